"""A chunk of a pool's envs, as a worker (or the caller, for its own share) steps it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium import Env

from vecenv.autoreset import EnvGroup, StepRows
from vecenv.shm.action_rows import ActionReader
from vecenv.shm.arena import Arena
from vecenv.shm.columns import ColumnWriter, Noted
from vecenv.shm.faults import EnvFault
from vecenv.shm.guard import unguarded
from vecenv.shm.layout import HAS_ERROR, HAS_MESSAGE, Leaf
from vecenv.shm.messages import Answer, Layout, ResetRequest, SlotLeaves
from vecenv.shm.slots import object_rows, reward_bits, slot_rows, unwritten
from vecenv.timing.stamps import EnvStamps

__all__ = ["Chunk", "Outcome"]

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
    """

    def __init__(
        self, envs: list[Env], worker: int, first: int, layout: Layout, arena: Arena
    ) -> None:
        self.worker = worker
        self.first, self.last = first, first + len(envs)
        self.columns = ColumnWriter(arena.view, first, self.last, layout.row_forms)
        self.group = EnvGroup(envs, layout.autoreset_mode, self.columns.note)
        self.announce: Callable[[int], None] = lambda env_id: None
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

    def learn(self, news: dict[str, Any]) -> None:
        """Take notice of new slots, columns and ring leaves."""
        self._slot_leaves.update(news.get("slots", ()))
        if "ring_leaves" in news:  # first, as threads may write columns as soon as they know them
            self.ring_leaves = self._arena.view(news["ring_leaves"])
        self.columns.add(news.get("columns", ()), news.get("forms", ()))
        if "stamps" in news:
            self._stamp(news["stamps"])

    def _stamp(self, leaves: tuple[Leaf, Leaf] | None) -> None:
        """Stamp the envs' steps into the rings and counts given; None ends it."""
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
        rows, mark_rewards, mark = self._slots.get(slot) or self._slot(slot)
        mark_rewards(mark)
        if slot:
            rows.has_ends = True  # it is the caller's memory: who knows what is in it
        faults: Sequence[EnvFault] = ()
        try:
            infos = self.group.step(actions, rows)
        except Exception as error:
            infos, faults = self._step_rest(error, list(actions), rows)
        if self._published:
            self._publish(range(len(self.group.envs)))
        if infos or faults or self._objects:
            return self.outcome(infos, faults)
        return 0, 0, None

    def mark_unwritten(self, slot: int) -> None:
        """Mark the rewards of a slot, so that it shows which envs have not been stepped yet."""
        _, mark_rewards, mark = self._slot(slot)
        mark_rewards(mark)

    def _step_rest(
        self, error: Exception, actions: list[Any], rows: StepRows
    ) -> tuple[dict[int, Noted], list[EnvFault]]:
        """Step the envs that come after one that has raised, so that none is left out."""
        faults: list[EnvFault] = []
        count = len(self.group.envs)
        while True:
            index = getattr(error, "env_index", 0)
            action = actions[index] if index < len(actions) else None
            faults.append(EnvFault.of(error, self.first + index, self.worker, "step", action))
            if index + 1 >= count or index + 1 >= len(actions):
                return {}, faults
            try:
                rest = range(index + 1, count)
                return self.group.step(actions[index + 1 :], rows, rest), faults
            except Exception as next_error:
                error = next_error

    def step_env(
        self, index: int, action: Any, slot: int = 0
    ) -> tuple[dict[int, Noted], Sequence[EnvFault]]:
        """Step one env of the chunk; threads may do this at the same time for different envs."""
        faults: Sequence[EnvFault] = ()
        infos: dict[int, Noted] = {}
        try:
            infos = self.group.step((action,), self.rows(slot), (index,))
        except Exception as error:
            faults = [EnvFault.of(error, self.first + index, self.worker, "step", action)]
        if self._published:
            self._publish((index,))
        return infos, faults

    def step_one(self, index: int, action: Any) -> Outcome:
        """Step one env into the pool's own rows, for a row of the ring."""
        infos, faults = self.step_env(index, action)
        if not infos and not faults and not self._objects:
            return 0, 0, None
        form, rest = self.columns.split(infos[index]) if infos else (0, [])
        if not rest and not faults and not self._objects:
            return 0, form, None
        objects = [[leaf.target[index]] for leaf in self._objects]
        answer = Answer(None, rest, objects, faults)
        return HAS_MESSAGE | (HAS_ERROR if faults else 0), form, answer

    def outcome(self, infos: dict[int, Noted], faults: Sequence[EnvFault]) -> Outcome:
        """Say which forms the infos have, and put what is not in columns into an answer."""
        form, rest = self.columns.pack(infos) if infos else (0, {})
        if not rest and not faults and not self._objects:
            return 0, form, None
        answer = Answer(None, rest, [leaf.target for leaf in self._objects], faults)
        return HAS_MESSAGE | (HAS_ERROR if faults else 0), form, answer

    def reset(self, request: ResetRequest) -> Outcome:
        """Reset the envs asked for; those after one that has raised are reset too."""
        count = len(self.group.envs)
        wanted = np.ones(count, np.bool_) if request.reset_mask is None else request.reset_mask
        faults: list[EnvFault] = []
        infos: dict[int, Noted] = {}
        seeds = _AnnouncedSeeds(request.seeds, self)
        while wanted.any():
            try:
                infos = self.group.reset(seeds, request.options, wanted, self._own.obs)
                break
            except Exception as error:
                index = getattr(error, "env_index", 0)
                faults.append(EnvFault.of(error, self.first + index, self.worker, "reset"))
                wanted = wanted & (np.arange(count) > index)
        if self._published:
            self._publish(range(count))
        return self.outcome(infos, faults)

    def _publish(self, indices: Iterable[int]) -> None:
        for name, array in self._published:
            for index in indices:
                value = self.group.envs[index].get_wrapper_attr(name)
                array[index] = value() if callable(value) else value

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
            value = unguarded(self.group.envs[index]).get_wrapper_attr(name)
            return value(*args, **kwargs) if callable(value) else value

        return self._each("call", read)

    def set_attr(self, name: str, values: Sequence[Any]) -> Outcome:
        """Set an attribute of every env."""

        def write(index: int) -> None:
            unguarded(self.group.envs[index]).set_wrapper_attr(name, values[index])

        return self._each("set_attr", write)

    def _each(self, call: str, function: Callable[[int], Any]) -> Outcome:
        results, faults = [], []
        for index in range(len(self.group.envs)):
            self.announce(self.first + index)
            try:
                results.append(function(index))
            except Exception as error:
                faults.append(EnvFault.of(error, self.first + index, self.worker, call))
        return HAS_ERROR if faults else 0, 0, Answer(results, errors=faults)

    def own_row(self, index: int) -> Any:
        """Return a copy of the last observation in the pool's own row of one env."""
        batch = self._own.obs.take(np.array([index]))
        return _first(batch)

    def close(self) -> None:
        """Close the envs, also those after one that fails to."""
        for env in self.group.envs:
            with contextlib.suppress(Exception):  # nobody is left to be told
                unguarded(env).close()


def _slot(rows: StepRows) -> _Slot:
    bits = reward_bits(rows.rewards)
    return rows, bits.fill, unwritten(bits)


def _first(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: _first(part) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_first(part) for part in batch)
    return batch[0]


class _AnnouncedSeeds(Sequence[int | None]):
    """Seeds that announce the env for which they are being read."""

    def __init__(self, seeds: Sequence[int | None], chunk: Chunk) -> None:
        self._seeds = seeds
        self._chunk = chunk

    def __getitem__(self, index: Any) -> Any:
        self._chunk.announce(self._chunk.first + index)
        return self._seeds[index]

    def __len__(self) -> int:
        return len(self._seeds)
