"""A Q-learner with a memory, as R2D2: a T-maze, in which what was seen first decides.

    python examples/r2d2.py --env-kwargs length 10                   # 1.0 after 100 000 steps

`vecenv.train.r2d2` steps the envs and learns from sequences with burn-in, stored states and
priorities. The env is in `memory.py`, beside this file. What is changed here: steps late in an
episode, which the memory has to reach, count a little more in the loss. `--late-weight 0` is R2D2.
"""

from dataclasses import dataclass
from typing import Any

import torch
import tyro
from torch import Tensor

from vecenv.train import r2d2


@dataclass
class Options(r2d2.Options):
    env_id: str = "memory:TMaze-v0"
    late_weight: float = 0.5  # more weight of the last step of a sequence


def late_loss(agent: Any, batch: Any, options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of sequences, weighted as they were drawn, and scalars."""
    errors = r2d2.td_errors(agent, batch, options)
    place = torch.linspace(0, 1, errors.shape[1])
    weights = batch.learn_mask * (1 + options.late_weight * place)
    weights = weights * batch.weights[:, None]  # of prioritized draws
    loss = (weights * errors.square()).sum() / batch.learn_mask.sum() / 2
    return loss, {"error": errors.detach()[batch.learn_mask].abs().mean()}


class Trainer(r2d2.R2D2):
    Options = Options
    loss = staticmethod(late_loss)


main, load_policy = Trainer.main, Trainer.load_policy

if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
