"""Advice from running totals: changes whose gain can be estimated from them."""

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
    CallTotals,
    EnvTotals,
)

__all__ = ["Advice", "Facts", "advise", "duration"]

_HERE, _WORKERS, _FIRST_READY, _COMPILED = (
    BACKENDS[name] for name in ("sync", "async", "async-first-ready", "jit")
)
_WORTH = 1.1  # smallest gain in steps/s for which a change is advised
_COMPUTES = 0.5  # steps with at least this share of processor time count as computing
_FEWEST_GAPS, _IN_TURN = 20, 0.08  # up to this share of short gaps, envs take turns
_HAND_OVER_NS = 30_000, 200_000  # usual range of the hand-over of a round to workers
_CHEAP_NS = 20_000  # a step that stamps and cold caches make noticeably longer
_BUSY = 0.2  # others' load in processors from which it is mentioned
_LATE_NS = 200_000  # a delay of the caller from which something is wrong


@dataclass(frozen=True)
class Advice:
    """A change that may help.

    Attributes:
        text: The change and the reason.
        low, high: Range of the expected gain, as a factor on steps per second; None where it
            can't be estimated: without `high` it is `low` or more.
        backend: Backend to be used instead, as `vecenv compare` names it; None if the advice is
            another.
    """

    text: str
    low: float | None = None
    high: float | None = None
    backend: str | None = None


class Facts(NamedTuple):
    """Measurements of a run; times in nanoseconds.

    Attributes:
        backend, num_envs: Of the vector env.
        stamped, is_local, num_workers, num_lanes: See `Crew`.
        cores: Processors that this process may use.
        others_load: Number of these kept busy by other processes; None if not known.
        wall_ns: Wall time of the run.
        spent_ns: Wall time by share.
        bound_ns: Time that the envs alone would have taken.
        first_ready: Whether envs were received as they became ready.
        copies: Whether observations are copied for the caller.
        calls, envs: Running totals.
        num_steps: Env steps.
        other_threads: Processors that other threads of the calling process keep busy.
    """

    backend: str
    stamped: str
    is_local: bool
    num_envs: int
    num_workers: int
    num_lanes: int
    cores: int
    others_load: float | None
    wall_ns: int
    spent_ns: dict[str, int]
    bound_ns: float
    first_ready: bool
    copies: bool
    calls: CallTotals
    envs: EnvTotals | None
    num_steps: int
    other_threads: float

    def gain(self, wall_ns: float) -> float:
        """Return the gain of another wall time, as a factor on steps per second."""
        return self.wall_ns / max(wall_ns, 1.0)

    @property
    def cpu_share(self) -> float | None:
        """Share of processor time in the envs' work."""
        if self.envs is None:
            return None
        of_ns = int(self.envs.cpu_of_ns.sum())
        return int(self.envs.cpu_ns.sum()) / of_ns if of_ns else None

    @property
    def free_cores(self) -> float:
        """Processors that other processes leave free, at least one."""
        return max(1.0, self.cores - (self.others_load or 0.0))

    @property
    def take_turns(self) -> bool:
        """Whether steps of different threads end one after the other, as if they shared a lock."""
        calls = self.calls
        return calls.gaps >= _FEWEST_GAPS and calls.short_gaps < _IN_TURN * calls.gaps

    @property
    def outside_ns(self) -> int:
        """The caller's own time, without waiting for envs."""
        return self.wall_ns - self.calls.waited_ns


def advise(facts: Facts) -> list[Advice]:
    """Return advice on the largest share, or the reason why there is none."""
    if facts.num_steps == 0:
        return [Advice("no env has been stepped, so nothing can be advised")]
    name = max(facts.spent_ns, key=lambda key: facts.spent_ns[key])
    about = {
        ENV_COMPUTE: _about_compute,
        ENV_RESET: _about_resets,
        STRAGGLERS: _about_stragglers,
        HAND_OVER: _about_hand_over,
        COPYING: _about_copying,
        OTHER: _about_other,
        UNSPLIT: _about_unsplit,
    }.get(name)
    return [_about_phase(facts, name) if about is None else about(facts)]


def _told(text: str, low: float, high: float | None, backend: str | None = None) -> Advice:
    """Return advice with its gain in words."""
    if high is None:
        return Advice(f"{text}: {low:.2g} x the steps/s or more", low, None, backend)
    low, high = min(low, high), max(low, high)
    if high < 1.15 * low:
        told = f"about {(low + high) / 2:.3g} x the steps/s"
    elif low <= 1.02:
        told = f"up to {high:.3g} x the steps/s"
    else:
        told = f"{low:.2g} to {high:.2g} x the steps/s"
    return Advice(f"{text}: {told}", low, high, backend)


def _without(facts: Facts, name: str, text: str) -> Advice:
    """Return advice with the gain if a share took no time."""
    gain = facts.gain(facts.wall_ns - facts.spent_ns[name])
    return _told(f"{text}; without it", gain, gain)


# -- inside the envs ------------------------------------------------------------------------------


def _about_compute(facts: Facts) -> Advice:
    if facts.stamped == KERNEL:
        return _without(
            facts, ENV_COMPUTE, "the compiled kernel; more threads or a simpler step shorten it"
        )
    cpu_share = facts.cpu_share
    if facts.envs is None or cpu_share is None:
        return _without(facts, ENV_COMPUTE, "the envs; whether they compute or wait is unknown")
    if facts.is_local:
        return _about_local_compute(facts, cpu_share)
    return _about_waiting(facts) if cpu_share < _COMPUTES else _about_computing(facts)


def _about_local_compute(facts: Facts, cpu_share: float) -> Advice:
    assert facts.envs is not None
    calls, envs = facts.calls, facts.envs
    env_ns = int(envs.step_ns.sum() + envs.reset_ns.sum())
    mean = duration(int(envs.step_ns.sum()) / max(int(envs.steps.sum()), 1))
    does_wait = cpu_share < _COMPUTES
    is_async_possible = facts.num_envs > 1 and not facts.first_ready and calls.num_rounds
    if is_async_possible and (does_wait or facts.cores > 1):
        rest_ns = facts.wall_ns - env_ns
        low, high = (
            facts.gain(
                rest_ns
                + max(
                    (cpu_share if does_wait else 1.0) * env_ns / min(cores, facts.num_envs),
                    calls.longest_ns if does_wait else 0,
                )
                + calls.num_rounds * per_round_ns
            )
            for cores, per_round_ns in zip(
                (facts.free_cores, facts.cores), reversed(_HAND_OVER_NS), strict=True
            )
        )
        if (high if facts.others_load else low) > _WORTH:
            if not does_wait:
                return _told(
                    f"{mean} per env step, one after the other; {_WORKERS.use} steps them on "
                    f"{min(facts.cores, facts.num_envs)} processors{_if_free(facts)}",
                    low,
                    high,
                    _WORKERS.name,
                )
            return _told(
                f"{mean} per env step, one after the other, and they wait rather than compute; "
                f"{_WORKERS.use} lets them wait side by side (unless for one another)",
                1.0,
                high,
                _WORKERS.name,
            )
    if does_wait:
        return _without(facts, ENV_COMPUTE, f"the envs wait, {mean} per step")
    return _without(
        facts,
        ENV_COMPUTE,
        f"the envs compute; make their step cheaper, or write it as {_COMPILED.use}",
    )


def _about_waiting(facts: Facts) -> Advice:
    """Advise on envs in workers that sleep, or wait for others."""
    assert facts.cpu_share is not None
    share = f"the envs wait for {1 - facts.cpu_share:.0%} of their time"
    if facts.take_turns:
        return _without(
            facts,
            ENV_COMPUTE,
            f"{share} and end one after the other, as if for one lock or server: more threads or "
            "processors would not help",
        )
    if facts.num_lanes < facts.num_envs and not facts.first_ready:
        low, high = _side_by_side(facts)
        threads = math.ceil(facts.num_envs / facts.num_workers)
        if facts.calls.gaps < _FEWEST_GAPS:  # too few to show whether they wait for one another
            low = 1.0
        if high > _WORTH:
            doubt = "" if low > 1 else " (unless they wait for one another)"
            return _told(
                f"{share}; threads_per_worker={threads} lets all wait side by side{doubt}",
                max(low, 1.0),
                high,
            )
    if facts.num_envs > 1:
        share += ", side by side already"
    return _without(facts, ENV_COMPUTE, f"{share}; more envs at once cost little more")


def _side_by_side(facts: Facts) -> tuple[float, float]:
    """Return the range of the gain if all envs wait side by side, as factors on steps/s.

    The threads of a worker take turns at computing, and workers share the processors. Computing may
    overlap with the waiting of others (high), or follow when all have waited (low).
    """
    calls, cpu_share = facts.calls, facts.cpu_share or 0.0
    rest_ns = facts.wall_ns - calls.work_ns
    cpu_ns = cpu_share * calls.work_ns * facts.num_lanes
    least_ns = max(calls.longest_ns, cpu_ns / min(facts.num_workers, facts.cores))
    most_ns = cpu_ns / min(facts.num_workers, facts.free_cores)
    most_ns += (1 - cpu_share) * calls.longest_ns
    high = facts.gain(max(rest_ns + least_ns, facts.outside_ns))
    low = facts.gain(max(rest_ns + most_ns, facts.outside_ns))
    return max(min(low, 0.8 * high), 1.0), high


def _about_computing(facts: Facts) -> Advice:
    calls, processors = facts.calls, min(facts.cores, facts.num_envs)
    rest_ns = facts.wall_ns - calls.work_ns
    spread_ns = max(calls.work_ns * facts.num_workers / processors, calls.longest_ns)
    gain = facts.gain(rest_ns + spread_ns)
    turns = facts.num_lanes > facts.num_workers
    if not facts.first_ready and processors > facts.num_workers and gain > _WORTH:
        why = "threads of one process take turns when they compute" if turns else "the envs compute"
        more = f"num_workers={processors}" + (", threads_per_worker=1" if turns else "")
        alone_ns = calls.work_ns * facts.num_workers / min(facts.free_cores, processors)
        least = facts.gain(rest_ns + min(alone_ns, calls.work_ns))
        return _told(f"{why}; {more}{_if_free(facts)}", min(least, 0.8 * gain), gain)
    why = "the envs compute"
    if turns:
        why += ", and threads of one process take turns"
    why += f", on {facts.num_workers} of {facts.cores} processors"
    return _without(facts, ENV_COMPUTE, f"{why}; a cheaper step, or more processors, are left")


def _if_free(facts: Facts) -> str:
    """Return a remark that other processes used processors, if they did."""
    if facts.others_load is None or facts.others_load < _BUSY:
        return ""
    return f" (of which others kept {facts.others_load:.1f} busy)"


def _about_resets(facts: Facts) -> Advice:
    if facts.envs is None or (count := int(facts.envs.resets.sum())) == 0:
        return _without(facts, ENV_RESET, "resets; make them cheaper, or episodes longer")
    mean = duration(int(facts.envs.reset_ns.sum()) / count)
    told = f"{count:,} resets of {mean}"
    if not facts.is_local and facts.num_lanes < facts.num_envs and not facts.first_ready:
        cpu_share, (_, high) = facts.envs.cpu_share(1), _side_by_side(facts)
        if cpu_share is not None and cpu_share < _COMPUTES and high > _WORTH:
            threads = math.ceil(facts.num_envs / facts.num_workers)
            return _told(
                f"{told} that wait; threads_per_worker={threads} lets them wait side by side "
                "(unless for one another)",
                1.0,
                high,
            )
    return _without(facts, ENV_RESET, f"{told}; make them cheaper, or episodes longer")


def _about_stragglers(facts: Facts) -> Advice:
    assert facts.envs is not None
    spent_ns = facts.spent_ns[STRAGGLERS]
    batch = max(1, facts.num_envs // 4)
    slowest = f"the slowest of {facts.num_envs} envs"
    if facts.calls.reset_straggler_ns > 0.5 * spent_ns:
        slowest = "the envs that are being reset"
    if facts.take_turns and (facts.cpu_share or 0.0) < _COMPUTES:
        return _without(
            facts,
            STRAGGLERS,
            f"waiting for {slowest}: they end one after the other, as if for one lock or server, "
            "which first-ready would not change",
        )
    even = facts.gain(facts.wall_ns - spent_ns)
    free = facts.envs.free_rate() * facts.wall_ns / 1e9 / max(facts.num_steps, 1)
    most = facts.gain(facts.outside_ns)
    low, high = sorted((min(even, most), min(max(free, 1.0), most)))
    return _told(
        f"waiting for {slowest}; use {_FIRST_READY.use} with batches of {batch}",
        max(0.8 * low, 1.0),
        high,
        _FIRST_READY.name,
    )


# -- around them ----------------------------------------------------------------------------------


def _about_hand_over(facts: Facts) -> Advice:
    calls, envs, spent_ns = facts.calls, facts.envs, facts.spent_ns[HAND_OVER]
    count = max(calls.num_rounds + calls.num_receives, 1)
    if calls.late_ns > 0.5 * spent_ns and calls.late_ns / count > _LATE_NS:
        late = f"the caller goes on {duration(calls.late_ns / count)} after the envs have finished"
        why = "no processor was free for it, or another thread of this process held Python's lock"
        if facts.other_threads > 0.1:
            why = (
                f"other threads of this process compute ({facts.other_threads:.1f} processors) and "
                "hold Python's lock; move them into a process"
            )
        gain = facts.gain(facts.wall_ns - calls.late_ns)
        return _told(f"{late}: {why}; without that", gain, gain)
    if envs is not None and not facts.first_ready and calls.num_rounds:
        env_ns = int(envs.step_ns.sum() + envs.reset_ns.sum() + envs.copy_ns.sum())
        gain = facts.gain(facts.outside_ns + env_ns)
        if gain > _WORTH:
            mean_ns = env_ns / max(facts.num_steps, 1)
            return _told(
                f"an env step takes {duration(mean_ns)} with the writing of its results, too "
                f"little to hand to another process; use {_HERE.use}",
                0.8 * gain,
                # A cheap step is quicker unstamped and after no sleep; it is not known how much.
                None if mean_ns < _CHEAP_NS else 1.25 * gain,
                _HERE.name,
            )
    per_call = f"{duration(spent_ns / count)} per call for commands and wake-ups"
    if facts.first_ready:
        gain = facts.gain(max(facts.wall_ns - spent_ns / 2, facts.bound_ns))
        return _told(f"{per_call}; batches of twice as many envs halve it", 1.0, gain)
    overlapped = _overlapped(facts)
    if overlapped > _WORTH:
        return _told(f"{per_call}; step_async or halves() let the caller go on", 1.0, overlapped)
    more_ns = calls.work_ns + facts.spent_ns[COPYING] + facts.wall_ns - facts.outside_ns - spent_ns
    gain = 2 * facts.wall_ns / (facts.wall_ns + max(min(more_ns, facts.wall_ns), 1))
    return _told(f"{per_call}; twice as many envs share it", max(0.8 * gain, 1.0), gain)


def _about_copying(facts: Facts) -> Advice:
    calls, spent_ns = facts.calls, facts.spent_ns[COPYING]
    if facts.stamped == KERNEL:
        count = max(calls.num_rounds, 1)
        gain = 2 * facts.wall_ns / (facts.wall_ns + facts.spent_ns[ENV_COMPUTE])
        return _told(
            f"{duration(spent_ns / count)} per call around the compiled kernel (checks, memory "
            "for results); twice as many envs share it",
            0.8 * gain,
            gain,
        )
    if facts.is_local:
        return _without(
            facts,
            COPYING,
            "the envs cost less than batching their results; write into your own memory with "
            f"out=, or write the env as {_COMPILED.use}",
        )
    rest_ns = max(spent_ns - calls.infos_ns - calls.workers_copying_ns, 0)
    most = max(calls.infos_ns, calls.workers_copying_ns, rest_ns)
    gain = facts.gain(max(facts.wall_ns - most, facts.bound_ns))
    if most == calls.infos_ns:
        return _told("infos, which are pickled or batched; without them", gain, gain)
    if most == calls.workers_copying_ns:
        return _told(
            "workers write observations and infos into shared memory; smaller ones (dtype, size) "
            "are what helps; without that",
            gain,
            gain,
        )
    if facts.copies:
        # Without copies the workers' rows also stay in the caches.
        highest = facts.gain(max(facts.wall_ns - spent_ns, facts.bound_ns))
        return _told(
            "observations are copied for the caller; copy=False, or out= with allocate()d memory",
            0.9 * gain,
            highest,
        )
    return _told("rewards and flags are copied for the caller; without that", gain, gain)


def _overlapped(facts: Facts) -> float:
    """Return the gain if the caller's own time and the envs' ran side by side."""
    return facts.gain(max(facts.outside_ns, facts.bound_ns))


def _about_other(facts: Facts) -> Advice:
    return _about_phase(
        facts,
        OTHER,
        "code outside the vector env; name its parts with envs.timing.phase(...) to see which; ",
    )


def _about_phase(facts: Facts, name: str, told: str = "") -> Advice:
    gain = facts.gain(max(facts.wall_ns - facts.spent_ns[name], facts.bound_ns))
    if gain < _WORTH and facts.bound_ns:
        return _told(
            f"{told}it runs beside the envs, which take as long by themselves; without it",
            gain,
            gain,
        )
    return _told(f"{told}the envs are not the bottleneck; without it", gain, gain)


def _about_unsplit(facts: Facts) -> Advice:
    return _without(
        facts, UNSPLIT, "the envs and the way to them; which of the two is unknown on this backend"
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
