"""File formats of trained policies, for any challenge.

Networks are saved by `save_network` in one format and are run by NumPy, without torch. Models of
stable-baselines3 are run by stable-baselines3.
"""

from __future__ import annotations

import importlib
import json
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vecenv.files import load_arrays, save_arrays

__all__ = [
    "Layers", "Network", "SB3Model", "find_vecnormalize", "is_sb3_file", "load_network",
    "load_sb3_model", "save_network", "softmax",
]  # fmt: skip

Layers = Sequence[tuple[np.ndarray, np.ndarray]]

_MAX_INPUT = 10.0  # normalised inputs are clipped here
_STATISTICS = "vecnormalize.pkl"  # usual file name among stable-baselines3's users
_MAX_SETTINGS = 1 << 24  # bytes of stable-baselines3's settings, pickled values included


class Network:
    """A network with tanh layers.

    Args:
        layers: Weights float32 (a, b) and biases (b,) of each layer, not copied.
        scale: Mean and standard deviation that normalise the inputs, float32 (inputs,) each; None
            for no normalisation.
        made_for: Identity of the scenario that it was trained in, see `vecenv.cage.identity`; None
            if unknown.

    Raises:
        ValueError: The shapes of the layers do not match each other.

    Attributes:
        num_inputs: Length of a row of inputs.
        num_outputs: Length of a row of outputs.
    """

    def __init__(
        self,
        layers: Layers,
        scale: tuple[np.ndarray, np.ndarray] | None = None,
        made_for: Mapping[str, Any] | None = None,
    ) -> None:
        self.layers = list(layers)
        self.scale = scale
        self.made_for = made_for
        shapes = [(weight.shape, bias.shape) for weight, bias in self.layers]
        widths = [weight[0] for weight, _ in shapes] + [bias[0] for _, bias in shapes[-1:]]
        if not shapes or shapes != [((a, b), (b,)) for a, b in pairwise(widths)]:
            raise ValueError(f"layers of shapes {shapes!s:.999} do not fit each other")
        self.num_inputs, self.num_outputs = widths[0], widths[-1]
        if scale is not None and not all(x.shape == (self.num_inputs,) for x in scale):
            raise ValueError(f"the scale is not of {self.num_inputs} inputs")

    def outputs(self, inputs: np.ndarray) -> np.ndarray:
        """Return (N, outputs) for inputs (N, inputs)."""
        x = inputs.astype(np.float32, copy=False)
        if self.scale is not None:
            mean, std = self.scale
            x = ((x - mean) / std).clip(-_MAX_INPUT, _MAX_INPUT)
        for number, (weight, bias) in enumerate(self.layers):
            x = (np.tanh(x) if number else x) @ weight + bias
        return x


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities float32 (N, A) of logits (N, A)."""
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


def save_network(
    path: str | Path,
    layers: Layers,
    *,
    scale: tuple[Any, Any] | None = None,
    made_for: Mapping[str, Any] | None = None,
    **facts: Any,
) -> None:
    """Write a network as `vecenv.files.save_arrays` does: an npz archive without pickles.

    Args:
        path: File to write; no ending is added.
        layers: As for `Network`; float16 is allowed too, and is read as float32.
        scale: As for `Network`.
        made_for: As for `Network`.
        **facts: Other values to save, such as the number of training steps.
    """
    pairs = [list(pair) for pair in layers]
    save_arrays(path, {**facts, "layers": pairs, "scale": scale, "made_for": made_for})


def load_network(path: str | Path) -> Network:
    """Read a network that `save_network` wrote.

    Raises:
        ValueError: The file does not hold such a network.
        OSError: The file can't be read.
    """
    try:
        return _network(load_arrays(path))
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no saved policy: {error!s:.999}") from error


def _network(saved: Mapping[str, Any]) -> Network:
    scale = saved["scale"]
    if scale is not None:
        mean, std = (_numbers(row, 1) for row in scale)
        if not std.min(initial=1.0) > 0:
            raise ValueError("the scale has a standard deviation that is not positive")
        scale = mean, std
    layers = [(_numbers(weight, 2), _numbers(bias, 1)) for weight, bias in saved["layers"]]
    return Network(layers, scale, saved.get("made_for"))


def _numbers(array: Any, ndim: int) -> np.ndarray:
    """Return an array of floats as float32; raise ValueError if it is no finite float array."""
    if not isinstance(array, np.ndarray) or array.ndim != ndim or array.dtype.kind != "f":
        raise ValueError("its arrays are others than those of a network")
    with np.errstate(over="ignore"):
        numbers = array.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise ValueError("its numbers are not finite")
    return numbers


def _names_in(path: str | Path) -> list[str]:
    """Return the member names of a zip archive, or [] for any other file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except Exception:  # whatever reading a file of unknown origin leads to
        return []


class SB3Model(NamedTuple):
    """A model of stable-baselines3, or of sb3-contrib.

    Attributes:
        model: The model.
        uses_masks: Whether its `predict` takes `action_masks`.
        normalized: Converts arrays of the env's observations to those that the model expects.
    """

    model: Any
    uses_masks: bool
    normalized: Callable[[Any], Any]


# A file does not name the algorithm that wrote it, but each algorithm saves a setting or a module
# that the ones below it lack. The list is searched from the top.
_SB3_SIGNS = (
    ("sb3_contrib", "MaskablePPO", "module", "sb3_contrib.common.maskable"),
    ("sb3_contrib", "RecurrentPPO", "module", "sb3_contrib.common.recurrent"),
    ("sb3_contrib", "QRDQN", "module", "sb3_contrib.qrdqn"),
    ("sb3_contrib", "TRPO", "setting", "cg_max_steps"),
    ("sb3_contrib", "ARS", "setting", "n_delta"),
    ("stable_baselines3", "DQN", "setting", "exploration_fraction"),
    ("stable_baselines3", "SAC", "setting", "target_entropy"),
    ("stable_baselines3", "TD3", "setting", "target_policy_noise"),  # or DDPG, see below
    ("stable_baselines3", "PPO", "setting", "clip_range"),
    ("stable_baselines3", "A2C", "setting", "gae_lambda"),
)


def is_sb3_file(path: str | Path) -> bool:
    """Return whether a file looks like one that stable-baselines3's `save` wrote.

    The name must end in .zip, which `save` adds: models with other names are never unpickled.
    """
    is_named = Path(path).suffix.lower() == ".zip"
    return is_named and {"data", "policy.pth"} <= set(_names_in(path))


def find_vecnormalize(path: str | Path) -> Path | None:
    """Return the file of a model's `VecNormalize` statistics if it has a usual place, else None.

    Usual places: `vecnormalize.pkl` beside the model or in a folder of its name (RL Zoo);
    `rl_model_vecnormalize_1000_steps.pkl` beside `CheckpointCallback`'s checkpoint
    `rl_model_1000_steps.zip`.
    """
    path = Path(path)
    names = [f"{path.stem}/{_STATISTICS}", _STATISTICS]
    if found := re.fullmatch(r"(.*)_(\d+_steps)", path.stem):
        names.insert(0, f"{found[1]}_vecnormalize_{found[2]}.pkl")
    return next((file for name in names if (file := path.parent / name).is_file()), None)


def load_sb3_model(path: str | Path, vecnormalize: str | Path | None = None) -> SB3Model:
    """Read a model that stable-baselines3 or sb3-contrib has saved, onto the CPU.

    Models and statistics are unpickled, so these files can run code: read only files that you
    trust.

    Args:
        path: File of the model.
        vecnormalize: File of the statistics that normalise its observations, written by
            `VecNormalize.save`; None searches for it, see `find_vecnormalize`.

    Raises:
        ValueError: A file holds something else, or the statistics have another observation shape.
        ModuleNotFoundError: The library is not installed.
    """
    library, name = _sb3_algorithm(path)
    try:
        module = importlib.import_module(library)
    except ModuleNotFoundError as error:
        if error.name != library:
            raise  # a dependency of the library is missing
        extra = "'vecenv[sb3]'" if library == "stable_baselines3" else "sb3-contrib"
        raise ModuleNotFoundError(
            f"{path} is a {name} model of {library}, which is not installed: pip install {extra}",
            name=error.name,
        ) from None
    model = getattr(module, name).load(path, device="cpu")
    statistics = vecnormalize or find_vecnormalize(path)
    normalized = _as_it_is if statistics is None else _load_vecnormalize(statistics, model)
    return SB3Model(model, name == "MaskablePPO", normalized)


def _as_it_is(obs: Any) -> Any:
    return obs


def _load_vecnormalize(path: str | Path, model: Any) -> Callable[[Any], Any]:
    """Return the function that normalises observations by the statistics in a file."""
    try:
        with Path(path).open("rb") as stream:
            found = pickle.load(stream)
    except OSError:
        raise
    except Exception as error:  # whatever reading a file of unknown origin leads to
        raise ValueError(f"{path} is no pickle of VecNormalize: {error!s:.200}") from error
    if type(found).__name__ != "VecNormalize":
        raise ValueError(f"{path} holds {type(found).__name__}, expected a VecNormalize")
    theirs, own = (str(x.observation_space.shape) for x in (found, model))
    if theirs != own:
        raise ValueError(f"{path} is of observations of shape {theirs}, the model's are of {own}")
    return found.normalize_obs


def _is_ddpg(settings: Mapping[str, Any]) -> bool:
    """Return whether TD3 settings have the values that stable-baselines3's DDPG sets."""
    return settings.get("policy_delay") == 1 and settings.get("target_noise_clip") == 0


def _sb3_algorithm(path: str | Path) -> tuple[str, str]:
    """Return the names of the library and class that wrote a file."""
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
            return library, "DDPG" if name == "TD3" and _is_ddpg(settings) else name
    raise ValueError(
        f"{path} is a model with a policy of {module}, expected one of "
        f"{', '.join(name for _, name, _, _ in _SB3_SIGNS)}"
    )
