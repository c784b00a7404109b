"""send and recv: any split gives what step gives, and what was received stays."""

import contextlib
import functools

import gymnasium as gym
import numpy as np
import pytest
from envs import (
    MODES,
    NUM_ENVS,
    SPACES,
    CounterEnv,
    Pair,
    PairSpace,
    counters,
    mode_id,
    random_envs,
)
from equality import assert_same
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from twins import assert_sends_alike, twins

from vecenv import AsyncVectorEnv, SyncVectorEnv, make_vec
from vecenv.core.batches import take_rows


@pytest.mark.parametrize("mode", MODES, ids=mode_id)
@pytest.mark.parametrize("name", SPACES)
def test_any_split_into_sends_gives_what_step_gives(name, mode):
    """Every row that recv hands back is the row of that env, infos included."""
    sent, stepped = twins(SPACES[name], mode, make=SyncVectorEnv)
    assert_same(sent.reset(seed=2), stepped.reset(seed=2))
    for order, received in assert_sends_alike(sent, stepped, 8):
        assert received == order  # in this process who was sent first is ready first


@pytest.mark.parametrize("mode", MODES, ids=mode_id)
def test_some_envs_may_run_ahead_of_others(mode):
    """Env 0 is stepped at every turn, env 4 at every fifth; each goes its own way."""
    envs, alone = random_envs(SPACES["nested"], mode), random_envs(SPACES["nested"], mode)
    envs.reset(seed=1)
    alone.reset(seed=1)
    rows = {i: [] for i in range(NUM_ENVS)}
    for turn in range(1, 16):
        ids = [i for i in range(NUM_ENVS) if turn % (i + 1) == 0]
        envs.send([turn % 4] * len(ids), ids)
        batch = envs.recv()
        for row, i in enumerate(batch.env_ids):
            obs = take_rows(SPACES["nested"], batch.obs, [row])
            rows[int(i)].append((obs, *(field[row] for field in batch[1:4])))
        restart_ids(envs, batch)
    for i in range(NUM_ENVS):
        turns = [turn for turn in range(1, 16) if turn % (i + 1) == 0]
        for turn, row in zip(turns, rows[i], strict=True):
            alone.send([turn % 4], [i])
            batch = alone.recv()
            assert_same(row, (batch.obs, *(field[0] for field in batch[1:4])))
            restart_ids(alone, batch)


def restart_ids(envs, batch):
    over = batch.terminations | batch.truncations
    if envs.autoreset_mode is AutoresetMode.DISABLED and over.any():
        envs.reset(options={"reset_mask": np.isin(np.arange(NUM_ENVS), batch.env_ids[over])})


def test_steps_and_sends_may_alternate():
    stepped, mixed = random_envs(SPACES["dict"]), random_envs(SPACES["dict"])
    assert_same(mixed.reset(seed=4), stepped.reset(seed=4))
    for step in range(8):
        actions = np.full(NUM_ENVS, step % 4)
        expected = stepped.step(actions)
        if step % 2:
            assert_same(mixed.step(actions), expected)
            continue
        mixed.send(actions)
        batch = mixed.recv()
        assert_same(tuple(batch[:4]), expected[:4])
        assert batch.env_ids.tolist() == list(range(NUM_ENVS))


@pytest.mark.parametrize("copy", [True, False])
def test_received_batches_are_the_callers_to_keep(copy):
    envs = SyncVectorEnv(counters([9, 9], reuses_obs=True), copy=copy)
    envs.reset()
    envs.send([0, 0])
    first = envs.recv()
    kept = [np.copy(field) for field in first[:4]]
    envs.step([0, 0])
    envs.send([0, 0])
    envs.recv()
    assert_same([*first[:4]], kept)
    assert first.infos["step"].tolist() == [1, 1]


class Exploding(CounterEnv):
    """Env 1 raises in its first step."""

    def step(self, action):
        if self.name == 1 and self.episode == 0:
            raise FloatingPointError("physics exploded")
        return super().step(action)


def test_after_an_exception_no_action_is_taken_twice():
    envs = SyncVectorEnv([functools.partial(Exploding, name, 9) for name in range(3)])
    envs.reset()
    envs.send([5, 5, 5])
    with pytest.raises(FloatingPointError):
        envs.recv()
    with contextlib.suppress(Exception):  # the rest, the same again, or a refusal
        envs.recv()
    assert envs.envs[0].calls.count(("step", 5)) == 1
    assert envs.reset()[0][:, 2].tolist() == [0, 0, 0]
    assert envs.step([0, 0, 0])[1].tolist() == [1, 1, 1]


class ChangingPair(gym.Env):
    """Returns one object again and again, and changes it."""

    observation_space = PairSpace()
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.pair = Pair(0, 0)

    def reset(self, *, seed=None, options=None):
        self.pair.left = 0
        return self.pair, {}

    def step(self, action):
        self.pair.left += 1
        return self.pair, 0.0, False, False, {}


@pytest.mark.parametrize("way", ["step", "send"])
def test_objects_that_envs_go_on_changing_are_copied_too(way):
    envs = SyncVectorEnv([ChangingPair] * 2)
    kept = [envs.reset()[0]]
    for _ in range(3):
        if way == "step":
            kept.append(envs.step([0, 0])[0])
        else:
            envs.send([0, 0])
            kept.append(envs.recv().obs)
    assert kept == [(Pair(k, 0), Pair(k, 0)) for k in range(4)]


KINDS = {
    "sync": lambda: SyncVectorEnv(counters([3] * 6)),
    "async": lambda: AsyncVectorEnv(counters([3] * 6), num_workers=2),
    "async, caller steps": lambda: AsyncVectorEnv(
        counters([3] * 6), num_workers=1, caller_steps=True
    ),
    "jit": lambda: make_vec("JitCartPole-v1", 6, backend="jit"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_one_size(kind):
    """Also when more are ready: the others come first at the next recv, none twice or never."""
    envs = KINDS[kind]()
    envs.reset(seed=0)
    actions = np.zeros(6, np.int64)
    counts = np.zeros(6, int)
    twin = SyncVectorEnv(counters([3] * 6)) if kind != "jit" else None
    expected = []
    if twin is not None:
        twin.reset(seed=0)
        expected = [twin.step(actions)[0] for _ in range(12)]
    envs.send(actions)
    for _ in range(12):
        batch = envs.recv(min_envs=4, max_envs=4)
        assert len(batch.env_ids) == len(batch.rewards) == 4
        for row, env_id in enumerate(batch.env_ids.tolist()):
            if expected:
                assert_same(batch.obs[row], expected[counts[env_id]][env_id])
            counts[env_id] += 1
        envs.send(actions[batch.env_ids], batch.env_ids)
    assert len(envs.recv(max_envs=5).env_ids) == 5
    assert len(envs.recv(max_envs=5).env_ids) == 1  # all that are left
    envs.close()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_envs": 0}, ValueError, "max_envs is 0, expected at least 1"),
        ({"max_envs": 2.0}, TypeError, "max_envs is 2.0, expected an integer"),
        ({"min_envs": 3, "max_envs": 2}, ValueError, "min_envs is 3 and max_envs 2, expected"),
        ({"min_envs": 4}, ValueError, "min_envs is 4, expected 1 to 3"),
    ],
)
def test_wrong_numbers_of_envs_to_receive(arguments, error, message):
    envs = SyncVectorEnv(counters([9] * 3))
    envs.reset()
    envs.send([0, 0, 0])
    with pytest.raises(error, match=message):
        envs.recv(**arguments)
    assert len(envs.recv(max_envs=9).env_ids) == 3
    envs.close()
