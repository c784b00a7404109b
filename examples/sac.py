"""SAC with critics of one's own: about -150 points in Pendulum-v1 after 20 000 steps.

    python examples/sac.py
    vecenv train Pendulum-v1 --algo examples/sac.py     # the same, also with --resume

`vecenv.train.sac` steps the envs, fills the replay buffer, learns, saves, resumes and evaluates.
What is changed here: critics whose layers are normalised, and a small cost of large actions.
`python examples/sac.py --help` lists all options.
"""

import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import tyro
from torch import Tensor, nn

from vecenv import VecEnv
from vecenv.train import sac


@dataclass
class Options(sac.Options):
    action_cost: float = 1e-3  # of the mean square of actions, in the loss


class Critic(nn.Module):
    """Two networks that tell the value of an action at an observation, with normalised layers."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.networks = nn.ModuleList(self.network(*widths) for _ in range(2))

    @staticmethod
    def network(*widths: int) -> nn.Sequential:
        layers = [(nn.Linear(a, b), nn.LayerNorm(b), nn.ReLU()) for a, b in pairwise(widths)]
        return nn.Sequential(*(part for row in layers for part in row), nn.Linear(widths[-1], 1))

    def forward(self, obs: Tensor, actions: Tensor, *, frozen: bool = False) -> Tensor:
        """Return values (2, B); frozen: gradients pass to the actions, not to the weights."""
        x = torch.cat([obs.flatten(1), actions], 1)
        if not frozen:
            return torch.stack([network(x).squeeze(1) for network in self.networks])
        weights = {name: weight.detach() for name, weight in self.named_parameters()}
        return torch.func.functional_call(self, weights, (obs, actions))


class Agent(sac.Agent):
    """The actor of SAC, and these critics."""

    def __init__(self, envs: VecEnv, options: Any) -> None:
        super().__init__(envs, options)
        space: Any = envs.single_observation_space
        self.critics: Any = Critic(space.shape[0] + self.num_actions, *options.hidden)
        self.targets: Any = copy.deepcopy(self.critics).requires_grad_(False)


def calm_loss(agent: Any, batch: Any, options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of SAC and a cost of large actions, and scalars, which are logged."""
    loss, scalars = sac.sac_loss(agent, batch, options)
    actions, _ = agent.draw(batch.obs, batch.noise)
    cost = actions.square().mean()
    return loss + options.action_cost * cost, {**scalars, "action_cost": cost.detach()}


class Trainer(sac.SAC):
    Options = Options
    make_agent = Agent
    loss = staticmethod(calm_loss)


main, load_policy = Trainer.main, Trainer.load_policy

if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
