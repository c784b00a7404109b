"""Finding out about envs in a process that is thrown away, so that nothing they do can hurt."""

from __future__ import annotations

import contextlib
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait as wait_for_any
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Env

from vecenv.core.deadline import Deadline
from vecenv.core.faults import describe_exit, leave_if_copied
from vecenv.core.interrupts import interrupts_later
from vecenv.core.library_threads import forked_with_one_openblas_thread
from vecenv.core.pickling import dumps, loads
from vecenv.core.random_actions import RandomActions
from vecenv.machine import pss_bytes
from vecenv.workers.starting import (
    ChildSetup,
    set_up_child,
    start_process,
    why_fresh,
)

__all__ = [
    "Probe",
    "ProbeError",
    "ProbeTimeout",
    "probe_env",
    "run_apart",
    "voluntary_switches",
]

_STEPPING_S = 0.015  # to tell how long a step takes
_SLOW_S = 0.5  # after which fewer than three steps must do
_CHEAP_TO_MAKE_S = 0.5  # envs that are made a second time, to see that it is another one
_START_S = 60.0  # until a process for a probe is there; it has not seen any user code then
_END_S = 0.5  # for a process that has answered to end by itself
_KILL_S = 5.0
_MEASURED_STEPS, _MEASURED_S = 64, 0.2
_WAITING_SHARE = 0.5
_WORTHWHILE_S = 2e-4  # waking a worker costs a tenth of this
_SIZE_BYTES = 8  # of the number before each message

Factories = Sequence[Callable[[], Env]]


class ProbeError(RuntimeError):
    """A probe has come to no result; the message says why.

    Attributes:
        has_died: Whether its process has ended, as a step here could end this one.
    """

    def __init__(self, text: str, *, has_died: bool = False) -> None:
        super().__init__(text)
        self.has_died = has_died


class ProbeTimeout(ProbeError):
    """A probe has taken too long."""


def run_apart(
    function: Callable[..., Any],
    factories: Factories,
    *args: Any,
    timeout: float,
    method: str | None = None,
) -> Any:
    """Return `function(factories, *args)`, called in a process of its own.

    What envs have started there ends with it.

    Args:
        function: Of a module; raises what it likes.
        factories: Of the envs.
        *args: Further arguments, and the result, are pickled.
        timeout: Seconds for user code: unpickling of the factories included, start of the process
            excluded.
        method: Start method, see `why_fresh`.

    Raises:
        ProbeError: It has raised, taken too long, or ended its process.
    """
    process: Any = None
    try:
        with forked_with_one_openblas_thread(), interrupts_later():
            task = _be_apart, "vecenv-probe", factories, function, args
            try:
                process, channel = start_process(why_fresh(method), *task)
            except Exception as error:  # factories that can't be pickled
                raise ProbeError(f"it can't be started: {error}") from error
        with contextlib.closing(channel):
            _receive(channel, process, Deadline(_START_S), "begun")
            what = f"ended after {timeout:g} s"
            kind, value = _receive(channel, process, Deadline(timeout), what)
            if kind == "failed":
                raise ProbeError(value)
            process.join(_END_S)
            return loads(value)
    finally:
        if process is not None:
            if process.is_alive():
                process.kill()
                process.join(_KILL_S)
            process.close()


def _receive(channel: socket.socket, process: Any, deadline: Deadline, what: str) -> Any:
    """Return the next message of a probe: its size, then its pickle."""

    def read(size: int) -> bytes:
        data = b""
        while len(data) < size:
            if not wait_for_any([channel], deadline.left()):
                raise ProbeTimeout(f"it has not {what}")
            if not (part := channel.recv(size - len(data))):
                raise EOFError
            data += part
        return data

    try:
        return loads(read(int.from_bytes(read(_SIZE_BYTES), "little")))
    except (EOFError, ConnectionResetError):
        process.join(1)
        raise ProbeError(f"its process {describe_exit(process.exit_code)}", has_died=True) from None


def _be_apart(
    channel: socket.socket, child: ChildSetup, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Carry out a task in the process for it."""

    def send(message: Any) -> None:
        leave_if_copied()
        pickled = dumps(message)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is ended already
            channel.sendall(len(pickled).to_bytes(_SIZE_BYTES, "little") + pickled)

    set_up_child(child, channel)
    warnings.simplefilter("ignore")  # what is made later for good repeats them
    send("begun")
    try:
        result = "result", dumps(function(child.load(), *args))
    except (Exception, KeyboardInterrupt) as error:  # an env's, which the vector env tells better
        result = "failed", f"{type(error).__name__}: {error}"
    send(result)


class Probe(NamedTuple):
    """What stepping a single env has shown.

    Attributes:
        make_s: Seconds that making it took.
        step_s: Seconds per step.
        is_waiting: Whether steps mostly wait, and gain by a process for each env therefore.
        is_new: Whether the factory makes a new env each time.
        is_only: Whether a process can hold one such env only.
        memory_bytes: Of the process; None if the system does not tell.
    """

    make_s: float
    step_s: float
    is_waiting: bool
    is_new: bool = True
    is_only: bool = False
    memory_bytes: int | None = None


def probe_env(factories: Factories) -> Probe:
    """Make and step an env of the last factory, unless that always returns the same one.

    Args:
        factories: Of some envs that are to be made; what the last one makes, the others do.
    """
    env_fn = factories[-1]
    begin = time.perf_counter()
    env = env_fn()
    make_s = time.perf_counter() - begin
    is_own, is_only = True, False
    try:
        if make_s < _CHEAP_TO_MAKE_S:
            other = _make_beside(env_fn, factories[0])
            is_only = other is None
            is_own = other is None or other.unwrapped is not env.unwrapped
            if not is_own:
                return Probe(make_s, 0.0, False, is_new=False)  # its owner steps and closes it
            if other is not None:
                other.close()
        step_s, is_waiting = _step_alone(env)
        memory_bytes = pss_bytes() if is_waiting else None
        return Probe(make_s, step_s, is_waiting, is_only=is_only, memory_bytes=memory_bytes)
    finally:
        if is_own:
            env.close()


def _make_beside(env_fn: Callable[[], Env], neighbour_fn: Callable[[], Env]) -> Env | None:
    """Make an env of a factory again while the first lives; None if no other can be made either."""
    try:
        return env_fn()
    except Exception:
        try:
            neighbour = neighbour_fn()
        except Exception:
            return None
        neighbour.close()
        raise  # each of them may be made once


def _step_alone(env: Env) -> tuple[float, bool]:
    """Return the median seconds per step, and whether the env waits.

    It waits if this process computes for less than half of the time, and gives its core up at every
    other step: what is only kept from a core by other programs gives it up involuntarily.

    Args:
        env: Is reset, and stepped with random actions that its masks allow.
    """
    draw = RandomActions(env)
    seen = env.reset()
    times: list[float] = []
    cpu_s = switches = 0.0
    is_waiting, begin = False, time.perf_counter()
    while (wall_s := time.perf_counter() - begin) < _STEPPING_S or (
        (len(times) < 3 and wall_s < _SLOW_S)
        or (is_waiting and len(times) < _MEASURED_STEPS and wall_s < _MEASURED_S)
    ):
        draw.see(*seen)
        action = draw()
        cpu_before, switches_before = time.process_time(), voluntary_switches()
        now = time.perf_counter()
        result = env.step(action)
        seen = result[0], result[4]
        if result[2] or result[3]:
            seen = env.reset()
        times.append(time.perf_counter() - now)
        cpu_s += time.process_time() - cpu_before
        switches += voluntary_switches() - switches_before
        stepped_s = sum(times)
        is_waiting = (
            cpu_s < _WAITING_SHARE * stepped_s
            and stepped_s > _WORTHWHILE_S * len(times)
            and 2 * switches >= len(times)
        )
    return float(np.median(times)), is_waiting


def voluntary_switches() -> int:
    """Return how often this thread has given up its core to wait for something."""
    try:
        import resource
    except ImportError:  # Windows, which does not tell: whoever does not compute has waited
        return time.perf_counter_ns()
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw
