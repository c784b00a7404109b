"""PPO on any vector env: vectors, images or dicts of them in, any common kind of action out.

    python examples/ppo.py --env-id CartPole-v1
    torchrun --nproc-per-node 2 examples/ppo.py --env-id CartPole-v1

Change what stands between the first two lines of dashes, `Agent` and `ppo_loss`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F

from buffers import RolloutBuffer
from vecenv import RayVectorEnv, VecEnv, make_vec, mask_width
from vecenv.files import load_arrays, save_arrays
from vecenv.learn import (
    Adam,
    EvaluationResult,
    Gradient,
    Graph,
    Moments,
    RankError,
    Ranks,
    Run,
    RunError,
    describe_graphs,
    evaluate,
    evaluating,
    gradient_options,
    load_checkpoint,
    quick_products,
)

DEFAULTS: Any = {  # of other envs
    "vecenv:Cage2-v0": {"total_steps": 5_000_000, "num_envs": 256, "masks": False}
}


@dataclass
class Options:
    env_id: str = "CartPole-v1"  # registered id, also "module:id"
    env_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)  # of the env
    wrappers: tuple[str, ...] = ()  # of every env, "module:name" each, the innermost first
    total_steps: int = 100_000  # env steps to train for, at most; 0 evaluates only
    num_envs: int = 8  # envs stepped side by side, by all processes of torchrun together
    num_steps: int = 128  # steps of each env between two updates
    num_epochs: int = 4  # passes over the rollout in an update, at most
    num_minibatches: int = 8  # gradient steps in a pass
    target_kl: float | None = None  # no further pass once the policy has moved further than this
    learning_rate: float = 1.5e-3  # of Adam at the start; it falls linearly to 0
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation
    clip: float = 0.2  # changing a probability by a factor beyond 1 +- clip does not pay
    clip_values: float | None = None  # nor does changing a value by more than this
    value_weight: float = 1.0  # of half the squared error of the values in the loss
    entropy_weight: float = 0.0  # of the entropy bonus in the loss
    entropy_falls: bool = False  # that weight falls linearly to 0, as the learning rate does
    max_grad_norm: float = 0.5  # longer gradients are shortened to this
    hidden: tuple[int, ...] = (64, 64)  # units of the tanh layers, of actor and critic each
    recurrent: Literal["no", "gru", "lstm"] = "no"  # a memory between observations and networks
    memory_size: int = 128  # units of the memory
    sequence_length: int = 32  # steps through which gradients of a memory go, at most
    normalize: bool = False  # observations to mean 0 and variance 1, returns to variance 1
    masks: bool = True  # take allowed actions only, if the env says which these are
    seed: int = 1  # the same seed gives the same curve
    backend: str | None = None  # of vecenv.make_vec; "jit" keeps compiled envs on the CPU beside
    # networks on a device; with "ray" the policy acts in actors
    num_workers: int | None = None  # processes (async) or actors (ray) for the envs
    ray_address: str | None = None  # of a Ray cluster; without one, ray runs on this machine
    ray_lost: Literal["raise", "wait", "share"] = "raise"  # actors: or replace, on CPUs in use too
    device: str = "cpu"  # where the networks are: cpu, cuda; there compiled envs are, too
    rank_timeout: float = 600.0  # seconds that a process of torchrun may keep the others waiting
    dtype: Literal["float32", "bfloat16"] = "float32"  # of products in the gradient
    compile: Literal["auto", "on", "off"] = "auto"  # the gradient; "auto": if there are many rows
    graphs: Literal["auto", "on", "off"] = "auto"  # rollout and update as CUDA graphs; "auto": if
    # envs are on the device, too
    torch_threads: int = 1  # of torch, for acting
    eval_episodes: int = 100  # episodes of the deterministic policy at the end
    save: Path = Path("runs")  # folder for policy, checkpoints, learning curve and scalars
    save_every: int = 200_000  # env steps between two checkpoints
    resume: bool = False  # go on from the last checkpoint in that folder
    overwrite: bool = False  # or delete an earlier run in it
    load: Path | None = None  # policy.npz of an earlier run to begin with
    tensorboard: bool = False  # write scalars for TensorBoard
    profile: bool = False  # report after the training where its time went


# ------------------------------------------------------------------------------ what to change


class Agent(nn.Module):
    """Actor and critic: on numbers a tanh network each, on images heads of one convolutional."""

    entropy_weight: Tensor
    start: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, envs: VecEnv, options: Options) -> None:
        super().__init__()
        space: Any = envs.single_observation_space
        self.action_space: Any = envs.single_action_space
        parts = dict(space) if isinstance(space, Dict) else {"obs": space}
        self.encoders = nn.ModuleDict(
            {k: encoder(k, part, options) for k, part in parts.items() if k != "action_mask"}
        )
        is_image = any(isinstance(e, NatureCnn) for e in self.encoders.values())
        encoders: Any = self.encoders.values()
        num_features = sum(encode.num_features for encode in encoders)
        self.memory: Memory | None = None
        if options.recurrent != "no":
            self.memory = Memory(num_features, options.memory_size, options.recurrent)
            num_features = options.memory_size
        widths = num_features, *(() if is_image else options.hidden)
        self.is_discrete = isinstance(self.action_space, Discrete | MultiDiscrete)
        self.sizes = sizes_of(self.action_space, options)  # numbers of choices; 1 for a real number
        self.actor = mlp(*widths, sum(self.sizes), gain=0.01)
        self.critic = mlp(*widths, 1, gain=1.0)
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
        kinds = f"hidden {options.hidden}, normalize {options.normalize}"
        if options.recurrent != "no":
            kinds += f", {options.recurrent} {options.memory_size}"
        self.kind = f"{(space, self.action_space)}, {kinds}"

    def features(self, obs: Any) -> Tensor:
        """Return one vector (B, F) for each observation, (B, ...) or a dict of these."""
        parts = obs if isinstance(obs, Mapping) else {"obs": obs}
        encoded = [encode(parts[name]) for name, encode in self.encoders.items()]
        return encoded[0] if len(encoded) == 1 else torch.cat(encoded, 1)

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
        parts = obs if isinstance(obs, Mapping) else {"obs": obs}
        for name, encode in self.encoders.items():
            if isinstance(encode, Numbers) and encode.moments is not None:
                encode.moments.update(parts[name], ranks=ranks)

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


# ------------------------------------------------------------------------------ its parts


class Choices:
    """K independent categorical distributions of logits (B, K, A); actions are int64 (B, K)."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def log_prob(self, actions: Tensor) -> Tensor:
        return self.logits.log_softmax(-1).gather(-1, actions[..., None]).sum((-2, -1))

    def entropy(self) -> Tensor:
        log_p = self.logits.log_softmax(-1)
        return -(log_p.exp() * log_p).sum((-2, -1))

    def icdf(self, quantiles: Tensor) -> Tensor:
        sums = self.logits.softmax(-1).cumsum(-1)
        found = torch.searchsorted(sums, (quantiles * sums[..., -1])[..., None]).squeeze(-1)
        return found.clamp(max=sums.shape[-1] - 1)  # of NaN there is none, which the loss will say

    @property
    def mode(self) -> Tensor:
        return self.logits.argmax(-1)


class Normals(Normal):
    """K independent normal distributions; actions are float32 (B, K)."""

    def log_prob(self, value: Tensor) -> Tensor:
        return super().log_prob(value).sum(-1)

    def entropy(self) -> Tensor:
        return super().entropy().sum(-1)


def mlp(*widths: int, gain: float) -> nn.Sequential:
    """Return linear layers with tanh between them."""
    layers: list[nn.Module] = []
    for number, (a, b) in enumerate(pairwise(widths), 2):
        layers += [linear(a, b, gain if number == len(widths) else 2**0.5), Tanh()]
    return nn.Sequential(*layers[:-1])


class Tanh(nn.Tanh):
    """`nn.Tanh`; of many numbers on a processor, while nothing is differentiated, NumPy's.

    NumPy takes a tenth of the time for each number, and torch has less to do for a few.
    """

    def forward(self, input: Tensor) -> Tensor:
        is_small = input.numel() <= 1024 or input.device.type != "cpu"
        if is_small or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(input)
        return torch.from_numpy(np.tanh(input.numpy()))


def linear(num_inputs: int, num_outputs: int, gain: float = 2**0.5) -> nn.Linear:
    """Return a layer with orthogonal weights and no bias to begin with."""
    layer = nn.Linear(num_inputs, num_outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def sizes_of(space: Any, options: Options) -> list[int]:
    """Return how many choices each part of an action has, 1 for a real number."""
    if isinstance(space, Discrete | MultiDiscrete):
        return np.ravel(space.n if isinstance(space, Discrete) else space.nvec).tolist()
    if isinstance(space, Box) and np.issubdtype(space.dtype, np.floating):
        return [1] * math.prod(space.shape)
    wanted = "Discrete, MultiDiscrete or a Box of floats; use a wrapper"
    raise SystemExit(f"{options.env_id}: actions are {space}, expected {wanted}")


def encoder(name: str, space: Any, options: Options) -> nn.Module:
    """Return what turns (a part of) an observation into a vector."""
    if isinstance(space, Box) and len(space.shape) == 3:
        if sorted(space.shape)[1] < 5:
            wanted = "5 cells a side at least; --wrappers gymnasium.wrappers:FlattenObservation"
            raise SystemExit(f"{options.env_id}: pictures are {space.shape}, expected {wanted}")
        return NatureCnn(space)
    if isinstance(space, Box | Discrete | MultiDiscrete | MultiBinary):
        return Numbers(space, options.normalize)
    wanted = "Box, Discrete, MultiDiscrete, MultiBinary or a Dict of these; use a wrapper"
    raise SystemExit(f"{options.env_id}: the observation {name!r} is {space}, expected {wanted}")


class Memory(nn.Module):
    """A GRU or LSTM; its state (B, S) is one vector, of which the first numbers are the output."""

    def __init__(self, num_inputs: int, size: int, kind: str) -> None:
        super().__init__()
        self.is_lstm, self.size = kind == "lstm", size
        self.state_size = 2 * size if self.is_lstm else size
        self.cell = nn.LSTMCell(num_inputs, size) if self.is_lstm else nn.GRUCell(num_inputs, size)
        for name, parameter in self.cell.named_parameters():
            nn.init.orthogonal_(parameter) if "weight" in name else nn.init.zeros_(parameter)

    def forward(self, x: Tensor, state: Tensor, is_first: Tensor) -> Tensor:
        state = state.masked_fill(is_first[:, None], 0.0)
        if self.is_lstm:
            return torch.cat(self.cell(x, tuple(state.chunk(2, 1))), 1)
        return self.cell(x, state)

    def features(self, state: Tensor) -> Tensor:
        return state[:, : self.size]


class Numbers(nn.Module):
    """Numbers as they are, or normalised; choices as a one for each and zeros."""

    def __init__(self, space: Any, normalizes: bool) -> None:
        super().__init__()
        shape: tuple[int, ...] = space.shape
        sizes = np.ravel(getattr(space, "nvec", getattr(space, "n", ()))).tolist()
        self.choices: list[tuple[int, int]] = []  # the first of them, how many
        if isinstance(space, Discrete | MultiDiscrete):
            self.choices = list(zip(np.ravel(space.start).tolist(), sizes, strict=True))
        self.num_features = sum(sizes) if self.choices else math.prod(shape)
        self.moments = Moments(shape) if normalizes and not self.choices else None

    def forward(self, numbers: Tensor) -> Tensor:
        if not self.choices:
            x = numbers.float() if self.moments is None else self.moments(numbers.float())
            return x.flatten(1) if x.ndim > 1 else x[:, None]
        columns = numbers.reshape(len(numbers), -1).long().unbind(1)
        pairs = zip(columns, self.choices, strict=True)
        return torch.cat([F.one_hot(x - start, n) for x, (start, n) in pairs], 1).float()


class NatureCnn(nn.Module):
    """Images (B, H, W, C) or (B, C, H, W), whichever has fewer channels, to 512 features."""

    def __init__(self, space: Box) -> None:
        super().__init__()
        self.num_features = 512
        self.is_last = space.shape[-1] < space.shape[0]
        self.scale = 255.0 if space.dtype == np.uint8 else 1.0
        height, width, channels = np.roll(space.shape, 0 if self.is_last else -1).tolist()
        layers = [(32, 8, 4), (64, 4, 2), (64, 3, 1)]  # channels, size, stride
        if min(height, width) < 36:  # too small for these
            layers = [(16, 3, 1), (32, 3, 1)]
        modules: list[nn.Module] = []
        for count, size, stride in layers:
            modules += [nn.Conv2d(channels, count, size, stride), nn.ReLU()]
            height, width = (height - size) // stride + 1, (width - size) // stride + 1
            channels = count
        last = linear(channels * height * width, self.num_features)
        self.layers = nn.Sequential(*modules, nn.Flatten(), last, nn.ReLU())

    def forward(self, image: Tensor) -> Tensor:
        image = image.permute(0, 3, 1, 2) if self.is_last else image
        return self.layers(image.float() / self.scale)


# ------------------------------------------------------------------------------ training


class Trainer:
    """Collects rollouts and learns from them.

    Attributes:
        steps: Env steps that all ranks have made; those on which autoreset resets do not count.
        episodes: Returns of the episodes that ended in the last update, of all ranks.
    """

    def __init__(
        self,
        options: Options,
        envs: VecEnv,
        agent: Agent,
        earlier: dict[str, Any] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.options, self.envs, self.agent = options, envs, agent
        self.ranks = ranks or Ranks()
        self.first = self.ranks.rank * envs.num_envs  # of these envs, among those of all ranks
        self.steps, self.num_updates, self.episodes = 0, 0, list[float]()
        self.is_captured = takes_graphs(options, envs)
        torch.empty(2**23 - 2**10)  # freed at once, which makes glibc keep memory freed later
        obs, _ = envs.reset(seed=options.seed + self.first)
        spaces = envs.single_observation_space, envs.single_action_space
        columns: dict[str, Any] = {}
        if options.masks and envs.has_action_masks:
            columns["action_mask"] = MultiBinary(mask_width(spaces[1]))
        self.state: Any = None  # of the memory
        if agent.memory is not None:
            columns["state"] = Box(-np.inf, np.inf, (agent.memory.state_size,))
            self.state = torch.zeros(envs.num_envs, agent.memory.state_size).to(options.device)
        self.rollout = RolloutBuffer(
            options.num_steps,
            envs.num_envs,
            *spaces,
            autoreset_mode=envs.autoreset_mode,
            gamma=options.gamma,
            gae_lambda=options.gae_lambda,
            device=options.device,
            seed=options.seed + self.ranks.rank,
            allocate=envs.allocate,
            extra_columns=columns,
            deferred=self.is_captured,
            staged=is_on_device(envs),  # where the simulator's memory is the host's, too
        )
        self.rollout.start(obs)
        self.acts_in_actors = isinstance(envs, RayVectorEnv) and not columns  # see `Actor`
        if isinstance(envs, RayVectorEnv) and self.acts_in_actors:
            envs.set_policy(lambda actor_envs: Actor(actor_envs, options))
        num_updates = options.total_steps // (options.num_envs * options.num_steps)
        how = gradient_options(
            options.compile,
            num_calls=num_updates * options.num_epochs * options.num_minibatches,
            num_rows=envs.num_envs * options.num_steps // options.num_minibatches,
            may_split=agent.memory is None,  # steps of a sequence depend on each other
            earlier=earlier,
        )
        self.gradient = Gradient(
            agent,
            partial(ppo_loss, options=options),
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
        self.graphs = dict[str, Graph[Any]]()
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
        if isinstance(envs, RayVectorEnv) and self.acts_in_actors:
            slots, fields = map(rollout.slot, range(num_steps)), {"actions": rollout.actions}
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
        return {name: mean_of(found, name) for name in found[0]}

    def learn_once(self) -> dict[str, Tensor]:
        """Make the gradient steps of a pass over the rollout; return means of the scalars."""
        found = list[dict[str, Tensor]]()
        for batch in self.minibatches():
            found.append(self.gradient(batch))
            self.optimizer.step()
        if not found:
            raise SystemExit("a rollout has no step to learn from, only resets: more --num-steps")
        return {name: mean_of(found, name) for name in found[0]}

    def train(self, run: Run) -> None:
        """Update while another rollout fits into the steps, and until a signal says to stop."""
        options = self.options
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


class Actor:
    """The agent in an actor of Ray; see `RayVectorEnv.set_policy`."""

    def __init__(self, envs: VecEnv, options: Options) -> None:
        self.agent, self.shape = Agent(envs, options), envs.single_action_space.shape or ()
        self.to_env = self.agent.to_env

    def load(self, weights: dict[str, Tensor]) -> None:
        self.agent.load_state_dict(weights)

    @torch.inference_mode()
    def act(self, obs: Any, quantiles: np.ndarray) -> Tensor:
        actions, _ = self.agent.act(each(obs, torch.as_tensor), torch.as_tensor(quantiles))
        return actions.view(-1, *self.shape)


def mean_of(found: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.stack([scalars[name] for scalars in found]).mean()


def each(obs: Any, function: Any) -> Any:
    """Apply a function to an observation, or to each part of one."""
    if isinstance(obs, Mapping):
        return {name: function(part) for name, part in obs.items()}
    return function(obs)


def player(envs: VecEnv, agent: Agent, options: Options) -> Callable[[Any, Tensor], np.ndarray]:
    """Return the likeliest actions as a function of observations, and of where episodes begin."""

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
                shares = [part[:, :n].numpy() for part, n in zip(parts, agent.sizes, strict=True)]
                report["probabilities"] = shares
        actions, state = agent.act(obs, None, mask, state, starts)
        return agent.to_env(actions.cpu().numpy().reshape(envs.action_space.shape))

    return act


def evaluate_agent(envs: VecEnv, agent: Agent, options: Options) -> EvaluationResult:
    """Play the likeliest actions for some episodes."""
    act, seed = player(envs, agent, options), 1_000_000 + options.seed
    return evaluate(act, envs, options.eval_episodes, seed=seed, device=options.device)


def load_policy(options: Options, num_envs: int) -> tuple[VecEnv, Callable[..., np.ndarray]]:
    """Return envs and the policy of a run, for `vecenv play`; also of one that was killed."""
    envs = make_envs(options, num_envs)
    agent = Agent(envs, options).to(options.device)
    agent.load_state_dict(load_checkpoint(options.save / "checkpoint/last.pt")["state"]["agent"])
    return envs, player(envs, agent, options)


def main(options: Options) -> EvaluationResult:
    """Train, save, evaluate and report; other processes of torchrun than the first only train."""
    run, trainer = train(options)
    options = trainer.options
    # The run has given back the signals: one is enough now.
    with evaluating(f"{options.eval_episodes} episodes"):
        envs = make_envs(options, min(100, options.eval_episodes))
        result = evaluate_agent(envs, trainer.agent, options)
        envs.close()
    with refusing():
        run.write_json("evaluation", {"mean": result.mean, "ci95": result.ci95})
    name = f"{options.env_id}, seed {options.seed}"
    print(f"{name}: {result}; {run.seconds:.0f} s, see {options.save}")
    return result


def train(
    options: Options,
    baselines: dict[str, float] | None = None,
    trainer_type: type[Trainer] = Trainer,
) -> tuple[Run, Trainer]:
    """Train and save; other processes of torchrun than the first end then.

    The learning curve has a line at each of `baselines`, returns of other policies by their names.
    """
    torch.set_num_threads(options.torch_threads)
    torch.manual_seed(options.seed)
    if options.device != "cpu" and not torch.cuda.is_available():
        raise SystemExit(f"--device {options.device}: torch finds no such device; leave it out")
    with refusing(), Ranks.join(options.device, timeout=options.rank_timeout) as ranks:
        return train_rank(options, baselines, trainer_type, ranks)


def train_rank(
    options: Options,
    baselines: dict[str, float] | None,
    trainer_type: type[Trainer],
    ranks: Ranks,
) -> tuple[Run, Trainer]:
    """Do what `train` does, as one of the ranks."""
    num_envs = num_own_envs(options, ranks)
    options = replace(options, device=str(ranks.device))
    folder = options.save if ranks.rank == 0 else options.save / f"rank{ranks.rank}"
    changeable = {"total_steps", "save", "save_every", "eval_episodes", "profile", "overwrite"}
    changeable |= {"num_workers", "ray_address", "ray_lost", "tensorboard", "rank_timeout"}
    with Run(
        folder,
        options,
        options.resume,
        may_change=changeable,
        save_every=options.save_every,
        tensorboard=options.tensorboard and ranks.rank == 0,
        overwrite=options.overwrite,
    ) as run:
        if options.resume and (size := run.read_json("ranks") or ranks.size) != ranks.size:
            expected = f"resume it with torchrun --nproc-per-node {size}"
            raise SystemExit(f"{folder} is of {size} processes, here are {ranks.size}: {expected}")
        run.write_json("ranks", ranks.size)
        envs = make_envs(options, num_envs, on_device=True)
        agent = Agent(envs, options).to(options.device)
        identity = identity_of(envs)
        if options.load is not None:
            load_agent(options.load, agent, identity)
        earlier = run.read_json("gradient") if options.resume else None
        trainer = trainer_type(options, envs, agent, earlier, ranks)
        if options.profile:
            envs.timing.enable()
        trainer.train(run)
        if options.profile and envs.timing.total_ns:
            print(envs.timing.report())
            if graphs := describe_graphs(trainer.graphs):
                print(f"of these the table has the first calls only:\n{graphs}")
        envs.close()
        if ranks.rank > 0:
            raise SystemExit(0)  # the first one does the rest
        save_agent(options.save / "policy.npz", agent, identity)
        run.draw_curve(f"{options.env_id}, seed {options.seed}", baselines)
    return run, trainer


@contextmanager
def refusing() -> Iterator[None]:
    """End the program with a sentence where a run or the other ranks say that it can't go on."""
    try:
        yield
    except (RunError, RankError) as error:
        raise SystemExit(str(error)) from None


def num_own_envs(options: Options, ranks: Ranks) -> int:
    """Return how many of the envs each process steps."""
    if ranks.size == 1:
        return options.num_envs
    if options.backend == "ray":
        raise SystemExit("--backend ray has actors for its envs: start it without torchrun")
    try:
        num_envs = ranks.share_of(options.num_envs)
    except ValueError as error:
        raise SystemExit(f"--num-envs: {error}") from None
    rows = num_envs * options.num_steps
    if rows < 2 * options.num_minibatches:  # half of them may only reset an env
        raise SystemExit(
            f"--num-minibatches {options.num_minibatches}: a rollout has {rows} steps in each of "
            f"{ranks.size} processes, expected at least twice as many as minibatches"
        )
    return num_envs


def identity_of(envs: VecEnv) -> dict[str, Any]:
    """Return the tables and rules that CAGE 2 envs play by; of others nothing."""
    owner = getattr(envs, "on_host", envs)
    return getattr(getattr(owner, "scenario", None), "identity", dict)()


def is_on_device(envs: VecEnv) -> bool:
    """Whether results of these envs are tensors where they are computed."""
    return hasattr(envs, "device")


def takes_graphs(options: Options, envs: VecEnv) -> bool:
    """Return whether rollout and update are done by the device alone, in CUDA graphs."""
    if options.graphs == "on" and not is_on_device(envs):
        raise SystemExit("--graphs on: the envs are not on the device; leave it out")
    return options.graphs != "off" and is_on_device(envs)


def make_envs(options: Options, num_envs: int, *, on_device: bool = False) -> VecEnv:
    """Make the envs that the options describe; compiled ones where the networks are, if asked."""
    backend, device = options.backend, None
    names_device = torch.device(options.device).type != "cpu"
    if backend == "cuda" or (backend in (None, "auto") and names_device and is_compiled(options)):
        backend, device = "jit", None
        if on_device:
            backend, device = "cuda", options.device if names_device else "cuda"
    env_kwargs: Any = options.env_kwargs
    given = {"num_workers": options.num_workers, "address": options.ray_address}
    given |= {"on_error": "restart" if options.ray_lost != "raise" else None}
    given |= {"shares_cpus": options.ray_lost == "share"}
    envs = make_vec(
        options.env_id,
        num_envs,
        backend=backend,
        device=device,
        wrappers=[named(wrapper) for wrapper in options.wrappers],
        vector_kwargs={name: value for name, value in given.items() if value},
        **env_kwargs,
    )
    if is_on_device(envs):
        found: Any = getattr(envs, "device", None)
        wanted = torch.device(options.device)  # "cuda" is the current one
        if found.type != wanted.type or wanted.index not in (None, found.index):
            raise SystemExit(
                f"--backend cuda with --device {options.device}: the envs are on {found}, and "
                "networks have to be there, too"
            )
    return envs


def is_compiled(options: Options) -> bool:
    """Whether the env is a compiled one, which may be on a device."""
    if options.wrappers:
        return False
    env_kwargs: Any = options.env_kwargs
    try:  # which makes none of another kind
        make_vec(options.env_id, 1, backend="jit", **env_kwargs).close()
    except ValueError:
        return False
    return True


def named(name: str) -> Any:
    """Import what "module:name" names."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SystemExit(f"--wrappers {name}: {error}; expected module:name") from None


def save_agent(file: Path, agent: Agent, identity: dict[str, Any]) -> None:
    """Write the agent; `vecenv evaluate` plays it, without torch, if it is one of tanh layers."""
    tensors = {name: tensor.cpu().numpy() for name, tensor in agent.state_dict().items()}
    saved = {"kind": agent.kind, "tensors": tensors, "made_for": identity or None}
    encode = next(iter(agent.encoders.values()))
    is_plain = len(agent.encoders) == 1 and agent.memory is None
    if is_plain and isinstance(encode, Numbers) and not encode.choices:
        names = [name for name in tensors if name.startswith("actor.")]
        saved["layers"] = [
            [tensors[weight].T, tensors[bias]]
            for weight, bias in zip(names[::2], names[1::2], strict=True)
        ]
        saved["scale"] = None
        if encode.moments is not None:
            mean, std = encode.moments.mean, encode.moments.std()
            saved["scale"] = [x.flatten().cpu().numpy() for x in (mean, std)]
    save_arrays(file, saved)


def load_agent(file: Path, agent: Agent, identity: dict[str, Any]) -> None:
    """Take over the weights of an earlier run."""
    saved = load_arrays(file)
    if saved["kind"] != agent.kind:
        raise SystemExit(f"{file} is for {saved['kind']}; expected {agent.kind}")
    if (made_for := saved.get("made_for") or identity) != identity:
        print(f"{file} was trained in {made_for}; it goes on in {identity}")
    agent.load_state_dict({name: torch.from_numpy(a) for name, a in saved["tensors"].items()})


if __name__ == "__main__":
    env_id = tyro.cli(Options, description=__doc__).env_id
    main(tyro.cli(Options, default=Options(env_id, **DEFAULTS.get(env_id, {}))))
