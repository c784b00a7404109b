"""A defender for CAGE Challenge 2 against an attacker and by weights of one's own.

    python examples/cage2_defender.py --total-steps 3000000 --num-envs 64
    vecenv train Cage2-v0 --algo examples/cage2_defender.py

`vecenv.train.cage2_defender`, which `vecenv train Cage2-v0` runs, is PPO with the rewards weighed
as the challenge's score does. What is changed here: all steps count the same, a step's losses cost
a little more, and the entropy bonus is larger for the first steps of an episode, when it matters
which decoys are laid. `python examples/cage2_defender.py --help` lists all options.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from vecenv.train import cage2_defender, ppo


@dataclass
class Options(cage2_defender.Options):
    cost: float = 1.1  # of a step's losses; 1 is the challenge's
    early_entropy: float = 0.02  # more weight of the entropy in the first ten steps
    save: Path = Path("runs/cage2_own")


def early_loss(agent: Any, batch: Any, options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's loss, with a bonus for the entropy early in episodes, and scalars."""
    loss, scalars = ppo.ppo_loss(agent, batch, options)
    is_early = batch.obs[:, cage2_defender.STEP_COLUMN] < 0.1
    mask = batch.extras.get("action_mask")
    entropy = agent.policy(agent.features(batch.obs), mask).entropy() * is_early
    bonus = (entropy * batch.weights).sum() / batch.weights.sum()
    return loss - options.early_entropy * bonus, {**scalars, "early_entropy": bonus.detach()}


class Trainer(cage2_defender.Cage2Defender):
    Options = Options
    loss = staticmethod(early_loss)

    @torch.inference_mode()
    def compute_advantages(self) -> None:
        """Weigh all steps alike, and the costly ones more."""
        self.rollout.rewards.mul_(self.options.cost)
        ppo.PPO.compute_advantages(self)


main, load_policy = Trainer.main, Trainer.load_policy

if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
