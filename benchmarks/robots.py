"""Robot simulators that draw: 4 tasks × 4 envs of MuJoCo, beside Gymnasium's async vector env.

    pip install "gymnasium[mujoco]"

A task is a Hopper with another reward and gravity; an observation is an image that the env draws
without a display (`MUJOCO_GL`: EGL, or `--gl osmesa`), or, with `--state`, MuJoCo's state. Each
measurement has a process of its own, and cases alternate. A row is the median and the range of:

*first*: seconds from the start of the constructor to the first observations of all 16 envs;
*steps/s*: env steps in a second afterwards, random actions;
*memory*: proportional set size (PSS) of the program and all of its workers, at the end.

Ours are lazy and have `worker_env`, so that their workers are fresh interpreters, but for the last
case. Gymnasium's class forks a process per env, and makes one more env in this process for its
spaces.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box
from measure import machine, markdown_table

from vecenv import AsyncVectorEnv
from vecenv.machine import tree_memory_bytes

TASKS = {
    "forward": (1.0, -9.81),
    "backward": (-1.0, -9.81),
    "moon": (1.0, -1.62),
    "stand": (0, -9.81),
}
ENVS_PER_TASK = 4
ACTION_SPACE = Box(-1, 1, (3,), np.float32)
STATE_SPACE = Box(-np.inf, np.inf, (11,), np.float64)


def image_space(size: int) -> Box:
    """Return the space of images (size, size, 3)."""
    return Box(0, 255, (size, size, 3), np.uint8)


class Pixels(gym.ObservationWrapper):
    """Observations are what the env draws."""

    def __init__(self, env: gym.Env, size: int) -> None:
        super().__init__(env)
        self.observation_space = image_space(size)

    def observation(self, observation: Any) -> Any:
        """Return an image, uint8 (size, size, 3)."""
        return self.env.render()


def make_task(name: str, size: int) -> gym.Env:
    """Make an env of a task; `size` 0 is for states."""
    reward, gravity = TASKS[name]
    drawing = {"render_mode": "rgb_array", "width": size, "height": size} if size else {}
    env = gym.make("Hopper-v5", forward_reward_weight=reward, **drawing)
    env.unwrapped.model.opt.gravity[2] = gravity  # type: ignore[attr-defined]  # a MuJoCo env
    return Pixels(env, size) if size else env


def theirs(factories: list[Callable[[], gym.Env]], size: int, gl: str) -> Any:
    """Make Gymnasium's vector env."""
    os.environ["MUJOCO_GL"] = gl
    return gym.vector.AsyncVectorEnv(factories)


def ours(
    num_workers: int, is_fork: bool, factories: list[Callable[[], gym.Env]], size: int, gl: str
) -> Any:
    """Make our vector env; of forks, with the variable set in this process."""
    if is_fork:
        os.environ["MUJOCO_GL"] = gl
    return AsyncVectorEnv(
        factories,
        num_workers=num_workers,
        context="fork" if is_fork else None,
        worker_env=None if is_fork else {"MUJOCO_GL": gl},
        lazy=True,
        spaces=(image_space(size) if size else STATE_SPACE, ACTION_SPACE),
    )


CASES: dict[str, Callable[..., Any]] = {
    "gymnasium, 16 processes": theirs,
    "vecenv, 16 workers": partial(ours, 16, False),
    "vecenv, 4 workers": partial(ours, 4, False),
    "vecenv, 2 workers": partial(ours, 2, False),
    "vecenv, 2 workers, forked": partial(ours, 2, True),
}


def measure(case: str, size: int, gl: str, num_steps: int) -> dict[str, float]:
    """Measure one case in this process."""
    factories = [partial(make_task, name, size) for name in TASKS for _ in range(ENVS_PER_TASK)]
    begin = time.perf_counter()
    envs = CASES[case](factories, size, gl)
    envs.reset(seed=0)
    first_s = time.perf_counter() - begin
    envs.action_space.seed(0)
    actions = [envs.action_space.sample() for _ in range(num_steps + 2)]
    for action in actions[:2]:
        envs.step(action)
    begin = time.perf_counter()
    for action in actions[2:]:
        envs.step(action)
    steps_s = time.perf_counter() - begin
    memory = tree_memory_bytes(os.getpid()) or 0
    envs.close()
    rate = num_steps * len(factories) / steps_s
    return {"first": first_s, "steps/s": rate, "memory": memory / 2**20}


def main() -> None:
    """Measure all cases, in processes of their own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, default=84, help="of an image")
    parser.add_argument("--state", action="store_true", help="no images")
    parser.add_argument("--gl", default="egl", help="MUJOCO_GL: egl or osmesa")
    parser.add_argument("--case", choices=CASES, help="measure one, once, in this process")
    args = parser.parse_args()
    if find_spec("mujoco") is None:
        print('needs mujoco: pip install "gymnasium[mujoco]"')
        return
    size = 0 if args.state else args.size
    if args.case:
        print(json.dumps(measure(args.case, size, args.gl, args.steps)))
        return
    found: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    options = ["--steps", str(args.steps), "--size", str(args.size), "--gl", args.gl]
    options += ["--state"] * args.state
    for _ in range(args.repetitions):
        for case, rows in found.items():
            command = [sys.executable, __file__, "--case", case, *options]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    print(machine("gymnasium", "mujoco"))
    names = ("first", "steps/s", "memory")
    table = [
        [case, *(_shown([row[name] for row in rows]) for name in names)]
        for case, rows in found.items()
    ]
    print(markdown_table(["", "first observation, s", "steps/s", "memory, MiB"], table))


def _shown(values: list[float]) -> str:
    return f"{statistics.median(values):.4g} ({min(values):.3g}-{max(values):.3g})"


if __name__ == "__main__":
    main()
