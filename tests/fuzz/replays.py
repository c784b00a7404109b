"""Random operations on a replay buffer with options drawn together, against lists.

Every observation carries a number of its own, so whatever is drawn can be compared with the
transition that was added. Options that no single test combines come together here: frames,
stored once, priorities, sequences, columns, memmap folders, writers, copies, states, and adds that
are interrupted.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import replay_model
import torch
from fuzz.harness import run_operations, temporary_folder
from gymnasium.spaces import Box
from replay_model import ACTIONS, NESTED, OBS, RINGS, CountingEnvs, TornModel

from buffers import (
    BufferMisuseError,
    MultiprocessReplayBuffer,
    PerEnvReplayBuffer,
    PrioritizedReplayBuffer,
)
from buffers.replay.table import write_columns

UNIT = "operations"
OPERATIONS_PER_CASE = 120
BY_KIND = Counter()  # operations tried so far by class and place of rows
# Frames of which an observation is a stack: how many, their dtype, and the axis of the stack.
STACKS = [(2, np.uint8, 0), (3, np.uint8, 1), (3, np.float32, 0), (2, np.float32, 1)]
TAGS = Box(-np.inf, np.inf, (2,), np.float64)
COLUMNS = ("obs", "next_obs", "actions", "rewards", "terminations", "truncations", "tags")


def run_case(number, count=OPERATIONS_PER_CASE):
    """Try `count` operations; raise if anything drawn is not what was added."""
    case = Case(number)
    with case.folder:
        try:
            BY_KIND[case.kind] += run_operations(case, number, count)
        finally:
            case.close()
    return count


class Case:
    lengths = drawn = None  # of sequences; the last batch of them
    largest = 1.0  # priority that sequences were given

    def __init__(self, number):
        rng = self.rng = np.random.default_rng(number)
        self.folder = temporary_folder()
        self.cls = RINGS[rng.integers(len(RINGS))]
        files = "memory" if self.cls is PrioritizedReplayBuffer else "memmap"
        self.where = str(rng.choice(["memory", "memory", "memory", files, "writers"]))
        self.space, self.stack = (OBS, NESTED)[rng.integers(2)], None
        if self.where == "memory" and rng.random() < 0.4:
            self.stack = number, dtype, axis = STACKS[rng.integers(len(STACKS))]
            frame = np.zeros((4 // np.dtype(dtype).itemsize), dtype)  # the bytes of a number
            self.space = Box(0, 255, np.stack([frame] * number, axis).shape, dtype)
        self.kind = "writers" if self.where == "writers" else f"{self.cls.__name__}, {self.where}"
        is_per_env = self.draw_options()
        total, per_ring = self.num_envs * self.num_writers, self.capacity // self.num_writers
        self.envs, self.before = CountingEnvs(total, int(rng.integers(99))), {}
        self.model = TornModel(per_ring, total, is_per_env)
        if self.where == "writers":
            self.model = WriterModel(per_ring, self.num_envs, self.num_writers)
        self.buffer, self.held, self.writers = self.make(), [], []
        self.tags, self.priorities = {}, {}  # that transitions, or sequences from them, were given
        if isinstance(self.buffer, MultiprocessReplayBuffer):
            self.writers = [self.buffer.writer(n) for n in range(self.num_writers)]
        self.names = ["add", "add", "add", "sample", "sample_columns", "cut"]
        if self.options.get("track_episodes"):
            self.names += ["sequences", "sequences", "rank", "refresh"]
            self.draw_lengths()
        if self.where != "writers":
            self.names += ["reload"]
        if self.where != "writers" and self.cls is PrioritizedReplayBuffer:
            self.names += ["hold", "update", "update"]
        self.told = (
            f"{self.cls.__name__}({self.capacity}, {self.space}, {self.options}), {self.where}"
        )

    def draw_options(self):
        """Draw sizes and options; return whether each environment has a ring."""
        rng = self.rng
        self.num_envs, self.capacity = int(rng.integers(1, 4)), int(rng.integers(2, 24))
        self.num_steps = int(rng.choice([1, 1, 2, 3]))
        self.gamma = 0.5 if self.num_steps > 1 or rng.random() < 0.3 else None
        self.num_writers = int(rng.integers(1, 3)) if self.where == "writers" else 1
        self.options = {
            "num_envs": self.num_envs, "n_step": self.num_steps, "gamma": self.gamma,
            "track_env": bool(rng.random() < 0.5), "seed": int(rng.integers(9)),
            "extra_columns": {"tags": TAGS} if rng.random() < 0.5 else None,
        }  # fmt: skip
        if self.where == "memory":
            self.options |= {
                "track_episodes": self.num_steps == 1 and bool(rng.random() < 0.8),
                "staged": bool(rng.random() < 0.3),
            }
            self.options["store_next"] = bool(rng.random() < 0.5)
            if self.stack is not None:
                self.options["frame_stack"] = self.stack[0]
        elif self.where == "writers":
            self.capacity *= self.num_writers
            self.options["num_writers"] = self.num_writers
        return self.where != "writers" and self.cls is PerEnvReplayBuffer

    def make(self):
        if self.where == "writers":
            return MultiprocessReplayBuffer(self.capacity, self.space, ACTIONS, **self.options)
        options = dict(self.options)
        if self.where == "memmap":
            options |= {"storage": "memmap", "folder": Path(self.folder.name) / "rows"}
        return self.cls(self.capacity, self.space, ACTIONS, **options)

    def close(self):
        for writer in self.writers:
            writer.close()
        self.buffer.close()

    # ---- transitions

    def encode(self, numbers):
        if self.stack is None:
            return replay_model.encode(np.asarray(numbers), self.space)
        number, dtype, axis = self.stack
        stacks = [[n] for n in numbers]
        for stack in stacks:  # the frames before, up to the first of the episode
            while len(stack) < number:
                stack.insert(0, self.before.get(stack[0], stack[0]))
        pages = np.array(stacks, "<u4").reshape(-1, number, 1).view(np.uint8)
        return np.ascontiguousarray(np.moveaxis(pages.view(dtype), 1, 1 + axis))

    def decode(self, obs):
        if self.stack is None:
            return replay_model.decode(obs).tolist()
        frames = np.moveaxis(obs.numpy(), 1 + self.stack[2], 1)[:, -1].copy()
        numbers = frames.view(np.uint8).view("<u4")[:, 0].tolist()
        assert obs.numpy().tobytes() == self.encode(numbers).tobytes()
        return numbers

    def columns(self, made):
        columns = {
            "obs": self.encode([t.obs for t in made]),
            "next_obs": self.encode([t.next_obs for t in made]),
            "actions": np.array([t.obs % 5 for t in made], np.int64),
            "rewards": np.array([t.reward for t in made], np.float32),
            "terminations": np.array([t.terminated for t in made], bool),
            "truncations": np.array([t.truncated for t in made], bool),
        }
        if self.options["extra_columns"]:
            columns["tags"] = self.tags_of(made)
        return columns

    def tags_of(self, made):
        tags = [self.tags.get(t.obs, (3.0 * t.obs, -t.obs)) for t in made]
        return np.array(tags, float).reshape(-1, 2)

    def in_some_form(self, array):
        if isinstance(array, dict):
            return {key: self.in_some_form(array[key]) for key in self.rng.permutation([*array])}
        form = int(self.rng.integers(5))
        if form == 0:
            return array.astype(array.dtype.newbyteorder(">"))
        if form == 1:
            return torch.from_numpy(array.copy())
        if form == 2:
            return np.repeat(array, 2, axis=0)[::2]
        if form == 3:
            array = array.copy()
            array.flags.writeable = False
        return array

    def step(self, envs):
        made = []
        for env in envs:
            made.append(self.envs.step(env, *(self.rng.random(2) < 0.12)))
            self.before[made[-1].next_obs] = made[-1].obs
        return made

    # ---- operations

    def add(self):
        rng, first = self.rng, 0
        writer = int(rng.integers(self.num_writers))
        if self.writers:
            first = writer * self.num_envs
        is_whole = rng.random() < 0.5
        size = int(rng.choice([0, 1, 2, 5, 9, 40]))
        envs = rng.integers(self.num_envs, size=size)
        if is_whole:
            envs = np.tile(np.arange(self.num_envs), int(rng.choice([0, 1, 1, 2, 12])))
        valid = None
        if rng.random() < 0.15:
            valid = rng.random(len(envs)) < 0.7
        made, kept = [], []
        for place, env in enumerate(envs):
            if valid is not None and not valid[place]:
                made += self.step([first + env])
                self.envs.cut(first + env)
            else:
                kept += self.step([first + env])
                made.append(kept[-1])
        columns = self.columns(made)
        if is_there := is_whole and self.options.get("staged") and rng.random() < 0.6:
            columns = {name: there(column) for name, column in columns.items()}
        elif rng.random() < 0.5:
            columns = {name: self.in_some_form(column) for name, column in columns.items()}
        if rng.random() < 0.3 and not is_there:
            columns["rewards"] = np.asarray(columns["rewards"], np.float64)
        if made and rng.random() < 0.2 and type(columns["terminations"]) is np.ndarray:
            columns["terminations"] = columns["terminations"].tolist()
        ids = {} if is_whole else {"env_ids": np.asarray(envs, np.int64)}
        given = {} if valid is None else {"valid": valid}
        target = self.writers[writer] if self.writers else self.buffer
        target.takes_tensors = is_there  # as a buffer on a device other than the CPU
        if not (self.writers or given) and made and rng.random() < 0.2:
            self.tear(kept, lambda: target.add(**columns, **ids))
        target.add(**columns, **ids, **given)
        target.takes_tensors = False
        self.model.add(kept)

    def tear(self, made, add):
        """Interrupt an add at one of the columns, if it is in one piece."""
        if len(made) > self.model.capacity:
            return
        number, table = self.rng.integers(9), self.buffer._table

        def stop(arrays, rows):
            write_columns(dict([*table._written.items()][:number]), arrays, rows)
            raise KeyboardInterrupt

        with patch.object(table, "_write", stop), contextlib.suppress(KeyboardInterrupt):
            add()
            raise AssertionError("an interrupt of an add is lost")
        self.model.tear(made)
        self.check_rows()

    def cut(self):
        ids = self.rng.permutation(self.num_envs)[: self.rng.integers(1, self.num_envs + 1)]
        writer = int(self.rng.integers(self.num_writers))
        (self.writers[writer] if self.writers else self.buffer).cut_episodes(ids)
        for env in ids.tolist():
            self.envs.cut(writer * self.num_envs + env)

    def sample(self):
        size = int(self.rng.choice([1, 7, 33]))
        if not self.model.live():
            with contextlib.suppress(BufferMisuseError, TimeoutError):
                self.buffer.sample(size, **({"timeout": 0.0} if self.writers else {}))
                raise AssertionError("an empty buffer was drawn from")
            return
        out = [] if self.writers or self.rng.random() < 0.5 else [self.buffer.new_batch(size)]
        batch = self.buffer.sample(size, *out)
        assert not out or batch is out[0]
        self.compare(batch, None)

    def some_columns(self):
        known = [n for n in COLUMNS if n != "tags" or self.options["extra_columns"]]
        return list(self.rng.permutation(known)[: self.rng.integers(1, len(known) + 1)])

    def sample_columns(self):
        if self.model.live():
            columns = [str(name) for name in self.some_columns()]
            size = int(self.rng.choice([1, 7, 33]))
            if self.writers and "obs" not in columns:
                columns.append("obs")  # by which transitions are known
            if self.writers or self.rng.random() < 0.5:
                batch = self.buffer.sample(size, columns=columns)
            else:
                batch = self.buffer.sample(size, self.buffer.new_batch(size, columns))
            self.compare(batch, columns)

    def by_row(self):
        return dict(zip(self.buffer.order().tolist(), self.model.live(), strict=True))

    def compare(self, batch, columns):
        """Raise unless a batch is of transitions that are held."""
        if self.writers:
            of_obs = {t.obs: t for t in self.model.live()}
            made = [of_obs[number] for number in self.decode(batch.obs)]
        else:
            rows = self.by_row()
            made = [rows[row] for row in batch.indices.tolist()]
        self.compare_made(batch, made, columns)

    def compare_made(self, batch, made, columns):
        def has(name):
            return columns is None or name in columns

        windows = [self.model.window(t, self.num_steps, self.gamma or 1.0) for t in made]
        lasts, totals, discounts = zip(*windows, strict=True)
        if has("obs"):
            assert self.decode(batch.obs) == [t.obs for t in made]
        if has("next_obs"):
            assert self.decode(batch.next_obs) == [t.next_obs for t in lasts]
        if has("actions"):
            assert batch.actions.tolist() == [t.obs % 5 for t in made]
        if has("rewards"):
            np.testing.assert_allclose(batch.rewards, totals, rtol=1e-6, atol=1e-5)
        if has("terminations"):
            assert batch.terminations.tolist() == [t.terminated for t in lasts]
        if has("truncations"):
            assert batch.truncations.tolist() == [t.truncated for t in lasts]
        if columns is None and self.gamma is not None:
            np.testing.assert_allclose(batch.discounts, discounts, rtol=1e-6)
        if columns is None and batch.env_ids is not None:
            assert batch.env_ids.tolist() == [t.env for t in made]
        if has("tags") and self.options["extra_columns"]:
            assert np.array_equal(batch.tags, self.tags_of(made))

    # ---- sequences

    def draw_lengths(self):
        length = int(self.rng.integers(1, 9))
        overlap = None if self.rng.random() < 0.4 else int(self.rng.integers(length))
        self.lengths = length, int(self.rng.integers(length)), overlap, self.rng.random() < 0.5
        self.drawn = None

    def settle(self):
        """Return first transitions of sequences with their values; new ones get the largest."""
        starts = self.model.starts(*self.lengths)
        alpha = getattr(self.buffer, "alpha", 0.0)
        return {t: self.priorities.setdefault(t.obs, self.largest) ** alpha for t in starts}

    def draw_sequences(self, buffer, size, **more):
        length, burn_in, overlap, pad = self.lengths
        options = {"burn_in": burn_in, "overlap": overlap, "pad": bool(pad), **more}
        return buffer.sample_sequences(size, length, **options)

    def sequences(self):
        starts, names = self.settle(), ["tags"] * bool(self.options["extra_columns"])
        names = names[: self.rng.integers(2)]
        if any(starts.values()):
            batch = self.draw_sequences(
                self.buffer, int(self.rng.integers(1, 6)), initial_states=names
            )
            runs = self.compare_sequences(batch, starts, names)
            self.drawn = batch, runs
            values = np.array([starts[run[0]] for run in runs])
            weights = batch.weights
            assert (weights is None) == (self.cls is not PrioritizedReplayBuffer)
            if weights is not None:
                np.testing.assert_allclose(weights, (values.min() / values) ** 0.4, rtol=1e-5)
        else:
            with contextlib.suppress(BufferMisuseError):
                self.draw_sequences(self.buffer, 3)
                raise AssertionError("sequences were drawn, though none begins")
        tree = self.buffer._sequences.tree
        rows = {made.obs: row for row, made in self.by_row().items()}
        leaves = np.zeros(len(tree.leaves))
        leaves[[rows[made.obs] for made in starts]] = [*starts.values()]
        np.testing.assert_allclose(tree.leaves, leaves, rtol=1e-12)
        np.testing.assert_allclose(tree.total, leaves.sum(), rtol=1e-12)

    def compare_sequences(self, batch, starts, names):
        """Return the transitions of each sequence; raise unless a batch has them."""
        rows, runs, (length, burn_in, *_) = self.by_row(), [], self.lengths
        places = np.arange(length)
        for b, found in enumerate(batch.indices.tolist()):
            run = self.model.run(rows[found[0]], length)
            count, first = len(run), run[0].number
            assert run[0] in starts
            assert [rows[row] for row in found[:count]] == run
            assert found[count:] == [-1] * (length - count)
            is_step = places < count
            assert (batch.mask[b].numpy() == is_step).all()
            assert (
                batch.learn_mask[b].numpy() == (is_step & (places >= burn_in * bool(first)))
            ).all()
            assert (batch.is_first[b].numpy() == (is_step & (places + first == 0))).all()
            assert batch.steps[b, :count].tolist() == [t.number for t in run]
            columns = [name for name in COLUMNS if name != "tags" or batch.extras]
            self.compare_made(part_of(batch, (b, slice(count))), run, columns)
            for column in vars(part_of(batch, (b, slice(count, None)))).values():
                parts = column.values() if isinstance(column, dict) else [column]
                assert not any(part.any() for part in parts)
            if names:
                assert np.array_equal(batch.initial_states["tags"][b], self.tags_of(run[:1])[0])
            runs.append(run)
        return runs

    def rank(self):
        """Give the sequences of the last draw priorities."""
        if self.drawn is None or self.cls is not PrioritizedReplayBuffer:
            return
        self.settle()
        (batch, runs), self.drawn = self.drawn, None
        errors = self.rng.normal(size=batch.mask.shape) * 3
        errors[self.rng.random(len(errors)) < 0.1] = 0
        learn = batch.learn_mask.numpy()
        errors[~learn] = np.nan
        eta = float(self.rng.choice([0.0, 0.5, 0.9, 1.0]))
        given = torch.from_numpy(errors) if self.rng.random() < 0.5 else errors
        self.buffer.update_sequence_priorities(batch, given, eta=eta)
        live = {made.obs for made in self.model.live()}
        for b, run in enumerate(runs):
            if run[0].obs in live:
                sizes = np.abs(errors[b][learn[b]])
                value = eta * sizes.max() + (1 - eta) * sizes.mean()
                self.priorities[run[0].obs] = value
                self.largest = max(self.largest, value)

    def refresh(self):
        """Give the steps of the last draw other tags; of several for one, some one stays."""
        if self.drawn is None or not self.options["extra_columns"]:
            return
        batch, runs = self.drawn
        tags, given = self.rng.random((*batch.mask.shape, 2)), {}
        self.buffer.refresh_states(batch, tags=torch.from_numpy(tags))
        for b, run in enumerate(runs):
            for k, made in enumerate(run):
                given.setdefault(made, []).append(tags[b, k].tolist())
        column = self.buffer.rows()["tags"]
        for row, made in self.by_row().items():
            if made in given:
                self.tags[made.obs] = column[row].tolist()
                assert self.tags[made.obs] in given[made]

    def check(self):
        """Now and then, compare everything."""
        if self.lengths is not None:
            self.settle()
        if self.where != "writers" and self.rng.random() < 0.25:
            self.check_rows()
            if self.stack is not None:  # no slot of frames is lost, or free while it is in use
                once = self.buffer._table.once
                used = once._used(*self.buffer._table.kept_links()).tolist()
                free = once.free[: int(once.num_free[0])].tolist()
                assert sorted([0, *used, *free]) == [*range(once.num_slots)]

    def check_rows(self):
        live = self.model.live()
        assert len(self.buffer) == len(live)
        if live:
            columns = None
            if self.rng.random() < 0.3:
                columns = [str(name) for name in self.some_columns()]
            self.compare_made(self.buffer.get(self.buffer.order(), columns), live, columns)

    def reload(self):
        """Go on with a copy, or with what was saved."""
        way, before = int(self.rng.integers(8)), self.buffer
        self.told += f"; way {way}"
        if self.where == "memmap":
            before.cut_episodes()
            for env in range(self.num_envs):
                self.envs.cut(env)
            before.close()
            self.buffer = self.make()
        elif way == 0:
            self.buffer = copy.deepcopy(before)
        elif way == 1:
            self.buffer = pickle.loads(pickle.dumps(before))
        elif way == 2:
            self.buffer = self.make()
            self.buffer.load_state_dict(before.state_dict())
        elif way == 3:
            path = Path(self.folder.name) / "saved"
            before.save(path)
            self.buffer = self.make()
            if self.stack is None and self.rng.random() < 0.5:
                made = CountingEnvs(self.num_envs).random_steps(range(self.num_envs))
                self.buffer.add(**self.columns(made))  # are forgotten
            self.buffer.load(path)
        elif way == 4:
            before.save(Path(self.folder.name) / "saved")
            self.buffer = type(before).from_file(Path(self.folder.name) / "saved")
        elif way == 5:
            self.buffer = copy.copy(before)
        elif way == 6:  # as Ray does it: the receiver gets arrays that it cannot write
            pages = []
            text = pickle.dumps(before, protocol=5, buffer_callback=pages.append)
            self.buffer = pickle.loads(text, buffers=[bytes(page.raw()) for page in pages])
        else:  # into itself
            before.load_state_dict(before.state_dict())
        self.drawn = None
        if self.buffer is not before and self.where == "memory":
            self.check_copied(before)

    def check_copied(self, before):
        """A copy draws the same, and nothing added to it is in what was copied."""
        if self.lengths is not None and any(self.settle().values()):
            drawn = [self.draw_sequences(one, 4).indices for one in (before, self.buffer)]
            assert drawn[0].equal(drawn[1])
            if not self.buffer._sequences.is_updated:
                self.draw_lengths()
        if len(before):
            size = int(self.rng.choice([1, 9]))
            rows = [one.sample(size).indices for one in (before, self.buffer)]
            assert rows[0].equal(rows[1])
        kept = tensors_of(before)
        self.add()
        assert all(tensor.equal(kept[name]) for name, tensor in tensors_of(before).items())

    def hold(self):
        if self.model.live():
            batch = self.buffer.sample(int(self.rng.choice([1, 9])))
            self.held.append(batch.indices)

    def update(self):
        """Rows have the priorities that they are given, whatever they hold now."""
        if not self.held:
            return
        rows = self.held.pop(int(self.rng.integers(len(self.held))))
        now, expected = self.by_row(), self.buffer.priorities.numpy().copy()
        given = self.rng.random(len(rows)) + 0.1
        self.buffer.update_priorities(rows, given)
        for row, value in zip(rows.tolist(), given, strict=True):
            if row in now:  # else it can't be drawn any more
                expected[row] = value**self.buffer.alpha
        if not self.options.get("staged"):
            np.testing.assert_allclose(self.buffer.priorities.numpy(), expected, rtol=1e-12)


class WriterModel(TornModel):
    """Rings by writer."""

    def __init__(self, capacity, num_envs, num_writers):
        super().__init__(capacity, num_writers, True)
        self.num_envs = num_envs

    def add(self, transitions):
        for made in transitions:
            ring = self.rings[made.env // self.num_envs]
            ring.append(made)
            del ring[: -self.capacity]


def tensors_of(buffer):
    return {k: v.clone() for k, v in buffer.state_dict().items() if torch.is_tensor(v)}


def there(column):
    """The tensors of a column."""
    if isinstance(column, dict):
        return {name: there(part) for name, part in column.items()}
    return torch.from_numpy(column.copy())


def part_of(batch, place):
    """Some steps of a batch of sequences."""
    columns = {name: getattr(batch, name) for name in COLUMNS[:-1]} | batch.extras
    return SimpleNamespace(
        **{
            name: {k: part[place] for k, part in c.items()} if isinstance(c, dict) else c[place]
            for name, c in columns.items()
        }
    )
