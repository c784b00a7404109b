"""EpisodicReplayBuffer against a model of lists, through any order of calls and checkpoints."""

import numpy as np
import pytest
import torch
from episodes import make_buffer, make_episode, slow_bound
from gymnasium import spaces
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from buffers import BufferMisuseError, EpisodicReplayBuffer

SPACE = spaces.Box(-1, 10**9, (2,), np.float64)  # (id of the episode, step)
NUM_ENVS = 3


class ListModel:
    """Episodes as lists of (id, step, boundary), the oldest first."""

    def __init__(self, capacity, max_episodes):
        self.capacity, self.max_episodes = capacity, max_episodes
        self.episodes, self.num_added = [], 0
        self.open = [[] for _ in range(NUM_ENVS)]

    def store(self, steps, terminates):
        self.episodes.append((list(steps), terminates))
        self.num_added += 1
        while (
            sum(len(steps) for steps, _ in self.episodes) > self.capacity
            or len(self.episodes) > self.max_episodes
        ):
            self.episodes.pop(0)

    def cut(self, env_id, terminates=False):
        if self.open[env_id]:
            self.store(self.open[env_id], terminates)
            self.open[env_id] = []


def bounds(flags):
    boundaries = [place for place, flag in enumerate(flags) if flag]
    return [slow_bound(len(flags), boundaries, t) for t in range(len(flags))]


class EpisodicMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(1, 25), max_episodes=st.integers(1, 25), staged=st.booleans())
    def make(self, capacity, max_episodes, staged):
        self.options = {"num_envs": NUM_ENVS, "seed": 0, "staged": staged}
        self.sizes = capacity, max_episodes
        self.buffer = self.new_buffer()
        self.model = ListModel(capacity, min(max_episodes, capacity))
        self.next_id = 0
        self.ids = [None] * NUM_ENVS

    def new_buffer(self):
        capacity, max_episodes = self.sizes
        return EpisodicReplayBuffer(
            capacity, SPACE, spaces.Discrete(99), max_episodes=max_episodes, **self.options
        )

    def new_id(self):
        self.next_id += 1
        return self.next_id

    @rule(flags=st.lists(st.booleans(), min_size=1, max_size=12), terminates=st.booleans())
    def add_episode(self, flags, terminates):
        length, number = len(flags), self.new_id()
        steps = np.arange(length + 1)
        episode = {
            "obs": np.stack([np.full(length + 1, number), steps], axis=1).astype(float),
            "actions": steps[:-1],
            "rewards": np.zeros(length),
            "terminations": (steps[:-1] == length - 1) & terminates,
            "boundaries": flags,
        }
        if length > self.sizes[0]:
            with pytest.raises(BufferMisuseError, match="the capacity is"):
                self.buffer.add_episode(episode)
            return
        self.buffer.add_episode(episode)
        self.model.store([(number, t, flags[t]) for t in range(length)], terminates)

    @rule(
        env_ids=st.lists(st.integers(0, NUM_ENVS - 1), min_size=1, unique=True),
        ends=st.lists(st.sampled_from("nntu"), min_size=NUM_ENVS, max_size=NUM_ENVS),
        flags=st.lists(st.booleans(), min_size=NUM_ENVS, max_size=NUM_ENVS),
    )
    def add_steps(self, env_ids, ends, flags):
        for env_id in env_ids:
            if not self.model.open[env_id]:
                self.ids[env_id] = self.new_id()
        ages = [len(self.model.open[env_id]) for env_id in env_ids]
        firsts = [self.model.open[i][0][1] if self.model.open[i] else 0 for i in env_ids]
        steps = np.add(ages, firsts)
        obs = np.stack([[self.ids[i] for i in env_ids], steps], axis=1).astype(float)
        ends, flags = ends[: len(env_ids)], flags[: len(env_ids)]
        self.buffer.add(
            env_ids=env_ids,
            obs=obs,
            next_obs=np.add(obs, [0, 1]),
            actions=steps,
            rewards=np.zeros(len(env_ids)),
            terminations=np.array(ends) == "t",
            truncations=np.array(ends) == "u",
            boundaries=flags,
        )
        for row, env_id in enumerate(env_ids):
            self.model.open[env_id].append((self.ids[env_id], steps[row], flags[row]))
            if ends[row] != "n" or len(self.model.open[env_id]) >= self.sizes[0]:
                self.model.cut(env_id, ends[row] == "t")

    @rule(env_ids=st.lists(st.integers(0, NUM_ENVS - 1), unique=True))
    def cut(self, env_ids):
        self.buffer.cut_episodes(np.array(env_ids, int))
        for env_id in env_ids:
            self.model.cut(env_id)

    @rule()
    def save_and_load(self):
        other = self.new_buffer()
        other.load_state_dict(self.buffer.state_dict())
        if self.num_drawable:
            old, new = self.buffer.sample(5, 0.9), other.sample(5, 0.9)
            torch.testing.assert_close(old.obs, new.obs)
        self.buffer = other

    @property
    def num_drawable(self):
        return sum(
            bound > t
            for steps, _ in self.model.episodes
            for t, bound in enumerate(bounds([flag for _, _, flag in steps]))
        )

    @rule(discount=st.sampled_from([0, 0.5, 1]), over=st.sampled_from(["steps", "episodes"]))
    def sample(self, discount, over):
        if not self.num_drawable:
            with pytest.raises(BufferMisuseError):
                self.buffer.sample(3, discount, over=over)
            return
        batch = self.buffer.sample(20, discount, over=over)
        held = {steps[0][0]: steps for steps, _ in self.model.episodes}
        rows = zip(batch.obs.tolist(), batch.future_obs.tolist(), batch.offsets, strict=True)
        for (number, step), (future_number, future_step), offset in rows:
            steps = held[number]
            t = int(step) - steps[0][1]
            assert future_number == number and future_step == step + offset
            assert 1 <= offset <= bounds([flag for _, _, flag in steps])[t] - t

    @rule(length=st.integers(1, 5))
    def sequences(self, length):
        lengths = [len(steps) for steps, _ in self.model.episodes]
        if max(lengths, default=0) < length:
            with pytest.raises(BufferMisuseError):
                self.buffer.sample_sequences(3, length)
            return
        batch = self.buffer.sample_sequences(10, length)
        held = {(n, t) for steps, _ in self.model.episodes for n, t, _ in steps}
        assert {tuple(map(int, row)) for row in batch.obs.reshape(-1, 2).tolist()} <= held
        assert (batch.obs.diff(dim=1) == torch.tensor([0, 1])).all()
        assert (batch.next_obs - batch.obs == torch.tensor([0, 1])).all()
        assert batch.mask.all() and (batch.actions == batch.obs[..., 1]).all()
        firsts = {steps[0][0]: steps[0][1] for steps, _ in self.model.episodes}
        ends = {steps[-1][:2] for steps, terminates in self.model.episodes if terminates}
        for place in np.ndindex(*batch.mask.shape):
            number, t = map(int, batch.obs[place].tolist())
            assert batch.steps[place] == t - firsts[number]
            assert batch.terminations[place] == ((number, t) in ends)

    @invariant()
    def same_as_model(self):
        model, buffer = self.model, self.buffer
        assert buffer.num_episodes == len(model.episodes)
        assert len(buffer) == sum(len(steps) for steps, _ in model.episodes)
        assert buffer.open_lengths.tolist() == [len(steps) for steps in model.open]
        for index, (steps, terminates) in enumerate(model.episodes):
            found = buffer.episode(index)
            number, first, _ = steps[0]
            expected = [[number, first + t] for t in range(len(steps) + 1)]
            assert found["obs"].tolist() == expected
            assert found["terminations"].tolist()[-1] == terminates
            assert found["boundaries"].tolist() == [flag for _, _, flag in steps]
            assert found["bounds"].tolist() == bounds([flag for _, _, flag in steps])


TestEpisodicMachine = EpisodicMachine.TestCase
TestEpisodicMachine.settings = settings(max_examples=6, stateful_step_count=30)


def test_files_of_other_spaces_or_devices_are_refused_and_change_nothing(tmp_path):
    """Damaged ones: tests/buffers/core/test_state.py."""
    buffer, path = make_buffer(staged=False), tmp_path / "file"
    buffer.add_episode(make_episode(0, 5))
    buffer.save(path)
    wide = spaces.Box(-1, 1, (3,), np.float64)
    for other, words in (
        (EpisodicReplayBuffer(1000, wide, spaces.Discrete(1000)), "with the same spaces"),
        (make_buffer(staged=True), "generator of another device"),
    ):
        with pytest.raises(BufferMisuseError, match=words):
            other.load(path)
        assert len(other) == 0
