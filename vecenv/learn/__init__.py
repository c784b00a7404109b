"""vecenv.learn: parts of a learner, each usable alone; imports torch."""

from vecenv.learn.checkpoint import CheckpointError, load_checkpoint
from vecenv.learn.curve import draw_curve
from vecenv.learn.evaluation import EvaluationResult, evaluate
from vecenv.learn.moments import Moments
from vecenv.learn.options import load_options
from vecenv.learn.run import Run, RunError

__all__ = [
    "CheckpointError",
    "EvaluationResult",
    "Moments",
    "Run",
    "RunError",
    "draw_curve",
    "evaluate",
    "load_checkpoint",
    "load_options",
]
