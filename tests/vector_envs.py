"""A small vector env of its own making that keeps all rules, and variants that break one each."""

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode


class DriftVectorEnv(VectorEnv):
    """Points drift by their action plus noise; an episode ends above 3 or after 8 steps.

    Every method that a variant may want to get wrong is small and separate.
    """

    def __init__(self, num_envs=3, mode=NEXT_STEP):
        self.num_envs = num_envs
        self.mode = mode
        self.metadata = {"autoreset_mode": mode}
        self.single_observation_space = spaces.Box(-999, 999, (2,), np.float32)
        self.single_action_space = spaces.Discrete(3)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.generators = [np.random.default_rng(i) for i in range(num_envs)]
        self.points = np.zeros((num_envs, 2))
        self.ages = np.zeros(num_envs, int)
        self.over = np.zeros(num_envs, bool)
        self.num_closed = 0

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        for i in np.flatnonzero(mask):
            if seed is not None:
                self.generators[i] = np.random.default_rng(self.seed_of(seed, i))
            self.start(i)
        return self.observe(), self.infos(mask)

    def step(self, actions):
        actions = self.checked(actions)
        rewards = np.zeros(self.num_envs)
        terminations, truncations = np.zeros((2, self.num_envs), bool)
        infos = {}
        for i, action in enumerate(actions):
            if self.mode is NEXT_STEP and self.over[i]:
                rewards[i], terminations[i] = self.dead_step(i, action)
                continue
            self.points[i] += action - 0.5 + self.generators[i].normal(size=2)
            self.ages[i] += 1
            rewards[i] = self.points[i, 0]
            terminations[i] = self.points[i, 0] > 3
            truncations[i] = self.ages[i] >= 8
        over = terminations | truncations
        if self.mode is SAME_STEP and over.any():
            infos = self.end(over)
        self.over = over
        infos |= self.infos(np.ones(self.num_envs, bool))
        return self.observe(), rewards, terminations, truncations, infos

    def start(self, i):
        self.points[i] = self.generators[i].normal(size=2)
        self.ages[i] = 0
        self.over[i] = False

    def seed_of(self, seed, i):
        return seed + i

    def observe(self):
        return self.points.astype(np.float32)

    def dead_step(self, i, action):
        """Return the reward and the flag of a step that only resets."""
        self.start(i)
        return 0.0, False

    def end(self, over):
        """Start the next episodes; return the infos of those that ended."""
        final_obs = np.full(self.num_envs, None, dtype=object)
        for i in np.flatnonzero(over):
            final_obs[i] = self.points[i].astype(np.float32)
            self.start(i)
        infos = {"final_obs": final_obs, "final_info": {"age": np.zeros(self.num_envs, int)}}
        return infos | {"_final_obs": over.copy(), "_final_info": over.copy()}

    def infos(self, mask):
        return {"age": self.ages.copy(), "_age": mask.copy()}

    def checked(self, actions):
        if np.shape(actions) != (self.num_envs,):
            raise ValueError(f"expected {self.num_envs} actions, got {np.shape(actions)}")
        return np.asarray(actions)

    def close(self, **kwargs):
        self.num_closed += 1


def variant(name, **members):
    """Make a DriftVectorEnv class with some members replaced."""
    return type(name, (DriftVectorEnv,), members)


def stepping(change):
    """A step whose result is changed."""

    def step(self, actions):
        return change(*DriftVectorEnv.step(self, actions))

    return step


def setting(**attributes):
    """An `__init__` that then sets attributes, computed from the vector env."""

    def __init__(self, *args, **kwargs):
        DriftVectorEnv.__init__(self, *args, **kwargs)
        for name, value in attributes.items():
            setattr(self, name, value(self))

    return __init__


class OneBuffer(DriftVectorEnv):
    """Returns one array of observations again and again."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.buffer = np.zeros((self.num_envs, 2), np.float32)

    def observe(self):
        self.buffer[:] = self.points
        return self.buffer


class ReusedRewards(DriftVectorEnv):
    """Returns one array of rewards again and again."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rewards = np.zeros(self.num_envs)

    def step(self, actions):
        obs, rewards, *rest = super().step(actions)
        self.rewards[:] = rewards
        return (obs, self.rewards, *rest)
