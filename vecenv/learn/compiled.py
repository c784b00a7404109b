"""The gradient of a loss as one compiled function of a vector of weights and a batch's tensors.

All that is not a stable interface of torch is in this file: the options of the compiler
(`cpp_wrapper`, its table of decompositions), and code objects of our own.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from vecenv.learn.batches import Layout, put_together
from vecenv.learn.parameters import FlatParameters
from vecenv.learn.workers import Worker

__all__ = [
    "CompiledGradient",
    "Part",
    "WithLoss",
    "build_part",
    "product_and_sum",
    "quick_parts",
    "split_rows",
    "tanh_by_polynomials",
    "why_not_compile",
]

_MIN_PRODUCT = 2  # columns; torch has a way of its own for one
_MAX_COMPILATIONS = 3  # of one gradient, where what the loss reads has changed; then autograd


class WithLoss(nn.Module):
    """A module and its loss as one module, so that `functional_call` exchanges the weights."""

    def __init__(self, module: nn.Module, loss: Callable[[Any, Any], Any]):
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, batch: Any) -> Any:
        """Return what the loss function does."""
        return self.loss(self.module, batch)


def why_not_compile(module: nn.Module) -> str:
    """Say why a module is not compiled, in a sentence; empty if nothing speaks against it."""
    for name, part in module.named_modules():
        if isinstance(part, nn.RNNBase):
            what = type(part).__name__
            return f"nn.{what} ({name or 'the module'}) does not compile; nn.{what}Cell does"
    return ""


def build_part(
    module: nn.Module,
    loss: Callable[[Any, Any], Any],
    weights: FlatParameters,
    layout: Layout,
    *,
    names: Sequence[str],
    dtype: torch.dtype,
    rows: int | None,
    weights_index: int | None,
    is_graph: bool = True,
) -> Part:
    """Compile the gradient over some rows of a batch.

    Args:
        module: What the loss differentiates.
        loss: Returns a loss, or a loss and scalars.
        weights: Of the module.
        layout: Of the batch.
        names: Of the scalars.
        dtype: float32, or what `torch.autocast` computes in.
        rows: Length of the batch's objects, if the layout is of a longer batch.
        weights_index: Which tensor has the weights of rows, if results are to be weighted by their
            sum.
        is_graph: On a GPU make a CUDA graph of it, which can't be captured in another one.

    Returns:
        A function of the vector of weights and of the batch's tensors, which come in shares. Its
        results are sums over the shares: the vector of the gradient, and float32 (2 + S,) of the
        loss, the scalars, and the weight of all that.
    """
    with_loss = WithLoss(module, loss)
    keys = tuple(f"module.{name}" for name in weights.names)
    shapes, lengths, gaps = tuple(weights.shapes), tuple(weights.lengths), tuple(weights.gaps)
    names, device, is_cast = tuple(names), weights.device.type, dtype != weights.dtype

    def gradient_of_part(vector: Tensor, leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
        pieces = vector.split(lengths)
        params = {
            key: piece[: length - gap].view(shape)
            for key, piece, length, gap, shape in zip(
                keys, pieces, lengths, gaps, shapes, strict=True
            )
        }

        def scalar_loss(params: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            batch = put_together(layout, list(leaves), rows)
            with torch.autocast(device, dtype) if is_cast else nullcontext():
                result = torch.func.functional_call(with_loss, params, (batch,))
            loss, scalars = result if isinstance(result, tuple) else (result, {})
            found = [torch.as_tensor(scalars[name], device=vector.device) for name in names]
            return loss, torch.stack([value.float() for value in (loss, *found)])

        grads, (_, values) = torch.func.grad_and_value(scalar_loss, has_aux=True)(params)
        flat = []
        for key, gap in zip(keys, gaps, strict=True):
            flat += [grads[key].reshape(-1), *([vector.new_zeros(gap)] if gap else [])]
        gradient = torch.cat(flat)
        if weights_index is None:
            weight = torch.ones(1, device=vector.device)
        else:
            weight = leaves[weights_index].sum().float().view(1)
            gradient = torch.where(weight > 0, gradient * weight, 0.0)
            values = torch.where(weight > 0, values * weight, 0.0)
        return gradient, torch.cat([values, weight])

    return Part(gradient_of_part, weights.device, is_graph=is_graph)


def tanh_by_polynomials(x: Tensor) -> Tensor:
    """Compute tanh as a quotient of polynomials, off by 4e-7 at most: those of Eigen's `ptanh`.

    The derivative stays 1 - tanh**2, of what this returns.
    """
    if x.dtype not in {torch.float32, torch.bfloat16}:
        return NotImplemented
    x_within = x.float().clamp(-7.90531110763549805, 7.90531110763549805)
    square = x_within * x_within
    above: Any = -2.76076847742355e-16
    for coefficient in (
        2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
        1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03,
    ):  # fmt: skip
        above = above * square + coefficient
    below: Any = 1.19825839466702e-06
    for coefficient in (1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03):
        below = below * square + coefficient
    return (x_within * above / below).to(x.dtype)


def product_and_sum(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Compute bias + a @ b apart: the sum then goes into the pass over what follows.

    Libraries on the CPU copy the bias to all rows first, and read it again in the product.
    """
    if beta != 1 or alpha != 1 or a.shape[-1] < _MIN_PRODUCT or b.shape[-1] < _MIN_PRODUCT:
        return NotImplemented
    return torch.matmul(a, b) + bias if a.ndim == 2 else torch.bmm(a, b) + bias


@contextmanager
def quick_parts(device: torch.device) -> Iterator[None]:
    """Compile on the CPU tanh as `tanh_by_polynomials`, and layers as `product_and_sum`.

    Left alone in other versions of torch. The table of decompositions belongs to the whole process,
    and so has these entries only while a gradient is compiled.
    """
    table: Any = None
    forget: Any = None  # the copy of the table that the compiler keeps
    with suppress(ImportError, AttributeError):
        from torch._inductor import decomposition

        table, forget = decomposition.decompositions, decomposition.fast_random_decomps.cache_clear
    aten = torch.ops.aten
    own = {aten.tanh.default: tanh_by_polynomials}
    own |= dict.fromkeys((aten.addmm.default, aten.baddbmm.default), product_and_sum)
    if forget is None or device.type != "cpu":
        yield
        return
    before = {name: table.get(name) for name in own}
    table.update(own)
    forget()
    try:
        yield
    finally:
        for name, function in before.items():
            if function is None:
                del table[name]
            else:
                table[name] = function
        forget()


class Part:
    """A compiled function, run for each share of a batch by threads.

    Guards are checked for the first share alone, whose tensors are of the kind of the others'. What
    torch makes of the function then runs for all: a call from Python to C++, which lets go of the
    interpreter's lock.

    Args:
        function: Of the weights and a list of tensors; returns two tensors that may be summed.
        device: Of the weights.
        is_graph: On a GPU make a CUDA graph of it.
    """

    def __init__(self, function: types.FunctionType | Any, device: torch.device, *, is_graph: bool):
        # Guards and the limit of recompilations belong to a code object: each gets its own.
        own = types.FunctionType(
            function.__code__.replace(), function.__globals__, function.__name__, None,
            function.__closure__,
        )  # fmt: skip
        options: dict[str, Any] = {}
        settings: dict[str, Any] = {"fullgraph": True, "dynamic": False, "options": options}
        self._backend = _Backend()
        if device.type == "cpu":
            settings["backend"] = self._backend
        else:
            options["triton.cudagraphs"] = is_graph
        if "recompile_limit" in inspect.signature(torch.compile).parameters:
            settings["recompile_limit"] = _MAX_COMPILATIONS
        self._function: Any = torch.compile(own, **settings)

    def __call__(
        self, vector: Tensor, shares: list[list[Tensor]], workers: Sequence[Worker]
    ) -> tuple[Tensor, Tensor]:
        """Return sums over the shares; without workers one is computed after the other."""
        backend = self._backend
        backend.shares, backend.workers, backend.num_done = shares, workers, 1
        try:
            totals = self._function(vector, shares[0])
        finally:
            backend.shares, backend.workers = [], ()
        for share in shares[backend.num_done :]:  # torch runs it uncompiled, or by other means
            for total, value in zip(totals, self._function(vector, share), strict=True):
                total.add_(value)
        return totals


class _Backend:
    """For `torch.compile`: torch's own compiler, and what it makes runs for all shares.

    torch keeps such objects forever; this one refers to a call's tensors only during the call.
    """

    def __init__(self) -> None:
        self.shares: list[list[Tensor]] = []
        self.workers: Sequence[Worker] = ()
        self.num_done = 1  # shares of this call

    def __call__(self, graph: Any, examples: Any, **_: Any) -> Callable[..., Any]:
        """Compile a graph."""
        from torch._inductor.compile_fx import compile_fx

        function: Any = compile_fx(graph, examples, config_patches={"cpp_wrapper": True})

        def run(*inputs: Tensor) -> Sequence[Tensor]:
            first, *others = self.shares
            if not others:
                return function(*inputs)
            # The inputs are the first share's tensors in an order of torch's, and what all share.
            places = {id(leaf): place for place, leaf in enumerate(first)}
            where = [places.get(id(x)) for x in inputs]
            tasks = [
                [
                    x if place is None else share[place]
                    for x, place in zip(inputs, where, strict=True)
                ]
                for share in others
            ]
            totals, *found = _run_all(function, [list(inputs), *tasks], self.workers)
            for result in found:
                for total, value in zip(totals, result, strict=True):
                    total.add_(value)
            self.num_done = len(self.shares)
            return totals

        return run


def _run_all(
    function: Callable[..., Any], tasks: list[list[Tensor]], workers: Sequence[Worker]
) -> list[Any]:
    """What a function returns for each task, the first by this thread, the others by workers."""
    if not workers:
        return [function(*task) for task in tasks]
    for worker, task in zip(workers, tasks[1:], strict=True):
        worker.begin(function, *task)
    try:
        first = function(*tasks[0])
    except BaseException:
        for worker in workers:
            with suppress(Exception):
                worker.end()
        raise
    return [first, *[worker.end() for worker in workers]]


class CompiledGradient:
    """A compiled gradient of a batch, by threads that take equal shares of the rows.

    Args:
        part: What `build_part` returned, for a batch of `rows / num_parts` rows.
        num_parts: Shares of the rows.
        is_threaded: Whether each share has a thread of its own.
    """

    def __init__(self, part: Part, num_parts: int, *, is_threaded: bool):
        self._part, self._num_parts, self._is_first = part, num_parts, True
        self._workers = [Worker() for _ in range(num_parts - 1)] if is_threaded else []

    def __call__(self, vector: Tensor, leaves: list[Tensor], out: Tensor) -> Tensor:
        """Write the gradient to out (W,); return the loss and the scalars, float32 (1 + S,)."""
        is_double = len({id(leaf) for leaf in leaves}) < len(leaves)
        if self._is_first or is_double or any(leaf.requires_grad for leaf in leaves):
            # When compiling torch takes an object that comes twice, here or in the loss, for one
            # that always does.
            leaves, self._is_first = [leaf.detach() for leaf in leaves], False
        if self._num_parts == 1:
            gradient, values = self._part(vector, [leaves], ())
            out.copy_(gradient)
            return values[:-1].clone()
        shares = split_rows(leaves, self._num_parts)
        gradient, values = self._part(vector, shares, self._workers)
        torch.div(gradient, values[-1], out=out)
        return values[:-1].div_(values[-1])


def split_rows(leaves: Sequence[Tensor], num_parts: int) -> list[list[Tensor]]:
    """Equal shares of the rows of tensors (B, ...); a tensor () goes to all."""
    cut = [leaf.chunk(num_parts) if leaf.ndim else (leaf,) * num_parts for leaf in leaves]
    return [list(share) for share in zip(*cut, strict=True)]
