"""Checks of vector envs of agents: rows of agents, who acts, games that end, sends and slots."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from vecenv.agents import AgentGroup, AgentRowsVecEnv, AgentSlot, AgentsVecEnv
from vecenv.check.rules import Findings, GiveUpError
from vecenv.core.batches import is_same, join_rows, take_row, take_rows
from vecenv.core.errors import ActionError
from vecenv.core.masks import sample_actions
from vecenv.core.rows import ObservationRows

__all__ = ["check_agents"]

_FIELDS = ("observations", "rewards", "terminations", "truncations", "valid", "alive")


class _Frame(NamedTuple):
    """Copies of what a reset or a step gave, by group."""

    observations: dict[str, Any]
    rewards: dict[str, np.ndarray]
    terminations: dict[str, np.ndarray]
    truncations: dict[str, np.ndarray]
    valid: dict[str, np.ndarray]
    alive: dict[str, np.ndarray]


def check_agents(
    envs: AgentsVecEnv | AgentRowsVecEnv, num_steps: int, seed: int, found: Findings
) -> None:
    """Do all checks of a vector env of agents and close it; see `vecenv.check_vector_env`."""
    try:
        with found.attempt("groups"):
            _check_groups(envs, found)
            checks = _AgentChecks(envs, num_steps, seed, found)
            checks.check_all()
    finally:
        rule = "close may be called twice"
        with found.attempt(rule):
            envs.close()
            envs.close()
            found.require(rule, True, "")
            rule = "calls after close raise ClosedEnvironmentError"
            found.require_raises(rule, ClosedEnvironmentError, envs.reset)


def _check_groups(envs: AgentsVecEnv | AgentRowsVecEnv, found: Findings) -> None:
    if not found.require("there are groups of agents", envs.groups, "groups is empty"):
        raise GiveUpError
    for name, group in envs.groups.items():
        found.where = f"group {name!r}"
        wanted = envs.num_games * len(group.agents)
        found.require(
            "num_envs of a group is the number of games times its agents",
            group.num_envs == wanted,
            "it is {came}, expected {wanted}",
            came=group.num_envs, wanted=wanted,
        )  # fmt: skip
        for kind in ("observation", "action"):
            batched = getattr(group, f"{kind}_space")
            wanted = batch_space(getattr(group, f"single_{kind}_space"), group.num_envs)
            found.require(
                f"{kind}_space of a group is the batch of single_{kind}_space",
                batched == wanted,
                "it is {batched}, expected {wanted}",
                batched=batched, wanted=wanted,
            )  # fmt: skip


class _AgentChecks:
    """Runs of a vector env of agents, and what they are held against."""

    def __init__(
        self, envs: AgentsVecEnv | AgentRowsVecEnv, num_steps: int, seed: int, found: Findings
    ) -> None:
        self._rows = envs if isinstance(envs, AgentRowsVecEnv) else None
        self._envs = envs.agents if isinstance(envs, AgentRowsVecEnv) else envs
        self._mode = envs.autoreset_mode
        self._seed, self._num_steps, self._found = seed, num_steps, found
        self._actions: list[dict[str, np.ndarray]] = []
        self._frames: list[_Frame] = []
        self._num_ends = 0

    def check_all(self) -> None:
        """Do every check but those of a closed env."""
        found = self._found
        with found.attempt("run with random actions"):
            self._check_run()
        if len(self._frames) <= self._num_steps:
            return
        if not self._num_ends:
            why = f"no game ended in {self._num_steps} steps; raise num_steps"
            found.skipped["rules about the end of a game"] = why
        rule = "the same seed gives the same run"
        with found.attempt("second run"):
            self._check_replay(rule, self._envs.step)
        if rule in found.failures or rule not in found.tried:
            return
        replays: dict[str, Any] = {
            "step(out=) writes what step returns, and `valid`": self._slot_step(),
            "send and recv of games give what step gives": self._step_in_parts,
            "actions of agents that are not alive are ignored": self._other_dead_actions,
        }
        if self._rows is not None:
            replays["rows of the only group are its rows by name"] = self._step_rows
        for rule, step in replays.items():
            with found.attempt(rule):
                self._check_replay(rule, step)
        with found.attempt("seeds"):
            self._check_seeds()
        with found.attempt("partial reset"):
            self._check_partial_reset()
        with found.attempt("wrong actions"):
            self._check_wrong_actions()

    def _frame(self, results: tuple[Any, ...]) -> _Frame:
        obs, rewards, terminations, truncations = deepcopy(tuple(results[:4]))
        valid, alive = deepcopy((self._envs.valid, self._envs.alive))
        return _Frame(obs, rewards, terminations, truncations, valid, alive)

    def _reset(self, seed: Any = None, mask: np.ndarray | None = None) -> _Frame:
        options = None if mask is None else {"reset_mask": mask}
        obs, _ = self._envs.reset(seed=seed, options=options)
        return self._frame((obs, {}, {}, {}))

    def _draw(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return random actions, allowed ones where there are masks."""
        drawn = {}
        for name, group in self._envs.groups.items():
            if group.has_action_masks:
                masks = group.action_masks()
                drawn[name] = sample_actions(group.single_action_space, masks, rng)
            else:
                drawn[name] = group.action_space.sample()
        return drawn

    def _check_run(self) -> None:
        """Step with random actions and hold every result against the rules."""
        envs, rng = self._envs, np.random.default_rng(self._seed)
        for group in envs.groups.values():
            group.action_space.seed(self._seed)
        self._found.where = "reset"
        frame = self._reset(self._seed)
        self._check_begun(frame, np.ones(envs.num_games, np.bool_))
        self._frames = [frame]
        kept: tuple[Any, Any] | None = None
        for step in range(self._num_steps):
            self._found.where = f"step {step}"
            actions = self._draw(rng)
            results = envs.step(actions)
            before, frame = frame, self._frame(results)
            if kept is not None:
                rule = "results returned earlier are the caller's to keep"
                self._found.require(rule, is_same(*kept), "the next step has changed them")
            kept = results[:4], deepcopy(results[:4])
            self._check_step(before, frame, results[4])
            over = self._over(frame)
            self._actions.append(actions)
            if self._mode is AutoresetMode.DISABLED and over.any():
                self._found.where += ", reset of the games that are over"
                frame = self._reset(mask=over)
                self._check_begun(frame, over)
            self._frames.append(frame)

    def _by_game(self, group: AgentGroup, array: np.ndarray) -> np.ndarray:
        return array.reshape(self._envs.num_games, group.num_agents)

    def _any(self, flags: dict[str, np.ndarray]) -> np.ndarray:
        """Return which games have an agent whose flag is set, bool (num_games,)."""
        found = np.zeros(self._envs.num_games, np.bool_)
        for name, group in self._envs.groups.items():
            found |= self._by_game(group, flags[name]).any(axis=1)
        return found

    def _over(self, frame: _Frame) -> np.ndarray:
        return ~self._any(frame.alive)

    def _check_begun(self, frame: _Frame, games: np.ndarray) -> None:
        """Check games that have just been reset."""
        self._check_arrays(frame, is_step=False)
        empty = games & ~self._any(frame.alive)
        rule = "a game that begins has agents"
        message = "nobody is alive in games {games}"
        self._found.require(rule, not empty.any(), message, games=np.flatnonzero(empty))
        rule = "after a reset nobody has acted"
        acted = games & self._any(frame.valid)
        message = "`valid` is set in games {games}"
        self._found.require(rule, not acted.any(), message, games=np.flatnonzero(acted))

    def _check_step(self, before: _Frame, frame: _Frame, infos: dict[str, Any]) -> None:
        """Check what a step returned, knowing the frame before it."""
        self._check_arrays(frame, is_step=True)
        require = self._found.require
        was_over, is_over = self._over(before), self._over(frame)
        ended = np.zeros_like(was_over)
        for name, group in self._envs.groups.items():
            flags = frame.terminations[name] | frame.truncations[name]
            self._check_who_acted(group, before, frame)
            rule = "an agent that has ended does not act next, until its game is reset"
            is_reset = self._mode is AutoresetMode.SAME_STEP
            wrong = self._by_game(group, flags & frame.alive[name])
            wrong = wrong & False if is_reset else wrong
            require(rule, not wrong.any(), "games {games}, group {name}",
                    games=np.flatnonzero(wrong.any(axis=1)), name=name)  # fmt: skip
            ended |= self._by_game(group, flags).any(axis=1)
            self._check_finals(group, flags, infos.get(name, {}))
        if self._mode is AutoresetMode.NEXT_STEP:
            rule = "NEXT_STEP: a game that is over is reset by the next step"
            stuck = was_over & is_over
            require(rule, not stuck.any(), "games {games}", games=np.flatnonzero(stuck))
        rule = "a game is over in a step in which agents end"
        silent = is_over & ~was_over & ~ended
        require(rule, not silent.any(), "games {games} have nobody left, and no flags",
                games=np.flatnonzero(silent))  # fmt: skip
        if self._mode is AutoresetMode.SAME_STEP:
            rule = "SAME_STEP: every game has agents after a step"
            require(rule, not is_over.any(), "games {games}", games=np.flatnonzero(is_over))
            self._num_ends += sum("final_obs" in infos.get(name, {}) for name in self._envs.groups)
        self._num_ends += int(is_over.sum())

    def _check_who_acted(self, group: AgentGroup, before: _Frame, frame: _Frame) -> None:
        name, require = group.name, self._found.require
        valid = frame.valid[name]
        wrong = valid != before.alive[name]
        rule = "`valid` after a step is `alive` before it"
        require(rule, not wrong.any(), "not so in rows {rows} of {name}",
                rows=np.flatnonzero(wrong), name=name)  # fmt: skip
        rule = "rows of agents that did not act have no reward and no flags"
        flags = frame.terminations[name] | frame.truncations[name]
        wrong = ~valid & (flags | (frame.rewards[name] != 0))
        require(rule, not wrong.any(), "rows {rows} of {name}",
                rows=np.flatnonzero(wrong), name=name)  # fmt: skip
        rule = "observations of agents that neither acted nor act next are zeros"
        for row in np.flatnonzero(~valid & ~frame.alive[name]).tolist():
            obs = take_row(group.single_observation_space, frame.observations[name], row)
            if not require(rule, _is_zero(obs), "row {row} of {name} is {obs}",
                           row=row, name=name, obs=obs):  # fmt: skip
                break

    def _check_finals(self, group: AgentGroup, flags: np.ndarray, infos: dict[str, Any]) -> None:
        given = infos.get("_final_obs")
        if given is None:
            return
        rule = "final observations are of agents that ended, and in their space"
        is_right = not (given & ~flags).any() and all(
            group.single_observation_space.contains(infos["final_obs"][row])
            for row in np.flatnonzero(given)
        )
        self._found.require(rule, is_right, "infos['final_obs'] of group {name}", name=group.name)

    def _check_arrays(self, frame: _Frame, *, is_step: bool) -> None:
        """Check shapes, dtypes and spaces."""
        for name, group in self._envs.groups.items():
            for field in _FIELDS[1 if is_step else 4 :]:
                array = getattr(frame, field)[name]
                dtype = np.float64 if field == "rewards" else np.bool_
                self._found.require(
                    f"{field} are {np.dtype(dtype)} with a row per agent",
                    array.shape == (group.num_envs,) and array.dtype == dtype,
                    "group {name} has shape {shape} and dtype {dtype}",
                    name=name, shape=array.shape, dtype=str(array.dtype),
                )  # fmt: skip
            if is_step:
                wrong = np.isnan(frame.rewards[name])
                self._found.require(
                    "rewards are numbers", not wrong.any(), "rows {rows} of {name} are NaN",
                    rows=np.flatnonzero(wrong), name=name,
                )  # fmt: skip
            rule = "observations of agents that act next are in their space"
            for row in np.flatnonzero(frame.alive[name]).tolist():
                obs = take_row(group.single_observation_space, frame.observations[name], row)
                if not self._found.require(
                    rule, group.single_observation_space.contains(obs),
                    "row {row} of {name} is {obs}, of {space}",
                    row=row, name=name, obs=obs, space=group.single_observation_space,
                ):  # fmt: skip
                    break

    def _check_replay(self, rule: str, step: Callable[[Any], Any]) -> None:
        """Require that the run comes again when stepped by `step`."""
        frames = [self._reset(self._seed)]
        for actions in self._actions:
            frame = self._frame(step(actions))
            over = self._over(frame)
            if self._mode is AutoresetMode.DISABLED and over.any():
                frame = self._reset(mask=over)
            frames.append(frame)
        for k, (first, second) in enumerate(zip(self._frames, frames, strict=True)):
            self._found.where = f"step {k - 1}" if k else "reset"
            if not self._require_same(rule, first, second):
                return

    def _require_same(self, rule: str, first: _Frame, second: _Frame) -> bool:
        for field, one, other in zip(_FIELDS, first, second, strict=True):
            for name in one:
                if not is_same(one[name], other[name]):
                    message = "{field} of {name} were {a} in the first run and are {b} now"
                    return self._found.require(
                        rule, False, message, field=field, name=name, a=one[name], b=other[name]
                    )
        return self._found.require(rule, True, "")

    def _slot_step(self) -> Callable[[Any], Any]:
        """Return a function that steps into memory of the env's, and returns copies of it."""
        slots = {}
        for name, group in self._envs.groups.items():
            rows = ObservationRows.make(
                group.single_observation_space, group.num_envs, group.allocate
            )
            flags = [group.allocate((group.num_envs,), np.bool_) for _ in range(3)]
            rewards = group.allocate((group.num_envs,), np.float64)
            slots[name] = AgentSlot(rows.batch(), rewards, *flags)

        def step(actions: Any) -> Any:
            results = self._envs.step(actions, out=slots)
            for name, slot in slots.items():
                rule = "a slot's `valid` is the group's"
                is_right = np.array_equal(slot.valid, self._envs.valid[name])
                self._found.require(rule, is_right, "not so in group {name}", name=name)
            return deepcopy(results[:4])

        return step

    def _step_in_parts(self, actions: dict[str, np.ndarray]) -> tuple[Any, ...]:
        """Step all games by two sends, and put what comes back in order."""
        envs = self._envs
        order = np.random.default_rng(self._seed).permutation(envs.num_games)
        for games in np.array_split(order, min(2, envs.num_games)):
            chosen = {
                name: np.asarray(actions[name])[group.rows(games)]
                for name, group in envs.groups.items()
            }
            envs.send(chosen, games)
        places: dict[str, dict[int, tuple[Any, int]]] = {name: {} for name in envs.groups}
        left = envs.num_games
        while left > 0:
            batch = envs.recv(min_games=1)
            left -= len(batch.game_ids)
            for name, ids in batch.env_ids.items():
                places[name].update({int(row): (batch, k) for k, row in enumerate(ids)})
        results: tuple[dict[str, Any], ...] = ({}, {}, {}, {})
        for name, group in envs.groups.items():
            found = [places[name][row] for row in range(group.num_envs)]
            space = group.single_observation_space
            results[0][name] = join_rows(space, [(batch.obs[name], k) for batch, k in found])
            for part, field in zip(results[1:], _FIELDS[1:4], strict=True):
                part[name] = np.stack([getattr(batch, field)[name][k] for batch, k in found])
        return results

    def _other_dead_actions(self, actions: dict[str, np.ndarray]) -> Any:
        """Step with other actions for agents that are not alive."""
        changed = {}
        for name, group in self._envs.groups.items():
            changed[name] = np.array(actions[name])
            dead = ~group.alive
            changed[name][dead] = group.action_space.sample()[dead]
        return self._envs.step(changed)

    def _step_rows(self, actions: dict[str, np.ndarray]) -> tuple[Any, ...]:
        assert self._rows is not None
        name = self._rows.group.name
        return tuple({name: part} for part in self._rows.step(actions[name])[:4])

    def _check_seeds(self) -> None:
        seeds = [self._seed + game for game in range(self._envs.num_games)]
        self._found.where = f"reset(seed={seeds})"
        rule = "reset(seed=s) gives game g what a list gives with s + g"
        self._require_same(rule, self._frames[0], self._reset(seeds))

    def _check_partial_reset(self) -> None:
        """Reset game 0 alone in the middle; the others must go on as if nothing had been."""
        envs = self._envs
        self._reset(self._seed)
        envs.reset(options={"reset_mask": np.arange(envs.num_games) == 0})
        if envs.num_games == 1:
            self._found.skipped["games go on as before when another is reset"] = "there is one"
            return
        after = self._frame(envs.step(self._actions[0]))
        before = self._frames[1]
        if self._mode is AutoresetMode.DISABLED and (self._over(after)).any():
            return  # of which the frame is that after their reset
        for name, group in envs.groups.items():
            rows = list(range(group.num_agents, group.num_envs))
            space = group.single_observation_space
            pairs = [
                (
                    take_rows(space, frame.observations[name], rows),
                    *(part[name][rows] for part in frame[1:4]),
                )
                for frame in (before, after)
            ]
            rule = "games go on as before when another is reset"
            message = "the next step of group {name} gives others something else"
            self._found.require(rule, is_same(*pairs), message, name=name)

    def _check_wrong_actions(self) -> None:
        envs, require_raises = self._envs, self._found.require_raises
        self._reset(self._seed)
        good = self._actions[0]
        name = next(iter(envs.groups))
        require_raises("actions of a group that are missing are refused", ActionError, envs.step,
                       {key: good[key] for key in good if key != name})  # fmt: skip
        require_raises("actions of wrong number are refused", ActionError, envs.step,
                       {**good, name: good[name][:-1]})  # fmt: skip
        self._found.where = "the step after refused actions"
        frame = self._frame(envs.step(good))
        if self._mode is not AutoresetMode.DISABLED or not self._over(frame).any():
            self._require_same("refused actions step nothing", self._frames[1], frame)


def _is_zero(obs: Any) -> bool:
    if isinstance(obs, dict):
        return all(map(_is_zero, obs.values()))
    if isinstance(obs, tuple):
        return all(map(_is_zero, obs))
    return not np.any(obs)
