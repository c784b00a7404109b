"""What a blue agent can know: the 52 bits it has seen, its own actions, and the published rules.

Nothing in here looks at the true state of an env, so a policy made of it plays the original
simulator as well.
"""

from __future__ import annotations

import numpy as np

from vecenv.cage.challenge2.network.choices import blue_choices
from vecenv.cage.challenge2.network.scenario import Scenario, cage2_scenario
from vecenv.cage.challenge2.network.state import host_bits
from vecenv.cage.challenge2.network.tables import compile_tables
from vecenv.cage.challenge2.rules.codes import (
    BITS_PER_HOST,
    EARLY_STEPS,
    EPISODE_LENGTHS,
    FIRST_EXPLOIT_STEP,
    MANY_EXPLOITS,
    OPENING_STEPS,
)

__all__ = ["BlueMemory"]


class BlueMemory:
    """The memory of a blue agent in N envs that it defends at the same time.

    In every step: `features` of the latest observations, from which choices are made; `act`, which
    turns choices into actions; and after the envs' step `note` of the new observations.

    Args:
        num_envs: How many envs, N.
        scenario: What they play; CAGE 2 by default.

    Attributes:
        choices: What there is to choose from.
        num_features: Length F of a row of features.
        step_column: Which of these is the number of steps made, as a fraction of 100.
    """

    def __init__(self, num_envs: int, scenario: Scenario | None = None) -> None:
        scenario = cage2_scenario() if scenario is None else scenario
        self.choices = blue_choices(scenario)
        num_hosts = self._num_hosts = len(scenario.hosts)
        self._num_bits = BITS_PER_HOST * num_hosts
        self._rows = np.arange(num_envs)
        most = max(len(choice.actions) for choice in self.choices)
        self._actions = np.zeros((len(self.choices), most + 1), dtype=np.int64)
        self._host = np.zeros(len(self.choices), dtype=np.int64)
        for number, choice in enumerate(self.choices):
            self._actions[number, : len(choice.actions)] = choice.actions
            if choice.host is not None:
                self._host[number] = scenario.host_index(choice.host)
        names = [choice.name for choice in self.choices]
        self._is_restore = np.array([name == "Restore" for name in names])
        self._is_decoy = np.array([name == "Decoy" for name in names])
        self._num_decoys = np.zeros(num_hosts, dtype=np.int64)  # that each host takes
        for number in np.flatnonzero(self._is_decoy):
            self._num_decoys[self._host[number]] = len(self.choices[number].actions)
        tables = compile_tables(scenario)
        masks = np.array([tables.plan_first_hosts, tables.plan_hosts])
        self._first_hosts, self._plan_hosts = host_bits(masks, num_hosts).astype(np.bool_)
        shape = (num_envs, num_hosts)
        self._placed = np.zeros(shape, dtype=np.int64)  # decoys in place
        self._seen_scanned = np.zeros(shape, dtype=np.bool_)
        self._last_scanned = np.zeros(shape, dtype=np.bool_)  # in the latest step with a scan
        self._num_exploits = np.zeros(shape, dtype=np.int64)  # seen since the last Restore
        self._is_stale = np.zeros(shape, dtype=np.bool_)  # changed by blue since its last scan
        self._is_wandering = np.zeros(num_envs, dtype=np.bool_)  # B_line would not do this
        self._is_direct = np.zeros(num_envs, dtype=np.bool_)  # Meander would not do this
        self._step = np.zeros(num_envs, dtype=np.int64)
        self._chosen = np.zeros(num_envs, dtype=np.int64)
        self.step_column = self._num_bits + 7 * num_hosts + 2
        self.num_features = self.step_column + 2 * len(EPISODE_LENGTHS) + 1

    def forget(self, begins: np.ndarray | None = None) -> None:
        """Forget the episodes of all envs, or of those where `begins` bool (N,) holds."""
        chosen = slice(None) if begins is None else begins
        for array in (
            self._placed,
            self._seen_scanned,
            self._last_scanned,
            self._num_exploits,
            self._is_stale,
            self._is_wandering,
            self._is_direct,
            self._step,
        ):
            array[chosen] = 0

    def act(self, choices: np.ndarray) -> np.ndarray:
        """Return the env's actions int64 (N,) for choices int64 (N,); Sleep for a missing decoy."""
        self._chosen = choices = np.array(choices)  # `note` needs them after the caller's step
        hosts = self._host[choices]
        number = np.where(self._is_decoy[choices], self._placed[self._rows, hosts], 0)
        return self._actions[choices, number]

    def useless(self) -> np.ndarray:
        """Return bool (N, choices): decoys on hosts that have all that they take."""
        is_full = self._placed >= self._num_decoys
        return is_full[:, self._host] & self._is_decoy

    def note(self, obs: np.ndarray) -> None:
        """Take in what came of the choices made: obs (N, 4 * hosts), numbers 0 and 1."""
        self._note_own()
        shape = len(obs), self._num_hosts, BITS_PER_HOST
        bits: np.ndarray = obs[:, : self._num_bits].reshape(shape) > 0
        is_active, is_exploit = bits[..., 0], bits[..., 1]
        is_scan = is_active & ~is_exploit
        has_scan = is_scan.any(axis=1, keepdims=True)
        np.copyto(self._last_scanned, is_scan, where=has_scan)
        self._seen_scanned |= is_scan
        self._is_stale &= ~is_scan
        self._num_exploits += is_exploit
        self._step += 1
        num_first = (self._seen_scanned & self._first_hosts).sum(axis=1)
        is_astray = (num_first > 1) | (is_active & ~self._plan_hosts).any(axis=1)
        self._is_wandering |= is_astray & (self._step <= OPENING_STEPS)
        is_early = (is_exploit & self._first_hosts).any(axis=1) & (self._step <= FIRST_EXPLOIT_STEP)
        self._is_direct |= is_early

    def _note_own(self) -> None:
        """Take in what blue has done to the hosts."""
        hosts, rows = self._host[self._chosen], self._rows
        restored: np.ndarray = self._is_restore[self._chosen]
        self._placed[rows[restored], hosts[restored]] = 0
        self._num_exploits[rows[restored], hosts[restored]] = 0
        placed = self._is_decoy[self._chosen] & (
            self._placed[rows, hosts] < self._num_decoys[hosts]
        )
        self._placed[rows[placed], hosts[placed]] += 1
        changed = restored | placed
        self._is_stale[rows[changed], hosts[changed]] = True

    def features(self, obs: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Return float32 (N, F) for the latest obs (N, 4 * hosts): these, and what is remembered.

        Args:
            obs: Numbers 0 and 1.
            out: Where to write, (N, F); fresh memory if None.
        """
        if out is None:
            out = np.empty((len(obs), self.num_features), dtype=np.float32)
        step, at = self._step, self._num_bits
        out[:, :at] = obs[:, :at]
        for columns in (
            self._seen_scanned,
            self._last_scanned,
            self._placed / 2,
            self._num_decoys - self._placed == 0,
            self._num_exploits > 0,
            np.minimum(self._num_exploits, MANY_EXPLOITS) / 2,
            self._is_stale,
        ):
            out[:, at : at + self._num_hosts] = columns
            at += self._num_hosts
        out[:, at] = self._is_wandering
        out[:, at + 1] = self._is_direct
        out[:, at + 2] = step / EPISODE_LENGTHS[-1]
        out[:, at + 3] = np.minimum(step, EARLY_STEPS) / EARLY_STEPS
        at += 4
        for bound in EPISODE_LENGTHS[:-1]:
            out[:, at] = step < bound
            out[:, at + 1] = np.maximum(bound - step, 0) / bound
            at += 2
        out[:, at] = np.maximum(EPISODE_LENGTHS[-1] - step, 0) / EPISODE_LENGTHS[-1]
        return out
