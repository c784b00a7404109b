"""This working tree against another revision, row by row, on an otherwise idle machine.

    python benchmarks/against.py 79f7096
    python benchmarks/against.py 79f7096 --rows "sync*" "gae*" --generations 2
    python benchmarks/against.py 79f7096 --rows "program*" --generations 2 --minutes 60
    python benchmarks/against.py --list

A is the revision, checked out into a temporary folder; B is this working tree as it is, changes
that are not committed included. One program, this file, measures both: it is run with `PYTHONPATH`
at one tree or the other, so rows are code that both must be able to run. In a generation two
processes of each tree are started; then each row runs in all four in turn, A B B A, for some
rounds, so a machine that becomes slower by and by makes neither of them look slower. A few
generations follow each other because two processes of one tree may differ for as long as they live,
by where their memory happens to lie.

The ratio is the time of B over that of A, the median over all rounds; below it stand the lowest and
the highest median of a generation. "A/A" is the control: how far the two processes of A were apart
in the generation where they were furthest apart. A row is called slower if its ratio is above 1.03
and above what the control shows. "others" is how many cores other programs kept busy meanwhile;
rows measured beside a busy core say little.

Start-up rows run in processes of their own: each run is one interpreter. "cold" is without compiled
code on the disk.

"program" rows are whole programs as users run them: a training, an evaluation, envs of others. What
counts is the time from the start of the interpreter to its end. "loop" rows are the same trainings,
but of their time only that in which the second half of the env steps was made, by the run's
`metrics.jsonl`: without imports, compiling and the evaluation. Each run has an empty folder; the
first of each tree, which fills the caches, is not counted. "grid" rows are steps of 12, 64 and 200
async envs that all take equally long, by computing (a worker a core) or by sleeping (a worker an
env). None of these is among the rows that run if none are named.
Some need other packages: pip install -r benchmarks/requirements-margins.txt
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from measure import machine, markdown_table
from work import Steps, make_columns, make_slot

ROOT = Path(__file__).resolve().parents[1]
BAR = 0.03  # what counts as slower, if the control is quieter
BUSY_CORES = 0.15  # others' load from which a row is marked
ASK_TIMEOUT_S, PROGRAM_TIMEOUT_S = 150.0, 600.0
ORDER = ("A1", "B1", "B2", "A2")

Call = Callable[[], object]
Prepared = Iterator[tuple[Call, int]]

# -- rows: what is measured, in one process of one tree ----------------------------------------


@dataclass(frozen=True)
class Row:
    """Something to measure.

    Attributes:
        name: Of the row.
        group: Rows of a group share their processes.
        unit: What one unit of work is.
        prepare: Generator function that sets up, yields a call and how many units it does, and
            cleans up; None for a row of which each run is a process.
        code: Of a start-up row: what a fresh interpreter runs; it prints seconds.
        is_cold: Whether the start-up row begins with an empty folder of compiled code.
        program: Of a program: the arguments of Python; "{tree}" is the folder of the tree.
        reads_loop: Whether a program's figure is that of its training loop, not its whole time.
        needs: Modules of other packages without which the row is left out.
    """

    name: str
    group: str
    unit: str
    prepare: Callable[[], Prepared] | None = None
    code: str = ""
    is_cold: bool = False
    program: tuple[str, ...] = ()
    reads_loop: bool = False
    needs: tuple[str, ...] = ()


def lacking(modules: Sequence[str]) -> str:
    """Name those modules that can't be imported, and say how to get them."""
    found = ", ".join(name for name in modules if find_spec(name) is None)
    return f"needs {found}: pip install -r benchmarks/requirements-margins.txt" if found else ""


ROWS: dict[str, Row] = {}


def row(name: str, group: str, unit: str = "env step") -> Callable[[Any], Any]:
    """Enter a generator function as a row."""

    def enter(prepare: Callable[[], Prepared]) -> Callable[[], Prepared]:
        ROWS[name] = Row(name, group, unit, prepare)
        return prepare

    return enter


def stepping_row(
    name: str, group: str, make: Callable[[], Any], *needs: str, into: bool = False
) -> None:
    """Enter a row that steps a vector env with random actions."""

    def prepare() -> Prepared:
        envs = make()
        envs.reset(seed=0)
        envs.action_space.seed(0)
        actions = envs.action_space.sample()
        options = {"out": make_slot(envs, "float64")} if into else {}
        for _ in range(20):
            envs.step(actions, **options)
        yield lambda: envs.step(actions, **options), envs.num_envs
        envs.close()

    ROWS[name] = Row(name, group, "env step", prepare, needs=needs)


def make_sync(env: str, num_envs: int) -> Callable[[], Any]:
    """Return a maker of a SyncVectorEnv over an env of `async_envs`, or a registered one."""

    def make() -> Any:
        from vecenv import SyncVectorEnv

        return SyncVectorEnv([env_factory(env)] * num_envs, copy=False)

    return make


def make_async(env: str, num_envs: int, **options: Any) -> Callable[[], Any]:
    """Return a maker of an AsyncVectorEnv over an env of `async_envs`, or a registered one."""

    def make() -> Any:
        from vecenv import AsyncVectorEnv

        return AsyncVectorEnv([env_factory(env)] * num_envs, copy=False, **options)

    return make


def env_factory(env: str) -> Any:
    """Return a factory of an env that is named."""
    import async_envs
    import gymnasium as gym

    found = getattr(async_envs, env, None)
    return functools.partial(gym.make, env) if found is None else found


for _env, _count in (("NullEnv", 8), ("NullEnv", 64), ("CartPole-v1", 8), ("PixelEnv", 64)):
    stepping_row(f"sync {_env} {_count}", "sync", make_sync(_env, _count))
stepping_row("sync NullEnv 64, out=", "sync", make_sync("NullEnv", 64), into=True)
for _env, _count in (("NullEnv", 64), ("NullEnv", 512), ("CartPole-v1", 64), ("PixelEnv", 64)):
    stepping_row(f"async {_env} {_count}", "async", make_async(_env, _count))
stepping_row("async NullEnv 64, out=", "async", make_async("NullEnv", 64), into=True)
stepping_row(
    "async NullEnv 64, caller_steps", "async", make_async("NullEnv", 64, caller_steps=True)
)


def _even(num_envs: int, step_us: int, sleeps: bool) -> Callable[[], Any]:
    def make() -> Any:
        from async_envs import EvenEnv

        from vecenv import AsyncVectorEnv

        factory = functools.partial(EvenEnv, step_us, sleeps)
        options: Any = {"num_workers": num_envs} if sleeps else {}
        return AsyncVectorEnv([factory] * num_envs, copy=False, **options)

    return make


for _count in (12, 64, 200):
    for _us in (0, 20, 200, 2000):
        for _kind in ("computing", "sleeping")[: 2 if _us else 1]:
            _title = f"grid: {_count} envs, {_kind} {_us} µs"
            stepping_row(_title, "grid", _even(_count, _us, _kind == "sleeping"))


def _made(env_id: str, num_envs: int, backend: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        from vecenv import make_vec

        return make_vec(env_id, num_envs, backend=backend, **options)

    return make


_compiled = functools.partial(_made, backend="jit")


for _count in (1, 64, 1024):
    _one = {"num_threads": 1}
    stepping_row(
        f"jit CartPole {_count}",
        "compiled",
        _compiled("JitCartPole-v1", _count, vector_kwargs=_one),
    )
for _count, _threads in ((64, 1), (2048, 1), (2048, 2)):
    stepping_row(
        f"CAGE 2 {_count}, {_threads} thread{'s' if _threads > 1 else ''}, out=",
        "compiled",
        _compiled("Cage2-v0", _count, vector_kwargs={"num_threads": _threads}, red_agent="mixed"),
        into=True,
    )
stepping_row("CAGE 4 256", "compiled", _compiled("Cage4-v0", 256))

# Envs of others by make_vec: id, how many, steps of a program, and the packages that they need.
OTHERS: dict[str, tuple[Any, ...]] = {
    "CartPole": ("CartPole-v1", 64, 20_000),
    "Atari": ("ale_py:ALE/Pong-v5", 16, 1000, "ale_py"),
    "MuJoCo": ("HalfCheetah-v5", 16, 5000, "mujoco", "imageio"),
    "MiniGrid": ("minigrid:MiniGrid-Empty-8x8-v0", 16, 4000, "minigrid"),
}
for _name, (_env, _count, _, *_needs) in OTHERS.items():
    for _backend in ("async", "auto"):
        _title = f"make_vec: {_name} {_count}, {_backend}"
        stepping_row(_title, "make_vec", _made(_env, _count, _backend), *_needs)


@row("jit CartPole 64, send and recv", "compiled")
def _jit_sends() -> Prepared:
    envs = _compiled("JitCartPole-v1", 64, vector_kwargs={"num_threads": 1})()
    yield from _sends(envs, 16)


@row("sync NullEnv 64, send and recv", "sync")
def _sync_sends() -> Prepared:
    yield from _sends(make_sync("NullEnv", 64)(), 16)


@row("async NullEnv 64, send and recv", "async")
def _async_sends() -> Prepared:
    yield from _sends(make_async("NullEnv", 64)(), 16)


@row("async 64 sleeping envs, first-ready", "async")
def _async_sleeping() -> Prepared:
    yield from _sends(make_async("SleepyEnv", 64)(), 1, rounds=30)


@row("async 64 sleeping envs, first-ready, 32 threads", "async")
def _async_sleeping_in_threads() -> Prepared:
    envs = make_async("SleepyEnv", 64, num_workers=64)()
    yield from _sends(envs, 1, rounds=60)


def _sends(envs: Any, min_envs: int, rounds: int = 1) -> Prepared:
    """Keep all envs in flight; one unit is an env that comes back."""
    envs.reset(seed=0)
    envs.action_space.seed(0)
    actions = envs.action_space.sample()
    for _ in range(5):
        envs.step(actions)
    envs.send(actions)
    wanted = envs.num_envs * rounds

    def receive() -> None:
        received = 0
        while received < wanted:
            batch = envs.recv(min(min_envs, envs.num_envs))
            received += len(batch.env_ids)
            envs.send(actions[batch.env_ids], batch.env_ids)

    # A few more than `wanted` may come back, in one tree as in the other.
    yield receive, wanted
    envs.recv()
    envs.close()


@row("timing on: async NullEnv 64", "async")
def _timed() -> Prepared:
    envs = make_async("NullEnv", 64)()
    envs.reset(seed=0)
    actions = envs.action_space.sample()
    envs.timing.enable()
    yield lambda: envs.step(actions), 64
    envs.close()


def _start(kind: str, **options: Any) -> Callable[[], Prepared]:
    def prepare() -> Prepared:
        import gymnasium as gym

        import vecenv

        module = {"ours": vecenv, "gymnasium": gym.vector}[kind]
        fns = [env_factory("CartPole-v1")] * 64

        def start() -> None:
            envs = module.AsyncVectorEnv(fns, **options)
            envs.reset(seed=0)
            envs.close()

        yield start, 1

    return prepare


row("start, reset, close 64 envs", "start", "start")(_start("ours"))
row("the same by Gymnasium", "start", "start")(_start("gymnasium"))


@row("make_vec('CartPole-v1', 8), backend 'auto'", "start", "start")
def _auto() -> Prepared:
    from vecenv import make_vec

    yield lambda: make_vec("CartPole-v1", 8).close(), 1


# In the buffers' processes torch is there, and has run: this is what a trainer's process is like.
@row("start, reset, close 64 envs, after torch", "buffers", "start")
def _start_after_torch() -> Prepared:
    import torch

    torch.set_num_threads(1)
    torch.nn.Linear(4, 4)(torch.zeros(1, 4)).sum().backward()
    yield from _start("ours")()


def make_replay(kind: str, capacity: int, **options: Any) -> Any:
    """Return a full buffer."""
    import numpy as np
    import torch
    from gymnasium.spaces import Box, Discrete

    import buffers

    torch.set_num_threads(1)
    spaces = Box(-np.inf, np.inf, (52,), np.float32), Discrete(7)
    buffer = getattr(buffers, kind)(capacity, *spaces, seed=0, **options)
    count = options.get("num_envs", 10_000)
    columns = make_columns(count)
    back = {**columns, "obs": columns["next_obs"], "next_obs": columns["obs"]}
    rows = capacity * (count if kind == "PerEnvReplayBuffer" else 1)
    for number in range(-(-rows // count)):
        buffer.add(**(back if number % 2 else columns))  # each obs is the next_obs before
    return buffer


def _replay_add(count: int, **options: Any) -> Callable[[], Prepared]:
    def prepare() -> Prepared:
        import itertools

        if options:
            options["num_envs"] = count
        buffer, columns = make_replay("SharedReplayBuffer", 100_000, **options), make_columns(count)
        back = {**columns, "obs": columns["next_obs"], "next_obs": columns["obs"]}
        steps = itertools.cycle([columns, back])  # each obs is the next_obs before
        yield lambda: buffer.add(**next(steps)), 1

    return prepare


def _replay_add_dict(count: int) -> Callable[[], Prepared]:
    def prepare() -> Prepared:
        import numpy as np
        from gymnasium.spaces import Box, Dict, Discrete

        import buffers

        parts = {"a": slice(0, 20), "b": slice(20, 36), "c": slice(36, 52)}
        space = Dict({k: Box(-np.inf, np.inf, (p.stop - p.start,)) for k, p in parts.items()})
        buffer = buffers.SharedReplayBuffer(100_000, space, Discrete(7), seed=0)
        columns = make_columns(count)
        for name in ("obs", "next_obs"):
            columns[name] = {k: columns[name][:, p].copy() for k, p in parts.items()}
        yield lambda: buffer.add(**columns), 1

    return prepare


def _replay_sample(
    kind: str, size: int, *, capacity: int = 100_000, into: bool = False, **options: Any
) -> Callable[[], Prepared]:
    def prepare() -> Prepared:
        buffer = make_replay(kind, capacity, **options)
        if into:
            out = buffer.new_batch(size)
            yield lambda: buffer.sample(size, out), 1
        else:
            yield lambda: buffer.sample(size), 1

    return prepare


for _count in (1, 8, 64, 2048):
    row(f"replay: add {_count}", "buffers", "call")(_replay_add(_count))
    _once = _replay_add(_count, store_next=False)
    row(f"replay: stored once, add {_count}", "buffers", "call")(_once)
row("replay: Dict, add 8", "buffers", "call")(_replay_add_dict(8))
for _name, _prepare in {
    "sample 256": _replay_sample("SharedReplayBuffer", 256),
    "sample 256, out": _replay_sample("SharedReplayBuffer", 256, into=True),
    "sample 4096": _replay_sample("SharedReplayBuffer", 4096),
    "per env, sample 256": _replay_sample("PerEnvReplayBuffer", 256, capacity=100, num_envs=1000),
    "3 steps, sample 256": _replay_sample(
        "SharedReplayBuffer", 256, num_envs=1000, n_step=3, gamma=0.99
    ),
    "3 steps, stored once, sample 256": _replay_sample(
        "SharedReplayBuffer", 256, num_envs=1000, n_step=3, gamma=0.99, store_next=False
    ),
    "prioritized, sample 256": _replay_sample("PrioritizedReplayBuffer", 256),
}.items():
    row(f"replay: {_name}", "buffers", "call")(_prepare)


@row("replay: prioritized, update 256", "buffers", "call")
def _update() -> Prepared:
    import itertools

    import numpy as np

    buffer = make_replay("PrioritizedReplayBuffer", 100_000)
    drawn = itertools.cycle([buffer.sample(256).indices for _ in range(50)])
    given = itertools.cycle(list(np.random.default_rng(0).random((97, 256)) + 0.1))
    yield lambda: buffer.update_priorities(next(drawn), next(given)), 1


@row("replay: TransitionWriter, 8 envs", "buffers", "call")
def _writer() -> Prepared:
    import numpy as np
    import torch

    from buffers import SharedReplayBuffer, TransitionWriter
    from vecenv import SyncVectorEnv

    torch.set_num_threads(1)
    envs = SyncVectorEnv([env_factory("NullEnv")] * 8)
    spaces = envs.single_observation_space, envs.single_action_space
    buffer = SharedReplayBuffer(100_000, *spaces, num_envs=8, seed=0)
    writer = TransitionWriter(envs, buffer)
    writer.reset(envs.reset(seed=0)[0])
    actions = np.zeros(8, np.int64)
    results = envs.step(actions)
    yield lambda: writer.step(actions, *results), 1
    envs.close()


def make_episodes() -> Any:
    """Return a full episodic buffer: 500 episodes of 200 steps."""
    import numpy as np
    import torch
    from gymnasium.spaces import Box, Discrete

    from buffers import EpisodicReplayBuffer

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    buffer = EpisodicReplayBuffer(
        100_000, Box(-1, 1, (52,)), Discrete(7), max_episodes=500, num_envs=1, seed=0
    )
    episode = make_episode(rng)
    for _ in range(500):
        buffer.add_episode(episode)
    return buffer


def make_episode(rng: Any) -> dict[str, Any]:
    """Return an episode of 200 steps with five boundaries."""
    import numpy as np

    boundaries = np.zeros(200, np.bool_)
    boundaries[rng.choice(200, 5, replace=False)] = True
    return {
        "obs": rng.random((201, 52), np.float32),
        "actions": rng.integers(0, 7, 200),
        "rewards": rng.standard_normal(200, np.float32),
        "boundaries": boundaries,
    }


@row("episodic: sample 256 pairs", "buffers", "call")
def _pairs() -> Prepared:
    buffer = make_episodes()
    yield lambda: buffer.sample(256, 0.95), 1


@row("episodic: add an episode", "buffers", "call")
def _episode() -> Prepared:
    import numpy as np

    buffer, episode = make_episodes(), make_episode(np.random.default_rng(1))
    yield lambda: buffer.add_episode(episode), 1


class Collected:
    """A rollout buffer and what fills it: T steps of N envs."""

    def __init__(self, num_steps: int, num_envs: int) -> None:
        import numpy as np
        import torch
        from gymnasium.spaces import Box, Discrete

        from buffers import RolloutBuffer

        torch.set_num_threads(1)
        self.steps = Steps(num_steps, num_envs)
        self.rollout = RolloutBuffer(
            num_steps, num_envs, Box(-np.inf, np.inf, (52,), np.float32), Discrete(7),
            autoreset_mode="Disabled", seed=0,
        )  # fmt: skip
        self.rollout.start(self.steps.obs[0])

    def fill(self) -> None:
        """Lay in all steps."""
        self.steps.fill(self.rollout)

    def learn(self) -> None:
        """Compute advantages and go through 16 minibatches."""
        self.rollout.compute_advantages(self.steps.values[-1])
        for _ in self.rollout.minibatches(16):
            pass


@row("rollout: lay in 128 x 8", "buffers", "update")
def _lay_in() -> Prepared:
    collected = Collected(128, 8)

    def run() -> None:
        collected.fill()
        collected.rollout.advance()

    yield run, 1


for _count in (8, 256):

    def _minibatches(num_envs: int = _count) -> Prepared:
        collected = Collected(128, num_envs)
        collected.fill()
        yield collected.learn, 1

    row(f"rollout: advantages, minibatches 128 x {_count}", "buffers", "update")(_minibatches)

for _count in (8, 2048):

    def _gae(num_envs: int = _count) -> Prepared:
        import numpy as np

        from buffers import gae

        rng, shape = np.random.default_rng(0), (128, num_envs)
        inputs = [
            rng.standard_normal(shape, np.float32),
            rng.standard_normal((129, num_envs), np.float32),
            *(rng.random((2, *shape)) < 0.01),
        ]
        yield lambda: gae(*inputs, gamma=0.99, gae_lambda=0.95), 1

    row(f"gae 128 x {_count}", "buffers", "call")(_gae)


_CLOCK = "import time; begin = time.perf_counter()\n"
_TOLD = "\nprint(time.perf_counter() - begin)"
_FIRST_STEP = """
from vecenv import make_vec
envs = make_vec({what})
envs.reset(seed=0)
envs.step(envs.action_space.sample())
"""


def startup_row(name: str, code: str, *, is_cold: bool = False) -> None:
    """Enter a row of which every run is an interpreter of its own."""
    ROWS[name] = Row(name, "start-up", "process", code=_CLOCK + code + _TOLD, is_cold=is_cold)


startup_row("import vecenv", "import vecenv")
startup_row("import buffers", "import buffers")
for _name, _what in {
    "sync CartPole 8": '"CartPole-v1", 8, backend="sync"',
    "async CartPole 8": '"CartPole-v1", 8, backend="async"',
    "jit CartPole 64": '"JitCartPole-v1", 64, backend="jit"',
    "CAGE 2 64": '"Cage2-v0", 64',
}.items():
    _code = _FIRST_STEP.format(what=_what)
    startup_row(f"first step from import, {_name}", _code)
    if "jit" in _name or "CAGE" in _name:
        startup_row(f"first step from import, {_name}, cold", _code, is_cold=True)

_STEPS = """
from vecenv import make_vec
envs = make_vec({!r}, {}, backend="async")
envs.reset(seed=0)
actions = envs.action_space.sample()
for _ in range({}):
    envs.step(actions)
envs.close()
"""


def program_row(name: str, *program: str, needs: Sequence[str] = (), unit: str = "program") -> None:
    """Enter a row of whole programs, or of their loops if its name begins so."""
    is_loop = name.startswith("loop")
    ROWS[name] = Row(
        name, "programs", unit, program=program, reads_loop=is_loop, needs=tuple(needs)
    )


for _name, (_command, *_needs) in {
    "PPO on CAGE 2": ("-m vecenv train Cage2-v0 --total-steps 1000000 --compile on",),
    "PPO on CartPole": ("-m vecenv train CartPole-v1 --total-steps 150000 --backend sync",),
    "PPO with a memory": (
        "-m vecenv train CartPole-v1 --total-steps 60000 --num-envs 16 --backend sync "
        "--recurrent gru --eval-episodes 2",
    ),
    "PPO of a game": ("-m vecenv train agents:Spread-v0 --total-steps 200000",),
    "SAC on HalfCheetah": (
        "-m vecenv train HalfCheetah-v5 --algo sac --num-envs 8 --backend sync --compile on "
        "--update-ratio 0.25 --learning-starts 1000 --total-steps 7000 --eval-episodes 2",
        "mujoco",
        "imageio",
    ),
    "DQN on Breakout": (
        "-m vecenv train breakout:Breakout-v0 --algo dqn --total-steps 30000 --num-envs 32 "
        "--update-ratio 0.1 --learning-starts 5000 --batch-size 64 --n-step 3 --hidden 128",
    ),
    "R2D2": ("{tree}/examples/r2d2.py --env-kwargs length 10 --total-steps 15000",),
}.items():
    program_row(f"program: {_name}", *_command.split(), needs=_needs)
    program_row(f"loop: {_name}", *_command.split(), needs=_needs, unit="env step")
_command = "-m vecenv evaluate --policy defender --episodes 10000"
program_row("program: evaluate a defender", *_command.split())
for _name, (_env, _count, _steps, *_needs) in OTHERS.items():
    _code = _STEPS.format(_env, _count, _steps)
    program_row(f"program: {_name} by make_vec", "-c", _code, needs=_needs)
_code = _FIRST_STEP.format(what='"CartPole-v1", 64, backend="async"')
program_row("program: start 64 envs", "-c", _code)


# -- a process that measures one tree ------------------------------------------------------------


def serve() -> None:
    """Answer requests on standard input, one JSON object per line, until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what envs print is not an answer
    current: tuple[Any, Call, int, int] | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "prepare":
                current = _prepare_row(request["row"], request["round_s"])
                found: Any = None
            elif request["do"] == "measure":
                assert current is not None
                found = _measure(*current[1:])
            else:
                if current is not None:
                    for _ in current[0]:
                        pass
                current, found = None, None
            print(json.dumps({"found": found}), file=answers, flush=True)
        except Exception as error:
            current = None
            told = f"{type(error).__name__}: {error}".splitlines()[0]
            print(json.dumps({"error": told}), file=answers, flush=True)


def _prepare_row(name: str, round_s: float) -> tuple[Any, Call, int, int]:
    """Set a row up, warm it up, and find how many calls take about `round_s`."""
    prepare = ROWS[name].prepare
    assert prepare is not None
    generator = prepare()
    call, units = next(generator)
    call()  # compiles
    count, begin = 0, perf_counter()
    while (seconds := perf_counter() - begin) < round_s / 2:
        call()
        count += 1
    return generator, call, units, max(1, round(round_s * count / seconds))


def _measure(call: Call, units: int, count: int) -> float:
    """Return seconds per unit of work."""
    begin = perf_counter()
    for _ in range(count):
        call()
    return (perf_counter() - begin) / (units * count)


class RowError(Exception):
    """A row can't be run in a tree."""


def environment(tree: Path, **more: str) -> dict[str, str]:
    """Return the environment in which a tree is imported; threads are set alike for both.

    Bytecode is kept, as it is for users: else the time of imports is that of compiling sources.
    """
    own = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", **more}
    own.pop("PYTHONDONTWRITEBYTECODE", None)
    return own


class Server:
    """A process that measures one tree; asked in turn with others."""

    def __init__(self, tree: Path, folder: Path) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment(tree),
            cwd=folder,
            text=True,
            start_new_session=True,  # so that its workers end with it, whatever happens
        )

    def ask(self, **request: Any) -> Any:
        """Send a request and wait for its answer.

        Raises:
            RowError: The row failed, the process died, or the answer took too long.
        """
        import select

        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RowError(f"the process is gone: {self._last_words()}") from None
        if not select.select([self._process.stdout], [], [], ASK_TIMEOUT_S)[0]:
            self.kill()
            raise RowError(f"no answer in {ASK_TIMEOUT_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise RowError(f"the process is gone: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RowError(answer["error"])
        return answer["found"]

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1] if lines else f"exit status {self._process.poll()}"

    def kill(self) -> None:
        """End it, and what it started."""
        end_session(self._process)


def end_session(process: subprocess.Popen[Any]) -> None:
    """End a process that has a session of its own, and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# -- who else is at work --------------------------------------------------------------------------


class Load:
    """How many cores other programs keep busy, from /proc/stat; None elsewhere than on Linux."""

    def __init__(self) -> None:
        self._ticks = os.sysconf("SC_CLK_TCK")
        self.is_known = Path("/proc/stat").exists()
        self.begin()

    def begin(self) -> None:
        """Begin to look."""
        self._time, self._all, self._own = perf_counter(), self._busy(), self._ours()

    def others(self) -> float | None:
        """Return the cores that others kept busy since `begin`, on average."""
        if not self.is_known:
            return None
        seconds = perf_counter() - self._time
        spent = (self._busy() - self._all) - (self._ours() - self._own)
        return max(0.0, spent / self._ticks / seconds)

    def _busy(self) -> int:
        if not self.is_known:
            return 0
        words = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        user, nice, system, _, _, irq, softirq, steal, *_ = map(int, words)
        return user + nice + system + irq + softirq + steal

    def _ours(self) -> int:
        """Return the ticks of this process, its descendants, and those that were waited for."""
        if not self.is_known:
            return 0
        spent, parents = {}, {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                words = path.read_text().rpartition(")")[2].split()
                pid = int(path.parent.name)
                parents[pid], spent[pid] = int(words[1]), sum(map(int, words[11:15]))
        total = 0
        for pid, ticks in spent.items():
            ancestor: int | None = pid
            while ancestor and ancestor != os.getpid():
                ancestor = parents.get(ancestor)
            total += ticks if ancestor else 0
        return total


# -- the comparison ------------------------------------------------------------------------------


@dataclass
class Found:
    """What was measured of a row.

    Attributes:
        seconds: By process of `ORDER`: for each generation the seconds per unit of each round.
        others: Cores that others kept busy, per generation.
        error: Why there is nothing, or no more.
    """

    name: str
    unit: str
    seconds: dict[str, list[list[float]]] = field(default_factory=lambda: {p: [] for p in ORDER})
    others: list[float | None] = field(default_factory=list)
    error: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether any round was finished."""
        return any(self.seconds["A2"])

    def _per_generation(self, over: tuple[str, ...], under: tuple[str, ...]) -> list[list[float]]:
        """Return, per generation and round, the mean of some processes over that of others."""
        parts = zip(*(self.seconds[p] for p in (*over, *under)), strict=True)
        return [
            [
                (sum(times[: len(over)]) / len(over)) / (sum(times[len(over) :]) / len(under))
                for times in zip(*generation, strict=True)
            ]
            for generation in parts
        ]

    @property
    def ratios(self) -> list[float]:
        """Time of B over that of A: the median of each generation."""
        return [statistics.median(r) for r in self._per_generation(("B1", "B2"), ("A1", "A2"))]

    @property
    def ratio(self) -> float:
        """Time of B over that of A, the median over all rounds."""
        found = self._per_generation(("B1", "B2"), ("A1", "A2"))
        return statistics.median(one for generation in found for one in generation)

    @property
    def control(self) -> float:
        """How far two processes of A were apart, in the generation where it was furthest."""
        found = self._per_generation(("A2",), ("A1",))
        return max(abs(statistics.median(generation) - 1) for generation in found)

    @property
    def is_slower(self) -> bool:
        """Whether B is slower by more than the bar and the control."""
        return self.ratio > 1 + max(BAR, self.control)

    def median(self, tree: str) -> float:
        """Return the seconds per unit of "A" or "B"."""
        kept = [self.seconds[process] for process in ORDER if process.startswith(tree)]
        return statistics.median(one for lists in kept for rounds in lists for one in rounds)

    @property
    def most_others(self) -> float | None:
        """Most cores that others kept busy, in a generation."""
        return max((one for one in self.others if one is not None), default=None)


def duration(seconds: float) -> str:
    """Write a time with three digits.

    >>> duration(1.234e-7), duration(0.00456), duration(12.3)
    ('123 ns', '4.56 ms', '12.3 s')
    """
    for limit, factor, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def run_generation(
    trees: dict[str, Path], found: Sequence[Found], options: argparse.Namespace, folder: Path
) -> None:
    """Start two processes of each tree per group of rows, and run all rows in them."""
    groups: dict[str, list[Found]] = {}
    for one in found:
        groups.setdefault(ROWS[one.name].group, []).append(one)
    for group, members in groups.items():
        if group not in {"start-up", "programs"}:
            run_group(trees, members, options, folder)
            continue
        for one in members:
            if time.monotonic() < options.deadline:
                run_processes(trees, one, options, folder)


def run_group(
    trees: dict[str, Path], members: Sequence[Found], options: argparse.Namespace, folder: Path
) -> None:
    """Run rows one after the other in the same four processes."""
    servers: dict[str, Server] = {}
    try:
        for one in members:
            if time.monotonic() > options.deadline:
                return
            for process in ORDER:
                if process not in servers:
                    servers[process] = Server(trees[process[0]], folder)
            if not run_row(servers, one, options):  # one that failed may be in any state
                for server in servers.values():
                    server.kill()
                servers.clear()
    finally:
        for server in servers.values():
            server.kill()


def run_row(servers: dict[str, Server], one: Found, options: argparse.Namespace) -> bool:
    """Run a row in four processes in turn; return whether all went well."""
    if one.error:
        return True
    show(one.name)
    process = ORDER[0]
    times: dict[str, list[float]] = {name: [] for name in ORDER}
    try:
        for process in ORDER:
            servers[process].ask(do="prepare", row=one.name, round_s=options.round_s)
        load = Load()
        for _ in range(options.rounds):
            for process in ORDER:
                times[process].append(servers[process].ask(do="measure"))
        one.others.append(load.others())
        for process in ORDER:
            servers[process].ask(do="finish")
    except RowError as error:
        one.error = f"{process[0]}: {error}"
        return False
    for process in ORDER:
        one.seconds[process].append(times[process])
    return True


def run_processes(
    trees: dict[str, Path], one: Found, options: argparse.Namespace, folder: Path
) -> None:
    """Run a start-up row or a program: A B B A, each run a process of its own."""
    setting = ROWS[one.name]
    if one.error or (setting.is_cold and one.is_measured):
        return  # the cold ones take long: once is enough to see what a user would
    show(one.name)
    if setting.program:
        num_rounds, has_caches = 1, one.is_measured
    else:
        num_rounds, has_caches = max(2, options.rounds // 2), setting.is_cold
    times: dict[str, list[float]] = {name: [] for name in ORDER}
    process = ORDER[0]
    try:
        for process in () if has_caches else ORDER[:2]:
            run_once(setting, trees[process[0]], folder)
        load = Load()
        for _ in range(1 if setting.is_cold else num_rounds):
            for process in ORDER:
                times[process].append(run_once(setting, trees[process[0]], folder))
    except RowError as error:
        one.error = f"{process[0]}: {error}"
        return
    one.others.append(load.others())
    for process in ORDER:
        one.seconds[process].append(times[process])


def run_once(setting: Row, tree: Path, parent: Path) -> float:
    """Run a start-up row or a program of a tree in an empty folder; return its seconds.

    Raises:
        RowError: It failed, or took too long.
    """
    arguments = [word.format(tree=tree) if "{tree}" in word else word for word in setting.program]
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        # The folder of the examples has the modules of ids such as breakout:Breakout-v0.
        more = {"PYTHONPATH": f"{tree}{os.pathsep}{tree / 'examples'}"} if arguments else {}
        if setting.is_cold:
            more["NUMBA_CACHE_DIR"] = str(Path(folder, "cache"))
        timeout = PROGRAM_TIMEOUT_S if arguments else ASK_TIMEOUT_S
        begin = perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, *(arguments or ["-c", setting.code])],
                env=environment(tree, **more),
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=timeout,
                stdin=subprocess.DEVNULL,
                check=True,
            )
        except subprocess.TimeoutExpired:
            raise RowError(f"no answer in {timeout:.0f} s") from None
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip().splitlines() or [str(error)])[-1]
            raise RowError(last) from None
        if arguments:
            whole = perf_counter() - begin
            return loop_seconds(Path(folder)) if setting.reads_loop else whole
        return float(done.stdout.split()[-1])


def loop_seconds(folder: Path) -> float:
    """Return the seconds per env step of the second half of a training that ran in a folder.

    Raises:
        RowError: There is no `metrics.jsonl` with some lines below the folder.
    """
    text = "".join(file.read_text() for file in folder.rglob("metrics.jsonl"))
    points = [(found["steps"], found["seconds"]) for found in map(json.loads, text.splitlines())]
    later = [point for point in points if point[0] >= points[-1][0] / 2]
    if len(later) < 2 or later[-1][0] == later[0][0]:
        raise RowError(f"metrics.jsonl has {len(points)} lines, expected some to tell a rate")
    return (later[-1][1] - later[0][1]) / (later[-1][0] - later[0][0])


def check_tree(tree: Path, folder: Path) -> None:
    """Exit unless `vecenv` and `buffers` are this tree's in processes with its environment."""
    code = (
        "import vecenv, importlib.util as i; print(vecenv.__file__, i.find_spec('buffers').origin)"
    )
    command, env = [sys.executable, "-c", code], environment(tree)
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=True)
    for where in map(Path, done.stdout.split()):
        if not where.resolve().is_relative_to(tree.resolve()):
            raise SystemExit(f"imported {where}, expected a module of {tree}")


def show(what: str) -> None:
    """Say what is being measured: in one line of a terminal, in lines of their own elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{what}", end="\r", file=sys.stderr, flush=True)
    elif what:
        print(what, file=sys.stderr, flush=True)


def table(found: Sequence[Found]) -> str:
    """Lay out the rows."""
    rows = []
    for one in found:
        if one.error or not one.is_measured:
            rows.append([one.name, one.error or "not run", "", "", "", "", "", ""])
            continue
        others = one.most_others
        verdict = "slower" if one.is_slower else ""
        if others is not None and others > BUSY_CORES:
            verdict = f"{verdict} (busy)".strip()
        rows.append(
            [
                f"{one.name} ({one.unit})",
                duration(one.median("A")),
                duration(one.median("B")),
                f"{one.ratio:.3f}",
                f"{min(one.ratios):.3f} to {max(one.ratios):.3f}",
                f"± {one.control:.1%}",
                "" if others is None else f"{others:.2f}",
                verdict,
            ]
        )
    return markdown_table(["row", "A", "B", "B/A", "spread", "A/A", "others", ""], rows)


def verdict(found: Sequence[Found]) -> str:
    """Say in a few lines what came out."""
    measured = [one for one in found if one.is_measured and not one.error]
    lines = []
    slower = [one for one in measured if one.is_slower]
    lines.append(
        f"{len(measured)} rows measured, {len(slower)} slower by more than {BAR:.0%} and control"
        + "".join(f"\n  {one.name}: {one.ratio:.3f}, control ± {one.control:.1%}" for one in slower)
    )
    medians = {one.name: one.median("B") for one in measured}
    ours, theirs = (
        medians.get(name) for name in ("start, reset, close 64 envs", "the same by Gymnasium")
    )
    if ours and theirs:
        lines.append(
            f"64 envs start in {duration(ours)}, Gymnasium's in {duration(theirs)}: "
            f"{ours / theirs:.2f} of its time"
        )
    busy = [one for one in measured if (one.most_others or 0) > BUSY_CORES]
    if busy:
        lines.append(
            f"other programs kept more than {BUSY_CORES} cores busy in {len(busy)} rows: measure "
            "these again on an idle machine"
        )
    return "\n".join(lines)


@contextlib.contextmanager
def checkout(revision: str) -> Iterator[tuple[Path, str]]:
    """Yield a tree of a revision and its name; a folder is taken as it is."""
    if Path(revision, "vecenv", "__init__.py").exists():
        folder = Path(revision).resolve()
        yield folder, describe(folder)
        return
    name = git("rev-parse", "--verify", f"{revision}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="against-") as parent:
        folder = Path(parent, "tree")
        git("worktree", "add", "--detach", "--force", str(folder), name)
        try:
            yield folder, name[:12]
        finally:
            git("worktree", "remove", "--force", str(folder))


def describe(folder: Path) -> str:
    """Return the commit of a tree, and whether it has been changed since."""
    try:
        return git("describe", "--always", "--dirty", "--abbrev=12", folder=folder)
    except SystemExit:
        return str(folder)


def git(*arguments: str, folder: Path = ROOT) -> str:
    """Run git and return what it says."""
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def chosen_rows(patterns: Sequence[str] | None) -> list[Row]:
    """Return the rows that a pattern matches, in their order; None: no programs, no grid."""
    if patterns is None:
        return [row for row in ROWS.values() if not row.program and row.group != "grid"]
    return [ROWS[name] for name in matching(ROWS, patterns)]


def matching(names: Collection[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that a pattern matches; exit if one matches none."""
    for pattern in patterns:
        if not any(fnmatch.fnmatch(name, pattern) for name in names):
            raise SystemExit(f"no row matches {pattern!r}; --list names them")
    return [name for name in names if any(fnmatch.fnmatch(name, p) for p in patterns)]


def wait_for_idle(seconds: float) -> float | None:
    """Return others' load, once it is small or `seconds` have passed."""
    load, end = Load(), time.monotonic() + seconds
    while True:
        load.begin()
        time.sleep(2.0)
        others = load.others()
        if others is None or others <= BUSY_CORES or time.monotonic() > end:
            return others
        print(f"others keep {others:.2f} cores busy, waiting", file=sys.stderr, flush=True)


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="This working tree against another revision.",
        epilog="Exit status 1 if a row is slower. The default takes about ten minutes.",
    )
    parser.add_argument("revision", nargs="?", help="of git, or the folder of a checkout: A")
    parser.add_argument(
        "--rows", nargs="+", help="patterns such as 'sync*'; all but program* and grid*"
    )
    parser.add_argument("--list", action="store_true", help="name the rows and end")
    parser.add_argument("--rounds", type=int, default=5, help="A B B A per row and generation")
    parser.add_argument("--generations", type=int, default=3, help="of new processes")
    parser.add_argument("--round-s", type=float, default=0.1, help="seconds of a row in a round")
    parser.add_argument("--minutes", type=float, default=12, help="no row begins after so long")
    parser.add_argument("--wait-idle", type=float, default=60, help="seconds to wait for others")
    parser.add_argument("--json", type=Path, help="file for all the numbers")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.revision is None and not (options.list or options.serve):
        parser.error("name a revision of git, such as HEAD~1")
    if min(options.rounds, options.generations, options.round_s) <= 0:
        parser.error("--rounds, --generations and --round-s must be above 0")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the numbers."""
    options = read_options(arguments)
    if options.serve:
        serve()
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: see below
    rows = chosen_rows(options.rows)
    if options.list:
        print("\n".join(row.name for row in rows))
        return 0
    found = [Found(row.name, row.unit, error=lacking(row.needs)) for row in rows]
    begin = time.monotonic()
    options.deadline = begin + 60 * options.minutes
    with checkout(options.revision) as (tree, name), tempfile.TemporaryDirectory() as folder:
        trees = {"A": tree, "B": ROOT}
        names = {"A": name, "B": describe(ROOT)}
        for one in trees.values():
            check_tree(one, Path(folder))
        before = wait_for_idle(options.wait_idle)
        number = 0
        try:
            while number < options.generations and time.monotonic() < options.deadline:
                number += 1
                run_generation(trees, found, options, Path(folder))
        except KeyboardInterrupt:
            print("stopped; the table is of what was finished", file=sys.stderr)
        show("")
    print(machine("gymnasium", "numpy", "numba", "torch"))
    print(f"A is {names['A']}, B is {names['B']}; {number} generations of {options.rounds} rounds")
    if before is not None:
        print(f"before, others kept {before:.2f} cores busy")
    print(f"\n{table(found)}\n\n{verdict(found)}")
    if options.json is not None:
        content = {
            "machine": machine("gymnasium", "numpy", "numba", "torch"),
            "trees": names,
            "options": {
                k: v for k, v in vars(options).items() if k not in ("json", "serve", "deadline")
            },
            "seconds": time.monotonic() - begin,
            "others_before": before,
            "rows": [
                {**asdict(one), "ratio": one.ratio, "ratios": one.ratios, "control": one.control}
                if one.is_measured
                else asdict(one)
                for one in found
            ],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return int(any(one.is_measured and one.is_slower for one in found))


if __name__ == "__main__":
    sys.exit(main())
