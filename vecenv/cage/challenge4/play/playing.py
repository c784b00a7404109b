"""Let a policy play whole episodes of CAGE Challenge 4, for a score or to look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text

from vecenv.cage.challenge4.env import Cage4VectorEnv, impossible_turns, overflows
from vecenv.cage.challenge4.graph import FLAT
from vecenv.cage.challenge4.options import Cage4Options
from vecenv.cage.challenge4.play.policies import OriginalAgents, find_policy
from vecenv.cage.challenge4.raw import RawNetwork, raw_observations
from vecenv.cage.challenge4.rules import codes
from vecenv.cage.evaluation import Estimate, Tabular, estimate, interval, new_table
from vecenv.cage.identity import CAGE4_RULES_VERSION
from vecenv.cage.playing import Seat, name_of
from vecenv.core.arguments import read_count
from vecenv.core.errors import ActionError
from vecenv.files import write_json

__all__ = ["CAUSES", "Cage4Evaluation", "Episodes", "evaluate_cage4", "play_episodes", "seated"]

CAUSES = ("local_work", "access_service", "impact", "action_cost")
_TITLES = ("LocalWork fails", "AccessService fails", "Impact", "Restore")
NUM_PHASES = 3
_BATCH = 250  # games played side by side


@dataclass(frozen=True, slots=True)
class Cage4Evaluation(Tabular):
    """The result of `evaluate_cage4`; prints as a table.

    Attributes:
        policy: Name of the policy.
        red: The red agent.
        steps: The original's S; an episode has S - 1 steps.
        episodes: Number of episodes played.
        seed: Seed of the first episode; episode i has seed + i.
        score: The challenge's own score: the sum of all rewards except the last, S - 2 of them.
        total: The return, the sum of all rewards.
        phases: The return by phase.
        causes: The return by cause, see `CAUSES`.
        overflowed: Number of games that exceeded a capacity of the simulator, by capacity; such
            games are not exact.
        impossible_turns: Turns in which a custom red agent chose something that does not exist,
            and waited instead.
        phishing_rate, alarm_rate: Rates of green users, see `Cage4Options`.
        scenario: Name of the challenge.
        rules_version: Version of the simulator; do not compare scores of different versions.
    """

    policy: str
    red: str
    steps: int
    episodes: int
    seed: int
    score: Estimate
    total: Estimate
    phases: tuple[Estimate, ...]
    causes: dict[str, Estimate]
    overflowed: dict[str, int]
    phishing_rate: float = codes.PHISHING_RATE
    alarm_rate: float = codes.ALARM_RATE
    scenario: str = "CAGE Challenge 4"
    rules_version: int = CAGE4_RULES_VERSION
    impossible_turns: int = 0

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the result as JSON, and write it to a file if a path is given.

        In the JSON, `total` is called "return".
        """
        fields = asdict(self)
        fields["return"] = fields.pop("total")
        return write_json(fields, path)

    def table(self) -> Table:
        """Return a table for `rich` to print: mean ± half of the 95 % confidence interval."""
        title = f"{self.policy} against {self.red}: {self.episodes} episodes of {self.steps} steps"
        table = new_table(title, "", "mean", "deviation")

        def row(name: str, found: Estimate, style: str | None = None) -> None:
            shown = interval(found.mean, found.ci95), f"{found.sd:.1f}"
            table.add_row(Text(name), *shown, style=style)

        row(f"score ({self.steps - 2} rewards)", self.score, "bold")
        row(f"return ({self.steps - 1} rewards)", self.total)
        table.add_section()
        for phase, found in enumerate(self.phases):
            row(f"phase {phase}", found)
        table.add_section()
        for title, name in zip(_TITLES, CAUSES, strict=True):
            row(title, self.causes[name])
        if self.impossible_turns:
            table.caption = Text(
                f"red agent {self.red} returned an action that does not exist in "
                f"{self.impossible_turns:_} turns; it waited instead".replace("_", " "),
                justify="left",
            )
        return table


class Episodes(NamedTuple):
    """Episodes that were played.

    Attributes:
        rewards: float64 (steps, N).
        phases: float64 (N, 3), rewards by phase.
        causes: float64 (N, 4), rewards by cause.
        impossible_turns: int64 (N,), see `Cage4Evaluation`.
        overflowed: See `Cage4Evaluation`.
    """

    rewards: np.ndarray
    phases: np.ndarray
    causes: np.ndarray
    impossible_turns: np.ndarray
    overflowed: Counter[str]


class _Seat(Seat):
    """A policy that plays games of CAGE 4 with messages."""

    def begin(self) -> None:
        """Pass the masks to the policy, which may keep them."""
        self.policy.reset([mask.copy() for mask in self.envs.agent_masks()])
        if getattr(self.policy, "observation", None) == "raw":
            self._network = RawNetwork.of_game(self.envs.states[0])

    def ask(self, obs: np.ndarray, more: dict[str, Any]) -> np.ndarray:
        """Return the policy's indices and messages, int64 (N, 10)."""
        if getattr(self.policy, "observation", None) == "raw":
            seen: Any = raw_observations(self.envs.states[0], self._network)
        else:
            seen = self.envs.agent_obs(obs)
        return _read(self.policy.act(seen, **more), len(obs))

    def tell(self) -> Mapping[str, str]:
        """Return which actions of red took effect in the latest step of the first game."""
        return self.envs.get_red_deeds()


def seated(policy: Any, num_envs: int = 1, *, seed: int | None = 0, **options: Any) -> Seat:
    """Return a policy together with games for it; the games do not reset automatically.

    Args:
        policy: See `policies.find_policy`.
        num_envs: Number of games; one if the policy consists of agents of the original.
        seed: Seed for policies that draw.
        **options: As for `Cage4VectorEnv`, except `observation`.
    """
    if "observation" in options:
        raise TypeError("policies are played with vectors, or what they ask for: no `observation`")
    player = find_policy(policy, seed)
    asked = getattr(player, "observation", None)
    options |= {"messages": True, "autoreset_mode": "Disabled", "log": asked == "raw"}
    options["observation"] = asked if isinstance(asked, str) and asked != "raw" else FLAT
    return _Seat(player, Cage4VectorEnv(num_envs, **options))


def _read(answer: Any, num: int) -> np.ndarray:
    """Convert the return value of a policy to actions int (N, 10), which the envs check."""
    indices, messages = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
    messages = np.zeros((num, codes.NUM_BLUE), int) if messages is None else messages
    arrays = {"actions": np.asarray(indices), "messages": np.asarray(messages)}
    for name, array in arrays.items():
        if array.shape != (num, codes.NUM_BLUE) or array.dtype.kind not in "iub":
            raise ActionError(
                f"the policy returned {name} of {array.dtype} {array.shape}, expected integers "
                f"({num}, {codes.NUM_BLUE}), one per game and agent"
            )
    return np.concatenate([*arrays.values()], axis=1, dtype=np.int64)


def play_episodes(
    policy: Any,
    episodes: int,
    *,
    seed: int = 0,
    num_threads: int | None = None,
    on_step: Callable[[int], Any] | None = None,
    **options: Any,
) -> Episodes:
    """Play episodes side by side with a policy; episode i has seed + i.

    Args:
        policy: See `policies.find_policy`.
        episodes: Number of episodes.
        seed: Seed of the first episode.
        num_threads: Maximum number of threads.
        on_step: Called after each step with the number of game steps made, to show progress.
        **options: See `Cage4Options`.
    """
    player, length = (
        find_policy(policy, seed),
        Cage4Options(steps=options.get("steps", 500)).steps - 1,
    )
    found = Episodes(
        np.zeros((length, episodes)),
        np.zeros((episodes, NUM_PHASES)),
        np.zeros((episodes, len(CAUSES))),
        np.zeros(episodes, np.int64),
        Counter(),
    )
    batch = 1 if isinstance(player, OriginalAgents) else _BATCH
    for start in range(0, episodes, batch):
        games = np.arange(start, min(start + batch, episodes))
        with seated(player, len(games), num_threads=num_threads, **options) as seat:
            states = seat.envs.states
            for step, rewards in enumerate(islice(seat.play(seed + start), 1, None)):
                found.rewards[step, games] = rewards
                found.phases[games, states["phase"]] += rewards
                found.causes[games] += states["reward_parts"]
                found.impossible_turns[games] += impossible_turns(states).sum(axis=1)
                if on_step is not None:
                    on_step(len(games))
            found.overflowed.update(overflows(states))
    return found


def evaluate_cage4(
    policy: Any,
    *,
    episodes: int = 1000,
    seed: int = 0,
    name: str | None = None,
    num_threads: int | None = None,
    on_step: Callable[[int], Any] | None = None,
    **options: Any,
) -> Cage4Evaluation:
    """Evaluate a policy on CAGE Challenge 4 by the challenge's protocol.

    Args:
        policy: "sleep", "random", "react-restore", "react-remove", "decoy-restore", "rules",
            "defender" (the trained one), a file with a saved defender, "module:object", an object
            with `reset(masks)` and `act(observations)`, a function of observations and masks; or
            agents of the original, see `policies.OriginalAgents`: their class, or a dict by name.
        episodes: Number of episodes, at least 2.
        seed: Seed of the first episode; equal seeds give equal results unless the policy draws.
        name: Name of the policy in the result.
        num_threads: Maximum number of threads.
        on_step: Called after each step with the number of game steps made, to show progress.
        **options: `steps`, `red`, `phishing_rate`, `alarm_rate`, see `Cage4Options`.

    Raises:
        TypeError, ValueError: An argument is invalid; the message names it.
        ActionError: The policy returned something that is not one index per game and agent.

    Example:
        >>> result = evaluate_cage4("sleep", episodes=4, steps=30)
        >>> result.episodes, result.causes["action_cost"].mean
        (4, 0.0)
    """
    episodes, seed = read_count("episodes", episodes, 2), read_count("seed", seed, 0)
    found = play_episodes(
        policy, episodes, seed=seed, num_threads=num_threads, on_step=on_step, **options
    )
    red = options.get("red", "fsm")
    return Cage4Evaluation(
        policy=name or name_of(policy),
        red=red if isinstance(red, str) else name_of(red),
        steps=int(options.get("steps", 500)),
        episodes=episodes,
        seed=seed,
        score=estimate(found.rewards[:-1].sum(axis=0)),
        total=estimate(found.rewards.sum(axis=0)),
        phases=tuple(estimate(column) for column in found.phases.T),
        causes={
            name: estimate(column) for name, column in zip(CAUSES, found.causes.T, strict=True)
        },
        overflowed=dict(found.overflowed),
        impossible_turns=int(found.impossible_turns.sum()),
        phishing_rate=float(options.get("phishing_rate", codes.PHISHING_RATE)),
        alarm_rate=float(options.get("alarm_rate", codes.ALARM_RATE)),
    )
