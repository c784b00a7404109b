"""Adds of tensors that lie on the device of the rows: operations of torch alone, of fixed shapes.

Nothing waits for the device, and values stay there, so that such an add can be captured in a CUDA
graph. Rows that follow one another have to be whole steps of all environments: what an environment
did last is on the device then, and the host asks for it when it has to know (`settle`), as before
an add of arrays. With observations stored once, slots are taken off a stack on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from buffers.core.arguments import tree_leaves
from buffers.core.columns import torch_dtype
from buffers.core.errors import BufferMisuseError
from buffers.core.rows import RowLayout, view_fields
from buffers.replay.table import Table

__all__ = ["DeviceAdds", "read_tensors"]


def read_tensors(
    columns: Mapping[str, Any], layout: RowLayout, device: torch.device
) -> dict[str, torch.Tensor] | None:
    """Columns by path, if all are tensors on the device and as they are stored; else None."""
    flags = ("terminations", "truncations")
    names = {"obs", "next_obs", "actions", "rewards", *flags, *layout.extras}
    if columns.keys() != names or not len(columns["rewards"]) or layout.frames is not None:
        return None
    count, fields = len(columns["rewards"]), layout.fields
    found: dict[str, Any] = {name: columns[name] for name in names - {"obs", "next_obs"}}
    kinds = {name: fields[name] for name in found}
    for prefix in ("", "next_"):
        leaves = tree_leaves(layout.observation_space, columns[f"{prefix}obs"], f"{prefix}obs")
        found |= {prefix + path: leaf for path, leaf in zip(layout.obs, leaves, strict=True)}
        kinds |= {prefix + path: fields[path] for path in layout.obs}
    for path, tensor in found.items():
        shape, dtype = (count, *kinds[path].shape), torch_dtype(kinds[path].dtype)
        if not isinstance(tensor, torch.Tensor) or tensor.device != device:
            return None
        if tensor.dtype != dtype or tensor.shape != shape:
            return None
        found[path] = tensor.detach()
    return found


class DeviceAdds:
    """Adds tensors to a table on their device.

    Args:
        table: See above.

    Attributes:
        is_ahead: The device has what the host does not know yet.
        is_captured: An add is in a CUDA graph, so that the host never knows how many there are.
    """

    def __init__(self, table: Table):
        plan, device = table.plan, table.device
        self._table, self._num_envs = table, plan.num_envs
        with torch.inference_mode(False):
            self._columns = view_fields(table.rows, plan.layout.fields)
            kinds = {"last": torch.int64, "is_open": torch.bool, "slot": torch.int64}
            self._envs = {
                name: torch.zeros(plan.num_envs, dtype=kind, device=device)
                for name, kind in kinds.items()
            }
            self._free = torch.zeros(1, dtype=torch.int64, device=device)
            self._num_free = torch.zeros((), dtype=torch.int64, device=device)
        self._least_free = 0  # slots that are free for certain
        self.is_ahead = self.is_captured = False
        self._is_stale = True  # the host has what the device does not know yet

    def fits(self, count: int, ids: np.ndarray) -> bool:
        """Whether rows can be added so: whole steps where it matters whose they are."""
        plan = self._table.plan
        if plan.is_linked or plan.num_rings > 1 or "env_ids" in plan.layout.fields:
            return count == plan.num_envs and not len(ids)
        return count <= plan.span

    def push(self) -> None:
        """Note that the host has changed what the device has to know; a graph reads it at once."""
        self._is_stale, self.is_ahead = True, False
        if self.is_captured:
            self._refresh()
            self.is_ahead = True  # as far as the host knows

    def _refresh(self) -> None:
        if not self._is_stale:
            return
        table, device = self._table, self._table.device
        for name, tensor in self._envs.items():
            tensor.copy_(torch.from_numpy(table.envs[name].copy()))
        if table.once is not None:
            free, number = table.once.free_slots()
            if len(self._free) != len(free) + 1:  # one more, for what is not let go of
                with torch.inference_mode(False):
                    self._free = torch.zeros(len(free) + 1, dtype=torch.int64, device=device)
            self._free[:-1].copy_(torch.from_numpy(free))
            self._num_free.fill_(number)
            self._least_free = number
        self._is_stale = False

    def reserve(self, count: int, *, is_capturing: bool) -> None:
        """See to it that there are slots for an add.

        Raises:
            BufferMemoryError: There is no memory for them; nothing was changed.
            BufferMisuseError: A graph is being captured, which might need more than there are.
        """
        table, plan = self._table, self._table.plan
        if is_capturing and self._is_stale:
            raise BufferMisuseError(
                "the first add of tensors takes memory for the places of rows; add some before "
                "an add is captured in a CUDA graph"
            )
        once = table.once
        if once is None:
            return
        enough = plan.num_rows + plan.num_envs
        if once.num_slots >= enough:
            return
        if is_capturing:
            raise BufferMisuseError(
                f"an add in a CUDA graph may need {enough} final observations, and there is room "
                f"for {once.num_slots}; call reserve_final_obs({enough}) before the capture"
            )
        if not self.is_captured and self._least_free < count:
            self.settle()
            once.reserve(count)
            self._is_stale = True

    def add(self, columns: Mapping[str, torch.Tensor], *, is_capturing: bool) -> torch.Tensor:
        """Write transitions that fit; return their rows int64 (K,)."""
        self.reserve(len(columns["rewards"]), is_capturing=is_capturing)
        self._refresh()
        table, plan = self._table, self._table.plan
        span, count, device = plan.span, len(columns["rewards"]), table.device
        begin, end = table.live_there()
        if plan.num_rings == 1:
            numbers, first, step = end + torch.arange(count, device=device), 0, count
        else:
            numbers, first, step = end.clone(), torch.arange(count, device=device) * span, 1
        rows, ends = numbers.remainder(span) + first, end + step
        written = {path: columns[path] for path in plan.layout.fields if path in columns}
        if "env_ids" in plan.layout.fields:
            written["env_ids"] = torch.arange(count, device=device, dtype=torch.int32)
        befores = links = None
        if plan.is_linked:
            codes, befores, links = self._link(columns, numbers, rows, ends)
            written["link"] = codes
        for path, column in written.items():
            self._columns[path].index_copy_(0, rows, column)
        if befores is not None and links is not None:
            self._columns["link"].index_copy_(0, befores, links)
            self._envs["last"].copy_(numbers + 1)
            torch.logical_or(
                columns["terminations"], columns["truncations"], out=self._envs["is_open"]
            )
            self._envs["is_open"].logical_not_()
            self.is_ahead = True
        begin.copy_(torch.maximum(begin, ends - plan.capacity))
        end.copy_(ends)
        self.is_captured |= is_capturing
        if self.is_captured:
            self.is_ahead = True
        else:
            table.count(step)
            self._least_free -= count
        return rows

    def _link(
        self,
        columns: Mapping[str, torch.Tensor],
        numbers: torch.Tensor,
        rows: torch.Tensor,
        ends: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes int32 of new rows; and of which rows int64 the codes change, and to what."""
        table, span = self._table, self._table.plan.span
        before = self._envs["last"] - 1
        is_joined = self._envs["is_open"] & (before >= (ends - span).clamp(min=0))
        before_rows = before.remainder(span) + (rows - rows.remainder(span))
        codes = torch.zeros_like(rows, dtype=torch.int32)
        if table.once is not None:
            is_joined, codes = self._take_slots(columns, rows, is_joined)
        # What follows on nothing writes its own link again.
        targets = torch.where(is_joined, before_rows, rows)
        return codes, targets, torch.where(is_joined, (rows + 1).int(), codes)

    def _take_slots(
        self, columns: Mapping[str, torch.Tensor], rows: torch.Tensor, is_joined: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep next observations in slots; return what is joined, and codes int32 (K,)."""
        table, num_rows, count = self._table, self._table.plan.num_rows, len(rows)
        once: Any = table.once
        units = once.units.view(torch.int64)
        obs, following = once.pack_there(columns, ""), once.pack_there(columns, "next_")
        is_joined = is_joined & (units.index_select(0, self._envs["slot"]) == obs).all(1)
        places = self._num_free - count + torch.arange(count, device=rows.device)
        slots = self._free.index_select(0, places)
        old = self._columns["link"].index_select(0, rows).long() - 1 - num_rows
        let_go, is_free = torch.cat([old, self._envs["slot"]]), torch.cat([old >= 0, is_joined])
        left = self._num_free - count
        places = torch.where(is_free, left + is_free.cumsum(0) - 1, len(self._free) - 1)
        units.index_copy_(0, slots, following)
        self._free.index_copy_(0, places, let_go)
        self._num_free.copy_(left + is_free.sum())
        self._envs["slot"].copy_(slots)
        return is_joined, (slots + (num_rows + 1)).int()

    def settle(self) -> None:
        """Let the host know all that was added on the device; waits if it does not."""
        if not self.is_ahead:
            return
        table = self._table
        if self.is_captured:
            table.take_counts()
        if table.plan.is_linked:
            for name, tensor in self._envs.items():
                table.envs[name] = tensor.cpu().numpy()
            table.links[...] = self._columns["link"].cpu().numpy()
        if table.once is not None:
            number = int(self._num_free)
            table.once.take_back(self._free[:-1].cpu().numpy(), number, self._envs["slot"])
            self._least_free = number
        self.is_ahead = self.is_captured
