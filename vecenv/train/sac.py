"""SAC for Box observations and bounded Box actions: `vecenv train Pendulum-v1`.

After T. Haarnoja et al., 2018 (arXiv 1812.05905).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor, nn
from torch.distributions import Normal

from vecenv import VecEnv
from vecenv.core.spaces import leaf_by_leaf
from vecenv.learn import Graph
from vecenv.train.networks import Encoders, rectified
from vecenv.train.options import GradientOptions, OptionsError
from vecenv.train.replay import Batch, Replay, ReplayOptions, TargetAgent

__all__ = ["SAC", "Agent", "Critics", "Options", "load_policy", "main", "sac_loss"]


@dataclass
class Options(GradientOptions, ReplayOptions):
    """Options of SAC."""

    env_id: str = "Pendulum-v1"  # registered id, also "module:id"
    total_steps: int = 20_000  # env steps to train for, those of a resumed run included
    num_envs: int = 1  # envs stepped side by side
    hold: int = 1  # steps for which each of the random actions at the start is held
    alpha: float | None = None  # entropy weight; None learns it, for minus the action's size
    hidden: tuple[int, ...] = (256, 256)  # units of the ReLU layers of each network
    graphs: bool = True  # an update on a device as a CUDA graph


class Critics(nn.Module):
    """`count` networks that estimate the value of an action; each layer is one batched product.

    `layers` are weights (count, K, N) and biases (count, 1, N) in turn.
    """

    def __init__(self, count: int, *widths: int) -> None:
        super().__init__()
        shapes = [(n, a, b) for a, b in pairwise(widths) for n in (a, 1)]
        drawn = [torch.empty(count, n, b).uniform_(-(a**-0.5), a**-0.5) for n, a, b in shapes]
        self.layers = nn.ParameterList(drawn)  # with the bounds of nn.Linear

    def forward(self, obs: Tensor, actions: Tensor, *, frozen: bool = False) -> Tensor:
        """Return values (count, B); if frozen, gradients reach the actions but not the weights."""
        layers = [x.detach() if frozen else x for x in self.layers]
        *hidden, (weight, bias) = zip(layers[::2], layers[1::2], strict=True)
        x = torch.cat([obs.flatten(1), actions], 1).expand(len(weight), -1, -1)
        for w, b in hidden:
            x = torch.baddbmm(b, x, w).relu()
        # A sum, because matrix products with one column are slow.
        return ((x * weight.mT).float().sum(-1, keepdim=True) + bias).squeeze(-1).float()


class Agent(TargetAgent):
    """Actor, critics (`network`), their targets, entropy weight. Actions are from -1 to 1."""

    def __init__(self, envs: VecEnv, options: Options) -> None:
        space: Any = envs.single_action_space
        is_row = isinstance(space, Box) and len(space.shape) == 1
        is_row = is_row and space.dtype in (np.float32, np.float64)
        with np.errstate(all="ignore"):  # some bounds mean none, such as the largest floats
            is_row = is_row and bool(np.isfinite(space.high - space.low).all())
        if not is_row:
            wanted = "a bounded Box of floats with one axis; use a wrapper"
            raise OptionsError(f"actions are {space}, expected {wanted}")
        encoders = Encoders(envs.single_observation_space)  # they have no weights
        if encoders.has_pictures:
            raise OptionsError("observations have pictures, which SAC has no layers for; take PPO")
        num_inputs, num_actions = encoders.num_features, len(space.low)
        widths = num_inputs, *options.hidden
        layers = *rectified(*widths), nn.Linear(widths[-1], 2 * num_actions)
        super().__init__(Critics(2, num_inputs + num_actions, *options.hidden, 1))
        self.encoders, self.num_actions = encoders, num_actions
        self.low, self.high = space.low, space.high
        self.actor = nn.Sequential(nn.Flatten(), *layers)
        if not (alpha := 1.0 if options.alpha is None else options.alpha) > 0:
            raise OptionsError(f"--alpha {alpha}: expected a number above 0; 1e-9 is nearly none")
        log_alpha = torch.tensor(math.log(alpha))
        self.log_alpha = nn.Parameter(log_alpha, requires_grad=options.alpha is None)

    def draw(self, obs: Tensor, noise: Tensor | float) -> tuple[Tensor, Tensor]:
        """Return actions (B, A) drawn with normal noise (B, A), and their log-densities (B,)."""
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

    def to_env(self, actions: Any) -> np.ndarray:
        """Turn actions (N, A) from -1 to 1 into those of the env."""
        return (self.low + (actions + 1) * (0.5 * (self.high - self.low))).clip(self.low, self.high)

    def errors(self, batch: Batch) -> Tensor:
        """Return how far the critics (2, B) exceed the lower target with its entropy bonus."""
        with torch.no_grad():
            actions, log_probs = self.draw(batch.next_obs, batch.next_noise)
            values = self.target(self.encoders(batch.next_obs), actions).amin(0)
            values = values - self.log_alpha.exp() * log_probs
            goals = batch.rewards + batch.discounts * values
        return self.network(self.encoders(batch.obs), batch.actions) - goals


def sac_loss(agent: Agent, batch: Batch, options: Options) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of three losses and scalars; each weight gets the gradient of one loss only.

    As in the paper's code, all three losses use the weights before the update.
    """
    alpha = agent.log_alpha.exp().detach()
    critic_loss = agent.errors(batch).square().sum(0).mean() / 2
    actions, log_probs = agent.draw(batch.obs, batch.noise)
    values = agent.network(agent.encoders(batch.obs), actions, frozen=True).amin(0)
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
    STATE = (*Replay.STATE, "generator", "held")

    def __init__(self, options: Options, envs: Any, agent: Any = None) -> None:
        super().__init__(options, envs, agent)
        space, device = envs.single_action_space, torch.device(options.device)
        # Not with a profile, which would see the first update only.
        is_captured = options.graphs and not options.profile and device.type == "cuda"
        actions = Box(-1, 1, space.shape, space.dtype)
        how: Any = {"n_step": options.n_step, "device": device}
        self.set_up(envs.single_observation_space, actions, is_captured, **how)
        self.noise = torch.zeros(2, options.batch_size, *space.shape, device=device)
        self.generator = torch.Generator(device).manual_seed(options.seed)
        self.held = np.zeros(envs.action_space.shape, space.dtype)  # random actions at the start
        if is_captured:  # from here on, a CUDA graph replays it, without waits
            generators = [self.buffer.generator, self.generator]
            self.learn: Any = Graph(self.learn, device, generators=generators, log=print)

    def choose(self, obs: Any) -> np.ndarray:
        """Return actions from -1 to 1, random ones at first."""
        options, device, held = self.options, self.noise.device, self.held
        if self.steps < options.learning_starts:
            if self.steps // len(held) % options.hold == 0:
                held[:] = self.rng.uniform(-1, 1, held.shape)
            return held
        x = leaf_by_leaf(lambda part: torch.as_tensor(part).to(device), obs)
        noise = torch.randn(held.shape, generator=self.generator, device=device)
        return self.agent.act(x, noise).cpu().numpy().astype(held.dtype, copy=False)

    def draw(self) -> Batch:
        """Return transitions of the buffer, valid until the next call, and new noise."""
        batch, (now, later) = super().draw(), self.noise.normal_(generator=self.generator)
        return batch._replace(actions=batch.actions.float(), noise=now, next_noise=later)

    @staticmethod
    def player(envs: VecEnv, agent: Agent, options: Options) -> Callable[[Tensor], np.ndarray]:
        """Return a function from observations to the likeliest, or with `sample` drawn, actions."""

        def act(obs: Any, *, sample: bool = False) -> np.ndarray:
            noise = torch.randn(envs.num_envs, agent.num_actions) if sample else torch.zeros(())
            return agent.to_env(agent.act(obs, noise.to(options.device)).cpu().numpy())

        return act


load_policy, main = SAC.load_policy, SAC.main
