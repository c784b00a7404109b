"""examples/compare_stepping.py: all methods do the same, and everything asked for is shown."""

import re
import time

import numpy as np
import pytest
from example_files import load_example
from PIL import Image

example = load_example("compare_stepping")
QUICK = {"cpu_ms": 0.02, "rounds": 2, "round_s": 0.01}


@pytest.fixture
def made():
    """Makes methods, and closes them."""
    methods = []

    def make(name, num_envs):
        methods.append(example.Method(name, num_envs, example.Options(**QUICK)))
        return methods[-1]

    yield make
    for method in methods:
        method.settle()
        method.envs.close()


@pytest.mark.parametrize("name", list(example.METHODS)[1:])
def test_every_way_leads_to_the_same_true_states(name, made):
    num_envs = 1 if name == "chunks, first-ready" else 3
    method, loop = made(name, num_envs), made("Gymnasium's sync", num_envs)
    for _ in range(12):
        assert method.step() == loop.step() == num_envs
        assert method.states.shape == (num_envs, 192)
        np.testing.assert_array_equal(method.states, loop.states)


def test_first_ready_hands_back_a_part_and_settles(made):
    method = made("chunks, first-ready", 8)
    assert 2 <= method.step() <= 8
    method.settle()
    method.settle()
    method.envs.step(method.actions)  # nothing is in flight


def test_steps_take_their_time_by_the_clock_of_the_thread():
    env = example.SlowCage(2.0)
    env.reset(seed=0)
    begin = time.thread_time_ns()
    for _ in range(3):
        env.step(0)
    assert time.thread_time_ns() - begin >= 6e6


@pytest.mark.slow
def test_all_figures_come_from_one_call(capsys, tmp_path):
    path = tmp_path / "stepping.png"
    found = example.main(example.Options(copies=(2, 1), out=path, **QUICK))

    assert list(found) == [1, 2]
    out = capsys.readouterr().out
    for methods in found.values():
        assert [method.name for method in methods] == list(example.METHODS)
        for method in methods:
            assert len(method.rates) == 2
            # On a busy machine no step may end in so short a time.
            if method.timing is not None:
                assert sum(method.parts.values()) == pytest.approx(1)
                assert method.parts["env compute"] >= 0
            assert method.name in out
    for words in ("copies: 1", "copies: 2", "x loop", "hand-over, µs", "true state, µs"):
        assert words in out
    assert len(re.findall("^\\| compiled", out, re.MULTILINE)) == 2
    with Image.open(path) as picture:
        assert picture.width > 1000
