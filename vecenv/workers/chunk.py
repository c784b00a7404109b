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
from vecenv.core.env_state import SavedEnv, dump_env, load_env
from vecenv.core.errors import EnvStateError, ObservationError
from vecenv.core.faults import EnvFault
from vecenv.core.infos import keep_info
from vecenv.core.pickling import dumps, load_factories, load_registry
from vecenv.core.replacing import MissingEnv, RestartingEnv, remade, without_restarts
from vecenv.core.spaces import require_new_env, take_row
from vecenv.workers.rows import Layout, Tables

__all__ = ["Answer", "Chunk", "EnvSpaces", "close_envs", "make_envs"]

_ANSWERING = "pickling infos and observations of step"
_RESERVED = ("reset", "step", "close")


class EnvSpaces(NamedTuple):
    """What is known of a chunk's envs when they have been made.

    Attributes:
        spaces: Observation space and action space of each; equal ones are the same pair. Of one
            that could not be made it is what has kept it from that.
        metadata, render_mode: Of the first env that was made; None if none was.
        published: Named spaces of arrays that this env publishes.
    """

    spaces: list[tuple[Space, Space] | EnvFault]
    metadata: dict[str, Any] | None
    render_mode: str | None
    published: dict[str, Space]

    @property
    def faults(self) -> list[EnvFault]:
        """What has kept envs from being made."""
        return [pair for pair in self.spaces if isinstance(pair, EnvFault)]

    @staticmethod
    def of(envs: list[Env]) -> EnvSpaces:
        """Describe envs; what they raise has an `env_index`."""
        spaces: list[Any] = []
        for index, env in enumerate(envs):
            try:
                if isinstance(env, MissingEnv):
                    spaces.append(env.reason)
                else:
                    pair = env.observation_space, env.action_space
                    spaces.append(next((other for other in spaces if other == pair), pair))
            except BaseException as error:  # attributes may be code of the env's
                vars(error)["env_index"] = index
                raise
        first = next((env for env in envs if not isinstance(env, MissingEnv)), None)
        if first is None:
            return EnvSpaces(spaces, None, None, {})
        published = getattr(first.unwrapped, "publish", None) or {}
        return EnvSpaces(spaces, dict(first.metadata), first.render_mode, dict(published))


class Answer(NamedTuple):
    """What a chunk has to say beyond numbers.

    Attributes:
        result: Of a message; None for a step.
        infos: By index in the chunk the infos to be entered, mostly one.
        objects: Observations of leaves without fixed shape, one list per leaf.
        errors: Faults of single envs.
    """

    result: Any = None
    infos: Mapping[int, Any] = {}
    objects: Sequence[Sequence[Any]] = ()
    errors: Sequence[EnvFault] = ()

    def pickled(self, first: int, worker: int) -> bytes:
        """Pickle what a worker says of its envs from `first` on, or a fault if that fails."""
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
    """Call factories one after the other; return the envs, and what stopped it, if something did.

    Args:
        factories: One per env.
        first: Id of the first env.
        worker: Whose they are; -1 for the caller, whose Ctrl-C is no fault.
        place: The id of the env that is about to be made is put here, as `place[0]`.
        goes_on: Whether a `MissingEnv` takes the place of one that can't be made.
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
    """Some envs of a pool, and their places in shared memory.

    Methods for messages return an `Answer` with a result for each env.

    Attributes:
        first, last, num_envs: Which envs these are, and how many the vector env has.
        group: The envs, with the rules of autoreset.

    Args:
        envs: The envs; those of a worker that replaces another are `RestartingEnv`s.
        worker: Whose they are; -1 for the caller.
        first: Id of the first.
        layout: What the tables are of.
        tables: Those of these envs.
        place: The id of the env that is at work is put here, as `place[0]`.
    """

    def __init__(
        self, envs: list[Env], worker: int, first: int, layout: Layout, tables: Tables, place: Any
    ) -> None:
        self.worker, self.num_envs = worker, layout.num_envs
        self.first, self.last = first, first + len(envs)
        self.group = EnvGroup(envs, layout.autoreset_mode, keep_info)
        self._every, self._place, self._layout = range(len(envs)), place, layout
        self._spaces = layout.observation_space, layout.action_space
        for env in map(without_restarts, envs):
            if isinstance(env, MissingEnv):
                env.be_of(*self._spaces)
        self._rows, self._objects = tables.rows, tables.objects
        self._actions: Any = tables.actions  # None if all travel by message
        self._published = list(tables.published.items())

    # -- steps -------------------------------------------------------------------------------

    def step(self, actions: Any = None, index: int | None = None) -> Answer | None:
        """Step every env once, or one; return what there is to say beyond numbers.

        Args:
            actions: One per env that is stepped; None for those that are in shared memory.
            index: Which env, in the chunk; None for all.
        """
        chosen = self._every if index is None else range(index, index + 1)
        if actions is None:
            actions = self._actions.all() if index is None else (self._actions.one(index),)
        infos: dict[int, Any] = {}
        faults: list[EnvFault] = []
        left = chosen
        while left:  # envs after one that raises are stepped all the same
            some = None if len(left) == len(self._every) else left  # a shorter way for all
            try:
                infos = self.group.step(self._announced(actions, left), self._rows, some)
                break
            except BaseException as error:
                k = getattr(error, "env_index", left[0]) - left[0]
                faults.append(self._fault(error, left[k], "step", actions[k]))
                actions, left = actions[k + 1 :], left[k + 1 : len(actions)]
        if self._published:
            faults += self._publish(chosen, "step", faults)
        self.group.mark_done(chosen[-1])
        if not (infos or faults or self._objects):
            return None
        infos = {k - chosen[0]: entries for k, entries in infos.items()}
        objects = [[leaf.target[k] for k in chosen] for leaf in self._objects]
        return Answer(None, infos, objects, faults)

    def _announced(self, actions: Iterable[Any], chosen: range) -> Iterator[Any]:
        """Yield the actions of some envs; each env is announced before, should it never return."""
        place = self._place
        for env_id, action in enumerate(actions, self.first + chosen[0]):
            place[0] = env_id
            yield action

    def _fault(self, error: BaseException, index: int, call: str, action: Any = None) -> EnvFault:
        """Describe what an env has raised; but let Ctrl-C through, which workers ignore."""
        if self.worker < 0 and isinstance(error, KeyboardInterrupt):
            raise error
        return EnvFault.of(error, self.first + index, self.worker, call, action)

    def _publish(
        self, indices: Iterable[int], call: str, known: Sequence[EnvFault] = ()
    ) -> Sequence[EnvFault]:
        """Copy what envs publish to where the caller sees it; return what went wrong.

        Envs that have failed already, whose faults are `known`, are left out.
        """
        failed = {fault.env_id - self.first for fault in known}
        return self._each(call, self._publish_one, (k for k in indices if k not in failed)).errors

    def _publish_one(self, index: int) -> None:
        env = self.group.envs[index]
        for name, array in () if isinstance(without_restarts(env), MissingEnv) else self._published:
            value = env.get_wrapper_attr(name)
            value = np.asarray(value() if callable(value) else value)
            is_cut = array.dtype.kind in "biu" and value.dtype.kind not in "biu"
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
        """Call a function for each env, or some; what it raises is that env's fault."""
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
        """Reset the envs asked for, each once; one that fails keeps none of the others from it."""
        infos: dict[int, Any] = {}

        def reset(index: int) -> None:
            info = self.group.reset_env(index, seeds[index], options, self._rows.obs)
            if info:  # taken down at once, as another env may use the same dict
                keep_info(infos, info, index, len(self._every))
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
        """Pickle every env; the result is its state, or the text of what is in the way."""

        def save(index: int) -> bytes | str:
            env = without_restarts(self.group.envs[index])
            try:
                saved = SavedEnv(env, index in self.group.ended, self._last_obs(index))
                return dump_env(saved, self.first + index)
            except EnvStateError as error:
                return str(error)

        return self._each("state_dict", save)

    def load_envs(self, pickles: Sequence[bytes]) -> Answer:
        """Put pickled envs in the place of these, which are closed.

        The result of each is whether its episode is over, or the text of what is in the way.
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
        """Put an env in the place of another."""
        if isinstance(old := self.group.envs[index], RestartingEnv):
            old.go_on_with(env, self._last_obs(index), factory)
        else:
            self.group.envs[index] = env

    def reopen(self, env_ids: Sequence[int], factories: Any, observation_mode: Any) -> Answer:
        """Close some envs and make them anew; the result is the faults of those that can't be.

        Args:
            env_ids: Which.
            factories: One for each, or the registry and these, pickled.
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
        """Take over from a worker that is gone: every episode of its envs is over.

        Args:
            reason: What has become of it.
            objects: The last observations' leaves without fixed shape; the others are in memory.
        """
        for leaf, items in zip(self._objects, objects, strict=True):
            leaf.target[:] = items
        for index, env in enumerate(self.group.envs):
            assert isinstance(env, RestartingEnv)
            with contextlib.suppress(BaseException):  # if it can't be reset, its next reset says so
                env.env.reset()
            env.lose(self._last_obs(index), reason)

    def _last_obs(self, index: int) -> Any:
        return take_row(self._layout.observation_space, self._rows.obs.take(np.array([index])), 0)


def close_envs(envs: Sequence[Any]) -> None:
    """Close envs, also those after one that fails to: no caller is left to be told."""
    for env in envs:
        with contextlib.suppress(BaseException):
            without_restarts(env).close()
