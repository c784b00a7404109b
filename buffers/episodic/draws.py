"""Draws from episodes: row numbers, from counts and a random stream.

Draws are operations of torch on hosts and devices, and never wait for a device. On the host,
compiled code draws pairs. `Gather` turns row numbers into columns: by compiled code on hosts, by
torch on devices. Goals in hindsight are put into drawn batches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces

from buffers.core.arguments import as_tensor
from buffers.core.batches import each_tensor
from buffers.core.errors import BufferMisuseError
from buffers.core.generator import DeviceGenerator, HostGenerator
from buffers.core.kernels import address_of, copy_item_at, njit, prefetch, random_word, unit_float
from buffers.core.spaces import space_leaves
from buffers.episodic.table import HOLE, PAIRS, EpisodeTable, GoalBatch

__all__ = [
    "STRATEGIES",
    "Columns",
    "Draws",
    "Gather",
    "GoalFunction",
    "Steps",
    "check_goals",
    "is_by_episode",
    "offsets_below",
    "relabel",
]


STRATEGIES = ("bound", "episode", "final", "future")
_OVER = {"steps": False, "episodes": True}
_LOW = 0xFFFFFFFF
_ASKED_BYTES = 512  # prefetched of a row that is about to be copied
_ONE = np.uint64(1)


def is_by_episode(over: str) -> bool:
    """Whether `over` is "episodes", not "steps"; raise BufferMisuseError for other values."""
    by_episode = _OVER.get(over) if isinstance(over, str) else None
    if by_episode is None:
        raise BufferMisuseError(f"over is {over!r}, expected one of {sorted(_OVER)}")
    return by_episode


class Steps(NamedTuple):
    """B drawn steps: int64 (B,) each."""

    first: torch.Tensor  # the first row of the episode
    length: torch.Tensor  # of the episode
    step: torch.Tensor


class Draws:
    """Draws from the episodes of a table by its `generator`."""

    def __init__(self, table: EpisodeTable, seed: int | None):
        self._table, self._num_rows = table, table.layout.num_rows
        self._is_compiled = not table.is_staged
        self.generator: Any
        if self._is_compiled:
            self.generator = HostGenerator(seed)
        else:
            self.generator = DeviceGenerator(seed, table.device)

    def uniforms(self, number: int, count: int) -> torch.Tensor:
        """Random numbers float64 (number, count) in [0, 1)."""
        if self._is_compiled:
            out = np.empty((number, count))
            draw_uniforms(self.generator.words, out.reshape(-1))
            return torch.from_numpy(out)
        device, generator = self._table.device, self.generator.torch
        shape = number, count
        return torch.rand(shape, dtype=torch.float64, device=device, generator=generator)

    def steps(self, law: int, period: int, batch_size: int, by_episode: bool) -> Steps:
        """Draw first steps of pairs or windows, by the law PAIRS or WINDOWS; it must not be empty.

        Windows begin every `period` steps. With `by_episode`, episodes are equally likely.
        """
        table = self._table.there
        pick, place = self.uniforms(2, batch_size)
        before = table[law + by_episode]
        low, high = before.index_select(0, self._table.live_there)
        numbers = low + (pick * (high - low)).long()
        if before.is_cpu:  # torch's searchsorted would start threads for some hundred numbers
            found: Any = np.searchsorted(before.numpy(), numbers.numpy(), side="right")
            slots = torch.from_numpy(found) - 1
        else:
            slots = torch.searchsorted(before, numbers, right=True) - 1
        first, length, hole = table[:PAIRS].index_select(1, slots)
        begin = table[law].index_select(0, slots)
        if by_episode:
            counts = table[law].index_select(0, slots + 1) - begin
            step = (place * counts).long() * period
        else:
            step = (numbers - begin) * period
        return Steps(first, length, step + (step >= hole) if law == PAIRS else step)

    def rows(self, steps: Steps, later: torch.Tensor | int = 0) -> torch.Tensor:
        """Rows of the steps `later` steps after, (B,), or (B, L) if `later` is (B, L)."""
        begin = steps.first + steps.step
        is_run = isinstance(later, torch.Tensor) and later.ndim == 2
        return ((begin[:, None] if is_run else begin) + later) % self._num_rows

    def rooms(self, rows: torch.Tensor) -> torch.Tensor:
        """Distances int64 (B,) of the steps in rows int64 (B,) to their bounds."""
        return self._table.columns["room"].index_select(0, rows).long()

    def pairs(self, batch_size: int, discount: float, by_episode: bool) -> tuple[Any, torch.Tensor]:
        """Draw rows int64 (2, B) of steps and of later ones, an array on the host, else a tensor.

        Returns also the distances of each pair in steps, int64 (B,).
        """
        if self._is_compiled:
            table, words = self._table, self.generator.words
            rows, offsets = np.empty((2, batch_size), np.int64), np.empty(batch_size, np.int64)
            log = math.log(discount) if discount > 0 else -math.inf
            law = table.live.begin, table.live.end, log, by_episode
            draw_pairs(table.rows.numpy(), table.table, words, law, rows, offsets)
            return rows, torch.from_numpy(offsets)
        steps = self.steps(PAIRS, 1, batch_size, by_episode)
        rows = self.rows(steps)
        later = offsets_below(self.uniforms(1, batch_size)[0], self.rooms(rows), discount)
        return torch.stack([rows, (rows + later) % self._num_rows]), later

    def goals(
        self, steps: Steps, strategy: str, relabel_ratio: float, discount: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Distances int64 (B,) from steps to their goals, and whether to use them, bool (B,)."""
        uses, place = self.uniforms(2, len(steps.step))
        remaining = steps.length - steps.step
        if strategy == "final":
            later = remaining
        elif strategy == "episode":
            later = 1 + (place * steps.length).long() - steps.step
        else:
            rooms = remaining if strategy == "future" else self.rooms(self.rows(steps))
            later = offsets_below(place, rooms, discount)
        return later, uses < relabel_ratio


def offsets_below(uniforms: torch.Tensor, rooms: torch.Tensor, discount: float) -> torch.Tensor:
    """Numbers int64 (B,) from 1 to room, with probability proportional to discount ** number.

    They are computed from uniforms float64 (B,), in [0, 1), and rooms int64 (B,), at least 1.
    """
    if discount == 1:
        offsets = (uniforms * rooms).long()
    elif discount == 0:
        return torch.ones_like(rooms)
    else:
        log: Any = math.log(discount)
        mass = -torch.expm1(rooms * log)
        offsets = (torch.log1p(-uniforms * mass) / log).long()
    return torch.minimum(offsets, rooms - 1) + 1


@njit(nogil=True, cache=True)
def draw_uniforms(generator, out):
    """Fill out float64 (K,) with random numbers in [0, 1); advance generator uint64 (2,)."""
    key, counter = generator[0], generator[1]
    for k in range(out.shape[0]):
        out[k] = unit_float(random_word(key, counter))
        counter = np.add(counter, _ONE)
    generator[1] = counter


@njit(nogil=True, cache=True)
def offset_below(uniform, room, log_discount):
    """A number from 1 to room with probability proportional to discount ** number.

    It inverts the distribution function of the truncated law; `min` only clips rounding errors.
    """
    if log_discount == 0.0:
        offset = int(uniform * room)
    elif log_discount < -1e-4:  # log and exp are faster, and exact to twelve digits here
        mass = 1.0 - math.exp(room * log_discount)
        offset = int(math.log(1.0 - uniform * mass) / log_discount)
    else:
        mass = -math.expm1(room * log_discount)  # of 1 .. room in the law that is not truncated
        offset = int(math.log1p(-uniform * mass) / log_discount)
    return min(offset, room - 1) + 1


@njit(nogil=True, cache=True)
def draw_pairs(rows, table, generator, law, chosen, offsets):
    """Draw steps that have room, and for each a later one within its room.

    Args:
        rows: int64 (R, W), the ring; `room` is the lower half of the first word.
        table: int64 (7, S), see `episodic.table`.
        generator: uint64 (2,), advanced.
        law: First and end slot; logarithm of the discount; whether to draw by episodes.
        chosen: int64 (2, B), written: rows of the steps and of the later ones.
        offsets: int64 (B,), written: distances in steps.
    """
    begin, end, log_discount, by_episode = law
    key, counter = generator[0], generator[1]
    num_rows, row_bytes, before = rows.shape[0], 8 * rows.shape[1], table[PAIRS]
    asked_bytes = min(row_bytes, _ASKED_BYTES)
    picked = table[PAIRS + 1] if by_episode else before
    low, count, size = picked[begin], picked[end] - picked[begin], end - begin
    slots, numbers, batch_size = chosen[0], chosen[1], offsets.shape[0]
    for b in range(batch_size):
        numbers[b] = low + int(unit_float(random_word(key, counter)) * count)
        slots[b] = begin
        counter = np.add(counter, _ONE)
    while size > 1:  # binary search for all draws at once, without branches
        half = size >> 1
        for b in range(batch_size):
            slots[b] += half * (picked[np.uint64(slots[b] + half)] <= numbers[b])
        size -= half
    for b in range(batch_size):
        slot = slots[b]
        step = numbers[b] - before[slot]
        if by_episode:
            number_of_steps = before[slot + 1] - before[slot]
            step = int(unit_float(random_word(key, counter)) * number_of_steps)
            counter = np.add(counter, _ONE)
        step += step >= table[HOLE, slot]  # skip the hole
        row = table[0, slot] + step
        row -= num_rows if row >= num_rows else 0
        chosen[0, b] = row
        for line in range(0, asked_bytes, 64):  # so that cache misses overlap
            prefetch(rows, row * row_bytes + line)
    for b in range(batch_size):
        offsets[b] = rows[chosen[0, b], 0] & _LOW
    for b in range(batch_size):
        uniform, row = unit_float(random_word(key, counter)), chosen[0, b]
        counter = np.add(counter, _ONE)
        offsets[b] = offset_below(uniform, offsets[b], log_discount)
        row += offsets[b]
        row -= num_rows if row >= num_rows else 0
        chosen[1, b] = row
        for line in range(0, asked_bytes, 64):
            prefetch(rows, row * row_bytes + line)
    generator[1] = counter


Columns = tuple[tuple[str, int], ...]  # name of each column, and index of its list of rows

_OBS = frozenset(("obs", "next_obs", "future_obs", "goal_obs"))  # columns nested like observations
_ALIGNMENT = 64
_MAX_PLANS = 64


class Gather:
    """Copies columns of the rows of a table."""

    def __init__(self, table: EpisodeTable):
        self._table, self._layout = table, table.layout.row
        self._is_flat = self._layout.obs == ["obs"]
        self._words = None if table.is_staged else table.rows.numpy()
        self._plan = functools.lru_cache(_MAX_PLANS)(self._make_plan)

    def take(self, wanted: Columns, lists: Any, lead: tuple[int, ...]) -> dict[str, Any]:
        """Columns (*lead, *shape) by name; observations nested, extra columns in a dict.

        `lists` are rows int64 (J, K), where K is the product of `lead`; on the host they may be an
        array.
        """
        if self._words is None:
            columns = [
                self._table.columns[p].index_select(0, lists[j]) for p, j in self._paths(wanted)
            ]
            tensors = iter([column.view(*lead, *column.shape[1:]) for column in columns])
        else:
            arrays, copies, nbytes = self._plan(wanted, lead)
            block = np.empty(nbytes, np.uint8)
            rows = lists if isinstance(lists, np.ndarray) else lists.contiguous().numpy()
            gather(self._words, rows, copies, block)
            tensors = iter([
                torch.from_numpy(np.ndarray(shape, dtype, block, begin))
                for shape, dtype, begin in arrays
            ])  # fmt: skip
        found = {}
        for name, _ in wanted:
            if name not in _OBS or self._is_flat:
                found[name] = next(tensors)
            else:
                found[name] = self._layout.build_obs([next(tensors) for _ in self._layout.obs])
        extras = {name: found.pop(name) for name in self._layout.extras if name in found}
        return {**found, "extras": extras}

    def _paths(self, wanted: Columns) -> list[tuple[str, int]]:
        """Paths of the fields of the wanted columns, each with its list of rows."""
        obs = self._layout.obs
        return [(path, j) for name, j in wanted for path in (obs if name in _OBS else (name,))]

    def _make_plan(self, wanted: Columns, lead: tuple[int, ...]) -> tuple[Any, np.ndarray, int]:
        """Layout of columns in one block of host memory, and the size of the block.

        Returns shape, dtype and first byte of each array; then copies int64 (F, 4): byte in the
        row, number of bytes, first byte in the block, list of rows; then the size in bytes.
        """
        arrays, copies, end, size = [], [], 0, int(np.prod(lead, dtype=object))
        for path, j in self._paths(wanted):
            _, shape, dtype, offset = field = self._layout.fields[path]
            end += -end % _ALIGNMENT
            arrays.append(((*lead, *shape), dtype, end))
            copies.append((offset, field.nbytes, end, j))
            end += size * field.nbytes
        return arrays, np.array(copies, np.int64).reshape(-1, 4), end


@njit(nogil=True, cache=True)
def gather(rows, lists, copies, block):
    """Copy fields of rows int64 (R, W) into block uint8, as described by copies int64 (F, 4).

    lists int64 (J, K) are row numbers.
    """
    row_bytes, source, to = 8 * rows.shape[1], address_of(rows), address_of(block)
    for f in range(copies.shape[0]):
        offset, size, target = source + copies[f, 0], copies[f, 1], to + copies[f, 2]
        chosen = lists[copies[f, 3]]
        for k in range(chosen.shape[0]):
            copy_item_at(target + k * size, offset + chosen[k] * row_bytes, size)


GoalFunction = Callable[[Any, Any, Any], Any]

_COLUMNS = {"compute_reward": "rewards", "compute_terminated": "terminations"}


def check_goals(space: Any, keys: tuple[str, str], functions: Mapping[str, Any]) -> bool:
    """Whether observations have both goals; raise if they differ, or functions lack them."""
    has_goals = isinstance(space, spaces.Dict) and {*keys} <= set(space.spaces)
    if not has_goals:
        if given := [name for name, compute in functions.items() if compute is not None]:
            raise BufferMisuseError(
                f"{given[0]} needs a Dict observation space with the keys {keys[0]!r} and "
                f"{keys[1]!r}; leave it out and use goal_obs"
            )
        return False
    parts = [[leaf[:2] for leaf in space_leaves(space[key], "")] for key in keys]
    if parts[0] != parts[1]:
        raise BufferMisuseError(
            f"{keys[0]} has the parts {parts[0]}, but {keys[1]} {parts[1]}; they must be alike to "
            "be exchanged"
        )
    return True


def relabel(batch: GoalBatch, keys: tuple[str, str], functions: Mapping[str, Any]) -> None:
    """Put the goals into the observations, and recompute rewards and terminations.

    `keys` are those of the achieved and the desired goal; `functions` are the user's, by name.
    """
    achieved, desired = keys
    for obs in (batch.obs, batch.next_obs):
        leaves = list[torch.Tensor](), list[torch.Tensor]()
        each_tensor(obs[desired], leaves[0].append)
        each_tensor(batch.goal_obs[achieved], leaves[1].append)
        for old, new in zip(*leaves, strict=True):
            mask = batch.relabelled.view(-1, *[1] * (new.ndim - 1))
            old.copy_(torch.where(mask, new, old))
    for name, compute in functions.items():
        if compute is not None:
            read = batch.next_obs[achieved], batch.next_obs[desired], dict(batch.extras)
            read = each_tensor(read, lambda tensor: tensor.to("cpu", copy=True).numpy())
            column = getattr(batch, _COLUMNS[name])
            made = _computed(name, compute(*read), column)
            column.copy_(torch.where(batch.relabelled, made, column))


def _computed(name: str, made: Any, column: torch.Tensor) -> torch.Tensor:
    """Check the numbers that a function of the user returned, one per step."""
    made = as_tensor(f"what {name} returned", made)
    if made.shape != column.shape:
        raise BufferMisuseError(
            f"{name} returned shape {tuple(made.shape)}, expected {tuple(column.shape)}: one "
            "number per step; of a function f of single steps pass "
            "`lambda achieved, desired, _: [f(a, d, {}) for a, d in zip(achieved, desired)]`"
        )
    if column.dtype is torch.bool:
        is_right, expected, stored = (made == 0) | (made == 1), "flags, 0 or 1", made
    else:
        stored = made.to(column.device, column.dtype)
        is_right, expected = stored.isfinite() & made.isfinite().to(stored.device), "finite numbers"
    if not is_right.all():
        wrong = stored[~is_right][0]
        raise BufferMisuseError(f"{name} returned {wrong}, expected {expected}")
    return stored.to(column.device, column.dtype)
