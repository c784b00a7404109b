"""The nine-cell table: its numbers, its policies, and what it refuses."""

import json
import math
import sys
import types

import numpy as np
import pytest
from cage.challenge2.free_run import own_red
from choices import needs_jit
from rich.console import Console

from vecenv import ActionError
from vecenv.cage import (
    RULES_VERSION,
    Cage2VectorEnv,
    Cell,
    Evaluation,
    cage2_scenario,
    evaluate,
    find_policy,
)
from vecenv.cage.challenge2 import playing


def test_a_cell_is_what_one_gets_by_hand():
    result = evaluate("obs-restore", episodes=50, seed=3, red_agents="meander", episode_lengths=30)
    (cell,) = result.cells
    envs = Cage2VectorEnv(50, red_agent="meander", episode_length=30)
    policy = find_policy("obs_restore")
    obs, _ = envs.reset(seed=playing.cell_seed(3, "meander", 30))
    totals = np.zeros(50)
    for _ in range(30):
        obs, rewards, *_ = envs.step(policy.act(obs, envs.shell_alerts()))
        totals += rewards
    assert cell.mean == pytest.approx(totals.mean())
    assert cell.sd == pytest.approx(totals.std(ddof=1))
    assert cell.ci95 == pytest.approx(2.009575 * cell.sd / math.sqrt(50), rel=1e-5)  # t, 49 degrees


@needs_jit
def test_the_total_sums_independent_cells():
    result = evaluate("obs_remove", episodes=30)
    assert result.total == pytest.approx(sum(cell.mean for cell in result.cells))
    variance = sum(cell.ci95**2 for cell in result.cells)
    assert result.total_ci95 == pytest.approx(math.sqrt(variance))
    keys = [(cell.red_agent, cell.episode_length) for cell in result.cells]
    assert keys == [(a, n) for a in playing.EVALUATED_AGENTS for n in playing.EPISODE_LENGTHS]


@needs_jit
def test_a_cell_depends_on_the_seed_alone():
    full = evaluate("uniform", episodes=20, seed=5)
    assert evaluate("uniform", episodes=20, seed=5, num_threads=1) == full
    part = evaluate(
        "obs_restore", episodes=20, seed=5, red_agents=["meander"], episode_lengths=[50]
    )
    assert part.cells[0] == evaluate("obs_restore", episodes=20, seed=5).cell("meander", 50)
    assert evaluate("uniform", episodes=20, seed=6) != full


def test_prints_and_writes_its_numbers(tmp_path):
    seen = []
    result = evaluate("sleep", episodes=5, name="my policy", on_cell=seen.append)
    text = str(result)
    for words in ("my policy", "faithful rules", "5 episodes", "B_line", "100 steps", "total", "±"):
        assert words in text
    console = Console(width=100)
    with console.capture() as capture:
        console.print(result)
    assert capture.get().strip() == text.strip()
    assert seen == list(result.cells)
    written = json.loads(result.to_json(tmp_path / "out.json"))
    assert written == json.loads((tmp_path / "out.json").read_text())
    assert written["total"] == result.total
    assert written["rules"] == "faithful"
    assert written["cells"][0]["mean"] == result.cell("b_line", 30).mean
    with pytest.raises(KeyError, match="no cell"):
        result.cell("b_line", 31)


class MaskedPolicy:
    """Takes the last valid action; counts the calls."""

    uses_masks = True
    observation = "bits"

    def __init__(self):
        self.num_resets = 0

    def reset(self):
        self.num_resets += 1

    def act(self, obs, alerts, masks):
        assert obs.shape[1] == 52
        assert alerts.shape == (len(obs), 13)
        assert masks.shape == (len(obs), 145)
        masks = masks[:, :132]  # no Restore
        return 131 - masks[:, ::-1].argmax(axis=1)


def test_policies_may_ask_for_masks():
    policy = MaskedPolicy()
    result = evaluate(policy, episodes=3, red_agents=["sleep"])
    assert (result.policy, result.observation, result.total) == ("MaskedPolicy", "bits", 0.0)
    assert policy.num_resets == 3


def test_a_function_is_a_policy():
    def always_restore(obs):
        return np.full(len(obs), 144)

    result = evaluate(always_restore, episodes=2, red_agents="sleep")
    assert result.policy == "always_restore"
    assert result.total == -(30 + 50 + 100)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"episodes": 1}, ValueError, "episodes is 1"),
        ({"policy": 3}, TypeError, "policy is 3"),
        ({"red_agents": []}, ValueError, "red_agents is empty"),
        ({"seed": -1}, ValueError, "seed is -1"),
        ({"red_agents": ["bline"]}, ValueError, "red_agents has 'bline'"),
        (
            {"red_agents": "json:dumps"},
            TypeError,
            "expected a function of \\(state, rng, tables\\)",
        ),
        ({"policy": "no_such_module:act"}, ImportError, "neither installed nor in"),
        ({"policy": "json:__name__"}, TypeError, "policy is 'json', expected a name"),
        ({"policy": "nobody"}, ValueError, "no built-in policy, no file; .*react-restore"),
        ({"policy": "rules"}, ValueError, "no file .it belongs to the other challenge, see --chal"),
        ({"policy": lambda obs: obs}, ActionError, "actions has shape"),
        ({"policy": lambda obs: np.full(len(obs), 145)}, ActionError, "is 145"),
    ],
)
def test_bad_input_is_refused_by_name(options, error, message):
    options = {"policy": "sleep", "episodes": 2, **options}
    with pytest.raises(error, match=message):
        evaluate(**options)


def test_names_of_policies_may_be_written_as_on_the_command_line():
    assert type(find_policy("react-remove")) is type(find_policy("react_remove"))
    assert type(find_policy("random")) is type(find_policy("uniform"))
    policy = MaskedPolicy()
    assert find_policy(policy) is policy


def test_an_episode_can_be_watched_step_by_step():
    snapshots = list(
        playing.play_episode("react-restore", seed=2, episode_length=20, red_agent="meander")
    )
    assert [snapshot.step for snapshot in snapshots] == list(range(21))
    assert snapshots[0].blue is snapshots[0].red is None
    assert str(snapshots[1].blue) == "Monitor"
    assert snapshots[1].blue.with_outcome() == "Monitor, succeeded"
    assert str(snapshots[1].red) == "DiscoverRemoteSystems User"
    totals = np.cumsum([snapshot.reward for snapshot in snapshots[1:]])
    np.testing.assert_allclose([s.total for s in snapshots[1:]], totals)
    assert list(
        playing.play_episode("react-restore", seed=2, episode_length=20, red_agent="meander")
    ) == (snapshots)


class Hoarder:
    """Keeps everything it is given, and checks that nothing of it changes later."""

    uses_masks = True

    def __init__(self):
        self.kept = []

    def reset(self):
        self.kept = []

    def act(self, obs, alerts, masks):
        for given, copies in self.kept:
            for array, copy in zip(given, copies, strict=True):
                np.testing.assert_array_equal(array, copy)
        given = obs, alerts, masks
        self.kept.append((given, [array.copy() for array in given]))
        return np.random.default_rng(len(self.kept)).integers(0, 132, len(obs))


def test_what_a_policy_is_given_is_its_own_to_keep():
    policy = Hoarder()
    evaluate(policy, episodes=4, red_agents="b_line", episode_lengths=30)
    assert len(policy.kept) == 30
    assert len({obs.tobytes() for (obs, _, _), _ in policy.kept}) > 10
    list(playing.play_episode(policy, seed=1, episode_length=20))
    assert len(policy.kept) == 20


@pytest.fixture
def own_modules(tmp_path, monkeypatch):
    """A folder beside the caller with a module that holds policies and a red agent."""
    (tmp_path / "my_cage.py").write_text(
        "import numpy as np\n"
        "def sleep(obs):\n    return np.zeros(len(obs), int)\n"
        "class Drawing:\n"
        "    def __init__(self, scenario, *, seed=None):\n"
        "        self.scenario, self.seed = scenario, seed\n"
        "    def reset(self):\n        self.rng = np.random.default_rng(self.seed)\n"
        "    def act(self, obs, alerts):\n"
        "        return self.rng.integers(0, 145, len(obs))\n"
        "class Nested:\n    policy = Drawing(None, seed=3)\n"
        "from cage.challenge2.free_run import own_red as scanner\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield tmp_path
    sys.modules.pop("my_cage", None)


def test_policies_of_a_module_beside_the_caller_are_found(own_modules):
    options = {"episodes": 3, "red_agents": "b_line", "episode_lengths": 30}
    assert evaluate("my_cage:sleep", **options).cells == evaluate("sleep", **options).cells
    drawing = find_policy("my_cage:Drawing", seed=7)
    assert (drawing.scenario, drawing.seed) == (cage2_scenario(), 7)
    assert find_policy("my_cage:Nested.policy").seed == 3
    first = evaluate("my_cage:Drawing", seed=7, **options)
    assert (first.policy, first) == (
        "my_cage:Drawing",
        evaluate(type(drawing), seed=7, name="my_cage:Drawing", **options),
    )


def test_red_agents_of_ones_own_have_rows_and_random_numbers_of_their_own(own_modules):
    reds = ["my_cage:scanner", own_red, "sleep"]
    result = evaluate("sleep", episodes=3, red_agents=reds, episode_lengths=[30])
    assert [cell.red_agent for cell in result.cells] == ["scanner", "own_red", "sleep"]
    assert result.total == 0, "they only look"
    assert "scanner" in str(result)
    assert len({playing.cell_seed(1, name, 30) for name in ("scanner", "own_red", "b_line")}) == 3
    code = getattr(own_red, "py_func", own_red).__code__
    namesake = types.FunctionType(code, {}, "own_red")
    with pytest.raises(ValueError, match="two that are called 'own_red'"):
        evaluate("sleep", episodes=2, red_agents=[own_red, namesake])
    envs = Cage2VectorEnv(1, red_agent="my_cage:scanner", step_infos="red_type")
    envs.reset(seed=0)
    assert [envs.step([0])[4]["red_type"][0] for _ in range(2)] == [1, 2]


def test_results_carry_scenario_and_version_of_the_rules(tmp_path):
    path = tmp_path / "scores.json"
    result = evaluate("sleep", episodes=2, rules="debugged", red_agents="sleep")
    assert (result.scenario, result.rules) == ("CAGE Challenge 2", "debugged")
    assert result.rules_version == RULES_VERSION
    assert result.tables != evaluate("sleep", episodes=2, red_agents="sleep").tables
    fields = json.loads(result.to_json(path))
    assert (fields["rules"], fields["tables"]) == (result.rules, result.tables)


def test_the_table_fits_eighty_columns():
    names = ["b_line", "meander", "sleep"]
    worst = [Cell(a, n, 1000, -1456.789, 99.9, 12.345) for a in names for n in (30, 50, 100)]
    made_for = cage2_scenario().identity()
    result = Evaluation(
        "sleep", **made_for, observation="bits", green=True, seed=0, cells=tuple(worst),
        total=-9876.543, total_ci95=65.432,
    )  # fmt: skip
    console = Console(width=80)
    with console.capture() as capture:
        console.print(result)
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 80
    (row,) = [line for line in lines if line.startswith("Meander")]
    assert row.split() == ["Meander", *["-1456.8", "±", "12.3"] * 3, "-4370.4", "±", "21.4"]
    assert len(lines) == 9 and "…" not in capture.get()


def test_policies_of_the_other_challenge_are_told():
    other = type("Fort", (), {"act": lambda self, obs: obs, "reset": lambda self, masks: None})
    with pytest.raises(TypeError, match=r"calls reset\(\), but it has reset\(masks\)"):
        find_policy(other)
