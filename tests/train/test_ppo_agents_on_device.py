"""vecenv.train.ppo_agents with games on a device, which is none: the driver in plain Python."""

import numpy as np
import pytest
import torch
from agents.toy_games import WALK
from jit.on_device.host_device import HostDevice, refuse_host, use

from vecenv import make_vec_agents
from vecenv.agents import AgentRowsVecEnv
from vecenv.learn import load_checkpoint
from vecenv.train import ppo_agents as example
from vecenv.train.options import is_on_device

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SMALL = {"num_games": 3, "num_steps": 8, "num_epochs": 2, "num_minibatches": 2, "hidden": (8,)}


@pytest.fixture(autouse=True)
def host_device(monkeypatch):
    return use(monkeypatch, HostDevice())


def trainer_for(kernels, device, **changes):
    options = example.Options(**{**SMALL, "compile": "off", "total_steps": 10_000, **changes})
    torch.manual_seed(1)
    envs = make_vec_agents(kernels, 3, device=device, max_episode_steps=9, debug=True)
    envs = envs.agents if isinstance(envs, AgentRowsVecEnv) else envs
    return example.AgentsPPO(options, envs)


def test_games_on_a_device_give_the_rollouts_of_the_cpu():
    """With one minibatch of all rows, in whatever order, updates are nearly those, too."""
    cpu, device = (trainer_for(WALK, where, num_minibatches=1) for where in ("cpu", "cuda"))
    assert device.is_captured and not cpu.is_captured
    for _ in range(3):
        found = []
        for trainer in (cpu, device):
            torch.manual_seed(2)
            found.append(trainer.update())
        expected, found = found
        assert device.steps == cpu.steps
        np.testing.assert_allclose(device.episodes, cpu.episodes, rtol=1e-6)
        assert found.keys() == expected.keys()
        for name in expected:
            assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name
        for name, learner in cpu.learners.items():
            other = device.learners[name].rollout
            torch.testing.assert_close(other.actions, learner.rollout.actions)
            torch.testing.assert_close(other.rewards, learner.rollout.rewards)
    assert cpu.episodes


def test_nothing_of_an_update_goes_through_the_host(monkeypatch):
    trainer = trainer_for(WALK, "cuda")
    trainer.update()

    with monkeypatch.context() as patch:
        refuse_host(patch)
        trainer.collect()
        for learner in trainer.learners.values():
            learner.compute_advantages()
            learner.learn_once()
            learner.rollout.advance()


def test_games_are_on_the_device_for_the_training_alone():
    options = example.Options(env="Spread-v0", backend="cuda", env_kwargs={"max_cycles": 9})
    envs = example.AgentsPPO.make_envs(options, 2, on_device=True)
    assert all(map(is_on_device, envs.groups.values()))
    assert options.env_kwargs == {"max_cycles": 9}
    assert not any(map(is_on_device, example.AgentsPPO.make_envs(options, 2).groups.values()))


def test_a_run_trains_on_the_device_evaluates_on_the_cpu_and_goes_on(tmp_path):
    options = example.Options(
        env="Spread-v0", backend="cuda", total_steps=3 * 3 * 8 * 2, eval_episodes=2, compile="off",
        save=tmp_path, env_kwargs={"max_cycles": 9}, **SMALL,
    )  # fmt: skip
    found = example.main(options)
    assert all(len(result.returns) == 2 for result in found.values())
    options.resume, options.total_steps = True, 3 * 3 * 8 * 3
    example.main(options)
    state = load_checkpoint(tmp_path / "checkpoint/last.pt")["state"]
    assert state["num_updates"] == 3
    options.critic, options.resume, options.overwrite = "central", False, True
    example.main(options)
