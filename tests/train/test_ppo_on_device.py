"""vecenv.train.ppo with envs on a device, which is none: the driver in plain Python."""

import numpy as np
import pytest
import torch
from choices import fast_are
from gymnasium.spaces import Box
from jit.on_device.host_device import HostDevice, refuse_host, use
from jit.toy_env import PARAMS, TOY

from buffers.core.generator import HostGenerator
from buffers.rollout.rows import RolloutRows, shuffle
from vecenv import ActionError, make_vec
from vecenv.jit import JitVectorEnv
from vecenv.jit.cuda.env import CudaVectorEnv
from vecenv.learn import Graph, Ranks, load_checkpoint
from vecenv.train import OptionsError, networks, ppo, trainer
from vecenv.train.options import is_on_device

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SMALL = {"num_steps": 16, "total_steps": 3 * 4 * 16, "compile": "off", "hidden": (8,)}


@pytest.fixture(autouse=True)
def host_device(monkeypatch):
    return use(monkeypatch, HostDevice())


def make_trainer(kind, mode, **changes):
    options = ppo.Options(**{**SMALL, "num_envs": 4, "num_minibatches": 2, **changes})
    envs = kind(TOY, 4, params=PARAMS, max_episode_steps=9, debug=True, autoreset_mode=mode)
    torch.manual_seed(1)
    agent = ppo.Agent(envs, options)
    return ppo.PPO(options, envs, agent)


class OrderOfTheHost:
    """Shuffles the rows of a rollout on a device as those of the CPU are."""

    def __init__(self, monkeypatch, seed):
        generator, valid = HostGenerator(seed), np.zeros(0, np.int64)
        list_valid = RolloutRows.list_valid

        def begin(rows):
            nonlocal valid
            list_valid(rows)
            if not rows.is_on_host:
                valid = rows._valid.reshape(-1).nonzero()[:, 0].numpy()

        def shuffled(rows, mask):
            ids = valid if len(mask) == rows._num_rows else np.flatnonzero(mask)
            shuffle(ids, generator.words)
            return torch.from_numpy(np.append(ids, np.zeros(len(mask) - len(ids), np.int64)))

        monkeypatch.setattr(RolloutRows, "list_valid", begin)
        monkeypatch.setattr(RolloutRows, "_shuffled", shuffled)


def assert_same_update(cpu, device):
    """Let both make an update, with the same random stream."""
    torch.manual_seed(2)
    expected = cpu.update()
    torch.manual_seed(2)
    found = device.update()
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name
    assert device.steps == cpu.steps > 0


CASES = fast_are(
    [("no", "off"), ("gru", "on")],
    [("no", "off"), ("no", "on"), ("gru", "off"), ("gru", "on"), ("lstm", "auto")],
)


@pytest.mark.parametrize(("recurrent", "graphs"), CASES)
def test_updates_are_those_of_envs_on_the_cpu(recurrent, graphs, monkeypatch):
    cpu, device = (
        make_trainer(kind, "NextStep", recurrent=recurrent, graphs=wish)
        for kind, wish in ((JitVectorEnv, "auto"), (CudaVectorEnv, graphs))
    )
    assert not cpu.is_captured
    assert device.is_captured == (graphs != "off")
    OrderOfTheHost(monkeypatch, device.options.seed)
    for _ in range(3):
        assert_same_update(cpu, device)
        np.testing.assert_allclose(device.episodes, cpu.episodes)
        for name in ("actions", "rewards", "obs"):
            one, other = getattr(device.rollout, name), getattr(cpu.rollout, name)
            torch.testing.assert_close(one, other)
    assert device.episodes
    assert isinstance(device.rollout.slot(0).obs, torch.Tensor)
    mask = device.rollout.extras["action_mask"]
    assert mask.any() and not mask.all()  # and they came from the device, step by step


class Twice(Ranks):
    """Two ranks, of which the other does the same as this one."""

    def __init__(self):
        super().__init__()
        self.size = 2

    def sum_(self, tensor):
        return tensor.mul_(2)

    def gather(self, value):
        return [value, value]


def test_of_several_ranks_all_but_the_sums_is_captured(monkeypatch):
    """Their updates are those of envs on the CPU, too."""
    monkeypatch.setattr(ppo, "Ranks", Twice)
    cpu, device = (
        make_trainer(kind, "NextStep", graphs=wish, num_minibatches=2)
        for kind, wish in ((JitVectorEnv, "auto"), (CudaVectorEnv, "on"))
    )
    names = ("collect", "compute_advantages", "learn_once")
    assert [isinstance(getattr(device, name), Graph) for name in names] == [True, True, False]
    assert not any(isinstance(getattr(cpu, name), Graph) for name in names)
    OrderOfTheHost(monkeypatch, device.options.seed)
    for _ in range(3):
        assert_same_update(cpu, device)


@pytest.mark.parametrize(
    ("graphs", "recurrent"),
    fast_are([("on", "gru")], [("on", "no"), ("on", "gru"), ("off", "no")]),
)
def test_no_step_goes_through_the_host(graphs, recurrent, monkeypatch):
    trainer = make_trainer(CudaVectorEnv, "NextStep", graphs=graphs, recurrent=recurrent)
    trainer.update()

    with monkeypatch.context() as steps:
        refuse = refuse_host(steps)
        steps.setattr(torch, "from_numpy", refuse)
        steps.setattr(CudaVectorEnv, "_wait", refuse)
        steps.setattr(networks.Tanh, "forward", lambda self, x: x.tanh())  # on a processor NumPy's
        if graphs == "on":  # and nothing else of an update
            trainer.collect()
            trainer.compute_advantages()
            trainer.learn()
            trainer.rollout.advance()
            return
        trainer.collect()


def test_graphs_are_refused_in_a_sentence_where_there_can_be_none():
    for kind, changes, told in ((JitVectorEnv, {}, "the envs are not on the device"),):
        with pytest.raises(OptionsError, match=f"--graphs on: {told}.*; leave it out"):
            make_trainer(kind, "NextStep", graphs="on", **changes)


def test_what_is_wrong_on_the_device_ends_the_update():
    trainer = make_trainer(CudaVectorEnv, "NextStep", graphs="on")
    trainer.update()
    with torch.no_grad():
        trainer.agent.critic[0].weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="were not finite"):
        trainer.update()
    trainer = make_trainer(CudaVectorEnv, "NextStep", graphs="on")
    trainer.agent.to_env = lambda actions: actions + 7
    with pytest.raises(ActionError, match="out of bounds"):
        trainer.update()


@pytest.mark.parametrize(
    ("space", "given"),
    [
        (Box(np.float32([-1, -2]), np.float32([1, 2])), [[-3.0, -1.5], [0.5, 3.0]]),
        (TOY.action_space, [1, 0]),
    ],
)
def test_actions_become_those_of_the_space_as_on_the_cpu(space, given):
    envs = CudaVectorEnv(TOY, 2, params=PARAMS, debug=True)
    envs.single_action_space = space
    agent = ppo.Agent(envs, ppo.Options(masks=False))
    actions = np.array(given, space.dtype)
    found = agent.to_env(torch.from_numpy(actions))
    assert isinstance(found, torch.Tensor)
    np.testing.assert_array_equal(found, agent.to_env(actions))


def test_a_run_trains_on_the_device_evaluates_on_the_cpu_and_goes_on(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        trainer, "make_vec", lambda *a, **k: made.append(make_vec(*a, **k)) or made[-1]
    )
    options = ppo.Options(
        "JitCartPole-v1", backend="cuda", num_envs=2, num_steps=8, total_steps=32, eval_episodes=2,
        num_minibatches=2, compile="off", save=tmp_path, hidden=(4,),
    )  # fmt: skip
    result = ppo.main(options)
    assert [type(envs) is CudaVectorEnv for envs in made] == [True, False, False]
    assert len(result.returns) == 2
    options.resume, options.total_steps = True, 48
    before = steps_of(tmp_path)
    ppo.main(options)
    assert steps_of(tmp_path) > before > 16


def steps_of(folder):
    return load_checkpoint(folder / "checkpoint/last.pt")["state"]["steps"]


def test_devices_of_envs_follow_the_networks():
    options = ppo.Options("JitCartPole-v1", backend="auto")
    assert not is_on_device(ppo.PPO.make_envs(options, 2, on_device=True))
    options.device = "cuda"
    with pytest.raises(OptionsError, match="the envs are on cpu"):  # as the stand-in's are
        ppo.PPO.make_envs(options, 2, on_device=True)
    options.backend, options.device = "cuda", "cpu"
    assert is_on_device(ppo.PPO.make_envs(options, 2, on_device=True))
    options.device = "cuda"
    for env_id, backend in (("JitCartPole-v1", "jit"), ("CartPole-v1", "sync")):
        options.env_id, options.backend = env_id, backend
        assert not is_on_device(ppo.PPO.make_envs(options, 2, on_device=True))
    options.env_id, options.backend = "CartPole-v1", "auto"  # not compiled
    assert not is_on_device(ppo.PPO.make_envs(options, 2, on_device=True))
