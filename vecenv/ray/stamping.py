"""Timing of actors: stamps of env steps, sent with the replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vecenv.core.base import VecEnv
from vecenv.sync import SyncVectorEnv
from vecenv.timing.stamps import BEGIN_NS, DONE_NS, END_NS, EnvStamps

__all__ = ["ActorStamps", "NewStamps", "StampMirror"]


class NewStamps(NamedTuple):
    """Env steps that have ended since the last reply.

    Attributes:
        env_ids: int64 (R,), counted from the actor's first env, env by env.
        records: int64 (R, RECORD_WORDS), as in a ring, by the actor's clock.
        sent_ns: Time of sending, by that clock.
    """

    env_ids: np.ndarray
    records: np.ndarray
    sent_ns: int


class ActorStamps:
    """The stamps of an actor's envs, in the actor.

    Attributes:
        lanes: int64 (n,), the thread that steps each env; None if steps can't be told apart.
    """

    def __init__(self, envs: VecEnv) -> None:
        self._envs = envs
        found = envs._begin_stamps()
        self._stamps = found if isinstance(found, EnvStamps) else None
        self.lanes: np.ndarray | None = None
        if self._stamps is None:
            envs._end_stamps()
        else:
            self._taken = self._stamps.counted()
            self.lanes = envs._env_lanes()

    def mark_done(self) -> None:
        """Stamp that the results of a call are written; async workers of an actor do it alone."""
        if isinstance(self._envs, SyncVectorEnv):
            self._envs._group.mark_done(-1)

    def take(self, now_ns: int) -> NewStamps | None:
        """Return the stamps since the last call."""
        if self._stamps is None:
            return None
        env_ids, words, self._taken = self._stamps.words_since(self._taken)
        return NewStamps(env_ids, words.T, now_ns)

    def end(self) -> None:
        """Stop stamping."""
        if self._stamps is not None:
            self._envs._end_stamps()


class StampMirror:
    """The caller's copy of the stamps of all actors, by the caller's clock.

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

    def enter(self, new: NewStamps, first_env: int, actor: tuple[int, int], now_ns: int) -> None:
        """Add the stamps of a reply.

        Args:
            new: The stamps.
            first_env: The actor's first env.
            actor: Its worker and process; the process is negative on another machine.
            now_ns: Time of arrival.
        """
        records = new.records.copy()
        if actor[1] < 0:
            ahead_ns = new.sent_ns - now_ns
            ahead_ns = self._ahead_ns[actor] = max(ahead_ns, self._ahead_ns.get(actor, ahead_ns))
            records[:, BEGIN_NS] -= np.sign(records[:, BEGIN_NS]) * ahead_ns
            times = records[:, (END_NS, DONE_NS)]
            records[:, (END_NS, DONE_NS)] = np.where(times > 0, times - ahead_ns, 0)
        ids = new.env_ids + first_env
        counts, rings = self.stamps.counts, self.stamps.rings
        size = rings.shape[1]
        ranks = np.arange(len(ids)) - np.searchsorted(ids, ids)  # ids are in order
        for first in range(0, int(ranks.max(initial=-1)) + 1, size // 2):
            part = (ranks >= first) & (ranks < first + size // 2)
            lengths = np.bincount(ids[part], minlength=len(counts))
            if (self._since_room + lengths).max() >= size:
                self._make_room()
                self._since_room[:] = 0
            places = counts[ids[part]] + ranks[part] - first
            rings[ids[part], places % size] = records[part]
            counts += lengths
            self._since_room += lengths
