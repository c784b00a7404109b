"""Make spaces of different agents equal: zeros for vectors, more numbers for Discrete actions.

A padded observation is the agent's own, followed by zeros. An agent's own actions are the first
of the padded ones, and masks forbid the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from vecenv.core.errors import ObservationError
from vecenv.core.masks import mask_sizes

__all__ = [
    "allowed_actions",
    "fit_action",
    "fit_mask",
    "fit_obs",
    "pad_action_space",
    "pad_observation_space",
]


def pad_observation_space(spaces: Mapping[Any, Space]) -> Space:
    """Return the space that has room for the observations of all these agents.

    Vectors become as long as the longest one; Discrete spaces as large as the largest; parts of
    Dict spaces are padded one by one. Arrays of more dimensions must have equal shapes.

    Raises:
        ValueError: The spaces can't be padded to one; names two agents.
    """
    agents, all_spaces = list(spaces), list(spaces.values())
    first = all_spaces[0]
    if _are_same(spaces, "observes"):
        return first
    if isinstance(first, Box):
        return _padded_box(all_spaces)
    if isinstance(first, Discrete):
        return Discrete(max(space.n for space in all_spaces), start=first.start)  # type: ignore[attr-defined]  # all are Discrete
    if isinstance(first, Dict):
        return Dict({k: pad_observation_space(_part(spaces, k)) for k in first.spaces})
    raise _unlike("observes", agents[0], first, agents[-1], all_spaces[-1])


def pad_action_space(spaces: Mapping[Any, Space]) -> Space:
    """Return the space that has room for the actions of all these agents.

    Raises:
        ValueError: The spaces can't be padded to one; names two agents.
    """
    agents, all_spaces = list(spaces), list(spaces.values())
    first = all_spaces[0]
    if _are_same(spaces, "acts in"):
        return first
    for agent, space in spaces.items():
        if isinstance(space, Box) and isinstance(first, Box):
            shared = min(len(space.low), len(first.low)) if len(first.shape) == 1 else None
            if not (
                np.array_equal(space.low[:shared], first.low[:shared])
                and np.array_equal(space.high[:shared], first.high[:shared])
            ):
                raise _unlike("acts in", agent, space, agents[0], first)
    if isinstance(first, Box):
        return max(all_spaces, key=lambda space: space.shape or ())
    if isinstance(first, Discrete):
        return Discrete(max(space.n for space in all_spaces), start=first.start)  # type: ignore[attr-defined]  # all are Discrete
    if isinstance(first, MultiDiscrete):
        counts = np.max([space.nvec for space in all_spaces], axis=0)  # type: ignore[attr-defined]  # all are MultiDiscrete
        return MultiDiscrete(counts, dtype=first.dtype.type, start=first.start)
    raise _unlike("acts in", agents[0], first, agents[-1], all_spaces[-1])


def allowed_actions(spaces: Sequence[Space], padded: Space) -> np.ndarray | None:
    """Return which of the padded actions each agent has, bool (A, width) in the form of masks.

    None if every agent has all, or if actions are not Discrete or MultiDiscrete.
    """
    if not isinstance(padded, Discrete | MultiDiscrete):
        return None
    sizes = [mask_sizes(space) for space in spaces]
    most = mask_sizes(padded)
    rows = [
        np.concatenate([np.arange(top) < size for size, top in zip(own, most, strict=True)])
        for own in sizes
    ]
    allowed = np.stack(rows)
    return None if allowed.all() else allowed


def fit_obs(space: Space, padded: Space) -> Callable[[Any], Any] | None:
    """Return a function from observations of `space` to those of `padded`; None if equal.

    It raises ObservationError for values outside `space`.
    """
    if space == padded:
        return None
    if isinstance(space, Box) and isinstance(padded, Box) and space.shape != padded.shape:
        (length,), size, dtype = space.shape, padded.shape[0], padded.dtype

        def fit(obs: Any) -> np.ndarray:
            values = np.asarray(obs)
            if values.shape != (length,) or not np.can_cast(values.dtype, dtype, "same_kind"):
                raise ObservationError(
                    f"returned an observation of shape {values.shape} and dtype {values.dtype}, "
                    f"expected shape {(length,)} and dtype {dtype} ({space}); correct the env or "
                    "its observation_space"
                )
            row = np.zeros(size, dtype)
            row[:length] = values
            return row

        return fit
    if isinstance(space, Dict) and isinstance(padded, Dict):
        fits = {key: fit_obs(part, padded[key]) for key, part in space.spaces.items()}

        def fit_parts(obs: Any) -> dict[str, Any]:
            return {k: obs[k] if fit is None else fit(obs[k]) for k, fit in fits.items()}

        return fit_parts
    return None  # equal except for bounds


def fit_action(space: Space, padded: Space) -> Callable[[Any], Any] | None:
    """Return a function from actions of `padded` to those of `space`; None if they are equal."""
    if isinstance(space, Box) and space.shape != padded.shape:
        (length,) = space.shape
        return lambda action: action[:length].copy()
    return None


def fit_mask(space: Space, padded: Space) -> Callable[[Any], Any] | None:
    """Return a function from masks for actions of `space` to ones for `padded`."""
    if space == padded or not isinstance(padded, Discrete | MultiDiscrete):
        return None
    own = allowed_actions([space], padded)
    if own is None:
        return None
    places = np.flatnonzero(own[0])

    def fit(mask: Any) -> Any:
        values = np.asarray(mask)
        if values.shape != places.shape:
            return mask  # it is refused where masks are read
        padded_mask = np.zeros(len(own[0]), np.int8)
        padded_mask[places] = values
        return padded_mask

    return fit


def _can_be_padded(space: Any, first: Any) -> bool:
    """Whether two spaces of one type differ only in what padding makes equal."""
    if isinstance(space, Box):
        is_vector = len(space.shape) == len(first.shape) == 1
        return space.dtype == first.dtype and (is_vector or space.shape == first.shape)
    if isinstance(space, Discrete):
        return space.start == first.start and space.dtype == first.dtype
    if isinstance(space, Dict):
        return space.spaces.keys() == first.spaces.keys()
    if isinstance(space, MultiDiscrete):
        same_start = np.array_equal(space.start, first.start)
        return space.shape == first.shape and space.dtype == first.dtype and same_start
    return space == first


def _padded_box(spaces: Sequence[Any]) -> Box:
    """Return a Box with the lowest and highest bounds; those of padded entries include 0."""
    shape = max(space.shape for space in spaces)
    lows, highs = [], []
    for space in spaces:
        low, high = np.zeros(shape, space.dtype), np.zeros(shape, space.dtype)
        part = tuple(slice(n) for n in space.shape)
        low[part], high[part] = space.low, space.high
        lows.append(low)
        highs.append(high)
    return Box(np.min(lows, axis=0), np.max(highs, axis=0), dtype=spaces[0].dtype.type)


def _part(spaces: Mapping[Any, Any], key: Any) -> dict[Any, Space]:
    return {agent: space.spaces[key] for agent, space in spaces.items()}


def _are_same(spaces: Mapping[Any, Space], verb: str) -> bool:
    """Whether all spaces are equal; else check that each is of the first one's kind."""
    first_agent, first = next(iter(spaces.items()))
    if all(space == first for space in spaces.values()):
        return True
    for agent, space in spaces.items():
        if type(space) is not type(first) or not _can_be_padded(space, first):
            raise _unlike(verb, agent, space, first_agent, first)
    return False


def _unlike(verb: str, agent: Any, space: Space, first: Any, other: Space) -> ValueError:
    return ValueError(
        f"agent {agent!r} {verb} {space}, agent {first!r} {other}, which can't be padded to one "
        "space: vectors are padded in length and Discrete spaces in number, the rest has to be "
        "equal; choose other groups, or take away pad=True"
    )
