"""An env of one's own, with Dict observations and masks, and PPO that learns it in 20 seconds.

    python examples/own_env.py
    vecenv check own_env:Courier                    # in the folder examples: is the env right?
    vecenv train own_env:Courier --total-steps 200000
    vecenv watch own_env:Courier                    # with the policy: vecenv play ... --text

A courier walks on a map with walls, to a goal that is drawn for each episode, before its battery is
empty. Observations are a Dict, and steps into a wall are masked. The env knows nothing of vecenv;
`make_vec` steps many of it, here side by side in one process (`backend="async"`: in workers).
"""

import time
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary
from torch import Tensor, nn
from torch.distributions import Categorical

from buffers import RolloutBuffer
from vecenv import make_vec
from vecenv.learn import EvaluationResult, evaluate

MOVES = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])  # up, down, left, right
MAP = """
.......
.##.##.
.#...#.
.#.#.#.
.......
.##.##.
.......
"""
WALLS = np.array([[cell == "#" for cell in row] for row in MAP.split()])


class Courier(gym.Env):
    """It observes `map` (7, 7, 3) of walls, courier and goal, and what is left in its `battery`."""

    metadata = {"render_modes": ["ansi"], "render_fps": 4}
    CAPACITY = 24  # steps

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        pictures = Box(0, 1, (*WALLS.shape, 3), np.float32)
        self.observation_space = Dict({"map": pictures, "battery": Box(0, 1, (1,), np.float32)})
        self.action_space = Discrete(len(MOVES))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        free = np.argwhere(~WALLS)
        self.cell, self.goal = self.np_random.choice(free, 2, replace=False)
        self.battery = self.CAPACITY
        return self.observe(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.action_masks()[action]:  # else it stays
            self.cell = self.cell + MOVES[action]
        self.battery -= 1
        is_there = bool((self.cell == self.goal).all())
        return self.observe(), float(is_there), is_there or self.battery == 0, False, {}

    def action_masks(self) -> np.ndarray:
        """Which actions are allowed: those that do not lead into a wall, or off the map."""
        cells = self.cell + MOVES
        is_inside = ((cells >= 0) & (cells < WALLS.shape)).all(1)
        rows, columns = cells.clip(0, np.array(WALLS.shape) - 1).T
        return is_inside & ~WALLS[rows, columns]

    def observe(self) -> dict[str, np.ndarray]:
        picture = np.zeros((*WALLS.shape, 3), np.float32)
        picture[..., 0] = WALLS
        picture[(*self.cell, 1)] = picture[(*self.goal, 2)] = 1
        return {"map": picture, "battery": np.array([self.battery / self.CAPACITY], np.float32)}

    def render(self) -> str:
        shown = np.where(WALLS, "#", ".")
        shown[tuple(self.goal)], shown[tuple(self.cell)] = "G", "C"
        return "\n".join("".join(row) for row in shown)


@dataclass
class Options:
    total_steps: int = 120_000  # env steps
    num_envs: int = 32  # envs stepped side by side
    num_steps: int = 64  # steps of each env per update
    learning_rate: float = 1e-3  # of Adam; falls to 0
    entropy_weight: float = 0.01  # in the loss
    seed: int = 1


class Agent(nn.Module):
    """Convolutions for the map, then layers that see the battery, too."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()
        )
        self.hidden = nn.Sequential(nn.Linear(16 * WALLS.size + 1, 128), nn.ReLU())
        self.actor, self.critic = nn.Linear(128, len(MOVES)), nn.Linear(128, 1)

    def forward(self, obs: dict[str, Tensor], masks: Tensor) -> tuple[Categorical, Tensor]:
        """Return the policy over the actions that masks (B, 4) allow, and values (B,)."""
        picture = self.map(obs["map"].movedim(-1, 1)).flatten(1)
        x = self.hidden(torch.cat([picture, obs["battery"]], 1))
        logits = self.actor(x).masked_fill(masks == 0, -1e9)
        return Categorical(logits=logits), self.critic(x).squeeze(-1)


def main(options: Options) -> EvaluationResult:
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    envs = make_vec(Courier, options.num_envs, backend="sync")
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=options.learning_rate, eps=1e-5)
    spaces = envs.single_observation_space, envs.single_action_space
    rollout = RolloutBuffer(
        options.num_steps, options.num_envs, *spaces,
        autoreset_mode=envs.autoreset_mode, extra_columns={"masks": MultiBinary(len(MOVES))},
        gamma=0.97, seed=options.seed,
    )  # fmt: skip
    rollout.start(envs.reset(seed=options.seed)[0])
    num_updates = options.total_steps // (options.num_envs * options.num_steps)
    begin = time.perf_counter()
    for update in range(num_updates):
        optimizer.param_groups[0]["lr"] = options.learning_rate * (1 - update / num_updates)
        with torch.no_grad():
            for t in range(options.num_steps):
                masks = torch.as_tensor(envs.action_masks())
                policy, values = agent(rollout.obs_at(t), masks)
                actions = policy.sample()
                log_probs = policy.log_prob(actions)
                rollout.put(t, actions=actions, log_probs=log_probs, values=values, masks=masks)
                envs.step(rollout.env_actions(t), out=rollout.slot(t))
            masks = torch.as_tensor(envs.action_masks())
            _, values = agent(rollout.obs_at(options.num_steps), masks)
            rollout.compute_advantages(values)
        for _ in range(4):
            for batch in rollout.minibatches(4, normalize_advantages=True):
                policy, values = agent(batch.obs, batch.extras["masks"])
                ratio = (policy.log_prob(batch.actions) - batch.log_probs).exp()
                gain = torch.min(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)
                errors = (values - batch.returns).square()
                bonus = options.entropy_weight * policy.entropy()
                loss = (0.5 * errors - gain - bonus).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        returns = rollout.episodes().returns
        if update % 20 == 19 and len(returns):
            steps = (update + 1) * options.num_envs * options.num_steps
            speed = steps / (time.perf_counter() - begin)
            print(f"{steps} steps: return {np.mean(returns):.2f}, {speed:.0f} steps/s", flush=True)
        rollout.advance()

    def act(obs: dict[str, Tensor], action_masks: Tensor) -> Tensor:
        return agent(obs, action_masks)[0].probs.argmax(-1)

    result = evaluate(act, envs, 200, seed=10_000)
    envs.close()
    print(
        f"Courier: arrived in {result.mean:.0%} of 200, after {np.mean(result.lengths):.1f} steps"
    )
    return result


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
