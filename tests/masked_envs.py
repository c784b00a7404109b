"""Minefields: envs in which an action that is masked ends the episode, and nothing else does.

What is allowed is drawn at every step and can be read from the observation, so that a mask shows
of which observation it is. Where an episode is over, nothing is allowed any more.
"""

import gymnasium as gym
import numpy as np
from agents.games import Game
from gymnasium import spaces
from numba import njit

from vecenv.jit import EnvKernels
from vecenv.jit.random import integers

NUM_ACTIONS = 5
LENGTH = 7  # steps until truncation


def mask_of(keys):
    """The mask int8 (..., 5) that belongs to observed keys (...)."""
    return (np.asarray(keys, np.int64)[..., None] >> np.arange(NUM_ACTIONS) & 1).astype(np.int8)


MASKS = mask_of(np.arange(1 << NUM_ACTIONS))


class Minefield(gym.Env):
    """Observes (key, step number); gives its mask as `form` says: in infos, by method, in obs."""

    metadata = {}

    def __init__(self, form="info", parts=False):
        self.form, self.key = form, 31
        self.action_space = spaces.MultiDiscrete([2, 3]) if parts else spaces.Discrete(5, start=2)
        self.observation_space = spaces.Box(0, 100, (2,), np.float32)
        if form == "obs":
            mask_space = spaces.Box(0, 1, (NUM_ACTIONS,), np.int8)
            self.observation_space = spaces.Dict(
                observation=self.observation_space, action_mask=mask_space
            )
        if form == "action_masks":
            self.action_masks = lambda: MASKS[self.key]

    def _allowed(self, action):
        if isinstance(self.action_space, spaces.MultiDiscrete):
            return all(MASKS[self.key, [action[0], 2 + action[1]]])
        return MASKS[self.key, action - 2]

    def _draw(self):
        number = int(self.np_random.integers(21))
        self.key = 1 + number % 3 + 4 * (1 + number // 3)  # each part has a choice

    def _result(self):
        obs, mask = np.array([self.key, self.step_number], np.float32), MASKS[self.key]
        if self.form == "obs":
            return {"observation": obs, "action_mask": mask}, {}
        if self.form == "tuple":
            return obs, {"action_mask": (mask[:2], mask[2:])}
        return obs, {"action_mask": mask} if self.form == "info" else {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_number = 0
        self._draw()
        return self._result()

    def step(self, action):
        is_dead = not self._allowed(action)
        self.step_number += 1
        self._draw()
        is_cut = self.step_number >= LENGTH
        if is_dead or is_cut:
            self.key = 0
        obs, info = self._result()
        return obs, -float(is_dead), is_dead, is_cut, info


class Forbidding(Minefield):
    """A minefield that raises at an action that is masked; it draws itself."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, form="info", parts=False, render_mode=None):
        super().__init__(form, parts)
        self.render_mode = render_mode

    def step(self, action):
        if not self._allowed(action):
            raise ValueError(f"the action {action} is forbidden")
        return super().step(action)

    def render(self):
        return np.full((16, 16, 3), 8 * self.key, np.uint8)


class ForbiddingGame(Game):
    """A game of agents with 3 and 4 actions that raises at one that is masked; it draws itself.

    The masks come as `form` says: in the agents' infos, or in their observations; with None there
    are none, and only actions that an agent does not have are refused. Agents die and come back.
    `parts` are those of each action: `spaces.MultiDiscrete`, or MultiBinary if all are 2.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
    possible_agents = ["ant_0", "ant_1", "bee_0"]
    sizes, empty_at = (3, 3, 4), None  # a step in which nothing is allowed

    def __init__(self, form="info", parts=None, render_mode=None):
        self.form, self.parts, self.render_mode = form, parts, render_mode
        self.rng = np.random.default_rng(0)
        self._spaces = {agent: self._spaces_of(agent) for agent in self.possible_agents}

    def _spaces_of(self, agent):
        seen = spaces.Box(0, 1, (2,), np.float32)
        if self.form == "obs":
            mask = spaces.Box(0, 1, (sum(self._sizes(agent)),), np.int8)
            seen = spaces.Dict(observation=seen, action_mask=mask)
        if self.parts is None:
            return seen, spaces.Discrete(*self._sizes(agent))
        is_binary = set(self.parts) == {2}
        return seen, (spaces.MultiBinary(2) if is_binary else spaces.MultiDiscrete(self.parts))

    def _sizes(self, agent):
        return self.parts or [self.sizes[self.possible_agents.index(agent)]]

    def _draw_mask(self, agent):
        masks = []
        for size in self._sizes(agent):
            masks.append(np.zeros(size, np.int8))
            masks[-1][self.rng.permutation(size)[: size - 1]] = self.time != self.empty_at
        return masks

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents, self.time = list(self.possible_agents), 0
        return self._results(self.agents)

    def _results(self, agents):
        seen, infos, self.masks = {}, {}, {}
        for agent in sorted(agents):
            masks = self._draw_mask(agent)
            mask = np.concatenate(masks)
            self.masks[agent] = [np.ones_like(one) for one in masks] if not self.form else masks
            seen[agent] = np.zeros(2, np.float32)
            if self.form == "obs":
                seen[agent] = {"observation": seen[agent], "action_mask": mask}
            infos[agent] = {"action_mask": mask} if self.form == "info" else {}
        return seen, infos

    def step(self, actions):
        for agent, action in actions.items():
            chosen = zip(self.masks[agent], np.reshape(action, -1), strict=True)
            if not all(mask[value] for mask, value in chosen):
                raise ValueError(f"the action {action} of {agent} is forbidden")
        self.time += 1
        ends = {agent: bool(self.rng.random() < 0.2) for agent in actions}
        left = [agent for agent in self.possible_agents if not ends.get(agent)]
        self.agents = [] if self.time == 9 else left
        seen, infos = self._results(set(self.agents) | set(actions))
        no = dict.fromkeys(actions, self.time == 9)
        return seen, dict.fromkeys(actions, 1.0), ends, no, infos

    def render(self):
        return np.full((16, 16, 3), 8 * self.time, np.uint8)


class ForbiddingPair(ForbiddingGame):
    """Two agents, of as many actions unless `sizes` are given."""

    possible_agents = ["player_0", "player_1"]

    def __init__(self, form="info", sizes=(4, 4), empty_at=None):
        self.sizes, self.empty_at = sizes, empty_at
        super().__init__(form)


@njit
def _draw(state, rng):
    state.key = 1 + integers(rng, 3) + 4 * (1 + integers(rng, 7))


def reset(state, rng):
    state.step_number = 0
    _draw(state, rng)


@njit
def _go_on(state, is_dead, rng):
    state.step_number += 1
    _draw(state, rng)
    is_cut = state.step_number >= LENGTH
    if is_dead or is_cut:
        state.key = 0
    return -1.0 if is_dead else 0.0, is_dead, is_cut


def step(state, action, rng):
    return _go_on(state, (state.key >> (action - 2)) & 1 == 0, rng)


def step_in_parts(state, action, rng):
    is_dead = ((state.key >> action[0]) & (state.key >> (2 + action[1])) & 1) == 0
    return _go_on(state, is_dead, rng)


def observe(state, out):
    out[0], out[1] = state.key, state.step_number


def action_mask(state, out):
    for k in range(out.shape[0]):
        out[k] = (state.key >> k) & 1 == 1


def kernels(parts=False):
    return EnvKernels(
        name="minefield",
        state_dtype=[("key", np.int64), ("step_number", np.int64)],
        observation_space=spaces.Box(0, 100, (2,), np.float32),
        action_space=spaces.MultiDiscrete([2, 3]) if parts else spaces.Discrete(5, start=2),
        reset=reset,
        step=step_in_parts if parts else step,
        observe=observe,
        action_mask=action_mask,
    )
