"""TrajectoryBuffer: trajectories of several workers laid one behind the other, in place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space

from buffers.core.arguments import (
    as_array,
    check_count,
    check_place,
    check_rewards,
    read_tensor,
    resolve_device,
    tree_leaves,
)
from buffers.core.columns import foreach_copy, torch_dtype
from buffers.core.copies import Rebuilt, fill_block
from buffers.core.errors import BufferMemoryError, BufferMisuseError
from buffers.core.memory import allocation, check_fits
from buffers.core.spaces import Leaf, action_leaf, build_tree, extra_leaves, space_leaves

__all__ = ["TrajectoryBuffer", "TrajectoryStats"]

_BOOL, _FLOAT32 = np.dtype(np.bool_), np.dtype(np.float32)
_FLAGS = ("terminations", "truncations")
_BUILT_IN = ("actions", "rewards", *_FLAGS)
_FEW_STEPS = 4096  # of trajectories whose rewards are summed together
_STEPS_AT_ONCE = 65536  # and of these together
_TAKEN = frozenset(("obs", "next_obs", "env_ids", "self", "valid", *_BUILT_IN))


class TrajectoryStats(NamedTuple):
    """What `update` laid in."""

    num_steps: int
    mean_reward: float


class TrajectoryBuffer(Rebuilt):
    """The steps of one update, as trajectories of different lengths, in memory used again.

    `update` replaces what was there. Trajectory after trajectory is copied to its place; nothing is
    transposed, concatenated or allocated, except that memory that is too small is given back and
    replaced by at least twice as much.

    Args:
        capacity: Steps there is memory for from the start.
        observation_space: Of a single environment: Box, Discrete, MultiDiscrete, MultiBinary, or
            Dict and Tuple of these.
        action_space: Of a single environment: Box, Discrete, MultiDiscrete or MultiBinary.
        extra_columns: Names and spaces of further values per step, such as `log_probs`.
        device: Where the steps live.

    Raises:
        BufferMisuseError: An argument that does not fit.
        BufferMemoryError: More memory is needed than is free. Nothing was allocated.

    >>> from gymnasium.spaces import Box, Discrete
    >>> buffer = TrajectoryBuffer(1000, Box(-1, 1, (4,)), Discrete(2))
    >>> def trajectory(steps):
    ...     flags = {"terminations": torch.zeros(steps, dtype=bool)}
    ...     flags["truncations"] = flags["terminations"]
    ...     obs, actions = torch.zeros(steps, 4), torch.zeros(steps).long()
    ...     return {"obs": obs, "actions": actions, "rewards": torch.ones(steps), **flags}
    >>> buffer.update([trajectory(300), trajectory(200)])
    TrajectoryStats(num_steps=500, mean_reward=1.0)
    >>> tuple(buffer["obs"].shape), buffer.offsets.tolist()
    ((500, 4), [0, 300, 500])
    """

    def __init__(
        self,
        capacity: int,
        observation_space: Space,
        action_space: Space,
        *,
        extra_columns: Mapping[str, Space] | None = None,
        device: torch.device | str = "cpu",
    ):
        self.observation_space, self.action_space = observation_space, action_space
        self.device = resolve_device(device)
        self._obs_leaves, self._leaves = _plan(observation_space, action_space, extra_columns)
        self._is_flat = self._obs_leaves[0].path == "obs"
        self._others = [leaf.path for leaf in self._leaves[len(self._obs_leaves) :]]
        self._keys = {"obs", *self._others}
        self._shapes = [leaf.shape for leaf in self._leaves]
        self._dtypes = [torch_dtype(leaf.dtype) for leaf in self._leaves]
        self._reward_index = [leaf.path for leaf in self._leaves].index("rewards")
        self._storage: list[torch.Tensor] = []
        self._capacity = 0
        self._ends: list[int] = []
        self._allocate(check_count("capacity", capacity))
        spaces = observation_space, action_space
        options = {"extra_columns": extra_columns, "device": self.device}
        self._remember(TrajectoryBuffer, capacity, *spaces, **options)

    def _copied_state(self) -> dict[str, Any]:
        columns = [column[: len(self)].cpu().numpy() for column in self._storage]
        return {"capacity": self._capacity, "ends": list(self._ends), "columns": columns}

    def _take_copied_state(self, state: dict[str, Any]) -> None:
        if state["capacity"] > self._capacity:
            self._allocate(state["capacity"])
        for column, pages in zip(self._storage, state["columns"], strict=True):
            fill_block(column[: len(pages)], pages)
        self._ends = state["ends"]

    @staticmethod
    def nbytes_for(
        capacity: int,
        observation_space: Space,
        action_space: Space,
        *,
        extra_columns: Mapping[str, Space] | None = None,
    ) -> int:
        """Bytes the constructor would allocate; allocates nothing.

        >>> from gymnasium.spaces import Box, Discrete
        >>> TrajectoryBuffer.nbytes_for(1000, Box(-1, 1, (52,)), Discrete(7))
        222000
        """
        _, leaves = _plan(observation_space, action_space, extra_columns)
        return check_count("capacity", capacity) * _step_bytes(leaves)

    def memory(self) -> dict[str, int]:
        """Bytes held now by name of column."""
        leaves = zip(self._leaves, self._storage, strict=True)
        return {leaf.path: column.nbytes for leaf, column in leaves}

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(self.memory().values())

    @property
    def capacity(self) -> int:
        """Steps there is memory for."""
        return self._capacity

    @property
    def offsets(self) -> np.ndarray:
        """int64 (W + 1,): trajectory w has the steps from offsets[w] to below offsets[w + 1]."""
        return np.array([0, *self._ends], np.int64)

    def __len__(self) -> int:
        """Number of steps of the last update."""
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, name: str) -> Any:
        """All steps of a column (num_steps, ...), as views that the next update overwrites."""
        views = [column[: len(self)] for column in self._storage]
        if name == "obs":
            return build_tree(self.observation_space, views[: len(self._obs_leaves)])
        for leaf, view in zip(self._leaves, views, strict=True):
            if leaf.path == name and name in self._others:
                return view
        raise BufferMisuseError(f"no column {name!r}, only {sorted(self._keys)}")

    @property
    def obs(self) -> Any:
        """All observations (num_steps, *obs_shape), nested like the space; views, as all here."""
        return self["obs"]

    @property
    def actions(self) -> torch.Tensor:
        """Actions of the steps, (num_steps, *action_shape)."""
        return self["actions"]

    @property
    def rewards(self) -> torch.Tensor:
        """Rewards of the steps, float32 (num_steps,)."""
        return self["rewards"]

    @property
    def terminations(self) -> torch.Tensor:
        """Where episodes terminated, bool (num_steps,)."""
        return self["terminations"]

    @property
    def truncations(self) -> torch.Tensor:
        """Where episodes were cut off, bool (num_steps,)."""
        return self["truncations"]

    @property
    def extras(self) -> dict[str, torch.Tensor]:
        """The extra columns by name, (num_steps, ...)."""
        return {name: self[name] for name in self._others if name not in _BUILT_IN}

    @torch.no_grad()
    def update(self, trajectories: Sequence[Mapping[str, Any]]) -> TrajectoryStats:
        """Replace all steps by those of some trajectories.

        Args:
            trajectories: One dict per worker: `obs` (T, *obs_shape), nested like the space,
                `actions` (T, *action_shape), `rewards`, `terminations`, `truncations` (T,) and the
                extra columns (T, ...); arrays, or tensors on the CPU or on `device`. T may differ
                and may be 0. Copied. With `valid` bool (T,) only the steps where it is True, as of
                an agent that acted.

        Returns:
            The number of steps and the mean of their rewards (0 for none).

        Raises:
            BufferMisuseError: A column is missing, unknown or does not fit, or a reward is not
                finite as float32; nothing was changed.
            BufferMemoryError: Larger memory is needed than is free. The old steps are kept if that
                was known beforehand; if the system refuses the memory later, the buffer is empty.
        """
        return self._replace(self._read(trajectories))

    def _replace(self, columns: list[list[torch.Tensor]]) -> TrajectoryStats:
        rewards = columns[self._reward_index]
        lengths = [len(part) for part in rewards]
        num_steps, total = sum(lengths), self._sum_rewards(rewards)
        if num_steps > self._capacity:
            self._allocate(max(num_steps, 2 * self._capacity))
        for column, parts in zip(self._storage, columns, strict=True):
            if parts:
                _lay(column[:num_steps], parts, lengths)
        if self.device.type == "cuda":  # pinned memory may be reused by the caller from now on
            torch.cuda.current_stream(self.device).synchronize()
        self._ends = list(accumulate(lengths))
        return TrajectoryStats(num_steps, total / num_steps if num_steps else 0.0)

    def _read(self, trajectories: Sequence[Mapping[str, Any]]) -> list[list[torch.Tensor]]:
        """For each column, in the order of the storage, the tensors of all trajectories."""
        columns: list[list[torch.Tensor]] = [[] for _ in self._leaves]
        expected: dict[int, list[tuple[int, ...]]] = {}  # shapes by number of steps
        is_host = self.device.type == "cpu"
        for number, trajectory in enumerate(trajectories):
            valid = trajectory.get("valid") if isinstance(trajectory, Mapping) else None
            keys = self._keys if valid is None else self._keys | {"valid"}
            if not isinstance(trajectory, Mapping) or trajectory.keys() != keys:
                got = (
                    sorted(trajectory, key=str)
                    if isinstance(trajectory, Mapping)
                    else type(trajectory)
                )
                raise BufferMisuseError(
                    f"trajectory {number} has the columns {got}, expected {sorted(self._keys)}"
                )
            obs = trajectory["obs"]
            values = [obs] if self._is_flat else tree_leaves(self.observation_space, obs, "obs")
            values += [trajectory[name] for name in self._others]
            steps = _count(trajectory["rewards"])
            name = f"trajectory {number}: valid"
            chosen = None if valid is None else read_tensor(name, valid, (steps,), torch.bool)
            shapes = expected.get(steps)
            if shapes is None:
                shapes = expected[steps] = [(steps, *shape) for shape in self._shapes]
            for index, (value, shape, dtype) in enumerate(
                zip(values, shapes, self._dtypes, strict=True)
            ):
                fits = (
                    type(value) is torch.Tensor
                    and value.dtype is dtype
                    and value.shape == shape
                    and (value.is_cpu if is_host else value.device == self.device)
                )
                tensor = value if fits else self._convert(number, index, value, steps)
                tensor = tensor if chosen is None else tensor[chosen.to(tensor.device)]
                columns[index].append(tensor)
        return columns

    def _convert(self, number: int, index: int, value: Any, steps: int) -> torch.Tensor:
        """The tensor of a value that is none, or of another dtype or device, or refuse."""
        leaf = self._leaves[index]
        name = f"trajectory {number}: {leaf.path}"
        tensor = read_tensor(name, value, (steps, *leaf.shape), self._dtypes[index])
        check_place(name, tensor, self.device)
        return tensor

    def _sum_rewards(self, rewards: list[torch.Tensor]) -> float:
        """Sum of all rewards, which must be finite; waits for the device once."""
        if not rewards:
            return 0.0
        lengths = list(map(len, rewards))
        if max(lengths) <= _FEW_STEPS and all(
            reward.dtype is torch.float32 and reward.is_cpu for reward in rewards
        ):  # Of float32 none but an infinite one, or NaN, makes an infinite sum in float64.
            most = max(1, _STEPS_AT_ONCE // max(1, *lengths))
            starts = range(0, len(rewards), most)
            total = math.fsum(
                float(torch.cat(rewards[i : i + most]).sum(dtype=torch.float64)) for i in starts
            )
            if math.isfinite(total):
                return total
        # Summed in their own dtype, pairwise: another one would make torch convert them all first.
        sums = [reward.sum() for reward in rewards]
        if any(part.device != self.device or part.dtype != sums[0].dtype for part in sums):
            sums = [part.to(self.device, torch.float64) for part in sums]
        values = torch.stack(sums).tolist()
        for number, (reward, value) in enumerate(zip(rewards, values, strict=True)):
            if reward.dtype is torch.float64 or not math.isfinite(value):
                what = f"trajectory {number}: "
                check_rewards(as_array("rewards", reward, self.device), what)
                values[number] = float(reward.double().sum())  # its own dtype may not hold the sum
        return math.fsum(values)

    def _allocate(self, capacity: int) -> None:
        """Replace the storage; what was in it need not be kept, so it is given back first."""
        needed = capacity * _step_bytes(self._leaves) - sum(c.nbytes for c in self._storage)
        what = f"a trajectory buffer of {capacity} steps"
        advice, before = "lay in fewer steps at once", self._capacity
        check_fits(what, needed, self.device, advice)
        self._storage, self._ends, self._capacity = [], [], 0
        try:
            with allocation(what, needed, self.device, advice, is_checked=True):
                self._storage = self._empty_columns(capacity)
        except BufferMemoryError:  # what was free when it was checked has gone since
            self._storage, self._capacity = self._empty_columns(before), before
            raise
        self._capacity = capacity

    def _empty_columns(self, capacity: int) -> list[torch.Tensor]:
        with torch.inference_mode(False):
            return [
                torch.empty((capacity, *leaf.shape), dtype=dtype, device=self.device)
                for leaf, dtype in zip(self._leaves, self._dtypes, strict=True)
            ]


def _lay(column: torch.Tensor, parts: list[torch.Tensor], lengths: list[int]) -> None:
    """Copy tensors into a column, one behind the other."""
    # One call for many small ones, if torch need not convert them.
    if column.is_cpu and all(part.dtype is column.dtype and part.is_cpu for part in parts):
        try:
            torch.cat(parts, out=column)
            return
        except RuntimeError:  # one of them is a view of this memory
            pass
    foreach_copy(column.split(lengths), parts, non_blocking=True)


def _plan(
    observation_space: Space, action_space: Space, extra_columns: Mapping[str, Space] | None
) -> tuple[list[Leaf], list[Leaf]]:
    """The leaves of observations, and of all columns."""
    obs = space_leaves(observation_space, "obs")
    if not obs:
        raise BufferMisuseError(f"observation_space {observation_space} holds no array at all")
    flags = [Leaf(name, (), _BOOL) for name in _FLAGS]
    extras = extra_leaves(extra_columns, _TAKEN)
    rewards = Leaf("rewards", (), _FLOAT32)
    return obs, [*obs, action_leaf(action_space), rewards, *flags, *extras]


def _step_bytes(leaves: list[Leaf]) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def _count(rewards: Any) -> int:
    """Number of steps, or -1 if the rewards are no list of any kind."""
    try:
        return len(rewards)
    except TypeError:
        return -1
