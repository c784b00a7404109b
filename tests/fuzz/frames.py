"""Random operations on a buffer that stores frames once, and on its twin that stores stacks.

Both have the same seed and are given the same transitions; every batch must have the same bytes.
Frames are few and often equal, episodes short, and adds sometimes larger than the buffer. After
each operation the slots of frames are counted anew: none may be lost, or free while it is in use.
"""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path

import numpy as np
from fuzz.harness import run_operations, temporary_folder
from gymnasium.spaces import Box, Discrete
from replay_model import RINGS

from buffers import BufferMisuseError, PrioritizedReplayBuffer

UNIT = "operations"
OPERATIONS_PER_CASE = 300
BY_KIND = Counter()  # operations tried so far by class
# Shape of a frame, and axis of the stack.
SHAPES = (((6, 7), 0), ((6, 7), 2), ((6, 7), 1), ((6,), 0), ((), 0))
DTYPES = (np.uint8, np.uint8, np.float32, np.int64, np.bool_)
ACTIONS = Discrete(4)
COLUMNS = ("obs", "next_obs", "actions", "rewards", "terminations", "truncations", "discounts")


def run_case(number, count=OPERATIONS_PER_CASE):
    """Try `count` operations; raise if the two buffers ever differ."""
    case = Case(number)
    with case.folder:
        BY_KIND[case.kind.__name__] += run_operations(case, number, count)
    return count


class Stream:
    """One environment: its newest stack, whose frames are often equal."""

    def __init__(self, case):
        self.case = case
        self.reset()

    def frame(self, before=None):
        rng, case = self.case.rng, self.case
        if before is not None and rng.random() < 0.2:
            return before
        values = rng.integers(0, 3 if rng.random() < 0.5 else 256, case.frame)
        if case.dtype == np.float32 and rng.random() < 0.1:
            return np.full(case.frame, np.nan, np.float32)
        return values.astype(case.dtype)

    def reset(self):
        case, number = self.case, self.case.number
        newest = self.frame()
        if case.rng.random() < 0.7:
            first = newest if case.rng.random() < 0.5 else np.zeros_like(newest)
            self.frames = [first] * (number - 1) + [newest]
        else:
            self.frames = [self.frame() for _ in range(number)]

    def step(self, over):
        obs = np.stack(self.frames)
        self.frames = [*self.frames[1:], self.frame(self.frames[-1])]
        row = obs, np.stack(self.frames)
        if over:
            self.reset()
        return row


class Case:
    """A pair of buffers, and what is done to both."""

    names = (
        *["add_steps"] * 8, *["add_rows"] * 8, *["add_valid"] * 3, "cut", "jump", *["draw"] * 8,
        *["give_priorities"] * 2, "get_all", "save_and_load", "go_back", "refuse",
    )  # fmt: skip

    def __init__(self, seed):
        self.rng = rng = np.random.default_rng(seed)
        self.kind = RINGS[rng.integers(len(RINGS))]
        self.number = number = int(rng.integers(1, 6))
        self.frame, self.axis = SHAPES[rng.integers(len(SHAPES))]
        self.dtype = np.dtype(DTYPES[rng.integers(len(DTYPES))])
        self.num_envs = int(rng.integers(1, 5))
        n_step = int(rng.integers(1, 5)) if rng.random() < 0.5 else 1
        options = {"num_envs": self.num_envs, "seed": seed, "staged": bool(rng.random() < 0.2)}
        options |= {"n_step": n_step, "gamma": 0.9 if n_step > 1 or rng.random() < 0.3 else None}
        options |= {"track_env": bool(rng.random() < 0.3)}
        if rng.random() < 0.3:
            options["extra_columns"] = {"costs": Box(-9, 9, (2,))}
        self.extras = options.get("extra_columns", {})
        self.capacity = int(rng.choice([1, 2, 5, 17, 40]))
        low = np.zeros(self.join(np.zeros((1, number, *self.frame))).shape[1:], self.dtype)
        space = Box(low, np.ones_like(low), dtype=self.dtype.type)
        store_next = bool(rng.random() < 0.5)
        self.told = f"{self.kind.__name__}, {space}, {number=}, {store_next=}, {options}"
        made = self.capacity, space, ACTIONS
        self.once = self.kind(*made, frame_stack=number, store_next=store_next, **options)
        self.twin = self.kind(*made, **options)
        self.streams = [Stream(self) for _ in range(self.num_envs)]
        self.folder = temporary_folder()
        self.saved = None

    def join(self, stacks):
        """Frames (K, F, *frame) as observations."""
        stacks = np.moveaxis(stacks, 1, self.axis + 1)
        return stacks if self.rng.random() < 0.5 else np.ascontiguousarray(stacks)

    def both(self, method, *arguments, **columns):
        return [getattr(b, method)(*arguments, **columns) for b in (self.once, self.twin)]

    # ---- operations

    def add_steps(self):
        count = int(self.rng.choice([1, 1, 1, 2, 5]))
        self.add(np.tile(np.arange(self.num_envs), count), has_ids=False)

    def add_rows(self):
        largest = 3 * self.capacity + 3 if self.rng.random() < 0.1 else 6
        self.add(self.rng.integers(self.num_envs, size=self.rng.integers(largest + 1)))

    def add_valid(self):
        ids = self.rng.integers(self.num_envs, size=8)
        self.add(ids, valid=self.rng.random(8) < 0.7)

    def add(self, ids, *, has_ids=True, valid=None):
        columns = self.columns(ids, valid)
        others = {"env_ids": ids} if has_ids else {}
        others |= {} if valid is None else {"valid": valid}
        self.both("add", **columns, **others)

    def columns(self, ids, valid=None):
        """A step of each env."""
        rng, count = self.rng, len(ids)
        flags = rng.random((2, count)) < rng.choice([0.0, 0.05, 0.4])
        obs = np.zeros((2, count, self.number, *self.frame), self.dtype)
        for i, env in enumerate(ids.tolist()):
            stream = self.streams[env]
            if valid is not None and not valid[i]:
                stream.reset()  # the agent was dead
                continue
            obs[:, i] = stream.step(flags[:, i].any())
        columns = {
            "obs": self.join(obs[0]),
            "next_obs": self.join(obs[1]),
            "actions": rng.integers(4, size=count),
            "rewards": rng.normal(size=count).astype(np.float32),
            "terminations": flags[0],
            "truncations": flags[1],
        }
        return columns | {name: rng.normal(size=(count, 2)) for name in self.extras}

    def jump(self):
        """Go on elsewhere, which the buffer finds out by itself."""
        ids = np.flatnonzero(self.rng.random(self.num_envs) < 0.6)
        self.twin.cut_episodes(ids)
        for env in ids.tolist():
            stream = self.streams[env]
            before = np.stack(stream.frames).tobytes()
            while np.stack(stream.frames).tobytes() == before:
                stream.reset()

    def cut(self):
        ids = np.flatnonzero(self.rng.random(self.num_envs) < 0.6)
        self.both("cut_episodes", ids)
        for env in ids.tolist():
            self.streams[env].reset()

    def draw(self):
        if len(self.twin):
            size = int(self.rng.integers(1, 9))
            replace = self.kind is PrioritizedReplayBuffer or self.rng.random() < 0.8
            size = size if replace else min(size, len(self.twin))
            options = {} if self.kind is PrioritizedReplayBuffer else {"replace": replace}
            self.compare_drawn(self.once.sample(size, **options))

    def compare_drawn(self, batch):
        """Compare with the transitions of the same ages; their rows are others."""
        order = self.once.order().tolist()
        ages = [order.index(row) for row in batch.indices.tolist()]
        expected = self.twin.get(self.twin.order()[ages])
        compare(*(drawn._replace(weights=None) for drawn in (batch, expected)))

    def give_priorities(self):
        if self.kind is PrioritizedReplayBuffer and len(self.twin):
            ages = np.unique(self.rng.integers(len(self.twin), size=4))
            values = self.rng.random(len(ages))
            for buffer in (self.once, self.twin):
                buffer.update_priorities(buffer.order()[ages], values)

    def get_all(self):
        if len(self.twin):
            compare(*(buffer.get(buffer.order()) for buffer in (self.once, self.twin)))

    def save_and_load(self):
        for name in ("once", "twin"):
            path, buffer = Path(self.folder.name, name), getattr(self, name)
            buffer.save(path)
            if self.rng.random() < 0.5:
                setattr(self, name, self.fresh(buffer))
            getattr(self, name).load(path)

    def fresh(self, buffer):
        maker, arguments, options = buffer._made_by
        return maker(*arguments, **options)

    def go_back(self):
        """Load what was held earlier, and go on from there or with newly reset envs."""
        now = self.both("state_dict"), [copy.copy(vars(stream)) for stream in self.streams]
        if self.saved is not None:
            states, streams = self.saved
            for buffer, state in zip((self.once, self.twin), states, strict=True):
                buffer.load_state_dict(state)
            if self.rng.random() < 0.5:
                self.both("cut_episodes")
                for stream in self.streams:
                    stream.reset()
            else:
                for stream, old in zip(self.streams, streams, strict=True):
                    vars(stream).update(old)
        self.saved = now if self.saved is None or self.rng.random() < 0.5 else self.saved

    def refuse(self):
        """What is no stack, or not the next one, changes nothing."""
        before = [copy.copy(vars(stream)) for stream in self.streams]
        ids = self.rng.integers(self.num_envs, size=4)
        columns = self.columns(ids)
        for stream, old in zip(self.streams, before, strict=True):
            vars(stream).update(old)
        name, row = ("obs", "next_obs")[self.rng.integers(2)], int(self.rng.integers(4))
        if self.number > 1 and self.rng.random() < 0.7:  # one of those that both have
            place = int(self.rng.integers(1, self.number)) - (name == "next_obs")
            # In place: a view of the one frame of one row.
            changed = np.array(columns[name])
            axis = self.axis
            length = changed.shape[1 + axis] // self.number
            part = [slice(None)] * (changed.ndim - 1)
            part[axis] = slice(place * length, (place + 1) * length)
            frame = changed[row][tuple(part)]
            frame[...] = frame == 0
            columns[name] = changed
        else:
            columns[name] = columns[name][..., None]
        try:
            self.once.add(**columns, env_ids=ids)
        except BufferMisuseError:
            return
        raise AssertionError(f"{name} of row {row} was taken")

    # ---- checks

    def check(self):
        assert len(self.once) == len(self.twin)
        assert self.once.num_added == self.twin.num_added
        table, once = self.once._table, self.once._table.once
        slots, number = once.free, int(once.num_free[0])
        used = once._used(*table.kept_links())
        used = used.tolist()
        assert sorted([0, *used, *slots[:number].tolist()]) == [*range(once.num_slots)]


def compare(once, twin):
    """Raise unless two batches have the same bytes."""
    for name in (*COLUMNS, "env_ids", "weights"):  # rows differ, as stacks are read of older ones
        left, right = getattr(once, name), getattr(twin, name)
        assert (left is None) == (right is None), name
        if left is not None:
            left, right = left.numpy(), right.numpy()
            assert left.dtype == right.dtype and left.shape == right.shape, name
            assert left.tobytes() == right.tobytes(), name
    for name, column in twin.extras.items():
        assert once.extras[name].numpy().tobytes() == column.numpy().tobytes(), name
