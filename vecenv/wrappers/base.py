"""VecWrapper: a VecEnv around another one, with all that a VecEnv can do.

    caller            step(actions, out=)            results, changed
      |                      |                              ^
    VecWrapper        actions(...)   _follow -> Part   rewards, observations, infos
      |                      v                              |
    env               step(actions, out=)            its own results

If a wrapper changes observations, the env returns its own in new memory, and the wrapper writes the
changed ones to `out`, or to other new memory. So no memory that the caller sees is changed later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv

from vecenv.core.actions import ActionBatcher
from vecenv.core.arguments import Seed
from vecenv.core.base import StepBatch, StepResult, VecEnv, forwarding
from vecenv.core.errors import ActionError, EnvStateError, NoActionMaskError
from vecenv.core.protocol import told
from vecenv.core.rows import ObservationRows, slot_rows
from vecenv.core.spaces import batch_thinly, by_space, stack_rows, take_row

__all__ = ["Part", "VecWrapper"]

EVERY = slice(None)
_STATE = "vecenv wrapper 1"
# Attributes of the env that are right through every wrapper, as they neither step nor observe.
_OF_ENVS = ("call", "get_attr", "set_attr", "restarts", "published", "envs", "kernels")
_OF_AGENTS = ("valid", "alive", "num_games", "group", "groups", "state")
_OF_RUNS = ("last_returns", "last_lengths", "num_episodes", "episode_lengths", "episode_over")
_FORWARDED = frozenset((*_OF_ENVS, *_OF_AGENTS, *_OF_RUNS, "max_episode_steps"))


class Part(NamedTuple):
    """The rows of a batch of results, and where their episodes stand.

    Attributes:
        rows: The envs: int64 (B,), or a slice of all.
        is_over: bool (B,), whether the episode has ended in this step.
        acted: bool (B,), whether the action counted: False for steps that only reset (NEXT_STEP),
            and for agents that were not alive.
        begins: bool (B,), whether the observation is the first of an episode.
        is_new: bool (B,), whether the env has just made the observation: False for envs that a
            reset by mask left out, and for agents that are not alive, whose observations are zeros.
        is_dead: bool (B,), rows of agents that are not alive, whose observations are zeros; or
            None, for envs without agents.
    """

    rows: Any
    is_over: np.ndarray
    acted: np.ndarray
    begins: np.ndarray
    is_new: np.ndarray
    is_dead: np.ndarray | None


_by_env = forwarding("env")


def _of_env(name: str, doc: str) -> Any:
    """Return a property with the value of the env's attribute of that name."""
    return property(lambda self: getattr(self.env, name), doc=doc)


class VecWrapper(VecEnv):
    """A `VecEnv` around another one; by itself it changes nothing.

    `out=`, `send` and `recv`, `reset_mask`, action masks, timing, states, and rows of agents work
    as without it. The caller may keep what is returned without `out`.

    To write a wrapper, derive from this class, say by `changes_obs` and `changes_rewards` what it
    changes, and override the methods for that: `observations`, `final_observations`, `rewards`,
    `actions`, `infos`. They get rows of all envs or of some, so index whatever you keep per env
    by `part.rows`.

    Args:
        env: The vector env; step it through the wrapper from now on. Closing the wrapper closes it.
        single_observation_space: Space of what `observations` writes; None if it is unchanged.
        single_action_space: Space of what `actions` takes; None if it is unchanged.

    Attributes:
        env: The vector env.
        changes_obs, changes_rewards: Whether the class changes observations, or rewards.

    Raises:
        TypeError: `env` is no `VecEnv`, or a space is no space.
        ClosedEnvironmentError: `env` is closed.
    """

    changes_obs = False
    changes_rewards = False
    env: VecEnv

    closed = _of_env("closed", "Whether the env has been closed.")
    unwrapped = _of_env("unwrapped", "The vector env without any wrapper.")  # type: ignore[assignment]  # Gymnasium has a property
    np_random = _of_env("np_random", "The envs' generators, a tuple.")  # type: ignore[assignment]  # Gymnasium has a property
    np_random_seed = _of_env("np_random_seed", "Seeds of the envs' generators, a tuple.")  # type: ignore[assignment]  # Gymnasium has a property
    allocate = _by_env(VecEnv.allocate)
    reopen = _by_env(VecEnv.reopen)
    render = _by_env(VecEnv.render)
    close = _by_env(VecEnv.close)

    def __init__(
        self,
        env: VecEnv,
        *,
        single_observation_space: Space | None = None,
        single_action_space: Space | None = None,
    ) -> None:
        name = type(self).__name__
        self.env = _checked_env(env, name)
        for same in ("num_envs", "autoreset_mode", "metadata", "render_mode", "spec", "timing"):
            setattr(self, same, getattr(env, same))
        self._phase = name
        self._log = None
        self._out: Any = None  # of the latest step, see `step_wait`
        self._fault: BaseException | None = None  # raised after the env's step
        self._set_spaces(single_observation_space, single_action_space)
        self._rows = ObservationRows(self.single_observation_space, self.num_envs)
        self._has_agents = getattr(env, "valid", None) is not None
        self._alive = np.zeros(self.num_envs, np.bool_)  # whether the next action counts
        self._converts_actions = type(self).actions is not VecWrapper.actions

    def _set_spaces(self, single_obs: Space | None, single_action: Space | None) -> None:
        for kind, space in (("observation", single_obs), ("action", single_action)):
            if space is None:
                single = getattr(self.env, f"single_{kind}_space")
                batched = getattr(self.env, f"{kind}_space")
            elif isinstance(space, Space):
                single, batched = space, batch_thinly(space, self.num_envs)
            else:
                raise TypeError(
                    f"{self._phase}: single_{kind}_space is a {type(space).__name__}, expected a "
                    "gymnasium.Space, of one env"
                )
            setattr(self, f"single_{kind}_space", single)
            setattr(self, f"{kind}_space", batched)
        self._has_own_actions = single_action is not None
        self._actions = ActionBatcher(self.single_action_space, self.action_space, self.num_envs)

    # -- what a wrapper overrides ----------------------------------------------------------------

    def actions(self, actions: Any, env_ids: np.ndarray | None) -> Any:
        """Return the actions for the env, (B, ...); don't change `actions`, which are the caller's.

        Args:
            actions: One per env of `env_ids`, checked against `single_action_space`.
            env_ids: Ids as `send` was given them; None for all.
        """
        return actions

    def rewards(self, rewards: np.ndarray, part: Part) -> np.ndarray:
        """Return the changed rewards (B,); `rewards`, float64 (B,), are the env's: don't keep them.

        Rows that did not act are ignored: their reward is 0.
        """
        return rewards

    def observations(self, obs: Any, part: Part, out: Any) -> None:
        """Write the changed observations.

        Args:
            obs: (B, *obs_shape) of the env; don't change or keep them.
            part: The rows, and where their episodes stand.
            out: (B, *obs_shape) of this wrapper's space, to be written.
        """
        raise NotImplementedError

    def reset_observations(self, obs: Any, part: Part, out: Any) -> None:
        """Write the changed observations of a reset, also of envs that it left out."""
        self.observations(obs, part, out)

    def restart(self, rows: np.ndarray) -> None:
        """Forget what is kept of the episodes of these envs, bool (num_envs,): `reset` was called.

        It comes before `reset_observations`.
        """

    def final_observations(self, obs: Any, rows: np.ndarray) -> Any:
        """Return changed final observations (SAME_STEP); called before `observations`.

        Args:
            obs: (E, *obs_shape) of the env.
            rows: int64 (E,), the envs.
        """
        raise NotImplementedError

    def infos(self, infos: dict[str, Any], rewards: np.ndarray, part: Part) -> dict[str, Any]:
        """Return the infos of a step; `infos` may be changed. `rewards` are the env's."""
        return infos

    def own_state(self) -> dict[str, Any]:
        """Return copies of the wrapper's own state, for `state_dict`: arrays and numbers."""
        return {}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `own_state` returned, of a wrapper with equal arguments."""

    # -- calls -----------------------------------------------------------------------------------

    def reset(
        self, *, seed: Seed = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all envs, or those of `options["reset_mask"]`; see `VecEnv.reset`."""
        obs, infos = self.env.reset(seed=seed, options=options)
        with self.timing.phase(self._phase):
            mask = None if options is None else options.get("reset_mask")
            rows = np.ones(self.num_envs, np.bool_)
            if mask is not None:
                rows = np.repeat(mask, self.num_envs // len(mask))  # of games, if there are agents
            if rows.all():
                self._fault = None
            part = self._begin(rows)
            self.restart(rows)
            if self.changes_obs:
                raw, obs = obs, new_batch(self.single_observation_space, self.num_envs)
                self.reset_observations(raw, part, obs)
            return obs, infos

    def step(self, actions: Any, *, out: Any = None) -> StepResult:
        """Step every env once; see `VecEnv.step`."""
        self._refuse_after_fault("step")
        slot, self._out = self._slot_of_env(out), out
        keywords = {} if slot is None else {"out": slot}
        return self._finish_step(self._call_env(self.env.step, actions, None, **keywords))

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """Wait for a step that timed out or that Ctrl-C interrupted, and return its results.

        Args:
            timeout: Longest wait in seconds.

        Raises:
            NoAsyncCallError: No step is pending.
            StepTimeoutError: Some env has not answered; the step stays pending.
            AttributeError: The envs' backend has no pending steps.
        """
        env: Any = self.env
        return self._finish_step(env.step_wait(timeout))

    def _finish_step(self, result: StepResult) -> StepResult:
        out, self._out = self._out, None
        return self._changed(result, EVERY, None, out)

    def send(self, actions: Any, env_ids: Any = None) -> None:
        """Start stepping some envs and return at once; see `VecEnv.send`."""
        self._refuse_after_fault("send")
        self._call_env(self.env.send, actions, env_ids, env_ids)

    def recv(
        self,
        min_envs: int | None = None,
        timeout: float | None = None,
        *,
        max_envs: int | None = None,
    ) -> StepBatch:
        """Return the results of envs in flight that are ready first; see `VecEnv.recv`."""
        self._refuse_after_fault("recv")
        batch: Any = self.env.recv(min_envs, timeout, max_envs=max_envs)
        valid = batch.valid if self._has_agents else None
        changed = self._changed(batch[:5], batch.env_ids, valid, None)
        return batch._replace(**dict(zip(StepBatch._fields[:5], changed, strict=True)))

    def _refuse_after_fault(self, call: str) -> None:
        """Refuse a call if the env has stepped, and the wrapper has failed on the results."""
        if self._fault is not None:
            raise ResetNeeded(
                f"`{call}` came after a call that ended in {self._phase}, after its env had been "
                "stepped, so what the wrappers keep is of an earlier step; call `reset` of all "
                f"envs first. What happened: {told(self._fault)}"
            ) from self._fault

    def _call_env(
        self, method: Callable[..., Any], actions: Any, env_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a method of the env with the actions that this wrapper makes of the given ones."""
        if not self._converts_actions:
            return method(actions, *args, **kwargs)
        ids = None if env_ids is None else np.asarray(env_ids)
        if ids is not None and self._has_agents:  # ids are those of games
            ids = self.env.group.rows(ids)  # type: ignore[attr-defined]  # games have a group
        changed = self.actions(self._actions.check(actions, ids), env_ids)
        try:
            return method(changed, *args, **kwargs)
        except ActionError as error:
            error.add_note(f"These are the actions that {self._phase} has made of those given.")
            raise

    def _slot_of_env(self, out: Any) -> Any:
        """Check `out`; return the slot into which the env writes, None for new memory."""
        if out is None or not (self.changes_obs or self.changes_rewards):
            return out
        self._check_slot_mode(out)
        slot_rows(out, self._rows)  # raises if it can't be written into
        if self.changes_obs:
            return None
        given = {name: getattr(out, name) for name in ("obs", "terminations", "truncations")}
        own = np.zeros(self.num_envs)  # for the env's rewards
        return SimpleNamespace(rewards=own, valid=getattr(out, "valid", None), **given)

    def _changed(self, result: Any, rows: Any, valid: np.ndarray | None, out: Any) -> StepResult:
        """Return the env's results, changed; note if this fails."""
        try:
            with self.timing.phase(self._phase):
                return self._change(result, rows, valid, out)
        except BaseException as error:
            self._fault = error
            raise

    def _change(self, result: Any, rows: Any, valid: np.ndarray | None, out: Any) -> StepResult:
        obs, rewards, *flags, infos = result
        part = self._follow(rows, flags[0] | flags[1], valid)
        infos = self.infos(infos, rewards, part)
        if self.changes_rewards:  # rows that only reset, or are not alive, have no reward
            rewards = np.where(part.acted, self.rewards(rewards, part), 0.0)
        if self.changes_obs:
            if infos and "final_obs" in infos:
                infos = self._with_final_obs(infos, rows)
            raw, obs = obs, None if out is None else out.obs
            if out is None:
                obs = new_batch(self.single_observation_space, len(rewards))
            self.observations(raw, part, obs)
            if self._has_agents and getattr(out, "valid", None) is not None:
                out.valid[...] = self.env.valid  # type: ignore[attr-defined]  # envs of agents have it
        if out is None:
            return obs, rewards, *flags, infos
        targets = out.rewards, out.terminations, out.truncations
        for target, value in zip(targets, (rewards, *flags), strict=True):
            if target is not value:
                target[...] = value
        return obs, *targets, infos

    def _with_final_obs(self, infos: dict[str, Any], rows: Any) -> dict[str, Any]:
        """Return infos with the env's final observations changed."""
        given = infos["final_obs"]
        places = np.flatnonzero(infos["_final_obs"])
        if not len(places):
            return infos
        batch = stack_rows(self.env.single_observation_space, list(given[places]))
        changed = self.final_observations(batch, np.arange(self.num_envs)[rows][places])
        finals = np.full(len(given), None, dtype=object)
        for number, place in enumerate(places.tolist()):
            finals[place] = take_row(self.single_observation_space, changed, number)
        return {**infos, "final_obs": finals}

    # -- where episodes stand --------------------------------------------------------------------

    def _begin(self, is_reset: np.ndarray) -> Part:
        """Record that these rows, bool (num_envs,), begin an episode."""
        none, is_dead = np.zeros(self.num_envs, np.bool_), None
        if self._has_agents:
            alive, valid = self.env.alive, self.env.valid  # type: ignore[attr-defined]  # rows of agents have them
            self._alive[is_reset] = alive[is_reset]
            is_dead, is_reset = ~(alive | valid), is_reset & alive
        else:
            self._alive[is_reset] = True
        return Part(EVERY, none, none, is_reset, is_reset, is_dead)

    def _follow(self, rows: Any, is_over: np.ndarray, valid: np.ndarray | None) -> Part:
        """Record the ends of episodes; return where the episodes stand."""
        was_alive, is_dead = self._alive[rows].copy(), None
        if self._has_agents:
            alive = self.env.alive[rows]  # type: ignore[attr-defined]  # rows of agents have it
            acted = self.env.valid[rows].copy() if valid is None else valid  # type: ignore[attr-defined]  # likewise
            is_new = acted | alive
            is_dead = ~is_new
        else:
            acted, is_new = was_alive, np.ones(len(is_over), np.bool_)
            alive = is_new if self.autoreset_mode is AutoresetMode.SAME_STEP else ~is_over
        self._alive[rows] = alive
        return Part(rows, is_over, acted, alive & (is_over | ~was_alive), is_new, is_dead)

    # -- what the env does -----------------------------------------------------------------------

    @property
    def copy(self) -> bool:
        """Whether returned observations are copies, which the caller may keep."""
        return self.changes_obs or getattr(self.env, "copy", True)

    @property
    def has_action_masks(self) -> bool:
        """Whether the envs give action masks; see `VecEnv`."""
        return not self._has_own_actions and self.env.has_action_masks

    def action_masks(self, env_ids: Any = None, *, out: np.ndarray | None = None) -> np.ndarray:
        """Return which actions the envs allow, see `VecEnv.action_masks`.

        Raises:
            NoActionMaskError: As there, or if the wrapper takes actions of another space.
        """
        if self._has_own_actions:
            raise NoActionMaskError(
                f"{self._phase} takes actions of {self.single_action_space}, and the masks are for "
                f"those of the env, {self.env.single_action_space}: ask `envs.env.action_masks()`"
            )
        return self.env.action_masks(env_ids, out=out)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the env and the wrapper, see `VecEnv.state_dict`."""
        found = {"format": _STATE, "wrapper": self._phase, "env": self.env.state_dict()}
        return {**found, "alive": self._alive.copy(), "own": self.own_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, see `VecEnv.load_state_dict`.

        Raises:
            EnvStateError: The state is of another wrapper, or can't be loaded.
        """
        name = state.get("wrapper") if isinstance(state, Mapping) else None
        if name is None or state.get("format") != _STATE or name != self._phase:
            came = "of an env without it" if name is None else f"of {name}"
            raise EnvStateError(
                f"the state is {came}, expected one of {self._phase}: wrap the envs as those that "
                "were saved"
            )
        own = self.own_state()
        if found := _other_layout(own, state["own"]):
            raise EnvStateError(f"the state of {self._phase} {found}")
        self.env.load_state_dict(state["env"])
        self._alive[:] = state["alive"]
        self._fault = None
        self.load_own_state(state["own"])

    def __getattr__(self, name: str) -> Any:
        if name in _FORWARDED:
            return getattr(self.env, name)
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r}: those of the wrapper inside are at "
            "`envs.env`, and what a backend adds to VecEnv is at `envs.unwrapped`, where it passes "
            "through no wrapper"
        )

    def __repr__(self) -> str:
        return f"{self._phase}({self.env!r})"

    def __del__(self) -> None:
        """Leave the env to others that refer to it; it closes itself."""


def _checked_env(env: Any, name: str) -> VecEnv:
    if not isinstance(env, VecEnv):
        hint = "make one with vecenv.make_vec"
        if isinstance(env, VectorEnv):
            hint = "gymnasium.wrappers.vector has wrappers for vector envs of others"
        raise TypeError(f"{name} goes around a vecenv.VecEnv, got {type(env).__name__}; {hint}")
    if env.closed:
        raise ClosedEnvironmentError(
            f"{name} was given a vector env that is closed ({env!r}); make a new one"
        )
    return env


def new_batch(space: Space, count: int) -> Any:
    """Return uninitialised memory for a batch of `count` rows."""
    return by_space(lambda part: np.empty((count, *(part.shape or ())), part.dtype), space)


def _other_layout(own: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    """Return how a state differs from the wrapper's own; None if it does not."""
    if not isinstance(given, Mapping) or own.keys() != given.keys():
        return f"has the entries {list(given)}, expected {list(own)}"
    for key, value in own.items():
        if isinstance(value, Mapping):
            if found := _other_layout(value, given[key]):
                return found
        elif isinstance(value, np.ndarray) and np.shape(given[key]) != value.shape:
            return f"has {key} of shape {np.shape(given[key])}, expected {value.shape}"
    return None
