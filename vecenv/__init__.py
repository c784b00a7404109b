"""Vectorized Gymnasium environments behind one interface.

`make_vec` makes a vector env from an id, a factory or compiled kernels, and `make_vec_agents` one
of games with several agents. Every vector env is a `VecEnv`: a `gymnasium.vector.VectorEnv` that
also has `send` and `recv`, `out=`, `action_masks`, `reopen` and `timing`. The backends are
`SyncVectorEnv` (this process), `AsyncVectorEnv` (worker processes), `RayVectorEnv` (actors of Ray)
and `vecenv.jit.JitVectorEnv` (compiled kernels). `check_vector_env` tries out any vector env.

    envs = vecenv.make_vec("CartPole-v1", num_envs=8)
    obs, infos = envs.reset(seed=1)
    obs, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())

Packages such as `vecenv.wrappers` are imported on first use. Importing `vecenv` loads no torch, Ray
or compiler.
"""

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
    EnvStepError,
    ForkedEnvError,
    InfoError,
    NoActionMaskError,
    ObservationError,
    SlotError,
    StepTimeoutError,
    WorkerDiedError,
)
from vecenv.core.masks import MaskInfos, mask_width, sample_actions

if TYPE_CHECKING:
    from vecenv.agents.make import make_vec_agents
    from vecenv.check import CheckReport, VectorEnvCheckError, check_vector_env
    from vecenv.make import make_vec
    from vecenv.ray.env import RayVectorEnv
    from vecenv.sync import SyncVectorEnv
    from vecenv.workers.env import AsyncVectorEnv

    def load_policy(path: Any, *, code: Any = None) -> Any:
        """Load a trained policy; see `vecenv.train.policy`, which imports this package."""


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

# Imported on first use: `buffers` imports `vecenv.core`, and should import no vector env with it.
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


# Packages from which users import, such as `vecenv.wrappers.FrameStack`: imported on first use too.
_PACKAGES = ("adapters", "agents", "cage", "check", "compare", "files", "jit", "learn", "train")
_PACKAGES += ("port", "wrappers")


def __getattr__(name: str) -> Any:
    if name not in _LATE and name not in _PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if name in _PACKAGES:
            return _import_module(f"{__name__}.{name}")  # which also sets the attribute
        value = globals()[name] = getattr(_import_module(_LATE[name]), name)
    except ModuleNotFoundError as error:  # an extra; hasattr and notebooks read all names
        raise AttributeError(str(error), name=name) from error
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})


# Entry points are strings, so that nothing compiled is imported before an env is made.
_COMPILED = {
    "CartPole-v1": ("cartpole:CartPole", {}),
    "Pendulum-v1": ("envs.pendulum:Pendulum", {}),
    "MountainCar-v0": ("envs.mountain_car:MountainCar", {}),
    "MountainCarContinuous-v0": ("envs.mountain_car:MountainCarContinuous", {}),
    "Acrobot-v1": ("envs.acrobot:Acrobot", {}),
    "FrozenLake-v1": ("envs.tables:FrozenLake", {"map_name": "4x4"}),
    "FrozenLake8x8-v1": ("envs.tables:FrozenLake", {"map_name": "8x8", "max_episode_steps": 200}),
    "CliffWalking-v1": ("envs.tables:CliffWalking", {}),
    "CliffWalkingSlippery-v1": ("envs.tables:CliffWalking", {"is_slippery": True}),
    "Taxi-v4": ("envs.tables:Taxi", {}),
    "MinAtarAsterix-v1": ("envs.minatar.asterix:Asterix", {}),
    "MinAtarFreeway-v1": ("envs.minatar.freeway:Freeway", {}),
    "MinAtarSeaquest-v1": ("envs.minatar.seaquest:Seaquest", {}),
    "MinAtarSpaceInvaders-v1": ("envs.minatar.space_invaders:SpaceInvaders", {}),
    "2048-v0": ("envs.game_2048:Game2048", {}),
    "Quadrotor2D-v0": ("envs.quadrotor:Quadrotor2D", {}),
    "GridEmpty-v0": ("envs.grid_world:GridWorld", {"layout": "empty"}),
    "GridFourRooms-v0": ("envs.grid_world:GridWorld", {"layout": "four_rooms", "size": 19}),
    "GridDoorKey-v0": ("envs.grid_world:GridWorld", {"layout": "door_key"}),
}
_POINTS = {f"Jit{name}": (f"jit.{point}", kwargs) for name, (point, kwargs) in _COMPILED.items()}
# Games with several agents, for make_vec_agents; as envs of Gymnasium all agents of a game are one.
_POINTS["Pursuit-v0"] = ("agents.games.pursuit:Pursuit", {})
_POINTS["Spread-v0"] = ("agents.games.spread:Spread", {})


def _register(name: str, entry_point: str, vector: str | None = None, **kwargs: Any) -> None:
    _gymnasium.register(
        id=name,
        entry_point=f"vecenv.{entry_point}",
        vector_entry_point=None if vector is None else f"vecenv.{vector}",
        disable_env_checker=True,
        kwargs=kwargs,
    )


_register("Cage2-v0", "cage:Cage2Env", "cage:Cage2VectorEnv")
_register("Cage4-v0", "cage:Cage4Env", "cage:Cage4VectorEnv")
_register("Synthetic-v0", "synthetic:SyntheticEnv")
for _name, (_point, _kwargs) in _POINTS.items():
    _vector = f"{_point}VectorEnv"
    _register(_name, f"jit.env:{_vector.replace(':', '.')}", _vector, **_kwargs)
