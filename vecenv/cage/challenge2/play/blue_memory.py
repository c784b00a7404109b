"""The knowledge of a blue agent: the 52 bits seen, its own actions and the published rules.

This module never reads the true state of an env, so a policy built on it can also play the original
simulator.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vecenv.cage.challenge2.network.scenario import Scenario, blue_choices, cage2_scenario
from vecenv.cage.challenge2.network.tables import compile_tables
from vecenv.cage.challenge2.remembering import (
    MEMORY_STATE_DTYPE,
    act_rows,
    mask_rows,
    note_rows,
    show_rows,
)
from vecenv.cage.challenge2.rules import codes

__all__ = ["BlueMemory"]


class BlueMemory:
    """The memory of a blue agent that defends N envs at the same time.

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
        num_hosts = len(scenario.hosts)
        self._tables: Any = compile_tables(scenario)
        # Only the parts of an env's state that blue can know are ever written.
        self._states = np.zeros(num_envs, MEMORY_STATE_DTYPE).view(np.recarray)
        self._bits = np.uint64(1) << np.arange(codes.BITS_PER_HOST * num_hosts, dtype=np.uint64)
        self._chosen = np.zeros(num_envs, np.int64)
        self.step_column = (codes.BITS_PER_HOST + 7) * num_hosts + 2
        self.num_features = self.step_column + 2 * len(codes.EPISODE_LENGTHS) + 1

    def forget(self, begins: np.ndarray | None = None) -> None:
        """Forget the episodes of all envs, or of those where `begins` bool (N,) holds."""
        self._states[... if begins is None else begins] = np.zeros((), MEMORY_STATE_DTYPE)

    def act(self, choices: np.ndarray) -> np.ndarray:
        """Return the env's actions int64 (N,) for choices int64 (N,); Sleep for a missing decoy."""
        self._chosen = np.array(choices, np.int64)  # `note` needs them after the caller's step
        actions = np.empty_like(self._chosen)
        act_rows(self._states, self._chosen, actions, self._tables)
        return actions

    def useless(self) -> np.ndarray:
        """Return which choices, bool (N, choices), are decoys on hosts that can take no more."""
        mask = np.empty((len(self._states), len(self.choices)), np.bool_)
        mask_rows(self._states, mask, self._tables)
        return ~mask

    def note(self, obs: np.ndarray) -> None:
        """Record the result of the latest choices: obs (N, 4 * hosts), numbers 0 and 1."""
        note_rows(self._states, self._chosen, self._packed(obs), self._tables)

    def features(self, obs: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Return the features, float32 (N, F): the latest obs (N, 4 * hosts) and the memory.

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
