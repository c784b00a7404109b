"""Code that runs in the process of one backend: it makes, steps and times the envs.

Each backend has its own process. So a process that dies or hangs harms no other backend, and memory
and start-up time are those of this backend alone.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any, NamedTuple

from vecenv.backends import BACKENDS, TIMED, Backend
from vecenv.compare.source import BackendUnavailableError, EnvSource, read_source
from vecenv.compare.stepping import BatchStepper, FirstReadyStepper, LoopStepper
from vecenv.core.masks import METHOD, MaskInfos, can_be_masked
from vecenv.machine import tree_memory_bytes
from vecenv.timing.report import TimingReport

__all__ = ["FAILED", "OK", "UNAVAILABLE", "Round", "Runner", "Setting", "serve"]

OK, UNAVAILABLE, FAILED = "ok", "unavailable", "failed"
_MOST_CALLS = 50_000  # most calls at a time: the flags of each call are kept until the end
_AT_A_TIME_S = 0.005  # between two looks at the clock
_EPISODES = 2  # episodes of every env in a round
# A round ends after this many times the reset's duration, whatever the episodes do: so resets cost
# at most a tenth of its time.
_RESETS = 10
_PROBE_S = 10.0  # time to find out whether envs wait


class Setting(NamedTuple):
    """What to run.

    Attributes:
        env: Id, or "module:factory".
        env_kwargs: For its constructor.
        backend: One of `COMPARED`.
        num_envs: Number of envs; "loop" always steps one.
        seed: Seed of envs and actions.
        num_workers: Most workers of the async backends; None for one per core, or, if envs wait,
            one per env.
    """

    env: str
    env_kwargs: dict[str, Any]
    backend: str
    num_envs: int
    seed: int
    num_workers: int | None = None


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
        self._setting: Any = None
        self._call_s = 0.0  # seconds of one call in the latest run

    def open(self, setting: Setting) -> tuple[float, float, int | None]:
        """Make the envs and reset them; return the seconds of each, and the number of workers.

        Imports are not timed. The number is None without workers, or if the envs don't tell it.

        Raises:
            BackendUnavailableError: The backend does not support this env.
        """
        source = read_source(setting.env, setting.env_kwargs)
        self._setting = setting
        backend = BACKENDS[setting.backend]
        for name in backend.imports:
            importlib.import_module(name)
        is_async = backend.makes == BACKENDS["async"].makes
        options = _workers_for(source, setting) if is_async else {}
        begin = perf_counter()
        envs = _make_envs(source, backend, setting.num_envs, options)
        made_s = perf_counter() - begin
        steppers = {"loop": LoopStepper, "step": BatchStepper, "first-ready": FirstReadyStepper}
        self._stepper = steppers[backend.stepping or "step"](envs, setting.seed)
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
        if self._setting.backend not in TIMED:
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

    def _calls_in(self, seconds: float) -> int:
        return max(1, min(round(seconds / self._call_s), _MOST_CALLS))

    def _step_for(self, seconds: float, episodes: int) -> Round:
        """Step for `seconds`, then until each env has ended `episodes` episodes, see `measure`."""
        stepper = self._stepper
        stepper.prepare()
        before, enough_s = stepper.episodes.copy(), max(seconds, _RESETS * stepper.reset_s)
        done, spent, ended = 0, 0.0, 0
        while spent < seconds or (spent < enough_s and ended < episodes):
            steps, last_s = self._run(self._calls_in(_AT_A_TIME_S))
            done, spent = done + steps, spent + last_s
            ended = int((stepper.episodes - before).min())
        return Round(done, spent, ended)

    def _run(self, count: int) -> tuple[int, float]:
        steps, seconds = self._stepper.run(count)
        self._call_s = seconds / count
        return steps, seconds


def _workers_for(source: EnvSource, setting: Setting) -> dict[str, Any]:
    """Return the number of workers as an option: one per env if envs wait, which is tried out."""
    from vecenv.choose import try_out  # needed by some backends only

    num_envs = setting.num_envs
    if setting.num_workers is not None:
        return {"num_workers": min(setting.num_workers, num_envs)}
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
