"""RayRolloutWorker: a vector env, and perhaps a policy, in an actor."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from copy import deepcopy
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol

import numpy as np
from gymnasium import Env, Space

from vecenv.core.autoreset import StepRows
from vecenv.core.base import GymVecEnv, VecEnv
from vecenv.core.batches import take_row
from vecenv.core.errors import EnvCreationError
from vecenv.core.faults import EnvFault
from vecenv.core.infos import InfosApart
from vecenv.core.pickling import load_registry, loads
from vecenv.core.restarts import with_restarts
from vecenv.ray.chunks import copy_rows, place_rows
from vecenv.ray.fragments import Fragment, FragmentMemory
from vecenv.ray.revival import Loss, Successors
from vecenv.ray.stamping import ActorStamps, NewStamps
from vecenv.sync import SyncVectorEnv
from vecenv.workers.env import AsyncVectorEnv

__all__ = ["ActorPolicy", "EnvChunk", "Opening", "RayRolloutWorker", "Reply", "Seat"]

_OF_POLICIES = ("set_policy", "collect")  # calls in which not only envs can raise


class ActorPolicy(Protocol):
    """The policy that the factory of `RayVectorEnv.set_policy` returns; see there."""

    @property
    def load(self) -> Callable[[Any], Any]:
        """Load new weights."""
        ...

    @property
    def act(self) -> Callable[..., Any]:
        """Choose actions for observations and inputs."""
        ...


class Seat(NamedTuple):
    """The start arguments of an actor.

    Attributes:
        worker: Number of the actor.
        first: Its first env.
        maker: Pickled factory of its vector env.
        registry: Pickled specs of envs that the caller has registered.
        policy: Pickled factory of the policy, or None.
        restarts: int64 (n,), how often its envs have been replaced, if it replaces another actor.
        loss: State of the lost envs, if it replaces another actor.
        is_stamped: Whether the steps of its envs are stamped.
    """

    worker: int
    first: int
    maker: bytes
    registry: bytes
    policy: bytes | None = None
    restarts: np.ndarray | None = None
    loss: Loss | None = None
    is_stamped: bool = False


class Opening(NamedTuple):
    """The report of an actor when its envs have been made.

    Attributes:
        spaces: (observation space, action space) of every env.
        metadata, render_mode: Of the vector env.
        host: Name of the machine.
        pid: Process id there.
    """

    spaces: list[tuple[Space, Space]]
    metadata: dict[str, Any]
    render_mode: str | None
    host: str
    pid: int

    @property
    def local_pid(self) -> int:
        """The process id if it is on this machine, else its negative."""
        return self.pid if self.host == socket.gethostname() else -self.pid


class Reply(NamedTuple):
    """The reply of an actor to a call.

    Attributes:
        result: Result of the call; None if it failed.
        faults: Faults of envs.
        restarts: int64 (n,), how often each env has been replaced, if that has changed.
        stamps: Stamps of env steps since the last reply, if enabled.
    """

    result: Any
    faults: Sequence[EnvFault] = ()
    restarts: np.ndarray | None = None
    stamps: NewStamps | None = None


class EnvChunk(NamedTuple):
    """Makes the vector env of an actor from factories of single envs; can be pickled.

    Attributes:
        env_fns: One per env.
        first: Number of the first.
        backend: "sync" or "async".
        options: Of the vector env.
        restarts_envs: Whether an env that raises is replaced.
    """

    env_fns: Sequence[Callable[[], Env]]
    first: int
    backend: str
    options: dict[str, Any]
    restarts_envs: bool

    def __call__(self) -> VecEnv:
        """Make the vector env; exceptions of a factory have the env's number as `env_id`."""
        env_fns = [_Numbered(env_fn, self.first + k) for k, env_fn in enumerate(self.env_fns)]
        if self.backend == "async":
            on_error = "restart" if self.restarts_envs else "raise"
            return AsyncVectorEnv(env_fns, on_error=on_error, **self.options)
        envs = SyncVectorEnv(env_fns, **self.options)
        if self.restarts_envs:
            counts = np.zeros(envs.num_envs, np.int64)
            envs.envs[:] = with_restarts(envs.envs, env_fns, counts)
            vars(envs)["restarts"] = counts
        return envs


class _Numbered:
    """Factory that adds the number of its env to its exceptions."""

    def __init__(self, env_fn: Callable[[], Env], env_id: int) -> None:
        self._env_fn, self._env_id = env_fn, env_id

    def __call__(self) -> Env:
        try:
            return self._env_fn()
        except Exception as error:
            vars(error)["env_id"] = self._env_id
            raise


class RayRolloutWorker:
    """A vector env, and perhaps a policy, in an actor; every call returns a `Reply`.

    Exceptions of the envs or the policy are part of the reply: through Ray they would lose their
    type.
    """

    envs: VecEnv
    _counts: np.ndarray | None = None  # restarts of envs
    _reported: np.ndarray | None = None  # restarts sent to the caller so far
    _policy: ActorPolicy | None = None
    _successors: Successors | None = None
    _memory: tuple[int, FragmentMemory] | None = None
    _stamps: ActorStamps | None = None
    _acting: tuple[int, Any] | None = None  # step and actions, while `collect` steps the envs

    def open(self, seat: Seat) -> Reply:
        """Make the vector env; the reply has an `Opening`."""
        self._seat = seat
        try:
            load_registry(seat.registry)
            self.envs = loads(seat.maker)()
            self._start()
            self._stamps = ActorStamps(self.envs) if seat.is_stamped else None
        except Exception as error:
            if isinstance(error, EnvCreationError) and isinstance(error.__cause__, Exception):
                error = error.__cause__
            env_id = getattr(error, "env_id", seat.first + getattr(error, "env_index", 0))
            return Reply(None, [EnvFault.of(error, env_id, seat.worker, "creation")])
        try:
            if seat.policy is not None:
                self._policy = loads(seat.policy)(self.envs)
        except Exception as error:
            return self._failed(error, "set_policy")
        return Reply(self._opening())

    def _start(self) -> None:
        """Allocate memory for the calls; if there is a predecessor, report its lost episodes."""
        envs = self.envs
        self._is_apart = envs._keep_infos_apart()
        self._rows = StepRows.make(envs.single_observation_space, envs.num_envs)
        self._counts = getattr(envs, "restarts", None)
        if self._counts is not None:
            if self._seat.restarts is not None:
                self._counts[:] = self._seat.restarts
            self._reported = self._counts.copy()
        if (loss := self._seat.loss) is not None:
            self._successors = Successors(envs, loss)
            self._place(loss.last_obs, range(envs.num_envs))

    def _opening(self) -> Opening:
        envs = self.envs
        if isinstance(envs, SyncVectorEnv | AsyncVectorEnv):
            pairs = zip(
                envs.get_attr("observation_space"), envs.get_attr("action_space"), strict=True
            )
        else:
            pair = envs.single_observation_space, envs.single_action_space
            pairs = [pair] * envs.num_envs
        return Opening(
            list(pairs), dict(envs.metadata), envs.render_mode, socket.gethostname(), os.getpid()
        )

    def _place(self, obs: Any, env_ids: range | np.ndarray) -> None:
        place_rows(self._rows.obs, self.envs.single_observation_space, obs, env_ids)

    def reset(self, seed: Any, options: dict[str, Any] | None, mask: np.ndarray | None) -> Reply:
        """Reset the envs; the result is obs and infos (where these aren't batched, by row)."""
        if mask is not None and not mask.all():
            options = {**(options or {}), "reset_mask": mask}
        try:
            obs, infos = self.envs.reset(seed=seed, options=options)
        except Exception as error:
            return self._failed(error, "reset")
        if self._successors is not None:
            self._successors.forget(mask)
        self._place(obs, range(self.envs.num_envs))
        if self._stamps is not None:
            self._stamps.mark_done()
        return self._reply((obs, self._infos(infos)))

    def step(self, actions: Any, env_ids: np.ndarray | None) -> Reply:
        """Step all envs, or these (int64, counted from the actor's first); see `StepBatch`."""
        try:
            result = self._step(actions, env_ids)
        except Exception as error:
            return self._failed(error, "step", actions, env_ids)
        self._place(result[0], range(self.envs.num_envs) if env_ids is None else result[5])
        return self._reply(result)

    def _infos(self, infos: dict[Any, Any]) -> dict[Any, Any]:
        return InfosApart(infos) if self._is_apart else infos

    def _step(self, actions: Any, env_ids: np.ndarray | None) -> Any:
        """Return obs, rewards, terminations, truncations, infos, and the envs (None for all)."""
        *results, infos, ids = self._results(actions, env_ids)
        return (*results, self._infos(infos), ids)

    def _results(self, actions: Any, env_ids: np.ndarray | None) -> Any:
        envs = self.envs
        if self._successors is not None and not self._successors.is_done:
            is_all = env_ids is None
            batch = self._successors.step(actions, np.arange(envs.num_envs) if is_all else env_ids)
            return (*batch[:5], None if is_all else batch.env_ids)
        if env_ids is None:
            results = (*envs.step(actions), None)
        else:
            envs.send(actions, env_ids)
            results = tuple(envs.recv())
        if self._stamps is not None:
            self._stamps.mark_done()
        return results

    def stamp(self, is_on: bool) -> Reply:
        """Stamp the envs' steps from now on, or no longer; the result is `ActorStamps.lanes`."""
        self._seat = self._seat._replace(is_stamped=is_on)
        if self._stamps is not None:
            self._stamps.end()
        self._stamps = ActorStamps(self.envs) if is_on else None
        return Reply(None if self._stamps is None else self._stamps.lanes)

    def set_policy(self, policy: bytes) -> Reply:
        """Make the policy from its pickled factory."""
        self._seat = self._seat._replace(policy=policy)
        try:
            self._policy = loads(policy)(self.envs)
        except Exception as error:
            return self._failed(error, "set_policy")
        return Reply(None)

    def collect(self, num_steps: int, weights: Any, inputs: Sequence[np.ndarray]) -> Reply:
        """Let the policy act for `num_steps` steps; the result is a `Fragment`.

        Args:
            num_steps: T.
            weights: For the policy; None leaves it as it is.
            inputs: Arrays (T, n, ...), of which the policy gets the row of each step.
        """
        try:
            return self._reply(self._collect(num_steps, weights, inputs))
        except Exception as error:
            if self._acting is None or not hasattr(error, "env_index"):
                return self._failed(error, "collect")
            t, actions = self._acting
            doing = f"step {t + 1} of {num_steps} of `collect` after step"
            return self._failed(error, doing, actions)
        finally:
            self._acting = None

    def _collect(self, num_steps: int, weights: Any, inputs: Sequence[np.ndarray]) -> Fragment:
        envs, policy = self.envs, self._policy
        assert policy is not None
        if weights is not None:
            policy.load(weights)
        if self._memory is None or self._memory[0] != num_steps:
            size = num_steps, envs.num_envs
            memory = FragmentMemory(envs.single_observation_space, *size, envs.allocate)
            self._memory = num_steps, memory
        memory, infos = self._memory[1], {}
        obs, to_env = self._rows.obs.batch(), getattr(policy, "to_env", None)
        for t, slot in enumerate(memory.slots):
            given = deepcopy(obs), *(rows[t].copy() for rows in inputs)  # the policy may keep them
            actions, fields = self._split(policy.act(*given))
            memory.put(t, fields)
            taken = actions if to_env is None else to_env(actions)
            self._acting = t, taken
            found = self._step_into(taken, slot)
            self._acting = None
            if found:
                infos[t] = found
            obs = slot.obs
        self._place(obs, range(envs.num_envs))
        return memory.fragment(infos)

    def _split(self, acted: Any) -> tuple[Any, dict[str, Any]]:
        """Return actions (n, *action_shape), and the fields to record, these included."""
        actions, fields = acted if isinstance(acted, tuple) else (acted, {})
        shape = self.envs.action_space.shape
        if shape is None or isinstance(actions, dict | tuple):
            return actions, fields
        actions = np.asarray(actions).reshape(shape)
        return actions, {"actions": actions, **fields}

    def _step_into(self, actions: Any, slot: Any) -> dict[str, Any]:
        """Step all envs into a slot; return the infos."""
        if self._successors is None or self._successors.is_done:
            infos = self._infos(self.envs.step(actions, out=slot)[4])
            if self._stamps is not None:
                self._stamps.mark_done()
            return infos
        obs, *results, infos, _ = self._step(self.envs._actions.check(actions), None)
        copy_rows(slot.obs, obs, slice(None))
        for target, found in zip(slot[1:], results, strict=True):
            target[:] = found
        return infos

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reply:
        """Call a method of every env, or read an attribute."""
        try:
            if name in ("np_random_seed", "np_random"):
                return self._reply(getattr(self.envs, name))
            return self._reply(_methods(self.envs).call(name, *args, **kwargs))
        except Exception as error:
            return self._failed(error, "call")

    def set_attr(self, name: str, values: list[Any]) -> Reply:
        """Set an attribute of every env to a value of its own."""
        try:
            return self._reply(_methods(self.envs).set_attr(name, values))
        except Exception as error:
            return self._failed(error, "set_attr")

    def mask_method(self) -> Reply:
        """Look for the method by which the envs give their masks; the result is its name."""
        envs = self.envs
        try:
            if isinstance(envs, GymVecEnv):
                return self._reply(envs._find_mask_method())
            return self._reply("action_masks" if envs.has_action_masks else None)
        except Exception as error:
            return self._failed(error, "call")

    def action_masks(self, name: str) -> Reply:
        """Ask the envs for their masks; the result has one per env."""
        envs = self.envs
        try:
            masks = envs.call(name) if isinstance(envs, GymVecEnv) else envs.action_masks()
            return self._reply(list(masks))
        except Exception as error:
            return self._failed(error, "call")

    def close(self) -> Reply:
        """Close the envs."""
        with contextlib.suppress(Exception):  # the caller is closing too, and ignores it
            self.envs.close()
        return Reply(None)

    def _reply(self, result: Any) -> Reply:
        stamps = None if self._stamps is None else self._stamps.take(perf_counter_ns())
        if self._counts is None or (self._counts == self._reported).all():
            return Reply(result, stamps=stamps)
        self._reported = self._counts.copy()
        return Reply(result, restarts=self._reported, stamps=stamps)

    def _failed(
        self, error: Exception, call: str, actions: Any = None, env_ids: np.ndarray | None = None
    ) -> Reply:
        """Return the reply about an exception: which env raised it, and for which action.

        Args:
            error: The exception.
            call: Name of the call.
            actions: Batch of actions, if the call has any.
            env_ids: Envs of the actions; None for all.
        """
        index, action = getattr(error, "env_index", None), None
        if index is None and call not in _OF_POLICIES:
            index = 0
        if index is not None and actions is not None:
            rows = [index] if env_ids is None else np.flatnonzero(env_ids == index).tolist()
            with contextlib.suppress(Exception):  # the actions themselves may be malformed
                action = take_row(self.envs.single_action_space, actions, rows[0])
        env_id = -1 if index is None else self._seat.first + index
        return Reply(None, [EnvFault.of(error, env_id, self._seat.worker, call, action)])


def _methods(envs: VecEnv) -> Any:
    """Return the vector env if the methods of its envs can be called."""
    if not hasattr(envs, "set_attr"):
        raise NotImplementedError(f"{type(envs).__name__} has no env objects that could be called")
    return envs
