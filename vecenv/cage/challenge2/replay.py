"""Replay: step environments with given red actions and given random outcomes.

A `Replay` steps any number of episodes in lockstep; `replay_episodes` runs whole recorded episodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vecenv.cage.challenge2.rules.actions import observe
from vecenv.cage.challenge2.rules.codes import B_LINE, BITS_PER_HOST, MEANDER, NONE
from vecenv.cage.challenge2.rules.dynamics import apply, begin_episode, red_commit, red_options
from vecenv.cage.challenge2.scenario import Scenario, cage2_scenario
from vecenv.cage.challenge2.tables import STATE_DTYPE, compile_tables, decode, host_bits
from vecenv.core.arguments import read_count
from vecenv.jit import cached_njit


@cached_njit
def begin_rows(states, tables):
    """Begin an episode in every state, STATE_DTYPE (N,)."""
    for row in range(states.shape[0]):
        begin_episode(states[row], tables)


@cached_njit
def apply_rows(states, inputs, obs, errors, tables):
    """Apply one step to every state.

    Args:
        states: STATE_DTYPE (N,), changed.
        inputs: int64 (N, 7): blue action, red type, red target, then the four outcomes of `apply`.
        obs: (N, 4 * hosts), written.
        errors: uint8 (N,), written.
    """
    for row in range(states.shape[0]):
        state, given = states[row], inputs[row]
        outcomes = (given[3], given[4], given[5], given[6])
        _, error = apply(state, given[0], given[1], given[2], outcomes, tables)
        errors[row] = error
        observe(state, obs[row], tables)


@cached_njit
def options_rows(states, red_types, targets, tables):
    """Write the options of every state's red agent to red_types and targets, uint64 (N,)."""
    for row in range(states.shape[0]):
        red_types[row], targets[row] = red_options(states[row], tables)


@cached_njit
def commit_rows(states, red_types, targets, tables):
    """Record the move of every state's red agent: red_types, targets int64 (N,)."""
    for row in range(states.shape[0]):
        red_commit(states[row], np.uint64(red_types[row]), np.uint64(targets[row]), tables)


class RecordedStep(NamedTuple):
    """The inputs of one step of N episodes: each an integer array (N,), or one integer for all.

    NONE (-1) stands where an outcome was not needed.
    """

    blue_action: Any
    red_type: Any
    red_target: Any
    red_exploit: Any = NONE
    red_detected: Any = NONE
    red_pe_index: Any = NONE
    green_target: Any = NONE


class ReplayedStep(NamedTuple):
    """The results of one step. `obs` and `errors` are overwritten by the next step."""

    obs: np.ndarray  # uint8 (N, 4 * hosts)
    reward10: np.ndarray  # int16 (N,), blue's reward times ten
    blue_success: np.ndarray  # uint8 (N,): FAILED, SUCCEEDED, UNKNOWN
    red_success: np.ndarray  # uint8 (N,)
    errors: np.ndarray  # uint8 (N,): 0, or an error code, see `dynamics.apply`


class Replay:
    """N episodes of a scenario in lockstep, with nothing left to chance.

    Args:
        num_envs: Number of episodes.
        scenario: Tables; by default those of CAGE 2 with the original rules.
        red_agents: Agents that `red_options` asks: NO_RED, B_LINE or MEANDER; int (N,), or one
            for all.
        green: Whether `green_target` has an effect.

    Attributes:
        states: STATE_DTYPE (N,), the live states.

    Example:
        >>> replay = Replay(1)
        >>> replay.step(RecordedStep(blue_action=0, red_type=1, red_target=2)).reward10
        array([0], dtype=int16)
        >>> replay.true_state()["known_ip"]
        array([[0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]], dtype=uint8)
    """

    def __init__(
        self,
        num_envs: int,
        scenario: Scenario | None = None,
        *,
        red_agents: Any = 0,
        green: bool = False,
    ) -> None:
        read_count("num_envs", num_envs)
        self.scenario = cage2_scenario() if scenario is None else scenario
        self._tables = compile_tables(self.scenario, red_agents=(), green=green)
        self.states = np.zeros(num_envs, STATE_DTYPE).view(np.recarray)
        self.states["red_agent"] = red_agents
        num_values = BITS_PER_HOST * len(self.scenario.hosts)
        self._obs = np.zeros((num_envs, num_values), np.uint8)
        self._errors = np.zeros(num_envs, np.uint8)
        self._inputs = np.zeros((num_envs, len(RecordedStep._fields)), np.int64)
        self.reset()

    def reset(self) -> None:
        """Begin a new episode in every env."""
        begin_rows(self.states, self._tables)

    def red_options(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the options of the red agents; call once per step, before `step`.

        Returns:
            Kinds of action, int64 (N,), and the hosts or subnets that each agent would draw its
            target from, bool (N, 16); none for Sleep. Pass the chosen move to `red_commit`.
        """
        num_envs = len(self.states)
        red_types, targets = np.zeros(num_envs, np.uint64), np.zeros(num_envs, np.uint64)
        options_rows(self.states, red_types, targets, self._tables)
        return red_types.astype(np.int64), host_bits(targets, 16).astype(bool)

    def red_commit(self, red_types: Any, targets: Any) -> None:
        """Record the moves of the red agents in their memory: int (N,) each."""
        moves = np.zeros((2, len(self.states)), np.int64)
        moves[0], moves[1] = red_types, targets
        commit_rows(self.states, moves[0], moves[1], self._tables)

    def step(self, recorded: RecordedStep) -> ReplayedStep:
        """Step all episodes.

        Raises:
            ValueError: An entry is no integer, or a blue action does not exist.
        """
        num_actions = int(self._tables.num_actions)
        for column, (name, given) in enumerate(zip(recorded._fields, recorded, strict=True)):
            values = np.asarray(given)
            if values.dtype.kind not in "iu" or values.shape not in ((), (len(self.states),)):
                raise ValueError(
                    f"{name} has dtype {values.dtype} and shape {values.shape}, "
                    f"expected one integer or integers of shape ({len(self.states)},)"
                )
            self._inputs[:, column] = values
        blue = self._inputs[:, 0]
        if blue.min() < 0 or blue.max() >= num_actions:
            raise ValueError(
                f"blue_action goes from {blue.min()} to {blue.max()}, expected 0..{num_actions - 1}"
            )
        apply_rows(self.states, self._inputs, self._obs, self._errors, self._tables)
        names = ("reward10", "blue_success", "red_success")
        reward10, blue, red = (self.states[name].copy() for name in names)
        return ReplayedStep(self._obs, reward10, blue, red, self._errors)

    def true_state(self) -> dict[str, np.ndarray]:
        """Return the compact true state of all episodes, see `tables.decode`."""
        return decode(self.states, self.scenario)


@dataclass(frozen=True)
class ReplayResult:
    """The results of E whole episodes of T steps; entry t belongs to step t.

    Attributes:
        fields: Observation, flags and state fields, by the names of the recordings: `obs` uint8
            (E, T, 4 * hosts), `reward10` int16 (E, T), `blue_success`, `red_success` uint8 (E, T),
            and the fields of `tables.decode`.
        errors: uint8 (E, T), see `dynamics.apply`.
        policy_agrees: bool (E, T), whether the built-in agent could have chosen the recorded red
            action; always True for other agents.
    """

    fields: dict[str, np.ndarray]
    errors: np.ndarray
    policy_agrees: np.ndarray


def replay_episodes(
    recorded: Mapping[str, np.ndarray], scenario: Scenario | None = None, *, green: bool = False
) -> ReplayResult:
    """Replay recorded episodes in one batch.

    Args:
        recorded: The fields of `RecordedStep` by name, integers (E, T), and `red_agent` (E,):
            B_LINE or MEANDER runs that agent beside the recording and compares the two.
        scenario: As for `Replay`.
        green: As for `Replay`.
    """
    names = [name for name in RecordedStep._fields if name in recorded]
    columns = {name: np.asarray(recorded[name], np.int64) for name in names}
    num_episodes, num_steps = columns["blue_action"].shape
    agents = np.asarray(recorded.get("red_agent", np.zeros(num_episodes)), np.int64)
    is_built_in = (agents == B_LINE) | (agents == MEANDER)
    agents = np.where(is_built_in, agents, 0)
    replay = Replay(num_episodes, scenario, red_agents=agents, green=green)
    states = np.zeros((num_steps, num_episodes), STATE_DTYPE)
    obs = np.zeros((num_episodes, num_steps, BITS_PER_HOST * len(replay.scenario.hosts)), np.uint8)
    errors = np.zeros((num_episodes, num_steps), np.uint8)
    agrees = np.ones((num_episodes, num_steps), bool)
    for t in range(num_steps):
        step = RecordedStep(**{name: column[:, t] for name, column in columns.items()})
        red_types, targets = replay.red_options()
        is_option = targets[np.arange(num_episodes), step.red_target & 15] & (step.red_target >= 0)
        agrees[:, t] = ~is_built_in | ((red_types == step.red_type) & is_option)
        replay.red_commit(step.red_type, step.red_target)
        result = replay.step(step)
        obs[:, t], errors[:, t] = result.obs, result.errors
        states[t] = replay.states
    by_episode = states.swapaxes(0, 1)
    flags = {name: by_episode[name].copy() for name in ("reward10", "blue_success", "red_success")}
    return ReplayResult(
        {"obs": obs, **flags, **decode(by_episode, replay.scenario)}, errors, agrees
    )
