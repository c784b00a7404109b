"""From the shares of a report to one line of advice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vecenv.timing.attribution import COPYING, ENV_COMPUTE, HAND_OVER, OTHER, STRAGGLERS

if TYPE_CHECKING:
    from vecenv.timing.report import TimingReport

__all__ = ["verdict"]

_SLOW_ENV_NS = 50_000  # a step that takes longer is worth handing to a worker
_BATCHES = 4  # first-ready batches per round that are proposed


def verdict(report: TimingReport) -> str:
    """Say which share is the largest and what would make it smaller."""
    name, share = max(report.shares.items(), key=lambda item: item[1])
    advice = {
        ENV_COMPUTE: _about_compute,
        STRAGGLERS: _about_stragglers,
        HAND_OVER: _about_hand_over,
        COPYING: _about_copying,
        OTHER: _about_other,
    }.get(name)
    what = f"{share:.0%} of the time goes to {name}"
    if advice is None:
        gain = report.gains[name] / max(report.steps_per_second, 1e-9)
        return f"{what}: the envs are not the bottleneck; without it, {gain:.1f} x the steps/s"
    return f"{what}: {advice(report)}"


def _about_compute(report: TimingReport) -> str:
    if report.envs is None:
        return "the compiled kernel; more threads or a simpler step make it shorter"
    is_slow = report.envs.mean > _SLOW_ENV_NS
    if report.backend == "SyncVectorEnv" and report.num_envs > 1 and is_slow:
        return (
            f"{report.envs.mean / 1e6:.2g} ms per env step, one after the other; "
            "backend='async' steps them in all processors"
        )
    if report.backend == "SyncVectorEnv":
        return "the envs themselves; make their step cheaper, or write it for the JIT kit"
    if report.first_ready and sum(worker.busy for worker in report.workers) > 1:
        return "the envs themselves; if they wait rather than compute, keep more of them in flight"
    return "the envs themselves, in every worker; more processors or a cheaper step are left"


def _about_stragglers(report: TimingReport) -> str:
    batch = max(1, report.num_envs // _BATCHES)
    return (
        f"waiting for the slowest of {report.num_envs} envs; use first-ready (send/recv) with "
        f"batches of {batch}, or more overlap (threads_per_worker)"
    )


def _about_hand_over(report: TimingReport) -> str:
    if report.envs is not None and report.envs.mean < _SLOW_ENV_NS:
        return (
            f"an env step takes {report.envs.mean / 1e3:.3g} us, too little to hand to another "
            "process; use backend='sync', or more envs per worker"
        )
    return "commands and wake-ups; use more envs per worker, or halves() to overlap the policy"


def _about_copying(report: TimingReport) -> str:
    if report.backend == "SyncVectorEnv":
        return (
            "the envs cost less than batching their results; write into your own memory with "
            "out=, or compile the env with the JIT kit"
        )
    return "results are copied for the caller; use copy=False, or out= with allocate()d memory"


def _about_other(report: TimingReport) -> str:
    return "code outside the vector env; name its parts with envs.timing.phase(...) to see which"
