"""What `vecenv play` does: load a policy that was trained, play episodes, film one."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from vecenv.cage.saved import is_sb3_file, load_sb3_model
from vecenv.compare.source import EnvSource, read_source
from vecenv.make import make_vec
from vecenv.page.episode import EpisodePage, record
from vecenv.page.names import action_names
from vecenv.trainers import ALGORITHMS, env_id_of, load, make_single
from vecenv.watching import frame_of

__all__ = ["LoadedPolicy", "film", "load_policy", "play", "record_run"]

# What plays the policies of trainers that have no `load_policy`.
_ELSEWHERE = {
    "ppo_agents": "vecenv train {env} --save {home} --resume --total-steps 0 plays its games",
    "cage4_defender": "vecenv evaluate --challenge 4 --policy {home}/defender.npz scores it, "
    "vecenv watch Cage4-v0 --policy {home}/defender.npz shows it",
}
_OPTIONS_FILE = "options.json"  # of a run folder, see vecenv.learn.Run


class LoadedPolicy(NamedTuple):
    """A policy, and envs for it.

    Attributes:
        envs: A vector env, the caller's to close.
        act: A function from observations, tensors, to actions, as `vecenv.learn.evaluate` calls it.
        name: What trained it.
    """

    envs: Any
    act: Callable[..., Any]
    name: str


def play(env: str, policy: Path, episodes: int, **options: Any) -> Any:
    """Play whole episodes; return the `vecenv.learn.EvaluationResult` and what trained the policy.

    Args:
        env: See `load_policy`.
        policy: See `load_policy`.
        episodes: How many, at most 100 side by side.
        **options: `seed`, and those of `load_policy`.

    Raises:
        ValueError: See `load_policy`; or fewer than one episode.
    """
    from vecenv.learn import evaluate

    if episodes < 1:
        raise ValueError(f"episodes is {episodes}, expected at least 1")
    seed = options.pop("seed")
    loaded = load_policy(env, policy, num_envs=min(episodes, 100), **options)
    try:
        return evaluate(loaded.act, loaded.envs, episodes, seed=seed), loaded.name
    finally:
        loaded.envs.close()


def film(
    env: str, policy: Path, render_mode: str, num_frames: int, **options: Any
) -> tuple[list[Any], float]:
    """Play one episode; return what is rendered, before each action and at the end, and the fps.

    Args:
        env: See `load_policy`.
        policy: See `load_policy`.
        render_mode: "rgb_array" or "ansi".
        num_frames: The first ones are kept, at most so many.
        **options: `seed`, and those of `load_policy`.

    Raises:
        ValueError: The env does not render so; see also `load_policy`.
    """
    from vecenv.learn import evaluate

    seed, kwargs = options.pop("seed"), {**options.pop("env_kwargs"), "render_mode": render_mode}
    loaded = load_policy(env, policy, num_envs=1, env_kwargs=kwargs, **options)
    frames: list[Any] = []

    @functools.wraps(loaded.act)  # `evaluate` reads the names of its parameters
    def act(*args: Any, **given: Any) -> Any:
        keep()
        return loaded.act(*args, **given)

    def keep() -> None:
        if len(frames) < num_frames:
            frames.append(frame_of(loaded.envs, env, render_mode))

    try:
        evaluate(act, loaded.envs, 1, seed=seed)
        keep()
        fps = float(loaded.envs.metadata.get("render_fps") or 10)
    finally:
        loaded.envs.close()
    return frames, fps


def record_run(page: EpisodePage, env: str, policy: Path, num_steps: int, **options: Any) -> None:
    """Play one episode into a page to scrub through.

    Args:
        page: An empty one.
        env: See `load_policy`.
        policy: See `load_policy`.
        num_steps: At most so many.
        **options: `seed`, and those of `load_policy`.

    Raises:
        ValueError: The env draws no pictures; see also `load_policy`.
    """
    from vecenv.learn.evaluation import ask

    seed = options.pop("seed")
    kwargs = {**options.pop("env_kwargs"), "render_mode": "rgb_array"}
    loaded = load_policy(env, policy, num_envs=1, env_kwargs=kwargs, **options)
    envs = loaded.envs

    def act(obs: Any, is_first: bool, report: dict[str, Any]) -> Any:
        return ask(loaded.act, envs, obs, np.array([is_first]), report=report)

    try:
        picture = functools.partial(frame_of, envs, env, "rgb_array")
        names = action_names(envs, env)
        record(page, envs, act, names, picture, seed=seed, num_steps=num_steps)
    finally:
        envs.close()


def load_policy(
    env: str,
    policy: Path,
    *,
    num_envs: int,
    algorithm: str | None = None,
    env_kwargs: Mapping[str, Any],
) -> LoadedPolicy:
    """Load a policy, and make envs for it.

    Args:
        env: What it plays in; see `vecenv.compare.source.read_source`.
        policy: A run folder of the trainers, or a file in it; or a .zip that stable-baselines3 has
            written, which can run code: give only those that you trust.
        num_envs: How many envs.
        algorithm: Which trainer the run is of, a name or a file; None finds out.
        env_kwargs: For the env, beside those of the training.

    Raises:
        ValueError: The file is no policy, or one of another env.
        OSError: It can't be read.
        ImportError: torch or stable-baselines3 is not installed.
    """
    source = read_source(env)
    if not policy.exists():
        raise FileNotFoundError(f"policy is {str(policy)!r}, but there is no such file or folder")
    if is_sb3_file(policy):
        return _load_sb3(source, policy, num_envs, env_kwargs)
    home = next((p for p in (policy, *policy.parents[:2]) if (p / _OPTIONS_FILE).is_file()), None)
    if home is None:
        raise ValueError(
            f"{policy} is no policy: no {_OPTIONS_FILE} is in it or beside it, as in run folders; "
            "expected a folder that vecenv train wrote, or a .zip of stable-baselines3"
        )
    module, options = _options_of(home, algorithm)
    if not hasattr(module, "load_policy"):
        does = _ELSEWHERE.get(module.__name__, "it has no function `load_policy`")
        raise ValueError(
            f"{home} is of {module.__name__}, which vecenv play can't play: "
            f"{does.format(env=env, home=home)}"
        )
    trained_in, env_id = options.env_id, env_id_of(source)
    kwargs = {**options.env_kwargs, **env_kwargs}
    if trained_in != env_id:
        _check_spaces(home, source, kwargs, trained_in)
    given = {"env_id": env_id, "env_kwargs": kwargs, "save": home, "device": "cpu"}
    options = dataclasses.replace(options, **given)
    envs, act = module.load_policy(options, num_envs)
    return LoadedPolicy(envs, act, module.__name__)


def _options_of(home: Path, algorithm: str | None) -> tuple[ModuleType, Any]:
    """Return the trainer that a run is of, and its options: the first one that has all of them."""
    from vecenv.learn import load_options

    try:
        names = set(json.loads((home / _OPTIONS_FILE).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{home / _OPTIONS_FILE} can't be read: {error!s:.200}") from None
    for candidate in ALGORITHMS if algorithm is None else (algorithm,):
        module = load(candidate)
        if names <= {field.name for field in dataclasses.fields(module.Options)}:
            return module, load_options(home, module.Options)
    if algorithm is not None:
        raise ValueError(f"{home} has other options than {algorithm}; leave --algo out")
    raise ValueError(
        f"{home} is of none of {', '.join(ALGORITHMS)}; give the file that trained it, by --algo"
    )


def _check_spaces(
    home: Path, source: EnvSource, kwargs: Mapping[str, Any], trained_in: str
) -> None:
    """Refuse a policy of an env with other spaces."""
    from vecenv.learn import load_checkpoint

    kinds = load_checkpoint(home / "checkpoint" / "last.npz")["kinds"].get("envs", {})
    envs = make_single(source, **kwargs)
    try:
        own = {
            "observation space": str(envs.single_observation_space),
            "action space": str(envs.single_action_space),
        }
    finally:
        envs.close()
    for name, space in own.items():
        if kinds.get(name) != space:
            raise ValueError(
                f"{home} was trained in {trained_in}, whose {name} is {kinds.get(name)!s:.200}; "
                f"that of {source.name} is {space!s:.200}"
            )


def _load_sb3(
    source: EnvSource, path: Path, num_envs: int, env_kwargs: Mapping[str, Any]
) -> LoadedPolicy:
    """Load a model of stable-baselines3 or sb3-contrib."""
    model, uses_masks = load_sb3_model(path)
    envs = make_vec(env_id_of(source), num_envs, **{**source.kwargs, **env_kwargs})
    own = envs.single_observation_space, envs.single_action_space
    theirs = model.observation_space, model.action_space
    if [space.shape for space in own] != [space.shape for space in theirs] or (
        getattr(own[1], "n", None) != getattr(theirs[1], "n", None)
    ):
        envs.close()
        raise ValueError(f"{path} was trained with the spaces {theirs}; {source.name} has {own}")
    state: Any = None

    def act(obs: Any, starts: Any) -> np.ndarray:
        nonlocal state
        arrays = _as_arrays(obs)
        actions, state = model.predict(arrays, state, starts.numpy(), deterministic=True)
        return actions

    def act_by_masks(obs: Any, action_masks: Any) -> np.ndarray:
        masks = action_masks.numpy()
        return model.predict(_as_arrays(obs), deterministic=True, action_masks=masks)[0]

    return LoadedPolicy(envs, act_by_masks if uses_masks else act, type(model).__name__)


def _as_arrays(obs: Any) -> Any:
    if isinstance(obs, dict):
        return {name: part.numpy() for name, part in obs.items()}
    return obs.numpy()
