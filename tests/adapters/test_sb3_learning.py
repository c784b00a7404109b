"""stable-baselines3 trains policies through SB3VecEnv to scores that are known."""

import numpy as np
import pytest

pytest.importorskip("stable_baselines3")
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy

from vecenv.adapters.sb3 import make_sb3_env

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
