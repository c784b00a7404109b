"""Kernels that compiled code would run without a word: what a trial in Python says of them."""

import dataclasses
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from choices import needs_jit
from gymnasium.spaces import Box, MultiDiscrete
from jit.toy_env import small_kernels

from vecenv.jit import (
    AgentsOf,
    EnvKernels,
    JitVectorEnv,
    KernelIndexError,
    KernelResultError,
    binding,
)


def reset(state, rng):
    state.total = 0.0
    state.hand[:] = 0


def step(state, action, rng):
    state.total += action
    return 1.0, state.total >= 3.0, False


def observe(state, out):
    out[0] = state.total
    out[1] = state.hand[1]


CARD_FIELDS = [("total", np.float64), ("hand", np.int8, (3,))]
CARDS = small_kernels(CARD_FIELDS, reset, step, observe, size=2, name="cards")


def branch_without_return(state, action, rng):
    state.total += 1.0
    if state.total < 3.0:
        return 1.0, False, False


def flags_first(state, action, rng):
    if action == 0:
        return 1.0, False, False
    return False, 1.0, False


def observe_that_returns(state, out):
    return np.array([state.total, 1.0])


def observe_that_rebinds(state, out):
    out = np.array([state.total, 1.0])  # noqa: F841  # the mistake


def observe_that_forgets(state, out):
    out[0] = state.total


def empty_reset(state, rng):
    pass


def reset_without_total(state, rng):
    state.hand[:] = 0


def reward_of_what_was_left(state, action, rng):
    return state.hand[2], False, False


def zeros(state, out):
    out[:] = 0


@needs_jit
@pytest.mark.parametrize(
    ("changes", "line", "message"),
    [
        (
            {"step": branch_without_return},
            "if state.total < 3.0:",
            r"step returns None \(this branch ends without `return`\)",
        ),
        (
            {"step": flags_first},
            "return False, 1.0, False",
            r"step returns \(bool, float, bool\) here; expected a tuple \(reward, terminated",
        ),
        (
            {"observe": observe_that_returns},
            "return np.array([state.total, 1.0])",
            r"observe leaves out\[0\] as it was.*after the reset; what it "
            "returns is not read: write it into out",
        ),
        (
            {"observe": observe_that_rebinds},
            "out = np.array([state.total, 1.0])  # noqa: F841  # the mistake",
            r"observe leaves out\[0\].*this line makes out another array: assign to out\[:\]",
        ),
        (
            {"observe": observe_that_forgets},
            "def observe_that_forgets(state, out):",
            r"observe leaves out\[1\] as it was before.*write all of it",
        ),
        (
            {"reset": reset_without_total},
            "def reset_without_total(state, rng):",
            r"reset does not set state\.total, and the observation of the reset depends on it",
        ),
        (
            {"reset": empty_reset, "step": reward_of_what_was_left, "observe": zeros},
            "def empty_reset(state, rng):",
            r"reset does not set all of state\.hand, and the reward of step 1 depends on it",
        ),
    ],
)  # fmt: skip
def test_a_trial_names_file_line_kernel_and_field(changes, line, message):
    kernels = dataclasses.replace(CARDS, **changes)
    with binding.uncompiled():
        with pytest.raises(KernelResultError, match="(?s)cards: kernel " + message) as caught:
            JitVectorEnv(kernels)
        JitVectorEnv(kernels, dry_run=False)
    error = caught.value
    first, second = str(error).splitlines()[:2]
    assert first.startswith(f"{__file__}:{error.lineno}, in ") and error.filename == __file__
    assert second.strip() == line
    assert Path(__file__).read_text().splitlines()[error.lineno - 1].strip() == line


NUM_CALLS = [0]


def observe_a_global(state, out):
    NUM_CALLS[0] += 1
    out[:] = NUM_CALLS[0]


@needs_jit
def test_kernels_that_read_something_besides_their_arguments_are_told_so():
    told = "cards: the observation of the reset differs when the same seed and actions are played"
    with binding.uncompiled(), pytest.raises(KernelResultError, match=told) as caught:
        JitVectorEnv(dataclasses.replace(CARDS, observe=observe_a_global))
    assert caught.value.lineno == observe_a_global.__code__.co_firstlineno


def step_that_sets_first(state, action, rng):
    state.total = action
    return state.total, False, False


def observe_that_returns_too(state, out):
    out[:] = state.hand[1]
    return out


@pytest.mark.parametrize(
    "changes",
    [
        {"reset": reset_without_total, "step": step_that_sets_first, "observe": zeros},
        {"observe": observe_that_returns_too},
    ],
)
def test_what_nothing_comes_of_is_no_mistake(changes):
    """Nor is a number that lasts from one episode to the next."""
    with binding.uncompiled():
        envs = JitVectorEnv(dataclasses.replace(CARDS, **changes))
        assert envs.reset(seed=0)[0].shape == (1, 2)


@pytest.mark.parametrize("kind", [KernelResultError, KernelIndexError])
def test_errors_of_kernels_can_be_sent_to_other_processes(kind):
    copy = pickle.loads(pickle.dumps(kind("text", "file.py", 7)))
    assert (type(copy), str(copy), copy.filename, copy.lineno) == (kind, "text", "file.py", 7)


def game_reset(state, rng):
    state.place[:] = 0


def game_step(state, actions, rng):
    return 0.0, False, False


def game_observe(state, agent, out):
    out[0, 0] = state.place[agent]
    out[0, 1] = 0


def game_observe_part(state, agent, out):
    out[0, 0] = state.place[agent]


def group_of(count):
    return AgentsOf(count, Box(0, 9, (1, 2), np.float32), MultiDiscrete([2, 2]))


def game(**changes):
    return EnvKernels(**{
        "name": "game",
        "state_dtype": [("place", np.int8, (3,))],
        "groups": {"cat": group_of(1), "dog": group_of(2)},
        "reset": game_reset,
        "step": game_step,
        "observe": game_observe,
        **changes,
    })  # fmt: skip


@needs_jit
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"observe": game_observe_part}, r"observe leaves out\[0, 1\] as it was"),
        ({"reset": empty_reset}, r"reset does not set all of state\.place"),
    ],
)
def test_of_a_game_the_authors_kernels_are_named(changes, message):
    with binding.uncompiled():
        JitVectorEnv(game())
        with pytest.raises(KernelResultError, match=f"(?s)game: kernel {message}") as caught:
            JitVectorEnv(game(**changes))
    assert re.match(rf"{re.escape(__file__)}:\d+, in (game_|empty_)", str(caught.value))


def index_too_far(state, action, rng):
    return state.hand[2 + action], False, False


@needs_jit
def test_debugging_refuses_memory_left_unwritten_but_no_index():
    forgets = dataclasses.replace(CARDS, reset=reset_without_total)
    with pytest.raises(KernelResultError, match=r"reset does not set state\.total"):
        JitVectorEnv(forgets, debug=True)
    JitVectorEnv(forgets, debug=True, dry_run=False)
    envs = JitVectorEnv(dataclasses.replace(CARDS, step=index_too_far), debug=True)
    envs.reset(seed=0)
    with pytest.raises(IndexError) as caught:
        envs.step([1])
    assert caught.type is IndexError  # where it is used, for a debugger
