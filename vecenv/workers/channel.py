"""The channel between caller and worker: a pair of sockets, and the frames that go through it.

A frame is a head of 24 bytes and a payload. The head holds the kind, an env id, a number and the
length of the payload in bytes. The caller numbers its commands; a reply repeats the number, so that
late replies to commands that were given up can be dropped. Payloads are pickles, and rare: a step
of plain arrays has none.
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

_PATIENCE_S = 0.0002  # how long a worker polls, if there is a core for each
_yield: Callable[[], None] = getattr(os, "sched_yield", lambda: None)

HEAD = struct.Struct("<iiqq")  # kind, env id, number, bytes of payload


class Kind:
    """What a frame commands or replies."""

    # From the caller.
    STEP = 1  # step all envs; payload: their actions, unless these are in shared memory
    SEND = 2  # step one env; payload: a list of its action, likewise
    ASK = 3  # payload: name of a method of the worker or its chunk, and the arguments pickled
    CLOSE = 4
    # From the worker. Payload: an `Answer`, if there is more to report than the shared rows.
    DONE = 11  # reply to STEP and ASK
    ROW = 12  # reply to SEND


def frame(kind: int, env_id: int, number: int, payload: bytes = b"") -> bytes:
    """Return a frame."""
    return HEAD.pack(kind, env_id, number, len(payload)) + payload


def message(method: str, *request: Any) -> bytes:
    """Return the payload of an ASK; pickling may raise anything."""
    return dumps((method, dumps(request)))


def ask(number: int, method: str, *request: Any) -> bytes:
    """Return the frame of an ASK; the number is 0 if no answer is expected."""
    return frame(Kind.ASK, 0, number, message(method, *request))


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return the caller's end, which does not block, and the worker's, which does.

    Neither is inheritable: programs that are started do not get them.
    """
    here, there = socket.socketpair()
    here.setblocking(False)
    there.setblocking(True)  # whatever the program has set by `socket.setdefaulttimeout`
    return here, there


def patient(channel: socket.socket) -> Callable[[int], bytes]:
    """Return a `recv` that polls for `_PATIENCE_S` before it sleeps, where the system can do so.

    It is for at most as many workers as there are cores. Waking a sleeping worker takes 40 us, and
    Linux may wake it on the busy core of the caller. Where the caller steps envs too, a step of 64
    CartPoles takes 196 us without this, and 161 with it.
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
