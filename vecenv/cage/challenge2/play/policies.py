"""Blue policies: what counts as one, ready-made ones, and how one is found by its name or file.

A policy is asked for actions with what blue sees: the observations and the *alerts*, i.e. on which
hosts the monitor saw a reverse shell in the latest step (`state.shell_alerts`), which the
observation shows only in part. It plays a whole batch of environments at once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vecenv.cage.challenge2.kernels import OBSERVATIONS, observation_space
from vecenv.cage.challenge2.network.choices import blue_choices
from vecenv.cage.challenge2.network.scenario import (
    Scenario,
    action_index,
    blue_actions,
    cage2_scenario,
)
from vecenv.cage.challenge2.play.blue_memory import BlueMemory
from vecenv.cage.challenge2.play.defender import TRAINED_DEFENDER, load_defender
from vecenv.cage.challenge2.rules.codes import BITS_PER_HOST
from vecenv.cage.identity import warn_of_other
from vecenv.cage.saved import Network, is_sb3_file, load_network, load_sb3_policy, softmax
from vecenv.core.importing import import_object

__all__ = [
    "POLICY_NAMES",
    "BatchedPolicy",
    "BluePolicy",
    "NetworkPolicy",
    "ObservationPolicy",
    "Policy",
    "ReactivePolicy",
    "SleepPolicy",
    "UniformPolicy",
    "find_policy",
    "make_policy",
]


@runtime_checkable
class BatchedPolicy(Protocol):
    """Chooses blue's actions for a batch of envs; `BluePolicy` is one.

    The arrays it is given are its own to keep and to change; what it returns is read at once.

    Two attributes may say what it needs: `observation`, "bits" or "extended", and `uses_masks`; if
    that is True, `act` is called with a third argument, `Cage2VectorEnv.action_masks()`, int8. If
    `act` has a parameter `report`, it may be given a dict to fill, see docs/watch.md.
    """

    def act(self, obs: np.ndarray, alerts: np.ndarray, /) -> Any:
        """Return actions, integers (N,), for obs (N, ...) and alerts bool (N, hosts)."""
        ...

    def reset(self) -> None:
        """Forget everything: all envs are about to begin an episode."""
        ...


Policy = str | Path | BatchedPolicy | Callable[..., Any]


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


class NetworkPolicy:
    """The most likely actions of a trained network.

    Args:
        network: From observations to one number per action, the largest for the most likely.
        observation: What it was trained on, "bits" or "extended".
    """

    def __init__(self, network: Network, observation: str) -> None:
        self._network = network
        self.observation = observation

    def act(
        self, obs: np.ndarray, alerts: np.ndarray, /, report: dict[str, Any] | None = None
    ) -> np.ndarray:
        """Choose actions, int64 (N,), for obs (N, inputs)."""
        outputs = self._network.outputs(obs)
        if report is not None:
            report["probabilities"] = softmax(outputs)
        return outputs.argmax(axis=1)

    def reset(self) -> None:
        """Do nothing: it remembers nothing."""


class _FunctionPolicy:
    """A function of the observations."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.uses_masks = function, getattr(function, "wants_masks", False)
        self.observation = getattr(function, "observation", "bits")
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def act(self, obs: np.ndarray, alerts: np.ndarray, *masks: np.ndarray) -> Any:
        """Ask the function."""
        return self._function(obs, *masks)

    def reset(self) -> None:
        """Let it forget, if it can."""
        getattr(self._function, "reset", lambda: None)()


def find_policy(
    policy: Policy, scenario: Scenario | None = None, *, seed: int | None = None
) -> BatchedPolicy:
    """Return what plays.

    Args:
        policy: Name of a ready-made policy ("react_restore" or "react-restore"; "random" is
            "uniform"; "defender" the trained one that comes along); name of a file with a saved
            policy, of `save_defender` or of stable-baselines3; a `vecenv.load_policy`; an object
            with `act` and `reset`; a function from observations (N, ...) to actions (N,); a class
            of either, which is called, with `scenario` and `seed` if it has parameters of these
            names; or "module:object" for one of these, looked for in the working directory too.
        scenario: What it is to play in; CAGE 2 by default.
        seed: For policies that draw.

    Raises:
        ValueError: No such policy and no such file, or a file for another env.
        TypeError: Something else.
        ImportError: There is no such module, or a library that a file needs is missing.
    """
    scenario = cage2_scenario() if scenario is None else scenario
    if isinstance(policy, str | Path):
        return _named_policy(str(policy), scenario, seed)
    if isinstance(policy, type):
        given: dict[str, Any] = {"scenario": scenario, "seed": seed}
        wanted = inspect.signature(policy).parameters
        policy = policy(**{name: value for name, value in given.items() if name in wanted})
    if isinstance(policy, BatchedPolicy):
        return policy
    if callable(policy):
        return _FunctionPolicy(policy)
    raise TypeError(
        f"policy is {policy!r}, expected a name, a file, an object with `act` and `reset`, or a "
        "function from observations to actions"
    )


def _named_policy(text: str, scenario: Scenario, seed: int | None) -> BatchedPolicy:
    """Return the policy of a name, of a file, or of "module:object"."""
    name = text.replace("-", "_")
    name = "uniform" if name == "random" else name
    if name in POLICY_NAMES:
        return make_policy(name, scenario, seed=seed)
    if name == "defender":
        return load_defender(TRAINED_DEFENDER, scenario)
    for path in (Path(text), Path(text) / "policy.npz"):  # in a run folder
        if path.is_file():
            return _policy_of_file(str(path), scenario)
    if (Path(text) / "checkpoint" / "last.pt").is_file():
        from vecenv import load_policy

        return _FunctionPolicy(load_policy(text))
    if ":" in text:
        found = import_object("policy", text)
        if isinstance(found, str | Path):
            raise TypeError(f"policy is {text!r}, which is {found!r}, no policy")
        return find_policy(found, scenario, seed=seed)
    known = (*(set(POLICY_NAMES) - {"uniform"}), "random", "defender")
    names = ", ".join(sorted(name.replace("_", "-") for name in known))
    kind = "a folder without a policy.npz" if Path(text).is_dir() else "but there is no such file"
    raise ValueError(
        f"policy is {text!r}, {kind}; expected a file with a saved policy, or its run "
        f"folder, 'module:object', or one of {names}"
    )


def _policy_of_file(path: str, scenario: Scenario) -> BatchedPolicy:
    """Return the policy of a file; what it takes in says which kind it is."""
    observation_of = functools.partial(_observation_of, path, scenario)
    if is_sb3_file(path):
        return load_sb3_policy(path, observation_of)
    network = load_network(path)
    if network.num_inputs == BlueMemory(1, scenario).num_features:
        return load_defender(path, scenario)
    observation = observation_of((network.num_inputs,), network.num_outputs)
    warn_of_other(Path(path).name, network.made_for, scenario.identity())
    return NetworkPolicy(network, observation)


def _observation_of(path: str, scenario: Scenario, shape: Any, num_actions: Any) -> str:
    """Return the name of the observation that a network takes; refuse that of another env.

    Args:
        path: Its file.
        scenario: What it is to play in.
        shape: Of its inputs.
        num_actions: What it chooses from; None if that isn't counted.

    Raises:
        ValueError: See above.
    """
    shapes = {observation_space(scenario, name).shape: name for name in OBSERVATIONS}
    num_choices = {name: len(blue_actions(scenario)) for name in OBSERVATIONS}
    num_choices["memory"] = len(blue_choices(scenario))
    if shape not in shapes or num_actions != num_choices[shapes[shape]]:
        inputs = shape[0] if shape is not None and len(shape) == 1 else shape
        known = [f"{wanted[0]} and {num_choices[name]}" for wanted, name in shapes.items()]
        raise ValueError(
            f"{path} is a policy for {inputs} inputs and {num_actions} actions, expected "
            f"{', '.join(known)}: it was trained in another env"
        )
    return shapes[shape]
