"""Sequences drawn from rings, against a model in plain Python that remembers every step."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from buffers import (
    BufferMisuseError,
    PerEnvReplayBuffer,
    PrioritizedReplayBuffer,
    SharedReplayBuffer,
)

OBS = Dict({"id": Box(-np.inf, np.inf, (2,), np.float64), "b": Box(0, 255, (3,), np.uint8)})
HIDDEN = Box(-np.inf, np.inf, (2,), np.float32)
KINDS = {
    "shared": (SharedReplayBuffer, {}),
    "per env": (PerEnvReplayBuffer, {}),
    "prioritized": (PrioritizedReplayBuffer, {"alpha": 0.7}),
    "stored once": (SharedReplayBuffer, {"store_next": False}),
    "per env, stored once": (PerEnvReplayBuffer, {"store_next": False}),
    "staged": (PrioritizedReplayBuffer, {"staged": True}),
}


def make(kind, capacity, num_envs, seed=0, **options):
    cls, own = KINDS[kind]
    return cls(
        capacity, OBS, Discrete(5), num_envs=num_envs, track_episodes=True, seed=seed,
        extra_columns={"hidden": HIDDEN, "cost": Box(-1e9, 1e9)}, **own, **options,
    )  # fmt: skip


class Model:
    """All steps that a buffer holds, in lists."""

    def __init__(self, capacity, num_envs, is_per_env):
        self.capacity, self.num_envs, self.is_per_env = capacity, num_envs, is_per_env
        self.rings = defaultdict(list)  # steps ever added
        self.newest = [None] * num_envs
        self.is_cut = [True] * num_envs
        self.time = 0
        self.obs = [None] * num_envs  # what the next step of the env begins with

    def columns(self, ids, rng, end_rate):
        """Draw steps of environments; one that goes on begins with its last next_obs."""
        steps = []
        for env in ids:
            self.time += 1
            begin = self.obs[env] if not self.is_cut[env] else self.time + 0.5
            flags = rng.random() < end_rate, rng.random() < end_rate
            self.obs[env] = self.time
            self.is_cut[env] = any(flags)
            hidden = rng.random(2).astype(np.float32)
            steps.append((env, begin, self.time, rng.integers(5), rng.random(), *flags, hidden))
        return steps

    def add(self, steps, was_cut):
        """Take steps as `columns` made them; was_cut[env] as it was before."""
        rows = []
        for env, begin, end, action, reward, terminated, truncated, hidden in steps:
            ring, before = env if self.is_per_env else 0, self.newest[env]
            number = len(self.rings[ring])
            step = SimpleNamespace(
                env=env, begin=begin, end=end, action=action, reward=reward, after=None, number=0,
                terminated=terminated, truncated=truncated, hidden=hidden, place=number,
                row=(ring * self.capacity if self.is_per_env else 0) + number % self.capacity,
            )  # fmt: skip
            if before is not None and not was_cut[env]:
                step.number, before.after = before.number + 1, step
            was_cut[env] = terminated or truncated
            self.newest[env] = step
            self.rings[ring].append(step)
            rows.append(step)

    def held(self):
        return [step for ring in self.rings.values() for step in ring[-self.capacity :]]

    @staticmethod
    def run(step, length):
        found = [step]
        while len(found) < length and found[-1].after is not None:
            found.append(found[-1].after)
        return found

    def starts(self, length, burn_in, overlap, pad):
        period = 1 if overlap is None else length - overlap
        found = []
        for step in self.held():
            count = len(self.run(step, length))
            is_enough = count == length or (pad and (count > burn_in or step.number == 0))
            if is_enough and step.number % period == 0:
                found.append(step)
        return found


def as_columns(steps):
    env, begin, end, action, reward, terminated, truncated, hidden = zip(*steps, strict=True)

    def observe(values):
        values = np.array(values, np.float64)
        ids = np.stack([values, np.array(env, np.float64)], 1)
        return {"id": ids, "b": np.repeat((values % 7).astype(np.uint8)[:, None], 3, 1)}

    return {
        "obs": observe(begin), "next_obs": observe(end), "actions": np.array(action),
        "rewards": np.array(reward), "terminations": np.array(terminated),
        "truncations": np.array(truncated), "env_ids": np.array(env),
        "hidden": np.array(hidden), "cost": np.array(end, np.float32)[:, None],
    }  # fmt: skip


def check_batch(batch, model, options, has_states):
    length, burn_in, _, _ = options
    by_row = {step.row: step for step in model.held()}
    starts = {step.row for step in model.starts(*options)}
    for b, rows in enumerate(batch.indices.tolist()):
        assert rows[0] in starts
        run = model.run(by_row[rows[0]], length)
        count = len(run)
        assert rows == [step.row for step in run] + [-1] * (length - count)
        assert batch.mask[b].tolist() == [True] * count + [False] * (length - count)
        first = 0 if run[0].number == 0 else burn_in
        assert batch.learn_mask[b].tolist() == [first <= k < count for k in range(length)]
        assert batch.is_first[b].tolist() == [k == 0 and run[0].number == 0 for k in range(length)]
        rest = [0] * (length - count)
        expected = {
            "steps": [s.number for s in run], "actions": [s.action for s in run],
            "terminations": [s.terminated for s in run], "truncations": [s.truncated for s in run],
        }  # fmt: skip
        for name, values in expected.items():
            assert getattr(batch, name)[b].tolist() == [*values, *rest], name
        assert batch.obs["id"][b, :, 0].tolist() == [*(s.begin for s in run), *rest]
        assert batch.next_obs["id"][b, :, 0].tolist() == [*(s.end for s in run), *rest]
        assert batch.next_obs["b"][b, :, 2].tolist() == [*(s.end % 7 for s in run), *rest]
        assert batch.extras["cost"][b, :, 0].tolist() == [*(s.end for s in run), *rest]
        np.testing.assert_array_equal(
            batch.rewards[b], np.array([*(s.reward for s in run), *rest], np.float32)
        )
        if has_states:
            assert "hidden" not in batch.extras
            np.testing.assert_array_equal(batch.initial_states["hidden"][b], run[0].hidden)
        else:
            hidden = batch.extras["hidden"][b]
            np.testing.assert_array_equal(hidden[:count], [s.hidden for s in run])
            assert not hidden[count:].any()


class Fuzz:
    """Random calls of a buffer and its model."""

    def __init__(self, kind, seed):
        self.rng = rng = np.random.default_rng(seed)
        self.kind = kind
        self.capacity, self.num_envs = int(rng.integers(3, 60)), int(rng.integers(1, 6))
        self.buffer = make(kind, self.capacity, self.num_envs, int(rng.integers(1000)))
        self.model = Model(self.capacity, self.num_envs, "per env" in kind)
        self.end_rate = float(rng.choice([0.0, 0.02, 0.2]))
        self.priorities = {}  # of steps, by id
        self.largest = 1.0
        self.draw_options()
        self.batch, self.seen = None, None

    def draw_options(self):
        length = int(self.rng.integers(1, 9))
        overlap = None if self.rng.random() < 0.4 else int(self.rng.integers(length))
        burn_in = int(self.rng.integers(length))
        self.options = length, burn_in, overlap, bool(self.rng.random() < 0.5)

    def add(self):
        rng, model = self.rng, self.model
        was_cut = list(model.is_cut)
        if rng.random() < 0.8:
            ids = np.tile(np.arange(self.num_envs), int(rng.choice([1, 1, 1, 3])))
        else:
            size = int(rng.choice([1, 2, 5, 2 * self.capacity]))
            ids = rng.integers(self.num_envs, size=size)
        steps = model.columns(ids.tolist(), rng, self.end_rate)
        columns = as_columns(steps)
        if rng.random() < 0.1 and len(set(ids.tolist())) == len(ids):
            valid = rng.random(len(ids)) < 0.7
            for env in np.flatnonzero(~valid):  # has no episode in this step
                was_cut[ids[env]] = model.is_cut[ids[env]] = True
            self.buffer.add(**columns, valid=valid)
            steps = [step for step, is_valid in zip(steps, valid, strict=True) if is_valid]
        else:
            self.buffer.add(**columns)
        model.add(steps, was_cut)

    def cut(self):
        ids = np.flatnonzero(self.rng.random(self.num_envs) < 0.5)
        self.buffer.cut_episodes(ids)
        for env in ids:
            self.model.is_cut[env] = True

    def sample(self):
        length, burn_in, overlap, pad = self.options
        names = "hidden" if self.rng.random() < 0.5 else ()
        arguments = {"burn_in": burn_in, "overlap": overlap, "pad": pad, "initial_states": names}
        starts = self.model.starts(*self.options)
        values = [self.value(step) for step in starts]
        if not any(values):
            with pytest.raises(BufferMisuseError, match="transitions begins sequences of"):
                self.buffer.sample_sequences(3, length, **arguments)
        else:
            size = int(self.rng.integers(1, 6))
            self.batch = self.buffer.sample_sequences(size, length, **arguments)
            check_batch(self.batch, self.model, self.options, bool(names))
            by_row = {step.row: step for step in self.model.held()}
            rows = self.batch.indices.tolist()
            self.seen = [[by_row[row] for row in run if row >= 0] for run in rows]
            if self.batch.weights is not None:
                drawn = np.array([self.value(run[0]) for run in self.seen])
                np.testing.assert_allclose(
                    self.batch.weights, (drawn.min() / drawn) ** 0.4, rtol=1e-5
                )
        leaves = self.buffer._sequences.tree.leaves
        expected = np.zeros(len(leaves))
        for step, value in zip(starts, values, strict=True):
            expected[step.row] = value
        np.testing.assert_allclose(leaves, expected, rtol=1e-12)
        np.testing.assert_allclose(self.buffer._sequences.tree.total, expected.sum(), rtol=1e-12)

    def value(self, step):
        alpha = getattr(self.buffer, "alpha", 0.0)
        key = step.end
        if key not in self.priorities:
            self.priorities[key] = self.largest
        return self.priorities[key] ** alpha

    def settle(self):
        """New sequences get the largest priority of the time they are complete."""
        self.sample()

    def update(self):
        if self.batch is None or self.batch.weights is None:
            return
        self.settle_new()
        errors = self.rng.normal(size=self.batch.mask.shape) * 3
        errors[self.rng.random(len(errors)) < 0.1] = 0
        learn = self.batch.learn_mask.numpy()
        errors[~learn] = np.nan
        eta = float(self.rng.choice([0.0, 0.5, 0.9, 1.0]))
        given = torch.from_numpy(errors) if self.rng.random() < 0.5 else errors
        self.buffer.update_sequence_priorities(self.batch, given, eta=eta)
        alive = {step.end for step in self.model.held()}
        for b, run in enumerate(self.seen):
            if run[0].end in alive:
                sizes = np.abs(errors[b][learn[b]])
                priority = eta * sizes.max() + (1 - eta) * sizes.mean()
                self.priorities[run[0].end] = priority
                self.largest = max(self.largest, priority)

    def settle_new(self):
        for step in self.model.starts(*self.options):
            self.value(step)

    def refresh(self):
        if self.batch is None:
            return
        new = self.rng.random((*self.batch.mask.shape, 2)).astype(np.float32)
        self.buffer.refresh_states(self.batch, hidden=torch.from_numpy(new))
        alive = {step.end for step in self.model.held()}
        for b, run in enumerate(self.seen):
            for k, step in enumerate(run):
                if step.end in alive:
                    step.hidden = new[b, k]
        states = defaultdict(set)  # of a step in several sequences one of the values stays
        for b, run in enumerate(self.seen):
            for k, step in enumerate(run):
                states[step.end].add(tuple(new[b, k].tolist()))
        column = self.buffer.rows()["hidden"]
        for step in self.model.held():
            if step.end in states:
                found = tuple(column[step.row].tolist())
                assert found in states[step.end]
                step.hidden = np.array(found, np.float32)

    def reload(self, tmp_path):
        self.settle_new()
        twin = make(self.kind, self.capacity, self.num_envs, 12345)
        way = self.rng.integers(4)
        if way == 0:
            twin.load_state_dict(self.buffer.state_dict())
        elif way == 1:
            self.buffer.save(tmp_path / "buffer")
            twin.load(tmp_path / "buffer")
        elif way == 2:
            twin = pickle.loads(pickle.dumps(self.buffer))
        else:
            twin = copy.deepcopy(self.buffer)
        length, burn_in, overlap, pad = self.options
        if any(self.value(step) for step in self.model.starts(*self.options)):
            for _ in range(2):
                first, second = (
                    b.sample_sequences(4, length, burn_in=burn_in, overlap=overlap, pad=pad)
                    for b in (self.buffer, twin)
                )
                assert torch.equal(first.indices, second.indices)
                assert torch.equal(first.rewards, second.rewards)
        self.buffer, self.batch = twin, None

    def go(self, num_calls, tmp_path):
        calls = [self.add, self.cut, self.sample, self.update, self.refresh, None]
        odds = [0.6, 0.03, 0.2, 0.08, 0.08, 0.01]
        for _ in range(num_calls):
            call = calls[self.rng.choice(len(calls), p=odds)]
            if call is None:
                self.reload(tmp_path)
                if self.rng.random() < 0.5 and not self.buffer._sequences.is_updated:
                    self.draw_options()
                    self.batch = None
            else:
                self.settle_new()
                call()
                self.settle_new()


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_are_those_of_the_model(kind, tmp_path):
    Fuzz(kind, 0).go(150, tmp_path)


def filled(kind, capacity=40, num_steps=40, num_envs=2, **options):
    """A buffer of two envs whose episodes have 7 and 9 steps, and its model."""
    buffer, rng = make(kind, capacity, num_envs, **options), np.random.default_rng(0)
    model = Model(capacity, num_envs, "per env" in kind)
    for t in range(num_steps):
        was_cut = list(model.is_cut)
        steps = model.columns(range(num_envs), rng, 0.0)
        ends = [t % (7 + 2 * env) == 6 + 2 * env for env in range(num_envs)]
        steps = [(*s[:5], end, False, s[7]) for s, end in zip(steps, ends, strict=True)]
        model.is_cut = list(ends)
        buffer.add(**as_columns(steps))
        model.add(steps, was_cut)
    return buffer, model


WRONG = {
    "longer than anything": (lambda b: b.sample_sequences(4, 10), "none of the 40 .* 10 steps"),
    "no length": (lambda b: b.sample_sequences(4, 0), "sequence_length must be"),
    "no batch": (lambda b: b.sample_sequences(0, 4), "batch_size must be"),
    "too much": (lambda b: b.sample_sequences(2**40, 2**40), "expected at most"),
    "all burn-in": (lambda b: b.sample_sequences(4, 4, burn_in=4), "leaves no step to learn"),
    "negative burn-in": (lambda b: b.sample_sequences(4, 4, burn_in=-1), "burn_in must be"),
    "all overlap": (lambda b: b.sample_sequences(4, 4, overlap=4), "overlap is 4"),
    "negative overlap": (lambda b: b.sample_sequences(4, 4, overlap=-2), "overlap must be"),
    "no column": (
        lambda b: b.sample_sequences(4, 4, initial_states="state"), "extra columns, which are",
    ),
    "others have priorities": (lambda b: b.sample_sequences(4, 3), "make another buffer"),
    "beta": (lambda b: b.sample_sequences(4, 4, beta=-1), "beta is -1"),
}  # fmt: skip
WRONG_OF_BATCH = {
    "errors by sequence": (lambda b, s: b.update_sequence_priorities(s, [1.0] * 4), "one for each"),
    "NaN": (lambda b, s: b.update_sequence_priorities(s, np.full((4, 4), np.nan)), "is nan"),
    "infinite": (lambda b, s: b.update_sequence_priorities(s, np.full((4, 4), np.inf)), "is inf"),
    "eta": (lambda b, s: b.update_sequence_priorities(s, np.ones((4, 4)), eta=2), "eta is 2"),
    "a copy": (lambda b, s: b.update_sequence_priorities(copy.copy(s), 0), "not a copy"),
    "transitions": (lambda b, s: b.refresh_states(b.sample(4), hidden=0), "a ReplayBatch"),
    "another buffer's": (
        lambda b, s: b.refresh_states(filled("shared")[0].sample_sequences(2, 3), hidden=0),
        "of this buffer",
    ),
    "no column": (lambda b, s: b.refresh_states(s, state=np.ones((4, 4, 2))), "extra columns"),
    "shape": (lambda b, s: b.refresh_states(s, hidden=torch.ones(4, 3, 2)), r"\(4, 4, 2\)"),
    "shape of array": (lambda b, s: b.refresh_states(s, hidden=np.ones((4, 2))), r"\(4, 4, 2\)"),
    "dtype": (lambda b, s: b.refresh_states(s, hidden=np.ones((4, 4, 2), complex)), "hidden"),
}


@pytest.mark.parametrize("case", [*WRONG, *WRONG_OF_BATCH])
def test_wrong_arguments_are_refused_and_change_nothing(case):
    buffer, _ = filled("prioritized")
    if case == "longer than anything":  # sequences without priorities may be of any length
        with pytest.raises(BufferMisuseError, match=WRONG[case][1]):
            WRONG[case][0](buffer)
        return
    batch = buffer.sample_sequences(4, 4)
    buffer.update_sequence_priorities(batch, np.ones((4, 4)))
    before = buffer.state_dict()
    call, message = WRONG.get(case) or WRONG_OF_BATCH[case]
    with pytest.raises(BufferMisuseError, match=message):
        call(buffer) if case in WRONG else call(buffer, batch)
    if case != "transitions":  # which draws some before
        after = buffer.state_dict()
        for name, value in before.items():
            same = torch.equal(value, after[name]) if torch.is_tensor(value) else True
            assert same, name


def test_constructors_refuse_what_has_no_sequences(tmp_path):
    made = {"observation_space": OBS, "action_space": Discrete(2)}
    with pytest.raises(BufferMisuseError, match="need num_envs"):
        SharedReplayBuffer(10, **made, track_episodes=True)
    with pytest.raises(BufferMisuseError, match="summed by the learner"):
        SharedReplayBuffer(10, **made, num_envs=1, n_step=2, gamma=0.9, track_episodes=True)
    with pytest.raises(BufferMisuseError, match="track_episodes=False"):
        SharedReplayBuffer(
            10, **made, num_envs=1, track_episodes=True, storage="memmap", folder=tmp_path / "f"
        )
    plain = SharedReplayBuffer(10, **made, num_envs=1)
    with pytest.raises(BufferMisuseError, match="track_episodes=True in the constructor"):
        plain.sample_sequences(1, 1)
    for name in ("steps", "mask", "is_first"):
        with pytest.raises(BufferMisuseError, match=name):
            SharedReplayBuffer(
                10, **made, num_envs=1, track_episodes=True, extra_columns={name: HIDDEN}
            )
