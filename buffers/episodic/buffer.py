"""EpisodicReplayBuffer: whole episodes, stored flat, and what can be drawn from them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import Space

from buffers.core.arguments import (
    MAX_COUNT,
    check_count,
    read_distinct_ids,
    read_episode,
    read_number,
    read_steps,
    read_valid,
    resolve_device,
)
from buffers.core.copies import fill_block
from buffers.core.drawn import DrawnBuffer
from buffers.core.errors import BufferMisuseError
from buffers.core.guard import Guard, exclusive
from buffers.core.rows import RowLayout
from buffers.core.sequences import SequenceBatch, read_sequences
from buffers.core.state import (
    Block,
    LoadedState,
    Wanted,
    check_settings,
)
from buffers.episodic.batches import BatchShaper, GoalBatch, PairBatch, StackBatch
from buffers.episodic.draws import EpisodicDraws, GoalFunction, SequenceMemory
from buffers.episodic.layout import FLAGS, NUM_STARTS, plan_episodic
from buffers.episodic.open_episodes import OpenEpisodes
from buffers.episodic.samplers import CompiledSampler, PairPlanner, TorchSampler, is_by_episode
from buffers.episodic.state import (
    check_episodes,
    check_meta,
    describe,
)
from buffers.episodic.storage import EpisodicStorage

__all__ = ["EpisodicReplayBuffer"]


class EpisodicReplayBuffer(DrawnBuffer):
    """Whole episodes of any length, flat in one ring; the oldest make room for new ones.

    An episode of T steps has T + 1 observations, each stored once. It comes in whole
    (`add_episode`) or step by step from running environments (`add`, best through a
    `TransitionWriter`); in the latter case it can be drawn once it is over.

    Boundaries are steps marked by the user, such as where an option ended. They are not the end of
    an episode, which `terminations` and `truncations` tell. For every step t of an episode its
    bound is computed at insertion: the second next boundary at or after t (one at t itself is the
    first), else the next, else the last step, T - 1. `sample` draws a step t and a later one no
    further than the bound, so a pair may cross one boundary, never two. Steps that are their own
    bound are never drawn.

    Args:
        capacity: Number of steps held at most, exactly.
        observation_space: Of a single environment: Box, Discrete, MultiDiscrete, MultiBinary, or
            Dict and Tuple of these.
        action_space: Of a single environment: Box, Discrete, MultiDiscrete or MultiBinary.
        num_envs: Number of environments `add` is fed from; None takes it from the first `add`.
        max_episodes: Number of episodes held at most; one row of memory each. By default as many
            as steps up to 4096, then an eighth of the capacity.
        extra_columns: Names and spaces of further values per step.
        device: Where the episodes live and are drawn.
        seed: Of the generator; None takes entropy of the system.
        staged: Do on the CPU what is done on other devices, to test it.

    Raises:
        BufferMisuseError: An argument that does not fit.
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
    _large = ("rows",)
    _draws_by = ("sample", "sample_sequences", "sample_stacks", "sample_goals")
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
        layout = plan_episodic(
            capacity, observation_space, action_space, max_episodes, extra_columns
        )
        self.capacity, self.max_episodes = layout.capacity, layout.max_episodes
        self.observation_space, self.action_space = observation_space, action_space
        self.device = resolve_device(device)
        self.num_envs = None
        if num_envs is not None:
            self.num_envs = check_count("num_envs", num_envs, MAX_COUNT)
        self._guard = Guard(self.device)
        is_staged = staged or self.device.type != "cpu"
        with torch.inference_mode(False):  # the tensors outlive the mode they were made in
            self._storage = EpisodicStorage(layout, self.device, staged=is_staged)
        sampler = TorchSampler if is_staged else CompiledSampler
        self._sampler = sampler(self._storage, seed)
        self._planner = PairPlanner(layout.row, self.device, is_staged=is_staged)
        self._shaper = BatchShaper(layout.row, self.device)
        self._draws = EpisodicDraws(self._storage, self._sampler, self._shaper)
        self._row, self._counters = layout.row, self._storage.counters
        self._given_envs = self.num_envs  # states with open episodes of another number are refused
        self._open: OpenEpisodes | None = None
        if self.num_envs is not None:
            self._open = OpenEpisodes(self.num_envs, self._storage)
        self._remember(
            EpisodicReplayBuffer, capacity, observation_space, action_space, num_envs=num_envs,
            max_episodes=max_episodes, extra_columns=extra_columns, device=self.device,
            staged=staged,
        )  # fmt: skip

    @staticmethod
    def nbytes_for(
        capacity: int,
        observation_space: Space,
        action_space: Space,
        *,
        max_episodes: int | None = None,
        extra_columns: Mapping[str, Space] | None = None,
        staged: bool = False,
    ) -> int:
        """Bytes the constructor would allocate for episodes; allocates nothing.

        >>> from gymnasium.spaces import Box, Discrete
        >>> EpisodicReplayBuffer.nbytes_for(200_000, Box(-1, 1, (52,)), Discrete(7))
        59300072
        """
        layout = plan_episodic(
            capacity, observation_space, action_space, max_episodes, extra_columns
        )
        return layout.nbytes(staged)

    def memory(self) -> dict[str, int]:
        """Bytes held now, by what they are for, host and device together; batches not included."""
        sizes = {name: column.nbytes for name, column in self._storage.columns.items()}
        sizes["staging"] = self._storage.staging_bytes
        sizes["windows"] = self._sampler.windows.nbytes
        sizes["open_episodes"] = 0 if self._open is None else self._open.nbytes
        return sizes

    @property
    def _generator(self) -> Any:
        return self._sampler.generator

    def __len__(self) -> int:
        """Number of steps that can be drawn; those of open episodes do not count."""
        return self._storage.count("num_steps")

    @property
    def num_episodes(self) -> int:
        """Number of episodes held."""
        return self._storage.count("num_episodes")

    @property
    def first_episode(self) -> int:
        """Number, counted from the first ever added, of the oldest episode held."""
        return self._storage.count("first_episode")

    @property
    def episode_lengths(self) -> np.ndarray:
        """int64 (num_episodes,), steps of each episode from the oldest to the newest; a copy."""
        return self._storage.live_lengths()

    @property
    def open_lengths(self) -> np.ndarray:
        """int64 (num_envs,), steps of each environment's open episode; a copy."""
        return np.zeros(0, np.int64) if self._open is None else self._open.lengths.copy()

    def add_episode(self, episode: Mapping[str, Any]) -> None:
        """Store a whole episode of T steps, from 1 to the capacity.

        Args:
            episode: `obs` (T + 1, *obs_shape), nested like the space; or (T, ...) and `next_obs`
                (T, ...). `actions` (T, *action_shape), `rewards` (T,), the extra columns (T, ...).
                Optional: `terminations` and `truncations` bool (T,), True in the last step only;
                without both the last step counts as truncated. `boundaries` bool (T,). Copied.

        Raises:
            BufferMisuseError: The episode does not fit; nothing was changed.
        """
        arrays, last, count = read_episode(episode, self._row, self.device)
        if count > self.capacity:
            raise BufferMisuseError(
                f"the episode has {count} steps, but the capacity is {self.capacity}; make the "
                "buffer larger or split the episode"
            )
        self._insert(arrays, last, count)

    @exclusive
    def _insert(
        self, arrays: dict[str, np.ndarray], last: dict[str, np.ndarray], count: int
    ) -> None:
        """Store an episode of `count` steps: columns by path, and one row of the last obs."""
        self._storage.reserve(count + 1)
        self._storage.staging[count] = 0
        fields = self._storage.fields
        for path, array in arrays.items():
            fields[path][:count] = array
        for path, array in last.items():
            fields[path][count] = array[0]
        self._storage.insert(np.array([count]))

    def add(self, env_ids: Any = None, *, valid: Any = None, **columns: Any) -> None:
        """Append one step to the open episode of each of some environments.

        A step with `terminations` or `truncations` ends its episode, which then is stored. An
        episode that reaches the capacity is stored and goes on as another.

        Args:
            env_ids: int (B,), distinct; None for all environments in order.
            valid: bool (B,), the rows to store, as of agents that acted; None for all. The episode
                of an environment that is left out is cut, if it is open, as by `cut_episodes`.
            columns: `obs`, `next_obs` (B, *obs_shape), nested like the space, `actions` (B,
                *action_shape), `rewards`, `terminations`, `truncations` (B,), the extra columns
                (B, ...) and, if wanted, `boundaries` bool (B,). Copied.

        Raises:
            BufferMisuseError: A column does not fit, or obs is not what the episode had as its last
                next_obs; nothing was changed.
            BufferMemoryError: Memory for open episodes is missing; nothing was changed.
        """
        arrays = read_steps(columns, self._row, self.device, {"boundaries"})
        count = len(arrays["rewards"])
        is_valid = None if valid is None else read_valid(valid, count, self.device)
        self._append(env_ids, arrays, is_valid)

    @exclusive
    def _append(
        self, env_ids: Any, arrays: dict[str, np.ndarray], is_valid: np.ndarray | None
    ) -> None:
        count = len(arrays["rewards"])
        opened = self._opened(env_ids, count)
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
            left = left[opened.lengths[left] > 0]
        for path, field in opened.fields.items():
            if path in arrays:  # the header is not
                field[:count] = arrays[path]
        for path, field in opened.next_fields.items():
            field[:count] = arrays[f"next_{path}"]
        opened.check_continuity(ids)
        ends = opened.prepare(ids, arrays["terminations"] | arrays["truncations"])
        self._open, self.num_envs = opened, opened.num_envs
        if len(left):
            opened.close(left)
        opened.append(ids)
        if len(ends):
            opened.close(ends)

    def _opened(self, env_ids: Any, count: int) -> OpenEpisodes:
        if self._open is not None:
            return self._open
        if env_ids is not None or count == 0:
            raise BufferMisuseError(
                "the number of environments is not known; give num_envs to the constructor, or add "
                "one step of all environments first"
            )
        return OpenEpisodes(count, self._storage)

    @exclusive
    def cut_episodes(self, env_ids: Any = None) -> None:
        """End open episodes where they are, as when environments were reset; they are stored.

        Their last step is neither terminated nor truncated.

        Args:
            env_ids: int (B,), distinct, or a mask bool (N,); None for all environments.

        Raises:
            BufferMisuseError: An id is out of range or repeated; nothing was changed.
        """
        num_envs = self.num_envs
        if num_envs is None:  # not known before any step
            num_envs, env_ids = 2**31, [] if env_ids is None else env_ids
        ids = read_distinct_ids(env_ids, num_envs, self.device)
        if self._open is not None:
            ids = ids[self._open.lengths[ids] > 0]
            if len(ids):
                self._open.close(ids)

    @exclusive
    def episode(self, index: int) -> dict[str, Any]:
        """Copy an episode out.

        Args:
            index: 0 is the oldest held, -1 the newest.

        Returns:
            What `add_episode` takes, as tensors on the device, with `obs` (T + 1, ...), and
            `bounds`, int32 (T,).

        Raises:
            IndexError: There is no such episode.
        """
        number = operator.index(index)
        if not -self.num_episodes <= number < self.num_episodes:
            raise IndexError(f"episode {index} of {self.num_episodes}")
        slot = (self.first_episode + number % self.num_episodes) % self.max_episodes
        first, length = self._storage.tables["episodes"][slot, :2]
        parts = self._storage.first_rows(int(length) + 1, int(first))
        words = torch.cat([self._storage.rows[part] for part in parts])
        names = ("actions", "rewards", *FLAGS, "bounds")
        fields = self._shaper.fields(words[:-1], *names)
        return {"obs": self._shaper.obs(words), **fields, **self._shaper.extras(words[:-1])}

    @exclusive
    def sample(
        self,
        batch_size: int,
        discount: float = 1.0,
        *,
        over: str = "steps",
        out: PairBatch | None = None,
        columns: Iterable[str] | None = None,
    ) -> PairBatch:
        """Draw steps, and for each a later step k steps on, not beyond its bound.

        k is at least 1, and its probability is proportional to discount ** k among the k possible;
        at 1 all are equally likely, at 0 it is 1.

        Args:
            batch_size: B.
            discount: From 0 to 1.
            over: "steps" draws every step that is possible with equal probability, "episodes" an
                episode first, so that steps of short episodes come more often.
            out: A batch returned before, of the same size, to be overwritten.
            columns: Names of the columns to draw, such as ("obs", "future_obs"); None for all. The
                pairs are the same; `offsets` are always there.

        Returns:
            Tensors on the device; the views lie in packed rows, so not all are contiguous, unless
            columns were named.

        Raises:
            BufferMisuseError: An argument does not fit, or no step has a later one in its bound.
        """
        batch_size = check_count("batch_size", batch_size, MAX_COUNT)
        discount = read_number("discount", discount)
        by_episode = is_by_episode(over)
        if not self._counters[NUM_STARTS]:
            self._draws.require_episode()
            raise BufferMisuseError(
                f"the buffer has {len(self)} steps, but none with a later one in its bound; add "
                "episodes of two steps or more first"
            )
        planner = self._planner
        chosen = planner.read_columns(columns)
        if out is None:
            batch = planner.new(batch_size, chosen)
        else:
            batch = planner.check(out, batch_size, chosen)
        self._sampler.fill_pairs(batch, discount, by_episode)
        return batch

    @exclusive
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
        """Draw runs of steps that follow one another in an episode, for recurrent networks.

        Args:
            batch_size: B.
            sequence_length: L.
            over: "steps" draws every possible first step with equal probability, "episodes" an
                episode first.
            burn_in: As in `SharedReplayBuffer.sample_sequences`, like all that follow: number of
                steps that are not learned from.
            overlap: Number of steps shared with the next run.
            pad: Whether runs may end with the episode. Otherwise all are full, and episodes shorter
                than L are never drawn.
            initial_states: Names of extra columns.
            columns: Names of those to draw.

        Raises:
            BufferMisuseError: An argument does not fit, or no episode is long enough.
        """
        options = read_sequences(sequence_length, burn_in, overlap, pad)
        return self._draws.sequences(batch_size, options, over, initial_states, columns)

    def _check_sequences(self, batch: Any) -> SequenceMemory:
        return self._draws.check_sequences(batch)

    def _alive_steps(self, batch: SequenceBatch, memory: SequenceMemory) -> torch.Tensor:
        return self._draws.alive_steps(batch, memory)

    def _columns_of_rows(self) -> tuple[RowLayout, dict[str, torch.Tensor]]:
        return self._row, self._shaper.extras(self._storage.rows)

    @exclusive
    def sample_stacks(
        self,
        batch_size: int,
        num_frames: int,
        *,
        over: str = "steps",
        columns: Iterable[str] | None = None,
    ) -> StackBatch:
        """Draw steps with the last observations of their episode stacked.

        Where the episode has not so many its first observation is repeated.

        Args:
            batch_size: B.
            num_frames: K.
            over: As in `sample_sequences`.
            columns: Names of the columns to draw; None for all. `steps` are always there.

        Raises:
            BufferMisuseError: An argument does not fit, or the buffer is empty.
        """
        return self._draws.stacks(batch_size, num_frames, over, columns)

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
        pass_tensors: bool = False,
        columns: Iterable[str] | None = None,
    ) -> GoalBatch:
        """Draw steps with goals that were reached in hindsight.

        Args:
            batch_size: B.
            strategy: Which observation of the episode gives the goal: "future", any after the
                step; "final", the last; "episode", any but the first; "bound", any after the step
                that is not beyond its bound, which are the pairs of `sample`: steps that are their
                own bound are not drawn then.
            relabel_ratio: Probability that a step gets a new goal.
            discount: Of "future" and "bound": the goal is k steps on with probability proportional
                to discount ** k among the k possible; at 1 all are equally likely, at 0 it is 1.
            over: As in `sample_sequences`.
            achieved: Key of the observation space, if that is a Dict, with the goal reached.
            desired: Key of the goal wanted, which is replaced in `obs` and `next_obs`. Goals may be
                nested, both alike.
            compute_reward: Called as `compute_reward(achieved, desired, extras)` on NumPy arrays
                (B, ...) of the next observations, nested like the goals, and a dict of the extra
                columns in place of infos, as the `compute_reward` of Gymnasium-Robotics. The arrays
                are copies, the function's to change. Its numbers (B,) replace `rewards` where the
                goal was replaced. None leaves rewards as they were.
            compute_terminated: The same for `terminations`: whether the goal that a step now has
                ends the episode. None leaves them as they were.
            pass_tensors: Pass both functions tensors on the device instead, copies too.
            columns: Names of the columns to draw; None for all. `goal_offsets` and `relabelled` are
                always there; a function whose column is not drawn is not called.

        Returns:
            `goal_obs` is the observation that holds the goal. If the space has no such keys nothing
            is replaced, and the caller makes of `goal_obs` and `relabelled` what is needed.

        Raises:
            BufferMisuseError: An argument does not fit, the buffer is empty, or a function returned
                something else than a finite number per step.
        """
        asked = batch_size, strategy, relabel_ratio, discount, over
        relabelling = self._draws.relabelling(
            achieved, desired, compute_reward, compute_terminated, columns, pass_tensors
        )
        return relabelling.apply(self._goals(*asked, relabelling.needed()))

    @exclusive
    def _goals(self, *asked: Any) -> GoalBatch:
        return self._draws.goals(*asked)

    @exclusive
    def clear(self) -> None:
        """Forget all episodes, open ones too; memory and generator stay."""
        self._storage.clear()
        if self._open is not None:
            width = self._row.num_words
            lengths = np.zeros(self._open.num_envs, np.int64)
            self._open.restore(lengths, np.zeros((0, width), np.int64))

    def _described(self) -> dict[str, Any]:
        return describe(self._storage.layout, self.first_episode)

    def _check_described(self, meta: Mapping[str, Any]) -> None:
        check_meta(meta, self._described())

    def _saved_arrays(self) -> dict[str, list[Block]]:
        lengths, rows = np.zeros(0, np.int64), np.zeros((0, self._row.num_words), np.int64)
        if self._open is not None:
            lengths, rows = self._open.snapshot()
        return {
            "lengths": [self._storage.live_lengths()],
            "open_lengths": [lengths],
            "open_rows": [rows],
            "generator": [self._sampler.generator.get_state()],
            "rows": [*self._storage.live_rows()],
        }

    def _wanted_arrays(self) -> Wanted:
        width, generator = self._row.num_words, self._sampler.generator.get_state()
        int64 = np.dtype(np.int64)
        return {
            "lengths": (int64, (None,)),
            "open_lengths": (int64, (None,)),
            "open_rows": (int64, (None, width)),
            "generator": (generator.dtype, generator.shape),
            "rows": (int64, (None, width)),
        }

    def _check_arrays(self, state: LoadedState) -> None:
        num_envs = len(state.small["open_lengths"])
        if self._given_envs is not None and num_envs:  # none with open episodes fits any number
            check_settings({"num_envs": num_envs}, {"num_envs": self._given_envs})
        check_episodes(self._storage.layout, state)
        self._check_generator(state.small["generator"])

    def _take(self, state: LoadedState) -> None:
        small, storage = state.small, self._storage
        opened, begin = self._make_open(len(small["open_lengths"])), 0
        for block in state.large["rows"]:
            fill_block(storage.rows[begin : begin + len(block)], block)
            begin += len(block)
        if not storage.refile(small["lengths"], int(state.meta["first_episode"])):
            raise BufferMisuseError(
                "state has rows that contradict its lengths; the buffer is empty now"
            )
        self._sampler.generator.set_state(small["generator"])
        self._restore_open(opened, small)

    def _make_open(self, num_envs: int) -> OpenEpisodes | None:
        """What is to hold the open episodes of a state of so many envs; ours, if it can."""
        if not num_envs:
            return None if self.num_envs is None else self._open
        if self._open is not None and self._open.num_envs == num_envs:
            return self._open
        return OpenEpisodes(num_envs, self._storage)

    def _restore_open(self, opened: OpenEpisodes | None, small: dict[str, np.ndarray]) -> None:
        lengths, self._open = small["open_lengths"], opened
        if opened is not None:
            self.num_envs = opened.num_envs
            lengths = lengths if len(lengths) else np.zeros(opened.num_envs, np.int64)
            opened.restore(lengths, small["open_rows"])
