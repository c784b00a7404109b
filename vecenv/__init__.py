"""Vectorized Gymnasium environments behind one interface."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

import gymnasium as _gymnasium
from gymnasium.vector import AutoresetMode

from vecenv.core.base import StepBatch, StepSlot, VecEnv
from vecenv.core.errors import (
    ActionError,
    ActionMaskError,
    ActionTypeError,
    EnvCreationError,
    EnvStateError,
    ForkedEnvError,
    InfoError,
    NoActionMaskError,
    ObservationError,
    SlotError,
)
from vecenv.core.faults import EnvStepError, StepTimeoutError, WorkerDiedError
from vecenv.core.masks import MaskInfos, mask_width, sample_actions

if TYPE_CHECKING:
    from vecenv.agents.make import make_vec_agents
    from vecenv.check import CheckReport, VectorEnvCheckError, check_vector_env
    from vecenv.make import make_vec
    from vecenv.ray.env import RayVectorEnv
    from vecenv.sync import SyncVectorEnv
    from vecenv.workers.env import AsyncVectorEnv

    def load_policy(path: Any, *, code: Any = None) -> Any:
        """Load a trained policy, see `vecenv.train.policy`, which imports this package."""


__all__ = [
    "ActionError",
    "ActionMaskError",
    "ActionTypeError",
    "AsyncVectorEnv",
    "AutoresetMode",
    "CheckReport",
    "EnvCreationError",
    "EnvStateError",
    "EnvStepError",
    "ForkedEnvError",
    "InfoError",
    "MaskInfos",
    "NoActionMaskError",
    "ObservationError",
    "RayVectorEnv",
    "SlotError",
    "StepBatch",
    "StepSlot",
    "StepTimeoutError",
    "SyncVectorEnv",
    "VecEnv",
    "VectorEnvCheckError",
    "WorkerDiedError",
    "check_vector_env",
    "load_policy",
    "make_vec",
    "make_vec_agents",
    "mask_width",
    "sample_actions",
]
__version__ = "0.1.0"

# Imported when they are asked for: `buffers` imports `vecenv.core`, and with it no vector env.
_LATE = {
    "AsyncVectorEnv": "vecenv.workers.env",
    "CheckReport": "vecenv.check",
    "RayVectorEnv": "vecenv.ray.env",
    "SyncVectorEnv": "vecenv.sync",
    "VectorEnvCheckError": "vecenv.check",
    "check_vector_env": "vecenv.check",
    "load_policy": "vecenv.train.policy",
    "make_vec": "vecenv.make",
    "make_vec_agents": "vecenv.agents.make",
}


# So are the packages within it that users import from: `vecenv.wrappers.FrameStack`.
_PACKAGES = ("adapters", "agents", "cage", "check", "compare", "files", "jit", "learn", "train")
_PACKAGES += ("wrappers",)


def __getattr__(name: str) -> Any:
    if name not in _LATE and name not in _PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if name in _PACKAGES:
            return _import_module(f"{__name__}.{name}")  # which sets the attribute
        value = globals()[name] = getattr(_import_module(_LATE[name]), name)
    except ModuleNotFoundError as error:  # of an extra; hasattr and notebooks look at all names
        raise AttributeError(str(error), name=name) from error
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})


# Entry points are strings, so that nothing compiled is imported before somebody makes the env.
_gymnasium.register(
    id="Cage2-v0",
    entry_point="vecenv.cage:Cage2Env",
    vector_entry_point="vecenv.cage:Cage2VectorEnv",
    disable_env_checker=True,
)
_gymnasium.register(
    id="Cage4-v0",
    entry_point="vecenv.cage:Cage4Env",
    vector_entry_point="vecenv.cage:Cage4VectorEnv",
    disable_env_checker=True,
)
for _name, _point, _kwargs in (
    ("JitCartPole-v1", "jit.cartpole:CartPoleVectorEnv", {}),
    ("JitPendulum-v1", "jit.envs.pendulum:PendulumVectorEnv", {}),
    ("JitMountainCar-v0", "jit.envs.mountain_car:MountainCarVectorEnv", {}),
    ("JitMountainCarContinuous-v0", "jit.envs.mountain_car:MountainCarContinuousVectorEnv", {}),
    ("JitAcrobot-v1", "jit.envs.acrobot:AcrobotVectorEnv", {}),
    ("JitFrozenLake-v1", "jit.envs.tables:FrozenLakeVectorEnv", {"map_name": "4x4"}),
    (
        "JitFrozenLake8x8-v1",
        "jit.envs.tables:FrozenLakeVectorEnv",
        {"map_name": "8x8", "max_episode_steps": 200},
    ),
    ("JitCliffWalking-v1", "jit.envs.tables:CliffWalkingVectorEnv", {}),
    ("JitCliffWalkingSlippery-v1", "jit.envs.tables:CliffWalkingVectorEnv", {"is_slippery": True}),
    ("JitTaxi-v4", "jit.envs.tables:TaxiVectorEnv", {}),
    ("JitMinAtarAsterix-v1", "jit.envs.minatar.asterix:AsterixVectorEnv", {}),
    ("JitMinAtarFreeway-v1", "jit.envs.minatar.freeway:FreewayVectorEnv", {}),
    ("JitMinAtarSeaquest-v1", "jit.envs.minatar.seaquest:SeaquestVectorEnv", {}),
    ("JitMinAtarSpaceInvaders-v1", "jit.envs.minatar.space_invaders:SpaceInvadersVectorEnv", {}),
    ("Jit2048-v0", "jit.envs.game_2048:Game2048VectorEnv", {}),
    ("JitQuadrotor2D-v0", "jit.envs.quadrotor:Quadrotor2DVectorEnv", {}),
    ("JitGridEmpty-v0", "jit.envs.grid_world:GridWorldVectorEnv", {"layout": "empty"}),
    (
        "JitGridFourRooms-v0",
        "jit.envs.grid_world:GridWorldVectorEnv",
        {"layout": "four_rooms", "size": 19},
    ),
    ("JitGridDoorKey-v0", "jit.envs.grid_world:GridWorldVectorEnv", {"layout": "door_key"}),
    # Games with several agents, for make_vec_agents; here all agents of a game are one.
    ("Pursuit-v0", "agents.games.pursuit:PursuitVectorEnv", {}),
    ("Spread-v0", "agents.games.spread:SpreadVectorEnv", {}),
):
    _gymnasium.register(
        id=_name,
        entry_point=f"vecenv.jit.single:{_point.replace(':', '.')}",
        vector_entry_point=f"vecenv.{_point}",
        disable_env_checker=True,
        kwargs=_kwargs,
    )
_gymnasium.register(
    id="Synthetic-v0", entry_point="vecenv.synthetic:SyntheticEnv", disable_env_checker=True
)
