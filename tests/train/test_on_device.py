"""Trainers with envs on a device, which is none: the driver in plain Python."""

import numpy as np
import pytest
import torch
from agents.toy_games import WALK
from jit.on_device.host_device import HostDevice, refuse_host, use
from jit.toy_env import PARAMS, TOY

from buffers.core.generator import HostGenerator
from buffers.rollout.minibatches import Sampler, shuffle
from buffers.rollout.storage import RolloutStorage
from vecenv import ActionError, make_vec, make_vec_agents
from vecenv.jit import JitVectorEnv
from vecenv.jit.cuda.env import CudaVectorEnv
from vecenv.learn import Graph, Ranks, load_checkpoint
from vecenv.train import OptionsError, networks, ppo, ppo_agents, trainer
from vecenv.train.options import is_on_device

pytestmark = pytest.mark.usefixtures("one_torch_thread")

ROLLOUT = {"num_steps": 8, "num_minibatches": 2, "compile": "off", "hidden": (8,)}
PPO = {**ROLLOUT, "num_steps": 16, "total_steps": 3 * 4 * 16, "num_envs": 4}
AGENTS = {**ROLLOUT, "num_games": 3, "num_epochs": 2, "total_steps": 10_000}


@pytest.fixture(autouse=True)
def host_device(monkeypatch):
    monkeypatch.setattr(networks, "Tanh", torch.nn.Tanh)  # as on a device, which this one is not
    return use(monkeypatch, HostDevice())


def make_ppo(kind, **changes):
    options = ppo.Options(**{**PPO, **changes})
    envs = kind(TOY, 4, params=PARAMS, max_episode_steps=9, debug=True, autoreset_mode="NextStep")
    torch.manual_seed(1)
    return ppo.PPO(options, envs, ppo.Agent(envs, options))


def make_agents(device, **changes):
    options = ppo_agents.Options(**{**AGENTS, **changes})
    torch.manual_seed(1)
    envs = make_vec_agents(WALK, 3, device=device, max_episode_steps=9, debug=True)
    return ppo_agents.AgentsPPO(options, envs)


class OrderOfTheHost:
    """Shuffles the rows of a rollout on a device as those of the CPU are."""

    def __init__(self, monkeypatch, seed):
        generator, valid = HostGenerator(seed), np.zeros(0, np.int64)
        list_valid = RolloutStorage.list_valid

        def begin(rows):
            nonlocal valid
            list_valid(rows)
            if not rows.is_on_host:
                valid = rows._valid.reshape(-1).nonzero()[:, 0].numpy()

        def shuffled(sampler, mask):
            is_of_rows = len(mask) == sampler._storage._num_rows
            ids = valid if is_of_rows else np.flatnonzero(mask)
            shuffle(ids, generator.words)
            return torch.from_numpy(np.append(ids, np.zeros(len(mask) - len(ids), np.int64)))

        monkeypatch.setattr(RolloutStorage, "list_valid", begin)
        monkeypatch.setattr(Sampler, "_shuffled", shuffled)


def assert_same_update(cpu, device):
    """Let both make an update, with the same random stream."""
    found = []
    for one in (cpu, device):
        torch.manual_seed(2)
        found.append(one.update())
    assert found[0].keys() == found[1].keys()
    for name in found[0]:
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-3, abs=1e-4), name
    assert device.steps == cpu.steps > 0
    np.testing.assert_allclose(device.episodes, cpu.episodes, rtol=1e-6)


# ---- PPO ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recurrent", "graphs"), [("no", False), ("gru", True)])
def test_updates_are_those_of_envs_on_the_cpu(recurrent, graphs, monkeypatch):
    cpu = make_ppo(JitVectorEnv, recurrent=recurrent)
    device = make_ppo(CudaVectorEnv, recurrent=recurrent, graphs=graphs)
    assert not cpu.is_captured
    assert device.is_captured == graphs
    OrderOfTheHost(monkeypatch, device.options.seed)
    for _ in range(3):
        assert_same_update(cpu, device)
        for name in ("actions", "terminations", "obs"):
            one, other = getattr(device.rollout, name), getattr(cpu.rollout, name)
            torch.testing.assert_close(one, other)
    assert device.episodes
    assert isinstance(device.rollout.slot(0).obs, torch.Tensor)
    mask = device.rollout.extras["action_mask"]
    assert mask.any() and not mask.all()  # and they came from the device, step by step


@pytest.mark.parametrize("kind", ["ppo", "ppo, calls", "ppo_agents"])
def test_no_step_and_with_graphs_no_update_goes_through_the_host(kind, monkeypatch):
    make: dict = {"ppo": lambda: make_ppo(CudaVectorEnv, graphs=True, recurrent="gru"),
                  "ppo, calls": lambda: make_ppo(CudaVectorEnv, graphs=False),
                  "ppo_agents": lambda: make_agents("cuda")}  # fmt: skip
    made = make[kind]()
    made.update()
    with monkeypatch.context() as steps:
        refuse = refuse_host(steps, allowed=[])
        steps.setattr(CudaVectorEnv, "_wait", refuse)
        steps.setattr(torch, "from_numpy", refuse)
        made.collect()
        if kind != "ppo, calls":
            made.compute_advantages()
            made.learn()
            made.rollout.advance()


def test_what_is_wrong_on_the_device_ends_the_update():
    made = make_ppo(CudaVectorEnv, graphs=True)
    made.update()
    with torch.no_grad():
        made.agent.critic[0].weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="were not finite"):
        made.update()
    made = make_ppo(CudaVectorEnv, graphs=True)
    made.agent.to_env = lambda actions: actions + 7
    with pytest.raises(ActionError, match="out of bounds"):
        made.update()


def test_devices_of_envs_follow_the_networks():
    def is_there(env_id, backend, device):
        options = ppo.Options(env_id, backend=backend, device=device)
        return is_on_device(ppo.PPO.make_envs(options, 2, on_device=True))

    assert not is_there("JitCartPole-v1", "auto", "cpu")
    with pytest.raises(OptionsError, match="the envs are on cpu"):  # as the stand-in's are
        is_there("JitCartPole-v1", "auto", "cuda")
    assert is_there("JitCartPole-v1", "cuda", "cpu")
    assert not is_there("JitCartPole-v1", "jit", "cuda")
    assert not is_there("CartPole-v1", "sync", "cuda")
    assert not is_there("CartPole-v1", "auto", "cuda")  # not compiled


@pytest.mark.parametrize("algorithm", ["ppo", "ppo_agents"])
def test_a_run_trains_on_the_device_evaluates_on_the_cpu_and_goes_on(
    algorithm, tmp_path, monkeypatch
):
    made = []
    monkeypatch.setattr(
        trainer, "make_vec", lambda *a, **k: made.append(make_vec(*a, **k)) or made[-1]
    )
    module, given, more = {
        "ppo": (ppo, {**ROLLOUT, "env_id": "JitCartPole-v1", "num_envs": 2}, 16),
        "ppo_agents": (ppo_agents, {**AGENTS, "env": "Spread-v0"}, 72),
    }[algorithm]
    given |= {"backend": "cuda", "eval_episodes": 2, "save": tmp_path, "total_steps": 3 * more}
    options = module.Options(**given)
    if algorithm == "ppo_agents":
        options.env_kwargs = {"max_cycles": 9}
    assert len(module.main(options).returns) == 2
    if algorithm == "ppo":
        assert [type(envs) is CudaVectorEnv for envs in made] == [True, False, False]
    state = load_checkpoint(tmp_path / "checkpoint/last.pt")["state"]
    options.resume, options.total_steps = True, 4 * more
    module.main(options)
    resumed = load_checkpoint(tmp_path / "checkpoint/last.pt")["state"]
    assert resumed["num_updates"] > state["num_updates"] > 0
    assert resumed["steps"] > state["steps"]


# ---- several agents -----------------------------------------------------------------------------


def test_games_on_a_device_give_the_rollouts_of_the_cpu():
    """With one minibatch of all rows, in whatever order, updates are nearly those, too."""
    cpu, device = (make_agents(where, num_minibatches=1) for where in ("cpu", "cuda"))
    assert device.is_captured and not cpu.is_captured
    for _ in range(3):
        assert_same_update(cpu, device)
        torch.testing.assert_close(device.rollout.actions, cpu.rollout.actions)
        assert device.rollout.terminations.equal(cpu.rollout.terminations)
    assert cpu.episodes


def test_of_several_ranks_all_but_the_sums_is_captured(monkeypatch):
    """Their updates are those of envs on the CPU, too."""
    monkeypatch.setattr(ppo.PPO, "ranks", Twice())
    cpu, device = make_ppo(JitVectorEnv), make_ppo(CudaVectorEnv, graphs=True)
    names = ("collect", "compute_advantages", "learn")
    assert [isinstance(getattr(device, name), Graph) for name in names] == [True, True, False]
    assert not any(isinstance(getattr(cpu, name), Graph) for name in names)
    OrderOfTheHost(monkeypatch, device.options.seed)
    for _ in range(3):
        assert_same_update(cpu, device)


class Twice(Ranks):
    """Two ranks, of which the other does the same as this one."""

    def __init__(self):
        super().__init__()
        self.size = 2

    def sum_(self, tensor):
        return tensor.mul_(2)

    def gather(self, value):
        return [value, value]
