"""A red agent of a user's own: what it may return."""

from __future__ import annotations

from typing import Any

from vecenv.cage.challenge2.rules.codes import IMPACT, RED_ACTION_NAMES, RED_SLEEP, SWEEP
from vecenv.cage.own_red import choice_problem, outside

__all__ = ["red_problem"]

_KINDS = ", ".join(f"{number} {name}" for number, name in enumerate(RED_ACTION_NAMES))


def red_problem(policy: str, choice: Any, state: Any, rng: Any, tables: Any) -> str | None:
    """Return what is wrong with the choice of a policy, or None; see `step_with`.

    Args:
        policy: Its name.
        choice: What it returned.
        state, rng, tables: Its arguments.
    """

    def unknown(kind: int, target: int) -> str | None:
        if not RED_SLEEP <= kind <= IMPACT:
            return f"no kind of action {kind}, expected one of {_KINDS}"
        if kind == RED_SLEEP:
            return None
        if kind == SWEEP:
            return outside("subnet", target, tables.num_subnets)
        return outside("host", target, tables.num_hosts)

    expected = "two integers, a kind of red action and its target"
    return choice_problem(policy, choice, 2, expected, unknown)
