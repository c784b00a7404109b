"""PettingZoo's games beside bare ones, step by step; `make test-real`.

The bare games share the whole history of calls: what some do after `reset(seed)` depends on it.
"""

import functools
import importlib

import pytest
from agents.bare import BareGames
from agents.twins import play
from envs import MODES, mode_id

from vecenv import EnvCreationError, make_vec_agents

pytestmark = [
    pytest.mark.slow,
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # of libraries
]

# Name, package, arguments, number of games and steps; agents of `knights` die.
GAMES = {
    "spread": ("mpe2.simple_spread_v3", {"max_cycles": 11}),
    "speaker_listener": ("mpe2.simple_speaker_listener_v4", {"max_cycles": 9}),
    "tag": ("mpe2.simple_tag_v3", {"max_cycles": 9}),
    "knights": (
        "pettingzoo.butterfly.knights_archers_zombies_v11",
        {"max_cycles": 150, "spawn_delay": 2, "max_zombies": 40},
    ),
    "knights_short": ("pettingzoo.butterfly.knights_archers_zombies_v11", {"max_cycles": 30}),
    "knights_image": (
        "pettingzoo.butterfly.knights_archers_zombies_v11",
        {"max_cycles": 8, "obs_method": "image"},
    ),
    "pistonball": ("pettingzoo.butterfly.pistonball_v6", {"max_cycles": 12, "n_pistons": 5}),
    "pursuit": ("pettingzoo.sisl.pursuit_v5", {"max_cycles": 15}),
    "multiwalker": (
        "pettingzoo.sisl.multiwalker_v9",
        {"terminate_on_fall": False, "max_cycles": 60, "remove_on_fall": True},
    ),
}
ASYNC = {
    f"async {n}": {"backend": "async", "vector_kwargs": {"num_workers": n}} for n in (1, 2, 3, 4)
}
WHERE = {"sync": {"backend": "sync"}, **ASYNC}


def factory(name):
    module_name, kwargs = GAMES[name]
    pytest.importorskip(module_name.partition(".")[0])
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        pytest.skip(str(error))
    return functools.partial(module.parallel_env, **kwargs)


@pytest.mark.parametrize("mode", MODES, ids=mode_id)
@pytest.mark.parametrize("by", ["step", "out", "send"])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", ["spread", "knights_short"])
def test_spread_and_knights_do_as_bare_games_everywhere(name, where, by, mode):
    options = {"autoreset_mode": mode, "central_state": True, **WHERE[where]}
    num_ends, _ = play(factory(name), 4, 40, by=by, **options)
    assert num_ends > 0


HAVE_STATES = {"speaker_listener", "tag", "pistonball"}
PAIRS = [
    ("speaker_listener", "sync", "step", "NextStep"),
    ("speaker_listener", "async 2", "send", "SameStep"),
    ("tag", "async 2", "out", "NextStep"),
    ("knights_image", "async 2", "step", "SameStep"),
    ("pistonball", "sync", "out", "SameStep"),
    ("pistonball", "async 2", "step", "NextStep"),
    ("pursuit", "sync", "send", "NextStep"),
    ("pursuit", "async 2", "out", "SameStep"),
    ("pursuit", "async 2", "step", "Disabled"),
    ("multiwalker", "async 2", "step", "NextStep"),
    ("multiwalker", "sync", "send", "SameStep"),
]


@pytest.mark.parametrize(("name", "where", "by", "mode"), PAIRS)
def test_other_games_do_as_bare_games(name, where, by, mode):
    num_steps = {"multiwalker": 130, "knights_image": 10}.get(name, 40)
    options = {"autoreset_mode": mode, "central_state": name in HAVE_STATES, **WHERE[where]}
    play(factory(name), 2, num_steps, by=by, **options)


@pytest.mark.parametrize("name", ["padded", "stacked"])
def test_supersuit_s_wrappers_do_as_bare_ones(name):
    supersuit = pytest.importorskip("supersuit")
    make = factory("speaker_listener" if name == "padded" else "spread")

    def wrapped():
        game = make()
        if name == "padded":
            return supersuit.pad_action_space_v0(supersuit.pad_observations_v0(game))
        return supersuit.frame_stack_v1(game, 2)

    play(wrapped, 2, 30, backend="sync")


def test_agents_of_real_games_die_before_their_game():
    num_ends, num_early = play(factory("knights"), 2, 200, backend="sync")
    assert num_ends > 0 and num_early > 20


def test_the_registry_and_its_near_names():
    pytest.importorskip("pettingzoo")
    envs = make_vec_agents("sisl/pursuit-v5", 2, backend="sync", max_cycles=5)
    assert envs.num_envs == 16
    envs.close()
    for name, message in [
        ("sisl/pursiut-v5", "PettingZoo has no 'sisl/pursiut-v5'; it has sisl/pursuit-v5"),
        ("classic/tictactoe-v3", "in 'classic/tictactoe-v3' agents take turns"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_vec_agents(name, 2)
    with pytest.raises(ModuleNotFoundError, match=r"sisl has no such .*did you mean pursuit_v5"):
        make_vec_agents("pettingzoo.sisl.pursiut_v5")


def test_aec_envs_of_simultaneous_games_are_converted_and_others_refused():
    pytest.importorskip("pettingzoo")

    module = pytest.importorskip("mpe2.simple_spread_v3")
    envs = make_vec_agents(functools.partial(module.env, max_cycles=5), 2, backend="sync")
    bare = BareGames([module.parallel_env(max_cycles=5)], {}, envs.autoreset_mode)
    obs, _ = envs.reset(seed=3)
    wanted, _ = bare.games[0].reset(seed=3)
    for agent, row in wanted.items():
        assert (obs[envs.group.row(0, agent)] == row).all()
    envs.close()
    chess = pytest.importorskip("pettingzoo.classic.tictactoe_v3")
    with pytest.raises(EnvCreationError, match="agents take turns"):
        make_vec_agents(chess, backend="sync")
