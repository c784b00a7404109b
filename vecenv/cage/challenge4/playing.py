"""Blue policies, and letting them play whole episodes, for a score or to look at.

A policy plays many games at a time, which begin and end together: a `Cage4Policy`, or a function
from the observations and masks to indices. The ready-made ones are those of the reference returns,
and `rules`; like the challenge's evaluation they send no messages.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from gymnasium.spaces import Discrete
from rich.table import Table
from rich.text import Text

from vecenv.cage.challenge4.env import (
    Cage4Options,
    Cage4VectorEnv,
    impact_rewards,
    impossible_turns,
    overflows,
)
from vecenv.cage.challenge4.observations import FLAT
from vecenv.cage.challenge4.original import RawNetwork, raw_observations
from vecenv.cage.challenge4.player import Cage4Memory, Cage4Player
from vecenv.cage.challenge4.rules import codes
from vecenv.cage.challenge4.rules.codes import CAGE4_RULES_VERSION
from vecenv.cage.playing import (
    PLUS_MINUS,
    Estimate,
    Seat,
    Tabular,
    called,
    estimate,
    found_policy,
    impossible_text,
    interval,
    name_of,
    new_table,
)
from vecenv.core.arguments import read_count
from vecenv.core.errors import ActionError
from vecenv.files import write_json

TRAINED_DEFENDER = Path(__file__).with_name("defender.npz")  # what `make cage4` has trained
_FIRST_BLOCK = 1 + 27  # of the process events of the first subnet
_BLOCK = 59
_MAX_HOSTS = 48
_NEVER = np.iinfo(np.int64).max


@runtime_checkable
class Cage4Policy(Protocol):
    """A blue policy, which plays N games side by side that begin and end together.

    An attribute `observation`, "graph" or "events", asks for these instead of vectors.
    """

    def reset(self, masks: Sequence[np.ndarray], /) -> Any:
        """Begin episodes.

        Args:
            masks: Which actions do something: five arrays bool, (N, 82) of agents 0 to 3 and
                (N, 242) of agent 4; they stay through the episode.
        """

    def act(self, observations: Sequence[np.ndarray], /) -> Any:
        """Choose actions.

        Args:
            observations: Five arrays, (N, 92) of agents 0 to 3 and (N, 210) of agent 4, see
                `Cage4ParallelEnv.observation_labels`.

        Returns:
            Indices int (N, 5); or a pair of these and messages int (N, 5), of 8 bits each.
        """


class Random:
    """Draw uniformly, in every step, among the actions whose mask is true."""

    def __init__(self, seed: int | None) -> None:
        self._rng = np.random.default_rng(seed)

    def reset(self, masks: Sequence[np.ndarray]) -> None:
        """Begin episodes."""
        self._sizes = np.stack([mask.sum(axis=1) for mask in masks], axis=1)
        self._indices = [np.argsort(~mask, axis=1, kind="stable") for mask in masks]

    def act(self, observations: Sequence[np.ndarray]) -> np.ndarray:
        """Choose random actions."""
        ranks = self._rng.integers(0, self._sizes)
        rows = np.arange(len(ranks))
        return np.stack(
            [self._indices[a][rows, ranks[:, a]] for a in range(codes.NUM_BLUE)], axis=1
        )


class React:
    """Queue hosts with process events; when free, treat the first, place a decoy, or sleep."""

    def __init__(self, family: int, places_decoys: bool = False) -> None:
        self._family, self._places_decoys = family, places_decoys

    def reset(self, masks: Sequence[np.ndarray]) -> None:
        """Begin episodes."""
        num = len(masks[0])
        # Order in which hosts were queued, smallest first; never for hosts not in the queue.
        self._queued = np.full((num, codes.NUM_BLUE, _MAX_HOSTS), _NEVER)
        self._has_decoy = np.zeros((num, codes.NUM_BLUE, _MAX_HOSTS), bool)
        self._left = np.zeros((num, codes.NUM_BLUE), np.int64)
        self._masks = list(masks)
        self._step = 0

    def act(self, observations: Sequence[np.ndarray]) -> np.ndarray:
        """Treat the first host in the queue."""
        actions = np.tile(codes.SLEEPS, (len(self._left), 1))
        for agent in range(codes.NUM_BLUE):
            self._act(agent, np.asarray(observations[agent]), actions)
        self._step += 1
        return actions

    def _act(self, agent: int, obs: np.ndarray, actions: np.ndarray) -> None:
        rows, size = np.arange(len(obs)), codes.HOSTS_PER_SUBNET * len(codes.BLUE_SUBNETS[agent])
        blocks = _FIRST_BLOCK + _BLOCK * np.arange(size // codes.HOSTS_PER_SUBNET)
        places = blocks[:, None] + np.arange(codes.HOSTS_PER_SUBNET)
        alarms = obs[:, places.reshape(-1)].astype(bool)
        queued = self._queued[:, agent, :size]
        is_new = alarms & (queued == _NEVER)
        queued[is_new] = (self._step * _MAX_HOSTS + np.arange(size))[np.nonzero(is_new)[1]]
        is_free = self._left[:, agent] == 0
        first = queued.argmin(axis=1)
        acts = is_free & (queued[rows, first] != _NEVER)
        base = size + 1 if self._family == codes.REMOVE else 2 * size + 1
        actions[acts, agent] = base + first[acts]
        queued[rows[acts], first[acts]] = _NEVER
        self._left[acts, agent] = codes.BLUE_TICKS[self._family]
        if self._places_decoys:
            start = codes.NUM_ACTIONS[agent] - size
            wanted = self._masks[agent][:, start:] & ~self._has_decoy[:, agent, :size]
            places = np.flatnonzero(is_free & ~acts & wanted.any(axis=1))
            chosen = wanted[places].argmax(axis=1)
            actions[places, agent] = start + chosen
            self._has_decoy[places, agent, chosen] = True
            self._left[places, agent] = codes.BLUE_TICKS[codes.DECOY]
        self._left[:, agent] = np.maximum(self._left[:, agent] - 1, 0)


class FunctionPolicy:
    """A function from observations and masks to indices."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def reset(self, masks: Sequence[np.ndarray]) -> None:
        """Begin episodes."""
        self._masks = masks

    def act(self, observations: Sequence[np.ndarray]) -> Any:
        """Call the function."""
        return self._function(observations, self._masks)


class Rules:
    """The rules of `Cage4Memory`, for many games at a time."""

    observation = "events"

    def reset(self, masks: Sequence[np.ndarray]) -> None:
        """Begin episodes."""
        self._memory = Cage4Memory(len(masks[0]))
        self._memory.begin(masks)

    def act(self, observations: Sequence[np.ndarray]) -> np.ndarray:
        """Return the agents' indices int64 (N, 5)."""
        self._memory.note(observations)
        return self._memory.act(self._memory.rule_choices())


class OriginalAgents:
    """Five agents written for the original simulator, as a policy for one game at a time.

    Each agent has `get_action(observation, action_space)`, which returns an index. Observations are
    the dicts of hosts that `Cage4ParallelEnv(raw=True)` returns, or int64 vectors if agent 0's
    attribute `observation` is "flat". An agent's `reset()`, if it has one, is called before each
    episode. Without it, nothing tells the agent of a new episode, as in the original's evaluation.

    Args:
        agents: Agents by name, "blue_agent_0" to "blue_agent_4"; five distinct objects.

    Raises:
        ValueError: The names are not these.
    """

    def __init__(self, agents: Mapping[str, Any]) -> None:
        if set(agents) != set(codes.AGENT_NAMES):
            raise ValueError(
                f"policy has the agents {', '.join(map(str, agents))}, expected "
                f"{', '.join(codes.AGENT_NAMES)}"
            )
        self._agents = [agents[name] for name in codes.AGENT_NAMES]
        is_flat = getattr(self._agents[0], "observation", "raw") == "flat"
        self.observation = "flat" if is_flat else "raw"
        self._spaces = [Discrete(num) for num in codes.NUM_ACTIONS]

    def reset(self, masks: Sequence[np.ndarray]) -> None:
        """Begin an episode."""
        for agent in self._agents:
            getattr(agent, "reset", lambda: None)()

    def act(self, observations: Sequence[Any]) -> np.ndarray:
        """Call each agent's `get_action`; return indices int64 (1, 5)."""
        if self.observation == "flat":
            observations = [rows[0].astype(np.int64) for rows in observations]
        asked = zip(self._agents, observations, self._spaces, strict=True)
        return np.array([[agent.get_action(seen, space) for agent, seen, space in asked]])


_READY = {
    "sleep": lambda seed: FunctionPolicy(
        lambda observations, masks: np.tile(codes.SLEEPS, (len(masks[0]), 1))
    ),
    "random": Random,
    "react_restore": lambda seed: React(codes.RESTORE),
    "react_remove": lambda seed: React(codes.REMOVE),
    "decoy_restore": lambda seed: React(codes.RESTORE, places_decoys=True),
    "rules": lambda seed: Rules(),
    "defender": lambda seed: Cage4Player(TRAINED_DEFENDER),
}
POLICY_NAMES = tuple(_READY)


def _load(path: Path) -> Cage4Player:
    """Return the defender of a file; warn if it was trained under another version of the rules."""
    player = Cage4Player(path)
    version = player.facts.get("rules_version", CAGE4_RULES_VERSION)
    if version != CAGE4_RULES_VERSION:
        warnings.warn(
            f"{path.name} was made with version {version} of the rules, and is used with version "
            f"{CAGE4_RULES_VERSION}: scores under the two are not comparable",
            stacklevel=4,
        )
    return player


def _made(kind: type) -> Any:
    """Instantiate a class of policies once, or a class of the original's agents five times."""
    if not hasattr(kind, "get_action"):
        return kind()
    return {name: called(kind, name=name) for name in codes.AGENT_NAMES}


def _converted(found: Any) -> Any:
    """Return agents of the original, or a function, as a policy; None for anything else."""
    if isinstance(found, Mapping):
        return OriginalAgents(found)
    if hasattr(found, "observation_space"):  # by `load_policy`
        raise TypeError(f"policy is {found!r:.200}, which was not trained on CAGE 4")
    return FunctionPolicy(found) if callable(found) else None


def find_policy(policy: Any, seed: int | None = 0) -> Cage4Policy:
    """Return the policy of a name, a file, "module:object", an object or a function.

    | ready-made | each agent, independently |
    |---|---|
    | sleep | does nothing |
    | random | draws, in every step, an action that its mask allows |
    | react-restore, react-remove | treats hosts with process events in order of arrival |
    | decoy-restore | as react-restore; when no host is queued, places one decoy on each host |
    | rules | works through what its events ask for, see `Rules` |
    | defender | the trained network over events, see `Cage4Player` |

    Args:
        policy: See above; names take hyphens or underscores. A class is called with no arguments.
            A class with `get_action` makes the agents of the original: it is called five times,
            with `name` if it has this parameter. A dict of five such agents is accepted too.
        seed: Seed for policies that draw.

    Raises:
        TypeError, ValueError: `policy` is none of these.
        OSError: The file can't be read.
    """
    return found_policy(
        policy,
        "an object with reset(masks) and act(observations), a function of observations and masks, "
        "or agents of the original, with get_action(observation, action_space)",
        ready={name: functools.partial(make, seed) for name, make in _READY.items()},
        files=("defender.npz",),
        others=("obs_remove", "obs_restore", "policy.npz"),
        load=_load,
        make=_made,
        convert=_converted,
        reset_takes=("masks",),
    )


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
        score_without_contractor: The score without Impact on the contractor's network, which hardly
            depends on blue and varies most.
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
    score_without_contractor: Estimate
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
        row("score without contractors' Impact", self.score_without_contractor)
        table.add_section()
        for phase, found in enumerate(self.phases):
            row(f"phase {phase}", found)
        table.add_section()
        for title, name in zip(_TITLES, CAUSES, strict=True):
            row(title, self.causes[name])
        told = impossible_text(self.red, self.impossible_turns, "turns; it waited instead")
        table.caption = Text("\n".join(filter(None, (PLUS_MINUS, told))), justify="left")
        return table


class Episodes(NamedTuple):
    """Episodes that were played.

    Attributes:
        rewards: float64 (steps, N).
        phases: float64 (N, 3), rewards by phase.
        causes: float64 (N, 4), rewards by cause.
        contractor: float64 (steps, N), rewards of Impact on the contractor's network.
        impossible_turns: int64 (N,), see `Cage4Evaluation`.
        overflowed: See `Cage4Evaluation`.
    """

    rewards: np.ndarray
    phases: np.ndarray
    causes: np.ndarray
    contractor: np.ndarray
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
        policy: See `find_policy`.
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
        policy: See `find_policy`.
        episodes: Number of episodes.
        seed: Seed of the first episode.
        num_threads: Maximum number of threads.
        on_step: Called after each step with the number of game steps made, to show progress.
        **options: See `Cage4Options`.
    """
    player = find_policy(policy, seed)
    length = Cage4Options(steps=options.get("steps", 500)).steps - 1
    found = Episodes(
        np.zeros((length, episodes)),
        np.zeros((episodes, NUM_PHASES)),
        np.zeros((episodes, len(CAUSES))),
        np.zeros((length, episodes)),
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
                found.contractor[step, games] = impact_rewards(states)[:, codes.CON]
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
            agents of the original, see `OriginalAgents`: their class, or a dict by name.
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
        score_without_contractor=estimate((found.rewards - found.contractor)[:-1].sum(axis=0)),
        overflowed=dict(found.overflowed),
        impossible_turns=int(found.impossible_turns.sum()),
        phishing_rate=float(options.get("phishing_rate", codes.PHISHING_RATE)),
        alarm_rate=float(options.get("alarm_rate", codes.ALARM_RATE)),
    )
