"""Small compiled games, of two groups and of one, and the same as `ParallelEnv`s in Python."""

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from vecenv.jit import AgentsOf, EnvKernels
from vecenv.jit.random import RNG_DTYPE, integers, open_block, seed_key, uniform

# Cats chase mice on a ring of cells. A mouse that shares a cell with a cat is caught: it ends, and
# each cat there is paid. Cats move by -1, 0 or 1, mice by a step of that size times a pace of 1 or
# 2. The game ends when no mouse is left; late mice come after some steps.
NUM_CATS, NUM_MICE, CELLS = 2, 3, 11


def reset(state, rng):
    state.time = 0
    for k in range(NUM_CATS):
        state.cell[k] = integers(rng, CELLS)
    for k in range(NUM_CATS, NUM_CATS + NUM_MICE):
        state.cell[k] = integers(rng, CELLS)
    state.alive[NUM_CATS + NUM_MICE - 1] = 0  # comes in the third step


def step(state, actions, rng):
    cats, mice = actions
    state.time += 1
    for k in range(NUM_CATS):
        state.cell[k] = (state.cell[k] + cats[k] - 1) % CELLS
    for m in range(NUM_MICE):
        k = NUM_CATS + m
        if state.alive[k]:
            state.cell[k] = (state.cell[k] + (mice[m, 0] - 1) * (mice[m, 1] + 1)) % CELLS
            state.rewards[k] = 0.125
    left = 0
    for k in range(NUM_CATS, NUM_CATS + NUM_MICE):
        if not state.alive[k]:
            continue
        for cat in range(NUM_CATS):
            if state.cell[cat] == state.cell[k]:
                state.rewards[cat] += 1.0
                state.rewards[k] = -1.0
                state.terminations[k] = 1
        left += 1 - state.terminations[k]
    if state.time == 3:
        state.alive[NUM_CATS + NUM_MICE - 1] = 1
        left += 1
    return -0.25, left == 0 and state.time > 3, False


def observe(state, agent, out):
    out[0] = 1 + state.cell[agent]
    for k in range(NUM_CATS + NUM_MICE):
        if k < out.shape[0] - 1:
            out[1 + k] = 1 + state.cell[k]


def mask(state, agent, out):
    for k in range(out.shape[0]):
        out[k] = True
    if agent < NUM_CATS and state.cell[agent] == 0:
        out[0] = False  # may not go back from the first cell


CHASE = EnvKernels(
    name="Chase",
    state_dtype=[("time", np.int32), ("cell", np.int32, (NUM_CATS + NUM_MICE,))],
    groups={
        "cat": AgentsOf(NUM_CATS, Box(0, CELLS, (4,), np.float32), Discrete(3)),
        "mouse": AgentsOf(NUM_MICE, Box(0, CELLS, (6,), np.float32), MultiDiscrete([3, 2])),
    },
    reset=reset,
    step=step,
    observe=observe,
)


# Walkers on a plane push off with two numbers each; all are paid for being close together.
NUM_WALKERS = 3


def reset_walk(state, rng):
    for k in range(NUM_WALKERS):
        for axis in range(2):
            state.place[k, axis] = uniform(rng)


def step_walk(state, actions, rng):
    spread = 0.0
    for k in range(NUM_WALKERS):
        for axis in range(2):
            state.place[k, axis] += 0.125 * actions[k, axis]
            spread += abs(state.place[k, axis] - state.place[0, axis])
        state.rewards[k] = -abs(state.place[k, 0])
    return -spread, spread > 4.0, False


def observe_walk(state, agent, out):
    for axis in range(2):
        out[0, axis] = state.place[agent, axis]
        out[1, axis] = state.place[(agent + 1) % NUM_WALKERS, axis]


WALK = EnvKernels(
    name="Walk",
    state_dtype=[("place", np.float64, (NUM_WALKERS, 2))],
    groups={
        "walker": AgentsOf(
            NUM_WALKERS, Box(-9, 9, (2, 2), np.float32), Box(-1, 1, (2,), np.float32)
        )
    },
    reset=reset_walk,
    step=step_walk,
    observe=observe_walk,
)


class PythonGame:
    """A `ParallelEnv` that plays kernels as plain functions; what agents get is worked out anew."""

    def __init__(self, kernels, max_steps=10**9):
        self.kernels, self.max_steps = kernels, max_steps
        self.groups = kernels.groups
        self.seats = {}
        for name, group in self.groups.items():
            for k in range(group.agents):
                self.seats[f"{name}_{k}"] = (group, len(self.seats))
        self.possible_agents = list(self.seats)
        self.state_of_game = np.zeros(1, kernels.state_dtype).view(np.recarray)[0]
        self.rng = np.zeros(1, RNG_DTYPE).view(np.recarray)[0]

    def observation_space(self, agent):
        return self.seats[agent][0].observation_space

    def action_space(self, agent):
        return self.seats[agent][0].action_space

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng.key, self.rng.counter = seed_key(np.uint64(seed)), 0
        open_block(self.rng)
        self.num_steps = 0
        self.state_of_game.alive[:] = 1
        self.kernels.reset(self.state_of_game, self.rng)
        self.agents = self.living()
        return {agent: self.observed(agent) for agent in self.agents}, {}

    def step(self, actions):
        state, acted = self.state_of_game, self.agents
        assert list(actions) == acted
        parts = []
        for name, group in self.groups.items():
            part = np.zeros((group.agents, *group.action_space.shape), group.action_space.dtype)
            for k in range(group.agents):
                if f"{name}_{k}" in actions:
                    part[k] = actions[f"{name}_{k}"]
            parts.append(part)
        state.rewards[:] = state.terminations[:] = state.truncations[:] = 0
        open_block(self.rng)
        reward, terminated, truncated = self.kernels.step(
            state, parts[0] if len(parts) == 1 else tuple(parts), self.rng
        )
        self.num_steps += 1
        number = {agent: self.seats[agent][1] for agent in acted}
        rewards = {agent: reward + state.rewards[k] for agent, k in number.items()}
        terminations = {a: terminated or bool(state.terminations[k]) for a, k in number.items()}
        truncations = {a: truncated or bool(state.truncations[k]) for a, k in number.items()}
        is_over = terminated or truncated
        if self.num_steps >= self.max_steps:
            is_over = True
            truncations = {a: cut or not terminations[a] for a, cut in truncations.items()}
        observations = {agent: self.observed(agent) for agent in acted}
        for agent, k in number.items():
            if terminations[agent] or truncations[agent]:
                state.alive[k] = 0
        self.agents = [] if is_over else self.living()
        observations |= {agent: self.observed(agent) for agent in self.agents}
        return observations, rewards, terminations, truncations, {}

    def living(self):
        return [agent for agent, (_, k) in self.seats.items() if self.state_of_game.alive[k]]

    def observed(self, agent):
        group, k = self.seats[agent]
        out = np.zeros(group.observation_space.shape, group.observation_space.dtype)
        self.kernels.observe(self.state_of_game, k, out)
        return out

    def close(self):
        pass
