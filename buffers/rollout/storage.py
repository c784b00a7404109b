"""The memory of a rollout buffer, and the views of it that are handed out step by step."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakMethod

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from buffers.core.columns import Allocate, Column, ColumnSpec, allocate_columns, foreach_copy
from buffers.core.spaces import build_tree
from buffers.core.staging import Departures
from buffers.rollout.gae import GaeInputs
from buffers.rollout.kernels import UNWRITTEN, UNWRITTEN_FLAG
from buffers.rollout.layout import RolloutLayout

__all__ = ["RolloutSlot", "RolloutStorage", "WrittenValid"]

_ADVICE = "use fewer steps or envs, or smaller observations"
_POLICY_FLOATS = ("log_probs", "values")
_RESULTS = ("rewards", "terminations", "truncations")


class RolloutSlot(NamedTuple):
    """Where an environment writes the results of one step: views of the buffer's host pages.

    Of an environment on the buffer's device they are tensors there.

    Its attribute `autoreset_mode` is that of the buffer: `step(out=)` of vecenv's vector envs
    refuses a slot of another mode than their own.

    Its attribute `valid`, bool (N,), is for envs of which not all rows act in every step, as those
    with agents that die: which rows acted in this step, so that their reward, flags and next
    observation are a transition. Such an env writes all elements in every step. The memory is
    allocated when the attribute is first read; other envs leave it alone.
    """

    obs: Any  # (N, *obs_shape), nested like the observation space
    rewards: np.ndarray  # float32 (N,)
    terminations: np.ndarray  # bool (N,)
    truncations: np.ndarray  # bool (N,)

    autoreset_mode = None

    @property
    def valid(self) -> np.ndarray:
        """Where to write which rows acted in this step, bool (N,)."""
        raise AttributeError("this slot belongs to no buffer, so it has no memory for valid")


class _StepSlot(RolloutSlot):
    _written_valid: WrittenValid
    _t: int

    @property
    def valid(self) -> np.ndarray:
        return self._written_valid.row(self._t)


# The mode stands in the class, so that looking at it costs a step nothing.
class _NextStepSlot(_StepSlot):
    autoreset_mode = AutoresetMode.NEXT_STEP


class _SameStepSlot(_StepSlot):
    autoreset_mode = AutoresetMode.SAME_STEP


class _DisabledSlot(_StepSlot):
    autoreset_mode = AutoresetMode.DISABLED


_SLOT_CLASSES = {
    made.autoreset_mode: made for made in (_NextStepSlot, _SameStepSlot, _DisabledSlot)
}


class WrittenValid:
    """Which rows acted in each step, as envs with agents write it; allocated when first asked for.

    What is not written is marked, as rewards are: it is told apart from what was, and nothing of an
    earlier rollout is taken for it.

    Args:
        num_steps: T.
        num_envs: N.
        device: As in `RolloutStorage`, like the next two.
        staged: See above.
        allocate: See above; that of a vector env is used only while this exists.
        is_env_on_device: Whether envs write tensors on the device.

    Attributes:
        flags: uint8 (T, N): 0, 1, or `UNWRITTEN_FLAG`. None before anyone asked.
    """

    def __init__(
        self,
        num_steps: int,
        num_envs: int,
        device: torch.device,
        *,
        staged: bool,
        allocate: Allocate | None,
        is_env_on_device: bool,
    ):
        self._spec = ColumnSpec(
            "valid",
            (num_steps, num_envs),
            np.dtype(np.bool_),
            "both" if is_env_on_device else "host",
            True,
            is_env_on_device,
        )
        self._device, self._staged, self._is_on_device = device, staged, is_env_on_device
        # The buffer does not keep the vector env alive.
        is_method = isinstance(allocate, MethodType)
        self._allocate: Any = WeakMethod(allocate) if is_method else lambda: allocate
        self._column: Column | None = None
        self._rows: Sequence[Any] = ()
        self.flags: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self._column is None else self._column.nbytes

    @property
    def tensor(self) -> torch.Tensor | None:
        """Bool (T, N) on the device that envs write to; None before anyone asked."""
        return None if self._column is None else self._column.tensor

    def row(self, t: int) -> Any:
        """Where step t is written, bool (N,): an array, or a tensor if envs are on the device.

        Raises:
            BufferMemoryError: It is the first to be asked for, and memory for all is missing.
        """
        if not self._rows:
            pages = self.allocated()
            assert self._column is not None
            self._rows = self._column.rows() if self._is_on_device else list(pages)
        return self._rows[t]

    def allocated(self) -> np.ndarray:
        """All rows, bool (T, N)."""
        if self._column is None:
            num_steps, num_envs = self._spec.shape
            self._column = allocate_columns(
                f"which of {num_envs} rows act in {num_steps} steps",
                [self._spec],
                self._device,
                staged=self._staged,
                allocate=self._allocate(),
                advice=_ADVICE,
            )["valid"]
            self.flags = self._column.host.view(np.uint8)
            self.mark()
        return self._column.host

    def mark(self) -> None:
        """Mark all as not written yet."""
        if self.flags is not None:
            self.flags.fill(UNWRITTEN_FLAG)
            if self._is_on_device and self._column is not None:
                self._column.tensor.view(torch.uint8).fill_(UNWRITTEN_FLAG)

    def download(self, steps: slice) -> None:
        """Copy steps to the host pages, if envs have written them on the device."""
        if self._is_on_device and self._column is not None:
            self._column.download(steps)

    def written_row(self, t: int) -> np.ndarray | None:
        """Which rows acted in step t, bool (N,); None if the env does not say, or has not yet."""
        if self.flags is None or self.flags[t, 0] == UNWRITTEN_FLAG:
            return None
        return self.allocated()[t]


class RolloutStorage:
    """Columns of a rollout and one view per step, made once.

    Views are made beforehand because making one costs about as much as copying a small row.

    Attributes:
        columns: All columns by name.
        pages: Those on the host as arrays, by name.
        flags: The bool ones of these as uint8, which is what kernels read.
        obs: Columns of the observation leaves.
        obs_pages: Their pages.
        obs_rows: T + 1 nests of tensors (N, *obs_shape) on the device.
        slots: T slots of host pages.
        written_valid: What envs with agents write into the slots' `valid`.
        policy_rows: T triples (actions, log_probs, values) of tensors on the device.
        extras: The tensors (T, N, ...) of the extra columns by name, on the device.
        games: The tensors (T, G, ...) of the game columns by name, on the device.
        extra_rows: T views of each of both, by name.
        reward_bits: The rewards' host pages as int32 (T, N).
        policy_bits: The tensors `log_probs` (T, N) and `values` (T + 1, N) as int32.
        action_pages: T NumPy arrays (N, *action_shape) of host pages.
    """

    def __init__(
        self,
        layout: RolloutLayout,
        device: torch.device,
        *,
        staged: bool,
        allocate: Allocate | None,
    ):
        self.is_staged = staged
        self.device = device
        self._departures = Departures(device)
        self.is_env_on_device = staged and _device_of(allocate) == device
        specs = layout.columns
        if self.is_env_on_device:
            hostless = {"actions", *(leaf.path for leaf in layout.obs_leaves)}
            specs = [
                spec._replace(
                    place="device" if spec.name in hostless else spec.place,
                    is_on_device=spec.is_shared,
                )
                for spec in specs
            ]
        self.columns = allocate_columns(
            f"a rollout of {layout.num_steps} steps of {layout.num_envs} envs",
            specs,
            device,
            staged=staged,
            allocate=allocate,
            advice=_ADVICE,
        )
        self.obs = [self.columns[leaf.path] for leaf in layout.obs_leaves]
        self.obs_pages = [] if self.is_env_on_device else [column.host for column in self.obs]
        self.pages = {
            name: column.host
            for name, column in self.columns.items()
            if not staged or column.spec.place != "device"
        }
        self.flags = {n: a.view(np.uint8) for n, a in self.pages.items() if a.dtype == np.bool_}
        self._layout = layout
        self.written_valid = WrittenValid(
            layout.num_steps,
            layout.num_envs,
            device,
            staged=staged,
            allocate=allocate,
            is_env_on_device=self.is_env_on_device,
        )
        self._make_views()

    def _make_views(self) -> None:
        columns, space = self.columns, self._layout.observation_space
        num_steps = self._layout.num_steps
        leaf_rows = [column.rows() for column in self.obs]
        self.obs_rows = [
            build_tree(space, [rows[t] for rows in leaf_rows]) for t in range(num_steps + 1)
        ]
        at_env: list[Any] = [
            column.tensor if self.is_env_on_device else column.host
            for column in (*self.obs, *(columns[name] for name in _RESULTS))
        ]
        *obs, rewards, terminations, truncations = at_env
        slot_class = _SLOT_CLASSES[self._layout.autoreset_mode]
        self.slots = [
            slot_class(
                build_tree(space, [array[t + 1] for array in obs]),
                rewards[t],
                terminations[t],
                truncations[t],
            )
            for t in range(num_steps)
        ]
        for t, slot in enumerate(self.slots):
            slot._written_valid, slot._t = self.written_valid, t
        fields = (columns[name].rows() for name in ("actions", "log_probs", "values"))
        self.policy_rows = list(zip(*fields, strict=False))  # values has one row more
        self._leaf_rows = leaf_rows
        self.action_pages: list[Any] = [row for row, *_ in self.policy_rows]
        if not self.is_env_on_device:
            self.action_pages = list(columns["actions"].host)
        self._first_rows = columns["is_first"].rows()
        self.extras = {leaf.path: columns[leaf.path].tensor for leaf in self._layout.extras}
        self.games = {leaf.path: columns[leaf.path].tensor for leaf in self._layout.games}
        self.extra_rows = {name: columns[name].rows() for name in (*self.extras, *self.games)}
        self.reward_bits = columns["rewards"].host.view(np.int32)
        self.policy_bits = [columns[name].tensor.view(torch.int32) for name in _POLICY_FLOATS]
        if self.is_staged and not self.is_env_on_device:
            host_rows = [column.host_rows() for column in self.obs]
            self._upload_pairs = list(
                zip(zip(*leaf_rows, strict=True), zip(*host_rows, strict=True), strict=True)
            )
        self.begin_results()
        self._host_action_rows: Sequence[torch.Tensor] = ()
        if self.is_staged and not self.is_env_on_device:
            self._host_action_rows = columns["actions"].host_rows()
        self._host_first_rows = columns["is_first"].host_rows() if self.is_staged else ()

    def tensor(self, name: str) -> torch.Tensor:
        """The column's tensor on the device."""
        return self.columns[name].tensor

    def obs_tensor(self) -> Any:
        """Observations of all steps, (T + 1, N, *obs_shape), nested like the space."""
        return build_tree(self._layout.observation_space, [column.tensor for column in self.obs])

    def write_obs(self, t: int, leaves: Sequence[np.ndarray | torch.Tensor]) -> None:
        """Copy checked observations into row t: host pages, unless the env is on the device."""
        if self.is_env_on_device:
            for rows, leaf in zip(self._leaf_rows, leaves, strict=True):
                rows[t].copy_(torch.as_tensor(leaf))
            return
        for pages, leaf in zip(self.obs_pages, leaves, strict=True):
            pages[t] = leaf

    def last_obs(self) -> list[Any]:
        """The leaves of the observations after the last step, where the env writes them."""
        if self.is_env_on_device:
            return [rows[-1] for rows in self._leaf_rows]
        return [pages[-1] for pages in self.obs_pages]

    def mark_results(self) -> None:
        """Mark all rewards as not written yet; they read as NaN. So too which rows acted."""
        if self.is_env_on_device:
            self.columns["rewards"].tensor.view(torch.int32).fill_(UNWRITTEN)
        self.reward_bits.fill(UNWRITTEN)
        self.written_valid.mark()

    def mark_policy_outputs(self) -> None:
        """Mark log_probs and values as not written yet; they read as NaN."""
        for bits in self.policy_bits:
            bits.fill_(UNWRITTEN)

    def upload_obs(self, t: int) -> None:
        """Enqueue the copy of one row of observations from the host pages to the device."""
        if self.is_env_on_device:
            return
        targets, sources = self._upload_pairs[t]
        foreach_copy(targets, sources, non_blocking=True)
        self._departures.note()

    def upload_first(self, t: int) -> torch.Tensor:
        """Row t of `is_first` on the device, where it is copied to."""
        if self.is_staged:
            self._first_rows[t].copy_(self._host_first_rows[t], non_blocking=True)
            self._departures.note()
        return self._first_rows[t]

    def upload(self, name: str, where: slice = slice(None)) -> None:
        """Enqueue the copy of a column, or some steps of it, from the host pages to the device."""
        self.columns[name].upload(where)
        self._departures.note()

    def begin_results(self) -> None:
        """Forget what became of the results on the device in an earlier rollout."""
        self._sent = {name: (self.columns[name].tensor._version, 0, 0) for name in _RESULTS}

    def upload_result(self, name: str, num_steps: int) -> torch.Tensor:
        """Enqueue the copy of a column of results to the device, and return it there.

        What the user has changed on the device since the last call stays: only the steps after
        those that had been taken then are copied.

        Args:
            name: "rewards", "terminations" or "truncations".
            num_steps: Steps whose slots have been taken.
        """
        column = self.columns[name]
        if self.is_env_on_device:
            return column.tensor
        version, begin, count = self._sent[name]  # steps up to `begin` the user has changed
        if column.tensor._version != version:  # each change in place counts it up
            begin = count
        if begin < num_steps:
            self.upload(name, slice(begin, num_steps))
        self._sent[name] = column.tensor._version, begin, num_steps
        return column.tensor

    def download_results(self, names: Sequence[str] = _RESULTS, t: int | None = None) -> None:
        """Copy results, of one step or all, to the host pages if the env has not written there."""
        if self.is_env_on_device:
            steps = slice(None) if t is None else slice(t, t + 1)
            for name in names:
                self.columns[name].download(steps)
            if t is None:
                self.written_valid.download(steps)

    def forget_step(self, t: int) -> None:
        """Let the results of a step, whose slot is taken once more, be copied once more."""
        for name, (version, begin, count) in self._sent.items():
            self._sent[name] = version, min(begin, t), min(count, t)

    def download_actions(self, t: int) -> None:
        """Copy the actions of one step from the device to the host pages, and wait for that."""
        if not self.is_env_on_device:
            self._host_action_rows[t].copy_(self.policy_rows[t][0])

    def wait_for_device(self) -> None:
        """Wait until enqueued copies have left the host pages, which are about to be rewritten."""
        if self.is_staged:
            self._departures.wait()

    def gae_inputs(self) -> GaeInputs:
        """Tensors on the device if that is not the CPU, else arrays over the same memory."""
        columns = self.columns
        final = columns.get("final_values")
        if self.is_staged:
            names = ("rewards", "values", "terminations", "truncations")
            rewards, values, terminations, truncations = (columns[name].tensor for name in names)
            final_values = None if final is None else final.tensor
            valid = columns["valid"].tensor
            return GaeInputs(rewards, values, terminations, truncations, final_values, valid)
        return GaeInputs(
            columns["rewards"].host,
            columns["values"].host,
            self.flags["terminations"],
            self.flags["truncations"],
            None if final is None else final.host,
            self.flags["valid"],
        )


def _device_of(allocate: Allocate | None) -> torch.device | None:
    """The device of the env that memory is taken from, if it says."""
    device = getattr(getattr(allocate, "__self__", None), "device", None)
    return device if isinstance(device, torch.device) else None
