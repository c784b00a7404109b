"""Compiled games on a CUDA device: their states and results are there, as rows of agents.

Nothing waits for the device but `check`.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from vecenv.agents import grouping as at
from vecenv.agents.compiled import CompiledAgentsVecEnv
from vecenv.agents.env import MASK_DTYPES, AgentGroup, AgentSlot, valid_action
from vecenv.agents.grouping import Members
from vecenv.core.errors import ActionError, NoActionMaskError, SlotError
from vecenv.core.masks import MASK_KEY, can_be_masked
from vecenv.jit.cuda.env import CudaVectorEnv, DeviceActions, checked_tensor
from vecenv.jit.games import GroupLayout

__all__ = ["CudaAgentGroup", "CudaAgentsVecEnv"]

_FLAGS = (at.TERMINATIONS, at.TRUNCATIONS, at.VALID)


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
        self, name: str, members: Members, games: CudaVectorEnv, layout: GroupLayout
    ) -> None:
        super().__init__(name, members, games)
        self._layout, self._games = layout, games
        self.device, self.check = games.device, games.check
        self.alive = games.allocate((self.num_envs,), np.bool_)
        self.valid = games.allocate((self.num_envs,), np.bool_)
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
        """Return int8 (B, width) on the device, see `AgentGroup.action_masks`."""
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
        shape, device = tuple(masks.shape), masks.device
        return checked_tensor("masks", out, shape, MASK_DTYPES, device).copy_(masks)

    def games_actions(self, actions: Any, game_ids: np.ndarray | None) -> Any:
        """Return checked actions (B, num_agents, ...) on the device, see `AgentGroup`."""
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
        """Check the caller's slot of tensors and return it."""
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

    def _saved_notes(self) -> tuple[np.ndarray, np.ndarray, Any]:
        """Return `alive` and `valid` in the CPU's form, so that either side can restore them."""
        return self.alive.cpu().numpy(), self.valid.cpu().numpy(), self.masks.state()

    def _restore_notes(self, alive: Any, valid: Any, masks: Any) -> None:
        """Restore what `_saved_notes` returned, here or on the CPU."""
        self.alive.copy_(torch.from_numpy(np.asarray(alive)))
        self.valid.copy_(torch.from_numpy(np.asarray(valid)))


class CudaAgentsVecEnv(CompiledAgentsVecEnv):
    """Compiled games with several groups of agents on a CUDA device; see `AgentsVecEnv`.

    Results, `alive` and `valid` are tensors on the device, rewards float32. Calls return before the
    device is done, so a later call reports an impossible action, which steps no agent of its game;
    `check` waits. Infos have the same keys after every step.

    Args:
        games: The games, whose kernels have `groups`; their results must be tensors.
        mask_infos: Whether every reset and step reports infos[group]["action_mask"].
        central_state: Whether `state` can be called; not in autoreset mode SAME_STEP.

    Attributes:
        device: The `torch.device`.
    """

    _reward_dtype, _flag_dtype = torch.float32, torch.bool
    groups: dict[str, CudaAgentGroup]  # type: ignore[assignment]  # a kind of AgentGroup; nobody assigns others
    games: CudaVectorEnv

    @torch.inference_mode(mode=False)  # tensors made in it can't be changed outside
    def __init__(
        self, games: CudaVectorEnv, *, mask_infos: bool = False, central_state: bool = False
    ) -> None:
        self.device = games.device
        super().__init__(games, mask_infos=mask_infos, central_state=central_state)

    def _new_group(self, name: str, members: Members, games: Any) -> CudaAgentGroup:
        return CudaAgentGroup(name, members, games, self._layouts[name])

    def _on_device(self, ids: Any) -> Tensor:
        return torch.as_tensor(ids, device=self.device)

    def _cast(self, column: Tensor, dtype: Any) -> Tensor:
        return column.to(dtype).reshape(-1)

    def _joined(self, parts: dict[str, Any], game_ids: np.ndarray | None) -> Tensor:
        if not self._is_flat:
            (only,) = parts.values()
            return only
        return torch.cat([part.flatten(1) for part in parts.values()], 1)

    def _refuse(self, error: ActionError, parts: Any, game_ids: Any) -> NoReturn:
        raise error

    def _final_infos(
        self, name: str, is_over: Tensor, infos: dict[str, Any], game_ids: np.ndarray | None
    ) -> dict[str, Any]:
        layout = self._layouts[name]
        ends = self._ended(layout)
        ends = ends if game_ids is None else ends[self._on_device(game_ids)]
        final = self._observed(infos["final_obs"], layout).clone()
        return {"final_obs": final, "_final_obs": (ends & is_over[:, None]).reshape(-1)}

    def _require_agents(self) -> None:
        """Leave it to `check`, which waits."""

    def _add_masks(self, rows_infos: dict[str, Any], game_ids: np.ndarray | None) -> None:
        for name, group in self.groups.items():
            if can_be_masked(group.single_action_space) and group.has_action_masks:
                rows = None if game_ids is None else group.rows(game_ids)
                own = rows_infos.setdefault(name, {})
                own[MASK_KEY] = group.action_masks(rows)
                own[f"_{MASK_KEY}"] = torch.ones_like(own[MASK_KEY][:, 0], dtype=torch.bool)

    def check(self) -> None:
        """Wait until all steps are done, and raise the error of a step that failed.

        Raises:
            ObservationError: A game has no agents after its reset.
            ActionError, ActionMaskError, ResetNeeded: See `CudaVectorEnv.check`.
        """
        self._call(self.games.check)
        is_empty = ~self._fields[at.ALIVE].any(dim=1) & ~self.games.episode_over
        if is_empty.any():
            self._refuse_empty(int(is_empty.byte().argmax()))
