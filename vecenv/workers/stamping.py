"""Timing of a pool: workers stamp the steps of their envs into shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vecenv.core.base import VecEnv
from vecenv.timing.recording import WorkerProcess
from vecenv.timing.stamps import EnvStamps

if TYPE_CHECKING:
    from vecenv.workers.arena import Arena
    from vecenv.workers.exchange import Exchange

__all__ = ["StampedPool"]


class StampedPool(VecEnv):
    """What `Timing` asks of a vector env whose envs are stepped by a pool."""

    _arena: Arena
    _exchange: Exchange
    _shared_stamps: EnvStamps | None = None

    def _begin_stamps(self) -> EnvStamps | None:
        self._calls.require_idle("timing.enable")
        if self._shared_stamps is None:
            self._shared_stamps = EnvStamps.make(self.num_envs, self._arena.allocate)
        stamps, leaf = self._shared_stamps, self._arena.leaf
        self._exchange.stamp((leaf(stamps.rings), leaf(stamps.counts)))
        return stamps

    def _end_stamps(self) -> None:
        if not self.closed:
            self._calls.require_idle("timing.disable")
            self._exchange.stamp(None)

    def _env_lanes(self) -> np.ndarray:
        exchange = self._exchange
        lanes = exchange.link.layout.env_lanes(exchange.pool.bounds)  # -1 for the caller's
        return lanes if exchange.own is None else lanes + 1

    def _env_chunks(self) -> list[int]:
        bounds = list(self._exchange.pool.bounds)
        return bounds if self._exchange.own is None else [0, *bounds]

    def _worker_processes(self) -> list[WorkerProcess | None]:
        pool = self._exchange.pool
        workers: list[WorkerProcess | None] = [
            WorkerProcess(process.pid, start_s)
            for process, start_s in zip(pool.processes, pool.start_s, strict=True)
        ]
        return workers if self._exchange.own is None else [None, *workers]
