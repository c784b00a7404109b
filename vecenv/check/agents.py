"""Checks of games with several agents: who acts, rows of others, games that end, the seed."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.agents import AgentGroup, AgentRowsVecEnv, AgentsVecEnv
from vecenv.check.rules import Findings
from vecenv.core.masks import sample_actions
from vecenv.core.spaces import is_same, take_row

__all__ = ["check_agents"]


class _Frame(NamedTuple):
    """Copies of the results of a reset or a step, by group."""

    observations: dict[str, Any]
    rewards: dict[str, np.ndarray]
    terminations: dict[str, np.ndarray]
    truncations: dict[str, np.ndarray]
    valid: dict[str, np.ndarray]
    alive: dict[str, np.ndarray]


def check_agents(
    envs: AgentsVecEnv | AgentRowsVecEnv, num_steps: int, seed: int, found: Findings
) -> None:
    """Do all checks of a vector env of agents except that of `close`; see `check_vector_env`."""
    checks = _AgentChecks(envs, num_steps, seed, found)
    with found.attempt("run with random actions"):
        checks.check_run()
        if not checks.num_ends:
            why = f"no game ended in {num_steps} steps; raise num_steps"
            found.skipped["rules about the end of a game"] = why
        with found.attempt("second run"):
            checks.check_replay()


class _AgentChecks:
    """Runs of a vector env of agents, and the rules for their results."""

    def __init__(
        self, envs: AgentsVecEnv | AgentRowsVecEnv, num_steps: int, seed: int, found: Findings
    ) -> None:
        self._envs = envs.agents if isinstance(envs, AgentRowsVecEnv) else envs
        self._mode = envs.autoreset_mode
        self._seed, self._num_steps, self._found = seed, num_steps, found
        self._actions: list[dict[str, np.ndarray]] = []
        self._frames: list[_Frame] = []
        self.num_ends = 0

    def check_run(self) -> None:
        """Step with random actions; check every result against the rules."""
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
            actions = {name: _draw(group, rng) for name, group in envs.groups.items()}
            results = envs.step(actions)
            before, frame = frame, self._frame(results)
            if kept is not None:
                rule = "results returned earlier are the caller's to keep"
                self._found.require(rule, is_same(*kept), "the next step has changed them")
            kept = results[:4], deepcopy(results[:4])
            self._check_step(before, frame, results[4])
            self._actions.append(actions)
            over = self._over(frame)
            if self._mode is AutoresetMode.DISABLED and over.any():
                self._found.where += ", reset of the games that are over"
                frame = self._reset(mask=over)
                self._check_begun(frame, over)
            self._frames.append(frame)

    def check_replay(self) -> None:
        """Require that the same seed repeats the run."""
        rule, frame = "the same seed gives the same run", self._reset(self._seed)
        for k, first in enumerate(self._frames):
            self._found.where = f"step {k - 1}" if k else "reset"
            if k:
                frame = self._frame(self._envs.step(self._actions[k - 1]))
            over = self._over(frame)
            if k and self._mode is AutoresetMode.DISABLED and over.any():
                frame = self._reset(mask=over)
            for field, one, other in zip(_Frame._fields, first, frame, strict=True):
                for name in one:
                    message = "{field} of {name} were {a} in the first run and are {b} now"
                    values = {"name": name, "a": one[name], "b": other[name]}
                    is_kept = is_same(one[name], other[name])
                    if not self._found.require(rule, is_kept, message, field=field, **values):
                        return

    def _frame(self, results: tuple[Any, ...]) -> _Frame:
        return _Frame._make(deepcopy((*results[:4], self._envs.valid, self._envs.alive)))

    def _reset(self, seed: Any = None, mask: np.ndarray | None = None) -> _Frame:
        options = None if mask is None else {"reset_mask": mask}
        obs, _ = self._envs.reset(seed=seed, options=options)
        return self._frame((obs, {}, {}, {}))

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

    def _require_none(self, rule: str, wrong: np.ndarray, where: str) -> None:
        """Require that no row, or no game, is marked as wrong."""
        message = "not so in {where} {marked}"
        marked = np.flatnonzero(wrong)
        self._found.require(rule, not wrong.any(), message, where=where, marked=marked)

    def _check_begun(self, frame: _Frame, games: np.ndarray) -> None:
        """Check games that were just reset."""
        self._check_observations(frame)
        empty, acted = games & ~self._any(frame.alive), games & self._any(frame.valid)
        self._require_none("a game that begins has agents", empty, "games")
        self._require_none("after a reset nobody has acted", acted, "games")

    def _check_step(self, before: _Frame, frame: _Frame, infos: dict[str, Any]) -> None:
        """Check the results of a step, given the frame before it."""
        self._check_observations(frame)
        was_over, is_over = self._over(before), self._over(frame)
        ended = np.zeros_like(was_over)
        for name, group in self._envs.groups.items():
            flags, rows = frame.terminations[name] | frame.truncations[name], f"{name}'s rows"
            valid = frame.valid[name]
            self._require_none("rewards are numbers", np.isnan(frame.rewards[name]), rows)
            rule = "`valid` after a step is `alive` before it"
            self._require_none(rule, valid != before.alive[name], rows)
            rule = "rows of agents that did not act have no reward and no flags"
            self._require_none(rule, ~valid & (flags | (frame.rewards[name] != 0)), rows)
            if self._mode is not AutoresetMode.SAME_STEP:
                rule = "an agent that has ended does not act next, until its game is reset"
                self._require_none(rule, flags & frame.alive[name], rows)
            ended |= self._by_game(group, flags).any(axis=1)
            given = infos.get(name, {}).get("_final_obs", np.zeros_like(flags))
            final = {k: infos[name]["final_obs"][k] for k in np.flatnonzero(given).tolist()}
            outside = [k for k, x in final.items() if x not in group.single_observation_space]
            rule = "final observations are of agents that ended, and in their space"
            self._require_none(
                rule, (given & ~flags) | np.isin(np.arange(len(flags)), outside), rows
            )
            self.num_ends += len(final)
        silent = is_over & ~was_over & ~ended
        self._require_none("a game is over in a step in which agents end", silent, "games")
        if self._mode is AutoresetMode.NEXT_STEP:
            rule = "NEXT_STEP: a game that is over is reset by the next step"
            self._require_none(rule, was_over & is_over, "games")
        if self._mode is AutoresetMode.SAME_STEP:
            self._require_none("SAME_STEP: every game has agents after a step", is_over, "games")
        self.num_ends += int(is_over.sum())

    def _check_observations(self, frame: _Frame) -> None:
        for name, group in self._envs.groups.items():
            space, alive = group.single_observation_space, frame.alive[name]
            for row in range(group.num_envs):
                obs = take_row(space, frame.observations[name], row)
                rule, is_right = "observations of agents that act next are in their space", True
                if alive[row]:
                    is_right = obs in space
                elif not frame.valid[name][row]:
                    rule = "observations of agents that neither acted nor act next are zeros"
                    is_right = _is_zero(obs)
                message = "row {row} of {name} is {obs}, of {space}"
                values = {"row": row, "name": name, "obs": obs, "space": space}
                if not self._found.require(rule, is_right, message, **values):
                    break


def _draw(group: AgentGroup, rng: np.random.Generator) -> np.ndarray:
    """Return random actions, allowed ones if there are masks."""
    if group.has_action_masks:
        return sample_actions(group.single_action_space, group.action_masks(), rng)
    return group.action_space.sample()


def _is_zero(obs: Any) -> bool:
    if isinstance(obs, dict | tuple):
        return all(map(_is_zero, obs.values() if isinstance(obs, dict) else obs))
    return not np.any(obs)
