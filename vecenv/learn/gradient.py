"""Gradients of a loss over a batch, as `loss.backward()` gives them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

__all__ = ["Gradient"]

Loss = Callable[[Any, Any], Any]  # (module, batch) -> loss, or (loss, scalars)

_ALIGNMENT = 16  # elements: 64 bytes of float32, a line of the cache


class Gradient:
    """A module and a loss, turned into gradients.

    ``scalars = gradient(batch)`` gives the parameters of the module the `.grad` that they have after

        module.zero_grad()
        loss, scalars = loss_function(module, batch)
        loss.backward()

    The weights move into one vector, of which the module's parameters become views: the module
    is used, saved and loaded as before, and an optimizer has a single tensor to update. Moving the
    module to another device or dtype afterwards is an error; make the `Gradient` after that.

    Args:
        module: What the loss differentiates: parameters with `requires_grad`.
        loss: ``loss(module, batch)`` returns a scalar tensor that is a mean over the rows of the
            batch, or a pair of it and a dict of further scalars to report, also means over rows.
            The mean is weighted by ``batch.weights`` if the batch has them.
        compile: "on", "off", or "auto": if it pays in `num_calls` calls.
        dtype: What to compute in, float32 or bfloat16 (as `torch.autocast` does); the parameters
            and their gradients keep their dtype.
        threads: Threads among which the rows of a batch are split, or "auto".
        num_calls: Calls to come, for "auto".
        plan: `plan` of an earlier `Gradient` of this module and loss, to go on just as it did.
        allow_unused: Names of parameters that the loss may leave without a gradient; they get zero.
        log: Takes one sentence that says what was chosen.

    Attributes:
        plan: What was chosen at the first call, ready for JSON; None before.

    Raises:
        ValueError: An argument is none of those above, or no parameter has `requires_grad`.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        *,
        compile: Literal["auto", "on", "off"] = "auto",
        dtype: torch.dtype = torch.float32,
        threads: int | Literal["auto"] = "auto",
        num_calls: int | None = None,
        plan: Mapping[str, Any] | None = None,
        allow_unused: Iterable[str] = (),
        log: Callable[[str], Any] | None = None,
    ):
        self.module, self.loss = module, loss
        self.plan: dict[str, Any] | None = None
        self.num_calls_made = 0
        self._compile, self._dtype, self._threads = compile, dtype, threads
        self._num_calls, self._given_plan = num_calls, plan
        self._allow_unused = frozenset(allow_unused)
        self._log = log or (lambda text: None)
        self._weights = FlatParameters(module)

    def parameters(self) -> list[nn.Parameter]:
        """What an optimizer updates: one parameter, the vector of all the module's weights.

        Its memory is that of the module's own parameters, of which parameter groups can be made
        instead.
        """
        return [self._weights.vector]

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """Overwrite `.grad` of the parameters; return the loss and the scalars, detached.

        Args:
            batch: What the loss takes: tensors in any nest of dicts, tuples and objects.

        Returns:
            "loss" and the scalars of the loss function, tensors ().

        Raises:
            FloatingPointError: The loss is not finite; no gradient is left for an optimizer.
            ValueError: The loss is not a scalar, or parameters get no gradient.
        """
        self._weights.check()
        self.num_calls_made += 1
        if self.plan is None:
            self.plan = {"path": "autograd", "reason": "compile is off"}
        scalars = self._autograd(batch)
        if not math.isfinite(scalars["loss"]):
            self._weights.drop_gradients()
            raise FloatingPointError(
                f"the loss is {float(scalars['loss'])} in call {self.num_calls_made}; no gradient "
                "was written and no weight has changed"
            )
        return scalars

    def _autograd(self, batch: Any) -> dict[str, Tensor]:
        weights = self._weights
        with torch.enable_grad():
            loss, scalars = split_result(self.loss(self.module, batch))
        grads = torch.autograd.grad(loss, weights.parameters, allow_unused=True)
        unused = [
            name
            for name, grad in zip(weights.names, grads, strict=True)
            if grad is None and name not in self._allow_unused
        ]
        if unused:
            raise ValueError(
                f"{', '.join(unused)}: the loss gives no gradient to these parameters; use them in "
                "the loss, freeze them with requires_grad_(False), or name them in allow_unused"
            )
        weights.write_gradients(grads)
        return {name: value.detach() for name, value in {"loss": loss, **scalars}.items()}


def split_result(result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Read what a loss function returned: a loss, or a loss and a dict of scalars."""
    loss, scalars = result if isinstance(result, tuple) else (result, {})
    if not (isinstance(loss, Tensor) and loss.ndim == 0):
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss)}"
        raise ValueError(f"the loss has {found}, expected a tensor (): end it with .mean()")
    found = {name: torch.as_tensor(value) for name, value in scalars.items()}
    for name, value in found.items():
        if value.ndim:
            shape = tuple(value.shape)
            raise ValueError(f"scalar {name!r} of the loss has shape {shape}, expected (): a mean")
    return loss, found


class FlatParameters:
    """The weights of a module that get gradients, and these gradients, as two vectors.

    Args:
        module: Its parameters become views of the vector; their values stay.
    """

    def __init__(self, module: nn.Module):
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not named:
            raise ValueError(
                f"{type(module).__name__} has no parameter with requires_grad; expected one at least"
            )
        kinds = {(p.dtype, p.device) for p in named.values()}
        if len(kinds) > 1:
            raise ValueError(
                f"the parameters of {type(module).__name__} have dtypes and devices "
                f"{sorted(map(str, kinds))}, expected one; move the module with .to() first"
            )
        self.names, self.parameters = list(named), list(named.values())
        self.shapes = [p.shape for p in self.parameters]
        sizes = [p.numel() for p in self.parameters]
        self.gaps = [-size % _ALIGNMENT for size in sizes]
        lengths = [size + gap for size, gap in zip(sizes, self.gaps, strict=True)]
        (dtype, device), total = kinds.pop(), sum(lengths)
        self.vector = nn.Parameter(torch.zeros(total, dtype=dtype, device=device))
        self._grad = torch.zeros(total, dtype=dtype, device=device)
        self._grads = self.cut(self._grad, lengths)
        with torch.no_grad():
            views = self.cut(self.vector.detach(), lengths)
            for parameter, view in zip(self.parameters, views, strict=True):
                view.copy_(parameter)
                parameter.data = view
        self._addresses = [p.data_ptr() for p in self.parameters]
        self._flat_grads = [grad.view(-1) for grad in self._grads]

    def cut(self, vector: Tensor, lengths: list[int]) -> list[Tensor]:
        """Views of a vector of all weights, shaped like the parameters."""
        pieces = zip(vector.split(lengths), self.gaps, self.shapes, strict=True)
        return [piece[: len(piece) - gap].view(shape) for piece, gap, shape in pieces]

    def check(self) -> None:
        """Ensure that the module's parameters are still views of the vector."""
        for name, p, address in zip(self.names, self.parameters, self._addresses, strict=True):
            if p.data_ptr() != address:
                raise RuntimeError(
                    f"the memory of parameter {name} was exchanged after Gradient was made (by "
                    ".to(), .half() or .data = ...?); make the Gradient after that"
                )

    def write_gradients(self, grads: Iterable[Tensor | None]) -> None:
        """Set `.grad` of all parameters; None stands for zero."""
        for view, grad in zip(self._grads, grads, strict=True):
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad)
        self.attach_gradients()

    def attach_gradients(self) -> None:
        """Make `.grad` of all parameters the memory that gradients are written to."""
        if self.vector.grad is not self._grad:
            self.vector.grad = self._grad
        for parameter, grad in zip(self.parameters, self._grads, strict=True):
            if parameter.grad is not grad:
                parameter.grad = grad

    def drop_gradients(self) -> None:
        """Leave nothing for an optimizer to apply."""
        for parameter in (self.vector, *self.parameters):
            parameter.grad = None
