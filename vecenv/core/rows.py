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
from gymnasium.spaces import Dict, Tuple
from gymnasium.vector.utils import concatenate, create_empty_array

from vecenv.core.errors import ObservationError, SlotError
from vecenv.core.spaces import ARRAY_SPACES, parts_of, take_row

__all__ = [
    "FLAG_DTYPES",
    "NEEDS_CONVERSION",
    "Allocate",
    "ObservationRows",
    "Outputs",
    "StepRows",
    "aligned_zeros",
    "check_slot_array",
    "checked_layout",
    "copy_batch",
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
    """
    wanted = np.dtype(dtype)
    dtype, inner = wanted.base, wanted.shape  # of a dtype with dimensions of its own
    lengths = shape if isinstance(shape, tuple | list) else (shape,)
    sizes = (*map(operator.index, lengths), *inner)
    if any(size < 0 for size in sizes):
        raise ValueError(f"allocate: shape is {shape}, expected dimensions of at least 0")
    if dtype.hasobject:
        raise TypeError(
            f"allocate: dtype is {dtype}, expected numbers, flags or text of fixed length: Python "
            "objects can't be in memory that other code writes into"
        )
    if dtype.itemsize == 0:
        raise ValueError(
            f"allocate: dtype is {dtype.str!r}, whose items have no bytes; give it a length, such "
            f"as {dtype.str[1:-1]}8"
        )
    return sizes, dtype, math.prod(sizes) * dtype.itemsize


def aligned_zeros(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """Return zeros of this shape and dtype, aligned to a cache line; the caller owns them.

    Raises:
        ValueError, TypeError: See `checked_layout`.
        MemoryError: There is not enough memory.
    """
    shape, dtype, size_bytes = checked_layout(shape, dtype)
    if size_bytes >= 1 << 62:
        raise MemoryError(f"allocate({shape}, {dtype}) needs {size_bytes} bytes")
    pages = np.zeros(size_bytes + _CACHE_LINE, dtype=np.uint8)
    start = -pages.ctypes.data % _CACHE_LINE
    return pages[start : start + size_bytes].view(dtype).reshape(shape)


def copy_batch(batch: Any) -> Any:
    """Return a copy of batched observations that shares no memory with them."""
    if isinstance(batch, np.ndarray) and not batch.dtype.hasobject:
        return batch.copy()
    if type(batch) is dict:
        return {key: copy_batch(part) for key, part in batch.items()}
    return tuple(map(copy_batch, batch)) if type(batch) is tuple else deepcopy(batch)


def rows_of(env_ids: range | np.ndarray) -> slice | np.ndarray:
    """Return an index of these rows; for a range it gives views."""
    return slice(env_ids.start, env_ids.stop) if isinstance(env_ids, range) else env_ids


def _is_batched_as(space: Space, types: tuple[type, ...]) -> bool:
    """Whether Gymnasium concatenates this space (maybe a user's) like one of these types."""
    return concatenate.dispatch(type(space)) in {concatenate.dispatch(kind) for kind in types}


# -- observations ----------------------------------------------------------------------------------


class ObservationRows:
    """Batched observations of `num_envs` envs, written env by env.

    The loop over envs writes `rows.target[rows.keys[i]] = obs`, whatever the space. If `target`
    refuses a value, `rows.write(i, obs)` converts it, or raises an error that names the env. For
    a one-dimensional Box, by far the commonest space, `target` is a flat memoryview: its slice
    assignment checks dtype and length and copies, in a third less time than NumPy's.

    Attributes:
        target: Object for `target[key] = obs`.
        keys: One key per env.
        array: The array of a fixed-shape leaf, (num_envs, *shape); None for other spaces.
    """

    target: Any
    keys: Sequence[Any]
    array: Any = None

    @staticmethod
    def make(space: Space, num_envs: int, allocate: Allocate = aligned_zeros) -> ObservationRows:
        """Allocate the batch for `num_envs` observations of `space`."""
        if isinstance(space, ARRAY_SPACES) and _is_batched_as(space, ARRAY_SPACES):
            return ArrayRows(space, allocate((num_envs, *(space.shape or ())), space.dtype))
        parts = parts_of(space)
        if parts is not None and _is_batched_as(space, (Dict, Tuple)):
            make = ObservationRows.make
            children = {k: make(part, num_envs, allocate) for k, part in parts.items()}
            return TreeRows(space, children, num_envs)
        return ObjectRows(space, num_envs)

    def write(self, index: int, obs: Any) -> None:
        """Write the observation of env `index`, with conversion within the same kind of dtype.

        Raises:
            ObservationError: Shape or dtype do not fit; names the env.
        """
        raise NotImplementedError

    def put(self, env_ids: range | np.ndarray, batch: Any) -> None:
        """Write a batch of observations, one per entry of `env_ids`; a range is one block."""
        raise NotImplementedError

    def batch(self) -> Any:
        """Return the batch in the form of the observation space: views, until the next write."""
        raise NotImplementedError

    def take(self, env_ids: np.ndarray) -> Any:
        """Return a batch of the rows `env_ids`, int64 (B,): copies, in this order."""
        raise NotImplementedError

    def over(self, batch: Any) -> ObservationRows:
        """Return rows that write into `batch`, which the caller owns.

        Raises:
            SlotError: An array of wrong shape, dtype or layout, or a space without fixed shape.
        """
        raise NotImplementedError


class ArrayRows(ObservationRows):
    """Rows of one array.

    Args:
        space: Space of one observation.
        array: (num_envs, *shape).
        slices: Slice of each row in the flat array, if other rows of this space have them.
    """

    array: np.ndarray

    def __init__(self, space: Space, array: np.ndarray, slices: list[slice] | None = None) -> None:
        self._space, self.array = space, array
        num_envs, *shape = array.shape
        self._row_shape = tuple(shape)
        width = math.prod(shape)
        self._slices = slices or [slice(i * width, (i + 1) * width) for i in range(num_envs)]
        # Memoryviews can't assign items of other dtypes, and can't be cast if they are empty.
        is_simple = array.dtype.char in _MEMORYVIEW_FORMATS and array.dtype.isnative
        self._flat: Any = None
        if is_simple and array.size:
            self._flat = memoryview(array.reshape(-1))  # type: ignore[arg-type]  # typeshed before 3.12
        self.keys = self._slices if self._flat is not None and len(shape) == 1 else range(num_envs)
        self.target = self if self._flat is None or len(shape) > 1 else self._flat

    def __setitem__(self, index: int, obs: Any) -> None:
        """Write an observation of two or more dimensions, or of a dtype unknown to memoryviews."""
        if obs.shape != self._row_shape or (self._flat is None and obs.dtype != self.array.dtype):
            raise ValueError("needs the checks of write()")  # caught: the caller uses `write`
        if self._flat is None:
            self.array[index] = obs
        else:
            self._flat[self._slices[index]] = obs.ravel()  # the view refuses other dtypes

    def write(self, index: int, obs: Any) -> None:
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
        self.array[rows_of(env_ids)] = batch

    def batch(self) -> np.ndarray:
        return self.array

    def take(self, env_ids: np.ndarray) -> np.ndarray:
        return self.array[env_ids]

    def over(self, batch: Any) -> ArrayRows:
        batch = check_slot_array("obs", batch, self.array.shape, (self.array.dtype,))
        return ArrayRows(self._space, batch, self._slices)


class ObjectRows(ObservationRows):
    """Rows of a space without fixed shape: a list with one observation per env."""

    def __init__(self, space: Space, num_envs: int) -> None:
        self._space = space
        self._is_batched_as_tuple = _is_batched_as(space, (Space,))
        self.keys = range(num_envs)
        self.target: list[Any] = [None] * num_envs

    def write(self, index: int, obs: Any) -> None:
        self.target[index] = obs

    def put(self, env_ids: range | np.ndarray, batch: Any) -> None:
        for row, env_id in enumerate(env_ids):
            self.target[env_id] = take_row(self._space, batch, row)

    def batch(self) -> Any:
        return self._batch_of(self.target)

    def take(self, env_ids: np.ndarray) -> Any:
        return self._batch_of([copy_batch(self.target[index]) for index in env_ids])

    def _batch_of(self, items: list[Any]) -> Any:
        if self._is_batched_as_tuple:
            return tuple(items)
        return concatenate(self._space, items, create_empty_array(self._space, n=len(items)))

    def over(self, batch: Any) -> ObjectRows:
        raise SlotError(
            f"`out` needs observations of fixed shape; {self._space} has none, step without `out`"
        )


class TreeRows(ObservationRows):
    """Rows of a Dict or Tuple space.

    Attributes:
        children: The rows of the parts, by key or position.
    """

    def __init__(self, space: Space, children: dict[Any, ObservationRows], num_envs: int) -> None:
        self._space = space
        self.children = children
        self._parts = [(name, rows, rows.target, rows.keys) for name, rows in children.items()]
        self.keys = range(num_envs)
        self.target = self

    def __setitem__(self, index: int, obs: Any) -> None:
        for name, rows, target, keys in self._parts:
            part = obs[name]
            try:
                target[keys[index]] = part
            except NEEDS_CONVERSION:
                rows.write(index, part)

    def write(self, index: int, obs: Any) -> None:
        try:
            self[index] = obs
        except (KeyError, IndexError, TypeError) as error:
            raise ObservationError(
                f"returned {type(obs).__name__} without part {error}, "
                f"expected an observation of {self._space}",
                index,
            ) from error

    def put(self, env_ids: range | np.ndarray, batch: Any) -> None:
        for name, rows in self.children.items():
            rows.put(env_ids, batch[name])

    def batch(self) -> Any:
        return self._nested({name: rows.batch() for name, rows in self.children.items()})

    def take(self, env_ids: np.ndarray) -> Any:
        return self._nested({name: rows.take(env_ids) for name, rows in self.children.items()})

    def _nested(self, parts: dict[Any, Any]) -> Any:
        return parts if isinstance(self._space, Dict) else tuple(parts.values())

    def over(self, batch: Any) -> TreeRows:
        is_list = isinstance(batch, tuple | list)
        if not is_list and not hasattr(batch, "keys"):
            raise SlotError(f"out.obs is {type(batch).__name__}, expected {list(self.children)}")
        names = range(len(batch)) if is_list else batch
        if set(names) != set(self.children):
            raise SlotError(f"out.obs has the parts {list(names)}, expected {list(self.children)}")
        children = {name: rows.over(batch[name]) for name, rows in self.children.items()}
        return TreeRows(self._space, children, len(self.keys))


# -- the results of a step -------------------------------------------------------------------------


class StepRows:
    """Rows for the results of one step: observations, rewards and flags.

    Attributes:
        obs: Rows of the observations.
        rewards: float64 or float32 (num_envs,).
        terminations: bool (num_envs,).
        truncations: bool (num_envs,).
        has_ends: Whether a flag may be True; only then a step clears the flags.
    """

    __slots__ = ("has_ends", "obs", "reward_view", "rewards", "terminations", "truncations")

    def __init__(
        self,
        obs: ObservationRows,
        rewards: np.ndarray,
        terminations: np.ndarray,
        truncations: np.ndarray,
    ) -> None:
        self.obs = obs
        self.rewards = rewards
        # Assigning an item of the view takes 2/3 of the time of an array's item.
        self.reward_view: Any = memoryview(rewards)  # type: ignore[arg-type]  # typeshed before 3.12
        self.terminations = terminations
        self.truncations = truncations
        self.has_ends = True

    @staticmethod
    def make(space: Space, num_envs: int, allocate: Allocate = aligned_zeros) -> StepRows:
        """Allocate rows for `num_envs` envs with observations of `space`."""
        obs = ObservationRows.make(space, num_envs, allocate)
        return StepRows(obs, *(allocate((num_envs,), kind) for kind in ("f8", "?", "?")))

    def put(self, env_ids: range | np.ndarray, results: Sequence[Any]) -> None:
        """Write observations, rewards, terminations and truncations of these envs, one row each."""
        self.obs.put(env_ids, results[0])
        rows = rows_of(env_ids)
        self.rewards[rows], self.terminations[rows], self.truncations[rows] = results[1:4]

    def clear_flags(self, indices: Sequence[int] | None) -> None:
        """Set the flags of all rows, or of some, to False."""
        chosen: Any = slice(None) if indices is None else list(indices)
        self.terminations[chosen] = False
        self.truncations[chosen] = False
        self.has_ends = indices is not None


class Outputs(NamedTuple):
    """The output arrays of a call with R rows; all are C-contiguous.

    Attributes:
        obs: (R, *obs_shape).
        rewards: float32 or float64 (R,).
        terminations: bool (R,).
        truncations: bool (R,).
    """

    obs: Any
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray


def slot_arrays(out: Any, num_envs: int) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
    """Return a slot's observations unchanged, and its other arrays, checked, as plain arrays.

    Args:
        out: Object with the arrays `obs, rewards, terminations, truncations`, see `StepSlot`.
        num_envs: Number of rows that every array must have.

    Raises:
        SlotError: An array is missing, or has a wrong shape, dtype or layout, or is both flags.
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
    rewards = check_slot_array("rewards", rewards, shape, _REWARD_DTYPES)
    terminations = check_slot_array("terminations", terminations, shape, FLAG_DTYPES)
    truncations = check_slot_array("truncations", truncations, shape, FLAG_DTYPES)
    is_shared = terminations.base is truncations.base  # else they don't; this is asked every step
    if is_shared and np.may_share_memory(terminations, truncations):
        raise SlotError(
            "out.terminations and out.truncations share memory, so one would overwrite the other; "
            "give each an array of its own"
        )
    return obs, rewards, terminations, truncations


def slot_outputs(out: Any, obs_shape: tuple[int, ...], obs_dtypes: tuple[np.dtype, ...]) -> Outputs:
    """Return the arrays of a slot whose observations are one array, see `slot_arrays`."""
    obs, *others = slot_arrays(out, obs_shape[0])
    return Outputs(check_slot_array("obs", obs, obs_shape, obs_dtypes), *others)


def slot_rows(out: Any, own: ObservationRows, num_envs: int) -> StepRows:
    """Check a slot, see `slot_arrays`, and return its rows; `own` are rows of the same space."""
    obs, *others = slot_arrays(out, num_envs)
    return StepRows(own.over(obs), *others)


def check_slot_array(
    name: str, array: Any, shape: tuple[int, ...], dtypes: tuple[np.dtype, ...]
) -> np.ndarray:
    """Return an `out` array's memory as a plain array into which results can be written.

    Raises:
        SlotError: The array can't be written into as it is.
    """
    if type(array) is np.ndarray and array.shape == shape and array.dtype in dtypes:
        if array.flags.carray:
            return array
    elif not isinstance(array, np.ndarray):
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
