"""vecenv.train.dqn, and the envs it and the memory tasks are made of."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from example_files import load_example
from gymnasium.spaces import Box, Dict, Discrete

from vecenv import SyncVectorEnv, check_vector_env, make_vec
from vecenv.learn import load_checkpoint
from vecenv.train import dqn
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


def test_pictures_have_their_channels_first_or_last():
    agent, batch = agent_and_batch(Box(0, 255, (4, 10, 10), np.uint8))
    assert agent.errors(batch).shape == (6,)
    assert agent.network.encoders["obs"].layers[0].in_channels == 4
    twin = agent_of(Box(0, 255, (10, 10, 4), np.uint8))
    twin.load_state_dict(agent.state_dict())
    found = twin.network(batch.obs.movedim(1, 3))
    torch.testing.assert_close(found, agent.network(batch.obs))


def test_masks_are_not_heeded_which_is_told(capsys):
    envs = SyncVectorEnv([Masked] * 4, autoreset_mode="SameStep")
    trainer = dqn.DQN(dqn.Options(**SMALL), envs)
    assert "masks" not in capsys.readouterr().out
    trainer.start()
    assert "dqn ignores the env's action masks" in capsys.readouterr().out


class Masked(gym.Env):
    """Allows all actions but one."""

    observation_space, action_space = Box(0, 1, (3,), np.float32), Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {"action_mask": np.array([1, 1, 0], np.int8)}


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


def test_observations_of_several_parts_are_learned_from_and_resumed(tmp_path):
    gym.register("Parts-v0", Parts, disable_env_checker=True)
    try:
        given = {**SMALL, "total_steps": 1500, "env_id": "Parts-v0", "backend": "sync"}
        given |= {"gamma": 0.0, "exploration_steps": 1000, "learning_rate": 3e-3}
        options = dqn.Options(**given, update_ratio=0.5, save=tmp_path)
        mean = dqn.main(options).mean
        state = load_checkpoint(tmp_path / "checkpoint/last.pt")["state"]
        assert state["num_updates"] == 700 and mean > 6.5, "8 at most; by guessing 2.7"
        options.resume = True
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
    check_vector_env(make_vec("memory:TMaze-v0", 3))


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


@pytest.mark.learn
@pytest.mark.timeout(900)
def test_cartpole_is_learned(tmp_path):
    assert dqn.main(dqn.Options(save=tmp_path, seed=0)).mean >= 475
