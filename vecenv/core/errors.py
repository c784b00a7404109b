"""Errors that Gymnasium has no type for; each subclasses what a Gymnasium user would catch."""

from __future__ import annotations

from gymnasium.error import InvalidAction

__all__ = [
    "ActionError",
    "ActionMaskError",
    "ActionTypeError",
    "EnvCreationError",
    "EnvStateError",
    "ForkedEnvError",
    "InfoError",
    "NoActionMaskError",
    "ObservationError",
    "SlotError",
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
