"""EpisodicReplayBuffer: whole episodes, stored flat, and draws from them.

```
#  add_episode ------------------------------------.
#  add --> OpenEpisodes: a pool of rows -- close --+--> EpisodeTable: ring of rows, episodes
#                                                         |
#  batch <-- Gather: rows to columns <-- Draws: row numbers of steps
```
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space

from buffers.core.arguments import (
    MAX_COUNT,
    check_count,
    read_columns,
    read_distinct_ids,
    read_episode,
    read_number,
    read_steps,
    read_valid,
    resolve_device,
)
from buffers.core.batches import (
    SequenceBatch,
    SequenceOptions,
    memory_of,
    read_sequences,
    read_states,
    zero_padding,
)
from buffers.core.drawn import DrawnBuffer
from buffers.core.errors import BufferMisuseError
from buffers.core.memory import check_fits
from buffers.core.rows import RowLayout, row_views
from buffers.core.state import (
    Block,
    LoadedState,
    check_bools,
    check_settings,
    contradiction,
)
from buffers.episodic.draws import (
    STRATEGIES,
    Columns,
    Draws,
    Gather,
    GoalFunction,
    Steps,
    check_goals,
    is_by_episode,
    relabel,
)
from buffers.episodic.open_episodes import OpenEpisodes
from buffers.episodic.table import (
    FLAGS,
    PAIRS,
    WINDOWS,
    EpisodeTable,
    GoalBatch,
    PairBatch,
    StackBatch,
    plan_layout,
)

__all__ = ["EpisodicReplayBuffer"]

_VERSION = 2
_ANY_STEP = SequenceOptions(1, 0, 1, True)
_OF_STEPS = dict.fromkeys(("actions", "rewards", "terminations", "truncations"), 0)
_PAIRS = {"obs": 0, "future_obs": 1, **_OF_STEPS}  # index of the list of rows of each column


class SequenceMemory(NamedTuple):
    """State of the ring when sequences were drawn."""

    owner: object
    first_row: int  # the oldest then; never wraps
    num_restored: int


_NUMBER_BYTES = 64  # scratch memory per drawn step, for row numbers
_UNSEEN_BYTES = 1 << 26  # smaller batches are drawn without a look at free memory


class EpisodicReplayBuffer(DrawnBuffer):
    """Whole episodes of any length, flat in one ring; new episodes replace the oldest.

    An episode of T steps has T + 1 observations, each stored once. It is added whole
    (`add_episode`) or step by step from running environments (`add`, best through a
    `TransitionWriter`). Only complete episodes can be drawn.

    Boundaries are steps marked by the user, such as the ends of options. They do not end an
    episode; `terminations` and `truncations` do. The bound of step t is computed when its episode
    is stored: the second boundary at or after t (a boundary at t is the first one), else the only
    one, else the last step, T - 1. `sample` draws a step t and a later one up to the bound, so a
    pair may cross one boundary, but not two. Steps that are their own bound are never drawn.

    Args:
        capacity: Largest number of steps held.
        observation_space: Of a single environment: Box, Discrete, MultiDiscrete, MultiBinary, or
            Dict and Tuple of these.
        action_space: Of a single environment: Box, Discrete, MultiDiscrete or MultiBinary.
        num_envs: Number of environments of `add`; None takes it from the first `add`.
        max_episodes: Largest number of episodes held; each takes one extra row of memory. The
            default is the larger of 4096 and an eighth of the capacity, at most the capacity.
        extra_columns: Names and spaces of further values per step.
        device: Where the episodes live and are drawn.
        seed: Seed of the generator; None takes entropy of the system.
        staged: Run the code for other devices on the CPU, for tests.

    Raises:
        BufferMisuseError: An argument does not fit.
        BufferMemoryError: More memory is needed than is free. Nothing was allocated.

    >>> from gymnasium.spaces import Box, Discrete
    >>> buffer = EpisodicReplayBuffer(1000, Box(-1, 1, (4,)), Discrete(2), seed=0)
    >>> obs = np.zeros((51, 4), np.float32)  # 50 steps
    >>> buffer.add_episode({"obs": obs, "actions": np.ones(50, int), "rewards": np.ones(50)})
    >>> batch = buffer.sample(256, discount=0.9)
    >>> tuple(batch.future_obs.shape), int(batch.offsets.min())
    ((256, 4), 1)
    >>> tuple(buffer.sample_sequences(32, 10).obs.shape)
    (32, 10, 4)
    """

    _kind = "EpisodicReplayBuffer"
    _large, _growing = ("rows",), ("lengths", "open_lengths", "open_rows", "rows")
    _options_in_files = frozenset(("num_envs", "max_episodes", "extra_columns", "device", "staged"))
    takes_steps = False  # rows without env_ids may be of other envs; `add` checks its columns

    def __init__(
        self,
        capacity: int,
        observation_space: Space,
        action_space: Space,
        *,
        num_envs: int | None = None,
        max_episodes: int | None = None,
        extra_columns: Mapping[str, Space] | None = None,
        device: torch.device | str = "cpu",
        seed: int | None = None,
        staged: bool = False,
    ):
        layout = plan_layout(capacity, observation_space, action_space, max_episodes, extra_columns)
        self.capacity, self.max_episodes = layout.capacity, layout.max_episodes
        self.observation_space, self.action_space = observation_space, action_space
        self.device = resolve_device(device)
        known = None if num_envs is None else check_count("num_envs", num_envs, MAX_COUNT)
        is_staged = staged or self.device.type != "cpu"
        with torch.inference_mode(False):  # the tensors outlive the mode they were made in
            self._table = EpisodeTable(layout, self.device, is_staged)
        self._draws, self._gather = Draws(self._table, seed), Gather(self._table)
        self._row = layout.row
        self._all_pairs = self._wanted(None, **_PAIRS)
        # A state with another number of envs is refused if num_envs was an argument.
        self.num_envs = self._given_envs = known
        self._open = None if known is None else OpenEpisodes(known, self._table)
        self._remember(
            EpisodicReplayBuffer, capacity, observation_space, action_space, num_envs=num_envs,
            max_episodes=max_episodes, extra_columns=extra_columns, device=self.device,
            staged=staged,
        )  # fmt: skip

    def memory(self) -> dict[str, int]:
        """Bytes held now, by purpose, on host and device together, without batches."""
        opened = 0 if self._open is None else self._open.nbytes
        return {**self._table.sizes, "open_episodes": opened}

    @property
    def _generator(self) -> Any:
        return self._draws.generator

    def __len__(self) -> int:
        """Number of steps of complete episodes, which can be drawn."""
        return self._table.live.num_steps

    @property
    def num_episodes(self) -> int:
        """Number of episodes held."""
        return self._table.live.end - self._table.live.begin

    @property
    def episode_lengths(self) -> np.ndarray:
        """Steps of each episode, from the oldest to the newest, int64 (num_episodes,); a copy."""
        return self._table.lengths.copy()

    @property
    def open_lengths(self) -> np.ndarray:
        """Steps of the open episode of each environment, int64 (num_envs,); a copy."""
        return np.zeros(0, np.int64) if self._open is None else self._open.lengths.copy()

    def add_episode(self, episode: Mapping[str, Any]) -> None:
        """Store a whole episode of T steps, from 1 to the capacity.

        Args:
            episode: `obs` (T + 1, *obs_shape), nested like the space; or (T, ...) and `next_obs`
                (T, ...). `actions` (T, *action_shape), `rewards` (T,), the extra columns (T, ...).
                Optional: `terminations` and `truncations` bool (T,), True in the last step only;
                if both are missing, the last step is truncated. `boundaries` bool (T,). Copied.

        Raises:
            BufferMisuseError: The episode does not fit; nothing was changed.
        """
        arrays, last, count = read_episode(episode, self._row, self.device)
        if count > self.capacity:
            raise BufferMisuseError(
                f"the episode has {count} steps, but the capacity is {self.capacity}; make the "
                "buffer larger or split the episode"
            )
        rows = np.zeros((count + 1, self._row.num_words), np.int64)
        fields = row_views(rows, self._row.fields)
        for path, array in arrays.items():
            fields[path][:count] = array
        for path, array in last.items():
            fields[path][count] = array[0]
        self._table.insert(rows, np.array([count]))

    def add(self, env_ids: Any = None, *, valid: Any = None, **columns: Any) -> None:
        """Append one step to the open episode of each of some environments.

        An episode that ends is stored. One that reaches the capacity is stored too, and its further
        steps form another episode.

        Args:
            env_ids: int (B,), distinct; None for all environments in order.
            valid: bool (B,), the rows to store, such as those of agents that acted; None for all.
                Leaving a row out cuts the open episode of its environment, like `cut_episodes`.
            columns: `obs`, `next_obs` (B, *obs_shape), nested like the space, `actions` (B,
                *action_shape), `rewards`, `terminations`, `truncations` (B,), the extra columns
                (B, ...) and, if wanted, `boundaries` bool (B,). Copied.

        Raises:
            BufferMisuseError: A column does not fit, or obs differs from the last next_obs of the
                episode; nothing was changed.
            BufferMemoryError: Memory for open episodes is missing; nothing was changed.
        """
        arrays = read_steps(columns, self._row, self.device)
        count = len(arrays["rewards"])
        is_valid = None if valid is None else read_valid(valid, count, self.device)
        opened = self._open
        if opened is None:
            if env_ids is not None or count == 0:
                raise BufferMisuseError(
                    "the number of environments is not known; give num_envs to the constructor, or "
                    "add one step of all environments first"
                )
            opened = OpenEpisodes(count, self._table)
        ids = read_distinct_ids(env_ids, opened.num_envs, self.device)
        if len(ids) != count:
            raise BufferMisuseError(
                f"got {count} steps for {len(ids)} of {opened.num_envs} envs; pass one step per "
                "env, or env_ids with one id per step"
            )
        arrays.setdefault("boundaries", np.zeros(count, np.bool_))
        left = ids[:0]
        if is_valid is not None:
            arrays = {path: array[is_valid] for path, array in arrays.items()}
            ids, left, count = ids[is_valid], ids[~is_valid], int(is_valid.sum())
        for path, field in opened.fields.items():
            if path != "room":
                field[:count] = arrays[path]
        for path, field in opened.next_fields.items():
            field[:count] = arrays[f"next_{path}"]
        opened.check_continuity(ids)
        is_over = arrays["terminations"] | arrays["truncations"]
        ends = ids[is_over | (opened.lengths[ids] + 1 >= self.capacity)]
        opened.reserve(count)
        self._open, self.num_envs = opened, opened.num_envs
        opened.close(left)  # after all checks and `reserve`
        opened.append(ids)
        opened.close(ends)

    def cut_episodes(self, env_ids: Any = None) -> None:
        """End and store open episodes, such as after a reset of their environments.

        Their last step is neither terminated nor truncated.

        Args:
            env_ids: int (B,), distinct, or a mask bool (N,); None for all environments.

        Raises:
            BufferMisuseError: An id is out of range or repeated; nothing was changed.
        """
        if self._open is not None:  # None before the first step
            self._open.close(read_distinct_ids(env_ids, self._open.num_envs, self.device))

    def episode(self, index: int) -> dict[str, Any]:
        """Copy an episode out.

        Args:
            index: 0 is the oldest held, -1 the newest.

        Returns:
            The columns of `add_episode`, as tensors on the device, with `obs` (T + 1, ...), and
            `bounds`, int32 (T,).

        Raises:
            IndexError: There is no such episode.
        """
        number = operator.index(index)
        if not -self.num_episodes <= number < self.num_episodes:
            raise IndexError(f"episode {index} of {self.num_episodes}")
        table = self._table
        slot = table.live.begin + number % self.num_episodes
        first, length, _ = table.table[:PAIRS, slot].tolist()
        rows = (first + torch.arange(length + 1, device=self.device))[None] % table.layout.num_rows
        obs = self._gather.take((("obs", 0),), rows, (length + 1,))["obs"]
        names = ("actions", "rewards", *FLAGS, "room", *self._row.extras)
        found = self._gather.take(tuple((n, 0) for n in names), rows[:, :-1], (length,))
        steps = torch.arange(length, dtype=torch.int32, device=self.device)
        bounds, extras = found.pop("room") + steps, found.pop("extras")
        return {"obs": obs, **found, "bounds": bounds, **extras}

    def sample(
        self,
        batch_size: int,
        discount: float = 1.0,
        *,
        over: str = "steps",
        columns: Iterable[str] | None = None,
    ) -> PairBatch:
        """Draw steps, and for each the step k steps later, up to its bound.

        k is at least 1. Its probability is proportional to discount ** k: with discount 1 all
        possible k are equally likely, with discount 0 k is always 1.

        Args:
            batch_size: B.
            discount: From 0 to 1.
            over: "steps" draws every possible step with equal probability. "episodes" draws an
                episode first, so that steps of short episodes are more likely.
            columns: Names of the columns to draw, such as ("obs", "future_obs"); None for all. The
                choice does not change which pairs are drawn; `offsets` are always there.

        Returns:
            Tensors on the device, each contiguous.

        Raises:
            BufferMisuseError: An argument does not fit, or no step has a later one up to its bound.
        """
        batch_size = self._read_size(batch_size)
        discount = read_number("discount", discount)
        by_episode = is_by_episode(over)
        self._check_pairs()
        wanted = self._all_pairs
        if columns is not None:
            chosen = read_columns(columns, (*PairBatch._fields, *self._row.extras))
            wanted = self._wanted(chosen, **_PAIRS)
        rows, offsets = self._draws.pairs(batch_size, discount, by_episode)
        found = {**self._gather.take(wanted, rows, (batch_size,)), "offsets": offsets}
        return PairBatch(**found) if columns is None else PairBatch._made_of(found)

    def _check_pairs(self) -> None:
        """Raise BufferMisuseError if no step has a later one up to its bound."""
        self._require(
            self._table.total(PAIRS),
            f"the buffer has {len(self)} steps, but none with a later one in its bound; add "
            "episodes of two steps or more first",
        )

    def _require(self, count: int, message: str) -> None:
        """Raise BufferMisuseError if there is no episode, or `count` is 0."""
        if not self.num_episodes:
            raise BufferMisuseError(
                "the buffer holds no whole episode yet, and only whole ones are drawn from; add "
                "steps until an episode ends, or end open ones by cut_episodes()"
            )
        if not count:
            raise BufferMisuseError(message)

    def _wanted(self, chosen: frozenset[str] | None, **lists: int) -> Columns:
        """The columns to gather: the chosen ones, or all.

        `lists` gives the list of rows that each column is read from; extra columns use list 0.
        """
        lists |= dict.fromkeys(self._row.extras, 0)
        return tuple(pair for pair in lists.items() if chosen is None or pair[0] in chosen)

    def sample_sequences(
        self,
        batch_size: int,
        sequence_length: int,
        *,
        over: str = "steps",
        burn_in: int = 0,
        overlap: int | None = None,
        pad: bool = False,
        initial_states: Sequence[str] | str = (),
        columns: Iterable[str] | None = None,
    ) -> SequenceBatch:
        """Draw sequences of consecutive steps of an episode, for recurrent networks.

        Args:
            batch_size: B.
            sequence_length: L.
            over: "steps" draws every possible first step with equal probability; "episodes" draws
                an episode first.
            burn_in: Number of steps that are not learned from. This and the following arguments are
                those of `SharedReplayBuffer.sample_sequences`.
            overlap: Number of steps shared with the next sequence.
            pad: Whether sequences may end early, with the episode; else episodes shorter than L are
                not drawn.
            initial_states: Names of extra columns with recurrent states.
            columns: Names of the columns to draw.

        Raises:
            BufferMisuseError: An argument does not fit, or no episode is long enough.
        """
        options = read_sequences(sequence_length, burn_in, overlap, pad)
        names = read_states(initial_states, self._row.extras)
        chosen = read_columns(columns, (*SequenceBatch._fields, *self._row.extras))
        length = options.length
        batch_size = self._read_size(batch_size, length)
        starts = self._draw_windows(batch_size, options, over)
        places = torch.arange(length, device=self.device)
        mask = places < (starts.length - starts.step)[:, None]
        rows, following = (self._draws.rows(starts, places[None] + later) for later in (0, 1))
        steps = (starts.step[:, None] + places).to(torch.int32) * mask
        wanted = self._wanted(chosen, obs=0, next_obs=1, **_OF_STEPS, boundaries=0)
        lists = torch.stack([rows, following]).view(2, -1)
        found = self._gather.take(
            tuple(pair for pair in wanted if pair[0] not in names), lists, tuple(rows.shape)
        )
        states = self._gather.take(tuple((n, 0) for n in names), rows[None, :, 0], (batch_size,))
        if options.pad:  # else all sequences are full
            zero_padding(found, mask)
            rows = torch.where(mask, rows, -1)
        return SequenceBatch._made_of({
            **found, "steps": steps, "mask": mask, **options.masks(mask, steps), "indices": rows,
            "weights": None, "initial_states": states["extras"], "memory": SequenceMemory(
                self, self._table.live.first_row, self._table.num_restored
            ),
        })  # fmt: skip

    def _check_sequences(self, batch: Any) -> SequenceMemory:
        memory = memory_of(batch, self)
        if memory.num_restored != self._table.num_restored:
            raise BufferMisuseError("batch was drawn before a state was loaded; draw anew")
        return memory

    def _alive_steps(self, batch: SequenceBatch, memory: SequenceMemory) -> torch.Tensor:
        rows, oldest = batch.indices.reshape(-1), memory.first_row
        numbers = oldest + (rows - oldest) % self._table.layout.num_rows  # numbers at the draw
        return ((numbers >= self._table.live.first_row) & (rows >= 0)).nonzero()[:, 0]

    def _read_size(self, batch_size: Any, length: int = 1) -> int:
        """Check the size of a batch; raise BufferMemoryError if memory for it is missing."""
        size = check_count("batch_size", batch_size, MAX_COUNT)
        nbytes = (_NUMBER_BYTES + 2 * self._row.stride) * size * length
        if nbytes > _UNSEEN_BYTES:
            what = f"a batch of {size} x {length} steps"
            check_fits(what, nbytes, self.device, "draw fewer at once")
        return size

    def _draw_windows(self, batch_size: int, options: SequenceOptions, over: str) -> Steps:
        """Draw the first steps of sequences."""
        by_episode = is_by_episode(over)
        self._require(
            self._table.count_windows(options),
            f"none of the {self.num_episodes} episodes has {options.needed_at_start} steps; add "
            "longer ones, or ask for shorter sequences",
        )
        return self._draws.steps(WINDOWS, options.period, batch_size, by_episode)

    def _columns_of_rows(self) -> tuple[RowLayout, dict[str, torch.Tensor]]:
        return self._row, self._table.columns

    def sample_stacks(
        self,
        batch_size: int,
        num_frames: int,
        *,
        over: str = "steps",
    ) -> StackBatch:
        """Draw steps with stacks of the last K observations.

        Near the start of an episode, its first observation is repeated.

        Args:
            batch_size: B.
            num_frames: K.
            over: As in `sample_sequences`.

        Raises:
            BufferMisuseError: An argument does not fit, or the buffer is empty.
        """
        num_frames = check_count("num_frames", num_frames, MAX_COUNT)
        batch_size = self._read_size(batch_size, num_frames)
        steps = self._draw_windows(batch_size, _ANY_STEP, over)
        ages, rows = torch.arange(num_frames, device=self.device) - num_frames + 1, self._draws.rows
        lists = torch.stack([
            rows(steps, torch.maximum(ages + later, -steps.step[:, None])) for later in (0, 1)
        ])  # fmt: skip
        lead, frames = (batch_size, num_frames), self._wanted(None, obs=0, next_obs=1)
        frames = tuple(pair for pair in frames if pair[0] not in self._row.extras)
        stacked = self._gather.take(frames, lists.view(2, -1), lead)
        found = self._gather.take(self._wanted(None, **_OF_STEPS), rows(steps)[None], lead[:1])
        return StackBatch._made_of({**stacked, **found, "steps": steps.step.to(torch.int32)})

    def sample_goals(
        self,
        batch_size: int,
        strategy: str = "future",
        *,
        relabel_ratio: float = 0.8,
        discount: float = 1.0,
        over: str = "steps",
        achieved: str = "achieved_goal",
        desired: str = "desired_goal",
        compute_reward: GoalFunction | None = None,
        compute_terminated: GoalFunction | None = None,
    ) -> GoalBatch:
        """Draw steps with goals that the episode reached (hindsight experience replay).

        Args:
            batch_size: B.
            strategy: The observation of the episode that gives the goal. "future": any after the
                step; "final": the last one; "episode": any but the first; "bound": any after the
                step, up to its bound, as in `sample`. With "bound", steps that are their own bound
                are not drawn.
            relabel_ratio: Probability that a step gets a new goal.
            discount: For "future" and "bound": the goal is k steps later with probability
                proportional to discount ** k; with 1 all possible k are equally likely, with 0 k
                is 1.
            over: As in `sample_sequences`.
            achieved: Key of the reached goal in the observation space, if that is a Dict.
            desired: Key of the wanted goal, which is replaced in `obs` and `next_obs`. Goals may be
                nested; both must have the same structure.
            compute_reward: Called as `compute_reward(achieved, desired, extras)`, with NumPy arrays
                (B, ...) of the next observations, nested like the goals, and a dict of the extra
                columns in place of infos. All are copies, which the function may change. It returns
                numbers (B,), which replace `rewards` where the goal was replaced. None keeps the
                rewards.
            compute_terminated: Like `compute_reward`, for `terminations`.

        Returns:
            A batch in which `goal_obs` is the observation that holds the goal. If the space lacks
            the two keys, nothing is replaced: the caller uses `goal_obs` and `relabelled`.

        Raises:
            BufferMisuseError: An argument does not fit, the buffer is empty, or a function did not
                return a finite number per step.
        """
        batch_size, keys = self._read_size(batch_size), (achieved, desired)
        functions = {"compute_reward": compute_reward, "compute_terminated": compute_terminated}
        has_goals = check_goals(self.observation_space, keys, functions)
        if not isinstance(strategy, str) or strategy not in STRATEGIES:
            raise BufferMisuseError(f"strategy is {strategy!r}, expected one of {[*STRATEGIES]}")
        relabel_ratio = read_number("relabel_ratio", relabel_ratio)
        discount = read_number("discount", discount)
        if discount != 1 and strategy not in ("future", "bound"):
            raise BufferMisuseError(
                f"discount is {discount} with strategy={strategy!r}; it is a law of distances, "
                "which 'future' and 'bound' have"
            )
        batch = self._goals(batch_size, over, (strategy, relabel_ratio, discount))
        if has_goals:
            relabel(batch, keys, functions)
        return batch

    def _goals(self, batch_size: int, over: str, law: tuple[str, float, float]) -> GoalBatch:
        """Draw steps and the observations of their goals; nothing is replaced yet."""
        if law[0] == "bound":
            by_episode = is_by_episode(over)
            self._check_pairs()
            steps = self._draws.steps(PAIRS, 1, batch_size, by_episode)
        else:
            steps = self._draw_windows(batch_size, _ANY_STEP, over)
        offsets, relabelled = self._draws.goals(steps, *law)
        lists = torch.stack([self._draws.rows(steps, later) for later in (0, 1, offsets)])
        wanted = self._wanted(None, obs=0, next_obs=1, goal_obs=2, **_OF_STEPS)
        found = self._gather.take(wanted, lists, (batch_size,))
        return GoalBatch._made_of({**found, "goal_offsets": offsets, "relabelled": relabelled})

    def _described(self) -> dict[str, Any]:
        return {"state_version": _VERSION, "fields": self._row.describe()}

    def _saved_arrays(self) -> dict[str, list[Block]]:
        lengths, rows = np.zeros(0, np.int64), np.zeros((0, self._row.num_words), np.int64)
        if self._open is not None:
            lengths = self.open_lengths
            rows, _ = self._open.collect(np.flatnonzero(lengths))
        return {
            "lengths": [self.episode_lengths],
            "open_lengths": [lengths],
            "open_rows": [rows],
            "generator": [self._generator.get_state()],
            "rows": [*self._table.live_rows()],
        }

    def _check_arrays(self, state: LoadedState) -> None:
        small, large = state
        lengths, open_lengths = small["lengths"], small["open_lengths"]
        if self._given_envs is not None and len(open_lengths):  # else any number fits
            check_settings({"num_envs": len(open_lengths)}, {"num_envs": self._given_envs})
        self._check_generator(small["generator"])
        if lengths.min(initial=1) < 1 or open_lengths.min(initial=0) < 0:
            raise contradiction("it has episodes without steps")
        steps = sum(lengths.tolist())  # Python ints do not overflow
        if steps > self.capacity or len(lengths) > self.max_episodes:
            raise BufferMisuseError(
                f"state has {len(lengths)} episodes of {steps} steps, but the buffer holds "
                f"{self.max_episodes} of {self.capacity}; load it into a larger one"
            )
        if open_lengths.max(initial=0) >= self.capacity:  # `add` would have stored it
            raise contradiction("it has open episodes as long as the buffer")
        bools = [(f.offset, f.nbytes) for f in self._row.fields.values() if f.dtype == np.bool_]
        opened = open_lengths[open_lengths > 0]
        for name, numbers, blocks in (
            ("rows", lengths, large["rows"]), ("open_rows", opened, [small["open_rows"]])
        ):  # fmt: skip
            if sum(map(len, blocks)) != int((numbers + 1).sum()):
                raise contradiction(f"its {name} are not those of {len(numbers)} episodes")
            check_bools(name, blocks, bools)

    def _take(self, state: LoadedState) -> None:
        small, opened = state.small, self._open
        lengths = small["open_lengths"]
        if len(lengths) and (opened is None or opened.num_envs != len(lengths)):
            opened = OpenEpisodes(len(lengths), self._table)
        if opened is not None:
            lengths = lengths if len(lengths) else np.zeros(opened.num_envs, np.int64)
            opened.restore(lengths, small["open_rows"])
            self._open, self.num_envs = opened, opened.num_envs
        self._table.restore(state.large["rows"], small["lengths"])
        self._generator.set_state(small["generator"])
