"""SAC for Box observations and bounded Box actions: --env-id Pendulum-v1.

Gradients are written out, as autograd's bookkeeping takes longer than small networks compute.
"""

import math
import signal
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from gymnasium.spaces import Box
from ppo import draw_curve, evaluate, optional  # the example next to this one
from rich.progress import Progress
from torch import Tensor

from buffers import (
    PrioritizedReplayBuffer,
    SharedReplayBuffer,
    TransitionWriter,
    restore_generator,
)
from vecenv import VecEnv, make_vec
from vecenv.files import load_arrays, require_writable, save_arrays


@dataclass
class Options:
    env_id: str = "Pendulum-v1"  # registered id, also "module:id"
    total_steps: int = 20_000  # env steps to train for, those of a resumed run included
    num_envs: int = 1  # envs stepped side by side
    update_ratio: float = 1.0  # updates per env step made after learning_starts
    learning_starts: int = 1000  # env steps with uniformly random actions at the start
    hold: int = 1  # steps for which each of those actions is held
    batch_size: int = 256  # transitions per update
    capacity: int = 1_000_000  # of the replay buffer, in transitions
    learning_rate: float = 1e-3  # of Adam, for all networks and the entropy weight
    gamma: float = 0.99  # discount
    tau: float = 0.005  # step of the targets towards the critics in an update, as a fraction
    alpha: float | None = None  # entropy weight; None learns it, for minus the action's size
    n_step: int = 1  # rewards summed before the value of the next observation
    prioritized: bool = False  # draw transitions by their latest error
    hidden: tuple[int, ...] = (256, 256)  # units of the ReLU layers of each network
    seed: int = 1  # the same seed gives the same curve, unless envs are taken first-ready
    backend: str = "auto"  # of vecenv.make_vec
    first_ready: bool = False  # envs step while the learner learns; for the backend async
    device: str = "cpu"  # of networks and replay
    torch_threads: int = 1  # more is faster on idle cores, and far slower on busy ones
    bfloat16: bool = False  # multiply large matrices in bfloat16; faster on some processors
    compile: bool = False  # torch.compile the update, with CUDA graphs where there is a GPU
    eval_episodes: int = 100  # episodes of the deterministic policy at the end
    save: Path = Path("runs")  # folder for checkpoint, learning curve and TensorBoard files
    save_every: int = 0  # env steps between checkpoints; each resets the envs; 0: at the end only
    resume: Path | None = None  # checkpoint to continue from
    tensorboard: bool = False  # write scalars for TensorBoard
    profile: bool = False  # report after the training where its time went


class Mlps:
    """Networks of one shape side by side: ReLU layers and a linear one."""

    def __init__(self, count: int, widths: list[int], options: Options, num_extra: int = 0) -> None:
        shapes = [shape for a, b in pairwise(widths) for shape in ((count, a, b), (count, 1, b))]
        sizes = [math.prod(shape) for shape in shapes]
        self.memory = torch.zeros(4, sum(sizes) + num_extra, device=options.device)
        self.weights, self.grad, *self.moments = self.memory.unbind(0)
        self.num_steps, self.is_half = torch.zeros((), device=options.device), options.bfloat16
        self.extra, self.d_extra = self.memory[:2, sum(sizes) :]
        cut = [map(Tensor.view, v[: sum(sizes)].split(sizes), shapes) for v in self.memory[:2]]
        self.layers, self.d_layers = ([*zip(parts, parts, strict=True)] for parts in cut)
        for part, size in ((p, layer[0].shape[1]) for layer in self.layers for p in layer):
            part.uniform_(-1, 1).div_(size**0.5)  # as torch.nn.Linear

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a @ b, (count, M, K) by (count, K, N)."""
        if b.shape[2] < min(32, a.shape[1]):  # libraries are slow at a few columns
            return (b.mT @ a.mT).mT
        return (a @ b).float()

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs (count, B, N) for x (B, K); keep the inputs of `backward`."""
        self.inputs, x = [], x.expand(len(self.layers[0][0]), *x.shape)
        for weight, bias in self.layers:  # keep x, and both factors as they were multiplied
            x = x.relu_() if self.inputs else x
            is_half = self.is_half and min(len(x[0]), *weight[0].shape) >= 64  # else it is slower
            factors = [v.bfloat16() if is_half else v for v in (x, weight)]
            self.inputs.append((x, *factors))
            x = self.multiply(*factors).add_(bias)
        return x

    def backward(self, d_x: Tensor, rows: slice = slice(None), first: int | None = None) -> Tensor:
        """Fill `grad`, or return the gradient of x from a column on, given that of the outputs."""
        for k in reversed(range(len(self.layers))):
            (x, x_factor, weight), (d_weight, d_bias) = self.inputs[k], self.d_layers[k]
            d_factor = d_x.to(weight.dtype)
            if first is None:
                d_weight.copy_(self.multiply(x_factor[:, rows].mT, d_factor))
                torch.sum(d_x, 1, keepdim=True, out=d_bias)
            if k or first is not None:
                d_factor, weight = (d_factor, weight) if k else (d_x, self.layers[0][0][:, first:])
                d_x = self.multiply(d_factor, weight.mT)
            if k:
                d_x = torch.ops.aten.threshold_backward(d_x, x[:, rows], 0)
        return d_x

    def step_adam(self, learning_rate: float) -> None:
        self.num_steps += 1
        vectors: Any = [[self.weights], [self.grad], *([moment] for moment in self.moments), []]
        settings: Any = {"lr": learning_rate, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
        settings |= {"weight_decay": 0.0, "amsgrad": False, "maximize": False}
        torch.ops.aten._fused_adam_(*vectors, [self.num_steps], **settings)


class Learner:
    """Actor, two critics and their targets, the replay buffer, and the update."""

    def __init__(self, envs: VecEnv, options: Options) -> None:
        self.options, self.timing, self.num_updates = options, envs.timing, 0
        self.spaces: Any = envs.single_observation_space, envs.single_action_space
        obs_space, space = self.spaces
        is_row = isinstance(space, Box) and len(space.shape) == 1 and space.is_bounded()
        if not (isinstance(obs_space, Box) and is_row and space.dtype in (np.float32, np.float64)):
            wanted = "(Box, bounded Box of floats with one axis); use a wrapper to convert"
            raise SystemExit(f"{options.env_id} has the spaces {self.spaces}, expected {wanted}")
        self.first = first = math.prod(obs_space.shape)  # column of actions in the critics' inputs
        self.actor = Mlps(1, [first, *options.hidden, 2 * len(space.low)], options, num_extra=1)
        widths = [first + len(space.low), *options.hidden, 1]
        self.critics, self.targets = Mlps(2, widths, options), Mlps(2, widths, options)
        self.targets.weights.copy_(self.critics.weights)
        self.log_alpha = self.actor.extra.fill_(math.log(options.alpha or 1))
        buffer: Any = PrioritizedReplayBuffer if options.prioritized else SharedReplayBuffer
        settings: Any = {"num_envs": options.num_envs, "n_step": options.n_step}
        settings |= {"gamma": options.gamma, "seed": options.seed, "device": options.device}
        unit: Any = Box(-1, 1, space.shape, space.dtype)  # pyright: ignore[reportArgumentType]
        self.buffer = buffer(options.capacity, obs_space, unit, **settings)
        self.batch = self.buffer.new_batch(options.batch_size)
        self.generator = torch.Generator(options.device).manual_seed(options.seed)
        # Inputs of the critics: with the action taken, the next observation, the policy's action.
        self.asked = torch.zeros(3, options.batch_size, widths[0], device=options.device)
        self.errors = torch.zeros(2, options.batch_size, device=options.device)
        nets = self.actor, self.critics, self.targets
        self.tensors = [tensor for net in nets for tensor in (net.memory, net.num_steps)]
        if options.compile:
            Mlps.step_adam = torch.compiler.disable(Mlps.step_adam)  # pyright: ignore
            self.improve = torch.compile(self.improve, mode="reduce-overhead")

    def act(self, obs: Tensor, *, explore: bool = False) -> Tensor:
        x = obs.flatten(1).float().to(self.options.device)
        actions = torch.empty(len(x), *self.spaces[1].shape, device=x.device)
        self.draw(x, actions, explore=explore)
        return actions.cpu()

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        low, high = self.spaces[1].low, self.spaces[1].high
        return np.clip(low + (actions + 1) * (0.5 * (high - low)), low, high, dtype=low.dtype)

    def draw(self, x: Tensor, actions: Tensor, *, explore: bool = True) -> Tensor:
        """Fill actions (B, A) for x (B, K); return their log-probabilities (B,)."""
        mean, log_std = self.actor.forward(x)[0].chunk(2, -1)
        self.log_std, self.noise = log_std.clamp(-20, 2), torch.zeros_like(mean)
        if explore:
            self.noise.normal_(generator=self.generator)
        raw = torch.addcmul(mean, self.noise, self.log_std.exp())
        torch.tanh(raw, out=actions)
        # The normal density over tanh' = 1 - tanh^2, whose logarithm must not be -inf.
        log_slope = 2 * (math.log(2) - raw - torch.nn.functional.softplus(-2 * raw))
        log_scale = self.log_std + math.log(2 * math.pi) / 2
        return -(self.noise.square() / 2 + log_scale + log_slope).sum(-1)

    def learn(self) -> None:
        """Draw a batch and make an update."""
        with self.timing.phase("sample"):
            self.buffer.sample(self.options.batch_size, self.batch)
        self.improve()
        if self.options.prioritized:
            self.buffer.update_priorities(self.batch.indices, self.errors.abs().mean(0) + 1e-6)
        self.num_updates += 1

    def improve(self) -> None:
        """Make a step of Adam for the critics and one for the actor; move the targets."""
        batch, first, options, phase = self.batch, self.first, self.options, self.timing.phase
        (done, future, now), size = self.asked, options.batch_size
        with phase("actor"):
            future[:, :first], now[:, :first] = batch.next_obs.flatten(1), batch.obs.flatten(1)
            both = self.asked[1:].flatten(0, 1)
            log_probs, alpha = self.draw(both[:, :first], both[:, first:]), self.log_alpha.exp()
        with phase("critics"):
            values = self.targets.forward(future).amin(0)[:, 0] - alpha * log_probs[:size]
            goals = torch.addcmul(batch.rewards, batch.discounts, values)  # 0 where terminated
            done[:, :first], done[:, first:] = now[:, :first], batch.actions.flatten(1)
            torch.sub(self.critics.forward(done)[..., 0], goals, out=self.errors)
            weights = batch.weights if options.prioritized else 1.0
            self.critics.backward((self.errors * weights / size)[..., None])
            self.critics.step_adam(options.learning_rate)
        with phase("actor"):
            values = self.critics.forward(now)
            d_values = (values <= values.flip(0)) / -size  # the lesser one counts
            d_actions = self.critics.backward(d_values, first=first).sum(0)
            actions, noise, log_std = now[:, first:], self.noise[size:], self.log_std[size:]
            d_raw = d_actions * (1 - actions.square()) + 2 / size * alpha * actions
            d_log_std = d_raw * noise * log_std.exp() - alpha / size
            d_log_std *= (log_std > -20) & (log_std < 2)
            self.actor.backward(torch.cat([d_raw, d_log_std], -1)[None], slice(size, None))
            if options.alpha is None:
                self.actor.d_extra[:] = actions.shape[1] - log_probs[size:].mean()
            self.actor.step_adam(options.learning_rate)
            self.targets.weights.lerp_(self.critics.weights, options.tau)


class Trainer:
    """Steps the envs, lets the learner keep up, and writes checkpoints."""

    def __init__(self, options: Options, envs: VecEnv, learner: Learner) -> None:
        self.options, self.envs, self.learner, self.steps = options, envs, learner, 0
        self.writer, self.ids = TransitionWriter(envs, learner.buffer), np.arange(envs.num_envs)
        self.curve: list[tuple[int, float]] = []  # steps made when an episode had ended, its return
        how = f"hidden {options.hidden}, n_step {options.n_step}, {type(learner.buffer).__name__}"
        self.kind = f"SAC 1 for {envs.num_envs} {options.env_id}, {learner.spaces}, {how}"

    def start(self) -> None:
        """Reset the envs; the seed depends on the steps, so that a resumed run begins alike."""
        self.obs, _ = self.envs.reset(seed=self.options.seed + self.steps)
        self.writer.reset(self.obs)
        self.returns = np.zeros(len(self.ids))
        self.held = np.zeros_like(self.envs.action_space.sample())
        self.rng = np.random.default_rng([self.options.seed, self.steps])
        if self.options.first_ready:
            self.send(self.obs, self.ids)

    def choose(self, obs: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Return actions from -1 to 1, at the start random ones, each held for a while."""
        with self.envs.timing.phase("policy"):
            if self.steps >= self.options.learning_starts:
                actions = self.learner.act(torch.from_numpy(obs), explore=True)
                return actions.numpy().astype(self.held.dtype, copy=False)
            if self.steps // len(self.ids) % self.options.hold == 0:
                self.held[ids] = self.rng.uniform(-1, 1, self.held[ids].shape)
            return self.held[ids]

    def send(self, obs: np.ndarray, ids: np.ndarray) -> None:
        actions = self.choose(obs, ids)
        self.envs.send(self.learner.to_env(actions), ids)
        self.writer.sent(actions, ids)

    def collect(self) -> None:
        """Step all envs; or take those that are ready, and send them on."""
        envs, ids = self.envs, self.ids
        if self.options.first_ready:
            batch = envs.recv(max(1, len(ids) // 2), timeout=60)
            ids, rewards = batch.env_ids, batch.rewards
            flags = batch.terminations, batch.truncations
            self.writer.received(batch)
            self.send(batch.obs, ids)
        else:
            actions = self.choose(self.obs, ids)
            result = self.obs, rewards, *flags, _ = envs.step(self.learner.to_env(actions))
            self.writer.step(actions, *result)
        self.steps += len(ids)
        self.returns[ids] += rewards
        ended = ids[np.logical_or(*flags)]
        self.curve += [(self.steps, value) for value in self.returns[ended].tolist()]
        self.returns[ended] = 0

    def run(self, board: Any) -> float:
        """Train until the steps are made, or until Ctrl-C; return the seconds."""
        options, learner, begin, first = self.options, self.learner, time.perf_counter(), self.steps
        stops: list[int] = []  # a flag, as an exception could interrupt an update
        handler = signal.signal(signal.SIGINT, lambda number, _: stops.append(number))
        self.start()
        with Progress(refresh_per_second=4) as progress:
            task = progress.add_task(options.env_id, total=options.total_steps)
            while self.steps < options.total_steps and not stops:
                before = self.steps
                self.collect()
                due = options.update_ratio * (self.steps - options.learning_starts)
                while learner.num_updates < due:
                    learner.learn()
                if before // 200 < self.steps // 200:
                    speed = (self.steps - first) / (time.perf_counter() - begin)
                    recent = float(np.mean([value for _, value in self.curve[-20:]] or [np.nan]))
                    text = f"{options.env_id}: return {recent:.1f}, {speed:.0f} steps/s"
                    progress.update(task, completed=self.steps, description=text)
                    scalars = {"charts/episodic_return": recent, "charts/SPS": speed}
                    scalars |= {"losses/qf": learner.errors.square().mean()}
                    for name, value in scalars.items() if board else ():
                        board.add_scalar(name, value, self.steps)
                if (period := options.save_every) and before // period < self.steps // period:
                    self.save()
                    self.start()
        signal.signal(signal.SIGINT, handler)
        return time.perf_counter() - begin

    def save(self) -> Path:
        """Write a checkpoint atomically; return its path."""
        learner, path = self.learner, self.options.save / "sac.npz"
        progress = self.steps, learner.num_updates, self.curve
        tensors = [tensor.cpu() for tensor in learner.tensors]
        state = {"kind": self.kind, "tensors": tensors, "progress": progress}
        state |= {"buffer": learner.buffer.state_dict(), "noise": learner.generator.get_state()}
        save_arrays(path, state)
        return path

    def load(self, path: Path) -> None:
        try:
            saved = load_arrays(path)
            if saved["kind"] != self.kind:
                raise ValueError(f"it is of {saved['kind']}; expected {self.kind}")
            self.learner.buffer.load_state_dict(saved["buffer"])
            self.learner.buffer.cut_episodes()  # open ones, as `start` does in a resumed run
            for tensor, loaded in zip(self.learner.tensors, saved["tensors"], strict=True):
                tensor.copy_(torch.from_numpy(loaded))
            restore_generator(self.learner.generator, saved["noise"])
            self.steps, self.learner.num_updates, self.curve = saved["progress"]
        except Exception as error:
            raise SystemExit(f"cannot go on from {path}: {error}") from None


@torch.inference_mode()
def main(options: Options, **env_kwargs: Any) -> np.ndarray:
    """Train, save, evaluate and report; return the returns of the evaluation."""
    torch.set_num_threads(options.torch_threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(options.seed)
    torch.empty(2**23 - 2**10)  # freed at once, which makes glibc keep memory freed later
    try:
        options.save.mkdir(parents=True, exist_ok=True)
        require_writable(options.save / "sac.npz")
    except OSError as error:
        raise SystemExit(f"{error}: choose another folder with --save") from None
    board = optional("torch.utils.tensorboard", "tensorboard") if options.tensorboard else None
    settings: Any = {"backend": options.backend, "autoreset_mode": "SameStep", **env_kwargs}
    envs = make_vec(options.env_id, options.num_envs, **settings)
    trainer = Trainer(options, envs, learner := Learner(envs, options))
    if options.resume is not None:
        trainer.load(options.resume)
    if options.profile:
        envs.timing.enable()
    seconds = trainer.run(board and board.SummaryWriter(str(options.save)))
    if options.profile:
        print(envs.timing.report())
    envs.close()
    title, path = f"{options.env_id}, seed {options.seed}", trainer.save()
    made = f"{trainer.steps} of {options.total_steps} steps, {learner.num_updates} updates"
    print(f"{title}: {made}, {seconds:.0f} s; go on with --resume {path}")
    draw_curve(trainer.curve, title, options.save / "curve.png")
    returns = evaluate(learner, options, **env_kwargs)  # pyright: ignore[reportArgumentType]
    print(f"return {returns.mean():.1f} ± {returns.std():.1f} over {len(returns)} episodes")
    return returns


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
