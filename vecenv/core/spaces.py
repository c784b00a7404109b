"""Batched spaces of a vector env from the spaces of its envs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Env, Space
from gymnasium.spaces import Box, Dict, MultiDiscrete, Tuple
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector.utils import batch_differing_spaces, batch_space

__all__ = [
    "BatchedSpaces",
    "batch_env_spaces",
    "batch_thinly",
    "require_new_env",
    "require_spaces",
]

ObservationMode = str | tuple[Space, Space]

_BOUNDS = {Box: ("low", "high", "bounded_below", "bounded_above"), MultiDiscrete: ("nvec", "start")}


class BatchedSpaces(NamedTuple):
    """The four spaces of a vector env."""

    single_observation_space: Space
    observation_space: Space
    single_action_space: Space
    action_space: Space

    @classmethod
    def of(cls, observation_space: Space, action_space: Space, num_envs: int) -> BatchedSpaces:
        """Batch the spaces of one env, see `batch_thinly`."""
        return cls(
            observation_space,
            batch_thinly(observation_space, num_envs),
            action_space,
            batch_thinly(action_space, num_envs),
        )


def require_new_env(env: Env, known: dict[int, int]) -> None:
    """Raise TypeError for an env without spaces, or one that a factory has returned before.

    Args:
        env: The env.
        known: Numbers of the envs made so far, which are alive, by the id of the innermost; this
            one is added.
    """
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


def batch_thinly(space: Space, num_envs: int) -> Space:
    """Batch a space like Gymnasium, but keep the bounds of one env only: views of them serve all.

    Gymnasium's arrays take ten bytes for each float32 of an observation.
    """
    batched = batch_space(space, num_envs)
    pending = [batched]
    while pending:
        part = pending.pop()
        if isinstance(part, Dict | Tuple):
            pending += part.spaces.values() if isinstance(part, Dict) else part.spaces
        for name in _BOUNDS.get(type(part), ()):
            array = getattr(part, name)
            setattr(part, name, np.broadcast_to(array[0].copy(), array.shape))
    return batched


def batch_env_spaces(
    observation_spaces: Sequence[Space],
    action_spaces: Sequence[Space],
    observation_mode: ObservationMode,
    owner: str,
) -> BatchedSpaces:
    """Batch the spaces of all envs, as `gymnasium.vector.SyncVectorEnv` does.

    The messages of errors begin as Gymnasium's do, since code exists that looks for them.

    Args:
        observation_spaces: One per env.
        action_spaces: One per env; all must be equal.
        observation_mode: "same", "different" (same shape and dtype, bounds may differ), or the pair
            (batched space, single space) to use as they are.
        owner: Class name of the vector env, for messages.

    Raises:
        ValueError: Unknown observation mode, or no env at all.
        TypeError: The pair given holds something that is not a space.
        RuntimeError: The space of some env does not fit; the message names the env.
    """
    if not observation_spaces:
        raise ValueError("A vector env needs at least one env, got an empty list of factories")
    single, num_envs = observation_spaces[0], len(observation_spaces)
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
    for index, space in _distinct(observation_spaces):
        if _fits(space, single, observation_mode):
            continue
        if observation_mode == "same":
            raise RuntimeError(
                f"{owner}(..., observation_mode='same') however the sub-environments observation "
                f"spaces are not equivalent. Env {index} has {space}, expected that of env 0: "
                f"{single}. If this is intentional, use `observation_mode='different'` instead."
            )
        raise RuntimeError(
            f"{owner}(..., observation_mode='different' or custom space) however the "
            "sub-environments observation spaces do not share a common shape and dtype. "
            f"Env {index} has {space}, expected the shape and dtype of {single}"
        )
    for index, space in _distinct(action_spaces):
        if space != action_spaces[0]:
            raise RuntimeError(
                f"The action space of env {index} is {space}, expected that of env 0: "
                f"{action_spaces[0]}; all envs of a vector env must share one action space"
            )
    if observation_mode == "same":
        batched = batch_space(single, num_envs)
    elif observation_mode == "different":
        batched = batch_differing_spaces(list(observation_spaces))
    assert batched is not None
    return BatchedSpaces(single, batched, action_spaces[0], batch_space(action_spaces[0], num_envs))


def _fits(space: Space, wanted: Space, mode: Any) -> bool:
    """Whether an observation space is that of the other envs; bounds may differ but for "same"."""
    return space == wanted if mode == "same" else is_space_dtype_shape_equiv(space, wanted)


def require_spaces(
    env_id: int, spaces: tuple[Space, Space], expected: tuple[Space, Space], mode: Any, why: str
) -> None:
    """Refuse the (observation space, action space) of an env that are not those expected.

    Args:
        env_id: Which env.
        spaces: Its spaces.
        expected: What they are to be.
        mode: The observation mode; if it is not "same", bounds of observations may differ.
        why: Where the expected ones come from, for the message.

    Raises:
        RuntimeError: They differ; names the env.
    """
    fits = _fits(spaces[0], expected[0], mode), spaces[1] == expected[1]
    for kind, space, wanted, is_right in zip(
        ("observation", "action"), spaces, expected, fits, strict=True
    ):
        if not is_right:
            raise RuntimeError(
                f"The {kind} space of env {env_id} is {space}, expected {wanted}, {why}"
            )


def _distinct(spaces: Sequence[Space]) -> Iterable[tuple[int, Space]]:
    """Each space once, and its first env: those of a worker's envs are often one object."""
    first: dict[int, tuple[int, Space]] = {}
    for index, space in enumerate(spaces):
        first.setdefault(id(space), (index, space))
    return first.values()
