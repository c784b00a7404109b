"""The trainers of `vecenv train` and `play`: modules of `vecenv.train`, or users' files.

Both have the same parts:

- `Options`, a dataclass with the field `env_id` (or `env`), and, if it has them, `save`, the folder
  of the run, and `resume`;
- `main(options)`, which trains;
- for `vecenv play`, `load_policy(options, num_envs)`: it returns envs, and a function from
  observations, and where episodes begin, to actions. For several agents these are an
  `AgentsVecEnv`, and dicts by group. If `Options` lacks `env_kwargs`, it gets them as keywords.

For each trainer there is an example to copy and change; for some envs, the zoo has settings and a
policy. They lie in `examples/` of a checkout; a wheel has copies in `vecenv/examples/`.

Only `load` imports torch, by the modules that it loads.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import gymnasium as gym
from gymnasium.spaces import Box, Discrete

from vecenv.files import write_text
from vecenv.source import GAMES, EnvSource, did_you_mean, is_ours, read_source

__all__ = [
    "ALGORITHMS", "OF_ENVS", "OPTIONS_FILE", "Chosen", "arguments_of", "choose", "eject",
    "env_id_of", "folder", "load", "name_of", "read_config", "require_tracker", "run_folder",
    "runs_of", "sent_to", "zoo_config", "zoo_policy",
]  # fmt: skip

# Names for `--algo`; others are files. In this order, the trainer of a run folder is recognised.
ALGORITHMS = ("ppo", "sac", "dqn", "r2d2", "ppo_agents", "cage2_defender", "cage4_defender")
_EXAMPLES = {"cage2_defender": "cage2"}  # names of trainers' examples, where they differ
OF_ENVS = {"Cage2-v0": "cage2_defender", "Cage4-v0": "cage4_defender"}
OPTIONS_FILE = "options.json"  # in a run folder, see vecenv.learn.Run


class Chosen(NamedTuple):
    """A trainer for an env.

    Attributes:
        algorithm: A name of `ALGORITHMS`, or a file.
        env: The env in its options: an id, or the argument of `make_vec_agents`.
        reason: Why it was chosen, a sentence.
    """

    algorithm: str
    env: str
    reason: str


def folder() -> Path:
    """Return the folder of the examples: in the package (wheel), or beside it (checkout)."""
    package = Path(__file__).parents[1]
    for found in (package / "examples", package.parent / "examples"):
        if (found / "ppo.py").is_file():
            return found
    raise FileNotFoundError(f"no examples are in {package} or beside it; install vecenv anew")


def path_of(algorithm: str) -> Path:
    """Return the file of a user's trainer, or the example of a bundled one."""
    if algorithm.endswith(".py"):
        path = Path(algorithm).resolve()
        if not path.is_file():
            raise FileNotFoundError(f"algo is {algorithm!r}, but there is no such file")
        return path
    if algorithm not in ALGORITHMS:
        told = did_you_mean(algorithm, ALGORITHMS) or "of your own it is a file, my.py"
        raise ValueError(f"algo is {algorithm!r}, expected one of {', '.join(ALGORITHMS)}; {told}")
    return folder() / f"{_EXAMPLES.get(algorithm, algorithm)}.py"


def load(name: str) -> ModuleType:
    """Import a trainer by its name, or from a file of the same form.

    Meanwhile the file's folder is first in `sys.path`, as for a script; afterwards it is last.
    """
    try:
        if name in ALGORITHMS:
            return importlib.import_module(f"vecenv.train.{name}")
        return _load_file(path_of(name))
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "matplotlib", "PIL"):
            raise
        raise ModuleNotFoundError(
            f"{Path(name).stem} needs {error.name}, which is not installed: pip install "
            '"vecenv[train]"',
            name=error.name,
        ) from None


def _load_file(path: Path) -> ModuleType:
    here = str(path.parent)
    sys.path.insert(0, here)
    try:
        module = importlib.import_module(path.stem)
    finally:
        sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)  # for envs beside the file
    found = Path(module.__file__ or "").resolve()
    if found != path:
        raise ValueError(f"{path} is named like {found}, which is imported already: rename it")
    if missing := [name for name in ("Options", "main") if not hasattr(module, name)]:
        raise ValueError(
            f"{path} is no trainer: it has no {missing[0]}; expected a dataclass Options (Args in "
            "CleanRL's scripts) and a function main(options). --eject writes a file to change"
        )
    return module


def name_of(module: ModuleType) -> str:
    """Return the name of a trainer: one of `ALGORITHMS`, or a file's name without ending."""
    return module.__name__.rpartition(".")[2]


def env_id_of(source: EnvSource) -> str:
    """Return the argument of `make_vec` for an env."""
    if source.spec is None:
        return source.name
    module, colon, _ = source.name.rpartition(":")
    # Another module may have registered one of our envs under its own id.
    if module in ("", "vecenv") and is_ours(gym.registry.get(source.spec.id)):
        return f"vecenv:{source.spec.id}"
    return f"{module}{colon}{source.spec.id}"


def choose(
    env: str, algorithm: str | None = None, env_kwargs: Mapping[str, Any] | None = None
) -> Chosen:
    """Choose a trainer that fits the spaces of an env.

    Args:
        env: Registered id, also "module:id", "module:name" of a factory or of `EnvKernels`, or
            "agents:NAME".
        algorithm: One of `ALGORITHMS`, or a file; None chooses.
        env_kwargs: For the env.
    """
    if algorithm is not None:
        path_of(algorithm)
    if env.startswith(GAMES):
        read_source(env)
        game = env.removeprefix(GAMES)
        return Chosen(algorithm or "ppo_agents", game, "it is a game with several agents")
    source = read_source(env)
    env_id = env_id_of(source)
    if algorithm is not None:
        return Chosen(algorithm, env_id, "given by --algo")
    if (own := OF_ENVS.get(env_id.rpartition(":")[2])) is not None:
        return Chosen(own, env_id, "the env has a trainer of its own")
    with closing(source.make(1, **(env_kwargs or {}))) as envs:
        obs_space, action_space = envs.single_observation_space, envs.single_action_space
    is_bounded = False
    if isinstance(action_space, Box) and len(action_space.shape) == 1:
        is_bounded = action_space.dtype.kind == "f" and action_space.is_bounded()
    obs_axes = len(obs_space.shape) if isinstance(obs_space, Box) else 0
    if is_bounded and obs_axes in (1, 2):
        return Chosen("sac", env_id, f"actions are {action_space}")
    if isinstance(action_space, Discrete) and obs_axes == 3:
        reason = f"observations are pictures {obs_space.shape}, actions {action_space}"
        return Chosen("dqn", env_id, reason)
    return Chosen("ppo", env_id, f"actions are {action_space}")


def _file_name(env: str) -> str:
    return env.rpartition(":")[2].replace("/", "-")


def zoo_config(env: str) -> Path:
    """Return the file of the zoo's settings for an env, for `--config zoo`; see `zoo_policy`."""
    return _in_zoo(env, "settings", "{}.toml")


def zoo_policy(env: str) -> Path:
    """Return the zoo's policy for an env, a folder like that of a run, for `--policy zoo`."""
    return _in_zoo(env, "policy", f"{{}}/{OPTIONS_FILE}").parent


def _in_zoo(env: str, kind: str, pattern: str) -> Path:
    zoo, name = folder() / "zoo", _file_name(env)
    if (path := zoo / pattern.format(name)).is_file():
        return path
    found = [str(file.relative_to(zoo)) for file in zoo.glob(pattern.format("*"))]
    names = [file.removesuffix(".toml").partition("/")[0] for file in found]
    told = did_you_mean(name, names) or f"it has {', '.join(sorted(names))}"
    raise ValueError(f"the zoo has no {kind} for {name}; {told}")


def read_config(config: Path) -> dict[str, Any]:
    """Read a file of options; names are as in a trainer's dataclass.

    Args:
        config: .toml or .json, such as `options.json` of a run folder. `algo` in it is as --algo.
    """
    try:
        text = config.read_text(encoding="utf-8")
        values = tomllib.loads(text) if config.suffix == ".toml" else json.loads(text)
        if not isinstance(values, dict) or not isinstance(values.get("algo", ""), str):
            raise ValueError("expected names and values, of algo a name")
        values = {name.replace("-", "_"): value for name, value in values.items()}
    except (OSError, ValueError) as error:
        told = getattr(error, "strerror", None) or f"{error!s:.200}"
        raise (type(error) if isinstance(error, OSError) else ValueError)(
            f"config is {str(config)!r}, which can't be read ({told}); expected options in TOML "
            '(.toml) or JSON, or "zoo" for the bundled ones'
        ) from None
    return values


def arguments_of(values: Mapping[str, Any], kind: type, config: Path) -> list[str]:
    """Return options as command line arguments, which are then read in the usual way.

    Args:
        values: What `read_config` returned.
        kind: The dataclass.
        config: The file, for messages.
    """
    names = [field.name for field in dataclasses.fields(kind)]
    found: list[str] = []
    for name, value in values.items():
        if name == "algo":
            continue
        if name not in names:
            told = did_you_mean(name, names) or "--help lists the options"
            raise ValueError(f"{config} has the option {name!r}, which there is not; {told}")
        if name in ("save", "resume", "overwrite", "env_id", "env"):
            continue  # belongs to that run
        found += _as_arguments(name.replace("_", "-"), value)
    return found


def _as_arguments(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, Mapping):
        return [f"--{name}", *(str(word) for pair in value.items() for word in pair)]
    if isinstance(value, list | tuple):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]


def run_folder(env: str, algorithm: str) -> Path:
    """Return the folder where `vecenv train` saves by default."""
    return Path("runs", f"{_file_name(env)}-{Path(algorithm).stem}")


def runs_of(env: str) -> list[Path]:
    """Return the default folders of `vecenv train` that have a policy for an env."""
    checkpoints = Path("runs").glob(f"{_file_name(env)}-*/checkpoint/last.pt")
    return sorted(path.parents[1] for path in checkpoints)


def require_tracker(tracker: str, algorithm: str, options: Any) -> None:
    """Raise ModuleNotFoundError if a tracker is missing, ValueError if a trainer writes no scalars.

    `options` is the dataclass of the trainer.
    """
    if "tensorboard" not in {field.name for field in dataclasses.fields(options)}:
        raise ValueError(f"{algorithm} has no option tensorboard, which --track {tracker} needs")
    for name in {"tensorboard", tracker}:  # W&B reads TensorBoard's files
        if find_spec(name) is None:
            told = f"--track {tracker} needs {name}, which is not installed: pip install {name}"
            raise ModuleNotFoundError(told, name=name)


@contextmanager
def sent_to(tracker: str | None, options: Any) -> Iterator[None]:
    """Send TensorBoard's data to W&B, too; a resumed run continues the same W&B run."""
    if tracker != "wandb":
        yield
        return
    wandb: Any = importlib.import_module("wandb")
    options.save.mkdir(parents=True, exist_ok=True)
    note, folder = options.save / "wandb_id", str(options.save)
    kept = note.read_text().strip() if options.resume and note.exists() else None
    run_options = {"id": kept, "resume": "allow", "dir": folder, "sync_tensorboard": True}
    settings = {name: str(value) for name, value in dataclasses.asdict(options).items()}
    name = options.save.name
    with wandb.init(project="vecenv", name=name, config=settings, **run_options) as run:
        write_text(note, run.id)
        yield


def eject(algorithm: str, target: Path) -> Path:
    """Copy the example of a trainer into a folder, to change it; return the copy."""
    path = path_of(algorithm)
    copy = target / path.name
    if copy.exists():
        raise FileExistsError(f"{copy}: there already; choose another folder")
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, copy)
    return copy
