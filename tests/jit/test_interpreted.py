"""Kernels run as Python: the trial before the first compiled call, and debug=True."""

import dataclasses

import numpy as np
import pytest
from choices import needs_jit
from envs import begun
from gymnasium.spaces import Box
from jit.toy_env import PARAMS, TOY, small_kernels
from jit.toy_rolls import assert_same, make, random_actions, roll
from numba import njit

from vecenv.jit import JitVectorEnv, KernelIndexError, KernelResultError, binding, pack_record
from vecenv.jit.random import integers

SIZE = 5
TABLE = np.array([3, -1, 2], dtype=np.int8)


@njit
def visit(state, cell):
    state.visits[cell] += 1  # the line at fault


def reset(state, rng):
    state.cell = 0
    state.visits[:] = 0


def step(state, action, rng):
    state.cell += action
    visit(state, state.cell)
    return 0.0, False, False


def observe(state, out):
    out[0] = state.cell


FIELDS = [("cell", np.uint8), ("visits", np.int8, (SIZE,))]
WALK = small_kernels(FIELDS, reset, step, observe, name="walk")


def assert_refused(changes, line, message, **options):
    with pytest.raises(KernelIndexError, match=message) as caught:
        JitVectorEnv(dataclasses.replace(WALK, **changes), **options)
    error = caught.value
    assert str(error).splitlines()[0].startswith(f"{__file__}:{error.lineno}, in ")
    assert str(error).splitlines()[1].strip() == line
    assert error.filename == __file__ and error.__suppress_context__


def far_reset(state, rng):
    state.cell = integers(rng, 4)
    state.visits[SIZE] = 1


def far_mask(state, out):
    out[0] = True
    out[2] = True


@needs_jit
@pytest.mark.parametrize(
    ("changes", "line", "message"),
    [
        (
            {},
            "state.visits[cell] += 1  # the line at fault",
            "index 5 is out of bounds for axis 0 with size 5, with cell = 5",
        ),
        ({"reset": far_reset}, "state.visits[SIZE] = 1", "index 5 is out of bounds"),
        ({"action_mask": far_mask}, "out[2] = True", "index 2 is out of bounds"),
    ],
)
def test_an_index_out_of_range_is_found_before_anything_is_compiled(
    changes, line, message, monkeypatch
):
    monkeypatch.setattr(binding, "cached_njit", None)
    assert_refused(changes, line, message)


def wide_step(state, action, rng):
    """Right in compiled code, where integers are widened; not with NumPy's own scalars."""
    before = state.cell - 1  # uint8 0 - 1 is -1
    if before >= 0:
        state.visits[before] += 1
    state.visits[3] = 100
    total = state.visits[3] + state.visits[3]  # 200, not -56
    state.visits[total // 50] = 5
    state.visits[(state.visits[3] * 3) % SIZE] = 300  # 44 by wrapping
    state.visits[TABLE[0]] = TABLE[0] * 100 % 7
    state.flag = state.cell == 0
    state.visits[int(state.flag)] += 1
    state.share = 0.1
    state.visits[int(state.share * 30)] += 1
    state.cell = min(state.cell + action, SIZE - 1)
    return state.visits[4] + state.share, False, state.cell == 3


@njit
def wide_observe(state, out):
    for k in range(SIZE):
        out[k] = state.visits[k] * 1000  # wraps in an int16


WIDE = dataclasses.replace(
    WALK,
    name="wide",
    state_dtype=[*FIELDS, ("flag", np.bool_), ("share", np.float64)],
    observation_space=Box(-999, 999, (SIZE,), np.int16),
    step=wide_step,
    observe=wide_observe,
)


@pytest.mark.slow
@needs_jit
def test_narrow_integers_are_widened_as_in_compiled_code():
    compiled, interpreted = JitVectorEnv(WIDE, 3), JitVectorEnv(WIDE, 3, debug=True)
    actions = np.random.default_rng(0).integers(0, 2, (30, 3))
    assert_same(roll(compiled, actions), roll(interpreted, actions))


def test_debugging_runs_everything_in_python_with_equal_results():
    actions = random_actions(5)
    debugged = make(5, debug=True)
    assert_same(roll(make(5), actions), roll(debugged, actions))
    np.testing.assert_array_equal(debugged.action_masks().shape, (5, 3))
    with pytest.raises(IndexError):
        envs = begun(JitVectorEnv(WALK, 2, debug=True))
        for _ in range(SIZE):
            envs.step([1, 1])


@needs_jit
def test_a_trial_leaves_the_envs_and_their_spaces_alone():
    TOY.action_space.seed(3)
    expected = TOY.action_space.sample()
    TOY.action_space.seed(3)
    envs = JitVectorEnv(TOY, 2, params=PARAMS)
    assert TOY.action_space.sample() == expected
    assert not any(envs.states[name].any() for name in envs.states.dtype.names)


SIXTEENTHS = np.arange(16.0)


def hash_step(state, action, rng):
    hashed = (state.cell + 7) * 6364136223846793005 * 1442695040888963407
    return SIXTEENTHS[hashed >> 90], False, False  # 0 or -1 of 64 bits


@needs_jit
def test_hashes_that_wrap_around_are_left_to_the_compiler():
    with binding.uncompiled():
        JitVectorEnv(dataclasses.replace(WALK, step=hash_step))


def step_to_param(state, action, rng, params):
    state.visits[params.last] += 1
    return 0.0, False, False


def observe_one(state, out, params):
    out[0] = 1.0


@pytest.mark.slow
@needs_jit
def test_other_parameters_are_tried_too():
    kernels = small_kernels(
        FIELDS, lambda state, rng, params: None, step_to_param, observe_one, name="walk"
    )
    JitVectorEnv(kernels, params=pack_record(last=4))
    with pytest.raises(KernelIndexError, match="index 6 is out of bounds"):
        JitVectorEnv(kernels, params=pack_record(last=6))
    JitVectorEnv(kernels, params=pack_record(last=6), dry_run=False)


def five_values(state, action, rng):
    return 0, 1.0, False, False, {}


def test_debugging_tells_what_a_step_must_return():
    kernels = dataclasses.replace(WALK, step=five_values)
    told = (
        r"step returns five values, as a step of Gymnasium.*expected a tuple \(reward, terminated"
    )
    with pytest.raises(KernelResultError, match=told):
        JitVectorEnv(kernels, debug=True)
    envs = begun(JitVectorEnv(kernels, debug=True, dry_run=False))
    with pytest.raises(KernelResultError, match=told):
        envs.step([0])


def test_the_time_of_kernels_is_known_while_timing_is_on():
    envs = make(debug=True)
    assert envs._runner.num_threads == 1
    envs.reset(seed=1)
    envs.timing.enable()
    for row in random_actions(5, 10):
        envs.step(row)
    report = envs.timing.report()
    assert report.shares["env compute"] > 0.3
    envs.timing.disable()
    envs.step(random_actions(5, 1)[0])
    envs.close()
