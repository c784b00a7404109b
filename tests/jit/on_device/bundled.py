"""The compiled envs that belong to the project, and what they are on a device."""

from functools import partial

import numpy as np
from example_files import load_example

import vecenv
import vecenv.agents.games.pursuit
import vecenv.agents.games.spread
from vecenv.cage.challenge2.env import Cage2VectorEnv
from vecenv.cage.challenge4.env import Cage4AgentsVectorEnv, Cage4VectorEnv
from vecenv.jit import JitVectorEnv
from vecenv.jit.cartpole import CartPoleVectorEnv


def breakout(num_envs, **options):
    return JitVectorEnv(load_example("breakout").BREAKOUT, num_envs, **options)


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
    "cage4 agents": Cage4AgentsVectorEnv,
}


# Of each kind of kernels one id; and which of them compute with floats.
ZOO = {
    name: partial(vecenv.make_vec, name, backend="jit")
    for name in (
        "Jit2048-v0", "JitAcrobot-v1", "JitCliffWalkingSlippery-v1", "JitFrozenLake-v1",
        "JitGridDoorKey-v0", "JitGridFourRooms-v0", "JitMinAtarAsterix-v1", "JitMinAtarFreeway-v1",
        "JitMinAtarSeaquest-v1", "JitMinAtarSpaceInvaders-v1", "JitMountainCar-v0",
        "JitMountainCarContinuous-v0", "JitPendulum-v1", "JitQuadrotor2D-v0", "JitTaxi-v4",
    )
}  # fmt: skip
FLOATS = {
    "cartpole", "spread", "JitAcrobot-v1", "JitMountainCar-v0", "JitMountainCarContinuous-v0",
    "JitPendulum-v1", "JitQuadrotor2D-v0",
}  # fmt: skip


# Goals of these are worth 1 - 0.9 * share, which devices compute without rounding in between.
RETURNS_ARE_FLOATS = {"JitGridDoorKey-v0", "JitGridFourRooms-v0"}


def check_step(found, expected):
    """See that a step on a device has found what one on the processor has."""
    for one, other in zip(found[:4], expected[:4], strict=True):
        np.testing.assert_array_equal(one, other.astype(one.numpy().dtype))


def check_agents(device, cpu, found, expected):
    """The same of rows of agents after a step; return in which rows an episode has ended."""
    np.testing.assert_array_equal(device.alive, cpu.alive)
    np.testing.assert_array_equal(device.valid, cpu.valid)
    over = expected[2] | expected[3]
    if "final_obs" in found[4]:
        np.testing.assert_array_equal(found[4]["_final_obs"], over)
        for row in np.flatnonzero(over):
            final = expected[4]["final_obs"][row]
            np.testing.assert_array_equal(found[4]["final_obs"][row], final)
    return over


def check_infos(found, expected):
    """The same of infos of a step: those of the device have all envs, those of the CPU some."""
    over = expected.get("_episode", np.zeros(len(found["_episode"]), np.bool_))
    np.testing.assert_array_equal(found["_episode"].cpu(), over)
    for name in "rl":
        values = expected["episode"][name] if "episode" in expected else np.zeros(len(over))
        wanted = np.where(over, values, 0)
        np.testing.assert_array_equal(found["episode"][name].cpu(), wanted, name)
    if "_final_obs" in found:
        np.testing.assert_array_equal(found["_final_obs"].cpu(), over)


def check_states(found, expected, nearly=()):
    """The same of what `state_dict` has of the envs; of fields in `nearly`, to the last place."""
    for part in ("states", "runs"):
        for field in expected[part].dtype.names:
            one, other = found[part][field], expected[part][field]
            if field in nearly:
                np.testing.assert_allclose(one, other, rtol=4e-16, atol=0, err_msg=field)
            else:
                np.testing.assert_array_equal(one, other, field)
