"""Which path a gradient takes: what speaks against one, and what is measured."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vecenv.learn.batches import (
    Layout,
    Reads,
    UnknownBatchError,
    put_together,
    record_reads,
    take_apart,
    tensors_in,
    weights_at,
)
from vecenv.learn.compiled import (
    CompiledGradient,
    WithLoss,
    build_part,
    quick_parts,
    split_rows,
    why_not_compile,
)
from vecenv.learn.parameters import FlatParameters
from vecenv.learn.settings import Settings
from vecenv.machine import usable_cores

__all__ = [
    "DTYPES",
    "Eager",
    "Plan",
    "choose",
    "first_line",
    "split_result",
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Rules with measured numbers: docs/learner.md has the measurements.
_COMPILE_SECONDS = 12.0  # of a network of a few layers, on one idle core
_SAVED = 0.35  # of the time of autograd, at least
_MANY_CALLS = 100_000  # stand for a number of calls that nobody told
# A gradient is worth handing half of it to another thread from so many rows on, or products.
_SPLIT_ROWS, _MANY_PRODUCTS = 1024, 16_000_000  # rows times weights
_CLEARLY_SLOWER = 1.1  # of a thread's time: cores that are busy now may be idle later
# From so many rows on oneDNN is quicker than MKL. With fewer, but many products, it depends on the
# processor: MKL leaves AVX-512 of other makers than Intel alone.
_MEDIUM_ROWS = 512
_CLEARLY_QUICKER = 0.9  # of the time, from which on another rounding is worth it

Found = tuple[CompiledGradient, list[str], Reads]


class Plan(NamedTuple):
    """How gradients are computed; ready for JSON.

    Attributes:
        path: "compiled" or "autograd".
        dtype: "float32" or "bfloat16".
        threads: Among which the parts of a batch go.
        parts: Into which the rows of a batch are split.
        combine: How the results of parts are weighted: "rows", or "weights" for the sums of
            ``batch.weights``.
        precision: Of float32 products, for `torch.set_float32_matmul_precision`; None leaves it.
        rows: Of the batches that the function is compiled for, None without.
        reason: A sentence.
    """

    path: str
    dtype: str
    threads: int = 1
    parts: int = 1
    combine: str = "rows"
    precision: str | None = None
    rows: int | None = None
    reason: str = ""

    @classmethod
    def read(cls, plan: Mapping[str, Any]) -> Plan:
        """Check a plan that comes from a file.

        Raises:
            ValueError: It is not what `Gradient.plan` was.
        """
        wrong = set(plan) ^ set(cls._fields)
        if wrong or plan["path"] not in {"compiled", "autograd"} or plan["dtype"] not in DTYPES:
            raise ValueError(
                f"plan is {dict(plan)}, expected what Gradient.plan was after its first call, "
                f"a dict of {', '.join(cls._fields)}"
            )
        return cls(**plan)

    def sentence(self) -> str:
        """What the log says."""
        parts = [self.path, self.dtype]
        if self.path == "compiled":
            split = f"{self.parts} parts of the rows by " if self.parts > 1 else ""
            parts.append(f"{split}{self.threads} thread{'s'[: self.threads > 1]}")
        if self.precision is not None:
            parts.append(f"matmul precision {self.precision}")
        return f"gradient: {', '.join(parts)}: {self.reason}"


def split_result(result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Read what a loss function returned: a loss, or a loss and a dict of scalars."""
    loss, scalars = result if isinstance(result, tuple) else (result, {})
    if not (isinstance(loss, Tensor) and loss.ndim == 0):
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss)}"
        raise ValueError(f"the loss has {found}, expected a tensor (): end it with .mean()")
    found = {name: torch.as_tensor(value) for name, value in scalars.items() if name != "loss"}
    for name, value in found.items():
        if value.ndim:
            shape = tuple(value.shape)
            raise ValueError(f"scalar {name!r} of the loss has shape {shape}, expected (): a mean")
    return loss, found


class Eager(NamedTuple):
    """What is to be differentiated, and how autograd does it."""

    module: nn.Module
    loss: Callable[[Any, Any], Any]
    weights: FlatParameters
    dtype: torch.dtype
    run: Callable[[Any, Any], tuple[dict[str, Tensor], list[Tensor | None]]]
    is_graph: bool = True  # whether a compiled one is a CUDA graph of its own on a GPU

    def gradient(self, batch: Any) -> tuple[dict[str, Tensor], Tensor]:
        """Scalars by name, and the gradients in one vector (W,) of its own."""
        scalars, grads = self.run(self.module, batch)
        shapes = zip(grads, self.weights.lengths, strict=True)
        found = [
            torch.zeros(length, device=self.weights.device)
            if grad is None
            else nn.functional.pad(grad.reshape(-1), (0, length - grad.numel()))
            for grad, length in shapes
        ]
        return scalars, torch.cat(found)


def choose(
    eager: Eager,
    batch: Any,
    given: Plan | None,
    log: Callable[[str], Any],
    **wishes: Any,
) -> tuple[Plan | None, Found | None]:
    """Choose how to compute gradients of such batches; leave module and random streams alone.

    Args:
        eager: What to differentiate.
        batch: The first one.
        given: A plan to follow; None makes one.
        log: Takes a sentence before compiling.
        **wishes: `compile`, `threads` and `num_calls`, as `Gradient` takes them.

    Returns:
        The plan, and for "compiled" the function, the names of its results, and what the loss reads
        of objects in the batch. None for the plan if this batch can't tell: if its gradient is not
        finite, or it has other rows than the batches of the given plan.
    """
    if given is not None and given.path == "autograd":
        return given, None
    with _state_kept(eager, batch) as state:
        choice = _Choice(eager, batch, given, log, state)
        is_finite = torch.isfinite(choice.gradient.sum() + choice.scalars["loss"])
        if not is_finite or (given is not None and given.rows != choice.rows):
            return None, None
        return choice.make(**wishes)


class _State:
    """Of a module's buffers, a batch and torch's random stream, before a loss was computed."""

    def __init__(self, eager: Eager, batch: Any):
        self._device = eager.weights.device
        # With the dict that holds each, as `self.mean = ...` puts another one in its place.
        self._buffers = [
            (f"{prefix}.{name}" if prefix else name, name, part._buffers, b, _cloned(b))
            for prefix, part in eager.module.named_modules()
            for name, b in part._buffers.items()
        ]
        self._random = self._streams()
        columns = [x for x in tensors_in(batch) if not x.is_inference()]  # others can't change
        self._columns = [(x, x._version, x.detach().clone()) for x in columns]

    def _streams(self) -> list[Tensor]:
        streams = [torch.get_rng_state()]
        if self._device.type == "cuda":
            streams.append(torch.cuda.get_rng_state(self._device))
        return streams

    def changed_buffers(self) -> list[str]:
        """Names of the buffers that have changed since."""
        return [
            path
            for path, name, holder, _, before in self._buffers
            if not _same(holder.get(name), before)
        ]

    def has_drawn(self) -> bool:
        """Whether random numbers were drawn since."""
        pairs = zip(self._streams(), self._random, strict=True)
        return not all(torch.equal(now, before) for now, before in pairs)

    def restore(self) -> None:
        """Undo what has changed since."""
        with torch.no_grad():
            for _, name, holder, buffer, before in self._buffers:
                if holder.get(name) is not buffer:
                    holder[name] = buffer
                if buffer is not None:
                    buffer.copy_(before)
            for now, version, before in self._columns:
                if now._version != version:
                    now.copy_(before)
        torch.set_rng_state(self._random[0])
        if len(self._random) > 1:
            torch.cuda.set_rng_state(self._random[1], self._device)


def _cloned(buffer: Tensor | None) -> Any:
    return None if buffer is None else buffer.clone()


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.dtype != b.dtype:
        return a is b
    if a.layout != torch.strided:  # sparse, as of a graph's edges
        a, b = a.to_dense(), b.to_dense()
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


@contextmanager
def _state_kept(eager: Eager, batch: Any) -> Iterator[_State]:
    state = _State(eager, batch)
    try:
        yield state
    finally:
        state.restore()


class _Choice:
    """The tests and measurements that end in a plan."""

    def __init__(self, eager: Eager, batch: Any, given: Plan | None, log: Any, state: _State):
        self.eager, self.batch, self.given, self.log, self.state = eager, batch, given, log, state
        self.scalars, self.gradient = eager.gradient(batch)
        self.is_random = state.has_drawn()
        self.dtype = next(name for name, dtype in DTYPES.items() if dtype == eager.dtype)
        self.reads: Reads = {}
        self.leaves: list[Tensor] = []
        self.layout: Layout | None = None
        self.unknown = self._take_apart()
        self.rows = next((len(leaf) for leaf in self.leaves if leaf.ndim), None)
        self.num_products = (self.rows or 0) * sum(eager.weights.lengths)

    def _take_apart(self) -> str:
        """Read the layout of the batch; return why that is not possible."""
        self.state.restore()
        try:
            self.eager.gradient(record_reads(self.batch, self.reads))
            self.layout = take_apart(self.batch, self.reads, self.leaves)
        except UnknownBatchError as error:
            return str(error)
        except Exception as error:  # the loss itself has just worked
            return f"the loss fails on stand-ins for objects of the batch ({first_line(error)})"
        return ""

    def make(self, *, compile: str, threads: int | str, num_calls: int | None) -> Any:
        """Return the plan and, if it is a compiled one, what it needs."""
        precision = self.given.precision if self.given else self.choose_precision()
        plan = Plan("autograd", self.dtype, precision=precision)
        reason = self._why_not(compile)
        if reason:
            return plan._replace(reason=reason), None
        with Settings(precision):
            seconds = self.time_autograd()
        must = compile == "on" or self.given is not None
        calls = _MANY_CALLS if num_calls is None else num_calls
        saved = calls * seconds * _SAVED
        if saved < _COMPILE_SECONDS and not must:
            reason = (
                f"{calls} calls of {_ms(seconds)} are over before compiling, which takes about "
                f"{_COMPILE_SECONDS:.0f} s, has paid"
            )
            return plan._replace(reason=reason), None
        combine, no_split = self._choose_split(threads)
        return self._compile(plan, combine, no_split, threads, seconds, must)

    def _why_not(self, compile: str) -> str:
        """Say why the loss is not compiled; empty if nothing speaks against it."""
        if compile == "off" and self.given is None:
            return "compile is off"
        if changed := self.state.changed_buffers():
            return f"computing the loss changes the buffers {', '.join(changed)}"
        if hooked := self.eager.weights.hooked():
            return f"there are hooks on the gradients of {', '.join(hooked)}"
        reason = self.unknown or why_not_compile(self.eager.module)
        return reason or self._reads_elsewhere()

    def _reads_elsewhere(self) -> str:
        """Say which weights the loss has not from the module, but from a list of its own, say.

        The compiled function puts others in the module, and would give these no gradient.
        """
        weights, dtype = self.eager.weights, self.eager.dtype
        pairs = zip(weights.names, weights.parameters, strict=True)
        others = {f"module.{name}": p.detach().clone().requires_grad_() for name, p in pairs}
        with_loss, is_cast = WithLoss(self.eager.module, self.eager.loss), dtype != weights.dtype
        try:
            with (
                torch.inference_mode(mode=False),
                torch.enable_grad(),
                torch.autocast(weights.device.type, dtype, enabled=is_cast),
            ):
                result = torch.func.functional_call(with_loss, others, (self.batch,))
                loss, _ = split_result(result)
                grads = torch.autograd.grad(loss, weights.parameters, allow_unused=True)
        except Exception:  # compiling, which does the same, shows it
            return ""
        found = zip(weights.names, grads, strict=True)
        names = ", ".join(name for name, grad in found if grad is not None)
        return names and f"the loss reads {names} not from the module that it is given"

    def choose_precision(self) -> str | None:
        """Take products that are quicker, if they have float32's error on this processor."""
        is_sure = (self.rows or 0) >= _MEDIUM_ROWS
        if not is_sure and (self.num_products < _MANY_PRODUCTS or self.dtype != "float32"):
            return None
        if self.eager.weights.device.type != "cpu":
            return None
        if self.is_random or self.state.changed_buffers():
            return None
        try:
            with Settings("medium"):
                _, gradient = self.eager.gradient(self.batch)
        except RuntimeError:  # set by another interface of torch: leave it so
            return None
        error = float((gradient - self.gradient).norm() / self.gradient.norm().clamp(min=1e-30))
        if error >= (1e-5 if self.dtype == "float32" else 0.05):
            return None
        return "medium" if is_sure or self._is_quicker("medium") else None

    def _is_quicker(self, precision: str) -> bool:
        """Whether autograd clearly is with such products; timed in turns, as cores get busy."""
        times: dict[str | None, list[float]] = {None: [], precision: []}
        for _ in range(5):
            for one, found in times.items():
                with Settings(one):
                    found.append(self.time_autograd(num_calls=1))
        return min(times[precision]) < _CLEARLY_QUICKER * min(times[None])

    def time_autograd(self, num_calls: int = 7) -> float:
        """Seconds of a gradient by autograd, the least of some calls."""
        return _time(lambda: self.eager.run(self.eager.module, self.batch), num_calls)

    def _choose_split(self, threads: int | str) -> tuple[str | None, str]:
        """How results of parts are combined; None and a reason if the rows are not split."""
        if self.given is not None:
            return (self.given.combine if self.given.parts > 1 else None), ""
        parts = self._parts_wanted(threads)
        if parts == 1:
            return None, ""
        sizes = {len(leaf) for leaf in self.leaves if leaf.ndim}
        if len(sizes) != 1 or sizes.pop() % parts:
            return None, f"the rows of the batch's tensors can't be split into {parts} equal parts"
        if self.is_random:
            return None, "the loss draws random numbers, and so its rows are not split"
        return self._find_rule(parts)

    def _parts_wanted(self, threads: int | str) -> int:
        if self.eager.weights.device.type != "cpu":
            return 1
        if isinstance(threads, int):
            return threads
        rows = self.rows or 0
        is_worth_it = rows >= _SPLIT_ROWS or self.num_products >= _MANY_PRODUCTS
        return 2 if usable_cores() >= 2 and is_worth_it else 1

    def _find_rule(self, parts: int) -> tuple[str | None, str]:
        """Find how means over parts of this batch are combined, so that they are that of all.

        Whether other batches' are, too, is the caller's word; see `Gradient`.
        """
        assert self.layout is not None
        at, leaves = weights_at(self.layout), list(self.leaves)
        if at is not None:  # different ones, else two rules agree
            weights = leaves[at]
            uneven = torch.linspace(0.5, 1.5, weights.numel(), dtype=weights.dtype)
            leaves[at] = uneven.view(weights.shape).to(weights.device)
        try:
            wrong = self._broken_rules(leaves, parts, at)
        except Exception as error:
            return None, f"the rows are not split: the loss fails on a part ({first_line(error)})"
        for rule, name in wrong.items():
            if not name:
                return rule, ""
        name = [*wrong.values()][-1] if wrong else "the gradient"
        return None, (
            f"the rows are not split: {name} of all rows is not the mean over parts of them "
            "(a mean over rows is expected, with nothing normalised over the batch)"
        )

    def _broken_rules(self, leaves: list[Tensor], parts: int, at: int | None) -> dict[str, str]:
        """Return for each rule what is no mean over parts by it; nothing if it is not finite."""

        def results(leaves: list[Tensor], rows: int | None) -> Tensor:
            assert self.layout is not None
            scalars, gradient = self.eager.gradient(put_together(self.layout, list(leaves), rows))
            return torch.cat([gradient, torch.stack([v.float() for v in scalars.values()])])

        shares = split_rows(leaves, parts)
        whole = results(leaves, None)
        found = torch.stack([results(share, len(leaves[0]) // parts) for share in shares])
        num_weights = sum(self.eager.weights.lengths)
        rules = {"rows": torch.ones(parts, device=whole.device)}
        if at is not None:
            rules["weights"] = torch.stack([share[at].sum() for share in shares]).float()
        if not (torch.isfinite(whole).all() and torch.isfinite(found).all()):
            return {}
        tolerance = 1e-3 if self.dtype == "float32" else 0.1
        wrong: dict[str, str] = {}
        for rule, factors in rules.items():
            mean = (found * (factors / factors.sum())[:, None]).sum(0)
            error = mean - whole
            size = whole[:num_weights].norm()
            scalars = list(zip(self.scalars, error[num_weights:], whole[num_weights:], strict=True))
            off = [name for name, e, w in scalars if abs(e) > tolerance * max(abs(float(w)), 1e-2)]
            is_same = float(error[:num_weights].norm()) <= tolerance * float(size)
            wrong[rule] = ", ".join(off) or ("" if is_same else "the gradient")
        return wrong

    def _compile(
        self,
        plan: Plan,
        combine: str | None,
        no_split: str,
        threads: int | str,
        eager_seconds: float,
        must: bool,
    ) -> tuple[Plan, Found | None]:
        if combine is None:
            num_parts = 1
        else:
            num_parts = self.given.parts if self.given else self._parts_wanted(threads)
        self.log(f"gradient: compiling for batches of {self.rows} rows")
        start = time.perf_counter()
        settings = Settings(plan.precision, 1 if num_parts > 1 else None)
        candidates: dict[int, CompiledGradient] = {}
        removed: set[Path] = set()
        while not candidates:
            try:
                with settings, warnings.catch_warnings(), quick_parts(self.eager.weights.device):
                    warnings.simplefilter("ignore")  # of the compiler about itself
                    candidates = self._build(num_parts, combine, threads)
                    for candidate in candidates.values():
                        self._verify(candidate)
            except Exception as error:
                candidates = {}
                torn = remove_torn_library(error)
                if torn is not None and torn not in removed:
                    removed.add(torn)
                    self.log(f"gradient: {torn} was written by half, and is compiled again")
                    continue
                reason = f"the loss does not compile ({first_line(error)})"
                if "InvalidCxxCompiler" in reason:
                    reason = "no C++ compiler was found (install g++, or set CXX)"
                return plan._replace(reason=reason), None
        compile_seconds = time.perf_counter() - start
        arguments = self.eager.weights.values, self.leaves, torch.empty_like(self.gradient)
        with settings:
            timed = {n: _time(lambda c=c: c(*arguments)) for n, c in candidates.items()}
        one, most = min(timed), max(timed)
        num_threads = most if timed[most] <= _CLEARLY_SLOWER * timed[one] else one
        seconds = timed[num_threads]
        if seconds > eager_seconds and not must:
            reason = f"compiled it takes {_ms(seconds)}, by autograd {_ms(eager_seconds)}"
            return plan._replace(reason=reason), None
        reason = (
            f"{_ms(seconds)} a call, {_ms(eager_seconds)} by autograd; compiled in "
            f"{compile_seconds:.0f} s" + (f"; {no_split}" if no_split else "")
        )
        if num_parts > 1 and (others := torch.get_num_threads()) > 1:
            reason += f"; torch's own {others} threads get in its way: torch.set_num_threads(1)"
        plan = plan._replace(
            path="compiled", threads=num_threads, parts=num_parts, combine=combine or "rows",
            rows=self.rows, reason=reason,
        )  # fmt: skip
        return plan, (candidates[num_threads], list(self.scalars), self.reads)

    def _build(
        self, num_parts: int, combine: str | None, threads: int | str
    ) -> dict[int, CompiledGradient]:
        """Functions to choose from by number of threads, of one compiled part."""
        assert self.layout is not None
        eager = self.eager
        is_weighted = combine == "weights"
        part = build_part(
            eager.module,
            eager.loss,
            eager.weights,
            self.layout,
            names=[name for name in self.scalars if name != "loss"],
            dtype=eager.dtype,
            rows=None if num_parts == 1 or self.rows is None else self.rows // num_parts,
            weights_index=weights_at(self.layout) if is_weighted else None,
            is_graph=eager.is_graph,
        )
        numbers = {1} if num_parts == 1 else {1, num_parts}
        if self.given is not None:
            numbers = {self.given.threads}
        elif isinstance(threads, int):
            numbers = {num_parts}
        return {n: CompiledGradient(part, num_parts, is_threaded=n > 1) for n in numbers}

    def _verify(self, compiled: CompiledGradient) -> None:
        """Ensure that a compiled gradient is autograd's, parameter by parameter."""
        weights = self.eager.weights
        found = torch.full_like(self.gradient, torch.nan)
        compiled(weights.values, self.leaves, found)
        if self.is_random:
            return
        is_exact = self.dtype == "float32"
        size = float(self.gradient.norm())
        pairs = zip(weights.named(found), weights.named(self.gradient), strict=True)
        for (name, ours), (_, expected) in pairs:
            error, own = float((ours - expected).norm()), float(expected.norm())
            allowed = 1e-3 * own + 1e-5 * size if is_exact else 0.2 * own + 0.05 * size
            if not error <= allowed:
                raise ArithmeticError(
                    f"the compiled gradient of {name} is off by {error:.2g}, of {own:.2g}"
                )


def _time(run: Callable[[], Any], num_calls: int = 7) -> float:
    """Seconds of a call: the least of some, as other programs only add to it."""
    if num_calls > 1:
        run()  # not counted
    found = []
    for _ in range(num_calls):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return min(found)


def remove_torn_library(error: BaseException) -> Path | None:
    """Remove the library in torch's cache which, the error says, can't be loaded; return its path.

    The linker writes it in its place: a process that was killed meanwhile leaves a part of it,
    which torch takes for the whole from then on.
    """
    found = re.search(r"(/\S+\.so): (file too short|invalid ELF header)", str(error))
    if found is None:
        return None
    path = Path(found[1])
    try:
        path.unlink()
    except OSError:
        return None
    return path


def first_line(error: BaseException) -> str:
    """The type and the first line of a message, which of compilers go on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}".rstrip(": ")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
