"""Random actions of a vector env or a single env, which its masks allow if it gives any."""

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
    mask_starts,
    mask_width,
    sample_actions,
)

__all__ = ["RandomActions"]

# How `vecenv.agents.GameEnv` lays out a game: actions and observations are dicts by group, and a
# group's observations have a part of this name, one row per agent.
_AGENTS_OBS = "obs"
_MOST_VALUES = 1 << 12  # of a part of a MultiDiscrete action; more are those of a box


class RandomActions:
    """Draws random actions: those that the env's masks allow if it gives any, else any.

    Masks are looked for where `VecEnv.action_masks` looks for them, in Gymnasium's vector envs and
    in single envs too; those of the agents of a game (`vecenv.agents.GameEnv`) where
    `AgentGroup.action_masks` does. Where a mask is wrong, missing or allows nothing, any action is
    drawn.

    Args:
        env: A vector env or a single env.
        seed: Of the actions; without masks they are what `action_space.seed(seed)` leads to. None
            draws from the env's own action space.

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
        num_envs = 1 if self._is_single else env.num_envs
        self._all_actions = env.action_space
        if seed is not None:  # the env's own stream stays as it is
            self._all_actions = deepcopy(env.action_space)
            self._all_actions.seed(seed)
        self._rng = np.random.default_rng(seed)
        groups = _groups(self._action_space, obs_space)
        self._is_game = bool(groups)
        # The masks seen in results: of each group of a game, or of the only kind of actions.
        self._seen = {
            name: _SeenMasks(space, part, num_envs)
            for name, (space, part) in (groups or {"": (self._action_space, obs_space)}).items()
        }
        if self._is_game:
            with contextlib.suppress(Exception):  # of games that are laid out by somebody else
                padding = self._call("padding")
                for name, allowed in (padding if self._is_single else padding[0]).items():
                    self._seen[name].restrict(allowed)

    def see(self, obs: Any, infos: Any, env_ids: np.ndarray | None = None) -> None:
        """Note the results of the latest reset or step; `VecEnv`s are asked for masks instead.

        Args:
            obs: Observations.
            infos: Infos.
            env_ids: Whose results these are, int64 (B,); None for all envs in order.
        """
        if self._asked is not None:
            return
        for name, seen in self._seen.items():
            if self._is_game:
                found = seen.find(obs[name][_AGENTS_OBS], infos.get(name))
            else:
                found = seen.find(obs, infos)
                if found is None and can_be_masked(seen.space) and self._method is not None:
                    found = self._call(self._method), None
            if found is not None:
                values, given = found
                seen.write([values] if self._is_single else values, given, env_ids)

    @cached_property
    def are_masked(self) -> bool:
        """Whether there are masks; ask after the first reset, whose results have been seen."""
        if self._asked is not None:
            return self._asked.has_action_masks
        return any(seen.bits is not None for seen in self._seen.values())

    def __call__(self, env_ids: np.ndarray | None = None) -> Any:
        """Draw an action for each env, or, of envs with masks, for those of `env_ids`, (B,)."""
        drawn = self._all_actions.sample()
        if self._is_game:
            return {name: self._draw(name, part, env_ids) for name, part in drawn.items()}
        return self._draw("", drawn, env_ids)

    def _draw(self, name: str, drawn: Any, env_ids: np.ndarray | None) -> Any:
        """Return actions that are allowed; `drawn`, of all envs, if there are no masks."""
        seen, masks = self._seen[name], None
        with contextlib.suppress(ActionMaskError, ResetNeeded):
            if self._asked is not None and self.are_masked:
                masks = self._asked.action_masks(env_ids)
            elif seen.bits is not None:
                masks = seen.bits if env_ids is None else seen.bits[env_ids]
            if masks is not None:
                actions = sample_actions(seen.space, masks, self._rng)
                return actions[0] if self._is_single else actions
        return drawn if env_ids is None or self._is_single else drawn[env_ids]

    @cached_property
    def _asked(self) -> VecEnv | None:
        """The `VecEnv` that knows the masks; not one that a wrapper has given other actions."""
        whole = self._env
        if not isinstance(whole, VecEnv):
            whole = getattr(whole, "unwrapped", None)
        is_it = isinstance(whole, VecEnv) and whole.single_action_space == self._action_space
        return whole if is_it and can_be_masked(self._action_space) else None

    @cached_property
    def _method(self) -> str | None:
        """The method, or attribute, by which single envs give their masks."""
        for name in METHODS:
            with contextlib.suppress(Exception):  # of vector envs without `call`, and of others'
                if np.all(self._call("has_wrapper_attr", name)):
                    return name
        return None

    def _call(self, name: str, *args: Any) -> Any:
        """Call a method of the single envs; return the result, of vector envs one per env."""
        if not self._is_single:
            return self._env.unwrapped.call(name, *args)
        found = self._env.get_wrapper_attr(name)
        return found(*args) if callable(found) else found


class _SeenMasks:
    """The latest masks of one kind of actions, as they come with results.

    Attributes:
        space: Of the actions of one env; of a game, of all agents of a group.
        bits: bool (num_envs, width); None before there are any. Parts that are allowed nothing are
            allowed all, as rows of agents that are not alive.
    """

    def __init__(self, space: Space, obs_space: Space, num_envs: int) -> None:
        self.space, self._num_envs = space, num_envs
        self.bits: np.ndarray | None = None
        self._allowed: Any = True  # bool (width,), what a mask can allow at all
        self._has_masks = can_be_masked(space)
        self._is_observed = self._has_masks and has_mask_part(obs_space, mask_width(space))

    def restrict(self, allowed: np.ndarray) -> None:
        """Never allow other actions than these, bool (width,)."""
        self._allowed, self.bits = allowed, np.tile(allowed, (self._num_envs, 1))

    def find(self, obs: Any, infos: Any) -> tuple[Any, Any] | None:
        """Return the masks in results, and whose are given if not all; None without any."""
        if self._has_masks and isinstance(infos, dict) and infos.get(MASK_KEY) is not None:
            return infos[MASK_KEY], infos.get(f"_{MASK_KEY}")
        return (obs[MASK_KEY], None) if self._is_observed else None

    def write(self, values: Any, given: Any, env_ids: np.ndarray | None) -> None:
        """Keep masks, one for each of `env_ids` that has `given` one."""
        if self.bits is None:
            self.bits = np.ones((self._num_envs, mask_width(self.space)), np.bool_)
        for place, row in enumerate(range(self._num_envs) if env_ids is None else env_ids):
            if given is None or given[place]:
                self.bits[row] = _as_bits(values[place], self.space) & self._allowed


def _groups(actions: Space, observations: Space) -> dict[str, tuple[Space, Space]]:
    """Return the spaces of each group of a game, its actions' first; nothing for other envs."""
    found: dict[str, tuple[Space, Space]] = {}
    if isinstance(actions, Dict) and isinstance(observations, Dict):
        for name, space in actions.spaces.items():
            columns = observations.spaces.get(name)
            if not isinstance(columns, Dict) or _AGENTS_OBS not in columns.spaces:
                return {}
            found[name] = _as_parts(space), columns[_AGENTS_OBS]
    return found


def _as_parts(space: Space) -> Space:
    """Return the actions of several agents as a space with masks, if these can have any.

    Gymnasium batches Discrete spaces so, and MultiDiscrete and MultiBinary ones as integer boxes.
    """
    if isinstance(space, Box) and space.dtype.kind in "iu" and space.is_bounded():
        low, high = space.low.astype(np.int64), space.high.astype(np.int64)
        if (high - low).max(initial=0) < _MOST_VALUES:
            return MultiDiscrete(high - low + 1, dtype=space.dtype.type, start=low)
    return space


def _as_bits(mask: Any, space: Space) -> np.ndarray:
    """Return a mask as bool (width,), where a part is all True if it allows nothing."""
    try:
        bits = flat_mask(mask, mask_width(space), space).astype(np.bool_)
    except ActionMaskError:
        return np.ones(mask_width(space), np.bool_)
    starts, sizes = mask_starts(space), mask_sizes(space)
    return bits | np.repeat(~np.logical_or.reduceat(bits, starts), sizes)
