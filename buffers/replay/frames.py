"""FrameStack: which axis of an observation frames are stacked along."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np
from gymnasium import Space, spaces

from buffers.core.arguments import check_count
from buffers.core.errors import BufferMisuseError
from buffers.core.rows import FrameLayout
from buffers.core.spaces import space_leaves

__all__ = ["FrameStack", "plan_frames"]

_PADDINGS = ("reset", "zero")
_MOST_FRAMES = 2**15


@dataclass(frozen=True)
class FrameStack:
    """Says that observations are stacks of frames, to be stored once each.

    It stacks nothing: that is done by a wrapper of the envs.

    Attributes:
        num_frames: F, the frames of a stack, the oldest first.
        axis: Of the observation, along which they lie; None finds the only axis of length F. An
            axis that is longer, such as that of the colors, is cut into F parts.
        padding: What the first stack of an episode is filled up with if its newest frame is added
            alone: "reset" takes that frame, "zero" zeros, as in Gymnasium's FrameStackObservation.
        is_checked: Compare each stack with the one before it, and refuse what differs. Otherwise
            only the first stack of an episode is looked at, and of others the newest frame.

    Raises:
        BufferMisuseError: An argument is none of these.
    """

    num_frames: int
    axis: int | None = None
    padding: str = "reset"
    is_checked: bool = True

    def __post_init__(self) -> None:
        try:
            check_count("num_frames", self.num_frames, _MOST_FRAMES)
        except BufferMisuseError as error:
            raise BufferMisuseError(
                f"{error}: how many frames the envs' observations are stacked of; to stack "
                "them, wrap the envs"
            ) from None
        if self.axis is not None and type(self.axis) is not int:
            raise BufferMisuseError(f"axis is {self.axis!r}, expected an int, or None to find it")
        if self.padding not in _PADDINGS:
            raise BufferMisuseError(f"padding is {self.padding!r}, expected 'reset' or 'zero'")


def plan_frames(space: Space, given: int | FrameStack | None) -> FrameLayout | None:
    """How the frames of an observation lie; None if they are not stored apart.

    Raises:
        BufferMisuseError: The argument does not fit, or the observation is no such stack.
    """
    if given is None:
        return None
    if isinstance(given, FrameStack):
        stack, number = given, operator.index(given.num_frames)
    else:
        number = check_count("frame_stack", given, _MOST_FRAMES)
        stack = FrameStack(number)
    if not isinstance(space, spaces.Box):
        raise BufferMisuseError(
            f"frame_stack={number} needs a Box of stacked frames, got {space}; leave it out, or "
            "flatten the observation with a wrapper first"
        )
    shape = tuple(space.shape)
    axis = _find_axis(shape, number, stack.axis)
    part = (shape[axis] // number,) if shape[axis] != number else ()
    frame = (*shape[:axis], *part, *shape[axis + 1 :])
    (leaf,) = space_leaves(space, "obs")
    if not np.prod(frame, dtype=np.int64):
        raise BufferMisuseError(f"obs has shape {shape}, expected frames with something in them")
    pads_zeros = stack.padding == "zero"
    return FrameLayout(number, frame, leaf.dtype, shape, axis, pads_zeros, bool(stack.is_checked))


def _find_axis(shape: tuple[int, ...], number: int, axis: int | None) -> int:
    if axis is None:
        found = [place for place, size in enumerate(shape) if size == number]
        if len(found) != 1:
            raise BufferMisuseError(
                f"obs has shape {shape}, and {len(found)} axes of length {number}, expected one "
                f"along which {number} frames lie; name it by FrameStack({number}, axis=...)"
            )
        return found[0]
    if not -len(shape) <= axis < len(shape):
        raise BufferMisuseError(f"axis is {axis!r}, expected one of obs, whose shape is {shape}")
    axis %= len(shape)
    if shape[axis] == 0 or shape[axis] % number:
        raise BufferMisuseError(
            f"axis {axis} of obs, whose shape is {shape}, has length {shape[axis]}, expected "
            f"{number} frames, or a multiple of it"
        )
    return axis
