"""Vector envs of games with several agents, whose results are rows of agents.

A game is an env with several agents. Agents with equal spaces form a group, and a group has one
row per game and agent: row `game * num_agents + k` is agent k of that game. A vector env of any
backend steps the games, one env per game. Its observations are columns per group (see
`vecenv.agents.grouping`). Rows are these columns with games and agents as one axis, in the same
memory. So workers and kernels write a group's rows directly to where the caller wants them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space

from vecenv.agents import grouping as at
from vecenv.agents.grouping import Members
from vecenv.agents.infos import repeat_infos, rows_of_infos
from vecenv.agents.masks import GroupMasks
from vecenv.core.actions import ActionBatcher, as_array
from vecenv.core.base import StepBatch, StepSlot, VecEnv
from vecenv.core.errors import (
    ActionError,
    ActionTypeError,
    EnvStateError,
    ObservationError,
    SlotError,
)
from vecenv.core.infos import take_infos
from vecenv.core.masks import MASK_KEY, can_be_masked, mask_sizes
from vecenv.core.rows import FLAG_DTYPES, ObservationRows, check_slot_array, slot_rows
from vecenv.core.seeding import Seed
from vecenv.core.spaces import BatchedSpaces, batch_thinly, leaf_by_leaf

__all__ = ["AgentBatch", "AgentGroup", "AgentRowsVecEnv", "AgentSlot", "AgentsVecEnv"]

_NONE = np.empty(0, np.int64)  # of games
_OF_STEP = (at.REWARDS, at.TERMINATIONS, at.TRUNCATIONS, at.VALID)
_FLAGS = (at.TERMINATIONS, at.TRUNCATIONS)
_MASK_DTYPES = (np.dtype(np.int8), np.dtype(np.bool_))


class AgentSlot(NamedTuple):
    """Memory for the results of one step of a group's rows; see `vecenv.StepSlot`.

    Attributes:
        obs: (num_envs, *obs_shape) of the group's space, nested as the space is.
        rewards: float32 or float64 (num_envs,).
        terminations: bool (num_envs,).
        truncations: bool (num_envs,).
        valid: bool (num_envs,): whether the row's agent acted in this step; None if not wanted.
    """

    obs: Any
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray
    valid: np.ndarray | None = None


class AgentBatch(NamedTuple):
    """Results of the games that `recv` returns, in the order in which they became ready.

    For an `AgentsVecEnv` all fields but `game_ids` are dicts by group; then B is the number of
    games times the number of agents of that group.

    Attributes:
        obs: (B, *obs_shape).
        rewards: float64 (B,).
        terminations: bool (B,).
        truncations: bool (B,).
        infos: Batched infos with B rows.
        env_ids: int64 (B,), the rows.
        valid: bool (B,): the agent acted in this step.
        game_ids: int64, the games.
    """

    obs: Any
    rewards: Any
    terminations: Any
    truncations: Any
    infos: dict[str, Any]
    env_ids: Any
    valid: Any
    game_ids: np.ndarray

    def of(self, name: str) -> AgentBatch:
        """Return the part of one group, as `TransitionWriter.received` takes it.

        Raises:
            KeyError: There is no such group.
        """
        results = (part[name] for part in self[:4])
        infos, rows = self.infos.get(name, {}), self.env_ids[name]
        return AgentBatch._make((*results, infos, rows, self.valid[name], self.game_ids))


class AgentGroup:
    """Agents with equal spaces in all games, one row each, as buffers and policies take them.

    Attributes:
        name: Name of the group.
        agents: Names of its agents in a game.
        num_agents: Number of these agents.
        num_games: Number of games.
        num_envs: Number of rows, num_games * num_agents; row game * num_agents + k is agent k's.
        single_observation_space, observation_space: Space of one agent; of all rows.
        single_action_space, action_space: Likewise for actions.
        autoreset_mode, metadata: Those of the games.
        alive: bool (num_envs,), agents whose actions the next step uses. The env's memory, always
            the latest.
        valid: bool (num_envs,), agents that acted in the latest step. The env's memory.
        timing: The games' timing, see `VecEnv`.
    """

    def __init__(self, name: str, members: Members, games: VecEnv) -> None:
        self.name, self.agents = name, members.agents
        self.num_agents, self.num_games = len(members.agents), games.num_envs
        self.num_envs = self.num_agents * self.num_games
        self.single_observation_space = members.observation_space
        self.observation_space = batch_thinly(members.observation_space, self.num_envs)
        self.single_action_space: Space[Any] = members.action_space
        self.action_space = batch_thinly(members.action_space, self.num_envs)
        self.autoreset_mode, self.metadata = games.autoreset_mode, games.metadata
        self.alive = np.zeros(self.num_envs, np.bool_)
        self.valid = np.zeros(self.num_envs, np.bool_)
        self.allocate, self.timing = games.allocate, games.timing
        self.checks = ActionBatcher(self.single_action_space, self.action_space, self.num_envs)
        self.masks = GroupMasks(members, self.num_games)
        self._allowed = members.allowed
        self._rows = ObservationRows(self.single_observation_space, self.num_envs)
        self._own: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"AgentGroup({self.name!r}, {self.num_games} games x {list(self.agents)})"

    def rows(self, game_ids: Any = None) -> np.ndarray:
        """Return the rows of these games (None: all), int64 (B * num_agents,)."""
        if game_ids is None:
            return np.arange(self.num_envs)
        games = as_array(game_ids).astype(np.int64, copy=False)
        return (games[:, None] * self.num_agents + np.arange(self.num_agents)).reshape(-1)

    def row(self, game: int, agent: Any) -> int:
        """Return the row of an agent, given by its name, in a game."""
        if agent not in self.agents:
            raise ValueError(f"group {self.name!r} has no agent {agent!r}; it has {self.agents}")
        return game * self.num_agents + self.agents.index(agent)

    def _saved_notes(self) -> tuple[np.ndarray, np.ndarray, Any]:
        """Return copies of `alive` and `valid`, and of the masks, for `_restore_notes`."""
        return self.alive.copy(), self.valid.copy(), self.masks.state()

    def _restore_notes(self, alive: Any, valid: Any, masks: Any) -> None:
        """Restore what `_saved_notes` returned."""
        self.alive[:], self.valid[:] = alive, valid
        self.masks.restore(*masks)

    @property
    def has_action_masks(self) -> bool:
        """Whether there are action masks; see `vecenv.VecEnv`."""
        return self.masks.is_there

    def action_masks(self, rows: Any = None, *, out: np.ndarray | None = None) -> np.ndarray:
        """Return which actions the agents may take next: 0 or 1 per action.

        The masks came with the latest observations or infos; after an autoreset they are those of
        the new game. Masks of agents that are not alive are all 1. Masks that are a part of the
        observations are read from the arrays that `reset`, `step` or `recv` returned last.

        Args:
            rows: The rows, integer (B,); None for all.
            out: int8 or bool (B, width) to write into; None for a new array.

        Returns:
            int8 (B, width), in the form of `vecenv.VecEnv.action_masks`.

        Raises:
            NoActionMaskError: The agents give no masks; says what a game must provide.
            ActionMaskError: A mask is missing, allows nothing, or does not fit the action space;
                names game and agent.
            SlotError: `out` can't be written into.
            TypeError, ValueError: `rows` are not integers (B,) in range.
        """
        ids = slice(None) if rows is None else self._checked_rows(rows)
        masks = self.masks.read_rows(self.alive, ids)
        if out is None:
            return masks
        check_slot_array("masks", out, masks.shape, _MASK_DTYPES)
        out[...] = masks
        return out

    def _checked_rows(self, rows: Any) -> np.ndarray:
        """Return numbers of rows as int64 (B,); they may repeat."""
        ids = as_array(rows)
        if ids.ndim != 1:
            raise ValueError(f"rows must be an array (B,) of rows, got shape {ids.shape}")
        if ids.dtype.kind not in "iu" and len(ids):
            hint = "; of a mask take np.flatnonzero(mask)" if ids.dtype == np.bool_ else ""
            raise TypeError(f"rows must be integers, got dtype {ids.dtype}{hint}")
        wrong = (ids < 0) | (ids >= self.num_envs)
        if wrong.any():
            raise ValueError(
                f"rows has {ids[wrong][0]}, expected rows from 0 to {self.num_envs - 1}"
            )
        return ids.astype(np.int64, copy=False)

    def games_actions(self, actions: Any, game_ids: np.ndarray | None) -> np.ndarray:
        """Check actions, one per row, and return them as (B, num_agents, ...).

        NaN is accepted for agents that are not alive, as their actions are ignored.

        Raises:
            ActionError: Wrong count, shape or dtype; or an agent that is alive has NaN or an action
                that only padding has added. Names game and agent.
        """
        rows = None if game_ids is None else self.rows(game_ids)
        alive = self.alive if rows is None else self.alive[rows]
        array, count = as_array(actions), len(alive)
        if array.ndim and len(array) < count:
            raise ActionError(
                f"the actions of group {self.name!r} are {len(array)}, expected {count}: one "
                f"per row, {count // self.num_agents} games times {self.num_agents} agents; "
                f"there is none for {self._named(len(array), rows)}"
            )
        if array.dtype.kind == "f" and array.shape[:1] == alive.shape:
            array = self._without_nan(array, alive, rows)
        try:
            array = self.checks.check(array, rows)
        except ActionError as error:
            raise type(error)(f"group {self.name!r}: {error}") from None
        if self._allowed is not None:
            self._refuse_padding(array, alive, rows)
        return array.reshape(-1, self.num_agents, *array.shape[1:])

    def _without_nan(
        self, actions: np.ndarray, alive: np.ndarray, rows: np.ndarray | None
    ) -> np.ndarray:
        """Return actions with zeros where agents that are not alive have NaN."""
        if not np.isnan(np.minimum.reduce(actions, axis=None, initial=np.inf)):
            return actions
        is_nan = np.isnan(actions).reshape(len(alive), -1).any(axis=1)
        if (wrong := np.flatnonzero(is_nan & alive)).size:
            raise ActionError(
                f"the action of {self._named(wrong[0], rows)} is {actions[wrong[0]]}; "
                f"{self.single_action_space} has no NaN"
            )
        actions = actions.copy()
        actions[is_nan] = 0
        return actions

    def _refuse_padding(
        self, actions: np.ndarray, alive: np.ndarray, rows: np.ndarray | None
    ) -> None:
        """Raise for actions that agents have only in the padded space."""
        assert self._allowed is not None
        sizes = mask_sizes(self.single_action_space)
        chosen = (actions - getattr(self.single_action_space, "start", 0)).reshape(len(alive), -1)
        is_inside = (chosen >= 0) & (chosen < sizes)
        places = np.concatenate([[0], np.cumsum(sizes)[:-1]]) + np.where(is_inside, chosen, 0)
        allowed = np.tile(self._allowed, (len(alive) // self.num_agents, 1))
        has = np.take_along_axis(allowed, places, axis=1) & is_inside
        if (wrong := np.flatnonzero(alive & ~has.all(axis=1))).size:
            raise ActionError(
                f"{self._named(wrong[0], rows)} got the action {actions[wrong[0]]}, which it does "
                "not have: padding has added it; draw actions with `action_masks()`"
            )

    def _named(self, place: Any, rows: np.ndarray | None) -> str:
        """Return the name of the agent at a place in the actions for these rows."""
        row = int(place if rows is None else rows[place])
        game, k = divmod(row, self.num_agents)
        return f"game {game}, agent {self.agents[k]!r}"

    def slot(self, out: Any) -> AgentSlot:
        """Check the caller's slot; return its arrays as plain ones."""
        rows = slot_rows(out, self._rows, self.num_envs)
        valid = getattr(out, "valid", None)
        if valid is not None:
            valid = check_slot_array("valid", valid, (self.num_envs,), FLAG_DTYPES)
        return AgentSlot(rows.obs.batch(), rows.rewards, rows.terminations, rows.truncations, valid)

    def own_columns(self) -> dict[str, Any]:
        """Return memory for the columns of all games, allocated once."""
        if self._own is None:
            shape = (self.num_games, self.num_agents)
            flags = {
                name: self.allocate(shape, np.int8)
                for name in (at.TERMINATIONS, at.TRUNCATIONS, at.VALID, at.ALIVE)
            }
            self._own = {at.REWARDS: self.allocate(shape, np.float64), **flags}
        return self._own

    def own_obs(self) -> Any:
        """Return memory for the observations of all rows, allocated once."""
        own = self.own_columns()
        if at.OBS not in own:
            space, count = self.single_observation_space, self.num_envs
            own[at.OBS] = ObservationRows(space, count, self.allocate).batch()
        return own[at.OBS]

    def take(self, columns: dict[str, Any], infos: dict[str, Any], rows: Any) -> None:
        """Record who acted in these rows, who acts next, and with which masks."""
        self.alive[rows] = columns[at.ALIVE].reshape(-1)
        self.valid[rows] = columns[at.VALID].reshape(-1)
        self.masks.note_rows(_as_rows(columns[at.OBS]), infos, rows, self.alive)


class AgentsVecEnv:
    """Games with several groups of agents, stepped together.

    Actions, results and slots are dicts by group. Seeds, `reset_mask` and `send` are per game.

    Args:
        games: Vector env of `GameEnv`s, or one with observations and actions in that form.
        members: The groups of one game.
        mask_infos: Whether every reset and step reports infos[group]["action_mask"], for groups
            whose actions can be masked.

    Attributes:
        games: That vector env. Step it only through this one.
        groups: The groups by name.
        num_games: Number of games.
        autoreset_mode: When games are reset.
        timing: Where the time goes, see `VecEnv`; one env is one game.
    """

    def __init__(
        self, games: VecEnv, members: Mapping[str, Members], *, mask_infos: bool = False
    ) -> None:
        self.games = games
        self.mask_infos = mask_infos
        self.groups = {name: AgentGroup(name, found, games) for name, found in members.items()}
        if (source_of := getattr(games, "mask_source", None)) is not None:
            for name, group in self.groups.items():
                group.masks.source = source_of(name)
        self.num_games = games.num_envs
        self.autoreset_mode = games.autoreset_mode
        self.metadata = games.metadata
        self.render_mode = games.render_mode
        self.timing = games.timing
        self._state: np.ndarray | None = None
        self._game_results = tuple(
            games.allocate((self.num_games,), dtype) for dtype in (np.float64, np.bool_, np.bool_)
        )

    def __repr__(self) -> str:
        return f"AgentsVecEnv({self.num_games} games, {list(self.groups.values())})"

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self.games.closed

    @property
    def alive(self) -> dict[str, np.ndarray]:
        """Agents that act next, bool (num_envs,) by group: the env's memory, always the latest."""
        return {name: group.alive for name, group in self.groups.items()}

    @property
    def valid(self) -> dict[str, np.ndarray]:
        """Agents that acted in the latest step, bool (num_envs,) by group: the env's memory."""
        return {name: group.valid for name, group in self.groups.items()}

    def reset(
        self, *, seed: Seed = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reset all games, or those of `options["reset_mask"]`, bool (num_games,).

        Args:
            seed: None, an integer s (game g gets s + g), or a list with one per game.
            options: See `VecEnv.reset`.

        Returns:
            Observations of all rows and infos of the games that were reset, by group.
        """
        obs, infos = self._call(self.games.reset, seed=seed, options=options)
        found = self._infos_of(infos, self.num_games)
        mask = None if options is None else options.get("reset_mask")
        for name, group in self.groups.items():
            part = found.get(name, {})
            if mask is None:
                group.take(obs[name], part, slice(None))
            else:
                games = np.flatnonzero(mask)
                rows = group.rows(games)
                group.take(_picked(obs[name], games), take_infos(part, rows), rows)
        if at.STATE in obs:
            self._state = obs[at.STATE]
        if self.mask_infos:
            self._add_masks(found, None)
        return {name: _as_rows(obs[name][at.OBS]) for name in self.groups}, found

    def step(
        self, actions: Mapping[str, Any], *, out: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], ...]:
        """Step every game once.

        Args:
            actions: By group, one action per row. Those of agents that are not alive are ignored.
            out: By group, the slot for its results (see `AgentSlot`); groups that are not in
                it get new arrays.

        Returns:
            obs, rewards float64, terminations bool, truncations bool: by group, one row per agent;
            and infos by group.

        Raises:
            ActionError: A group's actions are missing or wrong. Nothing was stepped.
            SlotError: `out` can't be written into. Nothing was stepped.
        """
        checked = self._checked(actions, None)
        if out is None:
            return self._results(*self._call(self.games.step, checked), slots={})
        slots = self._slots_of(out)
        columns: dict[str, Any] = {}
        for name, group in self.groups.items():
            rows = slots[name].obs if name in slots else group.own_obs()
            shape = self.num_games, group.num_agents
            obs = leaf_by_leaf(lambda array, n=shape: array.reshape(*n, *array.shape[1:]), rows)
            columns[name] = {**group.own_columns(), at.OBS: obs}
        if self._state is not None:
            columns[at.STATE] = self._state
        slot = StepSlot(columns, *self._game_results)
        return self._results(*self._call(self.games.step, checked, out=slot), slots=slots)

    def send(self, actions: Mapping[str, Any], game_ids: Any = None) -> None:
        """Start stepping some games; `actions` has, by group, one action per row of these games."""
        ids = None if game_ids is None else self.games._calls.check_env_ids(game_ids)
        self._call(self.games.send, self._checked(actions, ids), game_ids)

    def recv(
        self,
        min_games: int | None = None,
        timeout: float | None = None,
        *,
        max_games: int | None = None,
    ) -> AgentBatch:
        """Return the results of whole games that are ready first, see `VecEnv.recv`."""
        return self._agent_batch(self._receive(min_games, timeout, max_games))

    def _receive(self, least: int | None, timeout: float | None, most: int | None) -> StepBatch:
        return self._call(self.games.recv, least, timeout, max_envs=most)

    def _agent_batch(self, batch: StepBatch) -> AgentBatch:
        """Return the rows of agents of a batch of games."""
        ids = batch.env_ids
        results = self._results(*batch[:5], slots={}, game_ids=ids)
        rows = {name: group.rows(ids) for name, group in self.groups.items()}
        valid = {name: group.valid[rows[name]] for name, group in self.groups.items()}
        return AgentBatch._make((*results, rows, valid, ids))

    def state(self) -> np.ndarray:
        """Return the latest central state of every game, (num_games, ...); the caller owns it.

        Raises:
            ValueError: The env was not made with `central_state=True`.
        """
        if self._state is None:
            raise ValueError("no central state: make the env with central_state=True, and reset it")
        return self._state.copy()

    def allocate(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """Return zeroed memory, which the caller owns; see `VecEnv.allocate`."""
        return self.games.allocate(shape, dtype)

    def render(self) -> tuple[Any, ...]:
        """Return the drawing of each game."""
        return self._call(self.games.render)

    def render_game(self, game: int) -> Any:
        """Return the drawing of one game, without drawing the others.

        Raises:
            IndexError: There is no such game.
        """
        if not 0 <= game < self.num_games:
            raise IndexError(f"game is {game}, expected 0 to {self.num_games - 1}")
        if not hasattr(self.games, "call"):  # compiled games are drawn from arrays
            return self.render()[game]
        return self._call(self.games.call, "render_if", game)[game]  # type: ignore[attr-defined]  # all but compiled ones have it

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state of the games, see `VecEnv.state_dict`."""
        games = self._call(self.games.state_dict)
        notes = {name: group._saved_notes() for name, group in self.groups.items()}
        central = None if self._state is None else self._state.copy()
        return {"games": games, "groups": notes, "central": central}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state["groups"].keys() != self.groups.keys():
            raise EnvStateError(
                f"the state has the groups {list(state['groups'])}, the env {list(self.groups)}"
            )
        self._call(self.games.load_state_dict, state["games"])
        for name, notes in state["groups"].items():
            self.groups[name]._restore_notes(*notes)
        self._state = None if state["central"] is None else state["central"].copy()

    def copy_rows(self, source: Any, target: Any, *, luck: str = "same") -> None:
        """Copy compiled games to others, also amid episodes; see `JitVectorEnv.copy_rows`.

        Raises:
            TypeError: The games are not compiled, or on a device; or `JitVectorEnv` raises it.
        """
        if (copy_games := getattr(self.games, "copy_games", None)) is None:
            raise TypeError(
                "copy_rows needs compiled games on the CPU, these are of a "
                f"{type(self.games).__name__}; "
                "state_dict and load_state_dict copy any"
            )
        sources, targets = copy_games(source, target, luck)
        for group in self.groups.values():
            for notes in (group.alive, group.valid):
                notes[group.rows(targets)] = notes[group.rows(sources)]
        if self._state is not None:
            self._state[targets] = self._state[sources]

    def close(self) -> None:
        """Close the games; may be called twice."""
        self.games.close()

    def _slots_of(self, out: Mapping[str, Any]) -> dict[str, AgentSlot]:
        """Return `out` as slots of agents by group; raise SlotError if it has another form."""
        if unknown := [name for name in out if name not in self.groups]:
            raise SlotError(f"out has the groups {unknown}, the env {list(self.groups)}")
        return {name: self.groups[name].slot(slot) for name, slot in out.items()}

    def _checked(self, actions: Any, game_ids: np.ndarray | None) -> dict[str, np.ndarray]:
        """Return the actions by group as (B, num_agents, ...), checked."""
        if not isinstance(actions, Mapping) or actions.keys() != self.groups.keys():
            came = list(actions) if isinstance(actions, Mapping) else type(actions).__name__
            raise ActionTypeError(
                f"actions must be a dict with the groups {list(self.groups)}, got {came}"
            )
        return {
            name: group.games_actions(actions[name], game_ids)
            for name, group in self.groups.items()
        }

    def _results(
        self,
        obs: dict[str, Any],
        game_rewards: np.ndarray,
        game_terminations: np.ndarray,
        game_truncations: np.ndarray,
        infos: dict[str, Any],
        *,
        slots: Mapping[str, AgentSlot],
        game_ids: np.ndarray | None = None,
    ) -> tuple[dict[str, Any], ...]:
        """Return the games' results as rows by group, and record who is alive."""
        is_over = game_terminations | game_truncations
        ended = np.flatnonzero(is_over) if is_over.any() else _NONE
        lost = _lost(infos) if len(ended) and infos else _NONE
        finals = infos.pop("final_obs", None) if infos else None
        if finals is not None:
            infos.pop("_final_obs", None)
        found: tuple[dict[str, Any], ...] = ({}, {}, {}, {})
        rows_infos = self._infos_of(infos, len(is_over)) if infos else {}
        for name, group in self.groups.items():
            columns = obs[name]
            rows = slice(None) if game_ids is None else group.rows(game_ids)
            if len(ended):
                own = rows_infos.setdefault(name, {})
                _end_games(columns, ended, lost, group.alive[rows], own, finals, name)
                if not own:
                    del rows_infos[name]
            group.take(columns, rows_infos.get(name, {}), rows)
            for part, value in zip(found, _values(columns, slots.get(name)), strict=True):
                part[name] = value
        if at.STATE in obs:
            if game_ids is None or self._state is None:
                self._state = obs[at.STATE]
            else:
                self._state[game_ids] = obs[at.STATE]
            if finals is not None:
                states, is_final = np.full(len(finals), None, object), np.zeros(len(finals), bool)
                for game in ended.tolist():
                    states[game], is_final[game] = np.array(finals[game][at.STATE]), True
                rows_infos[at.FINAL_STATE], rows_infos[f"_{at.FINAL_STATE}"] = states, is_final
        if self.mask_infos:
            self._add_masks(rows_infos, game_ids)
        return *found, rows_infos

    def _add_masks(self, rows_infos: dict[str, Any], game_ids: np.ndarray | None) -> None:
        """Put the masks of the agents into their infos."""
        for name, group in self.groups.items():
            if can_be_masked(group.single_action_space):
                rows = None if game_ids is None else group.rows(game_ids)
                own = rows_infos.setdefault(name, {})
                own[MASK_KEY] = group.action_masks(rows)
                own[f"_{MASK_KEY}"] = np.ones(len(own[MASK_KEY]), np.bool_)

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the games; errors name the game, and the agent if known."""
        try:
            return method(*args, **kwargs)
        except Exception as error:
            game = vars(error).get("env_index")
            who = "An env here is a game of several agents"
            if isinstance(game, int):
                who = f"Env {game} is game {game}, with the agents {self._agent_names()}"
                if isinstance(error, ObservationError):
                    sign = "," if error.problem.startswith("agent ") else ""
                    error.args = (f"game {game}{sign} {error.problem}",)
            error.add_note(f"{who}.")
            raise

    def _agent_names(self) -> str:
        names = [agent for group in self.groups.values() for agent in group.agents]
        shown = ", ".join(map(repr, names[:6]))
        return shown if len(names) <= 6 else f"{shown}, ... ({len(names)})"

    def _infos_of(self, infos: dict[str, Any], num_games: int) -> dict[str, Any]:
        """Return the infos of games by group, with a row per agent, and the games' own infos.

        Each group's infos include "final_info", from the games' final infos.
        """
        found: dict[str, Any] = {}
        for key, value in infos.items():
            if key in self.groups and isinstance(value, dict):
                found[key] = rows_of_infos(value)
            elif key == "final_info" and isinstance(value, dict):
                rest = self._infos_of(value, num_games)
                for name, group in self.groups.items():
                    if (final := rest.pop(name, None)) is not None:
                        own = found.setdefault(name, {})
                        own["final_info"] = final
                        own["_final_info"] = np.repeat(infos["_final_info"], group.num_agents)
                if rest:
                    found[key], found[f"_{key}"] = rest, infos["_final_info"]
            elif key[1:] not in self.groups and key != "_final_info":
                found[key] = value
        return found


class AgentRowsVecEnv(VecEnv):
    """One group of agents as a `VecEnv`, which buffers, learners and adapters accept unchanged.

    `num_envs` is the number of rows, games times agents. Seeds, `send` and `recv` are per game.
    `options["reset_mask"]` has an entry per game, or per row with equal entries in a game.

    Args:
        agents: Games with one group.

    Attributes:
        agents: The `AgentsVecEnv`. Step it only through this one.
        group: The group.
        groups: `{name: group}`.
        num_games: Number of games.
        alive, valid: See `AgentGroup`.
    """

    def __init__(self, agents: AgentsVecEnv) -> None:
        if len(agents.groups) != 1:
            raise ValueError(
                f"the agents form the groups {list(agents.groups)}; rows of one vector env need "
                "one: pad=True pads their spaces to be equal"
            )
        (group,) = agents.groups.values()
        spaces = BatchedSpaces(
            *(group.single_observation_space, group.observation_space),
            *(group.single_action_space, group.action_space),
        )
        self._set_up(
            group.num_envs, spaces, agents.autoreset_mode, agents.metadata, agents.render_mode
        )
        self.agents, self.group, self.groups = agents, group, agents.groups
        self.num_games, self.alive, self.valid = agents.num_games, group.alive, group.valid
        self.timing = agents.timing

    def __repr__(self) -> str:
        return f"AgentRowsVecEnv({self.group!r})"

    def reset(
        self, *, seed: Seed = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all games, or those of `options["reset_mask"]`; see `VecEnv.reset`."""
        obs, infos = self.agents.reset(seed=seed, options=self._games_options(options))
        return obs[self.group.name], self._own_infos(infos)

    def step(self, actions: Any, *, out: Any = None) -> Any:
        """Step every game once, see `VecEnv.step`; `out` may have `valid`, bool (num_envs,)."""
        name = self.group.name
        if out is not None:
            self._check_slot_mode(out)
        slots = None if out is None else {name: out}
        *found, infos = self.agents.step({name: actions}, out=slots)
        infos = self._own_infos(infos)
        if out is not None:
            return out.obs, out.rewards, out.terminations, out.truncations, infos
        return *(part[name] for part in found), infos

    def send(self, actions: Any, env_ids: Any = None) -> None:
        """Start stepping some games.

        Args:
            actions: One action per row of these games.
            env_ids: Ids of games; None for all.
        """
        self.agents.send({self.group.name: actions}, env_ids)

    def recv(  # type: ignore[override]  # of more fields than a StepBatch
        self,
        min_envs: int | None = None,
        timeout: float | None = None,
        *,
        max_envs: int | None = None,
    ) -> AgentBatch:
        """Return the results of whole games that are ready first; numbers count games."""
        batch = self.agents.recv(min_envs, timeout, max_games=max_envs)
        infos = self._own_infos(batch.infos)
        return batch.of(self.group.name)._replace(infos=infos)

    @property
    def has_action_masks(self) -> bool:
        """Whether there are action masks; see `VecEnv`."""
        return self.group.has_action_masks

    def action_masks(self, env_ids: Any = None, *, out: np.ndarray | None = None) -> np.ndarray:
        """Return which actions the agents may take next, see `AgentGroup.action_masks`."""
        return self.group.action_masks(env_ids, out=out)

    def state(self) -> np.ndarray:
        """Return the latest central state of every game, see `AgentsVecEnv.state`."""
        return self.agents.state()

    def allocate(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """Return zeroed memory, which the caller owns; see `VecEnv.allocate`."""
        return self.agents.allocate(shape, dtype)

    def render(self) -> tuple[Any, ...]:
        """Return the drawing of each game."""
        return self.agents.render()

    def render_game(self, game: int) -> Any:
        """Return the drawing of one game, see `AgentsVecEnv.render_game`."""
        return self.agents.render_game(game)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state of the games, see `VecEnv.state_dict`."""
        return self.agents.state_dict()

    def copy_rows(self, source: Any, target: Any, *, luck: str = "same") -> None:
        """Copy games, by their numbers, to others; see `AgentsVecEnv.copy_rows`."""
        self.agents.copy_rows(source, target, luck=luck)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.agents.load_state_dict(state)

    def close(self, **kwargs: Any) -> None:
        """Close the games; may be called twice."""
        self.agents.close()
        self.closed = True

    def __del__(self) -> None:
        """Leave the games to others that refer to `agents`; they close themselves."""

    def _own_infos(self, infos: dict[str, Any]) -> dict[str, Any]:
        """Return infos with a row per agent: the agent's own, and those of its game."""
        own = infos.pop(self.group.name, {})
        games = repeat_infos(infos, self.group.num_agents) if infos else {}
        if "final_info" in games and "final_info" in own:
            own["final_info"] = {**games["final_info"], **own["final_info"]}
        return {**games, **own}

    def _games_options(self, options: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return options whose `reset_mask` has an entry per game."""
        mask = None if options is None else options.get("reset_mask")
        if not isinstance(mask, np.ndarray) or mask.shape != (self.num_envs,):
            return options
        games = mask.reshape(self.num_games, -1)
        if (games != games[:, :1]).any():
            game = int(np.flatnonzero((games != games[:, :1]).any(axis=1))[0])
            raise ValueError(
                f"options['reset_mask'] resets some agents of game {game} and not others; games "
                "are reset whole: give it an entry per game, or equal entries in a game"
            )
        assert options is not None
        return {**options, "reset_mask": games[:, 0].copy()}


def _lost(infos: dict[str, Any]) -> np.ndarray:
    """Return the games that were replaced after a fault, so that their results are old ones."""
    found = infos.get("_restarts")
    if found is None:
        found = infos.get("final_info", {}).get("_restarts")
    return _NONE if found is None else np.flatnonzero(found)


def _values(columns: dict[str, Any], slot: AgentSlot | None) -> tuple[Any, ...]:
    """Return a group's results as rows: the slot's arrays if there is a slot."""
    if slot is None:
        flags = [columns[flag].reshape(-1).view(np.bool_) for flag in _FLAGS]
        return (_as_rows(columns[at.OBS]), columns[at.REWARDS].reshape(-1), *flags)
    slot.rewards[:] = columns[at.REWARDS].reshape(-1)
    slot.terminations[:] = columns[at.TERMINATIONS].reshape(-1)
    slot.truncations[:] = columns[at.TRUNCATIONS].reshape(-1)
    if slot.valid is not None:
        slot.valid[:] = columns[at.VALID].reshape(-1)
    return slot.obs, slot.rewards, slot.terminations, slot.truncations


def _end_games(  # noqa: PLR0917  # all from one caller, in this order
    columns: dict[str, Any],
    ended: np.ndarray,
    lost: np.ndarray,
    was_alive: np.ndarray,
    infos: dict[str, Any],
    finals: np.ndarray | None,
    name: str,
) -> None:
    """Complete the columns of games that have ended.

    For games that were reset in this step, `finals` has the last results. If a game ended but no
    agent did, it was replaced after a fault and has no results of this step, or it was truncated
    from outside, as by a wrapper: then all its agents are truncated.
    """
    if finals is not None:
        for game in ended.tolist():
            for column in _OF_STEP:
                columns[column][game] = finals[game][name][column]
    for column in _OF_STEP:
        columns[column][lost] = 0
    was_alive = was_alive.reshape(columns[at.VALID].shape)
    flags = columns[at.TERMINATIONS][ended] | columns[at.TRUNCATIONS][ended]
    for game in ended[~flags.any(axis=1)].tolist():
        columns[at.TRUNCATIONS][game] |= was_alive[game]
        columns[at.VALID][game] |= was_alive[game]
        if finals is None:
            columns[at.ALIVE][game] = 0
    if finals is not None:
        infos["final_obs"], infos["_final_obs"] = _final_rows(columns, ended, finals, name)


def _final_rows(
    columns: dict[str, Any], ended: np.ndarray, finals: np.ndarray, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the final observations of agents that ended, objects (rows,), and their rows' mask."""
    num_agents = columns[at.VALID].shape[1]
    final_obs = np.full(len(finals) * num_agents, None, object)
    is_final = np.zeros(len(final_obs), np.bool_)
    flags = columns[at.TERMINATIONS] | columns[at.TRUNCATIONS]
    for game in ended.tolist():
        obs, is_over = finals[game][name][at.OBS], flags[game]
        for k in np.flatnonzero(is_over).tolist():
            row = game * num_agents + k
            final_obs[row], is_final[row] = _picked(obs, k), True
    return final_obs, is_final


def _picked(batch: Any, place: Any) -> Any:
    """Return one entry of a batch, or the entries of an array of places, as copies."""
    return leaf_by_leaf(lambda array: array[place].copy(), batch)


def _as_rows(batch: Any) -> Any:
    """Merge the first two axes, games and agents, as views."""
    return leaf_by_leaf(lambda array: array.reshape(-1, *array.shape[2:]), batch)
