"""Games that are played in lockstep, all agents of a game by one row of actions."""

import dataclasses

import numpy as np

from vecenv.cage.challenge4.env import Cage4Options, Cage4VectorEnv, overflows


class Games:
    """`Cage4VectorEnv` with what the latest step returned kept in arrays."""

    def __init__(self, num_games, *, seed=None, options=None, **vector_options):
        chosen = dataclasses.asdict(options or Cage4Options())
        self.envs = Cage4VectorEnv(num_games, messages=True, **chosen, **vector_options)
        self.num_games = num_games
        self.reset(seed)

    def reset(self, seed=None):
        self.obs = self.envs.reset(seed=seed)[0]
        self.rewards, self.is_over = np.zeros(self.num_games), np.zeros(self.num_games, bool)

    def step(self, actions, messages=None):
        sent = np.zeros((self.num_games, 5), int) if messages is None else messages
        both = np.concatenate([actions, sent], axis=1)
        self.obs, self.rewards, self.is_over, truncations, _ = self.envs.step(both)
        assert (truncations == self.is_over).all()

    def agent_obs(self, agent):
        return self.envs.agent_obs(self.obs)[agent]

    @property
    def masks(self):
        return self.envs.agent_masks()

    @property
    def overflows(self):
        return overflows(self.envs.states)

    def close(self):
        self.envs.close()


def rows_by_agent(obs, num_games, pad):
    """Observations (num_games, ...) of each of the five agents of `make_vec_agents`."""
    if pad:
        return [*np.asarray(obs).reshape(num_games, 5, -1).swapaxes(0, 1)]
    return [*obs["blue_agent"].reshape(num_games, 4, -1).swapaxes(0, 1), obs["blue_agent_4"]]


def as_rows(actions, pad):
    """Actions (num_games, 5, ...) in the form that `make_vec_agents` takes."""
    if pad:
        return actions.reshape(-1, *actions.shape[2:])
    zones = actions[:, :4].reshape(-1, *actions.shape[2:])
    return {"blue_agent": zones, "blue_agent_4": actions[:, 4]}


def play(games, policy, num_steps):
    """Let a policy play from the beginning of an episode; yield after each step."""
    policy.reset(games.masks)
    for _ in range(num_steps):
        games.step(policy.act(games.envs.agent_obs(games.obs)))
        yield games
