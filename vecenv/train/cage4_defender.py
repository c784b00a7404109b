"""Five defenders for CAGE Challenge 4, which start as rules and learn with PPO.

    vecenv train Cage4-v0

One policy plays all five agents. `Cage4Memory` keeps each agent's observations and actions, and
offers choices when the agent is free to act: only these decisions are learnt from. The network
uses the same weights for every host, so it applies what it learns to all hosts. The initial weights
of one layer make agents follow the rules (`Rules`), more or less.

All agents get the same reward, most of it caused by others. In training, an agent gets the part of
its own subnets and a small share of the rest, both from the true state. The critic sees that, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from vecenv import cage
from vecenv.cage.challenge4.player import HOST_FEATURES
from vecenv.learn import Adam, Run, evaluating
from vecenv.train.options import OptionsError, RunOptions
from vecenv.train.trainer import Trainer

__all__ = ["BASELINES", "Cage4Defender", "Defender", "Options", "load_policy", "main", "ppo_loss"]

NUM_STEPS, NUM_AGENTS = 499, 5  # of an episode; a rollout is one episode of every game
BASELINES = {  # second and third as published: the best learned entry; rules
    "react-restore": -1045.5,
    "KEEP": -193.68,
    "the challenge's winner": -113.0,
    "rules": -93.7,
}
# Agents 0 to 3 watch one subnet each, agent 4 the last three: (first agent, agents, units each).
GROUPS = ((0, 4, 1), (4, 1, 3))
# The agent that owns each of the subnets RZA, OZA, RZB, OZB, contractors, PUB, ADM, OFF.
OWN = np.zeros((NUM_AGENTS, 8), np.float32)
OWN[range(4), range(4)] = OWN[4, 5:] = 1
UNITS = OWN[:, [0, 1, 2, 3, 6, 7, 5]]  # in the order of `Cage4Memory`
RED_STATES, RED_ACTIONS = range(1, 9), range(9)  # codes that the critic sees


@dataclass
class Options(RunOptions):
    """Options of the defenders' training."""

    total_steps: int = 6_000_000  # game steps to train for
    learning_rate: float = 7e-4  # Adam's at the start
    gamma: float = 0.998  # discount: what a Restore gains comes much later
    num_games: int = 64  # played side by side
    width: int = 32  # units of a layer
    num_epochs: int = 2  # passes over the decisions of a rollout
    minibatch: int = 2048  # decisions of agents 0 to 3 in a gradient step, and 1/5 of agent 4
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation, per decision
    clip: float = 0.2  # probability ratios beyond 1 +- clip gain nothing
    sharpness: float = 1.25  # of the logits with which agents follow the rules at the start
    entropy_weight: float = 0.001  # of the entropy bonus at the start; it falls to a tenth
    max_grad_norm: float = 0.5  # larger gradient norms are scaled down to this
    temperature: float = 0.0  # of the saved policy's draws; 0 plays the likeliest choices
    share: float = 0.05  # share of the rewards that other agents' subnets cause
    compile: Literal["auto", "on", "off"] = "auto"  # the gradient; "auto": if there are many rows
    eval_episodes: int = 1000
    save: Path = Path("runs/cage4_defender")  # folder for policy, table, checkpoints and curve
    save_every: int = 300_000  # game steps between checkpoints


# Initial logits of the direct layer: the rules, and other choices that may be worth a trial. For
# Analyse, Remove, Restore and DeployDecoy: a constant, and factors of features.
PRIOR = (
    {"": -2, "look": 4, "stale": 1, "stalest": 1.5, "rule_analyse": 3},
    {"": -5, "remove": 5, "rule_remove": 4},
    {"": -6, "restore": 7, "sources": 1, "rule_restore": 4},
    {"": -5, "decoys_0": 4, "decoys_1": 3, "rule_decoy": 4},
)


class Defender(nn.Module):
    """The policy of all agents, and their critic."""

    entropy_weight: Tensor  # of the entropy bonus in the loss
    scale: Tensor  # the critic's values are returns divided by it

    def __init__(self, num_truths: int, options: Options) -> None:
        super().__init__()
        width, memory = options.width, cage.Cage4Memory
        hosts, units = memory.num_host_features, memory.num_unit_features
        self.host, self.unit = nn.Linear(hosts, width), nn.Linear(units, width)
        self.again, self.pooled = nn.Linear(width, width), nn.Linear(2 * width, width)
        self.act, self.direct = nn.Linear(width, 4), nn.Linear(hosts, 4)
        nn.init.normal_(self.act.weight, std=0.01)
        nn.init.zeros_(self.act.bias)
        weight, bias = torch.zeros_like(self.direct.weight), torch.zeros(4)
        for kind, factors in enumerate(PRIOR):
            for name, factor in factors.items():
                place = weight[kind, HOST_FEATURES.index(name)] if name else bias[kind]
                place.fill_(factor * options.sharpness)
        self.direct.load_state_dict({"weight": weight, "bias": bias})
        self.critic = nn.Sequential(
            nn.Linear(num_truths, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )
        self.register_buffer("entropy_weight", torch.tensor(options.entropy_weight))
        self.register_buffer("scale", torch.tensor(10.0))

    def log_probs(self, hosts: Tensor, units: Tensor, useless: Tensor) -> Tensor:
        """Return log-probabilities (B, U * 64) of the choices of agents with U units.

        hosts (B, U, 16, F), units (B, U, F), useless bool (B, U * 64): see `Cage4Memory`.
        """
        first = torch.relu(self.host(hosts) + self.unit(units)[:, :, None])
        pooled = torch.cat([first.mean(2), first.amax(2)], 2)
        second = torch.relu(self.again(first) + self.pooled(pooled)[:, :, None])
        logits = (self.act(second) + self.direct(hosts)).flatten(1)
        return logits.masked_fill(useless, -1e9).log_softmax(1)

    def weights(self) -> dict[str, np.ndarray]:
        """Return the policy in the form that `save_cage4_defender` takes."""
        own = {name: x for name, x in self.named_parameters() if not name.startswith("critic")}
        return {name: x.detach().numpy().copy() for name, x in own.items()}


def ppo_loss(agent: Defender, batch: Any, options: Options) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a minibatch of decisions of both groups, a mean over them."""
    gains, entropies, errors, count = [], [], [], 0
    for part in batch:
        all_log_probs = agent.log_probs(part["hosts"], part["units"], part["useless"])
        log_probs = all_log_probs.gather(1, part["choices"][:, None])[:, 0]
        ratio, advantages = (log_probs - part["log_probs"]).exp(), part["advantages"]
        clipped = ratio.clamp(1 - options.clip, 1 + options.clip)
        gains.append(torch.minimum(advantages * ratio, advantages * clipped).sum())
        entropies.append(-(all_log_probs.exp() * all_log_probs.clamp(min=-50)).sum())
        errors.append((agent.critic(part["truths"])[:, 0] - part["returns"]).square().sum())
        count += len(ratio)
    gain, entropy, error = (torch.stack(x).sum() / count for x in (gains, entropies, errors))
    loss = error / 2 - gain - agent.entropy_weight * entropy
    return loss, {"entropy": entropy.detach(), "value_error": error.detach()}


class Cage4Defender(Trainer):
    """PPO on whole episodes of many games; see `Trainer`.

    `make_agent(num_truths, options)` gets the number of true-state values that the critic sees.
    """

    Options = Options
    make_agent = Defender
    loss = staticmethod(ppo_loss)
    STATE = ("agent", "optimizer", "steps", "num_updates")  # not envs: episodes begin anew
    BASELINES: ClassVar = BASELINES

    def __init__(self, options: Options, envs: Any, agent: Any = None) -> None:
        self.options, self.envs, count = options, envs, options.num_games
        self.memory = cage.Cage4Memory(count)
        self.begin_episodes(options.seed)
        agent = agent or self.make_agent(self.truths().shape[2], options)
        super().__init__(options, envs, agent)
        self.NUM_RECENT, self.rollout_steps = 10 * count, NUM_STEPS * count
        self.total_updates = options.total_steps // self.rollout_steps
        num_calls = self.total_updates * options.num_epochs * 25
        self.gradient = self.make_gradient(num_calls, options.minibatch, may_split=False)
        weights, longest = self.gradient.parameters(), options.max_grad_norm
        self.optimizer = Adam(weights, eps=1e-5, max_grad_norm=longest)
        shape = NUM_STEPS, count, NUM_AGENTS
        self.rewards, self.is_free = np.zeros(shape, np.float32), np.zeros(shape, bool)

    def begin_episodes(self, seed: int) -> None:
        """Begin an episode in every game."""
        self.obs, _ = self.envs.reset(seed=seed)
        self.memory.begin(self.envs.agent_masks())
        self.memory.note(self.envs.agent_obs(self.obs))

    def truths(self) -> np.ndarray:
        """Return the critic's input, float32 (G, 5, F): the true state of each agent's zones."""
        states, memory = self.envs.states, self.memory
        is_there = np.arange(states["session_flags"].shape[2]) < states["num_sessions"][..., None]
        is_root = (states["session_flags"] & 2 > 0) & is_there
        of_red = [states["num_sessions"], is_root.sum(2), states["num_offered"] / 4]
        of_red += [states["busy_type"] == code for code in RED_ACTIONS] + [states["busy_left"]]
        of_red += [(states["fsm"] & 15 == code).sum(2) / 2 for code in RED_STATES]
        of_blue = [np.bitwise_count(states[name]) @ OWN.T for name in ("degraded", "red_hosts")]
        of_blue += [x.sum(2) @ UNITS.T for x in (memory.restore, memory.look, memory.remove)]
        numbers = [x[:, 1:] / 3 for x in of_red] + [x / 3 for x in of_blue]
        phase = np.eye(3)[memory.phase][:, :, None] * np.eye(NUM_AGENTS)[..., None]
        phase, clock = phase.reshape(len(phase), 5, -1), memory.unit_features()[:, :5, 21:]
        return np.concatenate([np.stack(numbers, 2), phase, clock], axis=2, dtype=np.float32)

    def told_rewards(self, actions: np.ndarray) -> np.ndarray:
        """Return the rewards that agents learn from, float32 (G, 5)."""
        hurt = self.envs.zone_rewards().sum(2)  # no agent can help the contractors
        own = hurt @ OWN.T
        others = own.sum(1, keepdims=True) - own
        return own - self.memory.restores(actions) + self.options.share * others

    @torch.no_grad()
    def collect(self) -> None:
        """Play one episode in every game; keep decisions and their observations by group."""
        options, memory = self.options, self.memory
        self.begin_episodes(options.seed * 1_000_003 + (self.num_updates + 1) * options.num_games)
        found: list[list[dict[str, Tensor]]] = [[] for _ in GROUPS]
        self.totals, silence = np.zeros(options.num_games), np.zeros_like(self.is_free[0], int)
        for step in range(NUM_STEPS):
            seen = memory.host_features(), memory.unit_features(), memory.useless()
            truths, is_free = self.truths(), memory.is_free
            self.is_free[step], choices = is_free, np.zeros(is_free.shape, np.int64)
            for rows, (first, num, size) in zip(found, GROUPS, strict=True):
                games, agents = np.nonzero(is_free[:, first : first + num])
                if not len(games):
                    continue
                agents += first
                units = games[:, None], agents[:, None] + np.arange(size)  # units of the agents
                names = "hosts", "units", "useless"
                row = {k: torch.from_numpy(x[units]) for k, x in zip(names, seen, strict=True)}
                row["useless"] = row["useless"].flatten(1)
                log_probs = self.agent.log_probs(**row)
                noise = torch.empty_like(log_probs).exponential_().log_()
                chosen = (log_probs - noise).argmax(1)  # draws from the distribution
                choices[games, agents] = chosen.numpy()
                row |= {"choices": chosen, "truths": torch.from_numpy(truths[games, agents])}
                row["log_probs"] = log_probs.gather(1, chosen[:, None])[:, 0]
                place = (step * options.num_games + games) * NUM_AGENTS + agents
                rows.append(row | {"place": torch.from_numpy(place)})  # index in the whole rollout
            actions = memory.act(choices)
            self.obs, rewards, *_ = self.envs.step(np.concatenate([actions, silence], 1))
            self.rewards[step] = self.told_rewards(actions)
            self.totals += rewards
            memory.note(self.envs.agent_obs(self.obs))
        self.decisions = [{k: torch.cat([x[k] for x in rows]) for k in rows[0]} for rows in found]

    @torch.no_grad()
    def estimate(self) -> None:
        """Add advantages and returns to the decisions.

        Two decisions of an agent are as many steps apart as its action takes.
        """
        gamma, gae_lambda, scale = self.options.gamma, self.options.gae_lambda, self.agent.scale
        values = np.zeros(self.rewards.size, np.float32)
        for columns in self.decisions:
            found = self.agent.critic(columns["truths"])[:, 0] * float(scale)
            values[columns["place"].numpy()] = found.numpy()
        values = values.reshape(self.rewards.shape)
        advantages, zeros = np.zeros_like(values), np.zeros_like(values[0])
        reward, discount, next_value, next_advantage = zeros, zeros + 1, zeros, zeros
        for t in reversed(range(NUM_STEPS)):
            is_free = self.is_free[t]
            reward = self.rewards[t] + gamma * reward  # until the next decision
            discount = gamma * discount
            error = reward + discount * next_value - values[t]
            advantages[t] = error + gae_lambda * discount * next_advantage
            next_advantage = np.where(is_free, advantages[t], next_advantage)
            next_value = np.where(is_free, values[t], next_value)
            reward, discount = np.where(is_free, 0, reward), np.where(is_free, 1, discount)
        returns = advantages + values
        scale.fill_(0.8 * float(scale) + 0.2 * float(returns[self.is_free].std() + 1e-3))
        for columns in self.decisions:
            place = columns["place"].numpy()
            columns["advantages"] = torch.from_numpy(advantages.reshape(-1)[place])
            columns["returns"] = torch.from_numpy(returns.reshape(-1)[place] / float(scale))

    def learn(self, left: float) -> dict[str, float]:
        """Update policy and critic; `left` falls from 1 to 0 over the training."""
        options = self.options
        self.optimizer.set_lr(options.learning_rate * left)
        self.agent.entropy_weight.fill_(options.entropy_weight * (0.1 + 0.9 * left))
        wanted = options.minibatch, options.minibatch // 5
        sizes = [len(columns["place"]) for columns in self.decisions]
        num_minibatches = max(1, sizes[0] // wanted[0])
        scalars: dict[str, float] = {}
        for _ in range(options.num_epochs):
            orders = []
            for size, count in zip(sizes, wanted, strict=True):
                rows = -(-num_minibatches * count // size)  # some rows of agent 4 twice, or never
                order = torch.cat([torch.randperm(size) for _ in range(rows)])
                orders.append(order[: num_minibatches * count].view(num_minibatches, count))
            for chosen in zip(*orders, strict=True):
                batch = [
                    {name: column[rows] for name, column in columns.items() if name != "place"}
                    for columns, rows in zip(self.decisions, chosen, strict=True)
                ]
                for part in batch:
                    std, mean = torch.std_mean(part["advantages"])
                    part["advantages"].sub_(mean).div_(std + 1e-8)
                scalars = {name: float(x) for name, x in self.gradient(batch).items()}
                self.optimizer.step()
        return scalars

    def update(self) -> dict[str, float]:
        """Play one episode in every game and learn from it; return scalars to log."""
        self.collect()
        self.estimate()
        scalars = self.learn(1 - self.num_updates / self.total_updates)
        self.num_updates += 1
        self.steps += self.rollout_steps
        self.episodes = self.totals.tolist()
        return {"return": self.totals.mean(), **scalars}

    def finish(self, run: Run) -> None:
        """Save the policy."""
        facts: Any = {"steps": self.steps, "rules_version": cage.CAGE4_RULES_VERSION}
        facts["temperature"] = self.options.temperature
        cage.save_cage4_defender(self.options.save / "defender.npz", self.agent.weights(), **facts)

    @classmethod
    def make_envs(cls, options: Options, num_envs: int, *, on_device: bool = False) -> Any:
        """Make games for training; their episodes all begin together."""
        how: Any = {"messages": True, "observation": "events", "autoreset_mode": "Disabled"}
        return cage.Cage4VectorEnv(num_envs, num_threads=1, **how)

    @staticmethod
    def check_options(options: Options) -> None:
        """Raise OptionsError if there are too few steps for one update."""
        if options.total_steps < (least := NUM_STEPS * options.num_games):
            raise OptionsError(f"--total-steps is less than one rollout, {least}")

    @classmethod
    def main(cls, options: Options) -> float:
        """Train, save and evaluate; return the mean score."""
        run, trainer = cls.run(options)
        path, count = options.save / "defender.npz", options.eval_episodes
        name = f"defender, {trainer.steps:,} steps"
        with evaluating(f"{count} episodes"):
            result = cage.evaluate_cage4(cage.Cage4Player(path), episodes=count, name=name)
        result.to_json(options.save / "evaluation.json")
        Console().print(result)
        print(f"{run.seconds:.0f} s; policy, curve and table: {options.save}")
        print(f"to watch it: vecenv watch Cage4-v0 --policy {path} --gif episode.gif")
        return result.score.mean

    @classmethod
    def load_policy(cls, options: Options, num_envs: int, **env_kwargs: Any) -> tuple[Any, Any]:
        """Return games and the defender of a run, for `vecenv play`."""
        envs = cage.Cage4VectorEnv(num_envs, observation="events", **env_kwargs)
        player = cage.Cage4Player(options.save / "defender.npz", seed=options.seed)

        def act(obs: Tensor, starts: Tensor, report: dict[str, Any] | None = None) -> np.ndarray:
            if starts.all():  # all games have the same length
                player.reset([mask.copy() for mask in envs.agent_masks()])
            return player.act(envs.agent_obs(obs.numpy()), report=report)

        return envs, act


load_policy, main = Cage4Defender.load_policy, Cage4Defender.main
