"""Models of stable-baselines3 and sb3-contrib, from their files; these libraries run them."""

from __future__ import annotations

import importlib
import json
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_STATISTICS = "vecnormalize.pkl"  # usual file name among stable-baselines3's users


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
    if Path(path).suffix.lower() != ".zip" or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return {"data", "policy.pth"} <= set(archive.namelist())


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


# Logged or printed about a model, whose path it takes.
WITHOUT_STATISTICS = (
    "no vecnormalize.pkl is beside %s: it is given observations as they are, which is wrong if it "
    "was trained under VecNormalize; name the file by vecnormalize (--vecnormalize)"
)


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
    normalized = _load_vecnormalize(statistics, model) if statistics else lambda obs: obs
    return SB3Model(model, name == "MaskablePPO", normalized)


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


def _sb3_algorithm(path: str | Path) -> tuple[str, str]:
    """Return the names of the library and class that wrote a file."""
    try:
        with zipfile.ZipFile(path) as archive:
            settings = json.loads(archive.read("data"))
        module = str(settings["policy_class"]["__module__"])
    except Exception as error:  # whatever reading a file of unknown origin leads to
        raise ValueError(f"{path} is no model that stable-baselines3 saved: {error}") from error
    for library, name, kind, sign in _SB3_SIGNS:
        if module.startswith(sign) if kind == "module" else sign in settings:
            marks = settings.get("policy_delay"), settings.get("target_noise_clip")
            return library, "DDPG" if name == "TD3" and marks == (1, 0) else name
    raise ValueError(
        f"{path} is a model with a policy of {module}, expected one of "
        f"{', '.join(name for _, name, _, _ in _SB3_SIGNS)}"
    )
