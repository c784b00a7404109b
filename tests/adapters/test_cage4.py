"""stable-baselines3 trains one policy for all five agents of CAGE Challenge 4."""

import numpy as np
import pytest

from vecenv import make_vec_agents

pytest.importorskip("stable_baselines3")
pytest.importorskip("sb3_contrib")
import sb3_contrib as contrib

from vecenv.adapters.sb3 import SB3VecEnv

pytestmark = pytest.mark.usefixtures("one_torch_thread")

STEPS = 100  # an episode has 99; random actions over the mask get -540, what this trains -260


def make_envs(num_games):
    games = make_vec_agents("Cage4-v0", num_games, pad=True, steps=STEPS, autoreset_mode="SameStep")
    return SB3VecEnv(games)


def make_model(envs):
    return contrib.MaskablePPO(
        "MlpPolicy",
        envs,
        n_steps=STEPS - 1,
        batch_size=1980,
        n_epochs=4,
        learning_rate=1e-3,
        gamma=0.97,
        ent_coef=0.003,
        seed=1,
        device="cpu",
    )


def test_a_maskable_policy_plays_all_agents_by_their_masks():
    envs = make_envs(2)
    model = make_model(envs)
    model.learn(10 * (STEPS - 1))
    actions, _ = model.predict(envs.reset(), action_masks=envs.envs.action_masks())
    assert envs.envs.action_masks()[np.arange(10), actions].all()
    envs.close()
