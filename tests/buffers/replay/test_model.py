"""Shared and per-env buffers against lists: adding, wrapping round, successors and windows."""

import numpy as np
import pytest
from gymnasium.spaces import Discrete
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from replay_model import (
    ACTIONS,
    NESTED,
    OBS,
    CountingEnvs,
    ListModel,
    check_against,
    columns_of,
)

from buffers import PerEnvReplayBuffer, SharedReplayBuffer

CLASSES = {"shared": SharedReplayBuffer, "per_env": PerEnvReplayBuffer}
OPTIONS = {
    "plain": {},
    "tracked": {"track_env": True},
    "three steps": {"n_step": 3, "gamma": 0.5},
    "stored once": {"store_next": False},
    "stored once, four steps": {"store_next": False, "n_step": 4, "gamma": 0.5},
    "discounts": {"gamma": 0.9},
}


def make(kind, capacity, num_envs, option, space=OBS, staged=False):
    return CLASSES[kind](
        capacity, space, ACTIONS, num_envs=num_envs, seed=0, staged=staged, **OPTIONS[option]
    )


def check(buffer, model, option):
    choice = OPTIONS[option]
    check_against(buffer, model, choice.get("n_step", 1), choice.get("gamma"))


class ReplayMachine(RuleBasedStateMachine):
    """Any sequence of adds, cuts and checkpoints leaves what the lists have."""

    @initialize(
        kind=st.sampled_from(sorted(CLASSES)),
        option=st.sampled_from(sorted(OPTIONS)),
        capacity=st.integers(1, 9),
        num_envs=st.integers(1, 3),
        staged=st.booleans(),
        space=st.sampled_from([OBS, NESTED]),
    )
    def start(self, kind, option, capacity, num_envs, staged, space):
        self.made = kind, capacity, num_envs, option, space, staged
        self.buffer = make(*self.made)
        self.model = ListModel(capacity, num_envs, kind == "per_env")
        self.envs = CountingEnvs(num_envs)
        self.num_envs, self.option, self.space = num_envs, option, space

    @rule(data=st.data(), size=st.integers(1, 12))
    def add_some(self, data, size):
        ids = data.draw(st.lists(st.integers(0, self.num_envs - 1), min_size=size, max_size=size))
        made = self.envs.random_steps(ids, 0.3)
        self.buffer.add(**columns_of(made, self.space), env_ids=np.array(ids))
        self.model.add(made)

    @rule(steps=st.integers(1, 3))
    def add_whole_steps(self, steps):
        made = self.envs.random_steps(list(range(self.num_envs)) * steps, 0.3)
        self.buffer.add(**columns_of(made, self.space))
        self.model.add(made)

    @rule(data=st.data())
    def cut(self, data):
        env = data.draw(st.integers(0, self.num_envs - 1))
        self.envs.cut(env)
        self.buffer.cut_episodes([env])

    @rule()
    def reload(self):
        state = self.buffer.state_dict()
        self.buffer = make(*self.made)
        self.buffer.load_state_dict(state)

    @invariant()
    def same(self):
        if hasattr(self, "model"):
            check(self.buffer, self.model, self.option)


ReplayMachine.TestCase.settings = settings(
    max_examples=12, stateful_step_count=15, deadline=None, derandomize=True
)
test_any_sequence = ReplayMachine.TestCase


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("kind", CLASSES)
def test_rows_of_the_buffer_itself_are_added_as_they_were(kind, staged):
    """Also more than it holds: the first pieces overwrite what the others are views of."""
    spaces = Discrete(3), Discrete(4)

    def filled():
        rng = np.random.default_rng(0)
        more = {"over": "envs"} if kind == "per_env" else {"n_step": 2, "gamma": 0.9}
        buffer = CLASSES[kind](6, *spaces, num_envs=3, seed=0, staged=staged, **more)
        for _ in range(9):
            obs, next_obs = rng.integers(0, 3, (2, 3))
            no = np.zeros(3, bool)
            actions = rng.integers(0, 4, 3)
            buffer.add(
                obs=obs, next_obs=next_obs, actions=actions, rewards=rng.random(3),
                terminations=no, truncations=no,
            )  # fmt: skip
        return buffer

    def add(buffer, is_copied):
        own = buffer.rows()["obs"].numpy()
        own = own.copy() if is_copied else own
        count = len(own)
        no, zeros = np.zeros(count, bool), np.zeros(count)
        buffer.add(
            obs=own, next_obs=own, actions=np.zeros(count, np.int64), rewards=zeros,
            terminations=no, truncations=no, env_ids=own,
        )  # fmt: skip
        return {name: rows.numpy().copy() for name, rows in buffer.rows().items()}

    found, expected = add(filled(), is_copied=False), add(filled(), is_copied=True)
    for name, rows in expected.items():
        np.testing.assert_array_equal(found[name], rows, err_msg=name)
