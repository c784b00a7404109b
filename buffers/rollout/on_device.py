"""What is done with the rows of a rollout on a device, so that nothing waits for it.

Each function of the compiled `kernels` has its like here, in operations of torch: dead steps,
episodes, the order of rows, what is missing. Nothing is read back, so all of it can be captured in
a CUDA graph; `DeviceRows.faults` and `DeviceRows.ended` are for those who wait.
"""

from __future__ import annotations

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from buffers.core.generator import DeviceGenerator
from buffers.core.memory import allocation
from buffers.rollout.kernels import UNWRITTEN, UNWRITTEN_FLAG
from buffers.rollout.layout import RolloutLayout
from buffers.rollout.storage import RolloutStorage

__all__ = ["NO_FINAL", "NO_LOG_PROBS", "NO_RESULTS", "NO_VALID", "NO_VALUES", "DeviceRows"]
__all__ += ["WRONG_REWARD"]

NO_RESULTS, WRONG_REWARD, NO_LOG_PROBS, NO_VALUES, NO_FINAL, NO_VALID = range(6)  # of `faults`
_LAST_KEY = 2**63 - 1


class DeviceRows:
    """Marks, counts, checks and shuffles the rows of a rollout whose env is on the device.

    Args:
        layout: Of the rollout.
        storage: Its memory.
        seed: Of the order of rows.

    Attributes:
        generator: Of the order of rows.
        over_before: bool (N,), whether the step before the first one ended an episode.
        running_returns: float64 (N,), of the episodes that were open before the first step.
        running_lengths: int64 (N,), of these.
        has_final: bool (T, N), or None: rows whose final value was given.
        num_valid: int64 (), of the rollout that was computed last.
        faults: int64 (6,), the first row that lacks something, by kind, or T * N: since the last
            `forget_faults`.
        ended: bool (T, N), rows with which episodes ended, of the rollout that was counted last.
        returns: float64 (T, N), returns of these episodes; elsewhere of those under way.
        lengths: int64 (T, N), their lengths.
    """

    def __init__(self, layout: RolloutLayout, storage: RolloutStorage, seed: int | None):
        self._layout, self._storage, device = layout, storage, storage.device
        self._is_next_step = layout.autoreset_mode is AutoresetMode.NEXT_STEP
        shape = self._shape = layout.num_steps, layout.num_envs
        self._num_rows = layout.num_steps * layout.num_envs
        what, advice = f"episodes of {self._num_rows} rows", "use fewer steps or envs"
        with allocation(what, 18 * self._num_rows, device, advice):
            self.over_before = torch.zeros(shape[1], dtype=torch.bool, device=device)
            self.running_returns = torch.zeros(shape[1], dtype=torch.float64, device=device)
            self.running_lengths = torch.zeros(shape[1], dtype=torch.int64, device=device)
            self.ended = torch.zeros(shape, dtype=torch.bool, device=device)
            self.returns = torch.zeros(shape, dtype=torch.float64, device=device)
            self.lengths = torch.zeros(shape, dtype=torch.int64, device=device)
            self._next_returns = torch.zeros_like(self.running_returns)
            self._next_lengths = torch.zeros_like(self.running_lengths)
            self._is_counted = torch.zeros((), dtype=torch.bool, device=device)
            self._is_given = torch.zeros(shape, dtype=torch.bool, device=device)
            self.num_valid = torch.zeros((), dtype=torch.int64, device=device)
            self.faults = torch.full((6,), self._num_rows, dtype=torch.int64, device=device)
        self.has_final = self._is_given if layout.uses_final_values else None
        self.generator = DeviceGenerator(seed, device)
        names = ("rewards", "values", "log_probs", "terminations", "truncations", "valid")
        self._columns = {name: storage.tensor(name) for name in names}
        self._is_first = storage.tensor("is_first")

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        held = self.ended, self.returns, self.lengths, self._is_given
        carried = self.over_before, *(2 * (self.running_returns, self.running_lengths))
        return sum(tensor.nbytes for tensor in (*held, *carried))

    def start(self) -> None:
        """Forget episodes under way, as after a reset of all envs."""
        for tensor in (self.over_before, self.running_returns, self.running_lengths):
            tensor.zero_()
        self._is_first[0] = True

    def begin(self) -> None:
        """Mark what the policy makes of steps as not written yet."""
        self._storage.mark_policy_outputs()
        self._columns["valid"].fill_(True)
        self._is_given.fill_(False)
        self._is_counted.fill_(False)

    def mark_results(self) -> None:
        """Mark what the env makes of steps as not written yet."""
        self._columns["rewards"].view(torch.int32).fill_(UNWRITTEN)
        written = self._storage.written_valid.tensor
        if written is not None:
            written.view(torch.uint8).fill_(UNWRITTEN_FLAG)

    def advance(self) -> None:
        """Carry over to the next rollout what a computed one ends with, but for observations."""
        self.count_episodes()
        self.running_returns.copy_(self._next_returns)
        self.running_lengths.copy_(self._next_lengths)
        self.mark_first(self._shape[0])
        self.over_before.copy_(self._over(-1))
        self._is_first[0].copy_(self._is_first[-1])

    def mark_first(self, t: int) -> torch.Tensor:
        """Write whether the observations before step t begin episodes, bool (N,), and return it.

        See `RolloutBuffer.is_first_at`; of step 0 `start` and `advance` write it.
        """
        row, over = self._is_first[t], self._over
        if t == 0:
            return row
        last = t - 2 if self._is_next_step else t - 1
        row.copy_(over(last) if last >= 0 else self.over_before)
        written = self._storage.written_valid.tensor
        if written is not None:
            if not self._is_next_step:
                ends, cuts = (self._columns[k][t - 1] for k in ("terminations", "truncations"))
                row.copy_(ends | (cuts & self._is_given[t - 1]))
            row.logical_or_(~written[t - 1])
        return row

    def mark_all_first(self) -> None:
        """Do what `mark_first` does for each step, of the flags as they are."""
        later, over, written = self._is_first[1:], self._over(), self._storage.written_valid.tensor
        if self._is_next_step:
            later[0].copy_(self.over_before)
            later[1:].copy_(over[:-1])
        elif written is None:
            later.copy_(over)
        else:
            ends, cuts = (self._columns[name] for name in ("terminations", "truncations"))
            later.copy_(ends | (cuts & self._is_given))
        if written is not None:
            later.logical_or_(~written)

    def set_final_values(self, t: int, mask: torch.Tensor, values: torch.Tensor) -> None:
        """Write the final values float32 (N,) of step t where mask bool (N,)."""
        row = self._storage.tensor("final_values")[t]
        torch.where(mask, values, row, out=row)
        self._is_given[t].logical_or_(mask)

    def count_episodes(self) -> None:
        """Add up episodes, of the rewards as they are, unless it was done in this rollout."""
        is_done, over = self._is_counted, self._over()
        valid = self._mark_valid(over)
        ends, ended = self._last_end(over), over & valid
        self.ended.copy_(torch.where(is_done, self.ended, ended))
        before = torch.nn.functional.pad(ends[:-1], (0, 0, 1, 0), value=-1)
        targets = (self.returns, self._next_returns), (self.lengths, self._next_lengths)
        for (found, following), sums in zip(targets, self._sums(), strict=True):
            torch.where(is_done, found, sums - _at(sums, before), out=found)
            left = torch.where(over[-1], 0, sums[-1] - _at(sums, ends[-1]))
            torch.where(is_done, following, left, out=following)
        is_done.fill_(True)

    def _mark_valid(self, over: torch.Tensor) -> torch.Tensor:
        """Clear `valid` bool (T, N) in dead steps, and where the env says so; return it."""
        valid, written = self._columns["valid"], self._storage.written_valid.tensor
        if self._is_next_step:
            valid[0].logical_and_(~self.over_before)
            valid[1:].logical_and_(~over[:-1])
        if written is not None:
            valid.logical_and_(written)
        return valid

    def complete(self) -> None:
        """Finish `valid`, `final_values`, episodes and faults, before advantages are computed."""
        self.count_episodes()
        rows, written = self._columns, self._storage.written_valid.tensor
        valid = self._mark_valid(self._over())
        self.num_valid.copy_(valid.sum())
        self._look_for_faults(valid, written)
        for name in ("log_probs", "values"):  # what was not written, and need not be, is zero
            bits = rows[name].view(torch.int32)
            bits.masked_fill_(bits == UNWRITTEN, 0)
        if self.has_final is not None and written is not None:
            final = self._storage.tensor("final_values")
            torch.where(self.has_final, final, rows["values"][1:], out=final)

    def _over(self, t: int | slice = slice(None)) -> torch.Tensor:
        return self._columns["terminations"][t] | self._columns["truncations"][t]

    def _sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rewards and numbers of valid rows up to each row, (T, N), the episodes before included.

        What lies between the ends of two episodes is the difference of two of these.
        """
        valid = self._columns["valid"]
        rewards = torch.where(valid, self._columns["rewards"], 0.0).double()
        rewards[0] += self.running_returns
        counts = valid.long()
        counts[0] += self.running_lengths
        return rewards.cumsum(0), counts.cumsum(0)

    def _last_end(self, over: torch.Tensor) -> torch.Tensor:
        """The last step up to each row that ended an episode of its env, int64 (T, N), or -1."""
        steps = torch.arange(len(over), device=over.device)[:, None]
        return torch.where(over, steps, -1).cummax(0).values

    def _look_for_faults(self, valid: torch.Tensor, written: torch.Tensor | None) -> None:
        rows, size = self._columns, self._shape[0]
        bits = {
            name: rows[name].view(torch.int32)[:size] == UNWRITTEN
            for name in ("rewards", "log_probs", "values")
        }
        found = {
            NO_RESULTS: bits["rewards"],
            WRONG_REWARD: ~torch.isfinite(rows["rewards"]) & ~bits["rewards"] & valid,
            NO_LOG_PROBS: bits["log_probs"] & valid,
            NO_VALUES: bits["values"],  # in dead steps too, as those of final observations
        }
        if written is not None:
            found[NO_VALID] = written.view(torch.uint8) == UNWRITTEN_FLAG
            is_valued = valid.clone()
            is_valued[1:] |= valid[:-1]
            found[NO_VALUES] = bits["values"] & is_valued
        if self.has_final is not None:
            is_cut = rows["truncations"] & ~rows["terminations"] & valid & ~self.has_final
            if written is not None:  # the next row has the value, unless the game was reset
                is_cut[:-1] &= written[1:]
                is_cut[-1] = False
            found[NO_FINAL] = is_cut
        places = torch.arange(self._num_rows, device=valid.device)
        for kind, mask in found.items():
            first = torch.where(mask.reshape(-1), places, self._num_rows).amin()
            self.faults[kind] = torch.minimum(self.faults[kind], first)

    def forget_faults(self) -> None:
        """Take no row for faulty."""
        self.faults.fill_(self._num_rows)

    def padded(self, num_batches: int, size: int) -> list[torch.Tensor]:
        """The valid rows in random order, in batches of one size, and their weights.

        As `kernels.pad_batches` lays them out. Where there are fewer valid rows than batches, one
        of them fills each batch that would have none.

        Returns:
            int64 and float32 (num_batches * size,).
        """
        rows = self._shuffled(self._columns["valid"].reshape(-1))
        order, weights = _pad(rows, self.num_valid, num_batches, size)
        return [order, weights.float()]

    def padded_sequences(self, length: int, num_batches: int, size: int) -> list[torch.Tensor]:
        """Rows of the sequences that have a valid one, in random order, and their weights.

        As `kernels.lay_out_sequences` lists them, in batches of one size as above.

        Returns:
            int64 and float32 (num_batches * length * size,).
        """
        (num_steps, num_envs), valid = self._shape, self._columns["valid"]
        num_chunks = -(-num_steps // length)
        missing = num_chunks * length - num_steps
        chunks = torch.nn.functional.pad(valid, (0, 0, 0, missing)).view(num_chunks, length, -1)
        has_row = chunks.any(1).reshape(-1)
        ids, is_own = _pad(self._shuffled(has_row), has_row.sum(), num_batches, size)
        ids, is_own = ids.view(num_batches, 1, size), is_own.view(num_batches, 1, size)
        chunk, env = torch.div(ids, num_envs, rounding_mode="floor"), ids % num_envs
        step = chunk * length + torch.arange(length, device=valid.device)[:, None]
        last = step.clamp(max=num_steps - 1)
        rows = (last * num_envs + env).reshape(-1)
        weights = (is_own & (step == last)).reshape(-1) & valid.reshape(-1).index_select(0, rows)
        return [rows, weights.float()]

    def _shuffled(self, mask: torch.Tensor) -> torch.Tensor:
        """Places in a mask bool (K,), in random order, those where it is set first."""
        keys = torch.empty(len(mask), dtype=torch.int64, device=mask.device)
        keys.random_(generator=self.generator.torch)
        return keys.masked_fill_(~mask, _LAST_KEY).argsort()

    def carry(self) -> dict[str, np.ndarray]:
        """What the next rollout starts from beside observations, as arrays; waits."""
        carried = {
            "over_before": self.over_before,
            "running_returns": self.running_returns,
            "running_lengths": self.running_lengths,
            "is_first": self._is_first[0],
        }
        return {name: tensor.cpu().numpy() for name, tensor in carried.items()}

    def take_carry(self, carried: dict[str, np.ndarray]) -> None:
        """Go on from what `carry` returned."""
        for name in ("over_before", "running_returns", "running_lengths"):
            getattr(self, name).copy_(torch.from_numpy(np.array(carried[name])))
        self._is_first[0].copy_(torch.from_numpy(np.array(carried["is_first"])))


def _at(sums: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Rows of sums (T, N) at steps int64 (..., N), or zeros where these are negative."""
    rows = steps.clamp(min=0)
    found = sums.gather(0, rows if rows.ndim == 2 else rows[None]).view(rows.shape)
    return torch.where(steps >= 0, found, 0)


def _pad(
    rows: torch.Tensor, count: torch.Tensor, num_batches: int, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `count` rows int64 (K,) in batches of one size; see `DeviceRows.padded`.

    Returns:
        int64 and bool (num_batches * size,), the rows and whether they count.
    """
    batch = torch.arange(num_batches, device=rows.device)[:, None]
    place = torch.arange(size, device=rows.device)[None]
    each, longer = torch.div(count, num_batches, rounding_mode="floor"), count % num_batches
    own = each + (batch < longer)
    start = batch * each + torch.minimum(batch, longer)
    # Up to and with a place ceil((place + 1) * own / size) rows are taken.
    taken = torch.div((place + 1) * own + size - 1, size, rounding_mode="floor")
    before = torch.div(place * own + size - 1, size, rounding_mode="floor")
    weights = (taken > before) | ((own == 0) & (place == 0))
    chosen = (start + taken - 1).clamp_(min=0)
    return rows[chosen.reshape(-1)], weights.reshape(-1)
