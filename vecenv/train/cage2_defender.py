"""A defender for CAGE Challenge 2, trained from scratch by PPO.

    vecenv train Cage2-v0

Blue sees the challenge's 52 bits and its memory (`vecenv.cage.BlueMemory`), and chooses from 44
actions instead of 145: the next decoy on a host rather than one of eight.

The score is the sum of mean returns over 30, 50 and 100 steps, the first ones of the same episode:
so PPO maximises the score itself if rewards have weights of three, two and one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.console import Console

from vecenv import VecEnv, cage
from vecenv.learn import Run, evaluating
from vecenv.train import ppo
from vecenv.train.options import OptionsError

__all__ = ["STEP_COLUMN", "WINNER", "Cage2Defender", "Options", "load_policy", "main"]

CELLS = (30, 50, 100)  # lengths of the challenge's episodes
STEP_COLUMN = cage.BlueMemory(1).step_column  # column of an observation: steps made, of a hundred
WINNER = {"the challenge's winner": (-13.76 - 16.60) / 2}  # of B_line, Meander, as published


@dataclass
class Options(ppo.Options):
    """PPO's options, with other defaults."""

    env_id: str = "vecenv:Cage2-v0"
    red_agent: str = "mixed"  # attacker in training; "mixed": drawn for every episode
    rules: str = "faithful"  # or "debugged"; scores under different rules are not comparable
    total_steps: int = 40_000_000
    num_envs: int = 512
    num_steps: int = 101  # an episode of every env, and the step that only resets
    gamma: float = 0.995
    entropy_weight: float = 0.03  # with less, which way to play is found depends on the seed
    entropy_falls: bool = True
    eval_episodes: int = 1000  # per cell of the table at the end
    save: Path = Path("runs/cage2_defender")
    save_every: int = 5_000_000


class Cage2Defender(ppo.PPO):
    """PPO for the challenge's score; its episodes truly end after their last step."""

    Options = Options
    BASELINES: ClassVar = WINNER

    @torch.inference_mode()
    def compute_advantages(self) -> None:
        """Weigh rewards as the challenge does; after the last step, no value is added."""
        rollout = self.rollout
        steps = (rollout.obs[:-1, :, STEP_COLUMN] * CELLS[-1]).round().long()
        shares = sum((steps < end).float() for end in CELLS) / len(CELLS)  # cells with the step
        rollout.rewards.mul_(torch.as_tensor(shares, device=rollout.rewards.device))
        rollout.terminations.logical_or_(rollout.truncations)
        rollout.truncations.zero_()
        super().compute_advantages()

    def finish(self, run: Run) -> None:
        """Save the policy in a form that `vecenv evaluate` plays without torch."""
        arrays = [p.detach().cpu().numpy() for p in self.agent.actor.parameters()]
        layers = [(w.T, b) for w, b in zip(arrays[::2], arrays[1::2], strict=True)]
        scenario = cage.cage2_scenario(self.options.rules)
        cage.save_defender(self.options.save / "policy.npz", layers, scenario)

    @staticmethod
    def check_options(options: Options) -> None:
        """Raise OptionsError for options that a defender does not support."""
        if options.normalize or options.recurrent != "no":
            raise OptionsError("a defender has tanh layers: leave --normalize and --recurrent out")

    @classmethod
    def make_envs(cls, options: Any, num_envs: int, *, on_device: bool = False) -> VecEnv:
        """Make envs with the attacker and observations of the options."""
        given = {"observation": "memory", "red_agent": options.red_agent, "rules": options.rules}
        options = replace(options, env_kwargs={**given, **options.env_kwargs})
        return super().make_envs(options, num_envs, on_device=on_device)

    @classmethod
    def main(cls, options: Options) -> cage.Evaluation:
        """Train, save, and play the nine cells of the challenge."""
        cls.run(options)
        policy, count = str(options.save / "policy.npz"), options.eval_episodes
        with evaluating(f"{count} episodes a cell"):
            result = cage.evaluate(policy, episodes=count, rules=options.rules)
        Console().print(result)
        result.to_json(options.save / "evaluation.json")
        print(f"policy, curve and table: {options.save}; vecenv watch --policy {policy} shows it")
        return result


load_policy, main = Cage2Defender.load_policy, Cage2Defender.main
