"""Calls of envs' methods and attributes in other processes."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.error import NoAsyncCallError
from gymnasium.vector import AsyncVectorEnv as OneProcessPerEnv

from vecenv.core.autoreset import read_autoreset_mode
from vecenv.core.deadline import Deadline
from vecenv.workers.stamping import StampedPool

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RemoteCalls"]

_WORKER = 5  # place of the argument


class RemoteCalls(StampedPool):
    """The part of `AsyncVectorEnv` that reads, sets and calls attributes of envs."""

    num_workers: int
    _workers: range
    _timeout: float | None
    _pending_own: Callable[[], Any] | None

    # Not in AsyncVectorEnv, whose signature would be this one then.
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Leave envs with a worker function, which speaks Gymnasium's protocol, to its class."""
        worker = args[_WORKER] if len(args) > _WORKER else kwargs.get("worker")
        if worker is None or cls.__module__ != "vecenv.workers.env":  # a subclass
            return super().__new__(cls)
        if "autoreset_mode" in kwargs:
            kwargs["autoreset_mode"] = read_autoreset_mode(kwargs["autoreset_mode"])
        return OneProcessPerEnv(*args, **kwargs)

    def _begin(self, call: str, give: Callable[[], None]) -> None:
        raise NotImplementedError

    def _finish(self, call: str, deadline: Deadline) -> Any:
        raise NotImplementedError

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """Seeds of the envs' generators."""
        return self.get_attr("np_random_seed")

    @property
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """Copies of the envs' generators."""
        return self.get_attr("np_random")

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Start calling a method of every env, or reading an attribute."""
        self._calls.require_idle("call_async")
        self._begin_call("call", [(name, args, kwargs)] * (self.num_workers + 1))

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for `call_async` and return one result per env.

        Raises:
            NoAsyncCallError: No `call_async` is pending.
            StepTimeoutError: Some env has not answered; the call stays pending.
        """
        self._require_pending("call")
        _, _, results = self._finish("call", self._deadline(timeout))
        found = tuple(result for part in results for result in part)
        self._calls.end_async()
        self._exchange.drop_answers()
        return found

    def _begin_call(self, kind: str, requests: list[Any]) -> None:
        exchange = self._exchange
        self._pending_own = None
        if exchange.own is not None:
            method = getattr(exchange.own, kind)
            self._pending_own = lambda: method(*requests[0])
        self._begin("call", lambda: exchange.ask_all(kind, requests[1:]))

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env, or read an attribute, and return the results."""
        self._calls.require_idle("call")
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def render(self) -> tuple[Any, ...]:
        """Return what each env renders."""
        return self.call("render")

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every env."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every env, to one value or to one per env (a list or tuple).

        Raises:
            ValueError: The list has the wrong length.
        """
        self._calls.require_idle("set_attr")
        values = self._value_per_env(values)
        bounds = [0, *self._exchange.pool.bounds]
        self._begin_call(
            "set_attr", [(name, values[first:last]) for first, last in pairwise(bounds)]
        )
        self.call_wait()

    def _require_pending(self, call: str) -> None:
        self._calls.require_open(f"{call}_wait")
        if self._calls.pending != call:
            raise NoAsyncCallError(
                f"Calling `{call}_wait` without any prior call to `{call}_async`.", call
            )

    def _deadline(self, timeout: float | None) -> Deadline:
        if timeout is None:
            return Deadline(self._timeout, is_limit=True)
        return Deadline(timeout)
