"""A Q-learner with a memory: sequences with burn-in, stored states and priorities, as in R2D2.

    python examples/r2d2.py --env-id memory:TMaze-v0 --env-kwargs length 10
    python examples/r2d2.py --env-id memory:TMaze-v0 --env-kwargs length 10 --no-recurrent

S. Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning", 2019,
without its actors, its rescaled values and its noise. The env is in `memory.py`, beside this file.
"""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn

from buffers import (
    BufferMisuseError,
    PrioritizedReplayBuffer,
    SequenceBatch,
    SharedReplayBuffer,
    TransitionWriter,
)
from vecenv import VecEnv, make_vec
from vecenv.learn import EvaluationResult, Run, RunError, evaluate, evaluating


@dataclass
class Options:
    env_id: str = "memory:TMaze-v0"  # registered id, also "module:id"
    env_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)  # of the env
    total_steps: int = 100_000  # env steps to train for
    num_envs: int = 16  # envs stepped side by side
    update_every: int = 32  # env steps between two updates
    learning_starts: int = 2000  # env steps with random actions at the start
    exploration: tuple[float, float] = (0.4, 0.01)  # share of random actions in first and last env
    capacity: int = 50_000  # of the replay buffer, in steps
    batch_size: int = 32  # sequences per update
    sequence_length: int = 24  # steps of a sequence, burn-in included
    burn_in: int = 4  # of these, steps that only bring the state up to date
    overlap: int | None = None  # steps shared with the next sequence; None: begin anywhere
    prioritized: bool = True  # draw sequences by their errors
    eta: float = 0.9  # share of the largest error of a sequence in its priority; rest: the mean
    refresh: bool = True  # store the states that the network has now
    recurrent: bool = True  # False: the same network without a memory
    hidden: int = 64  # units of encoder and memory
    n_step: int = 5  # rewards summed before the value of an observation
    learning_rate: float = 1e-3  # of Adam
    max_grad_norm: float = 10.0  # longer gradients are shortened to this
    gamma: float = 0.99  # discount
    tau: float = 0.01  # step of the target towards the network in an update, as a fraction
    seed: int = 1
    backend: str | None = None  # of vecenv.make_vec
    threads: int = 1  # of torch
    eval_episodes: int = 100  # episodes of the greedy policy at the end
    save: Path = Path("runs/r2d2")  # folder of the run: options, metrics, weights, curve
    overwrite: bool = False  # delete an earlier run in it


class QNetwork(nn.Module):
    """Values of all actions along sequences of observations."""

    def __init__(self, space: Box, num_actions: int, options: Options) -> None:
        super().__init__()
        inputs, size = int(np.prod(space.shape)), options.hidden
        self.encoder = nn.Sequential(nn.Flatten(2), nn.Linear(inputs, size), nn.ReLU())
        self.memory = nn.GRU(size, size, batch_first=True) if options.recurrent else None
        self.body = nn.Sequential(nn.Linear(size, size), nn.ReLU())
        self.value, self.advantages = nn.Linear(size, 1), nn.Linear(size, num_actions)

    def forward(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return values (B, L, A), and states (B, L, H) after each of obs (B, L, ...)."""
        states = features = self.encoder(obs.float())
        if self.memory is not None:
            states = features = self.memory(features, state[None])[0]
        x = self.body(features)
        advantages = self.advantages(x)
        return self.value(x) + advantages - advantages.mean(2, keepdim=True), states


def td_errors(
    network: QNetwork, target: QNetwork, batch: SequenceBatch, options: Options
) -> tuple[Tensor, Tensor]:
    """Return what values (B, L) are above those found n steps later, and states (B, L, H)."""
    count, first = batch.mask.sum(1), batch.initial_states["state"]
    # The observations of all steps, and behind them the one after the last.
    obs = torch.cat([batch.obs, torch.zeros_like(batch.obs[:, :1])], 1)
    rows = torch.arange(len(obs))
    obs[rows, count] = batch.next_obs[rows, count - 1]
    values, states = network(obs, first)
    with torch.no_grad():
        picks = values[:, 1:].argmax(2, keepdim=True)
        next_values = target(obs, first)[0][:, 1:].gather(2, picks).squeeze(2)
        discounts = options.gamma * (~batch.terminations)
        goals = batch.rewards + discounts * next_values
        for _ in range(options.n_step - 1):  # fewer where the sequence ends
            later = torch.where(batch.mask[:, 1:], goals[:, 1:], next_values[:, :-1])
            later = torch.cat([later, next_values[:, -1:]], 1)
            goals = batch.rewards + discounts * later
    taken = values[:, :-1].gather(2, batch.actions[..., None].long()).squeeze(2)
    return taken - goals, torch.cat([first[:, None], states[:, :-2].detach()], 1)


class Trainer:
    """Steps the envs and lets the network learn."""

    def __init__(self, options: Options, envs: VecEnv) -> None:
        self.options, self.envs = options, envs
        space: Any = envs.single_observation_space
        actions = envs.single_action_space
        is_known = isinstance(space, Box) and len(space.shape) > 0
        if not (is_known and isinstance(actions, Discrete) and actions.start == 0):
            raise SystemExit(f"{options.env_id} has the spaces {(space, actions)}, not these: Box "
                             "with an axis, and Discrete from 0")  # fmt: skip
        if not min(options.exploration) > 0:
            raise SystemExit(f"--exploration {options.exploration}: expected numbers above 0")
        if not 0 <= options.burn_in < options.sequence_length:
            raise SystemExit(f"--burn-in {options.burn_in}: expected 0 or more and less than "
                             f"--sequence-length {options.sequence_length}")  # fmt: skip
        self.num_actions = int(actions.n)
        self.network = QNetwork(space, self.num_actions, options)
        self.target = copy.deepcopy(self.network).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=options.learning_rate)
        kind: Any = PrioritizedReplayBuffer if options.prioritized else SharedReplayBuffer
        self.buffer = kind(
            options.capacity, space, actions, num_envs=envs.num_envs, track_episodes=True,
            extra_columns={"state": Box(-np.inf, np.inf, (options.hidden,))}, seed=options.seed,
        )  # fmt: skip
        self.writer = TransitionWriter(envs, self.buffer)
        self.rng = np.random.default_rng(options.seed)
        # Each env explores in its own way.
        self.random_share = np.geomspace(*options.exploration, num=envs.num_envs)
        self.returns, self.steps = np.zeros(envs.num_envs), 0
        self.state = torch.zeros(envs.num_envs, options.hidden)  # of the memory
        self.obs, _ = envs.reset(seed=options.seed)
        self.writer.reset(self.obs)

    @torch.no_grad()
    def collect(self) -> list[float]:
        """Step all envs; return the returns of ended episodes."""
        is_early = self.steps < self.options.learning_starts
        is_random = self.rng.random(len(self.obs)) < np.where(is_early, 1.0, self.random_share)
        random = self.rng.integers(self.num_actions, size=len(self.obs))
        values, states = self.network(torch.from_numpy(self.obs)[:, None], self.state)
        actions = np.where(is_random, random, values[:, 0].argmax(1).numpy())
        result = self.obs, rewards, terminations, truncations, _ = self.envs.step(actions)
        self.writer.step(actions, *result, state=self.state.numpy())
        is_over = terminations | truncations
        self.state = states[:, 0].masked_fill(torch.from_numpy(is_over)[:, None], 0.0)
        self.steps += len(actions)
        self.returns += rewards
        found = self.returns[is_over].tolist()
        self.returns[is_over] = 0
        return found

    def learn(self) -> dict[str, float]:
        """Draw sequences, make a step of Adam, move the target, and tell the buffer."""
        options = self.options
        batch = self.buffer.sample_sequences(
            options.batch_size, options.sequence_length, burn_in=options.burn_in,
            overlap=options.overlap, pad=True, initial_states="state",
        )  # fmt: skip
        errors, states = td_errors(self.network, self.target, batch, options)
        learn = batch.learn_mask
        weights = learn if batch.weights is None else learn * batch.weights[:, None]
        loss = (weights * errors.square()).sum() / learn.sum() / 2
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), options.max_grad_norm)
        self.optimizer.step()
        with torch.no_grad():
            pairs = zip(self.target.parameters(), self.network.parameters(), strict=True)
            for target, weight in pairs:
                target.lerp_(weight, options.tau)
        if options.prioritized:
            self.buffer.update_sequence_priorities(batch, errors.detach(), eta=options.eta)
        if options.refresh:
            self.buffer.refresh_states(batch, state=states)
        return {"loss": float(loss.detach()), "error": float(errors[learn].abs().mean().detach())}

    def run(self, run: Run) -> None:
        """Train until the steps are made, or until a signal."""
        options, scalars = self.options, dict[str, float]()
        with run.progress(options.env_id, self.steps, options.total_steps) as progress:
            while self.steps < options.total_steps and not run.should_stop:
                before = self.steps
                run.add_episodes(self.steps, self.collect())
                if self.steps >= options.learning_starts:
                    every = options.update_every
                    for _ in range(self.steps // every - before // every):
                        scalars = self.learn()
                if before // 1000 < self.steps // 1000:
                    recent = run.recent_return()
                    run.log(self.steps, {"return": recent, **scalars})
                    progress.show(self.steps, f"return {recent:.2f}")

    def evaluate(self, episodes: int, seed: int = 1_000_000) -> EvaluationResult:
        """Play the greedy policy in envs of its own."""
        state = torch.zeros(1, self.options.hidden)

        def act(obs: Tensor, starts: Any) -> Tensor:
            nonlocal state
            begins = torch.as_tensor(starts)[:, None]
            state = state.expand(len(obs), -1).masked_fill(begins, 0.0)
            values, states = self.network(obs[:, None], state)
            state = states[:, 0]
            return values[:, 0].argmax(1)

        given: Any = {"backend": self.options.backend, **self.options.env_kwargs}
        return evaluate(act, self.options.env_id, episodes, seed=seed, **given)


def main(options: Options) -> EvaluationResult:
    """Train, save, evaluate and report; return the evaluation."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    given: Any = {"backend": options.backend, **options.env_kwargs}
    try:
        with Run(options.save, options, overwrite=options.overwrite) as run:
            envs = make_vec(options.env_id, options.num_envs, autoreset_mode="SameStep", **given)
            trainer = Trainer(options, envs)
            trainer.run(run)
            run.save({"network": trainer.network, "steps": trainer.steps})
            envs.close()
            title = f"{options.env_id}, seed {options.seed}"
            print(f"{title}: {trainer.steps} steps, {run.seconds:.0f} s")
            run.draw_curve(title)
    except (RunError, BufferMisuseError) as error:  # errors that are NaN are no priorities
        raise SystemExit(str(error)) from None
    with evaluating(f"{options.eval_episodes} episodes"):
        result = trainer.evaluate(options.eval_episodes)
    print(f"mean {result.mean:.3f}, {result}")
    return result


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
