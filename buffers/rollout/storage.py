"""The memory of a rollout, and what follows from its steps: valid rows, episodes, faults.

::

    envs on the CPU, device "cpu"       one memory: arrays for the envs, tensors for the learner
    envs on the CPU, another device     host pages for the envs, copied to tensors on the device
    envs on the device                  one memory: tensors on the device for both

Valid rows, episodes and faults are computed by torch in the memory that envs write to. On a device
nothing is read back, so a CUDA graph can capture it; faults are noted there until `raise_faults`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space
from gymnasium.vector import AutoresetMode
from torch import Tensor
from torch.nn.functional import pad

from buffers.core.arguments import as_tensor, check_count
from buffers.core.errors import BufferMisuseError
from buffers.core.memory import Allocate, ColumnSpec, allocate_columns
from buffers.core.spaces import Leaf, action_leaf, build_tree, extra_leaves, obs_leaves
from buffers.rollout.gae import discounted_sums, sum_episodes
from vecenv.core.arguments import read_autoreset_mode

__all__ = [
    "RESULTS", "UNWRITTEN", "UNWRITTEN_FLAG", "RolloutLayout", "RolloutSlot", "RolloutStorage",
    "parse_autoreset_mode", "plan_rollout",
]  # fmt: skip

RESULTS = ("rewards", "terminations", "truncations")
# Bits of a float32 that has not been written yet: a NaN that no computation yields. Async vector
# envs mark rewards in `step(out=)` likewise, so rows that a dead worker left are recognised too.
UNWRITTEN = 0x7FC5EED1
UNWRITTEN_FLAG = 2  # the mark of a flag that has not been written; written flags are 0 or 1

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

_MAX_ROWS = 2**31 - 1  # the shuffle draws numbers below 2**31

# Names that no extra column may have: other columns, entries of batches and of `memory`, and
# parameters of `put`.
_TAKEN = frozenset((
    "obs", "actions", "log_probs", "values", "rewards", "terminations", "truncations", "valid",
    "final_values", "advantages", "returns", "rows", "over_before", "running_returns", "episodes",
    "running_lengths", "has_final", "indices", "extras", "memory", "self", "t", "weights",
    "is_first", "initial_states", "acting",
))  # fmt: skip


class RolloutLayout(NamedTuple):
    """Sizes and columns of a rollout buffer; nothing is allocated yet."""

    num_steps: int
    num_envs: int
    observation_space: Space
    obs_leaves: list[Leaf]
    extras: list[str]
    games: list[str]  # the columns with one row per game
    agents_per_game: int  # rows of a step that share a row of a game column
    autoreset_mode: AutoresetMode
    columns: list[ColumnSpec]  # "host": where envs write; "device": where the tensors live


def plan_rollout(
    num_steps: int,
    num_envs: int,
    observation_space: Space,
    action_space: Space,
    *,
    autoreset_mode: AutoresetMode | str,
    extra_columns: Mapping[str, Space] | None,
    game_columns: Mapping[str, Space] | None,
    agents_per_game: int | None,
) -> RolloutLayout:
    """Plan the columns of a rollout buffer; raise BufferMisuseError if an argument is wrong."""
    num_steps, num_envs = check_count("num_steps", num_steps), check_count("num_envs", num_envs)
    if num_steps * num_envs > _MAX_ROWS:
        raise BufferMisuseError(
            f"num_steps * num_envs is {num_steps * num_envs}, expected at most {_MAX_ROWS}; "
            "use shorter rollouts"
        )
    obs = obs_leaves(observation_space)
    action, extras = action_leaf(action_space), extra_leaves(extra_columns, _TAKEN)
    if game_columns and agents_per_game is None:
        raise BufferMisuseError(
            "game_columns needs agents_per_game, the number of agents whose rows share one of a "
            "game column; pass it too"
        )
    agents = 1 if agents_per_game is None else check_count("agents_per_game", agents_per_game)
    if num_envs % agents:
        raise BufferMisuseError(
            f"agents_per_game is {agents}, which does not divide num_envs = {num_envs}; expected "
            "num_envs to be the number of games times that of agents of each"
        )
    games = extra_leaves(game_columns, _TAKEN | {leaf.path for leaf in extras}, "game column")
    mode = parse_autoreset_mode(autoreset_mode)

    steps, later = (num_steps, num_envs), (num_steps + 1, num_envs)
    columns = [ColumnSpec(o.path, (*later, *o.shape), o.dtype, "both", True) for o in obs]
    columns.append(ColumnSpec("actions", (*steps, *action.shape), action.dtype, "both", True))

    def add(place: Any, dtype: Any, shape: tuple[int, ...], *names: str, is_shared: bool = False):
        columns.extend(ColumnSpec(n, shape, np.dtype(dtype), place, is_shared) for n in names)

    add("both", "f4", steps, "rewards", is_shared=True)
    add("both", "?", steps, "terminations", "truncations", is_shared=True)
    add("host", "?", steps, "acting", is_shared=True)
    add("both", "?", steps, "valid")
    add("both", "?", later, "is_first")
    add("device", "f4", steps, "log_probs", "advantages", "returns")
    add("device", "f4", later, "values")
    add("host", "i8", (num_steps * num_envs,), "rows")  # the valid ones
    add("host", "?", (num_envs,), "over_before")
    add("host", "f8", (num_envs,), "running_returns")
    add("host", "i8", (num_envs,), "running_lengths")
    # Returns and lengths where episodes ended, else zeros.
    add("host", "f8", (num_steps, 2, num_envs), "episodes")
    for count, leaves in ((num_envs, extras), (num_envs // agents, games)):
        for leaf in leaves:
            add("device", leaf.dtype, (num_steps, count, *leaf.shape), leaf.path)
    if mode is not AutoresetMode.NEXT_STEP:
        add("device", "f4", steps, "final_values")
        add("host", "?", steps, "has_final")
    own, shared = ([leaf.path for leaf in leaves] for leaves in (extras, games))
    space = observation_space
    return RolloutLayout(num_steps, num_envs, space, obs, own, shared, agents, mode, columns)


def parse_autoreset_mode(mode: AutoresetMode | str) -> AutoresetMode:
    """Convert a member, name or value of the enum; raise BufferMisuseError for others."""
    try:
        return read_autoreset_mode(mode)
    except ValueError as error:
        raise BufferMisuseError(
            f'{error}; pass envs.metadata["autoreset_mode"] of the vector env that fills the buffer'
        ) from None


class RolloutSlot(NamedTuple):
    """Where an environment writes the results of one step: views of the buffer's host pages.

    With environments on the buffer's device, they are tensors there.

    The attribute `autoreset_mode` is the mode of the buffer: `step(out=)` of vecenv's vector envs
    refuses a slot of another mode.

    The attribute `valid`, bool (N,), is for envs in which not all rows act in every step, such as
    games whose agents die. It says which rows acted in this step, so that their reward, flags and
    next observation are a transition. Such an env writes all elements in every step; other envs
    must not write it.
    """

    obs: Any  # (N, *obs_shape), nested like the observation space
    rewards: np.ndarray  # float32 (N,)
    terminations: np.ndarray  # bool (N,)
    truncations: np.ndarray  # bool (N,)

    autoreset_mode = None
    valid = None


class _Slot(RolloutSlot):
    """A slot of a buffer; unlike a NamedTuple it can have the two attributes."""


class RolloutStorage:
    """Columns of a rollout, and views per step, made once: making one takes as long as a copy.

    Attributes:
        is_on_device: Envs write tensors on the device.
        is_apart: Envs write host pages, which are copied to the device.
        columns: All columns by name.
        tensors, at_env: The tensors of all columns: for the learner, on the device; and where the
            env writes, for columns that it writes or that are computed from these.
        obs, obs_rows: Observations, nested like the space; and T + 1 nests (N, *obs_shape).
        slots: T slots, of arrays or, on the device, tensors.
        action_rows: T views (N, *action_shape) of actions as envs take them.
        rows: Views of the learner's tensors, one for each step.
        acting: uint8 (T, N), whether rows acted, written by envs with agents: 0, 1 or
            `UNWRITTEN_FLAG`.
        has_final: bool (T, N), rows whose final value was given; None under NEXT_STEP.
        num_valid: int64 (), valid rows of the last computed rollout.
        is_counted: bool (), whether the episodes of this rollout were summed up.
        num_changes: How often the rows have changed; a change ends passes of minibatches.
        faults: int64 (6,), with envs on a device: by kind, the first row with the fault, or T * N.
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
        # `allocate` is a bound method of the envs, whose `device` tells where they write.
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
        self.at_env = {
            name: torch.from_numpy(column.host) if column.is_twofold else column.tensor
            for name, column in self.columns.items()
        }
        self.acting = self.at_env["acting"].view(torch.uint8)
        columns, self.is_on_host = self.at_env, not self.is_on_device
        self._is_next_step = layout.autoreset_mode is AutoresetMode.NEXT_STEP
        self._num_rows = layout.num_steps * layout.num_envs
        self._rewards, self._valid = columns["rewards"], columns["valid"]
        self._ends, self._cuts = columns["terminations"], columns["truncations"]
        self._is_first, self.has_final = columns["is_first"], columns.get("has_final")
        self._over_before, self._episodes = columns["over_before"], columns["episodes"]
        self._running = columns["running_returns"], columns["running_lengths"]
        like: Any = {"device": self._rewards.device}
        self.is_counted = torch.zeros((), dtype=torch.bool, **like)
        self.num_valid = torch.zeros((), dtype=torch.int64, **like)
        self.faults = torch.full((6,), self._num_rows, dtype=torch.int64, **like)
        self.num_changes = 0
        self._paths = [leaf.path for leaf in layout.obs_leaves]
        self.rows = {name: tensor.unbind(0) for name, tensor in self.tensors.items()}
        self.obs = self.nest(self.tensors[path] for path in self._paths)
        obs_rows = zip(*(self.rows[path] for path in self._paths), strict=True)
        self.obs_rows = [self.nest(leaves) for leaves in obs_rows]
        obs = zip(*map(self._rows_at_env, self._paths), strict=True)
        written = map(self._rows_at_env, (*RESULTS, "acting"))
        self.slots = []
        for leaves, *results, acting in zip(islice(obs, 1, None), *written, strict=True):
            slot: Any = _Slot(self.nest(leaves), *results)
            slot.valid, slot.autoreset_mode = acting, layout.autoreset_mode
            self.slots.append(slot)
        self.action_rows = self._rows_at_env("actions")

    def _rows_at_env(self, name: str) -> list[Any]:
        return list(self.rows[name] if self.is_on_device else self.columns[name].host)

    def nest(self, leaves: Any) -> Any:
        """Nest the leaves of an observation like the space."""
        return build_tree(self.layout.observation_space, [*leaves])

    def begin(self) -> None:
        """Mark all columns that must be written as not written; reset flags of the last rollout."""
        # By bits, as NaN is unequal to itself.
        for column in (self.tensors["log_probs"], self.tensors["values"], self._rewards):
            column.view(torch.int32).fill_(UNWRITTEN)
        self.acting.fill_(UNWRITTEN_FLAG)
        self._valid.fill_(True)
        self.is_counted.fill_(False)
        self.num_changes += 1
        if self.has_final is not None:
            self.has_final.fill_(False)

    def unwritten_rewards(self) -> torch.Tensor:
        """Whether the env has not yet written a reward in this rollout, bool (T, N)."""
        return self._rewards.view(torch.int32) == UNWRITTEN

    def write_obs(self, t: int, leaves: Any) -> None:
        """Copy checked observations into row t, where envs write."""
        for path, leaf in zip(self._paths, leaves, strict=True):
            self.at_env[path][t].copy_(as_tensor("obs", leaf))

    def upload_obs(self, t: int) -> None:
        """Enqueue the copy of one row of observations from host pages to the device."""
        for path in self._paths:
            self.upload(path, slice(t, t + 1))

    def upload(self, name: str, steps: slice = slice(None)) -> None:
        """Enqueue the copy of a column from host pages to the device, if they are separate."""
        if self.is_apart:
            self.columns[name].upload(steps)

    def wait_for_device(self) -> None:
        """Wait until enqueued copies have left the host pages, which are about to be rewritten."""
        if self.is_apart and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def start(self) -> None:
        """Drop unfinished episodes, after a reset of all envs."""
        for tensor in (self._over_before, *self._running):
            tensor.zero_()
        self._is_first[0] = True

    def advance(self) -> None:
        """Carry the last observations and flags over to a new rollout, after `count_episodes`."""
        self.write_obs(0, [self.at_env[path][-1] for path in self._paths])
        last = self.mark_first(self.layout.num_steps, self.layout.num_steps + 1)
        self._over_before.copy_(self._ends[-1] | self._cuts[-1])
        self._is_first[0].copy_(last[0])

    def mark_first(self, first: int, stop: int) -> Tensor:
        """Write and return `is_first` of the steps from `first`, at least 1, to stop - 1.

        See `RolloutBuffer.is_first_at`. `start` and `advance` write it for step 0.
        """
        rows = self._is_first[first:stop]
        lag = 2 if self._is_next_step else 1  # a NEXT_STEP reset takes a step
        steps = slice(max(first - lag, 0), stop - lag)
        begins = self._ends[steps] | self._cuts[steps]
        if first < lag:  # the flags of the last step of the rollout before
            begins = torch.cat([self._over_before[None], begins])
        before = slice(first - 1, stop - 1)
        acting = self.acting[before]
        if self.has_final is not None:  # not NEXT_STEP: the next row may be a final observation
            is_known = self.has_final[before] | (acting == UNWRITTEN_FLAG)
            begins = self._ends[before] | (self._cuts[before] & is_known)
        return rows.copy_(begins | (acting == 0))

    def mark_valid(self) -> None:
        """Set `valid` to False in steps that only reset and in rows that did not act."""
        if self._is_next_step:  # a step after the end of an episode is the reset
            self._valid[0].logical_and_(~self._over_before)
            self._valid[1:].logical_and_(~(self._ends[:-1] | self._cuts[:-1]))
        self._valid.logical_and_(self.acting != 0)

    def list_valid(self) -> None:
        """Count the valid rows, and list them on the host."""
        self.num_changes += 1
        if self.is_on_host:
            found = self._valid.reshape(-1).nonzero()[:, 0]
            self.at_env["rows"][: len(found)] = found
            self.num_valid.fill_(len(found))
        else:
            self.num_valid.copy_(self._valid.sum())

    def fill_final(self, final_values: Tensor | None, values: Tensor) -> None:
        """Take missing final values from the next row, where an agent's game goes on."""
        if self.has_final is not None and final_values is not None:
            is_given = (self.has_final | (self.acting == UNWRITTEN_FLAG)).to(values.device)
            torch.where(is_given, final_values, values[1:], out=final_values)

    # Episodes.

    def count_episodes(self, *, is_finished: bool = False) -> None:
        """Sum up episodes with the current rewards, unless this was done in this rollout."""
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
        """Do what `sum_episodes` does by operations of torch, unless `is_done`."""
        over = self._ends | self._cuts
        sums = torch.stack([torch.where(self._valid, self._rewards, 0.0), self._valid], 1).double()
        for k, running in enumerate(self._running):
            sums[0, k] += running
        # Time is reversed: `discounted_sums` sums later rows, an episode sums earlier ones.
        goes_on = pad((~over[:-1, None]).double().flip(0), (0, 0, 0, 0, 0, 1)).expand_as(sums)
        sums = discounted_sums(sums.flip(0), goes_on.contiguous()).flip(0)
        for k, running in enumerate(self._running):
            left = torch.where(over[-1], 0.0, sums[-1, k]).to(running.dtype)
            torch.where(is_done, running, left, out=running)
        sums.masked_fill_(~(over & self._valid)[:, None], 0.0)
        torch.where(is_done, self._episodes, sums, out=self._episodes)

    def episodes(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns float64 and lengths int64 (K,) of the last counted episodes; waits."""
        has_ended = self._episodes[:, 1] > 0
        returns, lengths = (self._episodes[:, k][has_ended].cpu() for k in range(2))
        return returns.numpy(), lengths.long().numpy()

    # Faults.

    def finish(self) -> None:
        """Complete `valid`; note results that are not written, and rewards that are not finite."""
        self._note(0, self.unwritten_rewards())
        unwritten = self.acting == UNWRITTEN_FLAG
        self._note(1, unwritten & ~unwritten.all())
        self.mark_valid()
        self._note(2, ~torch.isfinite(self._rewards) & self._valid)

    def look_for_gaps(self, *outputs: Tensor) -> None:
        """Note missing policy outputs, log_probs (T, N) and values (T + 1, N), if these are given.

        Note also truncated episodes whose final value was not given and is not in the next row.
        """
        valid, unwritten = self._valid, self.acting == UNWRITTEN_FLAG
        if outputs:
            missing = [x[: len(valid)].view(torch.int32) == UNWRITTEN for x in outputs]
            self._note(3, missing[0].to(valid.device) & valid)
            needed = valid | unwritten  # values of dead steps too: they bootstrap truncations
            needed[1:] |= valid[:-1]  # a step bootstraps from the value of the next row
            self._note(4, missing[1].to(valid.device) & needed)
        if self.has_final is not None:
            cut_off = self._cuts & ~self._ends & valid & ~self.has_final
            # If the agent acts in the next step, its game was reset, so the next row is not its
            # final observation. After the last step of the rollout this is not known.
            cut_off[:-1] &= self.acting[1:] != 0
            cut_off[-1] &= unwritten[-1]
            self._note(_NO_FINAL, cut_off)

    def _note(self, kind: int, mask: Tensor) -> None:
        """Raise BufferMisuseError if mask (T, N) has a True; on devices, note it instead."""
        if self.is_on_host:
            if bool(mask.any()):
                raise self._fault(kind, int(mask.reshape(-1).nonzero()[0]))
            return
        # The smallest row with a fault, without reading the mask on the host.
        places = torch.arange(self._num_rows, device=mask.device)
        first = torch.where(mask.reshape(-1), places, self._num_rows).amin()
        self.faults[kind] = torch.minimum(self.faults[kind], first)

    def raise_faults(self) -> None:
        """Wait; clear the notes and raise BufferMisuseError for the first kind noted."""
        faults = self.faults.tolist()
        self.faults.fill_(self._num_rows)
        for kind, row in enumerate(faults):
            if row < self._num_rows:
                raise self._fault(kind, row)

    def _fault(self, kind: int, row: int) -> BufferMisuseError:
        t, env_id = divmod(row, self.layout.num_envs)
        if kind == _NO_FINAL:
            return BufferMisuseError(
                f"env {env_id} was truncated in step {t}, but the value of its final observation "
                f"is missing; call set_final_values({t}, [{env_id}], values) with the value of "
                f"infos['final_obs'][{env_id}] (under DISABLED: of the observation before reset)"
            )
        late = "" if self.is_on_host else "; the advantages of that rollout were wrong"
        return BufferMisuseError(f"env {env_id} in step {t} had {_FAULTS[kind]}{late}")
