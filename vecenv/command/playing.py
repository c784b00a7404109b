"""Load a trained policy, and play episodes with it; scores of two policies on equal seeds."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from vecenv.agents import AgentsVecEnv
from vecenv.cage.saved import is_sb3_file, load_sb3_model
from vecenv.command import trainers
from vecenv.command.trainers import ALGORITHMS, OF_ENVS, OPTIONS_FILE, env_id_of, load, name_of
from vecenv.command.watching import Shown, check_draws, show
from vecenv.core.moments import mean_of
from vecenv.files import write_json
from vecenv.source import GAMES, EnvSource, read_source
from vecenv.timing.report import as_number, new_table

__all__ = ["Scores", "Trained", "compare_policies", "play", "show_run"]

LoadedPolicy = tuple[Any, Callable[..., Any], str]  # see `Trained.load`


class Trained(NamedTuple):
    """A trained policy, and the env to play.

    Attributes:
        env: The env; see `vecenv.source.read_source`.
        policy: A run folder of the trainers, or a file in it; "zoo"; or a .zip of
            stable-baselines3, which can run code: load only those that you trust.
        env_kwargs: For the env; in the env of the training, those of the training also apply.
        algorithm: The run's trainer, a name or a file; None finds out.
        vecnormalize: Statistics of a model of stable-baselines3, see `load_sb3_model`; they can run
            code, too.
        sample: Whether to draw actions from the policy instead of taking the likeliest ones.
    """

    env: str
    policy: Path
    env_kwargs: Mapping[str, Any]
    algorithm: str | None = None
    vecnormalize: Path | None = None
    sample: bool = False

    def load(self, num_envs: int, **env_kwargs: Any) -> LoadedPolicy:
        """Load the policy, and make envs for it; `env_kwargs` are further ones of the env.

        Returns:
            A vector env, which the caller must close (for several agents an `AgentsVecEnv`); a
            function from tensors of observations to actions, as `vecenv.learn.evaluate` calls it;
            and a text that says what trained the policy.
        """
        source, policy = read_source(self.env, {**self.env_kwargs, **env_kwargs}), self.policy
        if policy == Path("zoo") and not (policy / OPTIONS_FILE).is_file():
            policy = trainers.zoo_policy(self.env)
        if not policy.exists():
            told = f"policy is {str(policy)!r}, but there is no such file or folder"
            raise FileNotFoundError(told)
        if is_sb3_file(policy):
            envs, act, name = _load_sb3(source, policy, num_envs, self.vecnormalize)
        elif self.vecnormalize is not None:
            raise ValueError(f"{policy} is no model of stable-baselines3: leave vecnormalize out")
        else:
            kwargs = {**self.env_kwargs, **env_kwargs}
            envs, act, name = _load_run(source, policy, num_envs, kwargs, self.algorithm)
        if self.sample and "sample" not in inspect.signature(act).parameters:
            envs.close()
            raise ValueError(f"{policy} has no probabilities to draw from: leave --sample out")
        return envs, functools.partial(act, sample=True) if self.sample else act, name


def play(
    trained: Trained, episodes: int, seed: int, render_modes: Iterable[str] = ()
) -> tuple[dict[str, tuple[Any, Any]], str]:
    """Play whole episodes; return the results, and what trained the policy.

    The results are two `vecenv.learn.EvaluationResult`, under the name "", or for each group of
    agents under "NAME, N agents". The first is for the likeliest actions, the second for drawn ones
    (None if the policy can't draw). With `sample`, the first is for drawn ones, the second None.

    Args:
        trained: The policy, and the env.
        episodes: Number of episodes; at most 100 run side by side.
        seed: Seed of the episodes and of draws.
        render_modes: Modes in which `show_run` is to draw later: raises if the env lacks them.
    """
    if episodes < 1:
        raise ValueError(f"episodes is {episodes}, expected at least 1")
    envs, act, name = trained.load(min(episodes, 100))
    from vecenv.learn import evaluate  # imports torch, only after the policy was found

    with closing(envs):
        for mode in render_modes:
            check_draws(envs, trained.env, mode)
        draws = not trained.sample and "sample" in inspect.signature(act).parameters
        first = evaluate(act, envs, episodes, seed=seed, sample=trained.sample)
        second = evaluate(act, envs, episodes, seed=seed, sample=True) if draws else None
        if not isinstance(envs, AgentsVecEnv):
            return {"": (first, second)}, name
        told = dict[str, tuple[Any, Any]]()
        for group, rows in envs.groups.items():
            label = f"{group}, {rows.num_agents} agent{'s' * (rows.num_agents > 1)}"
            told[label] = first[group], second and second[group]
        return told, name


def show_run(trained: Trained, shown: Shown, seed: int) -> None:
    """Play one more episode, and show it as `vecenv.command.watching.show` does."""
    envs, act, _ = trained.load(1, render_mode=shown.render_mode)
    from vecenv.learn.evaluation import ask

    def answer(obs: Any, is_first: bool, report: dict[str, Any]) -> Any:
        return ask(act, envs, obs, np.array([is_first]), report=report)

    with closing(envs):
        show(envs, trained.env, answer, shown, seed=seed)


def _load_run(
    source: EnvSource, policy: Path, num_envs: int, env_kwargs: dict[str, Any], algo: str | None
) -> LoadedPolicy:
    """Load a run's policy by its trainer; `env_kwargs` are those that the user gave."""
    from vecenv.learn import load_options

    home = next((p for p in (policy, *policy.parents[:2]) if (p / OPTIONS_FILE).is_file()), None)
    if home is None:
        told = "expected a folder that vecenv train wrote, or a .zip of stable-baselines3"
        raise ValueError(f"{policy} is no policy: no {OPTIONS_FILE} is in it or beside it; {told}")
    if policy.suffix == ".pt" and policy.name not in ("policy.pt", "last.pt"):
        raise ValueError(
            f"{policy} is not the last checkpoint, which is what {home} plays; another one is "
            "evaluated by vecenv.learn.evaluate(vecenv.load_policy(FILE), ENV)"
        )
    module = load(algo or _trained_by(home))
    if not hasattr(module, "load_policy"):
        told = (
            "which vecenv play can't play: it has no function load_policy(options, num_envs) that "
            "returns envs and a function from observations to actions"
        )
        raise ValueError(f"{home} is of {name_of(module)}, {told}")
    options = dataclasses.replace(load_options(home, module.Options), save=home)
    if getattr(options, "backend", None) == "auto":  # the training has chosen one
        options.backend = None
    kwargs: dict[str, Any] = {}
    if hasattr(options, "env_kwargs"):
        field = "env_id" if hasattr(options, "env_id") else "env"
        trained_in, asked = getattr(options, field), source.name.removeprefix(GAMES)
        asked = env_id_of(source) if field == "env_id" else asked
        own = options.env_kwargs if asked == trained_in else {}
        options = dataclasses.replace(options, env_kwargs={**own, **env_kwargs}, **{field: asked})
        if hasattr(options, "device"):
            options.device = "cpu"
    else:  # a trainer for one agent
        asked = source.name.removeprefix(GAMES).rpartition(":")[2]
        trained_in = next((k for k, v in OF_ENVS.items() if v == name_of(module)), asked)
        kwargs = source.kwargs
    try:
        if asked != trained_in and not hasattr(options, "env_kwargs"):
            raise ValueError("its trainer knows one env")
        envs, act = module.load_policy(options, num_envs, **kwargs)
    except FileNotFoundError as error:
        told = f"{home} has no policy yet, no {error.filename}: the training has saved nothing"
        raise FileNotFoundError(told if error.filename else str(error)) from error
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        if not (told := _about_spaces(home, module, options)) and asked == trained_in:
            raise
        raise ValueError(
            f"{home} {told or f'was trained in {trained_in}, not {source.name}: {error!s:.200}'}"
        ) from None
    return envs, act, name_of(module)


def _about_spaces(home: Path, module: Any, options: Any) -> str:
    """Say how an env's spaces differ from those of a run; return "" if they do not."""
    from vecenv.learn import load_checkpoint
    from vecenv.train.policy import POLICY_FILE, describe_space, env_of, space_of

    trainer = getattr(module.load_policy, "__self__", None)
    if not (home / POLICY_FILE).exists() or not hasattr(options, "env_kwargs") or not trainer:
        return ""
    saved = load_checkpoint(home / POLICY_FILE)["spaces"]
    with closing(trainer.make_envs(options, 1)) as envs:
        own = envs.single_observation_space, envs.single_action_space
    if saved is None:
        return ""
    # Both go the same way, as MultiBinary(3) comes back as MultiBinary((3,)), which is not equal.
    both = [list(map(space_of, texts)) for texts in (saved, map(describe_space, own))]
    texts = [f"{obs} and actions {actions}" for obs, actions in both]
    if both[0] == both[1]:
        return ""
    return f"was trained with observations {texts[0]}; {env_of(options)} has {texts[1]}"


def _trained_by(home: Path) -> str:
    """Return the bundled trainer that a run names as its own."""
    from vecenv.learn import load_checkpoint
    from vecenv.train.policy import LAST, LIBRARY, POLICY_FILE

    if not (home / POLICY_FILE).exists():
        if not (home / LAST).exists():
            raise FileNotFoundError(f"{home} has no policy yet: its training has saved nothing")
        raise ValueError(f"{home} does not say what trained it: name the trainer, by --algo")
    trainer = str(load_checkpoint(home / POLICY_FILE)["trainer"])
    if (name := trainer.removeprefix(LIBRARY)) not in ALGORITHMS:
        raise ValueError(f"{home} was made by {trainer}, which only runs if you name it: --algo")
    return name


def _load_sb3(
    source: EnvSource, path: Path, num_envs: int, vecnormalize: Path | None
) -> LoadedPolicy:
    """Load a model of stable-baselines3 or sb3-contrib."""
    from vecenv.train.policy import sb3_player

    loaded = load_sb3_model(path, vecnormalize)
    model = loaded[0]
    envs = source.make(num_envs)
    own = envs.single_observation_space, envs.single_action_space
    theirs = model.observation_space, model.action_space
    if [space.shape for space in own] != [space.shape for space in theirs] or (
        getattr(own[1], "n", None) != getattr(theirs[1], "n", None)
    ):
        envs.close()
        raise ValueError(f"{path} was trained with the spaces {theirs}; {source.name} has {own}")
    return envs, sb3_player(envs, *loaded), type(model).__name__


# -- two policies on equal seeds -------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """Mean returns with their uncertainty.

    Attributes:
        rows: Name, mean, and half the width of its 95 % confidence interval.
        facts: Further values for JSON.
        title, note: Texts above and below the table.
    """

    rows: list[tuple[str, float, float]]
    facts: dict[str, Any]
    title: str
    note: str

    def table(self) -> Table:
        """Return the table, for `rich` to print."""
        made = new_table(self.title, ["", "return"], box=SIMPLE_HEAD, caption=self.note)
        made.min_width = len(self.note)
        for name, mean, half in self.rows:
            made.add_row(Text(name), f"{as_number(mean)} ± {as_number(half)}")
        return made

    def to_json(self, path: str | Path | None = None) -> str:
        """Return all of it as JSON, and write it to a file if a path is given."""
        rows = [dict(zip(("name", "mean", "ci95"), row, strict=True)) for row in self.rows]
        return write_json({**self.facts, "scores": rows}, path)


def compare_policies(
    policies: tuple[str, str], episodes: int, seed: int, *, env: str, env_kwargs: Mapping[str, Any]
) -> Scores:
    """Let two policies play the same episodes, once each; the rest is as in `returns_of`.

    Rows: both policies, then the first minus the second, episode by episode.

    Raises:
        ValueError: There are fewer than two episodes, or `returns_of` raises it.
    """
    if episodes < 2:
        raise ValueError(f"episodes is {episodes}, expected at least 2")
    first, second = (
        returns_of(policy, episodes, seed, env=env, env_kwargs=env_kwargs) for policy in policies
    )
    names = *policies, " - ".join(policies)
    rows = []
    for name, returns in zip(names, (first, second, first - second), strict=True):
        mean, _, half = mean_of(returns)
        rows.append((name, mean, half))
    unpaired = math.hypot(rows[0][2], rows[1][2])  # as if the episodes were independent
    note = f"{episodes} episodes under equal luck; ±: 95 %; unpaired it would be ± "
    facts = {"env": env, "env_kwargs": {**env_kwargs}, "episodes": episodes, "seed": seed}
    usual = {"red_agent": "b_line", "episode_length": 100} if env == "Cage2-v0" else {}
    title = " ".join([env, *(f"{key}={value}" for key, value in {**usual, **env_kwargs}.items())])
    return Scores(rows, facts | {"unpaired_ci95": unpaired}, title, note + as_number(unpaired))


def returns_of(
    policy: str, episodes: int, seed: int, *, env: str, env_kwargs: Mapping[str, Any]
) -> np.ndarray:
    """Return the returns float64 (episodes,) of a policy; episode i has the seed `seed + i`.

    Args:
        policy: As in `vecenv evaluate` for CAGE; otherwise as in `vecenv play`.
        episodes: Number of episodes, side by side, each the first of its env.
        seed: Seed of the first episode.
        env: "Cage2-v0", "Cage4-v0", or an env of `vecenv play`.
        env_kwargs: For the env, such as red_agent="meander" for CAGE 2.
    """
    if env == "Cage2-v0":
        from vecenv.cage.challenge2.playing import play_cell

        return play_cell(policy, episodes, seed, **env_kwargs)[0]
    if env == "Cage4-v0":
        from vecenv.cage.challenge4.playing import play_episodes

        return play_episodes(policy, episodes, seed=seed, **env_kwargs).rewards[:-1].sum(axis=0)
    envs, act, _ = Trained(env, Path(policy), env_kwargs).load(episodes)
    from vecenv.learn import evaluate  # imports torch, only after the policy was found

    with closing(envs):
        return np.array(evaluate(act, envs, episodes, seed=seed).returns)
