"""Blue policies: what counts as one, ready-made ones, and how one is found by its name or file.

A policy plays many games at a time, which begin and end together. It is an object with

- `reset(masks)`: episodes begin; masks are five arrays bool, (N, 82) of agents 0 to 3 and (N, 242)
  of agent 4;
- `act(observations)`: from five arrays (N, 92), (N, 210) to indices int (N, 5), or to a pair of
  these and messages int (N, 5) of 8 bits; an attribute `observation` may ask for other arrays, see
  `Cage4VectorEnv`;

or a function from the observations and masks to indices. The ready-made ones are those of the
reference returns, and `rules`; like the challenge's evaluation they send no messages.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from gymnasium.spaces import Discrete

from vecenv.cage.challenge4.play.player import Cage4Memory, Cage4Player
from vecenv.cage.challenge4.rules import codes
from vecenv.cage.identity import CAGE4_RULES_VERSION
from vecenv.cage.playing import called, found_policy

__all__ = ["POLICY_NAMES", "TRAINED_DEFENDER", "Cage4Policy", "OriginalAgents", "find_policy"]

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
    found = found_policy(
        policy,
        "an object with reset(masks) and act(observations), a function of observations and masks, "
        "or agents of the original, with get_action(observation, action_space)",
        ready={name: functools.partial(make, seed) for name, make in _READY.items()},
        files=("defender.npz",),
        load=_load,
        make=_made,
        convert=_converted,
    )
    try:
        inspect.signature(found.reset).bind(None)
    except TypeError:
        raise TypeError(f"{policy!r} is for CAGE 2: CAGE 4 calls `reset(masks)`") from None
    return found
