"""PPO on any vector env, after J. Schulman et al., 2017: `vecenv train CartPole-v1 --algo ppo`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torch import Tensor, nn
from torch.nn import functional as F

from buffers import RolloutBuffer
from vecenv import RayVectorEnv, VecEnv, mask_width
from vecenv.core.spaces import leaf_by_leaf
from vecenv.learn import Adam, Graph, Moments, Run, quick_products
from vecenv.learn.compiled import second_thread
from vecenv.train import networks
from vecenv.train.networks import Choices, Encoders, Memory, Normals, mlp
from vecenv.train.options import EnvOptions, GradientOptions, OptionsError, RunOptions, is_on_device
from vecenv.train.policy import load_agent
from vecenv.train.trainer import Trainer

__all__ = ["PPO", "Agent", "Options", "RolloutOptions", "main", "ppo_loss"]


@dataclass
class RolloutOptions(RunOptions, GradientOptions):
    """Options of trainers that learn from rollouts."""

    num_steps: int = 128  # steps of each env between two updates
    num_epochs: int = 4  # passes over the rollout in an update
    num_minibatches: int = 8  # gradient steps in a pass
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation
    clip: float = 0.2  # probability ratios beyond 1 +- clip gain nothing
    value_weight: float = 1.0  # of half the squared error of the values in the loss
    entropy_weight: float = 0.0  # of the entropy bonus in the loss
    entropy_falls: bool = False  # its weight falls linearly to 0, as the learning rate does
    max_grad_norm: float = 0.5  # larger gradient norms are scaled down to this
    hidden: tuple[int, ...] | None = None  # units of layers; see docs/learning.md for the default
    recurrent: Literal["no", "gru"] = "no"  # a memory between observations and networks
    memory_size: int = 128  # units of the memory
    sequence_length: int = 32  # most steps through which gradients of a memory go
    normalize: bool = False  # observations to mean 0 and variance 1, returns to variance 1
    masks: bool = True  # take allowed actions only, if the env says which these are
    graphs: bool = True  # rollouts and passes of envs on a device as CUDA graphs; not if profiled
    save_every: int = 200_000  # env steps between two checkpoints


@dataclass
class Options(RolloutOptions, EnvOptions):
    """Options of PPO."""

    learning_rate: float = 1.5e-3  # Adam's at the start; it falls linearly to 0
    rank_timeout: float = 600.0  # seconds that a process of torchrun may keep the others waiting
    load: Path | None = None  # run, or checkpoint, whose policy to begin with


class Agent(nn.Module):
    """Actor and critic, each with its own hidden layers; behind pictures they share them.

    Attributes:
        encoders: By part of the observation, see `vecenv.train.networks`.
        trunk: Hidden layers that actor and critic share; empty without pictures.
        memory: The recurrent cell; None without one.
        actor, critic: Map vectors (B, F) to outputs (B, sum(sizes)), and to (B, 1).
        sizes: Number of choices for each part of an action; 1 for a real number.
        returns: Moments of returns; the critic's values are in units of their deviation.
    """

    entropy_weight: Tensor
    start: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, envs: Any, options: RolloutOptions) -> None:
        super().__init__()
        self.action_space: Any = envs.single_action_space
        self.encoders = Encoders(envs.single_observation_space, options.normalize)
        num_features, widths = self.encoders.num_features, options.hidden
        self.trunk = nn.Sequential()
        if self.encoders.has_pictures:
            if widths is None:  # about as many units as inputs
                widths = (min(max(2 ** int(math.log2(num_features)), 128), 512),)
            self.trunk = networks.rectified(num_features, *widths, layer=networks.linear)
            num_features, widths = [num_features, *widths][-1], ()
        widths = (64, 64) if widths is None else widths
        self.memory: Memory | None = None
        if options.recurrent != "no":
            self.memory = Memory(num_features, options.memory_size)
            num_features = options.memory_size
        self.is_discrete = isinstance(self.action_space, Discrete | MultiDiscrete)
        self.sizes = networks.sizes_of(self.action_space)
        self.actor = mlp(num_features, *widths, sum(self.sizes), gain=0.01)
        self.critic = mlp(num_features, *widths, 1, gain=1.0)
        if not self.is_discrete:
            self.log_std = nn.Parameter(torch.zeros(len(self.sizes)))
        self.returns = Moments()
        # Constants of all actions, as buffers: on a device, envs then wait for nothing.
        for name in ("start", "low", "high"):
            bound = getattr(self.action_space, name, None)
            tensor = None if bound is None else torch.from_numpy(np.array(bound))
            self.register_buffer(name, tensor, persistent=False)
        # A buffer, because it may change: each new constant would compile the loss anew.
        self.register_buffer("entropy_weight", torch.tensor(options.entropy_weight), False)

    def features(self, obs: Any) -> Tensor:
        """Return vectors (B, F) of observations (B, ...); observations may be a dict."""
        return self.trunk(self.encoders(obs))

    def policy(self, features: Tensor, mask: Tensor | None = None) -> Choices | Normals:
        """Return the distribution of actions for vectors (B, F) of `features` or `step`.

        `mask` (B, sum(sizes)) is 0 for choices that are not allowed; None allows all.
        """
        outputs = self.actor(features).float()
        if not self.is_discrete:
            return Normals(outputs, self.log_std.exp().expand_as(outputs), validate_args=False)
        if mask is not None:
            outputs = torch.where(mask.bool(), outputs, -1e9)
        most = max(self.sizes)
        if min(self.sizes) < most:  # pad with choices that are never taken
            parts = zip(outputs.split(self.sizes, 1), self.sizes, strict=True)
            outputs = torch.cat([F.pad(x, (0, most - n), value=-2e9) for x, n in parts], 1)
        return Choices(outputs.view(-1, len(self.sizes), most))

    def value(self, features: Tensor) -> Tensor:
        """Return values, float32 (B,), in units of the returns' deviation, at features (B, F)."""
        return self.critic(features).squeeze(1).float()

    def step(self, obs: Any, state: Any = None, is_first: Any = None) -> tuple[Tensor, Any]:
        """Return vectors (B, F) for observations (B, ...), and the memory's new state.

        With a memory, `state` is its state before, float32 (B, M), and `is_first` bool (B,) says
        where it starts anew. L steps of S sequences, (L, S, ...), give vectors (L * S, F).
        """
        if self.memory is None:
            return self.features(obs), None
        if is_first.ndim == 2:
            obs = leaf_by_leaf(lambda x: x.flatten(0, 1), obs)
        begins, states = is_first.reshape(-1, is_first.shape[-1]), []
        features = self.features(obs).unflatten(0, begins.shape)
        for seen, first in zip(features, begins, strict=True):
            states.append(state := self.memory.after(seen, state, first))
        return torch.cat(states), state

    def act(
        self, obs: Any, quantiles: Any = None, mask: Any = None, *memory: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return actions (B, K) and the new state of the memory, None without one.

        `quantiles`, float32 (B, K) in 0..1, select actions from the distribution at observations
        (B, ...); None takes the likeliest ones. `mask` is as in `policy`. `memory` is the state and
        where it starts anew, as in `step`.
        """
        features, state = self.step(obs, *memory)
        policy = self.policy(features, mask)
        return policy.mode if quantiles is None else policy.icdf(quantiles), state

    def to_env(self, actions: Any) -> Any:
        """Turn actions into those of the env: an array, or a tensor on a device."""
        own: Any = self if isinstance(actions, Tensor) else self.action_space
        if self.is_discrete:
            return actions + own.start
        found: Any = actions.clip(own.low, own.high)
        return found if own is self else found.astype(own.dtype, copy=False)


def ppo_loss(agent: Agent, batch: Any, options: RolloutOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a minibatch, a mean over rows, and further means over rows to log.

    `batch` comes from `buffers.rollout`; an agent with a memory gets sequences. Rows that are only
    padding have weight 0 in `weights`.
    """
    first = (None, None)
    if agent.memory is not None:  # sequences (L, S, ...)
        first = batch.initial_states["state"], batch.is_first
    features, _ = agent.step(batch.obs, *first)
    if (mask := batch.extras.get("action_mask")) is not None:
        mask = mask.flatten(0, -2)
    policy, values = agent.policy(features, mask), agent.value(features)
    log_probs = policy.log_prob(batch.actions.view(len(features), -1)).view_as(batch.returns)
    log_ratio = log_probs - batch.log_probs
    ratio = log_ratio.exp()
    gain = batch.advantages * ratio
    clipped = batch.advantages * ratio.clamp(1 - options.clip, 1 + options.clip)
    errors = (values.view_as(batch.returns) - batch.returns).square()
    rows = {"policy_loss": -torch.minimum(gain, clipped), "value_loss": errors / 2}
    loss = rows["policy_loss"] + options.value_weight * rows["value_loss"]
    rows["entropy"] = -batch.log_probs  # of the policy that acted, as a mean over its own actions
    if options.entropy_weight:
        rows["entropy"] = policy.entropy().view_as(batch.returns)
        loss = loss - agent.entropy_weight * rows["entropy"]
    rows |= {"approx_kl": ratio - 1 - log_ratio, "clipfrac": (gain > clipped).float()}
    share = batch.weights / batch.weights.sum()  # padding rows count nothing
    return (loss * share).sum(), {k: (row.detach() * share).sum() for k, row in rows.items()}


class PPO(Trainer):
    """Collects rollouts and learns from them; see `Trainer` for what can be replaced.

    `rollout` is the `RolloutBuffer`. `memory` is the state of the agent's memory, float32 (N, M),
    or None. `lengths` has the steps of the episodes that ended on this rank in the last update.
    """

    Options = Options
    make_agent = Agent
    loss = staticmethod(ppo_loss)
    MAY_CHANGE: ClassVar = Trainer.MAY_CHANGE | {"total_steps", "rank_timeout"}
    STATE = (*Trainer.STATE, "rollout", "memory")
    memory: Tensor | None = None

    def __init__(self, options: Any, envs: Any, agent: Any = None) -> None:
        super().__init__(options, envs, agent)
        if (file := getattr(options, "load", None)) is not None:
            load_agent(self.agent, Path(file))
        ranks, cell, make_agent = self.ranks, self.agent.memory, self.make_agent
        self.first = ranks.rank * envs.num_envs  # its first env, among those of all ranks
        self.rollout_steps = ranks.size * envs.num_envs * options.num_steps
        self.is_captured = options.graphs and not options.profile and is_on_device(envs)
        if cell is not None:
            self.memory = torch.zeros(envs.num_envs, cell.hidden_size, device=options.device)
        self.start()
        if isinstance(envs, RayVectorEnv):
            if cell is not None:
                raise OptionsError("--recurrent: Ray's actors keep no memory; use --backend async")
            envs.set_policy(lambda actor_envs: Actor(actor_envs, options, make_agent))
        count, rows = options.num_minibatches, envs.num_envs * options.num_steps
        calls = options.total_steps // self.rollout_steps * options.num_epochs * count
        given: Any = {"ranks": ranks, "log": print if ranks.rank == 0 else None}
        # Rows of a sequence depend on each other, so no gradient of sequences is split.
        given |= {"may_split": cell is None, "deferred": self.is_captured}
        self.gradient = self.make_gradient(calls, rows // count, **given)
        given = {"max_grad_norm": options.max_grad_norm, "deferred": self.is_captured, "eps": 1e-5}
        self.optimizer = Adam(self.gradient.parameters(), lr=options.learning_rate, **given)
        if self.is_captured:  # from here on, CUDA graphs replay these functions, without waits
            # Sums over ranks stay outside: in a graph they wait forever for a rank that has ended.
            given = {"generators": [self.rollout.generator], "log": print}
            for name in ["collect", "compute_advantages", "learn"][: 3 if ranks.size == 1 else 2]:
                setattr(self, name, Graph(getattr(self, name), options.device, **given))

    def start(self) -> None:
        """Reset the envs and begin a rollout."""
        options, envs = self.options, self.envs
        obs, _ = envs.reset(seed=options.seed + self.steps + self.first)
        if self.rollout is None:
            given: Any = {k: getattr(options, k) for k in ("gamma", "gae_lambda", "device")}
            given |= {"autoreset_mode": envs.autoreset_mode, "allocate": envs.allocate}
            given |= {"seed": options.seed + self.ranks.rank, "extra_columns": self.extra_columns()}
            spaces = envs.single_observation_space, envs.single_action_space
            self.rollout = RolloutBuffer(options.num_steps, envs.num_envs, *spaces, **given)
        self.rollout.start(obs)

    def extra_columns(self) -> dict[str, Any]:
        """Return spaces of further columns of the rollout; a subclass writes its own in `fill`."""
        columns = dict[str, Any]()
        if self.options.masks and self.envs.has_action_masks:
            columns["action_mask"] = MultiBinary(mask_width(self.envs.single_action_space))
            if self.ranks.rank == 0:
                print("action masks of the env are heeded")
        if self.memory is not None:
            columns["state"] = Box(-np.inf, np.inf, self.memory.shape[1:])
        return columns

    @torch.inference_mode()
    def collect(self) -> None:
        """Step all envs `num_steps` times, then compute everything that no step needed."""
        envs, rollout, count = self.envs, self.rollout, self.envs.num_envs
        # Quantiles (T, N, K) for all ranks: actions don't depend on the number of ranks.
        shape = (end := rollout.num_steps), count * self.ranks.size, len(self.agent.sizes)
        drawn = torch.rand(shape, device=rollout.device if self.is_captured else "cpu")
        drawn = drawn[:, self.first :][:, :count].clamp_(2**-24, 1 - 2**-24)
        self.quantiles = drawn.to(rollout.device)
        if isinstance(envs, RayVectorEnv):
            slots = [rollout.slot(t) for t in range(end)]
            fields = {k: x for k, x in rollout.extras.items() if k == "action_mask"}
            fields["actions"] = rollout.actions
            envs.collect(slots, self.agent.state_dict(), inputs=[self.quantiles], fields=fields)
        else:
            for t in range(end):
                envs.step(self.act(t), out=rollout.slot(t))
        # As many steps as fit the processor's cache; on a device, as many as keep it busy.
        size = max(1, (4096 if rollout.device.type == "cpu" else 2**20) // count)
        parts = [slice(t, min(t + size, end)) for t in range(0, end, size)]
        others = parts[1::2] if self.gradient.num_threads > 1 else []
        with quick_products(size * count, device=rollout.device):
            waiting = second_thread(os.getpid()).map(self.fill, others, timeout=600)
            list(chain(map(self.fill, parts[::2] if others else parts), waiting))
        rollout.count_episodes()  # with the original rewards

    def act(self, t: int) -> Any:
        """Draw the actions (N, *action_shape) of step t; note masks and states of memories."""
        rollout, state, mask, is_first = self.rollout, self.memory, None, None
        with self.timing.phase("policy"):
            if (masks := rollout.extras.get("action_mask")) is not None:
                mask = masks[t].copy_(torch.as_tensor(self.envs.action_masks()))
            if state is not None:
                rollout.extras["state"][t], is_first = state, rollout.is_first_at(t)
            found = self.agent.act(rollout.obs_at(t), self.quantiles[t], mask, state, is_first)
            rollout.actions[t] = found[0].view_as(rollout.actions[t])
            if state is not None:
                state.copy_(found[1])  # in place, because a graph reads it
        return self.agent.to_env(rollout.env_actions(t))

    @torch.inference_mode()
    def fill(self, steps: slice) -> None:
        """Compute log-probabilities and values of some steps."""
        rollout, agent, first = self.rollout, self.agent, None
        columns = {k: x[steps].flatten(0, 1) for k, x in rollout.extras.items()}
        if agent.memory is not None:
            first = torch.cat([rollout.is_first_at(t) for t in range(rollout.num_steps)[steps]])
        obs = leaf_by_leaf(lambda x: x[steps].flatten(0, 1), rollout.obs)
        features, _ = agent.step(obs, columns.get("state"), first)
        policy = agent.policy(features, columns.get("action_mask"))
        log_probs = policy.log_prob(rollout.actions[steps].reshape(len(features), -1))
        rollout.log_probs[steps] = log_probs.view(-1, rollout.num_envs)
        rollout.values[steps] = agent.value(features).view(-1, rollout.num_envs)

    @torch.inference_mode()
    def compute_advantages(self) -> None:
        """Fill advantages, and returns in the critic's unit, their standard deviation."""
        rollout, agent, end = self.rollout, self.agent, self.rollout.num_steps
        features, _ = agent.step(rollout.obs_at(end), self.memory, rollout.is_first_at(end))
        last_values, unit = agent.value(features), agent.returns.std()
        rollout.values *= unit
        rollout.compute_advantages(last_values * unit)
        rollout.values /= unit
        rollout.returns /= unit

    def minibatches(self) -> Any:
        """Yield batches of all steps, or sequences; each takes the memory of the last one."""
        rollout, count = self.rollout, self.options.num_minibatches
        given: Any = {"normalize_advantages": self.ranks.size == 1}
        if self.agent.memory is None:
            batches = rollout.minibatches(count, fixed=True, **given)
        else:
            given["length"] = min(self.options.sequence_length, rollout.num_steps)
            batches = rollout.sequences(count, initial_states=["state"], **given)
        for batch in batches:
            if self.ranks.size > 1:  # a minibatch is spread over all ranks
                self.ranks.normalize_(batch.advantages, batch.weights)
            yield batch

    def update(self) -> dict[str, float]:
        """Collect a rollout, learn from it, and begin the next one; return scalars by name."""
        self.collect()
        self.num_updates += 1
        options, rollout, agent, ranks = self.options, self.rollout, self.agent, self.ranks
        left = max(0.0, 1 - self.steps / options.total_steps)
        self.optimizer.set_lr(options.learning_rate * left)
        if options.entropy_falls:
            agent.entropy_weight.fill_(options.entropy_weight * left)
        with self.timing.phase("learner"):
            self.compute_advantages()
            means = self.learn()
            self.check()  # raise errors of deferred work
            if self.is_captured:
                rollout.check()
            ended = rollout.episodes()
            self.episodes = list(chain.from_iterable(ranks.gather(ended.returns.tolist())))
            self.lengths = ended.lengths
            returns, values = rollout.returns[rollout.valid], rollout.values[:-1][rollout.valid]
            variance = ranks.variance(returns - values) / ranks.variance(returns)
            means["explained_variance"] = 1 - variance
            if options.normalize:
                agent.returns.update(returns * agent.returns.std(), ranks=ranks)  # without the unit
                obs = leaf_by_leaf(lambda x: x[:-1][rollout.valid], rollout.obs)
                agent.encoders.absorb(obs, ranks=ranks)
            rollout.advance()
        self.steps += sum(ranks.gather(len(returns)))
        scalars = {f"losses/{name}": float(value) for name, value in means.items()}
        if len(self.lengths):
            scalars["charts/episodic_length"] = float(np.mean(self.lengths))
        return scalars

    def learn(self) -> dict[str, Tensor]:
        """Make all gradient steps of an update; return the means of the loss's scalars."""
        found = list[dict[str, Tensor]]()
        for _ in range(self.options.num_epochs):
            for batch in self.minibatches():
                found.append(self.gradient(batch))
                self.optimizer.step()
        if not found:
            raise OptionsError("a rollout has no step to learn from, only resets: more --num-steps")
        return {name: torch.stack([x[name] for x in found]).mean() for name in found[0]}

    def restore(self, run: Run, **given: Any) -> bool | None:
        """Continue from the run's checkpoint; all ranks use that of the first one."""
        begins_anew, modules = super().restore(run, **given), (self.agent, self.optimizer)
        if (ranks := self.ranks).size == 1:
            return begins_anew
        own = self.steps, self.num_updates, torch.get_rng_state()
        first, states = ranks.gather((own, [module.state_dict() for module in modules]))[0]
        if first[0] == self.steps:
            return begins_anew
        self.steps, self.num_updates, stream = first  # this rank's own values may be older
        torch.set_rng_state(stream)
        for module, state in zip(modules, states, strict=True):
            module.load_state_dict(state)
        return True

    @staticmethod
    def player(envs: Any, agent: Agent, options: RolloutOptions) -> Callable[..., np.ndarray]:
        """Return a function from observations, and where episodes begin, to the likeliest actions.

        Observations are tensors (N, ...), nested like the space, starts bool (N,), actions an
        array. `sample` draws by torch's generator; a dict `report` gets values and probabilities.
        """
        state, device = None, options.device
        if agent.memory is not None:
            state = torch.zeros(envs.num_envs, agent.memory.hidden_size, device=device)

        def act(obs: Any, starts: Tensor, report: Any = None, *, sample: bool = False) -> Any:
            nonlocal state
            mask = quantiles = None
            if sample:
                drawn = torch.rand(len(starts), len(agent.sizes))
                quantiles = drawn.clamp_(2**-24, 1 - 2**-24).to(device)
            if options.masks and envs.has_action_masks:
                mask = torch.as_tensor(envs.action_masks(), device=device)
            if report is not None:  # for `vecenv play --html`, which shows it beside the action
                features, _ = agent.step(obs, state, starts)
                report["values"] = agent.value(features) * agent.returns.std()
                if agent.is_discrete:
                    policy: Any = agent.policy(features, mask)
                    parts = zip(policy.logits.softmax(-1).unbind(1), agent.sizes, strict=True)
                    report["probabilities"] = [part[:, :n].numpy() for part, n in parts]
            actions, state = agent.act(obs, quantiles, mask, state, starts)
            shape = len(starts), *(envs.single_action_space.shape or ())
            return agent.to_env(actions.cpu().numpy().reshape(shape))

        return act


class Actor:
    """The agent inside an actor of Ray; see `RayVectorEnv.set_policy`."""

    def __init__(self, envs: VecEnv, options: Any, make_agent: Callable[..., Any] = Agent) -> None:
        self.envs, self.takes_masks, self.agent = envs, options.masks, make_agent(envs, options)
        self.to_env, self.load = self.agent.to_env, self.agent.load_state_dict

    @torch.inference_mode()
    def act(self, obs: Any, quantiles: np.ndarray) -> tuple[Tensor, dict[str, Any]]:
        """Return actions (n, *action_shape), and the masks under which they were drawn."""
        mask, found = None, dict[str, Any]()
        if self.takes_masks and self.envs.has_action_masks:  # known after the first reset
            found["action_mask"] = np.array(self.envs.action_masks(), np.int8)
            mask = torch.from_numpy(found["action_mask"])
        actions, _ = self.agent.act(*leaf_by_leaf(torch.as_tensor, (obs, quantiles)), mask)
        return actions.view(-1, *(self.envs.single_action_space.shape or ())), found


load_policy, main = PPO.load_policy, PPO.main
