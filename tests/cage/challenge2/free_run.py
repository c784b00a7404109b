"""Free-running episodes for the tests: a batch of envs, a blue policy, nothing else."""

import numpy as np
from numba import njit

from vecenv.cage import Cage2VectorEnv
from vecenv.cage.challenge2.rules.codes import RED_AGENT_NAMES
from vecenv.cage.challenge2.tables import compile_tables
from vecenv.jit.random import integers


@njit
def own_red(state, rng, tables):
    """A red that sweeps its subnet, then scans User2 for ever.

    One policy for all tests, as each is compiled for a quarter of a minute: where `custom[0]` is
    set it scans Enterprise1, exploits it again and again, then escalates; sometimes nonsense.
    """
    if state.custom[0] == 0:
        return (1, 2) if state.step == 0 else (2, 10)
    if state.step % 12 == 11:
        return 4, 2
    if state.step == 0:
        return 2, 2
    if integers(rng, 20) == 0:
        return integers(rng, 40) - 20, integers(rng, 40) - 20
    return 3, 2


class FreeRun:
    """A batch of envs that run by themselves.

    Args:
        num_envs: How many.
        red_agents: Agents to draw from: numbers of built-in ones, and policies.
        seed: Env i has the stream of seed + i.
        **options: For `Cage2VectorEnv`.
    """

    def __init__(self, num_envs, red_agents, *, seed=0, **options):
        agents = [agent if callable(agent) else RED_AGENT_NAMES[agent] for agent in red_agents]
        options |= {"episode_length": 1000, "autoreset_mode": "Disabled"}
        self.envs = Cage2VectorEnv(num_envs, red_agent=agents, **options)
        self.scenario, self.states = self.envs.scenario, self.envs.states
        self.tables = compile_tables(self.scenario)
        self.reset(seed)

    def reset(self, seed=None):
        self._see(self.envs.reset(seed=seed)[0])

    def step(self, actions):
        obs, self.rewards, *_ = self.envs.step(actions)
        self._see(obs)
        return self.rewards

    def _see(self, obs):
        self.obs = obs.astype(np.uint8)

    def play(self, policy, num_steps):
        """Rewards (num_steps, num_envs) of the policy."""
        rewards = np.zeros((num_steps, len(self.states)))
        for t in range(num_steps):
            rewards[t] = self.step(policy.act(self.obs, self.alerts()))
        return rewards

    def alerts(self):
        return self.envs.shell_alerts()
