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
host that sees them, and their processes no id. `Cage4Memory` keeps what there is to do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vecenv.cage.challenge4.play.player import Cage4Memory

__all__ = ["Rules"]


class Rules:
    """The defender, for many games at a time; see `policies` for what a policy is."""

    observation = "events"

    def reset(self, masks: Sequence[np.ndarray]) -> None:
        """Begin episodes."""
        self._memory = Cage4Memory(len(masks[0]))
        self._memory.begin(masks)

    def act(self, observations: Sequence[np.ndarray]) -> np.ndarray:
        """Return the agents' indices int64 (N, 5)."""
        self._memory.note(observations)
        return self._memory.act(self._memory.rule_choices())
