"""A trained defender: a small network that chooses from what a blue agent remembers."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from vecenv.cage.challenge2.network.cage2 import cage2_scenario
from vecenv.cage.challenge2.network.scenario import Scenario, warn_of_other
from vecenv.cage.challenge2.play.blue_memory import BlueMemory
from vecenv.files import read_npz, write_npz

__all__ = [
    "TRAINED_DEFENDER",
    "DefenderPolicy",
    "is_defender_file",
    "load_defender",
    "save_defender",
]

TRAINED_DEFENDER = Path(__file__).with_name("defender.npz")  # what `make cage2` has trained
_FORMAT = "vecenv cage defender 1"
_MADE_FOR = "made_for"  # the fact that says in what it was trained
_IMPOSSIBLE = -1e9

Layers = Sequence[tuple[np.ndarray, np.ndarray]]


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
        self.layers = list(layers)
        self._memory: BlueMemory | None = None
        self._has_acted = False
        probe = BlueMemory(1, self._scenario)
        widths = [probe.num_features, *(len(bias) for _, bias in self.layers)]
        shapes = [weight.shape for weight, _ in self.layers]
        expected = list(pairwise(widths))
        if shapes != expected or widths[-1] != len(probe.choices):
            raise ValueError(
                f"layers of shapes {shapes}, expected {probe.num_features} inputs and "
                f"{len(probe.choices)} outputs: they were trained for another scenario"
            )

    def reset(self) -> None:
        """Begin new episodes in all envs."""
        self._memory = None

    def act(self, obs: np.ndarray, alerts: Any = None, /) -> np.ndarray:
        """Return actions int64 (N,) for obs (N, 4 * hosts), what came of the last actions."""
        obs = np.asarray(obs)
        if self._memory is None:
            self._memory = BlueMemory(len(obs), self._scenario)
        else:
            self._memory.note(obs)
        x = self._memory.features(obs)
        for number, (weight, bias) in enumerate(self.layers):
            x = (np.tanh(x) if number else x) @ weight + bias
        x[self._memory.useless()] = _IMPOSSIBLE
        return self._memory.act(x.argmax(axis=1))


def save_defender(
    path: str | Path, layers: Layers, scenario: Scenario | None = None, **facts: Any
) -> None:
    """Write a defender's network, as float16, into an uncompressed NumPy archive without pickle.

    Args:
        path: File to write; the ending is taken as it is.
        layers: Weights (a, b) and biases (b,) of each layer.
        scenario: What it was trained in, CAGE 2 by default; its names and the version of the rules
            are kept, and compared by `load_defender`.
        **facts: What else to keep, such as the steps it was trained for; as JSON.
    """
    scenario = cage2_scenario() if scenario is None else scenario
    facts = {**facts, _MADE_FOR: scenario.identity()}
    arrays: dict[str, Any] = {}
    for number, (weight, bias) in enumerate(layers):
        arrays[f"weight{number}"] = np.asarray(weight, dtype=np.float16)
        arrays[f"bias{number}"] = np.asarray(bias, dtype=np.float16)
    texts = {"format": np.array(_FORMAT), "facts": np.array(json.dumps(facts))}
    write_npz(path, {**texts, **arrays})


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
    try:
        arrays = read_npz(path)
        if str(arrays["format"]) != _FORMAT:
            raise ValueError(f"its format is {arrays['format']!s:.99}, expected {_FORMAT!r}")
        count = sum(name.startswith("weight") for name in arrays)
        layers = [
            (_numbers(arrays[f"weight{n}"], 2), _numbers(arrays[f"bias{n}"], 1))
            for n in range(count)
        ]
        facts = json.loads(str(arrays["facts"])) if "facts" in arrays else {}
        made_for = facts.get(_MADE_FOR) if isinstance(facts, dict) else None
        policy = DefenderPolicy(layers, scenario)
    except (KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no defender that can play here: {error}") from error
    warn_of_other(Path(path).name, made_for, scenario)
    return policy


def _numbers(array: np.ndarray, ndim: int) -> np.ndarray:
    """Weights or biases as float32; they are kept as float16."""
    if array.ndim != ndim or array.dtype.kind != "f" or not np.isfinite(array).all():
        raise ValueError(f"its layers are {array.dtype} {array.shape}, expected finite floats")
    with np.errstate(over="raise"):
        try:
            return array.astype(np.float32)
        except FloatingPointError:
            raise ValueError("its layers have numbers too large for float32") from None


def is_defender_file(path: str | Path) -> bool:
    """Return whether a file looks like one that `save_defender` wrote."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {"format.npy", "weight0.npy"} <= set(archive.namelist())
    except Exception:  # whatever reading a file of unknown origin leads to
        return False
