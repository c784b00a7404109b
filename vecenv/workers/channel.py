"""The channel between caller and worker: a pair of sockets, and the frames that go through it.

A frame is a head of 24 bytes, and a payload. The head says what it is, an env, a number and how
many bytes of payload follow. The number is that of the caller's command; a worker's replies have it
too, so replies to commands that have been given up are known. Payloads are pickles, and rare: a
step of plain arrays has none.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable

from vecenv.core.pickling import dumps

__all__ = ["ASK", "CLOSE", "DONE", "HEAD", "ROW", "SEND", "STEP", "Channel", "frame", "message"]

_PATIENCE_S = 0.0002  # of a worker beside a caller that steps envs, too
_yield: Callable[[], None] = getattr(os, "sched_yield", lambda: None)

HEAD = struct.Struct("<iiqq")

# From the caller.
STEP = 1  # payload: actions of all envs, if they have no fixed shape
SEND = 2  # of one env. Payload: a list of its action, likewise
ASK = 3  # payload: name of a method of the worker or its chunk, and the arguments pickled
CLOSE = 4

# From the worker. Payload: `Answer`, if there is more to say than what is in memory.
DONE = 11  # of STEP and ASK
ROW = 12  # of SEND


def frame(kind: int, env_id: int, number: int, payload: bytes = b"") -> bytes:
    """Return a frame."""
    return HEAD.pack(kind, env_id, number, len(payload)) + payload


def message(method: str, *request: object) -> bytes:
    """Return the payload of ASK; raises what pickling raises."""
    return dumps((method, dumps(request)))


class Channel(socket.socket):
    """One end of a pair of sockets; no process inherits it by starting another program."""

    @staticmethod
    def pair() -> tuple[Channel, Channel]:
        """Return both ends."""
        here, there = (Channel(fileno=end.detach()) for end in socket.socketpair())
        there.setblocking(True)  # whatever the program has set by `socket.setdefaulttimeout`
        return here, there

    def be_patient(self) -> None:
        """Let `recv` look for `_PATIENCE_S` before it sleeps, where a system can.

        For a worker beside a caller that steps envs, too. Waking it takes 40 us, and Linux does so
        on the core of the caller, who goes on: a step of 64 CartPoles takes 196 us instead of 161.
        """
        if not hasattr(socket, "MSG_DONTWAIT"):  # Windows
            return
        read, poll = super().recv, select.poll()
        poll.register(self, select.POLLIN)

        def recv(most: int, flags: int = socket.MSG_DONTWAIT) -> bytes:
            end = time.monotonic() + _PATIENCE_S
            while True:
                try:
                    return read(most, flags)
                except BlockingIOError:
                    if time.monotonic() > end:
                        poll.poll()
                    else:
                        _yield()  # to the caller, should it be on this core

        self.recv = recv  # type: ignore[method-assign]  # for this end

    def __del__(self) -> None:
        """Close one that nobody has any more."""
        self.close()
