"""Games of several agents as rows, whose agents die and come at random, in all autoreset modes.

What a vector env with agents returns for one group of them, without any env: and beside it, per
row, the lives in plain lists, which buffers are compared with. Agents that have died may come back.
"""

from typing import NamedTuple

import numpy as np

NEXT_STEP, SAME_STEP, DISABLED = "NextStep", "SameStep", "Disabled"
MODES = [NEXT_STEP, SAME_STEP, DISABLED]


class Transition(NamedTuple):
    """A step of one agent."""

    t: int  # counted from the first step on
    obs: float
    reward: float
    next_obs: float
    terminated: bool
    truncated: bool

    @property
    def is_over(self):
        return self.terminated or self.truncated


class Step(NamedTuple):
    """What the vector env returns; all are (N,)."""

    obs: np.ndarray  # float32 (N, 1)
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray
    valid: np.ndarray
    final_obs: np.ndarray  # float32 (N, 1), 0 where has_final is False
    has_final: np.ndarray  # of rows that ended in a step in which their game was reset

    @property
    def infos(self):
        """As Gymnasium has them."""
        if not self.has_final.any():
            return {}
        finals = np.full(len(self.valid), None)
        for row in np.flatnonzero(self.has_final):
            finals[row] = self.final_obs[row]
        return {"final_obs": finals, "_final_obs": self.has_final}


class AgentGames:
    """Each observation is a number of its own, so that any two are told apart; that of the dead 0.

    Attributes:
        lives: For each row its lives, lists of transitions; the last one may go on.
        reset_rows: bool (N,), under DISABLED: rows of games that have ended, for `reset`.
    """

    def __init__(self, mode, num_games, agents, seed):
        self.mode, self.num_games, self.agents = mode, num_games, agents
        self.num_envs = num_games * agents
        self.rng = np.random.default_rng(seed)
        self.count, self.t = 0, -1
        shape = num_games, agents
        self.is_alive = np.zeros(shape, bool)
        self.seen = np.zeros(shape)  # the agents' latest observations
        self.lives = [[] for _ in range(self.num_envs)]
        self.over = np.zeros(num_games, bool)
        for game in range(num_games):
            self._begin(game)

    @property
    def obs(self):
        return self.seen.reshape(-1, 1).astype(np.float32)

    @property
    def reset_rows(self):
        return np.repeat(self.over, self.agents)

    def reset(self):
        """Under DISABLED: begin the games anew that have ended; observations of all rows."""
        for game in np.flatnonzero(self.over):
            self._begin(game)
        return self.obs

    def _observe(self):
        self.count += 1
        return float(self.count)

    def _begin(self, game):
        self.over[game] = False
        self.is_alive[game] = self.rng.random(self.agents) < 0.7
        self.is_alive[game, self.rng.integers(self.agents)] = True
        for agent in range(self.agents):
            self.seen[game, agent] = self._observe() if self.is_alive[game, agent] else 0.0

    def step(self):
        self.t += 1
        shape = self.num_games, self.agents
        rewards, finals = np.zeros(shape), np.zeros(shape)
        terminated, truncated, valid, has_final = np.zeros((4, *shape), bool)
        for game in range(self.num_games):
            if self.over[game]:
                assert self.mode == NEXT_STEP, "reset first"
                self._begin(game)
                continue
            valid[game] = self.is_alive[game]
            for agent in range(self.agents):
                if not self.is_alive[game, agent]:
                    self.seen[game, agent] = 0.0
                    comes = self.rng.random() < 0.2  # for the first time, or again
                    if comes:
                        self.seen[game, agent] = self._observe()
                    self.is_alive[game, agent] = comes
                    continue
                self._act(game, agent, rewards, terminated, truncated)
            if not self.is_alive[game].any():
                if self.mode == SAME_STEP:
                    has_final[game] = terminated[game] | truncated[game]
                    finals[game] = np.where(has_final[game], self.seen[game], 0.0)
                    self._begin(game)
                else:
                    self.over[game] = True
        return Step(
            self.obs,
            rewards.reshape(-1).astype(np.float32),
            *(flags.reshape(-1) for flags in (terminated, truncated, valid)),
            finals.reshape(-1, 1).astype(np.float32),
            has_final.reshape(-1),
        )

    def _act(self, game, agent, rewards, terminated, truncated):
        place = game, agent
        before, self.seen[place] = self.seen[place], self._observe()
        rewards[place] = float(np.float32(self.rng.normal()))
        kind = self.rng.random()
        terminated[place] = kind < 0.1 or kind > 0.97
        truncated[place] = kind > 0.8  # some are both
        made = Transition(
            self.t, before, rewards[place], self.seen[place],
            bool(terminated[place]), bool(truncated[place]),
        )  # fmt: skip
        lives = self.lives[game * self.agents + agent]
        if not lives or lives[-1][-1].is_over:
            lives.append([])
        lives[-1].append(made)
        self.is_alive[place] = not made.is_over
