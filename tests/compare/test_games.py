"""Comparison of backends on a game with several agents."""

import pytest
from agents.games import runners
from agents.toy_games import WALK
from compare.test_comparison import as_text, compared

from vecenv import make_vec_agents
from vecenv.compare import Options, run_comparison
from vecenv.compare.stepping import read_source


@pytest.mark.slow
def test_steps_of_games_are_counted():
    backends = ("loop", "sync", "gymnasium-sync", "jit")
    game = {"env": "agents:agents.parallel_tag", "env_kwargs": {"late": False}, "num_envs": (2,)}
    result = compared(backends, **game, rounds=1, round_s=0.02, warm_up_s=0.01, timed_s=0.05)
    assert [case.backend for case in result.measured] == ["loop", "sync", "gymnasium-sync"]
    assert "agents:agents.parallel_tag: env steps per second" in as_text(result)


def test_unknown_games_are_refused_before_anything_is_started():
    with pytest.raises(ModuleNotFoundError, match="agents has no such module"):
        run_comparison(Options("agents:agents.parallel_tug"))


def test_games_of_ones_own_have_names_of_a_module_and_what_is_in_it():
    assert make_vec_agents("agents.games:runners", 2, backend="sync").num_games == 2
    game = read_source("agents:agents.games:runners").factory()
    assert game.members["runner"].agents == tuple(runners().runners)
    assert read_source("agents:agents.toy_games:WALK").kernels is WALK
    assert read_source("agents:vecenv:Pursuit-v0").spec.id == "Pursuit-v0"
