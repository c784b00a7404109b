"""Sequences, frame stacks and goals from the episodes of a ring."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from gymnasium import spaces

from buffers.core.arguments import MAX_COUNT, as_tensor, check_count, read_columns, read_number
from buffers.core.errors import BufferMisuseError
from buffers.core.memory import check_fits
from buffers.core.sequences import SequenceBatch, SequenceOptions, memory_of, read_states
from buffers.episodic.batches import BatchShaper, GoalBatch, StackBatch
from buffers.episodic.layout import FIRST_DRAWABLE, FIRST_START, NUM_DRAWABLE, NUM_STARTS
from buffers.episodic.samplers import (
    STRATEGIES,
    CompiledSampler,
    TorchSampler,
    is_by_episode,
)
from buffers.episodic.storage import EpisodicStorage

__all__ = ["EpisodicDraws", "GoalFunction", "SequenceMemory"]

GoalFunction = Callable[[Any, Any, Any], Any]

_LOW = 0xFFFFFFFF
_NO_MATTER_BYTES = 1 << 26  # that may be there without looking
_COMMON = ("actions", "rewards", "terminations", "truncations")
_COMPUTED = {"compute_reward": "rewards", "compute_terminated": "terminations"}


_ANY_STEP = SequenceOptions(1, 0, 1, True)


class SequenceMemory(NamedTuple):
    """What the ring was when sequences were drawn."""

    owner: object
    first_row: int  # of the ring, the oldest then
    num_evicted: int
    num_restored: int


class EpisodicDraws:
    """Draws what is more than pairs; the arguments are those of `EpisodicReplayBuffer`."""

    def __init__(
        self,
        storage: EpisodicStorage,
        sampler: CompiledSampler | TorchSampler,
        shaper: BatchShaper,
    ):
        self._storage, self._sampler, self._shaper = storage, sampler, shaper
        self._num_rows = storage.layout.num_rows

    def sequences(
        self,
        batch_size: int,
        options: SequenceOptions,
        over: str,
        initial_states: Sequence[str] | str,
        columns: Iterable[str] | None,
    ) -> SequenceBatch:
        """Runs of steps."""
        length, known = options.length, self._storage.layout.row.extras
        names = read_states(initial_states, known)
        chosen = read_columns(columns, (*SequenceBatch._fields, *known))
        self._check_room(batch_size, 3 * length, f"sequences of {length} steps")
        first = self._first_rows(batch_size, options, over)
        places = torch.arange(length, device=first.device)
        rows = (first[:, None] + places) % self._num_rows
        remaining = self._headers(first)[:, 1] & _LOW
        mask = places < remaining[:, None]
        words = self._rows(torch.where(mask, rows, -1))
        following = torch.where(mask, (rows + 1) % self._num_rows, -1)
        extras = self._shaper.extras(words)
        states = {name: extras.pop(name)[:, 0] for name in names}
        found = self._chosen(
            chosen, words, extras, "boundaries", "steps",
            obs=lambda: self._shaper.obs(words), next_obs=lambda: self._observations(following),
        )  # fmt: skip
        steps = self._shaper.fields(words, "steps")["steps"]
        return SequenceBatch._made_of(
            {
                **found,
                "steps": steps,
                "mask": mask,
                **options.masks(mask, steps),
                "indices": torch.where(mask, rows, -1),
                "weights": None,
                "initial_states": states,
                "memory": self._sequence_memory(),
            }
        )

    def _chosen(
        self,
        chosen: frozenset[str] | None,
        words: torch.Tensor,
        extras: dict[str, torch.Tensor],
        *others: str,
        **observations: Callable[[], Any],
    ) -> dict[str, Any]:
        """Columns of a batch by name: those chosen, or all; others are not gathered.

        Args:
            chosen: Their names; None for all.
            words: Whole rows int64 (*K, W).
            extras: Extra columns of these.
            others: Columns of these that not all batches have.
            observations: What gathers observations, by name.
        """
        names = [name for name in (*_COMMON, *others) if chosen is None or name in chosen]
        found = self._shaper.fields(words, *names) if names else {}
        found |= {
            name: gather()
            for name, gather in observations.items()
            if chosen is None or name in chosen
        }
        kept = {name: extras[name] for name in extras if chosen is None or name in chosen}
        return {**found, "extras": kept}

    def _sequence_memory(self) -> SequenceMemory:
        storage = self._storage
        evicted, restored = storage.num_evicted, storage.num_restored
        return SequenceMemory(self, storage.count("first_row"), evicted, restored)

    def check_sequences(self, batch: Any) -> SequenceMemory:
        """What is known of a batch of sequences; raise BufferMisuseError if it is not ours."""
        memory = memory_of(batch, self)
        if memory.num_restored != self._storage.num_restored:
            raise BufferMisuseError("batch was drawn before a state was loaded; draw anew")
        return memory

    def alive_steps(self, batch: SequenceBatch, memory: SequenceMemory) -> torch.Tensor:
        """int64 (K,): the steps of a batch (B * L) whose rows hold them still."""
        rows = batch.indices.reshape(-1)
        num_evicted = self._storage.num_evicted - memory.num_evicted
        is_there = (rows - memory.first_row) % self._num_rows >= num_evicted
        return (is_there & (rows >= 0)).nonzero()[:, 0]

    def stacks(
        self, batch_size: int, num_frames: int, over: str, columns: Iterable[str] | None
    ) -> StackBatch:
        """Steps with the observations before them."""
        known = self._storage.layout.row.extras
        chosen = read_columns(columns, (*StackBatch._fields, *known))
        num_frames = check_count("num_frames", num_frames, MAX_COUNT)
        self._check_room(batch_size, 3 * num_frames, f"stacks of {num_frames} frames")
        rows = self._first_rows(batch_size, _ANY_STEP, over)
        words = self._rows(rows)
        steps = words[:, 0] >> 32 & _LOW
        back = torch.arange(num_frames - 1, -1, -1, device=rows.device)
        ages = torch.minimum(back, steps[:, None])
        next_ages = torch.minimum(back - 1, steps[:, None])
        found = self._chosen(
            chosen, words, self._shaper.extras(words),
            obs=lambda: self._observations((rows[:, None] - ages) % self._num_rows),
            next_obs=lambda: self._observations((rows[:, None] - next_ages) % self._num_rows),
        )  # fmt: skip
        return StackBatch._made_of({**found, **self._shaper.fields(words, "steps")})

    def goals(
        self,
        batch_size: int,
        strategy: str,
        relabel_ratio: float,
        discount: float,
        over: str,
        columns: frozenset[str] | None,
    ) -> GoalBatch:
        """Steps and the observations that are to give their goals; nothing is replaced yet."""
        if not isinstance(strategy, str) or strategy not in STRATEGIES:
            raise BufferMisuseError(
                f"strategy is {strategy!r}, expected one of {sorted(STRATEGIES)}"
            )
        relabel_ratio = read_number("relabel_ratio", relabel_ratio)
        discount = read_number("discount", discount)
        if discount != 1 and strategy not in ("future", "bound"):
            raise BufferMisuseError(
                f"discount is {discount} with strategy={strategy!r}; it is a law of distances, "
                "which 'future' and 'bound' have"
            )
        self._check_room(batch_size, 5, "goals")
        if strategy == "bound":
            rows = self._rows_with_room(batch_size, over)
        else:
            rows = self._first_rows(batch_size, _ANY_STEP, over)
        goals, relabelled = self._sampler.draw_goals(rows, strategy, relabel_ratio, discount)
        has_goals = columns is None or "goal_obs" in columns
        words, goal_words = self._rows(rows), (self._rows if has_goals else self._headers)(goals)
        found = self._chosen(
            columns, words, self._shaper.extras(words),
            obs=lambda: self._shaper.obs(words),
            next_obs=lambda: self._observations((rows + 1) % self._num_rows),
            goal_obs=lambda: self._shaper.obs(goal_words),
        )  # fmt: skip
        offsets = (goal_words[:, 0] >> 32) - (words[:, 0] >> 32)
        return GoalBatch._made_of({**found, "goal_offsets": offsets, "relabelled": relabelled})

    def relabelling(
        self,
        achieved: str,
        desired: str,
        compute_reward: GoalFunction | None,
        compute_terminated: GoalFunction | None,
        columns: Iterable[str] | None,
        pass_tensors: bool,
    ) -> Relabelling:
        """How goals are put into batches with some columns."""
        row = self._storage.layout.row
        chosen = read_columns(columns, (*GoalBatch._fields, *row.extras))
        space = row.observation_space
        has_goals = isinstance(space, spaces.Dict) and {achieved, desired} <= set(space.spaces)
        functions = {"compute_reward": compute_reward, "compute_terminated": compute_terminated}
        given = {name: compute for name, compute in functions.items() if compute is not None}
        if given and not has_goals:
            raise BufferMisuseError(
                f"{next(iter(given))} needs a Dict observation space with the keys {achieved!r} "
                f"and {desired!r}; leave it out and use goal_obs"
            )
        given = {
            _COMPUTED[name]: (name, compute)
            for name, compute in given.items()
            if chosen is None or _COMPUTED[name] in chosen
        }
        keys = (achieved, desired) if has_goals else None
        return Relabelling(keys, given, chosen, row.extras, pass_tensors)

    def require_episode(self) -> None:
        """Raise BufferMisuseError if no episode is held, though some may be open."""
        if not self._storage.count("num_episodes"):
            raise BufferMisuseError(
                "the buffer holds no whole episode yet, and only whole ones are drawn from; add "
                "steps until an episode ends, or end open ones by cut_episodes()"
            )

    def _first_rows(self, batch_size: int, options: SequenceOptions, over: str) -> torch.Tensor:
        batch_size = check_count("batch_size", batch_size, MAX_COUNT)
        by_episode = is_by_episode(over)
        if not self._sampler.windows.prepare(options):
            self.require_episode()
            held = self._storage.count("num_episodes")
            raise BufferMisuseError(
                f"none of the {held} episodes has {options.needed_at_start} steps; add longer "
                "ones, or ask for shorter sequences"
            )
        return self._sampler.draw_windows(batch_size, by_episode)

    def _rows_with_room(self, batch_size: int, over: str) -> torch.Tensor:
        """Rows int64 (B,) of steps with a later one in their bound, as `sample` draws them."""
        batch_size = check_count("batch_size", batch_size, MAX_COUNT)
        by_episode, storage = is_by_episode(over), self._storage
        if not storage.count("num_starts"):
            self.require_episode()
            raise BufferMisuseError(
                f"the buffer has {storage.count('num_steps')} steps, but none with a later one in "
                "its bound; add episodes of two steps or more first"
            )
        tables = storage.device_tables
        first, count = tables["counters"][FIRST_START], tables["counters"][NUM_STARTS]
        uniforms = self._sampler.uniforms(2 * batch_size).view(2, -1)
        if by_episode:
            drawable = tables["drawable"]
            number = (uniforms[0] * tables["counters"][NUM_DRAWABLE]).long()
            slots = drawable[(tables["counters"][FIRST_DRAWABLE] + number) % len(drawable)].long()
            first, count = tables["episodes"].index_select(0, slots)[:, 2:].unbind(1)
        places = (first + (uniforms[1] * count).long()) % len(tables["starts"])
        return tables["starts"].index_select(0, places).long()

    def _check_room(self, batch_size: int, rows_each: int, what: str) -> None:
        """Raise BufferMemoryError if a batch takes more memory than there is, intermediates too."""
        count = check_count("batch_size", batch_size, MAX_COUNT)
        needed = 8 * count * rows_each * self._storage.layout.row.num_words
        if needed > _NO_MATTER_BYTES:
            advice = "draw fewer at once"
            check_fits(f"a batch of {count} {what}", needed, self._storage.device, advice)

    def _headers(self, rows: torch.Tensor) -> torch.Tensor:
        return self._storage.rows[:, :2].index_select(0, rows)

    def _rows(self, chosen: torch.Tensor) -> torch.Tensor:
        out = self._shaper.empty_words(*chosen.shape)
        return self._sampler.gather(chosen, out, bare=False)

    def _observations(self, chosen: torch.Tensor) -> Any:
        out = self._shaper.empty_words(*chosen.shape, bare=True)
        self._sampler.gather(chosen, out, bare=True)
        return self._shaper.obs(out, bare=True)


class Relabelling(NamedTuple):
    """What to do with the goals of a batch."""

    keys: tuple[str, str] | None  # of the goals reached and wanted, if the space has such
    functions: dict[str, tuple[str, GoalFunction]]  # their names too, by the columns they make
    chosen: frozenset[str] | None  # columns, None for all
    extras: list[str]
    pass_tensors: bool  # to the functions

    def needed(self) -> frozenset[str] | None:
        """The columns that this and the caller read."""
        if self.chosen is None or self.keys is None:
            return self.chosen
        needed = self.chosen
        if self.functions:
            needed |= {"next_obs", *self.extras}
        return needed | {"goal_obs"} if {"obs", "next_obs"} & needed else needed

    def apply(self, batch: GoalBatch) -> GoalBatch:
        """Put the goals into the observations, and what follows; with the columns chosen."""
        if self.keys is not None:
            achieved, desired = self.keys
            for name in ("obs", "next_obs"):
                if (obs := getattr(batch, name, None)) is not None:
                    goal = batch.goal_obs[achieved]
                    _replace(obs[desired], goal, batch.relabelled, (achieved, desired))
            for name, (caller, compute) in self.functions.items():
                read = batch.next_obs[achieved], batch.next_obs[desired], dict(batch.extras)
                column = getattr(batch, name)
                made = _computed(caller, compute(*_copied(read, self.pass_tensors)), column)
                column.copy_(torch.where(batch.relabelled, made, column))
        if self.chosen is None:
            return batch
        kept = {*self.chosen, "goal_offsets", "relabelled"}
        contents = {name: part for name, part in batch._contents().items() if name in kept}
        contents["extras"] = {name: batch.extras[name] for name in batch.extras if name in kept}
        return GoalBatch._made_of(contents)


def _replace(target: Any, goal: Any, mask: torch.Tensor, names: tuple[str, str]) -> None:
    """Copy goals (B, ...), nested or not, where the mask (B,) says so."""
    if isinstance(target, dict | tuple) or isinstance(goal, dict | tuple):
        keys = list(target) if isinstance(target, dict) else range(len(target))
        if type(target) is not type(goal) or len(goal) != len(target):
            raise BufferMisuseError(
                f"{names[0]} and {names[1]} are nested differently; they must be alike to be "
                "exchanged"
            )
        for key in keys:
            _replace(target[key], goal[key], mask, (f"{names[0]}[{key!r}]", f"{names[1]}[{key!r}]"))
        return
    if target.shape != goal.shape:
        raise BufferMisuseError(
            f"{names[0]} has shape {tuple(goal.shape)}, but {names[1]} {tuple(target.shape)}; they "
            "must be alike to be exchanged"
        )
    target.copy_(torch.where(mask.view(-1, *[1] * (goal.ndim - 1)), goal, target))


def _copied(part: Any, as_tensors: bool) -> Any:
    """Tensors, nested or not, as arrays or tensors of a function's own, which it may change."""
    if isinstance(part, Mapping):
        return {key: _copied(inner, as_tensors) for key, inner in part.items()}
    if isinstance(part, tuple):
        return tuple(_copied(inner, as_tensors) for inner in part)
    return part.clone() if as_tensors else part.cpu().numpy().copy()


def _computed(name: str, made: Any, column: torch.Tensor) -> torch.Tensor:
    """What a function of the user's returned, as one number per step."""
    made = as_tensor(f"what {name} returned", made)
    if made.shape != column.shape:
        raise BufferMisuseError(
            f"{name} returned shape {tuple(made.shape)}, expected {tuple(column.shape)}: one "
            "number per step; of a function f of single steps pass "
            "`lambda achieved, desired, _: [f(a, d, {}) for a, d in zip(achieved, desired)]`"
        )
    if (made.is_floating_point() or made.is_complex()) and not made.isfinite().all():
        raise BufferMisuseError(
            f"{name} returned {made[~made.isfinite()][0]}, expected finite numbers"
        )
    if column.dtype is torch.bool and not (is_flag := (made == 0) | (made == 1)).all():
        raise BufferMisuseError(f"{name} returned {made[~is_flag][0]}, expected flags, 0 or 1")
    made = made.to(column.device, column.dtype)
    if made.is_floating_point() and not made.isfinite().all():  # as float32
        raise BufferMisuseError(
            f"{name} returned {made[~made.isfinite()][0]}, expected finite numbers"
        )
    return made
