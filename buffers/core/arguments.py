"""Checks of user arguments, the same for all buffers.

Each function returns its argument in the form to be stored, or raises BufferMisuseError.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces

from buffers.core.errors import BufferMisuseError
from buffers.core.rows import Field, RowLayout
from buffers.core.spaces import Leaf

__all__ = [
    "MAX_COUNT", "ColumnReader", "Transitions", "as_array", "as_tensor", "check_count",
    "check_place", "check_rewards", "read_array", "read_columns", "read_distinct_ids",
    "read_episode", "read_flags", "read_nest", "read_number", "read_steps", "read_tensor",
    "read_valid", "resolve_device", "tree_leaves",
]  # fmt: skip

MAX_COUNT = 2**31 - 1  # largest number of rows per draw, and of other 32-bit counts

_BOOL, _FLOAT32 = np.dtype(np.bool_), np.dtype(np.float32)
_FLOATS = (np.dtype(np.float64), _FLOAT32)  # accepted as rewards; envs return the first
_FLAGS = ("terminations", "truncations")
# K rows to store: arrays (K, ...) by path; env ids int64 (K,), or (0,) for whole steps or buffers
# that don't track envs; stops bool (K,), the episode of the row's env ends after it; and cuts int64
# (C,), envs whose episode ends before their first row.
Transitions = tuple[Mapping[str, np.ndarray], np.ndarray, np.ndarray | None, np.ndarray | None]
_NO_IDS = np.zeros(0, np.int64)
_SMALL = 1e30  # a sum of squares below this has only terms that fit into float32


def resolve_device(device: torch.device | str) -> torch.device:
    """The device as tensors name it: "cuda" becomes the current device, such as cuda:0."""
    try:
        asked = torch.device(device)
        if asked.type == "cpu":
            return torch.device("cpu")
        return asked if asked.index is not None else torch.empty(0, device=asked).device
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise BufferMisuseError(
            f"device is {device!r}, expected one that torch can use here, such as 'cpu': "
            f"{str(error).partition(chr(10))[0]}"
        ) from None


def check_place(name: str, tensor: torch.Tensor, device: torch.device | None) -> None:
    """Raise BufferMisuseError unless a tensor is on the CPU or on a resolved device."""
    if tensor.device.type != "cpu" and tensor.device != device:
        where = "" if device is None or device.type == "cpu" else f" or {device}"
        raise BufferMisuseError(f"{name} lies on {tensor.device}, expected the CPU{where}; move it")


def _check_names(given: Mapping[str, Any], required: Set[str], optional: Set[str]) -> None:
    """Raise BufferMisuseError for columns that are unknown or missing."""
    if not required <= set(given) <= required | optional:
        unknown, missing = set(given) - required - optional, sorted(required - set(given))
        problem = f"unknown: {sorted(unknown, key=str)}" if unknown else f"missing: {missing}"
        others = f" and possibly {sorted(optional)}" if optional else ""
        raise BufferMisuseError(
            f"columns are {sorted(given, key=str)}, expected {sorted(required)}{others}; {problem}"
        )


def as_array(name: str, given: Any, device: torch.device | None = None) -> np.ndarray:
    """Convert to an array on the host, of any shape and dtype; bfloat16 becomes float32.

    Args:
        name: Name of the argument, for messages, here and below.
        given: Array, tensor or nested list.
        device: Device that tensors may be on, besides the CPU.
    """
    if type(given) is np.ndarray:
        return given
    if isinstance(given, torch.Tensor):
        check_place(name, given, device)
        given = given.detach().cpu()
        given = given.float() if given.dtype is torch.bfloat16 else given
    try:
        return given.numpy() if isinstance(given, torch.Tensor) else np.asarray(given)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        kind = type(given).__name__
        raise BufferMisuseError(
            f"{name} must be a tensor or an array, got {kind}: {error}"
        ) from None


def as_tensor(name: str, given: Any) -> torch.Tensor:
    """Convert to a plain tensor without gradients, of any shape, dtype and device."""
    if isinstance(given, torch.Tensor):
        return (given if type(given) is torch.Tensor else given.as_subclass(torch.Tensor)).detach()
    array = as_array(name, given)
    # torch rejects other byte orders and negative strides, and warns of read-only memory.
    if not (array.dtype.isnative and array.flags.carray):
        array = np.array(array, array.dtype.newbyteorder("="), order="C")
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        kind = type(given).__name__
        raise BufferMisuseError(
            f"{name} must be a tensor or an array, got {kind}: {error}"
        ) from None


def check_count(name: str, number: Any, most: int | None = None) -> int:
    """Convert to an int; raise BufferMisuseError unless it is an integer from 1 to `most`."""
    try:
        count = operator.index(number)
    except TypeError:
        count = 0
    if count < 1 or number is True:
        raise BufferMisuseError(f"{name} must be a positive integer, got {number!r}")
    if most is not None and count > most:
        raise BufferMisuseError(f"{name} is {count}, expected at most {most}")
    return count


def read_columns(columns: Any, known: Sequence[str]) -> frozenset[str] | None:
    """Names of columns to draw, at least one, all in `known`; None for all columns."""
    if columns is None:
        return None
    is_listed = isinstance(columns, Iterable) and not isinstance(columns, str | bytes | Mapping)
    names: tuple[Any, ...] = tuple(columns) if is_listed else ()
    if names and all(type(name) is str and name in known for name in names):
        return frozenset(names)
    raise BufferMisuseError(
        f"columns is {columns!r}, expected a sequence of names out of {list(known)}, one at least"
    )


def read_number(name: str, number: Any, most: float = 1.0) -> float:
    """Convert to a float; raise BufferMisuseError unless it is finite and from 0 to `most`."""
    value = math.nan
    if not isinstance(number, str | bytes | bytearray) and getattr(number, "ndim", 0) == 0:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            value = float(number)
    if not (math.isfinite(value) and 0.0 <= value <= most):
        end = "finite number of 0 or more" if most == math.inf else f"number from 0 to {most:g}"
        raise BufferMisuseError(f"{name} is {number!r}, expected a {end}")
    return value


def read_array(
    name: str, given: Any, shape: tuple[int, ...], dtype: np.dtype,
    device: torch.device | None = None,
) -> np.ndarray:  # fmt: skip
    """Return an array of exactly this shape whose values the dtype can hold.

    Floats may lose precision; integers must fit exactly. Flags may be integers 0 and 1, and are
    returned as bool. A tensor may be on `device`, too.
    """
    array = as_array(name, given, device)
    if array.shape != tuple(shape):
        raise BufferMisuseError(f"{name} has shape {array.shape}, expected {tuple(shape)}")
    if dtype == _BOOL and array.dtype.kind in "iu":
        return read_flags(name, array)
    if not _holds_values(dtype, array):
        raise BufferMisuseError(
            f"{name} has dtype {array.dtype}, expected {dtype}, which cannot hold its values; "
            "convert it before if that is meant"
        )
    return array


def read_tensor(name: str, given: Any, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a plain tensor of exactly this shape whose values the dtype can hold.

    The rules are those of `read_array`. If values must be checked, they are copied to the host.
    """
    tensor = as_tensor(name, given)
    is_held = tensor.dtype is dtype or (dtype.is_floating_point and not tensor.is_complex())
    if is_held and tensor.shape == tuple(shape):
        return tensor
    own = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    return as_tensor(name, read_array(name, tensor, tuple(shape), own, tensor.device))


def _holds_values(dtype: np.dtype, array: np.ndarray) -> bool:
    """Whether a dtype can hold the values of an array: floats rounded, integers exactly."""
    if array.dtype == dtype:
        return True
    if dtype.kind not in "iu" or array.dtype.kind not in "iu":
        return np.can_cast(array.dtype, dtype, "safe" if dtype.kind in "iu" else "same_kind")
    cast = array.astype(dtype)
    return bool(((cast == array) & ((cast >= 0) == (array >= 0))).all())


def read_flags(name: str, given: Any) -> Any:
    """Convert bools, or integers 0 and 1, to bools, on the same device."""
    if isinstance(given, torch.Tensor):  # torch can't compare all unsigned integers
        given = given if given.dtype is torch.bool else given.to(torch.int64)
        flags: Any = given.bool()
    else:
        flags = given.astype(np.bool_, copy=False)
    if flags is not given and not (flags == given).all():
        wrong = given[flags != given].reshape(-1)[0]
        raise BufferMisuseError(f"{name} has {int(wrong)}, expected bool, or integers 0 and 1")
    return flags


def check_rewards(rewards: np.ndarray, what: str = "") -> None:
    """Raise BufferMisuseError, beginning with `what`, unless rewards (K,) are finite as float32."""
    # One fast pass for the usual case. Unlike `dot`, `vdot` does not warn of infinite sums.
    if rewards.ndim == 1 and np.vdot(rewards, rewards) < _SMALL:
        return
    stored = _stored(rewards, _FLOAT32)
    wrong = np.flatnonzero(~np.isfinite(stored))
    if len(wrong):
        raise BufferMisuseError(
            f"{what}rewards[{wrong[0]}] is {stored[wrong[0]]} as float32, expected finite numbers; "
            "find the step that makes it"
        )


def _read_rewards(given: Any, device: torch.device) -> np.ndarray:
    """Rewards float32 or float64 (K,), finite as float32."""
    rewards = as_array("rewards", given, device)
    if rewards.ndim != 1:
        raise BufferMisuseError(
            f"rewards has shape {rewards.shape}, expected (K,): one number per transition"
        )
    if rewards.dtype not in _FLOATS:
        rewards = _stored(read_array("rewards", rewards, rewards.shape, _FLOAT32), _FLOAT32)
    check_rewards(rewards)
    return rewards


def _read_ids(
    env_ids: Any, device: torch.device | None, num_rows: int | None, num_envs: int | None,
    expected: str,
) -> np.ndarray:  # fmt: skip
    """Copy ids as int64 (K,); check K == num_rows and ids < num_envs, unless these are None."""
    ids = as_array("env_ids", env_ids, device)
    is_shaped = ids.ndim == 1 and num_rows in (None, len(ids))
    if not is_shaped or (ids.size and ids.dtype.kind not in "iu"):
        raise BufferMisuseError(
            f"env_ids has dtype {ids.dtype} and shape {ids.shape}, expected {expected}"
        )
    ids = ids.astype(np.int64)
    if num_envs is not None and len(wrong := ids[(ids < 0) | (ids >= num_envs)]):
        raise BufferMisuseError(f"env_ids has {wrong[0]}, expected {expected}")
    return ids


def read_distinct_ids(
    env_ids: Any, num_envs: int, device: torch.device | None = None
) -> np.ndarray:
    """Environment ids int64 (B,), from distinct ids 0 to N - 1, a mask bool (N,), or None for all.

    A tensor may be on `device`.
    """
    if env_ids is None:
        return np.arange(num_envs)
    given = as_array("env_ids", env_ids, device)
    if given.dtype == _BOOL and given.shape == (num_envs,):
        return np.flatnonzero(given)
    expected = f"different numbers from 0 to {num_envs - 1}, (K,), or a mask bool ({num_envs},)"
    ids = _read_ids(given, device, None, num_envs, expected)
    if len(np.unique(ids)) < len(ids):
        raise BufferMisuseError(f"env_ids is {ids.tolist()}, expected {expected}")
    return ids


def read_valid(valid: Any, num_rows: int, device: torch.device | None = None) -> np.ndarray:
    """Whether each row acted, so that it is a transition: bool (K,), a copy."""
    return np.array(read_array("valid", valid, (num_rows,), _BOOL, device), np.bool_)


def tree_leaves(space: Space, tree: Any, name: str) -> list[Any]:
    """List the leaves of a nest, which must have the structure of the space."""
    parts: Mapping[Any, Space]
    nest: Any = tree
    if isinstance(space, spaces.Dict):
        parts, expected = space.spaces, f"dict with the keys {sorted(map(str, space.spaces))}"
        fits = isinstance(tree, Mapping) and set(tree) == set(parts)
    elif isinstance(space, spaces.Tuple):
        parts, expected = dict(enumerate(space.spaces)), f"tuple of {len(space.spaces)} items"
        fits = isinstance(tree, tuple | list) and len(tree) == len(parts)
    else:
        return [tree]
    if not fits:
        content = f" of {len(tree)} items" if isinstance(tree, tuple | list) else ""
        content = f" with {sorted(map(str, tree))}" if isinstance(tree, Mapping) else content
        raise BufferMisuseError(f"{name} must be a {expected}, got {type(tree).__name__}{content}")
    return [
        leaf
        for key, child in parts.items()
        for leaf in tree_leaves(child, nest[key], f"{name}[{key!r}]")
    ]


def read_nest(
    name: str, given: Any, space: Space, leaves: Sequence[Leaf | Field], count: int,
    device: torch.device | None = None,
) -> list[np.ndarray]:  # fmt: skip
    """Convert K observations, nested like the space, to arrays (K, *shape), one per leaf.

    `leaves` are the leaves of the space under the name "obs".
    """
    values = zip(leaves, tree_leaves(space, given, name), strict=True)
    return [
        read_array(name + path.removeprefix("obs"), value, (count, *shape), dtype, device)
        for (path, shape, dtype, *_), value in values
    ]


def _stored(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if array.dtype == dtype and array.flags.c_contiguous:
        return array
    with np.errstate(over="ignore"):  # overflowing rewards are checked apart
        return np.ascontiguousarray(array, dtype)


class ColumnReader:
    """Checks the columns of steps.

    Args:
        layout: Layout of the rows to be filled.
    """

    def __init__(self, layout: RowLayout):
        self._layout = layout
        self._others = ("actions", *_FLAGS, *layout.extras)
        self._names = {"obs", "next_obs", "rewards", *self._others}
        # For the fast path of `_is_stored`: name, shape and dtype, which is compared by `is`.
        is_flat = layout.obs == ["obs"] and layout.frames is None
        kinds = {name: layout.fields[name] for name in ("obs", *self._others)} if is_flat else {}
        kinds |= {"next_obs": kinds["obs"]} if is_flat else {}
        self._flat = [(name, f.shape, np.dtype(f.dtype.str)) for name, f in kinds.items()]

    def read(
        self, columns: Mapping[str, Any], device: torch.device, optional: Set[str] = frozenset()
    ) -> Mapping[str, np.ndarray]:
        """Steps as arrays (K, ...) by path, of the dtypes of the rows; rewards may be float64.

        The leaves of next_obs are included, also if rows do not store them.

        Args:
            columns: Columns of the user, by name; None for a column that was not passed.
            device: Device that tensors may be on, besides the CPU.
            optional: Names of further accepted columns.
        """
        if self._is_stored(columns):
            check_rewards(columns["rewards"])
            return columns
        given = {name: column for name, column in columns.items() if column is not None}
        if given.keys() != self._names:
            _check_names(given, self._names, optional)
        layout, rewards = self._layout, _read_rewards(given["rewards"], device)
        count, found = len(rewards), {"rewards": rewards}
        frames, leaves = layout.frames, [layout.fields[path] for path in layout.obs]
        if frames is not None:
            leaves = [leaves[0]._replace(shape=frames.stack_shape)]
        for name, prefix in (("obs", ""), ("next_obs", "next_")):
            space = layout.observation_space
            arrays = read_nest(name, given[name], space, leaves, count, device)
            for field, array in zip(leaves, arrays, strict=True):
                array = array if frames is None else frames.split(array)
                found[prefix + field.path] = _stored(array, field.dtype)
        for name in (*self._others, *(optional & given.keys())):
            field = layout.fields[name]
            array = read_array(name, given[name], (count, *field.shape), field.dtype, device)
            found[name] = _stored(array, field.dtype)
        return found

    def _is_stored(self, columns: Mapping[str, Any]) -> bool:
        """Whether all columns are arrays as stored; takes a third of the time of `read`."""
        rewards = columns.get("rewards")
        if not self._flat or len(columns) != len(self._names) or type(rewards) is not np.ndarray:
            return False
        rows = rewards.shape
        for name, shape, dtype in self._flat:
            value = columns.get(name)
            if type(value) is not np.ndarray or value.dtype is not dtype:
                return False
            if value.shape != rows + shape:
                return False
        return rewards.ndim == 1 and rewards.dtype in _FLOATS

    def read_transitions(
        self, columns: Mapping[str, Any], env_ids: Any, valid: Any, num_envs: int,
        device: torch.device,
    ) -> Transitions:  # fmt: skip
        """Check the arguments of `add` of a replay buffer; leave out rows that are not valid.

        `num_envs` is 0 if the buffer does not track envs.
        """
        arrays, frames, is_valid = self.read(columns, device), self._layout.frames, None
        count = len(arrays["rewards"])
        ids = _NO_IDS  # whole steps, or envs are not tracked
        if env_ids is not None:
            expected = f"integers ({count},)" + (f" from 0 to {num_envs - 1}" if num_envs else "")
            ids = _read_ids(env_ids, device, count, num_envs or None, expected)
            ids = ids if num_envs else _NO_IDS
        elif num_envs and count % num_envs:
            raise BufferMisuseError(
                f"got {count} rows without env_ids, expected a multiple of num_envs = {num_envs}: "
                "whole steps of all envs in order; pass env_ids with one id per row"
            )
        if valid is not None:
            is_valid = read_valid(valid, count, device)
            arrays = {path: array[is_valid] for path, array in arrays.items()}
        if frames is not None:
            row = frames.first_break(arrays["obs"], arrays["next_obs"])
            if row is not None:
                raise BufferMisuseError(
                    f"row {row}: next_obs is not obs moved on by a frame, the oldest first along "
                    f"axis {frames.axis} of {frames.stack_shape}; leave frame_stack out"
                )
        if is_valid is None or not num_envs:
            return arrays, ids, None, None
        ids = ids if len(ids) else np.arange(count) % num_envs
        stops, cuts = _find_gaps(ids, is_valid)
        return arrays, ids[is_valid], stops[is_valid], cuts


def read_steps(
    columns: Mapping[str, Any], layout: RowLayout, device: torch.device
) -> dict[str, np.ndarray]:
    """As `ColumnReader.read`, with float32 rewards, and with `boundaries` if given."""
    found = ColumnReader(layout).read(columns, device, {"boundaries"})
    return {**found, "rewards": _stored(found["rewards"], _FLOAT32)}


def _find_gaps(env_ids: np.ndarray, is_valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the ends of episodes caused by rows that are left out: `is_valid` bool (K,) is False.

    Returns:
        stops bool (K,), whether the next row of the same env is left out; and cuts int64 (C,), the
        envs whose first row is left out.
    """
    order = np.argsort(env_ids, kind="stable")
    ids, is_out = env_ids[order], ~is_valid[order]
    is_first = np.ones(len(ids), np.bool_)
    is_first[1:] = ids[1:] != ids[:-1]
    stops = np.zeros(len(ids), np.bool_)
    stops[order[:-1]] = is_out[1:] & ~is_first[1:]
    return stops, ids[is_first & is_out]


def read_episode(
    episode: Mapping[str, Any], layout: RowLayout, device: torch.device
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], int]:
    """A whole episode of T steps.

    Returns:
        Arrays (T, ...) by path, with the first T observations; the last observation by path, one
        row; and T.
    """
    if not isinstance(episode, Mapping):
        raise BufferMisuseError(
            f"an episode must be a dict of columns, got {type(episode).__name__}"
        )
    flags, given = (*_FLAGS, "boundaries"), dict(episode)
    _check_names(episode, {"obs", "actions", "rewards", *layout.extras}, {"next_obs", *flags})
    count = len(_read_rewards(episode["rewards"], device))
    if count == 0:
        raise BufferMisuseError("the episode has no step; expected one at least")
    if "next_obs" not in episode:
        leaves = [layout.fields[path] for path in layout.obs]
        space = layout.observation_space
        arrays = read_nest("obs", episode["obs"], space, leaves, count + 1, device)
        given["obs"] = layout.build_obs([array[:-1] for array in arrays])
        given["next_obs"] = layout.build_obs([array[1:] for array in arrays])
    if not episode.keys() & {*_FLAGS}:
        given["truncations"] = np.arange(count) == count - 1
    given = {**dict.fromkeys(flags, np.zeros(count, np.bool_)), **given}
    found = read_steps(given, layout, device)
    last = {path: found[f"next_{path}"][-1:] for path in layout.obs}
    for path in layout.obs:
        array, following = found[path][1:], found.pop(f"next_{path}")[:-1]
        same = (array == following) | (array != array)  # NaN equals NaN here
        wrong = np.flatnonzero(~same.all(axis=tuple(range(1, same.ndim))))
        if len(wrong):
            raise BufferMisuseError(
                f"next_obs of step {wrong[0]} differs from obs of step {wrong[0] + 1} in {path}; "
                "in one episode they are the same observation: split it there"
            )
    over = (found["terminations"] | found["truncations"])[:-1]
    if over.any():
        raise BufferMisuseError(
            f"the episode ends in step {int(np.argmax(over))}, but has {count} steps; split it "
            "there, or use the column boundaries for what does not end an episode"
        )
    return found, last, count
