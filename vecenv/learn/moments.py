"""Moments: the running mean and variance of observations or returns, as a torch module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vecenv.core.moments import joined
from vecenv.learn.ranks import Ranks

__all__ = ["Moments"]

_EPSILON = 1e-8  # added to the variance, so that constant inputs become 0


class Moments(nn.Module):
    """Running mean and variance of rows, to normalise inputs; the mean is 0 at first.

    A layer of a module, part of its `state_dict`. `normalize` and `scale` can be compiled; call
    `update` outside of compiled code, once per rollout. `RunningMoments` of `vecenv.wrappers` does
    the same in NumPy, and each loads the other's state.

    Args:
        shape: Shape of a row, such as an observation's; () for numbers, such as returns.
        clip: Normalised values are clipped to -clip ... clip; None leaves them.

    Attributes:
        mean, variance: float32 `shape`, buffers; the mean of squared deviations is the variance.
        count: int64 scalar, buffer; rows seen.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, shape: int | Sequence[int] = (), *, clip: float | None = 10.0) -> None:
        super().__init__()
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.clip = clip
        self.register_buffer("mean", torch.zeros(self.shape))
        self.register_buffer("variance", torch.ones(self.shape))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def normalize(self, x: Tensor) -> Tensor:
        """Return x (..., *shape) minus the mean, divided by the standard deviation.

        bfloat16 and float16 stay, others become float32. Clipped values get no gradient.
        """
        centred = x.float() - self.mean
        return self._clipped(centred * torch.rsqrt(self.variance + _EPSILON), x)

    forward = normalize

    def scale(self, x: Tensor) -> Tensor:
        """Return x (..., *shape) divided by the standard deviation; the signs of returns stay."""
        return self._clipped(x.float() * torch.rsqrt(self.variance + _EPSILON), x)

    def std(self) -> Tensor:
        """Return the standard deviation, float32 `shape`, by which `scale` divides."""
        return torch.sqrt(self.variance + _EPSILON)

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor | None = None, *, ranks: Ranks | None = None) -> None:
        """Count in the rows x (..., *shape), of any dtype, where mask bool (...) is True.

        With `ranks`, all ranks call this and get the same moments, those of all their rows.

        Raises:
            ValueError: A wrong shape, or NaN or infinity in rows that count; nothing was changed.
        """
        x = torch.as_tensor(x, device=self.mean.device).detach()
        lead = x.shape[: max(x.ndim - len(self.shape), 0)]
        if x.shape != (*lead, *self.shape):
            raise ValueError(f"x has shape {tuple(x.shape)}, expected (..., *{self.shape})")
        rows = x.reshape(-1, *self.shape).double()
        if mask is not None and (mask.shape != lead or mask.dtype != torch.bool):
            found = f"{mask.dtype} {tuple(mask.shape)}"
            raise ValueError(f"mask is {found}, expected bool {tuple(lead)}: one per row of x")
        rows = rows if mask is None else rows[mask.reshape(-1).to(rows.device)]
        mean = rows.sum(0) / max(len(rows), 1)
        own = len(rows), mean.cpu(), (rows - mean).square().sum(0).cpu()
        before, device = int(self.count), self.mean.device
        state = before, self.mean.double(), self.variance.double() * before
        for number, *part in [own] if ranks is None else ranks.gather(own):
            if number:
                state = joined(*state, number, *(moment.to(device) for moment in part))
        count, mean, squares = state
        if count == before:
            return
        mean, variance = mean.to(self.mean), (squares / count).to(self.variance)
        if not torch.isfinite(torch.stack([mean, variance])).all():
            what = "x has NaN or infinity, or numbers too large to be squared"
            raise ValueError(f"{what}; look for the env that returns them, or use `mask`")
        self.mean.copy_(mean)
        self.variance.copy_(variance)
        self.count.fill_(count)

    def _clipped(self, x: Tensor, given: Tensor) -> Tensor:
        if self.clip is not None:
            x = x.clamp(-self.clip, self.clip)
        return x.to(given.dtype) if given.dtype in (torch.bfloat16, torch.float16) else x
