"""examples/compare_stepping.py: all methods do the same, and everything asked for is shown."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from choices import fast_are
from example_files import load_example
from PIL import Image

SCRIPT = Path(__file__).parents[2] / "examples" / "compare_stepping.py"


example = load_example("compare_stepping")
QUICK = {"cpu_ms": 0.02, "rounds": 2, "round_s": 0.01}


@pytest.fixture
def made(monkeypatch):
    """Makes methods that do not warm up, and closes them."""
    monkeypatch.setattr(example.Method, "run", lambda self, seconds: 0.0)
    methods = []

    def make(method_class, num_envs):
        methods.append(method_class(num_envs, example.Options(**QUICK)))
        return methods[-1]

    yield make
    for method in methods:
        method.close()


@pytest.mark.parametrize("method_class", fast_are(example.METHODS[1::2], example.METHODS[1:]))
def test_every_way_leads_to_the_same_true_states(method_class, made):
    num_envs = 1 if method_class is example.FirstReady else 3
    method, loop = made(method_class, num_envs), made(example.OneByOne, num_envs)
    for _ in range(12):
        assert method.step() == loop.step() == num_envs
        assert method.states.shape == (num_envs, 192)
        np.testing.assert_array_equal(method.states, loop.states)


def test_first_ready_hands_back_a_part_and_settles(made):
    method = made(example.FirstReady, 8)
    assert 2 <= method.step() <= 8
    method.settle()
    method.settle()
    method.envs.step(method.actions)  # nothing is in flight


def test_steps_take_their_time_by_the_clock_of_the_thread():
    env = example.SlowCage(2.0)
    env.reset(seed=0)
    for _ in range(3):
        env.step(0)
    assert env.cpu_ns == pytest.approx(6e6, rel=0.1)


@pytest.mark.slow
def test_all_figures_come_from_one_call(capsys, tmp_path):
    path = tmp_path / "stepping.png"
    found = example.main(example.Options(copies=(2, 1), out=path, **QUICK))

    assert list(found) == [1, 2]
    out = capsys.readouterr().out
    for methods in found.values():
        assert [type(method) for method in methods] == list(example.METHODS)
        for method in methods:
            assert len(method.rates) == 2
            # On a busy machine no step may end in so short a time.
            assert sum(method.parts.values()) > 0 <= method.parts[example.COMPUTE]
            assert method.name in out
            # The parts are shares of what a step takes.
            assert sum(method.parts.values()) == pytest.approx(1e6 / method.rate)
    for words in (
        "copies: 1",
        "copies: 2",
        "x loop",
        "x before",
        "hand-over, µs",
        "true state, µs",
    ):
        assert words in out
    assert len(re.findall("^\\| compiled", out, re.MULTILINE)) == 2
    with Image.open(path) as picture:
        assert picture.width > 1000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"copies": (0,)}, "copies and rounds of at least 1"),
        ({"copies": ()}, "copies and rounds of at least 1"),
        ({"rounds": 0}, "copies and rounds of at least 1"),
        ({"cpu_ms": float("nan")}, "cpu_ms of at least 0"),
        ({"out": Path("/nowhere/at/all.png")}, "can't be written"),
    ],
)
def test_wrong_options_end_it_at_once(options, words, monkeypatch):
    monkeypatch.setattr(example, "measure", None)
    with pytest.raises(SystemExit, match=words):
        example.main(example.Options(**options))


@pytest.mark.slow
def test_help_lists_the_options():
    command = [sys.executable, SCRIPT, "--help"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--cpu-ms" in run.stdout
