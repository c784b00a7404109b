"""Where the time of a training loop goes: stamps, a report, a timeline.

Off by default. `envs.timing.enable()` stamps every env step where it happens, every call of the
vector env, and the phases that the user names; `envs.timing.report()` sums them up.
"""

from vecenv.timing.control import Timing

__all__ = ["Timing"]
