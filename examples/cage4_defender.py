"""Five defenders for CAGE Challenge 4, trained from nothing with PPO in half an hour.

    python examples/cage4_defender.py

One policy plays all five agents. `Cage4Memory` keeps what an agent has seen and done, and offers
choices when it is free to act: only these are decisions, and only they are learnt from. The network
looks at each host with the same weights, so what it learns about one it knows about all.

All agents get the same reward; most of it is what others cause. In training an agent is told its
own subnets' part in full and the rest in a small share, which the true state gives. The critic sees
the true state, the policy only what its agent sees.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from vecenv.cage.challenge4.games import Cage4Games
from vecenv.cage.challenge4.options import Cage4Options
from vecenv.cage.challenge4.play.player import (
    NUM_AGENTS,
    NUM_HOST_FEATURES,
    NUM_UNIT_FEATURES,
    UNITS,
    Cage4Memory,
)
from vecenv.learn import Adam, Gradient

NUM_STEPS = 499  # of an episode; a rollout is one episode of every game
KEEP_SCORE = -193.68  # the best known to us, as published
GROUPS = ((0, 4, 1), (4, 5, 3))  # first agent, last, number of units of each


@dataclass
class Options:
    total_steps: int = 8_000_000  # game steps to train for
    num_games: int = 64  # played side by side
    width: int = 32  # units of the layers
    num_epochs: int = 2  # passes over the decisions of a rollout
    minibatch: int = 2048  # decisions of agents 0 to 3 in a gradient step
    learning_rate: float = 1e-3  # of Adam at the start; it falls linearly to 0
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy_weight: float = 0.01  # at the start; it falls linearly to a tenth
    share: float = 0.2  # of the rewards of subnets that are not the agent's own
    max_grad_norm: float = 0.5
    seed: int = 1
    threads: int = 1
    compile: Literal["auto", "on", "off"] = "on"
    minutes: float = 1e9  # stop after
    save: Path = Path("runs/cage4_defender")
    load: Path | None = None


class Defender(nn.Module):
    """The policy of all agents, and their critic."""

    entropy_weight: Tensor

    def __init__(self, width: int, num_truths: int, entropy_weight: float) -> None:
        super().__init__()
        self.host = nn.Linear(NUM_HOST_FEATURES, width)
        self.unit = nn.Linear(NUM_UNIT_FEATURES, width)
        self.again = nn.Linear(width, width)
        self.pooled = nn.Linear(2 * width, width)
        self.act = nn.Linear(width, 3)
        self.whole = nn.Linear(2 * width + NUM_UNIT_FEATURES, width)
        self.rest = nn.Linear(width, 17)
        self.direct = nn.Linear(NUM_UNIT_FEATURES, 17)
        for layer in (self.act, self.rest, self.direct):
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)
        with torch.no_grad():  # at first agents mostly wait
            self.direct.bias[16] = 3.0
            self.direct.bias[:8] = -1.0
        self.critic = nn.Sequential(
            nn.Linear(num_truths, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )
        self.register_buffer("entropy_weight", torch.tensor(entropy_weight))

    def log_probs(self, hosts: Tensor, units: Tensor, useless: Tensor) -> Tensor:
        """Return log-probabilities (B, U * 56 + 1) of choices; useless bool (B, U * 56)."""
        first = torch.relu(self.host(hosts) + self.unit(units)[:, :, None])
        pooled = torch.cat([first.mean(2), first.amax(2)], 2)
        second = torch.relu(self.again(first) + self.pooled(pooled)[:, :, None])
        on_hosts = self.act(second).flatten(2)
        whole = torch.relu(self.whole(torch.cat([pooled, units], 2)))
        rest = self.rest(whole) + self.direct(units)
        traffic = rest[..., :8] + units[..., 32:40] * rest[..., 8:16]
        logits = torch.cat([on_hosts, traffic], 2).flatten(1).masked_fill(useless, -1e9)
        return torch.cat([logits, rest[..., 16].mean(1, keepdim=True)], 1).log_softmax(1)


def ppo_loss(agent: Defender, batch: Any, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a minibatch: decisions of agents 0 to 3, and of agent 4."""
    losses, errors, entropies, kls, weights = [], [], [], [], []
    for part in batch["parts"]:
        all_log_probs = agent.log_probs(part["hosts"], part["units"], part["useless"])
        log_probs = all_log_probs.gather(1, part["choices"][:, None])[:, 0]
        ratio, advantages = (log_probs - part["log_probs"]).exp(), part["advantages"]
        gain = torch.minimum(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip))
        losses.append(-gain.sum())
        entropies.append(-(all_log_probs.exp() * all_log_probs.clamp(min=-50)).sum())
        values = agent.critic(part["truths"])[:, 0]
        errors.append((values - part["returns"]).square().sum())
        kls.append((ratio - 1 - (log_probs - part["log_probs"])).detach().sum())
        weights.append(len(values))
    num = sum(weights)
    entropy, error = sum(entropies) / num, sum(errors) / num
    loss = sum(losses) / num + error / 2 - agent.entropy_weight * entropy
    return loss, {
        "entropy": entropy.detach(),
        "value_error": error.detach(),
        "kl": sum(kls) / num,
    }


_BITS = np.array([bin(n).count("1") for n in range(1 << 16)], np.uint8)
WORK = np.array([[-1, -1, -1, -1, 0, -1, -1, -1], [-2, -10, -1, -1, 0, -1, -1, -1],
                 [-1, -1, -2, -10, 0, -1, -1, -1]], np.float32)  # fmt: skip
ACCESS = np.array([[-3, -1, -3, -1, -5, -1, -1, -1], [-1, 0, -1, -1, 0, -1, -1, -1],
                   [-3, -1, -1, 0, 0, -1, -1, -1]], np.float32)  # fmt: skip
IMPACT = np.array([[-1, -1, -1, -1, -5, -3, -3, -3], [-3, -10, -1, -1, 0, -3, -3, -3],
                   [-3, -1, -3, -10, 0, -3, -3, -3]], np.float32)  # fmt: skip
OWN = np.zeros((5, 8), np.float32)
for _agent, _subnets in enumerate(((0,), (1,), (2,), (3,), (5, 6, 7))):
    OWN[_agent, list(_subnets)] = 1
OWN_BITS = (OWN.astype(int) << np.arange(8)).sum(1)


def subnet_rewards(states: Any) -> tuple[np.ndarray, np.ndarray]:
    phase = states["phase"].astype(int)
    hurt = WORK[phase] * _BITS[states["work_failed"]]
    access = ACCESS[phase] * _BITS[states["access_failed"]]
    impacts = (states["done_type"] == 6) & (states["active"] > 0)
    games, agents = np.nonzero(impacts)
    subnets = states["done_target"][games, agents] >> 4
    np.add.at(hurt, (games, subnets), IMPACT[phase[games], subnets])
    return hurt, access


def agent_rewards(states: Any, costs: np.ndarray, share: float) -> np.ndarray:
    """What each agent is told, float32 (G, 5)."""
    hurt, access = subnet_rewards(states)
    hurt[:, 4] = 0  # nobody can help the contractors
    own = hurt @ OWN.T
    barred = states["barred"].astype(int)[:, None, :] & OWN_BITS[:, None]
    concerns = (barred > 0) | (OWN > 0)  # (G, 5, 8)
    mine = (access[:, None] * concerns).sum(2)
    rest = hurt.sum(1, keepdims=True) - own + (access.sum(1, keepdims=True) - mine)
    return own + mine + costs + share * rest


def truths(states: Any, memory: Cage4Memory) -> np.ndarray:
    """What the critic sees, float32 (G, 5, F)."""
    num = len(states)
    flags = states["session_flags"] & 2 > 0
    there = np.arange(80) < states["num_sessions"][..., None]
    parts = [
        _BITS[states["red_hosts"]] / 5,
        _BITS[states["degraded"]] / 5,
        _BITS[states["barred"]] / 4,
        _BITS[states["process_events"]] / 2,
        _BITS[states["exists"]] / 16,
        states["num_sessions"] / 5,
        (flags & there).sum(2) / 5,
    ]
    phase = states["phase"].astype(int)
    clock = np.zeros((num, 5), np.float32)
    clock[np.arange(num), phase] = 1
    clock[:, 3] = memory.time / 500
    clock[:, 4] = memory.unit_features()[:, 0, 22]
    whole = np.concatenate([*parts, clock], axis=1, dtype=np.float32)
    out = np.zeros((num, 5, whole.shape[1] + 5 + 6 + 15), np.float32)
    out[..., : whole.shape[1]] = whole[:, None]
    out[:, np.arange(5), whole.shape[1] + np.arange(5)] = 1
    place = whole.shape[1] + 5
    own = [parts[0], parts[1], parts[2], parts[3]]
    for column, part in enumerate(own):
        out[..., place + column] = part @ OWN.T
    out[..., place + 4] = memory._busy / 5
    spot = place + 6 + np.arange(5) * 3 + phase[:, None]
    np.put_along_axis(out, spot[..., None], 1, axis=2)
    return out


class Trainer:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.games = Cage4Games(
            options.num_games, seed=options.seed, autoreset_mode="Disabled", num_threads=1
        )
        self.memory = Cage4Memory(options.num_games)
        self.memory.begin(self.games.masks)
        self.memory.note([self.games.agent_obs(a) for a in range(5)])
        num_truths = truths(self.games.envs.states, self.memory).shape[2]
        self.agent = Defender(options.width, num_truths, options.entropy_weight)
        if options.load is not None:
            self.agent.load_state_dict(torch.load(options.load), strict=False)
        self.gradient = Gradient(
            self.agent, partial(ppo_loss, clip=options.clip), compile=options.compile, threads=1, log=print
        )
        self.optimizer = Adam(
            self.gradient.parameters(), eps=1e-5, max_grad_norm=options.max_grad_norm
        )
        num, T = options.num_games, NUM_STEPS
        self.store = []
        for first, last, size in GROUPS:
            rows = T * num * (last - first)
            self.store.append(
                {
                    "hosts": torch.zeros(rows, size, 16, NUM_HOST_FEATURES),
                    "units": torch.zeros(rows, size, NUM_UNIT_FEATURES),
                    "useless": torch.zeros(rows, size * 56, dtype=torch.bool),
                    "choices": torch.zeros(rows, dtype=torch.int64),
                    "log_probs": torch.zeros(rows),
                    "truths": torch.zeros(rows, num_truths),
                    "place": torch.zeros(rows, dtype=torch.int64),
                }
            )
        self.scale = 100.0
        self.steps, self.round = 0, 0
        self.curve = []

    @torch.no_grad()
    def collect(self) -> None:
        options, games, memory = self.options, self.games, self.memory
        num = options.num_games
        self.round += 1
        games.reset(seed=options.seed * 1_000_003 + self.round * num)
        memory.begin(games.masks)
        self.sizes = [0, 0]
        self.rewards = np.zeros((NUM_STEPS, num, 5), np.float32)
        self.is_free = np.zeros((NUM_STEPS, num, 5), bool)
        total = np.zeros(num)
        kinds = np.zeros(6)
        for step in range(NUM_STEPS):
            memory.note([games.agent_obs(a) for a in range(5)])
            hosts, units, useless = (
                memory.host_features(),
                memory.unit_features(),
                memory.useless(),
            )
            truth = truths(games.envs.states, memory)
            self.is_free[step] = memory.is_free
            choices = np.zeros((num, 5), np.int64)
            for number, (first, last, size) in enumerate(GROUPS):
                store, begin = self.store[number], self.sizes[number]
                free = memory.is_free[:, first:last]
                g, a = np.nonzero(free)
                end = begin + len(g)
                if size == 1:
                    h, u, bad = hosts[g, a][:, None], units[g, a][:, None], useless[g, a]
                else:
                    h, u, bad = hosts[g, 4:7], units[g, 4:7], useless[g, 4:7].reshape(len(g), -1)
                rows = slice(begin, end)
                store["hosts"][rows] = torch.from_numpy(h)
                store["units"][rows] = torch.from_numpy(u)
                store["useless"][rows] = torch.from_numpy(bad)
                store["truths"][rows] = torch.from_numpy(truth[g, first + a])
                log_probs = self.agent.log_probs(
                    store["hosts"][rows], store["units"][rows], store["useless"][rows]
                )
                noise = torch.empty_like(log_probs).exponential_().log_()
                chosen = (log_probs - noise).argmax(1)
                store["choices"][rows] = chosen
                store["log_probs"][rows] = log_probs.gather(1, chosen[:, None])[:, 0]
                store["place"][rows] = torch.from_numpy((step * num + g) * 5 + first + a)
                choices[g, first + a] = chosen.numpy()
                self.sizes[number] = end
            actions = memory.act(choices)
            games.step(actions)
            costs = -self.restores(actions)
            self.rewards[step] = agent_rewards(games.envs.states, costs, options.share)
            total += games.rewards
        self.steps += NUM_STEPS * num
        self.curve.append((self.steps, float(total.mean())))
        self.causes = None

    def restores(self, actions: np.ndarray) -> np.ndarray:
        out = (actions >= 33) & (actions < 49)
        out[:, 4] = (actions[:, 4] >= 97) & (actions[:, 4] < 145)
        return out.astype(np.float32)

    def learn(self, left: float) -> dict[str, float]:
        options, num = self.options, self.options.num_games
        values = np.zeros(NUM_STEPS * num * 5, np.float32)
        with torch.no_grad():
            for store, size in zip(self.store, self.sizes, strict=True):
                place = store["place"][:size].numpy()
                values[place] = self.agent.critic(store["truths"][:size])[:, 0].numpy()
        values = values.reshape(NUM_STEPS, num, 5)
        rewards = self.rewards / self.scale
        advantages = np.zeros_like(rewards)
        shape = (num, 5)
        reward, discount, next_value, carry = (np.zeros(shape, np.float32) for _ in range(4))
        discount += 1
        for t in reversed(range(NUM_STEPS)):
            reward = rewards[t] + options.gamma * reward
            discount = options.gamma * discount
            free = self.is_free[t]
            delta = reward + discount * next_value - values[t]
            now = delta + options.gae_lambda * discount * carry
            advantages[t] = now
            carry = np.where(free, now, carry)
            next_value = np.where(free, values[t], next_value)
            reward = np.where(free, 0, reward)
            discount = np.where(free, 1, discount)
        returns = (advantages + values).reshape(-1)
        advantages = advantages.reshape(-1)
        for store, size in zip(self.store, self.sizes, strict=True):
            place = store["place"][:size].numpy()
            store["advantages"] = torch.from_numpy(advantages[place])
            store["returns"] = torch.from_numpy(returns[place])
        for group in self.optimizer.param_groups:
            group["lr"] = options.learning_rate * left
        self.agent.entropy_weight.fill_(options.entropy_weight * (0.1 + 0.9 * left))
        sums: dict[str, float] = {}
        chunks = max(1, self.sizes[0] // options.minibatch)
        count = 0
        names = ("hosts", "units", "useless", "choices", "log_probs", "truths")
        for _ in range(options.num_epochs):
            orders = [
                torch.randperm(self.sizes[0])[: chunks * options.minibatch].chunk(chunks),
                torch.randperm(self.sizes[1])
                .repeat(9)[: chunks * (options.minibatch // 5)]
                .chunk(chunks),
            ]
            for chosen in zip(*orders, strict=True):
                parts = []
                for store, rows in zip(self.store, chosen, strict=True):
                    part = {name: store[name][rows] for name in names}
                    part["advantages"] = store["advantages"][rows]
                    part["returns"] = store["returns"][rows]
                    std, mean = torch.std_mean(part["advantages"])
                    part["advantages"] = (part["advantages"] - mean) / (std + 1e-8)
                    parts.append(part)
                scalars = self.gradient({"parts": parts})
                self.optimizer.step()
                count += 1
                for name, value in scalars.items():
                    sums[name] = sums.get(name, 0.0) + float(value)
        var = float(np.var(returns))
        return {name: value / count for name, value in sums.items()} | {"returns_var": var}


def main(options: Options) -> None:
    options.save.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    trainer = Trainer(options)
    begin = time.perf_counter()
    num_updates = options.total_steps // (NUM_STEPS * options.num_games)
    for update in range(num_updates):
        seconds = time.perf_counter() - begin
        left = 1 - update / num_updates
        if seconds > 60 * options.minutes:
            break
        t0 = time.perf_counter()
        trainer.collect()
        t1 = time.perf_counter()
        out = trainer.learn(left)
        t2 = time.perf_counter()
        shown = " ".join(f"{k} {v:.4f}" for k, v in out.items())
        print(
            f"{update}/{num_updates} steps {trainer.steps} ret {trainer.curve[-1][1]:.1f} "
            f"rows {trainer.sizes} {t1 - t0:.1f}s+{t2 - t1:.1f}s {shown}",
            flush=True,
        )
        if update % 10 == 9:
            torch.save(trainer.agent.state_dict(), options.save / "agent.pt")
    torch.save(trainer.agent.state_dict(), options.save / "agent.pt")


if __name__ == "__main__":
    main(tyro.cli(Options))
