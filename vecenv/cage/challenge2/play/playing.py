"""Play a policy: one episode to look at, or the nine cells of the challenge for a score."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

from vecenv.cage.challenge2.env import Cage2VectorEnv
from vecenv.cage.challenge2.network.scenario import Scenario
from vecenv.cage.challenge2.network.state import impossible_turns
from vecenv.cage.challenge2.options import (
    RED_AGENTS,
    RedAgent,
    read_episode_lengths,
    read_red_agents,
    read_scenario,
)
from vecenv.cage.challenge2.play.policies import Policy, find_policy
from vecenv.cage.challenge2.rules.codes import EPISODE_LENGTHS
from vecenv.cage.challenge2.snapshot import Snapshot
from vecenv.cage.evaluation import Cell, Evaluation, cell_of, sum_of
from vecenv.cage.playing import Seat, name_of
from vecenv.core.arguments import read_count

__all__ = ["cell_seed", "evaluate", "play_cell", "play_episode", "save_episode_gif", "seated"]

EVALUATED_AGENTS = ("b_line", "meander", "sleep")


class _Seat(Seat):
    """A policy that plays envs of CAGE 2."""

    def ask(self, obs: np.ndarray, more: dict[str, Any]) -> Any:
        """Return the policy's actions for obs (N, ...)."""
        uses_masks = getattr(self.policy, "uses_masks", False)
        masks = (self.envs.action_masks(),) if uses_masks else ()
        return self.policy.act(obs, self.envs.shell_alerts(), *masks, **more)

    def tell(self) -> Mapping[str, str]:
        """Return what blue and red did in the latest step of the first env, and its outcome."""
        snapshot = self.envs.in_words()
        deeds = {"blue": snapshot.blue, "red": snapshot.red}
        return {side: deed.with_outcome() for side, deed in deeds.items() if deed is not None}


def seated(
    policy: Policy,
    num_envs: int = 1,
    *,
    seed: int | None = None,
    observation: str | None = None,
    **options: Any,
) -> Seat:
    """Return a policy together with envs for it; the envs do not reset automatically.

    Args:
        policy: See `find_policy`.
        num_envs: Number of envs.
        seed: Seed for policies that draw.
        observation: Kind of observation; None for the kind that the policy asks for, or "bits".
        **options: As for `Cage2VectorEnv`.
    """
    scenario = read_scenario(options.pop("scenario", None), options.pop("rules", None))
    player = find_policy(policy, scenario, seed=seed)
    options["observation"] = observation or getattr(player, "observation", "bits")
    options |= {"scenario": scenario, "autoreset_mode": "Disabled"}
    return _Seat(player, Cage2VectorEnv(num_envs, **options))


def play_episode(policy: Policy, *, seed: int | None = None, **options: Any) -> Iterator[Snapshot]:
    """Play one episode and yield a `Snapshot` after its reset and after each step.

    Its `blue` and `red` describe the actions: action, target, success, and red's exploit.

    Args:
        policy: See `find_policy`.
        seed: Seed of the episode.
        **options: `observation`: its kind; None for the kind the policy asks for, or "bits".
            `red_agent`, `episode_length`, `rules`, `scenario`, `green` as for `Cage2VectorEnv`.
    """
    with seated(policy, seed=seed, **options) as seat:
        for _ in seat.play(seed):
            yield seat.envs.in_words()


def save_episode_gif(
    policy: Policy, path: str | Path, *, fps: float = 2.0, seed: int | None = None, **options: Any
) -> None:
    """Play one episode and write it as an animated GIF.

    Args:
        policy: See `find_policy`.
        path: File to write; an existing file is replaced.
        fps: Steps per second.
        seed: Seed of the episode.
        **options: As for `play_episode`.

    Raises:
        ValueError: The file name does not end in .gif.
        OSError: The file can't be written.
        ImportError: Pictures need the extra `plots`.
    """
    from vecenv.cage.canvas import require_gif, save_gif

    require_gif(path)
    with seated(policy, seed=seed, render_mode="rgb_array", **options) as seat:
        save_gif((seat.envs.render()[0] for _ in seat.play(seed)), path, fps=fps)


def evaluate(
    policy: Policy,
    *,
    episodes: int = 1000,
    seed: int = 0,
    rules: str | None = None,
    scenario: Scenario | None = None,
    observation: str | None = None,
    green: bool = False,
    red_agents: RedAgent = EVALUATED_AGENTS,
    episode_lengths: Sequence[int] = EPISODE_LENGTHS,
    num_threads: int | None = None,
    name: str | None = None,
    on_cell: Callable[[Cell], Any] | None = None,
) -> Evaluation:
    """Evaluate a policy on the challenge's nine cells: three red agents, three episode lengths.

    All episodes of a cell are played side by side, in one batch. Every cell has its own
    random numbers, which depend only on the seed, the red agent and the length.

    Args:
        policy: See `vecenv.cage.find_policy`: a name, a file, an object with `act` and
            `reset`, or a function from observations (N, ...) to actions (N,).
        episodes: Number of episodes per cell.
        seed: Equal seeds give equal results, unless the policy itself draws.
        rules: "faithful" (the default) or "debugged".
        scenario: Tables to use instead of CAGE 2's.
        observation: Kind of observation; None for the kind that the policy asks for, or "bits".
        green: Whether the green agent is present.
        red_agents: Rows of the table: names, or custom red agents (see `Cage2VectorEnv`), also
            as "module:function"; such a row has the name of its function.
        episode_lengths: Columns of the table.
        num_threads: Maximum number of threads.
        name: Name of the policy in the result.
        on_cell: Called after each cell, to show progress.

    Raises:
        TypeError, ValueError: An argument is invalid; the message names it.
        ActionError: The policy returned something that is not one action per env.

    Example:
        >>> print(evaluate("sleep", episodes=20, red_agents=["sleep"]).total)
        0.0
    """
    episodes, seed = read_count("episodes", episodes, 2), read_count("seed", seed, 0)
    agents, lengths = _read_table(red_agents, episode_lengths)
    scenario = read_scenario(scenario, rules)
    player = find_policy(policy, scenario, seed=seed)
    wanted = observation or getattr(player, "observation", "bits")
    options: Any = {"scenario": scenario, "observation": wanted, "green": green}
    options["num_threads"] = num_threads
    cells = []
    for (agent, red_agent), length in product(agents.items(), lengths):
        options |= {"red_agent": red_agent, "episode_length": length}
        found = play_cell(player, episodes, cell_seed(seed, agent, length), **options)
        cells.append(cell_of(agent, length, *found))
        if on_cell is not None:
            on_cell(cells[-1])
    total, total_ci95 = sum_of(cells)
    return Evaluation(
        policy=name or name_of(policy),
        **scenario.identity(),
        observation=wanted,
        green=green,
        seed=seed,
        cells=tuple(cells),
        total=total,
        total_ci95=total_ci95,
    )


def _read_table(red_agents: Any, episode_lengths: Any) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return the red agents by name, and the lengths."""
    if isinstance(red_agents, str) or callable(red_agents):
        red_agents = [red_agents]
    agents: dict[str, Any] = {}
    for agent in red_agents:
        if not isinstance(agent, str) and not callable(agent):
            raise TypeError(f"red_agents has {agent!r}, expected names and compiled policies")
        try:
            read_red_agents(agent)
        except (TypeError, ValueError) as error:
            raise type(error)(f"red_agents has {agent!r}: {error}") from error
        name = name_of(agent).rpartition(":")[2]
        if agents.setdefault(name, agent) != agent:
            raise ValueError(f"red_agents has two that are called {name!r}; rename one")
    if not agents:
        raise ValueError("red_agents is empty, expected at least one")
    return agents, tuple(sorted(set(read_episode_lengths(episode_lengths))))


def cell_seed(seed: int, red_agent: str, episode_length: int) -> int:
    """Return the seed of env 0 of a cell; seeds of other cells are far from it.

    Args:
        seed: Seed of the evaluation.
        red_agent: Name of the row.
        episode_length: Episode length of the column.
    """
    names = list(RED_AGENTS)
    is_known, own = red_agent in names, zlib.crc32(red_agent.encode()) + len(names)
    entropy = [seed, names.index(red_agent) if is_known else own, episode_length]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 2


def play_cell(policy: Policy, episodes: int, seed: int, **options: Any) -> tuple[np.ndarray, int]:
    """Play the episodes of one cell; episode i has seed `seed + i`.

    Args:
        policy: See `find_policy`.
        episodes: Number of episodes.
        seed: Seed of the first episode.
        **options: See `seated`.

    Returns:
        Total rewards, float64 (episodes,), and the number of impossible turns of red.
    """
    totals, impossible = np.zeros(episodes), 0
    with seated(policy, episodes, seed=seed, **options) as seat:
        for rewards in islice(seat.play(seed), 1, None):
            totals += rewards
            impossible += int(impossible_turns(seat.envs.true_state).sum())
    return totals.round(1), impossible  # sums of tenths
