"""Finding out about envs in a process that is thrown away, so that nothing they do can hurt."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gymnasium import Env

from vecenv.core.deadline import Deadline
from vecenv.core.faults import describe_exit
from vecenv.core.interrupts import interrupts_later
from vecenv.core.pickling import dumps, loads
from vecenv.workers.process import Process, tell_after_fork

if TYPE_CHECKING:
    from vecenv.workers.child import ChildSetup
    from vecenv.workers.starting import StartMethod

__all__ = [
    "MOST_THREADS",
    "Apart",
    "Probe",
    "ProbeError",
    "ProbeTimeout",
    "WaitMeter",
    "can_share",
    "probe_env",
    "run_apart",
    "tells_queues",
]

MOST_THREADS = 256  # of a worker whose envs wait

_STEPPING_S = 0.015  # to tell how long a step takes
_GLANCE_S = 0.003  # to tell that envs compute, unless that is clear sooner
_SLOW_S = 0.5  # after which fewer than three steps must do
_CHEAP_TO_MAKE_S = 0.5  # envs that are made a second time, to see that it is another one
_START_S = 60.0  # until a process for a probe is there; it has not seen any user code then
_SLICE_S = 0.05  # between looks whether it is alive
_END_S = 0.5  # for a process that has answered to end by itself
_MEASURED_STEPS, _MEASURED_NS = 64, 200_000_000
_WAITING_SHARE = 0.5
_OPENGL = re.compile(rb"/lib(GL|EGL|GLX|OSMesa|GLESv2)[.\-_0-9]")
_WORTHWHILE_NS = 200_000  # handing a step to a thread costs a tenth of this

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


class _Task(NamedTuple):
    """What a process for a probe is started with.

    Attributes:
        function: Called with the factories and `args`; returns the result.
        args: What can be pickled.
        setup: What every process for envs is given.
        pipe: For the result.
        is_worker: Whether libraries are limited to one thread, as in workers.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    setup: ChildSetup
    pipe: Any
    is_worker: bool


def run_apart(
    function: Callable[..., Any],
    factories: Factories,
    *args: Any,
    timeout: float,
    method: str | None = None,
) -> Any:
    """Return `function(factories, *args)`, called in a process of its own; see `Apart`.

    Args:
        function: Of a module; raises what it likes.
        factories: Of the envs.
        *args: Further arguments, and the result, are pickled.
        timeout: Seconds for user code: unpickling of the factories included, start of the process
            excluded.
        method: Start method, see `choose_method`.

    Raises:
        ProbeError: It has raised, taken too long, or ended its process.
    """
    from vecenv.workers.starting import choose_method

    with Apart(function, factories, *args) as apart:
        apart.start(choose_method(method))
        return apart.result(timeout)


class Apart:
    """A call in a process of its own, while this one goes on; a context, at whose end it is over.

    The process leads a group of processes, which are all killed then: whatever envs have started
    ends with them.

    Args:
        function, factories, *args: As of `run_apart`.
        is_worker: Whether libraries are limited to one thread, as in workers.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        factories: Factories,
        *args: Any,
        is_worker: bool = False,
    ) -> None:
        self._function, self._factories, self._args = function, factories, args
        self._is_worker = is_worker
        self._process: Process | None = None
        self._pipe: Any = None
        tell_after_fork(self)

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def has_ended(self) -> bool:
        """Whether this process has no process to end."""
        return self._process is None

    def leave_to_parent(self, parent_pid: int) -> None:
        """Let go of the process in a fork, and close its copy of the pipe."""
        self._process = None
        if self._pipe is not None:
            self._pipe.close()

    def start(self, method: StartMethod) -> None:
        """Start the process."""
        from vecenv.workers.starting import make_start

        start = make_start(method, self._factories)
        self._pipe, there = start.context.Pipe()
        with there:  # which the child has then
            task = _Task(self._function, self._args, start.setup, there, self._is_worker)
            self._process = start.process(_be_apart, task, name="vecenv-probe", daemon=False)
            self._process.start()

    def result(self, timeout: float) -> Any:
        """Wait for the result, and a moment for the end of the process; errors as of `run_apart`.

        Args:
            timeout: As of `run_apart`.
        """
        assert self._process is not None
        _receive(self._pipe, self._process, Deadline(_START_S), "begun")
        what = f"ended after {timeout:g} s"
        kind, value = _receive(self._pipe, self._process, Deadline(timeout), what)
        if kind == "failed":
            raise ProbeError(value)
        self._process.join(_END_S)
        return loads(value)

    def kill(self) -> None:
        """Kill the process and all that it has started; nothing happens the second time."""
        with interrupts_later():
            process = self._process
            if process is not None:
                if process.pid is not None:
                    with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
                        os.killpg(process.pid, signal.SIGKILL)  # which Windows has not
                process.kill()  # it may have no group of its own yet
                process.join(5)
                process.close()  # unless it can't be ended, in a system call for example
                self._process = None
            if self._pipe is not None:
                self._pipe.close()


def _receive(pipe: Any, process: Any, deadline: Any, what: str) -> Any:
    """Return the next message of a probe."""
    try:
        # Processes that it has started may keep its pipe open when it is gone.
        while not pipe.poll(min(_SLICE_S, deadline.left())):
            if deadline.is_over:
                raise ProbeTimeout(f"it has not {what}")
            if not process.is_alive() and not pipe.poll(0):
                raise EOFError
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        process.join(1)
        raise ProbeError(f"its process {describe_exit(process.exitcode)}", has_died=True) from None


def _be_apart(task: _Task) -> None:
    """Carry out a task: the target of the process."""
    from vecenv.workers.child import end_child, limit_threads, set_up_child

    family = set_up_child(task.setup, "vecenv-probe")
    if task.is_worker:
        limit_threads()
    warnings.simplefilter("ignore")  # what is made later for good repeats them
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is ended already
        task.pipe.send("begun")
    try:
        result = "result", dumps(task.function(task.setup.load(), *task.args))
    except (Exception, KeyboardInterrupt) as error:  # an env's, which the vector env tells better
        result = "failed", f"{type(error).__name__}: {error}"
    family.look()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        task.pipe.send(result)
    end_child()


class Probe(NamedTuple):
    """What stepping a single env has shown.

    Attributes:
        make_s: Seconds that making it took.
        step_s: Seconds per step.
        is_waiting: Whether steps mostly wait.
        is_new: Whether the factory makes a new env each time.
        is_only: Whether a process can hold one such env only.
    """

    make_s: float
    step_s: float
    is_waiting: bool
    is_new: bool = True
    is_only: bool = False


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
        env.reset()
        return Probe(make_s, *_step_alone(env, _STEPPING_S), is_only=is_only)
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


def can_share(factories: Factories) -> bool:
    """Whether envs as of the last factory gain by threads of one process: they mostly wait.

    Not if they draw by OpenGL: libraries such as pyglet hold the current context for all threads,
    so that envs draw into one another's pictures.
    """
    env = factories[-1]()
    try:
        env.reset()
        return _step_alone(env)[1] and not _has_opengl()
    finally:
        env.close()


def _step_alone(env: Env, seconds: float = 0.0) -> tuple[float, bool]:
    """Return seconds per step, of the fastest of some blocks of steps, and whether it waits.

    Args:
        env: Reset.
        seconds: For how long to step it at least, to tell its speed; to tell whether it waits takes
            less.
    """
    actions = [env.action_space.sample() for _ in range(64)]
    meter, fastest, steps, block = WaitMeter(), float("inf"), 0, 1
    begin = time.perf_counter()
    while (
        (steps < 3 and time.perf_counter() - begin < _SLOW_S)
        or time.perf_counter() - begin < seconds
        or (meter.is_measuring and (meter.found_waiting or time.perf_counter() - begin < _GLANCE_S))
    ):
        meter.begin()
        now = time.perf_counter()
        for number in range(block):
            result = env.step(actions[(steps + number) % len(actions)])
            if result[2] or result[3]:
                env.reset()
        block_s = time.perf_counter() - now
        meter.end(block)
        steps += block
        fastest = min(fastest, block_s / block)
        block = 2 * block if block_s < 5e-4 else block
    return fastest, meter.found_waiting


class WaitMeter:
    """Finds out from the first steps whether envs wait (sleep, network) or compute.

    Attributes:
        is_measuring: Whether more steps are wanted.
        found_waiting: The verdict so far: of the time that no thread of this process was in the
            queue for a core, none computed for more than half; so nothing else in it may compute.
    """

    def __init__(self) -> None:
        self.is_measuring = True
        self.found_waiting = False
        self._steps = 0
        self._wall_ns = self._cpu_ns = self._queue_ns = self._switches = 0
        self._begun = (0, 0, 0)
        self._queued_ns: dict[str, int] = {}  # by thread, when these began

    def begin(self) -> None:
        """Note the clocks before some steps."""
        self._queued_ns = _read_queued_ns()
        self._begun = (time.perf_counter_ns(), time.process_time_ns(), _voluntary_switches())

    def end(self, num_steps: int) -> None:
        """Note the clocks after `num_steps` env steps."""
        wall_ns, cpu_ns, switches = self._begun
        self._wall_ns += time.perf_counter_ns() - wall_ns
        self._cpu_ns += time.process_time_ns() - cpu_ns
        self._switches += _voluntary_switches() - switches
        for thread, queued_ns in _read_queued_ns().items():
            self._queue_ns += max(0, queued_ns - self._queued_ns.get(thread, 0))
        self._steps += num_steps
        self.is_measuring = self._steps < _MEASURED_STEPS and self._wall_ns < _MEASURED_NS
        self.found_waiting = (
            self._cpu_ns < _WAITING_SHARE * (self._wall_ns - self._queue_ns)
            and self._wall_ns > _WORTHWHILE_NS * self._steps
            # Where queues are not told: who is only kept from a core gives it up involuntarily.
            and 2 * self._switches >= self._steps
        )


def _read_queued_ns() -> dict[str, int]:
    """How long each thread has been in the queue for a core, in ns; Linux alone tells, if at all.

    On a machine that is busy with other programs envs spend most of their time there, those that
    compute, and those that wait each time that they have waited.
    """
    found: dict[str, int] = {}
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return found
    for thread in threads:
        with (
            contextlib.suppress(OSError, ValueError, IndexError),  # the thread may end
            open(f"/proc/self/task/{thread}/schedstat", "rb") as file,
        ):
            found[thread] = int(file.read().split()[1])
    return found


def tells_queues() -> bool:
    """Whether the system tells how long threads have been in the queue for a core."""
    return bool(_read_queued_ns())


def _voluntary_switches() -> int:
    try:
        import resource
    except ImportError:  # Windows, which does not tell: whoever does not compute has waited
        return time.perf_counter_ns()
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw


def _has_opengl() -> bool:
    """Whether this process has loaded OpenGL; Linux alone tells."""
    try:
        return _OPENGL.search(Path("/proc/self/maps").read_bytes()) is not None
    except OSError:
        return False
