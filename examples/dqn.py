"""DQN with a network and a loss of one's own: 500 points in CartPole-v1 after 100 000 steps.

    python examples/dqn.py
    python examples/dqn.py --env-id breakout:Breakout-v0    # pictures, beside this file
    vecenv train CartPole-v1 --algo examples/dqn.py         # also with --resume

`vecenv.train.dqn` steps the envs, fills the replay buffer, learns, saves, resumes and evaluates.
What is changed here: a network with normalised layers, and Huber's loss, which large errors pull
at less. `python examples/dqn.py --help` lists all options.
"""

import copy
from dataclasses import dataclass
from typing import Any

import tyro
from torch import Tensor, nn
from torch.nn import functional as F

from vecenv import VecEnv
from vecenv.train import dqn


@dataclass
class Options(dqn.Options):
    delta: float = 1.0  # errors beyond it count linearly


class Network(nn.Module):
    """Values of all actions, (B, A), behind convolutions if observations are pictures."""

    def __init__(self, encoders: nn.Module, num_features: int, num_actions: int, width: int):
        super().__init__()
        self.encoders = encoders
        self.layers = nn.Sequential(
            nn.Linear(num_features, width), nn.LayerNorm(width), nn.ReLU(),
            nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU(),
            nn.Linear(width, num_actions),
        )  # fmt: skip

    def forward(self, obs: Tensor) -> Tensor:
        return self.layers(self.encoders(obs)).float()


class Agent(dqn.Agent):
    """The network and its slow copy."""

    def __init__(self, envs: VecEnv, options: Any) -> None:
        super().__init__(envs, options)
        space: Any = envs.single_action_space
        encoders = self.network.encoders
        width = options.hidden[0]
        self.network: Any = Network(encoders, encoders.num_features, int(space.n), width)
        self.target: Any = copy.deepcopy(self.network).requires_grad_(False)


def huber_loss(agent: Any, batch: Any, options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss, a mean over the rows of the batch, and scalars, which are logged."""
    errors = agent.errors(batch)
    losses = F.huber_loss(errors, errors.new_zeros(()).expand_as(errors), "none", options.delta)
    return (batch.importance * losses).mean(), {"error": errors.detach().abs().mean()}


class Trainer(dqn.DQN):
    Options = Options
    make_agent = Agent
    loss = staticmethod(huber_loss)


main, load_policy, DEFAULTS = Trainer.main, Trainer.load_policy, dqn.DEFAULTS

if __name__ == "__main__":
    env_id = tyro.cli(Options, description=__doc__).env_id
    main(tyro.cli(Options, default=Options(env_id, **DEFAULTS.get(env_id, {}))))
