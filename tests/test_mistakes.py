"""The mistakes of docs/mistakes.md, made: what is said then."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError, ResetNeeded

import vecenv
from buffers import BufferMisuseError, RolloutBuffer


class Still(gym.Env):
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {}


def variant(**members):
    return type("Variant", (Still,), members)


ZEROS = np.zeros(2, np.float32)
OLD_STEP = variant(step=lambda self, action: (ZEROS, 0.0, False, {}))
OLD_RESET = variant(reset=lambda self: (ZEROS, {}))
BARE_RESET = variant(reset=lambda self, seed=None, options=None: ZEROS)
DICT_RESET = variant(
    observation_space=spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(2)),
    reset=lambda self, seed=None, options=None: {"a": 0, "b": 1},
)
BYTES = variant(observation_space=spaces.Box(0, 255, (2,), np.uint8))
WIDE = variant(step=lambda self, action: (np.zeros(3, np.float32), 0.0, False, False, {}))
MANY = variant(step=lambda self, action: (ZEROS, np.zeros(2), False, False, {}))


class Spaceless(gym.Env):
    pass


def made(env, backend="sync"):
    envs = vecenv.make_vec(env, 2, backend=backend)
    try:
        envs.reset(seed=1)
        return envs.step(np.zeros(2, np.int64))
    finally:
        envs.close()


def stepped(actions):
    envs = vecenv.make_vec("CartPole-v1", 3, backend="sync")
    envs.reset(seed=1)
    envs.step(actions)


def rollout(space="single", **kwargs):
    envs = vecenv.make_vec("CartPole-v1", 3, backend="sync")
    spaces_of = {"single": envs.single_observation_space, "batched": envs.observation_space}
    kwargs = {"autoreset_mode": "NextStep", **kwargs}
    buffer = RolloutBuffer(4, 3, spaces_of[space], envs.single_action_space, **kwargs)
    buffer.start(envs.reset(seed=1)[0])
    envs.step([0, 0, 0], out=buffer.slot(0))


def closed():
    envs = vecenv.make_vec("CartPole-v1", 2, backend="sync")
    envs.reset()
    envs.close()
    envs.close()
    envs.step([0, 0])


def nan_actions():
    envs = vecenv.make_vec("Pendulum-v1", 2, backend="sync")
    envs.reset(seed=1)
    envs.step(np.full((2, 1), np.nan, np.float32))


def ended():
    brief = variant(step=lambda self, action: (ZEROS, 0.0, True, False, {}))
    envs = vecenv.make_vec(brief, 2, backend="sync", autoreset_mode="Disabled")
    envs.reset(seed=1)
    envs.step([0, 0])
    envs.step([0, 0])


def put_actions_alone():
    envs = vecenv.make_vec("CartPole-v1", 3, backend="sync")
    mode = envs.autoreset_mode
    buffer = RolloutBuffer(
        4, 3, envs.single_observation_space, envs.single_action_space, autoreset_mode=mode
    )
    buffer.start(envs.reset(seed=1)[0])
    buffer.put(0, actions=np.zeros(3, np.int64))


ONE = Still()
MISTAKES = {
    "old step": (lambda: made(OLD_STEP), vecenv.ObservationError, "four are gym's old interface"),
    "old reset": (lambda: made(OLD_RESET), TypeError, "unexpected keyword argument 'seed'"),
    "bare reset": (lambda: made(BARE_RESET), vecenv.ObservationError, r"expected \(obs, info\)"),
    "dict reset": (lambda: made(DICT_RESET), vecenv.ObservationError, r"expected \(obs, info\)"),
    "no spaces": (lambda: made(Spaceless), vecenv.EnvCreationError, "has no observation_space"),
    "dtype": (lambda: made(BYTES), vecenv.ObservationError, "dtype float32, expected .* uint8"),
    "shape": (
        lambda: made(WIDE),
        vecenv.ObservationError,
        r"shape \(3,\) .* expected shape \(2,\)",
    ),
    "reward": (lambda: made(MANY), vecenv.ObservationError, "expected one number"),
    "an env": (lambda: made(ONE), TypeError, "that is an env already"),
    "envs": (lambda: vecenv.make_vec([ONE, ONE]), TypeError, "that is an env already"),
    "one env": (
        lambda: made(lambda: ONE),
        vecenv.EnvCreationError,
        "was made for env 0; let every",
    ),
    "one inside": (
        lambda: made(lambda: gym.wrappers.TimeLimit(ONE, 3)),
        vecenv.EnvCreationError,
        "was made for env 0; let every",
    ),
    "wrappers": (
        lambda: vecenv.make_vec(Still, 2, wrappers=gym.wrappers.FlattenObservation),
        TypeError,
        "expected a list of functions or classes",
    ),
    "one action": (lambda: stepped(0), vecenv.ActionError, r"shape \(\), expected \(3,\)"),
    "column": (lambda: stepped(np.zeros((3, 1), int)), vecenv.ActionError, r"expected \(3,\)"),
    "one-hot": (lambda: stepped(np.eye(3, 2, dtype=int)), vecenv.ActionError, r"expected \(3,\)"),
    "floats": (lambda: stepped(np.zeros(3)), vecenv.ActionError, "expected an integer dtype"),
    "gradients": (
        lambda: stepped(torch.zeros(3, requires_grad=True)),
        vecenv.ActionError,
        r"tensor.detach\(\).numpy\(\)",
    ),
    "nan actions": (
        nan_actions,
        vecenv.ActionError,
        r"actions\[0\] \(env 0\) is \[nan\]",
    ),
    "ended": (ended, ResetNeeded, "reset_mask"),
    "no log_probs": (
        put_actions_alone,
        BufferMisuseError,
        r"put\(0\) was given no log_probs and no values",
    ),
    "no reset": (
        lambda: vecenv.make_vec("CartPole-v1", 2, backend="sync").step([0, 0]),
        ResetNeeded,
        "before the first `reset`",
    ),
    "mode": (
        lambda: rollout(autoreset_mode="SameStep"),
        vecenv.SlotError,
        "make the buffer with autoreset_mode=envs.autoreset_mode",
    ),
    "batched space": (lambda: rollout("batched"), BufferMisuseError, r"expected \(3, 3, 4\)"),
    "closed": (closed, ClosedEnvironmentError, "make a new vector env"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_message_says_what_to_do(mistake):
    make, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message) as caught:
        make()
    if mistake == "old reset":
        assert "def reset(self, *, seed=None, options=None)" in caught.value.__notes__[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a CUDA device")
def test_a_device_that_is_not_there():
    with pytest.raises(BufferMisuseError, match="'cuda', expected one that torch can use here"):
        rollout(device="cuda")


def test_observations_outside_of_their_space_are_found_by_the_check():
    far = variant(step=lambda self, action: (np.full(2, 5, np.float32), 0.0, False, False, {}))
    assert (made(far)[0] == 5).all()
    with pytest.raises(vecenv.VectorEnvCheckError, match=r"outside \[-1.0, 1.0\]"):
        vecenv.check_vector_env(vecenv.make_vec(far, 2, backend="sync"))
