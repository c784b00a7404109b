"""TrajectoryBuffer: trajectories of several workers, one after the other, in reused memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from buffers.core.errors import BufferMisuseError
from buffers.core.memory import allocation, check_fits, torch_dtype
from buffers.core.spaces import Leaf, action_leaf, build_tree, extra_leaves, obs_leaves

__all__ = ["TrajectoryBuffer", "TrajectoryStats"]

_BOOL, _FLOAT32 = np.dtype(np.bool_), np.dtype(np.float32)
_FLAGS = ("terminations", "truncations")
_TAKEN = frozenset((
    "obs", "next_obs", "env_ids", "self", "valid", "actions", "rewards", *_FLAGS
))  # fmt: skip


class TrajectoryStats(NamedTuple):
    """Statistics of the steps that `update` stored."""

    num_steps: int
    mean_reward: float


class TrajectoryBuffer:
    """The steps of one update, as trajectories of different lengths, in reused memory.

    `update` replaces all steps: it copies one trajectory after the other to its place, without
    transposing, concatenating or allocating. Only if the memory is too small, it is freed and
    replaced by at least twice as much.

    Args:
        capacity: Number of steps to allocate memory for at first.
        observation_space: Of a single environment: Box, Discrete, MultiDiscrete, MultiBinary, or
            Dict and Tuple of these.
        action_space: Of a single environment: Box, Discrete, MultiDiscrete or MultiBinary.
        extra_columns: Names and spaces of further values per step, such as `log_probs`.
        device: Where the steps live.

    Attributes:
        capacity: Number of steps that there is memory for now.

    Raises:
        BufferMisuseError: An argument does not fit.
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
        obs = obs_leaves(observation_space)
        rewards, flags = Leaf("rewards", (), _FLOAT32), [Leaf(name, (), _BOOL) for name in _FLAGS]
        extras = extra_leaves(extra_columns, _TAKEN)
        self._leaves = [*obs, action_leaf(action_space), rewards, *flags, *extras]
        self._num_obs = len(obs)
        self._others = [leaf.path for leaf in self._leaves[self._num_obs :]]
        self._storage: list[torch.Tensor] = []
        self._allocate(check_count("capacity", capacity))

    def memory(self) -> dict[str, int]:
        """Bytes held now, by column."""
        leaves = zip(self._leaves, self._storage, strict=True)
        return {leaf.path: column.nbytes for leaf, column in leaves}

    @property
    def offsets(self) -> np.ndarray:
        """int64 (W + 1,): trajectory w has the steps from offsets[w] to offsets[w + 1] - 1."""
        return self._offsets.copy()

    def __len__(self) -> int:
        """Number of steps of the last update."""
        return int(self._offsets[-1])

    def __getitem__(self, name: str) -> Any:
        """Return all steps of a column (num_steps, ...), as views that the next update overwrites.

        Columns are "obs", nested like the space, "actions", "rewards" float32, "terminations" and
        "truncations" bool, and the extra columns.
        """
        views = [column[: len(self)] for column in self._storage]
        if name == "obs":
            return build_tree(self.observation_space, views[: self._num_obs])
        if name in self._others:
            return views[self._num_obs + self._others.index(name)]
        raise BufferMisuseError(f"no column {name!r}, only {sorted(['obs', *self._others])}")

    @torch.no_grad()
    def update(self, trajectories: Sequence[Mapping[str, Any]]) -> TrajectoryStats:
        """Replace all steps by those of the trajectories.

        Args:
            trajectories: One dict per worker: `obs` (T, *obs_shape), nested like the space,
                `actions` (T, *action_shape), `rewards`, `terminations`, `truncations` (T,) and the
                extra columns (T, ...); arrays, or tensors on the CPU or on `device`. T may differ
                and may be 0. If there is `valid` bool (T,), only steps where it is True. Copied.

        Returns:
            The number of steps and the mean of their rewards (0 for none).

        Raises:
            BufferMisuseError: A column is missing, unknown or does not fit, or a reward is not
                finite as float32; nothing was changed.
            BufferMemoryError: More memory is needed than is free. The old steps are kept, unless
                the system refuses the memory after they were freed.
        """
        columns = [self._read(*numbered) for numbered in enumerate(trajectories)]
        rewards = [column[self._num_obs + 1] for column in columns]
        lengths, total = [len(part) for part in rewards], 0.0
        for number, part in enumerate(rewards):
            array = as_array("rewards", part, self.device)
            check_rewards(array, f"trajectory {number}: ")
            total += float(array.sum(dtype=np.float64))
        offsets = np.cumsum([0, *lengths])
        num_steps = int(offsets[-1])
        if num_steps > self.capacity:
            self._allocate(max(num_steps, 2 * self.capacity))
        for column, parts in zip(self._storage, zip(*columns, strict=True), strict=bool(columns)):
            for target, part in zip(column[:num_steps].split(lengths), parts, strict=True):
                target.copy_(part, non_blocking=True)
        if self.device.type == "cuda":  # the caller may now overwrite pinned memory
            torch.cuda.current_stream(self.device).synchronize()
        self._offsets = offsets
        return TrajectoryStats(num_steps, total / num_steps if num_steps else 0.0)

    def _read(self, number: int, trajectory: Mapping[str, Any]) -> list[torch.Tensor]:
        """The columns of a trajectory, in the order of the storage."""
        is_dict = isinstance(trajectory, Mapping)
        if not is_dict or trajectory.keys() - {"valid"} != {"obs", *self._others}:
            got = sorted(trajectory, key=str) if is_dict else type(trajectory)
            raise BufferMisuseError(
                f"trajectory {number} has the columns {got}, expected "
                f"{sorted(['obs', *self._others])}"
            )
        values = tree_leaves(self.observation_space, trajectory["obs"], "obs")
        values += [trajectory[name] for name in self._others]
        rewards, what, found = trajectory["rewards"], f"trajectory {number}: ", []
        steps = len(rewards) if getattr(rewards, "ndim", isinstance(rewards, Sequence)) else -1
        chosen = trajectory.get("valid")
        if chosen is not None:
            chosen = read_tensor(f"{what}valid", chosen, (steps,), torch.bool)
        for leaf, value in zip(self._leaves, values, strict=True):
            name, shape = what + leaf.path, (steps, *leaf.shape)
            tensor = read_tensor(name, value, shape, torch_dtype(leaf.dtype))
            check_place(name, tensor, self.device)
            found.append(tensor if chosen is None else tensor[chosen.to(tensor.device)])
        return found

    def _allocate(self, capacity: int) -> None:
        """Replace the storage; frees the old one first, as its steps are not needed."""
        step = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self._leaves)
        needed = capacity * step - sum(column.nbytes for column in self._storage)
        what, advice = f"a trajectory buffer of {capacity} steps", "lay in fewer steps at once"
        check_fits(what, needed, self.device, advice)
        self._offsets, self.capacity = np.zeros(1, np.int64), 0
        self._storage = [column[:0].clone() for column in self._storage]
        place: Any = {"device": self.device}
        needed = capacity * step
        with allocation(what, needed, self.device, advice), torch.inference_mode(False):
            self._storage = [
                torch.empty((capacity, *leaf.shape), dtype=torch_dtype(leaf.dtype), **place)
                for leaf in self._leaves
            ]
        self.capacity = capacity
