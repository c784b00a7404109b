"""Errors that cross process boundaries, and what is said about workers that are gone."""

from __future__ import annotations

import contextlib
import multiprocessing.context
import signal
import traceback
from typing import Any, NamedTuple

from gymnasium import logger
from gymnasium.error import ResetNeeded

from vecenv.shm.messages import dumps, loads

__all__ = [
    "EnvFault",
    "EnvStepError",
    "RemoteTraceback",
    "StepTimeoutError",
    "WorkerDiedError",
    "describe_exit",
    "raise_faults",
    "reset_needed_as",
]


class WorkerDiedError(RuntimeError):
    """A worker process is gone; the message says which, how, and at what."""


class StepTimeoutError(multiprocessing.context.TimeoutError, TimeoutError):
    """Envs have not answered in time; what they were asked stays pending."""


class EnvStepError(RuntimeError):
    """An env raised an exception that can't be pickled; the message has its text."""


class RemoteTraceback(Exception):
    """The worker's traceback, as cause of an exception that was raised in an env there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


class EnvFault(NamedTuple):
    """An exception that an env raised in a worker.

    Attributes:
        env_id: Which env; negative if it was none, but a policy for example.
        worker: Which worker.
        call: What it was doing, such as "step".
        action: Short text of the action, or "".
        pickled: The exception.
        text: Its `repr`.
        trace: The formatted traceback.
    """

    env_id: int
    worker: int
    call: str
    action: str
    pickled: bytes
    text: str
    trace: str

    @staticmethod
    def of(
        error: BaseException, env_id: int, worker: int, call: str, action: Any = None
    ) -> EnvFault:
        """Describe an exception that is being handled."""
        trace = "".join(traceback.format_exception(type(error), error, _own_part(error)))
        if hasattr(error, "__notes__"):
            trace = trace.removesuffix("".join(f"{note}\n" for note in error.__notes__))
            del error.__notes__
        bare = error.with_traceback(None)
        bare.__cause__ = bare.__context__ = None
        shown = "" if action is None else shorten(repr(action))
        return EnvFault(env_id, worker, call, shown, _pickled(bare), repr(bare), trace)

    def exception(self, step: int) -> BaseException:
        """Return the exception, with the worker's traceback as cause and a note saying where."""
        try:
            error = loads(self.pickled)
        except Exception:  # unpickling runs code of the exception's class
            error = None
        if not isinstance(error, BaseException):
            error = EnvStepError(f"{self._who()} raised {self.text}")
        action = f", action {self.action}" if self.action else ""
        by = "" if self.env_id < 0 else f" by env {self.env_id}"
        error.add_note(f"Raised{by} in worker {self.worker}, {self.call} {step}{action}.")
        if self.env_id >= 0:
            vars(error)["env_index"] = self.env_id
        error.__cause__ = RemoteTraceback(self.trace)
        return error

    def _who(self) -> str:
        return f"worker {self.worker}" if self.env_id < 0 else f"env {self.env_id}"


def _own_part(error: BaseException) -> Any:
    """Return the traceback without the frames of this package that lead to the env's code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        if not trace.tb_frame.f_globals.get("__name__", "").startswith("vecenv."):
            break
        trace = trace.tb_next
    return trace


def _pickled(error: BaseException) -> bytes:
    try:
        pickled = dumps(error)
        loads(pickled)
    except Exception:  # exceptions with unusual constructors fail in many ways
        return b""
    return pickled


def shorten(text: str, most: int = 200) -> str:
    """Cut a text that is too long for a message."""
    return text if len(text) <= most else f"{text[:most]}..."


def raise_faults(faults: list[EnvFault], step: int) -> None:
    """Log every fault as Gymnasium's AsyncVectorEnv does, and raise the last."""
    if not faults:
        return
    with contextlib.suppress(Warning):  # they are warnings, which may be set to raise
        for fault in faults:
            number = fault.worker if fault.env_id < 0 else fault.env_id
            logger.error(f"Received the following error from Worker-{number} - Shutting it down")
            logger.error(f"{fault.trace}")
        logger.error("Raising the last exception back to the main process.")
    raise faults[-1].exception(step)


def reset_needed_as(kind: type[Exception]) -> type[Exception]:
    """Return a ResetNeeded that is also a `kind`, so that who expects either catches it.

    Example:
        >>> issubclass(reset_needed_as(ValueError), ValueError)
        True
    """
    if issubclass(ResetNeeded, kind):
        return ResetNeeded
    plain = {"__init__": Exception.__init__, "__str__": Exception.__str__}
    try:
        return type("ResetNeeded", (ResetNeeded, kind), plain)
    except TypeError:  # classes whose instances hold something in C, such as OSError
        return ResetNeeded


def describe_exit(exit_code: int | None) -> str:
    """Say how a process ended.

    Example:
        >>> describe_exit(-9)
        'was killed by signal SIGKILL'
        >>> describe_exit(3)
        'exited with code 3'
    """
    if exit_code is None:
        return "is gone"
    if exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = str(-exit_code)
        return f"was killed by signal {name}"
    return f"exited with code {exit_code}"
