"""A chunk of a pool's envs, as a worker (or the caller, for its own share) steps it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium import Env

from vecenv.core.autoreset import EnvGroup, StepRows
from vecenv.core.batches import take_row
from vecenv.core.env_state import SavedEnv, dump_env, load_env
from vecenv.core.errors import EnvStateError, ObservationError
from vecenv.core.faults import EnvFault
from vecenv.core.restarts import RestartingEnv, without_restarts
from vecenv.timing.stamps import EnvStamps
from vecenv.workers.actions import ActionReader
from vecenv.workers.arena import Arena
from vecenv.workers.info_columns import ColumnWriter, Noted
from vecenv.workers.layout import HAS_ERROR, HAS_MESSAGE, Leaf
from vecenv.workers.messages import Answer, Layout, ResetRequest, SlotLeaves
from vecenv.workers.rows import object_rows, reward_bits, slot_rows, unwritten

__all__ = ["Chunk", "Outcome", "run_here"]

# Status bits, form of the infos, and what has to be said beyond them (None for nothing).
Outcome = tuple[int, int, Answer | None]
# Rows of a slot, and how to mark rewards as unwritten: a function and its argument.
_Slot = tuple[StepRows, Callable[[int], None], int]
_RESERVED = ("reset", "step", "close")


class Chunk:
    """Envs first, ..., last - 1 of a pool and their places in shared memory.

    Attributes:
        first, last: Which envs these are.
        group: The envs, with the rules of autoreset.
        has_objects: Whether some leaves of the observations have no fixed shape.
        announce: Called with the id of the env that is about to be reset or called.
        is_stamped: Whether steps are being stamped; the writer of a step's results then calls
            `group.mark_done`.
        run_each: Calls a function with indices of envs and returns the results, each in the thread
            that owns the env; the function must not raise.

    Args:
        envs: The envs.
        worker: Whose they are; -1 for the caller.
        first: Id of the first.
        layout: Where everything is.
        arena: The shared memory.
        lanes: Threads that own the envs; None if the thread that calls does.
    """

    def __init__(
        self,
        envs: list[Env],
        worker: int,
        first: int,
        layout: Layout,
        arena: Arena,
        lanes: Any = None,
    ) -> None:
        self._lanes = lanes
        self.run_each: Callable[[Callable[[int], Any], Sequence[int]], list[Any]] = (
            run_here if lanes is None else lanes.run_each
        )
        self.worker = worker
        self.first, self.last = first, first + len(envs)
        self.columns = ColumnWriter(arena.view, first, self.last, layout.row_forms)
        self.group = EnvGroup(envs, layout.autoreset_mode, self.columns.note)
        self.announce: Callable[[int], None] = lambda env_id: None
        self.is_stamped = False
        self._space = layout.observation_space
        self._arena = arena
        own = slot_rows(arena, self._space, layout.own, first, self.last)
        self._slots: dict[int, _Slot] = {0: _slot(own)}
        self._own = own
        self._slot_leaves: dict[int, SlotLeaves] = {}
        self._objects = list(object_rows(own.obs))
        self.has_objects = bool(self._objects)
        self.actions: ActionReader | None = None
        if layout.actions is not None:
            self.actions = ActionReader(
                layout.action_space, layout.actions, arena.view, first, self.last
            )
        # What is copied into the ring with a row without infos, and with one that has some.
        self.bare_leaves = self.ring_leaves = arena.view(layout.ring_leaves)
        self._published = [
            (name, arena.view(leaf)[first : self.last]) for name, leaf in layout.published.items()
        ]

    def learn(self, updates: dict[str, Any]) -> None:
        """Take notice of new slots, forms of infos with their columns, and ring leaves."""
        self._slot_leaves.update(updates.get("slots", ()))
        if "ring_leaves" in updates:  # first: threads write columns as soon as they know them
            self.ring_leaves = self._arena.view(updates["ring_leaves"])
        self.columns.add(
            updates.get("columns", ()), updates.get("forms", ()), updates.get("first_form", 0)
        )
        if "stamps" in updates:
            self._stamp(updates["stamps"])

    def _stamp(self, leaves: tuple[Leaf, Leaf] | None) -> None:
        """Stamp the envs' steps into the rings and counts given; None ends it."""
        self.is_stamped = leaves is not None
        if leaves is None:
            self.group.stamp(None)
            return
        rings, counts = map(self._arena.view, leaves)
        self.group.stamp(EnvStamps(rings, counts).part(self.first, self.last))

    def rows(self, slot: int) -> StepRows:
        """Return the rows of this chunk in a slot."""
        return self._slot(slot)[0]

    def _slot(self, slot: int) -> _Slot:
        found = self._slots.get(slot)
        if found is None:
            leaves = self._slot_leaves[slot]
            rows = slot_rows(self._arena, self._space, leaves, self.first, self.last)
            found = self._slots[slot] = _slot(rows)
        return found

    def step_all(self, slot: int, actions: Iterable[Any] | None = None) -> Outcome:
        """Step every env once; `actions` are given only if they came by message."""
        if actions is None:
            assert self.actions is not None
            actions = self.actions.all()
        if self._lanes is not None:
            return self._step_in_lanes(slot, list(actions))
        rows, mark_rewards, mark = self._slots.get(slot) or self._slot(slot)
        mark_rewards(mark)
        if slot:
            rows.has_ends = True  # it is the caller's memory, with anything in it
        faults: Sequence[EnvFault] = ()
        try:
            infos = self.group.step(actions, rows)
        except BaseException as error:
            infos, faults = self._step_rest(error, list(actions), rows)
        if self._published:
            faults = [*faults, *self._publish(range(len(self.group.envs)), "step")]
        if self.is_stamped and self.worker < 0:  # the caller goes on with other things
            self.group.mark_done(-1)
        if infos or faults or self._objects:
            return self.outcome(infos, faults)
        return 0, 0, None

    def _step_in_lanes(self, slot: int, actions: list[Any]) -> Outcome:
        """Step every env once, each in its own thread."""
        rows, mark_rewards, mark = self._slots.get(slot) or self._slot(slot)
        mark_rewards(mark)
        rows.has_ends = True
        count = min(len(actions), len(self.group.envs))  # fewer if they have not been checked
        infos: dict[int, Noted] = {}
        faults: list[EnvFault] = []

        def step(index: int) -> tuple[dict[int, Noted], Sequence[EnvFault]]:
            result = self.step_env(index, actions[index], slot)
            if self.is_stamped:
                self.group.mark_done(index)
            return result

        results = self.run_each(step, range(count))
        for env_infos, env_faults in results:
            faults += env_faults
            infos.update(env_infos)
        return self.outcome(infos, faults)

    def _fault(self, error: BaseException, index: int, call: str, action: Any = None) -> EnvFault:
        """Describe what an env has raised; but let Ctrl-C through, which workers ignore."""
        if self.worker < 0 and isinstance(error, KeyboardInterrupt):
            raise error
        return EnvFault.of(error, self.first + index, self.worker, call, action)

    def _step_rest(
        self, error: BaseException, actions: list[Any], rows: StepRows
    ) -> tuple[dict[int, Noted], list[EnvFault]]:
        """Step the envs that come after one that has raised, so that none is left out."""
        faults: list[EnvFault] = []
        count = len(self.group.envs)
        while True:
            index = getattr(error, "env_index", 0)
            action = actions[index] if index < len(actions) else None
            faults.append(self._fault(error, index, "step", action))
            if index + 1 >= count or index + 1 >= len(actions):
                return {}, faults
            try:
                rest = range(index + 1, count)
                return self.group.step(actions[index + 1 :], rows, rest), faults
            except BaseException as next_error:
                error = next_error

    def step_env(
        self, index: int, action: Any, slot: int = 0
    ) -> tuple[dict[int, Noted], Sequence[EnvFault]]:
        """Step one env of the chunk; threads may do this at the same time for different envs."""
        faults: Sequence[EnvFault] = ()
        infos: dict[int, Noted] = {}
        try:
            infos = self.group.step((action,), self.rows(slot), (index,))
        except BaseException as error:
            faults = [self._fault(error, index, "step", action)]
        if self._published:
            faults = [*faults, *self._publish((index,), "step")]
        return infos, faults

    def step_one(self, index: int, action: Any) -> Outcome:
        """Step one env into the pool's own rows, for a row of the ring."""
        infos, faults = self.step_env(index, action)
        if not infos and not faults and not self._objects:
            return 0, 0, None
        form, rest = 0, []
        if infos:
            try:
                form, rest = self.columns.split(infos[index])
            except Exception as error:
                faults = [*faults, self._fault(error, index, "step", action)]
        if not rest and not faults and not self._objects:
            return 0, form, None
        objects = [[leaf.target[index]] for leaf in self._objects]
        answer = Answer(None, rest, objects, faults)
        return HAS_MESSAGE | (HAS_ERROR if faults else 0), form, answer

    def failed(self, error: BaseException, index: int, call: str) -> Outcome:
        """Report what went wrong before an env was called."""
        return HAS_MESSAGE | HAS_ERROR, 0, Answer(errors=[self._fault(error, index, call)])

    def outcome(self, infos: dict[int, Noted], faults: Sequence[EnvFault]) -> Outcome:
        """Say which forms the infos have, and put what is not in columns into an answer."""
        form, rest = 0, {}
        if infos:
            try:
                form, rest = self.columns.pack(infos)
            except Exception as error:
                faults = [*faults, EnvFault.of(error, -1, self.worker, "infos")]
        if not rest and not faults and not self._objects:
            return 0, form, None
        answer = Answer(None, rest, [leaf.target for leaf in self._objects], faults)
        return HAS_MESSAGE | (HAS_ERROR if faults else 0), form, answer

    def reset(self, request: ResetRequest) -> Outcome:
        """Reset the envs asked for, each once; one that fails keeps none of the others from it."""
        count = len(self.group.envs)
        mask = request.reset_mask
        wanted = list(range(count)) if mask is None else np.flatnonzero(mask).tolist()
        infos: dict[int, Noted] = {}

        def reset(index: int) -> EnvFault | None:
            self.announce(self.first + index)
            try:
                if request.drop and self._lanes is not None:
                    self._lanes.drop(index)
                seed = request.seeds[index]
                info = self.group.reset_env(index, seed, request.options, self._own.obs)
                if info:  # taken down at once, as another env may use the same dict
                    self.group.enter(infos, info, index, count)
            except BaseException as error:
                return self._fault(error, index, "reset")
            if self.is_stamped:
                self.group.mark_done(index)
            return None

        faults = [fault for fault in self.run_each(reset, wanted) if fault is not None]
        if self._published:
            faults += self._publish_each(range(count), "reset")
        return self.outcome(infos, faults)

    def _publish_each(self, indices: Sequence[int], call: str) -> list[EnvFault]:
        """Do what `_publish` does, each env in its own thread."""
        found = self.run_each(lambda index: self._publish((index,), call), indices)
        return [fault for faults in found for fault in faults]

    def _publish(self, indices: Iterable[int], call: str) -> list[EnvFault]:
        """Copy what envs publish to where the caller sees it; return what went wrong."""
        faults: list[EnvFault] = []
        for index in indices:
            for name, array in self._published:
                try:
                    value = self.group.envs[index].get_wrapper_attr(name)
                    array[index] = value() if callable(value) else value
                except BaseException as error:
                    faults.append(self._fault(error, index, call))
        return faults

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
        """Call a method of every env, or read an attribute."""
        if name in _RESERVED:
            error = ValueError(
                f"Trying to call function `{name}` with `call`, use `{name}` directly instead."
            )
            return (
                HAS_ERROR,
                0,
                Answer(errors=[EnvFault.of(error, self.first, self.worker, "call")]),
            )

        def read(index: int) -> Any:
            value = without_restarts(self.group.envs[index]).get_wrapper_attr(name)
            return value(*args, **kwargs) if callable(value) else value

        return self._each("call", read)

    def set_attr(self, name: str, values: Sequence[Any]) -> Outcome:
        """Set an attribute of every env."""

        def write(index: int) -> None:
            without_restarts(self.group.envs[index]).set_wrapper_attr(name, values[index])

        return self._each("set_attr", write)

    def save_envs(self) -> Outcome:
        """Pickle every env; the result is its state, or the text of what is in the way."""

        def save(index: int) -> bytes | str:
            env = without_restarts(self.group.envs[index])
            saved = SavedEnv(env, index in self.group.ended, self._own_row(index))
            try:
                return dump_env(saved, self.first + index)
            except EnvStateError as error:
                return str(error)

        return self._each("state_dict", save)

    def load_envs(self, pickles: Sequence[bytes]) -> Outcome:
        """Put pickled envs in the place of these, which are closed.

        The result of each is whether its episode is over, or the text of what is in the way.
        """

        def load(index: int) -> bool | str:
            envs, env = self.group.envs, without_restarts(self.group.envs[index])
            spaces = env.observation_space, env.action_space
            try:
                saved = load_env(pickles[index], self.first + index, *spaces)
                self._own.obs.write(index, saved.obs)
            except (EnvStateError, ObservationError) as error:
                return str(error)
            if isinstance(restarting := envs[index], RestartingEnv):
                restarting.go_on_with(saved.env, saved.obs)
            else:
                envs[index] = saved.env
            (self.group.ended.add if saved.is_over else self.group.ended.discard)(index)
            with contextlib.suppress(Exception):  # its results are not asked for any more
                env.close()
            return saved.is_over

        status, form, answer = self._each("load_state_dict", load)
        assert answer is not None
        faults = [*answer.errors]
        if self._published:
            faults += self._publish_each(range(len(self.group.envs)), "load_state_dict")
        objects = [leaf.target for leaf in self._objects]
        status |= HAS_ERROR if faults else 0
        return status, form, answer._replace(objects=objects, errors=faults)

    def _each(self, call: str, function: Callable[[int], Any]) -> Outcome:
        def attempt(index: int) -> tuple[Any, EnvFault | None]:
            self.announce(self.first + index)
            try:
                return function(index), None
            except BaseException as error:
                return None, self._fault(error, index, call)

        pairs = self.run_each(attempt, range(len(self.group.envs)))
        faults = [fault for _, fault in pairs if fault is not None]
        results = [result for result, fault in pairs if fault is None]
        return HAS_ERROR if faults else 0, 0, Answer(results, errors=faults)

    def lose_episodes(self, reason: str) -> None:
        """Take over from a worker that is gone: every episode of its envs is over."""

        def lose(index: int) -> None:
            restarting = self.group.envs[index]
            assert isinstance(restarting, RestartingEnv)
            obs = None
            with contextlib.suppress(BaseException):  # if it can't be reset, its next reset says so
                obs, _ = restarting.env.reset()
            restarting.lose(obs if self.has_objects else self._own_row(index), reason)

        self.run_each(lose, range(len(self.group.envs)))

    def _own_row(self, index: int) -> Any:
        """Return a copy of the last observation in the pool's own row of one env."""
        return take_row(self._space, self._own.obs.take(np.array([index])), 0)

    def close(self) -> None:
        """Close the envs, also those after one that fails to, and let go of them."""

        def close(index: int) -> None:
            with contextlib.suppress(BaseException):  # no caller is left to be told
                without_restarts(self.group.envs[index]).close()
            if self.worker >= 0:
                self.group.envs[index] = None  # type: ignore[call-overload] # ends in its thread

        self.run_each(close, range(len(self.group.envs)))


def run_here(function: Callable[[int], Any], indices: Sequence[int]) -> list[Any]:
    """Do what `Lanes.run_each` does where the calling thread owns all envs."""
    return [function(index) for index in indices]


def _slot(rows: StepRows) -> _Slot:
    bits = reward_bits(rows.rewards)
    return rows, bits.fill, unwritten(bits)
