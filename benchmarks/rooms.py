"""The project's files that run in one public call: how many hands a step or a batch goes through.

    python benchmarks/rooms.py                       # this tree
    python benchmarks/rooms.py --repo ../before      # another one: public names only are used
    python benchmarks/rooms.py --calls step --walk   # each file with its first function, in order
    python benchmarks/rooms.py --markdown            # the walks of CONTRIBUTING.md

A profiler (`sys.setprofile`) notes the files of `vecenv` and `buffers` in which a Python function
runs, in the order in which they are entered. Kernels run as Python too (NUMBA_DISABLE_JIT=1), so
that their files count; async workers and their caller then wait for each other without compiled
code, which takes other files (--jit counts with the compiler on, and sees no kernels). Each call
has been made once before, so that what only the first one does is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

NUM_ENVS = 2
ROOT = Path(__file__).resolve().parents[1]
Walk = dict[str, str]  # path of a file: the first function of it that ran
Events = list[tuple[int, str, str]]  # time in ns, path of a file, its function


@contextmanager
def walked(repo: str) -> Iterator[Walk]:
    """Profile this thread; the walk is filled in at the end."""
    walk: Walk = {}
    events: Events = []
    sys.setprofile(noting(events, repo))
    try:
        yield walk
    finally:
        sys.setprofile(None)
        walk |= files(events)


def noting(events: Events, repo: str) -> Callable[..., None]:
    """Return a profiler that adds what happens in the packages below `repo`."""
    folders = tuple(os.path.join(repo, package) + os.sep for package in ("vecenv", "buffers"))

    def note(frame, event, arg) -> None:  # every event: loops that began before have no `call`
        path = frame.f_code.co_filename
        if path.startswith(folders):
            name = frame.f_code.co_qualname.replace(".<locals>", "")
            events.append((time.monotonic_ns(), os.path.relpath(path, repo), name))

    return note


def files(events: Events) -> Walk:
    """Return each file with its first function."""
    walk: Walk = {}
    for _, path, name in events:
        walk.setdefault(path, name)
    return walk


class ProfiledEnv(gym.Env):
    """An env that profiles the worker it is in, from each step to the next."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, repo: str, report: str) -> None:
        self._repo, self._report = repo, report
        self._events: Events | None = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        if self._events is not None:
            sys.setprofile(None)
            Path(self._report).write_text(json.dumps(self._events), encoding="utf-8")
        self._events = []
        sys.setprofile(noting(self._events, self._repo))
        return np.zeros(3, np.float32), 1.0, False, False, {}


def usual(walks: list[Walk]) -> Walk:
    """Return the most frequent of the shortest walks."""
    least = min(map(len, walks))
    shortest = [tuple(walk.items()) for walk in walks if len(walk) == least]
    return dict(max(shortest, key=shortest.count))


def walk_async(repo: str) -> Walk:
    """`AsyncVectorEnv.step`: the caller, then a worker; each the shortest of some steps.

    Steps differ by whether results are there before the caller begins to wait, and by whether it
    begins the next one before the worker has returned from telling it.
    """
    from vecenv import AsyncVectorEnv

    callers: list[Walk] = []
    workers: list[Walk] = []
    with tempfile.TemporaryDirectory() as folder:
        reports = [os.path.join(folder, f"{env}.json") for env in range(NUM_ENVS)]
        envs = AsyncVectorEnv([lambda path=path: ProfiledEnv(repo, path) for path in reports])
        try:
            envs.reset(seed=1)
            actions = np.zeros(NUM_ENVS, np.int64)
            envs.step(actions)
            for _ in range(30):
                begin = time.monotonic_ns()
                with walked(repo) as walk:
                    envs.step(actions)
                callers.append(walk)
                # From within the last step to within this one: the end of the last belongs behind.
                events = json.loads(Path(reports[0]).read_text(encoding="utf-8"))
                workers.append(files(sorted(events, key=lambda event: event[0] < begin)))
        finally:
            envs.close()
    caller, worker = usual(callers), usual(workers)
    return caller | {path: name for path, name in worker.items() if path not in caller}


def walk_cage2(repo: str) -> Walk:
    """Steps of `Cage2-v0`, over the end of an episode."""
    import vecenv

    envs = vecenv.make_vec("Cage2-v0", num_envs=NUM_ENVS, episode_length=8)
    envs.reset(seed=1)
    envs.action_space.seed(1)
    actions = [envs.action_space.sample() for _ in range(20)]
    for row in actions:
        envs.step(row)
    with walked(repo) as walk:
        for row in actions:
            envs.step(row)
    envs.close()
    return walk


def transitions(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return one transition of each env; those of an env do not end."""
    return {
        "obs": np.zeros((NUM_ENVS, 3), np.float32),
        "next_obs": np.zeros((NUM_ENVS, 3), np.float32),
        "actions": rng.integers(2, size=NUM_ENVS),
        "rewards": rng.standard_normal(NUM_ENVS).astype(np.float32),
        "terminations": np.zeros(NUM_ENVS, bool),
        "truncations": np.zeros(NUM_ENVS, bool),
    }


def spaces() -> tuple[gym.Space, gym.Space]:
    return ProfiledEnv.observation_space, ProfiledEnv.action_space


def walk_add(repo: str) -> Walk:
    """`SharedReplayBuffer.add`."""
    from buffers import SharedReplayBuffer

    buffer = SharedReplayBuffer(100, *spaces(), seed=1)
    columns = transitions(np.random.default_rng(1))
    buffer.add(**columns)
    with walked(repo) as walk:
        buffer.add(**columns)
    return walk


def walk_sample(repo: str) -> Walk:
    """`SharedReplayBuffer.sample`."""
    from buffers import SharedReplayBuffer

    return _walk_draw(repo, SharedReplayBuffer(100, *spaces(), seed=1))


def _walk_draw(repo: str, buffer: Any) -> Walk:
    """`sample` of a buffer, after twenty steps in two of which episodes end."""
    columns = transitions(np.random.default_rng(1))
    for step in range(20):
        columns["terminations"][:] = step % 10 == 9
        buffer.add(**columns)
    buffer.sample(8)
    with walked(repo) as walk:
        buffer.sample(8)
    return walk


def walk_episodic(repo: str) -> Walk:
    """`EpisodicReplayBuffer.sample`."""
    from buffers import EpisodicReplayBuffer

    return _walk_draw(repo, EpisodicReplayBuffer(100, *spaces(), num_envs=NUM_ENVS, seed=1))


def walk_rollout(repo: str) -> Walk:
    """`RolloutBuffer`: `start`, the slots of all steps, `compute_advantages`."""
    from buffers import RolloutBuffer

    rollout = RolloutBuffer(4, NUM_ENVS, *spaces(), autoreset_mode="NextStep")
    columns = transitions(np.random.default_rng(1))

    def fill() -> None:
        rollout.start(columns["obs"])
        for step in range(4):
            slot = rollout.slot(step)
            slot.obs[:] = columns["next_obs"]
            slot.rewards[:] = columns["rewards"]
            slot.terminations[:] = slot.truncations[:] = False
        rollout.log_probs[:] = rollout.values[:] = 0.0
        rollout.compute_advantages(np.zeros(NUM_ENVS, np.float32))

    fill()
    with walked(repo) as walk:
        fill()
    return walk


CALLS: dict[str, tuple[str, Callable[[str], Walk]]] = {
    "add": ("SharedReplayBuffer.add", walk_add),
    "sample": ("SharedReplayBuffer.sample", walk_sample),
    "episodic": ("EpisodicReplayBuffer.sample", walk_episodic),
    "step": ("AsyncVectorEnv.step", walk_async),
    "cage2": ("Cage2-v0, steps", walk_cage2),
    "rollout": ("RolloutBuffer, start to advantages", walk_rollout),
}


def count(repo: Path, calls: list[str], has_jit: bool = False) -> dict[str, Walk]:
    """Return the walk of each call in the packages of `repo`, counted in a process of its own."""
    is_off = "0" if has_jit else "1"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": is_off, "PYTHONPATH": str(repo)}
    command = [sys.executable, "-W", "ignore", __file__, "--here", str(repo), "--calls", *calls]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, cwd=repo)
    return json.loads(done.stdout)


def markdown(repo: Path) -> str:
    """Return the walks as CONTRIBUTING.md has them, those with the compiler on last."""
    walks = {CALLS[call][0]: walk for call, walk in count(repo, list(CALLS)).items()}
    compiled = count(repo, ["add"], has_jit=True)
    walks |= {f"{CALLS[call][0]}, compiler on": walk for call, walk in compiled.items()}
    blocks = []
    for title, walk in walks.items():
        width = max(map(len, walk))
        lines = "\n".join(f"{path:{width}}  {function}" for path, function in walk.items())
        blocks.append(f"`{title}`\n\n```\n{lines}\n```\n")
    return "\n".join(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repo", type=Path, default=ROOT, help="a checkout of any revision")
    parser.add_argument("--calls", nargs="+", choices=list(CALLS), default=list(CALLS))
    parser.add_argument("--walk", action="store_true", help="print the files, not only how many")
    parser.add_argument("--markdown", action="store_true", help="print the walks of all, no more")
    parser.add_argument("--jit", action="store_true", help="count with the compiler on")
    parser.add_argument("--here", help=argparse.SUPPRESS)  # count in this process, print JSON
    options = parser.parse_args()
    if options.here:
        print(json.dumps({call: CALLS[call][1](options.here) for call in options.calls}))
        return
    if options.markdown:
        print(markdown(options.repo.resolve()), end="")
        return
    for call, walk in count(options.repo.resolve(), options.calls, options.jit).items():
        print(f"{CALLS[call][0]:36} {len(walk):3} files")
        if options.walk:
            for path, function in walk.items():
                print(f"    {path:40} {function}")


if __name__ == "__main__":
    main()
