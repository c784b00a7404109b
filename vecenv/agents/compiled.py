"""Compiled games as rows of agents, on the CPU and on a CUDA device.

    envs.games    JitVectorEnv or CudaVectorEnv, one env per game
      records     ... rewards[A] terminations[A] truncations[A] valid[A] alive[A]   <- kernels
                      |  live views, (games, agents of a group)
    envs          completes the ends of games there, and copies the columns into rows by group

The arithmetic is that of NumPy's arrays and torch's tensors, so it is written once for both. On a
device nothing waits but `check`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, cast

import numpy as np
import torch
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode
from torch import Tensor

from vecenv.agents import grouping as at
from vecenv.agents.env import MASK_DTYPES, AgentGroup, AgentSlot, AgentsVecEnv, valid_action
from vecenv.agents.grouping import Members
from vecenv.core.base import StepBatch
from vecenv.core.errors import ActionError, NoActionMaskError, ObservationError, SlotError
from vecenv.core.masks import MASK_KEY, can_be_masked
from vecenv.core.rows import FLAG_DTYPES, slot_outputs
from vecenv.jit.cuda.env import CudaVectorEnv, DeviceActions, checked_tensor
from vecenv.jit.games import GameLayout, GroupLayout
from vecenv.jit.kernels import EnvKernels

__all__ = [
    "CompiledAgentsVecEnv",
    "CudaAgentGroup",
    "CudaAgentsVecEnv",
    "require_central_state",
    "state_kernels",
]


_OF_STEP = (at.REWARDS, at.TERMINATIONS, at.TRUNCATIONS, at.VALID)
_OF_FINAL = ("final_obs", "_final_obs", "final_info", "_final_info")


class CompiledAgentsVecEnv(AgentsVecEnv):
    """Compiled games with groups of agents; see `AgentsVecEnv`.

    Args:
        games: A `JitVectorEnv` whose kernels have `groups`; it has statistics and `states` of the
            games.
        mask_infos: Whether every reset and step reports infos[group]["action_mask"].
        central_state: Whether `state` can be called; not in autoreset mode SAME_STEP.

    Raises:
        TypeError: The kernels have no groups.
        ValueError: There is no central state, or the state in which a game ended would be lost.
    """

    _reward_dtype: Any = np.float64
    _flag_dtype: Any = np.bool_

    def __init__(
        self, games: Any, *, mask_infos: bool = False, central_state: bool = False
    ) -> None:
        kernels = games.kernels
        if kernels.groups is None:
            raise TypeError(
                f"{kernels.name} has no groups of agents: give its EnvKernels groups=..., or make "
                "it with make_vec"
            )
        if central_state:
            require_central_state(kernels, games.autoreset_mode)
        layout = GameLayout.of(kernels.groups)
        self._layouts, self._is_flat = layout.groups, layout.is_flat
        self._fields = {name: games.state_field(name) for name in (*_OF_STEP, at.ALIVE)}
        members = {
            name: Members(group.agents, group.observation_space, group.action_space)
            for name, group in layout.groups.items()
        }
        super().__init__(games, members, mask_infos=mask_infos)
        self._is_same_step = games.autoreset_mode is AutoresetMode.SAME_STEP
        self._write_state: Any = None
        if central_state:
            self._write_state = games.observer(state_kernels(kernels))
        self.state_space = kernels.state_space if central_state else None

    # -- what differs on a device ------------------------------------------------------------

    def _new_group(self, name: str, members: Members, games: Any) -> AgentGroup:
        group = AgentGroup(name, members, games)
        layout = self._layouts[name]
        if games.has_action_masks and layout.mask_width:
            group.masks.source = _mask_source(games, layout)
        return group

    def _on_device(self, ids: Any) -> Any:
        """Return ids of games or rows as an index of the games' arrays."""
        return ids

    def _cast(self, column: Any, dtype: Any) -> Any:
        """Return a copy of a column (games, agents) as rows of this dtype."""
        return column.astype(dtype).reshape(-1)

    def _joined(self, parts: dict[str, Any], game_ids: np.ndarray | None) -> Any:
        """Return the actions of all agents of a game as one array."""
        if not self._is_flat:
            (only,) = parts.values()
            return only
        flat = [part.reshape(len(part), -1) for part in parts.values()]
        dtype = self.games.single_action_space.dtype
        return np.concatenate(flat, axis=1, dtype=dtype, casting="unsafe")

    def _final_infos(
        self, name: str, is_over: Any, infos: dict[str, Any], game_ids: np.ndarray | None
    ) -> dict[str, Any]:
        """Return the final observations of agents whose games were reset in this step."""
        ended = np.flatnonzero(is_over)
        if not len(ended):
            return {}
        games, layout = ended if game_ids is None else game_ids[ended], self._layouts[name]
        final: Any = self.games.final_obs[games]  # type: ignore[attr-defined]  # compiled games have it
        shape = (len(is_over), len(layout.agents))
        objects, is_final = np.full(shape, None, object), np.zeros(shape, np.bool_)
        is_final[ended] = has_ended = self._ended(layout)[games]
        rows = self._observed(final, layout).reshape(*has_ended.shape, *layout.obs_shape)[has_ended]
        objects[is_final] = np.fromiter(rows, object, count=len(rows))
        return {"final_obs": objects.reshape(-1), "_final_obs": is_final.reshape(-1)}

    # -- calls -------------------------------------------------------------------------------

    def _begin(self, obs: Any, infos: dict[str, Any], mask: Any) -> dict[str, Any]:
        self._clear(slice(None) if mask is None else self._on_device(mask))
        self._require_agents()
        self._note_agents()
        return {name: self._observed(obs, layout) for name, layout in self._layouts.items()}

    def _require_agents(self) -> None:
        """Raise ObservationError if a game has no agents, though its episode goes on."""
        is_empty = ~self._fields[at.ALIVE].astype(np.bool_).any(axis=1)
        if (is_empty & ~self.games.episode_over).any():  # type: ignore[attr-defined]  # compiled games have it
            self._refuse_empty(int(np.argmax(is_empty)))

    def _refuse_empty(self, game: int) -> NoReturn:
        raise ObservationError(
            f"game {game} of {self.games.kernels.name} has no agents after reset: the kernel "  # type: ignore[attr-defined]  # compiled games have them
            "`reset` has set `state.alive` to 0 for all of them"
        )

    def _call_games(
        self, method: Callable[..., Any], actions: Any, game_ids: Any, *args: Any
    ) -> Any:
        if method == self.games.step:
            self.games._calls.require_ready("step")
            self._clear(slice(None))
        try:
            return super()._call_games(method, actions, game_ids, *args)
        except ActionError as error:
            self._refuse(error, self._checked(actions, game_ids), game_ids)

    def _clear(self, games: Any) -> None:
        """Set to zero what a step writes, for games that it resets instead, or can't step."""
        for name in _OF_STEP:
            self._fields[name][games] = 0

    def _refuse(
        self, error: ActionError, parts: dict[str, Any], game_ids: np.ndarray | None
    ) -> NoReturn:
        """Raise an ActionError that names the agent."""
        for name, part in parts.items():
            group = self.groups[name]
            space: Any = group.single_action_space
            for place, action in enumerate(part.reshape(-1, *part.shape[2:])):
                game, k = divmod(place, group.num_agents)
                game = game if game_ids is None else int(game_ids[game])
                is_alive = group.alive[game * group.num_agents + k]
                if is_alive and not space.contains(np.asarray(action, space.dtype)):
                    raise ActionError(
                        f"the action of agent {group.agents[k]!r} (group {name!r}) of game {game} "
                        f"is {action}, expected one of {space}; nothing was stepped"
                    ) from None
        raise error

    def _receive(self, least: int | None, timeout: float | None, most: int | None) -> StepBatch:
        """Step the first games in the order of sending."""
        count, _ = self.games._calls.check_recv(least, most)
        self._clear(self._on_device(self.games._sent_ids()[:count]))  # type: ignore[attr-defined]  # compiled games have it
        return super()._receive(count, timeout, count)

    def _rows_of(
        self, obs: Any, is_over: Any, infos: dict[str, Any], game_ids: np.ndarray | None
    ) -> tuple[dict[str, tuple[Any, ...]], dict[str, Any]]:
        over, fields = is_over, self._fields
        if game_ids is not None:
            over = self.games.allocate((self.num_games,), np.bool_)
            over[self._on_device(game_ids)] = is_over
        # The vector env's limit truncates the agents that acted and have no end of their own.
        flags = fields[at.TERMINATIONS] | fields[at.TRUNCATIONS]
        fields[at.TRUNCATIONS] |= fields[at.VALID] & ~flags & over[:, None]
        if not self._is_same_step:
            fields[at.ALIVE] *= ~over[:, None]
        self._note_agents()
        rest = {key: value for key, value in infos.items() if key not in _OF_FINAL}
        found = {}
        for name, layout in self._layouts.items():
            rows: Any = slice(None)
            if game_ids is not None:
                rows = self._on_device(self.groups[name].rows(game_ids))
            results = [
                self._cast(fields[column][:, layout.agent_ids], dtype)[rows]
                for column, dtype in (
                    (at.REWARDS, self._reward_dtype),
                    (at.TERMINATIONS, self._flag_dtype),
                    (at.TRUNCATIONS, self._flag_dtype),
                )
            ]
            found[name] = self._observed(obs, layout), *results
            if self._is_same_step and (own := self._final_infos(name, is_over, infos, game_ids)):
                rest[name] = own
        return found, rest

    def _ended(self, layout: GroupLayout) -> Any:
        """Return which agents of a group ended in the latest step, bool (games, A)."""
        ends = self._fields[at.TERMINATIONS] | self._fields[at.TRUNCATIONS]
        return ends[:, layout.agent_ids] != 0

    def _observed(self, obs: Any, layout: GroupLayout) -> Any:
        """Return a group's rows in observations of games; a view if it is the only group."""
        if self._is_flat:
            obs = obs[:, layout.obs]
        return obs.reshape(-1, *layout.obs_shape)

    def _note_agents(self) -> None:
        """Copy from the records who acted and who acts next."""
        for name, layout in self._layouts.items():
            group = self.groups[name]
            shape = self.num_games, group.num_agents
            for notes, column in ((group.alive, at.ALIVE), (group.valid, at.VALID)):
                notes.reshape(shape)[...] = self._fields[column][:, layout.agent_ids]

    # -- states ------------------------------------------------------------------------------

    def state(self) -> Any:
        """Return every game's central state, (num_games, ...); the caller owns it.

        Raises:
            ValueError: The env was not made with `central_state=True`.
        """
        if self._write_state is None:
            return super().state()  # raises
        self.games._calls.require_ready("state")
        space: Any = self.state_space
        found = self.games.allocate((self.num_games, *space.shape), space.dtype)
        self._write_state(found)
        return found

    def copy_rows(self, source: Any, target: Any, *, luck: str = "same") -> None:
        """Copy games to others, also amid episodes; see `JitVectorEnv.copy_rows`."""
        self.games.copy_rows(source, target, luck=luck)  # type: ignore[attr-defined]  # compiled games have it
        self._note_agents()


def _no_reset(state, rng, *params):
    pass


def _no_step(state, action, rng, *params):
    return 0.0, False, False


def state_kernels(kernels: EnvKernels) -> EnvKernels:
    """Return kernels whose observation is the central state of games."""
    return EnvKernels(
        kernels.state_dtype,
        cast("Any", kernels.state_space),
        Discrete(1),
        _no_reset,
        _no_step,
        kernels.central_state,
        name=f"{kernels.name}, central state",
    )


def _mask_source(games: Any, layout: GroupLayout) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from rows of a group, int64 (B,), to their action masks (B, width)."""

    def masks_of(rows: np.ndarray) -> np.ndarray:
        of, agents = np.divmod(rows, len(layout.agents))
        chosen, places = np.unique(of, return_inverse=True)
        own = games.action_masks(chosen)[:, layout.masks]
        return own.reshape(len(chosen), len(layout.agents), -1)[places, agents]

    return masks_of


def require_central_state(kernels: EnvKernels, mode: AutoresetMode) -> None:
    """Raise ValueError if games have no central state, or not the one in which they end."""
    if kernels.central_state is None:
        raise ValueError(
            f"{kernels.name} has no central state: give its EnvKernels central_state=..., a "
            "function (state, out), and its state_space"
        )
    if mode is AutoresetMode.SAME_STEP:
        raise ValueError(
            "compiled games have no central state in autoreset mode SameStep, in which the one "
            "that a game ended in is overwritten: take another mode"
        )


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
        check, space = self._games._check_array, self.single_observation_space
        shape = self.num_envs, *(space.shape or ())
        slot = slot_outputs(out, shape, (np.dtype(space.dtype),), check)
        if (valid := getattr(out, "valid", None)) is not None:
            valid = check("valid", valid, shape[:1], FLAG_DTYPES)
            if valid is slot.terminations or valid is slot.truncations:
                raise SlotError("out.valid and a flag of out share memory; give each its own")
        return AgentSlot(*slot, valid)

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
