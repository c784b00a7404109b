"""Step for step, SyncVectorEnv returns what Gymnasium's class of that name returns."""

import functools

import gymnasium as gym
import numpy as np
import pytest
from choices import fast_are, in_turn, product
from envs import MODES, SPACES, CounterEnv, RandomEnv, counters, mode_id
from equality import assert_same
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector import SyncVectorEnv as GymnasiumSyncVectorEnv

from vecenv import SyncVectorEnv

REGISTERED = {
    "CartPole-v1": {},
    "MountainCar-v0": {},
    "MountainCarContinuous-v0": {},
    "Pendulum-v1": {},
    "Acrobot-v1": {},
    "Blackjack-v1": {},
    "FrozenLake-v1": {},
    "FrozenLake8x8-v1": {"is_slippery": False},
    "CliffWalking-v1": {},
    "CliffWalkingSlippery-v1": {},
    "Taxi-v4": {"is_rainy": True},
}
KINDS = ("box", "discrete", "multi-discrete", "multi-binary", "dict", "tuple")
AVAILABLE = [env_id for env_id in REGISTERED if env_id in gym.registry]


def both(env_fns, **kwargs):
    return SyncVectorEnv(env_fns, **kwargs), GymnasiumSyncVectorEnv(env_fns, **kwargs)


def assert_same_run(ours, theirs, num_steps, seed, action_seed=0):
    """Compare all that is returned; with autoreset disabled, ended envs are reset by mask."""
    theirs.action_space.seed(action_seed)
    assert_same(ours.reset(seed=seed), theirs.reset(seed=seed), "reset")
    num_ends = 0
    for step in range(num_steps):
        actions = theirs.action_space.sample()
        result, expected = ours.step(actions), theirs.step(actions)
        assert_same(result, expected, f"step {step}")
        over = expected[2] | expected[3]
        num_ends += over.sum()
        if ours.metadata["autoreset_mode"] is AutoresetMode.DISABLED and over.any():
            restarts = [envs.reset(options={"reset_mask": over.copy()}) for envs in (ours, theirs)]
            assert_same(*restarts, f"reset after step {step}")
    ours.close()
    theirs.close()
    return num_ends


def spaces_and_modes():
    """All spaces in one mode; in the others one of each kind of rows, the rest are slow."""
    chosen = ("float32(3,)", "discrete", "nested", "text", "dict with objects")
    for name in SPACES:
        for mode in MODES:
            is_fast = mode is AutoresetMode.NEXT_STEP or name in chosen
            marks = [] if is_fast else [pytest.mark.slow]
            yield pytest.param(name, mode, marks=marks, id=f"{name}-{mode_id(mode)}")


@pytest.mark.parametrize(("name", "mode"), [*spaces_and_modes()])
def test_observations_of_any_space(name, mode):
    for num_envs, copy in ((1, True), (5, mode is AutoresetMode.NEXT_STEP)):
        env_fns = [functools.partial(RandomEnv, SPACES[name])] * num_envs
        ours, theirs = both(env_fns, copy=copy, autoreset_mode=mode)
        assert ours.observation_space == theirs.observation_space
        num_ends = assert_same_run(ours, theirs, num_steps=9, seed=num_envs)
        assert num_ends > 0


@pytest.mark.parametrize("name", SPACES)
def test_actions_of_any_space(name):
    """The envs echo their action in the infos, with its type."""
    env_fns = [functools.partial(RandomEnv, spaces.Discrete(2), SPACES[name])] * 3
    ours, theirs = both(env_fns)
    assert ours.action_space == theirs.action_space
    assert_same_run(ours, theirs, num_steps=9, seed=4)


@pytest.mark.parametrize(
    ("env_id", "mode"), fast_are(in_turn(AVAILABLE, MODES), product(AVAILABLE, MODES))
)
def test_registered_envs(env_id, mode):
    env_fns = [
        lambda: gym.make(env_id, max_episode_steps=25, **REGISTERED[env_id]) for _ in range(3)
    ]
    ours, theirs = both(env_fns, autoreset_mode=mode)
    num_ends = assert_same_run(ours, theirs, num_steps=60, seed=11)
    assert num_ends >= 3


@pytest.mark.parametrize(("kind", "mode"), fast_are(in_turn(KINDS, MODES), product(KINDS, MODES)))
def test_observation_mode_different(kind, mode):
    """Spaces of one shape and dtype, with bounds of their own."""
    boxes = [spaces.Box(-k, k, (2,), np.float32) for k in (1, 2, 3)]
    of_kind = {
        "box": boxes,
        "discrete": [spaces.Discrete(k, start=k) for k in (2, 3, 4)],
        "multi-discrete": [spaces.MultiDiscrete([k, k]) for k in (2, 3, 4)],
        "multi-binary": [spaces.MultiBinary(3)] * 3,
        "dict": [spaces.Dict(box=box) for box in boxes],
        "tuple": [spaces.Tuple([box, box]) for box in boxes],
    }
    env_fns = [functools.partial(RandomEnv, space) for space in of_kind[kind]]
    ours, theirs = both(env_fns, observation_mode="different", autoreset_mode=mode)
    assert ours.observation_space == theirs.observation_space
    assert ours.single_observation_space == theirs.single_observation_space
    assert_same_run(ours, theirs, num_steps=9, seed=5)


@pytest.mark.parametrize("seed", [None, 3, [5, None, 7]])
def test_seeds(seed):
    """Without a seed the generators of the first reset go on."""
    ours, theirs = both([lambda: gym.make("CartPole-v1")] * 3)
    for envs in (ours, theirs):
        envs.reset(seed=[1, 2, 3])
    assert_same(ours.reset(seed=[1, None, 3])[0][::2], theirs.reset(seed=[1, None, 3])[0][::2])
    assert_same(ours.reset(seed=seed), theirs.reset(seed=seed))
    assert_same(ours.np_random_seed, theirs.np_random_seed)
    for our_generator, their_generator in zip(ours.np_random, theirs.np_random, strict=True):
        assert our_generator.random() == their_generator.random()


@pytest.mark.parametrize("mode", MODES, ids=mode_id)
def test_attributes(mode):
    ours, theirs = both(counters([2, 3]), copy=False, autoreset_mode=mode.value)
    ours.reset()
    names = ["num_envs", "metadata", "render_mode", "copy", "observation_mode", "autoreset_mode"]
    names += ["action_space", "single_action_space", "observation_space"]
    names += ["single_observation_space", "spec", "closed", "env_fns"]
    for name in names:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert str(ours) == str(theirs)
    assert ours.unwrapped is ours
    assert CounterEnv.metadata == gym.Env.metadata  # the class's dict was not written to
