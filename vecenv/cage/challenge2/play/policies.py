"""Blue policies: what counts as one, ready-made ones, and how one is found by its name or file.

A policy plays a batch of environments at once. It chooses actions from the observations and the
*alerts*: the hosts on which the monitor saw a reverse shell in the latest step
(`state.shell_alerts`). The observation shows the alerts only in part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vecenv.cage.challenge2.kernels import OBSERVATIONS, observation_space
from vecenv.cage.challenge2.network.scenario import (
    Scenario,
    action_index,
    blue_actions,
    blue_choices,
    cage2_scenario,
)
from vecenv.cage.challenge2.play.blue_memory import BlueMemory
from vecenv.cage.challenge2.rules.codes import BITS_PER_HOST
from vecenv.cage.identity import warn_of_other
from vecenv.cage.playing import PolicyKinds, called
from vecenv.cage.saved import Layers, Network, is_sb3_file, load_network, save_network, softmax

__all__ = [
    "POLICY_NAMES", "TRAINED_DEFENDER", "BatchedPolicy", "BluePolicy", "DefenderPolicy",
    "NetworkPolicy", "ObservationPolicy", "Policy", "ReactivePolicy", "SleepPolicy",
    "UniformPolicy", "find_policy", "load_defender", "save_defender",
]  # fmt: skip


@runtime_checkable
class BatchedPolicy(Protocol):
    """Chooses blue's actions for a batch of envs; `BluePolicy` is one.

    The policy may keep and change its input arrays. The returned array is read at once.

    Two attributes are optional: `observation`, "bits" or "memory", and `uses_masks`. If the latter
    is True, `act` gets a third argument, `Cage2VectorEnv.action_masks()`, int8. If `act` has a
    parameter `report`, callers may pass a dict to fill, see docs/watch.md.
    """

    def act(self, obs: np.ndarray, alerts: np.ndarray, /) -> Any:
        """Return actions, integers (N,), for obs (N, ...) and alerts bool (N, hosts)."""
        ...

    def reset(self) -> None:
        """Forget everything: all envs are about to begin an episode."""
        ...


Policy = str | Path | BatchedPolicy | Callable[..., Any]


class BluePolicy:
    """Base class of blue policies.

    Args:
        scenario: Scenario to play; CAGE 2 by default.
    """

    def __init__(self, scenario: Scenario | None = None) -> None:
        self.scenario = cage2_scenario() if scenario is None else scenario

    def act(self, obs: np.ndarray, alerts: np.ndarray) -> np.ndarray:
        """Choose actions.

        Args:
            obs: (N, at least 4 * hosts), the observations.
            alerts: bool (N, hosts), see `state.shell_alerts`.

        Returns:
            int64 (N,); fresh memory.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Forget the episodes: all envs are about to begin new ones."""


class SleepPolicy(BluePolicy):
    """Does nothing."""

    def act(self, obs: np.ndarray, alerts: np.ndarray) -> np.ndarray:
        """Choose Sleep."""
        return np.zeros(len(obs), np.int64)


class UniformPolicy(BluePolicy):
    """Draws uniformly among all actions.

    Args:
        scenario: See `BluePolicy`.
        seed: Seed of its generator.
    """

    def __init__(self, scenario: Scenario | None = None, *, seed: int | None = None) -> None:
        super().__init__(scenario)
        hosts, decoys = len(self.scenario.hosts), len(self.scenario.decoys)
        self._num_actions = 2 + (3 + decoys) * hosts
        self._generator = np.random.default_rng(seed)

    def act(self, obs: np.ndarray, alerts: np.ndarray) -> np.ndarray:
        """Choose random actions."""
        return self._generator.integers(self._num_actions, size=len(obs))


class _Cleaner(BluePolicy):
    """Apply Remove or Restore to a suspicious host, but never to red's foothold.

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
        """Act on the first host of each row of is_suspect bool (N, hosts), or do `otherwise`."""
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

    The challenge's own reactive agents keep a queue of such hosts. Red acts on one host per step,
    alerts count only in Monitor steps, and the agents monitor only when the queue is empty. So it
    never holds more than one host, which is cleaned at once.
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

    def reset(self) -> None:
        """Forget the previous actions."""
        self._has_monitored = np.zeros(0, bool)


_MAKERS: dict[str, Callable[[Scenario | None, int | None], BluePolicy]] = {
    "sleep": lambda scenario, seed: SleepPolicy(scenario),
    "uniform": lambda scenario, seed: UniformPolicy(scenario, seed=seed),
    "react_remove": lambda scenario, seed: ReactivePolicy("Remove", scenario),
    "react_restore": lambda scenario, seed: ReactivePolicy("Restore", scenario),
    "obs_remove": lambda scenario, seed: ObservationPolicy("Remove", scenario),
    "obs_restore": lambda scenario, seed: ObservationPolicy("Restore", scenario),
}
POLICY_NAMES = tuple(_MAKERS)


class NetworkPolicy:
    """The most likely actions of a trained network.

    Args:
        network: Maps observations to one number per action, largest for the most likely.
        observation: Kind of observation it was trained on, "bits" or "memory".
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
        """Do nothing: the policy has no memory."""


TRAINED_DEFENDER = Path(__file__).with_name("defender.npz")  # what `make cage2` has trained
_IMPOSSIBLE = -1e9


class DefenderPolicy:
    """Plays the most likely choices of a network with tanh layers; see `BlueMemory`.

    The policy sees the 52 bits and remembers its actions; `reset` begins episodes. All envs that it
    plays at the same time must begin together.

    Args:
        layers: Weights float32 (a, b) and biases (b,) of each layer, kept.
        scenario: Scenario to play; CAGE 2 by default.

    Raises:
        ValueError: The layers do not fit each other or the scenario.

    Attributes:
        layers: As given.
    """

    observation = "bits"

    def __init__(self, layers: Layers, scenario: Scenario | None = None) -> None:
        self._scenario = cage2_scenario() if scenario is None else scenario
        self._network = network = Network(layers)
        self.layers = network.layers
        self._memory: BlueMemory | None = None
        probe = BlueMemory(1, self._scenario)
        expected = probe.num_features, len(probe.choices)
        if (network.num_inputs, network.num_outputs) != expected:
            raise ValueError(
                f"layers with {network.num_inputs} inputs and {network.num_outputs} outputs, "
                f"expected {expected[0]} inputs and {expected[1]} outputs: they were trained for "
                "another scenario"
            )

    def reset(self) -> None:
        """Begin new episodes in all envs."""
        self._memory = None

    def act(
        self, obs: np.ndarray, alerts: Any = None, /, report: dict[str, Any] | None = None
    ) -> np.ndarray:
        """Return actions int64 (N,) for obs (N, 4 * hosts), the result of the last actions.

        A dict passed as `report` receives the probabilities (N, choices), the labels of the choices
        and the choices taken.
        """
        obs = np.asarray(obs)
        if self._memory is None:
            self._memory = BlueMemory(len(obs), self._scenario)
        else:
            self._memory.note(obs)
        x = self._network.outputs(self._memory.features(obs))
        x[self._memory.useless()] = _IMPOSSIBLE
        choices = x.argmax(axis=1)
        if report is not None:
            labels = [f"{c.name} {c.host}" if c.host else c.name for c in self._memory.choices]
            report.update(probabilities=softmax(x), labels=labels, chosen=choices)
        return self._memory.act(choices)


def save_defender(
    path: str | Path, layers: Layers, scenario: Scenario | None = None, **facts: Any
) -> None:
    """Write a defender's network, as float16; see `vecenv.files.save_arrays`.

    Args:
        path: File to write; no suffix is added.
        layers: Weights (a, b) and biases (b,) of each layer.
        scenario: Scenario it was trained in, CAGE 2 by default; `load_defender` compares the saved
            names and version of the rules.
        **facts: Further values to save, such as the number of training steps.
    """
    scenario = cage2_scenario() if scenario is None else scenario
    small = [(np.asarray(w, np.float16), np.asarray(b, np.float16)) for w, b in layers]
    save_network(path, small, **{**facts, "made_for": scenario.identity()})


def load_defender(path: str | Path, scenario: Scenario | None = None) -> DefenderPolicy:
    """Load a defender that `save_defender` wrote.

    Warn if it was trained in another scenario or under other rules but can play here too.

    Args:
        path: The file.
        scenario: Scenario to play; CAGE 2 by default.

    Raises:
        ValueError: The file holds no defender, or one for another scenario.
        OSError: The file can't be read.
    """
    scenario = cage2_scenario() if scenario is None else scenario
    network = load_network(path)
    try:
        if network.scale is not None:
            raise ValueError("its inputs are normalised")
        policy = DefenderPolicy(network.layers, scenario)
    except ValueError as error:
        raise ValueError(f"{path} is no defender that can play here: {error}") from error
    warn_of_other(Path(path).name, network.made_for, scenario.identity())
    return policy


class _FunctionPolicy:
    """A function of the observations."""

    def __init__(self, function: Callable[..., Any], observation: str = "bits") -> None:
        self._function, self.uses_masks = function, getattr(function, "wants_masks", False)
        self.observation = getattr(function, "observation", observation)
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def act(self, obs: np.ndarray, alerts: np.ndarray, *masks: np.ndarray) -> Any:
        """Call the function."""
        return self._function(obs, *masks)

    def reset(self) -> None:
        """Reset the function, if it has a `reset`."""
        getattr(self._function, "reset", lambda: None)()


def find_policy(
    policy: Policy, scenario: Scenario | None = None, *, seed: int | None = None
) -> BatchedPolicy:
    """Find a policy by name, file or object.

    | ready-made | in each step |
    |---|---|
    | sleep | does nothing |
    | random, uniform | draws any of the actions |
    | obs-remove, obs-restore | treats the first host that the observation shows exploited |
    | react-remove, react-restore | treats the host where a shell was seen at Monitor, or monitors |
    | defender | the likeliest choice of the trained network, see `DefenderPolicy` |

    Args:
        policy: Name of a ready-made policy ("react_restore" or "react-restore"; "random" is
            "uniform"; "defender" is the bundled trained one); name of a file with a saved
            policy, of `save_defender` or of stable-baselines3; a `vecenv.load_policy`; an object
            with `act` and `reset`; a function from observations (N, ...) to actions (N,); a class
            of either, which is called, with `scenario` and `seed` if it has parameters of these
            names; or "module:object" for one of these, searched in the working directory too.
        scenario: Scenario to play; CAGE 2 by default.
        seed: Seed for policies that draw.

    Raises:
        ValueError: There is no such policy or file, or the file is for another env.
        TypeError: The argument is none of these.
        ImportError: There is no such module, or a library that a file needs is missing.
    """
    scenario = cage2_scenario() if scenario is None else scenario
    makers = {**_MAKERS, "random": _MAKERS["uniform"]}
    ready: dict[str, Any] = {
        name: functools.partial(make, scenario, seed) for name, make in makers.items()
    }
    ready["defender"] = functools.partial(load_defender, TRAINED_DEFENDER, scenario)
    kinds = PolicyKinds(
        ready,
        ("policy.npz", "checkpoint/last.pt"),
        functools.partial(_policy_of_file, scenario=scenario),
        functools.partial(called, scenario=scenario, seed=seed),
        BatchedPolicy,
        lambda found: _FunctionPolicy(found) if callable(found) else None,
        "a name, a file, an object with `act` and `reset`, or a function from observations to "
        "actions",
    )
    return kinds.find(policy)


def _policy_of_file(path: Path, scenario: Scenario) -> BatchedPolicy:
    """Return the policy of a file; what it takes in says which kind it is."""
    if path.suffix == ".pt" or is_sb3_file(path):  # the first in a run folder
        from vecenv import load_policy

        found = load_policy(path.parents[1] if path.suffix == ".pt" else path)
        shape, num_actions = found.observation_space.shape, getattr(found.action_space, "n", None)
        return _FunctionPolicy(found, _observation_of(path, scenario, shape, num_actions))
    network = load_network(path)
    if network.num_inputs == BlueMemory(1, scenario).num_features:
        return load_defender(path, scenario)
    observation = _observation_of(path, scenario, (network.num_inputs,), network.num_outputs)
    warn_of_other(path.name, network.made_for, scenario.identity())
    return NetworkPolicy(network, observation)


def _observation_of(path: Path, scenario: Scenario, shape: Any, num_actions: Any) -> str:
    """Return the kind of observation that a network takes; refuse networks for other envs.

    Args:
        path: File of the network.
        scenario: Scenario to play.
        shape: Shape of its inputs.
        num_actions: Number of its actions; None to skip this check.

    Raises:
        ValueError: The network is for another env.
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
