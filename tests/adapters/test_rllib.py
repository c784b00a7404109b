"""The recipe of docs/adapters.md: RLlib's env runners step a vector env of ours."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict

from vecenv import make_vec_agents
from vecenv.adapters.pettingzoo import GameView
from vecenv.cage import Cage2VectorEnv

pytest.importorskip("ray.rllib", exc_type=ImportError)
import ray
from ray import tune
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

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


def test_ppo_learns_from_the_agents_of_cage4_by_their_masks():
    pytest.importorskip("pettingzoo")
    from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
    from ray.rllib.examples.rl_modules.classes.action_masking_rlm import ActionMaskingTorchRLModule

    class Masked(ParallelPettingZooEnv):
        """What RLlib's module takes: observations together with masks."""

        def __init__(self, env):
            super().__init__(env)
            self.observation_spaces = {
                name: Dict(
                    action_mask=Box(0, 1, (int(env.action_space(name).n),)),
                    observations=Box(0, 2, env.observation_space(name).shape),
                )
                for name in env.possible_agents
            }
            self.observation_space = Dict(self.observation_spaces)

        def reset(self, **options):
            obs, self.infos = super().reset(**options)
            return self._masked(obs), self.infos

        def step(self, actions):
            assert all(self.infos[name]["action_mask"][one] for name, one in actions.items())
            obs, *rest, self.infos = super().step(actions)
            return self._masked(obs), *rest, self.infos

        def _masked(self, obs):
            masks = {name: self.infos[name]["action_mask"] for name in obs}
            parts = {name: {"action_mask": masks[name], "observations": obs[name]} for name in obs}
            return {
                name: {key: np.asarray(value, np.float32) for key, value in both.items()}
                for name, both in parts.items()
            }

    def make(config):
        options = {"mask_infos": True, "vector_kwargs": {"debug": True}}
        games = make_vec_agents("Cage4-v0", steps=20, autoreset_mode="Disabled", **options)
        return Masked(GameView(games))

    tune.register_env("vecenv-cage4", make)
    names = "zones", "headquarters"
    module = RLModuleSpec(
        module_class=ActionMaskingTorchRLModule,
        model_config=DefaultModelConfig(fcnet_hiddens=[32]),
    )
    # RLlib's check takes any action, and is left out as `step` above refuses masked ones.
    config = PPOConfig().environment("vecenv-cage4", disable_env_checking=True)
    config.env_runners(num_env_runners=0)
    config.learners(num_learners=0)
    config.multi_agent(
        policies=set(names),
        policy_mapping_fn=lambda agent, *_, **__: names[agent == "blue_agent_4"],
    )
    config.training(train_batch_size=95, minibatch_size=38, num_epochs=1)
    config.rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=dict.fromkeys(names, module)))
    algorithm = config.build_algo()
    widths = [algorithm.get_module(name).action_space.n for name in names]
    result = algorithm.train()
    algorithm.stop()
    assert widths == [82, 242]
    assert result["env_runners"]["episode_len_mean"] == 19
    assert set(names) <= result["learners"].keys()
