"""Spaces and their batches: one walk over their parts, batched spaces, and rows of batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Env, Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector.utils import batch_differing_spaces, batch_space

__all__ = [
    "ARRAY_SPACES", "BatchedSpaces", "ObservationMode", "batch_env_spaces", "batch_thinly",
    "by_space", "chunk_bounds", "is_arrays", "is_same", "leaf_by_leaf", "leaves", "merge_rows",
    "parts_of", "require_new_env", "require_spaces", "short", "stack_rows", "take_row", "take_rows",
    "why_outside",
]  # fmt: skip

ObservationMode = str | tuple[Space, Space]

ARRAY_SPACES = (Box, Discrete, MultiDiscrete, MultiBinary)
_BOUNDS = {Box: ("low", "high", "bounded_below", "bounded_above"), MultiDiscrete: ("nvec", "start")}


# -- walks over spaces and batches -----------------------------------------------------------------


def parts_of(space: Space) -> dict[Any, Space] | None:
    """Return the parts of a Dict or Tuple space, by key or position; None for other spaces."""
    if isinstance(space, Dict):
        return dict(space.spaces)
    return dict(enumerate(space.spaces)) if isinstance(space, Tuple) else None


def is_arrays(space: Space) -> bool:
    """Whether all parts of a space have a fixed shape."""
    if (parts := parts_of(space)) is not None:
        return all(map(is_arrays, parts.values()))
    return isinstance(space, ARRAY_SPACES)


def by_space(function: Callable[..., Any], space: Space, *batches: Any) -> Any:
    """Apply a function to each leaf of a space, with the batches' values there."""
    if (parts := parts_of(space)) is None:
        return function(space, *batches)
    made = {
        key: by_space(function, part, *(batch[key] for batch in batches))
        for key, part in parts.items()
    }
    return made if isinstance(space, Dict) else tuple(made.values())


def leaf_by_leaf(function: Callable[[Any], Any], batch: Any) -> Any:
    """Apply a function to each array of a batch; the results are nested as the batch is."""
    if isinstance(batch, dict):
        return {key: leaf_by_leaf(function, part) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(leaf_by_leaf(function, part) for part in batch)
    return function(batch)


def leaves(batch: Any, space: Space) -> list[Any]:
    """Return the arrays of a batch in the order of the space's parts."""
    found: list[Any] = []
    by_space(lambda _, part: found.append(part), space, batch)
    return found


# -- spaces of vector envs -------------------------------------------------------------------------


class BatchedSpaces(NamedTuple):
    """The four spaces of a vector env."""

    single_observation_space: Space
    observation_space: Space
    single_action_space: Space
    action_space: Space

    @classmethod
    def of(cls, observation_space: Space, action_space: Space, num_envs: int) -> BatchedSpaces:
        """Batch the spaces of one env, see `batch_thinly`."""
        batched = batch_thinly(observation_space, num_envs), batch_thinly(action_space, num_envs)
        return cls(observation_space, batched[0], action_space, batched[1])


def batch_thinly(space: Space, num_envs: int) -> Space:
    """Batch a space as Gymnasium does, but store the bounds of one env only, shared by views.

    Gymnasium's arrays take ten bytes for each float32 of an observation.
    """
    batched = batch_space(space, num_envs)

    def thin(part: Space) -> None:
        for name in _BOUNDS.get(type(part), ()):
            array = getattr(part, name)
            setattr(part, name, np.broadcast_to(array[0].copy(), array.shape))

    by_space(thin, batched)
    return batched


def batch_env_spaces(
    observation_spaces: Sequence[Space],
    action_spaces: Sequence[Space],
    observation_mode: ObservationMode,
    owner: str,
) -> BatchedSpaces:
    """Batch the spaces of all envs, as `gymnasium.vector.SyncVectorEnv` does.

    Error messages begin as Gymnasium's do, since existing code looks for them.

    Args:
        observation_spaces: One per env.
        action_spaces: One per env; all must be equal.
        observation_mode: "same", "different" (same shape and dtype, bounds may differ), or the pair
            (batched space, single space) to use as they are.
        owner: Class name of the vector env, for messages.

    Raises:
        ValueError: The observation mode is unknown, or there is no env.
        TypeError: The given pair contains something that is not a space.
        RuntimeError: An env's space does not fit; the message names the env.
    """
    if not observation_spaces:
        raise ValueError("A vector env needs at least one env, got an empty list of factories")
    single, action_space, num_envs = observation_spaces[0], action_spaces[0], len(action_spaces)
    batched = None
    if isinstance(observation_mode, tuple) and len(observation_mode) == 2:
        batched, single = observation_mode
        if not isinstance(batched, Space) or not isinstance(single, Space):
            raise TypeError(
                "observation_mode as a pair must be (batched space, single space), "
                f"got ({type(batched)}, {type(single)})"
            )
    elif observation_mode not in ("same", "different"):
        raise ValueError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and "
            f"batch observation space, actual got {observation_mode}"
        )
    named, broken = "different' or 'custom space", "do not share shape and dtype"
    if observation_mode == "same":
        named, broken = "same", "are not equivalent (observation_mode='different' allows it)"
    told = f"{owner}(..., observation_mode='{named}') however the sub-environments observation "
    told += f"spaces {broken}. "
    seen: set[tuple[int, int]] = set()  # a worker's envs often share one object
    for index, spaces in enumerate(zip(observation_spaces, action_spaces, strict=True)):
        if (ids := (id(spaces[0]), id(spaces[1]))) not in seen:
            seen.add(ids)
            expected, why = (single, action_space), "that of env 0"
            require_spaces(index, spaces, expected, observation_mode, why, told)
    if observation_mode == "same":
        batched = batch_space(single, num_envs)
    elif observation_mode == "different":
        batched = batch_differing_spaces(list(observation_spaces))
    assert batched is not None
    return BatchedSpaces(single, batched, action_space, batch_space(action_space, num_envs))


def require_spaces(
    env_id: int,
    spaces: tuple[Space, Space],
    expected: tuple[Space, Space],
    mode: Any,
    why: str,
    told: str = "",
) -> None:
    """Raise RuntimeError unless an env has the expected (observation space, action space).

    In observation modes other than "same" the bounds of observations may differ. The message says
    `why` these are expected, and begins with `told` if it is about an observation space.
    """
    (obs_space, action_space), (wanted, wanted_action) = spaces, expected
    fits = obs_space == wanted
    if not (fits or (mode != "same" and is_space_dtype_shape_equiv(obs_space, wanted))):
        kind, found = f"{told}The observation", (obs_space, wanted)
    elif action_space != wanted_action:
        kind, found = "The action", (action_space, wanted_action)
    else:
        return
    raise RuntimeError(
        f"{kind} space of env {env_id} is {found[0]}, expected {found[1]}, {why}; all envs of a "
        "vector env must share one"
    )


def require_new_env(env: Env, known: dict[int, int]) -> None:
    """Raise TypeError for an object that is no env, has no spaces, or was returned before.

    `known` has the numbers of the envs made so far by the id of the innermost env; this is added.
    """
    if not isinstance(env, Env):
        raise TypeError(f"expected a gymnasium.Env, got {type(env).__name__}")
    for name in ("observation_space", "action_space"):
        if not hasattr(env, name):
            raise TypeError(
                f"{type(env).__name__} has no {name}; set observation_space and action_space in "
                "its __init__, or as class attributes"
            )
    number = len(known)
    index = known.setdefault(id(env.unwrapped), number)
    if index != number:
        raise TypeError(
            f"the factory returned the env that was made for env {index}; let every call make "
            "a new one (`lambda: MyEnv()`, not `env = MyEnv(); lambda: env`)"
        )


# -- rows of batches -------------------------------------------------------------------------------


def chunk_bounds(num_envs: int, num_chunks: int) -> list[int]:
    """Cut envs into contiguous chunks whose sizes differ by at most one, larger ones first.

    Returns:
        num_chunks + 1 bounds; chunk c holds the envs bounds[c], ..., bounds[c + 1] - 1.

    Example:
        >>> chunk_bounds(7, 3)
        [0, 3, 5, 7]
    """
    size, longer = divmod(num_envs, num_chunks)
    return [size * chunk + min(chunk, longer) for chunk in range(num_chunks + 1)]


def take_row(single_space: Space, batch: Any, index: int) -> Any:
    """Return the part of env `index` in a batch; arrays are views."""
    return by_space(lambda _, rows: rows[index], single_space, batch)


def take_rows(single_space: Space, batch: Any, indices: Sequence[int]) -> Any:
    """Return a batch of these rows, in this order; an index may occur twice."""

    def take(space: Space, rows: Any) -> Any:
        if isinstance(space, ARRAY_SPACES):
            return np.asarray(rows)[np.asarray(indices, dtype=np.int64)]
        return tuple(rows[index] for index in indices)

    return by_space(take, single_space, batch)


def stack_rows(single_space: Space, rows: Sequence[Any]) -> Any:
    """Return a batch of elements of the space of one env."""

    def stack(space: Space, *found: Any) -> Any:
        if isinstance(space, ARRAY_SPACES):
            return np.stack(found).astype(space.dtype, copy=False)  # native byte order
        return found

    return by_space(stack, single_space, *rows)


def merge_rows(single_space: Space, batch: Any, other: Any, use_other: np.ndarray) -> Any:
    """Return `batch`, with the rows where `use_other`, bool (num_envs,), is True from `other`."""
    chosen = (other if use else batch for use in use_other)
    return stack_rows(single_space, [take_row(single_space, b, k) for k, b in enumerate(chosen)])


# -- values in spaces ------------------------------------------------------------------------------


def is_same(a: Any, b: Any) -> bool:
    """Whether two nested values are equal in type, dtype, shape and value (NaN equals NaN)."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.dtype == object:
            return all(map(is_same, a.flat, b.flat))
        return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_same, a, b))
    if type(a).__eq__ is object.__eq__ and hasattr(a, "__dict__"):
        return is_same(vars(a), vars(b))  # custom spaces may have samples that compare by identity
    return bool(a == b) or bool(a != a and b != b)


def why_outside(space: Space, value: Any, name: str) -> str | None:
    """Return why `value` is not in `space`, with exactly its dtype; None if it is.

    Messages call the value `name`; parts of nested values add theirs.
    """
    if (parts := parts_of(space)) is not None:
        if isinstance(space, Dict) and (
            not isinstance(value, dict) or value.keys() != parts.keys()
        ):
            came = list(value) if isinstance(value, dict) else type(value).__name__
            return f"{name} is {came}, expected a dict with the keys {list(parts)}"
        if isinstance(space, Tuple) and (not isinstance(value, tuple) or len(value) != len(parts)):
            came = f"{type(value).__name__} {short(value)}"
            return f"{name} is a {came}, expected a tuple of {len(parts)}"
        found = (why_outside(part, value[k], f"{name}[{k!r}]") for k, part in parts.items())
        return next((reason for reason in found if reason is not None), None)
    if isinstance(space, ARRAY_SPACES) and not isinstance(space, Discrete):
        if isinstance(value, np.generic) and value.dtype == np.dtype(space.dtype).newbyteorder("="):
            value = np.asarray(value, space.dtype)  # a number in native byte order
        if not isinstance(value, np.ndarray):
            return f"{name} is a {type(value).__name__}, expected an array of {short(space)}"
        if value.shape != space.shape or value.dtype != space.dtype:
            return (
                f"{name} has shape {value.shape} and dtype {value.dtype}, "
                f"expected shape {space.shape} and dtype {space.dtype}"
            )
    if space.contains(value):
        return None
    if isinstance(space, Box):
        is_outside = ~((value >= space.low) & (value <= space.high))  # NaN is outside too
        if is_outside.any():
            place = tuple(int(k) for k in np.argwhere(is_outside)[0])
            limits = f"[{space.low[place]}, {space.high[place]}]"
            index = ", ".join(map(str, place))
            return f"{name}[{index}] is {value[place]}, outside {limits}"
    return f"{name} is {short(value)}, which is not in {short(space)}"


def short(value: Any, most: int = 100) -> str:
    """Return a representation of at most `most` characters, on one line."""
    try:
        text = " ".join(repr(value.item() if isinstance(value, np.generic) else value).split())
    except Exception as error:  # of a user's class
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    return text if len(text) <= most else text[: most - 3] + "..."
