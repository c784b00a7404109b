"""FrozenLake, CliffWalking and Taxi against Gymnasium's, with the same draws."""

import gymnasium as gym
import numpy as np
import pytest
from jit.envs.draws import Draws, disabled, feed

from vecenv.jit.envs.tables import FrozenLakeVectorEnv, TaxiVectorEnv

OWN_MAP = ["SFFFF", "FHSFG", "FFFHF"]  # two starts, not square
CASES = [
    ("FrozenLake-v1", {}),
    ("FrozenLake-v1", {"is_slippery": False}),
    ("FrozenLake-v1", {"desc": OWN_MAP}),
    ("FrozenLake8x8-v1", {}),
    ("CliffWalking-v1", {}),
    ("CliffWalking-v1", {"is_slippery": True}),
    ("Taxi-v4", {}),
    ("Taxi-v4", {"is_rainy": True}),
]
TAXI = pytest.mark.skipif("Taxi-v4" not in gym.registry, reason="this Gymnasium has an older Taxi")
CLIFF = pytest.mark.skipif(
    "CliffWalking-v1" not in gym.registry, reason="this Gymnasium has an older CliffWalking"
)
MARKS = {"CliffWalking-v1": CLIFF, "Taxi-v4": TAXI}
CASES = [pytest.param(*case, marks=MARKS.get(case[0], ())) for case in CASES]


def check_equal(name, options, num_envs, num_steps, debug):
    """Step both with the same actions and draws; return the number of episodes."""
    envs = disabled(f"Jit{name}", num_envs, debug, **options)
    references = [gym.make(name, **options) for _ in range(num_envs)]
    draws, rng = [Draws() for _ in references], np.random.default_rng(0)
    over, num_episodes = np.ones(num_envs, np.bool_), 0

    def start():
        feed(envs, draws, 2)
        obs, _ = envs.reset(options={"reset_mask": over})
        for i in np.flatnonzero(over):
            references[i].unwrapped.np_random = draws[i]
            assert obs[i] == references[i].reset()[0]
        return obs

    obs = start()
    for _ in range(num_steps):
        masks = envs.action_masks() if envs.has_action_masks else None
        actions = rng.integers(0, envs.single_action_space.n, num_envs)
        if masks is not None:  # mostly what changes something
            useful = np.array([rng.choice(np.flatnonzero(mask)) for mask in masks])
            actions = np.where(rng.random(num_envs) < 0.8, useful, actions)
        feed(envs, draws, 2)
        obs, rewards, terminations, truncations, _ = envs.step(actions)
        for i, reference in enumerate(references):
            *expected, infos = reference.step(int(actions[i]))
            assert [obs[i], rewards[i], terminations[i], truncations[i]] == expected
            if masks is not None:
                np.testing.assert_array_equal(envs.action_masks()[i], infos["action_mask"])
        over = terminations | truncations
        num_episodes += over.sum()
        if over.any():
            obs = start()
    return num_episodes


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_few_steps_equal_gymnasiums(name, options):
    check_equal(name, options, num_envs=2, num_steps=60, debug=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_hundred_thousand_steps_equal_gymnasiums(name, options):
    count = check_equal(name, options, num_envs=20, num_steps=5_000, debug=False)
    assert count > 0 or name == "CliffWalking-v1"


def test_what_the_table_does_not_say_is_refused():
    with pytest.raises(ValueError, match="has no fickle_passenger"):
        TaxiVectorEnv(2, fickle_passenger=True)
    envs = FrozenLakeVectorEnv(2, debug=True)
    envs.reset(seed=0)
    state = envs.state_dict()
    state["states"]["cell"] = 16
    with pytest.raises(ValueError, match="cells outside of 0 to 15"):
        envs.load_state_dict(state)
    with pytest.raises(KeyError, match="9x9"):
        FrozenLakeVectorEnv(2, map_name="9x9")
    with pytest.raises(TypeError, match="slipery"):
        FrozenLakeVectorEnv(2, slipery=False)
