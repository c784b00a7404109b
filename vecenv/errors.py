"""Errors that Gymnasium has no type for; each subclasses what a Gymnasium user would catch."""

from __future__ import annotations

from gymnasium.error import InvalidAction

__all__ = [
    "ActionError",
    "ActionTypeError",
    "EnvCreationError",
    "InfoError",
    "ObservationError",
    "SlotError",
]


class ActionError(InvalidAction, ValueError):
    """Actions of wrong shape, dtype or count, or NaN; nothing was stepped."""


class ActionTypeError(ActionError, TypeError):
    """Actions of wrong dtype or container, such as one number for a whole batch."""


class EnvCreationError(RuntimeError):
    """An environment factory raised; the original exception is the `__cause__`."""


class InfoError(ValueError):
    """The infos of an environment don't fit into the batched infos."""


class ObservationError(ValueError):
    """An environment returned an observation or a reward that its spaces do not allow."""


class SlotError(ValueError):
    """`out=` has an array of wrong shape, dtype or memory layout; nothing was stepped."""
