"""What a learner is made of: gradients, the optimizer's step. Each part can be used alone.

`import vecenv` does not import this package, which imports torch.
"""

from vecenv.learn.gradient import Gradient
from vecenv.learn.optimizer import Adam

__all__ = ["Adam", "Gradient"]
