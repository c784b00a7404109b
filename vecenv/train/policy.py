"""Policies of run folders as functions of observations, without envs: `vecenv.load_policy`."""

from __future__ import annotations

import inspect
import logging
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Discrete, MultiBinary, MultiDiscrete, Space

from buffers.core.arguments import tree_leaves
from buffers.core.spaces import build_tree, describe_space, space_leaves, space_of
from vecenv.cage.saved import WITHOUT_STATISTICS, find_vecnormalize, is_sb3_file, load_sb3_model
from vecenv.core.masks import allow_something, mask_starts, mask_width
from vecenv.core.spaces import leaf_by_leaf
from vecenv.learn import load_checkpoint, load_options
from vecenv.learn.run import save_checkpoint
from vecenv.train.options import OptionsError

__all__ = ["Policy", "load_policy", "save_spaces", "sb3_player"]

POLICY_FILE = "policy.pt"  # in a run folder: what `load_policy` needs besides options and weights
SHIPPED, LAST = (POLICY_FILE, "options.json"), "checkpoint/last.pt"
LIBRARY = "vecenv.train."
_logger = logging.getLogger("vecenv")


class Policy:
    """A trained policy: a function from arrays of observations to arrays of actions.

    `policy(obs)` is deterministic. A recurrent policy keeps a memory for each row of the batch;
    `starts` says where episodes begin. `observation_space` and `action_space` are those of one env;
    `name` gives trainer and env.
    """

    _make: Any = None  # returns a function that plays `num_envs` envs

    def __init__(self, observation_space: Space, action_space: Space, name: str) -> None:
        self.observation_space = self.single_observation_space = observation_space
        # With these names, a policy replaces a vector env in code that only reads spaces and masks.
        self.action_space: Any = action_space
        self.single_action_space: Any = action_space
        self.has_action_masks = isinstance(action_space, Discrete | MultiDiscrete | MultiBinary)
        self.name, self.num_envs, self.has_memory, self.wants_masks = name, 1, False, False
        self._act: Any = None

    def reset(self) -> None:
        """Forget all memory: the next observations begin episodes."""
        self._act = None

    def __call__(
        self, obs: Any, masks: Any = None, starts: Any = None, *, sample: bool = False
    ) -> np.ndarray:
        """Return actions (N, *action_shape); for a single observation, one action without N.

        Args:
            obs: Observations (N, *obs_shape), nested like the space; or a single one, without N.
            masks: Allowed actions (N, A), or (A,), 1 and 0 as in `action_masks()`. None allows all;
                the log says so once if the training had masks.
            starts: Where an episode begins with this observation, bool (N,), or one bool. None:
                everywhere in the first call and after `reset`, then nowhere.
            sample: Draw actions, from torch's global generator, instead of taking the likeliest
                ones; TypeError if the policy has no probabilities.

        Raises:
            ValueError: A shape or dtype does not fit, a row of the masks allows nothing, or N has
                changed although the policy has a memory and `starts` is not all True.
        """
        x, count, is_one = _read(self.observation_space, obs)
        is_new = self._act is None
        begins = np.broadcast_to(is_new if starts is None else np.asarray(starts, bool), (count,))
        if is_new or count != self.num_envs:
            if not is_new and self.has_memory and not begins.all():
                raise ValueError(
                    f"obs has {count} rows, after {self.num_envs}, of which the policy has a "
                    "memory: call reset(), or say by starts that all rows begin an episode"
                )
            self.num_envs = count
            self._act = self._make()
        self._take(masks)
        names = inspect.signature(self._act).parameters
        if sample and "sample" not in names:
            raise TypeError(f"{self.name} has values, not probabilities: leave sample out")
        given = {"starts": torch.from_numpy(begins.copy()), "sample": sample}
        actions = np.asarray(self._act(x, **{k: v for k, v in given.items() if k in names}))
        return actions[0] if is_one else actions

    def _take(self, masks: Any) -> None:
        """Keep the masks of the next call; None means all ones."""
        if not self.has_action_masks:
            if masks is not None:
                raise ValueError(f"masks are given, but {self.action_space} has none")
            return
        if masks is None and self.wants_masks:
            _logger.warning("the policy was trained with masks and is asked without: give masks=")
            self.wants_masks = False  # the log says it once
        expected = self.num_envs, mask_width(self.action_space)
        masks = np.ones(expected) if masks is None else masks
        self._masks = np.atleast_2d(np.asarray(masks, np.int8))
        if self._masks.shape != expected:
            raise ValueError(f"masks has the shape {self._masks.shape}, expected {expected}")
        if not allow_something(self._masks != 0, mask_starts(self.action_space)).all():
            raise ValueError("masks has a row that allows no action; all ones allow all")

    def __repr__(self) -> str:
        return f"<Policy {self.name}: {self.observation_space} -> {self.action_space}>"

    def action_masks(self) -> np.ndarray:
        """Return the masks (N, A) of the latest call."""
        return self._masks


def _read(space: Space, obs: Any) -> tuple[Any, int, bool]:
    """Return observations as nested tensors, their number, and whether they were a single one."""
    leaves, arrays = space_leaves(space, "obs"), []
    for (path, shape, dtype), given in zip(leaves, tree_leaves(space, obs, "obs"), strict=True):
        given = np.asarray(given.cpu() if isinstance(given, torch.Tensor) else given)
        if given.dtype.kind == "f" and dtype.kind != "f":
            raise ValueError(f"{path} is {given.dtype}, expected {dtype}, as the env returns it")
        array = np.array(given, dtype, order="C")  # a copy, because the policy may keep it
        if array.shape != shape and array.shape[1:] != shape:
            batch = ", ".join(map(str, ("N", *shape)))
            raise ValueError(f"{path} has the shape {array.shape}, expected {shape} or ({batch})")
        arrays.append(array)
    is_one = arrays[0].shape == leaves[0].shape
    tensors = [torch.from_numpy(array[None] if is_one else array) for array in arrays]
    return build_tree(space, tensors), len(tensors[0]), is_one


def load_policy(
    path: str | Path, *, code: str | Path | None = None, vecnormalize: str | Path | None = None
) -> Policy:
    """Load a trained policy as a function of observations; makes no envs.

    Args:
        path: A run folder of `vecenv train` (it needs policy.pt, options.json and
            checkpoint/last.pt), one of these files, or another checkpoint in the folder. Or a .zip
            of stable-baselines3, which can run code: load only those that you trust.
        code: The file of your subclass of a trainer, if one made the run: it is imported. The
            folder records the path, but only a file named here is ever run.
        vecnormalize: Statistics of stable-baselines3's VecNormalize for a .zip, a pickle; None for
            those beside the .zip. The log says if there are none.

    Raises:
        FileNotFoundError: There is no such run, or it has not saved anything yet.
        ValueError: It is not a run, or was made by other code than `code`.
        ImportError: stable-baselines3 is not installed.

    Two lines of a script, the second with masks if the env has them::

        policy = vecenv.load_policy("runs/CartPole-v1-ppo")
        action = policy(obs)  # or policy(obs, env.action_masks())
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}; expected a run folder of vecenv train")
    if is_sb3_file(path):
        return _load_sb3(path, vecnormalize)
    if vecnormalize is not None:
        raise ValueError(f"vecnormalize is for models of stable-baselines3, {path} is none")
    near = path, *path.parents[:2]
    home = next((p for p in near if any((p / name).is_file() for name in SHIPPED)), path)
    if missing := [name for name in SHIPPED if not (home / name).is_file()]:
        if missing == [POLICY_FILE] and not (home / LAST).is_file():
            raise FileNotFoundError(f"{home} has no policy yet: its training has saved nothing")
        told = f"a run folder of vecenv train with {', '.join(SHIPPED)} and {LAST}, or a .zip of "
        told += f"stable-baselines3; a script on Run: load_checkpoint(folder / {LAST!r})['state']"
        raise ValueError(f"{path} has no {missing[0]}, expected {told}")
    try:
        kept = load_checkpoint(home / POLICY_FILE)
        made_by, spaces = str(kept["trainer"]), kept["spaces"]
        if spaces is None:
            raise ValueError("it has no spaces of arrays: vecenv play plays policies of games")
        name = f"{made_by.removeprefix(LIBRARY)}, trained in {kept['env']}"
        policy = Policy(space_of(spaces[0]), space_of(spaces[1]), name)
        policy.wants_masks = bool(kept["masks"])
    except Exception as error:  # parts of the space may raise anything
        raise ValueError(f"{home / POLICY_FILE} can't be read: {error!s:.200}") from None
    trainer = _trainer_of(home, made_by, code)
    options = load_options(home, trainer.Options)
    options.save, options.device = home, "cpu"
    agent = trainer.make_agent(policy, options)
    load_agent(agent, path)
    policy._make = lambda: torch.inference_mode()(trainer.player(policy, agent, options))
    starts = "starts" in inspect.signature(policy._make()).parameters
    policy.has_memory = starts and getattr(agent, "memory", True) is not None
    return policy


def load_agent(agent: Any, path: Path) -> None:
    """Load the weights of a checkpoint, or of a run's last one, into an agent.

    OptionsError if they are another agent's, FileNotFoundError if there are none yet.
    """
    home = path.parent if path.name in SHIPPED else path
    file = home / LAST if home.is_dir() else path
    if not file.exists():
        raise FileNotFoundError(f"{path} has no policy yet: its training has not saved {file}")
    saved = load_checkpoint(file)
    try:
        agent.load_state_dict(saved["state"]["agent"])
    except (KeyError, RuntimeError) as error:
        told = f"{file} has weights of another agent; load it with the code and options that made "
        told += f"it (code= of load_policy, --algo of play): {' '.join(str(error).split()):.300}"
        raise OptionsError(told) from error


def _trainer_of(home: Path, made_by: str, code: str | Path | None) -> Any:
    """Return the trainer class from the module that made a run; run no code but `code`."""
    if code is not None:
        path = Path(code)
        spec = spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise FileNotFoundError(f"code is {str(code)!r}, but there is no such Python file")
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    elif made_by.startswith(LIBRARY) and made_by.removeprefix(LIBRARY).isidentifier():
        module = import_module(made_by)
    else:
        told = f"load_policy({str(home)!r}, code={made_by!r})"
        raise ValueError(f"{home} is of {made_by}, which is not run unless you name it: {told}")
    trainer = getattr(getattr(module, "load_policy", None), "__self__", None)
    if not hasattr(trainer, "player"):  # no trainer, or one whose policy plays whole games
        told = "whose policies are no functions of single observations: play them by `vecenv play`"
        raise ValueError(f"{home} is of {module.__name__}, {told}")
    return trainer


def _load_sb3(path: Path, vecnormalize: str | Path | None) -> Policy:
    """Return the policy of a model of stable-baselines3 or sb3-contrib."""
    loaded = load_sb3_model(path, vecnormalize)
    if vecnormalize is None and find_vecnormalize(path) is None:
        _logger.warning(WITHOUT_STATISTICS, path)
    model, uses_masks, _ = loaded
    name = f"{type(model).__name__} of stable-baselines3"
    policy = Policy(model.observation_space, model.action_space, name)
    policy.has_memory, policy.wants_masks = hasattr(model.policy, "lstm_actor"), uses_masks
    policy._make = lambda: sb3_player(policy, *loaded)
    return policy


def save_spaces(folder: Path, trainer: type, options: Any, envs: Any) -> None:
    """Write what `load_policy` needs besides options and weights; nothing for games."""
    module = trainer.__module__
    if not module.startswith(LIBRARY):  # a user's file
        module = str(Path(getattr(sys.modules[module], "__file__", None) or module).resolve())
    found: Any = [getattr(envs, f"single_{kind}_space", None) for kind in ("observation", "action")]
    try:
        spaces = [describe_space(space) for space in found if space_leaves(space, "obs")]
    except ValueError:
        spaces = None
    masks = getattr(options, "masks", True) and getattr(envs, "has_action_masks", False)
    kept = {"trainer": module, "env": env_of(options), "spaces": spaces, "masks": bool(masks)}
    save_checkpoint(folder / POLICY_FILE, kept)


def env_of(options: Any) -> str:
    """Return the env in a trainer's options, as the user wrote it; else the run's name."""
    return getattr(options, "env_id", None) or getattr(options, "env", None) or options.save.name


def sb3_player(envs: Any, model: Any, uses_masks: bool, normalized: Any) -> Any:
    """Return a function of observations that asks a model from `load_sb3_model`."""
    state: Any = None

    def act(obs: Any, starts: Any, *, sample: bool = False) -> np.ndarray:
        nonlocal state
        arrays = normalized(leaf_by_leaf(lambda part: part.numpy(), obs))
        given: dict[str, Any] = {"deterministic": not sample}
        if uses_masks:
            return model.predict(arrays, action_masks=envs.action_masks(), **given)[0]
        actions, state = model.predict(arrays, state, starts.numpy(), **given)
        return actions

    return act
