"""FrameStack: which axis of an observation frames are stacked along, told or read from wrappers."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from buffers.core.arguments import check_count
from buffers.core.errors import BufferMisuseError
from buffers.core.rows import FrameLayout
from buffers.core.spaces import space_leaves

__all__ = ["FrameStack", "plan_frames"]

_PADDINGS = ("reset", "zero")
_MOST_FRAMES = 2**15
# Gymnasium's, and of the same name that of its older releases and `vecenv.wrappers`' vector one.
_WRAPPERS = ("FrameStackObservation", "FrameStack")
_ARGUMENTS = ("stack_size", "num_stack")  # their F


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
                f"{error}: how many frames the envs' observations are stacked of, which "
                "FrameStack.of(envs) finds out; to stack them, wrap the envs"
            ) from None
        if self.axis is not None and type(self.axis) is not int:
            raise BufferMisuseError(f"axis is {self.axis!r}, expected an int, or None to find it")
        if self.padding not in _PADDINGS:
            raise BufferMisuseError(f"padding is {self.padding!r}, expected 'reset' or 'zero'")

    @classmethod
    def of(cls, envs: Any) -> FrameStack:
        """Read the wrappers of a vector env, FrameStackObservation among them, or Atari's own.

        A wrapper that pads with an observation of its own is taken for one that pads by "reset":
        give stacks to `add` then, or at least at the beginning of episodes.

        Args:
            envs: Of Gymnasium's interface, vectorized or not.

        Raises:
            BufferMisuseError: There is no such wrapper, or the environments differ; or nothing can
                be read, as of workers whose environments have no `spec`.
        """
        found = set(_stacks_of(envs))
        if len(found) == 1 and None not in found:
            return found.pop()
        told = "differ in it" if len(found) > 1 else "have no wrapper that tells it"
        raise BufferMisuseError(
            f"the frames of a stack cannot be read from {envs}: its environments {told}; say "
            "frame_stack=4, for example"
        )


def _stacks_of(envs: Any) -> list[Any]:
    """The `FrameStack` of each environment, or None where nothing tells it."""
    if (found := _stack_of_wrappers(envs)) is not None:
        return [found]
    inner = getattr(envs, "unwrapped", envs)
    if any(kind.__name__ == "AtariVectorEnv" for kind in type(inner).__mro__):  # of ale_py
        return [FrameStack(int(envs.single_observation_space.shape[0]), 0, "zero")]
    if isinstance(getattr(inner, "envs", None), list | tuple):
        return [_stack_of_wrappers(env) or _stack_of_spec(env.spec) for env in inner.envs]
    specs = envs.get_attr("spec") if hasattr(envs, "get_attr") else [getattr(envs, "spec", None)]
    return [_stack_of_spec(spec) for spec in specs]


def _stack_of_wrappers(env: Any) -> FrameStack | None:
    outermost = env
    while env is not None:
        if type(env).__name__ in _WRAPPERS:
            given = [getattr(env, name) for name in _ARGUMENTS if hasattr(env, name)]
            if given:
                # Along a new first axis, unless a wrapper around it has moved that.
                stacked = (given[0], *_shape_of(env.env))
                is_first = _shape_of(env) == _shape_of(outermost) == stacked
                return _made_of(given[0], getattr(env, "padding_type", "reset"), is_first)
        env = getattr(env, "env", None)
    return None


def _shape_of(env: Any) -> tuple[int, ...]:
    """Of one env's observations; of several arrays ()."""
    space = getattr(env, "single_observation_space", None) or env.observation_space
    return tuple(space.shape or ())


def _stack_of_spec(spec: Any) -> FrameStack | None:
    wrappers: Any = getattr(spec, "additional_wrappers", None) or ()
    for wrapper in reversed(wrappers):
        given = wrapper.kwargs or {}
        found = [given[name] for name in _ARGUMENTS if name in given]
        if wrapper.name in _WRAPPERS and found:
            is_first = wrapper is wrappers[-1] and wrapper.name == _WRAPPERS[0]
            return _made_of(found[0], given.get("padding_type", "reset"), is_first)
    return None


def _made_of(number: Any, padding: Any, is_first: bool) -> FrameStack:
    """What a wrapper does; `is_first`: frames are known to lie along the first axis."""
    # Of another padding, an observation, no frame that is added alone can be padded.
    is_known = isinstance(padding, str) and padding in _PADDINGS
    return FrameStack(int(number), 0 if is_first else None, padding if is_known else "reset")


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
