"""Ready-made blue policies, for a whole batch of environments at once.

A policy is asked for actions with what blue sees: the observations and the *alerts*, i.e. on which
hosts the monitor saw a reverse shell in the latest step (`state.shell_alerts`), which the
observation shows only in part.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vecenv.cage.challenge2.network.actions import action_index
from vecenv.cage.challenge2.network.cage2 import cage2_scenario
from vecenv.cage.challenge2.network.scenario import Scenario
from vecenv.cage.challenge2.rules.codes import BITS_PER_HOST

__all__ = [
    "POLICY_NAMES",
    "BluePolicy",
    "ObservationPolicy",
    "ReactivePolicy",
    "SleepPolicy",
    "UniformPolicy",
    "make_policy",
]


class BluePolicy:
    """What chooses blue's actions.

    Args:
        scenario: What it plays in; CAGE 2 by default.
    """

    def __init__(self, scenario: Scenario | None = None) -> None:
        self.scenario = cage2_scenario() if scenario is None else scenario

    def act(self, obs: np.ndarray, alerts: np.ndarray) -> np.ndarray:
        """Choose actions.

        Args:
            obs: (N, at least 4 * hosts), the observations, plain or extended.
            alerts: bool (N, hosts), see `state.shell_alerts`.

        Returns:
            int64 (N,); fresh memory.
        """
        raise NotImplementedError

    def reset(self, begins: np.ndarray | None = None) -> None:
        """Forget the episodes of the envs in `begins` bool (N,), or of all envs."""


class SleepPolicy(BluePolicy):
    """Does nothing."""

    def act(self, obs: np.ndarray, alerts: np.ndarray) -> np.ndarray:
        """Choose Sleep."""
        return np.zeros(len(obs), np.int64)


class UniformPolicy(BluePolicy):
    """Draws uniformly among all actions.

    Args:
        scenario: See `BluePolicy`.
        seed: Of its generator.
    """

    def __init__(self, scenario: Scenario | None = None, *, seed: int | None = None) -> None:
        super().__init__(scenario)
        hosts, decoys = len(self.scenario.hosts), len(self.scenario.decoys)
        self._num_actions = 2 + (3 + decoys) * hosts
        self._generator = np.random.default_rng(seed)

    def act(self, obs: np.ndarray, alerts: np.ndarray) -> np.ndarray:
        """Choose any."""
        return self._generator.integers(self._num_actions, size=len(obs))


class _Cleaner(BluePolicy):
    """Uses Remove or Restore on a host when it notices something there; never on red's foothold.

    Args:
        action: "Remove" or "Restore".
        scenario: See `BluePolicy`.
    """

    def __init__(self, action: str, scenario: Scenario | None = None) -> None:
        super().__init__(scenario)
        if action not in ("Remove", "Restore"):
            raise ValueError(f"action must be 'Remove' or 'Restore', got {action!r}")
        self._first = action_index(self.scenario, action, self.scenario.hosts[0].name)
        foothold = self.scenario.foothold
        self._is_foothold = np.array([h.name == foothold for h in self.scenario.hosts])

    def _clean(self, is_suspect: np.ndarray, otherwise: int) -> np.ndarray:
        """Act on the first host of each row of is_suspect bool (N, hosts), or do something else."""
        suspects = is_suspect & ~self._is_foothold
        return np.where(suspects.any(axis=1), self._first + suspects.argmax(axis=1), otherwise)


class ObservationPolicy(_Cleaner):
    """Cleans the first host whose activity in the last observation is Exploit; else sleeps."""

    def act(self, obs: np.ndarray, alerts: np.ndarray) -> np.ndarray:
        """Choose by the observation alone."""
        num_values = BITS_PER_HOST * len(self.scenario.hosts)
        is_exploit = (obs[:, 0:num_values:4] == 1) & (obs[:, 1:num_values:4] == 1)
        return self._clean(is_exploit, action_index(self.scenario, "Sleep"))


class ReactivePolicy(_Cleaner):
    """Monitors; cleans the host on which it saw a reverse shell while monitoring.

    The challenge's own reactive agents, which keep a queue of such hosts. Red acts on one host per
    step and alerts count only in steps with Monitor, which is done when the queue is empty: so it
    never holds more than one host, and that one is acted on at once.
    """

    def __init__(self, action: str, scenario: Scenario | None = None) -> None:
        super().__init__(action, scenario)
        self._monitor = action_index(self.scenario, "Monitor")
        self._has_monitored = np.zeros(0, bool)

    def act(self, obs: np.ndarray, alerts: np.ndarray) -> np.ndarray:
        """Choose by the alerts and the action chosen before."""
        if len(self._has_monitored) != len(obs):
            self._has_monitored = np.zeros(len(obs), bool)
        actions = self._clean(alerts & self._has_monitored[:, None], self._monitor)
        self._has_monitored = actions == self._monitor
        return actions

    def reset(self, begins: np.ndarray | None = None) -> None:
        """Forget what was done in the envs in `begins` bool (N,), or in all."""
        if begins is None:
            self._has_monitored = np.zeros(0, bool)
        else:
            self._has_monitored &= ~begins


_MAKERS: dict[str, Callable[[Scenario | None, int | None], BluePolicy]] = {
    "sleep": lambda scenario, seed: SleepPolicy(scenario),
    "uniform": lambda scenario, seed: UniformPolicy(scenario, seed=seed),
    "react_remove": lambda scenario, seed: ReactivePolicy("Remove", scenario),
    "react_restore": lambda scenario, seed: ReactivePolicy("Restore", scenario),
    "obs_remove": lambda scenario, seed: ObservationPolicy("Remove", scenario),
    "obs_restore": lambda scenario, seed: ObservationPolicy("Restore", scenario),
}
POLICY_NAMES = tuple(_MAKERS)


def make_policy(
    name: str, scenario: Scenario | None = None, *, seed: int | None = None
) -> BluePolicy:
    """Return a ready-made policy.

    Args:
        name: One of POLICY_NAMES.
        scenario: What it plays in; CAGE 2 by default.
        seed: For those that draw.

    Raises:
        ValueError: Unknown name.
    """
    if name not in _MAKERS:
        raise ValueError(f"policy must be one of {', '.join(POLICY_NAMES)}; got {name!r}")
    return _MAKERS[name](scenario, seed)
