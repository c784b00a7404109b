"""PPO for games with several agents: IPPO, or MAPPO with a central critic.

    vecenv train agents:mpe2.simple_spread_v3
    vecenv train agents:mpe2.simple_spread_v3 --critic central

Agents of equal spaces are a group; each group has a policy, a rollout and an optimizer of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal
from torch.nn import functional as F

from buffers import RolloutBuffer
from vecenv import make_vec_agents
from vecenv.agents import AgentGroup, AgentRowsVecEnv, AgentsVecEnv
from vecenv.learn import (
    Adam,
    EvaluationResult,
    Gradient,
    Graph,
    Run,
    evaluate_games,
    evaluating,
    gradient_options,
    load_checkpoint,
)
from vecenv.train.envs import placed
from vecenv.train.networks import Encoders, mlp
from vecenv.train.options import GradientOptions, OptionsError, RunOptions
from vecenv.train.ppo import RolloutOptions
from vecenv.train.trainer import Trainer, means_of, title_of

__all__ = ["Agent", "AgentsPPO", "Learner", "Options", "load_policy", "main", "ppo_loss"]


@dataclass
class Options(RunOptions, GradientOptions, RolloutOptions):
    """Options of PPO of several agents."""

    env: str = "mpe2.simple_spread_v3"  # what make_vec_agents takes: an id, or a module
    env_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)  # of the game
    critic: Literal["own", "central"] = "own"  # sees what its agent does, or the game's state, too
    policies: Literal["group", "agent"] = "group"  # one for agents of equal spaces, or one for each
    indicator: bool = False  # tell a group's policy which of its agents it acts for
    total_steps: int = 300_000  # steps of agents to train for, at most; 0 evaluates only
    num_games: int = 8  # games stepped side by side
    backend: str | None = None  # of the games, see vecenv.make_vec
    num_epochs: int = 8  # passes over the rollout in an update
    num_minibatches: int = 4  # gradient steps in a pass
    learning_rate: float = 2e-3  # of Adam at the start; it falls linearly to 0
    gamma: float = 0.95  # discount
    value_weight: float = 0.5  # of the squared error of the values in the loss
    eval_episodes: int = 100  # games of the deterministic policies at the end
    save: Path = Path("runs_agents")  # folder for checkpoints, learning curve and scalars
    save_every: int = 200_000  # steps of agents between two checkpoints


class Agent(nn.Module):
    """Actor and critic that the agents of a group share: a tanh network each.

    Args:
        group: Its single spaces count, and how many agents it has.
        state_size: Numbers of the game's state, which a central critic sees; 0 for none.
        options: `hidden` and `indicator`.

    Raises:
        OptionsError: A space is not supported.
    """

    low: Tensor
    high: Tensor

    def __init__(self, group: AgentGroup, state_size: int, options: Options) -> None:
        super().__init__()
        self.num_agents = group.num_agents
        self.action_space: Any = group.single_action_space
        self.is_discrete = isinstance(group.single_action_space, Discrete)
        if not isinstance(group.single_action_space, Discrete | Box):
            raise OptionsError(
                f"{options.env}: {group.agents[0]} acts in {self.action_space}, expected Discrete "
                "or Box; use a wrapper"
            )
        self.indicator, self.has_state = options.indicator, state_size > 0
        self.encoders = Encoders(group.single_observation_space)
        num_inputs = self.encoders.num_features + (group.num_agents if options.indicator else 0)
        hidden = (64, 64) if options.hidden is None else options.hidden
        num_outputs = int(getattr(self.action_space, "n", math.prod(self.action_space.shape)))
        self.actor = mlp(num_inputs, *hidden, num_outputs, gain=0.01)
        self.critic = mlp(num_inputs + state_size, *hidden, 1, gain=1.0)
        if not self.is_discrete:
            self.log_std = nn.Parameter(torch.zeros(num_outputs))
            for name in ("low", "high"):  # on the device, so that games there wait for nothing
                bound = torch.from_numpy(np.array(getattr(self.action_space, name)))
                self.register_buffer(name, bound, persistent=False)

    def features(self, obs: Any, rows: Tensor | None = None) -> Tensor:
        """Return a vector (B, F) for each observation; `rows` if they are not those of a step."""
        found = self.encoders(obs)
        if self.indicator:  # rows are steps, games and agents, in this order
            rows = torch.arange(len(found), device=found.device) if rows is None else rows
            found = torch.cat([found, F.one_hot(rows % self.num_agents, self.num_agents)], 1)
        return found

    def policy(self, features: Tensor, mask: Tensor | None = None) -> Categorical | Independent:
        """Return the distribution of actions; choices are possible where `mask` is not 0."""
        outputs = self.actor(features)
        if not self.is_discrete:
            normal = Normal(outputs, self.log_std.exp().expand_as(outputs), validate_args=False)
            return Independent(normal, 1, validate_args=False)
        if mask is not None:
            outputs = outputs.masked_fill(mask == 0, -1e9)
        return Categorical(logits=outputs, validate_args=False)

    def value(self, features: Tensor, state: Tensor | None) -> Tensor:
        """Return values (B,); a central critic sees the game's state (B, S) besides."""
        if self.has_state:
            assert state is not None
            features = torch.cat([features, state], 1)
        return self.critic(features).squeeze(1)

    def to_env(self, actions: Any) -> Any:
        """Turn actions, which begin at 0 or are unbounded, into those that the game takes.

        They are an array, or a tensor on a device.
        """
        space: Any = self.action_space
        if isinstance(actions, Tensor) and not self.is_discrete:
            return actions.reshape(-1, *space.shape).clamp(self.low, self.high)
        return (
            actions + space.start
            if self.is_discrete
            else np.clip(actions.reshape(-1, *space.shape), space.low, space.high)
        )


def ppo_loss(agent: Agent, batch: Any, options: Options) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a minibatch, a mean over rows, and other means over rows to look at."""
    features = agent.features(batch.obs, batch.indices)
    policy = agent.policy(features, batch.extras.get("action_mask"))
    values = agent.value(features, batch.extras.get("state"))
    log_ratio = policy.log_prob(batch.actions) - batch.log_probs
    ratio = log_ratio.exp()
    gain = batch.advantages * ratio
    clipped = batch.advantages * ratio.clamp(1 - options.clip, 1 + options.clip)
    rows = {
        "policy_loss": -torch.minimum(gain, clipped),
        "value_loss": (values - batch.returns).square(),
        "entropy": policy.entropy(),
        "approx_kl": ratio - 1 - log_ratio,
    }
    loss = rows["policy_loss"] + options.value_weight * rows["value_loss"]
    loss = loss - options.entropy_weight * rows["entropy"]
    share = batch.weights / batch.weights.sum()  # rows that only fill a batch up count nothing
    return (loss * share).sum(), {k: (row.detach() * share).sum() for k, row in rows.items()}


def masks_of(group: AgentGroup, device: str) -> Tensor | None:
    """Return which actions the agents of all rows may take next, int8 (B, n), if games say so."""
    return torch.as_tensor(group.action_masks()).to(device) if group.has_action_masks else None


def is_on_device(group: AgentGroup) -> bool:
    """Return whether rows of agents are tensors where they are computed."""
    return isinstance(group.alive, Tensor)


class Learner:
    """The policy of a group, and what it learns from: the rows of its agents in all games."""

    def __init__(
        self,
        group: AgentGroup,
        state: Tensor | None,
        options: Options,
        num_updates: int,
        trainer: AgentsPPO,
        earlier: dict[str, Any] | None = None,
    ) -> None:
        self.options, self.group, self.num_agents = options, group, group.num_agents
        self.is_captured = is_on_device(group) and options.graphs != "off"
        self.agent = trainer.make_agent(group, 0 if state is None else state.shape[1], options)
        self.agent.to(options.device)
        masks = masks_of(group, options.device)
        columns = {} if masks is None else {"action_mask": MultiBinary(masks.shape[1])}
        states = {} if state is None else {"state": Box(-np.inf, np.inf, state.shape[1:])}
        self.rollout = RolloutBuffer(
            options.num_steps,
            group.num_envs,
            group.single_observation_space,
            group.single_action_space,
            autoreset_mode=group.autoreset_mode,
            gamma=options.gamma,
            gae_lambda=options.gae_lambda,
            device=options.device,
            seed=options.seed,
            allocate=group.allocate,
            extra_columns=columns,
            game_columns=states,  # stored once for all agents of a game
            agents_per_game=group.num_agents,
        )
        self.gradient = Gradient(
            self.agent,
            partial(trainer.loss, options=options),
            **gradient_options(
                options.compile,
                num_calls=num_updates * options.num_epochs * options.num_minibatches,
                num_rows=group.num_envs * options.num_steps // options.num_minibatches,
                earlier=earlier,
            ),
            deferred=self.is_captured,
            dtype=options.dtype,
            log=lambda text: print(f"{group.name}: {text}"),
        )
        self.optimizer = Adam(
            self.gradient.parameters(),
            lr=options.learning_rate,
            eps=1e-5,
            max_grad_norm=options.max_grad_norm,
            deferred=self.is_captured,
        )
        if self.is_captured:  # from here on it is replayed, and waits for nothing
            self.learn_once = Graph(
                self.learn_once, options.device, generators=[self.rollout.generator], log=print
            )

    def act(self, t: int, state: Tensor | None) -> Any:
        """Draw the actions of step t, one per row; those of dead agents are ignored."""
        agent, obs = self.agent, self.rollout.obs_at(t)
        features, masks = agent.features(obs), masks_of(self.group, self.options.device)
        policy = agent.policy(features, masks)
        actions = policy.sample() if agent.is_discrete else policy.rsample()  # which never waits
        put = {"log_probs": policy.log_prob(actions), "values": self.values(features, state)}
        if masks is not None:
            put["action_mask"] = masks
        if state is not None:
            put["state"] = state
        return agent.to_env(self.rollout.put(t, actions=actions, **put))

    def values(self, features: Tensor, state: Tensor | None) -> Tensor:
        """Return values of all rows, of which those of a game share its state."""
        each = None if state is None else state.repeat_interleave(self.num_agents, 0)
        return self.agent.value(features, each)

    def learn(self, state: Tensor | None) -> dict[str, float]:
        """Make the gradient steps of an update; return means over them of the loss's scalars."""
        rollout, found = self.rollout, list[dict[str, Tensor]]()
        with torch.inference_mode():
            last = self.agent.features(rollout.obs_at(rollout.num_steps))
            rollout.compute_advantages(self.values(last, state))
        for _ in range(self.options.num_epochs):
            found.append({name: mean.clone() for name, mean in self.learn_once().items()})
        rollout.check()  # what nobody has waited for
        self.gradient.check()
        return {name: float(mean) for name, mean in means_of(found).items()}

    def learn_once(self) -> dict[str, Tensor]:
        """Make the gradient steps of a pass over the rollout; return means of the scalars."""
        count, found = self.options.num_minibatches, list[dict[str, Tensor]]()
        for batch in self.rollout.minibatches(count, fixed=True, normalize_advantages=True):
            found.append(self.gradient(batch))
            self.optimizer.step()
        return means_of(found)


class AgentsPPO(Trainer):
    """Plays the games and lets each group learn from its rows; see `Trainer`.

    `make_agent(group, state_size, options)` makes the agent of a group, and `loss` is given that.

    Args:
        options: How.
        envs: The games, the caller's to close; they are reset.
        agent: Not used: each group has one.
        earlier: How gradients were computed, by group, in the run that goes on.

    Attributes:
        steps: Steps made by agents; those of dead ones do not count.
        learners: By group.
    """

    Options = Options
    make_agent = Agent
    loss = staticmethod(ppo_loss)
    MAY_CHANGE: ClassVar = Trainer.MAY_CHANGE | {"total_steps", "eval_episodes", "num_workers"}

    def __init__(
        self,
        options: Options,
        envs: AgentsVecEnv,
        agent: Any = None,
        earlier: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(options, envs, agent or nn.Module(), earlier)
        self.num_rows = sum(group.num_envs for group in envs.groups.values())
        obs = self.reset(options.seed)
        num_updates = options.total_steps // (self.num_rows * options.num_steps)
        self.learners = {
            name: Learner(group, self.state, options, num_updates, self, (earlier or {}).get(name))
            for name, group in envs.groups.items()
        }
        for name, learner in self.learners.items():
            learner.rollout.start(obs[name])
        self.is_captured = all(learner.is_captured for learner in self.learners.values())
        if self.is_captured:
            self.collect = Graph(self.collect, options.device, log=print)

    def reset(self, seed: int) -> dict[str, Any]:
        """Reset all games; return observations by group."""
        obs, _ = self.envs.reset(seed=seed)
        self.state = None
        self.look()
        return obs

    def look(self) -> None:
        """Take note of the games' states (G, S) for a central critic, in memory that stays."""
        if self.options.critic == "own":
            return
        found = torch.as_tensor(self.envs.state()).flatten(1).float().to(self.options.device)
        if self.state is None:
            self.state = found.clone()
        else:
            self.state.copy_(found)

    @torch.inference_mode()
    def collect(self) -> None:
        """Step all games `num_steps` times."""
        for t in range(self.options.num_steps):
            actions = {k: learner.act(t, self.state) for k, learner in self.learners.items()}
            slots = {k: learner.rollout.slot(t) for k, learner in self.learners.items()}
            self.envs.step(actions, out=slots)
            self.look()
        for learner in self.learners.values():
            learner.rollout.count_episodes()

    def update(self) -> dict[str, float]:
        """Collect a rollout and learn from it; return scalars by group."""
        left, scalars = max(0.0, 1 - self.steps / self.options.total_steps), dict[str, float]()
        self.collect()
        self.episodes = list[float]()
        if all(map(is_on_device, self.envs.groups.values())):
            envs: Any = self.envs
            envs.check()
        for name, learner in self.learners.items():
            learner.optimizer.set_lr(self.options.learning_rate * left)
            returns = learner.rollout.episodes().returns.tolist()
            means = learner.learn(self.state)
            self.steps += learner.rollout.num_valid
            learner.rollout.advance()
            if returns:
                scalars[f"{name}/episodic_return"] = sum(returns) / len(returns)
            scalars |= {f"{name}/{key}": value for key, value in means.items()}
            self.episodes += returns
        self.num_updates += 1
        return scalars

    def train(self, run: Run) -> None:
        """Update while another rollout fits into the steps, and until a signal says to stop."""
        options = self.options
        if (saved := run.restore(self.parts())) is not None:
            self.steps, self.num_updates = saved["steps"], saved["num_updates"]
            if self.state is not None:
                self.state.copy_(saved["state"])
            if run.not_restored:
                obs = self.reset(options.seed + self.steps)
                for name, learner in self.learners.items():
                    learner.rollout.start(obs[name])
        total, per_rollout = options.total_steps, self.num_rows * options.num_steps
        with run.progress(options.env, self.steps, total, rollout_steps=per_rollout) as progress:
            while self.steps + per_rollout <= total:
                if run.should_stop:
                    progress.print(f"stopped after {self.steps} steps: {run.resume_command}")
                    break
                with run.updating(self.num_updates + 1, self.steps):
                    scalars = self.update()
                run.add_episodes(self.steps, self.episodes)
                recent, speed = run.recent_return(100), progress.speed(self.steps)
                text = f"return of an agent {recent:.1f}, {speed:.0f} steps/s"
                progress.show(self.steps, text)
                run.log(self.steps, scalars | {"SPS": speed})
                if run.is_due(self.steps):
                    self.save(run, score=recent)
            else:
                progress.fill(self.steps)  # what no rollout fits into is left out
        self.save(run)

    def parts(self) -> dict[str, Any]:
        """Return what a checkpoint restores."""
        parts: dict[str, Any] = {"envs": self.envs}
        for name, learner in self.learners.items():
            parts[f"{name}/agent"], parts[f"{name}/optimizer"] = learner.agent, learner.optimizer
            parts[f"{name}/rollout"] = learner.rollout
        return parts

    def save(self, run: Run, score: float | None = None) -> None:
        """Write a checkpoint, after how gradients are computed, which a resumed run keeps."""
        run.write_json("gradient", {k: lea.gradient.describe() for k, lea in self.learners.items()})
        counts = {"steps": self.steps, "num_updates": self.num_updates, "state": self.state}
        run.save({**self.parts(), **counts}, score=score)

    @staticmethod
    def make_envs(options: Options, num_envs: int, *, on_device: bool = False) -> AgentsVecEnv:
        """Make the games; compiled ones where the networks are, if asked."""
        kwargs: Any = dict(options.env_kwargs)
        if options.policies == "agent":
            kwargs["groups"] = str  # each agent a group of its own name
        if options.critic == "central":
            kwargs["central_state"] = True
        workers = {} if options.num_workers is None else {"num_workers": options.num_workers}

        def make(num_games: int = 1, **where: Any) -> Any:
            return make_vec_agents(options.env, num_games, **where, **kwargs)

        where = placed(make, options, on_device=on_device)
        envs = make(num_envs, vector_kwargs=workers, **where)
        # One group is an ordinary vector env of its rows; here all goes by group.
        return envs.agents if isinstance(envs, AgentRowsVecEnv) else envs

    @staticmethod
    def player(
        envs: AgentsVecEnv, agent: Mapping[str, Agent], options: Options
    ) -> Callable[[Any], dict[str, Any]]:
        """Return the likeliest actions, by group, as a function of observations by group."""

        def act(obs: Any) -> dict[str, Any]:
            found = {}
            for name, one in agent.items():
                device = str(obs_device(obs[name]))
                policy = one.policy(one.features(obs[name]), masks_of(envs.groups[name], device))
                found[name] = one.to_env(policy.mode.cpu().numpy())
            return found

        return act

    def evaluate(self, episodes: int, seed: int | None = None) -> dict[str, EvaluationResult]:
        """Play the likeliest actions in games of their own; return what a game earns, by group."""
        options = self.options
        games = self.make_envs(options, episodes)
        first: int = 1_000_000 + options.seed if seed is None else seed
        try:
            agents = {name: learner.agent for name, learner in self.learners.items()}
            act = self.player(games, agents, options)
            return evaluate_games(act, games, episodes, seed=first, device=options.device)
        finally:
            games.close()

    @classmethod
    def main(cls, options: Options) -> dict[str, EvaluationResult]:
        """Train, save, evaluate and report; return what a game earns, by group."""
        run, trainer = cls.run(options)
        # The run has given back the signals: one is enough now.
        with evaluating(f"{options.eval_episodes} games"):
            found = trainer.evaluate(options.eval_episodes)
        results = {name: {"mean": x.mean, "ci95": x.ci95} for name, x in found.items()}
        run.write_json("evaluation", results)
        print(f"{title_of(options)}: {run.seconds:.0f} s, see {options.save}")
        for name, result in found.items():
            count = trainer.learners[name].num_agents
            print(f"{name}, {count} agents: {result}, {result.mean / count:.2f} each")
        return found

    @classmethod
    def load_policy(
        cls, options: Options, num_envs: int
    ) -> tuple[AgentsVecEnv, Callable[..., Any]]:
        """Return games and the policies of a run, for `vecenv play`."""
        envs = cls.make_envs(options, num_envs)
        size = 0
        if options.critic == "central":
            envs.reset()
            size = envs.state()[0].size
        agents = {name: cls.make_agent(group, size, options) for name, group in envs.groups.items()}
        state = load_checkpoint(cls.checkpoint_of(options.save))["state"]
        for name, agent in agents.items():
            agent.load_state_dict(state[f"{name}/agent"])
        return envs, cls.player(envs, agents, options)


def obs_device(obs: Any) -> torch.device:
    """Return where an observation, or the parts of one, is."""
    return obs_device(next(iter(obs.values()))) if isinstance(obs, Mapping) else obs.device


load_policy, main = AgentsPPO.load_policy, AgentsPPO.main
