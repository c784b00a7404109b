"""The gradient of a loss as a function compiled ahead of time, of tensors alone."""

#   weights, one vector     other parameters, buffers     columns of the batch
#            |                          |                          |
#            +----------- graph of ATen operations ----------------+   traced in the first call
#                                       |
#                      package in the user's cache folder             compiled by AOTInductor once
#                                       |
#               gradient, one vector; loss and scalars                loaded once for each thread

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.fx.experimental.proxy_tensor import make_fx

from vecenv.learn.batches import PLAIN, exchange, row_weights
from vecenv.learn.private_torch import compile_graph, load_package, no_validation
from vecenv.learn.watching import Watch

__all__ = ["CompiledGradient", "Refusal", "first_line", "read_result"]

_KEPT = 200  # packages in the cache folder, of a megabyte or two
_LAST_S = 600.0  # longest wait for half of a gradient


class Refusal(Exception):
    """Why a gradient is not compiled, in a sentence."""


def read_result(result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the scalars of what a loss function returned.

    Raises:
        ValueError: One of these is no scalar.
    """
    loss, scalars = result if isinstance(result, tuple) else (result, {})
    if not (isinstance(loss, Tensor) and loss.ndim == 0):
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss)}"
        raise ValueError(f"the loss has {found}, expected a tensor (): end it with .mean()")
    scalars = {name: torch.as_tensor(x) for name, x in scalars.items() if name != "loss"}
    for name, x in scalars.items():
        if x.ndim:
            shape = tuple(x.shape)
            raise ValueError(f"scalar {name!r} of the loss has shape {shape}, expected (): a mean")
    return loss, scalars


class _Called(nn.Module):
    """Calls a function with a module, of which `functional_call` exchanges the tensors."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[nn.Module], Any]) -> Any:
        return function(self.module)


class CompiledGradient:
    """A compiled gradient of batches like the one that it is made for, see `take_apart`.

    It raises `Refusal` if the gradient can't be compiled. `names` are those of the loss and the
    scalars; `num_parts` parts of the rows have a thread each; `note` says how it was made.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Any, Any], Any],
        weights: Any,
        batch: tuple[Any, Mapping[str, Tensor], Mapping[str, Any]],
        *,
        dtype: torch.dtype,
        threads: int,
        log: Callable[[str], Any],
    ):
        template, leaves, others = batch
        for name, (kind, _) in others.items():
            if kind not in PLAIN:
                raise Refusal(f"{name} is a {kind.__name__}, expected tensors, numbers, and nests")
        columns = list(leaves.values())
        self._leaf_names, self._others, self.names = list(leaves), others, list[str]()
        self._state = _state_of(module)
        parts = _split(columns, threads if weights.device.type == "cpu" else 1)
        self.num_parts = len(parts)
        inputs = [weights.values, *self._tensors_of_state(), *parts[0]]
        if any(x.layout != torch.strided for x in inputs):
            raise Refusal("there are sparse tensors in the module or the batch")
        graph = _trace(self._function(module, loss, weights, template, dtype), inputs)
        self._watch = Watch(loss, module)
        _refuse_unsafe(graph, weights)
        self._kinds = [*map(_kind_of, [*self._tensors_of_state(), *columns])]
        started = time.perf_counter()
        with _one_thread(self.num_parts):
            self._runs, is_new = _runs_of(graph, inputs, self.num_parts, log)
        self.note = f"{'compiled' if is_new else 'loaded'} in {time.perf_counter() - started:.1f} s"
        if self.num_parts > 1:
            self.note += ", two halves of the rows by two threads"
        elif threads > 1:
            self.note += "; one thread, as the rows can't be split in two equal halves on the CPU"
        self._helper: ThreadPoolExecutor | None = None
        self._process = 0

    def _tensors_of_state(self) -> list[Any]:
        return [getattr(part, name, None) for part, name, _ in self._state]

    def _function(
        self, module: nn.Module, user_loss: Any, weights: Any, template: Any, dtype: torch.dtype
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return a function of the vector of weights, the module's other tensors and the batch's.

        It sets `names` when it is called, and returns the vector of the gradient (W,), and float32
        (2 + S,) of the loss, the scalars, and the weight of the rows. Where halves have weights,
        all are multiplied by the sum of these.
        """
        state, called, is_cast = self._state, _Called(module), dtype != weights.dtype

        def gradient_of(vector: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
            tensors, columns = others[: len(state)], others[len(state) :]
            leaves = dict(zip(self._leaf_names, columns, strict=True))
            given = {f"module.{path}": x for (*_, path), x in zip(state, tensors, strict=True)}

            def loss_of(module: nn.Module) -> Any:
                batch = exchange(template, leaves.get)
                result = user_loss(module, batch)
                for (part, name, path), x in zip(state, tensors, strict=True):
                    if getattr(part, name) is not x:
                        raise Refusal(f"computing the loss changes the buffer {path}")
                return result

            def scalar_loss(params: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
                with torch.autocast(vector.device.type, dtype) if is_cast else nullcontext():
                    result = functional_call(called, {**params, **given}, (loss_of,))
                    loss, scalars = read_result(result)
                if not loss.requires_grad:
                    raise Refusal("the loss gives no gradient to the weights")
                self.names = ["loss", *scalars]
                values = [value.to(vector.device).float() for value in (loss, *scalars.values())]
                return loss, torch.stack(values)

            params = {f"module.{name}": piece for name, piece in weights.named(vector)}
            grads, (_, values) = grad_and_value(scalar_loss, has_aux=True)(params)
            gradient, weight = weights.joined(grads.values()), torch.ones(1, device=vector.device)
            if self.num_parts > 1 and (weighted_by := row_weights(leaves)):
                weight = leaves[weighted_by].sum().float().view(1)
                gradient = torch.where(weight > 0, gradient * weight, 0.0)
                values = torch.where(weight > 0, values * weight, 0.0)
            return gradient, torch.cat([values, weight])

        return gradient_of

    def why_not(self, leaves: Mapping[str, Tensor], others: Mapping[str, Any]) -> str:
        """Return why it can't compute the gradient of a batch, or ""."""
        kinds = [*map(_kind_of, [*self._tensors_of_state(), *leaves.values()])]
        if kinds != self._kinds or others != self._others or list(leaves) != self._leaf_names:
            return "sizes, nesting, numbers or dtypes of batch or buffers differ from the first"
        changed = self._watch.changed()
        return changed and f"{changed} is not what it was when the loss was compiled"

    @torch.no_grad()
    def __call__(self, vector: Tensor, leaves: Sequence[Tensor], out: Tensor) -> Tensor:
        """Write the gradient to out (W,); return the loss and the scalars, float32 (1 + S,)."""
        fixed = [vector, *self._tensors_of_state()]
        if self.num_parts == 1:
            gradient, values = self._runs[0](*fixed, *leaves)
            out.copy_(gradient)
            return values[:-1]
        if self._helper is None or self._process != os.getpid():  # a fork has no threads
            self._helper = ThreadPoolExecutor(1, "gradient", torch.set_num_threads, (1,))
            self._process = os.getpid()
        with _one_thread(2):
            first, second = _split(leaves, 2)
            other = self._helper.submit(self._runs[1], *fixed, *second)
            gradient, values = self._runs[0](*fixed, *first)
            other_gradient, other_values = other.result(_LAST_S)
            values += other_values
            torch.add(gradient, other_gradient, out=out)
            out /= values[-1]
            return values[:-1] / values[-1]


@contextmanager
def _one_thread(num_parts: int) -> Iterator[None]:
    """Keep torch's own threads from halves, which have a thread each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if num_parts > 1 else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _state_of(module: nn.Module) -> list[tuple[nn.Module, str, str]]:
    """Frozen parameters and buffers: their module, their name there, and their whole name."""
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    paths = [*frozen, *(name for name, _ in module.named_buffers())]
    splits = [(path, *path.rpartition(".")) for path in paths]
    return [(module.get_submodule(holder), name, path) for path, holder, _, name in splits]


def _split(leaves: Sequence[Tensor], num_parts: int) -> list[Sequence[Tensor]]:
    """Equal shares of the rows of tensors (B, ...), or all of them; a tensor () goes to all."""
    sizes = {len(leaf) for leaf in leaves if leaf.ndim}
    if num_parts == 1 or len(sizes) != 1 or sizes.pop() % num_parts:
        return [leaves]
    cut = [leaf.chunk(num_parts) if leaf.ndim else (leaf,) * num_parts for leaf in leaves]
    return [*zip(*cut, strict=True)]


def _kind_of(tensor: Tensor | None) -> Any:
    if tensor is None or tensor.layout != torch.strided:
        return id(tensor)
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _trace(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
    """Return the graph of a function; what it does to tensors is done to copies."""
    device = inputs[0].device
    table = {torch.ops.aten.tanh.default: _tanh} if device.type == "cpu" else {}
    try:
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.inference_mode(mode=False),
            torch.enable_grad(),
            no_validation(),
        ):
            copies = [x.detach().clone() for x in inputs]
            graph = make_fx(function, decomposition_table=table)(*copies)
    except Refusal:
        raise
    except Exception as error:
        raise Refusal(f"the loss can't be traced ({first_line(error)})") from error
    pairs = zip(copies, inputs, strict=True)
    if not all(bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in pairs):
        raise Refusal("computing the loss changes buffers of the module, or the batch")
    graph.graph.eliminate_dead_code()
    return graph


def _tanh(x: Tensor) -> Tensor:
    """Compute tanh as a quotient of polynomials, those of Eigen's `ptanh`, off by 4e-7 at most.

    A compiled one costs hardly more than a sum; torch's costs a sixth of a gradient of two layers.
    """
    if x.dtype not in (torch.float32, torch.bfloat16):
        return NotImplemented
    limited = x.float().clamp(-7.90531110763549805, 7.90531110763549805)
    square = limited * limited
    above: Any = -2.76076847742355e-16
    for coefficient in (
        2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
        1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03,
    ):  # fmt: skip
        above = above * square + coefficient
    below: Any = 1.19825839466702e-06
    for coefficient in (1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03):
        below = below * square + coefficient
    return (limited * above / below).to(x.dtype)


def _refuse_unsafe(graph: Any, weights: Any) -> None:
    """Refuse a graph whose results depend on more than its inputs: random numbers, tensors."""
    fresh = torch.ops.aten.lift_fresh_copy.default  # a number that became a tensor
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise Refusal(f"the loss draws random numbers ({node.target}); put them in the batch")
        tensor = getattr(graph, node.target) if node.op == "get_attr" else None
        if isinstance(tensor, Tensor) and any(user.target is not fresh for user in node.users):
            for name, parameter in zip(weights.names, weights.parameters, strict=True):
                if tensor.data_ptr() == parameter.data_ptr():
                    raise Refusal(f"the loss reads {name} not from the module that it is given")
            raise Refusal(
                f"the loss reads a tensor {tuple(tensor.shape)} that is neither in the module nor "
                "in the batch; make it a buffer of the module, or a column of the batch"
            )


# -- packages in the cache folder ------------------------------------------------------------------


def _runs_of(
    graph: Any, inputs: Sequence[Tensor], count: int, log: Callable[[str], Any]
) -> tuple[list[Callable[..., Any]], bool]:
    """Load a graph's package so many times, compiled now if it is not in the cache folder."""
    folder, device = _cache_folder(), inputs[0].device
    kept = folder / f"{_key_of(graph, inputs)}.pt2"
    if kept.is_file():
        try:
            os.utime(kept)
            return [load_package(kept, device) for _ in range(count)], False
        except Exception:  # the file is damaged
            kept.unlink(missing_ok=True)
    log(f"gradient: compiling for batches of {len(inputs[-1]) if inputs[-1].ndim else 1} rows")
    aside = Path(tempfile.mkdtemp(dir=folder))  # where no other process looks
    try:
        compile_graph(graph, [x.detach().clone() for x in inputs], aside / "gradient.pt2")
        os.replace(aside / "gradient.pt2", kept)
        runs = [load_package(kept, device) for _ in range(count)]
    except Exception as error:
        reason = first_line(error)
        if "InvalidCxxCompiler" in reason:
            reason = "no C++ compiler was found: install g++, or set CXX"
        raise Refusal(f"the loss does not compile ({reason})") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    for old in sorted(folder.glob("*.pt2"), key=lambda file: file.stat().st_mtime)[:-_KEPT]:
        old.unlink(missing_ok=True)
    return runs, True


def _cache_folder() -> Path:
    """Return the folder of compiled gradients, which this user alone can write to."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "vecenv" / "gradients"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise Refusal(f"{folder} can't be used ({error}); set XDG_CACHE_HOME") from None
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise Refusal(f"others than you can write to {folder}, whose files are run")
    return folder


def _key_of(graph: Any, inputs: Sequence[Tensor]) -> str:
    """Hash of all that machine code depends on."""
    constants = [
        (name, x.tolist() if isinstance(x, Tensor) else x) for name, x in graph.named_buffers()
    ]
    parts = (
        graph.code, [*map(_kind_of, inputs)], constants, torch.__version__, _processor(),
        torch.get_num_threads(), torch.get_float32_matmul_precision(),
        torch.cuda.get_device_name() if inputs[0].is_cuda else "",
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:40]


@cache
def _processor() -> str:
    """Describe the processor, with its instructions: another one may share the cache folder."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().split("\n\n")[0].splitlines() if cpuinfo.is_file() else []
    named = ("model name", "flags", "Features", "CPU part")
    found = [line for line in lines if line.startswith(named)]
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {found}"


def first_line(error: BaseException) -> str:
    """The type and the first line of a message, which of compilers go on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}".rstrip(": ")
