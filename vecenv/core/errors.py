"""Errors that Gymnasium has no type for, and exceptions of envs on their way between processes.

Each error subclasses what a Gymnasium user would catch.
"""

from __future__ import annotations

import contextlib
import multiprocessing.context
import signal
import traceback
from typing import Any, NamedTuple

from gymnasium import logger
from gymnasium.error import InvalidAction

from vecenv.core.pickling import dumps, loads
from vecenv.core.spaces import short

__all__ = [
    "ActionError",
    "ActionMaskError",
    "ActionTypeError",
    "EnvCreationError",
    "EnvFault",
    "EnvStateError",
    "EnvStepError",
    "ForkedEnvError",
    "InfoError",
    "NoActionMaskError",
    "ObservationError",
    "RemoteTraceback",
    "SlotError",
    "StepTimeoutError",
    "WorkerDiedError",
    "describe_exit",
    "raise_faults",
]


class ActionError(InvalidAction, ValueError):
    """Actions have a wrong shape, dtype or count, or contain NaN; nothing was stepped."""


class ActionMaskError(ValueError):
    """An env's action mask has the wrong shape, is missing, or allows no action; names the env."""


class ActionTypeError(ActionError, TypeError):
    """Actions have a wrong dtype or container, such as one number for a whole batch."""


class EnvCreationError(RuntimeError):
    """An environment factory raised; the original exception is the `__cause__`."""


class EnvStateError(RuntimeError):
    """The state of envs can't be saved or loaded; they can be reset instead."""


class ForkedEnvError(RuntimeError):
    """A forked process has called a vector env whose workers are those of its parent."""


class InfoError(ValueError):
    """The infos of an environment don't fit into the batched infos."""


class NoActionMaskError(NotImplementedError):
    """Action masks were requested, but the envs give none; says what an env must provide."""


class ObservationError(ValueError):
    """An environment returned an observation or a reward that its spaces do not allow.

    Args:
        problem: What is wrong, as the rest of a sentence that begins with the env.
        env_id: Which env, in the numbering of the raising code.

    Attributes:
        problem: What is wrong.
    """

    def __init__(self, problem: str, env_id: int | None = None) -> None:
        self.problem = problem
        super().__init__(problem if env_id is None else f"env {env_id} {problem}")
        self._names_env = env_id is not None

    def name_env(self, env_id: int) -> None:
        """Change the env's number to that of another numbering, such as of all envs for a chunk."""
        if self._names_env:
            self.args = (f"env {env_id} {self.problem}",)


class SlotError(ValueError):
    """`out=` has an array of wrong shape, dtype or memory layout; nothing was stepped."""


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
