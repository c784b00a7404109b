"""Pursuit-v0 and Spread-v0 do what the games of PettingZoo do that they are named after."""

import numpy as np
import pytest
from agents.fed_draws import hunt
from agents.record_games import CASES, GOLDEN, SEED
from envs import begun

from vecenv import make_vec_agents
from vecenv.page.names import action_names

IDS = {"pursuit": "Pursuit-v0", "spread": "Spread-v0"}


def make(name, num_games, options, **vector_kwargs):
    return make_vec_agents(
        IDS[name.partition("_")[0]], num_games, vector_kwargs=vector_kwargs, **options
    )


def assert_as_recorded(name, arrays, row, found):
    """Of pursuit everything is exact; the libm of another machine may round spread otherwise."""
    is_exact = name.startswith("pursuit")
    for part, own in zip(("obs", "rewards"), found, strict=False):
        if is_exact:
            np.testing.assert_array_equal(own, arrays[part][row])
        else:
            np.testing.assert_allclose(own, arrays[part][row], rtol=1e-4, atol=1e-6)
    for part, own in zip(("terminations", "truncations"), found[2:], strict=True):
        np.testing.assert_array_equal(own, arrays[part][row])


@pytest.mark.parametrize(
    ("name", "debug"),
    [
        *((name, True) for name in CASES if name != "pursuit_crowd"),
        *((name, False) for name in ("pursuit_small", "spread")),
        pytest.param("pursuit_crowd", True, marks=pytest.mark.slow),
        # Each of these is compiled for itself.
        *(
            pytest.param(name, False, marks=pytest.mark.slow)
            for name in ("pursuit", "pursuit_crowd", "spread_pushed")
        ),
    ],
)
def test_games_are_as_recorded(name, debug):
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = dict(file)
    envs = make(name, 1, CASES[name][1], debug=debug)
    obs, _ = envs.reset(seed=SEED)
    nothing = np.zeros(envs.num_envs)
    assert_as_recorded(name, arrays, 0, (obs, nothing, nothing, nothing))
    assert arrays["rewards"].any()
    for row in range(1, len(arrays["actions"])):
        assert_as_recorded(name, arrays, row, envs.step(arrays["actions"][row])[:4])


def test_central_states_show_the_whole_map():
    envs = make_vec_agents("Pursuit-v0", 2, central_state=True, vector_kwargs={"debug": True})
    obs, _ = envs.reset(seed=0)
    for _ in range(20):
        obs, *_ = envs.step(hunt(obs, np.random.default_rng(0)))
    states = envs.state()
    assert states.shape == (2, 16, 16, 3)
    np.testing.assert_array_equal(states[..., 1].sum(axis=(1, 2)), 8)
    # A pursuer sees its part of the map; what is outside looks as buildings do.
    record = envs.agents.games.states[1]
    y, x = divmod(int(record.pursuer[5]), 22)
    padded = np.pad(states[1], ((3, 3), (3, 3), (0, 0)))
    padded[..., 0] = np.pad(states[1, ..., 0], 3, constant_values=1)
    np.testing.assert_array_equal(obs[8 + 5], padded[y - 3 : y + 4, x - 3 : x + 4])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pursuit", {"n_pursuers": 0}, "n_pursuers is 0, expected an integer from 1 to 128"),
        ("pursuit", {"n_evaders": 30, "x_size": 5, "y_size": 5}, "do not fit into 5 x 5 cells"),
        ("spread", {"local_ratio": -1.0}, "local_ratio is -1.0, expected a part from 0 to 1"),
    ],
)
def test_options_that_make_no_game_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        make(name, 1, options)


def test_saved_states_with_agents_outside_the_map_are_refused():
    envs = begun(make("pursuit", 2, {}, debug=True))
    saved = envs.state_dict()
    saved["games"]["states"]["evader"][1, 3] = 0
    with pytest.raises(ValueError, match="evaders outside the map"):
        envs.load_state_dict(saved)


@pytest.mark.parametrize(
    ("name", "options", "colour"),
    [
        ("pursuit", {"n_pursuers": 1, "freeze_evaders": True}, (200, 40, 40)),
        ("spread", {"N": 1}, (154, 154, 232)),
    ],
)
def test_actions_move_agents_in_the_picture_as_they_are_called(name, options, colour):
    envs = make(name, 1, {**options, "render_mode": "rgb_array"}, debug=True)

    def place():
        away = abs(np.asarray(envs.render()[0], int) - colour).sum(2)
        return np.argwhere(away < 9).mean(0).round()  # row and column

    (part,) = action_names(envs.group, f"agents:{IDS[name]}").parts
    moved = {}
    for number, called in enumerate(part.names):
        envs.reset(seed=1)  # where nothing is in the way
        before = place()
        for _ in range(3):
            envs.step(np.array([number]))
        moved[called] = tuple(np.sign(place() - before).tolist())
    ways = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1), "none": (0, 0)}
    assert moved == ways


def test_options_of_games_in_python_are_refused():
    for options, names in [
        ({"pad": True}, "pad"),
        ({"max_agents": 3, "agent_indicator": True}, "agent_indicator, max_agents"),
    ]:
        with pytest.raises(ValueError, match=f"groups of its own and got {names}, which"):
            make_vec_agents("Spread-v0", 2, **options)
    with pytest.raises(ValueError, match="num_envs is 0, expected an integer of at least 1"):
        make_vec_agents("Spread-v0", 0)
    with pytest.raises(ValueError, match="backend 'async' steps games one by one on the CPU"):
        make_vec_agents("Spread-v0", 2, backend="async")
    with pytest.raises(ValueError, match="no central state in autoreset mode SameStep"):
        make_vec_agents("Spread-v0", 2, central_state=True, autoreset_mode="SameStep")
