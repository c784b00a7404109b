"""Policies from files, read and evaluated without torch."""

import json
import shutil
import sys
import zipfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from choices import fast_are
from gymnasium.spaces import Box, Discrete

import vecenv.cage
from vecenv.cage import Cage4Player, evaluate, find_policy
from vecenv.cage.challenge4.playing import find_policy as find_cage4_policy
from vecenv.cage.saved import find_vecnormalize
from vecenv.files import save_arrays


def random_layers(*widths):
    """Return the layers of a random network."""
    rng = np.random.default_rng(1)
    pairs = [(rng.normal(size=(a, b)), rng.normal(size=b)) for a, b in pairwise(widths)]
    return [tuple(part.astype(np.float16).astype(np.float32) for part in pair) for pair in pairs]


@pytest.mark.parametrize("hidden", [(), (5,), (64, 64)])
def test_a_saved_network_acts_as_it_did(tmp_path, hidden):
    """A twin in torch, which takes the env's own features and masks, makes the same choices."""
    path, layers = tmp_path / "policy.npz", random_layers(152, *hidden, 44)
    vecenv.cage.save_defender(path, layers)

    def act(obs, masks):
        x = torch.from_numpy(obs).float()
        for number, (weight, bias) in enumerate(layers):
            x = (x.tanh() if number else x) @ torch.from_numpy(weight) + torch.from_numpy(bias)
        return x.masked_fill(torch.from_numpy(masks) == 0, -np.inf).argmax(-1).numpy()

    act.wants_masks, act.observation = True, "memory"
    options = {"episodes": 20, "red_agents": ["b_line"], "episode_lengths": [30]}
    result = evaluate(str(path), **options)
    assert result.cells == evaluate(act, **options).cells
    assert result.observation == "bits"
    assert result.policy == str(path)


@pytest.mark.parametrize("normalize", fast_are([True], [False, True]))
def test_what_ppo_saves_can_be_evaluated(tmp_path, normalize, capsys):
    """Train for a moment; the mean return of the example and of the table must agree."""
    from vecenv.train import ppo

    given = {"total_steps": 2000, "num_envs": 8, "eval_episodes": 300, "compile": "off"}
    given |= {"normalize": normalize, "masks": False, "save": tmp_path}
    result = ppo.main(ppo.Options("vecenv:Cage2-v0", **given))

    table = {"episodes": 300, "red_agents": ["b_line"], "episode_lengths": [100]}
    (cell,) = evaluate(vecenv.load_policy(tmp_path), **table).cells
    error = np.hypot(result.std, cell.sd) / np.sqrt(300)
    assert abs(result.mean - cell.mean) <= 4 * error + 1e-9


TD3 = {"target_policy_noise": 0.1, "policy_delay": 2, "target_noise_clip": 0.5}
SB3_FILES = [
    ("stable_baselines3", "TD3", TD3, "td3.policies"),
    ("stable_baselines3", "PPO", {"clip_range": 0}, "common.policies"),
    ("stable_baselines3", "DQN", {"exploration_fraction": 0.1}, "dqn.policies"),
    ("sb3_contrib", "MaskablePPO", {"clip_range": 0}, "common.maskable.policies"),
    ("sb3_contrib", "RecurrentPPO", {"clip_range": 0}, "common.recurrent.policies"),
]


def save_as_sb3(path, settings, module):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", json.dumps({**settings, "policy_class": {"__module__": module}}))
        archive.writestr("policy.pth", b"")


class FakeModel:
    """Stands in for what these libraries load: the tests have none of them."""

    observation_space, action_space, policy = Box(0, 1, (52,)), Discrete(145), None

    def predict(self, obs, state=None, starts=None, *, deterministic, **options):
        assert deterministic
        self.options = options
        return np.full(len(obs), 144), "state"


@pytest.mark.parametrize(("library", "name", "settings", "module"), SB3_FILES)
def test_models_of_stable_baselines3_play(tmp_path, monkeypatch, library, name, settings, module):
    model = FakeModel()

    def load(path, device):
        assert device == "cpu"
        return model

    modules = SimpleNamespace(**{name: SimpleNamespace(load=load)})
    monkeypatch.setitem(sys.modules, library, modules)
    path = tmp_path / "model.zip"
    save_as_sb3(path, settings, f"{library}.{module}")
    result = evaluate(str(path), episodes=3, red_agents="sleep", episode_lengths=[30])
    assert result.total == -30
    assert ("action_masks" in model.options) == (name == "MaskablePPO")
    model.observation_space = Box(0, 1, (4,))
    with pytest.raises(ValueError, match="for 4 inputs and 145 actions, expected 52 and 145"):
        find_policy(path)


def test_what_a_model_of_stable_baselines3_needs_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    path = tmp_path / "model.zip"
    save_as_sb3(path, {"clip_range": 0}, "stable_baselines3.common.policies")
    with pytest.raises(ModuleNotFoundError, match=r"a PPO model of .*pip install 'vecenv\[sb3\]'"):
        find_policy(path)
    save_as_sb3(path, {}, "stable_baselines3.sac.policies")
    with pytest.raises(ValueError, match=r"policy of stable_baselines3\.sac\.policies, exp"):
        find_policy(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", "[]")
        archive.writestr("policy.pth", b"")
    with pytest.raises(ValueError, match="is no model that stable-baselines3 saved"):
        find_policy(path)


def test_only_files_named_zip_are_given_to_a_library_that_runs_what_is_in_them(tmp_path):
    path = tmp_path / "model.npz"
    save_as_sb3(path, {"clip_range": 0}, "stable_baselines3.common.policies")
    with pytest.raises(ValueError, match=r"is no saved policy"):
        find_policy(path)


def test_files_of_another_kind_are_refused_by_name(tmp_path):
    path = tmp_path / "policy.npz"
    path.write_text("hello")
    with pytest.raises(ValueError, match=r"policy\.npz is no saved policy"):
        find_policy(path)
    layer = [np.ones((152, 44)), np.ones(44)]

    def save(layers, **facts):
        arrays = {f"weight{k}": weight for k, (weight, _) in enumerate(layers)}
        arrays |= {f"bias{k}": bias for k, (_, bias) in enumerate(layers)}
        save_arrays(path, arrays, facts)

    numbers = np.ones(1)
    for content, facts in [
        ([(numbers, numbers)], {"made_for": None}),
        ([(np.ones((1, 1), int), numbers)], {"made_for": None}),
        ([layer], {}),
        ([], {}),
    ]:
        save(content, **facts)
        with pytest.raises(ValueError, match="is no saved policy"):
            find_policy(path)
    save_arrays(path, {"a": numbers, "b": numbers}, {"made_for": None})
    with pytest.raises(ValueError, match="is no saved policy"):
        find_policy(path)
    for layers in ([], [layer, layer], [layer[::-1]]):
        save(layers, made_for=None)
        with pytest.raises(ValueError, match=r"is no saved policy|do not fit each other"):
            find_policy(path)
    for wrong in (np.nan, np.inf, 1e300):
        layer[0][5, 5] = wrong
        save([layer], made_for=None)
        with pytest.raises(ValueError, match="its numbers are not finite"):
            find_policy(path)
    for sizes in ((4, 44), (152, 2)):
        vecenv.cage.save_defender(path, random_layers(*sizes))
        with pytest.raises(ValueError, match=f"{sizes[0]} inputs and {sizes[1]} outputs, expected"):
            find_policy(path)


def test_a_run_folder_stands_for_the_policy_in_it(tmp_path):
    trained = Path(vecenv.cage.__file__).parent
    for challenge, name in (("challenge2", "policy.npz"), ("challenge4", "defender.npz")):
        shutil.copy(trained / challenge / "defender.npz", tmp_path / name)
    assert type(find_policy(str(tmp_path))) is type(find_policy("defender"))
    assert isinstance(find_cage4_policy(str(tmp_path)), Cage4Player)


def test_statistics_are_found_where_they_are_kept(tmp_path):
    """Beside the model, in a folder of its name, or those of a checkpoint, which go first."""
    model = tmp_path / "rl_model_1000_steps.zip"
    assert find_vecnormalize(model) is None
    for name in (
        "vecnormalize.pkl",
        "rl_model_1000_steps/vecnormalize.pkl",
        "rl_model_vecnormalize_1000_steps.pkl",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        assert find_vecnormalize(model) == path
        assert find_vecnormalize(tmp_path / "a.zip") == tmp_path / "vecnormalize.pkl"
