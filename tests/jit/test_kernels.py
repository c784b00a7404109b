import dataclasses
from pathlib import Path

import numpy as np
import pytest
from choices import needs_jit
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from jit.toy_env import small_kernels
from numba import njit

from vecenv import ActionError
from vecenv.check import check_vector_env
from vecenv.jit import EnvKernels, JitVectorEnv, KernelCompileError, pack_record
from vecenv.jit.driver import element_bounds


def reset(state, rng):
    state.total = 0.0


def step(state, action, rng):
    state.total += 1.0
    return 1.0, state.total >= 3.0, False


def observe(state, out):
    out[0] = state.total


COUNTER = small_kernels([("total", np.float64)], reset, step, observe, name="counter")


def count(**changes):
    return JitVectorEnv(dataclasses.replace(COUNTER, **changes), 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_dtype": [("total", object)]}, "field 'total' has dtype object"),
        ({"state_dtype": [("a", [("b", bool, 2)], 2)]}, "arrays of bools inside of records"),
        ({"state_dtype": "nonsense"}, "state_dtype 'nonsense' is no NumPy dtype"),
        ({"observation_space": Dict(a=Discrete(2))}, "observation_space must be a Box, Discrete"),
        ({"observation_space": Box(0, 1, (2,), np.float16)}, "observation_space .* of float16.*32"),
        ({"action_space": Box(0, 1, (2,), np.float16)}, "action_space .* of float16, .* float32"),
        ({"action_mask": 3}, "action_mask must be a function or None, got 3"),
        (
            {"action_mask": observe, "action_space": MultiBinary(3)},
            "needs a Discrete or MultiDiscrete action space",
        ),
        ({"step": reset}, r"kernel step\(state, rng\) must take \(state, action, rng\)"),
    ],
)
def test_wrong_kinds_of_env_are_refused(changes, message):
    with pytest.raises(TypeError, match=message):
        count(**changes)


def test_params_must_be_one_record_and_kernels_must_take_it():
    for params in (3, {"a": 1}, np.zeros(1, [("a", object)])):
        with pytest.raises(TypeError, match="params must be one record"):
            JitVectorEnv(COUNTER, 2, params=params)
    with pytest.raises(TypeError, match=r"must take \(state, rng, params\)"):
        JitVectorEnv(COUNTER, 2, params=pack_record(a=1))
    with pytest.raises(TypeError, match=r"kernel render\(\) must take \(state\)"):
        JitVectorEnv(dataclasses.replace(COUNTER, render=lambda: ""), 2)
    for field in ("text", None, np.zeros(0), [{}]):
        with pytest.raises(TypeError, match=r"field 'a' has dtype .* expected numbers"):
            pack_record(a=field)
    with pytest.raises(TypeError, match="arrays of bools"):
        pack_record(a=np.ones(3, bool))


def misspelt_step(state, action, rng):
    return state.totall, False, False


@njit
def innermost(x):
    return x + "one"


@njit
def in_between(x):
    return innermost(x)


def step_that_calls_what_fails(state, action, rng):
    state.total = in_between(state.total)
    return 1.0, False, False


def plain_helper(x):
    return x


def step_that_calls_a_plain_function(state, action, rng):
    return plain_helper(1.0), False, False


def reset_that_replaces_an_array(state, rng):
    state.total = 0.0
    state.hand = state.hand[:]


def step_to_be_written(state, action, rng):
    raise NotImplementedError


HAND = [("total", float), ("hand", np.int8, (3,))]


@needs_jit
@pytest.mark.parametrize(
    ("changes", "line", "message"),
    [
        (
            {"reset": reset_that_replaces_an_array, "state_dtype": HAND},
            "state.hand = state.hand[:]",
            r"the field 'hand' is an array, .*write into it, state.hand\[:\] = .*kernel reset\(",
        ),
        (
            {"step": misspelt_step},
            "return state.totall, False, False",
            r"no field 'totall'; state has total\n"
            r"counter: kernel step\(state: \{total: float64\}, action: int64, rng: random stream\)",
        ),
        pytest.param(
            {"step": step_that_calls_what_fails},
            'return x + "one"',
            "No implementation.*add",
            marks=pytest.mark.slow,
        ),
        (
            {"step": step_that_calls_a_plain_function},
            "return plain_helper(1.0), False, False",
            "plain_helper is a plain function; decorate it with @numba.njit",
        ),
        (
            {"step": step_to_be_written},
            "def step_to_be_written(state, action, rng):",
            "counter: kernel step never returns a result; expected a reward and two flags",
        ),
    ],
)
def test_kernels_that_cannot_be_compiled_are_told_by_line_and_reason(changes, line, message):
    with pytest.raises(KernelCompileError, match="(?s)" + message) as caught:
        count(**changes)
    error = caught.value
    first, second, *rest = str(error).splitlines()
    assert first.startswith(f"{__file__}:{error.lineno}, in ") and error.filename == __file__
    assert second == "    " + line
    assert len(rest) <= 8 and len(str(error)) < 1500 and "\x1b" not in str(error)
    assert error.__cause__ is None and error.__suppress_context__
    assert Path(__file__).read_text().splitlines()[error.lineno - 1].strip() == line
    if changes == {"step": step_that_calls_what_fails}:
        assert "add(float64, Literal[str](one))" in error.numba_message


# Every kind of space.


@njit
def board_reset(state, rng):
    state.last[:] = 0


@njit
def board_step(state, action, rng):
    state.last[0] = action[0]
    state.last[1] = action[1]
    return float(action[0]), False, action[1] == 3


@njit
def board_observe(state, out):
    out[0, 0], out[1, 1] = state.last[0], state.last[1]
    out[0, 1], out[1, 0] = 0, 0


LAST = {"names": ["last"], "formats": [(np.int64, (2,))]}
BOARD_SPACES = MultiDiscrete([[9, 9]] * 2, dtype=np.int16), MultiDiscrete([2, 4], dtype=np.int32)
BOARD = EnvKernels(LAST, *BOARD_SPACES, board_reset, board_step, board_observe)


@njit
def level_reset(state, rng):
    state.level = 5


@njit
def level_step(state, action, rng):
    state.level = min(max(state.level + round(action[0, 0]), 2), 8)
    return np.float32(0.5), state.level == 8, 0


@njit
def level_observe(state, out):
    out[0] = state.level


LEVEL_SPACES = Discrete(7, start=2), Box(-3, 3, (1, 1), np.float32)
LEVEL = EnvKernels([("level", np.int16)], *LEVEL_SPACES, level_reset, level_step, level_observe)
BITS = dataclasses.replace(
    BOARD, observation_space=MultiBinary((2, 2)), action_space=MultiBinary(2)
)
BYTES = dataclasses.replace(BOARD, action_space=Box(-1, 1, (2,), np.int8))


@pytest.mark.parametrize(
    ("kernels", "debug"),
    [
        (BOARD, False),
        (LEVEL, True),
        (BITS, True),
        pytest.param(LEVEL, False, marks=pytest.mark.slow),  # each is compiled for itself
        pytest.param(BITS, False, marks=pytest.mark.slow),
    ],
    ids=["board", "level", "bits", "compiled level", "compiled bits"],
)
def test_every_kind_of_array_space(kernels, debug):
    envs = JitVectorEnv(kernels, 3, max_episode_steps=7, debug=debug)
    check_vector_env(envs, num_steps=30)


def test_bounds_of_large_integers_are_exact_and_none_are_beyond_int64():
    most = 2**63 - 1
    assert element_bounds(Box(0, 2**53 + 1, (), np.uint64)).tolist() == [[0], [2**53 + 1]]
    assert element_bounds(Box(0, 2**64 - 1, (), np.uint64)).tolist() == [[0], [most]]
    assert element_bounds(Box(0, 2**64 - 1, (1,), np.uint64)).tolist() == [[0], [most]]
    assert element_bounds(Discrete(3, start=2**62)).tolist() == [[2**62], [2**62 + 2]]
    start = np.array([2**63, 0], np.uint64)
    with pytest.raises(ValueError, match=r"begins at 2\*\*63 or above"):
        element_bounds(MultiDiscrete(np.array([3, 3], np.uint64), np.uint64, start=start))


def test_array_actions_arrive_and_results_have_the_spaces_dtype():
    envs = JitVectorEnv(BOARD, 2)
    assert envs.reset()[0].dtype == np.int16
    obs, rewards, _, truncations, _ = envs.step([[1, 2], [0, 3]])
    assert obs.tolist() == [[[1, 0], [0, 2]], [[0, 0], [0, 3]]]
    assert (rewards.dtype, rewards.tolist()) == (np.float64, [1.0, 0.0])
    assert truncations.tolist() == [False, True]
    envs = JitVectorEnv(LEVEL, 2, debug=True)
    assert envs.reset()[0].tolist() == [5, 5]
    assert envs.step([[[1.0]], [[-3.0]]])[0].tolist() == [6, 2]
    envs.send(np.full((1, 1, 1), 2.0, np.float64), [1])
    assert envs.recv().obs.tolist() == [4]


@pytest.mark.parametrize(
    ("kernels", "actions", "message"),
    [
        (
            BOARD,
            [[1, 2], [0, 4]],
            r"actions\[1\] \(env 1\) is \[0 4\], expected an action of Multi",
        ),
        (BOARD, [1, 2], r"shape \(2,\), expected \(2, 2\)"),
        (BYTES, [[0, 1], [-2, 0]], r"actions\[1\] \(env 1\) is \[-2  0\]"),
        (LEVEL, [[[1.0]], [[np.nan]]], r"actions\[1\].*NaN"),
    ],
)
def test_array_actions_out_of_bounds_are_refused(kernels, actions, message):
    envs = JitVectorEnv(kernels, 2, debug=kernels is not BOARD)  # the check is the same
    envs.reset()
    before = envs.observe()
    for call in (envs.step, envs.send):
        with pytest.raises(ActionError, match=message):
            call(actions)
    np.testing.assert_array_equal(envs.observe(), before)


def test_pack_record_keeps_dtypes_shapes_and_copies():
    table = np.arange(6, dtype=np.int16).reshape(2, 3)
    record = pack_record(table=table, flag=True, depth=3)
    table[0, 0] = 9
    assert record.table.dtype == np.int16 and record.table.shape == (2, 3)
    assert record.table[0, 0] == 0
    assert (bool(record.flag), int(record.depth)) == (True, 3)


@pytest.mark.parametrize(
    ("kernels", "message"),
    [([COUNTER] * 3, "a list of 3: pass one of them and num_envs"), (COUNTER.step, "got function")],
)
def test_what_is_no_kernels_is_refused(kernels, message):
    with pytest.raises(TypeError, match=message):
        JitVectorEnv(kernels)
