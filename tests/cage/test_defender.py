from itertools import pairwise

import numpy as np
import pytest

from vecenv.cage import (
    BlueMemory,
    Cage2VectorEnv,
    DefenderPolicy,
    evaluate,
    load_defender,
    save_defender,
)


@pytest.fixture
def layers():
    memory = BlueMemory(1)
    rng = np.random.default_rng(1)
    widths = (memory.num_features, 16, len(memory.choices))
    return [
        (rng.normal(size=(a, b)).astype(np.float16).astype(np.float32), np.zeros(b, np.float32))
        for a, b in pairwise(widths)
    ]


def actions_of(policy, num_envs, seed):
    envs = Cage2VectorEnv(num_envs, red_agent="meander", episode_length=30)
    obs, _ = envs.reset(seed=seed)
    policy.reset()
    actions = []
    for _ in range(20):
        actions.append(policy.act(obs, None))
        obs, *_ = envs.step(actions[-1])
    envs.close()
    return np.array(actions)


def test_it_plays_each_env_as_if_it_were_alone(layers):
    policy = DefenderPolicy(layers)
    together = actions_of(policy, 5, seed=3)
    assert len(np.unique(together)) > 5
    for env in range(5):
        alone = actions_of(policy, 1, seed=3 + env)
        assert (alone[:, 0] == together[:, env]).all()


def test_a_saved_defender_plays_the_same(layers, tmp_path):
    path = tmp_path / "defender.npz"
    save_defender(path, layers, steps=7)
    assert (actions_of(load_defender(path), 4, 1) == actions_of(DefenderPolicy(layers), 4, 1)).all()
    options = {"episodes": 5, "red_agents": ["b_line"], "episode_lengths": [30]}
    assert evaluate(str(path), **options).total == evaluate(DefenderPolicy(layers), **options).total


def test_other_files_are_refused(layers, tmp_path):
    path = tmp_path / "defender.npz"
    save_defender(path, layers)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="is no defender"):
        load_defender(path)
    np.savez(path, format=np.array("something else"))
    with pytest.raises(ValueError, match="its format is something else"):
        load_defender(path)
    np.savez(path, format=np.array({"a": 1}, dtype=object))
    with pytest.raises(ValueError, match="is no defender"):
        load_defender(path)
    save_defender(path, [(layers[0][0][:-1], layers[0][1]), layers[1]])
    with pytest.raises(ValueError, match="expected 152 inputs and 44 outputs"):
        load_defender(path)
    with pytest.raises(ValueError, match="is no defender"):
        evaluate(str(path), episodes=2)


@pytest.mark.slow
def test_the_defender_that_comes_along_beats_the_challenges_winner():
    result = evaluate("defender", episodes=4000, seed=1)
    assert result.total - result.total_ci95 > -54.57
    assert result.cell("sleep", 100).mean == 0
