"""Messages that a worker receives, shared by its loop and its threads."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from vecenv.core.pickling import loads

__all__ = ["Inbox"]


class Inbox:
    """A worker's end of the pipe: commands' messages for the loop, actions for whoever steps.

    Whoever waits for one kind keeps what comes of the other. Everything waited for has been
    announced in shared memory, so it is on its way.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._messages: deque[dict[str, Any]] = deque()
        self._actions: dict[int, Any] = {}
        self._latest = -1  # number of the actions that came last

    def message(self, sequence: int) -> dict[str, Any]:
        """Return the message of a command; others are ones that came twice."""
        with self._lock:
            while True:
                while not self._messages:
                    self._receive()
                message = self._messages.popleft()
                if message["sequence"] == sequence:
                    return message

    def action(self, env_id: int) -> Any:
        """Return the action of an env that was queued."""
        with self._lock:
            while env_id not in self._actions:
                self._receive()
            return self._actions.pop(env_id)

    def drop_actions(self) -> None:
        """Forget the actions that nobody has asked for."""
        with self._lock:
            self._actions.clear()

    def _receive(self) -> None:
        message = loads(self._pipe.recv_bytes())
        if message["kind"] == "actions":
            if message["number"] > self._latest:  # otherwise it came before
                self._latest = message["number"]
                self._actions.update(message["actions"])
        else:
            self._messages.append(message)
