"""Collecting whole fragments: the policy acts in the actors, results fill the caller's memory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.core.base import VecEnv
from vecenv.core.errors import InfoError
from vecenv.core.slots import slot_rows
from vecenv.ray.chunks import Where, copy_rows, place_infos, place_rows
from vecenv.ray.fragments import Fragment, step_of
from vecenv.ray.remote import RemoteEnvs
from vecenv.timing.calls import COLLECT

if TYPE_CHECKING:
    from vecenv.ray.worker import ActorPolicy

__all__ = ["Collecting"]

_logger = logging.getLogger("vecenv")
_STORE_SHARE = 0.8  # of an object store that is full before Ray writes to disk


class Collecting(RemoteEnvs):
    """The part of `RayVectorEnv` that lets policies act in the actors."""

    _has_policy = False
    _sized_steps = 0  # length of the fragments last compared with the size of the object stores

    def set_policy(self, policy_fn: Callable[[VecEnv], ActorPolicy]) -> None:
        """Let every actor make a policy, for `collect`.

        Args:
            policy_fn: Called in each actor with its vector env; returns the policy, an object with
                two or three methods. `load(weights)` takes over the `weights` of `collect`; arrays
                in them are read-only. `act(obs, *inputs)` gets observations (n, *obs_shape) of the
                actor's n envs and the step's rows of the inputs, copies which it may keep; it
                returns actions (n, *action_shape), or a pair of actions and a dict of further
                arrays (n, ...) to be recorded. `to_env(actions)`, if there is one, converts the
                policy's actions into the envs', by clipping for example. All may return CPU
                tensors.

        Raises:
            TypeError: The factory can't be pickled.
            StepTimeoutError: The policies were not made within `start_timeout`.
            Exception: The factory raised it in an actor.
        """
        from vecenv.ray.opening import pickled

        self._calls.require_idle("set_policy")
        policy = pickled(policy_fn, "policy_fn")
        self._fleet.seats = [seat._replace(policy=policy) for seat in self._fleet.seats]
        patience = self._fleet.start_timeout  # it may import much
        self._ask_all("set_policy", [(policy,)] * self.num_workers, patience)
        self._has_policy = True

    def collect(
        self,
        slots: Sequence[Any],
        weights: Any = None,
        *,
        inputs: Sequence[Any] = (),
        fields: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> dict[int, dict[str, Any]]:
        """Let the actors' policies step all envs T times, and fill the caller's memory.

        Every actor works independently and sends one message with all its results, which is written
        when it arrives. With `on_error="restart"` the loss of an actor loses only the fragment of
        its envs, and its successor collects another.

        Args:
            slots: T slots such as `StepSlot`, into which the results of each step are written, as
                with `step(out=)`: for a `RolloutBuffer`
                `[rollout.slot(t) for t in range(num_steps)]`.
            weights: Argument of the policies' `load`: any object that can be pickled, put into
                Ray's object store once. None leaves the policies as they are.
            inputs: Arrays (T, num_envs, ...), of which each policy gets its rows at each step, such
                as noise: so the results don't depend on the number of actors.
            fields: Memory for the fields that the policies record: by name arrays, or CPU tensors,
                (T, num_envs, ...). The actions of `act` are recorded as "actions".
            timeout: Longest wait in seconds.

        Returns:
            Batched infos by step, of the steps that had any.

        Raises:
            StepTimeoutError: An actor is not ready. All envs have to be reset.
            SlotError: A slot can't be written into. Nothing was stepped.
            ValueError: An input or field has the wrong shape, there is no policy or no slot, or
                autoreset is disabled. Nothing was stepped, unless a field is missing.
            Exception: An env or a policy raised it.
        """
        self._calls.require_ready("collect")
        size = len(slots), self.num_envs
        self._check_collect(slots)
        arrays = [_checked(f"inputs[{k}]", rows, size) for k, rows in enumerate(inputs)]
        targets = {k: _checked(f"fields[{k!r}]", rows, size) for k, rows in (fields or {}).items()}
        if len(slots) != self._sized_steps:
            self._sized_steps = len(slots)
            self._warn_of_size(slots[0], targets)
        with self._logged(COLLECT) as log:
            if log is not None:
                log.note_rows(len(slots) * self.num_envs)
            return self._collect(slots, weights, arrays, targets, timeout)

    def _check_collect(self, slots: Sequence[Any]) -> None:
        if not self._has_policy:
            raise ValueError("`collect` came before `set_policy`; actors need a policy to act")
        if self.autoreset_mode is AutoresetMode.DISABLED:
            raise ValueError(
                "`collect` with autoreset 'Disabled' would need a reset between two steps; use "
                "'NextStep' or 'SameStep'"
            )
        if len(slots) == 0:
            raise ValueError("slots is empty, expected one for each step")
        for slot in slots:
            self._check_slot_mode(slot)
            slot_rows(slot, self._rows.obs, self.num_envs)

    def _warn_of_size(self, slot: Any, fields: dict[str, np.ndarray]) -> None:
        """Log which nodes' object stores can't hold the fragments, as Ray slows down silently."""
        fleet, num_steps = self._fleet, self._sized_steps
        rows = self._rows.rewards, self._rows.terminations, self._rows.truncations
        step_bytes = _bytes_of(slot.obs) + sum(array.nbytes for array in rows)
        total = num_steps * step_bytes + sum(array.nbytes for array in fields.values())
        needed = Counter[str]()
        for worker, node in enumerate(fleet.nodes):
            needed[node] += total * len(self._chunk(worker)) // self.num_envs
        needed[fleet.cluster.own_node()] = total  # all of them arrive here
        stores = fleet.cluster.store_bytes()
        small = [
            f"{node[:12]} has {stores[node] / 2**20:.0f} MiB for {size / 2**20:.0f} MiB"
            for node, size in needed.items()
            if size > _STORE_SHARE * stores.get(node, size)
        ]
        if small:
            _logger.warning(
                "fragments of %d steps x %d envs don't fit into Ray's object store, which writes "
                "to disk then and is many times slower: %s. Collect fewer steps at a time, or give "
                "Ray more (ray start --object-store-memory=BYTES, ray.init(object_store_memory=))",
                num_steps,
                self.num_envs,
                "; ".join(f"node {text}" for text in small),
            )

    def _collect(
        self,
        slots: Sequence[Any],
        weights: Any,
        inputs: list[np.ndarray],
        fields: dict[str, np.ndarray],
        timeout: float | None,
    ) -> dict[int, dict[str, Any]]:
        fleet, deadline = self._fleet, self._deadline(timeout)
        self._require_known("collect")
        self._own_rows()
        reference = None if weights is None else fleet.cluster.put(weights)
        found: dict[int, dict[int, dict[str, Any]]] = {}  # infos by worker and step
        try:
            for worker, (first, last) in enumerate(pairwise(fleet.bounds)):
                rows = [array[:, first:last] for array in inputs]
                fleet.ask(worker, "collect", len(slots), reference, rows)
            while len(found) < self.num_workers:
                doing = f"the collection of steps {self._steps + 1}-{self._steps + len(slots)}"
                replies = self._wait("collect", 1, deadline, doing)
                self._raise_faults(replies)
                for task, reply in replies:
                    self._take_fragment(task.worker, reply.result, slots, fields)
                    found[task.worker] = reply.result.infos
        except BaseException:
            fleet.forget()
            self._calls.forget_reset()
            raise
        self._steps += len(slots)
        infos: dict[int, dict[str, Any]] = {}
        for worker in range(self.num_workers):
            for t, part in found[worker].items():
                self._enter_infos(infos.setdefault(t, {}), part, self._rows_of(worker))
        return dict(sorted(infos.items()))

    def _enter_infos(self, infos: dict[str, Any], part: dict[str, Any], where: Where) -> None:
        """Merge infos of an actor's envs; if they can't be batched, all envs need a reset."""
        try:
            place_infos(infos, part, where, self.num_envs)
        except InfoError:
            self._calls.forget_reset()
            raise

    def _take_fragment(
        self, worker: int, fragment: Fragment, slots: Sequence[Any], fields: dict[str, np.ndarray]
    ) -> None:
        """Copy an actor's fragment into the caller's memory."""
        rows = self._rows_of(worker)
        for name, target in fields.items():
            came = fragment.fields.get(name)
            if came is None or came.shape[2:] != target.shape[2:]:
                shapes = {key: array.shape[2:] for key, array in fragment.fields.items()}
                raise ValueError(
                    f"fields[{name!r}] has the shape {target.shape[2:]} per step and env, but the "
                    f"policy recorded {shapes}"
                )
            target[:, rows] = came
        for t, slot in enumerate(slots):
            copy_rows(slot.obs, step_of(fragment.obs, t), rows)
            slot.rewards[rows] = fragment.rewards[t]
            slot.terminations[rows] = fragment.terminations[t]
            slot.truncations[rows] = fragment.truncations[t]
        last = step_of(fragment.obs, len(slots) - 1)
        place_rows(self._rows.obs, self.single_observation_space, last, self._chunk(worker))


def _bytes_of(obs: Any) -> int:
    """Return the size of nested arrays."""
    if isinstance(obs, dict | tuple):
        return sum(map(_bytes_of, obs.values() if isinstance(obs, dict) else obs))
    return obs.nbytes


def _checked(name: str, rows: Any, size: tuple[int, int]) -> np.ndarray:
    """Return an array over the memory of an array or tensor (T, N, ...)."""
    if not hasattr(rows, "dtype"):
        raise ValueError(f"{name} is a {type(rows).__name__}, expected an array or a CPU tensor")
    array = np.asarray(rows)
    if array.shape[:2] != size:
        raise ValueError(f"{name} has shape {array.shape}, expected {size} first: (steps, envs)")
    return array
