"""Gradients of a loss over a batch, as `loss.backward()` gives them."""

# Gradient owns two vectors; the module's parameters and their .grad are views of these.
#
#   optimizer  --updates-->  weights (W,) -----+
#   buffers of the module  --------------------+-->  autograd, or a compiled function
#   batch  ------------------------------------+            |
#   optimizer  <--reads--  gradient (W,)  <--writes---------+-->  loss and scalars

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vecenv.learn.batches import num_rows, row_weights, take_apart
from vecenv.learn.compiled import CompiledGradient, Refusal, first_line, read_result
from vecenv.learn.ranks import Ranks
from vecenv.learn.sizes import quick_products

__all__ = ["Gradient"]

_COMPARED_CALLS, _COMPARED_EVERY = (1, 2, 100), 1000  # in which it is compared with autograd
_ALIGNMENT = 16  # elements: 64 bytes of float32, a line of the cache
# Error of a parameter's gradient over its length, and over that of all; of rounding it is less.
_ALLOWED = {torch.float32: (1e-2, 1e-3), torch.bfloat16: (0.3, 0.1)}


class FlatParameters:
    """The weights of a module that get gradients, and these gradients, as two vectors.

    The module's parameters become views of `vector` (W,), each at a multiple of 16 elements, with
    zeros between. `gradient` (W,) is what `.grad` of the vector and of them is made of.
    """

    def __init__(self, module: nn.Module):
        self._module, named = module, _trained(module)
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
        self.dtype, self.device = kinds.pop()
        self._gaps = [-p.numel() % _ALIGNMENT for p in self.parameters]
        self._lengths = [p.numel() + -p.numel() % _ALIGNMENT for p in self.parameters]
        self.gradient = torch.zeros(sum(self._lengths), dtype=self.dtype, device=self.device)
        self.vector = nn.Parameter(torch.zeros_like(self.gradient))
        self.values = self.vector.detach()  # the same memory, outside of autograd
        self._grads = [grad for _, grad in self.named(self.gradient)]
        with torch.no_grad():
            for name, view in self.named(self.values):
                view.copy_(named[name])
                named[name].data = view
        self._addresses = [p.data_ptr() for p in self.parameters]

    def named(self, vector: Tensor) -> list[tuple[str, Tensor]]:
        """Views of a vector of all weights by name, shaped like the parameters."""
        pieces = zip(self.names, self.parameters, vector.split(self._lengths), strict=True)
        return [(name, piece[: p.numel()].view(p.shape)) for name, p, piece in pieces]

    def check(self) -> None:
        """Raise RuntimeError if the module has other parameters, or these other memory, now."""
        now, before = _trained(self._module), dict(zip(self.names, self.parameters, strict=True))
        changed = [name for name in {**before, **now} if now.get(name) is not before.get(name)]
        found = zip(self.names, self.parameters, self._addresses, strict=True)
        changed += [name for name, p, address in found if p.data_ptr() != address]
        if changed:
            raise RuntimeError(
                f"{', '.join(changed)}: frozen, unfrozen, exchanged or added, or moved (by .to(), "
                ".half() or .data = ...), after Gradient was made; make another Gradient, and "
                "another optimizer, after such changes"
            )

    def joined(self, grads: Iterable[Tensor]) -> Tensor:
        """Return a new vector (W,) of gradients of the parameters."""
        pairs = zip(grads, self._gaps, strict=True)
        pieces = [(grad.reshape(-1), grad.new_zeros(gap)) for grad, gap in pairs]
        return torch.cat([part for piece in pieces for part in piece if len(part)])

    @torch.no_grad()
    def write(self, grads: Iterable[Tensor | None]) -> None:
        """Write gradients of the parameters, of which None stands for zero."""
        for view, grad in zip(self._grads, grads, strict=True):
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad.to_dense() if grad.is_sparse else grad)  # of nn.Embedding

    def give(self, *, is_finite: bool = True) -> None:
        """Make what was written `.grad` of vector and parameters; where it is wrong, leave none."""
        pairs = zip((self.vector, *self.parameters), (self.gradient, *self._grads), strict=True)
        for parameter, grad in pairs:
            if parameter.grad is not grad or not is_finite:
                parameter.grad = grad if is_finite else None


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


class Gradient:
    """A module and a loss, turned into gradients.

    ``scalars = gradient(batch)`` gives the module's parameters the `.grad` that they have after::

        module.zero_grad()
        loss, scalars = loss_function(module, batch)
        loss.backward()

    The weights move into one vector, of which the module's parameters become views: the module
    is used, saved and loaded as before, and an optimizer has a single tensor to update. Moving the
    module to another device or dtype afterwards is an error; make the `Gradient` after that.

    By autograd, loss and module may be anything. With `compile` the first call makes a function of
    tensors of it: weights, buffers, and columns of a batch of just that size. It is compiled ahead
    of time and kept in ``$XDG_CACHE_HOME/vecenv/gradients`` (``~/.cache`` by default), so only the
    first run waits for the compiler. Numbers that the loss reads are part of it. Where
    something else than tensors has changed since (a number, `train` or `eval`, a layer) and for
    batches of another size, calls go through autograd, and `log` says why, once. What can't be
    compiled is left to autograd from the first call on: a loss that has effects, draws random
    numbers, or reads tensors that are in neither module nor batch. Calls 1, 2, 100 and every
    thousandth are compared with autograd, which takes over where they differ. Hooks on gradients of
    parameters are called by autograd only.

    Args:
        module: What the loss differentiates: its parameters with `requires_grad`.
        loss: ``loss(module, batch)`` returns a scalar tensor, or a pair of it and a dict of further
            scalars to report.
        compile: Compile the loss.
        threads: 2 lets two threads compute halves of the rows of a compiled gradient on the CPU. It
            says that loss and scalars are means over the rows of the batch, all weighted by
            ``batch.weights`` or ``batch["weights"]`` if there are such, with nothing in them that
            depends on several rows, such as a mean over those that a mask leaves.
        dtype: What to compute in, float32 or bfloat16 (as `torch.autocast` does), by dtype or name.
            bfloat16 is quicker on processors with instructions for it. The parameters and their
            gradients keep their dtype.
        allow_unused: Names of parameters that the loss may leave without a gradient; they get zero.
        ranks: Processes that compute gradients of the same weights at the same time: gradient, loss
            and scalars are means over the rows of all their batches. Rows are counted by
            ``batch.weights`` or ``batch["weights"]``, or else all of a batch's first tensor are.
        deferred: Do not wait in each call to see whether loss and gradient are finite: where they
            are not the gradient is zero, and a later `check` raises. On a GPU calls can be
            captured in a CUDA graph then, see `Graph`, once two were made.
        log: Takes a sentence about compiling, and each reason for autograd. None sends them to the
            logger "vecenv.learn".

    Attributes:
        path: "compiled" or "autograd"; None before the first call if `compile` is set.
        reason: Why it is that path, a sentence; "" if `compile` is not set.

    Raises:
        ValueError: An argument is none of those above, or no parameter has `requires_grad`.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Any, Any], Any],
        *,
        compile: bool = False,
        threads: int = 1,
        dtype: torch.dtype | str = torch.float32,
        allow_unused: Iterable[str] = (),
        ranks: Ranks | None = None,
        deferred: bool = False,
        log: Callable[[str], Any] | None = None,
    ):
        if not isinstance(compile, bool):
            raise ValueError(f"compile is {compile!r}, expected True or False")
        if threads not in (1, 2) or isinstance(threads, bool):
            raise ValueError(f"threads is {threads!r}, expected 1 or 2")
        found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if found not in _ALLOWED:
            raise ValueError(f"dtype is {dtype}, expected torch.float32 or torch.bfloat16")
        self._weights = FlatParameters(module)
        if self._weights.dtype != torch.float32:
            raise ValueError(
                f"the parameters of the module are {self._weights.dtype}, expected torch.float32; "
                "to compute in bfloat16 pass dtype=torch.bfloat16"
            )
        self.module, self.loss = module, loss
        self.path: str | None = None if compile else "autograd"
        self.reason = ""
        self._threads, self._dtype, self._is_deferred = threads, found, deferred
        self._allow_unused, self._ranks = frozenset(allow_unused), ranks or Ranks()
        self._log = log or logging.getLogger("vecenv.learn").info
        with torch.inference_mode(mode=False):  # calls that were not finite, since `check`
            self._num_refused = torch.zeros((), dtype=torch.int64, device=self._weights.device)
        self._compiled: CompiledGradient | None = None
        self._num_calls, self._said = 0, set[str]()

    def describe(self) -> dict[str, Any]:
        """Return path, threads and reason, ready for JSON; `gradient_options` follows them."""
        threads = 1 if self._compiled is None else self._compiled.num_parts
        return {"path": self.path, "threads": threads, "reason": self.reason}

    def parameters(self) -> list[nn.Parameter]:
        """What an optimizer updates: one parameter, the vector of all the module's weights.

        Its memory is that of the module's own parameters, of which parameter groups can be made
        instead.
        """
        return [self._weights.vector]

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """Overwrite `.grad` of the parameters; return the loss and the scalars, detached.

        Args:
            batch: What the loss takes: tensors (B, ...) in any nest of dicts, tuples and objects.

        Returns:
            "loss" and the scalars of the loss function: tensors (), the caller's to keep.

        Raises:
            FloatingPointError: The loss or a gradient is not finite; no `.grad` is left for an
                optimizer to apply. Of a deferred one `check` raises it.
            ValueError: The loss is not a scalar, or parameters get no gradient.
            RankError: Another rank has ended, or does not answer.
            RuntimeError: The module was moved after this object was made.
        """
        self._num_calls += 1
        (template, leaves, others), weights = take_apart(batch), self._weights
        weights.check()
        with quick_products(num_rows(leaves), len(weights.gradient), weights.device):
            if self.path is None:
                self._compile(template, leaves, others)
            scalars = self._by_compiled(leaves, others, batch) or self._by_autograd(batch)
            if self._ranks.size > 1:
                scalars = self._mean_over_ranks(scalars, leaves)
            # One number, as on a device each costs a wait.
            total = scalars["loss"] + weights.gradient.sum()
            if self._is_deferred:
                with torch.no_grad():  # where it is not finite the gradient is zero
                    is_wrong = ~torch.isfinite(total)
                    self._num_refused.add_(is_wrong)
                    weights.gradient.masked_fill_(is_wrong, 0.0)
            elif not math.isfinite(total):
                self._refuse(scalars["loss"], leaves)
        weights.give()
        return scalars

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles, which would share weights with nobody's module."""
        raise TypeError(
            "a Gradient can't be copied or pickled: copy its module, and make another Gradient"
        )

    def check(self) -> None:
        """Wait, and raise if a loss or gradient was not finite since the last time.

        Raises:
            FloatingPointError: In one of the calls, of a deferred `Gradient`; its gradient was
                replaced by zero.
        """
        count = int(self._num_refused)
        self._num_refused.zero_()
        if count:
            raise FloatingPointError(
                f"the loss, or gradients, of {count} calls were not finite, and zero was put in "
                "the gradients' place: look for a division by zero, a root or a logarithm of zero, "
                "or try a smaller learning rate; without deferred=True the call that it was says "
                "more"
            )

    def _compile(self, *batch: Any) -> None:
        """Compile for batches like this one, or decide on autograd."""
        try:
            self._compiled = CompiledGradient(
                self.module, self.loss, self._weights, batch,
                dtype=self._dtype, threads=self._threads, log=self._log,
            )  # fmt: skip
        except Refusal as refusal:
            self._decide_on_autograd(str(refusal))
        else:
            self.path, self.reason = "compiled", self._compiled.note
            self._log(f"gradient: {self.reason}")

    def _decide_on_autograd(self, reason: str) -> None:
        self._compiled, self.path, self.reason = None, "autograd", reason
        self._log(f"gradient: by autograd, {reason}")

    def _by_compiled(
        self, leaves: Mapping[str, Tensor], others: Mapping[str, Any], batch: Any
    ) -> dict[str, Tensor] | None:
        """The scalars, or None if no compiled function can compute them."""
        if self._compiled is None:
            return None
        number, weights = self._num_calls, self._weights
        if reason := self._compiled.why_not(leaves, others):
            if reason not in self._said:
                self._said.add(reason)
                self._log(f"gradient: call {number} goes through autograd: {reason}")
            return None
        try:
            values = self._compiled(weights.values, [*leaves.values()], weights.gradient)
        except Exception as error:  # autograd goes on, or shows the user's own mistake
            self._decide_on_autograd(
                f"the compiled one failed in call {number}: {first_line(error)}"
            )
            return None
        scalars = dict(zip(self._compiled.names, values.unbind(), strict=True))
        is_compared = number in _COMPARED_CALLS or number % _COMPARED_EVERY == 0
        is_captured = weights.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return self._compared(scalars, batch) if is_compared and not is_captured else scalars

    def _compared(self, scalars: dict[str, Tensor], batch: Any) -> dict[str, Tensor]:
        """The scalars, or autograd's with its gradient, if it is another."""
        weights, (own_part, part) = self._weights, _ALLOWED[self._dtype]
        found, expected = weights.gradient.clone(), self._by_autograd(batch)
        size = float(weights.gradient.norm())
        if not math.isfinite(size):  # nothing to compare; an error, or a deferred one
            return expected
        pairs = zip(weights.named(found), weights.named(weights.gradient), strict=True)
        all_pairs = [(f"the gradient of {k}", a, b, part * size) for (k, a), (_, b) in pairs]
        all_pairs += [(k, scalars[k], x.float(), 0.1 * own_part) for k, x in expected.items()]
        for name, ours, theirs, more in all_pairs:
            error, own = float((ours - theirs).norm()), float(theirs.norm())
            if not error <= own_part * own + more:
                hint = "; if it is no mean over rows, leave threads=2 out" * (self._threads > 1)
                wrong = f"{name} is off by {error:.2g}, of {own:.2g}{hint}"
                self._decide_on_autograd(f"as in call {self._num_calls} {wrong}")
                return expected
        weights.gradient.copy_(found)
        return scalars

    def _by_autograd(self, batch: Any) -> dict[str, Tensor]:
        """The scalars, after autograd has written the gradient."""
        weights, is_cast = self._weights, self._dtype != self._weights.dtype
        for parameter in weights.parameters:
            parameter.grad = None
        with (
            torch.inference_mode(mode=False),
            torch.enable_grad(),
            torch.autocast(weights.device.type, self._dtype, enabled=is_cast),
        ):
            loss, scalars = read_result(self.loss(self.module, batch))
            if loss.requires_grad:
                loss.backward(inputs=weights.parameters)
        grads = {name: p.grad for name, p in zip(weights.names, weights.parameters, strict=True)}
        unused = [name for name in grads if grads[name] is None and name not in self._allow_unused]
        if unused:
            raise ValueError(
                f"{', '.join(unused)}: the loss gives no gradient to these parameters; use them in "
                "the loss, freeze them with requires_grad_(False), or name them in allow_unused"
            )
        weights.write(grads.values())
        return {name: value.detach() for name, value in {"loss": loss, **scalars}.items()}

    @torch.no_grad()
    def _mean_over_ranks(
        self, scalars: dict[str, Tensor], leaves: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Replace gradient and scalars by means over all ranks, weighted by their rows."""
        gradient, weights = self._weights.gradient, row_weights(leaves)
        rows = torch.tensor(float(num_rows(leaves) or 1))
        rows = (rows if weights is None else leaves[weights].detach().sum()).to(gradient)
        own = torch.stack([value.to(gradient) for value in scalars.values()])
        # A mean over no rows is NaN, and counts nothing.
        parts = torch.cat([gradient, own, gradient.new_ones(1)])
        parts = self._ranks.sum_(torch.where(rows > 0, parts * rows, 0.0))
        means = parts[:-1] / parts[-1]
        gradient.copy_(means[: len(gradient)])
        return dict(zip(scalars, means[len(gradient) :].unbind(), strict=True))

    def _refuse(self, loss: Tensor, leaves: Mapping[str, Tensor]) -> None:
        """Raise because of what is not finite, and leave no gradient."""
        found = self._weights.named(self._weights.gradient)
        names = [name for name, grad in found if not torch.isfinite(grad).all()]
        self._weights.give(is_finite=False)
        places = {name: (~torch.isfinite(leaf)).nonzero() for name, leaf in leaves.items()}
        wrong = [f"{name} at {tuple(at[0].tolist())}" for name, at in places.items() if len(at)]
        batch = f"not finite in the batch: {', '.join(wrong)}" if wrong else "the batch is finite"
        raise FloatingPointError(
            f"the loss is {float(loss)} in call {self._num_calls}, and the gradients of "
            f"{', '.join(names) or 'no parameters'} are not finite; {batch}. No weight "
            "has changed, and no gradient is left to apply: look for a division by zero, a root or "
            "a logarithm of zero, or try a smaller learning rate"
        )
