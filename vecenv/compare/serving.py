"""The process of one backend, which makes, steps and times the envs: its code and its caller.

Each backend has its own process. So a process that dies or hangs harms no other backend, and memory
and start-up time are those of this backend alone.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, Pipe
from time import monotonic, perf_counter
from typing import Any, NamedTuple

from vecenv.backends import BACKENDS, COMPARED, TIMED, Backend
from vecenv.compare.stepping import BatchStepper, FirstReadyStepper, LoopStepper
from vecenv.core.ending import Watcher
from vecenv.core.errors import describe_exit
from vecenv.core.masks import METHOD, MaskInfos, can_be_masked
from vecenv.machine import tree_memory_bytes
from vecenv.source import BackendUnavailableError, EnvSource, read_source
from vecenv.timing.report import TimingReport

__all__ = [
    "FAILED", "OK", "UNAVAILABLE", "Options", "Round", "Runner", "RunnerError", "RunnerProcess",
    "serve",
]  # fmt: skip


OK, UNAVAILABLE, FAILED = "ok", "unavailable", "failed"
_MOST_CALLS = 50_000  # most calls at a time: the flags of each call are kept until the end
_AT_A_TIME_S = 0.005  # between two looks at the clock
_EPISODES = 2  # episodes of every env in a round
# A round ends after this many times the reset's duration, whatever the episodes do: so resets cost
# at most a tenth of its time.
_RESETS = 10
_PROBE_S = 10.0  # time to find out whether envs wait


@dataclass(frozen=True)
class Options:
    """What is compared, and how.

    Attributes:
        env: Registered id, also "module:id", or "module:factory".
        env_kwargs: For the env's constructor, or the factory.
        num_envs: Numbers of envs to compare.
        backends: Names in `vecenv.backends.COMPARED`.
        seed: Seed of envs and actions.
        rounds: Number of rounds; each backend runs once per round.
        round_s: Least number of seconds per backend and round; if resets take long, the round goes
            on until every env has ended two episodes.
        warm_up_s: Seconds of stepping before the rounds.
        timed_s: Seconds of stepping with timing on.
        timeout: Most seconds for any request to a backend.
        num_workers: Most workers of the async backends, at most one per env; None for
            one per core, or, if envs wait, one per env.
    """

    env: str
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    num_envs: Sequence[int] = (1, 8, 64)
    backends: Sequence[str] = COMPARED
    seed: int = 0
    rounds: int = 5
    round_s: float = 0.15
    warm_up_s: float = 0.3
    timed_s: float = 0.4
    timeout: float = 60.0
    num_workers: int | None = None

    def __post_init__(self) -> None:
        """Check the values; `run_comparison` looks for the env."""
        unknown = [name for name in self.backends if name not in COMPARED]
        if unknown or not self.backends:
            what = f"has {unknown[0]!r}" if unknown else "is empty"
            raise ValueError(f"backends {what}, expected some of {', '.join(COMPARED)}")
        if not self.num_envs or min(self.num_envs) < 1:
            raise ValueError(f"num_envs is {list(self.num_envs)}, expected integers of at least 1")
        for name, least in {"rounds": 1, "seed": 0, "num_workers": 1}.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name} is {value}, expected at least {least}")
        for name in ("round_s", "warm_up_s", "timed_s", "timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, expected seconds above 0")


class Round(NamedTuple):
    """The results of a backend in one round.

    Attributes:
        steps: Env steps.
        seconds: Their duration.
        episodes: Number of episodes that ended in the env with the fewest.
    """

    steps: int
    seconds: float
    episodes: int

    @property
    def rate(self) -> float:
        """Env steps per second."""
        return self.steps / self.seconds


class Runner:
    """Envs of one backend, stepped on command."""

    def __init__(self) -> None:
        self._stepper: Any = None  # a `Stepper`, once there are envs
        self._is_timed = False
        self._call_s = 0.0  # seconds of one call in the latest run

    def open(self, options: Options, name: str, num_envs: int) -> tuple[float, float, int | None]:
        """Make the envs of a backend and reset them.

        Returns the seconds of each, and the number of workers.

        Imports are not timed. The number is None without workers, or if the envs don't tell it.

        Raises:
            BackendUnavailableError: The backend does not support this env.
        """
        source = read_source(options.env, options.env_kwargs)
        backend, self._is_timed = BACKENDS[name], name in TIMED
        for module in backend.imports:
            importlib.import_module(module)
        is_async = backend.makes == BACKENDS["async"].makes
        workers = _workers_for(source, num_envs, options.num_workers) if is_async else {}
        begin = perf_counter()
        envs = _make_envs(source, backend, num_envs, workers)
        made_s = perf_counter() - begin
        steppers = {"loop": LoopStepper, "step": BatchStepper, "first-ready": FirstReadyStepper}
        self._stepper = steppers[backend.stepping or "step"](envs, options.seed)
        return made_s, self._stepper.reset_s, getattr(envs, "num_workers", None)

    def warm_up(self, seconds: float) -> int | None:
        """Step for about this long; return the memory then in use, in bytes."""
        begin, count = perf_counter(), 1
        self._stepper.prepare()
        while (left := seconds - (perf_counter() - begin)) > 0 or self._call_s == 0:
            self._run(count)
            count = max(1, min(2 * count, int(left / self._call_s), _MOST_CALLS))
        self._step_for(0.0, 1)  # rounds then begin with episodes
        return tree_memory_bytes(os.getpid())

    def measure(self, seconds: float) -> Round:
        """Step for at least this long, and until every env has ended two episodes.

        A round that stops inside an episode would count its steps but not its reset. But if resets
        take at most a tenth of the time, because they are quick or episodes long, a round may stop
        anywhere. The next round continues from there.
        """
        return self._step_for(seconds, _EPISODES)

    def take_time(self, seconds: float) -> TimingReport | None:
        """Step for about this long with timing on; None for backends without timing."""
        if not self._is_timed:
            return None
        stepper = self._stepper
        timing, act = stepper.envs.timing, stepper.act

        def timed_act(*args: Any) -> Any:
            with timing.phase("policy"):
                return act(*args)

        stepper.settle()
        timing.enable()
        stepper.prepare()
        timing.clear()
        stepper.act = timed_act
        self.measure(seconds)
        report = timing.report()
        stepper.act = act
        stepper.settle()
        timing.disable()
        return report

    def close(self) -> None:
        """Close the envs."""
        if self._stepper is not None:
            self._stepper.envs.close()

    def _step_for(self, seconds: float, episodes: int) -> Round:
        """Step for `seconds`, then until each env has ended `episodes` episodes, see `measure`."""
        stepper = self._stepper
        stepper.prepare()
        before, enough_s = stepper.episodes.copy(), max(seconds, _RESETS * stepper.reset_s)
        done, spent, ended = 0, 0.0, 0
        while spent < seconds or (spent < enough_s and ended < episodes):
            steps, last_s = self._run(max(1, min(round(_AT_A_TIME_S / self._call_s), _MOST_CALLS)))
            done, spent = done + steps, spent + last_s
            ended = int((stepper.episodes - before).min())
        return Round(done, spent, ended)

    def _run(self, count: int) -> tuple[int, float]:
        steps, seconds = self._stepper.run(count)
        self._call_s = seconds / count
        return steps, seconds


def _workers_for(source: EnvSource, num_envs: int, most: int | None) -> dict[str, Any]:
    """Return the number of workers as an option: one per env if envs wait, which is tried out."""
    from vecenv.choose import try_out  # needed by some backends only

    if most is not None:
        return {"num_workers": min(most, num_envs)}
    with contextlib.suppress(Exception):  # the later construction reports what is wrong
        if try_out(source.env_fn(), _PROBE_S).is_waiting:
            return {"num_workers": num_envs}
    return {}


def _make_envs(source: EnvSource, backend: Backend, num_envs: int, options: dict[str, Any]) -> Any:
    """Make the envs of a backend."""
    if backend.takes == "compiled":
        return source.make_compiled(num_envs)
    env_fn = source.env_fn()
    if backend.stepping == "first-ready":
        env_fn = partial(_with_mask_infos, env_fn)
    return backend.load()([env_fn] * num_envs, **options) if backend.makes else env_fn()


def _with_mask_infos(env_fn: Callable[[], Any]) -> Any:
    """Make an env that puts its masks into infos: a method can't be called at any time."""
    env = env_fn()
    has_method = env.has_wrapper_attr(METHOD) and can_be_masked(env.action_space)
    return MaskInfos(env) if has_method else env


def serve(file_number: int) -> None:
    """Answer the caller's requests over a connection, until it is closed.

    A request is the name of a method of `Runner` with its arguments. The answer is OK with the
    result, or UNAVAILABLE or FAILED with the reason in one line.
    """
    connection, runner = Connection(file_number), Runner()
    while True:
        try:
            name, args = connection.recv()
        except EOFError:
            return
        try:
            answer = OK, getattr(runner, name)(*args)
        except BackendUnavailableError as error:
            answer = UNAVAILABLE, str(error)
        except Exception as error:  # envs may raise anything
            answer = FAILED, describe(error)
        connection.send(answer)
        if name == "close":
            return


def describe(error: BaseException) -> str:
    """Return one line that says what went wrong, and in which env.

    Example:
        >>> describe(ValueError("no such level"))
        'ValueError: no such level'
    """
    text = f"{type(error).__name__}: {error}".split(" (raised by env_fns")[0]
    notes = [note for note in getattr(error, "__notes__", []) if "\n" not in note]
    return "; ".join([text.strip().splitlines()[0].rstrip(": "), *notes[:1]])


_LOOK_S = 0.1  # between two checks that the process is alive
_CLOSE_S = 5.0
_DOING = {"open": "making the envs", "warm_up": "warming up"}


class RunnerError(Exception):
    """A backend can't go on; `is_unavailable` means that it does not support this env."""

    is_unavailable = False


class RunnerProcess:
    """A process with a `Runner`; output of its envs goes to a file, which errors quote.

    It leads its own process group; ending it also ends its workers.
    """

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        serve = "from vecenv.compare.serving import serve"
        script = f"{serve}; serve({theirs.fileno()})"
        places = os.pathsep.join(place or os.getcwd() for place in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": places},
            start_new_session=True,
        )
        theirs.close()
        self._watcher = Watcher()
        self._watcher.start()
        self._watcher.tell("+", self._process.pid)

    def call(self, name: str, *args: Any, timeout: float) -> Any:
        """Return the result of a method of the process's `Runner`.

        Args:
            name: Name of the method.
            *args: Its arguments; they are pickled.
            timeout: Longest wait in seconds; then the process is killed.

        Raises:
            RunnerError: The method raised, the process is gone, or it did not answer in time.
        """
        deadline = monotonic() + timeout
        try:
            self._connection.send((name, args))
            while not self._connection.poll(_LOOK_S):
                if self._process.poll() is not None and not self._connection.poll(0):
                    raise EOFError
                if monotonic() > deadline:
                    self.kill()
                    raise RunnerError(
                        f"no answer within {timeout:g} s while {_DOING.get(name, 'stepping')}; an "
                        "env hangs, or its steps take long: give it more time"
                    )
            status, result = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if status == OK:
            return result
        error = RunnerError(result)
        error.is_unavailable = status == UNAVAILABLE
        raise error

    def _gone(self) -> RunnerError:
        """Return an error that says how the process ended, with its last output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        reason = f"its process {describe_exit(self._process.returncode)}"
        return RunnerError(f"{reason} ({lines[-1]})" if lines else reason)

    def kill(self) -> None:
        """End the process and its workers at once; does nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self, is_now: bool = False) -> None:
        """End it, and wait until its envs are closed unless `is_now`; may be called twice."""
        if self._output.closed:
            return
        if not is_now and self._process.poll() is None:
            with contextlib.suppress(RunnerError):
                self.call("close", timeout=_CLOSE_S)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_S)
        self.kill()
        self._watcher.close()
        self._connection.close()
        self._output.close()
