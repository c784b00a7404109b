"""The compiled envs that belong to the project, for the tests of what they are on a device."""

import importlib.util
import sys
from pathlib import Path

import vecenv.agents.games.pursuit
import vecenv.agents.games.spread
from vecenv.cage.challenge2.env import Cage2VectorEnv
from vecenv.cage.challenge4.env import Cage4VectorEnv
from vecenv.jit import JitVectorEnv
from vecenv.jit.cartpole import CartPoleVectorEnv


def load_breakout():
    """The example as a module, once: it registers its envs, as other tests' imports do."""
    if "breakout" not in sys.modules:
        path = Path(__file__).parents[3] / "examples" / "breakout.py"
        spec = importlib.util.spec_from_file_location("breakout", path)
        sys.modules["breakout"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["breakout"])
    return sys.modules["breakout"]


def breakout(num_envs, **options):
    return JitVectorEnv(load_breakout().BREAKOUT, num_envs, **options)


def cage2_memory(num_envs, **options):
    return Cage2VectorEnv(
        num_envs, observation="memory", red_agent="mixed", episode_length=[30, 50], **options
    )


MAKERS = {
    "cartpole": CartPoleVectorEnv,
    "breakout": breakout,
    "cage2": Cage2VectorEnv,
    "cage2 memory": cage2_memory,
    "spread": vecenv.agents.games.spread.SpreadVectorEnv,
    "pursuit": vecenv.agents.games.pursuit.PursuitVectorEnv,
    "cage4": Cage4VectorEnv,
}
