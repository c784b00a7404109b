"""Files of every kind the project reads, flipped, cut, swapped, and made to contradict themselves.

Each must be refused with one of the project's errors, changing nothing, or load; then what was
loaded must be of use. A process of its own reads those of a case, under a limit of memory; what is
in a file must never be run. A third of the files are changed as bytes, the others by their parts.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import io
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from fuzz.harness import run_apart
from gymnasium.spaces import Box, Dict, Discrete

import buffers
from buffers import BufferMemoryError, BufferMisuseError

UNIT = "files"
FILES_PER_CASE = 200
_SPARE_BYTES = 768 << 20  # what a child may take besides what it has when it begins
_KINDS = []  # of files, made by `warm_up`


def run_case(number, count=FILES_PER_CASE):
    """Let a process of its own read `count` files; raise if it dies, or finds something."""
    return run_apart("fuzz.files", number, count)


def warm_up():
    """Make whole files of each kind, load them, and so compile what loads them."""
    torch.set_num_threads(1)  # a fork has none of the threads that it would wait for
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.chdir(folder)
    _KINDS.extend([*buffer_kinds(folder), policy_kind(folder), state_kind(folder)])
    _KINDS.append(checkpoint_kind(folder))
    for kind in _KINDS:
        for source in kind.sources:
            (folder / "file.npz").write_bytes(source if isinstance(source, bytes) else b"")
            kind.load(source if isinstance(source, dict) else folder / "file.npz")


def run_here(number, count):
    """Read the files of a case in this process, which is to be thrown away."""
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _SPARE_BYTES,) * 2)
    rng = random.Random(number)
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        for index in range(count):
            kind = rng.choice(_KINDS)
            sys.stderr.write(f"file {index} ({kind.name})\n")  # the last word of one that dies
            read_file(kind, rng, Path(name, "file.npz"))
            assert not Path("was_run").exists(), "what was in the file was run"
    return count


def read_file(kind, rng, path):
    """Change a file of a kind and read it: it loads, or is refused in not too many words."""
    source = given = rng.choice(kind.sources)
    if isinstance(source, dict):
        given = kind.change(source, rng)
    else:
        content = mutate_bytes(source, rng) if rng.random() < 0.3 else kind.change(source, rng)
        path.write_bytes(content)
        given = path
    try:
        kind.load(given)
    except kind.errors as error:
        assert len(str(error)) < 20_000, "an error of more than 20 000 letters"


NUMBERS = (-1, 0, 1, 2, 3, 7, 19, 20, 21, 255, 2**31 - 1, 2**31, -(2**31), 2**60, 2**63 - 1)
VALUES = (
    *NUMBERS, None, True, 0.5, 1e308, float("nan"), float("inf"), 2**64, 10**400, "", "x", "|O",
    "<f4", "<i8", "|S0", "|V0", "<U0", "(1000000000,)u1", "f4,,f4", "x" * 9000, [], {}, [[]] * 99,
    {"dict": []}, ["dict", {}], [[[[[[]]]]]],
)  # fmt: skip


def mutate_tree(tree, rng):
    """A tree of JSON with something else somewhere."""
    holder = [copy.deepcopy(tree)]
    places = []

    def walk(node, depth=0):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            places.append((node, key))
            if isinstance(value, dict | list) and depth < 9:
                walk(value, depth + 1)

    walk(holder)
    node, key = rng.choice(places)
    value, how = node[key], rng.randrange(6)
    if how == 0 and isinstance(node, dict):
        del node[key]
    elif how == 1 and isinstance(value, int):
        node[key] = value + rng.choice((-1, 1, 8, 64))
    elif how == 2:
        other, place = rng.choice(places)
        with contextlib.suppress(KeyError):
            node[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(value)
    elif how == 3 and isinstance(value, list):
        value.append(copy.deepcopy(rng.choice([*value, None])))
    else:
        node[key] = copy.deepcopy(rng.choice(VALUES))
    return holder[0]


def mutate_array(array, rng):
    """An array with other numbers somewhere, or of another shape or dtype."""
    array, how = array.copy(), rng.randrange(12)
    if how == 0:
        length = rng.choice((0, 1, len(array) + 1 if array.ndim else 1, 40, 3000))
        shape = (length, *array.shape[1:])
        return np.resize(array, shape) if array.size else np.zeros(shape, array.dtype)
    if how == 1:
        kinds = [np.int64, np.int32, np.uint8, np.uint64, np.float32, np.float64, np.bool_]
        return np.zeros(array.shape, rng.choice(kinds))
    if how == 2 and array.ndim:
        return rng.choice((array[None], array[..., None], array.reshape(-1), array[::-1].copy()))
    if not array.size or array.dtype.kind == "U":
        return array
    pages = array.reshape(-1).view(np.uint8)
    if how < 6:  # one number of 4 or 8 bytes
        size = rng.choice((4, 8)) if len(pages) >= 8 else 1
        place = rng.randrange(max(1, len(pages) // size)) * size
        number = rng.choice(NUMBERS) if rng.random() < 0.7 else rng.randrange(-40, 41)
        text = (number % (1 << 8 * size)).to_bytes(size, "little")
        pages[place : place + size] = np.frombuffer(text, np.uint8)
    elif how == 6 and array.dtype.kind == "f":
        flat = array.reshape(-1)
        flat[rng.randrange(len(flat))] = rng.choice((np.nan, np.inf, -np.inf, -1.0, 1e30))
    elif how == 7 and array.ndim and len(array) > 1:
        one, two = rng.randrange(len(array)), rng.randrange(len(array))
        array[[one, two]] = array[[two, one]]
    elif how == 8:
        begin = rng.randrange(len(pages))
        stop = min(len(pages), begin + rng.randrange(1, 40))
        pages[begin:stop] = np.frombuffer(rng.randbytes(stop - begin), np.uint8)
    else:
        for _ in range(rng.choice((1, 1, 2, 5))):
            pages[rng.randrange(len(pages))] ^= 1 << rng.randrange(8)
    return array


def mutate_bytes(content, rng):
    """Bytes with some changed, cut, moved or put in between."""
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        how, place = rng.randrange(6), rng.randrange(len(content) + 1)
        if how == 0:
            del content[place:]
        elif how == 1 and content:
            content[place % len(content)] ^= 1 << rng.randrange(8)
        elif how == 2 and content:
            content[place % len(content)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif how == 3:
            stop = place + rng.randrange(1, 65)
            part, target = content[place:stop], rng.randrange(len(content) + 1)
            content[target : target + len(part)] = part
        elif how == 4:
            content[place:place] = rng.choice((b"\0", b"\xff" * 8, rng.randbytes(9)))
        else:
            del content[place : place + rng.randrange(1, 65)]
    return bytes(content)


class Evil:
    """What would leave a folder behind if it were unpickled."""

    def __reduce__(self):
        return os.mkdir, ("was_run",)


class Unusable(Exception):
    """What was loaded fails when it is used."""


@contextlib.contextmanager
def being_used():
    try:
        yield
    except Exception as error:
        raise Unusable("what was loaded is of no use") from error


class Kind(NamedTuple):
    """One kind of file: whole ones, `change(source, rng)`, and `load(path)`, which uses it, too."""

    name: str
    sources: list
    change: Callable
    load: Callable
    errors: tuple  # what a refusal may be


def obs_at(t, count):
    return {"x": np.full((count, 3), t, np.float32), "on": np.full((count, 2), t % 2, np.bool_)}


def stacks_at(t, count):
    """Stacks of three frames, of bools."""
    frames = [np.full((count, 4), (t + k) % 3 == 0, np.bool_) for k in range(3)]
    return np.stack(frames, 1)


def add_steps(buffer, first, stop, num_envs=2):
    obs = stacks_at if has_frames(buffer) else obs_at
    for t in range(first, stop):
        over = np.array([(t + 1) % 5 == 0, (t + 1) % 7 == 0])
        buffer.add(
            obs=obs(t, num_envs),
            next_obs=obs(t + 1, num_envs),
            actions=np.full(num_envs, t % 4),
            rewards=np.full(num_envs, float(t)),
            terminations=over,
            truncations=np.zeros(num_envs, np.bool_),
        )


def has_frames(buffer):
    return getattr(buffer.observation_space, "shape", None) is not None


def use_replay(buffer):
    """All that reads or writes through indices."""
    for t in range(3):
        if has_frames(buffer):  # those of before are not followed by these
            buffer.cut_episodes([t % 2])
            buffer.cut_episodes()
        add_steps(buffer, 100 + 9 * t, 100 + 9 * t + 3)
        if hasattr(buffer, "update_priorities"):
            buffer.update_priorities(np.arange(len(buffer)), np.ones(len(buffer)))
        else:
            is_plain = getattr(buffer, "over", "transitions") == "transitions"
            buffer.sample(min(3, len(buffer)), replace=not is_plain)
        buffer.sample(17)
    buffer.get(buffer.order())


def use_episodic(buffer):
    buffer.cut_episodes()
    if buffer.num_envs == 2:
        add_steps(buffer, 100, 107)
    if len(buffer):
        with contextlib.suppress(ValueError):
            buffer.sample(9, 0.9)
        buffer.sample_sequences(3, 2, pad=True)
        buffer.sample_stacks(3, 2)
        buffer.sample_goals(4)
        for index in range(buffer.num_episodes):
            buffer.episode(index)


def buffer_kinds(folder):
    """Checkpoints of buffers, as files and as states."""
    obs = Dict({"x": Box(-9, 9, (3,), np.float32), "on": Box(0, 1, (2,), np.bool_)})
    actions = Discrete(4)
    once = {"store_next": False, "n_step": 3, "gamma": 0.9}
    stacked = {"frame_stack": 3, "n_step": 3, "gamma": 0.9}
    stacks = Box(0, 1, (3, 4), np.bool_)
    made = {
        "shared": (buffers.SharedReplayBuffer, {}),
        "shared, staged": (buffers.SharedReplayBuffer, {**once, "staged": True}),
        "per env": (buffers.PerEnvReplayBuffer, {**once, "over": "envs"}),
        "prioritized": (buffers.PrioritizedReplayBuffer, {"track_env": True}),
        "per env, frames": (buffers.PerEnvReplayBuffer, stacked),
        "prioritized, frames": (buffers.PrioritizedReplayBuffer, {**stacked, "staged": True}),
        "episodic": (buffers.EpisodicReplayBuffer, {}),
        "episodic, staged": (buffers.EpisodicReplayBuffer, {"staged": True}),
    }
    kinds = []
    for name, (cls, options) in made.items():
        make = lambda cls=cls, options=options: cls(  # noqa: E731  # for these lines only
            20, stacks if "frame_stack" in options else obs, actions, num_envs=2, seed=1, **options
        )
        files, states = [], []
        for steps in (0, 6, 17):
            buffer = make()
            add_steps(buffer, 0, steps)
            buffer.save(folder / "whole")
            files.append((folder / "whole").read_bytes())
            states.append(buffer.state_dict())
        use = use_episodic if "episodic" in name else use_replay
        errors = (BufferMisuseError, BufferMemoryError)
        held = make()
        held.load_state_dict(states[1])
        loaded = loader(held, states[1], use, make)
        kinds.append(Kind(f"file, {name}", files, change_saved, loaded, errors))
        kinds.append(Kind(f"state, {name}", states, change_state, loaded, errors))
    rollout = buffers.RolloutBuffer(4, 2, obs, actions, autoreset_mode="NextStep", seed=3)
    rollout.start(obs_at(3, 2))
    state = rollout.state_dict()

    def load_rollout(changed):
        rollout.load_state_dict(changed)
        with being_used():
            rollout.load_state_dict(rollout.state_dict())
            rollout.load_state_dict(state)

    kinds.append(Kind("state, rollout", [state], change_state, load_rollout, (BufferMisuseError,)))
    return kinds


def loader(buffer, whole, use, make):
    """A function that loads a file or a state into a buffer; a refused one must change nothing."""

    def load(source):
        before = describe(buffer.state_dict())
        try:
            if isinstance(source, Path):
                buffer.load(source)
            else:
                buffer.load_state_dict(source)
        except Exception:
            assert describe(buffer.state_dict()) == before, "a refused file changed the buffer"
            raise
        with being_used():
            make().load_state_dict(buffer.state_dict())
            use(buffer)
            buffer.save("again")
            make().load("again")
            buffer.load_state_dict(whole)
        if isinstance(source, Path) and hasattr(buffer, "from_file"):
            made = type(buffer).from_file(source)
            with being_used():
                made.state_dict()
                use(made)

    return load


def describe(state):
    """What a state holds, to be compared."""

    def told(value):
        if isinstance(value, list):
            return [told(item) for item in value]
        return value.numpy().tobytes() if hasattr(value, "numpy") else repr(value)

    return {name: told(value) for name, value in state.items()}


def change_saved(content, rng):
    """Change the entries of the state in a file of torch."""
    state, file = torch.load(io.BytesIO(content), weights_only=True), io.BytesIO()
    torch.save(change_state(state, rng), file)
    return file.getvalue()


def change_run(content, rng):
    """Change the entries of one of the dicts in a checkpoint of a training."""
    saved, file, holders = torch.load(io.BytesIO(content), weights_only=True), io.BytesIO(), []

    def walk(node):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(value, dict) and value:
                holders.append((node, key))
            if isinstance(value, dict | list):
                walk(value)

    walk(saved)
    holder, key = rng.choice(holders)
    holder[key] = change_state(holder[key], rng)
    torch.save(saved, file)
    return file.getvalue()


def change_state(state, rng):
    """Change the entries of a state."""
    state = {
        name: value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in state.items()
    }
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choice(list(state))
        value, how = state[name], rng.randrange(20)
        if how == 0:
            del state[name]
            break
        if how == 1:
            state[name] = copy.deepcopy(rng.choice(VALUES))
        elif isinstance(value, torch.Tensor):
            if value.dtype in (torch.bfloat16, torch.complex64):
                continue
            array = mutate_array(value.numpy(), rng)
            if how == 2:
                state[name] = array
            elif array.dtype != np.bool_ or how != 3:
                with contextlib.suppress(TypeError, ValueError):
                    state[name] = torch.from_numpy(np.ascontiguousarray(array))
            if how == 4 and isinstance(state[name], torch.Tensor):
                state[name] = state[name].to(rng.choice((torch.bfloat16, torch.complex64)))
        elif isinstance(value, dict | list):
            state[name] = mutate_tree(value, rng)
        else:
            state[name] = copy.deepcopy(rng.choice(VALUES))
    return state


def change_npz(content, rng):
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    name, file = rng.choice(list(arrays)), io.BytesIO()
    array = arrays[name]
    if array.dtype.kind == "U" and rng.random() < 0.8:
        try:
            text = json.dumps(mutate_tree(json.loads(str(array)), rng))
        except ValueError:
            text = str(array)[: rng.randrange(9)]
        arrays[name] = np.array(rng.choice((text, text, text, "[" * 100_000)))
    elif rng.random() < 0.05:
        arrays[name] = np.array([Evil()], object)
    elif rng.random() < 0.03:
        del arrays[name]
    elif array.dtype.names:
        arrays[name] = mutate_array(array.reshape(-1).view(np.uint8), rng)
        with contextlib.suppress(ValueError):
            arrays[name] = arrays[name].view(array.dtype).reshape(array.shape)
    else:
        arrays[name] = mutate_array(array, rng)
    np.savez(file, **arrays)
    return file.getvalue()


def policy_kind(folder):
    """Policies of `save_defender`."""
    from vecenv.cage import find_policy, save_defender

    rng, path = np.random.default_rng(0), folder / "whole"
    pairs = pairwise((152, 3, 44))
    save_defender(path, [(rng.standard_normal(pair), rng.random(pair[1])) for pair in pairs])
    policies = [path.read_bytes()]

    def play(file):
        policy = find_policy(file)
        obs = np.ones((2, 52), np.uint8)
        with being_used():
            policy.reset()
            for _ in range(2):
                found = np.asarray(policy.act(obs, np.zeros((2, 13), np.bool_)))
                assert found.min() >= 0 and found.max() < 145

    return Kind("policy", policies, change_npz, play, (ValueError,))


def state_kind(folder):
    """States of compiled envs."""
    from vecenv.cage import Cage2VectorEnv

    envs = Cage2VectorEnv(2, red_agent="mixed", episode_length=(30, 50), num_threads=1)
    envs.reset(seed=5)
    actions = [np.array([t * 9 % 145, t * 7 % 145]) for t in range(12)]
    for action in actions:
        envs.step(action)
    np.savez(folder / "state.npz", **envs.state_dict())

    def load_state(file):
        try:
            found = np.load(file, allow_pickle=False)
        except Exception:  # the caller's part
            return
        with contextlib.closing(found):
            envs.load_state_dict(found)
        with being_used():
            envs.in_words(), envs.decoded_state(), envs.shell_alerts(), envs.state_dict()
            for action in actions[:4]:
                envs.step(action)

    sources = [(folder / "state.npz").read_bytes()]
    return Kind("env state", sources, change_npz, load_state, (ValueError, KeyError))


def checkpoint_kind(folder):
    """Checkpoints of trainings: of modules, optimizers, generators and envs."""
    import logging

    from envs import CounterEnv

    from vecenv import SyncVectorEnv
    from vecenv.learn import CheckpointError, Moments, Run

    logging.getLogger("vecenv").setLevel(logging.ERROR)
    os.environ["XDG_DATA_HOME"] = str(folder)
    module = torch.nn.Sequential(Moments(3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.Adam(module.parameters(), fused=True)
    envs = SyncVectorEnv([CounterEnv] * 2)
    envs.reset()
    parts = {"module": module, "optimizer": optimizer, "envs": envs}
    parts |= {"draws": torch.Generator(), "noise": np.random.Generator(np.random.MT19937(1))}

    def use():
        optimizer.zero_grad()
        module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        envs.step([0, 0])
        np.random.rand(), random.random(), parts["noise"].random(999)  # noqa: NPY002  # the global one
        torch.rand(9), torch.rand(9, generator=parts["draws"])

    use()
    with Run(folder / "run", {}) as run:
        run.add_episodes(1, [1.0, 2.0])
        run.log(1, {"x": 1})
        path = run.save({**parts, "steps": 1, "more": (1.5, "x", None)})
    whole = path.read_bytes()

    def resume(file):
        path.write_bytes(file.read_bytes())
        with Run(folder / "run", {}, resume=True) as run:
            run.restore(parts)
            if "envs" in run.not_restored:
                envs.reset()
        with contextlib.suppress(Exception):  # what an optimizer lacks, it says when it is used
            use()

    return Kind("checkpoint", [whole], change_run, resume, (CheckpointError,))
