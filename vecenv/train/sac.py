"""SAC for Box observations and bounded Box actions: `vecenv train Pendulum-v1`.

T. Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", 2018 (arXiv 1812.05905).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor, nn
from torch.distributions import Normal

from vecenv import VecEnv
from vecenv.core.batches import leaf_by_leaf
from vecenv.learn import Adam
from vecenv.train.networks import Encoders, rectified
from vecenv.train.options import OptionsError
from vecenv.train.replay import Batch, Replay, ReplayOptions, TargetAgent

__all__ = ["SAC", "Agent", "Critics", "Options", "load_policy", "main", "sac_loss", "to_env"]


@dataclass
class Options(ReplayOptions):
    """Options of SAC."""

    env_id: str = "Pendulum-v1"  # registered id, also "module:id"
    total_steps: int = 20_000  # env steps to train for, those of a resumed run included
    num_envs: int = 1  # envs stepped side by side
    hold: int = 1  # steps for which each of the random actions at the start is held
    alpha: float | None = None  # entropy weight; None learns it, for minus the action's size
    hidden: tuple[int, ...] = (256, 256)  # units of the ReLU layers of each network
    first_ready: bool = False  # envs step while the learner learns; for the backend async
    graphs: Literal["auto", "on", "off"] = "auto"  # an update as a CUDA graph; auto: on a device


class Linears(nn.Module):
    """`count` linear layers side by side, (count, B, K) to (count, B, N), as one product."""

    def __init__(self, count: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = inputs**-0.5  # as nn.Linear
        self.weight = nn.Parameter(torch.empty(count, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(count, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor, *, frozen: bool = False) -> Tensor:
        """Return x @ weight + bias; frozen: gradients pass to x, not to weight and bias."""
        weight, bias = (x.detach() if frozen else x for x in (self.weight, self.bias))
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


class Agent(TargetAgent):
    """Actor, two critics and their targets, and the entropy's weight. Actions are -1 to 1."""

    FOLLOWS: ClassVar = ("critics", "targets")

    def __init__(self, envs: VecEnv, options: Options) -> None:
        super().__init__()
        space: Any = envs.single_action_space
        is_row = isinstance(space, Box) and len(space.shape) == 1 and space.is_bounded()
        with np.errstate(over="ignore"):  # some bounds stand for none, as the largest floats
            is_row = is_row and bool(np.isfinite(space.high - space.low).all())
        if not (is_row and space.dtype in (np.float32, np.float64)):
            wanted = "a bounded Box of floats with one axis; use a wrapper"
            raise OptionsError(f"actions are {space}, expected {wanted}")
        self.encoders = Encoders(envs.single_observation_space)  # without weights
        if self.encoders.has_pictures:
            raise OptionsError("observations have pictures, which SAC has no layers for; take PPO")
        num_inputs, self.num_actions = self.encoders.num_features, len(space.low)
        widths = num_inputs, *options.hidden
        layers = *rectified(*widths), nn.Linear(widths[-1], 2 * self.num_actions)
        self.actor = nn.Sequential(nn.Flatten(), *layers)
        self.critics = Critics(2, num_inputs + self.num_actions, *options.hidden, 1)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        log_alpha = torch.tensor(math.log(1.0 if options.alpha is None else options.alpha))
        self.log_alpha = nn.Parameter(log_alpha, requires_grad=options.alpha is None)

    def draw(self, obs: Tensor, noise: Tensor | float) -> tuple[Tensor, Tensor]:
        """Draw actions at observations (B, ...), with normal noise, float32 (B, A).

        Returns:
            Actions from -1 to 1, float32 (B, A), and their log-densities, float32 (B,).
        """
        mean, log_std = self.actor(self.encoders(obs)).float().chunk(2, -1)
        normal = Normal(mean, log_std.clamp(-20, 2).exp(), validate_args=False)
        raw = mean + normal.scale * noise
        # The normal density over tanh' = 1 - tanh^2, whose logarithm must not be -inf.
        log_slope = 2 * (math.log(2) - raw - nn.functional.softplus(-2 * raw))
        return raw.tanh(), (normal.log_prob(raw) - log_slope).sum(-1)

    @torch.no_grad()
    def act(self, obs: Tensor, noise: Tensor | float = 0.0) -> Tensor:
        """Return actions (B, A) for obs (B, *obs_shape); without noise the most likely ones."""
        return self.draw(obs, noise)[0]

    def errors(self, batch: Batch) -> Tensor:
        """Return how far the critics, (2, B), are above the rewards and the value after them.

        That is the lower of the targets' values of an action drawn there, and its entropy.
        """
        with torch.no_grad():
            actions, log_probs = self.draw(batch.next_obs, batch.next_noise)
            values = self.targets(self.encoders(batch.next_obs), actions).amin(0)
            values = values - self.log_alpha.exp() * log_probs
            goals = batch.rewards + batch.discounts * values
        return self.critics(self.encoders(batch.obs), batch.actions) - goals


def sac_loss(agent: Agent, batch: Batch, options: Options) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of three losses, of which each weight gets the gradient of one, and scalars.

    As in the code of the paper's authors, all three are of the weights before the update.
    """
    alpha = agent.log_alpha.exp().detach()
    critic_loss = (batch.importance * agent.errors(batch).square()).sum(0).mean() / 2
    actions, log_probs = agent.draw(batch.obs, batch.noise)
    values = agent.critics(agent.encoders(batch.obs), actions, frozen=True).amin(0)
    actor_loss = (alpha * log_probs - values).mean()
    entropy = -log_probs.detach().mean()
    alpha_loss = agent.log_alpha * (entropy + agent.num_actions)
    scalars = {"critic_loss": critic_loss, "actor_loss": actor_loss, "entropy": entropy}
    return critic_loss + actor_loss + alpha_loss, scalars


class SAC(Replay):
    """SAC; see `Trainer` for what can be replaced."""

    Options = Options
    make_agent = Agent
    loss = staticmethod(sac_loss)
    LOG_STEPS: ClassVar = 200
    STATE = (*Replay.STATE, "generator", "held", "num_episodes")

    def __init__(self, options: Options, envs: Any, agent: Any = None) -> None:
        super().__init__(options, envs, agent)
        if options.first_ready and self.is_on_device:
            raise OptionsError("--first-ready is for envs in processes; leave it out, or --device")
        space, device = envs.single_action_space, torch.device(options.device)
        is_captured = options.graphs == "on" or (options.graphs, device.type) == ("auto", "cuda")
        actions, rate = Box(-1, 1, space.shape, space.dtype), options.learning_rate
        self.set_up(envs.single_observation_space, actions, is_captured)
        self.optimizer = Adam(self.gradient.parameters(), lr=rate, deferred=is_captured)
        self.noise = torch.zeros(2, options.batch_size, *space.shape, device=device)
        self.generator = torch.Generator(device).manual_seed(options.seed)
        self.ids = np.arange(envs.num_envs)
        self.held = np.zeros(envs.action_space.shape, space.dtype)  # random actions at the start
        self.num_episodes = np.zeros(len(self.ids), np.int32)  # seen of envs on a device
        self.bounds: Any = space.low, space.high
        if self.is_on_device:
            self.bounds = [torch.tensor(bound, device=device) for bound in self.bounds]
        if is_captured:  # from here on it is replayed, and waits for nothing
            drawn_with = [self.buffer.generator, self.generator] if device.type == "cuda" else []
            self.capture("learn", generators=drawn_with)

        if options.first_ready:  # envs that are stepping can't be saved
            self.STATE = tuple(name for name in self.STATE if name != "envs")

    def start(self) -> None:
        """Reset the envs."""
        super().start()
        self.num_episodes[:] = 0
        if self.options.first_ready:
            self.send(self.obs, self.ids)

    def choose(self, obs: Any, ids: Any = ...) -> Any:
        """Return actions from -1 to 1 of the envs `ids`, random ones at the start."""
        options, device, held = self.options, self.noise.device, self.held
        if self.steps < options.learning_starts:
            if self.steps // len(self.ids) % options.hold == 0:
                held[ids] = self.rng.uniform(-1, 1, held[ids].shape)
            return torch.from_numpy(held[ids]).to(device) if self.is_on_device else held[ids]
        x = leaf_by_leaf(lambda part: torch.as_tensor(part).to(device), obs)
        noise = torch.randn(held[ids].shape, generator=self.generator, device=device)
        actions = self.agent.act(x, noise)
        if self.is_on_device:
            return actions.to(self.bounds[0].dtype)
        return actions.cpu().numpy().astype(held.dtype, copy=False)

    def to_env(self, actions: Any) -> Any:
        """Turn actions from -1 to 1 into those that the env takes."""
        return to_env(actions, *self.bounds)

    def send(self, obs: Any, ids: np.ndarray) -> None:
        """Begin steps of the envs `ids` (n,), with actions for their observations."""
        with self.timing.phase("policy"):
            actions = self.choose(obs, ids)
        self.envs.send(self.to_env(actions), ids)
        self.writer.sent(actions, ids)

    def collect(self) -> list[float]:
        """Step all envs, or take those that are ready; return the returns of ended episodes."""
        if not self.options.first_ready:
            return super().collect()
        batch = self.envs.recv(max(1, len(self.ids) // 2), timeout=60)
        self.writer.received(batch)
        self.send(batch.obs, batch.env_ids)
        self.steps += len(batch.env_ids)
        flags = batch.terminations, batch.truncations
        return self.note_returns(batch.rewards, flags, batch.env_ids)

    def ended(self) -> list[float]:
        """Wait for envs on a device, and return the newest of the returns of those that ended."""
        if not self.is_on_device:
            return []
        counts = self.envs.num_episodes.cpu().numpy()
        found = self.envs.last_returns.cpu().numpy()[counts != self.num_episodes].tolist()
        self.num_episodes = counts
        return found

    def draw(self) -> Batch:
        """Return transitions of the buffer, valid until the next call, and fresh noise."""
        batch, noise = super().draw(), self.noise.normal_(generator=self.generator)
        names = "obs", "next_obs", "actions"
        seen = {k: leaf_by_leaf(lambda part: part.float(), getattr(batch, k)) for k in names}
        return batch._replace(**seen, noise=noise[0], next_noise=noise[1])

    @staticmethod
    def player(envs: VecEnv, agent: Agent, options: Options) -> Callable[[Tensor], np.ndarray]:
        """Return the most likely actions, or with `sample` drawn ones, of observations."""
        space: Any = envs.single_action_space

        def act(obs: Any, *, sample: bool = False) -> np.ndarray:
            drawn = torch.randn(envs.num_envs, *space.shape) if sample else torch.zeros(())
            noise = drawn.to(options.device)
            return to_env(agent.act(obs, noise).cpu().numpy(), space.low, space.high)

        return act

    @staticmethod
    def check_options(options: Options) -> None:
        """Refuse an entropy weight that is none."""
        if (alpha := options.alpha) is not None and not alpha > 0:
            raise OptionsError(f"--alpha {alpha}: expected a number above 0; 1e-9 is nearly none")


def to_env(actions: Any, low: Any, high: Any) -> Any:
    """Turn actions (N, A) from -1 to 1 into those between bounds (A,): arrays, or tensors."""
    return (low + (actions + 1) * (0.5 * (high - low))).clip(low, high)


load_policy, main = SAC.load_policy, SAC.main
