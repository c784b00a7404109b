"""step(out=): results go into the caller's arrays, and nothing is allocated or copied."""

import tracemalloc
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from envs import (
    MODES,
    NUM_ENVS,
    SPACES,
    CounterEnv,
    arrays_in,
    counters,
    mode_id,
    random_envs,
    restart_ended,
)
from equality import assert_same
from gymnasium import spaces
from gymnasium.vector.utils import create_empty_array
from twins import make_slot

from buffers import BufferMisuseError, RolloutBuffer
from vecenv import AsyncVectorEnv, SlotError, StepSlot, SyncVectorEnv, make_vec


@pytest.mark.parametrize("mode", MODES, ids=mode_id)
@pytest.mark.parametrize("name", ["float32(3,)", "uint8 image", "discrete", "nested"])
def test_step_writes_into_the_arrays_given_and_returns_them(name, mode):
    space = SPACES[name]
    plain, slotted = random_envs(space, mode), random_envs(space, mode)
    assert_same(slotted.reset(seed=3), plain.reset(seed=3))
    slots = [make_slot(slotted, dtype) for dtype in (np.float64, np.float32)]
    for step in range(10):
        actions = np.full(NUM_ENVS, step % 4)
        slot = slots[step % 2]
        for array in (*arrays_in(slot.obs), slot.rewards):
            array[...] = 77  # shows any row left unwritten
        slot.terminations[:] = slot.truncations[:] = True
        expected = plain.step(actions)
        result = slotted.step(actions, out=slot)
        assert all(came is own for came, own in zip(result[:4], slot, strict=True))
        rewards = expected[1].astype(slot.rewards.dtype)
        assert_same(result, (expected[0], rewards, *expected[2:]), f"step {step}")
        assert_same(restart_ended(slotted, expected), restart_ended(plain, expected))


def test_a_rollout_is_filled_without_a_copy():
    """Rows of a [T + 1, N, ...] buffer as slots: what step returns is the buffer's memory."""
    envs = SyncVectorEnv(counters([3, 4]))
    rollout = envs.allocate((6, 2, 3))
    rewards, flags = np.zeros((5, 2), np.float32), np.zeros((2, 5, 2), bool)
    rollout[0] = envs.reset()[0]
    for t in range(5):
        slot = StepSlot(rollout[t + 1], rewards[t], flags[0, t], flags[1, t])
        result = envs.step([0, 0], out=slot)
        assert np.shares_memory(result[0], rollout)
        assert np.shares_memory(result[1], rewards)
    assert rollout[:, :, 2].tolist() == [[0, 0], [1, 1], [2, 2], [3, 3], [0, 4], [1, 0]]
    assert rewards.tolist() == [[1, 1], [2, 2], [3, 3], [0, 4], [1, 0]]
    assert flags[0].tolist() == [[False, False]] * 2 + [[True, False], [False, True], [False] * 2]


def test_calls_after_a_step_into_a_slot_know_the_latest_observations():
    """A partial reset returns all rows, recv those asked for; the slot is not written to again."""
    envs = SyncVectorEnv(counters([9, 9, 9]))
    envs.reset()
    slot = make_slot(envs)
    envs.step([0, 0, 0], out=slot)
    kept = slot.obs.copy()
    obs, _ = envs.reset(options={"reset_mask": np.array([False, True, False])})
    assert obs.tolist() == [[0, 0, 1], [1, 1, 0], [2, 0, 1]]
    envs.step([0, 0, 0], out=slot)
    kept = slot.obs.copy()
    envs.send([0], [2])
    assert envs.recv().obs.tolist() == [[2, 0, 3]]
    envs.step([0, 0, 0])
    assert_same(slot.obs, kept)


class SilentEnv(gym.Env):
    """Returns always the same, so that all memory used is the vector env's."""

    observation_space = spaces.Box(-1, 1, (4096,), np.float32)
    action_space = spaces.Box(-1, 1, (2,), np.float32)
    obs = np.ones(4096, np.float32)
    info = {}

    def reset(self, *, seed=None, options=None):
        return self.obs, self.info

    def step(self, action):
        return self.obs, 0.5, False, False, self.info


def test_steps_into_slots_allocate_no_array_memory():
    num_envs = 64
    envs = SyncVectorEnv([SilentEnv] * num_envs)
    envs.reset()
    slots = [make_slot(envs, np.float32) for _ in range(2)]
    actions = np.zeros((num_envs, 2), np.float32)
    for slot in slots:
        envs.step(actions, out=slot)
    numpy_only = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for step in range(20):
            envs.step(actions, out=slots[step % 2])
        peak = tracemalloc.get_traced_memory()[1] - before
        snapshot = tracemalloc.take_snapshot().filter_traces([numpy_only])
    finally:
        tracemalloc.stop()
    assert sum(trace.size for trace in snapshot.traces) == 0
    assert peak < 64 * 1024  # one batch of observations is 1 MiB, so none was made and dropped
    assert (slots[0].obs == 1).all()


def broken_slots():
    def slot(**changes):
        arrays = {
            "obs": np.zeros((2, 3), np.float32),
            "rewards": np.zeros(2),
            "terminations": np.zeros(2, bool),
            "truncations": np.zeros(2, bool),
        }
        return SimpleNamespace(**{**arrays, **changes})

    read_only = np.zeros(2)
    read_only.flags.writeable = False
    flags = np.zeros(3, bool)
    no_rewards = slot()
    del no_rewards.rewards
    return {
        "obs shape": (slot(obs=np.zeros((3, 3), np.float32)), r"out.obs has shape \(3, 3\)"),
        "obs dtype": (slot(obs=np.zeros((2, 3))), "out.obs .* dtype float64, expected .* float32"),
        "obs layout": (slot(obs=np.zeros((3, 2), np.float32).T), "out.obs must be C-contiguous"),
        "obs list": (slot(obs=[[0, 0, 0]] * 2), "out.obs must be a NumPy array, got list"),
        "rewards shape": (slot(rewards=np.zeros((2, 1))), r"out.rewards has shape \(2, 1\) and"),
        "rewards dtype": (
            slot(rewards=np.zeros(2, int)),
            r"out.rewards .*int64, expected shape \(2,\) and dtype float64 or float32",
        ),
        "rewards layout": (slot(rewards=np.zeros(4)[::2]), "out.rewards must be C-contiguous"),
        "rewards unaligned": (
            slot(rewards=np.zeros(17, np.uint8)[1:].view(np.float64)),
            "out.rewards .*aligned=False",
        ),
        "rewards read-only": (slot(rewards=read_only), "out.rewards .*writeable=False"),
        "flags dtype": (
            slot(terminations=np.zeros(2, np.uint8)),
            "out.terminations .*uint8, expected .* dtype bool",
        ),
        "flags shape": (slot(truncations=np.zeros(3, bool)), r"out.truncations has shape \(3,\)"),
        "one array for both flags": (
            slot(terminations=flags[:2], truncations=flags[1:]),
            "out.terminations and out.truncations share memory",
        ),
        "no rewards": (no_rewards, "rewards"),
        "a tuple": ((np.zeros((2, 3), np.float32),), "obs, rewards, terminations, truncations"),
    }


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("name", broken_slots())
def test_wrong_slots_are_refused_and_nothing_is_stepped(name, kind):
    slot, message = broken_slots()[name]
    envs = kind(counters([9, 9]))
    envs.reset()
    with pytest.raises(SlotError, match=message):
        envs.step([0, 0], out=slot)
    assert [len(calls) for calls in envs.get_attr("calls")] == [1, 1]
    assert envs.step([0, 0], out=make_slot(envs))[1].tolist() == [1, 1]
    envs.close()


@pytest.mark.parametrize("name", ["text", "custom", "dict with objects"])
def test_observations_without_fixed_shape_cannot_go_into_slots(name):
    envs = random_envs(SPACES[name])
    envs.reset(seed=0)
    obs = create_empty_array(SPACES[name], NUM_ENVS)
    slot = StepSlot(obs, np.zeros(NUM_ENVS), np.zeros(NUM_ENVS, bool), np.zeros(NUM_ENVS, bool))
    with pytest.raises(SlotError, match="step without `out`"):
        envs.step([0] * NUM_ENVS, out=slot)
    assert len(envs.step([0] * NUM_ENVS)) == 5


@pytest.mark.parametrize("backend", ["sync", "async", "jit"])
def test_a_slot_of_a_buffer_for_another_autoreset_mode_is_refused(backend):
    env_id = "JitCartPole-v1" if backend == "jit" else "CartPole-v1"
    envs = make_vec(env_id, num_envs=2, backend=backend, autoreset_mode="SameStep")
    sizes = 2, 2, envs.single_observation_space, envs.single_action_space
    right, wrong = (RolloutBuffer(*sizes, autoreset_mode=mode) for mode in ("SameStep", "NextStep"))
    obs, _ = envs.reset(seed=0)
    actions = np.zeros(2, np.int64)
    for rollout in (right, wrong):
        rollout.start(obs)
    for _ in range(2):  # also once the right one is known
        with pytest.raises(SlotError, match="mode 'NextStep', but the envs have 'SameStep'; make"):
            envs.step(actions, out=wrong.slot(0))
        envs.step(actions, out=right.slot(0))
        envs.step(actions)
    named = SimpleNamespace(**right.slot(1)._asdict(), autoreset_mode=wrong.autoreset_mode)
    with pytest.raises(SlotError, match="mode 'NextStep', but the envs have 'SameStep'; make"):
        envs.step(actions, out=named)
    for mode in (right.autoreset_mode, "SameStep", "same_step"):
        named.autoreset_mode = mode
        envs.step(actions, out=named)
    with pytest.raises(BufferMisuseError, match=r"is 'NextStep', but .*VectorEnv.* has 'SameStep'"):
        RolloutBuffer(*sizes, autoreset_mode="NextStep", allocate=envs.allocate)
    envs.close()


@pytest.mark.parametrize("fails_at", [0, 2])
@pytest.mark.parametrize("make", [SyncVectorEnv, AsyncVectorEnv])
def test_rows_that_an_env_which_raised_did_not_write_are_not_learned_from(make, fails_at):
    class Fragile(CounterEnv):
        def step(self, action):
            if action == 9:
                raise RuntimeError("out of order")
            return super().step(action)

    envs = make([lambda i=i: Fragile(i, 5) for i in range(3)])
    space, action_space = envs.single_observation_space, envs.single_action_space
    mode = envs.autoreset_mode
    rollout = RolloutBuffer(2, 3, space, action_space, autoreset_mode=mode, allocate=envs.allocate)
    actions, floats = np.zeros(3, np.int64), np.zeros(3)
    rollout.start(envs.reset(seed=0)[0])
    for number in range(2):
        for t in range(2):
            actions[fails_at] = 9 if (number, t) == (1, 1) else 0
            rollout.put(t, actions=actions, log_probs=floats, values=floats)
            if number and t:
                with pytest.raises(RuntimeError, match="out of order"):
                    envs.step(actions, out=rollout.slot(t))
                with pytest.raises(BufferMisuseError, match=r"steps? 1 have no results"):
                    rollout.compute_advantages(floats)
            else:
                envs.step(actions, out=rollout.slot(t))
        if not number:
            rollout.compute_advantages(floats)
            rollout.advance()
    envs.close()


class Lying(np.ndarray):
    """Says that it is as large and as writable as it is wanted."""

    shape = property(lambda self: self.claimed)
    dtype = property(lambda self: np.dtype(self.claimed_dtype))
    flags = property(lambda self: np.zeros(self.claimed).flags)

    @staticmethod
    def made(array, shape, dtype):
        lying = array.view(Lying)
        lying.claimed, lying.claimed_dtype = shape, dtype
        return lying


class Honest(np.ndarray):
    pass


@pytest.mark.parametrize("backend", ["sync", "async", "jit"])
def test_what_a_subclass_of_arrays_says_of_itself_is_not_believed(backend):
    env_id = "JitCartPole-v1" if backend == "jit" else "CartPole-v1"
    envs = make_vec(env_id, num_envs=64, backend=backend)
    envs.reset(seed=0)
    fields = dict(make_slot(envs)._asdict())
    for name, array in fields.items():
        small = np.zeros(1, array.dtype)
        lying = Lying.made(small, array.shape, array.dtype)
        read_only = array.copy()
        read_only.flags.writeable = False
        for wrong in (lying, Lying.made(read_only, array.shape, array.dtype)):
            with pytest.raises(SlotError, match=f"out.{name}"):
                envs.step(np.zeros(64, int), out=StepSlot(**{**fields, name: wrong}))
        assert not small.any()
    honest = StepSlot(*(array.view(Honest) for array in fields.values()))
    results = envs.step(np.zeros(64, int), out=honest)
    assert results[0] is honest.obs
    assert (np.asarray(honest.rewards) == 1).all()
    envs.close()


@pytest.mark.parametrize("backend", ["sync", "async", "jit"])
def test_allocate_refuses_what_is_no_memory_and_keeps_names_of_fields(backend):
    env_id = "JitCartPole-v1" if backend == "jit" else "CartPole-v1"
    envs = make_vec(env_id, num_envs=2, backend=backend)
    for shape, dtype, error, message in [
        ((-1,), "S0", ValueError, "dimensions of at least 0"),
        ((-1,), np.float32, ValueError, r"shape is \(-1,\)"),
        ((3,), "S0", ValueError, "no bytes"),
        ((3,), "V0", ValueError, "no bytes"),
        ((3,), [], ValueError, "no bytes"),
        ((3,), object, TypeError, "dtype is object"),
        ((3,), [("a", int), ("b", object)], TypeError, "Python objects"),
        ((2.5,), np.float32, TypeError, "integer"),
        ((1 << 62, 1 << 62), np.float32, MemoryError, "allocate"),
        ((1 << 32, 1 << 32), np.int8, MemoryError, "allocate"),
    ]:
        with pytest.raises(error, match=message):
            envs.allocate(shape, dtype)
    named = envs.allocate((3,), [("step", np.int32), ("reward", np.float64, (2,))])
    named["reward"] = 4
    assert named.dtype.names == ("step", "reward")
    assert named["step"].tolist() == [0, 0, 0]
    assert envs.allocate((2,), np.dtype((np.int8, (3,)))).shape == (2, 3)
    assert envs.allocate(4, "S5").tolist() == [b""] * 4
    envs.close()
