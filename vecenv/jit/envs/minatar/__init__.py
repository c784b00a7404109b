"""MinAtar's Asterix, Freeway, Seaquest and Space Invaders, one per module.

The rules are those of K. Young and T. Tian, "MinAtar: An Atari-Inspired Testbed for Thorough and
Reproducible Reinforcement Learning Experiments", 2019 (arXiv 1903.03176), as of version 1.0.15.

Here is what they share: the board, the actions, the options, the picture.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from numba import njit

from vecenv.jit.bundled import BundledVectorEnv, enlarge
from vecenv.jit.kernels import EnvKernels, pack_record
from vecenv.jit.random import uniform

SIZE = 10  # cells of an edge
RAMP_INTERVAL = 100
# Colours by the name of the channel; later channels are drawn over earlier ones.
COLORS = {
    "trail": (90, 90, 90),
    "gauge": (90, 160, 250),
    "friend": (120, 220, 120),
    "shot": (250, 250, 120),
    "enemy": (230, 90, 60),
    "enemy shot": (250, 170, 200),
    "gold": (250, 200, 40),
    "tail": (150, 150, 200),
    "player": (255, 255, 255),
}


@njit
def intended(state, action, rng, params):
    """Return the action to do: sometimes the previous one instead."""
    if uniform(rng) < params.sticky_action_prob:
        return state.action
    state.action = action
    return action


def game_kernels(
    name: str, channels: Sequence[str], num_actions: int, numbers: str, arrays: Any, **kernels: Any
) -> EnvKernels:
    """Return the kernels of a game.

    Args:
        name: Name of the game.
        channels: For each channel of the observation a name in `COLORS`.
        num_actions: Number of actions.
        numbers: Names of the integers in the state, besides `action`.
        arrays: Its other fields.
        **kernels: `reset`, `step` and `observe`.
    """

    def draw(state: Any, params: Any) -> np.ndarray:
        board = np.zeros((SIZE, SIZE, len(channels)), np.uint8)
        getattr(kernels["observe"], "py_func", kernels["observe"])(state, board, params)
        cells = np.zeros((SIZE, SIZE, 3), np.uint8)
        for name, color in COLORS.items():
            for k in range(len(channels)):
                if channels[k] == name:
                    cells[board[..., k] > 0] = color
        return enlarge(cells, 16)

    return EnvKernels(
        name=name,
        state_dtype=[("action", np.int64), *((n, np.int32) for n in numbers.split()), *arrays],
        observation_space=Box(0, 255, (SIZE, SIZE, len(channels)), np.uint8),
        action_space=Discrete(num_actions),
        render=draw,
        params=pack_record(sticky_action_prob=0.1, difficulty_ramping=True),
        **kernels,
    )


class MinAtarVectorEnv(BundledVectorEnv):
    """Many games of one kind.

    Observations are pictures, uint8 (10, 10, channels), 255 where MinAtar's are True. Actions are
    MinAtar's minimal set, in its order. Parameters that may differ between envs:
    `sticky_action_prob`, the probability that the previous action is done again, and
    `difficulty_ramping`, whether games get harder with time.
    """

    actions: tuple[str, ...]

    def __init__(self, num_envs: int = 1, **options: Any) -> None:
        if not 0 <= (given := options.get("sticky_action_prob", 0.1)) <= 1:
            raise ValueError(f"sticky_action_prob is {given!r}, expected a probability")
        super().__init__(num_envs, **options)

    def get_action_meanings(self) -> list[str]:
        """Return the names of the actions, as Atari's envs do."""
        return list(self.actions)
