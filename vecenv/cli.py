"""The command `vecenv`: evaluate and watch CAGE 2 policies, check vector envs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro
from gymnasium.error import Error as GymnasiumError
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["main"]

RedAgent = Literal["b_line", "meander", "sleep", "mixed"]
Rules = Literal["faithful", "debugged"]
Observation = Literal["bits", "extended"]

# What wrong arguments, files and ids lead to; anything else is a bug and keeps its traceback.
_USER_ERRORS = (ValueError, TypeError, OSError, ImportError, RuntimeError, GymnasiumError)


def evaluate(
    *,
    policy: str,
    episodes: int = 1000,
    seed: int = 0,
    rules: Rules = "faithful",
    observation: Observation | None = None,
    green: bool = False,
    json: Path | None = None,
) -> int:
    """Let a CAGE 2 policy play the challenge's nine cells and print the table of its scores.

    Args:
        policy: sleep, random, react-remove, react-restore, obs-remove, obs-restore, or a file with
            a saved policy.
        episodes: Per cell.
        seed: Of the episodes.
        rules: Scores under different rules are not comparable.
        observation: What the policy sees; by default what it was trained with.
        green: With the green agent, which the challenge does not have.
        json: File to write the numbers to.
    """
    from vecenv.cage.evaluation import EPISODE_LENGTHS, EVALUATED_AGENTS
    from vecenv.cage.evaluation import evaluate as play_all

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task(policy, total=len(EPISODE_LENGTHS) * len(EVALUATED_AGENTS))
        result = play_all(
            policy,
            episodes=episodes,
            seed=seed,
            rules=rules,
            observation=observation,
            green=green,
            on_cell=lambda cell: bar.advance(task),
        )
    Console().print(result.table())
    if json is not None:
        result.to_json(json)
        print(f"numbers: {json}")
    return 0


def watch(
    *,
    policy: str,
    red_agent: RedAgent = "b_line",
    steps: int = 50,
    seed: int = 0,
    rules: Rules = "faithful",
    observation: Observation | None = None,
    green: bool = False,
    gif: Path | None = None,
    fps: float = 2.0,
) -> int:
    """Play one episode of CAGE 2, in the terminal or as an animated picture.

    Args:
        policy: As for `evaluate`.
        red_agent: Who attacks.
        steps: Length of the episode.
        seed: Of the episode.
        rules: As for `evaluate`.
        observation: As for `evaluate`.
        green: As for `evaluate`.
        gif: File to write an animation to, instead of showing the episode here.
        fps: Steps per second.
    """
    from vecenv.cage.playing import play_episode, save_episode_gif
    from vecenv.cage.text import overview

    if not fps > 0:
        raise ValueError(f"fps is {fps!r}, expected a positive number")
    options = {
        "red_agent": red_agent,
        "episode_length": steps,
        "seed": seed,
        "rules": rules,
        "observation": observation,
        "green": green,
    }
    if gif is not None:
        save_episode_gif(policy, gif, fps=fps, **options)
        print(f"animation: {gif}")
        return 0
    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        for snapshot in play_episode(policy, **options):
            live.update(overview(snapshot), refresh=True)
            if console.is_terminal:
                time.sleep(1 / fps)
    print()
    return 0


def check(
    env: tyro.conf.Positional[str], /, *, num_envs: int = 3, num_steps: int = 200, seed: int = 0
) -> int:
    """Check that a vector env keeps the rules of Gymnasium's interface.

    Args:
        env: Registered id, also "module:id".
        num_envs: How many envs the vector env has.
        num_steps: Length of a run.
        seed: Of the resets and the actions.
    """
    from vecenv.check import VectorEnvCheckError, check_vector_env
    from vecenv.make import make_vec

    try:
        print(check_vector_env(make_vec(env, num_envs), num_steps=num_steps, seed=seed))
    except VectorEnvCheckError as error:
        print(error)
        return 1
    return 0


def main(args: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if a check failed, 2 for wrong arguments.

    Args:
        args: Arguments; None for those of the process.
    """
    commands = {"evaluate": evaluate, "watch": watch, "check": check}
    try:
        return tyro.extras.subcommand_cli_from_dict(commands, prog="vecenv", args=args)
    except _USER_ERRORS as error:
        print(f"vecenv: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
