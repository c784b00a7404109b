"""Policies that actors make: one that does as it is told, and some that fail."""

import numpy as np


class Follower:
    """Acts as its input says, shifted by its weight; records the observations it saw."""

    def __init__(self, envs):
        self.num_actions = envs.single_action_space.n
        self.shift = 0

    def load(self, weights):
        self.shift = int(weights["shift"])

    def act(self, obs, chosen):
        return chosen[:, None], {"seen": obs.copy()}

    def to_env(self, actions):
        return (actions + self.shift) % self.num_actions


class Failing(Follower):
    def act(self, obs, chosen):
        raise ArithmeticError("no idea what to do")


class Odd(Follower):
    def act(self, obs, chosen):
        return chosen, {"triple": np.zeros(3)}


class Hoarder(Follower):
    """Keeps all that it is given as it is, and records whether any of it has changed since."""

    def __init__(self, envs):
        super().__init__(envs)
        self.kept = []

    def act(self, obs, chosen):
        self.kept.append((obs, obs.copy()))
        is_torn = any((given != copy).any() for given, copy in self.kept)
        return chosen[:, None], {"torn": np.full(len(obs), is_torn)}


class Masked(Follower):
    """Takes the first action that is allowed, and records the masks."""

    def __init__(self, envs):
        self.envs = envs

    def act(self, obs):
        masks = self.envs.action_masks()
        return masks.argmax(1) + self.envs.single_action_space.start, {"masks": masks}

    def to_env(self, actions):
        return actions
