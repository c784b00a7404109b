"""The weights of a module as one vector."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["FlatParameters"]

_ALIGNMENT = 16  # elements: 64 bytes of float32, a line of the cache


class FlatParameters:
    """The weights of a module that get gradients, and these gradients, as two vectors.

    Args:
        module: Its parameters become views of the vector; their values stay.

    Attributes:
        vector: (W,), all weights, each parameter at a multiple of 16 elements, zeros between.
        gradient: (W,), what `.grad` of the vector and of the module's parameters is made of.

    Raises:
        ValueError: There is no parameter with `requires_grad`, or they differ in dtype or device.
    """

    def __init__(self, module: nn.Module):
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        kind = type(module).__name__
        if not named:
            raise ValueError(f"{kind} has no parameter with requires_grad; expected one at least")
        kinds = {(p.dtype, p.device) for p in named.values()}
        if len(kinds) > 1:
            raise ValueError(
                f"the parameters of {kind} have dtypes and devices {sorted(map(str, kinds))}, "
                "expected one of each; move the module with .to() first"
            )
        self.names, self.parameters = list(named), list(named.values())
        self.shapes = [tuple(p.shape) for p in self.parameters]
        sizes = [p.numel() for p in self.parameters]
        self.gaps = [-size % _ALIGNMENT for size in sizes]
        self.lengths = [size + gap for size, gap in zip(sizes, self.gaps, strict=True)]
        (self.dtype, self.device), total = kinds.pop(), sum(self.lengths)
        self.gradient = torch.zeros(total, dtype=self.dtype, device=self.device)
        self.vector = nn.Parameter(torch.zeros_like(self.gradient))
        self.values = self.vector.detach()  # the same memory, outside of autograd
        self._grads = self._cut(self.gradient)
        with torch.no_grad():
            for parameter, view in zip(self.parameters, self._cut(self.values), strict=True):
                view.copy_(parameter)
                parameter.data = view
        self._addresses = [p.data_ptr() for p in self.parameters]
        self._module = module

    def _cut(self, vector: Tensor) -> list[Tensor]:
        """Views of a vector of all weights, shaped like the parameters."""
        pieces = zip(vector.split(self.lengths), self.gaps, self.shapes, strict=True)
        return [piece[: len(piece) - gap].view(shape) for piece, gap, shape in pieces]

    def check(self, *, names: bool) -> None:
        """Ensure that the parameters are still views of the vector, and get gradients.

        Args:
            names: Whether to look, too, if the module has other parameters now, which takes longer.

        Raises:
            RuntimeError: They are not, as after `.to()` or `.data = ...`, or others are there.
        """
        if names or not all(p.requires_grad for p in self.parameters):
            now = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
            before = dict(zip(self.names, self.parameters, strict=True))
            changed = [name for name in {**before, **now} if now.get(name) is not before.get(name)]
            if changed:
                raise RuntimeError(
                    f"{', '.join(changed)}: frozen, unfrozen, exchanged or added after Gradient "
                    "was made, which goes on with the parameters that had requires_grad then; make "
                    "another Gradient, and another optimizer, after such changes"
                )
        addresses = [p.data_ptr() for p in self.parameters]
        if addresses != self._addresses:
            found = zip(self.names, addresses, self._addresses, strict=True)
            raise RuntimeError(
                f"the memory of {', '.join(name for name, now, then in found if now != then)} was "
                "exchanged after Gradient was made (by .to(), .half() or .data = ...?); make the "
                "Gradient after that"
            )

    def joined(self, grads: Sequence[Tensor]) -> Tensor:
        """Return a new vector (W,) of gradients of the parameters."""
        pairs = zip(grads, self.gaps, strict=True)
        pieces = [(grad.reshape(-1), grad.new_zeros(gap)) for grad, gap in pairs]
        return torch.cat([part for piece in pieces for part in piece if len(part)])

    @torch.no_grad()
    def write(self, grads: Sequence[Tensor | None]) -> None:
        """Write gradients of the parameters, of which None stands for zero."""
        for view, grad in zip(self._grads, grads, strict=True):
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad.to_dense() if grad.is_sparse else grad)  # of nn.Embedding

    def attach(self) -> None:
        """Make what was written `.grad` of the vector and of the parameters."""
        if self.vector.grad is not self.gradient:
            self.vector.grad = self.gradient
        for parameter, grad in zip(self.parameters, self._grads, strict=True):
            if parameter.grad is not grad:
                parameter.grad = grad

    def detach(self) -> None:
        """Leave no `.grad` that an optimizer could apply."""
        for parameter in (self.vector, *self.parameters):
            parameter.grad = None

    def named(self, vector: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Parts of a vector like `gradient` by name, shaped like the parameters."""
        return zip(self.names, self._cut(vector), strict=True)
