"""The code for devices, run by the processor, does what the code for the processor does."""

from typing import Any

import numpy as np
import pytest
from jit.drawn_env import DRAWN
from jit.on_device.bundled import (
    MAKERS,
    check_agents,
    check_infos,
    check_states,
    check_step,
)
from jit.on_device.host_device import use
from jit.on_device.recorded import RULES_OF_TRACE, count_differences

from vecenv import make_vec_agents
from vecenv.core.masks import sample_actions
from vecenv.jit import JitVectorEnv
from vecenv.jit.binding import uncompiled
from vecenv.jit.cuda.env import CudaVectorEnv

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(900)]
MODES = ("NextStep", "SameStep", "Disabled")
NUM_ENVS, NUM_STEPS = 64, 400
LIMITS = {
    "cartpole": {"max_episode_steps": 60},
    "breakout": {"max_episode_steps": 80},
    "pursuit": {"max_cycles": 60},
}


@pytest.fixture(autouse=True)
def lowered_device(monkeypatch):
    from jit.on_device.lowered import LoweredDevice

    return use(monkeypatch, LoweredDevice())


def step_both(cpu, device, rng):
    """Step both by the same random actions; what is expected, and what the device has found."""
    if cpu.has_action_masks:
        masks = cpu.action_masks()
        np.testing.assert_array_equal(device.action_masks(), masks)
        actions = sample_actions(cpu.single_action_space, masks, rng)
    else:
        cpu.action_space.seed(int(rng.integers(2**31)))
        actions = cpu.action_space.sample()
    expected, found = cpu.step(actions), device.step(actions)
    check_step(found, expected)
    return expected, found


@pytest.mark.parametrize("name", MAKERS)
def test_every_bit_is_that_of_the_processor(name):
    """No multiply is fused with an add here, so this holds for floats too."""
    rng = np.random.default_rng(0)
    num_steps = 60 if name.startswith("cage4") else NUM_STEPS
    for mode in MODES:
        options = {"autoreset_mode": mode, "episode_infos": True, **LIMITS.get(name, {})}
        cpu = MAKERS[name](NUM_ENVS, **options)
        with uncompiled():
            device = CudaVectorEnv(MAKERS[name](1, **options), NUM_ENVS)
        obs, _ = cpu.reset(seed=7)
        np.testing.assert_array_equal(device.reset(seed=7)[0].numpy(), obs)
        num_ended = 0
        for _ in range(num_steps):
            expected, found = step_both(cpu, device, rng)
            over = expected[2] | expected[3]
            num_ended += over.sum()
            check_infos(found[4], expected[4])
            if mode == "SameStep":
                np.testing.assert_array_equal(device.final_obs[over], cpu.final_obs[over])
            if mode == "Disabled" and over.any():
                again = {"options": {"reset_mask": over}}
                np.testing.assert_array_equal(device.reset(**again)[0], cpu.reset(**again)[0])
        device.check()
        assert num_ended or name.startswith("cage4")
        check_states(device.state_dict(), cpu.state_dict())
        device.close()
        cpu.close()


def test_every_distribution_has_the_draws_of_the_processor():
    cpu = JitVectorEnv(DRAWN, NUM_ENVS)
    with uncompiled():
        device = CudaVectorEnv(DRAWN, NUM_ENVS)
    check = np.testing.assert_allclose
    check(device.reset(seed=7)[0].numpy(), cpu.reset(seed=7)[0], rtol=1e-12)
    for _ in range(100):
        actions = np.zeros(NUM_ENVS, np.int64)
        check(device.step(actions)[0].numpy(), cpu.step(actions)[0], rtol=1e-12)
    device.check()


@pytest.mark.parametrize("name", RULES_OF_TRACE)
def test_all_recorded_episodes_replay(name):
    assert count_differences(name)[0] == 0


GAMES: dict[str, dict[str, Any]] = {
    "Spread-v0": {},
    "Pursuit-v0": {"max_cycles": 60},
    "Cage4-v0": {"pad": True, "steps": 25},
}


@pytest.mark.parametrize("env_id", GAMES)
def test_agents_are_those_of_the_processor(env_id):
    """Through `make_vec_agents`: rows, who acts, masks, final observations."""
    rng = np.random.default_rng(0)
    for mode in MODES[:2]:
        has_state = mode == "NextStep" and env_id != "Cage4-v0"
        options = {"autoreset_mode": mode, "central_state": has_state, **GAMES[env_id]}
        cpu: Any = make_vec_agents(env_id, 16, **options)
        device: Any = make_vec_agents(env_id, 16, device="cuda", **options)
        np.testing.assert_array_equal(device.reset(seed=7)[0], cpu.reset(seed=7)[0])
        num_ended = 0
        for _ in range(80):
            expected, found = step_both(cpu, device, rng)
            if has_state:
                np.testing.assert_array_equal(device.state(), cpu.state())
            num_ended += check_agents(device, cpu, found, expected).sum()
            assert mode != "SameStep" or "final_obs" in found[4]
        device.check()
        assert num_ended
        check_states(device.state_dict()["games"], cpu.state_dict()["games"])
        device.close()
        cpu.close()
