"""The channel between caller and worker: a pair of sockets, and the frames that go through it.

A frame is a head of 24 bytes, and a payload. The head says what it is, an env, a number and how
many bytes of payload follow. The number is that of the caller's command; a worker's replies have it
too, so replies to commands that have been given up are known. Payloads are pickles, and rare: a
step of plain arrays has none.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from vecenv.core.pickling import dumps

__all__ = ["HEAD", "Kind", "ask", "frame", "message", "patient", "socket_pair"]

_PATIENCE_S = 0.0002  # of a worker beside a caller that steps envs, too
_yield: Callable[[], None] = getattr(os, "sched_yield", lambda: None)

HEAD = struct.Struct("<iiqq")


class Kind:
    """What a frame is."""

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


def message(method: str, *request: Any) -> bytes:
    """Return the payload of ASK; raises what pickling raises."""
    return dumps((method, dumps(request)))


def ask(number: int, method: str, *request: Any) -> bytes:
    """Return the frame of ASK, with number 0 if no answer is waited for."""
    return frame(Kind.ASK, 0, number, message(method, *request))


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return our end, which does not block, and the worker's, which does.

    No process inherits them by starting another program.
    """
    here, there = socket.socketpair()
    here.setblocking(False)
    there.setblocking(True)  # whatever the program has set by `socket.setdefaulttimeout`
    return here, there


def patient(channel: socket.socket) -> Callable[[int], bytes]:
    """Return a `recv` that looks for `_PATIENCE_S` before it sleeps, where the system can do so.

    For a worker beside a caller that steps envs, too. Waking it takes 40 us, and Linux does so on
    the core of the caller, who goes on: a step of 64 CartPoles takes 196 us instead of 161.
    """
    if not hasattr(socket, "MSG_DONTWAIT"):  # in Windows
        return channel.recv

    def recv(most: int) -> bytes:
        end = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end:
            try:
                return channel.recv(most, socket.MSG_DONTWAIT)
            except BlockingIOError:
                _yield()  # to the caller, should it be on this core
        return channel.recv(most)

    return recv
