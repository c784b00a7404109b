"""The channel between caller and worker: two pipes, and the frames that go through them.

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
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from vecenv.core.pickling import dumps

__all__ = ["HEAD", "Channel", "Kind", "ask", "frame", "message"]

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


class Channel:
    """One end of two pipes; in Windows, whose pipes can't be waited for, of a pair of sockets.

    Attributes:
        reader, writer: Files, as `selectors` takes them.
        recv: Returns at most so many bytes; none if the other end is gone.
        send: Writes bytes and returns how many; raises OSError if the other end is gone.
    """

    recv: Callable[[int], bytes]
    send: Callable[[Any], int]

    def __init__(self, reader: Any, writer: Any) -> None:
        self._is_open, self.reader, self.writer = True, reader, writer
        if isinstance(reader, int):
            self.recv, self.send = partial(os.read, reader), partial(os.write, writer)
            self._close: Any = os.close
            self._set_blocking: Any = os.set_blocking
        else:
            self.recv, self.send = reader.recv, writer.send
            self._close, self._set_blocking = socket.socket.close, socket.socket.setblocking

    @staticmethod
    def pair() -> tuple[Channel, Channel]:
        """Return both ends; no process inherits them by starting another program."""
        if sys.platform == "win32":
            here, there = socket.socketpair()
            there.setblocking(True)  # whatever the program has set by `socket.setdefaulttimeout`
            return Channel(here, here), Channel(there, there)
        (their_reader, writer), (reader, their_writer) = os.pipe(), os.pipe()
        return Channel(reader, writer), Channel(their_reader, their_writer)

    def set_nonblocking(self) -> None:
        """Let `recv` and `send` raise BlockingIOError instead of waiting."""
        for file in (self.reader, self.writer):
            self._set_blocking(file, False)

    def be_patient(self) -> None:
        """Let `recv` look for `_PATIENCE_S` before it sleeps, where a pipe is read.

        For a worker beside a caller that steps envs, too. Waking it takes 40 us, and Linux does so
        on the core of the caller, who goes on: a step of 64 CartPoles takes 196 us instead of 161.
        """
        if not isinstance(self.reader, int):
            return
        read, poll = self.recv, select.poll()
        os.set_blocking(self.reader, False)
        poll.register(self.reader, select.POLLIN)

        def recv(most: int) -> bytes:
            end = time.monotonic() + _PATIENCE_S
            while True:
                try:
                    return read(most)
                except BlockingIOError:
                    if time.monotonic() > end:
                        poll.poll()
                    else:
                        _yield()  # to the caller, should it be on this core

        self.recv = recv

    def send_all(self, data: bytes) -> None:
        """Write all of the bytes."""
        while data:
            data = data[self.send(data) :]

    def close(self) -> None:
        """Close it; nothing happens the second time."""
        if self._is_open:
            self._is_open = False
            for file in {self.reader, self.writer}:
                self._close(file)

    def __del__(self) -> None:
        """Close one that nobody has any more."""
        self.close()
