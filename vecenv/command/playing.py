"""What `vecenv play` does: load a policy that was trained, play episodes, film one."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from vecenv.agents import AgentsVecEnv
from vecenv.cage.saved import is_sb3_file, load_sb3_model
from vecenv.command.trainers import (
    ALGORITHMS,
    OF_ENVS,
    OPTIONS_FILE,
    env_id_of,
    load,
    make_single,
    name_of,
)
from vecenv.command.watching import frame_of, page_fps
from vecenv.compare.source import GAMES, EnvSource, read_source
from vecenv.make import make_vec
from vecenv.page.episode import EpisodePage, record
from vecenv.page.names import action_names

__all__ = ["LoadedPolicy", "film", "load_policy", "options_of_run", "play", "record_run"]


class LoadedPolicy(NamedTuple):
    """A policy, and envs for it.

    Attributes:
        envs: A vector env, the caller's to close; of several agents an `AgentsVecEnv`.
        act: A function from observations, tensors, to actions, as `vecenv.learn.evaluate` calls it;
            of several agents as `evaluate` does.
        name: What trained it.
    """

    envs: Any
    act: Callable[..., Any]
    name: str


def play(env: str, policy: Path, episodes: int, **options: Any) -> tuple[dict[str, Any], str]:
    """Play whole episodes; return what was found, and what trained the policy.

    That is a `vecenv.learn.EvaluationResult` under the name "", or for each group of agents one
    under "NAME, N agents".

    Args:
        env: See `load_policy`.
        policy: See `load_policy`.
        episodes: How many, at most 100 side by side.
        **options: `seed`, and those of `load_policy`.

    Raises:
        ValueError: See `load_policy`; or fewer than one episode.
    """
    if episodes < 1:
        raise ValueError(f"episodes is {episodes}, expected at least 1")
    seed = options.pop("seed")
    loaded = load_policy(env, policy, num_envs=min(episodes, 100), **options)
    try:
        return _evaluate(loaded.act, loaded.envs, episodes, seed), loaded.name
    finally:
        loaded.envs.close()


def _evaluate(act: Callable[..., Any], envs: Any, episodes: int, seed: int) -> dict[str, Any]:
    """Return what `play` does."""
    from vecenv.learn import evaluate  # torch, not before there is a policy

    found = evaluate(act, envs, episodes, seed=seed)
    if not isinstance(envs, AgentsVecEnv):
        return {"": found}
    counts = {name: group.num_agents for name, group in envs.groups.items()}
    return {f"{k}, {counts[k]} agent{'s' * (counts[k] > 1)}": x for k, x in found.items()}


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
    seed, kwargs = options.pop("seed"), {**options.pop("env_kwargs"), "render_mode": render_mode}
    loaded = load_policy(env, policy, num_envs=1, env_kwargs=kwargs, **options)
    frames: list[Any] = []

    @functools.wraps(loaded.act)  # `ask` reads the names of its parameters
    def act(*args: Any, **given: Any) -> Any:
        keep()
        return loaded.act(*args, **given)

    def keep() -> None:
        if len(frames) < num_frames:
            frames.append(frame_of(loaded.envs, env, render_mode))

    try:
        _evaluate(act, loaded.envs, 1, seed)
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
        **options: `seed`, `fps` of the page or None, and those of `load_policy`.

    Raises:
        ValueError: The env draws no pictures; see also `load_policy`.
    """
    from vecenv.learn.evaluation import ask

    seed, fps = options.pop("seed"), options.pop("fps")
    kwargs = {**options.pop("env_kwargs"), "render_mode": "rgb_array"}
    loaded = load_policy(env, policy, num_envs=1, env_kwargs=kwargs, **options)
    envs: Any = loaded.envs
    page.fps = fps or page_fps(envs)
    is_game = isinstance(envs, AgentsVecEnv)

    def act(obs: Any, is_first: bool, report: dict[str, Any]) -> Any:
        return ask(loaded.act, envs, obs, np.array([is_first]), report=report)

    try:
        picture = functools.partial(frame_of, envs, env, "rgb_array")
        names: Any = _NamesByAgent(envs, env) if is_game else action_names(envs, env)
        shown = _OneGame(envs) if is_game else envs
        record(page, shown, act, names, picture, seed=seed, num_steps=num_steps)
    finally:
        envs.close()


class _OneGame:
    """One game as a vector env of one env, for `record`: its reward is that of all agents."""

    def __init__(self, envs: AgentsVecEnv) -> None:
        self._envs = envs

    def reset(self, *, seed: int | None) -> tuple[Any, dict[str, Any]]:
        return self._envs.reset(seed=seed)[0], {}

    def step(self, actions: Any) -> tuple[Any, ...]:
        obs, rewards, *_ = self._envs.step(actions)
        facts = {f"reward of {k}": x.sum(keepdims=True) for k, x in rewards.items()}
        is_over = np.array([not any(alive.any() for alive in self._envs.alive.values())])
        total = np.array([sum(part.sum() for part in rewards.values())])
        return obs, total, is_over, np.zeros(1, np.bool_), facts if len(rewards) > 1 else {}


class _NamesByAgent:
    """What the actions of all agents of a game are called, in place of `ActionNames`."""

    parts = ()

    def __init__(self, envs: AgentsVecEnv, env: str) -> None:
        self._groups = [(group, action_names(group, env)) for group in envs.groups.values()]

    def describe(self, actions: Mapping[str, Any]) -> str:
        return "; ".join(
            f"{agent}: {names.describe(actions[group.name][k])}"
            for group, names in self._groups
            for k, agent in enumerate(group.agents)
            if group.alive[k]
        )


def load_policy(
    env: str,
    policy: Path,
    *,
    num_envs: int,
    sample: bool = False,
    **options: Any,
) -> LoadedPolicy:
    """Load a policy, and make envs for it.

    Args:
        env: What it plays in; see `vecenv.compare.source.read_source`.
        policy: A run folder of the trainers, or a file in it; or a .zip that stable-baselines3 has
            written, which can run code: give only those that you trust.
        num_envs: How many envs.
        sample: Whether it draws from the policy instead of taking the likeliest actions.
        **options: `env_kwargs` for the env, beside those of the training; `algorithm`, which
            trainer the run is of, a name or a file, None finds out; `vecnormalize`, statistics of a
            model of stable-baselines3, see `load_sb3_model`, which can run code, too.

    Raises:
        ValueError: The file is no policy, or one of another env; or there is nothing to draw from.
        OSError: It can't be read.
        ImportError: torch or stable-baselines3 is not installed.
    """
    loaded = _load(env, policy, num_envs, **options)
    if not sample:
        return loaded
    if "sample" not in inspect.signature(loaded.act).parameters:
        loaded.envs.close()
        raise ValueError(f"{policy} has no probabilities to draw from: leave --sample out")
    return loaded._replace(act=functools.partial(loaded.act, sample=True))


def _load(
    env: str,
    policy: Path,
    num_envs: int,
    env_kwargs: Mapping[str, Any],
    algorithm: str | None = None,
    vecnormalize: Path | None = None,
) -> LoadedPolicy:
    """Do what `load_policy` does, for the likeliest actions."""
    source = read_source(env)
    if not policy.exists():
        raise FileNotFoundError(f"policy is {str(policy)!r}, but there is no such file or folder")
    if is_sb3_file(policy):
        return _load_sb3(source, policy, num_envs, env_kwargs, vecnormalize)
    if vecnormalize is not None:
        raise ValueError(
            f"vecnormalize is for models of stable-baselines3, which {policy} is none of; leave it "
            "out"
        )
    home = next((p for p in (policy, *policy.parents[:2]) if (p / OPTIONS_FILE).is_file()), None)
    if home is None:
        raise ValueError(
            f"{policy} is no policy: no {OPTIONS_FILE} is in it or beside it, as in run folders; "
            "expected a folder that vecenv train wrote, or a .zip of stable-baselines3"
        )
    module, options = _options_of(home, algorithm)
    if not hasattr(module, "load_policy"):
        raise ValueError(
            f"{home} is of {name_of(module)}, which vecenv play can't play: it has no function "
            "`load_policy`"
        )
    fields = {field.name for field in dataclasses.fields(module.Options)}
    if "env_kwargs" not in fields:  # a trainer of one env
        return _load_for_one(source, home, module, options, num_envs, env_kwargs)
    kwargs = {**options.env_kwargs, **env_kwargs}
    given = {"env_kwargs": kwargs, "save": home}
    if "env_id" not in fields:
        return _load_agents(env, dataclasses.replace(options, **given), module, num_envs)
    trained_in, env_id = options.env_id, env_id_of(source)
    if trained_in != env_id:
        if env.startswith(GAMES):
            raise ValueError(
                f"{home} was trained in {trained_in}, which has one agent; {env} is a game of "
                "several"
            )
        # Arguments of another env may be none of this one's.
        given["env_kwargs"] = kwargs if _takes(source, kwargs) else dict(env_kwargs)
        _check_spaces(home, source, given["env_kwargs"], trained_in)
    given |= {"env_id": env_id} | ({"device": "cpu"} if "device" in fields else {})
    options = dataclasses.replace(options, **given)
    if policy.parent == home / "checkpoint" and policy.suffix == ".pt":
        return _load_checkpoint(policy, module, options, num_envs)
    return _load_run(module, options, num_envs)


def _load_run(module: ModuleType, options: Any, num_envs: int, **kwargs: Any) -> LoadedPolicy:
    """Have a trainer load the policy of a run; say when the run has none yet."""
    try:
        envs, act = module.load_policy(options, num_envs, **kwargs)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{options.save} has no policy yet: there is no {error.filename}, which the training "
            "saves at its end and from time to time (--save-every)"
        ) from error
    return LoadedPolicy(envs, act, name_of(module))


def _load_checkpoint(
    checkpoint: Path, module: ModuleType, options: Any, num_envs: int
) -> LoadedPolicy:
    """Load the policy of one checkpoint, where trainers choose among those of a folder."""
    from vecenv.learn import load_checkpoint

    load_checkpoint(checkpoint)  # says so if it is none
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder, "checkpoint", "last.pt")
        alone.parent.mkdir()
        shutil.copyfile(checkpoint, alone)
        return _load_run(module, dataclasses.replace(options, save=Path(folder)), num_envs)


def _load_agents(env: str, options: Any, module: ModuleType, num_games: int) -> LoadedPolicy:
    """Load the policies of a run with several agents, whose options call the game `env`."""
    game = env.removeprefix(GAMES)
    trained_in, home = options.env, options.save
    try:
        return _load_run(module, dataclasses.replace(options, env=game), num_games)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        if game == trained_in:
            raise
        raise ValueError(
            f"{home} was trained in {trained_in}; {game} is no game with the same agents, of the "
            f"same spaces: {type(error).__name__}: {error!s:.200}"
        ) from None


def _load_for_one(
    source: EnvSource,
    home: Path,
    module: ModuleType,
    options: Any,
    num_envs: int,
    env_kwargs: Mapping[str, Any],
) -> LoadedPolicy:
    """Load a policy of a trainer that has an env of its own."""
    own = [env_id for env_id, name in OF_ENVS.items() if name == name_of(module)]
    asked = source.name.removeprefix(GAMES).rpartition(":")[2]
    if own and asked not in own:
        raise ValueError(f"{home} was trained in {own[0]}, not in {source.name}")
    options = dataclasses.replace(options, save=home)
    return _load_run(module, options, num_envs, **{**source.kwargs, **env_kwargs})


def options_of_run(home: Path, kind: type, algorithm: str) -> Any:
    """Return the options that the run in a folder has, to go on with; None if it has no run.

    Args:
        home: The folder.
        kind: The dataclass of the trainer.
        algorithm: What the trainer is called, for the message.

    Raises:
        ValueError: It is of another trainer, or its options are damaged.
        OSError: They can't be read.
    """
    from vecenv.learn import load_options

    if not (home / OPTIONS_FILE).is_file():
        return None
    try:
        return load_options(home, kind)
    except ValueError as error:
        raise ValueError(
            f"{home / OPTIONS_FILE} is not of {algorithm}: give the trainer that began the run, by "
            f"--algo, or another folder, by --save ({error.__cause__ or error!s:.99})"
        ) from None


def _options_of(home: Path, algorithm: str | None) -> tuple[ModuleType, Any]:
    """Return the trainer that a run is of, and its options: the first one that has all of them."""
    from vecenv.learn import load_options

    try:
        names = set(json.loads((home / OPTIONS_FILE).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{home / OPTIONS_FILE} can't be read: {error!s:.200}") from None
    known = algorithm or _trained_by(home)
    for candidate in ALGORITHMS if known is None else (known,):
        module = load(candidate)
        if names <= {field.name for field in dataclasses.fields(module.Options)}:
            return module, _without_trial(load_options(home, module.Options))
    if algorithm is not None:
        raise ValueError(f"{home} has other options than {algorithm}; leave --algo out")
    raise ValueError(
        f"{home} is of none of {', '.join(ALGORITHMS)}; give the file that trained it, by --algo"
    )


def _trained_by(home: Path) -> str | None:
    """Return the bundled trainer that a run says it is of; None if it does not say.

    Raises:
        ValueError: It is of a file of the user's.
    """
    from vecenv.learn import CheckpointError, load_checkpoint
    from vecenv.train.policy import LIBRARY, POLICY_FILE

    try:
        trainer = str(load_checkpoint(home / POLICY_FILE)["trainer"])
    except (OSError, CheckpointError, LookupError, TypeError):
        return None
    if not trainer.startswith(LIBRARY):
        raise ValueError(f"{home} was made by {trainer}, which only runs if you name it: --algo")
    name = trainer.removeprefix(LIBRARY)
    return name if name in ALGORITHMS else None


def _without_trial(options: Any) -> Any:
    """Leave the backend to `make_vec`, where it was to be tried out in the training."""
    if getattr(options, "backend", None) == "auto":
        return dataclasses.replace(options, backend=None)
    return options


def _takes(source: EnvSource, kwargs: Mapping[str, Any]) -> bool:
    """Whether an env can be made with these arguments."""
    try:
        make_single(source, **kwargs).close()
    except Exception:  # whatever its constructor raises
        return False
    return True


def _check_spaces(
    home: Path, source: EnvSource, kwargs: Mapping[str, Any], trained_in: str
) -> None:
    """Refuse a policy of an env with other spaces, if the run has saved its envs."""
    from vecenv.learn import load_checkpoint

    kinds = load_checkpoint(home / "checkpoint" / "last.pt")["kinds"].get("envs")
    if kinds is None:
        return
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
    source: EnvSource,
    path: Path,
    num_envs: int,
    env_kwargs: Mapping[str, Any],
    vecnormalize: Path | None,
) -> LoadedPolicy:
    """Load a model of stable-baselines3 or sb3-contrib."""
    from vecenv.train.policy import sb3_player

    loaded = load_sb3_model(path, vecnormalize)
    model = loaded[0]
    envs = make_vec(env_id_of(source), num_envs, **{**source.kwargs, **env_kwargs})
    own = envs.single_observation_space, envs.single_action_space
    theirs = model.observation_space, model.action_space
    if [space.shape for space in own] != [space.shape for space in theirs] or (
        getattr(own[1], "n", None) != getattr(theirs[1], "n", None)
    ):
        envs.close()
        raise ValueError(f"{path} was trained with the spaces {theirs}; {source.name} has {own}")
    return LoadedPolicy(envs, sb3_player(envs, *loaded), type(model).__name__)
