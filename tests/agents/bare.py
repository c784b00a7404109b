"""The slow twin: bare games stepped one by one, their results put into rows agent by agent."""

from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode


class Expected(NamedTuple):
    """What a step of all games gives, by group and row."""

    obs: dict[str, list]
    rewards: dict[str, np.ndarray]
    terminations: dict[str, np.ndarray]
    truncations: dict[str, np.ndarray]
    valid: dict[str, np.ndarray]
    alive: dict[str, np.ndarray]
    final_obs: dict[str, dict[int, Any]]
    infos: dict[str, dict[int, Any]]  # of agents that have some
    common: dict[int, Any]  # of games
    states: dict[int, np.ndarray]  # central ones, of games, if asked for
    final_states: dict[int, np.ndarray]  # of games that were reset in the step that ended them


class BareGames:
    """Games and the rules of autoreset, in the plainest way.

    They share the whole history of calls with the vector env that they are compared with, as what a
    game does after `reset(seed)` may depend on what it did before.
    """

    def __init__(self, games, groups, mode, *, with_states=False):
        self.games, self.mode, self.with_states = games, mode, with_states
        self.agents = {name: list(group.agents) for name, group in groups.items()}
        self.over = [False] * len(games)

    def blank(self):
        counts = {name: len(self.games) * len(agents) for name, agents in self.agents.items()}

        def zeros(dtype):
            return {name: np.zeros(count, dtype) for name, count in counts.items()}

        return Expected(
            {name: [None] * count for name, count in counts.items()},
            zeros(np.float64),
            *(zeros(np.bool_) for _ in range(4)),
            {name: {} for name in counts},
            {name: {} for name in counts},
            {},
            {},
            {},
        )

    def rows(self, game):
        """Name, row and agent of all of a game's."""
        for name, agents in self.agents.items():
            for k, agent in enumerate(agents):
                yield name, game * len(agents) + k, agent

    def reset(self, seeds, mask=None):
        found = self.blank()
        for g, game in enumerate(self.games):
            if mask is None or mask[g]:
                self.begin(found, g, *game.reset(seed=seeds[g]))
                self.over[g] = False
        return found

    def begin(self, found, g, obs, infos):
        self.look(found.states, g)
        for name, row, agent in self.rows(g):
            if agent in self.games[g].agents:
                found.obs[name][row] = obs[agent]
                found.alive[name][row] = True
        self.note(found, g, infos)

    def look(self, states, g):
        if self.with_states:
            states[g] = np.array(self.games[g].state())

    def note(self, found, g, infos):
        for name, row, agent in self.rows(g):
            if infos.get(agent):
                found.infos[name][row] = infos[agent]
        if "common" in infos:
            found.common[g] = infos["common"]

    def step(self, actions):
        found = self.blank()
        for g, game in enumerate(self.games):
            if self.over[g]:
                assert self.mode is AutoresetMode.NEXT_STEP
                self.over[g] = False
                self.begin(found, g, *game.reset())
                continue
            chosen = {
                agent: actions[name][row]
                for name, row, agent in self.rows(g)
                if agent in game.agents
            }
            obs, rewards, terminations, truncations, infos = game.step(chosen)
            is_reset = not game.agents and self.mode is AutoresetMode.SAME_STEP
            self.over[g] = not game.agents and not is_reset
            self.look(found.final_states if is_reset else found.states, g)
            for name, row, agent in self.rows(g):
                if agent in chosen:
                    found.valid[name][row] = True
                    found.rewards[name][row] = rewards[agent]
                    terminated, truncated = terminations[agent], truncations[agent]
                    has_left = agent not in game.agents
                    found.terminations[name][row] = terminated
                    found.truncations[name][row] = truncated or (has_left and not terminated)
                    if has_left and is_reset:
                        found.final_obs[name][row] = obs[agent]
                if (agent in chosen or agent in game.agents) and not is_reset:
                    found.obs[name][row] = obs[agent]
                    found.alive[name][row] = agent in game.agents
            if is_reset:
                self.begin(found, g, *game.reset())
            else:
                self.note(found, g, infos)
        return found
