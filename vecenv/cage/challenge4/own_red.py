"""A red agent of a user's own: what it may return."""

from __future__ import annotations

from typing import Any

from vecenv.cage.challenge4.rules.codes import DISCOVER, NONE, NUM_HOSTS, NUM_SUBNETS, WITHDRAW
from vecenv.cage.own_red import choice_problem, outside

__all__ = ["red_problem"]


def red_problem(policy: str, choice: Any, state: Any, agent: Any, rng: Any) -> str | None:
    """Return what is wrong with the choice of a policy, or None; see `Cage4Options`.

    What exists and the agent does not know is no mistake.

    Args:
        policy: Its name.
        choice: What it returned.
        state, agent, rng: Its arguments.
    """
    expected = "three integers: what to do, the host or subnet, and a session on offer"
    return choice_problem(policy, choice, 3, expected, _unknown)


def _unknown(kind: int, target: int, session: int) -> str | None:
    if kind == NONE:
        return None
    if not 0 <= kind < WITHDRAW:
        codes = f"a code from 0 to {WITHDRAW - 1}, or {NONE} to wait"
        return f"no action {kind}, expected {codes}"
    if kind == DISCOVER:
        return outside("subnet", target, NUM_SUBNETS)
    return outside("host", target, NUM_HOSTS)
