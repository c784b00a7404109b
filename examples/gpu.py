"""PPO with envs, rollout and networks on one GPU: a defender for CAGE Challenge 2.

    python examples/gpu.py
    python examples/gpu.py --device cpu --num-envs 256 --total-steps 500000   # the same, anywhere

The compiled simulator runs on the device, a thread for each of 16 384 networks; observations never
leave it, and rollout and update are replayed as CUDA graphs. It needs "vecenv[train,cuda]".
What is changed of `vecenv.train.ppo` here is the loss: that is compiled and captured as it is.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from vecenv.train import ppo


@dataclass
class Options(ppo.Options):
    env_id: str = "vecenv:Cage2-v0"
    env_kwargs: dict[str, Any] = field(
        default_factory=lambda: {"red_agent": "mixed", "observation": "memory"}
    )
    device: str = "cuda"
    num_envs: int = 16_384
    num_steps: int = 101  # an episode of every env, and the step that only resets
    total_steps: int = 50_000_000
    gamma: float = 0.995
    entropy_weight: float = 0.01
    smoothness: float = 0.001  # weight of the squared logits in the loss
    save: Path = Path("runs/gpu")


def smooth_loss(agent: Any, batch: Any, options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's loss and a cost of large logits, and scalars, which are logged."""
    loss, scalars = ppo.ppo_loss(agent, batch, options)
    logits = agent.policy(agent.features(batch.obs)).logits
    cost = (logits.clamp(min=-20).square().mean((-2, -1)) * batch.weights).sum()
    cost = cost / batch.weights.sum()
    return loss + options.smoothness * cost, {**scalars, "logits": cost.detach()}


class Trainer(ppo.PPO):
    Options = Options
    loss = staticmethod(smooth_loss)


main, load_policy = Trainer.main, Trainer.load_policy

if __name__ == "__main__":
    chosen = tyro.cli(Options, description=__doc__)
    if chosen.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here; --device cpu does the same on the processor")
    main(chosen)
