"""PPO whose envs are stepped by the actors of Ray, on this machine or on a cluster.

    python examples/ray_cluster.py
    RAY_ADDRESS=10.0.0.1:6379 python examples/ray_cluster.py --num-workers 16 --num-envs 512

Each actor steps a share of the envs and, as the policy travels to it once per rollout, chooses its
actions there: a rollout costs one message to each actor and one back. If an actor is lost its envs
begin anew in another one (`--vector-kwargs on_error restart`). Needs "vecenv[train,ray]".
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from vecenv.train import ppo


@dataclass
class Options(ppo.Options):
    env_id: str = "CartPole-v1"
    backend: str | None = "ray"
    num_workers: int | None = 2  # actors
    num_envs: int = 64
    num_steps: int = 64
    total_steps: int = 200_000
    save: Path = Path("runs/ray")


class Trainer(ppo.PPO):
    """PPO as it is; `make_agent` and `loss` can be replaced, and travel to the actors."""

    Options = Options


main, load_policy = Trainer.main, Trainer.load_policy

if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
