"""Policies from files.

Those of `examples/ppo.py` are run by NumPy, so torch is not needed; those of stable-baselines3 by
itself.
"""

from __future__ import annotations

import importlib
import json
import re
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from vecenv.cage.challenge2.kernels import OBSERVATIONS, observation_space
from vecenv.cage.challenge2.network.actions import blue_actions
from vecenv.cage.challenge2.network.scenario import Scenario, warn_of_other
from vecenv.files import load_arrays

__all__ = ["SavedPolicy", "is_sb3_file", "load_policy", "load_sb3_policy"]

_MAX_INPUT = 10.0  # normalised inputs are clipped here
_MAX_SETTINGS = 1 << 24  # bytes of the settings of stable-baselines3, with what it pickled in them


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

    Warns if it was trained in another scenario, or under other rules, in which it can play too.

    Args:
        path: The file.
        scenario: What it is to play in.

    Raises:
        ValueError: The file holds something else, or a policy for another env.
        OSError: The file can't be read.
    """
    if _is_torch_file(path):
        raise ValueError(
            f"{path} is a file of torch, as examples/ppo.py saved policies before; convert it: "
            f"python examples/convert_policy.py {path}"
        )
    try:
        saved = load_arrays(path)
        actor, *_, moments = saved["tensors"]
        hidden, normalize = _read_kind(saved["kind"])
        _, mean, std = _floats(moments, 2)[:, :-1]  # the last column is about returns
        num_inputs = len(mean)
        layers = _layers(_floats(actor, 1), (num_inputs, *hidden))
        scale = (mean, std) if normalize else None
        made_for = saved.get("made_for")
        if not normalize:
            std = np.ones_like(std)
        if not (std.min(initial=1.0) > 0 and all(map(_are_finite, (mean, std, *sum(layers, ()))))):
            raise ValueError("its numbers are not finite")
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is no policy saved by examples/ppo.py: {error}") from error
    wanted = _observation_of(path, (num_inputs,), layers[-1][1].size, scenario)
    if isinstance(made_for, dict) and all(isinstance(v, str | int) for v in made_for.values()):
        warn_of_other(Path(path).name, made_for, scenario)
    return SavedPolicy(layers, scale, wanted)


def _floats(array: Any, ndim: int) -> np.ndarray:
    if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.ndim != ndim:
        raise ValueError("its tensors are others than those of a policy")
    return array


def _are_finite(array: np.ndarray) -> bool:
    return bool(np.isfinite(array).all())


def _is_torch_file(path: str | Path) -> bool:
    """Return whether a file looks like one that `torch.save` wrote."""
    return any(name.endswith("data.pkl") for name in _names_in(path))


def _names_in(path: str | Path) -> list[str]:
    """Names of the parts of a zip archive; none of any other file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except Exception:  # whatever reading a file of unknown origin leads to
        return []


def _observation_of(path: Any, shape: Any, num_actions: Any, scenario: Scenario) -> str:
    """Return the name of the observation that a network takes; refuse that of another env.

    Args:
        path: Its file.
        shape: Of its inputs.
        num_actions: What it chooses from; None if that isn't counted.
        scenario: What it is to play in.

    Raises:
        ValueError: See above.
    """
    shapes = {observation_space(scenario, name).shape: name for name in OBSERVATIONS}
    if shape not in shapes or num_actions != len(blue_actions(scenario)):
        inputs = shape[0] if shape is not None and len(shape) == 1 else shape
        raise ValueError(
            f"{path} is a policy for {inputs} inputs and {num_actions} actions, expected "
            f"{' or '.join(str(known[0]) for known in shapes)} inputs and "
            f"{len(blue_actions(scenario))} actions: it was trained in another env"
        )
    return shapes[shape]


def _read_kind(kind: str) -> tuple[tuple[int, ...], bool]:
    """Return the numbers of hidden units, and whether inputs are normalised."""
    found = re.search(r"hidden \(((?:[0-9]{1,7}[, ]*){0,99})\), normalize (True|False)$", kind)
    if found is None:
        raise ValueError(f"its kind is {kind!r:.999}, expected '..., hidden (...), normalize ...'")
    hidden = tuple(map(int, re.findall(r"\d+", found[1])))
    return hidden, found[2] == "True"


def _layers(vector: np.ndarray, widths: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Cut a vector into the weights and biases of layers; what is left over is the last one's."""
    shapes = [(a + 1, b) for a, b in pairwise(widths)]
    begin, matrices = 0, []
    for shape in shapes:
        size = shape[0] * shape[1]
        matrices.append(vector[begin : begin + size].reshape(shape))
        begin += size
    matrices.append(vector[begin:].reshape(widths[-1] + 1, -1))
    return [(matrix[:-1], matrix[-1]) for matrix in matrices]


class SB3Policy:
    """A model of stable-baselines3, or of sb3-contrib, that plays its most likely actions.

    Args:
        model: What `predict`s.
        observation: What it was trained on, "bits" or "extended".
        uses_masks: Whether `predict` takes `action_masks`.
    """

    def __init__(self, model: Any, observation: str, *, uses_masks: bool) -> None:
        self._model = model
        self.observation = observation
        self.uses_masks = uses_masks
        self._is_recurrent = "lstm" in type(model.policy).__name__.lower()
        self._state: Any = None
        self._begins = True

    def act(self, obs: np.ndarray, alerts: np.ndarray, masks: Any = None, /) -> np.ndarray:
        """Choose actions, int64 (N,), for obs (N, inputs)."""
        options: dict[str, Any] = {"action_masks": masks} if self.uses_masks else {}
        if self._is_recurrent:
            options |= {"state": self._state, "episode_start": np.full(len(obs), self._begins)}
        actions, self._state = self._model.predict(obs, deterministic=True, **options)
        self._begins = False
        return actions

    def reset(self) -> None:
        """Begin new episodes in all envs."""
        self._state, self._begins = None, True


# By which algorithm a file was written stands in no word of it, but each keeps a setting of its own
# that the others lack; looked for from the top.
_SB3_SIGNS = (
    ("sb3_contrib", "MaskablePPO", "module", "sb3_contrib.common.maskable"),
    ("sb3_contrib", "RecurrentPPO", "module", "sb3_contrib.common.recurrent"),
    ("sb3_contrib", "QRDQN", "module", "sb3_contrib.qrdqn"),
    ("sb3_contrib", "TRPO", "setting", "cg_max_steps"),
    ("sb3_contrib", "ARS", "setting", "n_delta"),
    ("stable_baselines3", "DQN", "setting", "exploration_fraction"),
    ("stable_baselines3", "PPO", "setting", "clip_range"),
    ("stable_baselines3", "A2C", "setting", "gae_lambda"),
)


def is_sb3_file(path: str | Path) -> bool:
    """Return whether a file looks like one that stable-baselines3's `save` wrote.

    Its name has to end in .zip, as that library sees to: no file of another name can run code.
    """
    is_named = Path(path).suffix.lower() == ".zip"
    return is_named and {"data", "policy.pth"} <= set(_names_in(path))


def load_sb3_policy(path: str | Path, scenario: Scenario) -> SB3Policy:
    """Read a model that stable-baselines3 or sb3-contrib has saved; on the CPU.

    They unpickle what is in it: a file of theirs can run code, so read only those that you trust.

    Args:
        path: The file.
        scenario: What it is to play in.

    Raises:
        ValueError: The model is for another env, or of an algorithm without discrete actions.
        ModuleNotFoundError: The library is not installed.
    """
    library, name = _sb3_algorithm(path)
    try:
        module = importlib.import_module(library)
    except ModuleNotFoundError as error:
        if error.name != library:
            raise  # something that the library needs
        extra = "'vecenv[sb3]'" if library == "stable_baselines3" else "sb3-contrib"
        raise ModuleNotFoundError(
            f"{path} is a {name} model of {library}, which is not installed: pip install {extra}",
            name=error.name,
        ) from None
    model = getattr(module, name).load(path, device="cpu")
    num_actions = getattr(model.action_space, "n", None)
    wanted = _observation_of(path, model.observation_space.shape, num_actions, scenario)
    return SB3Policy(model, wanted, uses_masks=name == "MaskablePPO")


def _sb3_algorithm(path: str | Path) -> tuple[str, str]:
    """Return the library and the class that wrote a file."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open("data") as stream:
            text = stream.read(_MAX_SETTINGS + 1)
        if len(text) > _MAX_SETTINGS:
            raise ValueError(f"its settings have more than {_MAX_SETTINGS} bytes")
        settings = json.loads(text)
        module = str(settings["policy_class"]["__module__"])
    except Exception as error:  # whatever reading a file of unknown origin leads to
        raise ValueError(f"{path} is no model that stable-baselines3 saved: {error}") from error
    for library, name, kind, sign in _SB3_SIGNS:
        if module.startswith(sign) if kind == "module" else sign in settings:
            return library, name
    raise ValueError(
        f"{path} is a model with a policy of {module}, expected one of an algorithm for discrete "
        f"actions: {', '.join(name for _, name, _, _ in _SB3_SIGNS)}"
    )
