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
from vecenv.core.errors import ActionMaskError, NoActionMaskError
from vecenv.core.masks import MASK_KEY, LatestMasks, call_single, can_be_masked, sample_actions

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
        self._groups = _groups(self._action_space, obs_space)
        kinds = self._groups or {"": (self._action_space, obs_space)}
        self._kinds = {name: LatestMasks(self._num_envs, *pair) for name, pair in kinds.items()}
        if not self._groups:
            self._kinds[""] = LatestMasks(self._num_envs, *kinds[""], self._call)
        self._spaces = {name: space for name, (space, _) in kinds.items()}
        self._observed: dict[str, dict[str, np.ndarray]] = {}  # latest masks in observations
        self._padding: dict[str, np.ndarray] = {}  # what masks of a group can allow at all
        if self._groups:
            with contextlib.suppress(Exception):  # games that are laid out differently
                self._padding = self._call("padding")[0]

    def see(self, obs: Any, infos: Any, env_ids: np.ndarray | None = None) -> None:
        """Record the results of the latest reset or step; `VecEnv`s are asked for masks instead.

        Args:
            obs: Observations.
            infos: Infos.
            env_ids: Envs of these results, int64 (B,); None for all envs in order.
        """
        rows = slice(None) if env_ids is None else env_ids
        for name, masks in self._kinds.items() if self._asked is None else ():
            own_obs, own = (obs[name][_AGENTS_OBS], infos.get(name)) if name else (obs, infos)
            if masks.is_observed:
                part = np.asarray(own_obs[MASK_KEY])[None if self._is_single else ...]
                known = self._observed.setdefault(name, {MASK_KEY: part.copy()})
                known[MASK_KEY][rows] = part
            elif isinstance(own, dict):
                mask = own.get(MASK_KEY)
                if self._is_single and mask is not None:
                    given = np.array([None])
                    given[0] = mask
                    own = {MASK_KEY: given, f"_{MASK_KEY}": True}
                masks.note(own, rows)

    @cached_property
    def are_masked(self) -> bool:
        """Whether there are masks; known once `see` has got the results of the first reset."""
        if self._asked is not None:
            return self._asked.has_action_masks
        return bool(self._padding) or any(masks.is_there for masks in self._kinds.values())

    def __call__(self, env_ids: np.ndarray | None = None) -> Any:
        """Draw an action for each env, or, for envs with masks, for those of `env_ids`, (B,)."""
        drawn = self._all_actions.sample()
        if self._groups:
            return {name: self._draw(name, part, env_ids) for name, part in drawn.items()}
        return self._draw("", drawn, env_ids)

    def _draw(self, name: str, drawn: Any, env_ids: np.ndarray | None) -> Any:
        """Return allowed actions; without masks, `drawn`, which are for all envs."""
        rows = slice(None) if env_ids is None or self._is_single else env_ids
        if self.are_masked:
            with contextlib.suppress(ActionMaskError, NoActionMaskError, ResetNeeded):
                masks = self._masks_of(name, rows, env_ids)
                actions = sample_actions(self._spaces[name], masks, self._rng)
                return actions[0] if self._is_single else actions
        return drawn if self._is_single or env_ids is None else drawn[rows]

    def _masks_of(self, name: str, rows: Any, env_ids: np.ndarray | None) -> np.ndarray:
        """Return the masks of these envs; what is wrong with one makes it allow everything."""
        if self._asked is not None:
            return self._asked.action_masks(env_ids)
        count, allowed = len(np.arange(self._num_envs)[rows]), self._padding.get(name)
        if allowed is not None:
            allowed = np.tile(allowed, (count, 1))
            if not self._kinds[name].is_there:
                return allowed
        masks, observed = self._kinds[name], self._observed.get(name)
        return masks.read(rows, np.ones(count, np.bool_), observed, allowed)

    @cached_property
    def _asked(self) -> VecEnv | None:
        """The `VecEnv` that knows the masks; None if a wrapper has changed the actions."""
        whole = self._env
        if not isinstance(whole, VecEnv):
            whole = getattr(whole, "unwrapped", None)
        is_it = isinstance(whole, VecEnv) and whole.single_action_space == self._action_space
        return whole if is_it and can_be_masked(self._action_space) else None

    def _call(self, name: str, *args: Any) -> Any:
        """Call a method of the single envs; return a list with the result of each."""
        if self._is_single:
            return call_single(self._env, name, *args)
        try:
            return self._env.unwrapped.call(name, *args)
        except Exception:  # vector envs without `call`, and others' errors
            if name != "has_wrapper_attr":
                raise
            return [False]


def _groups(actions: Space, observations: Space) -> dict[str, tuple[Space, Space]]:
    """Return the action and observation space of each group of a game; nothing for other envs."""
    if not isinstance(actions, Dict) or not isinstance(observations, Dict):
        return {}
    found: dict[str, tuple[Space, Space]] = {}
    for name, space in actions.spaces.items():
        columns = observations.spaces.get(name)
        if not isinstance(columns, Dict) or _AGENTS_OBS not in columns.spaces:
            return {}
        # Gymnasium batches Discrete spaces to MultiDiscrete, and the others to integer boxes.
        if isinstance(space, Box) and space.dtype.kind in "iu" and space.is_bounded():
            low, high = space.low.astype(np.int64), space.high.astype(np.int64)
            if (high - low).max(initial=0) < _MOST_VALUES:
                space = MultiDiscrete(high - low + 1, dtype=space.dtype.type, start=low)
        found[name] = space, columns[_AGENTS_OBS]
    return found
