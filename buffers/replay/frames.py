"""Frames of stacked observations, each stored once: which are held, and by which rows.

Frames lie in slots. Each row holds F + 1 of them: the last F - 1 of its stack of obs are the first
F - 1 of next_obs. A slot is free when no row that is alive holds it, nor the newest stack of an
environment whose episode goes on, which its next row begins with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space, spaces

from buffers.core.arguments import check_count
from buffers.core.compiling import njit
from buffers.core.errors import BufferMisuseError
from buffers.core.interrupts import interrupts_later
from buffers.core.kernels import copy_bytes
from buffers.core.memory import allocation, zeroed_bytes
from buffers.core.rows import FrameLayout, as_words, row_stride
from buffers.core.spaces import space_leaves
from buffers.core.staging import StagingBlocks
from buffers.replay import addresses
from buffers.replay.addresses import Addresses

__all__ = ["FrameStack", "Frames", "first_break", "frame_bytes", "plan_frames"]

_PADDINGS = ("reset", "zero")
# Gymnasium's, and of the same name that of its older releases and `vecenv.wrappers`' vector one.
_WRAPPERS = ("FrameStackObservation", "FrameStack")
_ARGUMENTS = ("stack_size", "num_stack")  # their F
_NO_BYTES = np.zeros((0, 1), np.uint8)
_ADVICE = "use a smaller capacity, or add fewer rows at once"
_MOST_SENT_BYTES = 1 << 26  # to a device in one piece


class FrameStack(NamedTuple):
    """Says that observations are stacks of frames, to be stored once each.

    Attributes:
        num_frames: F, the frames of a stack, the oldest first.
        axis: Of the observation, along which they lie; None finds the only axis of length F. An
            axis that is longer, such as that of the colors, is cut into F parts.
        padding: What the first stack of an episode is filled up with if its newest frame is added
            alone: "reset" takes that frame, "zero" zeros, as in Gymnasium's FrameStackObservation.
        is_checked: Compare each stack with the one before it, and refuse what differs. Otherwise
            only the first stack of an episode is looked at, and of others the newest frame.
    """

    num_frames: int
    axis: int | None = None
    padding: str = "reset"
    is_checked: bool = True

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
    stack = given if isinstance(given, FrameStack) else FrameStack(given)
    number = check_count("frame_stack", stack.num_frames, 2**15)
    if stack.padding not in _PADDINGS:
        raise BufferMisuseError(f"padding is {stack.padding!r}, expected 'reset' or 'zero'")
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
    if type(axis) is not int or not -len(shape) <= axis < len(shape):
        raise BufferMisuseError(f"axis is {axis!r}, expected one of obs, whose shape is {shape}")
    axis %= len(shape)
    if shape[axis] == 0 or shape[axis] % number:
        raise BufferMisuseError(
            f"axis {axis} of obs, whose shape is {shape}, has length {shape[axis]}, expected "
            f"{number} frames, or a multiple of it"
        )
    return axis


def _first_slots(num_rows: int, num_envs: int, num_frames: int) -> int:
    """Frames there is room for at first.

    One for each row, and further ones for the beginnings and ends of episodes.
    """
    return num_rows + max(16, num_rows // 64) + num_envs * (num_frames + 1)


def frame_bytes(frames: FrameLayout, num_rows: int, num_envs: int) -> int:
    """Bytes a new `Frames` takes, if nothing is staged."""
    slots = _first_slots(num_rows, num_envs, frames.num_frames)
    return slots * (row_stride(frames.nbytes, 16) + 8) + 4 * num_envs * frames.num_frames


class Frames:
    """Frames in slots.

    Slots from `num_main` on lie in `extra`, which doubles when needed, and moves; the others never
    do, so a buffer of millions of them does not take twice its memory when it needs a few more.

    Attributes:
        layout: Of frames and stacks.
        num_main: Slots on memory that stays.
        main: uint8 (num_main, bytes) on the device; like `extra`.
        extra: uint8 (E, bytes).
        main_pages: The same as NumPy arrays, if the device is the CPU and nothing is staged.
        extra_pages: Like `main_pages`.
        heads: int32 (N, F), slots of the newest stack of each env whose episode goes on, else -1.
        is_captured: Whether a CUDA graph reads `extra`.
    """

    def __init__(
        self,
        layout: FrameLayout,
        num_rows: int,
        num_envs: int,
        device: torch.device,
        where: Addresses,
        *,
        staged: bool,
    ):
        self.layout, self._device, self._staged, self._where = layout, device, staged, where
        number, self.num_main = (
            layout.num_frames,
            _first_slots(num_rows, num_envs, layout.num_frames),
        )
        # On devices a stack is viewed in frames that lie behind one another.
        self._stride = layout.nbytes if staged else row_stride(layout.nbytes, 16)
        if device.type == "cpu":
            self.main = zeroed_bytes(self.num_main * self._stride).view(self.num_main, -1)
        else:
            shape = self.num_main, self._stride
            self.main = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.heads = np.full((num_envs, number), -1, np.int32)
        self._counts = np.zeros(self.num_main, np.int32)  # rows and heads that hold a slot
        self._free = np.zeros(self.num_main, np.int32)  # a stack
        # How many slots are free, and up to where any was ever used.
        self._numbers = np.zeros(2, np.int64)
        # On other devices the host keeps what it compares and counts with.
        mirrored = num_envs * number if staged else 0
        self._mirror = np.zeros((mirrored, layout.nbytes), np.uint8) if staged else _NO_BYTES
        self._windows = np.zeros((num_rows if staged else 0, number + 1), np.int32)
        self.is_captured = False
        self._blocks = StagingBlocks(device, _ADVICE)
        self._take_extra(torch.zeros((0, self._stride), dtype=torch.uint8, device=device))
        self.forget()

    @property
    def nbytes(self) -> int:
        """Bytes held, on host and device together."""
        tensors, arrays = (self.main, self.extra), (self.heads, self._counts, self._free)
        held = *tensors, *arrays, self._mirror, self._windows, self._blocks
        return sum(memory.nbytes for memory in held)

    def _take_extra(self, extra: torch.Tensor) -> None:
        self.extra = extra
        pages = [_NO_BYTES, _NO_BYTES] if self._staged else [self.main.numpy(), extra.numpy()]
        self.main_pages, self.extra_pages = pages
        self._where.name({addresses.PENDING: pages[0], addresses.FINALS: pages[1]})

    def check(
        self,
        arrays: Mapping[str, np.ndarray],
        envs: np.ndarray,
        is_over: np.ndarray,
        cuts: np.ndarray | None,
    ) -> None:
        """Raise BufferMisuseError unless each stack goes on from the one before; changes nothing.

        Args:
            arrays: obs and next_obs (K, F or 1, *frame).
            envs: int64 (K,).
            is_over: bool (K,), the next row of the env begins another episode.
            cuts: int64 (C,), envs whose episodes are cut before, or None.
        """
        obs, following = arrays["obs"], arrays["next_obs"]
        if obs.shape[1] < following.shape[1]:
            raise BufferMisuseError(
                "next_obs has stacks, but obs the newest frames alone; give stacks of both, or "
                "frames of both"
            )
        if not self.layout.is_checked:
            return
        newest = np.where(self.heads[:, 0] < 0, -1, -2)  # closed, or as in `heads`
        if cuts is not None:
            newest[cuts] = -1
        wrong = np.zeros(2, np.int64)
        row = first_wrong_frame(
            *_as_bytes(obs, following), envs, is_over, newest, self.heads, self._mirror,
            self.main_pages, self.extra_pages, wrong,
        )  # fmt: skip
        if row < 0:
            return
        env, (is_next, frame) = envs[row], wrong.tolist()
        if is_next:
            raise BufferMisuseError(f"row {row}, env {env}: {_not_moved_on(self.layout, frame)}")
        raise BufferMisuseError(
            f"row {row}, env {env}: frame {frame} of obs is not that of the next_obs added before, "
            "in the same episode. If the env was reset, call cut_episodes; else give what the env "
            "returned, step by step"
        )

    def reserve(self, starts: int, rows: int, skipped: int) -> None:
        """See to it that an add finds free slots.

        Args:
            starts: Rows of it that may begin an episode.
            rows: Rows of it that are kept.
            skipped: Rows that are overwritten by the same add.

        Raises:
            BufferMemoryError: They would not fit into free memory; nothing was changed.
            BufferMisuseError: They would have to move; nothing was changed.
        """
        number = self.layout.num_frames
        held = min(skipped, len(self.heads)) * (number + 1)
        missing = rows + min(starts, rows) * number + held - int(self._numbers[0])
        if missing > 0:
            spare = max(missing, len(self.extra), self.num_main // 256)
            self.resize(len(self.extra) + spare)
        if self._staged:
            most = rows + min(starts, rows) * number + held
            num_bytes = min(most * (8 + self._stride), max(_MOST_SENT_BYTES, 16 + self._stride))
            self._blocks.reserve(f"staging {most} frames", num_bytes + 8)

    def resize(self, num_extra: int) -> None:
        """Grow to a number of slots besides the main ones. Raises as `reserve`."""
        before = len(self.extra)
        if num_extra <= before:
            return
        if self.is_captured:
            raise BufferMisuseError(
                f"{num_extra} frames have to be kept apart, but a CUDA graph was captured that "
                f"reads the {before} there is room for where they lie; call "
                "reserve_final_obs(number) before the capture, or now, and capture again"
            )
        needed, device = num_extra * (self._stride + 8), self._device
        with (
            allocation(f"{num_extra} further frames", needed, device, _ADVICE),
            torch.inference_mode(False),
        ):
            # Not touched yet, so that the system gives only pages that are needed.
            extra = torch.zeros((num_extra, self._stride), dtype=torch.uint8, device=device)
            counts = np.zeros(self.num_main + num_extra, np.int32)
            free = np.zeros(self.num_main + num_extra, np.int32)
        extra[:before] = self.extra
        counts[: len(self._counts)] = self._counts
        added, num_free = num_extra - before, int(self._numbers[0])
        # Below those that were there, which are taken first.
        free[:added] = np.arange(len(counts), len(self._counts), -1) - 1
        free[added : added + num_free] = self._free[:num_free]
        with interrupts_later():
            self._counts, self._free = counts, free
            self._numbers[0] = added + num_free
            self._take_extra(extra)

    def cut(self, env_ids: np.ndarray) -> None:
        """Let the next stacks of some envs begin episodes."""
        release_heads(self.heads, env_ids, self._counts, self._free, self._numbers)

    def keep(
        self,
        arrays: Mapping[str, np.ndarray],
        envs: np.ndarray,
        is_over: np.ndarray,
        rows: np.ndarray,
        windows: np.ndarray | None,
        place: int,
    ) -> np.ndarray:
        """Store the frames of an add that was checked, for which there is room.

        Args:
            arrays: obs and next_obs (K, F or 1, *frame).
            envs: int64 (K,).
            is_over: bool (K,).
            rows: int64 (K,), of the table, or -1.
            windows: int32 (rows, words), the table, or None if it lies on a device.
            place: The column of a row's first slot in it.

        Returns:
            int32 (K, F + 1), the slots of each row.
        """
        number, count = self.layout.num_frames, len(rows)
        obs, following = _as_bytes(arrays["obs"], arrays["next_obs"])
        windows, place = (self._windows, 0) if windows is None else (windows, place)
        found = np.zeros((count, number + 1), np.int32)
        most = count * (number + 1) if self._staged else 0
        fresh, slots = np.zeros((most, self._stride), np.uint8), np.zeros(most, np.int64)
        num_fresh = keep_frames(
            obs, following, envs, is_over, rows, windows, place, self.heads, self._mirror,
            self._counts, self._free, self._numbers, self.layout.pads_zeros,
            self.main_pages, self.extra_pages, fresh, slots, found,
        )  # fmt: skip
        if num_fresh:
            self._upload(fresh[:num_fresh], slots[:num_fresh])
        return found

    def _upload(self, frames: np.ndarray, slots: np.ndarray) -> None:
        """Enqueue copies of frames to the device; of equal slots the last counts.

        `reserve` saw to the memory, so that nothing can fail when rows already have these slots.
        """
        slots, first = np.unique(slots[::-1], return_index=True)
        chosen = len(frames) - 1 - first
        at_once = (self._blocks.num_bytes - 8) // (8 + self._stride)
        middle = int(np.searchsorted(slots, self.num_main))
        for target, start, stop, begin in (
            (self.main, 0, middle, 0),
            (self.extra, middle, len(slots), self.num_main),
        ):
            for first in range(start, stop, at_once):
                part = slice(first, min(first + at_once, stop))
                places, pages = slots[part] - begin, frames[chosen[part]]
                with self._blocks.sent("frames", places, pages) as (where, values):
                    rows, values = as_words(target, values)
                    rows.index_copy_(0, where, values)

    def blocks(self) -> list[torch.Tensor]:
        """The slots that were ever used, as views of memory."""
        number = int(self._numbers[1])
        return [self.main[:number], self.extra[: max(0, number - self.num_main)]]

    def reserve_blocks(self, number: int) -> list[torch.Tensor]:
        """Memory of `number` slots, to load frames into."""
        self.resize(number - self.num_main)
        return [self.main[:number], self.extra[: max(0, number - self.num_main)]]

    def forget(self) -> None:
        """Take all slots for free."""
        self.heads[:] = -1
        self._counts[:] = 0
        self._free[:] = np.arange(len(self._free), 0, -1) - 1
        self._numbers[:] = len(self._free), 0

    def recount(self, num_used: int, windows: np.ndarray, rows: np.ndarray) -> None:
        """Find out which slots are held, after rows and heads were loaded.

        Args:
            num_used: Slots that there are frames in.
            windows: int32 (L, F + 1), the slots of the rows that are alive.
            rows: int64 (L,), these rows.
        """
        self._counts[:] = np.bincount(windows.reshape(-1), minlength=len(self._counts))
        held = self.heads[self.heads >= 0]
        self._counts += np.bincount(held, minlength=len(self._counts)).astype(np.int32)
        free = np.flatnonzero(self._counts == 0)[::-1]
        self._free[: len(free)] = free
        self._numbers[:] = len(free), num_used
        if self._staged:
            self._windows[:] = 0
            self._windows[rows] = windows
            places = np.flatnonzero(self.heads.reshape(-1) >= 0)
            for place in places.tolist():
                slot = int(self.heads.reshape(-1)[place])
                is_main = slot < self.num_main
                frame = self.main[slot] if is_main else self.extra[slot - self.num_main]
                self._mirror[place] = frame.cpu().numpy()


def _not_moved_on(layout: FrameLayout, frame: int) -> str:
    return (
        f"frame {frame} of next_obs is not frame {frame + 1} of obs. Stacks of {layout.num_frames} "
        f"frames, oldest first along axis {layout.axis} of {layout.stack_shape}, move on by one "
        "frame per step; name their axis, or make the buffer without frame_stack"
    )


def first_break(layout: FrameLayout, stacks: np.ndarray) -> tuple[int, str] | None:
    """Find the first step of an episode whose next stack is not its own, moved on by a frame.

    Args:
        layout: Of frames and stacks.
        stacks: (T + 1, *stack_shape), of the dtype of frames.

    Returns:
        The step and what is wrong with it, or None.
    """
    frames = np.ascontiguousarray(layout.split(stacks))
    obs, following = _as_bytes(frames[:-1], frames[1:])
    wrong, count, none = np.zeros(2, np.int64), len(obs), np.full(1, -1, np.int64)
    step = first_wrong_frame(
        obs, following, np.zeros(count, np.int64), np.ones(count, np.bool_), none,
        np.full((1, layout.num_frames), -1, np.int32), *[_NO_BYTES] * 3, wrong,
    )  # fmt: skip
    return None if step < 0 else (int(step), _not_moved_on(layout, int(wrong[1])))


def _as_bytes(*arrays: np.ndarray) -> list[np.ndarray]:
    """Frames (K, F, *shape) as uint8 (K, F, bytes)."""
    return [
        array.reshape(*array.shape[:2], -1).view(np.uint8)
        if array.size
        else np.zeros((*array.shape[:2], 1), np.uint8)
        for array in arrays
    ]


@njit(nogil=True, cache=True)
def same_frame(left, i, right, j, size):
    """Whether `size` bytes of row i of uint8 (A, S) equal those of row j of uint8 (B, T)."""
    difference = np.uint8(0)
    for k in range(size):
        difference |= left[i, k] ^ right[j, k]
    return difference == 0


@njit(nogil=True, cache=True)
def is_kept(frames, i, heads, env, k, mirror, main, extra):
    """Whether row i of frames uint8 (A, S) equals frame k of the newest stack of an env."""
    size = frames.shape[1]
    if mirror.shape[0]:
        return same_frame(frames, i, mirror, env * heads.shape[1] + k, size)
    slot = heads[env, k]
    if slot < main.shape[0]:
        return same_frame(frames, i, main, slot, size)
    return same_frame(frames, i, extra, slot - main.shape[0], size)


@njit(nogil=True, cache=True)
def first_wrong_frame(obs, next_obs, envs, is_over, newest, heads, mirror, main, extra, wrong):
    """The first row whose stacks are not those before it, moved on by a frame; -1 for none.

    Args:
        obs, next_obs: uint8 (K, F, S), or (K, 1, S) of the newest frames.
        envs: int64 (K,).
        is_over: bool (K,).
        newest: int64 (N,), -2 if an episode of the env is open, else -1; written.
        heads, mirror, main, extra: See `Frames`.
        wrong: int64 (2,), written: whether it is in next_obs, and which frame.
    """
    given, following, number = obs.shape[1], next_obs.shape[1], heads.shape[1]
    size = obs.shape[2]
    flat, flat_next = obs.reshape(-1, size), next_obs.reshape(-1, size)
    for i in range(envs.shape[0]):
        env = envs[i]
        before = newest[env]
        for k in range(given):
            place = number - given + k
            same = True
            if before == -2:
                same = is_kept(flat, i * given + k, heads, env, place, mirror, main, extra)
            elif before >= 0 and following - given + k >= 0:
                other = before * following + following - given + k
                same = same_frame(flat, i * given + k, flat_next, other, size)
            elif before >= 0:  # next_obs of the row before was one frame; the others are in its obs
                same = same_frame(flat, i * given + k, flat, before * given + k + 1, size)
            if not same:
                wrong[0], wrong[1] = 0, place
                return i
        for k in range(following - 1):
            if not same_frame(flat_next, i * following + k, flat, i * given + k + 1, size):
                wrong[0], wrong[1] = 1, k
                return i
        newest[env] = -1 if is_over[i] else i
    return -1


@njit(nogil=True, cache=True)
def release(slot, counts, free, numbers):
    """Let go of a slot once."""
    counts[slot] -= 1
    if counts[slot] == 0:
        free[numbers[0]] = slot
        numbers[0] += 1


@njit(nogil=True, cache=True)
def release_heads(heads, env_ids, counts, free, numbers):
    """Let go of the newest stacks of env_ids int64 (K,)."""
    for i in range(env_ids.shape[0]):
        env = env_ids[i]
        if heads[env, 0] >= 0:
            for k in range(heads.shape[1]):
                release(heads[env, k], counts, free, numbers)
                heads[env, k] = -1


@njit(nogil=True, cache=True)
def store_frame(frames, i, free, numbers, main, extra, fresh, slots, num_fresh):
    """Store row i of frames uint8 (A, S), or zeros if i is -1, in a free slot; return the slot."""
    numbers[0] -= 1
    slot = free[numbers[0]]
    numbers[1] = max(numbers[1], slot + 1)
    size = frames.shape[1]
    if fresh.shape[0]:
        target, row = fresh, num_fresh
        slots[num_fresh] = slot
    elif slot < main.shape[0]:
        target, row = main, np.int64(slot)
    else:
        target, row = extra, np.int64(slot) - main.shape[0]
    if i < 0:
        target[row, :size] = 0
    else:
        copy_bytes(target, row * target.shape[1], frames, i * size, size)
    return slot


@njit(nogil=True, cache=True)
def keep_frames(
    obs, next_obs, envs, is_over, rows, windows, place, heads, mirror, counts, free, numbers,
    pads_zeros, main, extra, fresh, slots, found,
):  # fmt: skip
    """Store the frames that are new, and note which slots each row holds.

    Args:
        obs, next_obs: uint8 (K, F, S), or (K, 1, S) of the newest frames.
        envs: int64 (K,).
        is_over: bool (K,).
        rows: int64 (K,), rows of the table, whose transitions until now are overwritten; or -1.
        windows: int32 (rows, W), slots of each row from column `place` on; written. Those of a row
            that holds nothing are all zero, and slots of others never are: the last one differs.
        heads, mirror: See `Frames`; written.
        counts: int32 (slots,), how often each is held; written.
        free: int32 (slots,), the stack of free slots; written.
        numbers: int64 (2,), number of free slots, and of those ever used; written.
        pads_zeros: Whether zeros are before a frame that begins an episode alone.
        main, extra: uint8 (M, B) and (E, B), written; unless `fresh` has rows.
        fresh: uint8 (X, B), written: frames to be moved to their slots.
        slots: int64 (X,), written: these slots.
        found: int32 (K, F + 1), written: the slots of each row.

    Returns:
        How many frames are in `fresh`.
    """
    given, following, number = obs.shape[1], next_obs.shape[1], heads.shape[1]
    size, num_fresh = obs.shape[2], 0
    is_staged = fresh.shape[0] > 0
    flat, flat_next = obs.reshape(-1, size), next_obs.reshape(-1, size)
    for i in range(rows.shape[0]):
        row, env = rows[i], envs[i]
        if row >= 0 and windows[row, place] != windows[row, place + number]:
            for k in range(number + 1):
                release(windows[row, place + k], counts, free, numbers)
        if heads[env, 0] < 0:
            for k in range(number):
                own = k - (number - given)  # among the given ones
                if (
                    (own > 0 and same_frame(flat, i * given + own, flat, i * given + own - 1, size))
                    or (own < 0 and k > 0)
                    or (own <= 0 and not pads_zeros and k > 0)
                ):
                    slot = heads[env, k - 1]
                else:
                    source = i * given + max(own, 0)
                    if own < 0 and pads_zeros:
                        source = -1
                    slot = store_frame(
                        flat, source, free, numbers, main, extra, fresh, slots, num_fresh
                    )
                    num_fresh += is_staged
                heads[env, k] = slot
                counts[slot] += 1
                if is_staged:
                    place_to, source = env * number + k, i * given + max(own, 0)
                    if own < 0 and pads_zeros:
                        mirror[place_to, :] = 0
                    else:
                        copy_bytes(mirror, place_to * size, flat, source * size, size)
        newest = i * following + following - 1
        slot = store_frame(flat_next, newest, free, numbers, main, extra, fresh, slots, num_fresh)
        num_fresh += is_staged
        counts[slot] += 1  # of the head
        for k in range(number):
            found[i, k] = heads[env, k]
        found[i, number] = slot
        if row >= 0:
            for k in range(number + 1):
                windows[row, place + k] = found[i, k]
                counts[found[i, k]] += 1
        release(heads[env, 0], counts, free, numbers)
        for k in range(number - 1):
            heads[env, k] = heads[env, k + 1]
        heads[env, number - 1] = slot
        if is_staged:
            begin = env * number * size
            for k in range(number - 1):
                copy_bytes(mirror, begin + k * size, mirror, begin + (k + 1) * size, size)
            copy_bytes(mirror, begin + (number - 1) * size, flat_next, newest * size, size)
        if is_over[i]:
            for k in range(number):
                release(heads[env, k], counts, free, numbers)
                heads[env, k] = -1
    return num_fresh
