"""vecenv.train.dqn, and the envs it and the memory tasks are made of."""

import json
import os
import signal
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from example_files import assert_another_network_is_refused, load_example
from gymnasium.spaces import Box, Dict, Discrete

from vecenv import SyncVectorEnv, check_vector_env, make_vec
from vecenv.learn import load_checkpoint
from vecenv.train import OptionsError, dqn
from vecenv.train.replay import Batch

breakout, memory = map(load_example, ("breakout", "memory"))
SMALL = {
    "total_steps": 400,
    "num_envs": 4,
    "learning_starts": 100,
    "batch_size": 16,
    "capacity": 300,
    "hidden": (16,),
    "eval_every": 150,
    "eval_episodes": 4,
    "compile": "off",
}
pytestmark = pytest.mark.usefixtures("one_torch_thread")
BOARD = {"env_id": "breakout:Breakout-v0", "env_kwargs": {"max_episode_steps": 20}}


def agent_of(space, **options):
    envs = SimpleNamespace(single_observation_space=space, single_action_space=Discrete(3))
    return dqn.Agent(envs, dqn.Options(hidden=(16,), **options))


def agent_and_batch(space, **options):
    """An agent whose target differs from its network, and random transitions."""
    torch.manual_seed(1)
    agent = agent_of(space, **options)
    with torch.no_grad():
        for weight in agent.target.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    rng = np.random.default_rng(1)
    obs = [torch.from_numpy(rng.integers(0, 255, (6, *space.shape)).astype(space.dtype))] * 2
    rewards, discounts = torch.randn(6), torch.tensor([0.9, 0.9, 0.0, 0.9, 0.0, 0.9])
    columns = torch.tensor([0, 1, 2, 0, 1, 2]), rewards, discounts, torch.rand(6)
    return agent, Batch(obs[0], obs[1].flip(0), *columns)


def test_errors_are_those_of_the_definition():
    """Row by row; a double network's own pick is worth what the target says."""
    space = Box(0, 255, (5,), np.float32)
    for double in (False, True):
        agent, batch = agent_and_batch(space, double=double)
        errors = agent.errors(batch)
        for i in range(6):
            values = agent.target(batch.next_obs[i : i + 1])[0]
            picks = agent.network(batch.next_obs[i : i + 1])[0] if double else values
            goal = batch.rewards[i] + batch.discounts[i] * values[picks.argmax()]
            value = agent.network(batch.obs[i : i + 1])[0, batch.actions[i]]
            torch.testing.assert_close(errors[i], value - goal)
        loss, _ = dqn.dqn_loss(agent, batch, None)
        torch.testing.assert_close(loss, (batch.importance * errors**2 / 2).mean())


@pytest.mark.parametrize("shape", [(10, 10, 4), (4, 10, 10), (84, 84, 3)], ids=str)
def test_pictures_have_their_channels_first_or_last(shape):
    agent, batch = agent_and_batch(Box(0, 255, shape, np.uint8))
    assert agent.errors(batch).shape == (6,)
    axis = 1 if shape[0] == 4 else 3
    convolution = agent.network.encoders["obs"].layers[0]
    assert convolution.in_channels == shape[axis - 1]
    other = Box(0, 255, tuple(np.moveaxis(np.empty(shape), axis - 1, 2 if axis == 1 else 0).shape))
    twin = agent_of(Box(0, 255, other.shape, np.uint8))
    twin.load_state_dict(agent.state_dict())
    moved = batch.obs.movedim(axis, 3 if axis == 1 else 1)
    torch.testing.assert_close(twin.network(moved), agent.network(batch.obs))


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"n_step": 1, "dueling": False}, marks=pytest.mark.slow),
        pytest.param({**BOARD, "prioritized": True}, marks=pytest.mark.slow),
        pytest.param({**BOARD, "prioritized": True, "storage": "memmap"}, marks=pytest.mark.slow),
    ],
    ids=["plain", "board", "board on disk"],
)
def test_a_resumed_run_ends_as_one_that_went_on(tmp_path, changed, monkeypatch):
    options = {**SMALL, **changed}
    whole = dqn.main(dqn.Options(save=tmp_path / "whole", save_every=200, **options))
    halved = dqn.Options(save=tmp_path / "half", **options)
    collect = dqn.DQN.collect
    with monkeypatch.context() as patch:  # stop in the middle, as a signal does

        def collect_half(self):
            found = collect(self)
            if self.steps == 200:
                os.kill(os.getpid(), signal.SIGTERM)
            return found

        patch.setattr(dqn.DQN, "collect", collect_half)
        dqn.main(halved)
    halved.resume = True
    assert dqn.main(halved) == whole
    evaluation = json.loads((tmp_path / "half" / "evaluation.json").read_text())
    assert evaluation == {"mean": whole.mean, "ci95": whole.ci95}
    states = [
        load_checkpoint(tmp_path / n / "checkpoint/last.pt")["state"] for n in ("whole", "half")
    ]
    assert [state["num_updates"] for state in states] == [75, 75]
    for a, b in zip(*(state["agent"].values() for state in states), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow  # as test_ppo.py and test_sac.py have it
def test_a_checkpoint_of_another_network_is_refused_in_a_sentence(tmp_path, monkeypatch):
    assert_another_network_is_refused(
        dqn.DQN, lambda **more: dqn.main(dqn.Options(save=tmp_path, **SMALL, **more)), monkeypatch
    )


def test_other_spaces_are_refused(tmp_path):
    with pytest.raises(
        SystemExit, match=r"Pendulum-v1: actions are Box.*, expected Discrete; use a wrapper"
    ):
        dqn.main(dqn.Options(env_id="Pendulum-v1", backend="sync", save=tmp_path, **SMALL))


class Odd(gym.Env):
    """An env of one step; with masks, which allow all actions but one."""

    def __init__(self, shape=(3,), has_masks=False):
        self.observation_space, self.action_space = Box(0, 1, shape, np.float32), Discrete(3)
        self.info = {"action_mask": np.array([1, 1, 0], np.int8)} if has_masks else {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(self.observation_space.shape, np.float32), self.info

    def step(self, action):
        return np.zeros(self.observation_space.shape, np.float32), 1.0, True, False, self.info


@pytest.mark.slow
def test_narrow_pictures_numbers_alone_and_masks(tmp_path, capsys):
    def trainer_of(*args):
        envs = SyncVectorEnv([lambda: Odd(*args)] * 4, autoreset_mode="SameStep")
        return dqn.DQN(dqn.Options(save=tmp_path, **SMALL), envs)

    with pytest.raises(OptionsError, match="expected 5 cells a side"):
        trainer_of((3, 40, 3))
    trainer_of((8, 40, 3)).start()
    assert "masks" not in capsys.readouterr().out
    trainer_of((3,), True).start()
    assert "dqn ignores the env's action masks" in capsys.readouterr().out


class Parts(gym.Env):
    """Observations are dicts; the action that earns 1 is a part of them, and a picture lies by."""

    action_space = Discrete(3, start=1)

    def __init__(self):
        picture = Box(0, 255, (8, 8, 1), np.uint8)
        self.observation_space = Dict(asked=Discrete(3, start=1), picture=picture)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.asked, self.steps = int(self.np_random.integers(1, 4)), 0
        return self.observe(), {}

    def observe(self):
        return {"asked": self.asked, "picture": np.full((8, 8, 1), self.steps, np.uint8)}

    def step(self, action):
        reward = float(action == self.asked)
        self.asked, self.steps = int(self.np_random.integers(1, 4)), self.steps + 1
        return self.observe(), reward, self.steps == 8, False, {}


@pytest.mark.parametrize("more", [{"env_id": "Parts-v0"}, {"env_id": "FrozenLake-v1"}], ids=str)
def test_observations_of_other_kinds_are_learned_from_and_resumed(more, tmp_path):
    gym.register("Parts-v0", Parts, disable_env_checker=True)
    try:
        options = dqn.Options(**{**SMALL, "total_steps": 1500, **more}, save=tmp_path)
        options.backend, options.gamma, options.exploration_steps = "sync", 0.0, 1000
        options.learning_rate, options.update_ratio = 3e-3, 0.5
        mean = dqn.main(options).mean
        state = load_checkpoint(tmp_path / "checkpoint/last.pt")["state"]
        assert state["num_updates"] == 700
        assert more["env_id"] != "Parts-v0" or mean > 6.5, "8 at most; by guessing 2.7"
        options.total_steps, options.resume = 1500, True
        assert dqn.main(options).mean == mean, "it goes on from dicts"
    finally:
        gym.registry.pop("Parts-v0")


# ---- envs ---------------------------------------------------------------------------------------


def play(envs, state, actions):
    """Put env 0 into a state; return rewards, ends and states of some steps."""
    for name, value in state.items():
        envs.states[name] = value
    found = []
    for action in actions:
        _, rewards, terminations, *_ = envs.step(np.array([action]))
        row = envs.states[0]
        found.append(
            (rewards[0], bool(terminations[0]), *(int(row[n]) for n in ("x", "y", "dx", "dy")))
        )
    return found


def test_breakout_keeps_the_rules(monkeypatch):
    monkeypatch.setattr(breakout, "STICKY", 0.0)
    envs = breakout.make_vec(1, autoreset_mode="Disabled", debug=True)
    obs, _ = envs.reset(seed=3)
    assert obs[0].sum(axis=(0, 1)).tolist() == [255, 255, 255, 255 * 30]
    state = {"paddle": 4, "action": 0, "has_hit": False, "bricks": 1, "trail_x": 0, "trail_y": 0}
    flying = {"x": 3, "y": 5, "dx": 1, "dy": -1}
    # Up into the lowest row of bricks: it breaks one, and comes back down.
    assert play(envs, state | flying, [0, 0, 0]) == [
        (0, False, 4, 4, 1, -1),
        (1, False, 5, 4, 1, 1),
        (0, False, 6, 5, 1, 1),
    ]
    assert envs.states[0]["bricks"].sum() == 29
    assert envs.states[0]["bricks"][2, 5] == 0
    # Off a side wall, which takes a step in the same column.
    assert play(envs, state | {"x": 9, "y": 5, "dx": 1, "dy": 1}, [0]) == [(0, False, 9, 6, -1, 1)]
    # Onto the paddle, onto its corner, and past it.
    at_bottom = {"y": 8, "dx": 1, "dy": 1}
    assert play(envs, state | at_bottom | {"x": 4}, [0]) == [(0, False, 5, 8, 1, -1)]
    assert play(envs, state | at_bottom | {"x": 3}, [0]) == [(0, False, 4, 8, -1, -1)]
    assert play(envs, state | at_bottom | {"x": 6}, [0]) == [(0, True, 7, 9, 1, 1)]
    # The paddle moves first; without bricks all are hung up again.
    envs.reset(seed=3)
    empty = state | {"bricks": 0} | at_bottom
    assert play(envs, empty | {"x": 5}, [breakout.RIGHT]) == [(0, False, 6, 8, 1, -1)]
    assert envs.states[0]["bricks"].all()


def test_t_mazes_pay_for_the_remembered_turn_alone():
    envs = memory.make_t_mazes(6, length=5, autoreset_mode="Disabled", debug=True)
    obs, _ = envs.reset(seed=1)
    signs = obs[:, 0].copy()
    assert set(signs.tolist()) == {-1.0, 1.0}
    _, rewards, *_ = envs.step(np.full(6, memory.UP))
    np.testing.assert_allclose(rewards, -1 / 5)
    for _ in range(4):
        obs, rewards, *_ = envs.step(np.full(6, memory.FORWARD))
        assert not rewards.any()
        assert not obs[:, 0].any()
    assert (obs[:, 1] == 1).all()
    _, rewards, terminations, *_ = envs.step(np.full(6, memory.UP))
    assert terminations.all()
    np.testing.assert_array_equal(rewards, signs == 1)


def test_masked_cartpole_has_no_velocities():
    masked = make_vec("memory:MaskedCartPole-v1", 2, backend="sync")
    whole = make_vec("CartPole-v1", 2, backend="sync")
    assert masked.single_observation_space.shape == (2,)
    for obs, all_obs in ((masked.reset(seed=1)[0], whole.reset(seed=1)[0]),):
        np.testing.assert_array_equal(obs, all_obs[:, ::2])
    actions = np.array([0, 1])
    np.testing.assert_array_equal(masked.step(actions)[0], whole.step(actions)[0][:, ::2])


def test_breakout_in_frames_is_the_same_game():
    envs = breakout.make_vec(1, autoreset_mode="NextStep", debug=True)
    framed = breakout.make_vec_frames(1, autoreset_mode="NextStep", debug=True)
    stack = framed.reset(seed=3)[0]
    envs.reset(seed=3)
    assert (stack[0] == stack[0, 0]).all()
    rng = np.random.default_rng(0)
    for _ in range(40):
        actions, was = rng.integers(3, size=1), stack
        obs, *results = envs.step(actions)
        stack, *framed_results = framed.step(actions)
        assert [r.tolist() for r in results[:3]] == [r.tolist() for r in framed_results[:3]]
        newest = stack[0, -1]
        assert ((newest == 255) == (obs[0, :, :, breakout.BALL] > 0)).all()
        assert ((newest == 0) | (obs[0][..., [0, 1, 3]] > 0).any(2)).all()
        assert (stack[0, :-1] == was[0, 1:]).all() or (stack[0] == newest).all()


@pytest.mark.parametrize(  # each is compiled for itself
    "env_id",
    [pytest.param("breakout:Breakout-v0", marks=pytest.mark.slow), "memory:TMaze-v0"],
)
def test_compiled_envs_keep_the_interface(env_id):
    check_vector_env(make_vec(env_id, 3))


@pytest.mark.learn
@pytest.mark.timeout(900)
def test_cartpole_is_learned(tmp_path):
    assert dqn.main(dqn.Options(save=tmp_path, seed=0)).mean >= 475
