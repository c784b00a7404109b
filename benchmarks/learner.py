"""Time of a gradient step: gradients written by hand, autograd, and `vecenv.learn.Gradient`.

    python benchmarks/learner.py

PPO's loss on the sizes of CAGE 2: 52 inputs, actor and critic of 64-64 tanh units apart, 145
actions. A step is the gradient, clipping and Adam's update. The reference are the classes that
examples/ppo.py had before it used `vecenv.learn`: forward and backward of each layer by hand, the
critic in a thread of its own for large batches. All cases run in turn in one process, with
`torch.set_num_threads(1)`; compiling is not inside. Each line of the table adds one trick.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
import torch
from measure import machine, markdown_table
from torch import Tensor, nn

from vecenv.learn import Adam, Gradient

NUM_INPUTS, NUM_ACTIONS, CLIP, MAX_GRAD_NORM = 52, 145, 0.2, 0.5


@dataclass
class Batch:
    obs: Tensor  # float32 (B, 52), zeros and ones
    actions: Tensor  # int64 (B,)
    log_probs: Tensor  # float32 (B,), and so are the next
    advantages: Tensor
    returns: Tensor


def draw_batch(rows: int) -> Batch:
    torch.manual_seed(1)
    obs, actions = torch.rand(rows, NUM_INPUTS) < 0.3, torch.randint(0, NUM_ACTIONS, (rows,))
    log_probs = torch.randn(rows) * 0.1 - 5
    return Batch(obs.float(), actions, log_probs, torch.randn(rows), torch.randn(rows))


class HandWrittenMlp:
    """Tanh layers and a linear one, without autograd."""

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
        self.inputs: list[Tensor] = []
        for weight, bias in self.layers:
            if self.inputs:
                np.tanh(x.numpy(), out=x.numpy())
            self.inputs.append(x)
            x = torch.addmm(bias, x, weight)
        return x

    def backward(self, d_x: Tensor) -> None:
        for k in reversed(range(len(self.layers))):
            x, (d_weight, d_bias) = self.inputs[k], self.d_layers[k]
            torch.mm(x.T, d_x, out=d_weight)
            torch.sum(d_x, 0, out=d_bias)
            if k:
                d_x = d_x @ self.layers[k][0].T
                d_x.addcmul_(d_x * x, x, value=-1)


class HandWritten:
    """The gradient step of examples/ppo.py in revision 79f7096, for one discrete action."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.actor = HandWrittenMlp(NUM_INPUTS, 64, 64, NUM_ACTIONS, gain=0.01)
        self.critic = HandWrittenMlp(NUM_INPUTS, 64, 64, 1, gain=1.0)
        self.weights = [self.actor.weights, self.critic.weights]
        self.optimizer = torch.optim.Adam(self.weights, lr=1e-6, eps=1e-5, fused=True)
        self.pool = ThreadPoolExecutor(1)

    def evaluate(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        log_p = outputs.view(-1, 1, NUM_ACTIONS).log_softmax(-1)
        p, index = log_p.exp(), actions.reshape(len(outputs), -1, 1)
        entropies = -torch.linalg.vecdot(p, log_p)[..., None]
        self.kept = log_p, p, index, entropies
        return log_p.gather(-1, index).sum((1, 2)), entropies.sum() / len(outputs)

    def differentiate(self, d_log_probs: Tensor, d_entropy: float) -> Tensor:
        log_p, p, index, entropies = self.kept
        d_log_probs, scale = d_log_probs[:, None, None], -d_entropy / len(p)
        d_logits = torch.add(entropies * scale - d_log_probs, log_p, alpha=scale).mul_(p)
        return d_logits.scatter_add_(-1, index, d_log_probs.expand_as(index)).flatten(1)

    @torch.inference_mode()
    def step(self) -> dict[str, Tensor]:
        batch, size = self.batch, len(self.batch.returns)
        log_probs, entropy = self.evaluate(self.actor.forward(batch.obs), batch.actions)
        critic = self.pool.submit(self.learn_values) if size >= 1024 else None
        ratio = (log_ratio := log_probs - batch.log_probs).exp()
        std, mean = torch.std_mean(batch.advantages)
        gain = (advantages := (batch.advantages - mean) / (std + 1e-8)) * ratio
        clipped = advantages * ratio.clamp(1 - CLIP, 1 + CLIP)
        d_log_probs = gain * (gain <= clipped) / -size
        self.actor.backward(self.differentiate(d_log_probs, 0.0))
        errors = critic.result() if critic else self.learn_values()
        torch.nn.utils.clip_grad_norm_(self.weights, MAX_GRAD_NORM)
        self.optimizer.step()
        scalars = {"value_loss": errors.square().mean() / 2, "entropy": entropy}
        scalars["policy_loss"] = -torch.minimum(gain, clipped).mean()
        scalars["approx_kl"] = (ratio - 1 - log_ratio).mean()
        return {**scalars, "clipfrac": (gain > clipped).float().mean()}

    @torch.inference_mode()
    def learn_values(self) -> Tensor:
        errors = self.critic.forward(self.batch.obs).squeeze(1) - self.batch.returns
        self.critic.backward(errors[:, None] / len(errors))
        return errors


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = self.mlp(NUM_ACTIONS)
        self.critic = self.mlp(1)

    @staticmethod
    def mlp(num_outputs: int) -> nn.Sequential:
        tanh = nn.Tanh()
        layers = [nn.Linear(NUM_INPUTS, 64), tanh, nn.Linear(64, 64), tanh]
        return nn.Sequential(*layers, nn.Linear(64, num_outputs))


def ppo_loss(agent: Agent, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    policy = torch.distributions.Categorical(logits=agent.actor(batch.obs), validate_args=False)
    log_ratio = policy.log_prob(batch.actions) - batch.log_probs
    ratio = log_ratio.exp()
    gain = batch.advantages * ratio
    clipped = batch.advantages * ratio.clamp(1 - CLIP, 1 + CLIP)
    policy_loss = -torch.minimum(gain, clipped).mean()
    value_loss = (agent.critic(batch.obs).squeeze(1) - batch.returns).square().mean() / 2
    return policy_loss + value_loss, {
        "value_loss": value_loss,
        "entropy": policy.entropy().mean(),
        "policy_loss": policy_loss,
        "approx_kl": (ratio - 1 - log_ratio).mean(),
        "clipfrac": (gain > clipped).float().mean(),
    }


def plain_step(batch: Batch) -> Callable[[], object]:
    """What one writes without a library."""
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-6, eps=1e-5, fused=True)

    def step() -> object:
        optimizer.zero_grad()
        loss, scalars = ppo_loss(agent, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        return scalars

    return step


def learn_step(batch: Batch, **options: Any) -> Callable[[], Any]:
    """A step of `vecenv.learn`, by a path that is told."""
    agent = Agent()
    gradient = Gradient(agent, ppo_loss, **options)
    optimizer = Adam(gradient.parameters(), lr=1e-6, eps=1e-5, max_grad_norm=MAX_GRAD_NORM)

    def step() -> object:
        scalars = gradient(batch)
        optimizer.step()
        return scalars

    step()
    expected = "compiled" if options.get("compile") else "autograd"
    assert gradient.path == expected, gradient.reason
    return step


def cases(batch: Batch, *, with_threads: bool) -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {
        "by hand": HandWritten(batch).step,
        "autograd, torch's clipping and Adam": plain_step(batch),
        "autograd, one vector, vecenv.learn.Adam": learn_step(batch),
        "compiled": learn_step(batch, compile=True),
        "compiled, bfloat16": learn_step(batch, compile=True, dtype="bfloat16"),
    }
    if with_threads:
        two: Any = {"compile": True, "threads": 2}
        found["compiled, 2 threads"] = learn_step(batch, **two)
        found["compiled, bfloat16, 2 threads"] = learn_step(batch, dtype="bfloat16", **two)
    return found


def measure(found: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of each case, in rounds of five steps each."""
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, step in found.items():
            step()  # finds the caches as the others left them, which does not count
            begin = perf_counter()
            for _ in range(5):
                step()
            seconds[name].append((perf_counter() - begin) / 5)
    return seconds


def report(rows: int, rounds: int) -> None:
    found = cases(draw_batch(rows), with_threads=rows >= 1024)
    seconds = measure(found, rounds)
    base = seconds["by hand"]
    lines = []
    for name, times in seconds.items():
        ratios = [b / t for b, t in zip(base, times, strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        median = f"{statistics.median(times) * 1e6:.0f}"
        lines.append([name, median, f"{ratio:.2f}", f"{low:.2f} – {high:.2f}"])
    header = [f"{rows} rows", "µs a step", "× by hand", "middle half"]
    print(markdown_table(header, lines), end="\n\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 128])
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine("torch", "numpy"), end="\n\n")
    for rows in options.rows:
        report(rows, options.rounds)


if __name__ == "__main__":
    main()
