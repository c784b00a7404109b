"""The memory of a rollout buffer, and the views of it that are handed out step by step.

::

    envs on the CPU, device "cpu"       one memory: arrays for the envs, tensors for the learner
    envs on the CPU, another device     host pages for the envs; tensors on the device, copied to
    envs on the device                  one memory: tensors there for both
"""

from __future__ import annotations

from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from buffers.core.arguments import as_tensor
from buffers.core.columns import Allocate, allocate_columns
from buffers.core.errors import BufferMisuseError
from buffers.core.spaces import build_tree
from buffers.rollout.layout import RolloutLayout

__all__ = ["RESULTS", "UNWRITTEN", "UNWRITTEN_FLAG", "RolloutSlot", "RolloutStorage"]

RESULTS = ("rewards", "terminations", "truncations")
# Bits of a float32 that has not been written yet: a NaN that no computation gives. Async vector
# envs mark rewards in `step(out=)` likewise, so that what a dead worker leaves is told apart too.
UNWRITTEN = 0x7FC5EED1
UNWRITTEN_FLAG = 2  # the same of flags, which are 0 or 1


class RolloutSlot(NamedTuple):
    """Where an environment writes the results of one step: views of the buffer's host pages.

    Of an environment on the buffer's device they are tensors there.

    Its attribute `autoreset_mode` is that of the buffer: `step(out=)` of vecenv's vector envs
    refuses a slot of another mode than their own.

    Its attribute `valid`, bool (N,), is for envs of which not all rows act in every step, as those
    with agents that die: which rows acted in this step, so that their reward, flags and next
    observation are a transition. Such an env writes all elements in every step; others leave it
    alone.
    """

    obs: Any  # (N, *obs_shape), nested like the observation space
    rewards: np.ndarray  # float32 (N,)
    terminations: np.ndarray  # bool (N,)
    truncations: np.ndarray  # bool (N,)

    autoreset_mode = None
    valid = None


class _Slot(RolloutSlot):
    """A slot of a buffer, which has the attributes."""


class RolloutStorage:
    """Columns of a rollout, and one view per step, made once as that takes as long as a copy.

    Attributes:
        is_on_device: Envs write tensors on the device.
        is_apart: Envs write host pages, which are copied to the device.
        columns: All columns by name.
        tensors: Those of the learner, on the device; of what only the host has, there.
        at_env: The same, but of what envs write and what follows from it alone, where they do.
        obs: Those of observations, nested like the space.
        obs_rows: T + 1 nests of tensors (N, *obs_shape) on the device.
        slots: T slots, of arrays or, on the device, tensors.
        action_rows: T views (N, *action_shape) of actions as envs take them.
        rows: Views of the learner's tensors, one for each step.
        is_marked: Whether results of this rollout can be told from those of the one before.
        acting: uint8 (T, N), which rows acted, as envs with agents write it: 0, 1 or
            `UNWRITTEN_FLAG`.
    """

    def __init__(
        self,
        layout: RolloutLayout,
        device: torch.device,
        allocate: Allocate | None,
        *,
        is_apart: bool,
    ):
        self.layout, self.device = layout, device
        there = getattr(getattr(allocate, "__self__", None), "device", None)
        self.is_on_device = isinstance(there, torch.device)
        if self.is_on_device and there != device:
            raise BufferMisuseError(
                f"allocate is that of envs on {there}, but device is {device}; pass "
                "device=envs.device"
            )
        self.is_apart = is_apart and not self.is_on_device
        specs = layout.columns
        if self.is_on_device:
            specs = [spec._replace(place="device", is_on_device=spec.is_shared) for spec in specs]
        self.columns = allocate_columns(
            f"a rollout of {layout.num_steps} steps of {layout.num_envs} envs", specs, device,
            staged=self.is_apart or self.is_on_device, allocate=allocate,
            advice="use fewer steps or envs, or smaller observations",
        )  # fmt: skip
        self.tensors = {name: column.tensor for name, column in self.columns.items()}
        self.at_env = dict(self.tensors)
        if self.is_apart:
            for name, column in self.columns.items():
                if column.is_twofold:
                    self.at_env[name] = torch.from_numpy(column.host)
        self.is_marked = False
        self.acting = self.at_env["acting"].view(torch.uint8)
        self.acting.fill_(UNWRITTEN_FLAG)
        self._paths = [leaf.path for leaf in layout.obs_leaves]
        self.obs = self.nest(self.tensors[path] for path in self._paths)
        rows = (self.tensors[path].unbind(0) for path in self._paths)
        self.obs_rows = [self.nest(leaves) for leaves in zip(*rows, strict=True)]
        obs = zip(*map(self._rows_at_env, self._paths), strict=True)
        written = map(self._rows_at_env, (*RESULTS, "acting"))
        self.slots = []
        for leaves, *results, acting in zip(islice(obs, 1, None), *written, strict=True):
            slot: Any = _Slot(self.nest(leaves), *results)
            slot.valid, slot.autoreset_mode = acting, layout.autoreset_mode
            self.slots.append(slot)
        self.action_rows = self._rows_at_env("actions")
        self.rows = {name: tensor.unbind(0) for name, tensor in self.tensors.items()}

    def _rows_at_env(self, name: str) -> list[Any]:
        column = self.columns[name]
        return list(column.rows() if self.is_on_device else column.host)

    def nest(self, leaves: Any) -> Any:
        """Observations of leaves, nested like the space."""
        return build_tree(self.layout.observation_space, [*leaves])

    def begin(self) -> None:
        """Mark log_probs and values as not written yet; they read as NaN."""
        self.is_marked = False
        for name in ("log_probs", "values"):
            self.tensors[name].view(torch.int32).fill_(UNWRITTEN)

    def mark_results(self) -> None:
        """Mark rewards, and which rows acted, as not written yet."""
        self.is_marked = True
        self.at_env["rewards"].view(torch.int32).fill_(UNWRITTEN)
        self.acting.fill_(UNWRITTEN_FLAG)

    def unwritten_rewards(self) -> torch.Tensor:
        """Which rewards the env has not written in this rollout, bool (T, N)."""
        is_marked = self.is_marked or self.is_on_device  # there a graph may have marked them
        bits = self.at_env["rewards"].view(torch.int32)
        return bits == UNWRITTEN if is_marked else torch.ones_like(bits, dtype=torch.bool)

    def write_obs(self, t: int, leaves: Any) -> None:
        """Copy checked observations into row t, where envs write."""
        for path, leaf in zip(self._paths, leaves, strict=True):
            self.at_env[path][t].copy_(as_tensor("obs", leaf))

    def carry_obs(self) -> None:
        """Copy the last observations into the first row."""
        self.write_obs(0, [self.at_env[path][-1] for path in self._paths])

    def upload_obs(self, t: int) -> None:
        """Enqueue the copy of one row of observations from host pages to the device."""
        for path in self._paths:
            self.upload(path, slice(t, t + 1))

    def upload(self, name: str, steps: slice = slice(None)) -> None:
        """Enqueue the copy of a column from host pages to the device, if these are apart."""
        if self.is_apart:
            self.columns[name].upload(steps)

    def wait_for_device(self) -> None:
        """Wait until enqueued copies have left the host pages, which are about to be rewritten."""
        if self.is_apart and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
