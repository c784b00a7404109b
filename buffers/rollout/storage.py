"""The memory of a rollout buffer: its columns, and the views that are handed out step by step.

::

    envs on the CPU, device "cpu"       one memory: arrays for the envs, tensors for the learner
    envs on the CPU, another device     host pages for the envs; tensors on the device, copied to
    envs on the device                  one memory: tensors there for both
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from buffers.core.arguments import as_tensor, check_count
from buffers.core.columns import Allocate, ColumnSpec, allocate_columns
from buffers.core.errors import BufferMisuseError
from buffers.core.spaces import Leaf, action_leaf, build_tree, extra_leaves, space_leaves
from vecenv.core.arguments import read_autoreset_mode

__all__ = [
    "RESULTS", "UNWRITTEN", "UNWRITTEN_FLAG", "RolloutLayout", "RolloutSlot", "RolloutStorage",
    "parse_autoreset_mode", "plan_rollout",
]  # fmt: skip

RESULTS = ("rewards", "terminations", "truncations")
# Bits of a float32 that has not been written yet: a NaN that no computation gives. Async vector
# envs mark rewards in `step(out=)` likewise, so that what a dead worker leaves is told apart too.
UNWRITTEN = 0x7FC5EED1
UNWRITTEN_FLAG = 2  # the same of flags, which are 0 or 1

_MAX_ROWS = 2**31 - 1  # the shuffle draws 32-bit words

# Names that no extra column may have: of columns, of other entries of batches and `memory`, and of
# the step in `put(t, ...)`.
_TAKEN = frozenset((
    "obs", "actions", "log_probs", "values", "rewards", "terminations", "truncations", "valid",
    "final_values", "advantages", "returns", "rows", "over_before", "running_returns",
    "running_lengths", "episodes", "has_final", "indices", "extras", "minibatches", "memory",
    "size", "self", "t", "weights", "is_first", "initial_states", "acting",
))  # fmt: skip


class RolloutLayout(NamedTuple):
    """Sizes and columns of a rollout buffer; nothing is allocated yet."""

    num_steps: int
    num_envs: int
    observation_space: Space
    obs_leaves: list[Leaf]
    extras: list[str]
    games: list[str]  # the columns with one row per game
    agents_per_game: int  # rows of a step that share one of these
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
    """Plan the columns of a rollout buffer.

    Raises:
        BufferMisuseError: A size, space, mode or name that does not do.
    """
    num_steps, num_envs = check_count("num_steps", num_steps), check_count("num_envs", num_envs)
    if num_steps * num_envs > _MAX_ROWS:
        raise BufferMisuseError(
            f"num_steps * num_envs is {num_steps * num_envs}, expected at most {_MAX_ROWS}; "
            "use shorter rollouts"
        )
    obs = space_leaves(observation_space, "obs")
    if not obs:
        raise BufferMisuseError(f"observation_space {observation_space} holds no array at all")
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
    return RolloutLayout(
        num_steps, num_envs, observation_space, obs, own, shared, agents, mode, columns
    )


def parse_autoreset_mode(mode: AutoresetMode | str) -> AutoresetMode:
    """Return the mode of an enum member, or of its name or value in any spelling.

    Raises:
        BufferMisuseError: There is no such mode.
    """
    try:
        return read_autoreset_mode(mode)
    except ValueError as error:
        raise BufferMisuseError(
            f'{error}; pass envs.metadata["autoreset_mode"] of the vector env that fills the buffer'
        ) from None


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
        self.at_env = {
            name: torch.from_numpy(column.host) if column.is_twofold else column.tensor
            for name, column in self.columns.items()
        }
        self.is_marked = False
        self.acting = self.at_env["acting"].view(torch.uint8)
        self.acting.fill_(UNWRITTEN_FLAG)
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
