"""The knowledge of a blue agent: the 52 bits seen, its own actions and the published rules.

`with_memory` wraps the kernels of the simulator: the action of a step is the index of a choice, and
the observation is a row of `BlueMemory.features`. `BlueMemory` is the same outside of an env.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from numba import njit

from vecenv.cage.challenge2.rules import codes
from vecenv.cage.challenge2.rules.actions import ONE, ZERO, count, every_fourth
from vecenv.cage.challenge2.scenario import Scenario, blue_choices, cage2_scenario
from vecenv.cage.challenge2.tables import STATE_DTYPE, compile_tables
from vecenv.jit import EnvKernels, cached_njit, write_bits

# The new fields come first: Numba treats two records as subtypes if one begins with the other's
# fields, and would then run code compiled for one with the other.
MEMORY_STATE_DTYPE = np.dtype(
    [
        ("seen_scanned", np.uint16),  # hosts on which blue has seen a scan,
        ("seen_last", np.uint16),  # and those of the latest step with a scan
        ("exploits_seen", np.uint8, (codes.MAX_HOSTS,)),  # since the last Restore; saturates
        ("is_stale", np.uint16),  # hosts that blue changed after it last saw a scan of them
        ("is_wandering", np.uint8),  # red did something that B_line would not do
        ("is_direct", np.uint8),  # red did something that Meander would not do
        *((name, STATE_DTYPE[name]) for name in STATE_DTYPE.names or ()),
    ],
    align=True,
)
_COLUMNS_PER_HOST = 7
_FLAGS = 2  # `is_wandering` and `is_direct`
_STEP_COLUMNS = 2 * len(codes.EPISODE_LENGTHS) + 1
_LAST_LENGTH = np.float64(codes.EPISODE_LENGTHS[-1])
_SHORTER_LENGTHS = np.array(codes.EPISODE_LENGTHS[:-1], np.float64)
_EARLY = np.float64(codes.EARLY_STEPS)
_OPENING, _FIRST_EXPLOIT = np.uint64(codes.OPENING_STEPS), np.uint64(codes.FIRST_EXPLOIT_STEP)
_MANY = np.uint64(codes.MANY_EXPLOITS)
_MAX_DECOYS = np.uint64(codes.MAX_DECOYS)
_RESTORE, _DECOY = np.uint64(codes.RESTORE), np.uint64(codes.DECOY)
_LAST_STEP = 65535  # the state's step counter saturates here


def memory_space(scenario: Scenario, dtype: Any = np.float32) -> Box:
    """Return the space of a row of `BlueMemory.features`.

    Raises:
        ValueError: The dtype is not floating point; the features have fractions.
    """
    if np.dtype(dtype).kind != "f":
        raise ValueError(
            f"obs_dtype is {np.dtype(dtype)}, expected a floating one such as float32: the "
            "observation 'memory' has fractions in it"
        )
    high = np.array([*feature_columns(scenario).values()], dtype)
    return Box(np.zeros_like(high), high, dtype=dtype)


def with_memory(kernels: EnvKernels, scenario: Scenario) -> EnvKernels:
    """Return kernels whose actions are blue's choices and whose observations are its memory.

    Args:
        kernels: Kernels of the simulator, with the observation space `memory_space`.
        scenario: Scenario of the kernels.
    """
    return EnvKernels(
        MEMORY_STATE_DTYPE,
        kernels.observation_space,
        Discrete(len(blue_choices(scenario))),
        _make_reset(kernels.reset),
        _make_step(kernels.step),
        observe_memory,
        choice_mask,
        name=kernels.name,
    )


@functools.cache  # equal envs share their compiled code
def _make_reset(core_reset: Any) -> Any:
    @njit
    def reset_and_forget(state, rng, tables):
        core_reset(state, rng, tables)
        for host in range(codes.MAX_HOSTS):
            state.exploits_seen[host] = ZERO
        state.seen_scanned = state.seen_last = ZERO
        state.is_stale = state.is_wandering = state.is_direct = ZERO

    return reset_and_forget


@functools.cache
def _make_step(core_step: Any) -> Any:
    @njit
    def choose(state, choice, rng, tables):
        kind, host, action = choice_of(state, choice, tables)
        note_own(state, kind, host, tables)
        result = core_step(state, action, rng, tables)
        note_red(state, tables)
        return result

    return choose


@njit
def choice_of(state, choice, tables):
    """Return kind and host, uint64, and env action, int64, of a choice; Sleep if it is invalid."""
    index = np.uint64(choice)
    kind = host = action = ZERO
    if index < tables.num_choices:
        kind = np.uint64(tables.choice_kind[index])
        host = np.uint64(tables.choice_host[index]) & codes.HOST_BITS
        number = num_placed(state, host) if kind == _DECOY else ZERO
        action = np.uint64(tables.choice_actions[index, min(number, _MAX_DECOYS)])
    return kind, host, np.int64(action)


@njit
def num_placed(state, host):
    """Return the number uint64 of decoys on host uint64; blue knows it, as it placed them."""
    return count(np.uint64(state.decoys[host]))


@njit
def note_own(state, kind, host, tables):
    """Update the memory with blue's next action on host uint64."""
    is_changed = kind == _RESTORE
    if kind == _RESTORE:
        state.exploits_seen[host] = ZERO
    elif kind == _DECOY:
        is_changed = num_placed(state, host) < np.uint64(tables.num_placeable[host])
    if is_changed:
        state.is_stale = np.uint64(state.is_stale) | (ONE << host)


@njit
def note_red(state, tables):
    """Update the memory with blue's observation of the latest step."""
    bits = np.uint64(state.obs_bits)
    active, exploited = every_fourth(bits), every_fourth(bits >> ONE)
    first_hosts, step = np.uint64(tables.plan_first_hosts), np.uint64(state.step)
    scanned = active & ~exploited
    if scanned != ZERO:
        state.seen_last = scanned
    state.seen_scanned = np.uint64(state.seen_scanned) | scanned
    state.is_stale = np.uint64(state.is_stale) & ~scanned
    for index in range(min(np.uint64(tables.num_hosts), np.uint64(codes.MAX_HOSTS))):
        host = np.uint64(index)
        seen = np.uint64(state.exploits_seen[host])
        state.exploits_seen[host] = min(seen + ((exploited >> host) & ONE), _MANY)
    if step <= _OPENING:
        is_off_plan = (active & ~np.uint64(tables.plan_hosts)) != ZERO
        if is_off_plan or count(np.uint64(state.seen_scanned) & first_hosts) > ONE:
            state.is_wandering = ONE
    if step <= _FIRST_EXPLOIT and (exploited & first_hosts) != ZERO:
        state.is_direct = ONE


@njit
def observe_memory(state, out, tables):
    """Write a row of `BlueMemory.features`."""
    num_hosts = min(np.uint64(tables.num_hosts), np.uint64(codes.MAX_HOSTS))
    start = num_hosts * np.uint64(codes.BITS_PER_HOST)
    per_host = num_hosts * np.uint64(_COLUMNS_PER_HOST)
    if np.uint64(out.shape[0]) < start + per_host + np.uint64(_FLAGS + _STEP_COLUMNS):
        return
    write_bits(np.uint64(state.obs_bits), start, out)
    scanned, last = np.uint64(state.seen_scanned), np.uint64(state.seen_last)
    stale = np.uint64(state.is_stale)
    for index in range(num_hosts):
        host = np.uint64(index)
        at = start + host
        placed, exploits = num_placed(state, host), np.uint64(state.exploits_seen[host])
        out[at] = (scanned >> host) & ONE
        out[at + num_hosts] = (last >> host) & ONE
        at += num_hosts + num_hosts
        out[at] = placed / 2.0
        out[at + num_hosts] = placed == np.uint64(tables.num_placeable[host])
        at += num_hosts + num_hosts
        out[at] = exploits > ZERO
        out[at + num_hosts] = exploits / 2.0
        out[at + num_hosts + num_hosts] = (stale >> host) & ONE
    at = start + per_host
    step = np.float64(state.step)
    out[at] = state.is_wandering
    out[at + ONE] = state.is_direct
    at += np.uint64(_FLAGS)
    out[at] = step / _LAST_LENGTH
    out[at + ONE] = min(step, _EARLY) / _EARLY
    at += np.uint64(2)
    for index in range(_SHORTER_LENGTHS.shape[0]):
        length = _SHORTER_LENGTHS[index]
        out[at] = step < length
        out[at + ONE] = max(length - step, 0.0) / length
        at += np.uint64(2)
    out[at] = max(_LAST_LENGTH - step, 0.0) / _LAST_LENGTH


@njit
def choice_mask(state, out, tables):
    """Write which choices are useful, bool (choices,): no decoys on hosts that have all theirs."""
    for index in range(min(out.shape[0], tables.num_choices)):
        choice = np.uint64(index)
        host = np.uint64(tables.choice_host[choice]) & codes.HOST_BITS
        is_full = num_placed(state, host) >= np.uint64(tables.num_placeable[host])
        out[index] = not (is_full and np.uint64(tables.choice_kind[choice]) == _DECOY)


# --- kernels of a memory outside an env ---


@cached_njit
def act_rows(states, choices, actions, tables):
    """Update the memories with choices, int64 (N,); write the env's actions, int64 (N,)."""
    for row in range(states.shape[0]):
        state = states[row]
        kind, host, actions[row] = choice_of(state, choices[row], tables)
        note_own(state, kind, host, tables)
        placed = num_placed(state, host)
        if kind == _RESTORE:
            state.decoys[host] = ZERO
        elif kind == _DECOY and placed < np.uint64(tables.num_placeable[host]):
            state.decoys[host] = (ONE << (placed + ONE)) - ONE  # only their number matters


@cached_njit
def note_rows(states, bits, tables):
    """Update the memories with the next observations, uint64 (N,)."""
    for row in range(states.shape[0]):
        state = states[row]
        state.obs_bits = bits[row]
        state.step = np.uint64(state.step) + ONE
        note_red(state, tables)


@cached_njit
def show_rows(states, bits, out, tables):
    """Write the features (N, F) for the latest observations, uint64 (N,)."""
    for row in range(states.shape[0]):
        states[row].obs_bits = bits[row]
        observe_memory(states[row], out[row], tables)


@cached_njit
def mask_rows(states, out, tables):
    """Write which choices are useful, bool (N, choices)."""
    for row in range(states.shape[0]):
        choice_mask(states[row], out[row], tables)


def feature_columns(scenario: Scenario) -> dict[str, float]:
    """Return the largest value of each column of `BlueMemory.features`, by its name."""
    kinds = {"scanned": 1, "scanned_last": 1, "decoys/2": codes.MAX_DECOYS / 2, "decoys_full": 1}
    kinds |= {"exploited": 1, "exploits/2": codes.MANY_EXPLOITS / 2, "stale": 1}
    *shorter, last = codes.EPISODE_LENGTHS
    steps = [f"{words}{length}" for length in shorter for words in ("step<", "left of ")]
    return {
        **dict.fromkeys(observation_labels(scenario), 1),
        **{f"{host.name} {kind}": kinds[kind] for kind in kinds for host in scenario.hosts},
        **dict.fromkeys(("red_is_wandering", "red_is_direct"), 1),
        f"step/{last}": _LAST_STEP / last,
        **dict.fromkeys((f"step/{codes.EARLY_STEPS} up to 1", *steps, f"left of {last}"), 1),
    }


def observation_labels(scenario: Scenario) -> list[str]:
    """Return the name of each of the four bits of every host, in the order of the scenario."""
    kinds = ("active", "exploit", "belief_unknown", "belief_user")
    return [f"{host.name} {kind}" for host in scenario.hosts for kind in kinds]


class BlueMemory:
    """The memory of a blue agent that defends N envs at the same time.

    It never reads the true state of an env, so a policy built on it can also play the original
    simulator.

    In every step, call `features` with the latest observations and make choices from the result.
    Then call `act` to get actions, step the envs, and call `note` with the new observations.

    Args:
        num_envs: Number of envs, N.
        scenario: Scenario of the envs; CAGE 2 by default.

    Attributes:
        choices: The possible choices.
        num_features: Length F of a row of features.
        step_column: Index of the feature that is the number of steps made, as a fraction of 100.
    """

    def __init__(self, num_envs: int, scenario: Scenario | None = None) -> None:
        scenario = cage2_scenario() if scenario is None else scenario
        self.choices = blue_choices(scenario)
        self._tables: Any = compile_tables(scenario)
        # Only the parts of an env's state that blue can know are ever written.
        self._states = np.zeros(num_envs, MEMORY_STATE_DTYPE).view(np.recarray)
        self._bits = np.uint64(1) << np.arange(
            codes.BITS_PER_HOST * len(scenario.hosts), dtype=np.uint64
        )
        self.num_features = memory_space(scenario).shape[0]
        self.step_column = self.num_features - _STEP_COLUMNS

    def forget(self, begins: np.ndarray | None = None) -> None:
        """Forget the episodes of all envs, or of those where `begins` bool (N,) holds."""
        self._states[... if begins is None else begins] = np.zeros((), MEMORY_STATE_DTYPE)

    def act(self, choices: np.ndarray) -> np.ndarray:
        """Record choices int64 (N,), and return the env's actions int64 (N,) for them.

        A choice of a decoy where none is left is Sleep.
        """
        actions = np.empty(len(self._states), np.int64)
        act_rows(self._states, np.array(choices, np.int64), actions, self._tables)
        return actions

    def useless(self) -> np.ndarray:
        """Return which choices, bool (N, choices), are decoys on hosts that can take no more."""
        mask = np.empty((len(self._states), len(self.choices)), np.bool_)
        mask_rows(self._states, mask, self._tables)
        return ~mask

    def note(self, obs: np.ndarray) -> None:
        """Record the result of the latest choices: obs (N, 4 * hosts), numbers 0 and 1."""
        note_rows(self._states, self._packed(obs), self._tables)

    def features(self, obs: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Return the features, float32 (N, F): the latest obs (N, 4 * hosts) and the memory.

        `Cage2VectorEnv.observation_labels` names the columns.

        Args:
            obs: Numbers 0 and 1.
            out: Array (N, F) to write into; a new array if None.
        """
        if out is None:
            out = np.empty((len(obs), self.num_features), dtype=np.float32)
        show_rows(self._states, self._packed(obs), out, self._tables)
        return out

    def _packed(self, obs: np.ndarray) -> np.ndarray:
        """Return the observations as bits, uint64 (N,)."""
        is_set = np.asarray(obs)[:, : len(self._bits)] > 0
        return (is_set * self._bits).sum(axis=1, dtype=np.uint64)
