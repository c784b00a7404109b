"""Rollouts of envs on a device, whose slots are memory there, against those on the CPU."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from jit.on_device.host_device import HostDevice, use
from jit.toy_env import PARAMS, TOY

from buffers import BufferMisuseError, RolloutBuffer
from vecenv.jit import JitVectorEnv
from vecenv.jit.cuda.env import CudaVectorEnv

T, N = 8, 5


@pytest.fixture(autouse=True)
def host_device(monkeypatch):
    return use(monkeypatch, HostDevice())


def pair(mode):
    """Envs and a rollout of them, on the CPU and on the "device"."""
    options = {"params": PARAMS, "max_episode_steps": 9, "debug": True, "autoreset_mode": mode}
    found = []
    for kind in (JitVectorEnv, CudaVectorEnv):
        envs = kind(TOY, N, **options)
        spaces = envs.single_observation_space, envs.single_action_space
        rollout = RolloutBuffer(
            T, N, *spaces, autoreset_mode=mode, seed=0, allocate=envs.allocate,
            staged=kind is CudaVectorEnv,
        )  # fmt: skip
        rollout.start(envs.reset(seed=3)[0])
        found.append((envs, rollout))
    return found


def array(values):
    return np.array(values.cpu().numpy() if isinstance(values, torch.Tensor) else values)


def collect(envs, rollout, seed):
    """Fill a rollout; return what was seen of it on the way."""
    rng, seen, mode = np.random.default_rng(seed), [], rollout.autoreset_mode.value
    space = envs.single_action_space
    for t in range(T):
        actions = torch.from_numpy(np.stack([space.sample() for _ in range(N)]))
        floats = torch.from_numpy(rng.random(N, np.float32))
        seen += [array(rollout.obs_at(t)), array(rollout.is_first_at(t))]
        given: Any = rollout.put(t, actions=actions, log_probs=floats, values=floats)
        _, _, terminations, truncations, _ = envs.step(given, out=rollout.slot(t))
        over = array(terminations) | array(truncations)
        if mode != "NextStep":
            rollout.set_final_values(t, over, np.arange(over.sum(), dtype=np.float32))
        if mode == "Disabled" and over.any():
            obs, _ = envs.reset(options={"reset_mask": over})
            rollout.write_obs(t + 1, obs)
    return seen


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_rollouts_on_a_device_are_those_of_the_cpu(mode):
    found = []
    for envs, rollout in pair(mode):
        envs.single_action_space.seed(1)
        all_seen = []
        for seed in range(3):
            all_seen += collect(envs, rollout, seed)
            episodes = rollout.episodes()
            rollout.compute_advantages(torch.ones(N))
            for _ in range(2):
                for batch in rollout.minibatches(3, fixed=True, normalize_advantages=False):
                    all_seen += [batch.obs, batch.actions, batch.advantages, batch.indices]
            for batch in rollout.sequences(2, length=4):
                all_seen += [batch.obs, batch.returns, batch.is_first, batch.weights]
            live = episodes.returns, episodes.lengths, rollout.valid, rollout.rewards
            all_seen += [array(x).copy() for x in live]
            rollout.advance()
        all_seen += list(rollout.state_dict().values())
        found.append([array(x) for x in all_seen if isinstance(x, np.ndarray | torch.Tensor)])
    assert len(found[0]) == len(found[1]) > 100
    for number, (expected, got) in enumerate(zip(*found, strict=True)):
        # Advantages are computed by another order of the same operations.
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6, err_msg=f"{number}")


def test_steps_touch_no_memory_of_the_host():
    _, (_, rollout) = pair("NextStep")
    slot = rollout.slot(0)
    pages = [slot.obs, slot.rewards, slot.terminations, slot.truncations, rollout.env_actions(0)]
    assert all(isinstance(page, torch.Tensor) for page in pages)
    assert slot.obs.data_ptr() == rollout.obs[1].data_ptr()
    assert slot.rewards.data_ptr() == rollout.rewards[0].data_ptr()
    assert rollout.env_actions(0).data_ptr() == rollout.actions[0].data_ptr()


def test_what_is_missing_is_told_as_on_the_cpu():
    found = pair("NextStep")
    for envs, rollout in found:
        envs.single_action_space.seed(1)
        with pytest.raises(BufferMisuseError, match="steps 0, 1, 2, 3, 4 and 3 more have no res"):
            rollout.compute_advantages(torch.ones(N))
        collect(envs, rollout, 0)
        rollout.rewards[2, 3] = np.nan
        with pytest.raises(BufferMisuseError, match="the reward of env 3 in step 2 is nan"):
            rollout.compute_advantages(torch.ones(N))
    with pytest.raises(BufferMisuseError, match="load its state_dict"):
        copy.deepcopy(found[1][1])


def test_a_state_goes_on_in_another_buffer():
    (_, (envs, rollout)), (_, (others, other)) = pair("NextStep"), pair("NextStep")
    envs.single_action_space.seed(1)
    collect(envs, rollout, 0)
    rollout.compute_advantages(torch.ones(N))
    rollout.advance()
    other.load_state_dict(rollout.state_dict())
    others.load_state_dict(envs.state_dict())
    assert other.obs[0].equal(rollout.obs[0])


def test_memory_of_another_kind_is_refused():
    (_, (envs, _)) = pair("NextStep")

    class Owner:
        device = torch.device("cpu")

        def allocate(self, shape, dtype):
            return np.zeros(shape, dtype)

    spaces = envs.single_observation_space, envs.single_action_space
    with pytest.raises(BufferMisuseError, match="allocate returned ndarray for obs, expected a"):
        RolloutBuffer(
            T, N, *spaces, autoreset_mode="NextStep", allocate=Owner().allocate, staged=True
        )


def test_the_current_device_is_that_of_envs_on_it(monkeypatch):
    """ "cuda" becomes "cuda:0" once, so that it equals the device of envs."""
    monkeypatch.setattr("buffers.rollout.buffer.resolve_device", lambda name: torch.device("cpu"))
    envs = CudaVectorEnv(TOY, N, params=PARAMS, debug=True)
    spaces = envs.single_observation_space, envs.single_action_space
    rollout = RolloutBuffer(
        T, N, *spaces, autoreset_mode="NextStep", device="cuda", allocate=envs.allocate, staged=True
    )
    assert rollout.device == envs.device
    rollout.start(envs.reset(seed=0)[0])
    assert isinstance(rollout.slot(0).obs, torch.Tensor)
