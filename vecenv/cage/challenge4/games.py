"""Many games of CAGE Challenge 4 at a time, for tests and measurements.

This is a thin class over `vecenv.jit.JitVectorEnv`, which steps all games in one compiled call. It
is no interface for several agents: there are no agent groups, no autoreset rows per agent, no
PettingZoo and no Gymnasium spaces per agent here. Use it to play the exact rules with arrays of
actions; expect it to be replaced by the project's interface for several agents.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vecenv.cage.challenge4.kernels import CAGE4
from vecenv.cage.challenge4.options import Cage4Options, compile_rules
from vecenv.cage.challenge4.rules.codes import (
    BLUE_SUBNETS,
    FIRST_SERVER,
    HOSTS_PER_SUBNET,
    NUM_ACTIONS,
    NUM_BLUE,
    OBS_LENGTH,
    OBS_LENGTHS,
    OBS_STARTS,
    OVERFLOW_NAMES,
)
from vecenv.jit.env import JitVectorEnv

__all__ = ["Cage4Games"]


class Cage4Games:
    """Games of CAGE Challenge 4 that are played in lockstep.

    Games that are over begin anew in the next step, whose actions are ignored and whose reward is
    0 (Gymnasium's NEXT_STEP), unless `autoreset_mode` says otherwise.

    Args:
        num_games: G.
        seed: Of the first reset, see `reset`.
        options: The challenge's numbers; None for the challenge's.
        **vector_options: `num_threads`, `autoreset_mode`, `debug`, ... of `JitVectorEnv`.

    Attributes:
        obs: uint8 (G, 578), what the agents see, one after the other; the array is kept, and
            overwritten by each step.
        rewards: float32 (G,), the reward of the latest step, the same for all five agents.
        is_over: bool (G,), whether the episode ended with it (terminated and truncated, both).
        envs: The `JitVectorEnv`; `envs.states` are the live state records.

    Example:
        >>> games = Cage4Games(2, seed=0, debug=True)
        >>> games.agent_obs(4).shape, [mask.shape for mask in games.masks][3:]
        ((2, 210), [(2, 82), (2, 242)])
        >>> games.step(np.array([[49, 49, 49, 49, 145]] * 2))
        >>> games.rewards.shape
        (2,)
    """

    def __init__(
        self,
        num_games: int,
        *,
        seed: int | None = None,
        options: Cage4Options | None = None,
        **vector_options: Any,
    ) -> None:
        self.options = Cage4Options() if options is None else options
        rules = compile_rules(self.options)
        self.envs = JitVectorEnv(CAGE4, num_games, params=rules, dry_run=False, **vector_options)
        self.num_games = num_games
        self.obs = self.envs.allocate((num_games, OBS_LENGTH), np.uint8)
        self.rewards = np.zeros(num_games, np.float32)
        self.is_over = np.zeros(num_games, bool)
        self._actions = np.zeros((num_games, 2 * NUM_BLUE), np.int64)
        self.reset(seed)

    def reset(self, seed: int | None = None) -> np.ndarray:
        """Begin new episodes on new networks; game i gets seed + i. Return `obs`."""
        self.obs[:] = self.envs.reset(seed=seed)[0]
        self.rewards[:] = 0
        self.is_over[:] = False
        return self.obs

    def step(self, actions: Any, messages: Any = None) -> None:
        """Play one step of all games; `obs`, `rewards` and `is_over` are overwritten.

        Args:
            actions: int (G, 5), an index into each agent's own actions. What the mask forbids acts
                as Sleep.
            messages: int (G, 5), 0..255: bit i is element i; None for zeros.

        Raises:
            ValueError: An array has another shape, or an entry is out of range.
        """
        shape = (self.num_games, NUM_BLUE)
        for name, given in (("actions", actions), ("messages", messages)):
            if given is not None and np.shape(given) != shape:
                raise ValueError(f"{name} has shape {np.shape(given)}, expected {shape}")
        self._actions[:, :NUM_BLUE] = actions
        self._actions[:, NUM_BLUE:] = 0 if messages is None else messages
        obs, rewards, terminations, _, _ = self.envs.step(self._actions)
        self.obs[:], self.rewards[:], self.is_over[:] = obs, rewards, terminations

    def agent_obs(self, agent: int) -> np.ndarray:
        """Return what an agent sees: a view of `obs`, uint8 (G, 92), (G, 210) of agent 4."""
        start = OBS_STARTS[agent]
        return self.obs[:, start : start + OBS_LENGTHS[agent]]

    @property
    def masks(self) -> list[np.ndarray]:
        """Which actions do something, per agent bool (G, 82), (G, 242); constant in an episode."""
        exists = self.envs.states["exists"].astype(np.int64)
        there = (exists[:, :, None] >> np.arange(HOSTS_PER_SUBNET) & 1).astype(bool)
        there = np.roll(there, HOSTS_PER_SUBNET - FIRST_SERVER, axis=2)  # servers first
        masks = []
        for agent, subnets in enumerate(BLUE_SUBNETS):
            own = there[:, list(subnets)].reshape(self.num_games, -1)
            num, size = NUM_ACTIONS[agent], own.shape[1]
            mask = np.ones((self.num_games, num), bool)
            for start in (0, size + 1, 2 * size + 1, num - size):
                mask[:, start : start + size] = own
            masks.append(mask)
        return masks

    @property
    def overflows(self) -> dict[str, int]:
        """How many games have outgrown a capacity in this episode; such a game is not exact."""
        flags = self.envs.states["overflow"]
        return {
            name: int((flags >> bit & 1).sum())
            for bit, name in enumerate(OVERFLOW_NAMES)
            if (flags >> bit & 1).any()
        }

    def close(self) -> None:
        """Close the envs."""
        self.envs.close()
