"""Trainers as a library: PPO, also for several agents, SAC, DQN, R2D2, and defenders for CAGE.

Each module here has `Options`, a dataclass; a class that trains, such as `vecenv.train.ppo.PPO`;
`main(options)`, which trains, saves and evaluates; and `load_policy(options, num_envs)`.
`vecenv train` and `vecenv play` call these. A program can, too: `ppo.main(ppo.Options("Env-v0"))`
or `ppo.PPO.replacing(loss=my_loss).main(ppo.Options("Env-v0"))`.

```
    Options ---> envs.make_envs ---> vector env ---- collect ----> buffer
       |                                 ^ actions                   | batches
       +-------> make_agent ---------> agent <-- optimizer <-- loss -+
                                         |
                       evaluate <--------+--------> Run: checkpoints, curve, policy
```

`import vecenv` does not import this package, because this package imports torch.
"""

try:
    import torch as _torch  # noqa: F401  # to say what to install
except ModuleNotFoundError as _error:
    if _error.name != "torch":  # torch is installed but lacks a module
        raise
    _needed = 'vecenv.train needs torch, which is not installed: pip install "vecenv[train]"'
    raise ModuleNotFoundError(_needed, name="torch") from None

from vecenv.train.options import OptionsError
from vecenv.train.trainer import Trainer

__all__ = ["OptionsError", "Trainer"]
