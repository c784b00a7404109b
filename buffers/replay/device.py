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
from buffers.core.rows import RowLayout
from buffers.replay.batches import views_of
from buffers.replay.table import Table

__all__ = ["DeviceAdds", "read_tensors"]


def read_tensors(
    columns: Mapping[str, Any], layout: RowLayout, device: torch.device
) -> dict[str, torch.Tensor] | None:
    """Columns by path, if all are tensors on the device and as they are stored; else None."""
    own = ("actions", "rewards", "terminations", "truncations", *layout.extras)
    if columns.keys() != {"obs", "next_obs", *own} or not len(columns["rewards"]):
        return None
    count, fields = len(columns["rewards"]), layout.fields
    found: dict[str, Any] = {}
    kinds = [(name, columns[name], fields[name]) for name in own]
    for prefix in ("", "next_"):
        leaves = tree_leaves(layout.observation_space, columns[f"{prefix}obs"], f"{prefix}obs")
        paired = zip(layout.obs, leaves, strict=True)
        kinds += [(prefix + path, leaf, fields[path]) for path, leaf in paired]
    for path, tensor, field in kinds:
        if not isinstance(tensor, torch.Tensor) or tensor.device != device:
            return None
        if tensor.dtype != torch_dtype(field.dtype) or tensor.shape != (count, *field.shape):
            return None
        found[path] = tensor.detach()
    return found


class DeviceAdds:
    """Adds tensors to a table on their device.

    Attributes:
        is_ahead: The device has what the host does not know yet.
        is_captured: An add is in a CUDA graph, so that the host never knows how many there are.
    """

    def __init__(self, table: Table):
        plan, device = table.plan, table.device
        self._table = table
        with torch.inference_mode(False):
            self._columns = views_of(table.rows, plan.layout.fields)
            self._last = torch.zeros(plan.num_envs, dtype=torch.int64, device=device)
            self._is_open = torch.zeros(plan.num_envs, dtype=torch.bool, device=device)
            self._free = torch.zeros(1, dtype=torch.int64, device=device)
            self._num_free = torch.zeros((), dtype=torch.int64, device=device)
        self._least_free = 0  # slots that are free for certain
        self.is_ahead = self.is_captured = False
        self._is_stale = True  # the host has what the device does not know yet

    def fits(self, count: int, ids: np.ndarray) -> bool:
        """Whether rows can be added so: whole steps where it matters whose they are."""
        plan = self._table.plan
        is_whole = count == plan.num_envs and not len(ids)
        is_any = not (plan.is_linked or plan.num_rings > 1 or "env_ids" in plan.layout.fields)
        return (is_whole or is_any) and count <= plan.span * plan.num_rings

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
        self._last.copy_(torch.from_numpy(table.envs["last"].copy()))
        self._is_open.copy_(torch.from_numpy(table.envs["is_open"].copy()))
        if table.once is not None:
            free, number = table.once.free, int(table.once.num_free[0])
            if len(self._free) != len(free) + 1:  # one more, for what is not let go of
                with torch.inference_mode(False):
                    self._free = torch.zeros(len(free) + 1, dtype=torch.int64, device=device)
            self._free[:-1].copy_(torch.from_numpy(free))
            self._num_free.fill_(number)
            self._least_free = number
        self._is_stale = False

    def _reserve(self, count: int, *, is_capturing: bool) -> None:
        """See to it that there are slots for an add; raise as `Once.resize`."""
        once, enough = self._table.once, self._table.plan.num_rows + self._table.plan.num_envs
        is_short = once is not None and once.num_slots < enough
        if is_capturing and (self._is_stale or is_short):
            raise BufferMisuseError(
                "an add can be captured in a CUDA graph after another one, and if there is room "
                f"for all final observations: add before, and call reserve_final_obs({enough})"
            )
        if once is not None and is_short and not self.is_captured and self._least_free < count:
            self.settle()
            once.reserve(count)
            self._is_stale = True

    def add(self, columns: Mapping[str, torch.Tensor], *, is_capturing: bool) -> torch.Tensor:
        """Write transitions that fit; return their rows int64 (K,)."""
        count, table, plan = len(columns["rewards"]), self._table, self._table.plan
        self._reserve(count, is_capturing=is_capturing)
        self._refresh()
        span, places = plan.span, torch.arange(count, device=table.device)
        begin, end = table.live_there()
        if plan.num_rings == 1:
            numbers, first, step = end + places, 0, count
        else:
            numbers, first, step = end.clone(), places * span, 1
        rows, ends = numbers.remainder(span) + first, end + step
        written = {path: columns[path] for path in plan.layout.fields if path in columns}
        if "env_ids" in plan.layout.fields:
            written["env_ids"] = places.int()
        befores = links = None
        if plan.is_linked:
            written["link"], befores, links = self._link(columns, rows, ends)
        for path, column in written.items():
            self._columns[path].index_copy_(0, rows, column)
        if befores is not None and links is not None:
            self._columns["link"].index_copy_(0, befores, links)
            self._last.copy_(numbers + 1)
            is_over = torch.logical_or(columns["terminations"], columns["truncations"])
            torch.logical_not(is_over, out=self._is_open)
            self.is_ahead = True
        begin.copy_(torch.maximum(begin, ends - plan.capacity))
        end.copy_(ends)
        self.is_captured |= is_capturing
        if self.is_captured:
            self.is_ahead = True
        else:
            np.maximum(table.begun, table.committed + step, out=table.begun)
            table.committed += step
            self._least_free -= count
        return rows

    def _link(
        self, columns: Mapping[str, torch.Tensor], rows: torch.Tensor, ends: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes int32 of new rows; and of which rows int64 the codes change, and to what."""
        once, span = self._table.once, self._table.plan.span
        before = self._last - 1
        is_joined = self._is_open & (before >= (ends - span).clamp(min=0))
        before_rows = before.remainder(span) + (rows - rows.remainder(span))
        codes = torch.zeros_like(rows, dtype=torch.int32)
        if once is not None:
            is_joined, codes = self._take_slots(once, columns, rows, before_rows, is_joined)
        # What follows on nothing writes its own link again.
        targets = torch.where(is_joined, before_rows, rows)
        return codes, targets, torch.where(is_joined, (rows + 1).int(), codes)

    def _take_slots(
        self,
        once: Any,
        columns: Mapping[str, torch.Tensor],
        rows: torch.Tensor,
        before_rows: torch.Tensor,
        is_joined: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep next observations in slots; return what is joined, and codes int32 (K,)."""
        num_rows, count = self._table.plan.num_rows, len(rows)
        units, column = once.units.view(torch.int64), self._columns["link"]
        obs, following = once.pack_there(columns, ""), once.pack_there(columns, "next_")
        own = (column.index_select(0, before_rows).long() - 1 - num_rows).clamp(min=0)
        is_joined = is_joined & (units.index_select(0, own) == obs).all(1)
        left = self._num_free - count
        slots = self._free.index_select(0, left + torch.arange(count, device=rows.device))
        old = column.index_select(0, rows).long() - 1 - num_rows
        let_go, is_free = torch.cat([old, own]), torch.cat([old >= 0, is_joined])
        places = torch.where(is_free, left + is_free.cumsum(0) - 1, len(self._free) - 1)
        units.index_copy_(0, slots, following)
        self._free.index_copy_(0, places, let_go)
        self._num_free.copy_(left + is_free.sum())
        return is_joined, (slots + (num_rows + 1)).int()

    def settle(self) -> None:
        """Let the host know all that was added on the device; waits if it does not."""
        if not self.is_ahead:
            return
        table, once = self._table, self._table.once
        if self.is_captured:
            end = table.live_there()[1].cpu().numpy()
            np.maximum(table.begun, end, out=table.begun)
            table.committed[...] = end
        if table.plan.is_linked:
            table.envs["last"] = self._last.cpu().numpy()
            table.envs["is_open"] = self._is_open.cpu().numpy()
            table.links[...] = self._columns["link"].cpu().numpy()
        if once is not None:
            number, plan = int(self._num_free), table.plan
            rings = np.arange(plan.num_envs) // (plan.num_envs // plan.num_rings)
            newest = rings * plan.span + (table.envs["last"] - 1) % plan.span
            slots = np.maximum(table.links[newest].astype(np.int64) - 1 - plan.num_rows, 0)
            where = torch.from_numpy(slots).to(table.device)
            once.take_back(self._free[:-1].cpu().numpy(), number, where)
            self._least_free = number
        self.is_ahead = self.is_captured
