"""Adam with the clipping of gradient norms inside its step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Adam"]


class Adam(torch.optim.Adam):
    """`torch.optim.Adam`, fused, with `torch.nn.utils.clip_grad_norm_` inside its step.

    Schedules, parameter groups and `state_dict` work as in torch. The norm is that of the gradients
    of all groups together. If it is not finite, `step` raises FloatingPointError, and weights and
    state stay unchanged.

    Args:
        params: Parameters or parameter groups: `Gradient.parameters()`, or the module's own.
        lr: Learning rate; a schedule may change it.
        max_grad_norm: Longer gradients are scaled down to this norm; None never scales them.
        deferred: For CUDA graphs: assume that the norm is finite, as a deferred `Gradient` ensures,
            and let the learning rate be a tensor on the device, written by `set_lr`.
        **kwargs: As for `torch.optim.Adam`.

    Attributes:
        grad_norm: Norm of the gradients in the last step, before scaling, float32 (); None before
            the first step, and without `max_grad_norm`.

    Raises:
        ValueError: `max_grad_norm` is not above zero.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        *,
        max_grad_norm: float | None = None,
        deferred: bool = False,
        **kwargs: Any,
    ):
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is {max_grad_norm}, expected a number above 0 or None")
        super().__init__(params, lr, **{"fused": True, **kwargs})
        self.max_grad_norm, self._is_deferred = max_grad_norm, deferred
        self.grad_norm: Tensor | None = None
        self.register_step_pre_hook(lambda *_: self._shorten())
        self._move_lr()

    def _move_lr(self) -> None:
        for group in self.param_groups if self._is_deferred else ():
            device = group["params"][0].device
            group["capturable"] = device.type == "cuda"  # a CUDA graph requires it
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)

    def __getstate__(self) -> Any:
        raise TypeError("an Adam can't be copied: make another one, and load its state_dict()")

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state; captured CUDA graphs must be captured anew."""
        super().load_state_dict(state_dict)
        self._move_lr()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all groups, also for steps in a captured CUDA graph."""
        for group in self.param_groups:
            before = group["lr"]
            group["lr"] = before.fill_(lr) if isinstance(before, Tensor) else lr

    @torch.no_grad()
    def _shorten(self) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        grads: list[Any] = [p.grad for p in params if p.grad is not None]
        if not grads or self.max_grad_norm is None:  # clip_grad_norm_ takes 30 us more
            return
        norms = [torch.linalg.vector_norm(grad) for grad in grads]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        if not self._is_deferred and not math.isfinite(norm):
            raise FloatingPointError(f"the norm of the gradients is {float(norm)}; nothing changed")
        self.grad_norm, scale = norm, norm.add(1e-6).div_(self.max_grad_norm).clamp_(min=1.0)
        for grad in grads:
            grad.div_(scale)
