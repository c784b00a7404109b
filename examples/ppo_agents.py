"""PPO for games with several agents, with a network and a loss of one's own.

    python examples/ppo_agents.py                                  # the compiled Spread-v0
    python examples/ppo_agents.py --env mpe2.simple_spread_v3 --critic central
    vecenv train agents:Spread-v0 --algo examples/ppo_agents.py    # also with --resume

`vecenv.train.ppo_agents` plays the games and lets each group of equal agents learn. What is changed
here: layers with normalised inputs in actor and critic, and a bonus for agents of a group that do
not all do the same. `python examples/ppo_agents.py --help` lists all options.
"""

from dataclasses import dataclass
from typing import Any

import tyro
from torch import Tensor, nn

from vecenv.agents import AgentGroup
from vecenv.train import ppo_agents


@dataclass
class Options(ppo_agents.Options):
    env: str = "Spread-v0"
    width: int = 64  # units of a layer
    entropy_goal: float = 0.5  # entropy below it costs
    goal_weight: float = 0.01  # of that cost in the loss


def network(num_inputs: int, width: int, num_outputs: int) -> nn.Sequential:
    """Return two normalised layers and a last one, which is small to begin with."""
    last = nn.Linear(width, num_outputs)
    nn.init.orthogonal_(last.weight, 0.01)
    layers = [nn.Linear(num_inputs, width), nn.LayerNorm(width), nn.SiLU()]
    return nn.Sequential(*layers, nn.Linear(width, width), nn.LayerNorm(width), nn.SiLU(), last)


class Agent(ppo_agents.Agent):
    """Actor and critic of a group."""

    def __init__(self, group: AgentGroup, state_size: int, options: Any) -> None:
        super().__init__(group, state_size, options)
        num_outputs = self.actor[-1].out_features
        num_inputs = self.actor[0].in_features
        self.actor = network(num_inputs, options.width, num_outputs)
        self.critic = network(num_inputs + state_size, options.width, 1)


def curious_loss(agent: Any, batch: Any, options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's loss and a cost of entropies below a goal, and scalars, which are logged."""
    loss, scalars = ppo_agents.ppo_loss(agent, batch, options)
    features = agent.features(batch.obs, batch.indices)
    entropy = agent.policy(features, batch.extras.get("action_mask")).entropy()
    missing = (options.entropy_goal - entropy).clamp(min=0)
    cost = (missing * batch.weights).sum() / batch.weights.sum()
    return loss + options.goal_weight * cost, {**scalars, "missing_entropy": cost.detach()}


class Trainer(ppo_agents.AgentsPPO):
    Options = Options
    make_agent = Agent
    loss = staticmethod(curious_loss)


main, load_policy = Trainer.main, Trainer.load_policy

if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
