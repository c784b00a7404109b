"""A trained defender: a small network that chooses from what a blue agent remembers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vecenv.cage.challenge2.network.scenario import Scenario, cage2_scenario
from vecenv.cage.challenge2.play.blue_memory import BlueMemory
from vecenv.cage.identity import warn_of_other
from vecenv.cage.saved import Layers, Network, load_network, save_network, softmax

__all__ = ["TRAINED_DEFENDER", "DefenderPolicy", "load_defender", "save_defender"]

TRAINED_DEFENDER = Path(__file__).with_name("defender.npz")  # what `make cage2` has trained
_IMPOSSIBLE = -1e9


class DefenderPolicy:
    """Plays the most likely choices of a network with tanh layers; see `BlueMemory`.

    It sees the 52 bits and remembers what it did; `reset` begins episodes. All envs that it plays
    in at the same time begin together.

    Args:
        layers: Weights float32 (a, b) and biases (b,) of each layer, kept.
        scenario: What it plays in; CAGE 2 by default.

    Raises:
        ValueError: The layers do not fit each other, or not the scenario.

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
        """Return actions int64 (N,) for obs (N, 4 * hosts), what came of the last actions.

        A dict given as `report` gets the probabilities (N, choices), what these are, and which were
        chosen.
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
        path: File to write; the ending is taken as it is.
        layers: Weights (a, b) and biases (b,) of each layer.
        scenario: What it was trained in, CAGE 2 by default; its names and the version of the rules
            are kept, and compared by `load_defender`.
        **facts: What else to keep, such as the steps it was trained for.
    """
    scenario = cage2_scenario() if scenario is None else scenario
    small = [(np.asarray(w, np.float16), np.asarray(b, np.float16)) for w, b in layers]
    save_network(path, small, **{**facts, "made_for": scenario.identity()})


def load_defender(path: str | Path, scenario: Scenario | None = None) -> DefenderPolicy:
    """Read what `save_defender` wrote.

    Warns if it was trained in another scenario, or under other rules, in which it can play too.

    Args:
        path: The file.
        scenario: What it is to play in; CAGE 2 by default.

    Raises:
        ValueError: The file holds something else, or a defender of another scenario.
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
