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
from vecenv.agents.grouping import Members, repeat_infos, rows_of_infos
from vecenv.core.actions import ActionBatcher, as_array
from vecenv.core.arguments import Seed
from vecenv.core.base import StepBatch, VecEnv, forwarding
from vecenv.core.errors import (
    ActionError,
    ActionTypeError,
    EnvStateError,
    NoActionMaskError,
    ObservationError,
    SlotError,
)
from vecenv.core.infos import take_infos
from vecenv.core.masks import (
    MASK_KEY,
    LatestMasks,
    can_be_masked,
    mask_sizes,
    mask_width,
)
from vecenv.core.rows import (
    FLAG_DTYPES,
    ObservationRows,
    StepSlot,
    check_slot_array,
    slot_rows,
)
from vecenv.core.spaces import BatchedSpaces, batch_thinly, leaf_by_leaf

__all__ = [
    "AgentBatch", "AgentGroup", "AgentRowsVecEnv", "AgentSlot", "AgentsVecEnv", "valid_action",
]  # fmt: skip


_NONE = np.empty(0, np.int64)  # of games
_OF_STEP = (at.REWARDS, at.TERMINATIONS, at.TRUNCATIONS, at.VALID)
_FLAGS = (at.TERMINATIONS, at.TRUNCATIONS)
MASK_DTYPES = (np.dtype(np.int8), np.dtype(np.bool_))


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
    valid: Any = None


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


class GroupMasks(LatestMasks):
    """The masks that came with the latest results of a group's rows.

    They are the part "action_mask" of Dict observations, or `infos["action_mask"]`. If actions are
    padded, the actions that an agent does not have are forbidden too.

    Args:
        members: The group.
        num_games: Number of games.

    Attributes:
        source: Function from rows, int64 (B,), to masks, bool or int8 (B, width), for games that
            compute masks on request; None for games that give them with their results.
    """

    source: Callable[[np.ndarray], np.ndarray] | None = None

    def __init__(self, members: Members, num_games: int) -> None:
        super().__init__(
            num_games * len(members.agents), members.action_space, members.observation_space
        )
        self._members = members

    def name(self, row: Any) -> str:
        """Return the name of a row in errors."""
        game, k = divmod(int(row), len(self._members.agents))
        return f"game {game}, agent {self._members.agents[k]!r}"

    @property
    def is_there(self) -> bool:
        """Whether there are masks; for masks in infos this is known after the first reset."""
        has_source = self.source is not None or self._members.allowed is not None
        return super().is_there or (self._can_be and has_source)

    def note_rows(self, obs: Any, infos: dict[str, Any], rows: Any) -> None:
        """Record the masks of observations and infos of `rows`: int64 (B,), or the slice of all."""
        if self.is_observed:
            infos = {MASK_KEY: obs[MASK_KEY].reshape(-1, self._width), f"_{MASK_KEY}": True}
        if self._can_be:
            self.note(infos, rows)

    def read_rows(self, alive: np.ndarray, rows: Any) -> np.ndarray:
        """Return masks of rows, int8 (B, width), owned by the caller; all 1 for agents not alive.

        Raises:
            NoActionMaskError: There are none.
            ActionMaskError: A mask is missing, has values other than 0 and 1, or allows nothing;
                names game and agent.
        """
        if not self.is_there:
            width = mask_width(self._members.action_space)  # raises if there can't be masks
            raise NoActionMaskError(
                "the agents give no action masks; games that have them return them in the infos of "
                "each agent, as info['action_mask'], or have a part 'action_mask' in its Dict "
                f"observations; each mask is an array of {width} times 0 or 1"
            )
        ids, is_given, allowed = np.arange(len(alive))[rows], None, self._members.allowed
        values: Any = np.ones((len(ids), self._width), np.int8)
        if self.source is not None:
            values = self.source(ids)
        elif self.values is not None:
            values, is_given = self.values[ids], self._is_given[ids]
        if allowed is not None:
            allowed = allowed[ids % len(self._members.agents)]
        masks = self.checked(values, ids, ~alive[ids], is_given, allowed)
        masks[~alive[ids]] = 1
        return masks


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
        check_slot_array("masks", out, masks.shape, MASK_DTYPES)
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

        Those of agents that are not alive may be anything, and become a valid action.

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
        space = self.single_action_space
        if array.shape == (count, *(space.shape or ())) and not alive.all():
            array = array.copy()
            array[~alive] = valid_action(space)
        try:
            array = self.checks.check(array, rows)
        except ActionError as error:
            if array.dtype.kind == "f" and np.isnan(array).any():
                place = int(np.isnan(array).reshape(len(array), -1).any(axis=1).argmax())
                raise ActionError(
                    f"the action of {self._named(place, rows)} is {array[place]}; {space} has no "
                    "NaN"
                ) from None
            raise type(error)(f"group {self.name!r}: {error}") from None
        if self._allowed is not None:
            self._refuse_padding(array, rows)
        return array.reshape(-1, self.num_agents, *array.shape[1:])

    def _refuse_padding(self, actions: np.ndarray, rows: np.ndarray | None) -> None:
        """Raise for actions that agents have only in the padded space."""
        assert self._allowed is not None
        sizes, start = mask_sizes(self.single_action_space), valid_action(self.single_action_space)
        chosen = (actions - start).reshape(len(actions), -1)
        is_inside = (chosen >= 0) & (chosen < sizes)
        places = np.concatenate([[0], np.cumsum(sizes)[:-1]]) + np.where(is_inside, chosen, 0)
        allowed = np.tile(self._allowed, (len(actions) // self.num_agents, 1))
        has = (np.take_along_axis(allowed, places, axis=1) & is_inside).all(axis=1)
        if not has.all():
            place = int(has.argmin())
            raise ActionError(
                f"{self._named(place, rows)} got the action {actions[place]}, which it does not "
                "have: padding has added it; draw actions with `action_masks()`"
            )

    def _named(self, place: Any, rows: np.ndarray | None) -> str:
        """Return the name of the agent at a place in the actions for these rows."""
        return self.masks.name(place if rows is None else rows[place])

    def slot(self, out: Any) -> AgentSlot:
        """Check the caller's slot; return its arrays as plain ones."""
        slot = slot_rows(out, self._rows)
        valid = getattr(out, "valid", None)
        if valid is not None:
            valid = check_slot_array("valid", valid, (self.num_envs,), FLAG_DTYPES)
        return AgentSlot(*slot, valid)

    def take(self, columns: dict[str, Any], infos: dict[str, Any], rows: Any) -> None:
        """Record who acted in these rows, who acts next, and with which masks."""
        self.alive[rows] = columns[at.ALIVE].reshape(-1)
        self.valid[rows] = columns[at.VALID].reshape(-1)
        self.masks.note_rows(_as_rows(columns[at.OBS]), infos, rows)


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
        alive, valid: See `AgentGroup`; by group.
        num_games: Number of games.
        autoreset_mode: When games are reset.
        state_space: Space of a game's central state; None without `central_state=True`.
        timing: Where the time goes, see `VecEnv`; one env is one game.
    """

    def __init__(
        self, games: VecEnv, members: Mapping[str, Members], *, mask_infos: bool = False
    ) -> None:
        self.games = games
        self.mask_infos = mask_infos
        self.groups = {name: self._new_group(name, own, games) for name, own in members.items()}
        self.alive = {name: group.alive for name, group in self.groups.items()}
        self.valid = {name: group.valid for name, group in self.groups.items()}
        self.num_games = games.num_envs
        self.autoreset_mode = games.autoreset_mode
        self.metadata = games.metadata
        self.render_mode = games.render_mode
        self.timing = games.timing
        self._state: np.ndarray | None = None
        parts = getattr(games.single_observation_space, "spaces", {})  # compiled games have none
        self.state_space: Space | None = parts.get(at.STATE)

    def _new_group(self, name: str, members: Members, games: VecEnv) -> AgentGroup:
        return AgentGroup(name, members, games)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_games} games, {list(self.groups.values())})"

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self.games.closed

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
        rows = self._begin(obs, found, None if options is None else options.get("reset_mask"))
        if self.mask_infos:
            self._add_masks(found, None)
        return rows, found

    def _begin(self, obs: Any, infos: dict[str, Any], mask: Any) -> dict[str, Any]:
        """Record who acts in games that were reset; return the observations of all rows."""
        for name, group in self.groups.items():
            part = infos.get(name, {})
            if mask is None:
                group.take(obs[name], part, slice(None))
            else:
                games = np.flatnonzero(mask)
                rows = group.rows(games)
                group.take(_picked(obs[name], games), take_infos(part, rows), rows)
        self._state = obs.get(at.STATE)
        return {name: _as_rows(obs[name][at.OBS]) for name in self.groups}

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
        slots = self._slots_of(out or {})
        *found, infos = self._results(self._call_games(self.games.step, actions, None), None)
        for name, slot in slots.items():
            group, given = self.groups[name], (out or {})[name]
            StepSlot(*slot[:4]).put(range(group.num_envs), [part[name] for part in found])
            if slot.valid is not None:
                slot.valid[...] = group.valid
            for field, part in zip(AgentSlot._fields, found, strict=False):
                part[name] = getattr(given, field)
        return *found, infos

    def send(self, actions: Mapping[str, Any], game_ids: Any = None) -> None:
        """Start stepping some games; `actions` has, by group, one action per row of these games."""
        ids = None if game_ids is None else self.games._calls.check_env_ids(game_ids)
        self._call_games(self.games.send, actions, ids, ids)

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
        results = self._results(batch[:5], ids)
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
            TypeError: The games are not compiled; or `JitVectorEnv` raises it.
        """
        raise TypeError(
            f"copy_rows needs compiled games, these are of a {type(self.games).__name__}; "
            "state_dict and load_state_dict copy any"
        )

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

    def _call_games(
        self, method: Callable[..., Any], actions: Any, game_ids: Any, *args: Any
    ) -> Any:
        """Call `step` or `send` of the games with checked actions."""
        checked = self._joined(self._checked(actions, game_ids), game_ids)
        return self._call(method, checked, *args)

    def _joined(self, parts: dict[str, Any], game_ids: np.ndarray | None) -> Any:
        """Return checked actions (B, num_agents, ...) by group in the form of the games."""
        return parts

    def _results(self, batch: Any, game_ids: np.ndarray | None) -> tuple[dict[str, Any], ...]:
        """Return the games' results as rows by group, and record who is alive."""
        obs, _, terminations, truncations, infos = batch
        found, rows_infos = self._rows_of(obs, terminations | truncations, infos, game_ids)
        if self.mask_infos:
            self._add_masks(rows_infos, game_ids)
        parts = ({name: part[k] for name, part in found.items()} for k in range(4))
        return *parts, rows_infos

    def _rows_of(
        self, obs: Any, is_over: Any, infos: dict[str, Any], game_ids: np.ndarray | None
    ) -> tuple[dict[str, tuple[Any, ...]], dict[str, Any]]:
        """Record who acted and who is alive; return rows of results, and of infos.

        Args:
            obs: Observations of the games that were stepped.
            is_over: bool (B,), which of these ended.
            infos: Infos of these games.
            game_ids: Ids of these games, int64 (B,); None for all.

        Returns:
            By group obs, rewards, terminations and truncations; and infos by group.
        """
        ended = np.flatnonzero(is_over)
        lost = _lost(infos) if len(ended) else _NONE
        finals = infos.pop("final_obs", None)
        infos.pop("_final_obs", None)
        found: dict[str, tuple[Any, ...]] = {}
        rows_infos = self._infos_of(infos, len(is_over)) if infos else {}
        for name, group in self.groups.items():
            columns = obs[name]
            rows = slice(None) if game_ids is None else group.rows(game_ids)
            if len(ended):
                own = _end_games(columns, ended, lost, group.alive[rows], finals, name)
                if own:
                    rows_infos.setdefault(name, {}).update(own)
            group.take(columns, rows_infos.get(name, {}), rows)
            flags = [columns[flag].reshape(-1).view(np.bool_) for flag in _FLAGS]
            found[name] = _as_rows(columns[at.OBS]), columns[at.REWARDS].reshape(-1), *flags
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
        return found, rows_infos

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


_by_agents = forwarding("agents")


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
        device, check: Only of games on a device, see `CudaAgentsVecEnv`.
    """

    state = _by_agents(AgentsVecEnv.state)
    allocate = _by_agents(VecEnv.allocate)
    render = _by_agents(VecEnv.render)
    state_dict = _by_agents(VecEnv.state_dict)
    load_state_dict = _by_agents(VecEnv.load_state_dict)
    copy_rows = _by_agents(AgentsVecEnv.copy_rows)

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
        if hasattr(agents, "device"):
            self.device, self.check = agents.device, agents.check  # type: ignore[attr-defined]  # on a device

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
        return {**(options or {}), "reset_mask": games[:, 0].copy()}


def valid_action(space: Any) -> Any:
    """Return an action of a space, for agents whose action does not matter."""
    if hasattr(space, "start"):
        return space.start
    return np.clip(0, space.low, space.high) if hasattr(space, "low") else 0


def _lost(infos: dict[str, Any]) -> np.ndarray:
    """Return the games that were replaced after a fault, so that their results are old ones."""
    found = infos.get("_restarts")
    if found is None:
        found = infos.get("final_info", {}).get("_restarts")
    return _NONE if found is None else np.flatnonzero(found)


def _end_games(
    columns: dict[str, Any],
    ended: np.ndarray,
    lost: np.ndarray,
    was_alive: np.ndarray,
    finals: np.ndarray | None,
    name: str,
) -> dict[str, Any]:
    """Complete the columns of games that have ended; return infos with final observations.

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
    if finals is None:
        return {}
    num_agents = columns[at.VALID].shape[1]
    final_obs = np.full(len(finals) * num_agents, None, object)
    is_final = np.zeros(len(final_obs), np.bool_)
    flags = columns[at.TERMINATIONS] | columns[at.TRUNCATIONS]
    for game in ended.tolist():
        obs, is_over = finals[game][name][at.OBS], flags[game]
        for k in np.flatnonzero(is_over).tolist():
            row = game * num_agents + k
            final_obs[row], is_final[row] = _picked(obs, k), True
    return {"final_obs": final_obs, "_final_obs": is_final}


def _picked(batch: Any, place: Any) -> Any:
    """Return one entry of a batch, or the entries of an array of places, as copies."""
    return leaf_by_leaf(lambda array: array[place].copy(), batch)


def _as_rows(batch: Any) -> Any:
    """Merge the first two axes, games and agents, as views."""
    return leaf_by_leaf(lambda array: array.reshape(-1, *array.shape[2:]), batch)
