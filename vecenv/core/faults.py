"""Errors that cross process boundaries, and descriptions of workers that are gone."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing.context
import signal
import traceback
from typing import Any, NamedTuple

from gymnasium import logger

from vecenv.core.errors import ObservationError
from vecenv.core.pickling import dumps, loads
from vecenv.core.spaces import short

__all__ = [
    "EnvFault",
    "EnvStepError",
    "RemoteTraceback",
    "StepTimeoutError",
    "WorkerDiedError",
    "describe_exit",
    "raise_faults",
    "retold",
]


class WorkerDiedError(RuntimeError):
    """A worker process is gone; the message says which, how it ended, and during which call."""


class StepTimeoutError(multiprocessing.context.TimeoutError, TimeoutError):
    """Envs have not answered in time; the call stays pending."""


class EnvStepError(RuntimeError):
    """An env raised an exception that can't be pickled; the message has its text."""


class RemoteTraceback(Exception):
    """The worker's traceback, as the cause of an exception that an env raised there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


class EnvFault(NamedTuple):
    """An exception that an env raised in a worker.

    `env_id` is negative if it was no env but, for example, a policy; `action` is a short text, or
    ""; `pickled` is the exception, `text` its `repr`, and `trace` the formatted traceback.
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
        """Describe an exception that is being handled; its notes are in no text."""
        if isinstance(error, ObservationError):
            error.name_env(env_id)
        shown = "" if action is None else short(action, 200)
        vars(error).pop("__notes__", ())
        lines = error.__traceback__  # without this package's frames above those of the env
        while lines is not None and lines.tb_next is not None:
            if not lines.tb_frame.f_globals.get("__name__", "").startswith("vecenv."):
                break
            lines = lines.tb_next
        trace = "".join(traceback.format_exception(type(error), error, lines))
        bare = error.with_traceback(None)
        bare.__cause__ = bare.__context__ = None
        return EnvFault(env_id, worker, call, shown, _pickled(bare), short(bare, 2000), trace)

    def exception(self, step: int) -> BaseException:
        """Return the exception, with the worker's traceback as cause and a note saying where."""
        try:
            error = loads(self.pickled)
        except Exception:  # unpickling runs code of the exception's class
            error = None
        is_env = self.env_id >= 0
        if not isinstance(error, Exception):  # SystemExit and the like would not look like a fault
            who = f"env {self.env_id}" if is_env else f"worker {self.worker}"
            error = EnvStepError(f"{who} raised {self.text}")
        action = f", action {self.action}" if self.action else ""
        by = f" by env {self.env_id}" if is_env else ""
        where = "this process" if self.worker < 0 else f"worker {self.worker}"
        error.add_note(f"Raised{by} in {where}, {self.call} {step}{action}.")
        if is_env:
            vars(error)["env_index"] = self.env_id
        error.__cause__ = RemoteTraceback(self.trace)
        return error


def _pickled(error: BaseException) -> bytes:
    try:
        pickled = dumps(error)
        return pickled if isinstance(loads(pickled), BaseException) else b""
    except BaseException:  # exceptions with unusual constructors fail in many ways
        return b""


def raise_faults(faults: list[EnvFault], step: int) -> None:
    """Log every fault, equal faults of several envs once; raise the last."""
    if not faults:
        return
    ids_of: dict[str, list[str]] = {}
    for fault in faults:
        who = f"worker {fault.worker}" if fault.env_id < 0 else str(fault.env_id)
        ids_of.setdefault(fault.trace, []).append(who)
    with contextlib.suppress(Warning):  # log records may be warnings set to raise
        for trace, ids in ids_of.items():
            logger.error(f"envs {', '.join(ids)} raised, in {faults[0].call}:\n{trace}")
    raise faults[-1].exception(step)


def retold(error: BaseException) -> BaseException:
    """Return a copy of an error without its traceback, to be raised or quoted later."""
    try:
        copied = copy.copy(error)
    except Exception:  # exceptions with unusual constructors fail in many ways
        copied = None
    if not isinstance(copied, BaseException):
        copied = EnvStepError(f"{type(error).__name__}: {error}")
    copied.__cause__ = error.__cause__
    return copied


def describe_exit(exit_code: int | None) -> str:
    """Return a text of how a process ended.

    Example:
        >>> describe_exit(-9), describe_exit(0)
        ('was killed by signal SIGKILL', 'exited with code 0')
    """
    if exit_code is None:
        return "is gone"
    if exit_code < 0:
        known = {-int(one): one.name for one in signal.Signals}
        return f"was killed by signal {known.get(exit_code, -exit_code)}"
    return f"exited with code {exit_code}"
