"""Policies from files that `examples/ppo.py` saves; run by NumPy, so torch is not needed."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from vecenv.cage.actions import blue_actions
from vecenv.cage.kernels import OBSERVATIONS, observation_space
from vecenv.cage.scenario import Scenario
from vecenv.cage.torch_file import read_torch_file

__all__ = ["SavedPolicy", "load_policy"]

_MAX_INPUT = 10.0  # normalised inputs are clipped here


class SavedPolicy:
    """The most likely actions of a trained network with tanh layers.

    Args:
        layers: Weights float32 (a, b) and biases (b,) of each layer.
        scale: Mean and standard deviation of the inputs, float32 (inputs,) each, or None.
        observation: What it was trained on, "bits" or "extended".
    """

    def __init__(
        self,
        layers: list[tuple[np.ndarray, np.ndarray]],
        scale: tuple[np.ndarray, np.ndarray] | None,
        observation: str,
    ) -> None:
        self._layers = layers
        self._scale = scale
        self.observation = observation

    def act(self, obs: np.ndarray, alerts: np.ndarray, /) -> np.ndarray:
        """Choose the most likely action, int64 (N,), for each of obs (N, inputs)."""
        x = obs.astype(np.float32)
        if self._scale is not None:
            mean, std = self._scale
            x = ((x - mean) / std).clip(-_MAX_INPUT, _MAX_INPUT)
        for number, (weight, bias) in enumerate(self._layers):
            x = (np.tanh(x) if number else x) @ weight + bias
        return x.argmax(axis=1)

    def reset(self) -> None:
        """Do nothing: it remembers nothing."""


def load_policy(path: str | Path, scenario: Scenario) -> SavedPolicy:
    """Read a policy that `examples/ppo.py` has saved.

    Args:
        path: The file.
        scenario: What it is to play in.

    Raises:
        ValueError: The file holds something else, or a policy for another env.
        OSError: The file can't be read.
    """
    try:
        saved = read_torch_file(path)
        actor, *_, moments = saved["tensors"]
        hidden, normalize = _read_kind(saved["kind"])
        _, mean, std = moments[:, :-1]  # the last column is about returns
        num_inputs = len(mean)
        layers = _layers(actor, (num_inputs, *hidden))
        scale = (mean, std) if normalize else None
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is no policy saved by examples/ppo.py: {error}") from error
    num_actions = layers[-1][1].size
    shapes = {observation_space(scenario, name).shape: name for name in OBSERVATIONS}
    if (num_inputs,) not in shapes or num_actions != len(blue_actions(scenario)):
        raise ValueError(
            f"{path} is a policy for {num_inputs} inputs and {num_actions} actions, expected "
            f"{' or '.join(str(shape[0]) for shape in shapes)} inputs and "
            f"{len(blue_actions(scenario))} actions: it was trained in another env"
        )
    return SavedPolicy(layers, scale, shapes[num_inputs,])


def _read_kind(kind: str) -> tuple[tuple[int, ...], bool]:
    """Return the numbers of hidden units, and whether inputs are normalised."""
    found = re.search(r"hidden \(([\d, ]*)\), normalize (True|False)$", kind)
    if found is None:
        raise ValueError(f"its kind is {kind!r}, expected '..., hidden (...), normalize ...'")
    hidden = tuple(map(int, re.findall(r"\d+", found[1])))
    return hidden, found[2] == "True"


def _layers(vector: np.ndarray, widths: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Cut a vector into the weights and biases of layers; what is left over is the last one's."""
    sizes = [(a + 1) * b for a, b in pairwise(widths)]
    *parts, last = np.split(vector, np.cumsum(sizes))
    matrices: list[Any] = [part.reshape(a + 1, -1) for part, a in zip(parts, widths, strict=False)]
    matrices.append(last.reshape(widths[-1] + 1, -1))
    return [(matrix[:-1], matrix[-1]) for matrix in matrices]
