"""Gradients of a loss over a batch, as `loss.backward()` gives them, by the quickest path."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vecenv.learn.batches import Layout, Reads, read_as, take_apart
from vecenv.learn.choosing import (
    DTYPES,
    Eager,
    Plan,
    choose,
    first_line,
    split_result,
)
from vecenv.learn.compiled import CompiledGradient
from vecenv.learn.parameters import FlatParameters
from vecenv.learn.ranks import Ranks
from vecenv.learn.settings import Settings

__all__ = ["Gradient"]

Loss = Callable[[Any, Any], Any]  # (module, batch) -> loss, or (loss, scalars)

_COMPARED_CALLS, _COMPARED_EVERY = (2, 100), 1000  # in which a split gradient is compared
_ALLOWED = {torch.float32: 1e-2, torch.bfloat16: 0.3}  # error over length; of rounding it is less


class Gradient:
    """A module and a loss, turned into gradients.

    ``scalars = gradient(batch)`` gives the module's parameters the `.grad` that they have after::

        module.zero_grad()
        loss, scalars = loss_function(module, batch)
        loss.backward()

    The weights move into one vector, of which the module's parameters become views: the module
    is used, saved and loaded as before, and an optimizer has a single tensor to update. Moving the
    module to another device or dtype afterwards is an error; make the `Gradient` after that.

    How the gradient is computed is chosen once, in the first call: by autograd, or by a function
    that torch compiles for batches of just that size. With autograd, loss and module may be
    anything. A compiled loss must not have effects, and reads columns of tensors from the batch;
    where it does not compile, `plan` and `log` say why, and autograd goes on. Batches of other
    sizes go through autograd, too.

    Args:
        module: What the loss differentiates: its parameters with `requires_grad`.
        loss: ``loss(module, batch)`` returns a scalar tensor that is a mean over the rows of the
            batch, or a pair of it and a dict of further scalars to report, also means over rows.
            The mean may be weighted by ``batch.weights`` or ``batch["weights"]``.
        compile: "on", "off", or "auto": if it pays in `num_calls` calls.
        dtype: What to compute in, float32 or bfloat16 (as `torch.autocast` does), by dtype or name.
            bfloat16 is quicker on processors with instructions for it. The parameters and their
            gradients keep their dtype.
        threads: Among how many to split the rows of a batch, or "auto": two where that pays. Other
            than 1 it says that loss and scalars are means over the rows of every batch, or all
            weighted by its weights, with nothing in them that depends on several rows, such as a
            mean over those that a mask leaves. Only a compiled gradient is split. It is compared
            with autograd's in calls 1, 2, 100 and every thousandth.
        num_calls: Calls to come, for "auto"; None stands for very many.
        plan: `plan` of an earlier `Gradient` of this module and loss, to go on just as it did.
        allow_unused: Names of parameters that the loss may leave without a gradient; they get zero.
        ranks: Processes that compute gradients of the same weights at the same time: gradient, loss
            and scalars are means over the rows of all their batches. Rows are counted by
            ``batch.weights`` or ``batch["weights"]``, or else all of a batch's first tensor are.
        deferred: Do not wait in each call to see whether loss and gradient are finite: where they
            are not the gradient is zero, and a later `check` raises. On a GPU calls can be
            captured in a CUDA graph then, see `Graph`, once the first one has chosen the path.
        log: Takes a sentence that says what was chosen, and another if that changes. None sends
            them to the logger "vecenv.learn".

    Attributes:
        plan: What was chosen in the first call, a dict ready for JSON; None before.

    Raises:
        ValueError: An argument is none of those above, or no parameter has `requires_grad`.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        *,
        compile: Literal["auto", "on", "off"] = "auto",
        dtype: torch.dtype | Literal["float32", "bfloat16"] = torch.float32,
        threads: int | Literal["auto"] = 1,
        num_calls: int | None = None,
        plan: Mapping[str, Any] | None = None,
        allow_unused: Iterable[str] = (),
        ranks: Ranks | None = None,
        deferred: bool = False,
        log: Callable[[str], Any] | None = None,
    ):
        if compile not in {"auto", "on", "off"}:
            raise ValueError(f"compile is {compile!r}, expected 'auto', 'on' or 'off'")
        kinds = {**DTYPES, **{kind: kind for kind in DTYPES.values()}}
        if dtype not in kinds:
            raise ValueError(f"dtype is {dtype}, expected torch.float32 or torch.bfloat16")
        if threads != "auto" and not (isinstance(threads, int) and threads >= 1):
            raise ValueError(f"threads is {threads!r}, expected a number from 1 on, or 'auto'")
        self._weights = FlatParameters(module)
        if self._weights.dtype != torch.float32:
            raise ValueError(
                f"the parameters of the module are {self._weights.dtype}, expected torch.float32; "
                "to compute in bfloat16 pass dtype=torch.bfloat16"
            )
        self.module, self.loss = module, loss
        self.plan: dict[str, Any] | None = None
        self._wishes = {"compile": compile, "threads": threads, "num_calls": num_calls}
        self._given = None if plan is None else Plan.read(plan)
        self._dtype = kinds[dtype] if self._given is None else DTYPES[self._given.dtype]
        self._allow_unused = frozenset(allow_unused)
        self._ranks = Ranks() if ranks is None else ranks
        self._log = log or logging.getLogger("vecenv.learn").info
        self._num_calls_made = 0
        self._is_deferred = deferred
        with torch.inference_mode(mode=False):  # calls that were not finite, since `check`
            self._num_refused = torch.zeros((), dtype=torch.int64, device=self._weights.device)
        self._modules = list(module.modules())
        self._hooks: list[Mapping[int, Any]] = [
            hooks
            for one in self._modules
            for hooks in (
                one._forward_hooks,
                one._forward_pre_hooks,
                one._backward_hooks,
                one._backward_pre_hooks,
            )
        ]
        self._parts = [one._modules for one in self._modules]
        self._settings = Settings()
        self._compiled: CompiledGradient | None = None
        self._names: list[str] = []  # of the compiled function's results
        self._reads: Reads = {}
        self._layout: Layout | None = None  # of the batches that the compiled function takes
        self._kinds: list[Any] = []  # of their tensors
        self._mode: Any = None  # of the module
        self._has_seen_another_kind = False

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
        self._weights.check()
        self._num_calls_made += 1
        if self.plan is None:
            self._choose(batch)
        with self._settings:
            scalars = None if self._compiled is None else self._by_compiled(batch)
            if scalars is None:
                scalars = self._by_autograd(batch)
            if self._ranks.size > 1:
                scalars = self._mean_over_ranks(scalars, batch)
            # One number, as on a device each costs a wait.
            total = scalars["loss"] + self._weights.gradient.sum()
            if self._is_deferred:
                return self._deferred(scalars, total)
            check = float(total)
        if not math.isfinite(check):
            self._refuse(scalars["loss"], batch)
        self._weights.attach()
        return scalars

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles, which would share weights with nobody's module.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "a Gradient can't be copied or pickled: copy its module, and make another Gradient of "
            "that, with plan=gradient.plan to go on as this one does"
        )

    @torch.no_grad()
    def _deferred(self, scalars: dict[str, Tensor], total: Tensor) -> dict[str, Tensor]:
        """Note whether what a number depends on is finite; if not, the gradient is zero."""
        is_wrong = ~torch.isfinite(total)
        self._num_refused.add_(is_wrong)
        self._weights.gradient.masked_fill_(is_wrong, 0.0)
        self._weights.attach()
        return scalars

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

    def _by_compiled(self, batch: Any) -> dict[str, Tensor] | None:
        """The scalars, or None if the compiled function does not take such a batch."""
        leaves: list[Tensor] = []
        if not self._fits(batch, leaves):
            if not self._has_seen_another_kind:
                self._has_seen_another_kind = True
                self._log(
                    f"gradient: call {self._num_calls_made} has a batch of another size, nesting "
                    "or dtype than was compiled for (or the module has changed since); such go "
                    "through autograd: let all have one size, as minibatches(fixed=True) does"
                )
            return None
        assert self._compiled is not None
        try:
            values = self._compiled(self._weights.values, leaves, self._weights.gradient)
        except Exception as error:  # autograd goes on, or shows the user's own mistake
            self._compiled = None
            reason = f"the compiled function failed in call {self._num_calls_made}: "
            self._decide_on_autograd(reason + first_line(error))
            return None
        number, is_split = self._num_calls_made, self.plan is not None and self.plan["parts"] > 1
        if is_split and (number in _COMPARED_CALLS or number % _COMPARED_EVERY == 0):
            return self._compared(dict(zip(self._names, values.unbind(), strict=True)), batch)
        return dict(zip(self._names, values.unbind(), strict=True))

    def _compared(self, scalars: dict[str, Tensor], batch: Any) -> dict[str, Tensor]:
        """The scalars, or autograd's with its gradient, if that is not the mean over the parts."""
        found = self._weights.gradient.clone()
        expected = self._by_autograd(batch)
        gradient, allowed = self._weights.gradient, _ALLOWED[self._dtype]
        error, size = float((found - gradient).norm()), float(gradient.norm())
        if error <= allowed * size or not math.isfinite(size):
            gradient.copy_(found)
            return scalars
        self._compiled = None
        self._decide_on_autograd(
            f"in call {self._num_calls_made} the mean of the gradients of parts of the rows is off "
            f"by {error:.2g}, of {size:.2g}: the loss is not a mean over rows; take threads=1"
        )
        return expected

    def _fits(self, batch: Any, leaves: list[Tensor]) -> bool:
        """Whether all is as it was compiled for; the batch's tensors are put into leaves."""
        assert self._layout is not None
        try:
            if not read_as(self._layout, batch, leaves):
                return False
        except AttributeError:
            return False
        return [*map(_kind_of, leaves)] == self._kinds and self._mode_of_module() == self._mode

    def _mode_of_module(self) -> Any:
        """What users change in modules, and decides what they compute."""
        training = [module.training for module in self._modules]
        hooks = [*chain.from_iterable(self._hooks)]  # numbers that no two hooks share
        parts = [*chain.from_iterable(map(dict.values, self._parts))]
        return training, hooks, self._weights.is_hooked, parts

    def _by_autograd(self, batch: Any) -> dict[str, Tensor]:
        scalars, grads = self._eager(self.module, batch)
        self._weights.write(grads)
        return scalars

    @torch.no_grad()
    def _mean_over_ranks(self, scalars: dict[str, Tensor], batch: Any) -> dict[str, Tensor]:
        """Replace gradient and scalars by means over all ranks, weighted by their rows."""
        gradient = self._weights.gradient
        rows = _count_rows(batch).to(gradient)
        own = torch.stack([value.to(gradient) for value in scalars.values()])
        # A mean over no rows is NaN, and counts nothing.
        parts = torch.cat([gradient, own, gradient.new_ones(1)])
        parts = torch.where(rows > 0, parts * rows, 0.0)
        total = self._ranks.sum_(parts)[-1]
        means = parts[:-1] / total
        gradient.copy_(means[: len(gradient)])
        return dict(zip(scalars, means[len(gradient) :].unbind(), strict=True))

    def _eager(self, module: Any, batch: Any) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        """The loss and the scalars, and the gradients of the parameters, by autograd."""
        weights, is_cast = self._weights, self._dtype != self._weights.dtype
        with (
            torch.inference_mode(mode=False),
            torch.enable_grad(),
            torch.autocast(weights.device.type, self._dtype, enabled=is_cast),
        ):
            loss, scalars = split_result(self.loss(module, batch))
            grads: list[Tensor | None] = [
                grad.to_dense() if grad is not None and grad.is_sparse else grad  # of nn.Embedding
                for grad in torch.autograd.grad(loss, weights.parameters, allow_unused=True)
            ]
        found = zip(weights.names, grads, strict=True)
        unused = [name for name, grad in found if grad is None and name not in self._allow_unused]
        if unused:
            raise ValueError(
                f"{', '.join(unused)}: the loss gives no gradient to these parameters; use them in "
                "the loss, freeze them with requires_grad_(False), or name them in allow_unused"
            )
        return {name: value.detach() for name, value in {"loss": loss, **scalars}.items()}, grads

    def _choose(self, batch: Any) -> None:
        is_graph = not self._is_deferred  # a graph can't be captured in another one
        eager = Eager(self.module, self.loss, self._weights, self._dtype, self._eager, is_graph)
        plan, found = choose(eager, batch, self._given, self._log, **self._wishes)
        if plan is None:
            return
        self._settings = Settings(plan.precision, 1 if plan.parts > 1 else None)
        if found is not None:
            self._compiled, self._names, self._reads = found
            leaves: list[Tensor] = []
            self._layout = take_apart(batch, self._reads, leaves)
            self._kinds, self._mode = [*map(_kind_of, leaves)], self._mode_of_module()
        self.plan = plan._asdict()
        self._log(plan.sentence())

    def _decide_on_autograd(self, reason: str) -> None:
        assert self.plan is not None
        plan = Plan(**self.plan)._replace(path="autograd", reason=reason, threads=1, parts=1)
        self.plan = plan._asdict()
        self._log(plan.sentence())

    def _refuse(self, loss: Tensor, batch: Any) -> None:
        """Raise because of what is not finite, and leave no gradient."""
        found = self._weights.named(self._weights.gradient)
        names = [name for name, grad in found if not torch.isfinite(grad).all()]
        self._weights.detach()
        raise FloatingPointError(
            f"the loss is {float(loss)} in call {self._num_calls_made}, and the gradients of "
            f"{', '.join(names) or 'no parameters'} are not finite; {_describe(batch)}. No weight "
            "has changed, and no gradient is left to apply: look for a division by zero, a root or "
            "a logarithm of zero, or try a smaller learning rate"
        )


def _kind_of(leaf: Tensor) -> Any:
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.device


def _count_rows(batch: Any) -> Tensor:
    """How many rows the means of a batch are over, a tensor ()."""
    weights = batch.get("weights") if isinstance(batch, Mapping) else None
    weights = getattr(batch, "weights", None) if weights is None else weights
    if isinstance(weights, Tensor):
        return weights.detach().sum()
    named: list[tuple[str, Tensor]] = []
    _name_tensors(batch, "batch", named)
    tensors = [tensor for _, tensor in named if tensor.ndim]
    return torch.tensor(float(len(tensors[0]) if tensors else 1))


def _describe(batch: Any, name: str = "batch") -> str:
    """Say which columns of a batch are not finite."""
    named: list[tuple[str, Tensor]] = []
    _name_tensors(batch, name, named)
    wrong = []
    for name, tensor in named:
        places = (~torch.isfinite(tensor)).nonzero()
        if len(places):
            wrong.append(f"{name} at {tuple(places[0].tolist())}")
    return f"not finite in the batch: {', '.join(wrong)}" if wrong else "the batch is finite"


def _name_tensors(batch: Any, name: str, found: list[tuple[str, Tensor]]) -> None:
    if isinstance(batch, Tensor):
        found.append((name, batch))
    elif isinstance(batch, Mapping):
        for key, part in batch.items():
            _name_tensors(part, f"{name}[{key!r}]", found)
    elif hasattr(batch, "_asdict"):
        for key, part in batch._asdict().items():
            _name_tensors(part, f"{name}.{key}", found)
    elif isinstance(batch, tuple | list):
        for key, part in enumerate(batch):
            _name_tensors(part, f"{name}[{key}]", found)
