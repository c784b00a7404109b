"""Ranks: the processes of one training, started by `torchrun`; each has a share of the envs."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["RankError", "Ranks"]


class RankError(RuntimeError):
    """Another rank has ended, did not answer in time, or could not be found."""


class Ranks(AbstractContextManager):
    """The processes of one training, one per device: each steps a share of the envs.

    `Ranks()` is a single process; `Ranks.join` finds the others. All ranks must call the same
    methods in the same order. Every wait has a deadline: if a rank ends, the others get a
    `RankError` (with NCCL, torch ends them). Objects travel as pickles: trust all ranks.

    Attributes:
        rank: Number of this process, from 0; only rank 0 logs and evaluates.
        size: Number of ranks.
        device: Device of this rank.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.rank, self.size, self.device = 0, 1, torch.device(device)
        self._timeout_s = 0.0

    @classmethod
    def join(cls, device: torch.device | str = "cpu", *, timeout: float = 600.0) -> Ranks:
        """Join the other processes that `torchrun` started; without `torchrun`, be the only rank.

        Args:
            device: "cpu", connected by gloo; or "cuda" by NCCL, a device for each local rank.
            timeout: Longest wait for another rank in seconds, now and later. It must be longer than
                compiling, and than a rollout of the slowest envs.

        Raises:
            RankError: The others were not found, or there are more ranks than devices.
        """
        ranks, backend, names = cls(device), "gloo", os.environ
        if int(names.get("WORLD_SIZE", "1")) < 2 or "RANK" not in names:
            return ranks
        ranks.rank, ranks.size = int(names["RANK"]), int(names["WORLD_SIZE"])
        ranks._timeout_s, given = timeout, {"timeout": timedelta(seconds=timeout)}
        if ranks.device.type == "cuda":
            ranks.device = torch.device("cuda", int(names.get("LOCAL_RANK", "0")))
            backend = "cpu:gloo,cuda:nccl"
            ranks._call("taking a device of its own", torch.cuda.set_device, ranks.device)
        ranks._call("finding each other", dist.init_process_group, backend, **given)
        return ranks

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum over all ranks, in place; all ranks get the same bits."""
        self._call("a sum", dist.all_reduce, tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, ordered by rank."""
        found = [value] * self.size
        self._call("gathering", dist.all_gather_object, found, value)
        return found

    @torch.no_grad()
    def normalize_(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Normalise x float32 (...) over all ranks, in place; rows of weight 0 do not count."""
        mean, variance = self._moments(x, torch.ones_like(x) if weights is None else weights)
        return x.sub_(mean.to(x.dtype)).div_(variance.sqrt().to(x.dtype) + 1e-8)

    @torch.no_grad()
    def variance(self, x: Tensor) -> Tensor:
        """Return the variance float64 () of x over all ranks, like `x.var()` of one array."""
        return self._moments(x, torch.ones_like(x))[1]

    def _moments(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        x, weights = x.double(), weights.double()
        count, total = self.sum_(torch.stack([weights.sum(), (weights * x).sum()]))
        squares = self.sum_((weights * (x - total / count).square()).sum())
        return total / count, squares / (count - 1).clamp(min=1)

    def __exit__(self, *_: object) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _call(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            if self.size > 1:
                function(*args, **kwargs)
        except (RuntimeError, ValueError) as error:  # ValueError: variables are missing
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            told = f"rank {self.rank} of {self.size}: {what} failed; another one has ended, or has"
            told += f" not answered for {self._timeout_s:g} s: see its output ({reason:.200})"
            raise RankError(told) from error
