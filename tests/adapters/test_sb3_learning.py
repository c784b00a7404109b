"""stable-baselines3 trains policies through SB3VecEnv to scores that are known."""

import numpy as np
import pytest

from vecenv.adapters.sb3 import make_sb3_env

pytest.importorskip("stable_baselines3")
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.evaluation import evaluate_policy

pytestmark = pytest.mark.usefixtures("one_torch_thread")

# Against B_line for 30 steps a defender who does nothing gets -218, `react-restore` -31, and what
# `make demo` trains -3.8 (docs/ppo.md).


def score(model, envs, episodes=50):
    envs.seed(123)
    return evaluate_policy(model, envs, episodes)[0]


def logged_return(model):
    return np.mean([episode["r"] for episode in model.ep_info_buffer])


@pytest.mark.learn
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_ppo_balances_the_pole(backend):
    envs = make_sb3_env("CartPole-v1", 8, backend=backend)
    model = PPO(
        "MlpPolicy",
        envs,
        n_steps=32,
        batch_size=256,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.8,
        learning_rate=lambda left: 1e-3 * left,
        clip_range=lambda left: 0.2 * left,
        seed=1,
        device="cpu",
    )
    model.learn(100_000)
    assert logged_return(model) > 300
    assert score(model, envs) >= 475
    envs.close()


def cage_envs(num_envs):
    return make_sb3_env("vecenv:Cage2-v0", num_envs, episode_length=30)


@pytest.mark.learn
@pytest.mark.timeout(400)
def test_dqn_defends_the_network():
    envs = cage_envs(32)
    model = DQN(
        "MlpPolicy",
        envs,
        learning_rate=1e-3,
        batch_size=256,
        buffer_size=200_000,
        learning_starts=5000,
        target_update_interval=2000,
        train_freq=2,
        gradient_steps=2,
        gamma=0.95,
        exploration_fraction=0.3,
        exploration_final_eps=0.02,
        seed=1,
        device="cpu",
    )
    model.learn(300_000)
    assert score(model, envs, 200) > -40
    envs.close()
