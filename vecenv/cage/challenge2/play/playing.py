"""Let a policy play: an episode to look at, or the nine cells of the challenge for a score."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.cage.challenge2.env import Cage2VectorEnv
from vecenv.cage.challenge2.network.scenario import Scenario
from vecenv.cage.challenge2.network.state import impossible_turns
from vecenv.cage.challenge2.options import (
    RED_AGENTS,
    RedAgent,
    read_episode_lengths,
    read_red_agents,
    read_scenario,
    red_agent_name,
)
from vecenv.cage.challenge2.play.policies import BatchedPolicy, Policy, find_policy
from vecenv.cage.challenge2.rules.codes import EPISODE_LENGTHS
from vecenv.cage.challenge2.view.snapshot import Snapshot
from vecenv.cage.evaluation import Cell, Evaluation, cell_of, sum_of
from vecenv.core.arguments import read_count
from vecenv.page.episode import EpisodePage, record, takes_report
from vecenv.page.names import action_names

__all__ = ["Player", "cell_seed", "evaluate", "play_episode", "record_episode", "save_episode_gif"]

EVALUATED_AGENTS = ("b_line", "meander", "sleep")


class Player:
    """A policy in a vector env whose envs all begin and end together."""

    def __init__(self, policy: BatchedPolicy, envs: Cage2VectorEnv) -> None:
        self._policy: Any = policy
        self._envs = envs
        self._uses_masks = bool(getattr(policy, "uses_masks", False))

    def begin(self) -> None:
        """Tell the policy that all envs have been reset."""
        self._policy.reset()

    def act(self, obs: np.ndarray, report: dict[str, Any] | None = None) -> Any:
        """Return the policy's actions for obs (N, ...), the latest observations.

        Args:
            obs: See above.
            report: Filled by policies that have something to say, see `vecenv.page.episode.record`.
        """
        masks = (self._envs.action_masks(),) if self._uses_masks else ()
        more = {"report": report} if report is not None and takes_report(self._policy.act) else {}
        return self._policy.act(obs, self._envs.shell_alerts(), *masks, **more)


def play_episode(
    policy: Policy, *, seed: int | None = None, observation: str | None = None, **options: Any
) -> Iterator[Snapshot]:
    """Play one episode and yield a `Snapshot` after its reset and after each step.

    Its `blue` and `red` say what both did: action, target, success, and red's exploit.

    Args:
        policy: See `find_policy`.
        seed: Of the episode.
        observation: What the policy gets; None for what it says it needs, or "bits".
        **options: `red_agent`, `episode_length`, `rules`, `scenario`, `green` as for
            `Cage2VectorEnv`.
    """
    blue, envs = _seated(policy, seed, observation, options)
    try:
        obs, _ = envs.reset(seed=seed)
        blue.begin()
        yield envs.in_words()
        for _ in range(envs.episode_length_of(0)):
            obs, *_ = envs.step(blue.act(obs))
            yield envs.in_words()
    finally:
        envs.close()


def _seated(
    policy: Policy, seed: int | None, observation: str | None, options: dict[str, Any]
) -> tuple[Player, Cage2VectorEnv]:
    """Return a policy before an env for it, which does not reset itself; see `play_episode`."""
    scenario = read_scenario(options.pop("scenario", None), options.pop("rules", None))
    player = find_policy(policy, scenario, seed=seed)
    options["observation"] = observation or getattr(player, "observation", "bits")
    mode = AutoresetMode.DISABLED
    envs = Cage2VectorEnv(1, scenario=scenario, autoreset_mode=mode, **options)
    try:
        return Player(player, envs), envs
    except BaseException:
        envs.close()
        raise


def save_episode_gif(policy: Policy, path: str | Path, *, fps: float = 2.0, **options: Any) -> None:
    """Play one episode and write it as an animated GIF.

    Args:
        policy: See `find_policy`.
        path: File to write, replaced if it is there.
        fps: Steps per second.
        **options: As for `play_episode`.

    Raises:
        ValueError: The name of the file does not end in .gif.
        OSError: The file can't be written.
        ImportError: Pictures need the extra `plots`.
    """
    from vecenv.cage.canvas import require_gif, save_gif
    from vecenv.cage.challenge2.view.picture import draw_snapshot

    require_gif(path)
    snapshots = play_episode(policy, **options)
    save_gif((draw_snapshot(snapshot).to_array() for snapshot in snapshots), path, fps=fps)


def record_episode(
    page: EpisodePage,
    policy: Policy,
    *,
    seed: int | None = None,
    observation: str | None = None,
    **options: Any,
) -> None:
    """Play one episode into a page to scrub through.

    Args:
        page: An empty one.
        policy: See `find_policy`.
        seed: Of the episode.
        observation: As for `play_episode`.
        **options: As for `play_episode`.

    Raises:
        ImportError: Pictures need the extra `plots`.
    """
    blue, envs = _seated(policy, seed, observation, options)

    def tell() -> dict[str, str]:
        deeds = {side: getattr(envs.in_words(), side) for side in ("blue", "red")}
        return {side: deed.with_outcome() for side, deed in deeds.items() if deed is not None}

    def act(obs: np.ndarray, is_first: bool, report: dict[str, Any]) -> np.ndarray:
        if is_first:
            blue.begin()
        return np.asarray(blue.act(obs, report))

    try:
        names = action_names(envs, "Cage2-v0")
        limit = max(read_episode_lengths(options.get("episode_length", 100)))
        record(
            page,
            envs,
            act,
            names,
            lambda: envs.render_env(0, "rgb_array"),
            seed=seed,
            num_steps=limit,
            tell=tell,
        )
    finally:
        envs.close()


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
    """Let a policy play the challenge's nine cells: three lengths against three red agents.

    All episodes of a cell are played side by side, in one batch. Every cell has random numbers of
    its own, which depend on the seed, the red agent and the length only.

    Args:
        policy: See `vecenv.cage.find_policy`: a name, a file, an object with `act` and
            `reset`, or a function from observations (N, ...) to actions (N,).
        episodes: Per cell.
        seed: The same one gives the same numbers, if the policy does not draw by itself.
        rules: "faithful" (the default) or "debugged".
        scenario: Other tables instead.
        observation: What the policy gets; None for what it says it needs, or "bits".
        green: Whether the green agent is there.
        red_agents: Rows of the table: names, and red agents of your own (see `Cage2VectorEnv`),
            also as "module:function"; a row is called what its function is.
        episode_lengths: Columns of the table.
        num_threads: At most so many threads.
        name: What to call the policy.
        on_cell: Called after each cell, to show progress.

    Raises:
        TypeError, ValueError: An argument is not what it should be; the message names it.
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
    options = {"scenario": scenario, "observation": wanted, "green": green}
    cells = []
    for (agent, red_agent), length in product(agents.items(), lengths):
        options |= {"red_agent": red_agent, "episode_length": length, "num_threads": num_threads}
        cells.append(
            cell_of(
                agent,
                length,
                *_play_cell(player, episodes, cell_seed(seed, agent, length), **options),
            )
        )
        if on_cell is not None:
            on_cell(cells[-1])
    total, total_ci95 = sum_of(cells)
    return Evaluation(
        policy=name or _name_of(policy),
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
        name = red_agent_name(agent)
        if agents.setdefault(name, agent) != agent:
            raise ValueError(f"red_agents has two that are called {name!r}; rename one")
    if not agents:
        raise ValueError("red_agents is empty, expected at least one")
    return agents, tuple(sorted(set(read_episode_lengths(episode_lengths))))


def cell_seed(seed: int, red_agent: str, episode_length: int) -> int:
    """Return the seed of env 0 of a cell; the episodes of other cells are far away from it.

    Args:
        seed: Of the evaluation.
        red_agent: Name of the row.
        episode_length: Of the column.
    """
    names = list(RED_AGENTS)
    own = zlib.crc32(red_agent.encode()) + len(names)
    number = names.index(red_agent) if red_agent in names else own
    entropy = [seed, number, episode_length]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 2


def play_cell(
    policy: Policy,
    episodes: int,
    seed: int,
    *,
    red_agent: Any = "b_line",
    episode_length: int = 100,
    scenario: Scenario | None = None,
) -> np.ndarray:
    """Return the total rewards float64 (episodes,) of a policy; episode i has seed `seed + i`.

    Arguments as those of `evaluate`.
    """
    scenario = read_scenario(scenario, None)
    player = find_policy(policy, scenario, seed=seed)
    options: Any = {"scenario": scenario, "red_agent": red_agent}
    options["observation"] = getattr(player, "observation", "bits")
    return _play_cell(player, episodes, seed, episode_length=episode_length, **options)[0]


def _play_cell(
    policy: BatchedPolicy, episodes: int, seed: int, *, episode_length: int, **options: Any
) -> tuple[np.ndarray, int]:
    """Play the episodes of one cell.

    Returns:
        Their total rewards, float64 (episodes,), and how many turns of red were impossible.
    """
    mode = AutoresetMode.DISABLED
    envs = Cage2VectorEnv(episodes, episode_length=episode_length, autoreset_mode=mode, **options)
    try:
        blue = Player(policy, envs)
        obs, _ = envs.reset(seed=seed)
        blue.begin()
        totals, impossible = np.zeros(episodes), 0
        for _ in range(episode_length):
            # Without `out`: every observation is an array of its own, which the policy may keep.
            obs, rewards, *_ = envs.step(blue.act(obs))
            totals += rewards
            impossible += int(impossible_turns(envs.true_state).sum())
    finally:
        envs.close()
    return totals.round(1), impossible  # sums of tenths


def _name_of(policy: Any) -> str:
    if isinstance(policy, str | Path):
        return str(policy)
    return getattr(policy, "__name__", type(policy).__name__)
