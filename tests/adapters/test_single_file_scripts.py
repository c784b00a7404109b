"""Scripts of the CleanRL kind: with one import line changed they do the same."""

import sys
import types
from contextlib import closing
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import vecenv
from buffers import RolloutBuffer

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SCRIPT = Path(__file__).parent / "single_file.py"
IMPORT_LINE = "from gymnasium import vector\n"
CHANGED_LINE = "import vecenv as vector\n"


def load(*, changed):
    """The script as a module."""
    text = SCRIPT.read_text()
    assert text.count(IMPORT_LINE) == 1
    if changed:
        text = text.replace(IMPORT_LINE, CHANGED_LINE)
    module = types.ModuleType(f"script_{changed}")
    sys.modules[module.__name__] = module
    exec(compile(text, str(SCRIPT), "exec"), module.__dict__)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_number_is_the_same(asynchronous):
    agents, episodes = [], []
    for changed in (False, True):
        script = load(changed=changed)
        agent, ended = script.main(2, asynchronous)
        agents.append(agent.state_dict())
        episodes.append(ended)
    assert episodes[0] == episodes[1] and len(episodes[0]) > 30
    for name, tensor in agents[0].items():
        assert torch.equal(tensor, agents[1][name])


def test_what_an_older_script_must_change_means_the_same_in_both():
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    returns = 'infos["final_info"]["episode"]["r"][infos["_final_info"]]'
    last = 'infos["final_obs"][i]'
    assert f"`for r in {returns}:`" in page
    assert f"`{last}`" in page
    found = []
    for vector in (gym.vector, vecenv):
        makers = [lambda: gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))] * 3
        mode = vector.AutoresetMode.SAME_STEP
        with closing(vector.SyncVectorEnv(makers, autoreset_mode=mode)) as envs:
            envs.reset(seed=1)
            seen = []
            for step in range(60):
                actions = np.full(3, step // 2 % 2)
                infos = envs.step(actions)[4]
                if "final_info" in infos:
                    ended = np.flatnonzero(infos["_final_info"])
                    seen += [(step, r) for r in eval(returns, {"infos": infos})]
                    seen += [(i, eval(last, {"infos": infos, "i": i}).tolist()) for i in ended]
        found.append(seen)
    assert found[0] == found[1]
    assert len(found[0]) >= 2


def test_the_replaced_buffers_of_a_script_give_its_advantages():
    """The lines of docs/migrating.md, with a critic that gives (N, 1), as CleanRL's."""
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    lines = [
        "rollout.put(t, actions=..., log_probs=..., values=value.flatten())",
        "rollout.compute_advantages(next_value.flatten())",
        "rollout.set_final_values(t, truncations, critic(final_obs).flatten())",
        'final_obs = torch.as_tensor(np.stack(infos["final_obs"][truncations]))',
        "envs.step(actions, out=rollout.slot(t))",
    ]
    assert all(line in page for line in lines)
    put, compute, set_finals, take_finals, step = lines
    put = put.replace("actions=...", "actions=actions").replace("=...", "=torch.zeros(3)")
    torch.manual_seed(1)
    critic = torch.nn.Linear(4, 1)
    limited = [lambda: gym.make("CartPole-v1", max_episode_steps=12)] * 3
    envs = vecenv.SyncVectorEnv(limited, autoreset_mode="SameStep")
    spaces = envs.single_observation_space, envs.single_action_space
    rollout = RolloutBuffer(64, 3, *spaces, autoreset_mode="SameStep", gamma=0.9, gae_lambda=0.8)
    rollout.start(envs.reset(seed=1)[0])
    names = {"rollout": rollout, "envs": envs, "torch": torch, "np": np, "num_cut": 0}
    with torch.no_grad():
        for t in range(64):
            names |= {"t": t, "value": critic(rollout.obs_at(t)), "actions": np.full(3, t // 3 % 2)}
            exec(put, names)
            names["infos"] = eval(step, names)[4]
            names["truncations"] = cut = rollout.slot(t).truncations
            if cut.any():
                exec(take_finals, names)
                names["critic"] = lambda obs: critic(obs) * 0  # as CleanRL: no bootstrap
                exec(set_finals, names)
                names["num_cut"] += cut.sum()
        names["next_value"] = next_value = critic(rollout.obs_at(64)).reshape(1, -1)
        exec(compute, names)
    assert names["num_cut"] > 3
    dones = (rollout.terminations | rollout.truncations).float()
    expected, last, following = torch.zeros(64, 3), torch.zeros(3), next_value[0]
    for t in reversed(range(64)):
        delta = rollout.rewards[t] + 0.9 * following * (1 - dones[t]) - rollout.values[t]
        expected[t] = last = delta + 0.9 * 0.8 * (1 - dones[t]) * last
        following = rollout.values[t]
    torch.testing.assert_close(rollout.advantages, expected)
    batch = next(rollout.minibatches(1))
    assert batch.values.shape == (192,) and batch.obs.shape == (192, 4)
    envs.close()
