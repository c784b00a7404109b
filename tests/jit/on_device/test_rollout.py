"""Rollouts of envs on a device, whose slots are memory there, against those on the CPU."""

from typing import Any

import numpy as np
import pytest
import torch
from choices import fast_are
from jit.on_device.host_device import refuse_host
from jit.toy_env import PARAMS, TOY

from buffers import BufferMisuseError, RolloutBuffer
from buffers.rollout.storage import UNWRITTEN
from vecenv.jit import JitVectorEnv
from vecenv.jit.cuda.env import CudaVectorEnv

pytestmark = pytest.mark.usefixtures("host_device")

T, N = 8, 5


def pair(mode):
    """Envs and a rollout of them, on the CPU and on the "device"."""
    options = {"params": PARAMS, "max_episode_steps": 9, "debug": True, "autoreset_mode": mode}
    found = []
    for kind in (JitVectorEnv, CudaVectorEnv):
        envs = kind(TOY, N, **options)
        spaces = envs.single_observation_space, envs.single_action_space
        rollout = RolloutBuffer(
            T, N, *spaces, autoreset_mode=mode, seed=0, allocate=envs.allocate,
        )  # fmt: skip
        rollout.start(envs.reset(seed=3)[0])
        found.append((envs, rollout))
    return found


def array(values):
    return np.array(values.cpu().numpy() if isinstance(values, torch.Tensor) else values)


def set_final_values(rollout, t, over):
    values = np.arange(over.sum(), dtype=np.float32)
    if rollout.generator is None or t % 2:
        rollout.set_final_values(t, over, values)
        return
    of_all = torch.full((N,), 99.0)
    of_all[torch.from_numpy(over)] = torch.from_numpy(values)
    rollout.set_final_values(t, torch.from_numpy(over), of_all)


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
            set_final_values(rollout, t, over)
        if mode == "Disabled" and over.any():
            obs, _ = envs.reset(options={"reset_mask": over})
            rollout.write_obs(t + 1, obs)
    return seen


MODES = ["NextStep", "SameStep", "Disabled"]


@pytest.mark.parametrize("mode", fast_are(["SameStep", "Disabled"], MODES))
def test_rollouts_on_a_device_are_those_of_the_cpu_but_for_the_order_of_rows(mode):
    found, lasting = [], []
    for envs, rollout in pair(mode):
        envs.single_action_space.seed(1)
        all_seen = []
        for seed in range(3):
            all_seen += collect(envs, rollout, seed)
            if rollout.generator is None:  # of the same rollout as the other's
                episodes = rollout.episodes()
            rollout.compute_advantages(torch.ones(N))
            if rollout.generator is not None:
                episodes = rollout.episodes()
            rollout.check()
            rows = [
                batch.indices[batch.weights > 0] for batch in rollout.minibatches(3, fixed=True)
            ]
            all_seen += [torch.cat(rows).sort().values, rollout.num_valid, sorted(map(len, rows))]
            live = rollout.valid, rollout.rewards, rollout.advantages, rollout.returns
            all_seen += [array(x).copy() for x in (*episodes, *live)]
            rollout.advance()
        state = rollout.state_dict()
        lasting.append({k: array(state[k]) for k in state if k != "generator"})
        found.append([array(x) for x in all_seen])
    assert len(found[0]) == len(found[1]) > 60
    for number, (expected, got) in enumerate(zip(*found, strict=True)):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6, err_msg=f"{number}")
    for name in ("over_before", "running_returns", "running_lengths", "is_first", "obs"):
        np.testing.assert_allclose(lasting[1][name], lasting[0][name], rtol=1e-6, err_msg=name)


def test_a_rollout_on_a_device_waits_for_nothing_and_touches_no_memory_of_the_host(monkeypatch):
    _, (envs, rollout) = pair("SameStep")
    envs.single_action_space.seed(1)
    collect(envs, rollout, 0)
    rollout.compute_advantages(torch.ones(N))
    for _ in rollout.minibatches(3, fixed=True):
        pass
    rollout.advance()
    actions, floats = torch.zeros(N, dtype=torch.int64), torch.ones(N)

    with monkeypatch.context() as patch:
        refuse = refuse_host(patch)
        patch.setattr(torch, "from_numpy", refuse)
        patch.setattr(CudaVectorEnv, "_wait", refuse)
        for _ in range(2):
            for t in range(T):
                rollout.obs_at(t), rollout.is_first_at(t)
                given: Any = rollout.put(t, actions=actions, log_probs=floats, values=floats)
                *_, ends, cuts, _ = envs.step(given, out=rollout.slot(t))
                rollout.set_final_values(t, ends | cuts, floats)
            rollout.compute_advantages(floats)
            for _ in rollout.minibatches(3, fixed=True):
                pass
            rollout.advance()
    rollout.check()


def test_what_a_rollout_on_a_device_lacks_is_told_by_check():
    _, (envs, rollout) = pair("SameStep")
    envs.single_action_space.seed(1)

    def leave_out(name, t, env):
        getattr(rollout, name)[t, env].view(torch.int32).fill_(UNWRITTEN)

    for change, told in (
        (lambda: rollout.rewards[2, 3].fill_(np.inf), "env 3 in step 2 had a reward that"),
        (lambda: leave_out("log_probs", 1, 4), "env 4 in step 1 had no log_probs"),
        (lambda: leave_out("values", 5, 0), "env 0 in step 5 had no values"),
        (lambda: rollout.truncations[7, 2].fill_(True), "env 2 was truncated in step 7, but"),
    ):
        collect(envs, rollout, 0)
        rollout.terminations[7, 2] = rollout.truncations[7, 2] = False
        change()
        rollout.compute_advantages(torch.ones(N))
        rollout.advance()  # a later call tells
        with pytest.raises(BufferMisuseError, match=told):
            rollout.check()
        rollout.check()  # once
    rollout.slot(0)
    rollout.compute_advantages(torch.ones(N))
    with pytest.raises(BufferMisuseError, match="env 0 in step 0 had no results"):
        rollout.check()
    rollout.compute_advantages(torch.ones(N), policy_outputs=False)
    with pytest.raises(BufferMisuseError, match="the host does not know how many rows are valid"):
        rollout.minibatches(3)


def test_a_state_goes_on_in_another_buffer():
    (_, (envs, rollout)), (_, (others, other)) = (pair("NextStep") for _ in "ab")
    envs.single_action_space.seed(1)
    collect(envs, rollout, 0)
    rollout.compute_advantages(torch.ones(N))
    rollout.advance()
    other.load_state_dict(rollout.state_dict())
    others.load_state_dict(envs.state_dict())
    assert other.obs[0].equal(rollout.obs[0])
    results = []
    for made, one in ((envs, rollout), (others, other)):
        made.single_action_space.seed(5)
        collect(made, one, 7)
        one.compute_advantages(torch.ones(N))
        orders = [batch.indices for batch in one.minibatches(2, fixed=True)]
        results.append([*orders, one.valid, *map(torch.from_numpy, one.episodes())])
    for a, b in zip(*results, strict=True):
        assert a.equal(b)
    other.advance()
    state = other.state_dict()
    with pytest.raises(BufferMisuseError, match="generator of another device"):
        other.load_state_dict({**state, "generator": torch.zeros_like(state["generator"])})
