"""Action masks: which actions an env allows, in one form for every source.

A mask is a row of 0 and 1: one entry per action of a Discrete space (entry k stands for the action
`start + k`); for MultiDiscrete spaces the entries of all parts one after the other, sum(nvec) in
all; for MultiBinary spaces two entries (0, 1) per bit. This is sb3-contrib's form. The dtype is
int8, which `sample(mask=)` of Gymnasium's spaces takes. Random actions heed masks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cached_property, partial
from typing import Any

import numpy as np
from gymnasium import Env, Space, Wrapper
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector import VectorEnv

from vecenv.core.errors import ActionMaskError, NoActionMaskError
from vecenv.core.infos import add_info, take_infos

__all__ = [
    "MASK_KEY",
    "METHOD",
    "LatestMasks",
    "MaskInfos",
    "RandomActions",
    "allow_something",
    "call_single",
    "can_be_masked",
    "flat_mask",
    "mask_sizes",
    "mask_starts",
    "mask_width",
    "none_allowed",
    "sample_actions",
]

MASK_KEY = "action_mask"  # key in infos, and in Dict observations
_GIVEN_KEY = f"_{MASK_KEY}"
METHOD = "action_masks"  # of single envs


def mask_sizes(space: Space) -> np.ndarray:
    """Return the number of values of each part of an action, int64 (K,); K = 1 for Discrete.

    Raises:
        NoActionMaskError: There are no masks for such a space.
    """
    if isinstance(space, Discrete):
        return np.array([space.n], np.int64)
    if isinstance(space, MultiDiscrete):
        return space.nvec.reshape(-1).astype(np.int64)
    if isinstance(space, MultiBinary):
        return np.full(int(np.prod(space.shape)), 2, np.int64)
    raise NoActionMaskError(
        f"the action space is {space}; only Discrete, MultiDiscrete and MultiBinary spaces have "
        "action masks"
    )


def mask_starts(space: Space) -> np.ndarray:
    """Return the position in a mask of the first value of each part of an action, int64 (K,)."""
    sizes = mask_sizes(space)
    return np.cumsum(sizes) - sizes


def allow_something(bits: np.ndarray, starts: np.ndarray) -> Any:
    """Return which masks, bool (B, width), allow a value for each part of an action, bool (B,)."""
    if len(starts) == 1:  # see `mask_starts`
        return bits.any(axis=1)
    return np.logical_or.reduceat(bits, starts, axis=1).all(axis=1)


def mask_width(space: Space) -> int:
    """Return the length of a mask for actions of `space`; raises as `mask_sizes` does.

    Example:
        >>> mask_width(Discrete(6)), mask_width(MultiDiscrete([3, 4]))
        (6, 7)
    """
    return int(mask_sizes(space).sum())


def can_be_masked(space: Space) -> bool:
    """Whether there are masks for actions of `space`."""
    return isinstance(space, Discrete | MultiDiscrete | MultiBinary)


def sample_actions(
    single_action_space: Space, masks: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Draw one action per mask, uniformly among the allowed actions.

    Args:
        single_action_space: Discrete, MultiDiscrete or MultiBinary.
        masks: 0 and 1, or bool, (B, width), as `VecEnv.action_masks` returns them.
        rng: Generator, from which B * width numbers are drawn.

    Returns:
        (B, *action_shape) of the space's dtype; the caller owns it.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> sample_actions(Discrete(3, start=5), np.array([[0, 0, 1], [1, 0, 0]]), rng)
        array([7, 5])
    """
    space, sizes = single_action_space, mask_sizes(single_action_space)
    width = int(sizes.sum())
    masks = np.asarray(masks)
    if masks.ndim != 2 or masks.shape[1] != width:
        raise ActionMaskError(f"masks has shape {masks.shape}, expected (B, {width}) for {space}")
    keys = rng.random(masks.shape, np.float32) + (masks != 0)  # keys of allowed actions are above 1
    ends = np.cumsum(sizes)
    parts = [keys[:, end - size : end].argmax(1) for size, end in zip(sizes, ends, strict=True)]
    actions = np.stack(parts, 1).reshape(len(masks), *(space.shape or ()))
    return (actions + getattr(space, "start", 0)).astype(space.dtype, copy=False)


class MaskInfos(Wrapper):
    """Puts an env's action mask into its infos, so that vector envs pass it on with the results.

    The mask of every reset and step is `info["action_mask"]` if the env puts it there itself, else
    the part "action_mask" of its Dict observations, else the result of its method
    `action_masks()`. Workers write it into shared memory with the other results, so that
    `action_masks` of the vector env asks no worker.
    `make_vec(..., mask_infos=True)` wraps every env in it.

    Args:
        env: The env; its action space is Discrete, MultiDiscrete or MultiBinary.

    Raises:
        NoActionMaskError: Another action space; or, in `reset` or `step`, the env gives no mask.
        ActionMaskError: In `reset` or `step`: the mask does not fit the action space, and the
            episode goes on.

    Example:
        >>> import gymnasium as gym
        >>> env = MaskInfos(gym.make("Cage2-v0"))
        >>> obs, info = env.reset(seed=1)
        >>> info["action_mask"].shape, info["action_mask"].dtype
        ((145,), dtype('int8'))
    """

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self._width, call = mask_width(env.action_space), partial(call_single, env)
        self._masks = LatestMasks(1, env.action_space, env.observation_space, call)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset the env; the info contains its mask."""
        obs, info = self.env.reset(**kwargs)
        return obs, self._with_mask(obs, info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the env; the info contains its mask."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        try:
            info = self._with_mask(obs, info)
        except ActionMaskError:
            if not (terminated or truncated):  # else no action will follow
                raise
        return obs, reward, terminated, truncated, info

    def _with_mask(self, obs: Any, info: dict[str, Any]) -> dict[str, Any]:
        mask: Any = info.get(MASK_KEY)
        if mask is None:
            mask = obs[MASK_KEY] if self._masks.is_observed else self._masks.ask()[0]
        return {**info, MASK_KEY: flat_mask(mask, self._width, self.env.action_space)}


def call_single(env: Env, name: str, *args: Any) -> list[Any]:
    """Call a method of an env, or read an attribute, as `VectorEnv.call` of a single one."""
    found: Any = env.get_wrapper_attr(name)
    return [found(*args) if callable(found) else found]


def flat_mask(mask: Any, width: int, space: Space) -> np.ndarray:
    """Return one env's mask as int8 (width,).

    Masks of MultiDiscrete actions may be tuples of one mask per part, which `sample(mask=)` of
    Gymnasium's space takes too.

    Raises:
        ActionMaskError: Wrong shape or type, or values other than 0 and 1.
    """
    try:
        is_apart = isinstance(mask, tuple | list) and any(np.ndim(part) for part in mask)
        flat = np.concatenate([np.ravel(part) for part in mask]) if is_apart else np.asarray(mask)
    except (TypeError, ValueError, RuntimeError):
        flat = np.array(None)
    is_array = flat.dtype.kind in "biuf"
    if not is_array or flat.size != width or (isinstance(space, Discrete) and flat.ndim != 1):
        came = f"of shape {flat.shape}" if is_array else f"{type(mask).__name__} {mask!r}"
        raise ActionMaskError(
            f"the action mask is {came}, expected {width} times 0 or 1 for actions of {space}"
        )
    flat = flat.reshape(-1)
    bits = flat.astype(np.bool_)
    if (bits != flat).any():
        raise ActionMaskError(
            f"an action mask has {flat[bits != flat][0]}, expected 0 (not allowed) or 1 (allowed)"
        )
    return bits.view(np.int8)


class LatestMasks:
    """The masks that came with each env's latest reset or step, or that the envs are asked for.

    Args:
        num_envs: Number of envs, or of other rows.
        space: Space of one action.
        observation_space: Space of one observation.
        call: Calls a method of every env, as `VectorEnv.call`; None if envs are not asked.

    Attributes:
        space: Space of one action.
        is_observed: Whether masks are a part of the observations.
        is_apart: Whether infos are unbatched, as `InfosApart`.
        values: Masks (num_envs, ...) as the infos had them; None if there have been none.
    """

    def __init__(
        self,
        num_envs: int,
        space: Space,
        observation_space: Space,
        call: Callable[..., Sequence[Any]] | None = None,
    ) -> None:
        self._num_envs, self.space, self._call = num_envs, space, call
        self._can_be = can_be_masked(space)
        self._width = mask_width(space) if self._can_be else 0
        self.is_observed = self._can_be and _has_mask_part(observation_space, self._width)
        self.is_apart = False
        self.values: np.ndarray | None = None
        self._is_given = np.zeros(num_envs, np.bool_)

    @property
    def is_there(self) -> bool:
        """Whether there are masks; for masks in infos this is known after the first reset."""
        is_known = self.is_observed or self.values is not None
        return self._can_be and (is_known or self._has_method)

    @property
    def is_asked_for(self) -> bool:
        """Whether masks do not come with the results."""
        return not self.is_observed and self.values is None

    @cached_property
    def _has_method(self) -> bool:
        """Whether a method, or attribute, gives the masks of all envs."""
        return self._call is not None and all(self._call("has_wrapper_attr", METHOD))

    def name(self, row: int) -> str:
        """Return the name of a row in errors."""
        return f"env {row}"

    def note(self, infos: dict[Any, Any], rows: Any = slice(None)) -> None:
        """Record the masks in the infos of the envs `rows`, int64 (B,) or a slice."""
        if self.is_apart:
            each = [infos.get(row, {}).get(MASK_KEY) for row in range(len(self._is_given[rows]))]
            given: Any = np.array([mask is not None for mask in each])
            found = _as_objects(each) if given.any() else None
        else:
            found, given = infos.get(MASK_KEY), infos.get(_GIVEN_KEY)
        values = self.values
        if found is None:
            if values is not None:
                self._is_given[rows] = False
            return
        if not isinstance(found, np.ndarray):  # masks that are dicts are batched as one
            found = _as_objects([found] * len(self._is_given[rows]))
        if values is None:
            values = np.zeros((self._num_envs, *found.shape[1:]), found.dtype)
        elif values.dtype != found.dtype or values.shape[1:] != found.shape[1:]:
            values, found = _as_objects(list(values)), _as_objects(list(found))
        self.values = values
        values[rows], self._is_given[rows] = found, given

    def note_reset(self, infos: dict[Any, Any], rows: Any) -> None:
        """Record the masks of a reset of the envs `rows`, from infos with rows of all envs."""
        if isinstance(rows, np.ndarray) and self.is_apart:
            pairs = enumerate(rows.tolist())
            infos = {row: infos[env_id] for row, env_id in pairs if env_id in infos}
        elif isinstance(rows, np.ndarray):
            known = {key: infos[key] for key in (MASK_KEY, _GIVEN_KEY) if key in infos}
            infos = take_infos(known, rows)
        self.note(infos, rows)

    def state(self) -> tuple[Any, ...]:
        """Return copies, the arguments of `restore`."""
        return deepcopy((self.values, self._is_given))

    def restore(self, values: Any, is_given: np.ndarray) -> None:
        """Restore what `state` returned, for the same number of envs."""
        self.values, self._is_given[:] = values, is_given

    def read(
        self, rows: Any, is_over: np.ndarray, obs: Any = None, allowed: Any = None
    ) -> np.ndarray:
        """Return the masks int8 (B, width) of these envs.

        Where an episode has ended and the env will be reset, whatever the action, a mask that is
        wrong, missing or allows nothing becomes one that allows everything.

        Args:
            rows: Which envs: int64 (B,), or a slice.
            is_over: bool (B,), whose episode has ended.
            obs: The latest observations of all envs, for masks in them.
            allowed: bool (B, width), what a mask can allow at all; None for everything.

        Raises:
            NoActionMaskError: The envs give none.
            ActionMaskError: A mask does not fit the action space, or is missing; names the env.
        """
        if self.is_observed:
            return self.checked(obs[MASK_KEY][rows], rows, is_over, None, allowed)
        if self.values is not None:
            return self.checked(self.values[rows], rows, is_over, self._is_given[rows], allowed)
        asked = self.ask()
        values = _as_objects([asked[env_id] for env_id in np.arange(self._num_envs)[rows].tolist()])
        return self.checked(values, rows, is_over, None, allowed)

    def ask(self) -> Sequence[Any]:
        """Ask all envs for their masks."""
        if self._has_method and self._call is not None:
            return self._call(METHOD)
        raise NoActionMaskError(
            "the envs give no action masks; an env that has them returns info['action_mask'] from "
            "reset and step, has a part 'action_mask' in its Dict observations, or has a method "
            f"action_masks(); each mask is an array of {mask_width(self.space)} times 0 or 1"
        )

    def checked(
        self, values: np.ndarray, rows: Any, is_over: np.ndarray, is_given: Any, allowed: Any
    ) -> np.ndarray:
        """Return what `read` does from masks that envs gave, (B, ...) or objects (B,).

        `is_given`, bool (B,), says which envs gave one; None if all did.
        """
        width, space = self._width, self.space
        env_ids = np.arange(self._num_envs)[rows]
        bits = np.zeros((len(env_ids), width), np.bool_)
        found = np.ones(len(env_ids), np.bool_) if is_given is None else is_given.copy()
        is_fast = values.dtype.kind in "biuf" and values.shape[1:] == (width,)
        if is_fast and not ((values != 0) & (values != 1)).any():
            bits[...] = values
        else:
            for row in np.flatnonzero(found).tolist():
                try:
                    bits[row] = flat_mask(values[row], width, space)
                except ActionMaskError as error:
                    if not is_over[row]:
                        raise ActionMaskError(f"{self.name(env_ids[row])}: {error}") from None
                    found[row] = False
        if len(missing := np.flatnonzero(~(found | is_over))):
            name = self.name(int(env_ids[missing[0]]))
            raise ActionMaskError(
                f"{name} gave no infos['action_mask'] with its latest "
                "results, as it or others did before; return one from every reset and step"
            )
        if allowed is not None:
            bits &= allowed
        is_empty = ~(allow_something(bits, mask_starts(space)) & found)
        if len(live := np.flatnonzero(is_empty & ~is_over)):
            raise none_allowed(self.name(int(env_ids[live[0]])))
        bits[is_empty] = True if allowed is None else allowed[is_empty]
        return bits.view(np.int8)


def none_allowed(name: str) -> ActionMaskError:
    """Return the error for a mask that allows no value of some part, in mid-episode."""
    return ActionMaskError(
        f"the action mask of {name} allows no action, though its episode goes on; end the "
        "episode (terminated) where nothing can be done, or allow an action that does nothing"
    )


def _has_mask_part(observation_space: Space, width: int) -> bool:
    """Whether observations have a part that is the action mask, as PettingZoo's do."""
    if not isinstance(observation_space, Dict) or MASK_KEY not in observation_space.spaces:
        return False
    shape = observation_space[MASK_KEY].shape
    return shape is not None and int(np.prod(shape)) == width


def _as_objects(items: Sequence[Any]) -> np.ndarray:
    """Return an object array (B,) of these items, which may be arrays."""
    array = np.full(len(items), None, dtype=object)
    for row, item in enumerate(items):
        array[row] = item
    return array


# -- random actions --------------------------------------------------------------------------------

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
        call = None if self._groups else self._call
        self._kinds = {n: LatestMasks(self._num_envs, *pair, call) for n, pair in kinds.items()}
        self._observed = {name for name, masks in self._kinds.items() if masks.is_observed}
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
        if self._asked is not None:
            return
        rows, batched = slice(None) if env_ids is None else env_ids, infos
        if self._is_single:
            batched = {}
            add_info(batched, infos or {}, 0, 1)
        for name, masks in self._kinds.items():
            own_obs, own = (obs[name][_AGENTS_OBS], batched.get(name)) if name else (obs, batched)
            if name in self._observed:
                masks.is_observed = False  # they are kept, as those in infos
                part = np.asarray(own_obs[MASK_KEY])[None if self._is_single else ...]
                own = {MASK_KEY: part, _GIVEN_KEY: True}
            if isinstance(own, dict):
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
                actions = sample_actions(self._kinds[name].space, masks, self._rng)
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
        return self._kinds[name].read(rows, np.ones(count, np.bool_), allowed=allowed)

    @cached_property
    def _asked(self) -> Any:
        """The `VecEnv` that knows the masks; None if a wrapper has changed the actions."""
        for whole in (self._env, getattr(self._env, "unwrapped", None)):
            if isinstance(whole, VectorEnv) and hasattr(type(whole), "has_action_masks"):
                is_it = whole.single_action_space == self._action_space
                return whole if is_it and can_be_masked(self._action_space) else None
        return None

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
