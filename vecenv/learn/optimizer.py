"""Adam that shortens long gradients before its step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["Adam"]


class Adam(torch.optim.Adam):
    """`torch.optim.Adam`, fused, with `torch.nn.utils.clip_grad_norm_` before each step.

    Learning-rate schedules of `torch.optim.lr_scheduler`, parameter groups and `state_dict` are
    those of torch. The norm is taken over the gradients of all groups together.

    Args:
        params: Parameters or parameter groups: `Gradient.parameters()`, or the module's own.
        lr: Learning rate, until a schedule changes it.
        betas: Decay of the running means of the gradient and of its square.
        eps: Added to the denominator.
        max_grad_norm: Gradients that are longer are scaled to this norm; None leaves them alone.
        **kwargs: As `torch.optim.Adam` takes them.

    Raises:
        ValueError: `max_grad_norm` is not above zero.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        max_grad_norm: float | None = None,
        **kwargs: Any,
    ):
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(
                f"max_grad_norm is {max_grad_norm}, expected a number above 0, or None to leave "
                "gradients as they are"
            )
        super().__init__(params, lr, betas, eps, **{"fused": True, **kwargs})
        self.max_grad_norm = max_grad_norm
        # Norm of the gradients of the last step before they were shortened, float32 ().
        self.grad_norm: torch.Tensor | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Shorten the gradients, which changes `.grad` as `clip_grad_norm_` does, and step.

        Raises:
            FloatingPointError: The norm is not finite; no weight has changed.
        """
        if self.max_grad_norm is None:
            return super().step(closure)
        if closure is not None:
            raise ValueError("Adam with max_grad_norm takes no closure: call it before the step")
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.grad_norm = torch.nn.utils.clip_grad_norm_(params, self.max_grad_norm)
        if not torch.isfinite(self.grad_norm):
            raise FloatingPointError(
                f"the norm of the gradients is {float(self.grad_norm)}, expected a finite number; "
                "no weight has changed: look for a division by zero or a root of zero in the loss"
            )
        return super().step()
