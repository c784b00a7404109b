"""Step an env that others wrote, and write down what every step gave; a program of its own.

`python lockstep.py ENV BACKEND FILE` makes `NUM_ENVS` copies, steps them with fixed actions and
writes a digest of every env's row of every step, so that two runs can be compared row by row.
`python lockstep.py ENV leaks FILE` opens and closes a pool 20 times and writes what is left.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

NUM_ENVS, NUM_STEPS, NUM_OPENINGS = 4, 300, 20
SEEDS = [11 + index for index in range(NUM_ENVS)]

os.environ["PYGLET_HEADLESS"] = "1"


def mujoco_state() -> Any:
    import gymnasium as gym

    return gym.make("HalfCheetah-v5", max_episode_steps=70)


def mujoco_pixels() -> Any:
    import gymnasium as gym
    from gymnasium.wrappers import AddRenderObservation

    env = gym.make(
        "HalfCheetah-v5", render_mode="rgb_array", width=48, height=48, max_episode_steps=70
    )
    return AddRenderObservation(env)


def ale() -> Any:
    import ale_py
    import gymnasium as gym

    gym.register_envs(ale_py)
    return gym.make("ALE/Breakout-v5")


def minigrid() -> Any:
    import gymnasium as gym
    import minigrid  # noqa: F401 - registers

    return gym.make("MiniGrid-DoorKey-5x5-v0", max_steps=60)


def miniworld() -> Any:
    import gymnasium as gym
    import miniworld  # noqa: F401 - registers

    return gym.make("MiniWorld-OneRoom-v0", max_episode_steps=60)


def pybullet() -> Any:
    import gymnasium as gym
    import pybullet_envs_gymnasium  # noqa: F401 - registers

    return gym.make("HopperBulletEnv-v0", max_episode_steps=60)


def stable_retro() -> Any:
    import stable_retro as retro

    return retro.make("Airstriker-Genesis-v0", render_mode="rgb_array")


def highway() -> Any:
    import gymnasium as gym
    import highway_env

    gym.register_envs(highway_env)
    return gym.make("highway-fast-v0")


def dm_control() -> Any:
    import gymnasium as gym
    import shimmy

    gym.register_envs(shimmy)
    return gym.make("dm_control/cartpole-balance-v0", max_episode_steps=70)


def open_envs(name: str, backend: str) -> Any:
    """Make the copies; Gymnasium's own where the backend begins with "gymnasium"."""
    factories = [globals()[name]] * NUM_ENVS
    if backend.startswith("gymnasium"):
        import gymnasium as gym

        kind = "AsyncVectorEnv" if backend.endswith("async") else "SyncVectorEnv"
        return getattr(gym.vector, kind)(factories)
    import vecenv

    if backend == "sync":
        return vecenv.SyncVectorEnv(factories)
    if backend == "auto":
        return vecenv.make_vec(globals()[name], NUM_ENVS, backend="auto")
    context, _, workers = backend.partition("+")
    num_workers = NUM_ENVS if name == "stable_retro" else int(workers or 2)  # one a process
    return vecenv.AsyncVectorEnv(factories, context=context, num_workers=num_workers)


def digest(value: Any) -> str:
    """Return a hash of one env's part of an observation, dtypes and shapes included."""
    found = hashlib.blake2b(digest_size=8)

    def add(part: Any) -> None:
        if isinstance(part, dict):
            for key in sorted(part):
                found.update(str(key).encode())
                add(part[key])
        elif isinstance(part, tuple | list):
            for item in part:
                add(item)
        elif isinstance(part, str):
            found.update(part.encode())
        else:
            array = np.ascontiguousarray(part)
            found.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())

    add(value)
    return found.hexdigest()


def row(batch: Any, index: int) -> Any:
    if isinstance(batch, dict):
        return {key: row(part, index) for key, part in batch.items()}
    if isinstance(batch, tuple) and len(batch) != NUM_ENVS:
        return tuple(row(part, index) for part in batch)
    return batch[index]


def brightness(obs: Any) -> float:
    return float(obs.mean()) if isinstance(obs, np.ndarray) and obs.dtype == np.uint8 else -1.0


def run(name: str, backend: str) -> dict[str, Any]:
    envs = open_envs(name, backend)
    try:
        envs.action_space.seed(5)
        rows, outcomes, levels = [], [], []
        obs, _ = envs.reset(seed=SEEDS)
        rows.append([digest(row(obs, index)) for index in range(NUM_ENVS)])
        for _ in range(NUM_STEPS):
            obs, rewards, terminations, truncations, _ = envs.step(envs.action_space.sample())
            levels.append(brightness(obs))
            rows.append([digest(row(obs, index)) for index in range(NUM_ENVS)])
            outcomes.append([rewards.tolist(), terminations.tolist(), truncations.tolist()])
        return {
            "kind": type(envs).__name__,
            "observations": rows,
            "outcomes": outcomes,
            "darkest": min(levels),
        }
    finally:
        envs.close()


def left_behind() -> dict[str, int]:
    gc.collect()
    own = Path("/proc/self")
    children = own / "task" / str(os.getpid()) / "children"
    pages = int((own / "statm").read_text().split()[1])
    return {
        "files": len(list((own / "fd").iterdir())),
        "maps": len((own / "maps").read_text().splitlines()),
        "children": len(children.read_text().split()),
        "kib": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
    }


def leaks(name: str) -> dict[str, Any]:
    found = []
    for _ in range(NUM_OPENINGS):
        envs = open_envs(name, "fork")
        envs.reset(seed=1)
        envs.step(envs.action_space.sample())
        envs.close()
        found.append(left_behind())
    return {"after": found}


def main() -> None:
    name, backend, file = sys.argv[1:]
    result = leaks(name) if backend == "leaks" else run(name, backend)
    Path(file).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
