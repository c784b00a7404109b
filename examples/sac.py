"""SAC for Box observations and bounded Box actions: --env-id Pendulum-v1.

Networks and losses are the first half of this file, and are for changing; the second half trains.
"""

import copy
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
import tyro
from gymnasium.spaces import Box
from torch import Tensor, nn
from torch.distributions import Normal

from buffers import PrioritizedReplayBuffer, SharedReplayBuffer, TransitionWriter
from vecenv import VecEnv, make_vec
from vecenv.learn import (
    Adam,
    EvaluationResult,
    Gradient,
    Graph,
    Run,
    RunError,
    describe_graphs,
    evaluate,
    evaluating,
    gradient_options,
    load_checkpoint,
)


@dataclass
class Options:
    env_id: str = "Pendulum-v1"  # registered id, also "module:id"
    env_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)  # of the env
    total_steps: int = 20_000  # env steps to train for, those of a resumed run included
    num_envs: int = 1  # envs stepped side by side
    update_ratio: float = 1.0  # updates per env step made after learning_starts
    learning_starts: int = 1000  # env steps with uniformly random actions at the start
    hold: int = 1  # steps for which each of those actions is held
    batch_size: int = 256  # transitions per update
    capacity: int = 1_000_000  # of the replay buffer, in transitions
    storage: Literal["memory", "memmap"] = "memory"  # of replay; memmap: files in the run's folder
    learning_rate: float = 1e-3  # of Adam, for all networks and the entropy weight
    gamma: float = 0.99  # discount
    tau: float = 0.005  # step of the targets towards the critics in an update, as a fraction
    alpha: float | None = None  # entropy weight; None learns it, for minus the action's size
    n_step: int = 1  # rewards summed before the value of the next observation
    prioritized: bool = False  # draw transitions by their error after the latest update
    hidden: tuple[int, ...] = (256, 256)  # units of the ReLU layers of each network
    seed: int = 1  # the same seed gives the same curve, unless envs are taken first-ready
    backend: str | None = None  # of vecenv.make_vec
    first_ready: bool = False  # envs step while the learner learns; for the backend async
    device: str = "cpu"  # of networks and replay; there compiled envs are, too
    graphs: Literal["auto", "on", "off"] = "auto"  # an update as a CUDA graph; auto: on a device
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the networks' matrix products
    compile: Literal["auto", "on", "off"] = "auto"  # the update; auto: if there are many
    threads: int = 1  # of torch; more is far slower where cores are busy
    eval_episodes: int = 100  # episodes of the deterministic policy at the end
    save: Path = Path("runs/sac")  # folder of the run: options, metrics, checkpoint, curve
    save_every: int = 0  # env steps between checkpoints; 0: at the end, or when stopped
    resume: bool = False  # go on from the checkpoint in that folder
    overwrite: bool = False  # or delete an earlier run in it
    tensorboard: bool = False  # write scalars for TensorBoard
    profile: bool = False  # report after the training where its time went


# ---- Networks and losses ------------------------------------------------------------------------


class Batch(NamedTuple):
    """Transitions, and the noise that the policy draws actions with: the loss is a function."""

    obs: Tensor  # (B, *obs_shape)
    next_obs: Tensor  # (B, *obs_shape), the one after the last of `n_step` rewards
    actions: Tensor  # (B, A), from -1 to 1
    rewards: Tensor  # (B,)
    discounts: Tensor  # (B,), of the value of next_obs: 0 where the episode terminated
    importance: Tensor  # (B,), of prioritized sampling, else 1
    noise: Tensor  # (B, A), normal, for the actions at obs
    next_noise: Tensor  # (B, A), for those at next_obs


class Linears(nn.Module):
    """`count` linear layers side by side, (count, B, K) to (count, B, N), as one product."""

    def __init__(self, count: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = inputs**-0.5  # as nn.Linear
        self.weight = nn.Parameter(torch.empty(count, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(count, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor, *, frozen: bool = False) -> Tensor:
        """Return x @ weight + bias; frozen: gradients pass to x, not to weight and bias."""
        weight, bias = self.weight, self.bias
        if frozen:
            weight, bias = weight.detach(), bias.detach()
        if weight.shape[2] == 1:  # libraries are slow at one column
            return (x * weight.mT).float().sum(-1, keepdim=True) + bias
        return torch.baddbmm(bias, x, weight)


class Critics(nn.Module):
    """`count` networks that tell the value of an action at an observation."""

    def __init__(self, count: int, *widths: int) -> None:
        super().__init__()
        self.count = count
        self.layers = nn.ModuleList(Linears(count, a, b) for a, b in pairwise(widths))

    def forward(self, obs: Tensor, actions: Tensor, *, frozen: bool = False) -> Tensor:
        """Return values (count, B)."""
        x = torch.cat([obs.flatten(1), actions], 1)
        *hidden, last = self.layers
        x = x.expand(self.count, *x.shape)
        for layer in hidden:
            x = layer(x, frozen=frozen).relu()
        return last(x, frozen=frozen).squeeze(-1).float()


class Agent(nn.Module):
    """Actor, two critics and their targets, and the entropy's weight. Actions are -1 to 1."""

    def __init__(self, obs_space: Box, action_space: Box, options: Options) -> None:
        super().__init__()
        num_inputs, self.num_actions = math.prod(obs_space.shape), len(action_space.low)
        widths = num_inputs, *options.hidden
        layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]
        last = nn.Linear(widths[-1], 2 * self.num_actions)
        self.actor = nn.Sequential(nn.Flatten(), *(part for pair in layers for part in pair), last)
        self.critics = Critics(2, num_inputs + self.num_actions, *options.hidden, 1)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        log_alpha = torch.tensor(math.log(1.0 if options.alpha is None else options.alpha))
        self.log_alpha = nn.Parameter(log_alpha, requires_grad=options.alpha is None)

    def draw(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions (B, A), drawn with normal noise (B, A), and log-probabilities (B,)."""
        mean, log_std = self.actor(obs).float().chunk(2, -1)
        normal = Normal(mean, log_std.clamp(-20, 2).exp(), validate_args=False)
        raw = mean + normal.scale * noise
        # The normal density over tanh' = 1 - tanh^2, whose logarithm must not be -inf.
        log_slope = 2 * (math.log(2) - raw - nn.functional.softplus(-2 * raw))
        return raw.tanh(), (normal.log_prob(raw) - log_slope).sum(-1)

    @torch.no_grad()
    def act(self, obs: Tensor, noise: Tensor | float = 0.0) -> Tensor:
        """Return actions (B, A) for obs (B, *obs_shape); without noise the most likely ones."""
        mean, log_std = self.actor(obs).float().chunk(2, -1)
        return (mean + noise * log_std.clamp(-20, 2).exp()).tanh()

    def errors(self, batch: Batch) -> Tensor:
        """Return what the critics (2, B) are above rewards and the value that the targets tell."""
        with torch.no_grad():
            actions, log_probs = self.draw(batch.next_obs, batch.next_noise)
            values = self.targets(batch.next_obs, actions).amin(0)
            values = values - self.log_alpha.exp() * log_probs
            goals = batch.rewards + batch.discounts * values
        return self.critics(batch.obs, batch.actions) - goals


def sac_loss(agent: Agent, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of three losses, of which each weight gets the gradient of one, and scalars.

    T. Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", 2018 (arXiv 1812.05905). As
    in its authors' code, all three are of the weights before the update.
    """
    alpha = agent.log_alpha.exp().detach()
    critic_loss = (batch.importance * agent.errors(batch).square()).sum(0).mean() / 2
    actions, log_probs = agent.draw(batch.obs, batch.noise)
    values = agent.critics(batch.obs, actions, frozen=True).amin(0)
    actor_loss = (alpha * log_probs - values).mean()
    entropy = -log_probs.detach().mean()
    alpha_loss = agent.log_alpha * (entropy + agent.num_actions)
    scalars = {"critic_loss": critic_loss, "actor_loss": actor_loss, "entropy": entropy}
    return critic_loss + actor_loss + alpha_loss, scalars


# ---- Training -----------------------------------------------------------------------------------


class Trainer:
    """Steps the envs and lets the agent learn."""

    def __init__(
        self, options: Options, envs: VecEnv, earlier: Any = None, log: Any = None
    ) -> None:
        self.options, self.envs, self.timing = options, envs, envs.timing
        obs_space: Any = envs.single_observation_space
        space = self.space = cast("Any", envs.single_action_space)
        is_row = isinstance(space, Box) and len(space.shape) == 1 and is_bounded(space)
        is_known = isinstance(obs_space, Box) and len(obs_space.shape) > 0
        if not (is_known and is_row and space.dtype in (np.float32, np.float64)):
            wanted = "(Box with an axis, bounded Box of floats with one); use a wrapper to convert"
            found = f"{options.env_id} has the spaces {(obs_space, space)}"
            raise SystemExit(f"{found}, expected {wanted}")
        self.agent = Agent(obs_space, self.space, options).to(options.device)
        if options.first_ready and hasattr(envs, "device"):
            raise SystemExit("--first-ready is for envs in processes; leave it out, or --device")
        is_captured = options.graphs == "on" or (options.graphs == "auto" and self.is_on_gpu)
        num_updates = int(options.update_ratio * (options.total_steps - options.learning_starts))
        how = gradient_options(
            options.compile,
            num_calls=num_updates,
            num_rows=options.batch_size,
            num_weights=sum(p.numel() for p in self.agent.parameters() if p.requires_grad),
            may_split=options.threads == 1,  # else torch's own do it
            earlier=earlier,
        )
        self.gradient = Gradient(
            self.agent,
            sac_loss,
            **how,
            dtype=options.dtype,
            deferred=is_captured,
            log=log,
        )
        parameters, rate = self.gradient.parameters(), options.learning_rate
        self.optimizer = Adam(parameters, lr=rate, deferred=is_captured)
        buffer: Any = PrioritizedReplayBuffer if options.prioritized else SharedReplayBuffer
        unit: Any = Box(-1, 1, space.shape, space.dtype)
        settings: Any = {"num_envs": options.num_envs, "n_step": options.n_step}
        settings |= {"gamma": options.gamma, "seed": options.seed, "device": options.device}
        if options.storage == "memmap":
            settings |= {"storage": "memmap", "folder": options.save / REPLAY}
        self.buffer = buffer(options.capacity, obs_space, unit, **settings)
        self.drawn = self.buffer.new_batch(options.batch_size)
        self.noise = torch.zeros(2, options.batch_size, *space.shape, device=options.device)
        self.ones = torch.ones(options.batch_size, device=options.device)
        self.generator = torch.Generator(options.device).manual_seed(options.seed)
        self.writer, self.ids = TransitionWriter(envs, self.buffer), np.arange(envs.num_envs)
        self.rng = np.random.default_rng(options.seed)  # of the actions at the start
        self.held = np.zeros_like(envs.action_space.sample())
        self.returns = np.zeros(len(self.ids))  # of the open episodes
        self.num_episodes = np.zeros(len(self.ids), np.int32)  # seen of envs on a device
        self.low, self.high = (torch.from_numpy(x).to(options.device) for x in bounds_of(space))
        self.steps = self.num_updates = 0
        if is_captured:  # from here on it is replayed, and waits for nothing
            generators = [self.buffer.generator, self.generator]
            generators = [one for one in generators if self.is_on_gpu]
            self.learn = Graph(
                self.learn, options.device, generators=generators, log=print,
                is_timed=options.profile,
            )  # fmt: skip

    @property
    def is_on_gpu(self) -> bool:
        return torch.device(self.options.device).type == "cuda"

    def start(self) -> None:
        """Reset the envs."""
        self.obs, _ = self.envs.reset(seed=self.options.seed + self.steps)
        self.writer.reset(self.obs)
        self.returns[:] = 0
        self.num_episodes[:] = 0
        if self.options.first_ready:
            self.send(self.obs, self.ids)

    def choose(self, obs: Any, ids: np.ndarray) -> Any:
        """Return actions from -1 to 1, at the start random ones, each held for a while.

        Of observations on a device they are a tensor there.
        """
        with self.timing.phase("policy"):
            if self.steps < self.options.learning_starts:
                if self.steps // len(self.ids) % self.options.hold == 0:
                    self.held[ids] = self.rng.uniform(-1, 1, self.held[ids].shape)
                held = self.held[ids]
                return torch.from_numpy(held).to(obs.device) if torch.is_tensor(obs) else held
            x = torch.as_tensor(obs).float().to(self.options.device)
            shape: Any = len(x), *self.space.shape
            noise = torch.randn(shape, generator=self.generator, device=x.device)
            actions = self.agent.act(x, noise)
            if torch.is_tensor(obs):
                return actions.to(self.low.dtype)
            return actions.cpu().numpy().astype(self.held.dtype, copy=False)

    def send(self, obs: np.ndarray, ids: np.ndarray) -> None:
        actions = self.choose(obs, ids)
        self.envs.send(to_env(actions, self.space), ids)
        self.writer.sent(actions, ids)

    def collect(self) -> list[float]:
        """Step all envs, or take those that are ready; return the returns of ended episodes."""
        envs, ids = self.envs, self.ids
        if self.options.first_ready:
            batch = envs.recv(max(1, len(ids) // 2), timeout=60)
            ids, rewards = batch.env_ids, batch.rewards
            flags = batch.terminations, batch.truncations
            self.writer.received(batch)
            self.send(batch.obs, ids)
        else:
            actions = self.choose(self.obs, ids)
            given = (
                self.to_env(actions) if torch.is_tensor(actions) else to_env(actions, self.space)
            )
            result = self.obs, rewards, *flags, _ = envs.step(given)
            self.writer.step(actions, *result)
        self.steps += len(ids)
        if torch.is_tensor(rewards):  # which nobody waits for
            return []
        self.returns[ids] += rewards
        ended = ids[np.logical_or(*flags)]
        found = self.returns[ended].tolist()
        self.returns[ended] = 0
        return found

    def to_env(self, actions: Tensor) -> Tensor:
        """Turn actions from -1 to 1 into those that the env takes, on the device."""
        scaled = self.low + (actions + 1) * (0.5 * (self.high - self.low))
        return scaled.clamp(self.low, self.high)

    def ended(self) -> list[float]:
        """Wait for envs on a device, and return the newest of the returns of those that ended."""
        envs: Any = self.envs
        if not torch.is_tensor(self.obs):
            return []
        counts = envs.num_episodes.cpu().numpy()
        found = envs.last_returns.cpu().numpy()[counts != self.num_episodes].tolist()
        self.num_episodes = counts
        return found

    def check(self) -> None:
        """Raise what was found on the device since the last time, for which nobody has waited."""
        envs: Any = self.envs
        self.gradient.check()
        if torch.is_tensor(self.obs):
            envs.check()

    def draw(self) -> Batch:
        """Return transitions of the buffer, valid until the next call, and fresh noise."""
        drawn = self.buffer.sample(self.options.batch_size, self.drawn)
        noise = self.noise.normal_(generator=self.generator).unbind()
        columns = drawn.obs.float(), drawn.next_obs.float(), drawn.actions.float()
        importance = drawn.weights if self.options.prioritized else self.ones
        return Batch(*columns, drawn.rewards, drawn.discounts, importance, *noise)

    @torch.no_grad()
    def learn(self) -> dict[str, Tensor]:
        """Draw a batch, make a step of Adam for all networks, and move the targets."""
        agent, options = self.agent, self.options
        with self.timing.phase("sample"):
            batch = self.draw()
        with self.timing.phase("gradient"):
            scalars = self.gradient(batch)
        with self.timing.phase("optimizer"):
            self.optimizer.step()
            pairs = zip(agent.targets.parameters(), agent.critics.parameters(), strict=True)
            for target, weight in pairs:
                target.lerp_(weight, options.tau)
        if options.prioritized:
            errors = agent.errors(batch).abs().mean(0)
            self.buffer.update_priorities(self.drawn.indices, errors + 1e-6)
        return scalars

    def run(self, run: Run) -> None:
        """Train until the steps are made, or until a signal."""
        options, scalars = self.options, dict[str, Any]()
        self.restore(run)
        with run.progress(options.env_id, self.steps, options.total_steps) as progress:
            while self.steps < options.total_steps and not run.should_stop:
                before = self.steps
                returns = self.collect()
                run.add_episodes(self.steps, returns)
                due = options.update_ratio * (self.steps - options.learning_starts)
                with self.timing.phase("learner"):
                    while self.num_updates < due:
                        scalars = self.learn()
                        self.num_updates += 1
                    if is_due := before // 200 < self.steps // 200:
                        self.check()
                        returns = self.ended()
                if is_due:
                    run.add_episodes(self.steps, returns)
                    recent, speed = run.recent_return(), progress.speed(self.steps)
                    run.log(self.steps, {"return": recent, "steps_per_second": speed, **scalars})
                    progress.show(self.steps, f"return {recent:.1f}, {speed:.0f} steps/s")
                if run.is_due(self.steps):
                    self.save(run)
            progress.show(self.steps)
        self.save(run)

    def report(self) -> str:
        """Say where the time went; of a graph the device says it."""
        graphs = {"update": self.learn} if isinstance(self.learn, Graph) else {}
        told = describe_graphs(graphs)
        note = told and f"\nof this the table has the first calls only:\n{told}"
        return f"{self.timing.report()}{note}"

    def save(self, run: Run) -> None:
        self.check()
        run.write_json("gradient", self.gradient.describe())
        run.save({**self.parts(), **{name: getattr(self, name) for name in NUMBERS}})

    def restore(self, run: Run) -> None:
        """Go on where the run's checkpoint was made, or begin."""
        others = {name: part for name, part in self.parts().items() if name != "buffer"}
        if (state := run.restore(others)) is None:
            return self.start()
        vars(self).update({name: state[name] for name in NUMBERS})
        if torch.is_tensor(self.obs):
            self.obs = self.obs.to(self.options.device)
            self.num_episodes = cast("Any", self.envs).num_episodes.cpu().numpy()
        begins_anew = bool(run.not_restored) or self.options.first_ready
        self.writer.reset(self.obs)  # cuts the open episodes of the buffer, which comes only now
        run.restore({"buffer": self.buffer})
        if begins_anew:
            self.start()

    def parts(self) -> dict[str, Any]:
        """What has a state; envs that are stepping, as first-ready ones are, can't be saved."""
        names = PARTS if self.options.first_ready else (*PARTS, "envs")
        return {name: getattr(self, name) for name in names}


def is_bounded(space: Box) -> bool:
    """Whether there is a middle between the bounds; some stand for none, as the largest floats."""
    with np.errstate(over="ignore"):
        return space.is_bounded() and bool(np.isfinite(space.high - space.low).all())


def bounds_of(space: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and largest actions, as arrays of their own."""
    return space.low.copy(), space.high.copy()


def to_env(actions: np.ndarray, space: Any) -> np.ndarray:
    """Turn actions from -1 to 1 into those that the env takes."""
    low, high = space.low, space.high
    return np.clip(low + (actions + 1) * (0.5 * (high - low)), low, high, dtype=low.dtype)


def make_envs(options: Options) -> VecEnv:
    """Make the envs to train in; compiled ones where the networks are."""
    given: Any = {"backend": options.backend, **options.env_kwargs}
    is_gpu = torch.device(options.device).type == "cuda"
    if options.backend in (None, "auto") and is_gpu and is_compiled(options):
        given["backend"] = "cuda"
    if given["backend"] == "cuda" and is_gpu:
        given["device"] = options.device
    return make_vec(options.env_id, options.num_envs, autoreset_mode="SameStep", **given)


def on_cpu(options: Options) -> Any:
    """Return how to make envs to play in, which are on the CPU."""
    backend = "jit" if options.backend == "cuda" else options.backend
    return {"backend": backend, **options.env_kwargs}


def is_compiled(options: Options) -> bool:
    """Whether the env is a compiled one, which may be on a device."""
    env_kwargs: Any = options.env_kwargs
    try:  # which makes none of another kind
        make_vec(options.env_id, 1, backend="jit", **env_kwargs).close()
    except ValueError:
        return False
    return True


def load_policy(options: Options, num_envs: int) -> tuple[VecEnv, Callable[[Tensor], np.ndarray]]:
    """Return envs and the policy of a run, for `vecenv play`."""
    envs = make_vec(options.env_id, num_envs, **on_cpu(options))
    space: Any = envs.single_action_space
    agent = Agent(cast("Box", envs.single_observation_space), space, options)
    agent.load_state_dict(load_checkpoint(options.save / "checkpoint/last.pt")["state"]["agent"])
    return envs, lambda obs: to_env(agent.act(obs.float()).numpy(), space)


REPLAY = "replay"  # folder of the replay buffer in that of the run
PARTS = "agent", "optimizer", "buffer", "generator", "rng"
NUMBERS = "steps", "num_updates", "obs", "held", "returns"


def main(options: Options) -> EvaluationResult:
    """Train, save, evaluate and report; return the evaluation."""
    if options.alpha is not None and not options.alpha > 0:
        raise SystemExit(f"--alpha {options.alpha}: expected a number above 0; 1e-9 is nearly none")
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)  # numbers below 1e-38 take long and change nothing
    torch.empty(2**23 - 2**10)  # freed at once, which makes glibc keep memory freed later
    torch.manual_seed(options.seed)
    settings: Any = {"save_every": options.save_every, "tensorboard": options.tensorboard}
    settings["overwrite"] = options.overwrite
    settings["may_change"] = "total_steps", "eval_episodes", *settings, "profile"
    title = f"{options.env_id}, seed {options.seed}"
    if options.device != "cpu" and not torch.cuda.is_available():
        raise SystemExit(f"--device {options.device}: torch finds no such device; leave it out")
    try:
        with Run(options.save, options, options.resume, **settings) as run:
            earlier = run.read_json("gradient") if options.resume else None
            envs = make_envs(options)
            if not options.resume:  # of a run that is overwritten
                shutil.rmtree(options.save / REPLAY, ignore_errors=True)
            trainer = Trainer(options, envs, earlier, log=print)
            if options.profile:
                envs.timing.enable()
            trainer.run(run)
            if options.profile and envs.timing.total_ns:
                print(trainer.report())
            trainer.buffer.close()
            envs.close()
            made = f"{trainer.steps} of {options.total_steps} steps, {trainer.num_updates} updates"
            note = f"; go on with {run.resume_command}" if run.should_stop else ""
            print(f"{title}: {made}, {run.seconds:.0f} s{note}")
            run.draw_curve(title)
    except (RunError, FloatingPointError) as error:
        raise SystemExit(str(error)) from None

    def act(obs: Tensor) -> np.ndarray:
        return to_env(trainer.agent.act(obs.float()).cpu().numpy(), trainer.space)

    count, device = options.eval_episodes, options.device
    with evaluating(f"{count} episodes"):
        result = evaluate(act, options.env_id, count, device=device, **on_cpu(options))
    run.write_json("evaluation", {"mean": result.mean, "ci95": result.ci95})
    print(result)
    return result


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
