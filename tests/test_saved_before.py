"""Files that an earlier version (79f7096) has saved: they load, and go on as they would have then.

What is expected was drawn with that version from the same files; of episodes, which were drawn by
another stream of random words then, with this one.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from buffers import (
    EpisodicReplayBuffer,
    PerEnvReplayBuffer,
    PrioritizedReplayBuffer,
    RolloutBuffer,
    SharedReplayBuffer,
)
from examples import convert_policy
from vecenv.cage import Cage2VectorEnv, Evaluation, find_policy, load_defender

SAVED = Path(__file__).parent / "saved_before"
OBS, ACTIONS = Dict({"x": Box(-9, 9, (3,), np.float32), "n": Discrete(5)}), Discrete(4)
WINDOWS = {"n_step": 3, "gamma": 0.9}
ONCE = {"n_step": 2, "gamma": 0.5, "store_next": False, "track_env": True}
BUFFERS = {
    "shared": (SharedReplayBuffer, {}),
    "shared_n_step": (SharedReplayBuffer, WINDOWS),
    "shared_once": (SharedReplayBuffer, {**WINDOWS, "store_next": False}),
    "per_env": (PerEnvReplayBuffer, ONCE),
    "prioritized": (PrioritizedReplayBuffer, {"alpha": 0.7, "beta": 0.5, "track_env": True}),
    "episodic": (EpisodicReplayBuffer, {}),
}
# First numbers of the observations of a batch of four, and its rewards (or offsets).
DRAWN = {
    "shared": ([7.0, 10.25, 7.25, 14.25], [7.0, -10.0, -7.0, -14.0]),
    "shared_n_step": ([7.0, 10.25, 7.25, 14.25], [14.2, -29.62, -21.49, -40.46]),
    "shared_once": ([7.0, 10.25, 7.25, 14.25], [14.2, -29.62, -21.49, -40.46]),
    "per_env": ([13.25, 9.0, 14.25, 8.0], [-13.0, 9.0, -21.5, 8.0]),
    "prioritized": ([11.25, 12.0, 16.25, 8.25], [-11.0, 12.0, -16.0, -8.0]),
    "episodic": ([10.25, 8.25, 7.0, 13.0], [1.0, 3.0, 2.0, 1.0]),
}


def make(name, **options):
    kind, own = BUFFERS[name]
    capacity = 9 if name == "per_env" else 20
    return kind(capacity, OBS, ACTIONS, num_envs=2, **own, **options)


def check_drawn(buffer, name):
    batch = buffer.sample(4)
    obs, numbers = DRAWN[name]
    assert batch.obs["x"][:, 0].tolist() == obs
    found = batch.offsets.double() if name == "episodic" else batch.rewards
    np.testing.assert_allclose(found, numbers, rtol=1e-5)


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers(name):
    buffer = make(name)
    buffer.load(SAVED / f"{name}.buffer")
    check_drawn(buffer, name)


@pytest.mark.parametrize("name", ["shared_once", "episodic"])
def test_states_of_buffers(name):
    buffer = make(name)
    buffer.load_state_dict(torch.load(SAVED / f"{name}_state.pt", weights_only=True))
    check_drawn(buffer, name)


def test_buffers_of_a_device():
    buffer, here = make("shared_once", staged=True), make("shared_once")
    buffer.load(SAVED / "shared_once_staged.buffer")
    here.load(SAVED / "shared_once.buffer")
    rows = here.order()
    assert torch.equal(buffer.order(), rows)
    for name in ("rewards", "discounts", "actions"):
        found, expected = (getattr(held.get(rows), name) for held in (buffer, here))
        torch.testing.assert_close(found, expected)
    assert torch.equal(buffer.get(rows).next_obs["x"], here.get(rows).next_obs["x"])


def test_states_of_rollouts():
    space = Box(-9, 9, (3,), np.float32)
    rollout = RolloutBuffer(4, 2, space, ACTIONS, autoreset_mode="NextStep")
    rollout.load_state_dict(torch.load(SAVED / "rollout_state.pt", weights_only=True))
    assert rollout.state_dict()["obs"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_policies(tmp_path):
    (tmp_path / "policy.pt").write_bytes((SAVED / "policy.pt").read_bytes())
    converted = convert_policy.main(convert_policy.Options(tmp_path / "policy.pt"))
    obs = np.eye(52, dtype=np.float32)[:9]
    actions = find_policy(converted).act(obs, np.zeros((9, 13), bool))
    assert actions.tolist() == [65, 17, 144, 17, 137, 65, 3, 75, 17]
    actions = load_defender(SAVED / "defender.npz").act(obs.astype(np.uint8))
    assert actions.tolist() == [20, 20, 18, 138, 24, 138, 18, 20, 18]


def test_states_of_envs_and_scores():
    envs = Cage2VectorEnv(2, red_agent="mixed", episode_length=30)
    with np.load(SAVED / "cage_state.npz") as state:
        envs.load_state_dict(state)
    for t in range(12, 20):
        _, rewards, *_ = envs.step(np.array([t * 9 % 145, t * 7 % 145]))
    np.testing.assert_allclose(rewards, [-0.3, -13.1])
    assert envs.true_state["obs_bits"].tolist() == [79748952752304, 2251801961201664]
    envs.close()
    assert "sleep" in str(Evaluation.from_json(SAVED / "scores.json"))
