"""Draw random actions for a vector env or a single env, only allowed ones if it gives masks."""

from __future__ import annotations

import contextlib
from copy import deepcopy
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box, Dict, MultiDiscrete
from gymnasium.vector import VectorEnv

from vecenv.core.base import VecEnv
from vecenv.core.errors import ActionMaskError
from vecenv.core.masks import (
    MASK_KEY,
    METHODS,
    can_be_masked,
    flat_mask,
    has_mask_part,
    mask_sizes,
    mask_width,
    sample_actions,
)

__all__ = ["RandomActions"]

# The layout of a game in `vecenv.agents.GameEnv`: actions and observations are dicts by group,
# and a group's observations have a part of this name, one row per agent.
_AGENTS_OBS = "obs"
_MOST_VALUES = 1 << 12  # of a part of a MultiDiscrete action; a part with more is treated as a box


class RandomActions:
    """Draws random actions: allowed ones if the env gives masks, else any.

    For `VecEnv`s masks come from `VecEnv.action_masks`; in Gymnasium's vector envs and single envs
    they are looked for in the same places. For the agents of a game (`vecenv.agents.GameEnv`) they
    are those of `AgentGroup.action_masks`. If a mask is wrong, missing or allows nothing, any
    action is drawn.

    Args:
        env: A vector env or a single env.
        seed: Seed of the actions; without masks they equal those after `action_space.seed(seed)`.
            None draws from the env's own action space.

    Example:
        >>> from vecenv import make_vec
        >>> envs = make_vec("Cage2-v0", 2)
        >>> draw = RandomActions(envs, seed=1)
        >>> draw.see(*envs.reset(seed=1))
        >>> envs.step(draw())[1].shape
        (2,)
    """

    def __init__(self, env: Any, seed: int | None = None) -> None:
        self._env = env
        self._is_single = not isinstance(env, VectorEnv)
        kind = "" if self._is_single else "single_"
        obs_space: Space = getattr(env, f"{kind}observation_space")
        self._action_space: Space = getattr(env, f"{kind}action_space")
        self._num_envs = 1 if self._is_single else env.num_envs
        self._all_actions = env.action_space
        if seed is not None:  # draw from a copy, so that the env's own stream is unchanged
            self._all_actions = deepcopy(env.action_space)
            self._all_actions.seed(seed)
        self._rng = np.random.default_rng(seed)
        # Spaces of actions and observations, per group of a game, or of the only kind of action.
        self._kinds = _groups(self._action_space, obs_space)
        self._is_game = bool(self._kinds)
        self._kinds = self._kinds or {"": (self._action_space, obs_space)}
        self._masks: dict[str, np.ndarray] = {}  # latest masks, bool (num_envs, width), by kind
        self._padding: dict[str, Any] = {}  # what masks of a group can allow at all
        if self._is_game:
            with contextlib.suppress(Exception):  # games that are laid out differently
                padding = self._call("padding")
                self._padding = padding if self._is_single else padding[0]
                for name, allowed in self._padding.items():
                    self._masks[name] = np.tile(allowed, (self._num_envs, 1))

    def see(self, obs: Any, infos: Any, env_ids: np.ndarray | None = None) -> None:
        """Record the results of the latest reset or step; `VecEnv`s are asked for masks instead.

        Args:
            obs: Observations.
            infos: Infos.
            env_ids: Envs of these results, int64 (B,); None for all envs in order.
        """
        if self._asked is not None:
            return
        for name, (space, obs_space) in self._kinds.items():
            if not can_be_masked(space):
                continue
            own_obs, own = (obs[name][_AGENTS_OBS], infos.get(name)) if name else (obs, infos)
            given = None
            if isinstance(own, dict) and own.get(MASK_KEY) is not None:
                values, given = own[MASK_KEY], own.get(f"_{MASK_KEY}")
            elif has_mask_part(obs_space, mask_width(space)):
                values = own_obs[MASK_KEY]
            elif not self._is_game and self._method is not None:
                values = self._call(self._method)
            else:
                continue
            shape = (self._num_envs, mask_width(space))
            masks = self._masks.setdefault(name, np.ones(shape, np.bool_))
            rows = range(self._num_envs) if env_ids is None else env_ids
            for row, mask, is_given in zip(
                rows,
                [values] if self._is_single else values,
                [True] * len(rows) if given is None or self._is_single else given,
                strict=True,
            ):
                if is_given:
                    masks[row] = _as_bits(mask, space) & self._padding.get(name, True)

    @cached_property
    def are_masked(self) -> bool:
        """Whether there are masks; known once `see` has got the results of the first reset."""
        return bool(self._masks) if self._asked is None else self._asked.has_action_masks

    def __call__(self, env_ids: np.ndarray | None = None) -> Any:
        """Draw an action for each env, or, for envs with masks, for those of `env_ids`, (B,)."""
        drawn = self._all_actions.sample()
        if self._is_game:
            return {name: self._draw(name, part, env_ids) for name, part in drawn.items()}
        return self._draw("", drawn, env_ids)

    def _draw(self, name: str, drawn: Any, env_ids: np.ndarray | None) -> Any:
        """Return allowed actions; without masks, `drawn`, which are for all envs."""
        masks = self._masks.get(name)
        with contextlib.suppress(ActionMaskError, ResetNeeded):
            if self._asked is not None and self.are_masked:
                masks = self._asked.action_masks(env_ids)
            elif masks is not None and env_ids is not None:
                masks = masks[env_ids]
            if masks is not None:
                actions = sample_actions(self._kinds[name][0], masks, self._rng)
                return actions[0] if self._is_single else actions
        return drawn if env_ids is None or self._is_single else drawn[env_ids]

    @cached_property
    def _asked(self) -> VecEnv | None:
        """The `VecEnv` that knows the masks; None if a wrapper has changed the actions."""
        whole = self._env
        if not isinstance(whole, VecEnv):
            whole = getattr(whole, "unwrapped", None)
        is_it = isinstance(whole, VecEnv) and whole.single_action_space == self._action_space
        return whole if is_it and can_be_masked(self._action_space) else None

    @cached_property
    def _method(self) -> str | None:
        """The method, or attribute, that gives the masks of single envs."""
        for name in METHODS:
            with contextlib.suppress(Exception):  # vector envs without `call`, and others' errors
                if np.all(self._call("has_wrapper_attr", name)):
                    return name
        return None

    def _call(self, name: str, *args: Any) -> Any:
        """Call a method of the single envs; return the result, a list per env for vector envs."""
        if not self._is_single:
            return self._env.unwrapped.call(name, *args)
        found = self._env.get_wrapper_attr(name)
        return found(*args) if callable(found) else found


def _groups(actions: Space, observations: Space) -> dict[str, tuple[Space, Space]]:
    """Return the action and observation space of each group of a game; nothing for other envs."""
    found: dict[str, tuple[Space, Space]] = {}
    if isinstance(actions, Dict) and isinstance(observations, Dict):
        for name, space in actions.spaces.items():
            columns = observations.spaces.get(name)
            if not isinstance(columns, Dict) or _AGENTS_OBS not in columns.spaces:
                return {}
            found[name] = _as_parts(space), columns[_AGENTS_OBS]
    return found


def _as_parts(space: Space) -> Space:
    """Return the actions of several agents as a space with masks, if such masks are possible.

    Gymnasium batches Discrete spaces to it; MultiDiscrete and MultiBinary to integer boxes.
    """
    if isinstance(space, Box) and space.dtype.kind in "iu" and space.is_bounded():
        low, high = space.low.astype(np.int64), space.high.astype(np.int64)
        if (high - low).max(initial=0) < _MOST_VALUES:
            return MultiDiscrete(high - low + 1, dtype=space.dtype.type, start=low)
    return space


def _as_bits(mask: Any, space: Space) -> np.ndarray:
    """Return a mask as bool (width,); a part that allows nothing becomes all True."""
    try:
        bits = flat_mask(mask, mask_width(space), space).astype(np.bool_)
    except ActionMaskError:
        return np.ones(mask_width(space), np.bool_)
    sizes = mask_sizes(space)
    return bits | np.repeat(~np.logical_or.reduceat(bits, np.cumsum(sizes) - sizes), sizes)
