"""The kernels that processes call, compiled and kept on disk by what they depend on."""

from __future__ import annotations

from vecenv.fingerprint import cached_njit
from vecenv.workers import link_kernels as kernels

__all__ = [
    "complete",
    "give_jobs",
    "pop",
    "post",
    "post_and_wait",
    "publish",
    "publish_and_take",
    "push",
    "push_lanes",
    "read_ready",
    "take",
    "wait_command",
    "wait_count",
    "wait_done",
]

complete = cached_njit(kernels.complete)
pop = cached_njit(kernels.pop)
post = cached_njit(kernels.post)
publish = cached_njit(kernels.publish)
push = cached_njit(kernels.push)
push_lanes = cached_njit(kernels.push_lanes)
read_ready = cached_njit(kernels.read_ready)
# Those that may sleep, or wake many, let other threads of their process run.
give_jobs = cached_njit(kernels.give_jobs, nogil=True)
post_and_wait = cached_njit(kernels.post_and_wait, nogil=True)
publish_and_take = cached_njit(kernels.publish_and_take, nogil=True)
take = cached_njit(kernels.take, nogil=True)
wait_command = cached_njit(kernels.wait_command, nogil=True)
wait_count = cached_njit(kernels.wait_count, nogil=True)
wait_done = cached_njit(kernels.wait_done, nogil=True)
