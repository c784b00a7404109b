"""PPO for Box observations and Discrete, MultiDiscrete or Box actions: --env-id CartPole-v1."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from rich.progress import Progress
from torch import Tensor, as_tensor

from buffers import RolloutBatch, RolloutBuffer
from vecenv import RayVectorEnv, VecEnv, make_vec
from vecenv.files import load_arrays, require_writable, save_arrays

DEFAULTS: Any = {"vecenv:Cage2-v0": {"total_steps": 5_000_000, "num_envs": 256}}  # of other envs


@dataclass
class Options:
    env_id: str = "CartPole-v1"  # registered id, also "module:id"
    total_steps: int = 100_000  # env steps to train for, at most; 0 evaluates only
    num_envs: int = 8  # envs stepped side by side
    num_steps: int = 128  # steps of each env between two updates
    num_epochs: int = 4  # passes over the rollout in an update
    num_minibatches: int = 8  # gradient steps in a pass
    learning_rate: float = 1.5e-3  # of Adam at the start; it falls linearly to 0
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation
    clip: float = 0.2  # changing a probability by a factor beyond 1 +- clip does not pay
    entropy_weight: float = 0.0  # of the entropy bonus in the loss
    max_grad_norm: float = 0.5  # longer gradients are shortened to this
    hidden: tuple[int, ...] = (64, 64)  # units of the tanh layers, of actor and critic each
    normalize: bool = False  # observations to mean 0 and variance 1, returns to variance 1
    seed: int = 1  # the same seed gives the same curve
    backend: str = "auto"  # of vecenv.make_vec; with "ray" the policy acts in actors
    num_workers: int | None = None  # processes (async) or actors (ray) for the envs
    ray_address: str | None = None  # of a Ray cluster; without one, ray runs on this machine
    ray_lost: Literal["raise", "wait", "share"] = "raise"  # actors: or replace, on CPUs in use too
    torch_threads: int = 1  # more pay for large minibatches only, and only on idle cores
    eval_episodes: int = 100  # episodes of the deterministic policy at the end
    save: Path = Path("runs")  # folder for the policy, its learning curve and TensorBoard files
    load: Path | None = None  # policy.npz of an earlier run to begin with
    tensorboard: bool = False  # write scalars for TensorBoard
    profile: bool = False  # report after the training where its time went


class Mlp:
    """Tanh layers and a linear one, without autograd, which takes longer than small layers do."""

    def __init__(self, *widths: int, gain: float) -> None:
        counts = [(a + 1) * b for a, b in pairwise(widths)]
        self.weights = torch.zeros(sum(counts))
        self.weights.grad = torch.zeros_like(self.weights)
        self.layers, self.d_layers = (
            [(p[:-b].view(-1, b), p[-b:]) for p, b in zip(v.split(counts), widths[1:], strict=True)]
            for v in (self.weights, self.weights.grad)
        )
        for weight, _ in self.layers:
            torch.nn.init.orthogonal_(weight, gain if weight is self.layers[-1][0] else 2**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs (B, widths[-1]) for x (B, widths[0]); keep the inputs of `backward`."""
        self.inputs: list[Tensor] = []
        for weight, bias in self.layers:
            if self.inputs:
                np.tanh(x.numpy(), out=x.numpy())  # takes a sixth of the time of torch's
            self.inputs.append(x)
            x = torch.addmm(bias, x, weight)
        return x

    def backward(self, d_x: Tensor) -> None:
        """Fill `weights.grad`, given the gradient of the last outputs of `forward`."""
        for k in reversed(range(len(self.layers))):
            x, (d_weight, d_bias) = self.inputs[k], self.d_layers[k]
            torch.mm(x.T, d_x, out=d_weight)
            torch.sum(d_x, 0, out=d_bias)
            if k:
                d_x = d_x @ self.layers[k][0].T
                d_x.addcmul_(d_x * x, x, value=-1)  # tanh' = 1 - tanh^2


class Policy:
    """Actor and critic. Discrete actions are K choices of at most A each, real ones are normal."""

    def __init__(self, envs: VecEnv, options: Options) -> None:
        self.spaces: Any = envs.single_observation_space, envs.single_action_space
        obs_space, space = self.spaces
        self.kind = f"spaces {self.spaces}, hidden {options.hidden}, normalize {options.normalize}"
        self.is_discrete = isinstance(space, Discrete | MultiDiscrete)
        is_real = np.issubdtype(space.dtype or object, np.floating)
        if not (isinstance(obs_space, Box) and (self.is_discrete or is_real)):
            wanted = "(Box, Discrete, MultiDiscrete or Box of floats); use a wrapper to convert"
            raise SystemExit(f"{options.env_id} has the spaces {self.spaces}, expected {wanted}")
        sizes = np.ravel(getattr(space, "nvec", getattr(space, "n", np.ones(space.shape, int))))
        self.shape = (len(sizes), int(sizes.max()))
        num_inputs, self.normalizes = math.prod(obs_space.shape), options.normalize
        self.actor = Mlp(num_inputs, *options.hidden, math.prod(self.shape), gain=0.01)
        self.critic = Mlp(num_inputs, *options.hidden, 1, gain=1.0)
        is_missing = torch.arange(self.shape[1]) >= torch.from_numpy(sizes)[:, None]
        self.actor.layers[-1][1][is_missing.flatten()] = -1e9  # p = 0, and so is its gradient
        if self.is_discrete:
            self.to_env = lambda actions: actions + space.start
            self.draw_noise = lambda *shape: 1 - torch.rand(*shape, len(sizes), 1)  # never 0
        else:
            self.to_env = lambda actions: np.clip(actions, space.low, space.high)
            self.draw_noise = lambda *shape: torch.randn(*shape, len(sizes))
        self.log_std = torch.zeros(0 if self.is_discrete else len(sizes))
        self.weights = [self.actor.weights, self.critic.weights, self.log_std]
        # Count of rollouts; means over them of mean and standard deviation of inputs, and returns.
        self.moments = torch.tensor([[0.0], [0.0], [1.0]]).repeat(1, num_inputs + 1)
        self.tensors = [*self.weights, self.moments]
        self.load = lambda tensors: [a.copy_(b) for a, b in zip(self.tensors, tensors, strict=True)]

    def absorb(self, obs: Tensor, returns: Tensor) -> None:
        """Update the moments with obs (B, *obs_shape) and returns (B,) of a rollout."""
        rows = torch.cat([obs.flatten(1), returns[:, None]], 1)
        self.moments[0] += 1
        found = torch.stack([rows.mean(0), rows.std(0).clamp(min=1e-4)])
        self.moments[1:].lerp_(found, 1 / self.moments[0])

    def inputs(self, obs: Tensor) -> Tensor:
        """Return observations (B, *obs_shape) as float32 (B, K), with `normalize` normalised."""
        x, (mean, std) = as_tensor(obs).flatten(1).float(), self.moments[1:, :-1]
        return ((x - mean) / std).clamp_(-10, 10) if self.normalizes else x

    def act(self, obs: Tensor, noise: Tensor | None = None) -> Tensor:
        """Pick actions for obs (B, *obs_shape), the most likely ones if there is no noise."""
        outputs = self.actor.forward(self.inputs(obs))
        if not self.is_discrete:
            return outputs if noise is None else outputs + as_tensor(noise) * self.log_std.exp()
        outputs = outputs.view(-1, *self.shape)
        if noise is None:
            return outputs.argmax(-1)
        sums = outputs.softmax(-1).cumsum_(-1)
        return torch.searchsorted(sums, as_tensor(noise) * sums[..., -1:])

    def evaluate(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities (B,) and the mean entropy; keep inputs of `differentiate`."""
        if self.is_discrete:
            log_p = outputs.view(-1, *self.shape).log_softmax(-1)
            p, index = log_p.exp(), actions.reshape(len(outputs), -1, 1)
            entropies = -torch.linalg.vecdot(p, log_p)[..., None]
            self.kept: Any = log_p, p, index, entropies
            return log_p.gather(-1, index).sum((1, 2)), entropies.sum() / len(outputs)
        self.kept = z = (actions.flatten(1).float() - outputs) / self.log_std.exp()
        log_scale = (self.log_std + 0.5 * math.log(2 * math.pi)).sum()
        return -0.5 * z.square().sum(-1) - log_scale, log_scale + 0.5 * len(self.log_std)

    def differentiate(self, d_log_probs: Tensor, d_entropy: float) -> Tensor:
        """Return the gradient of the outputs, given that of the last results of `evaluate`."""
        if self.is_discrete:
            log_p, p, index, entropies = self.kept
            d_log_probs, scale = d_log_probs[:, None, None], -d_entropy / len(p)
            d_logits = torch.add(entropies * scale - d_log_probs, log_p, alpha=scale).mul_(p)
            return d_logits.scatter_add_(-1, index, d_log_probs.expand_as(index)).flatten(1)
        d_log_probs, z = d_log_probs[:, None], self.kept
        self.log_std.grad = (d_log_probs * (z.square() - 1)).sum(0).add_(d_entropy)
        return d_log_probs * z / self.log_std.exp()


class Trainer:
    """Collects rollouts and learns from them."""

    def __init__(self, options: Options, envs: VecEnv, policy: Policy) -> None:
        self.options, self.envs, self.policy = options, envs, policy
        torch.empty(2**23 - 2**10)  # freed at once, which makes glibc keep memory freed later
        settings: dict[str, Any] = {"gamma": options.gamma, "gae_lambda": options.gae_lambda}
        settings |= {"autoreset_mode": envs.autoreset_mode, "allocate": envs.allocate}
        sizes = options.num_steps, options.num_envs
        self.rollout = RolloutBuffer(*sizes, *policy.spaces, seed=options.seed, **settings)
        if isinstance(envs, RayVectorEnv):
            envs.set_policy(lambda actor_envs: Policy(actor_envs, options))
        self.rollout.start(envs.reset(seed=options.seed)[0])
        self.optimizer = torch.optim.Adam(policy.weights, eps=1e-5, fused=True)
        self.pool = ThreadPoolExecutor(1)  # where the critic learns from large batches
        self.steps, self.curve = 0, list[tuple[int, float]]()  # steps made at an end, return

    @torch.inference_mode()
    def update(self) -> dict[str, float]:
        """Collect a rollout and learn from it; return scalars under their usual names."""
        options, policy, rollout = self.options, self.policy, self.rollout
        lr = options.learning_rate * (1 - self.steps / options.total_steps)
        self.optimizer.param_groups[0]["lr"] = lr
        self.collect()
        with self.envs.timing.phase("learner"):
            episodes = rollout.episodes().returns.tolist()
            rollout.rewards /= (scale := policy.moments[2, -1].clone())
            last_obs = policy.inputs(rollout.obs_at(options.num_steps))
            rollout.compute_advantages(policy.critic.forward(last_obs).squeeze(1))
            losses: Any = {}
            for _ in range(options.num_epochs):
                for batch in rollout.minibatches(options.num_minibatches):
                    losses = self.learn(batch)
            returns, values = rollout.returns[rollout.valid], rollout.values[:-1][rollout.valid]
            if policy.normalizes:
                policy.absorb(rollout.obs[:-1][rollout.valid], returns * scale)
            rollout.advance()
        self.steps += len(returns)
        self.curve += [(self.steps, episode_return) for episode_return in episodes]
        losses["explained_variance"] = 1 - (returns - values).var() / returns.var()
        return {f"losses/{name}": float(value) for name, value in losses.items()}

    def collect(self) -> None:
        """Step all envs `num_steps` times, then compute the columns that no step needed."""
        envs, rollout, policy = self.envs, self.rollout, self.policy
        noise = policy.draw_noise(rollout.num_steps, rollout.num_envs)
        if isinstance(envs, RayVectorEnv):
            slots, fields = map(rollout.slot, range(len(noise))), {"actions": rollout.actions}
            envs.collect(list(slots), policy.tensors, inputs=[noise], fields=fields)
        else:
            for t, (row, drawn) in enumerate(zip(rollout.actions, noise, strict=True)):
                with envs.timing.phase("policy"):
                    row.copy_(policy.act(rollout.obs_at(t), drawn).view_as(row))
                envs.step(policy.to_env(rollout.env_actions(t)), out=rollout.slot(t))
        fields = rollout.obs[:-1], rollout.actions, rollout.log_probs, rollout.values[:-1]
        rows = (field.flatten(0, 1).split(4096) for field in fields)  # fits the processor's cache
        for obs, actions, log_probs, values in zip(*rows, strict=True):
            x = policy.inputs(obs)
            log_probs[:] = policy.evaluate(policy.actor.forward(x), actions)[0]
            values[:] = policy.critic.forward(x).squeeze(1)

    def learn(self, batch: RolloutBatch) -> dict[str, Tensor]:
        """Make a gradient step on policy and value loss; return scalars of it."""
        options, policy, size = self.options, self.policy, len(batch.returns)
        x = policy.inputs(batch.obs)
        log_probs, entropy = policy.evaluate(policy.actor.forward(x), batch.actions)
        critic = self.pool.submit(self.learn_values, x, batch.returns) if size >= 1024 else None
        ratio = (log_ratio := log_probs - batch.log_probs).exp()
        std, mean = torch.std_mean(batch.advantages)
        gain = (advantages := (batch.advantages - mean) / (std + 1e-8)) * ratio
        clipped = advantages * ratio.clamp(1 - options.clip, 1 + options.clip)
        d_log_probs = gain * (gain <= clipped) / -size  # the lesser of the two counts
        policy.actor.backward(policy.differentiate(d_log_probs, -options.entropy_weight))
        errors = critic.result() if critic else self.learn_values(x, batch.returns)
        torch.nn.utils.clip_grad_norm_(policy.weights, options.max_grad_norm)
        self.optimizer.step()
        scalars = {"value_loss": errors.square().mean() / 2, "entropy": entropy}
        scalars["policy_loss"] = -torch.minimum(gain, clipped).mean()
        scalars["approx_kl"] = (ratio - 1 - log_ratio).mean()
        return {**scalars, "clipfrac": (gain > clipped).float().mean()}

    @torch.inference_mode()
    def learn_values(self, x: Tensor, returns: Tensor) -> Tensor:
        """Find the gradient of the value loss; return the errors (B,)."""
        errors = self.policy.critic.forward(x).squeeze(1) - returns
        self.policy.critic.backward(errors[:, None] / len(errors))
        return errors

    def run(self, writer: Any) -> float:
        """Update while another rollout fits into the steps, or until Ctrl-C; return the seconds."""
        options, begin = self.options, time.perf_counter()
        with Progress(refresh_per_second=4) as progress:
            task = progress.add_task(options.env_id, total=options.total_steps)
            try:
                while self.steps + options.num_envs * options.num_steps <= options.total_steps:
                    scalars = self.update()
                    recent = float(np.mean([value for _, value in self.curve[-20:]] or [np.nan]))
                    speed = self.steps / (time.perf_counter() - begin)
                    text = f"{options.env_id}: return {recent:.1f}, {speed:.0f} steps/s"
                    progress.update(task, completed=self.steps, description=text)
                    scalars |= {"charts/episodic_return": recent, "charts/SPS": speed}
                    for name, value in scalars.items() if writer else ():
                        writer.add_scalar(name, value, self.steps)
            except KeyboardInterrupt:
                progress.print(f"stopped by Ctrl-C after {self.steps} steps")
        return time.perf_counter() - begin


@torch.inference_mode()
def evaluate(policy: Policy, options: Options, **env_kwargs: Any) -> np.ndarray:
    """Return the returns of the first episode, short or long, of each of `eval_episodes` envs."""
    envs = make_vec(options.env_id, options.eval_episodes, backend=options.backend, **env_kwargs)
    obs, _ = envs.reset(seed=options.seed + 1_000_000)
    returns, is_playing = np.zeros(envs.num_envs), np.ones(envs.num_envs, bool)
    while is_playing.any():
        actions = policy.act(torch.from_numpy(obs)).numpy().reshape(envs.action_space.shape)
        obs, rewards, terminations, truncations, _ = envs.step(policy.to_env(actions))
        returns += rewards * is_playing
        is_playing &= ~(terminations | truncations)
    envs.close()
    return returns


def optional(module: str, extra: str) -> Any:
    """Import a module of an extra; if it is missing, print the extra and return None."""
    try:
        return import_module(module)
    except ImportError:
        print(f"{module.partition('.')[0]} is missing: pip install 'vecenv[{extra}]'")


def draw_curve(
    curve: list[tuple[int, float]],
    title: str,
    path: Path,
    baselines: dict[str, float] | None = None,
) -> None:
    """Draw the returns of episodes over env steps, with lines at the returns of other policies."""
    if not curve or not (matplotlib := optional("matplotlib.figure", "plots")):
        return
    steps, returns = np.array(curve).T
    window = min(max(20, len(curve) // 100), len(curve))
    means = np.convolve(returns, np.full(window, 1 / window), "valid")
    ends = np.flatnonzero(np.diff(steps, append=np.inf))  # the last episode of each rollout
    ends = ends[ends >= window - 1]
    unit, name = (1e6, "millions") if steps[-1] >= 1e6 else (1e3, "thousands")
    axes = (figure := matplotlib.Figure(figsize=(8, 4.5), layout="constrained")).subplots()
    axes.plot(steps / unit, returns, ".", markersize=3, alpha=0.25, label="an episode")
    label = f"mean of the last {window}"
    axes.plot(steps[ends] / unit, means[ends - window + 1], color="black", label=label)
    for number, (policy, value) in enumerate((baselines or {}).items()):
        label = f"{policy}: {value:.1f}"
        axes.axhline(value, color=f"C{number + 1}", linestyle="--", label=label)
    axes.set(title=title, xlabel=f"env steps ({name})", ylabel="return of an episode")
    sizes = np.abs([*means, *(baselines or {}).values()])
    sign = -1 if means.max() < 0 else 1
    if (returns * sign).min() >= 0 and sizes.max() > 20 * max(sizes.min(), 1):
        threshold = 10 ** math.floor(math.log10(max(sizes.min(), 1)))
        axes.set_yscale("symlog", linthresh=threshold)
        ticks = [digit * 10**k * sign for k in range(10) for digit in (1, 2, 5)]
        low, high = sorted((0, sign * 1.2 * max(np.abs(returns).max(), sizes.max())))
        axes.set_yticks([0, *(t for t in ticks if abs(t) >= threshold and low <= t <= high)])
        axes.set_ylim(low, high)
        axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    figure.savefig(path, dpi=150)


def main(
    options: Options, baselines: dict[str, float] | None = None, **env_kwargs: Any
) -> np.ndarray:
    """Train, save, evaluate and report; return the returns of the evaluation.

    The learning curve has a line at each of `baselines`, returns of other policies by their names.
    """
    torch.set_num_threads(options.torch_threads)
    torch.manual_seed(options.seed)
    file = options.save / "policy.npz"
    try:
        options.save.mkdir(parents=True, exist_ok=True)
        require_writable(file)
    except OSError as error:
        raise SystemExit(f"{error}: choose another folder with --save") from None
    board = optional("torch.utils.tensorboard", "tensorboard") if options.tensorboard else None
    given = {"num_workers": options.num_workers, "address": options.ray_address}
    given |= {"on_error": "restart" if options.ray_lost != "raise" else None}
    given |= {"shares_cpus": options.ray_lost == "share"}
    env_kwargs["vector_kwargs"] = {name: value for name, value in given.items() if value}
    envs = make_vec(options.env_id, options.num_envs, backend=options.backend, **env_kwargs)
    policy = Policy(envs, options)
    # CAGE 2 envs: the tables and rules that they play by.
    identity = getattr(getattr(envs, "scenario", None), "identity", dict)()
    if options.load is not None:
        if (saved := load_arrays(options.load))["kind"] != policy.kind:
            raise SystemExit(f"{options.load} is for {saved['kind']}; expected {policy.kind}")
        if (made_for := saved.get("made_for") or identity) != identity:
            print(f"{options.load} was trained in {made_for}; it goes on in {identity}")
        policy.load(map(torch.from_numpy, saved["tensors"]))
    trainer = Trainer(options, envs, policy)
    if options.profile:
        envs.timing.enable()
    seconds = trainer.run(board and board.SummaryWriter(str(options.save)))
    if options.profile:
        print(envs.timing.report())
    envs.close()
    # Layers and scale are what `vecenv.cage` plays; the tensors are for `--load`.
    scale = policy.moments[1:, :-1] if policy.normalizes else None
    saved = {"kind": policy.kind, "layers": policy.actor.layers, "scale": scale}
    save_arrays(file, {**saved, "tensors": policy.tensors, "made_for": identity or None})
    title, picture = f"{options.env_id}, seed {options.seed}", options.save / "curve.png"
    draw_curve(trainer.curve, title, picture, baselines)
    returns = evaluate(policy, options, **env_kwargs)
    score = f"return {returns.mean():.1f} ± {returns.std():.1f} over {len(returns)} episodes"
    print(f"{options.env_id}, seed {options.seed}: {score}; {seconds:.0f} s, see {options.save}")
    return returns


if __name__ == "__main__":
    env_id = tyro.cli(Options, description=__doc__).env_id
    main(tyro.cli(Options, default=Options(env_id, **DEFAULTS.get(env_id, {}))))
