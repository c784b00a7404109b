"""Rows of batched observations, rewards and flags: where they are, and how they are written.

A batch of an observation space is an array per fixed-shape leaf (Box, Discrete, MultiDiscrete,
MultiBinary), nested in dicts and tuples as the space is. Leaves without a fixed shape (Text, Graph,
Sequence, custom spaces) are lists with one entry per env until they are returned. Rows are the
vector env's own, or in memory of the caller: the slot of `step(out=...)`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space

from vecenv.core.errors import ObservationError, SlotError
from vecenv.core.spaces import ARRAY_SPACES, by_space, leaves, parts_of, short

__all__ = [
    "FLAG_DTYPES",
    "NEEDS_CONVERSION",
    "Allocate",
    "ObservationRows",
    "Outputs",
    "StepRows",
    "StepSlot",
    "aligned_zeros",
    "check_slot_array",
    "checked_layout",
    "rows_of",
    "slot_arrays",
    "slot_outputs",
    "slot_rows",
]

Allocate = Callable[[tuple[int, ...], Any], np.ndarray]

# What the fast assignments below raise for values that need conversion.
NEEDS_CONVERSION = (TypeError, ValueError, AttributeError, OverflowError, LookupError)
FLAG_DTYPES = (np.dtype(np.bool_),)
_REWARD_DTYPES = (np.dtype(np.float64), np.dtype(np.float32))
_CACHE_LINE = 64
_MEMORYVIEW_FORMATS = "?bBhHiIlLqQfd"  # formats whose items can be assigned


# -- memory ----------------------------------------------------------------------------------------


def checked_layout(shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype, int]:
    """Return shape, dtype and bytes of an array to be allocated.

    Raises:
        ValueError: A negative dimension, or items without any bytes.
        TypeError: A dimension that is no integer, or items that are Python objects.
        MemoryError: The array could not be addressed.
    """
    wanted = np.dtype(dtype)
    dtype, inner = wanted.base, wanted.shape  # of a dtype with dimensions of its own
    lengths = shape if isinstance(shape, tuple | list) else (shape,)
    sizes = (*map(operator.index, lengths), *inner)
    if min(sizes, default=0) < 0:
        raise ValueError(f"allocate: shape is {shape}, expected dimensions of at least 0")
    if dtype.hasobject or dtype.itemsize == 0:
        raise (TypeError if dtype.hasobject else ValueError)(
            f"allocate: dtype is {dtype}, expected numbers, flags or text of a given length, such "
            "as U8; Python objects can't be in memory that other code writes into"
        )
    if (size_bytes := math.prod(sizes) * dtype.itemsize) >= 1 << 62:
        raise MemoryError(f"allocate({shape}, {dtype}) needs {size_bytes} bytes")
    return sizes, dtype, size_bytes


def aligned_zeros(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """Return zeros, aligned to a cache line; the caller owns them. Raises as `checked_layout`."""
    shape, dtype, size_bytes = checked_layout(shape, dtype)
    pages = np.zeros(size_bytes + _CACHE_LINE, dtype=np.uint8)
    start = -pages.ctypes.data % _CACHE_LINE
    return pages[start : start + size_bytes].view(dtype).reshape(shape)


def rows_of(env_ids: range | np.ndarray) -> slice | np.ndarray:
    """Return an index of these rows; for a range it gives views."""
    return slice(env_ids.start, env_ids.stop) if isinstance(env_ids, range) else env_ids


# -- observations ----------------------------------------------------------------------------------


class ObservationRows:
    """Batched observations of `num_envs` envs, written env by env.

    The loop over envs writes `rows.target[rows.keys[i]] = obs`, whatever the space. If `target`
    refuses a value, `rows.write(i, obs)` converts it, or raises an error that names the env. For
    a one-dimensional Box, by far the commonest space, `target` is a flat memoryview: its slice
    assignment checks dtype and length and copies, in a third less time than NumPy's.

    Attributes:
        space: Space of one observation.
        target: Object for `target[key] = obs`.
        keys: One key per env.
        array: The array, (num_envs, *shape), of a space that is one leaf of fixed shape, else None.
        leaves: The rows of each leaf of the space.
    """

    def __init__(self, space: Space, num_envs: int, allocate: Allocate = aligned_zeros) -> None:
        self.space, self.leaves = space, list[_Leaf]()
        by_space(lambda part: self.leaves.append(_Leaf(part, num_envs, allocate)), space)
        self._parts = list(zip(_paths(space), self.leaves, strict=True))
        self.target: Any = self
        self.keys: Sequence[Any] = range(num_envs)
        self.array: Any = None
        if parts_of(space) is None:
            (leaf,) = self.leaves
            self.target, self.keys, self.array = leaf.target, leaf.keys, leaf.array

    @property
    def is_fixed(self) -> bool:
        """Whether all leaves are arrays."""
        return all(leaf.array is not None for leaf in self.leaves)

    def __setitem__(self, index: int, obs: Any) -> None:
        for path, leaf in self._parts:
            part = obs
            for key in path:
                part = part[key]
            try:
                leaf.target[leaf.keys[index]] = part
            except NEEDS_CONVERSION:
                leaf.write(index, part)

    def write(self, index: int, obs: Any) -> None:
        """Write the observation of env `index`, with conversion within the same kind of dtype.

        Raises ObservationError, which names the env, if shape or dtype do not fit.
        """
        if self.target is not self:
            self.leaves[0].write(index, obs)
            return
        try:
            self[index] = obs
        except (KeyError, IndexError, TypeError) as error:
            raise ObservationError(
                f"returned {type(obs).__name__} without part {error}, "
                f"expected an observation of {self.space}",
                index,
            ) from error

    def put(self, env_ids: range | np.ndarray, batch: Any) -> None:
        """Write a batch of observations, one per entry of `env_ids`; a range is one block."""
        for leaf, part in zip(self.leaves, leaves(batch, self.space), strict=True):
            leaf.put(env_ids, part)

    def batch(self) -> Any:
        """Return the batch in the form of the observation space: views, until the next write."""
        left = iter(self.leaves)
        return by_space(lambda _: next(left).batch(), self.space)

    def take(self, env_ids: np.ndarray) -> Any:
        """Return a batch of the rows `env_ids`, int64 (B,): copies, in this order."""
        left = iter(self.leaves)
        return by_space(lambda _: next(left).take(env_ids), self.space)


def _paths(space: Space) -> list[tuple[Any, ...]]:
    """Return the keys that lead to each leaf of a space."""
    if (parts := parts_of(space)) is None:
        return [()]
    return [(key, *path) for key, part in parts.items() for path in _paths(part)]


class _Leaf:
    """Rows of one leaf of a space: an array (num_envs, *shape), or a list of objects."""

    def __init__(self, space: Space, num_envs: int, allocate: Allocate) -> None:
        self._space, self.array = space, None
        self.target: Any = [None] * num_envs
        self.keys: Sequence[Any] = range(num_envs)
        if not isinstance(space, ARRAY_SPACES):
            return
        self._row_shape = shape = space.shape or ()
        self.array: Any = allocate((num_envs, *shape), space.dtype)
        self.target = self
        # Memoryviews can't assign items of other dtypes, and can't be cast if they are empty.
        is_simple = self.array.dtype.char in _MEMORYVIEW_FORMATS and self.array.dtype.isnative
        if is_simple and self.array.size and len(shape) <= 1:
            self.target = memoryview(self.array.reshape(-1))
            if shape:
                self.keys = [slice(i * shape[0], (i + 1) * shape[0]) for i in range(num_envs)]

    def __setitem__(self, index: int, obs: Any) -> None:
        """Write an observation of two or more dimensions, or of a dtype unknown to memoryviews."""
        if obs.shape != self._row_shape or obs.dtype != self.array.dtype:
            raise ValueError("needs the checks of write()")  # caught: the caller uses `write`
        self.array[index] = obs

    def write(self, index: int, obs: Any) -> None:
        """Write an observation, with conversion within the same kind of dtype."""
        if self.array is None:
            self.target[index] = obs
            return
        value, dtype = np.asarray(obs), self.array.dtype
        if value.shape != self._row_shape or not np.can_cast(value.dtype, dtype, "same_kind"):
            raise ObservationError(
                f"returned an observation of shape {value.shape} and dtype {value.dtype}, expected "
                f"shape {self._row_shape} and dtype {dtype} ({self._space}); correct the env or "
                "its observation_space",
                index,
            )
        self.array[index] = value

    def put(self, env_ids: range | np.ndarray, batch: Any) -> None:
        """Write one observation per entry of `env_ids`."""
        if self.array is not None:
            self.array[rows_of(env_ids)] = batch
        else:
            for env_id, item in zip(env_ids, batch, strict=True):
                self.target[env_id] = item

    def batch(self) -> Any:
        """Return all rows: a view, or a tuple of objects."""
        return tuple(self.target) if self.array is None else self.array

    def take(self, env_ids: np.ndarray) -> Any:
        """Return copies of some rows."""
        if self.array is not None:
            return self.array[env_ids]
        return tuple(deepcopy(self.target[index]) for index in env_ids)


# -- the results of a step -------------------------------------------------------------------------


class StepRows:
    """Rows for the results of one step: observations, rewards (num_envs,) and flags (num_envs,)."""

    __slots__ = ("obs", "reward_view", "rewards", "terminations", "truncations")

    def __init__(
        self,
        obs: ObservationRows,
        rewards: np.ndarray,
        terminations: np.ndarray,
        truncations: np.ndarray,
    ) -> None:
        self.obs, self.rewards = obs, rewards
        # Assigning an item of the view takes 2/3 of the time of an array's item.
        self.reward_view: Any = memoryview(rewards)  # type: ignore[arg-type]  # typeshed before 3.12
        self.terminations, self.truncations = terminations, truncations

    @staticmethod
    def make(space: Space, num_envs: int, allocate: Allocate = aligned_zeros) -> StepRows:
        """Allocate rows for `num_envs` envs with observations of `space`."""
        obs = ObservationRows(space, num_envs, allocate)
        return StepRows(obs, *(allocate((num_envs,), kind) for kind in ("f8", "?", "?")))

    def put(self, env_ids: range | np.ndarray, results: Sequence[Any]) -> None:
        """Write observations, rewards, terminations and truncations of these envs, one row each."""
        self.obs.put(env_ids, results[0])
        rows = rows_of(env_ids)
        self.rewards[rows], self.terminations[rows], self.truncations[rows] = results[1:4]


class StepSlot(NamedTuple):
    """Memory for the results of one step, for the argument `out`.

    Any object with these attributes works too, such as what `buffers.RolloutBuffer.slot` returns.
    The arrays are C-contiguous and stay the caller's; a step overwrites them. If a slot has an
    attribute `autoreset_mode`, envs of another mode refuse it.

    Attributes:
        obs: (R, *obs_shape), of the space's dtype.
        rewards: float32 or float64 (R,).
        terminations: bool (R,).
        truncations: bool (R,).
    """

    obs: Any
    rewards: Any  # arrays; on a device, tensors
    terminations: Any
    truncations: Any

    def put(self, env_ids: range | np.ndarray, results: Sequence[Any]) -> None:
        """Copy the first four results of a step of these envs into their rows."""
        for target, batch in zip(self, results, strict=False):
            _put_rows(target, rows_of(env_ids), batch)


def _put_rows(target: Any, rows: slice | np.ndarray, batch: Any) -> None:
    """Copy a batch into rows of the arrays of `target`, which may be nested."""
    if isinstance(target, dict | tuple):
        for key in target if isinstance(target, dict) else range(len(target)):
            _put_rows(target[key], rows, batch[key])
    else:
        target[rows] = batch


Outputs = StepSlot  # its name in `vecenv.jit`


def slot_arrays(out: Any, num_envs: int, check: Callable[..., Any] | None = None) -> StepSlot:
    """Return a slot's observations unchanged, and its other arrays, checked, as plain arrays.

    `check` replaces `check_slot_array` for memory that is no NumPy array.

    Raises:
        SlotError: An array is missing, or has a wrong shape (`num_envs` rows), dtype or layout, or
            is both flags.
    """
    shape = (num_envs,)
    try:
        obs, rewards = out.obs, out.rewards
        terminations, truncations = out.terminations, out.truncations
    except AttributeError as error:
        raise SlotError(
            f"out is {type(out).__name__}, expected an object with the arrays obs, rewards, "
            f"terminations, truncations such as StepSlot: {error}"
        ) from None
    check = check or check_slot_array
    rewards = check("rewards", rewards, shape, _REWARD_DTYPES)
    terminations = check("terminations", terminations, shape, FLAG_DTYPES)
    truncations = check("truncations", truncations, shape, FLAG_DTYPES)
    is_shared = terminations is truncations
    if check is check_slot_array and terminations.base is truncations.base:  # else they don't
        is_shared = np.may_share_memory(terminations, truncations)
    if is_shared:
        raise SlotError(
            "out.terminations and out.truncations share memory, so one would overwrite the other; "
            "give each an array of its own"
        )
    return StepSlot(obs, rewards, terminations, truncations)


def slot_outputs(
    out: Any, obs_shape: tuple[int, ...], obs_dtypes: tuple[Any, ...], check: Callable[..., Any]
) -> StepSlot:
    """Return the arrays of a slot whose observations are one array, see `slot_arrays`."""
    obs, *others = slot_arrays(out, obs_shape[0], check)
    return StepSlot(check("obs", obs, obs_shape, obs_dtypes), *others)


def slot_rows(out: Any, own: ObservationRows) -> StepSlot:
    """Return a slot's arrays as plain ones, see `slot_arrays`; `own` are rows of its space."""
    num_envs, found = len(own.keys), slot_arrays(out, len(own.keys))

    def check(space: Space, part: Any) -> np.ndarray:
        if not isinstance(space, ARRAY_SPACES):
            raise SlotError(
                f"`out` needs observations of fixed shape; {space} has none, step without `out`"
            )
        shape = num_envs, *(space.shape or ())
        return check_slot_array("obs", part, shape, (np.dtype(space.dtype),))

    try:
        return found._replace(obs=by_space(check, own.space, found.obs))
    except (LookupError, TypeError) as error:
        raise SlotError(
            f"out.obs is {short(found.obs)}, expected the parts of {own.space}: {error!r}"
        ) from None


def check_slot_array(
    name: str, array: Any, shape: tuple[int, ...], dtypes: tuple[np.dtype, ...]
) -> np.ndarray:
    """Return an `out` array's memory as a plain array into which results can be written.

    Raises:
        SlotError: The array can't be written into as it is.
    """
    if not isinstance(array, np.ndarray):
        raise SlotError(f"out.{name} must be a NumPy array, got {type(array).__name__}")
    plain = np.asarray(array)
    if plain.shape != shape or plain.dtype not in dtypes:
        raise SlotError(
            f"out.{name} has shape {plain.shape} and dtype {plain.dtype}, "
            f"expected shape {shape} and dtype {' or '.join(map(str, dtypes))}"
        )
    if not (flags := plain.flags).carray:
        raise SlotError(
            f"out.{name} must be C-contiguous, aligned and writable memory (its strides are "
            f"{plain.strides}, aligned={flags.aligned}, writeable={flags.writeable}); use "
            "`envs.allocate`"
        )
    return plain
