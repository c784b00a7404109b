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

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vecenv.cage.challenge4.play.player import Cage4Player
from vecenv.cage.challenge4.play.rules import Rules
from vecenv.cage.challenge4.rules.codes import (
    BLUE_SUBNETS,
    BLUE_TICKS,
    DECOY,
    HOSTS_PER_SUBNET,
    NUM_ACTIONS,
    NUM_BLUE,
    REMOVE,
    RESTORE,
    SLEEPS,
)
from vecenv.cage.identity import CAGE4_RULES_VERSION
from vecenv.core.importing import import_object

__all__ = ["POLICY_NAMES", "TRAINED_DEFENDER", "Cage4Policy", "find_policy", "make_policy"]

TRAINED_DEFENDER = Path(__file__).with_name("defender.npz")  # what `make cage4` has trained
_FIRST_BLOCK = 1 + 27  # of the process events of the first subnet
_BLOCK = 59
_MAX_HOSTS = 48
_NEVER = np.iinfo(np.int64).max


@runtime_checkable
class Cage4Policy(Protocol):
    """What plays, see the module."""

    def reset(self, masks: Sequence[np.ndarray], /) -> Any:
        """Begin episodes."""

    def act(self, observations: Sequence[np.ndarray], /) -> Any:
        """Return indices int (N, 5), or these and messages."""


class Sleep:
    """Sleep always."""

    def reset(self, masks: Sequence[np.ndarray]) -> None:
        """Begin episodes."""

    def act(self, observations: Sequence[np.ndarray]) -> np.ndarray:
        """Return five times Sleep of each game."""
        return np.tile(SLEEPS, (len(observations[0]), 1))


class Random:
    """Draw uniformly over all indices with mask true, every step anew."""

    def __init__(self, seed: int | None) -> None:
        self._rng = np.random.default_rng(seed)

    def reset(self, masks: Sequence[np.ndarray]) -> None:
        """Begin episodes."""
        self._sizes = np.stack([mask.sum(axis=1) for mask in masks], axis=1)
        self._indices = [np.argsort(~mask, axis=1, kind="stable") for mask in masks]

    def act(self, observations: Sequence[np.ndarray]) -> np.ndarray:
        """Draw."""
        ranks = self._rng.integers(0, self._sizes)
        rows = np.arange(len(ranks))
        return np.stack([self._indices[a][rows, ranks[:, a]] for a in range(NUM_BLUE)], axis=1)


class React:
    """Queue hosts with process events; when free, treat the first; else place decoys, or sleep."""

    def __init__(self, family: int, places_decoys: bool = False) -> None:
        self._family, self._places_decoys = family, places_decoys

    def reset(self, masks: Sequence[np.ndarray]) -> None:
        """Begin episodes."""
        num = len(masks[0])
        # When a host was queued: the smallest is the first; never if it is not queued.
        self._queued = np.full((num, NUM_BLUE, _MAX_HOSTS), _NEVER)
        self._has_decoy = np.zeros((num, NUM_BLUE, _MAX_HOSTS), bool)
        self._left = np.zeros((num, NUM_BLUE), np.int64)
        self._masks = list(masks)
        self._step = 0

    def act(self, observations: Sequence[np.ndarray]) -> np.ndarray:
        """Treat the first host in the queue."""
        actions = np.tile(SLEEPS, (len(self._left), 1))
        for agent in range(NUM_BLUE):
            self._act(agent, np.asarray(observations[agent]), actions)
        self._step += 1
        return actions

    def _act(self, agent: int, obs: np.ndarray, actions: np.ndarray) -> None:
        rows, size = np.arange(len(obs)), HOSTS_PER_SUBNET * len(BLUE_SUBNETS[agent])
        parts = [
            obs[:, start : start + HOSTS_PER_SUBNET]
            for start in range(_FIRST_BLOCK, _FIRST_BLOCK + size // 16 * _BLOCK, _BLOCK)
        ]
        alarms = np.concatenate(parts, axis=1).astype(bool)
        queued = self._queued[:, agent, :size]
        is_new = alarms & (queued == _NEVER)
        queued[is_new] = (self._step * _MAX_HOSTS + np.arange(size))[np.nonzero(is_new)[1]]
        is_free = self._left[:, agent] == 0
        first = queued.argmin(axis=1)
        acts = is_free & (queued[rows, first] != _NEVER)
        base = size + 1 if self._family == REMOVE else 2 * size + 1
        actions[acts, agent] = base + first[acts]
        queued[rows[acts], first[acts]] = _NEVER
        self._left[acts, agent] = BLUE_TICKS[self._family]
        if self._places_decoys:
            start = NUM_ACTIONS[agent] - size
            wanted = self._masks[agent][:, start:] & ~self._has_decoy[:, agent, :size]
            place = wanted.argmax(axis=1)
            places = is_free & ~acts & wanted.any(axis=1)
            actions[places, agent] = start + place[places]
            self._has_decoy[rows[places], agent, place[places]] = True
            self._left[places, agent] = BLUE_TICKS[DECOY]
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


POLICY_NAMES = (
    "sleep",
    "random",
    "react_restore",
    "react_remove",
    "decoy_restore",
    "rules",
    "defender",
)


def make_policy(name: str, seed: int | None = 0) -> Cage4Policy:
    """Make one of `POLICY_NAMES`; "defender" is the trained one that is installed with this."""
    if name == "sleep":
        return Sleep()
    if name == "random":
        return Random(seed)
    if name == "react_restore":
        return React(RESTORE)
    if name == "react_remove":
        return React(REMOVE)
    if name == "decoy_restore":
        return React(RESTORE, places_decoys=True)
    if name == "rules":
        return Rules()
    if name == "defender":
        return Cage4Player(TRAINED_DEFENDER)
    raise ValueError(f"no policy {name!r}; there are {', '.join(POLICY_NAMES)}")


def _load(path: Path) -> Cage4Player:
    """Return the defender of a file; warn if it was trained under another version of the rules."""
    player = Cage4Player(path)
    version = player.facts.get("rules_version", CAGE4_RULES_VERSION)  # files of before have none
    if version != CAGE4_RULES_VERSION:
        warnings.warn(
            f"{path.name} was made with version {version} of the rules, and is used with version "
            f"{CAGE4_RULES_VERSION}: scores under the two are not comparable",
            stacklevel=3,
        )
    return player


def find_policy(policy: Any, seed: int | None = 0) -> Cage4Policy:
    """Return the policy of a name, a file, "module:object", an object or a function.

    Args:
        policy: See above; hyphens in names are underscores. A class is called without arguments.
        seed: Of what the policy draws, if it does.

    Raises:
        TypeError, ValueError: It is none of these.
        OSError: The file can't be read.
    """
    if isinstance(policy, Path):
        return _load(policy)
    if isinstance(policy, str):
        name = policy.replace("-", "_")
        if name in POLICY_NAMES:
            return make_policy(name, seed)
        for path in (Path(policy), Path(policy) / "defender.npz"):  # in a run folder
            if path.is_file():
                return _load(path)
        if ":" not in policy:
            known = ", ".join(name.replace("_", "-") for name in POLICY_NAMES)
            kind = (
                "a folder without a defender.npz"
                if Path(policy).is_dir()
                else "but there is no such file"
            )
            raise ValueError(
                f"policy is {policy!r}, {kind}; expected a saved defender or its run folder, "
                f"'module:object', or one of {known}"
            )
        policy = import_object("policy", policy)
    if isinstance(policy, type):
        policy = policy()
    if isinstance(policy, Cage4Policy):
        return policy
    if callable(policy):
        return FunctionPolicy(policy)
    raise TypeError(
        f"policy is {policy!r:.200}, expected an object with reset(masks) and act(observations), "
        "or a function of observations and masks"
    )
