"""Batches that a thread draws, and copies to a device, before they are asked for."""

from __future__ import annotations

import collections
import functools
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch

from buffers.core.arguments import check_count, resolve_device
from buffers.core.batches import Batch
from buffers.core.errors import BufferMisuseError
from buffers.core.guard import Guard

__all__ = ["Prefetch", "bound_draw", "end_prefetch"]

_B = TypeVar("_B", bound=Batch)
_MAX_DEPTH = 64
_PAUSE = 0.02  # seconds, after a draw that has waited in vain, before the next
_TIMEOUT = 60.0  # seconds in which a batch has to be drawn


class Prefetch(Iterator[_B], Generic[_B]):
    """Batches of a buffer, drawn by a thread ahead of the learner; made by `buffer.prefetch`.

    The first `next` asks for `depth` + 1 batches, each later one for one more. A batch is drawn
    from the buffer as it is when it is asked for: whatever changes or reads the buffer waits until
    all that were asked for are drawn. So a batch is `depth` batches old at most, nothing depends on
    how fast the thread is, and if nothing is added in between the batches are those that as many
    calls of `sample` would have returned.

    Batches that were drawn and not taken are dropped by `close`, and when the buffer is saved,
    copied or loaded; if nothing else was drawn since, the generator goes back to before the first
    of them.

    Args:
        buffer: Held until `close`.
        draw: Draws a batch; called by the thread. Without `is_ordered` it is given a function that
            says whether to end, and asks it while it waits.
        generator: What it draws by.
        guard: Of the buffer.
        depth: See above.
        device: Where batches are copied to; None leaves them.
        timeout: Seconds in which a batch has to be drawn.
        patience: Of these, seconds that the draw itself may wait, then raising TimeoutError, which
            is told to whoever has waited as long; else the thread draws anew.
        is_ordered: Whether what changes or reads the buffer waits for batches that were asked for.
            Without, a draw may wait for what other processes add.

    Raises:
        BufferMisuseError: An argument does not fit, or another `Prefetch` of the buffer is open.
    """

    def __init__(
        self,
        draw: Callable[..., _B],
        generator: Callable[[], Any],
        guard: Guard,
        depth: int,
        device: torch.device | str | None,
        *,
        timeout: float = _TIMEOUT,
        patience: float = 0.0,
        is_ordered: bool = True,
    ):
        self._depth = check_count("depth", depth, _MAX_DEPTH)
        target = None if device is None else resolve_device(device)
        self._guard = guard
        self._work = _Work(draw, generator, target, timeout, patience, is_ordered=is_ordered)
        with guard.lock:
            if guard.ahead is not None and not guard.ahead.has_ended():
                raise BufferMisuseError(
                    "another prefetch of this buffer is open; close it first: two would draw in no "
                    "certain order"
                )
            guard.ahead = self._work
        self._stop = weakref.finalize(
            self, end_prefetch, self._work, guard
        )  # also when Python ends

    def __iter__(self) -> Self:
        """Itself."""
        return self

    def __next__(self) -> _B:
        """The next batch.

        Raises:
            BufferMisuseError: This was closed, or `sample` raised it: the buffer is empty, say. Any
                error of the draw comes here, and the next call draws anew.
            TimeoutError: The draw takes longer than `timeout`.
        """
        return self._work.take(self._depth)

    def close(self) -> None:
        """End the thread, and drop what was drawn and not taken. Twice does no harm."""
        self._stop()

    def __enter__(self) -> Self:
        """Itself; closed at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()


def bound_draw(
    sample: Callable[..., _B], batch_size: int, options: Mapping[str, Any]
) -> Callable[[], _B]:
    """`sample` with its arguments.

    Raises:
        BufferMisuseError: It does not take them, or one of them is memory to draw into.
    """
    try:
        if "out" in options:
            raise TypeError("each batch is a new one, so there is no out")
        inspect.signature(sample).bind(batch_size, **options)
    except TypeError as error:
        raise BufferMisuseError(f"options are {dict(options)}: {error}") from None
    return functools.partial(sample, batch_size, **options)


def end_prefetch(work: _Work, guard: Guard) -> None:
    """End a thread that draws ahead; `work` is what `guard.ahead` is while it is open."""
    try:
        # Within a call of the buffer, as a finalizer or a signal handler is, the thread may be
        # waiting for that: it ends when it can.
        work.close(joins=not guard.lock._is_owned())  # type: ignore[attr-defined]  # see `guard`
    finally:
        if guard.ahead is work and work.has_ended():
            guard.ahead = None


class _Work:
    """What the thread and its callers share; the thread holds this, and nobody's `Prefetch`."""

    def __init__(
        self,
        draw: Callable[..., Any],
        generator: Callable[[], Any],
        device: torch.device | None,
        timeout: float,
        patience: float,
        *,
        is_ordered: bool,
    ):
        self._draw, self._generator, self._device = draw, generator, device
        self._timeout, self._patience, self._is_ordered = timeout, patience, is_ordered
        self._awaited_since: float | None = None
        self._changed = threading.Condition()
        self._num_asked, self._is_closed = 0, False
        self._drawn: collections.deque[tuple[Any, np.ndarray]] = collections.deque()
        self._error: BaseException | None = None
        self._after: np.ndarray | None = None  # where the generator stood after the last draw
        self._thread: threading.Thread | None = None
        self._stream: Any = None

    def take(self, depth: int) -> Any:
        """The oldest batch; asks for as many as are to be ahead then."""
        with self._changed:
            if self._is_closed:
                raise BufferMisuseError(
                    "this prefetch was closed, or the process was forked; ask the buffer for "
                    "another"
                )
            self._start()
            if not self._error:
                self._ask(depth + 1 - len(self._drawn) - self._num_asked)
            self._awaited_since = time.monotonic()
            try:
                self._wait(lambda: bool(self._drawn or self._error))
            finally:
                self._awaited_since = None
            if not self._drawn:
                error, self._error = self._error, None
                assert error is not None
                raise error
            batch, _ = self._drawn.popleft()
        if self._device is not None and self._device.type == "cuda":
            _each(batch._contents(), lambda t: t.record_stream(torch.cuda.current_stream(t.device)))
        return batch

    def _ask(self, number: int) -> None:
        self._num_asked += max(0, number)
        self._changed.notify_all()

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
            thread.start()
            self._thread = thread

    def settle(self) -> bool:
        """Wait until all batches that were asked for are drawn.

        Returns:
            Whether it is the thread itself that calls, which does not wait.
        """
        if threading.current_thread() is self._thread:
            return True
        if self._num_asked and self._is_ordered:
            with self._changed:
                self._wait(lambda: not self._num_asked)
        return False

    def is_ending(self) -> bool:
        """Whether the thread that draws is to end."""
        return self._is_closed

    def has_ended(self) -> bool:
        """Whether this was closed, and its thread is gone."""
        return self._is_closed and (self._thread is None or not self._thread.is_alive())

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Wait; raise if it takes too long, or the thread is not there."""
        deadline = time.monotonic() + self._timeout
        while not is_done():
            if self._is_closed:
                raise BufferMisuseError("this prefetch was closed by another thread")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"a draw ahead is not done after {self._timeout:g} s; is a disk gone?"
                )
            self._changed.wait(0.5)

    def rewind(self) -> None:
        """Drop what was drawn and not taken; nothing is asked for."""
        with self._changed:
            if not self._drawn:
                return
            before = self._drawn[0][1]
            self._drawn.clear()
            generator, after = self._generator(), self._after
            if after is not None and np.array_equal(generator.get_state(), after):
                generator.set_state(before)

    def abandon(self) -> None:
        """In a child of fork, where the thread is not: it may have held the lock."""
        self._changed = threading.Condition()
        self._num_asked, self._is_closed = 0, True
        self._drawn.clear()

    def close(self, joins: bool = True) -> None:
        """End the thread, and wait for it unless that is left out."""
        with self._changed:
            self._is_closed, self._num_asked = True, 0
            self._changed.notify_all()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        if not (joins or self._is_ordered):  # of an ordered one the thread is idle in calls
            return
        thread.join(_TIMEOUT)
        if thread.is_alive():
            raise TimeoutError(f"the thread that draws ahead is not done after {_TIMEOUT:g} s")
        self.rewind()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._num_asked or self._is_closed):
                    self._changed.wait()
                if self._is_closed:
                    return
            try:
                before = self._generator().get_state()
                batch = self._draw() if self._is_ordered else self._draw(self.is_ending)
                after = self._generator().get_state()
                if self._device is not None:
                    batch = self._moved(batch, self._device)
            except BaseException as error:  # for the caller
                with self._changed:
                    if isinstance(error, TimeoutError) and self._is_early():
                        self._changed.wait(_PAUSE)
                        continue
                    self._error, self._num_asked = error, 0
                    self._changed.notify_all()
                continue
            with self._changed:
                self._drawn.append((batch, before))
                self._after = after
                self._num_asked = max(0, self._num_asked - 1)
                self._changed.notify_all()
            del batch

    def _is_early(self) -> bool:
        """Whether nobody has waited for as long as the draw has."""
        since = self._awaited_since
        if self._is_ordered or self._is_closed:
            return False
        return since is None or time.monotonic() - since < self._patience

    def _moved(self, batch: Any, device: torch.device) -> Any:
        """A copy of a batch on a device, done."""
        if device.type != "cuda":
            return type(batch)._made_of(_each(batch._contents(), lambda t: t.to(device)))
        self._stream = self._stream or torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            contents = _each(
                batch._contents(), lambda t: t.pin_memory().to(device, non_blocking=True)
            )
        self._stream.synchronize()
        return type(batch)._made_of(contents)


def _each(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The same nest with what the function returns for each tensor."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _each(part, function) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_each(part, function) for part in value)
    return value
