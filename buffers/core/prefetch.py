"""Batches that a thread draws, and copies to a device, before they are asked for."""

from __future__ import annotations

import collections
import concurrent.futures
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch

from buffers.core.arguments import check_count, resolve_device
from buffers.core.batches import Batch
from buffers.core.copies import each_tensor
from buffers.core.errors import BufferMisuseError
from buffers.core.guard import Guard

__all__ = ["Prefetch"]

_B = TypeVar("_B", bound=Batch)
_MAX_DEPTH = 64
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
        draw: Draws a batch; called by the thread. Without `is_ordered` it is given a function that
            says whether to end, and asks it while it waits.
        generator: What it draws by.
        guard: Of the buffer.
        depth: See above.
        device: Where batches are copied to; None leaves them.
        timeout: Seconds that `next` waits for a batch.
        why: Says why there is none by then.
        is_ordered: Whether what changes or reads the buffer waits for batches that were asked for.
            Without, a draw may wait for what other processes add, as long as nobody closes this.
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
        why: Callable[[], str] = lambda: "a draw ahead takes too long; is a disk gone?",
        is_ordered: bool = True,
    ):
        self._depth = check_count("depth", depth, _MAX_DEPTH)
        self._timeout, self._why = timeout, why
        target = None if device is None else resolve_device(device)
        if guard.ahead is not None:
            raise BufferMisuseError(
                "another prefetch of this buffer is open; close it first: two would draw in no "
                "certain order"
            )
        self._work = guard.ahead = _Work(draw, generator, target, is_ordered=is_ordered)
        # Also when nobody has it any more, and when Python ends.
        self._stop = weakref.finalize(self, self._work.close, guard)

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
        return self._work.take(self._depth, self._timeout, self._why)

    def close(self) -> None:
        """End the thread, and drop what was drawn and not taken. Twice does no harm."""
        self._stop()

    def __enter__(self) -> Self:
        """Itself; closed at the end of the block."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()


class _Work:
    """Draws on a thread, in the order in which they were asked for; holds nobody's `Prefetch`."""

    def __init__(
        self,
        draw: Callable[..., Any],
        generator: Callable[[], Any],
        device: torch.device | None,
        *,
        is_ordered: bool,
    ):
        self._draw, self._generator, self._device = draw, generator, device
        self._is_ordered, self._pid, self._is_closed = is_ordered, os.getpid(), False
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "prefetch")
        self._asked: collections.deque[concurrent.futures.Future] = collections.deque()
        self._after: Any = None  # where the generator stood after the last draw
        self._thread, self._stream = 0, None

    def take(self, depth: int, timeout: float, why: Callable[[], str]) -> Any:
        """The oldest batch; asks for as many as are to be ahead then."""
        if self._is_closed or self._pid != os.getpid():
            raise BufferMisuseError(
                "this prefetch was closed, or the process was forked; ask the buffer for another"
            )
        while len(self._asked) < depth + 1:
            self._asked.append(self._pool.submit(self._run))
        first = self._asked[0]
        if not concurrent.futures.wait([first], timeout).done:
            raise TimeoutError(why())
        if first.exception() is not None:  # what was asked for behind it would fail as well
            self._wait()
            self._asked.clear()
        batch, _ = first.result()
        self._asked.popleft()
        if self._device is not None and self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            each_tensor(batch._contents(), lambda t: t.record_stream(stream))
        return batch

    def settle(self) -> None:
        """Wait until all batches that were asked for are drawn, unless it is the thread that asks.

        Raises:
            TimeoutError: That takes too long.
        """
        if self._is_ordered and self._asked and threading.get_ident() != self._thread:
            self._wait()

    def _wait(self) -> None:
        if self._pid == os.getpid() and concurrent.futures.wait(self._asked, _TIMEOUT)[1]:
            raise TimeoutError(f"draws ahead are not done after {_TIMEOUT:g} s; is a disk gone?")

    def rewind(self) -> None:
        """Drop what was drawn and not taken; nothing is asked for."""
        self.settle()
        drawn = [future.result() for future in self._asked if future.exception() is None]
        self._asked.clear()
        if drawn and self._pid == os.getpid():
            generator = self._generator()
            if np.array_equal(generator.get_state(), self._after):
                generator.set_state(drawn[0][1])

    def close(self, guard: Guard) -> None:
        """End the thread, and wait for it."""
        guard.ahead, self._is_closed = None, True
        if self._pid != os.getpid() or threading.get_ident() == self._thread:
            return
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._asked = collections.deque(f for f in self._asked if not f.cancelled())
        self._wait()
        self.rewind()
        self._pool.shutdown()

    def _run(self) -> tuple[Any, np.ndarray]:
        """A batch, and where the generator stood before it."""
        self._thread, before = threading.get_ident(), self._generator().get_state()
        batch = self._draw() if self._is_ordered else self._draw(self._is_ending)
        self._after = self._generator().get_state()
        return batch if self._device is None else self._moved(batch, self._device), before

    def _is_ending(self) -> bool:
        """Whether nobody takes batches any more: Python waits for the thread when it ends."""
        return self._is_closed or not threading.main_thread().is_alive()

    def _moved(self, batch: Any, device: torch.device) -> Any:
        """A copy of a batch on a device, done."""
        contents = batch._contents()
        if device.type != "cuda":
            return type(batch)._made_of(each_tensor(contents, lambda t: t.to(device)))
        self._stream = self._stream or torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):  # beside what the learner has queued
            moved = each_tensor(contents, lambda t: t.pin_memory().to(device, non_blocking=True))
        self._stream.synchronize()
        return type(batch)._made_of(moved)
