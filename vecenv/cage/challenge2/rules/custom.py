"""A step with a red policy of somebody else's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from vecenv.cage.challenge2.rules.blue import blue_turn
from vecenv.cage.challenge2.rules.codes import CUSTOM
from vecenv.cage.challenge2.rules.free import finish_free
from vecenv.cage.challenge2.rules.red import red_policy

__all__ = ["make_step"]


def make_step(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Make the step kernel of envs whose red agent may be CUSTOM.

    Args:
        policy: Compiled function `(state, rng, tables) -> (kind of red action, target)` of two
            integers; what makes no sense fails. It may draw from `rng` with `next_word` and the
            like, or by slots from CUSTOM_SLOT on. Envs with another agent are not affected.
    """

    @njit
    def step_with_policy(state, action, rng, tables):
        blue_hosts = blue_turn(state, action, tables)
        if state.red_agent == CUSTOM:
            custom_type, custom_target = policy(state, rng, tables)
            red_type, target = np.uint64(custom_type), np.uint64(custom_target)
        else:
            red_type, target = red_policy(state, rng, tables)
        return finish_free(state, blue_hosts, red_type, target, rng, tables)

    return step_with_policy
