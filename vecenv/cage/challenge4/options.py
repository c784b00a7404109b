"""Options of a game, the record that kernels read, and checks of a custom red agent."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vecenv.cage.challenge4.rules import codes
from vecenv.cage.own_red import choice_problem, compiled_red, outside
from vecenv.core.arguments import import_object
from vecenv.jit import pack_record

__all__ = ["Cage4Options", "compile_rules", "red_problem"]

_MIN_STEPS, _MAX_STEPS = 2, 65535


@dataclass(frozen=True)
class Cage4Options:
    """Options of a game; the defaults are the challenge's numbers.

    Attributes:
        steps: The constructor argument S of the original. An episode has S - 1 steps.
        red: "fsm" the default red agent, "discovery" its variant, "sleep" one that does nothing; or
            a custom compiled function `(state, agent, rng)`, or its "module:function". It is called
            for an agent that has sessions and is not busy. It returns three integers: an action (a
            code of `rules.codes`), a host (for DISCOVER a subnet), and the id of an available
            session. The agent waits if the action is 255, or if it does not know what was chosen. A
            trial in Python rejects functions that choose what does not exist, but may not reach all
            of their choices; `evaluate_cage4` counts such choices.
        phishing_rate: Probability that a green user's work opens a phishing mail.
        alarm_rate: Probability that a green user's work or access raises a false alarm.
        greens_one_by_one: Whether each green user is drawn separately, as in the original. This is
            slower; the distribution is the same.
        log: Whether games keep what raw observations show; with observation "events" they always
            do. Without it they are 5 % faster.
    """

    steps: int = 500
    red: str | Callable[..., Any] = "fsm"
    phishing_rate: float = codes.PHISHING_RATE
    alarm_rate: float = codes.ALARM_RATE
    greens_one_by_one: bool = False
    log: bool = False

    def __post_init__(self) -> None:
        is_count = isinstance(self.steps, int | np.integer) and not isinstance(self.steps, bool)
        if not is_count or not _MIN_STEPS <= self.steps <= _MAX_STEPS:
            raise ValueError(f"steps must be {_MIN_STEPS}..{_MAX_STEPS}, got {self.steps!r}")
        if isinstance(self.red, str) and ":" in self.red:
            object.__setattr__(self, "red", import_object("red", self.red))
        if not callable(self.red) and self.red not in codes.RED_VARIANTS:
            raise ValueError(
                f"red must be one of {', '.join(codes.RED_VARIANTS)}, a compiled function or its "
                f"'module:function', got {self.red!r}"
            )
        for name in ("phishing_rate", "alarm_rate"):
            rate = getattr(self, name)
            is_number = isinstance(rate, int | float | np.integer | np.floating)
            if not is_number or not 0 <= rate <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {rate!r}")

    @property
    def own_red(self) -> Callable[..., Any] | None:
        """The custom red agent, compiled; None for the challenge's own red agents."""
        parameters = ("state", "agent", "rng")
        return compiled_red("red", self.red, parameters) if callable(self.red) else None


def compile_rules(options: Cage4Options) -> np.record:
    """Return the record that kernels read."""
    steps, alarm, phishing = options.steps, options.alarm_rate, options.phishing_rate
    length, rest = divmod(steps, 3)
    second_phase = length + (rest >= 1)
    # For a user whose work and access always succeed: probabilities of visible events (SPEC 6).
    # A third each: access, work, sleep; `anything` is at most 2/3.
    access = alarm / 3
    alarm_only, both = alarm * (1 - phishing) / 3, alarm * phishing / 3
    phishing_only = (1 - alarm) * phishing / 3
    anything = access + alarm_only + both + phishing_only
    shares = (access, access + alarm_only, access + alarm_only + both)
    share_access, share_phish, share_alarm = (
        [part / anything for part in shares] if anything else [0.0, 0.0, 0.0]
    )
    return pack_record(
        steps=np.int64(steps),
        second_phase=np.int64(second_phase),
        third_phase=np.int64(second_phase + length + (rest == 2)),
        red_variant=np.int64(0 if callable(options.red) else codes.RED_VARIANTS.index(options.red)),
        greens_one_by_one=np.int64(options.greens_one_by_one),
        keeps_log=np.int64(options.log),
        phishing_rate=float(phishing),
        alarm_rate=float(alarm),
        quiet_scale=1 / math.log1p(-anything) if anything else 0.0,
        share_access=share_access,
        share_alarm=share_alarm,
        share_phish=share_phish,
        access_failure=(1 - alarm) / 3 / (1 - anything),
        work_failure=(1 - alarm) * (1 - phishing) / 3 / (1 - anything),
    )


def red_problem(policy: str, choice: Any, state: Any, agent: Any, rng: Any) -> str | None:
    """Return what is wrong with a policy's choice, or None if it is valid; see `Cage4Options`.

    Choosing something that exists but is unknown to the agent is valid.

    Args:
        policy: Name of the policy.
        choice: Value that the policy returned.
        state, agent, rng: Arguments of the policy.
    """
    expected = "three integers: what to do, the host or subnet, and a session on offer"
    return choice_problem(policy, choice, 3, expected, _unknown)


def _unknown(kind: int, target: int, session: int) -> str | None:
    if kind == codes.NONE:
        return None
    if not 0 <= kind < codes.WITHDRAW:
        known = f"a code from 0 to {codes.WITHDRAW - 1}, or {codes.NONE} to wait"
        return f"no action {kind}, expected {known}"
    if kind == codes.DISCOVER:
        return outside("subnet", target, codes.NUM_SUBNETS)
    return outside("host", target, codes.NUM_HOSTS)
