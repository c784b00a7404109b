"""A chunk of a pool's envs, as a worker (or the caller, for its own share) steps it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Env, Space

from vecenv.core.autoreset import EnvGroup
from vecenv.core.errors import EnvFault, EnvStateError, ObservationError
from vecenv.core.infos import keep_info
from vecenv.core.pickling import dumps, load_factories, load_registry
from vecenv.core.replacing import (
    MissingEnv,
    RestartingEnv,
    SavedEnv,
    dump_env,
    load_env,
    remade,
    without_restarts,
)
from vecenv.core.spaces import require_new_env, take_row
from vecenv.workers.rows import Layout, Tables

__all__ = ["Answer", "Chunk", "EnvSpaces", "close_envs", "make_envs"]

_ANSWERING = "pickling infos and observations of step"
_RESERVED = ("reset", "step", "close")


class EnvSpaces(NamedTuple):
    """Report of a chunk's envs, after they have been made.

    Attributes:
        spaces: Observation space and action space of each env; equal ones are the same pair. For an
            env that could not be made, the `EnvFault` instead.
        metadata, render_mode: Those of the first env that was made; None if none was.
        published: Named spaces of arrays that this env publishes.
    """

    spaces: list[tuple[Space, Space] | EnvFault]
    metadata: dict[str, Any] | None
    render_mode: str | None
    published: dict[str, Space]

    @property
    def faults(self) -> list[EnvFault]:
        """Faults of the envs that could not be made."""
        return [pair for pair in self.spaces if isinstance(pair, EnvFault)]

    @staticmethod
    def of(envs: list[Env]) -> EnvSpaces:
        """Describe envs; an exception that an env raises gets its index as `env_index`."""
        spaces: list[Any] = []
        for index, env in enumerate(envs):
            try:
                if isinstance(env, MissingEnv):
                    spaces.append(env.reason)
                else:
                    pair = env.observation_space, env.action_space
                    spaces.append(next((other for other in spaces if other == pair), pair))
            except BaseException as error:  # attributes may be properties, and raise anything
                vars(error)["env_index"] = index
                raise
        first = next((env for env in envs if not isinstance(env, MissingEnv)), None)
        if first is None:
            return EnvSpaces(spaces, None, None, {})
        published = getattr(first.unwrapped, "publish", None) or {}
        return EnvSpaces(spaces, dict(first.metadata), first.render_mode, dict(published))


class Answer(NamedTuple):
    """A chunk's reply, beyond the rows in shared memory.

    Attributes:
        result: Result of a message; None for a step.
        infos: The infos by index in the chunk.
        objects: Observations of leaves without fixed shape, one list per leaf.
        errors: Faults of single envs.
    """

    result: Any = None
    infos: Mapping[int, Any] = {}
    objects: Sequence[Sequence[Any]] = ()
    errors: Sequence[EnvFault] = ()

    def pickled(self, first: int, worker: int) -> bytes:
        """Pickle the answer for envs from `first` on, or a fault if that fails."""
        try:
            return dumps(tuple(self))
        except BaseException as error:  # code of users' classes
            fault = EnvFault.of(error, first + self._culprit(), worker, _ANSWERING)
            return dumps(tuple(Answer(errors=[fault])))

    def _culprit(self) -> int:
        """Return the first env whose part can't be pickled; 0 if unknown."""
        parts = [enumerate(items) for items in (self.result or (), *self.objects)]
        for index, item in chain(self.infos.items(), *parts):
            try:
                dumps(item)
            except BaseException:  # code of users' classes
                return index
        return 0


def make_envs(
    factories: Sequence[Callable[[], Env]], first: int, worker: int, place: Any, goes_on: bool
) -> tuple[list[Env], EnvFault | None]:
    """Call factories one after the other; return the envs, and the fault that stopped it, if any.

    Args:
        factories: One per env.
        first: Id of the first env.
        worker: Number of the worker; -1 for the caller, where Ctrl-C is no fault.
        place: `place[0]` is set to the id of the env that is about to be made.
        goes_on: Whether a `MissingEnv` replaces an env that can't be made.
    """
    envs: list[Env] = []
    known: dict[int, int] = {}
    for env_id, factory in enumerate(factories, first):
        place[0] = env_id
        try:
            env = factory()
            if isinstance(env, Env):
                require_new_env(env, known)
            envs.append(env)
        except BaseException as error:
            if worker < 0 and isinstance(error, KeyboardInterrupt):
                raise
            fault = EnvFault.of(error, env_id, worker, "creation")
            if not goes_on:
                return envs, fault
            envs.append(MissingEnv(fault, is_empty=True))
            known[id(envs[-1])] = len(known)
    return envs, None


class Chunk:
    """Some envs of a pool, and their rows in shared memory.

    Methods for messages return an `Answer` with a result for each env.

    Attributes:
        first, last, num_envs: The envs are first, ..., last - 1 of `num_envs` in the vector env.
        group: The envs, with the rules of autoreset.

    Args:
        envs: The envs; those of a worker that replaces another are `RestartingEnv`s.
        worker: Number of the worker; -1 for the caller.
        first: Id of the first env.
        layout: Layout of the tables.
        tables: The rows of these envs.
        place: `place[0]` is set to the id of the env that is at work.
    """

    def __init__(
        self, envs: list[Env], worker: int, first: int, layout: Layout, tables: Tables, place: Any
    ) -> None:
        self.worker, self.num_envs = worker, layout.num_envs
        self.first, self.last = first, first + len(envs)
        self.group = EnvGroup(envs, layout.autoreset_mode, tables.rows, keep_info)
        self._every, self._place, self._layout = range(len(envs)), place, layout
        self._spaces = layout.observation_space, layout.action_space
        for env in map(without_restarts, envs):
            if isinstance(env, MissingEnv):
                env.observation_space, env.action_space = self._spaces
        self._rows, self._objects = tables.rows, tables.objects
        self._actions: Any = tables.actions  # None if all actions travel as payloads
        self._published = list(tables.published.items())

    # -- steps -------------------------------------------------------------------------------

    def step(self, actions: Any = None) -> Answer | None:
        """Step every env once; return an `Answer` if there is more than rows to report.

        `actions` has one per env; None to read them from shared memory.
        """
        if actions is None:
            actions = self._actions.all()
        infos: dict[int, Any] = {}
        faults: list[EnvFault] = []
        try:
            infos = self.group.step(self._announced(actions))
        except BaseException as error:
            failed = getattr(error, "env_index", 0)
            faults.append(self._fault(error, failed, "step", actions[failed]))
            for index in self._every[failed + 1 :]:  # these are stepped all the same
                self._step_env(index, actions[index], infos, faults)
        return self._stepped(self._every, infos, faults)

    def step_env(self, index: int, actions: Any = None) -> Answer | None:
        """Step one env of the chunk as `step` does; `actions` is a list of its action, or None."""
        infos: dict[int, Any] = {}
        faults: list[EnvFault] = []
        action = self._actions.one(index) if actions is None else actions[0]
        self._step_env(index, action, infos, faults)
        return self._stepped(range(index, index + 1), infos, faults)

    def _step_env(
        self, index: int, action: Any, infos: dict[int, Any], faults: list[EnvFault]
    ) -> None:
        self._place[0] = self.first + index
        try:
            self.group.step_env(index, action, infos)
        except BaseException as error:
            faults.append(self._fault(error, index, "step", action))

    def _stepped(
        self, chosen: range, infos: dict[int, Any], faults: list[EnvFault]
    ) -> Answer | None:
        """Return what there is to report of the envs that were stepped."""
        if self._published:
            faults += self._publish(chosen, "step", faults)
        self.group.mark_done(chosen[-1])
        if not (infos or faults or self._objects):
            return None
        infos = {k - chosen[0]: info for k, info in infos.items()}
        objects = [[leaf.target[k] for k in chosen] for leaf in self._objects]
        return Answer(None, infos, objects, faults)

    def _announced(self, actions: Iterable[Any]) -> Iterator[Any]:
        """Yield actions; before each, set `place` to its env, in case that env never returns."""
        place = self._place
        for env_id, action in enumerate(actions, self.first):
            place[0] = env_id
            yield action

    def _fault(self, error: BaseException, index: int, call: str, action: Any = None) -> EnvFault:
        """Return the fault of an exception; re-raise Ctrl-C in the caller (workers ignore it)."""
        if self.worker < 0 and isinstance(error, KeyboardInterrupt):
            raise error
        return EnvFault.of(error, self.first + index, self.worker, call, action)

    def _publish(
        self, indices: Iterable[int], call: str, known: Sequence[EnvFault] = ()
    ) -> Sequence[EnvFault]:
        """Copy what envs publish to shared memory; return the faults.

        Envs that have failed already, whose faults are `known`, are left out.
        """
        failed = {fault.env_id - self.first for fault in known}
        return self._each(call, self._publish_one, (k for k in indices if k not in failed)).errors

    def _publish_one(self, index: int) -> None:
        env = self.group.envs[index]
        for name, array in () if isinstance(without_restarts(env), MissingEnv) else self._published:
            value = env.get_wrapper_attr(name)
            value = np.asarray(value() if callable(value) else value)
            is_cut = array.dtype.kind in "biu" and value.dtype.kind not in "biu"  # loses fractions
            if value.shape != array.shape[1:] or is_cut:
                raise TypeError(
                    f"{name}, which is published, has shape {value.shape} and dtype "
                    f"{value.dtype}, expected {array.shape[1:]} and {array.dtype}"
                )
            array[index] = value

    # -- messages: methods that the caller names ---------------------------------------------

    def _each(
        self, call: str, function: Callable[[int], Any], indices: Iterable[int] | None = None
    ) -> Answer:
        """Call a function for each env, or some; an exception becomes the fault of that env."""
        results: list[Any] = []
        faults: list[EnvFault] = []
        for index in self._every if indices is None else indices:
            self._place[0] = self.first + index
            try:
                results.append(function(index))
            except BaseException as error:
                faults.append(self._fault(error, index, call))
        return Answer(results, errors=faults)

    def reset(
        self,
        seeds: Sequence[int | None],
        options: dict[str, Any] | None,
        reset_mask: np.ndarray | None,
    ) -> Answer:
        """Reset all envs, or those of `reset_mask`; if one fails, the others are reset as well."""
        infos: dict[int, Any] = {}

        def reset(index: int) -> None:
            self.group.reset_env(index, seeds[index], options, infos)
            self.group.mark_done(index)

        chosen = None if reset_mask is None else np.flatnonzero(reset_mask).tolist()
        faults = self._each("reset", reset, chosen).errors
        faults = [*faults, *self._publish(self._every, "reset", faults)]
        return Answer(None, infos, [leaf.target for leaf in self._objects], faults)

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
        """Call a method of every env, or read an attribute."""
        if name in _RESERVED:
            error = ValueError(
                f"Trying to call function `{name}` with `call`, use `{name}` directly instead."
            )
            return Answer(errors=[EnvFault.of(error, self.first, self.worker, "call")])

        def read(index: int) -> Any:
            value = without_restarts(self.group.envs[index]).get_wrapper_attr(name)
            return value(*args, **kwargs) if callable(value) else value

        return self._each("call", read)

    def set_attr(self, name: str, values: Sequence[Any]) -> Answer:
        """Set an attribute of every env."""
        envs = map(without_restarts, self.group.envs)
        setters = [partial(env.set_wrapper_attr, name) for env in envs]
        return self._each("set_attr", lambda index: setters[index](values[index]))

    def save_envs(self) -> Answer:
        """Pickle every env; each result is its state, or the text of the problem."""

        def save(index: int) -> bytes | str:
            env = without_restarts(self.group.envs[index])
            try:
                saved = SavedEnv(env, index in self.group.ended, self._last_obs(index))
                return dump_env(saved, self.first + index)
            except EnvStateError as error:
                return str(error)

        return self._each("state_dict", save)

    def load_envs(self, pickles: Sequence[bytes]) -> Answer:
        """Replace the envs by pickled ones, and close the former ones.

        Each result is whether the episode is over, or the text of the problem.
        """

        def load(index: int) -> bool | str:
            env = without_restarts(self.group.envs[index])
            spaces = env.observation_space, env.action_space
            try:
                saved = load_env(pickles[index], self.first + index, *spaces)
                self._rows.obs.write(index, saved.obs)
            except (EnvStateError, ObservationError) as error:
                return str(error)
            self._put(index, saved.env)
            (self.group.ended.add if saved.is_over else self.group.ended.discard)(index)
            close_envs([env])
            return saved.is_over

        answer = self._each("load_state_dict", load)
        faults = [*answer.errors, *self._publish(self._every, "load_state_dict")]
        return answer._replace(objects=[leaf.target for leaf in self._objects], errors=faults)

    def _put(self, index: int, env: Env, factory: Callable[[], Env] | None = None) -> None:
        """Replace an env by another."""
        if isinstance(old := self.group.envs[index], RestartingEnv):
            old.go_on_with(env, self._last_obs(index), factory)
        else:
            self.group.envs[index] = env

    def reopen(self, env_ids: Sequence[int], factories: Any, observation_mode: Any) -> Answer:
        """Close some envs and make them anew; the result is a list of faults, of failed envs.

        Args:
            env_ids: Ids of these envs.
            factories: One for each, or a pair: pickled registry, pickled factories.
            observation_mode: Whether bounds of the new observation spaces may differ.
        """
        if isinstance(factories, tuple):
            load_registry(factories[0])
            factories = load_factories(factories[1])
        made = dict(zip(env_ids, factories, strict=True))

        def remake(index: int) -> None:
            env_id, envs = self.first + index, list(map(without_restarts, self.group.envs))
            self.group.ended.discard(index)
            env = remade(env_id, envs[index], made[env_id], envs, self._spaces, observation_mode)
            self._put(index, env, made[env_id])

        faults = self._each("creation", remake, (env_id - self.first for env_id in env_ids)).errors
        for fault in faults:
            env = MissingEnv(fault.text, self._layout.restart_envs, self._spaces)
            self._put(fault.env_id - self.first, env, made[fault.env_id])
        return Answer(faults)

    def lose_episodes(self, reason: str, objects: Sequence[Sequence[Any]]) -> None:
        """Take over from a worker that is gone: the episodes of all its envs are over.

        Args:
            reason: How the worker ended.
            objects: Leaves without fixed shape of the last observations; others are in memory.
        """
        for leaf, items in zip(self._objects, objects, strict=True):
            leaf.target[:] = items
        for index, env in enumerate(self.group.envs):
            assert isinstance(env, RestartingEnv)
            with contextlib.suppress(BaseException):  # if this reset fails, the next one reports it
                env.env.reset()
            env.lose(self._last_obs(index), reason)

    def _last_obs(self, index: int) -> Any:
        return take_row(self._layout.observation_space, self._rows.obs.take(np.array([index])), 0)


def close_envs(envs: Sequence[Any]) -> None:
    """Close all envs, whatever some of them raise: nobody is left to report it to."""
    for env in envs:
        with contextlib.suppress(BaseException):
            without_restarts(env).close()
