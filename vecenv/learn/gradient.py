"""Gradients of a loss over a batch, as `loss.backward()` gives them."""

# Gradient owns two vectors. The module's parameters and their .grad are views of them.
#
#   batch, module's buffers ----+
#   weights (W,) ---------------+--read by-->  autograd, or a compiled function
#      ^ updates                                  | writes           | returns
#   optimizer  <--read by--  gradient (W,)  <-----+                  +-->  loss, scalars

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from vecenv.learn import compiled
from vecenv.learn.ranks import Ranks
from vecenv.machine import usable_cores

__all__ = ["Gradient", "gradient_options", "quick_products"]

_COMPARED_CALLS, _COMPARED_EVERY = (1, 2, 100), 1000  # calls compared with autograd
# From this many rows, or rows times weights, oneDNN is quicker than MKL: MKL uses AVX-512 only
# on Intel's processors.
_ROWS, _PRODUCTS = 512, 16_000_000
_SPLIT_ROWS = 1024  # or as many products: from here a second thread is worth its cost
_COMPILED_ROWS = 4_000_000  # in all calls together: about half a minute by autograd
_LOOK_FOR = "Look for a division by or a root of zero, or try a smaller learning rate"
# Allowed error of a parameter's gradient: over its own norm, over the whole gradient's norm.
_ALLOWED = {torch.float32: (1e-2, 1e-3), torch.bfloat16: (0.3, 0.1)}


class FlatParameters:
    """The trained weights of a module, `values` (W,), and their gradient, `gradient` (W,).

    The module's parameters become views of `values`; `vector` is `values` as one parameter.
    """

    def __init__(self, module: nn.Module):
        self.module, self.parameters = module, _trained(module.named_parameters())
        kinds = sorted({(str(p.dtype), str(p.device)) for p in self.parameters.values()})
        if len(kinds) != 1 or kinds[0][0] != "torch.float32":
            what = f"the parameters with requires_grad are {kinds or 'none'}"
            raise ValueError(f"{what}, expected some, torch.float32 on one device (see dtype)")
        with torch.no_grad():
            self.values = torch.cat([p.reshape(-1) for p in self.parameters.values()])
        vector_to_parameters(self.values, self.parameters.values())
        self.vector, self.gradient = nn.Parameter(self.values), torch.zeros_like(self.values)
        self._grads = [self.gradient, *(view for _, view in self.named(self.gradient))]
        self._places = {name: (id(p), p.data_ptr()) for name, p in self.parameters.items()}

    def named(self, vector: Tensor) -> list[tuple[str, Tensor]]:
        """Split a vector of all weights into views by name, shaped like the parameters."""
        pieces = vector.split([p.numel() for p in self.parameters.values()])
        pairs = zip(self.parameters.items(), pieces, strict=True)
        return [(name, piece.view(p.shape)) for (name, p), piece in pairs]

    def check(self, *, is_whole: bool) -> None:
        """Raise RuntimeError if weights were frozen, moved, or (`is_whole`) added, exchanged."""
        named = self.module.named_parameters() if is_whole else self.parameters.items()
        now = {name: (id(p), p.data_ptr()) for name, p in _trained(named).items()}
        if wrong := dict({*now.items()} ^ {*self._places.items()}):
            names = ", ".join(name for name in {**self._places, **now} if name in wrong)
            what = f"{names}: frozen, exchanged, added or moved (by .to())"
            raise RuntimeError(f"{what} after Gradient was made; make another, and an optimizer")

    def give(self, *, is_finite: bool = True) -> None:
        """Set `.grad` of vector and parameters to the written gradient; to None if not finite."""
        for p, grad in zip([self.vector, *self.parameters.values()], self._grads, strict=True):
            p.grad = grad if is_finite else None


def _trained(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    return {name: p for name, p in named if p.requires_grad}


class Gradient:
    """Compute the gradients of a loss over a module's parameters.

    ``scalars = gradient(batch)`` sets the `.grad` of the module's parameters as
    ``loss, scalars = loss_function(module, batch)`` and ``loss.backward()`` would. The weights move
    into one vector, and the parameters become views of it: the module is used, saved and loaded as
    before, and an optimizer gets one tensor. Make a new `Gradient` if it is moved or frozen.

    With autograd, loss and module may be anything. With `compile`, the first call turns the loss
    into a function of tensors (weights, buffers, columns of a batch of exactly this size). This
    function is compiled ahead of time and cached in ``$XDG_CACHE_HOME/vecenv/gradients``. Autograd
    still computes: batches of another size; calls in which something else has changed (a number
    that the loss reads, `train` or `eval`, a layer); losses that have effects, draw random numbers,
    or read tensors outside module and batch. Calls 1, 2, 100 and every thousandth are compared with
    autograd, which takes over if they differ: only this finds changes of what `getattr` reads.

    Args:
        module: The module to differentiate: its parameters with `requires_grad`, float32.
        loss: ``loss(module, batch)`` returns a scalar tensor, or a pair of it and a dict of further
            scalars to report.
        compile: Compile the loss.
        threads: 2 lets two threads compute half of the rows each, for a compiled gradient on the
            CPU, if ``torch.get_num_threads()`` is 1. Loss and scalars must be means over
            independent rows, weighted by a column `weights` if there is one.
        dtype: Dtype to compute in, float32 or bfloat16 (as in `torch.autocast`), or its name.
        ranks: Processes that make the same calls at the same time with equal weights. Gradient,
            loss and scalars are means over the rows of all batches, weighted as for `threads`.
        deferred: Wait for nothing, as a CUDA graph requires (`Graph`): if a loss or gradient is not
            finite, the gradient is zero, and a later `check` raises.
        log: Called with a sentence about compiling, and once with each reason for autograd; None
            uses the logger "vecenv.learn".

    Attributes:
        path: "compiled" or "autograd"; None before the first call if `compile` is set.
        num_threads, reason: The number of threads; why `path` was chosen, "" without `compile`.

    Raises:
        ValueError: An argument is not one of those above.
    """

    def __init__(
        self, module: nn.Module, loss: Callable[[Any, Any], Any], *, compile: bool = False,
        threads: int = 1, dtype: torch.dtype | str = torch.float32, ranks: Ranks | None = None,
        deferred: bool = False, log: Callable[[str], Any] | None = None,
    ) -> None:  # fmt: skip
        self._dtype: Any = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
        if not isinstance(compile, bool) or threads not in (1, 2) or self._dtype not in _ALLOWED:
            what = f"compile is {compile!r}, expected True or False; threads is {threads!r}"
            wanted = "expected torch.float32 or torch.bfloat16"
            raise ValueError(f"{what}, expected 1 or 2; dtype is {dtype}, {wanted}")
        self._weights, self.num_threads = FlatParameters(module), 1
        self.module, self.loss, self.reason = module, loss, ""
        self.path: str | None = None if compile else "autograd"
        self._threads, self._is_deferred, self._ranks = threads, deferred, ranks or Ranks()
        self._log = log or logging.getLogger("vecenv.learn").info
        self._num_refused = self._weights.gradient.new_zeros((), dtype=torch.int64)  # since `check`
        self._compiled: compiled.CompiledGradient | None = None
        self._num_calls, self._said = 0, set[str]()

    def parameters(self) -> list[nn.Parameter]:
        """Return the vector of weights, for an optimizer; the module's own parameters work, too."""
        return [self._weights.vector]

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """Overwrite `.grad` of the parameters; return "loss" and the scalars, detached tensors ().

        `batch` is what the loss takes: tensors (B, ...) in any nest of dicts, tuples and batches.

        Raises:
            FloatingPointError: The loss or a gradient is not finite; every `.grad` is None. If
                `deferred`, `check` raises this instead.
            ValueError: The loss is not a scalar, or parameters get no gradient.
            RankError: Another rank has ended, or does not answer.
            RuntimeError: The module was moved after this object was made.
        """
        self._num_calls += 1
        columns, weights = dict(compiled.columns_of(batch)), self._weights
        tensors = {name: x for name, x in columns.items() if isinstance(x, Tensor)}
        num_rows = next((len(x) for x in tensors.values() if x.ndim), 0)
        # A walk through the modules takes 6 % of a small DQN's call: only at times for autograd.
        weights.check(is_whole=self._compiled is not None or self._num_calls % 16 == 1)
        with quick_products(num_rows, len(weights.gradient), weights.gradient.device):
            scalars = self._by_compiled(columns, batch) or self._by_autograd(batch)
        if self._ranks.size > 1:
            scalars = self._mean_over_ranks(scalars, num_rows or 1, tensors)
        total = scalars["loss"] + weights.gradient.sum()  # one number: each costs a device a wait
        if self._is_deferred:
            with torch.no_grad():  # a gradient that is not finite becomes zero
                self._num_refused.add_(is_wrong := ~torch.isfinite(total))
                weights.gradient.masked_fill_(is_wrong, 0.0)
        elif not math.isfinite(total):
            weights.give(is_finite=False)
            wrong = [name for name, x in tensors.items() if not torch.isfinite(x).all()]
            raise FloatingPointError(
                f"in call {self._num_calls} the loss is {float(scalars['loss'])}, or its gradient "
                f"is not finite; no weight has changed. {_LOOK_FOR}. Not finite in the batch: "
                f"{', '.join(wrong) or 'nothing'}"
            )
        weights.give()
        return scalars

    def check(self) -> None:
        """Wait; raise FloatingPointError if a deferred call since the last check was not finite."""
        count = int(self._num_refused)
        self._num_refused.zero_()
        if count:
            what = f"the loss, or gradients, of {count} calls were not finite, and were left out"
            raise FloatingPointError(f"{what}. {_LOOK_FOR}")

    def _decide_on_autograd(self, reason: str) -> None:
        self._compiled, self.num_threads, self.path, self.reason = None, 1, "autograd", reason
        self._log(f"gradient: by autograd, {reason}")

    def _by_compiled(self, columns: Mapping[str, Any], batch: Any) -> dict[str, Tensor] | None:
        """Return the scalars, or None if no compiled function can compute them."""
        number, given = self._num_calls, (self._dtype, self._threads, self._log)
        try:
            if self.path is None:
                self._compiled = compiled.CompiledGradient(self._weights, self.loss, batch, *given)
                self.path, self.reason = "compiled", self._compiled.note
                self.num_threads = self._compiled.num_parts
                self._log(f"gradient: {self.reason}")
            if self._compiled is None:
                return None
            if reason := self._compiled.why_not(columns):
                if reason not in self._said:
                    self._said.add(reason)
                    self._log(f"gradient: call {number} goes through autograd: {reason}")
                return None
            scalars = self._compiled(columns)
        except Exception as error:  # autograd computes instead, or shows the user's own mistake
            reason = f"the compiled one failed in call {number}: {compiled.first_line(error)}"
            is_told = isinstance(error, compiled.Refusal)
            return self._decide_on_autograd(str(error) if is_told else reason)
        is_compared = number in _COMPARED_CALLS or number % _COMPARED_EVERY == 0
        is_captured = self._weights.gradient.is_cuda and torch.cuda.is_current_stream_capturing()
        return self._compared(scalars, batch) if is_compared and not is_captured else scalars

    def _compared(self, scalars: dict[str, Tensor], batch: Any) -> dict[str, Tensor]:
        """Return the compiled scalars, or autograd's and its gradient if they differ."""
        weights, (own_part, part) = self._weights, _ALLOWED[self._dtype]
        found, expected = weights.gradient.clone(), self._by_autograd(batch)
        size = float(weights.gradient.norm())
        if not math.isfinite(size):  # nothing to compare: the caller raises, or defers the error
            return expected
        pairs = zip(weights.named(found), weights.named(weights.gradient), strict=True)
        both = [(f"the gradient of {k}", a, b, part * size) for (k, a), (_, b) in pairs]
        both += [(k, scalars[k], x.float(), 0.1 * own_part) for k, x in expected.items()]
        for name, ours, theirs, more in both:
            error, own = float((ours - theirs).norm()), float(theirs.norm())
            if not error <= own_part * own + more:
                wrong = f"as in call {self._num_calls} {name} is off by {error:.2g}, of {own:.2g}"
                hint = "; if it is no mean over rows, leave threads=2 out" * (self._threads > 1)
                self._decide_on_autograd(wrong + hint)
                return expected
        weights.gradient.copy_(found)  # autograd has overwritten it
        return scalars

    def _by_autograd(self, batch: Any) -> dict[str, Tensor]:
        """Write the gradient by autograd; return the scalars."""
        parameters, is_cast = self._weights.parameters, self._dtype != torch.float32
        with (
            torch.inference_mode(mode=False),
            torch.enable_grad(),
            torch.autocast(self._weights.values.device.type, self._dtype, enabled=is_cast),
        ):
            found = compiled.read_result(self.loss(self.module, batch))
            loss, grads = found["loss"], list[Any]([None] * len(parameters))
            if loss.requires_grad:
                grads[:] = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True)
        if unused := [k for k, grad in zip(parameters, grads, strict=True) if grad is None]:
            self._weights.check(is_whole=True)  # others may have taken their places
            what = f"{', '.join(unused)}: the loss gives no gradient to these parameters"
            raise ValueError(f"{what}; use them, or freeze them with requires_grad_(False)")
        with torch.no_grad():
            torch.cat([grad.to_dense().flatten() for grad in grads], out=self._weights.gradient)
        return {name: value.detach() for name, value in found.items()}

    @torch.no_grad()
    def _mean_over_ranks(
        self, scalars: dict[str, Tensor], num_rows: int, tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Replace gradient and scalars by means over all ranks, weighted by their rows."""
        gradient, weights = self._weights.gradient, compiled.row_weights(tensors)
        rows = gradient.new_tensor(num_rows) if weights is None else weights.detach().sum()
        own = torch.stack([value.to(gradient) for value in scalars.values()])
        # The mean over no rows is NaN: `where` keeps it out of the sum.
        parts = torch.cat([gradient, own, gradient.new_ones(1)])
        parts = self._ranks.sum_(torch.where(rows > 0, parts * rows.to(gradient), 0.0))
        means = parts[:-1] / parts[-1]  # the last one is the sum of the rows
        gradient.copy_(means[: len(gradient)])
        return dict(zip(scalars, means[len(gradient) :].unbind(), strict=True))


def gradient_options(
    compile: str, *, num_calls: int, num_rows: int, num_weights: int = 0, may_split: bool = True
) -> dict[str, Any]:
    """Return `compile` and `threads` for a `Gradient` whose loss is a mean over rows.

    `compile` is "on", "off", or "auto": on if all calls together have 4 million rows. Two threads
    are used for batches of 1 024 rows or more (or rows times weights of 16 million or more), if
    `may_split` is set and there are two cores.
    """
    is_many = num_rows >= _SPLIT_ROWS or num_rows * num_weights >= _PRODUCTS
    is_split = may_split and is_many and usable_cores() > 1
    is_compiled = compile == "on" or (compile == "auto" and num_calls * num_rows >= _COMPILED_ROWS)
    return {"compile": is_compiled, "threads": 2 if is_split else 1}


@contextmanager
def quick_products(
    num_rows: int, num_weights: int = 0, device: torch.device | str = "cpu"
) -> Iterator[None]:
    """Let torch compute large matrix products by oneDNN inside a ``with`` statement.

    It sets `torch.set_float32_matmul_precision("medium")` on the CPU if `num_rows`, or `num_rows`
    times `num_weights`, is large, unless the processor would then round to bfloat16.
    """
    is_many = num_rows >= _ROWS or num_rows * num_weights >= _PRODUCTS
    before = torch.get_float32_matmul_precision()
    if is_many and torch.device(device).type == "cpu" and before == "highest" and _is_exact():
        torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@cache
def _is_exact() -> bool:
    """Return whether this processor keeps full float32 products at "medium" precision."""
    with torch.inference_mode():
        a = torch.linspace(-1, 1, 512 * 64).view(512, 64)
        exact = a.double() @ a.double().T
        torch.set_float32_matmul_precision("medium")
        return bool((a @ a.T - exact).abs().max() < 1e-5 * exact.abs().max())
