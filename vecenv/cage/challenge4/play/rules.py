"""A defender of rules over events: what it analyses, removes and restores, and its decoys.

Each agent is on its own. When free, it does the first of these that there is to do:

1. Restore a host on which Analyse found `escalate.sh`, or `cmd.sh` of an exploit that no process
   event told of, so that Remove does not know it; and, in the zone of the mission, a host from
   which red was seen to connect.
2. Remove what a process event told of.
3. Analyse a host that was attacked, or attacks, or was treated with Remove.
4. Place decoys, two a host.
5. Analyse the host that was looked at least recently.

What green users do by mistake is not taken for an attack: their connections tell no port of the
host that sees them, and their processes no id.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vecenv.cage.challenge4.events import Cage4Events
from vecenv.cage.challenge4.rules.codes import (
    ANALYSE,
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

__all__ = ["Rules"]

_PLACE = {name: place for place, name in enumerate(Cage4Events.NODE_FEATURES)}
_ATTACKS = [_PLACE[f"local_{name}"] for name in ("ssh", "ot", "http", "https", "sql", "mail")]
_ATTACKS += [_PLACE["local_drawn"], _PLACE["remote_ssh"]]
_MISSIONS = {1: 1, 3: 2}  # agents of the operational zones, and the phase of their mission
_NUM_DECOYS = 2


class Rules:
    """The defender, for many games at a time; see `policies` for what a policy is."""

    observation = "events"

    def reset(self, masks: Sequence[np.ndarray]) -> None:
        """Begin episodes."""
        sizes = [len(subnets) * HOSTS_PER_SUBNET for subnets in BLUE_SUBNETS]
        self._there = [mask[:, :size] for mask, size in zip(masks, sizes, strict=True)]
        self._left = np.zeros((len(masks[0]), NUM_BLUE), np.int64)  # steps of actions under way
        # By agent, (games, hosts): what is to do, whose process is known to Remove, decoys.
        none = [[np.zeros(there.shape, bool) for there in self._there] for _ in range(4)]
        self._look, self._remove, self._restore, self._known = none
        self._decoys = [np.zeros(there.shape, np.int64) for there in self._there]

    def act(self, observations: Sequence[np.ndarray]) -> np.ndarray:
        """Return the agents' indices int64 (N, 5)."""
        actions = np.tile(np.array(SLEEPS), (len(self._left), 1))
        for agent in range(NUM_BLUE):
            events = Cage4Events.of(observations[agent])
            nodes = events.nodes[:, : self._there[agent].shape[1]]  # without routers
            self._note(agent, nodes, events.vector[:, 0])
            self._choose(agent, nodes[..., _PLACE["since_analyse"]], actions[:, agent])
        self._left = np.maximum(self._left - 1, 0)
        return actions

    def _note(self, agent: int, nodes: np.ndarray, phase: np.ndarray) -> None:
        """Learn from what this step told of the agent's hosts."""
        told = {name: nodes[..., place] > 0 for name, place in _PLACE.items()}
        look, remove, known = self._look[agent], self._remove[agent], self._known[agent]
        restore = self._restore[agent]
        look &= ~told["is_analysed"]
        look |= told["is_removed"]
        restore |= told["has_escalate"] | (told["has_cmd"] & ~known)
        remove &= ~told["is_removed"]
        for work in (look, remove, known, restore):
            work &= ~told["is_restored"]
        self._decoys[agent][told["is_restored"]] = 0
        remove |= told["session"]
        known |= told["session"]
        look |= nodes[..., _ATTACKS].any(axis=-1) | told["is_source"]
        if agent in _MISSIONS:
            restore |= told["is_source"] & (phase == _MISSIONS[agent])[:, None]

    def _choose(self, agent: int, stale: np.ndarray, actions: np.ndarray) -> None:
        """Write the index of each game's action; of games that are busy it stays Sleep."""
        there, decoys = self._there[agent], self._decoys[agent]
        num, size = there.shape
        longest_first = 1 + stale.astype(np.int64)
        free = self._left[:, agent] == 0
        for family, base, score in (
            (RESTORE, 2 * size + 1, self._restore[agent] * longest_first),
            (REMOVE, size + 1, self._remove[agent] * longest_first),
            (ANALYSE, 0, self._look[agent] * longest_first),
            (DECOY, NUM_ACTIONS[agent] - size, _NUM_DECOYS - decoys),
            (ANALYSE, 0, longest_first),
        ):
            score = score * there
            host = score.argmax(axis=1)
            rows = np.flatnonzero(free & (score[np.arange(num), host] > 0))
            actions[rows] = base + host[rows]
            free[rows] = False
            self._left[rows, agent] = BLUE_TICKS[family]
            if family == RESTORE:
                self._restore[agent][rows, host[rows]] = False
            elif family == DECOY:
                decoys[rows, host[rows]] += 1
