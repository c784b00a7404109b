"""Advice: what the largest share of the time is, what shortens it, and the page that tells more."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from vecenv.backends import BACKENDS
from vecenv.timing.attribution import (
    COPYING,
    ENV_COMPUTE,
    ENV_RESET,
    HAND_OVER,
    KERNEL,
    OTHER,
    STRAGGLERS,
    UNSPLIT,
)

__all__ = ["Advice", "Facts", "advise", "duration"]

_HERE, _WORKERS, _FIRST_READY, _COMPILED = (
    BACKENDS[name] for name in ("sync", "async", "async-first-ready", "jit")
)
_COMPUTES = 0.5  # steps with at least this share of processor time count as computing
_CHEAP_NS = 20_000  # a step that costs less than handing it to another process


@dataclass(frozen=True)
class Advice:
    """A change that may help.

    Attributes:
        text: The change and the reason.
        backend: Backend to be used instead, as `vecenv compare` names it; None if the advice is
            another.
    """

    text: str
    backend: str | None = None


class Facts(NamedTuple):
    """What the advice depends on.

    Attributes:
        largest: Name of the largest share of the wall time.
        num_steps: Env steps.
        num_envs: Of the vector env.
        stamped, is_local, num_workers: See `Crew`.
        cores: Processors that this process may use.
        cpu_share: Processor time of env steps over their duration; None if not known.
        step_ns: Mean duration of an env step; None if not known.
        first_ready: Whether envs were received as they became ready.
    """

    largest: str
    num_steps: int
    num_envs: int
    stamped: str
    is_local: bool
    num_workers: int
    cores: int
    cpu_share: float | None
    step_ns: float | None
    first_ready: bool


def advise(facts: Facts) -> list[Advice]:
    """Return advice on the largest share, or the reason why there is none."""
    if facts.num_steps == 0:
        return [Advice("no env has been stepped, so nothing can be advised")]
    if facts.largest == ENV_COMPUTE:
        return [_about_compute(facts)]
    if facts.largest == HAND_OVER:
        return [_about_hand_over(facts)]
    if facts.largest == STRAGGLERS:
        batch = max(1, facts.num_envs // 4)
        text = f"waiting for the slowest of {facts.num_envs} envs; use {_FIRST_READY.use} with"
        return [Advice(f"{text} batches of {batch} (docs/asynchronous.md)", _FIRST_READY.name)]
    if facts.largest == COPYING:
        return [Advice(_about_copying(facts))]
    told = {
        ENV_RESET: "resets; make them cheaper, or episodes longer",
        OTHER: "code outside the vector env; name its parts with envs.timing.phase(...) to see "
        "which (docs/timing.md)",
        UNSPLIT: "the envs and the way to them; which of the two is unknown on this backend",
    }
    return [Advice(told.get(facts.largest, "the envs are not the bottleneck"))]


def _about_compute(facts: Facts) -> Advice:
    if facts.stamped == KERNEL and not facts.is_local:
        return Advice("the actors; more of them (num_workers) shorten it (docs/ray.md)")
    if facts.stamped == KERNEL:
        return Advice(
            "the compiled kernel; more threads or a simpler step shorten it (docs/compiled_envs.md)"
        )
    if facts.cpu_share is None:
        return Advice("the envs; whether they compute or wait is unknown")
    does_wait = facts.cpu_share < _COMPUTES
    told = "the envs wait" if does_wait else "the envs compute"
    if facts.is_local:
        if facts.num_envs > 1 and not facts.first_ready and (does_wait or facts.cores > 1):
            how = "lets them wait side by side" if does_wait else "steps them on more processors"
            text = f"{told}, one after the other; {_WORKERS.use} {how} (docs/stepping.md)"
            return Advice(text, _WORKERS.name)
        return Advice(f"{told}; make their step cheaper, or write it as {_COMPILED.use}")
    if does_wait and facts.num_workers < facts.num_envs:
        return Advice(
            f"{told}; num_workers={facts.num_envs} lets all wait side by side, unless for one "
            "another (docs/stepping.md)"
        )
    if does_wait:
        told += ", side by side already" if facts.num_envs > 1 else ""
        return Advice(f"{told}; more envs at once cost little more")
    processors = min(facts.cores, facts.num_envs)
    if processors > facts.num_workers:
        return Advice(f"{told}; num_workers={processors} uses all processors (docs/stepping.md)")
    return Advice(
        f"{told}, on {facts.num_workers} of {facts.cores} processors; a cheaper step, or more "
        "processors, are left"
    )


def _about_hand_over(facts: Facts) -> Advice:
    told = "commands to workers, and waking them up"
    if facts.step_ns is not None and facts.step_ns < _CHEAP_NS and not facts.first_ready:
        text = f"{told}, for steps of {duration(facts.step_ns)}; {_HERE.use} needs none"
        return Advice(f"{text} (docs/stepping.md)", _HERE.name)
    if facts.first_ready:
        return Advice(f"{told}; larger batches share them (docs/asynchronous.md)")
    return Advice(
        f"{told}; step_async, or send and recv, let the caller go on meanwhile, and more envs at "
        "once share them (docs/asynchronous.md)"
    )


def _about_copying(facts: Facts) -> str:
    if facts.stamped == KERNEL:
        return "the calls around the compiled kernel; more envs at once share them"
    if facts.is_local:
        return (
            "the envs cost less than batching their results; write into your own memory with out="
            f", or write the env as {_COMPILED.use} (docs/data_path.md)"
        )
    return (
        "observations and infos on their way to the caller; copy=False, smaller "
        "observations and fewer infos shorten it (docs/data_path.md)"
    )


def duration(time_ns: float) -> str:
    """Write a time with three digits, in the unit that suits it.

    Example:
        >>> duration(850), duration(42_345), duration(1_234_567), duration(2.5e9)
        ('850 ns', '42.3 us', '1.23 ms', '2.5 s')
    """
    if math.isnan(time_ns):
        return "unknown"
    for limit_ns, unit in ((1e3, "ns"), (1e6, "us"), (1e9, "ms")):
        if time_ns < limit_ns:
            return f"{time_ns * 1e3 / limit_ns:.3g} {unit}"
    return f"{time_ns / 1e9:.3g} s"
