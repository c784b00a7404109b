"""What follows from the steps of a rollout: which rows count, episodes, faults, orders of rows.

All of it is operations of torch on the memory that envs write to. On a device nothing is read back,
so that it can be captured in a CUDA graph; what is wrong is noted there until somebody asks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor
from torch.nn.functional import pad

from buffers.core.compiling import njit
from buffers.core.errors import BufferMisuseError
from buffers.core.generator import DeviceGenerator, HostGenerator
from buffers.core.kernels import bounded, random_word
from buffers.rollout.gae import discounted_sums, sum_episodes
from buffers.rollout.storage import UNWRITTEN, UNWRITTEN_FLAG, RolloutStorage

__all__ = ["RolloutRows", "Split", "shuffle"]

_ONE, _LAST_KEY = np.uint64(1), 2**63 - 1
_NO_FINAL = 5
_PUT = "call put(t, actions=..., log_probs=..., values=...) for every step, or let " + (
    "compute_advantages(..., policy_outputs=False) take zeros where nothing was written"
)
_FAULTS = (
    "no results; step the environment into slot(t) for each step",
    "no valid, but others have; an env that writes into slot(t).valid must write all its rows",
    "a reward that is not finite; find what makes it, or leave the row out of `valid`",
    f"no log_probs; {_PUT}",
    f"no values; {_PUT}",
)


class Split(NamedTuple):
    """How a pass is cut into batches."""

    size: int  # of batches
    most: int  # batches there can be
    is_by_size: bool  # the user gave the size

    def number(self, count: int) -> int:
        """How many batches `count` rows make."""
        return -(-count // self.size) if self.is_by_size else min(self.most, count)


class RolloutRows:
    """Marks, counts, checks and shuffles the rows of a rollout, whose memory is given.

    Attributes:
        is_on_host: Envs write to the host, so that reading costs nothing.
        generator: Of the order of rows.
        has_final: bool (T, N), rows whose final value was given; None under NEXT_STEP.
        num_valid: int64 (), of the rollout that was computed last.
        is_counted: bool (), whether the episodes of this rollout were added up.
        num_changes: How often the rows became others: passes through them are over then.
        faults: int64 (6,), by kind, the first row that lacks something, or T * N.
    """

    def __init__(self, storage: RolloutStorage, seed: int | None):
        columns, device = storage.at_env, storage.at_env["rewards"].device
        self._storage, self.is_on_host = storage, not storage.is_on_device
        self._is_next_step = storage.layout.autoreset_mode is AutoresetMode.NEXT_STEP
        self._shape = storage.layout.num_steps, storage.layout.num_envs
        self._num_rows = self._shape[0] * self._shape[1]
        self._rewards, self._valid = columns["rewards"], columns["valid"]
        self._ends, self._cuts = columns["terminations"], columns["truncations"]
        self._is_first, self.has_final = columns["is_first"], columns.get("has_final")
        self._acting = storage.acting
        self._over_before, self._episodes = columns["over_before"], columns["episodes"]
        self._running = columns["running_returns"], columns["running_lengths"]
        self._listed = columns["rows"]
        self.is_counted = torch.zeros((), dtype=torch.bool, device=device)
        self.num_valid = torch.zeros((), dtype=torch.int64, device=device)
        self.faults = torch.full((6,), self._num_rows, dtype=torch.int64, device=device)
        self.num_changes = 0
        made = HostGenerator(seed) if self.is_on_host else DeviceGenerator(seed, device)
        self.generator: Any = made

    # Steps.

    def start(self) -> None:
        """Forget episodes under way, as after a reset of all envs."""
        for tensor in (self._over_before, *self._running):
            tensor.zero_()
        self._is_first[0] = True

    def begin(self) -> None:
        """Forget what was known of the steps of the last rollout."""
        self._valid.fill_(True)
        self.is_counted.fill_(False)
        self.num_changes += 1
        if self.has_final is not None:
            self.has_final.fill_(False)

    def advance(self) -> None:
        """Carry over to the next rollout what this one ends with; its episodes are counted."""
        last = self.mark_first(self._shape[0], self._shape[0] + 1)
        self._over_before.copy_(self._ends[-1] | self._cuts[-1])
        self._is_first[0].copy_(last[0])

    def mark_first(self, first: int, stop: int) -> Tensor:
        """Write and return whether observations begin episodes, of steps 1 <= first to stop - 1.

        See `RolloutBuffer.is_first_at`; of step 0 `start` and `advance` write it.
        """
        rows = self._is_first[first:stop]
        lag = 2 if self._is_next_step else 1  # under NEXT_STEP a step in between only resets
        steps = slice(max(first - lag, 0), stop - lag)
        begins = self._ends[steps] | self._cuts[steps]
        if first < lag:
            begins = torch.cat([self._over_before[None], begins])
        before = slice(first - 1, stop - 1)
        acting = self._acting[before]
        if self.has_final is not None:
            is_known = self.has_final[before] | (acting == UNWRITTEN_FLAG)
            begins = self._ends[before] | (self._cuts[before] & is_known)
        return rows.copy_(begins | (acting == 0))

    def mark_valid(self) -> None:
        """Clear `valid` in steps that only reset, and in rows that did not act; set none."""
        if self._is_next_step:
            self._valid[0].logical_and_(~self._over_before)
            self._valid[1:].logical_and_(~(self._ends[:-1] | self._cuts[:-1]))
        self._valid.logical_and_(self._acting != 0)

    def list_valid(self) -> None:
        """Count the valid rows, and list them on the host."""
        self.num_changes += 1
        if self.is_on_host:
            found = self._valid.reshape(-1).nonzero()[:, 0]
            self._listed[: len(found)] = found
            self.num_valid.fill_(len(found))
        else:
            self.num_valid.copy_(self._valid.sum())

    def fill_final(self, final_values: Tensor | None, values: Tensor) -> None:
        """Take the next rows' values for those not given, where agents' games go on."""
        if self.has_final is not None and final_values is not None:
            is_given = (self.has_final | (self._acting == UNWRITTEN_FLAG)).to(values.device)
            torch.where(is_given, final_values, values[1:], out=final_values)

    # Episodes.

    def count_episodes(self, *, is_finished: bool = False) -> None:
        """Add up episodes, of the rewards as they are, unless it was done in this rollout."""
        if self.is_on_host:
            if not bool(self.is_counted):
                if not is_finished:
                    self.finish()
                columns = self._rewards, self._valid, self._ends, self._cuts
                tensors = *columns, *self._running, self._episodes
                sum_episodes(*[tensor.numpy() for tensor in tensors])
        else:
            self.mark_valid()
            self._count_there(self.is_counted)
        self.is_counted.fill_(True)

    def _count_there(self, is_done: Tensor) -> None:
        """As `sum_episodes`, by operations of torch, unless it was done."""
        over = self._ends | self._cuts
        sums = torch.stack([torch.where(self._valid, self._rewards, 0.0), self._valid], 1).double()
        for k, running in enumerate(self._running):
            sums[0, k] += running
        # Backwards, where `discounted_sums` adds up what comes later.
        goes_on = pad((~over[:-1, None]).double().flip(0), (0, 0, 0, 0, 0, 1)).expand_as(sums)
        sums = discounted_sums(sums.flip(0), goes_on.contiguous()).flip(0)
        for k, running in enumerate(self._running):
            left = torch.where(over[-1], 0.0, sums[-1, k]).to(running.dtype)
            torch.where(is_done, running, left, out=running)
        sums.masked_fill_(~(over & self._valid)[:, None], 0.0)
        torch.where(is_done, self._episodes, sums, out=self._episodes)

    def episodes(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns float64 and lengths int64 (K,) of the episodes that were counted last; waits."""
        has_ended = self._episodes[:, 1] > 0
        returns, lengths = (self._episodes[:, k][has_ended].cpu() for k in range(2))
        return returns.numpy(), lengths.long().numpy()

    # Faults.

    def finish(self) -> None:
        """Complete `valid`; note what the env did not write, and wrong rewards."""
        self._note(0, self._storage.unwritten_rewards())
        unwritten = self._acting == UNWRITTEN_FLAG
        self._note(1, unwritten & ~unwritten.all())
        self.raise_faults(waits=False)  # before flags that nobody wrote clear `valid`
        self.mark_valid()
        self._note(2, ~torch.isfinite(self._rewards) & self._valid)
        self.raise_faults(waits=False)

    def look_for_gaps(self, *outputs: Tensor) -> None:
        """Note rows without policy outputs, log_probs (T, N) and values (T + 1, N), if given.

        And truncated episodes whose final observation is not the next row, and has no value.
        """
        valid, unwritten = self._valid, self._acting == UNWRITTEN_FLAG
        if outputs:
            missing = [x[: len(valid)].view(torch.int32) == UNWRITTEN for x in outputs]
            self._note(3, missing[0].to(valid.device) & valid)
            needed = valid | unwritten  # values in dead steps too, as those of final observations
            needed[1:] |= valid[:-1]
            self._note(4, missing[1].to(valid.device) & needed)
        if self.has_final is not None:
            cut_off = self._cuts & ~self._ends & valid & ~self.has_final
            # An agent that acts in the next step, too, was in a game that was reset, so that its
            # next row has another observation; in the last step that is not known.
            cut_off[:-1] &= self._acting[1:] != 0
            cut_off[-1] &= unwritten[-1]
            self._note(_NO_FINAL, cut_off)
        self.raise_faults(waits=False)

    def _note(self, kind: int, mask: Tensor) -> None:
        if self.is_on_host and not bool(mask.any()):
            return
        places = torch.arange(self._num_rows, device=mask.device)
        first = torch.where(mask.reshape(-1), places, self._num_rows).amin()
        self.faults[kind] = torch.minimum(self.faults[kind], first)

    def raise_faults(self, *, waits: bool = True) -> None:
        """Raise BufferMisuseError for what was noted, and forget it; without waiting, if asked."""
        if not (waits or self.is_on_host):
            return
        found = [(n, row) for n, row in enumerate(self.faults.tolist()) if row < self._num_rows]
        if not found:
            return
        self.faults.fill_(self._num_rows)
        kind, (t, env_id) = found[0][0], divmod(found[0][1], self._shape[1])
        if kind == _NO_FINAL:
            raise BufferMisuseError(
                f"env {env_id} was truncated in step {t}, but the value of its final observation "
                f"is missing; call set_final_values({t}, [{env_id}], values) with the value of "
                f"infos['final_obs'][{env_id}] (under DISABLED: of the observation before reset)"
            )
        late = "" if self.is_on_host else "; the advantages of that rollout were wrong"
        raise BufferMisuseError(f"env {env_id} in step {t} had {_FAULTS[kind]}{late}")

    # Orders.

    def order(self, split: Split, *, is_fixed: bool) -> tuple[list[int], list[Tensor]]:
        """The valid rows in random order: sizes of the batches, and int64 (K,) their rows.

        If they are to have one size, also float32 (K,), 1 where a row comes first and 0 where it is
        repeated to fill a batch.
        """
        number, count = split.most, self.num_valid
        if self.is_on_host:
            rows = self._listed[: int(count)]
            shuffle(rows.numpy(), self.generator.words)
            number, count = split.number(len(rows)), len(rows)
            if not is_fixed:
                sizes = [count // number + (k < count % number) for k in range(number)]
                return sizes, [rows]
        else:
            rows = self._shuffled(self._valid.reshape(-1))
        order, weights = _pad(rows, count, number, split.size)
        return [split.size] * number, [order, weights.float()]

    def sequences(self, split: Split, length: int) -> tuple[list[int], list[Tensor]]:
        """The rows of sequences that have a valid one, in random order, in batches of one size.

        Returned are, as by `order`, sizes, rows and weights, each batch step after step. Where a
        sequence is shorter its last row comes again, with weight 0, as rows that are not valid.
        """
        (num_steps, num_envs), valid, number = self._shape, self._valid, split.most
        num_chunks = -(-num_steps // length)
        missing = num_chunks * length - num_steps
        chunks = pad(valid, (0, 0, 0, missing)).view(num_chunks, length, num_envs)
        has_row = chunks.any(1).reshape(-1)
        if self.is_on_host:
            ids = has_row.nonzero()[:, 0]
            shuffle(ids.numpy(), self.generator.words)
            count: Any = len(ids)
            number = split.number(count)
        else:
            ids, count = self._shuffled(has_row), has_row.sum()
        ids, is_own = _pad(ids, count, number, split.size)
        ids, is_own = (part.view(number, 1, split.size) for part in (ids, is_own))
        step = ids // num_envs * length + torch.arange(length, device=valid.device)[:, None]
        last = step.clamp(max=num_steps - 1)
        rows = (last * num_envs + ids % num_envs).reshape(-1)
        weights = (is_own & (step == last)).reshape(-1) & valid.reshape(-1).index_select(0, rows)
        return [length * split.size] * number, [rows, weights.float()]

    def _shuffled(self, mask: Tensor) -> Tensor:
        """Places in a mask bool (K,), in random order, those where it is set first."""
        keys = torch.empty(len(mask), dtype=torch.int64, device=mask.device)
        keys.random_(generator=self.generator.torch)
        return keys.masked_fill_(~mask, _LAST_KEY).argsort()


@njit(nogil=True, cache=True)
def shuffle(rows, generator):
    """Shuffle rows int64 (K,), K < 2**31, in place; generator uint64 (2,) moves on."""
    key, counter = generator[0], generator[1]
    for last in range(rows.shape[0] - 1, 0, -1):
        chosen = bounded(random_word(key, counter), last + 1)
        counter = np.add(counter, _ONE)
        rows[last], rows[chosen] = rows[chosen], rows[last]
    generator[1] = counter


def _pad(rows: Tensor, count: Any, num_batches: int, size: int) -> tuple[Tensor, Tensor]:
    """The first `count`, an int or int64 (), of rows int64 (K,), spread evenly over batches.

    Some are repeated, evenly too, to fill batches, so that each half of one has rows of its own;
    a bool says which come first. Where there are too few, a batch has one of another batch.
    """
    batch = torch.arange(num_batches, device=rows.device)[:, None]
    place = torch.arange(size, device=rows.device)[None]
    each, longer = (count // num_batches, count % num_batches) if num_batches else (0, 0)
    own = each + (batch < longer)
    start = batch * each + batch.clamp(max=longer)
    # Up to and with a place ceil((place + 1) * own / size) rows are taken.
    taken, before = (((place + k) * own + size - 1) // size for k in (1, 0))
    weights = (taken > before) | ((own == 0) & (place == 0))
    chosen = (start + taken - 1).clamp_(min=0)
    return rows[chosen.reshape(-1)], weights.reshape(-1)
