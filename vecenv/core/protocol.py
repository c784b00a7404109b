"""Which call is allowed when: the state machine that every backend's calls pass through."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
from gymnasium.error import (
    AlreadyPendingCallError,
    ClosedEnvironmentError,
    NoAsyncCallError,
    ResetNeeded,
)

from vecenv.core.actions import as_array
from vecenv.core.arguments import read_count
from vecenv.core.errors import ForkedEnvError

__all__ = ["CallProtocol", "told"]


class CallProtocol:
    """State of the calls of one vector env.

    A call that the state does not allow raises one of Gymnasium's errors, names the pending call,
    and changes nothing:

                       is closed   call pending   envs in flight   never reset   some env reopened
        full reset     refused     refused        gives them up    yes           yes
        masked reset   refused     refused        only others      refused       yes
        step           refused     refused        refused          refused       refused
        send           refused     refused        only others      refused       only others
        other calls    refused     refused        refused          yes           yes

    Attributes:
        pending: Name of the pending asynchronous call ("reset", "step", "call") or None.
        in_flight, num_in_flight: bool (num_envs,), envs between `send` and `recv`; their number.
        has_reset: Whether all envs have been reset, and their state is known since.
        unreset: Ids of envs that were reopened and have not been reset since.
        fault: What has made a reset or a new vector env necessary since the last reset, in a line;
            empty for nothing. Every call that is refused because of it quotes it.
        parent_pid: In a fork, the process that the envs belong to, or None.
        is_started: Whether the envs exist; before, only `reset` starts them.
        unfinished: Brings the envs in flight up to date if an exception from elsewhere, such as
            Ctrl-C, ends the call that now runs; None between calls.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.is_closed = self.has_reset = False
        self.is_started = True
        self.unreset: set[int] = set()
        self._reset_mask: np.ndarray | None = None  # of the reset that has begun
        self.pending: str | None = None
        self.in_flight = np.zeros(num_envs, dtype=np.bool_)
        self.num_in_flight = 0
        self.fault = ""
        self.unfinished: Callable[[], None] | None = None
        self.parent_pid: int | None = None

    @property
    def is_ready(self) -> bool:
        """Whether `step` is allowed: reset, open, and nothing pending or in flight."""
        return (
            self.has_reset
            and self.pending is None
            and not self.num_in_flight
            and self.unfinished is None
            and not self.unreset
            and not self.is_closed
            and self.parent_pid is None
        )

    # -- what has happened ---------------------------------------------------------------------

    def mark_reset(self) -> None:
        """Record that the reset has ended, and that all envs have been reset at least once."""
        mask, self._reset_mask = self._reset_mask, None
        self.unreset = {k for k in self.unreset if mask is not None and not mask[k]}
        self.fault, self.has_reset = "", True

    def forget_reset(self, fault: BaseException | str = "") -> None:
        """Require a new `reset`: after an env's exception its state is unknown."""
        self.note_fault(fault)
        self.has_reset = False

    def note_fault(self, fault: BaseException | str) -> None:
        """Keep what happened, unless something happened before."""
        self.fault = self.fault or (fault if isinstance(fault, str) else told(fault))

    def give_up(self, fault: BaseException | str = "") -> None:
        """Record that nothing is in flight any more, as a step failed, and require a `reset`."""
        self.in_flight[:], self.num_in_flight = False, 0
        self.forget_reset(fault)

    def mark_sent(self, env_ids: np.ndarray) -> None:
        """Record that these envs are in flight."""
        self.in_flight[env_ids] = True
        self.num_in_flight += len(env_ids)
        self.unfinished = None

    def mark_received(self, env_ids: np.ndarray) -> None:
        """Record that these envs have come back."""
        self.in_flight[env_ids] = False
        self.num_in_flight -= len(env_ids)
        self.unfinished = None

    def settle(self) -> None:
        """Complete what an interrupted call has left; if interrupted, the next call does it."""
        if self.unfinished is not None:
            self.unfinished()
            self.unfinished = None

    # -- what is allowed -----------------------------------------------------------------------

    def require_open(self, call: str) -> None:
        """Refuse `call` after close, and in a fork."""
        if self.parent_pid is not None:
            raise ForkedEnvError(
                f"`{call}` was called in process {os.getpid()}, a fork of process "
                f"{self.parent_pid}, which this vector env with its workers and its shared memory "
                "belongs to; make a vector env of its own in the fork, or call it there"
            )
        if self.is_closed:
            because = f" It is closed because: {self.fault}" if self.fault else ""
            raise ClosedEnvironmentError(
                f"Trying to operate on a vector env after a call to `close()`: `{call}` came after "
                f"`close`; make a new vector env.{because}"
            )
        self.settle()

    def require_idle(self, call: str) -> None:
        """Refuse `call` after close or while another call is pending."""
        self.require_open(call)
        if self.pending is not None or self.num_in_flight or not self.is_started:
            self._refuse_pending(call)

    def require_ready(self, call: str) -> None:
        """Refuse `call` unless the envs have been reset and nothing is pending."""
        if not self.is_ready:
            self.require_idle(call)
            if not self.is_ready:
                self._ask_for_reset(call)

    def _ask_for_reset(self, call: str) -> NoReturn:
        if self.has_reset and self.unreset:
            raise ResetNeeded(
                f"`{call}` came after envs {sorted(self.unreset)} were reopened; reset these "
                "first, with reset(options={'reset_mask': mask}), bool (num_envs,)"
            )
        if not self.fault:
            raise ResetNeeded(f"`{call}` was called before the first `reset`; call `reset` first")
        raise ResetNeeded(
            f"`{call}` was called after a fault, in what state the envs are is not known; call "
            f"`reset` first. What happened: {self.fault}"
        )

    def _refuse_pending(self, call: str) -> NoReturn:
        if not self.is_started:
            raise ResetNeeded(
                f"`{call}` came before the first `reset`, which starts the workers and makes their "
                "envs, as these were asked for with lazy=True; call `reset` first"
            )
        if self.pending is not None:
            raise AlreadyPendingCallError(
                f"Calling `{call}` while waiting for a pending call to `{self.pending}` to "
                f"complete; call `{self.pending}_wait` first",
                self.pending,
            )
        raise AlreadyPendingCallError(
            f"Calling `{call}` while {self.num_in_flight} envs are in flight since `send` (the "
            f"first is env {int(np.argmax(self.in_flight))}); call `recv` until all have come back",
            "send",
        )

    def begin_reset(self, reset_mask: np.ndarray | None, call: str = "reset") -> None:
        """Begin a reset of all envs (those in flight are given up) or of the masked ones."""
        self.require_open(call)
        if self.pending is not None:
            self._refuse_pending(call)
        if reset_mask is None or reset_mask.all():
            self.in_flight[:], self.num_in_flight = False, 0
            reset_mask = None
        elif not self.has_reset:
            raise ResetNeeded(
                "`reset` with a `reset_mask` came before the first full `reset`; "
                "reset all envs first"
            )
        elif (self.in_flight & reset_mask).any():
            self._refuse_pending(call)
        self._reset_mask = reset_mask

    # -- ids -----------------------------------------------------------------------------------

    def check_env_ids(self, env_ids: Any, call: str = "send") -> np.ndarray:
        """Return the ids of a `send`, or other call, as int64 (B,); all envs in order for None.

        Raises:
            TypeError, ValueError: Not a one-dimensional list of distinct integers in range.
            AlreadyPendingCallError: Some of these envs are already in flight.
        """
        self.require_open(call)
        if self.pending is not None:
            self._refuse_pending(call)
        if not self.has_reset:
            self._ask_for_reset(call)
        ids = np.arange(self.num_envs) if env_ids is None else self.distinct_ids(env_ids)
        if self.unreset and not self.unreset.isdisjoint(ids.tolist()):
            self._ask_for_reset(call)
        if self.num_in_flight and np.count_nonzero(self.in_flight[ids]):
            env_id = int(ids[np.argmax(self.in_flight[ids])])
            raise AlreadyPendingCallError(
                f"`{call}` for env {env_id}, which is in flight since an earlier `send`; "
                "`recv` it first",
                "send",
            )
        return ids

    def distinct_ids(self, env_ids: Any, name: str = "env_ids") -> np.ndarray:
        """Return distinct ids of envs as int64 (B,), a copy."""
        try:
            ids = as_array(env_ids)
        except TypeError as error:  # raised for tensors with gradients
            raise TypeError(f"{name} can't be made an array of integers: {error}") from None
        if ids.ndim != 1 or len(ids) == 0:
            raise ValueError(f"{name} must be a non-empty (B,) array of ids, got shape {ids.shape}")
        if ids.dtype.kind not in "iu":
            raise TypeError(f"{name} must be integers, got dtype {ids.dtype}")
        ids = ids.astype(np.int64)
        is_outside = (ids < 0) | (ids >= self.num_envs)
        if is_outside.any():
            bad = np.asarray(env_ids)[is_outside][0]
            raise ValueError(f"{name} has {bad}, expected ids from 0 to {self.num_envs - 1}")
        if np.bincount(ids).max() > 1:
            raise ValueError(
                f"{name} has repeated ids: {len(ids)} ids, {len(np.unique(ids))} different ones"
            )
        return ids

    def check_recv(self, min_envs: int | None, max_envs: int | None) -> tuple[int, int]:
        """Return how many envs a `recv` waits for, and how many it may return; see there."""
        self.require_open("recv")
        if self.num_in_flight == 0:
            if self.fault:  # what was in flight has been given up
                self._ask_for_reset("recv")
            raise NoAsyncCallError("`recv` was called without a pending `send`", "recv")
        there = self.num_in_flight
        most = there if max_envs is None else min(read_count("max_envs", max_envs), there)
        least = most if min_envs is None else read_count("min_envs", min_envs, 1, there)
        if least > most:
            raise ValueError(
                f"min_envs is {min_envs} and max_envs {max_envs}, expected min_envs <= max_envs"
            )
        return least, most


def told(fault: BaseException) -> str:
    """Return an error and its notes in one line."""
    text = " ".join([str(fault), *getattr(fault, "__notes__", ())]).strip()
    return f"{type(fault).__name__}{': ' if text else ''}{text}"
