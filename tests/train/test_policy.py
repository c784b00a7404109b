"""load_policy: the actions of the run's own evaluation, without envs, and what it refuses."""

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from example_files import EXAMPLES, load_example
from gymnasium.spaces import Box, Dict, Discrete

import vecenv
from vecenv.command.trainers import load
from vecenv.learn import CheckpointError, Run, load_checkpoint
from vecenv.learn.evaluation import ask
from vecenv.learn.run import save_checkpoint
from vecenv.train.policy import Policy

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SMALL = {"total_steps": 0, "eval_episodes": 1}
RUNS = {
    "ppo": ("ppo", {"env_id": "CartPole-v1", "num_envs": 2, "num_steps": 8, "normalize": True}),
    "real": ("ppo", {"env_id": "Pendulum-v1", "num_envs": 2}),
    "gru": ("ppo", {"env_id": "CartPole-v1", "num_envs": 2, "recurrent": "gru"}),
    "masks": ("ppo", {"env_id": "vecenv:Cage2-v0", "num_envs": 2}),
    "sac": ("sac", {"env_id": "Pendulum-v1"}),
    "dqn": ("dqn", {"env_id": "CartPole-v1"}),
    "r2d2": ("r2d2", {"env_id": "CartPole-v1", "num_envs": 2}),
}


def make_run(name, folder):
    algorithm, options = RUNS[name]
    trainer = load(algorithm)
    options = trainer.Options(**options, **SMALL, save=folder)
    trainer.main(options)
    return trainer, options


def policy_of(name, folder):
    """The policy of a new run."""
    make_run(name, folder)
    return vecenv.load_policy(folder)


@pytest.mark.parametrize("name", RUNS)
def test_actions_are_those_of_the_run_played_in_its_envs(name, tmp_path):
    trainer, options = make_run(name, tmp_path / "run")
    envs, act = trainer.load_policy(options, 3)
    policy = vecenv.load_policy(tmp_path / "run")
    assert policy.observation_space == envs.single_observation_space
    assert policy.action_space == envs.single_action_space
    obs, _ = envs.reset(seed=1)
    starts = np.ones(3, bool)
    for _ in range(12):
        expected = ask(act, envs, torch.as_tensor(obs), starts)
        masks = envs.action_masks() if envs.has_action_masks else None
        actions = policy(obs, masks, starts)
        np.testing.assert_array_equal(actions, np.asarray(expected))
        assert actions.shape == envs.action_space.shape
        obs, _, terminations, truncations, _ = envs.step(actions)
        starts = terminations | truncations
    envs.close()


def test_one_env_and_a_memory_that_begins_anew(tmp_path):
    policy, env = policy_of("gru", tmp_path), gym.make("CartPole-v1")
    obs, _ = env.reset(seed=1)
    seen = [env.step(policy(obs))[0] for _ in range(3)]
    logits = policy(np.array(seen[:1])), policy(seen[0])
    assert logits[0].shape == (1,)
    assert logits[1].shape == ()
    with pytest.raises(ValueError, match=r"obs has 2 rows, after 1, of which .*reset\(\)"):
        policy(np.array(seen[:2]))
    assert policy(np.array(seen[:2]), starts=True).shape == (2,)
    policy.reset()
    assert policy(np.array(seen)).shape == (3,)


def test_actions_can_be_sampled(tmp_path):
    policy = policy_of("ppo", tmp_path / "ppo")
    obs = np.zeros((200, 4), np.float32)
    assert len(set(policy(obs).tolist())) == 1
    torch.manual_seed(1)
    found = policy(obs, sample=True)
    assert 50 < found.sum() < 150
    torch.manual_seed(1)
    np.testing.assert_array_equal(policy(obs, sample=True), found)
    real = policy_of("sac", tmp_path / "sac")
    actions = real(np.zeros((50, 3), np.float32), sample=True)
    assert actions.std() > 0.1 and actions.dtype == np.float32
    with pytest.raises(ValueError, match=r"masks are given, but Box.* has none"):
        real(np.zeros(3), masks=np.ones(1))
    greedy = policy_of("dqn", tmp_path / "dqn")
    with pytest.raises(TypeError, match="has values, not probabilities"):
        greedy(np.zeros(4, np.float32), sample=True)


def test_masks_that_are_forgotten_are_missed_once(tmp_path, caplog):
    policy, obs = policy_of("masks", tmp_path), np.zeros(52, np.float32)
    policy(obs, np.ones(145))
    assert not caplog.records
    policy(obs)
    policy(obs)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "the policy was trained with masks and is asked without"
    ]


def test_observations_and_masks_of_wrong_shapes_are_refused(tmp_path):
    policy = policy_of("masks", tmp_path)
    with pytest.raises(ValueError, match=r"obs has the shape \(3,\), expected \(52,\)"):
        policy(np.zeros(3))
    with pytest.raises(ValueError, match=r"masks has the shape \(1, 3\), expected \(1, 145\)"):
        policy(np.zeros(52), masks=np.ones(3))
    masks = np.zeros(145)
    with pytest.raises(ValueError, match="masks has a row that allows no action; all ones"):
        policy(np.zeros((2, 52)), np.array([np.ones(145), masks]))
    masks[7] = 1
    assert policy(np.zeros(52), masks) == 7


def test_scaled_pictures_are_refused_where_bytes_were_trained():
    pictures = Box(0, 255, (4, 4, 1), np.uint8)
    space = Dict({"screen": pictures, "speed": Box(-1, 1, (2,), np.float32)})
    policy = Policy(space, Discrete(2), "ppo, trained in Pictures-v0")
    policy._make = lambda: lambda obs: obs["screen"].flatten(1).argmax(1).numpy() % 2
    screen = np.zeros((4, 4, 1), np.uint8)
    screen[0, 3] = 200
    assert policy({"screen": screen, "speed": [0.5, 0.25]}) == 1
    with pytest.raises(ValueError, match=r"obs\['screen'\] is float64, expected uint8, as the env"):
        policy({"screen": screen / 255, "speed": [0.5, 0.25]})
    shown = repr(policy)
    assert shown.startswith("<Policy ppo, trained in Pictures-v0: Dict(")
    assert shown.endswith("-> Discrete(2)>")


def test_code_of_a_run_is_run_only_if_it_is_named(tmp_path):
    example = load_example("resume")
    options = example.Options(save=tmp_path / "run", num_envs=2, compile="off", **SMALL)
    example.main(options)
    kept = load_checkpoint(tmp_path / "run" / "policy.pt")
    assert Path(kept["trainer"]) == EXAMPLES / "resume.py"
    with pytest.raises(ValueError, match=r"resume\.py, which is not run unless you name it: load"):
        vecenv.load_policy(tmp_path / "run")
    policy = vecenv.load_policy(tmp_path / "run", code=kept["trainer"])
    assert policy(np.zeros(4, np.float32)) in (0, 1)
    with pytest.raises(FileNotFoundError, match="there is no such Python file"):
        vecenv.load_policy(tmp_path / "run", code=tmp_path / "none.py")


def test_a_file_of_a_run_stands_for_its_folder(tmp_path):
    obs = np.random.default_rng(1).normal(size=(50, 4)).astype(np.float32)
    expected = policy_of("ppo", tmp_path / "run")(obs)
    for name in ("policy.pt", "options.json", "checkpoint/last.pt"):
        np.testing.assert_array_equal(vecenv.load_policy(tmp_path / "run" / name)(obs), expected)
    (tmp_path / "run" / "options.json").unlink()
    for name in ("", "policy.pt"):
        with pytest.raises(ValueError, match=r"has no options\.json, expected a run folder of"):
            vecenv.load_policy(tmp_path / "run" / name)


def test_a_script_on_run_is_told_how_to_load_its_agent(tmp_path):
    agent = torch.nn.Linear(4, 2)
    with Run(tmp_path, {"size": 2}) as run:
        run.save({"agent": agent, "steps": 3})
    for path in (tmp_path, tmp_path / "checkpoint" / "last.pt"):
        with pytest.raises(
            ValueError, match=r"has no policy\.pt.* a script on Run: load_"
        ) as caught:
            vecenv.load_policy(path)
    names = {"load_checkpoint": load_checkpoint, "folder": tmp_path}
    state = eval(str(caught.value).split(" on Run: ")[1], names)
    assert torch.equal(state["agent"]["weight"], agent.weight)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no .*none; expected a run folder"):
        vecenv.load_policy(tmp_path / "none")
    with pytest.raises(ValueError, match=r"has no policy\.pt, expected a run folder .*last\.pt"):
        vecenv.load_policy(tmp_path)
    make_run("ppo", tmp_path / "run")
    file = tmp_path / "run" / "policy.pt"
    kept = load_checkpoint(file)
    for wrong in ({}, {**kept, "spaces": [["Box"], None]}, {**kept, "spaces": None}):
        save_checkpoint(file, wrong)
        with pytest.raises(ValueError, match=r"policy\.pt can't be read"):
            vecenv.load_policy(tmp_path / "run")
    save_checkpoint(file, {**kept, "trainer": "vecenv.train.cage4_defender"})
    with pytest.raises(ValueError, match="no functions of single observations: play them by"):
        vecenv.load_policy(tmp_path / "run")
    for name in ("os", "vecenv.train.../../x", "vecenv.train.os.path"):
        save_checkpoint(file, {**kept, "trainer": name})
        with pytest.raises(ValueError, match="is not run unless you name it"):
            vecenv.load_policy(tmp_path / "run")
    save_checkpoint(file, kept)
    last = tmp_path / "run" / "checkpoint" / "last.pt"
    weights = last.read_bytes()
    last.write_bytes(weights[: len(weights) // 2])
    with pytest.raises(CheckpointError, match="damaged") as caught:
        vecenv.load_policy(tmp_path / "run")
    assert "another agent" not in str(caught.value)
    last.unlink()
    with pytest.raises(FileNotFoundError, match="has no policy yet"):
        vecenv.load_policy(tmp_path / "run")
    file.unlink()  # as after a kill before the env was made
    with pytest.raises(FileNotFoundError, match="has no policy yet"):
        vecenv.load_policy(tmp_path / "run")
