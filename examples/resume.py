"""PPO of the library with a network and a loss of one's own: a run that can be stopped, and go on.

    python examples/resume.py                    # Ctrl-C: it saves, and says how to go on
    python examples/resume.py --resume           # from there, bit for bit
    vecenv play CartPole-v1 --algo examples/resume.py --policy runs/resume

500 points in CartPole-v1 after 100 000 steps. `vecenv.train.ppo` collects rollouts and learns from
them, saves, resumes and evaluates. What is changed here: layers with normalised inputs that actor
and critic share, and one more term in the loss. CartPole is symmetric, so in the mirror image the
other action should be as likely. `python examples/resume.py --help` lists all options.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn

from vecenv import VecEnv
from vecenv.train import ppo


@dataclass
class Options(ppo.Options):
    save: Path = Path("runs/resume")  # folder of the run: options, metrics, checkpoints, curve
    save_every: int = 20_000  # env steps between two checkpoints
    width: int = 64  # units of the shared layers
    mirror_weight: float = 0.01  # of the difference to the mirror image, in the loss


class Agent(ppo.Agent):
    """Two shared layers, then a layer each for the actor and the critic.

    What `encoders` makes of observations, the distributions of actions and the bounds of the env
    are those of `ppo.Agent`; any module with its methods will do.
    """

    def __init__(self, envs: VecEnv, options: Any) -> None:
        super().__init__(envs, options)
        width = options.width
        self.trunk = nn.Sequential(
            nn.Linear(self.encoders.num_features, width),
            nn.LayerNorm(width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.SiLU(),
        )
        self.actor = nn.Linear(width, sum(self.sizes))
        self.critic = nn.Linear(width, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)  # at first all actions are as likely


def mirrored_loss(agent: Any, batch: Any, options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of PPO and a term more, and scalars, which are logged.

    Each is a mean over the rows of the minibatch; `batch.weights` is 0 in rows that only fill it
    up. `vecenv.train.ppo.ppo_loss` is as short as this: copy it to change the rest.
    """
    loss, scalars = ppo.ppo_loss(agent, batch, options)
    logits = agent.policy(agent.features(batch.obs)).logits
    mirrored = agent.policy(agent.features(-batch.obs)).logits.flip(-1)
    difference = (logits.softmax(-1) - mirrored.softmax(-1)).square().sum((-2, -1))
    asymmetry = (difference * batch.weights).sum() / batch.weights.sum()
    return loss + options.mirror_weight * asymmetry, {**scalars, "asymmetry": asymmetry.detach()}


class Trainer(ppo.PPO):
    Options = Options
    make_agent = Agent
    loss = staticmethod(mirrored_loss)

    @torch.inference_mode()
    def collect(self) -> None:
        """Step all envs, and look at what came: here one may shape rewards, or count something."""
        super().collect()
        self.rollout.rewards.clamp_(-10, 10)


main, load_policy = Trainer.main, Trainer.load_policy

if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
