"""Checks of games with several agents: what their authors can get wrong.

Who acts, rows of others, and ends of games are rules of `vecenv.agents`, held by its tests.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.agents import AgentRowsVecEnv, AgentsVecEnv
from vecenv.check.rules import Findings
from vecenv.core.masks import sample_actions
from vecenv.core.spaces import is_same, take_row

__all__ = ["check_agents"]

_FIELDS = "observations", "rewards", "terminations", "truncations", "valid", "alive"


def check_agents(
    envs: AgentsVecEnv | AgentRowsVecEnv, num_steps: int, seed: int, found: Findings
) -> None:
    """Play games twice with the same random actions; see `check_vector_env`."""
    games = envs.agents if isinstance(envs, AgentRowsVecEnv) else envs
    with found.attempt("run with random actions"):
        first = _play(games, num_steps, seed, found)
        second = _play(games, num_steps, seed, Findings())
        rule = "the same seed gives the same run"
        for step, (results, others) in enumerate(zip(first, second, strict=True)):
            found.where = f"step {step - 1}" if step else "reset"
            for field, one, other in zip(_FIELDS, results, others, strict=True):
                message = "{field} were {a} in the first run and are {b} now"
                if not found.require(
                    rule, is_same(one, other), message, field=field, a=one, b=other
                ):
                    return


def _play(games: AgentsVecEnv, num_steps: int, seed: int, found: Findings) -> list[Any]:
    """Play a run, and check it; return copies of all results."""
    rng, found.where = np.random.default_rng(seed), "reset"
    for group in games.groups.values():
        group.action_space.seed(seed)
    obs, _ = games.reset(seed=seed)
    run, num_ends = [_checked(games, (obs, {}, {}, {}), found)], 0
    for step in range(num_steps):
        found.where = f"step {step}"
        actions = {name: _draw(group, rng) for name, group in games.groups.items()}
        run.append(_checked(games, games.step(actions)[:4], found))
        num_ends += sum(int((run[-1][2][name] | run[-1][3][name]).sum()) for name in games.groups)
        alive = [x.reshape(games.num_games, -1).any(axis=1) for x in games.alive.values()]
        over = ~np.any(alive, axis=0)
        if games.autoreset_mode is AutoresetMode.DISABLED and over.any():
            games.reset(options={"reset_mask": over})
    if not num_ends:
        why = f"no agent ended in {num_steps} steps; raise num_steps"
        found.skipped["games after the end of an agent"] = why
    return run


def _checked(games: AgentsVecEnv, results: Any, found: Findings) -> Any:
    """Check what agents got; return copies of it, and of who acted and who acts next."""
    for name, group in games.groups.items():
        bad = np.isnan(results[1].get(name, np.zeros(0)))
        message = "not so in {name}'s rows {rows}"
        found.require(
            "rewards are numbers", not bad.any(), message, name=name, rows=np.flatnonzero(bad)
        )
        for row in np.flatnonzero(group.alive).tolist():
            space = group.single_observation_space
            obs, message = take_row(space, results[0][name], row), "row {row} is {obs}, of {space}"
            rule = "observations of agents that act next are in their space"
            found.require(rule, obs in space, message, row=row, obs=obs, space=space)
    return deepcopy((*results, games.valid, games.alive))


def _draw(group: Any, rng: np.random.Generator) -> np.ndarray:
    """Return random actions, allowed ones if there are masks."""
    if group.has_action_masks:
        return sample_actions(group.single_action_space, group.action_masks(), rng)
    return group.action_space.sample()
