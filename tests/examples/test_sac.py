"""examples/sac.py: gradients, truncation, resuming, refusals, and (slow) the score reached."""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import nn
from torch.distributions import Normal

from vecenv import make_vec
from vecenv.files import load_arrays, save_arrays

EXAMPLES = Path(__file__).parents[2] / "examples"


def load_example():
    sys.path.insert(0, str(EXAMPLES))  # as for a script, which finds its neighbours
    try:
        spec = importlib.util.spec_from_file_location("sac_example", EXAMPLES / "sac.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["sac_example"] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLES))
    return module


sac = load_example()


class Drift(gym.Env):
    """A point pushed about; rewards are higher near 0. Episodes end by truncation, or beyond 2."""

    observation_space = Box(-np.inf, np.inf, (3,), np.float64)
    action_space = Box(np.float32([-2, -1]), np.float32([1, 3]))

    def __init__(self, length=7, limit=2.0, **spaces):
        self.length, self.limit = length, limit
        self.__dict__.update(spaces)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.step_count = self.np_random.normal(0, 0.3, 3), 0
        return self.place, {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.place = self.place + 0.1 * np.array([*action, 0.0])
        self.step_count += 1
        is_out = bool(np.abs(self.place).max() > self.limit)
        reward = -float(np.square(self.place).sum())
        return self.place, reward, is_out, not is_out and self.step_count >= self.length, {}


gym.register("SacDrift-v0", Drift)
SMALL = {
    "env_id": "SacDrift-v0",
    "num_envs": 3,
    "total_steps": 120,
    "learning_starts": 30,
    "batch_size": 16,
    "hidden": (12, 9),
    "capacity": 1000,
    "eval_episodes": 3,
    "backend": "sync",
    "torch_threads": 1,
}


@pytest.fixture(autouse=True)
def threads():
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)
    torch.set_flush_denormal(False)


def options_for(folder, **changed):
    return sac.Options(save=Path(folder), **{**SMALL, **changed})


def trainer_for(folder, steps=60, **changed):
    """A trainer that has made some steps."""
    options = options_for(folder, **changed)
    torch.manual_seed(options.seed)
    settings = {"backend": options.backend, "autoreset_mode": "SameStep"}
    envs = make_vec(options.env_id, options.num_envs, **settings)
    trainer = sac.Trainer(options, envs, sac.Learner(envs, options))
    trainer.start()
    while trainer.steps < steps:
        trainer.collect()
    return trainer


def as_modules(nets):
    """The same networks for autograd."""
    found = []
    for i in range(len(nets.layers[0][0])):
        linears = []
        for weight, bias in nets.layers:
            linears += [nn.Linear(*weight.shape[1:]), nn.ReLU()]
            linears[-2].weight.data = weight[i].T.clone()
            linears[-2].bias.data = bias[i, 0].clone()
        found.append(nn.Sequential(*linears[:-1]))
    return found


def grads_of(nets, modules):
    """Pairs of a gradient written out and one of autograd."""
    for i, module in enumerate(modules):
        linears = [part for part in module if isinstance(part, nn.Linear)]
        for (weight, bias), linear in zip(nets.d_layers, linears, strict=True):
            yield weight[i].T, linear.weight.grad
            yield bias[i, 0], linear.bias.grad


def textbook_gradients(learner, noise):
    """Losses of SAC by torch.distributions and autograd, as the example should see them."""
    batch, options, actor = learner.batch, learner.options, as_modules(learner.actor)[0]
    critics, targets = as_modules(learner.critics), as_modules(learner.targets)

    def draw(obs, noise):
        mean, log_std = actor(obs).chunk(2, -1)
        normal = Normal(mean, log_std.clamp(-20, 2).exp())
        raw = mean + normal.scale * noise
        actions = raw.tanh()
        log_probs = (normal.log_prob(raw) - torch.log(1 - actions.square() + 1e-7)).sum(-1)
        return actions, log_probs

    obs, next_obs, count = batch.obs.float(), batch.next_obs.float(), options.batch_size
    log_alpha = learner.log_alpha.clone().requires_grad_()
    alpha = log_alpha.exp().detach()
    with torch.no_grad():
        actions, log_probs = draw(next_obs, noise[:count])
        x = torch.cat([next_obs, actions], -1)
        values = torch.min(*(net(x).squeeze(-1) for net in targets)) - alpha * log_probs
        goals = batch.rewards + options.gamma * ~batch.terminations * values
    done = torch.cat([obs, batch.actions], -1)
    errors = [net(done).squeeze(-1) - goals for net in critics]
    (sum(error.square().mean() for error in errors) / 2).backward()
    actions, log_probs = draw(obs, noise[count:])
    x = torch.cat([obs, actions], -1)
    frozen = [as_modules(learner.critics)[i] for i in range(2)]
    q = torch.min(*(net(x).squeeze(-1) for net in frozen))
    (alpha * log_probs - q).mean().backward()
    wanted = -actions.shape[1]
    (-log_alpha * (log_probs.detach() + wanted).mean()).backward()
    return actor, critics, errors, log_alpha.grad


def test_gradients_are_those_of_autograd(tmp_path):
    trainer = trainer_for(tmp_path)
    learner = trainer.learner
    learner.actor.step_adam = learner.critics.step_adam = lambda learning_rate: None
    learner.log_alpha.fill_(-0.7)
    learner.targets.weights.uniform_(-0.4, 0.4)
    targets = learner.targets.weights.clone()
    with torch.inference_mode():
        learner.learn()
    noise = learner.noise.clone()
    learner.targets.weights.copy_(targets)
    actor, critics, errors, d_log_alpha = textbook_gradients(learner, noise)
    torch.testing.assert_close(learner.errors, torch.stack(errors).detach())
    for ours, theirs in [*grads_of(learner.critics, critics), *grads_of(learner.actor, [actor])]:
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(learner.actor.d_extra, d_log_alpha)


def test_bfloat16_is_close(tmp_path):
    learner = trainer_for(tmp_path, hidden=(64, 64), batch_size=64).learner
    learner.actor.step_adam = learner.critics.step_adam = lambda learning_rate: None
    found = []
    for is_half in (False, True):
        learner.generator.manual_seed(1)
        learner.critics.is_half = learner.actor.is_half = is_half
        with torch.inference_mode():
            learner.improve() if found else learner.learn()
        found.append(learner.critics.grad.clone())
    assert not torch.equal(*found)
    assert (found[0] - found[1]).norm() < 0.02 * found[0].norm()


def test_adam_and_targets_move_as_defined(tmp_path):
    learner = trainer_for(tmp_path).learner
    weights = learner.critics.weights.clone().requires_grad_()
    adam = torch.optim.Adam([weights], lr=learner.options.learning_rate)
    for _ in range(3):
        targets = learner.targets.weights.clone()
        with torch.inference_mode():
            learner.learn()
        weights.grad = learner.critics.grad.clone()
        adam.step()
        torch.testing.assert_close(learner.critics.weights, weights.detach())
        torch.testing.assert_close(
            learner.targets.weights, targets + 0.005 * (weights.detach() - targets)
        )


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_truncated_episodes_go_on_in_the_value_of_the_final_observation(tmp_path, backend):
    trainer = trainer_for(tmp_path, backend=backend)
    batch = trainer.learner.buffer.get(trainer.learner.buffer.order())
    assert trainer.writer.num_transitions == trainer.steps == len(batch)
    assert batch.truncations.any()
    torch.testing.assert_close(batch.discounts, 0.99 * (~batch.terminations).float())
    low, high = trainer.learner.spaces[1].low, trainer.learner.spaces[1].high
    pushes = low + (batch.actions.numpy() + 1) / 2 * (high - low)
    moved = (batch.next_obs - batch.obs).numpy()[:, :2]
    np.testing.assert_allclose(moved, 0.1 * pushes, atol=1e-6)
    trainer.envs.close()


def test_terminated_episodes_have_no_value_after_them(tmp_path, monkeypatch):
    monkeypatch.setattr(Drift.__init__, "__defaults__", (50, 0.5))
    learner = trainer_for(tmp_path).learner
    batch = learner.buffer.get(learner.buffer.order())
    assert batch.terminations.any()
    assert not batch.discounts[batch.terminations].any()


@pytest.mark.parametrize(
    "changed",
    [{}, {"num_envs": 1, "n_step": 3}, {"prioritized": True}, {"hold": 4, "alpha": 0.1}],
    ids=str,
)
def test_resumed_runs_equal_those_that_went_on(tmp_path, changed):
    returns = sac.main(options_for(tmp_path / "whole", save_every=60, **changed))
    sac.main(options_for(tmp_path / "half", **{**changed, "total_steps": 60}))
    rest = options_for(tmp_path / "rest", resume=tmp_path / "half" / "sac.npz", **changed)
    np.testing.assert_array_equal(sac.main(rest), returns)
    whole, rest = (load_arrays(tmp_path / name / "sac.npz") for name in ("whole", "rest"))
    assert whole["progress"] == rest["progress"]
    assert rest["progress"][:2] == [120, 90]
    for a, b in zip(whole["tensors"], rest["tensors"], strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(whole["noise"], rest["noise"])


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_update_ratio_is_kept(tmp_path, ratio):
    sac.main(options_for(tmp_path, update_ratio=ratio))
    assert load_arrays(tmp_path / "sac.npz")["progress"][1] == ratio * 90


def test_envs_can_be_taken_first_ready(tmp_path):
    sac.main(options_for(tmp_path, first_ready=True, backend="async", num_envs=4, n_step=2))
    steps, updates, curve = load_arrays(tmp_path / "sac.npz")["progress"]
    assert updates == steps - 30
    assert curve


def test_ctrl_c_saves_and_says_where(tmp_path, capsys):
    before = signal.getsignal(signal.SIGINT)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    sac.main(options_for(tmp_path, total_steps=10**9))
    steps, updates, _ = load_arrays(tmp_path / "sac.npz")["progress"]
    assert updates == steps - 30
    assert f"--resume {tmp_path / 'sac.npz'}" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    "spaces",
    [
        {"action_space": Discrete(3)},
        {"action_space": Box(-np.inf, np.inf, (2,), np.float32)},
        {"observation_space": Dict(a=Box(-1, 1, (2,)))},
    ],
    ids=str,
)
def test_other_spaces_are_refused(tmp_path, spaces):
    kwargs = {"disable_env_checker": True, **spaces}
    with pytest.raises(SystemExit, match=r"SacDrift-v0 has the spaces .*; use a wrapper"):
        sac.main(options_for(tmp_path), **kwargs)


def test_unfit_checkpoints_are_refused(tmp_path):
    sac.main(options_for(tmp_path, total_steps=30))
    file = tmp_path / "sac.npz"
    for changed in ({"env_id": "Pendulum-v1"}, {"hidden": (5,)}, {"capacity": 77}):
        with pytest.raises(SystemExit, match=r"cannot go on from .*sac.npz: .*expected"):
            sac.main(options_for(tmp_path / "other", resume=file, **changed))
    saved = load_arrays(file)
    save_arrays(file, {**saved, "kind": saved["kind"].replace("SAC 1", "SAC 0")})
    with pytest.raises(SystemExit, match=r"it is of SAC 0 .*; expected SAC 1 "):
        sac.main(options_for(tmp_path / "other", resume=file))
    file.write_bytes(b"something else")
    with pytest.raises(SystemExit, match="cannot go on from"):
        sac.main(options_for(tmp_path / "other", resume=file))


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="choose another folder with --save"):
        sac.main(options_for(tmp_path / "file" / "runs", total_steps=10**9))


def test_profile_tensorboard_and_curve(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    pytest.importorskip("matplotlib")
    sac.main(options_for(tmp_path, total_steps=240, profile=True, tensorboard=True))
    assert "critics" in capsys.readouterr().out
    assert (tmp_path / "curve.png").stat().st_size
    assert list(tmp_path.glob("events*"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_update_can_be_compiled(tmp_path):
    """In a process of its own, as compiling changes the class."""
    command = [sys.executable, EXAMPLES / "sac.py", "--compile", "--total-steps", "1010"]
    command += ["--hidden", "8", "--eval-episodes", "2", "--save", tmp_path, "--backend", "sync"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    assert load_arrays(tmp_path / "sac.npz")["progress"][:2] == [1010, 10]


@pytest.mark.learn
@pytest.mark.timeout(900)
def test_pendulum_is_learned(tmp_path):
    returns = sac.main(sac.Options(total_steps=10_000, save=tmp_path, backend="sync"))
    assert returns.mean() >= -200
