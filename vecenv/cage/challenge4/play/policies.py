"""The blue policies of the reference returns (TRACES, end), for many games at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vecenv.cage.challenge4.games import Cage4Games
from vecenv.cage.challenge4.rules.codes import (
    BLUE_SUBNETS,
    BLUE_TICKS,
    DECOY,
    HOSTS_PER_SUBNET,
    NUM_ACTIONS,
    NUM_BLUE,
    REMOVE,
    RESTORE,
)

__all__ = ["POLICIES", "make_policy"]

_FIRST_BLOCK = 1 + 27  # of the process events of the first subnet
_BLOCK = 59
_SLEEPS = [3 * HOSTS_PER_SUBNET * len(subnets) + 1 for subnets in BLUE_SUBNETS]
_MAX_HOSTS = 48
_NEVER = np.iinfo(np.int64).max


def sleep(games: Cage4Games) -> np.ndarray:
    """Sleep always."""
    return np.tile(_SLEEPS, (games.num_games, 1))


class Random:
    """Draw uniformly over all indices with mask true, every step anew."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, games: Cage4Games) -> np.ndarray:
        if games.envs.episode_lengths[0] == 0:
            masks = games.masks
            self._sizes = np.stack([mask.sum(axis=1) for mask in masks], axis=1)
            self._indices = [np.argsort(~mask, axis=1, kind="stable") for mask in masks]
        ranks = self._rng.integers(0, self._sizes)
        rows = np.arange(games.num_games)
        return np.stack([self._indices[a][rows, ranks[:, a]] for a in range(NUM_BLUE)], axis=1)


class React:
    """Queue hosts with process events; when free, treat the first; else place decoys, or sleep."""

    def __init__(self, family: int, places_decoys: bool = False) -> None:
        self._family, self._places_decoys = family, places_decoys

    def __call__(self, games: Cage4Games) -> np.ndarray:
        num = games.num_games
        if games.envs.episode_lengths[0] == 0:
            # When a host was queued: the smallest is the first; never if it is not queued.
            self._queued = np.full((num, NUM_BLUE, _MAX_HOSTS), _NEVER)
            self._has_decoy = np.zeros((num, NUM_BLUE, _MAX_HOSTS), bool)
            self._left = np.zeros((num, NUM_BLUE), np.int64)
            self._masks = games.masks
            self._step = 0
        actions = sleep(games)
        rows = np.arange(num)
        for agent in range(NUM_BLUE):
            obs, size = games.agent_obs(agent), HOSTS_PER_SUBNET * len(BLUE_SUBNETS[agent])
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
        self._step += 1
        return actions


POLICIES: dict[str, Callable[[int], Callable[[Cage4Games], np.ndarray]]] = {
    "sleep": lambda seed: sleep,
    "random": Random,
    "react_restore": lambda seed: React(RESTORE),
    "react_remove": lambda seed: React(REMOVE),
    "decoy_restore": lambda seed: React(RESTORE, places_decoys=True),
}


def make_policy(name: str, seed: int = 0) -> Callable[[Cage4Games], np.ndarray]:
    """Make a policy that all games of a batch play from the beginning of their episodes.

    Returns:
        A function from the games, as they stand before a step, to actions int64 (G, 5).
    """
    if name not in POLICIES:
        raise ValueError(f"no policy {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name](seed)
