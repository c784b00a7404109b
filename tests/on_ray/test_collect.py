"""Fragments: policies act in the actors and the caller's memory is filled."""

import os
import re
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from envs import counters
from equality import assert_same
from gymnasium.vector import AutoresetMode
from on_ray.toy_policies import Failing, Follower, Hoarder, Odd
from workers.faulty_envs import DIE, FINE, HANG, RAISE, faulty

from vecenv import (
    RayVectorEnv,
    SlotError,
    StepSlot,
    StepTimeoutError,
    SyncVectorEnv,
    WorkerDiedError,
)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

NUM_STEPS = 6


def new_slots(envs, num_steps=NUM_STEPS):
    shape = envs.observation_space.shape
    return [
        StepSlot(
            np.full(shape, np.nan, np.float32),
            np.full(envs.num_envs, np.nan),
            *np.zeros((2, envs.num_envs), np.bool_),
        )
        for _ in range(num_steps)
    ]


def new_fields(envs):
    size = NUM_STEPS, envs.num_envs
    return {"seen": np.full((*size, *envs.observation_space.shape[1:]), np.nan, np.float32)}


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_fragments_hold_what_steps_give(mode, num_workers):
    env_fns = counters([2, 3, 4, 5, 9])
    spread = RayVectorEnv(env_fns, autoreset_mode=mode, num_workers=num_workers)
    sync = SyncVectorEnv(env_fns, autoreset_mode=mode)
    obs = sync.reset(seed=1)[0]
    assert_same(spread.reset(seed=1)[0], obs)
    spread.set_policy(Follower)
    rng = np.random.default_rng(3)
    for shift in (1, 4):
        chosen = rng.integers(0, 10, (NUM_STEPS, 5))
        slots, fields = new_slots(spread), new_fields(spread)
        infos = spread.collect(slots, {"shift": shift}, inputs=[chosen], fields=fields)
        for t, slot in enumerate(slots):
            assert_same(fields["seen"][t], obs)
            obs, *flags, expected = sync.step((chosen[t] + shift) % 10)
            assert_same(tuple(slot), (obs, *flags))
            assert_same(infos[t], expected)
    assert_same(spread.step([1] * 5), sync.step([1] * 5))
    spread.close()


def test_torch_tensors_are_filled_in_place():
    import torch

    spread = RayVectorEnv(counters([3] * 4), num_workers=2)
    spread.reset()
    spread.set_policy(Follower)
    chosen = torch.randint(10, (NUM_STEPS, 4))
    kept = torch.zeros((NUM_STEPS, 4), dtype=torch.int64)
    spread.collect(new_slots(spread), inputs=[chosen], fields={"actions": kept})
    assert torch.equal(kept, chosen)
    spread.close()


def test_a_killed_actor_costs_its_own_fragment_only():
    """The others' rows are there at once; the lost envs' begin with a truncation."""
    spread = RayVectorEnv(faulty(4), num_workers=2, on_error="restart")
    spread.reset(seed=1)
    spread.set_policy(Follower)
    spread.step([FINE] * 4)
    os.kill(spread.call("pid")[3], signal.SIGKILL)
    begin = time.monotonic()
    slots, chosen = new_slots(spread), np.full((NUM_STEPS, 4), FINE)
    infos = spread.collect(slots, {"shift": 0}, inputs=[chosen])
    assert time.monotonic() - begin < 60  # 2 on an idle machine
    counts = np.array([slot.obs[:, 1] for slot in slots])
    assert counts[:, :2].T.tolist() == [[2, 3, 4, 5, 6, 7]] * 2
    assert counts[:, 2:].T.tolist() == [[1, 0, 1, 2, 3, 4]] * 2
    truncations = np.array([slot.truncations for slot in slots])
    assert np.argwhere(truncations).tolist() == [[0, 2], [0, 3]]
    assert infos[0]["restarts"].tolist() == [0, 0, 1, 1] == spread.restarts.tolist()
    assert "worker 1 (envs 2-3) is gone during the collection of steps 2-7" in str(
        infos[0]["restart_reason"][2]
    )
    spread.close()


def test_an_actor_that_dies_every_time_ends_in_an_error():
    spread = RayVectorEnv(faulty(2), num_workers=2, on_error="restart")
    spread.reset(seed=1)
    spread.set_policy(Follower)
    chosen = np.full((NUM_STEPS, 2), FINE)
    chosen[4, 1] = DIE
    slots = new_slots(spread)
    with pytest.raises(WorkerDiedError, match="actor number 3 lost over this"):
        spread.collect(slots, inputs=[chosen])
    assert [slot.obs[0, 1] for slot in slots] == [1, 2, 3, 4, 5, 6]  # what came is kept
    assert spread.closed


def test_refusals():
    spread = RayVectorEnv(faulty(4), num_workers=2)
    slots, chosen = new_slots(spread), np.full((NUM_STEPS, 4), FINE)
    spread.reset(seed=1)
    with pytest.raises(ValueError, match="before `set_policy`"):
        spread.collect(slots)
    lock = threading.Lock()
    with pytest.raises(TypeError, match="can't be pickled"):
        spread.set_policy(lambda envs: lock)
    spread.set_policy(Follower)
    with pytest.raises(ValueError, match=r"inputs\[0\] has shape \(4, 6\), expected \(6, 4\)"):
        spread.collect(slots, inputs=[chosen.T])
    with pytest.raises(ValueError, match="is a list"):
        spread.collect(slots, inputs=[chosen], fields={"seen": []})
    with pytest.raises(ValueError, match="slots is empty"):
        spread.collect([], inputs=[chosen])
    with pytest.raises(SlotError):
        spread.collect([slots[0]._replace(rewards=None)] * NUM_STEPS, inputs=[chosen])
    other = SimpleNamespace(**slots[0]._asdict(), autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(SlotError, match="mode 'SameStep', but the envs have 'NextStep'"):
        spread.collect([other] * NUM_STEPS, inputs=[chosen])
    with pytest.raises(ValueError, match=r"policy recorded .*'seen'"):
        spread.collect(slots, inputs=[chosen], fields={"heard": new_fields(spread)["seen"]})
    spread.close()


def test_what_goes_wrong_in_an_actor():
    spread = RayVectorEnv(faulty(4), num_workers=2)
    slots, chosen = new_slots(spread), np.full((NUM_STEPS, 4), FINE)
    spread.reset(seed=1)
    spread.set_policy(Failing)
    with pytest.raises(ArithmeticError, match="no idea") as raised:
        spread.collect(slots, inputs=[chosen])
    assert re.fullmatch(r"Raised in worker [01], collect \d+\.", raised.value.__notes__[0])
    assert not hasattr(raised.value, "env_index")
    spread.set_policy(Odd)
    spread.reset(seed=1)
    with pytest.raises(ValueError, match="expected one row per env"):
        spread.collect(slots, inputs=[chosen])
    spread.set_policy(Follower)
    spread.reset(seed=1)
    chosen[2, 3] = RAISE
    with pytest.raises(ValueError, match="broken joint 3") as raised:
        spread.collect(slots, inputs=[chosen])
    assert raised.value.env_index == 3
    note = (
        r"Raised by env 3 in worker 1, step 3 of 6 of `collect` after step 0, action (np.int64\()?1"
    )
    assert re.match(note, raised.value.__notes__[0])
    chosen[2, 3] = HANG
    spread.reset(seed=1)
    with pytest.raises(StepTimeoutError, match=r"waiting for worker 1 \(envs 2-3\)"):
        spread.collect(slots, inputs=[chosen], timeout=0.3)
    spread.reset(seed=1)
    spread.collect(slots, inputs=[np.full((NUM_STEPS, 4), FINE)])
    spread.close()


def test_collecting_is_refused_where_the_caller_has_to_reset():
    spread = RayVectorEnv(faulty(2), num_workers=1, autoreset_mode="Disabled")
    spread.reset()
    spread.set_policy(Follower)
    with pytest.raises(ValueError, match="autoreset 'Disabled'"):
        spread.collect(new_slots(spread), inputs=[np.zeros((NUM_STEPS, 2), int)])
    spread.close()


def test_what_a_policy_is_given_is_its_own_to_keep():
    envs = RayVectorEnv(counters([2, 3, 4, 5]), num_workers=2)
    envs.reset(seed=1)
    envs.set_policy(Hoarder)
    for _ in range(3):  # fragments share memory
        fields = {"torn": np.ones((NUM_STEPS, 4), np.bool_)}
        chosen = np.ones((NUM_STEPS, 4), np.int64)
        envs.collect(new_slots(envs), {"shift": 0}, inputs=[chosen], fields=fields)
        assert not fields["torn"].any()
    envs.close()
