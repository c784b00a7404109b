"""PPO on any vector env: vectors, pictures or dicts of them in, any common kind of action out.

    vecenv train CartPole-v1 --algo ppo
    torchrun --nproc-per-node 2 examples/ppo.py --env-id CartPole-v1

J. Schulman et al., "Proximal Policy Optimization Algorithms", 2017 (arXiv 1707.06347).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torch import Tensor, nn
from torch.nn import functional as F

from buffers import RolloutBuffer
from vecenv import RayVectorEnv, VecEnv, mask_width
from vecenv.learn import (
    Adam,
    EvaluationResult,
    Gradient,
    Graph,
    Moments,
    Ranks,
    Run,
    gradient_options,
    quick_products,
)
from vecenv.train.envs import is_on_device, make_envs
from vecenv.train.networks import (
    Choices,
    Encoders,
    Memory,
    Normals,
    each,
    linear,
    mlp,
    rectified,
    sizes_of,
)
from vecenv.train.options import EnvOptions, GradientOptions, OptionsError, RunOptions
from vecenv.train.saved import load_agent, save_agent
from vecenv.train.trainer import Trainer, means_of, prepare, refusing

__all__ = [
    "DEFAULTS",
    "PPO",
    "Agent",
    "Options",
    "RolloutOptions",
    "load_policy",
    "main",
    "ppo_loss",
]

DEFAULTS: Any = {  # of other envs
    "vecenv:Cage2-v0": {"total_steps": 5_000_000, "num_envs": 256, "masks": False}
}


@dataclass
class RolloutOptions:
    """Options of trainers that learn from rollouts."""

    num_steps: int = 128  # steps of each env between two updates
    num_epochs: int = 4  # passes over the rollout in an update, at most
    num_minibatches: int = 8  # gradient steps in a pass
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation
    clip: float = 0.2  # changing a probability by a factor beyond 1 +- clip does not pay
    value_weight: float = 1.0  # of half the squared error of the values in the loss
    entropy_weight: float = 0.0  # of the entropy bonus in the loss
    max_grad_norm: float = 0.5  # longer gradients are shortened to this
    hidden: tuple[int, ...] | None = None  # units of hidden layers; by default 64 64, of actor and
    # critic each (tanh); where there are pictures 512, shared by both (ReLU)
    graphs: Literal["auto", "on", "off"] = "auto"  # rollout and update as CUDA graphs; "auto": if
    # envs are on the device, too
    num_workers: int | None = None  # processes (async) or actors (ray) for the envs


@dataclass
class Options(RunOptions, GradientOptions, RolloutOptions, EnvOptions):
    """Options of PPO."""

    learning_rate: float = 1.5e-3  # of Adam at the start; it falls linearly to 0
    wrappers: tuple[str, ...] = ()  # of every env, "module:name" each, the innermost first
    target_kl: float | None = None  # no further pass once the policy has moved further than this
    clip_values: float | None = None  # changing a value by more than this does not pay
    entropy_falls: bool = False  # its weight falls linearly to 0, as the learning rate does
    recurrent: Literal["no", "gru", "lstm"] = "no"  # a memory between observations and networks
    memory_size: int = 128  # units of the memory
    sequence_length: int = 32  # steps through which gradients of a memory go, at most
    normalize: bool = False  # observations to mean 0 and variance 1, returns to variance 1
    masks: bool = True  # take allowed actions only, if the env says which these are
    ray_address: str | None = None  # of a Ray cluster; without one, ray runs on this machine
    ray_lost: Literal["raise", "wait", "share"] = "raise"  # actors: or replace, on CPUs in use too
    rank_timeout: float = 600.0  # seconds that a process of torchrun may keep the others waiting
    save_every: int = 200_000  # env steps between two checkpoints
    load: Path | None = None  # policy.npz of an earlier run to begin with
    profile: bool = False  # report after the training where its time went


class Agent(nn.Module):
    """Actor and critic: hidden layers each, or behind pictures the same ones.

    Args:
        envs: Their single spaces count.
        options: `hidden`, `recurrent`, `memory_size`, `normalize`, `entropy_weight`.

    Attributes:
        encoders: By parts of the observation, see `vecenv.train.networks`.
        trunk: Hidden layers that actor and critic share; none without pictures.
        memory: None without one.
        actor, critic: From vectors (B, F) to outputs (B, sum(sizes)), and to (B, 1).
        sizes: Numbers of choices of each part of an action; 1 for a real number.
        returns: Moments of returns, in units of whose deviation the critic's values are.
        kind: Of which spaces and layers it is, as text.

    Raises:
        OptionsError: A space is not supported.
    """

    entropy_weight: Tensor
    start: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, envs: VecEnv, options: Options) -> None:
        super().__init__()
        space: Any = envs.single_observation_space
        self.action_space: Any = envs.single_action_space
        self.encoders = Encoders(space, options.normalize)
        num_features, has_pictures = self.encoders.num_features, self.encoders.has_pictures
        hidden = options.hidden
        if hidden is None:
            hidden = (512,) if has_pictures else (64, 64)
        self.trunk = nn.Sequential()
        widths = hidden
        if has_pictures and hidden:
            self.trunk = rectified(num_features, *hidden, layer=linear)
            num_features, widths = hidden[-1], ()
        self.memory: Memory | None = None
        if options.recurrent != "no":
            self.memory = Memory(num_features, options.memory_size, options.recurrent)
            num_features = options.memory_size
        self.is_discrete = isinstance(self.action_space, Discrete | MultiDiscrete)
        self.sizes = sizes_of(self.action_space)
        self.actor = mlp(num_features, *widths, sum(self.sizes), gain=0.01)
        self.critic = mlp(num_features, *widths, 1, gain=1.0)
        if not self.is_discrete:
            self.log_std = nn.Parameter(torch.zeros(len(self.sizes)))
        self.returns = Moments()
        # Of all actions; on a device, so that envs there wait for nothing.
        bounds = {k: getattr(self.action_space, k, None) for k in ("start", "low", "high")}
        for name, bound in bounds.items():
            tensor = None if bound is None else torch.from_numpy(np.array(bound))
            self.register_buffer(name, tensor, persistent=False)
        # It may change, and a compiled loss would have to be compiled anew for another constant.
        self.register_buffer("entropy_weight", torch.tensor(options.entropy_weight), False)
        kinds = f"hidden {hidden}, normalize {options.normalize}"
        if options.recurrent != "no":
            kinds += f", {options.recurrent} {options.memory_size}"
        self.kind = f"{(space, self.action_space)}, {kinds}"

    def features(self, obs: Any) -> Tensor:
        """Return one vector (B, F) for each observation, (B, ...) or a dict of these."""
        return self.trunk(self.encoders(obs))

    def policy(self, features: Tensor, mask: Tensor | None = None) -> Choices | Normals:
        """Return the distribution of actions; choices are possible where `mask` is not 0."""
        outputs = self.actor(features).float()
        if not self.is_discrete:
            return Normals(outputs, self.log_std.exp().expand_as(outputs), validate_args=False)
        if mask is not None:
            outputs = torch.where(mask.bool(), outputs, -1e9)
        most = max(self.sizes)
        if outputs.shape[1] < most * len(self.sizes):  # padded with choices that are never taken
            parts = outputs.split(self.sizes, 1)
            padded = [F.pad(part, (0, most - part.shape[1]), value=-2e9) for part in parts]
            outputs = torch.cat(padded, 1)
        return Choices(outputs.view(-1, len(self.sizes), most))

    def value(self, features: Tensor) -> Tensor:
        """Return values (B,)."""
        return self.critic(features).squeeze(1).float()

    def unroll(self, obs: Any, state: Tensor, is_first: Tensor) -> Tensor:
        """Return vectors (L * S, F) for sequences of observations (L, S, ...)."""
        assert self.memory is not None
        found = self.features(each(obs, lambda x: x.flatten(0, 1))).unflatten(0, is_first.shape)
        states = []
        for features, begins in zip(found, is_first, strict=True):
            state = self.memory(features, state, begins)
            states.append(state)
        return self.memory.features(torch.cat(states))

    def step(self, obs: Any, state: Any, is_first: Any) -> tuple[Tensor, Any]:
        """Return vectors (B, F) for observations (B, ...), and the memory's state after them."""
        features = self.features(obs)
        if self.memory is None:
            return features, None
        state = self.memory(features, state, is_first)
        return self.memory.features(state), state

    def act(
        self,
        obs: Any,
        quantiles: Tensor | None = None,
        mask: Tensor | None = None,
        state: Tensor | None = None,
        is_first: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return actions (B, K) and the new state of the memory, None without one.

        Actions are those at `quantiles` (B, K) in 0..1, or the likeliest ones.
        """
        features, state = self.step(obs, state, is_first)
        policy = self.policy(features, mask)
        return policy.mode if quantiles is None else policy.icdf(quantiles), state

    def absorb(self, obs: Any, returns: Tensor, ranks: Ranks | None = None) -> None:
        """Take observations and returns of a rollout into the moments that normalise them."""
        self.returns.update(returns * self.returns.std(), ranks=ranks)  # they are in units of it
        self.encoders.absorb(obs, ranks=ranks)

    def to_env(self, actions: Any) -> Any:
        """Turn actions into those that the env takes: an array, or a tensor on a device."""
        if isinstance(actions, Tensor):
            shift, low, high = self.start, self.low, self.high
            return actions + shift if self.is_discrete else actions.clamp(low, high)
        space = self.action_space
        if self.is_discrete:
            return actions + space.start
        return np.clip(actions, space.low, space.high).astype(space.dtype, copy=False)


def ppo_loss(agent: Agent, batch: Any, options: Options) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a minibatch, a mean over rows, and other means over rows to look at."""
    if agent.memory is None:
        features = agent.features(batch.obs)
    else:  # sequences (L, S, ...)
        features = agent.unroll(batch.obs, batch.initial_states["state"], batch.is_first)
    mask = batch.extras.get("action_mask")
    policy = agent.policy(features, None if mask is None else mask.flatten(0, -2))
    values = agent.value(features).view_as(batch.returns)
    log_probs = policy.log_prob(batch.actions.view(len(features), -1)).view_as(batch.returns)
    log_ratio = log_probs - batch.log_probs
    ratio = log_ratio.exp()
    gain = batch.advantages * ratio
    clipped = batch.advantages * ratio.clamp(1 - options.clip, 1 + options.clip)
    errors = (values - batch.returns).square()
    if options.clip_values is not None:
        change = (values - batch.values).clamp(-options.clip_values, options.clip_values)
        errors = torch.maximum(errors, (batch.values + change - batch.returns).square())
    rows = {"policy_loss": -torch.minimum(gain, clipped), "value_loss": errors / 2}
    loss = rows["policy_loss"] + options.value_weight * rows["value_loss"]
    rows["entropy"] = -batch.log_probs  # of the policy that acted: a mean over its own actions
    if options.entropy_weight:
        rows["entropy"] = policy.entropy().view_as(batch.returns)
        loss = loss - agent.entropy_weight * rows["entropy"]
    rows |= {"approx_kl": ratio - 1 - log_ratio, "clipfrac": (gain > clipped).float()}
    share = batch.weights / batch.weights.sum()  # rows that only fill a batch up count nothing
    return (loss * share).sum(), {k: (row.detach() * share).sum() for k, row in rows.items()}


class PPO(Trainer):
    """Collects rollouts and learns from them; see `Trainer` for what can be replaced.

    Args:
        options: How.
        envs: The caller's to close; they are reset.
        agent: On the device of the options; None makes one.
        earlier: How gradients were computed in the run that goes on.
        ranks: Processes that learn together.

    Attributes:
        episodes: Returns of the episodes that ended in the last update, of all ranks.
        rollout: The `RolloutBuffer`.
    """

    Options = Options
    make_agent = Agent
    loss = staticmethod(ppo_loss)
    MAY_CHANGE: ClassVar = Trainer.MAY_CHANGE | {
        *("total_steps", "eval_episodes", "num_workers", "ray_address", "ray_lost", "rank_timeout")
    }

    def __init__(
        self,
        options: Options,
        envs: VecEnv,
        agent: Agent | None = None,
        earlier: dict[str, Any] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(options, envs, agent, earlier)
        made: Any = self.agent
        if options.load is not None:
            load_agent(options.load, made, identity_of(envs))
        self.episodes = list[float]()
        self.ranks = ranks or Ranks()
        self.first = self.ranks.rank * envs.num_envs  # of these envs, among those of all ranks
        self.is_captured = takes_graphs(options, envs)
        torch.empty(2**23 - 2**10)  # freed at once, which makes glibc keep memory freed later
        obs, _ = envs.reset(seed=options.seed + self.first)
        self.state: Any = None  # of the memory
        if made.memory is not None:
            self.state = torch.zeros(envs.num_envs, made.memory.state_size).to(options.device)
        self.rollout = RolloutBuffer(
            options.num_steps,
            envs.num_envs,
            envs.single_observation_space,
            envs.single_action_space,
            autoreset_mode=envs.autoreset_mode,
            gamma=options.gamma,
            gae_lambda=options.gae_lambda,
            device=options.device,
            seed=options.seed + self.ranks.rank,
            allocate=envs.allocate,
            extra_columns=self.extra_columns(),
        )
        self.rollout.start(obs)
        if isinstance(envs, RayVectorEnv):
            if made.memory is not None:
                raise OptionsError(
                    f"--recurrent {options.recurrent} with --backend ray: the policy acts in "
                    "actors, which keep no memory between rollouts; use another backend"
                )
            make_agent = self.make_agent
            envs.set_policy(lambda actor_envs: Actor(actor_envs, options, make_agent))
        num_updates = options.total_steps // (options.num_envs * options.num_steps)
        how = gradient_options(
            options.compile,
            num_calls=num_updates * options.num_epochs * options.num_minibatches,
            num_rows=envs.num_envs * options.num_steps // options.num_minibatches,
            may_split=made.memory is None,  # steps of a sequence depend on each other
            earlier=earlier,
        )
        self.gradient = Gradient(
            made,
            partial(self.loss, options=options),
            **how,
            dtype=options.dtype,
            ranks=self.ranks,
            deferred=self.is_captured,
            log=print if self.ranks.rank == 0 else None,
        )
        self.threads = ThreadPoolExecutor(2)  # where what acting has left out is computed
        self.optimizer = Adam(
            self.gradient.parameters(),
            lr=options.learning_rate,
            eps=1e-5,
            max_grad_norm=options.max_grad_norm,
            deferred=self.is_captured,
        )
        if self.is_captured:  # from here on these are replayed, and wait for nothing
            # Of several ranks the sums are left out: torch does not watch those in a graph, and
            # would wait for a rank that has ended for ever.
            once = ("learn_once",) if self.ranks.size == 1 else ()
            for name in ("collect", "compute_advantages", *once):
                self.graphs[name] = Graph(
                    getattr(self, name), options.device, generators=[self.rollout.generator],
                    log=print, is_timed=options.profile,
                )  # fmt: skip
                setattr(self, name, self.graphs[name])

    def extra_columns(self) -> dict[str, Any]:
        """Return spaces of further columns of the rollout, by names.

        "action_mask" and "state" of a memory are filled when the agent acts; a subclass that adds
        others fills these in `fill`. Ray's actors record masks, and act whatever is added.
        """
        options, envs, columns = self.options, self.envs, dict[str, Any]()
        if options.masks and envs.has_action_masks:
            columns["action_mask"] = MultiBinary(mask_width(envs.single_action_space))
        if self.state is not None:
            columns["state"] = Box(-np.inf, np.inf, self.state.shape[1:])
        return columns

    def update(self) -> dict[str, float]:
        """Collect a rollout and learn from it; return scalars under their usual names."""
        options, agent, rollout = self.options, self.agent, self.rollout
        left = max(0.0, 1 - self.steps / options.total_steps)
        self.optimizer.set_lr(options.learning_rate * left)
        if options.entropy_falls:
            agent.entropy_weight.fill_(options.entropy_weight * left)
        self.collect()
        with self.envs.timing.phase("learner"):
            self.compute_advantages()
            means = self.learn()
            if is_on_device(self.envs):
                self.check()
            returns = self.ranks.gather(rollout.episodes().returns.tolist())
            self.episodes = list(chain.from_iterable(returns))
            returns, values = rollout.returns[rollout.valid], rollout.values[:-1][rollout.valid]
            variance = self.ranks.variance
            means["explained_variance"] = 1 - variance(returns - values) / variance(returns)
            if options.normalize:
                obs = each(rollout.obs, lambda x: x[:-1][rollout.valid])
                agent.absorb(obs, returns, self.ranks)
            rollout.advance()
        self.steps += sum(self.ranks.gather(len(returns)))
        self.num_updates += 1
        return {f"losses/{name}": float(value) for name, value in means.items()}

    def check(self) -> None:
        """Raise what was found on the device since the last update, for which nobody has waited."""
        envs: Any = self.envs
        envs.check()
        self.rollout.check()
        self.gradient.check()

    @torch.inference_mode()
    def collect(self) -> None:
        """Step all envs `num_steps` times, then compute the columns that no step needed."""
        envs, rollout, agent = self.envs, self.rollout, self.agent
        num_steps, num_envs = rollout.num_steps, rollout.num_envs
        masks, states = (rollout.extras.get(name) for name in ("action_mask", "state"))
        state: Any = self.state
        # In (0, 1); drawn at once for all, so that actions depend on no number of actors or ranks.
        device = rollout.device if self.is_captured else "cpu"
        shape = num_steps, num_envs * self.ranks.size, len(agent.sizes)
        quantiles = torch.rand(shape, device=device)
        quantiles = quantiles[:, self.first :][:, :num_envs].clamp_(2**-24, 1 - 2**-24)
        if isinstance(envs, RayVectorEnv):
            slots, fields = map(rollout.slot, range(num_steps)), {"actions": rollout.actions}
            if masks is not None:
                fields["action_mask"] = masks
            envs.collect(list(slots), agent.state_dict(), inputs=[quantiles], fields=fields)
        else:
            for t, (row, drawn) in enumerate(
                zip(rollout.actions, quantiles.to(rollout.device), strict=True)
            ):
                with envs.timing.phase("policy"):
                    mask, is_first = None, None
                    if masks is not None:
                        mask = masks[t].copy_(torch.as_tensor(envs.action_masks()))
                    if states is not None:
                        states[t], is_first = state, rollout.is_first_at(t)
                    actions, state = agent.act(rollout.obs_at(t), drawn, mask, state, is_first)
                    row.copy_(actions.view_as(row))
                envs.step(agent.to_env(rollout.env_actions(t)), out=rollout.slot(t))
        if state is not None:
            self.state.copy_(state)  # where a graph reads it
        # Steps whose rows fit the processor's cache; on a device as many as make it busy.
        count = max(1, (4096 if rollout.device.type == "cpu" else 2**20) // num_envs)
        parts = [slice(t, min(t + count, num_steps)) for t in range(0, num_steps, count)]
        with quick_products(count * num_envs, device=rollout.device):
            list(map(self.fill, parts) if self.is_captured else self.threads.map(self.fill, parts))
        rollout.count_episodes()  # of rewards as they came

    @torch.inference_mode()
    def fill(self, steps: slice) -> None:
        """Compute log-probabilities and values of some steps."""
        rollout, agent = self.rollout, self.agent
        columns = {k: x[steps].flatten(0, 1) for k, x in rollout.extras.items()}
        first = None
        if agent.memory is not None:
            is_first = [rollout.is_first_at(t) for t in range(rollout.num_steps)[steps]]
            first = torch.cat(is_first)
        obs = each(rollout.obs, lambda x: x[steps].flatten(0, 1))
        features, _ = agent.step(obs, columns.get("state"), first)
        policy = agent.policy(features, columns.get("action_mask"))
        log_probs = policy.log_prob(rollout.actions[steps].reshape(len(features), -1))
        rollout.log_probs[steps] = log_probs.view(-1, rollout.num_envs)
        rollout.values[steps] = agent.value(features).view(-1, rollout.num_envs)

    @torch.inference_mode()
    def compute_advantages(self) -> None:
        """Fill advantages, and returns in the critic's unit, their standard deviation."""
        rollout, agent, end = self.rollout, self.agent, self.rollout.num_steps
        is_first = None if agent.memory is None else rollout.is_first_at(end)
        last_values = agent.value(agent.step(rollout.obs_at(end), self.state, is_first)[0])
        unit = agent.returns.std()
        rollout.values *= unit
        rollout.compute_advantages(last_values * unit)
        rollout.values /= unit
        rollout.returns /= unit

    def minibatches(self) -> Any:
        """Go once through the rollout, in batches of one size: steps, or sequences of steps."""
        rollout, count = self.rollout, self.options.num_minibatches
        normalizes = self.ranks.size == 1
        if self.agent.memory is None:
            batches = rollout.minibatches(count, fixed=True, normalize_advantages=normalizes)
        else:
            length = min(self.options.sequence_length, rollout.num_steps)
            names = {"initial_states": ["state"], "normalize_advantages": normalizes}
            batches = rollout.sequences(count, length=length, **names)
        for batch in batches:
            if not normalizes:  # a minibatch is that of all ranks together
                self.ranks.normalize_(batch.advantages, batch.weights)
            yield batch

    def learn(self) -> dict[str, Tensor]:
        """Make the gradient steps of an update; return means over them of the loss's scalars."""
        options, found = self.options, list[dict[str, Tensor]]()
        for _ in range(options.num_epochs):
            means = self.learn_once()
            found.append({name: mean.clone() for name, mean in means.items()})
            if options.target_kl is not None and means["approx_kl"] > options.target_kl:
                break
        return means_of(found)

    def learn_once(self) -> dict[str, Tensor]:
        """Make the gradient steps of a pass over the rollout; return means of the scalars."""
        found = list[dict[str, Tensor]]()
        for batch in self.minibatches():
            found.append(self.gradient(batch))
            self.optimizer.step()
        if not found:
            raise OptionsError("a rollout has no step to learn from, only resets: more --num-steps")
        return means_of(found)

    def train(self, run: Run) -> None:
        """Update while another rollout fits into the steps, and until a signal says to stop."""
        options = self.options
        size = (run.read_json("ranks") if options.resume else None) or self.ranks.size
        if size != self.ranks.size:
            expected = f"resume it with torchrun --nproc-per-node {size}"
            raise OptionsError(
                f"{run.folder} is of {size} processes, here are {self.ranks.size}: {expected}"
            )
        run.write_json("ranks", size)
        parts = {"agent": self.agent, "optimizer": self.optimizer, "rollout": self.rollout}
        parts["envs"] = self.envs
        if (state := run.restore(parts)) is not None:
            self.steps = state["steps"]
            self.num_updates = state["num_updates"]
            if self.state is not None:
                self.state.copy_(state["memory"])
        if self.follow_first() or run.not_restored:
            self.rollout.start(self.envs.reset(seed=options.seed + self.steps + self.first)[0])
        total, per_rollout = options.total_steps, options.num_envs * options.num_steps
        is_shown = self.ranks.rank == 0
        with run.progress(
            options.env_id, self.steps, total, rollout_steps=per_rollout, is_shown=is_shown
        ) as progress:
            while self.steps + per_rollout <= total:
                if any(self.ranks.gather(run.should_stop)):
                    progress.print(f"stopped after {self.steps} steps: {run.resume_command}")
                    break
                with run.updating(self.num_updates + 1, self.steps):
                    scalars = self.update()
                run.add_episodes(self.steps, self.episodes)
                recent, speed = run.recent_return(), progress.speed(self.steps)
                progress.show(self.steps, f"return {recent:.1f}, {speed:.0f} steps/s")
                scalars |= {"charts/episodic_return": recent, "charts/SPS": speed}
                run.log(self.steps, scalars)
                if run.is_due(self.steps):
                    self.save(run, parts, score=recent)
            else:
                progress.fill(self.steps)  # what no rollout fits into is left out
        self.save(run, parts)

    def follow_first(self) -> bool:
        """Take over what rank 0 goes on from, if it is not the checkpoint of this rank."""
        if self.ranks.size == 1:
            return False
        own, modules = self.steps, (self.agent, self.optimizer)
        states = [module.state_dict() for module in modules]
        counts = self.steps, self.num_updates, torch.get_rng_state()
        counts, states = self.ranks.of_first((counts, states))
        if counts[0] == own:
            return False
        self.steps, self.num_updates, stream = counts
        torch.set_rng_state(stream)
        for module, state in zip(modules, states, strict=True):
            module.load_state_dict(state)
        if self.state is not None:
            self.state.zero_()
        return True

    def save(self, run: Run, parts: dict[str, Any], score: float | None = None) -> None:
        """Write a checkpoint, after how gradients are computed, which a resumed run keeps."""
        run.write_json("gradient", self.gradient.describe())
        counts = {"steps": self.steps, "num_updates": self.num_updates, "memory": self.state}
        run.save({**parts, **counts}, score=score)

    def finish(self, run: Run) -> None:
        """Save the policy, which `vecenv evaluate` plays and `--load` begins with."""
        if self.ranks.rank == 0:
            save_agent(self.options.save / "policy.npz", self.agent, identity_of(self.envs))

    def evaluate(self, episodes: int, seed: int | None = None) -> EvaluationResult:
        """Play the likeliest actions in envs of their own."""
        return super().evaluate(episodes, 1_000_000 + self.options.seed if seed is None else seed)

    @staticmethod
    def make_envs(options: Options, num_envs: int, *, on_device: bool = False) -> VecEnv:
        """Make envs to train in, or to play in; in Ray's actors, if asked."""
        given = {"num_workers": options.num_workers, "address": options.ray_address}
        given |= {"on_error": "restart" if options.ray_lost != "raise" else None}
        given |= {"shares_cpus": options.ray_lost == "share"}
        return make_envs(
            options,
            num_envs,
            on_device=on_device,
            wrappers=options.wrappers,
            vector_kwargs={name: value for name, value in given.items() if value},
        )

    @staticmethod
    def player(envs: VecEnv, agent: Agent, options: Options) -> Callable[..., np.ndarray]:
        """Return the likeliest actions as a function of observations, and where episodes begin.

        Given a dict as `report`, the function puts values and probabilities into it.
        """
        state = None
        if agent.memory is not None:
            state = torch.zeros(envs.num_envs, agent.memory.state_size, device=options.device)

        def act(obs: Any, starts: Tensor, report: dict[str, Any] | None = None) -> np.ndarray:
            nonlocal state
            mask = None
            if options.masks and envs.has_action_masks:
                mask = torch.as_tensor(envs.action_masks(), device=options.device)
            if report is not None:  # what `vecenv play --html` shows beside the action
                features, _ = agent.step(obs, state, starts)
                report["values"] = agent.value(features) * agent.returns.std()
                if agent.is_discrete:
                    policy: Any = agent.policy(features, mask)
                    parts = policy.logits.softmax(-1).unbind(1)
                    shares = [
                        part[:, :n].numpy() for part, n in zip(parts, agent.sizes, strict=True)
                    ]
                    report["probabilities"] = shares
            actions, state = agent.act(obs, None, mask, state, starts)
            return agent.to_env(actions.cpu().numpy().reshape(envs.action_space.shape))

        return act

    @classmethod
    def run(cls, options: Options, baselines: dict[str, float] | None = None) -> tuple[Run, Self]:
        """Train and save; other processes of torchrun than the first end then."""
        prepare(options)
        with refusing():
            cls.check_options(options)
            with Ranks.join(options.device, timeout=options.rank_timeout) as ranks:
                num_envs = num_own_envs(options, ranks)
                options = replace(options, device=str(ranks.device))
                rank = ranks.rank
                folder = options.save if rank == 0 else options.save / f"rank{rank}"
                if rank > 0:
                    options.tensorboard = False
                run, trainer = cls.run_in(folder, options, num_envs, baselines, ranks=ranks)
                if rank > 0:
                    raise SystemExit(0)  # the first one does the rest
        return run, trainer


class Actor:
    """The agent in an actor of Ray; see `RayVectorEnv.set_policy`."""

    def __init__(
        self, envs: VecEnv, options: Options, make_agent: Callable[[Any, Any], Any] = Agent
    ) -> None:
        self.agent, self.shape = make_agent(envs, options), envs.single_action_space.shape or ()
        self.to_env, self.envs = self.agent.to_env, envs
        self.takes_masks = options.masks

    def load(self, weights: dict[str, Tensor]) -> None:
        """Take over the weights of the learner."""
        self.agent.load_state_dict(weights)

    @torch.inference_mode()
    def act(self, obs: Any, quantiles: np.ndarray) -> tuple[Tensor, dict[str, Any]]:
        """Return actions (n, *action_shape), and the masks that they were drawn with."""
        mask, found = None, dict[str, Any]()
        if self.takes_masks and self.envs.has_action_masks:
            found["action_mask"] = np.array(self.envs.action_masks(), np.int8)
            mask = torch.from_numpy(found["action_mask"])
        x = each(obs, torch.as_tensor)
        actions, _ = self.agent.act(x, torch.as_tensor(quantiles), mask)
        return actions.view(-1, *self.shape), found


def num_own_envs(options: Options, ranks: Ranks) -> int:
    """Return how many of the envs each process steps."""
    if ranks.size == 1:
        return options.num_envs
    if options.backend == "ray":
        raise OptionsError("--backend ray has actors for its envs: start it without torchrun")
    try:
        num_envs = ranks.share_of(options.num_envs)
    except ValueError as error:
        raise OptionsError(f"--num-envs: {error}") from None
    rows = num_envs * options.num_steps
    if rows < 2 * options.num_minibatches:  # half of them may only reset an env
        raise OptionsError(
            f"--num-minibatches {options.num_minibatches}: a rollout has {rows} steps in each of "
            f"{ranks.size} processes, expected at least twice as many as minibatches"
        )
    return num_envs


def identity_of(envs: VecEnv) -> dict[str, Any]:
    """Return the tables and rules that CAGE 2 envs play by; of others nothing."""
    owner = getattr(envs, "on_host", envs)
    return getattr(getattr(owner, "scenario", None), "identity", dict)()


def takes_graphs(options: Options, envs: VecEnv) -> bool:
    """Return whether rollout and update are done by the device alone, in CUDA graphs."""
    if options.graphs == "on" and not is_on_device(envs):
        raise OptionsError("--graphs on: the envs are not on the device; leave it out")
    return options.graphs != "off" and is_on_device(envs)


load_policy, main = PPO.load_policy, PPO.main
