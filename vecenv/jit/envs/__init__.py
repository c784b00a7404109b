"""Bundled compiled envs, one per module; `vecenv.jit.cartpole` is another.

Most are made by their ids. Those that take the user's maps are here, too.
"""

from vecenv.jit.envs.grid_world import GridWorldVectorEnv
from vecenv.jit.envs.tables import FrozenLakeVectorEnv

__all__ = ["FrozenLakeVectorEnv", "GridWorldVectorEnv"]
