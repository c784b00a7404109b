"""Games on a CUDA device: their states and results are there, as rows of agents.

Kernels record what happens to agents in their games' state records, as on the CPU
(`agents.compiled`); torch copies it into rows, so that nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode
from torch import Tensor

from vecenv.agents import grouping as at
from vecenv.agents.compiled import require_central_state, valid_action
from vecenv.agents.env import AgentBatch, AgentGroup, AgentRowsVecEnv, AgentSlot, AgentsVecEnv
from vecenv.agents.grouping import Members
from vecenv.core.base import StepBatch, StepSlot
from vecenv.core.errors import ActionError, NoActionMaskError, ObservationError, SlotError
from vecenv.core.masks import MASK_KEY, can_be_masked
from vecenv.core.seeding import Seed
from vecenv.core.spaces import leaf_by_leaf
from vecenv.jit.cuda.env import CudaVectorEnv, DeviceActions, checked_tensor
from vecenv.jit.games import GameLayout, GroupLayout
from vecenv.jit.kernels import EnvKernels

__all__ = ["CudaAgentGroup", "CudaAgentRowsVecEnv", "CudaAgentsVecEnv", "state_kernels"]


def _no_reset(state, rng, *params):
    pass


def _no_step(state, action, rng, *params):
    return 0.0, False, False


def state_kernels(kernels: EnvKernels, mode: AutoresetMode) -> EnvKernels:
    """Return kernels whose observation is the central state of games.

    Raises:
        ValueError: There is no central state, or the state in which a game ended would be lost.
    """
    require_central_state(kernels)
    if mode is AutoresetMode.SAME_STEP:
        raise ValueError(
            "games on a device have no central state in autoreset mode SameStep, in which the one "
            "that a game ended in is overwritten: take another mode, or leave out device="
        )
    return EnvKernels(
        kernels.state_dtype,
        cast("Any", kernels.state_space),
        Discrete(1),
        _no_reset,
        _no_step,
        kernels.central_state,
        name=f"{kernels.name}, central state",
    )


_FLAGS = (at.TERMINATIONS, at.TRUNCATIONS, at.VALID)
_OF_FINAL = ("final_obs", "_final_obs", "final_info", "_final_info")


class CudaAgentGroup(AgentGroup):
    """An `AgentGroup` whose rows are on a CUDA device.

    Attributes:
        alive: bool (num_envs,) on the device, agents whose actions the next step uses: live tensor.
        valid: bool (num_envs,) on the device, agents that acted in the latest step: live tensor.
        device: The `torch.device`.
    """

    alive: Any
    valid: Any

    def __init__(
        self, name: str, layout: GroupLayout, games: CudaVectorEnv, *, is_flat: bool
    ) -> None:
        super().__init__(
            name,
            Members(layout.agents, layout.observation_space, layout.action_space),
            games,
        )
        self._layout, self._games, self._is_flat = layout, games, is_flat
        self.device, self.check = games.device, games.check
        self.alive = games.allocate((self.num_envs,), np.bool_)
        self.valid = games.allocate((self.num_envs,), np.bool_)
        self._columns = {
            column: games.state_field(column)[:, layout.agent_ids]
            for column in (at.REWARDS, *_FLAGS, at.ALIVE)
        }  # live views, (num_games, num_agents)
        self._given = DeviceActions(layout.action_space, self.num_envs, games.device)
        stand_in = np.broadcast_to(valid_action(layout.action_space), layout.action_shape)
        self._stand_in = torch.from_numpy(stand_in.astype(layout.action_space.dtype)).to(
            games.device
        )

    @property
    def has_action_masks(self) -> bool:
        """Whether there are action masks; see `vecenv.VecEnv`."""
        return self._games.has_action_masks and self._layout.mask_width > 0

    def action_masks(self, rows: Any = None, *, out: Any = None) -> Any:
        """Return which actions the agents may take next: 0 or 1 per action; all 1 if not alive.

        Args:
            rows: The rows, integer (B,), as an array on the host; None for all.
            out: int8 or bool (B, width) on the device to write into; None for a new tensor.

        Returns:
            int8 (B, width) on the device.

        Raises:
            NoActionMaskError: The game has no kernel `action_mask`, or such actions have no masks.
            SlotError: `out` can't be written into.
            TypeError, ValueError: `rows` are not integers (B,) in range.
        """
        if not self.has_action_masks:
            raise NoActionMaskError(
                f"{self._games.kernels.name} has no action_mask kernel, or the actions of group "
                f"{self.name!r} can't be masked: {self.single_action_space}"
            )
        games, places = None, None
        if rows is not None:  # a device that reads out of bounds is lost, so check here
            of, agents = np.divmod(self._checked_rows(rows), self.num_agents)
            games, numbers = np.unique(of, return_inverse=True)
            places = self._uploaded(numbers * self.num_agents + agents)
        masks = self._games.action_masks(games)[:, self._layout.masks]  # all 1 if not alive
        masks = masks.reshape(-1, self._layout.mask_width)
        masks = masks if places is None else masks[places]
        if out is None:
            return masks
        dtypes = (np.dtype(np.int8), np.dtype(np.bool_))
        return checked_tensor("masks", out, tuple(masks.shape), dtypes, masks.device).copy_(masks)

    def games_actions(self, actions: Any, game_ids: np.ndarray | None) -> Any:
        """Check actions, one per row, and return them as (B, num_agents, ...) on the device.

        Actions of agents that are not alive become a valid one, as kernels expect allowed actions.

        Raises:
            ActionError: Wrong count, shape or dtype, or a tensor on another device.
        """
        rows = None if game_ids is None else self.rows(game_ids)
        try:
            found = self._given.check(actions, rows)
        except ActionError as error:
            raise type(error)(f"group {self.name!r}: {error}") from None
        alive = self.alive
        if rows is not None:
            alive = alive[self._uploaded(rows)]
        found = torch.where(alive.view(-1, *[1] * (found.dim() - 1)), found, self._stand_in)
        return found.view(-1, self.num_agents, *found.shape[1:])

    def slot(self, out: Any) -> AgentSlot:
        """Check the caller's slot of tensors and return it.

        Raises:
            SlotError: A tensor is missing, or has another device, shape, dtype or layout.
        """
        flags, device = (np.dtype(np.bool_),), self._games.device
        space, shape = self.single_observation_space, (self.num_envs,)
        valid = getattr(out, "valid", None)
        wanted: dict[str, tuple[tuple[int, ...], tuple[np.dtype, ...]]] = {
            "obs": ((*shape, *(space.shape or ())), (np.dtype(space.dtype),)),
            at.REWARDS: (shape, (np.dtype(np.float32), np.dtype(np.float64))),
            at.TERMINATIONS: (shape, flags),
            at.TRUNCATIONS: (shape, flags),
        }
        if valid is not None:
            wanted[at.VALID] = shape, flags
        found: dict[str, Any] = {
            name: checked_tensor(name, getattr(out, name, None), *expected, device)
            for name, expected in wanted.items()
        }
        starts = [found[name].data_ptr() for name in _FLAGS if name in found]
        if len(set(starts)) < len(starts):
            raise SlotError(
                "the flags of out share memory, so one would overwrite the other; give each a "
                "tensor of its own"
            )
        return AgentSlot(**found)

    def _uploaded(self, rows: Any) -> Tensor:
        return torch.from_numpy(np.asarray(rows, np.int64)).to(self._games.device)

    def observed(self, obs: Tensor) -> Tensor:
        """Return this group's rows in observations of games; a view if it is the only group."""
        if self._is_flat:
            obs = obs[:, self._layout.obs]
        return obs.reshape(-1, *self._layout.obs_shape)

    def take(self, columns: Any, infos: Any, rows: Any) -> None:
        """Record who acted, and who acts next, in all rows."""
        shape = self.num_games, self.num_agents
        self.alive.view(shape).copy_(self._columns[at.ALIVE])
        self.valid.view(shape).copy_(self._columns[at.VALID])

    def results(self, slot: AgentSlot | None, rows: Tensor | None) -> AgentSlot:
        """Write rewards and flags of all rows into a slot, or return those of some as new tensors.

        Args:
            slot: Checked; its observations are left alone. None for new tensors, with none.
            rows: int64 (B,) on the device; None for all.
        """
        if slot is None:
            dtypes = {at.REWARDS: torch.float32} | dict.fromkeys(_FLAGS, torch.bool)
            found: dict[str, Any] = {
                n: self._columns[n].to(d).reshape(-1) for n, d in dtypes.items()
            }
            if rows is not None:
                found = {name: column[rows] for name, column in found.items()}
            return AgentSlot(None, **found)
        shape = self.num_games, self.num_agents
        for name in (at.REWARDS, *_FLAGS):
            tensor = getattr(slot, name)
            if tensor is not None:
                tensor.view(shape).copy_(self._columns[name])
        return slot

    def end(self, is_over: Tensor, *, is_reset: bool) -> None:
        """Bring records up to date for games that ended in a step; bool (num_games,).

        The vector env's limit truncates agents that acted and have no end of their own. Agents
        of a game that was not reset at once are not alive.
        """
        columns = self._columns
        flags = columns[at.TERMINATIONS] | columns[at.TRUNCATIONS]
        columns[at.TRUNCATIONS].bitwise_or_(columns[at.VALID] & ~flags & is_over[:, None])
        if not is_reset:
            columns[at.ALIVE].masked_fill_(is_over[:, None], 0)

    def final_rows(self, final_obs: Tensor, is_over: Tensor) -> dict[str, Tensor]:
        """Return the infos of agents whose games ended and were reset in the same step.

        Args:
            final_obs: Final observations of games, (B, ...).
            is_over: bool (num_games,).
        """
        flags = (self._columns[at.TERMINATIONS] | self._columns[at.TRUNCATIONS]).to(torch.bool)
        is_final = (flags & is_over[:, None]).reshape(-1)
        return {"final_obs": self.observed(final_obs).clone(), "_final_obs": is_final}

    def _saved_notes(self) -> tuple[np.ndarray, np.ndarray, Any]:
        """Return `alive` and `valid` in the CPU's form, so that either side can restore them."""
        return self.alive.cpu().numpy(), self.valid.cpu().numpy(), self.masks.state()

    def _restore_notes(self, alive: Any, valid: Any, masks: Any) -> None:
        """Restore what `_saved_notes` returned, here or on the CPU."""
        self.alive.copy_(torch.from_numpy(np.asarray(alive)))
        self.valid.copy_(torch.from_numpy(np.asarray(valid)))


class CudaAgentsVecEnv(AgentsVecEnv):
    """Compiled games with several groups of agents on a CUDA device; see `AgentsVecEnv`.

    Results, `alive` and `valid` are tensors on the device, rewards float32. Calls return before the
    device is done, so a later call reports an impossible action, which steps no agent of its game;
    `check` waits. Infos have the same keys after every step.

    Args:
        games: The games, whose kernels have `groups`; their results must be tensors.
        mask_infos: Whether every reset and step reports infos[group]["action_mask"].
        central_state: Whether `state` can be called; not in autoreset mode SAME_STEP.
        results: "torch" for tensors, or "numpy" for arrays, for which every call waits.

    Attributes:
        device: The `torch.device`.
    """

    groups: dict[str, CudaAgentGroup]  # type: ignore[assignment]  # a kind of AgentGroup; nobody assigns others

    @torch.inference_mode(mode=False)  # tensors made in it can't be changed outside
    def __init__(
        self,
        games: CudaVectorEnv,
        *,
        mask_infos: bool = False,
        central_state: bool = False,
        results: str = "torch",
    ) -> None:
        kernels = games.kernels
        if kernels.groups is None:
            raise TypeError(
                f"{kernels.name} has no groups of agents: give its EnvKernels groups=..., or make "
                "it with make_vec"
            )
        layout = GameLayout.of(kernels.groups)
        self.games, self.mask_infos = games, mask_infos
        self.groups = {
            name: CudaAgentGroup(name, group, games, is_flat=layout.is_flat)
            for name, group in layout.groups.items()
        }
        self.num_games, self.device = games.num_envs, games.device
        self.autoreset_mode = games.autoreset_mode
        self.metadata, self.render_mode = games.metadata, games.render_mode
        self.timing = games.timing
        self._state = None
        self._is_flat, self._is_numpy = layout.is_flat, results == "numpy"
        self._is_same_step = games.autoreset_mode is AutoresetMode.SAME_STEP
        self._write_state: Any = None
        if central_state:
            self._write_state = games.observer(state_kernels(kernels, games.autoreset_mode))
        self._notes = [games.state_field(name) for name in (at.REWARDS, *_FLAGS)]
        self._alive = games.state_field(at.ALIVE)
        self._game_results = tuple(
            games.allocate((self.num_games,), dtype) for dtype in (np.float32, np.bool_, np.bool_)
        )

    def __repr__(self) -> str:
        return f"CudaAgentsVecEnv({self.num_games} games, {list(self.groups.values())})"

    def reset(
        self, *, seed: Seed = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reset all games, or those of `options["reset_mask"]`, bool (num_games,).

        If the mask is a tensor on the device, no seed may be given, and nothing waits for it.
        """
        obs, infos = self._call(self.games.reset, seed=seed, options=options)
        mask = None if options is None else options.get("reset_mask")
        chosen = None if mask is None else torch.as_tensor(mask, device=self.device)[:, None]
        for column in self._notes:
            column.zero_() if chosen is None else column.masked_fill_(chosen, 0)
        found = self._infos_of(infos, self.num_games)
        for group in self.groups.values():
            group.take(None, None, None)
        if self.mask_infos:
            self._add_masks(found, None)
        rows = {name: group.observed(obs) for name, group in self.groups.items()}
        return self._result((rows, found))

    def step(
        self, actions: Mapping[str, Any], *, out: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], ...]:
        """Step every game once, see `AgentsVecEnv.step`; `out` has tensors on the device."""
        self.games._calls.require_ready("step")
        flat = self._joined(self._checked(actions, None))
        slots = self._slots_of(out or {})
        own = self._game_results
        if slots and not self._is_flat:  # the kernel writes directly into the caller's memory
            ((_, slot),) = slots.items()
            obs = slot.obs.view(self.num_games, -1, *slot.obs.shape[1:])
        else:
            obs = self.games._new_obs()
        for column in self._notes:  # for games that are reset instead, or not stepped
            column.zero_()
        *_, infos = self._call(self.games.step, flat, out=StepSlot(obs, *own))
        found = self._rows_results(obs, own[1] | own[2], infos, None, slots)
        if out is None:
            return self._result(found)
        given = [  # the caller's own objects, where given
            {k: getattr(out[k], name) if k in out else self._result(x) for k, x in parts.items()}
            for name, parts in zip(("obs", at.REWARDS, *_FLAGS[:2]), found, strict=False)
        ]
        return *given, self._result(found[-1])

    def send(self, actions: Mapping[str, Any], game_ids: Any = None) -> None:
        """Keep the actions of some games; `recv` steps them."""
        ids = self.games._calls.check_env_ids(game_ids)
        self._call(self.games.send, self._joined(self._checked(actions, ids)), ids)

    def _receive(self, least: int | None, timeout: float | None, most: int | None) -> StepBatch:
        """Step the first games in the order of sending."""
        count, _ = self.games._calls.check_recv(least, most)
        stepped = torch.from_numpy(self.games._sent_ids()[:count]).to(self.device)
        for column in self._notes:
            column[stepped] = 0
        return super()._receive(least, timeout, most)

    def _agent_batch(self, batch: Any) -> AgentBatch:  # of tensors
        ids = batch.env_ids
        over = torch.zeros(self.num_games, dtype=torch.bool, device=self.device)
        over[torch.from_numpy(ids).to(self.device)] = batch.terminations | batch.truncations
        *found, infos = self._rows_results(batch.obs, over, batch.infos, ids, {})
        rows = {name: group.rows(ids) for name, group in self.groups.items()}
        valid = {
            name: group.valid[torch.from_numpy(rows[name]).to(self.device)]
            for name, group in self.groups.items()
        }
        results = self._result((*found, infos))
        return AgentBatch._make((*results, rows, self._result(valid), ids))

    def state(self) -> Any:
        """Return a copy of every game's central state, (num_games, ...); the caller owns it.

        Raises:
            ValueError: The env was not made with `central_state=True`.
        """
        if self._write_state is None:
            return super().state()  # raises
        self.games._calls.require_ready("state")
        space: Any = self.games.kernels.state_space
        found = self.games._empty((self.num_games, *space.shape), space.dtype)
        self._write_state(found)
        return self._result(found)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state of the games, see `AgentsVecEnv.state_dict`."""
        state = super().state_dict()
        if self._write_state is not None:
            found = self.state()
            state["central"] = found.cpu().numpy() if isinstance(found, Tensor) else found
        return state

    def check(self) -> None:
        """Wait until all steps are done, and raise the error of a step that failed.

        Raises:
            ObservationError: A game has no agents after its reset.
            ActionError, ActionMaskError, ResetNeeded: See `CudaVectorEnv.check`.
        """
        self._call(self.games.check)
        is_empty = ~self._alive.any(dim=1) & ~self.games.episode_over
        if is_empty.any():
            raise ObservationError(
                f"game {int(is_empty.byte().argmax())} of {self.games.kernels.name} has no agents "
                "after reset: the kernel `reset` has set `state.alive` to 0 for all of them"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, here or on the CPU."""
        super().load_state_dict({**state, "central": None})

    def _joined(self, parts: dict[str, Any]) -> Tensor:
        """Return the actions of all agents of a game as one tensor."""
        if not self._is_flat:
            (only,) = parts.values()
            return only
        return torch.cat([part.flatten(1) for part in parts.values()], 1)

    def _rows_results(
        self,
        obs: Tensor,
        is_over: Tensor,
        infos: dict[str, Any],
        game_ids: np.ndarray | None,
        slots: Mapping[str, AgentSlot],
    ) -> tuple[dict[str, Any], ...]:
        """Return the games' results as rows by group, and record who is alive.

        Args:
            obs: Observations of the games that were stepped.
            is_over: bool (num_games,), which of these ended.
            infos: Infos of the games that were stepped.
            game_ids: Ids of these games, int64 (B,); None for all.
            slots: Slots for the rows, by group.
        """
        found: tuple[dict[str, Any], ...] = ({}, {}, {}, {})
        rows_infos = {key: value for key, value in infos.items() if key not in _OF_FINAL}
        for name, group in self.groups.items():
            group.end(is_over, is_reset=self._is_same_step)
            group.take(None, None, None)
            rows = None
            if game_ids is not None:
                rows = torch.from_numpy(group.rows(game_ids)).to(self.device)
            slot = slots.get(name)
            own = group.observed(obs)
            if slot is not None and self._is_flat:
                slot.obs.copy_(own)
            result = group.results(slot, rows)
            parts = own if slot is None else slot.obs, *result[1:4]
            for part, value in zip(found, parts, strict=True):
                part[name] = value
            if self._is_same_step:
                finals = group.final_rows(infos["final_obs"], is_over)
                if rows is not None:
                    finals["_final_obs"] = finals["_final_obs"][rows]
                rows_infos[name] = finals
        if self.mask_infos:
            self._add_masks(rows_infos, game_ids)
        return *found, rows_infos

    def _add_masks(self, rows_infos: dict[str, Any], game_ids: np.ndarray | None) -> None:
        for name, group in self.groups.items():
            if can_be_masked(group.single_action_space) and group.has_action_masks:
                rows = None if game_ids is None else group.rows(game_ids)
                own = rows_infos.setdefault(name, {})
                own[MASK_KEY] = group.action_masks(rows)
                own[f"_{MASK_KEY}"] = torch.ones_like(own[MASK_KEY][:, 0], dtype=torch.bool)

    def _result(self, found: Any) -> Any:
        """Return tensors unchanged, or as arrays if the user wants arrays."""
        if not self._is_numpy:
            return found
        return leaf_by_leaf(lambda x: x.cpu().numpy() if isinstance(x, Tensor) else x, found)


class CudaAgentRowsVecEnv(AgentRowsVecEnv):
    """One group of agents on a CUDA device as a vector env; see `CudaAgentsVecEnv`.

    Attributes:
        device: The `torch.device`.
    """

    agents: CudaAgentsVecEnv

    def __init__(self, agents: CudaAgentsVecEnv) -> None:
        super().__init__(agents)
        self.device = agents.device

    def check(self) -> None:
        """Wait until all steps are done, and raise the error of a step that failed."""
        self.agents.check()
