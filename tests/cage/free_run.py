"""Free-running episodes for the tests: a batch of envs, a blue policy, nothing else."""

import numpy as np
from numba import njit

from vecenv.cage.challenge2.network.cage2 import cage2_scenario
from vecenv.cage.challenge2.network.state import STATE_DTYPE, shell_alerts
from vecenv.cage.challenge2.network.tables import compile_tables
from vecenv.cage.challenge2.rules import free
from vecenv.cage.challenge2.rules.codes import BITS_PER_HOST, CUSTOM
from vecenv.cage.challenge2.rules.memory import observe_extended
from vecenv.cage.challenge2.rules.observation import observe
from vecenv.fingerprint import cached_njit
from vecenv.jit.random import RNG_DTYPE, open_block, seed_key


@cached_njit
@njit
def reset_rows(states, rngs, tables):
    for row in range(states.shape[0]):
        rngs[row].counter = np.uint64(0)
        open_block(rngs[row])
        free.reset(states[row], rngs[row], tables)


@cached_njit
@njit
def step_rows(states, rngs, actions, rewards, obs, tables):
    for row in range(states.shape[0]):
        open_block(rngs[row])
        reward, _, _ = free.step(states[row], actions[row], rngs[row], tables)
        rewards[row] = reward
        observe(states[row], obs[row], tables)


@cached_njit
@njit
def observe_extended_rows(states, out, tables):
    for row in range(states.shape[0]):
        observe_extended(states[row], out[row], tables)


@cached_njit
@njit
def mask_rows(states, out, tables):
    for row in range(states.shape[0]):
        free.action_mask(states[row], out[row], tables)


class FreeRun:
    """A batch of envs that run by themselves.

    Args:
        num_envs: How many.
        red_agents: Agents to draw from, as `compile_tables` takes them.
        seed: Env i has the stream of seed + i.
        step: Another loop with the arguments of `step_rows`.
        **options: For `compile_tables`.
    """

    def __init__(self, num_envs, red_agents, *, scenario=None, seed=0, step=step_rows, **options):
        self.scenario = scenario or cage2_scenario()
        self.tables = compile_tables(self.scenario, red_agents=red_agents, **options)
        self.states = np.zeros(num_envs, STATE_DTYPE).view(np.recarray)
        self.states["red_agent"] = CUSTOM
        self.rngs = np.zeros(num_envs, RNG_DTYPE).view(np.recarray)
        self.rngs["key"] = [seed_key(np.uint64(seed + i)) for i in range(num_envs)]
        self.rewards = np.zeros(num_envs)
        self.obs = np.zeros((num_envs, BITS_PER_HOST * len(self.scenario.hosts)), np.uint8)
        self._step = step
        reset_rows(self.states, self.rngs, self.tables)

    def step(self, actions):
        self._step(self.states, self.rngs, actions, self.rewards, self.obs, self.tables)
        return self.rewards

    def play(self, policy, num_steps):
        """Rewards (num_steps, num_envs) of the policy."""
        rewards = np.zeros((num_steps, len(self.states)))
        for t in range(num_steps):
            rewards[t] = self.step(policy.act(self.obs, self.alerts()))
        return rewards

    def alerts(self):
        return shell_alerts(self.states, self.scenario)
