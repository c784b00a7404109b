"""A defender for CAGE Challenge 2, trained from nothing with PPO in less than half an hour.

    python examples/cage2_defender.py

Blue sees the challenge's 52 bits. `BlueMemory` keeps a record of its observations and actions, and
it chooses from 44 actions instead of 145: the next decoy on a host rather than one of eight. One
policy plays against both attackers, which it tells apart by its memory.

The score of the challenge is the sum of mean returns over 30, 50 and 100 steps. These are the first
steps of the same episode, so rewards of the first 30 steps count three times, up to step 50 twice,
and then once: with these weights on the rewards PPO maximises the score itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from buffers import gae
from vecenv.cage import BlueMemory, Cage2VectorEnv, evaluate, load_defender, save_defender
from vecenv.learn import Adam, Gradient

NUM_STEPS = 100  # of an episode; a rollout is one episode of every env
CELLS = (30, 50, 100)  # lengths of the challenge's episodes
LEADERBOARD_BEST, ITS_CI95 = -54.57, 0.43  # total of the challenge's winner, as published


@dataclass
class Options:
    total_steps: int = 40_000_000  # env steps to train for
    num_envs: int = 512  # games played side by side
    hidden: tuple[int, ...] = (64, 64)  # units of the tanh layers, of actor and critic each
    num_epochs: int = 4  # passes over the rollout in an update
    num_minibatches: int = 8  # gradient steps in a pass
    learning_rate: float = 1.5e-3  # of Adam at the start; it falls linearly to 0
    gamma: float = 0.995  # discount
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation
    clip: float = 0.2  # changing a probability by a factor beyond 1 +- clip does not pay
    entropy_weight: float = 0.004  # of the entropy bonus at the start; it falls linearly to 0
    max_grad_norm: float = 0.5  # longer gradients are shortened to this
    red_agent: str = "mixed"  # who attacks in training; "mixed": either, drawn for every episode
    rules: str = "faithful"  # or "debugged"; scores under different rules are not comparable
    eval_episodes: int = 1000  # per cell of the table at the end
    seed: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"  # of products in the gradient; weights: 32
    compile: Literal["auto", "on", "off"] = "auto"  # the gradient; "auto": where it pays
    torch_threads: int = 1  # of torch, for acting
    save: Path = Path("runs/cage2_defender")  # folder for policy, table and curve
    load: Path | None = None  # defender.npz of an earlier run to begin with


class Agent(nn.Module):
    """Actor and critic over the features of a `BlueMemory`."""

    entropy_weight: Tensor  # of the bonus in the loss

    def __init__(self, options: Options, memory: BlueMemory) -> None:
        super().__init__()
        self.actor = network(memory.num_features, options.hidden, len(memory.choices), gain=0.01)
        self.critic = network(memory.num_features, options.hidden, 1, gain=1.0)
        self.register_buffer("entropy_weight", torch.tensor(options.entropy_weight))

    def log_probs(self, features: Tensor, useless: Tensor) -> Tensor:
        """Return log-probabilities (B, choices) for features (B, F); useless choices have none."""
        return self.actor(features).float().masked_fill(useless, -1e9).log_softmax(1)

    def layers(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the actor as `save_defender` takes it."""
        linear = [x for x in self.actor if isinstance(x, nn.Linear)]
        return [(x.weight.detach().numpy().T, x.bias.detach().numpy()) for x in linear]

    def take_over(self, layers: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Take over an actor that was saved."""
        linear = [x for x in self.actor if isinstance(x, nn.Linear)]
        with torch.no_grad():
            for layer, (weight, bias) in zip(linear, layers, strict=True):
                layer.weight.copy_(torch.from_numpy(weight.T.copy()))
                layer.bias.copy_(torch.from_numpy(bias))


def ppo_loss(agent: Agent, batch: Any, clip: float) -> Tensor:
    """Return the loss of a minibatch, a mean over rows."""
    all_log_probs = agent.log_probs(batch["features"], batch["useless"])
    log_probs = all_log_probs.gather(1, batch["choices"][:, None])[:, 0]
    ratio, advantages = (log_probs - batch["log_probs"]).exp(), batch["advantages"]
    gain = torch.minimum(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip)).mean()
    entropy = -(all_log_probs.exp() * all_log_probs.clamp(min=-50)).sum(1).mean()
    values = agent.critic(batch["features"])[:, 0].float()
    error = (values - batch["returns"]).square().mean()
    return error / 2 - gain - agent.entropy_weight * entropy


def network(
    num_inputs: int, hidden: tuple[int, ...], num_outputs: int, gain: float
) -> nn.Sequential:
    """Return tanh layers and a linear one, with orthogonal weights."""
    layers: list[nn.Module] = []
    widths = (num_inputs, *hidden, num_outputs)
    for number, (a, b) in enumerate(pairwise(widths)):
        layers += [nn.Tanh()] if number else []
        linear = nn.Linear(a, b)
        nn.init.orthogonal_(linear.weight, gain if number == len(hidden) else 2**0.5)
        nn.init.zeros_(linear.bias)
        layers.append(linear)
    return nn.Sequential(*layers)


class Trainer:
    """PPO on whole episodes of many games."""

    def __init__(self, options: Options) -> None:
        self.options, count = options, options.num_envs
        self.envs = Cage2VectorEnv(
            count,
            red_agent=options.red_agent,
            rules=options.rules,
            episode_length=NUM_STEPS,
            autoreset_mode="SameStep",
            num_threads=1,
        )
        self.memory = BlueMemory(count, self.envs.scenario)
        self.agent = Agent(options, self.memory)
        num_updates = options.total_steps // (NUM_STEPS * count)
        self.gradient = Gradient(
            self.agent,
            partial(ppo_loss, clip=options.clip),
            compile=options.compile,
            dtype=getattr(torch, options.dtype),
            num_calls=num_updates * options.num_epochs * options.num_minibatches,
            log=print,
        )
        self.optimizer = Adam(
            self.gradient.parameters(), eps=1e-5, max_grad_norm=options.max_grad_norm
        )
        self.obs, _ = self.envs.reset(seed=options.seed)
        self.weights = np.array([sum(step < end for end in CELLS) for step in range(NUM_STEPS)])
        shape = (NUM_STEPS, count)
        self.features = torch.zeros(*shape, self.memory.num_features)
        self.useless = torch.zeros(*shape, len(self.memory.choices), dtype=torch.bool)
        self.choices = torch.zeros(shape, dtype=torch.int64)
        self.log_probs = torch.zeros(shape)
        self.rewards = np.zeros(shape, dtype=np.float32)
        self.steps = 0
        self.curve: list[tuple[int, float]] = []  # steps made, score of a rollout

    @torch.no_grad()
    def collect(self) -> None:
        """Play one episode in every env."""
        self.memory.forget()
        for step in range(NUM_STEPS):
            features, useless = self.features[step], self.useless[step]
            self.memory.features(self.obs, out=features.numpy())
            useless.numpy()[:] = self.memory.useless()
            log_probs = self.agent.log_probs(features, useless)
            noise = torch.empty_like(log_probs).exponential_().log_()
            choices = (log_probs - noise).argmax(1)  # a draw from the distribution
            self.choices[step] = choices
            self.log_probs[step] = log_probs.gather(1, choices[:, None])[:, 0]
            self.obs, rewards, *_ = self.envs.step(self.memory.act(choices.numpy()))
            self.rewards[step] = rewards
            self.memory.note(self.obs)
        self.steps += self.choices.numel()
        returns = self.rewards.cumsum(0).mean(1)
        self.curve.append((self.steps, float(sum(returns[end - 1] for end in CELLS))))

    def learn(self, left: float) -> None:
        """Update actor and critic from the episodes; `left` falls from 1 to 0 over the training."""
        options, size = self.options, self.choices.numel()
        features = self.features.flatten(0, 1)
        values = torch.zeros(NUM_STEPS + 1, options.num_envs)  # nothing after the last step counts
        with torch.no_grad():
            values[:-1] = self.agent.critic(features).view(self.choices.shape)
        rewards = torch.from_numpy(self.rewards * self.weights[:, None] / len(CELLS)).float()
        no_end = torch.zeros(self.choices.shape, dtype=torch.bool)
        advantages, returns = gae(
            rewards, values, no_end, no_end, gamma=options.gamma, gae_lambda=options.gae_lambda
        )
        columns = {
            "features": features,
            "useless": self.useless.flatten(0, 1),
            "choices": self.choices.flatten(),
            "log_probs": self.log_probs.flatten(),
            "advantages": advantages.flatten(),
            "returns": returns.flatten(),
        }
        for group in self.optimizer.param_groups:
            group["lr"] = options.learning_rate * left
        self.agent.entropy_weight.fill_(options.entropy_weight * left)
        for _ in range(options.num_epochs):
            for chosen in torch.randperm(size).chunk(options.num_minibatches):
                batch = {name: column[chosen] for name, column in columns.items()}
                std, mean = torch.std_mean(batch["advantages"])
                batch["advantages"].sub_(mean).div_(std + 1e-8)
                self.gradient(batch)
                self.optimizer.step()

    def run(self) -> float:
        """Train, and show how it goes, until done or Ctrl-C; return the seconds."""
        options, begin, minutes = self.options, time.perf_counter(), 0
        num_updates = options.total_steps // self.choices.numel()
        note = TextColumn(f"score {{task.fields[score]:.2f}}, winner {LEADERBOARD_BEST / 2:.2f}")
        columns = (*Progress.get_default_columns()[:3], TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, note, console=Console(stderr=True)) as progress:
            task = progress.add_task(
                "training", total=num_updates, score=0.0, best=LEADERBOARD_BEST / 2
            )
            try:
                for update in range(num_updates):
                    self.collect()
                    self.learn(1 - update / num_updates)
                    score = np.mean([score for _, score in self.curve[-20:]])
                    progress.update(task, advance=1, score=score)
                    seconds = time.perf_counter() - begin
                    if not progress.console.is_terminal and seconds > 60 * (minutes + 1):
                        minutes = int(seconds // 60)
                        left = seconds / 60 * (num_updates / (update + 1) - 1)
                        about = f"{update + 1} of {num_updates} updates, score {score:.2f}"
                        progress.console.print(f"{about}, {minutes} min gone, {left:.0f} to go")
            except KeyboardInterrupt:
                progress.console.print("Interrupted; the policy learnt so far is saved.")
        return time.perf_counter() - begin


def draw(curve: list[tuple[int, float]], path: Path) -> None:
    """Draw the learning curve."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    steps, scores = np.array(curve).T
    width = max(1, len(scores) // 100)
    smooth = np.convolve(scores, np.ones(width) / width, mode="valid")
    axes.plot(steps[width - 1 :] / 1e6, smooth, color="#1d3557", label=f"mean of {width} rollouts")
    # A total is of two attackers, and of one that sleeps; here half of the episodes are of either.
    best, error = LEADERBOARD_BEST / 2, ITS_CI95 / 2
    label = f"half of the winner's total: {best:.1f} ± {error:.1f}"
    axes.axhspan(best - error, best + error, color="#e76f51", alpha=0.25, linewidth=0)
    axes.axhline(best, color="#e76f51", linestyle="--", label=label)
    lowest, highest = float(smooth.min()), float(smooth.max())
    axes.set_ylim(max(lowest - 1, min(-60.0, 1.5 * highest)), max(best + 7, highest + 1))
    axes.grid(axis="y", alpha=0.3)
    axes.set_xlabel("env steps (millions)")
    axes.set_ylabel("mean return of 30 + of 50 + of 100 steps")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130)


def main(options: Options) -> float:
    """Train, evaluate and save; return the total over the nine cells."""
    if options.total_steps and options.total_steps < NUM_STEPS * options.num_envs:
        raise SystemExit(f"total_steps is less than one rollout, {NUM_STEPS * options.num_envs}")
    options.save.mkdir(parents=True, exist_ok=True)  # before the training, in case it can't be
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.torch_threads)
    trainer = Trainer(options)
    if options.load is not None:
        trainer.agent.take_over(load_defender(options.load, trainer.envs.scenario).layers)
    seconds = trainer.run()
    policy = options.save / "defender.npz"
    facts = {"steps": trainer.steps, "seed": options.seed, "rules": options.rules}
    save_defender(policy, trainer.agent.layers(), trainer.envs.scenario, **facts)
    if trainer.curve:
        print(f"{trainer.steps:,} steps in {seconds:.0f} s, {trainer.steps / seconds:,.0f} per s")
        draw(trainer.curve, options.save / "curve.png")
    result = evaluate(str(policy), episodes=options.eval_episodes, rules=options.rules)
    Console().print(result)
    result.to_json(options.save / "evaluation.json")
    print(f"policy, curve and table: {options.save}; to watch it: vecenv watch --policy {policy}")
    return result.total


if __name__ == "__main__":
    main(tyro.cli(Options))
