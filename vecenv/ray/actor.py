"""What an actor runs: a `SyncVectorEnv` or a compiled vector env, and perhaps a policy."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.core.base import StepSlot, VecEnv
from vecenv.core.errors import EnvFault
from vecenv.core.infos import InfosApart
from vecenv.core.pickling import load_registry, loads
from vecenv.core.replacing import with_restarts
from vecenv.core.rows import StepRows, rows_of, slot_rows
from vecenv.core.spaces import leaf_by_leaf, take_row, take_rows
from vecenv.sync import SyncVectorEnv
from vecenv.workers.chunk import EnvSpaces, close_envs, make_envs

__all__ = ["EnvActor", "Fragment", "Reply", "Start", "checked_rows", "infos_by_env"]

_OF_POLICIES = ("set_policy", "collect")  # calls in which not only envs can raise
_LIVE, _IS_DUE, _LOST = range(3)  # next step of an env: step, begin anew, report


class Start(NamedTuple):
    """What an actor is started with.

    Attributes:
        worker: Number of the actor.
        first, num_envs: Its first env, and how many it has.
        maker: Pickled list of the envs' factories, or factory of a vector env; its options; and
            whether an env that raises is replaced.
        registry: Pickled specs of envs that the caller has registered.
        policy: Pickled factory of the policy, or None.
        restarts: int64 (n,), how often its envs have been replaced.
        loss: For an actor that replaces one with unfinished episodes: why that is gone, the batch
            of the last observations, and a seed, or None, for each env.
    """

    worker: int
    first: int
    num_envs: int
    maker: bytes
    registry: bytes
    policy: bytes | None = None
    restarts: Any = 0
    loss: tuple[str, Any, list[int | None]] | None = None

    @property
    def envs(self) -> range:
        """The envs of the actor."""
        return range(self.first, self.first + self.num_envs)

    @property
    def rows(self) -> slice:
        """The rows of these envs in batches of all envs."""
        return slice(self.first, self.first + self.num_envs)

    def __str__(self) -> str:
        """Name the worker as messages do."""
        last = self.envs[-1]
        envs = f"envs {self.first}-{last}" if last > self.first else f"env {last}"
        return f"worker {self.worker} ({envs})"


class Reply(NamedTuple):
    """The reply of an actor to a call.

    Attributes:
        result: Result of the call; None if it failed.
        faults: Faults of envs.
        restarts: int64 (n,), how often each env has been replaced; None if none ever was.
        busy_ns: Nanoseconds that the call took.
    """

    result: Any
    faults: Sequence[EnvFault] = ()
    restarts: np.ndarray | None = None
    busy_ns: int = 0


def infos_by_env(envs: VecEnv, infos: dict[Any, Any], env_ids: np.ndarray) -> InfosApart:
    """Return infos of a vector env in an actor as dicts by env.

    Args:
        envs: The vector env: a `SyncVectorEnv` has unbatched infos already, others batch them.
        infos: Row k belongs to the env `env_ids[k]`.
        env_ids: int64 (B,), counted from the actor's first env.
    """
    if isinstance(envs, SyncVectorEnv):
        return InfosApart({int(env_ids[row]): info for row, info in infos.items()})
    found = ((env_id, _row_of(infos, row)) for row, env_id in enumerate(env_ids.tolist()))
    return InfosApart({env_id: info for env_id, info in found if info})


def _row_of(infos: dict[str, Any], row: int) -> dict[str, Any]:
    """Return one row of batched infos, with the keys that it has."""
    found: dict[str, Any] = {}
    for key, column in infos.items():
        if f"_{key}" not in infos or not infos[f"_{key}"][row]:
            continue
        if isinstance(column, dict):
            found[key] = _row_of(column, row)
        else:  # a bit as `bool`, so that a column of bits is made again
            is_bits = column.dtype == np.bool_ and column.ndim == 1
            found[key] = bool(column[row]) if is_bits else column[row]
    return found


class Fragment(NamedTuple):
    """The results of T steps of n envs.

    Attributes:
        obs: After every step, (T, n, *obs_shape), nested as the space is.
        rewards: float64 (T, n).
        terminations: bool (T, n).
        truncations: bool (T, n).
        fields: Fields recorded by the policy, arrays (T, n, ...) by name.
        infos: Infos of the steps that had any.
    """

    obs: Any
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray
    fields: dict[str, np.ndarray]
    infos: dict[int, InfosApart]

    @staticmethod
    def of(envs: VecEnv, num_steps: int) -> Fragment:
        """Allocate a fragment of `num_steps` steps of all envs; it has no fields yet.

        Raises:
            TypeError: Observations have no fixed shape.
        """
        shape, space = (num_steps, envs.num_envs), envs.single_observation_space
        rows = StepRows.make(space, num_steps * envs.num_envs, envs.allocate)

        def by_step(array: Any) -> np.ndarray:
            if not isinstance(array, np.ndarray) or array.dtype == object:
                raise TypeError(f"fragments hold observations of fixed shape; {space} has none")
            return array.reshape(*shape, *array.shape[1:])

        obs, rewards = leaf_by_leaf(by_step, rows.obs.batch()), by_step(rows.rewards)
        flags = by_step(rows.terminations), by_step(rows.truncations)
        return Fragment(obs, rewards, *flags, {}, {})

    def slot(self, t: int) -> StepSlot:
        """Return the results of one step: views, which may be passed as `out`."""
        obs = leaf_by_leaf(lambda array: array[t], self.obs)
        return StepSlot(obs, self.rewards[t], self.terminations[t], self.truncations[t])

    def record(self, t: int, fields: dict[str, Any]) -> None:
        """Copy the policy's fields of step t: arrays or CPU tensors (n, ...)."""
        size = self.rewards.shape
        for name, value in fields.items():
            array, kept = np.asarray(value), self.fields.get(name)
            if t == 0 and array.shape[:1] == size[1:]:
                kept = self.fields[name] = np.zeros((*size, *array.shape[1:]), array.dtype)
            if kept is None or kept.shape[1:] != array.shape or kept.dtype != array.dtype:
                before = "one row per env" if kept is None else f"{kept.dtype} {kept.shape[1:]}"
                raise ValueError(
                    f"the policy's field {name!r} is {array.dtype} {array.shape} in step {t}, "
                    f"expected {before}: the same in every step for {size[1]} envs"
                )
            kept[t] = array

    def copy_fields(self, targets: dict[str, np.ndarray], envs: range) -> None:
        """Copy the requested fields into arrays (T, N, ...) of all envs.

        Raises:
            ValueError: The policy did not record a field, or recorded another shape.
        """
        for name, target in targets.items():
            came = self.fields.get(name)
            if came is None or came.shape[2:] != target.shape[2:]:
                shapes = {key: array.shape[2:] for key, array in self.fields.items()}
                raise ValueError(
                    f"fields[{name!r}] has the shape {target.shape[2:]} per step and env, but the "
                    f"policy recorded {shapes}"
                )
            target[:, rows_of(envs)] = came


def checked_rows(name: str, rows: Any, size: tuple[int, int]) -> np.ndarray:
    """Return an array over the memory of an array or tensor (T, N, ...)."""
    if not hasattr(rows, "dtype"):
        raise ValueError(f"{name} is a {type(rows).__name__}, expected an array or a CPU tensor")
    array = np.asarray(rows)
    if array.shape[:2] != size:
        raise ValueError(f"{name} has shape {array.shape}, expected {size} first: (steps, envs)")
    return array


class EnvActor:
    """A vector env, and perhaps a policy, in an actor; the caller names its methods.

    Exceptions of envs and the policy are part of the reply: through Ray they would lose their type.
    """

    envs: VecEnv
    _policy: Any = None
    _successors: Successors | None = None  # until all lost episodes have been reported
    _acting: tuple[str, Any, Any] | None = None  # name, actions and envs of the current step

    def answer(self, method: str, *args: Any) -> Reply:
        """Call a method; the reply has its result, or the fault if it raises."""
        self._acting, begin_ns = None, perf_counter_ns()
        try:
            result = getattr(self, method)(*args)
        except Exception as error:
            result = self._fault(error, method)
        if isinstance(result, EnvFault):
            return Reply(None, [result])
        restarts = self._counts.copy() if self._counts.any() else None
        return Reply(result, (), restarts, perf_counter_ns() - begin_ns)

    def _fault(self, error: Exception, method: str) -> EnvFault:
        """Describe an exception: which env raised it, and for which action."""
        doing, actions, env_ids = self._acting or (method, None, None)
        index, action = getattr(error, "env_index", None), None
        if index is None and method in _OF_POLICIES:
            return EnvFault.of(error, -1, self._start.worker, method)
        index = index or 0
        if actions is not None:
            rows = [index] if env_ids is None else np.flatnonzero(env_ids == index).tolist()
            with contextlib.suppress(Exception):  # the actions themselves may be malformed
                action = take_row(self.envs.single_action_space, actions, rows[0])
        doing = "creation" if method == "open" else doing
        return EnvFault.of(error, self._start.first + index, self._start.worker, doing, action)

    def open(self, start: Start) -> EnvSpaces | EnvFault:
        """Make the vector env, and the policy if there is one; return what the envs are."""
        envs: VecEnv
        self._start = start
        self._counts = np.zeros(start.num_envs, np.int64) + start.restarts
        load_registry(start.registry)
        made, options, restart_envs = loads(start.maker)
        if not isinstance(made, list):  # but one factory
            envs = made(num_envs=start.num_envs, **options)
            pair = envs.single_observation_space, envs.single_action_space
            found = EnvSpaces([pair] * start.num_envs, dict(envs.metadata), envs.render_mode, {})
        else:
            singles, fault = make_envs(made, start.first, start.worker, [0], goes_on=False)
            if fault is not None:
                close_envs(singles)
                return fault
            found = EnvSpaces.of(singles)
            envs = sync = SyncVectorEnv([partial(_itself, env) for env in singles], **options)
            sync._keep_infos_apart()
            if restart_envs:
                sync.envs[:] = with_restarts(singles, made, self._counts)
        self.envs, self._every = envs, np.arange(start.num_envs)
        self._rows = StepRows.make(envs.single_observation_space, start.num_envs)
        if start.loss is not None:
            self._successors = Successors(envs, self._rows, start.loss, self._counts)
        faults = self.answer("set_policy", start.policy).faults if start.policy else ()
        return faults[0] if faults else found

    # -- steps -------------------------------------------------------------------------------

    def reset(self, seed: Any, options: dict[str, Any] | None, mask: np.ndarray) -> Any:
        """Reset the envs; return obs of all and `InfosApart`."""
        if not mask.all():
            options = {**(options or {}), "reset_mask": mask}
        obs, infos = self.envs.reset(seed=seed, options=options)
        if self._successors is not None:
            self._successors.phases[mask] = _LIVE  # no lost episode is left to report
        self._rows.obs.put(self._every, obs)
        return obs, infos_by_env(self.envs, infos, self._every)

    def step(self, actions: Any, env_ids: np.ndarray | None) -> Any:
        """Step all envs, or these, int64 (B,) counted from the actor's first.

        Returns:
            obs, rewards, terminations, truncations, `InfosApart`, and the envs int64 (B,), None for
            all.
        """
        self._acting = "step", actions, env_ids
        result = self._step(actions, env_ids)
        self._rows.obs.put(self._every if env_ids is None else result[5], result[0])
        return result

    def _step(self, actions: Any, env_ids: np.ndarray | None, out: Any = None) -> Any:
        envs, successors = self.envs, self._successors
        if successors is not None and successors.phases.any():
            ids = self._every if env_ids is None else env_ids
            results = successors.step(envs._actions.check(actions, env_ids), ids)
            if out is not None:
                slot_rows(out, self._rows.obs).put(ids, results)
            return results
        if env_ids is None:
            *results, infos = envs.step(actions) if out is None else envs.step(actions, out=out)
        else:
            envs.send(actions, env_ids)
            *results, infos, env_ids = envs.recv()
        ids = self._every if env_ids is None else env_ids
        return (*results, infos_by_env(envs, infos, ids), env_ids)

    # -- the policy --------------------------------------------------------------------------

    def set_policy(self, policy: bytes) -> None:
        """Make the policy from its pickled factory."""
        self._policy = loads(policy)(self.envs)

    def collect(self, num_steps: int, weights: Any, inputs: Sequence[np.ndarray]) -> Fragment:
        """Let the policy act for `num_steps` steps.

        Args:
            num_steps: T.
            weights: For the policy; None leaves it as it is.
            inputs: Arrays (T, n, ...), of which the policy gets the row of each step.
        """
        envs, policy = self.envs, self._policy
        if weights is not None:
            policy.load(weights)
        fragment = Fragment.of(envs, num_steps)
        obs, to_env = self._rows.obs.batch(), getattr(policy, "to_env", None)
        for t in range(num_steps):
            given = deepcopy(obs), *(rows[t].copy() for rows in inputs)  # which it may keep
            actions, fields = self._split(policy.act(*given))
            fragment.record(t, fields)
            if to_env is not None:
                actions = to_env(actions)
            doing, slot = f"step {t + 1} of {num_steps} of `collect` after step", fragment.slot(t)
            self._acting = doing, actions, None
            if infos := self._step(actions, None, slot)[4]:
                fragment.infos[t] = infos
            self._acting, obs = None, slot.obs
        self._rows.obs.put(self._every, obs)
        return fragment

    def _split(self, acted: Any) -> tuple[Any, dict[str, Any]]:
        """Return actions (n, *action_shape), and the fields to record, including the actions."""
        actions, fields = acted if isinstance(acted, tuple) else (acted, {})
        shape = self.envs.action_space.shape
        if shape is None or isinstance(actions, dict | tuple):
            return actions, fields
        actions = np.asarray(actions).reshape(shape)
        return actions, {"actions": actions, **fields}

    # -- methods of the envs -----------------------------------------------------------------

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """Call a method of every env, or read an attribute; return one value per env."""
        envs: Any = self.envs
        if name in ("np_random_seed", "np_random"):
            return getattr(envs, name)
        if not isinstance(envs, SyncVectorEnv):  # compiled envs have masks only
            if name == "has_wrapper_attr":
                return [envs.has_action_masks and args == ("action_masks",)] * envs.num_envs
            if name == "action_masks" and envs.has_action_masks:
                return list(envs.action_masks())
        return self._singles().call(name, *args, **kwargs)

    def set_attr(self, name: str, values: list[Any]) -> None:
        """Set an attribute of every env to a value of its own."""
        self._singles().set_attr(name, values)

    def _singles(self) -> SyncVectorEnv:
        """Return the vector env if it has single envs."""
        if not isinstance(self.envs, SyncVectorEnv):
            name = type(self.envs).__name__
            raise NotImplementedError(f"{name} has no env objects that could be called")
        return self.envs

    def close(self) -> None:
        """Close the envs."""
        self.envs.close()


class Successors:
    """Steps the envs that replace those of a lost actor, and reports the lost episodes.

    The next step of each env returns its last observation, reward 0 and truncation, with the info
    fields `restarts` and `restart_reason`; then its new episode begins as the autoreset mode says.

    Args:
        envs: The new envs.
        rows: Rows of these envs for the results; the last observations are written into them.
        loss: See `Start`.
        restarts: int64 (n,), how often each env has been replaced, including this time.

    Attributes:
        phases: int8 (n,), what the next step of each env does; all 0 if nothing is left to report.
    """

    def __init__(
        self, envs: VecEnv, rows: StepRows, loss: tuple[str, Any, Any], restarts: np.ndarray
    ) -> None:
        self._envs, self._rows, self._restarts = envs, rows, restarts
        self._space = envs.single_observation_space
        self._reason, last_obs, seeds = loss
        self._first_obs, infos = envs.reset(seed=seeds)
        self._first_infos = infos_by_env(envs, infos, np.arange(envs.num_envs))
        rows.obs.put(range(envs.num_envs), last_obs)
        self.phases = np.full(envs.num_envs, _LOST, np.int8)

    def step(self, actions: Any, env_ids: np.ndarray) -> Any:
        """Step these envs, int64 (B,), or report their loss; return what `EnvActor.step` does."""
        envs, rows, infos = self._envs, self._rows, InfosApart()
        phases = self.phases[env_ids]
        rows.rewards[env_ids], rows.terminations[env_ids] = 0.0, False
        rows.truncations[env_ids] = phases == _LOST
        live = np.flatnonzero(phases == _LIVE)
        if len(live):
            chosen = take_rows(envs.single_action_space, actions, live.tolist())
            envs.send(chosen, env_ids[live])
            *results, found, ids = envs.recv()
            rows.put(ids, results)
            infos = infos_by_env(envs, found, ids)
        for env_id in env_ids[phases != _LIVE].tolist():
            infos[env_id] = self._report(env_id)
        flags = (rows.rewards, rows.terminations, rows.truncations)
        return (rows.obs.take(env_ids), *(column[env_ids] for column in flags), infos, env_ids)

    def _report(self, env_id: int) -> dict[str, Any]:
        """Report the lost episode of an env, begin its new one, or both; return the infos."""
        mode, told, was_lost = self._envs.autoreset_mode, {}, self.phases[env_id] == _LOST
        if was_lost:
            info = {"restarts": int(self._restarts[env_id]), "restart_reason": self._reason}
            if mode is not AutoresetMode.SAME_STEP:
                self.phases[env_id] = _IS_DUE if mode is AutoresetMode.NEXT_STEP else _LIVE
                return info
            last_obs = take_row(self._space, self._rows.obs.take(np.array([env_id])), 0)
            told = {"final_obs": last_obs, "final_info": info}
        self.phases[env_id] = _LIVE
        self._rows.obs.write(env_id, take_row(self._space, self._first_obs, env_id))
        return {**told, **self._first_infos.get(env_id, {})}


def _itself(env: Any) -> Any:
    return env
