"""What of a trainer can be replaced, by functions and by subclasses, and what it is given."""

import pytest
import torch

from vecenv.learn import EvaluationResult
from vecenv.train import Trainer, dqn, ppo, sac

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SMALL = {"num_envs": 4, "total_steps": 300, "eval_episodes": 2, "compile": "off"}
ROLLOUT = {**SMALL, "num_steps": 16, "num_minibatches": 2}


def test_functions_take_the_place_of_network_loss_collecting_and_evaluation(tmp_path):
    calls = {"agents": 0, "losses": 0, "collected": 0}

    class Agent(ppo.Agent):
        def __init__(self, envs, options):
            super().__init__(envs, options)
            calls["agents"] += 1

    def loss(agent, batch, options):
        calls["losses"] += 1
        assert type(agent) is Agent and options.num_steps == 16
        value, scalars = ppo.ppo_loss(agent, batch, options)
        return value, scalars | {"mine": value.detach() * 0 + 7}

    def collect(trainer):
        calls["collected"] += 1
        ppo.PPO.collect(trainer)
        trainer.rollout.rewards.fill_(2.0)

    def evaluate(trainer, episodes, seed=None, *, sample=False):
        return EvaluationResult(float(episodes), 0.0, 0.0, (1.0,), (1,))

    own = ppo.PPO.replacing(make_agent=Agent, loss=loss, collect=collect, evaluate=evaluate)
    assert own.main(ppo.Options(**ROLLOUT, save=tmp_path)).mean == 2.0
    assert calls["agents"] == 1 and calls["collected"] == 4 and calls["losses"] >= 4 * 8
    assert '"losses/mine": 7.0' in (tmp_path / "metrics.jsonl").read_text()
    assert ppo.PPO.loss is ppo.ppo_loss and ppo.PPO.make_agent is ppo.Agent, "others stay"
    envs, act = own.load_policy(ppo.Options(**ROLLOUT, save=tmp_path), 3)
    assert calls["agents"] == 2
    obs = torch.from_numpy(envs.reset(seed=1)[0])
    assert act(obs, torch.ones(3, dtype=torch.bool)).shape == (3,)
    envs.close()


def test_callbacks_see_updates_and_episodes_and_stop_a_training(tmp_path, capsys):
    updates, returns = [], []

    class Own(ppo.PPO):
        def on_update(self, scalars):
            updates.append((self.steps, float(scalars["losses/entropy"])))

        def on_episode(self, episode_return):
            returns.append(episode_return)
            return len(returns) == 5

    Own.main(ppo.Options(**{**ROLLOUT, "total_steps": 5_000}, save=tmp_path))
    assert 5 <= len(returns) < 40
    assert [steps for steps, _ in updates] == sorted({steps for steps, _ in updates})
    out = capsys.readouterr().out
    assert f"stopped after {updates[-1][0]} steps; go on with" in out
    assert "return" in out and "(drawn as in the training: return" in out
    assert "sampled" in (tmp_path / "evaluation.json").read_text()


@pytest.mark.parametrize(
    ("module", "trainer", "env_id", "name"),
    [(sac, sac.SAC, "Pendulum-v1", "sac_loss"), (dqn, dqn.DQN, "CartPole-v1", "dqn_loss")],
    ids=["sac", "dqn"],
)
def test_losses_of_replay_are_replaced(module, trainer, env_id, name, tmp_path):
    found = []

    def loss(agent, batch, options):
        found.append(len(batch.rewards))
        value, scalars = getattr(module, name)(agent, batch, options)
        return 2 * value, scalars

    options = module.Options(env_id, backend="sync", **SMALL, learning_starts=100, batch_size=8,
                             hidden=(8,), save=tmp_path)  # fmt: skip
    trainer.replacing(loss=loss).main(options)
    assert set(found) == {8}


def test_what_a_trainer_does_not_have_is_refused():
    with pytest.raises(ValueError, match="PPO has no make_agnet to be replaced; expected make_age"):
        ppo.PPO.replacing(make_agnet=ppo.Agent)
    assert issubclass(ppo.PPO, Trainer)
