"""Timing of actors: the caller's copy of the stamps of env steps, which come with the replies."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

import numpy as np

from vecenv.timing.stamps import BEGIN_NS, DONE_NS, END_NS, EnvStamps

__all__ = ["StampMirror"]


class StampMirror:
    """The stamps of all actors, by the caller's clock.

    Processes of one machine share a clock. The offset of another machine's clock is estimated as
    the most by which a reply seems to arrive before it was sent; the error is the delay of the
    fastest reply.

    Args:
        num_envs: Number of envs of all actors.
        make_room: Called before uncounted stamps are overwritten.

    Attributes:
        stamps: The copy.
    """

    def __init__(self, num_envs: int, make_room: Callable[[], None]) -> None:
        self.stamps = EnvStamps.make(num_envs)
        self._make_room = make_room
        self._since_room = np.zeros(num_envs, np.int64)  # entered since
        self._ahead_ns: dict[tuple[int, int], int] = {}  # by worker and process

    def enter(
        self, new: tuple[np.ndarray, np.ndarray, int], first_env: int, actor: tuple[int, int]
    ) -> None:
        """Add the stamps of a reply; of an env with more than its ring has, the latest.

        Args:
            new: The stamps, see `Reply`.
            first_env: The actor's first env.
            actor: Its worker and process; the process is negative on another machine.
        """
        env_ids, records, sent_ns = new[0], new[1].copy(), new[2]
        if actor[1] < 0:
            ahead_ns = sent_ns - perf_counter_ns()
            ahead_ns = self._ahead_ns[actor] = max(ahead_ns, self._ahead_ns.get(actor, ahead_ns))
            records[:, BEGIN_NS] -= np.sign(records[:, BEGIN_NS]) * ahead_ns
            times = records[:, (END_NS, DONE_NS)]
            records[:, (END_NS, DONE_NS)] = np.where(times > 0, times - ahead_ns, 0)
        ids, counts, rings = env_ids + first_env, self.stamps.counts, self.stamps.rings
        size = rings.shape[1]
        lengths = np.bincount(ids, minlength=len(counts))
        if (self._since_room + lengths).max() >= size:
            self._make_room()
            self._since_room[:] = 0
        ranks = np.arange(len(ids)) - np.searchsorted(ids, ids)  # ids are in order
        fits = ranks >= lengths[ids] - size
        places = (counts[ids] + ranks)[fits]
        rings[ids[fits], places % size] = records[fits]
        counts += lengths
        self._since_room += lengths
