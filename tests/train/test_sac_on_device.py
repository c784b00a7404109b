"""vecenv.train.sac with envs on a device, which is none: the driver in plain Python."""

from typing import Any

import numpy as np
import pytest
import torch
from jit.on_device.host_device import HostDevice, refuse_host, use

from buffers import BufferMisuseError, SharedReplayBuffer, TransitionWriter
from vecenv import make_vec
from vecenv.jit.cuda.env import CudaVectorEnv
from vecenv.learn import Run, load_checkpoint
from vecenv.train import OptionsError, replay, sac

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SMALL = {
    "env_id": "JitPendulum-v1", "num_envs": 3, "total_steps": 90, "learning_starts": 30,
    "batch_size": 16, "hidden": (12, 9), "capacity": 1000, "eval_episodes": 3, "compile": "off",
    "env_kwargs": {"max_episode_steps": 7},
}  # fmt: skip


@pytest.fixture(autouse=True)
def host_device(monkeypatch):
    return use(monkeypatch, HostDevice())


def trainer_for(backend, **changes):
    options = sac.Options(**{**SMALL, "backend": backend, **changes})
    torch.manual_seed(1)
    trainer = sac.SAC(options, sac.SAC.make_envs(options, options.num_envs, on_device=True))
    # On the CPU a buffer looks at values; here it is to be one on a device.
    trainer.buffer._takes_tensors = trainer.buffer._there is not None
    trainer.start()
    return trainer


@pytest.fixture
def staged(monkeypatch):
    """Let buffers keep what they hold as on a device."""

    def made(*args, make=SharedReplayBuffer, **options):
        return make(*args, staged=True, **options)

    monkeypatch.setattr(replay, "SharedReplayBuffer", made)


@pytest.mark.parametrize("n_step", [1, 3])
def test_steps_and_updates_are_those_of_envs_on_the_cpu(staged, n_step):
    more: Any = {"graphs": "on", "n_step": n_step}
    cpu, device = (trainer_for(backend, **more) for backend in ("jit", "cuda"))
    assert isinstance(device.envs, CudaVectorEnv)
    for _ in range(25):
        for trainer in (cpu, device):
            trainer.returns_seen = trainer.collect()
            if trainer.steps > 30:
                trainer.scalars = trainer.learn()
        np.testing.assert_allclose(device.obs, cpu.obs, rtol=1e-6)
    assert not device.returns_seen
    assert device.ended() == pytest.approx(cpu.envs.last_returns, rel=1e-6)
    assert device.ended() == []
    for name in cpu.scalars:
        assert device.scalars[name].item() == pytest.approx(cpu.scalars[name].item(), rel=1e-4)
    one, other = (t.buffer.get(t.buffer.order()) for t in (cpu, device))
    for name in ("obs", "next_obs", "actions", "rewards", "terminations", "truncations"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name))
    assert one.truncations.any()


def test_neither_step_nor_update_goes_through_the_host(staged, monkeypatch):
    trainer = trainer_for("cuda", graphs="on")
    for _ in range(12):
        trainer.collect()
    trainer.learn()

    with monkeypatch.context() as patch:
        refuse = refuse_host(patch, allowed=["numpy"])
        patch.setattr(CudaVectorEnv, "_wait", refuse)
        for _ in range(3):
            trainer.collect()
            trainer.learn()


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_graph_changes_no_number(prioritized):
    found = []
    for graphs in ("off", "on"):
        trainer = trainer_for("jit", graphs=graphs, prioritized=prioritized)
        for _ in range(20):
            trainer.collect()
            if trainer.steps > 30:
                trainer.learn()
        found.append(torch.cat([p.detach().flatten() for p in trainer.agent.parameters()]))
    torch.testing.assert_close(*found)


def test_losses_that_are_no_numbers_end_a_run_that_waits_for_nothing(tmp_path):
    trainer = trainer_for("jit", graphs="on", save=tmp_path)
    while trainer.steps < 40:
        trainer.collect()
    with torch.no_grad():
        next(trainer.agent.critics.parameters()).fill_(torch.nan)
    trainer.learn()
    with pytest.raises(FloatingPointError, match="of 1 calls were not finite"):
        trainer.check()
    trainer.learn()
    message = "of 1 calls were not finite"
    with pytest.raises(FloatingPointError, match=message), Run(tmp_path, {}) as run:
        trainer.save(run)
    assert not list((tmp_path / "checkpoint").iterdir())


def test_a_run_trains_on_the_device_evaluates_on_the_cpu_and_goes_on(tmp_path):
    options = sac.Options(**SMALL, backend="cuda", save=tmp_path)
    result = sac.main(options)
    assert len(result.returns) == 3
    options.resume, options.total_steps = True, 120
    sac.main(options)
    state = load_checkpoint(tmp_path / "checkpoint/last.pt")["state"]
    assert (state["steps"], state["num_updates"]) == (120, 90)
    options.first_ready = True
    with pytest.raises(OptionsError, match="first-ready is for envs in processes"):
        sac.SAC(options, sac.SAC.make_envs(options, options.num_envs, on_device=True))


def test_a_writer_goes_from_the_device_to_the_host_and_back():
    envs, plain = (make_vec("JitPendulum-v1", 3, backend=b, autoreset_mode="SameStep",
                            max_episode_steps=5) for b in ("cuda", "jit"))  # fmt: skip
    spaces = plain.single_observation_space, plain.single_action_space
    buffers = [
        SharedReplayBuffer(200, *spaces, num_envs=3, seed=0, staged=s) for s in (True, False)
    ]
    buffers[0]._takes_tensors = True
    writers = [TransitionWriter(e, b) for e, b in zip((envs, plain), buffers, strict=True)]
    for env, writer in zip((envs, plain), writers, strict=True):
        writer.reset(env.reset(seed=0)[0])
    assert writers[0]._there is not None
    rng = np.random.default_rng(0)
    for t in range(20):
        actions = rng.uniform(-2, 2, (3, 1)).astype(np.float32)
        result = envs.step(torch.from_numpy(actions))
        if t == 7:  # a mask of rows that acted, for which the host is needed
            writers[0].step(actions, *result, valid=np.ones(3, np.bool_))
            assert writers[0]._there is None
        else:
            writers[0].step(torch.from_numpy(actions), *result)
        writers[1].step(actions, *plain.step(actions))
        if t == 12:
            for env, writer in zip((envs, plain), writers, strict=True):
                writer.reset(env.observe())
            assert writers[0]._there is not None
    assert writers[0].num_transitions == writers[1].num_transitions == 60
    one, other = (buffer.get(buffer.order()) for buffer in buffers)
    for name in ("obs", "next_obs", "actions", "rewards", "truncations"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-5, atol=1e-6)
    with pytest.raises(BufferMisuseError, match="actions has shape"):
        writers[0].step(torch.zeros(2, 1), *result)
