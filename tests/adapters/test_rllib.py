"""The recipe of docs/adapters.md: RLlib's env runners step a vector env of ours."""

import gymnasium as gym
import pytest

from vecenv.cage import Cage2VectorEnv

pytest.importorskip("ray.rllib", exc_type=ImportError)
import ray
from ray import tune
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore"),  # Ray has many
    pytest.mark.timeout(1200),
]


def make_network(config):
    if "num_envs" in config:
        return Cage2VectorEnv(config["num_envs"], episode_length=30)
    return gym.make("vecenv:Cage2-v0", episode_length=30)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.shutdown()  # a snippet of the docs may have started one
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    tune.register_env("vecenv-network", make_network)
    yield
    ray.shutdown()


def build(env, num_envs, **training):
    config = PPOConfig().environment(env)
    config.env_runners(
        num_env_runners=0,
        num_envs_per_env_runner=num_envs,
        gym_env_vectorize_mode="vector_entry_point",
    )
    config.learners(num_learners=0)
    config.training(**training)
    config.rl_module(
        model_config=DefaultModelConfig(
            fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False
        )
    )
    config.debugging(seed=1)
    return config.build_algo()


def test_env_runners_hold_our_vector_env():
    algorithm = build("vecenv-network", 8, train_batch_size=480, minibatch_size=240, num_epochs=1)
    assert isinstance(algorithm.env_runner.env.unwrapped, Cage2VectorEnv)
    result = algorithm.train()["env_runners"]
    # 16 episodes of 30 steps: RLlib knows that the step which resets is none.
    assert result["episode_len_mean"] == 30
    assert result["num_env_steps_sampled"] >= 480
    assert -400 < result["episode_return_mean"] < 0
    algorithm.stop()
