"""Advice: the largest share of the time, how to shorten it, and the page that tells more."""

from __future__ import annotations

from dataclasses import dataclass

from vecenv.backends import BACKENDS
from vecenv.machine import usable_cores
from vecenv.timing.recording import Recording, Share

__all__ = ["Advice", "advise", "duration"]

_COMPUTES = 0.3  # steps with at least this share of processor time count as computing
_BUSY = 0.3  # of the processors: if others use that much, a waiting step may wait for one
_CHEAP_NS = 20_000  # a step below this costs less than its hand-over to another process
_TEXTS = {
    "kernel": "the compiled kernel; more threads or a simpler step shorten it "
    "(docs/compiled_envs.md)",
    "around": "calls around the kernel; more envs at once share them (docs/compiled_envs.md)",
    "actors": "the actors; more of them (num_workers) shorten it (docs/ray.md)",
    "batching": "the envs cost less than batching their results; write into your own memory with "
    f"out=, or write the env as {BACKENDS['jit'].use} (docs/data_path.md)",
    Share.COPYING: "observations and infos on their way to the caller; copy=False, smaller "
    "observations and fewer infos shorten it (docs/data_path.md)",
    Share.RESET: "resets; make them cheaper, or episodes longer (docs/autoreset.md)",
    Share.HAND_OVER: "commands to workers, and waking them up; larger batches, or a caller that "
    "goes on meanwhile (step_async, send and recv), hide them (docs/asynchronous.md)",
    Share.UNSPLIT: "the envs and the way to them; which is unknown here (docs/timing.md)",
    "other": "code outside the vector env; name its parts with envs.timing.phase(...) "
    "(docs/timing.md)",
}


@dataclass(frozen=True)
class Advice:
    """A change that may help.

    Attributes:
        text: The change and the reason.
        backend: Backend to use instead, as `vecenv compare` names it; None if the advice is
            something else.
    """

    text: str
    backend: str | None = None


def advise(largest: str, found: Recording, num_steps: int, step_ns: float | None) -> Advice:
    """Return advice on the largest share, or the reason why there is none.

    Args:
        largest: Name of the share.
        found: The recording.
        num_steps: Env steps in it.
        step_ns: Mean duration of a step; None if not known.
    """
    num_envs, first_ready, is_kernel = found.chunks[-1], found.num_receives > 0, not found.rings
    if num_steps == 0:
        return Advice("no env has been stepped, so nothing can be advised (docs/timing.md)")
    if largest == Share.COMPUTE and not is_kernel:
        return _about_compute(found, num_envs, first_ready)
    if largest == Share.STRAGGLERS:
        row = BACKENDS["async-first-ready"]
        text = f"waiting for the slowest of {num_envs} envs; use {row.use} with batches of"
        return Advice(f"{text} {max(1, num_envs // 4)} (docs/asynchronous.md)", row.name)
    if largest == Share.HAND_OVER and step_ns and step_ns < _CHEAP_NS and not first_ready:
        text = f"commands to workers, and waking them up, for steps of {duration(step_ns)}"
        if 2 * found.spent_ns.sum() < sum(found.shares_ns.values()):  # its loop takes time, too
            return Advice(f"{text}; {BACKENDS['sync'].use} needs none (docs/stepping.md)", "sync")
        or_this = "" if found.processes[0] is None else ", or caller_steps=True,"
        return Advice(f"{text}; more envs per worker{or_this} shorten it (docs/asynchronous.md)")
    if largest == Share.COMPUTE:
        largest = "kernel" if found.is_local else "actors"
    elif largest == Share.COPYING and found.is_local:
        largest = "around" if is_kernel else "batching"
    return Advice(_TEXTS.get(largest, "the envs are not the bottleneck (docs/timing.md)"))


def _about_compute(found: Recording, num_envs: int, first_ready: bool) -> Advice:
    """Return advice on envs that each worker steps one after the other."""
    if found.cpu_share is None:
        return Advice("the envs; whether they compute or wait is unknown (docs/stepping.md)")
    does_wait, cores, backend = found.cpu_share < _COMPUTES, usable_cores(), None
    what, num_workers = "the envs wait" if does_wait else "the envs compute", len(found.processes)
    most = num_envs if does_wait else min(cores, num_envs)  # workers that can be of use
    load = found.others_load() or 0.0
    if load > _BUSY * cores and (does_wait or (found.is_local and most > 1)):
        how = f"{'or' if does_wait else 'workers would'} find no processor free: other programs "
        how += f"keep {load:.1f} of {cores} busy; measure again without them"
    elif found.is_local and most > 1 and not first_ready:
        how = "lets them wait side by side" if does_wait else "steps them on more processors"
        how, backend = f"one after the other; {BACKENDS['async'].use} {how}", "async"
    elif found.is_local:
        how = f"make their step cheaper, or write it as {BACKENDS['jit'].use}"
    elif most > num_workers:
        how = f"num_workers={most} " + (
            "lets all wait side by side, unless for one another"
            if does_wait
            else "uses all processors"
        )
    elif does_wait:
        how = "side by side already; " if num_envs > 1 else ""
        how += "more envs at once cost little more"
    else:
        how = f"a cheaper step, or more processors than {cores}, are left"
    return Advice(f"{what}; {how} (docs/stepping.md)", backend)


def duration(time_ns: float) -> str:
    """Return a time as text, with three digits and a suitable unit.

    Example:
        >>> duration(850), duration(42_345), duration(1_234_567), duration(2.5e9)
        ('850 ns', '42.3 us', '1.23 ms', '2.5 s')
    """
    for limit_ns, unit in ((1e3, "ns"), (1e6, "us"), (1e9, "ms")):
        if time_ns < limit_ns:
            return f"{time_ns * 1e3 / limit_ns:.3g} {unit}"
    return f"{time_ns / 1e9:.3g} s"
