"""The parts of a learner: gradients, an optimizer, a run folder. Each part can be used alone.

`import vecenv` does not import this package, because this package imports torch.
"""

try:
    import torch as _torch  # noqa: F401  # to say what to install
except ModuleNotFoundError as _error:
    if _error.name != "torch":  # torch is installed but lacks a module
        raise
    _needed = 'vecenv.learn needs torch, which is not installed: pip install "vecenv[torch]"'
    raise ModuleNotFoundError(_needed, name="torch") from None

from vecenv.learn.evaluation import EvaluationResult, evaluate, evaluating
from vecenv.learn.gradient import Gradient, gradient_options, quick_products
from vecenv.learn.graphs import Graph
from vecenv.learn.moments import Moments
from vecenv.learn.optimizer import Adam
from vecenv.learn.ranks import RankError, Ranks
from vecenv.learn.run import CheckpointError, Run, RunError, load_checkpoint, load_options

__all__ = [
    "Adam",
    "CheckpointError",
    "EvaluationResult",
    "Gradient",
    "Graph",
    "Moments",
    "RankError",
    "Ranks",
    "Run",
    "RunError",
    "evaluate",
    "evaluating",
    "gradient_options",
    "load_checkpoint",
    "load_options",
    "quick_products",
]
