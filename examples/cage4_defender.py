"""Five defenders for CAGE Challenge 4, with a critic and rewards of one's own.

    python examples/cage4_defender.py                                 # half an hour
    vecenv train Cage4-v0 --algo examples/cage4_defender.py --total-steps 500000

`vecenv.train.cage4_defender`, which `vecenv train Cage4-v0` runs, plays whole episodes and lets one
policy for all five agents learn from them. What is changed here: a wider critic, and the share of
what other agents' subnets cause falls from all to `--share` over the training, so that agents learn
to work together first. `python examples/cage4_defender.py --help` lists all options.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from torch import nn

from vecenv.train import cage4_defender


@dataclass
class Options(cage4_defender.Options):
    critic_width: int = 128  # units of a layer of the critic
    save: Path = Path("runs/cage4_own")


class Defender(cage4_defender.Defender):
    """The policy of all agents, whose layers `vecenv evaluate` knows, and a wider critic."""

    def __init__(self, num_truths: int, options: Any) -> None:
        super().__init__(num_truths, options)
        width = options.critic_width
        self.critic = nn.Sequential(
            nn.Linear(num_truths, width), nn.LayerNorm(width), nn.Tanh(),
            nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh(),
            nn.Linear(width, 1),
        )  # fmt: skip


class Trainer(cage4_defender.Cage4Defender):
    Options = Options
    make_agent = Defender

    def told_rewards(self, actions: np.ndarray) -> np.ndarray:
        """Return the rewards that agents are told, float32 (G, 5)."""
        own, share = super().told_rewards(actions), self.options.share
        left = max(0.0, 1 - self.num_updates / max(self.total_updates, 1))
        total = own.mean(1, keepdims=True)  # of all five agents
        return own + left * (1 - share) * (total - own)


main, load_policy = Trainer.main, Trainer.load_policy

if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
