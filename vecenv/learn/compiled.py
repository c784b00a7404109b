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
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.fx.experimental.proxy_tensor import make_fx

from vecenv.learn.private_torch import compile_graph, load_package, no_validation
from vecenv.learn.watching import Watch

__all__ = ["CompiledGradient", "Refusal", "columns_of", "first_line", "read_result", "row_weights"]

_PLAIN = (bool, int, float, str, type(None))
_KEPT = 200  # packages in the cache folder, of a megabyte or two
_LAST_S = 600.0  # longest wait for half of a gradient


class Refusal(Exception):
    """Why a gradient is not compiled, in a sentence."""


def _parts_of(batch: Any, name: str) -> list[tuple[Any, str, Any]] | None:
    """Return what a nest holds: keys, whole names, values; None of what is no nest."""
    if hasattr(batch, "_asdict"):  # of `buffers`, and named tuples
        extras = {"extras": x} if (x := getattr(batch, "extras", None)) else {}
        return [(key, f"{name}.{key}", x) for key, x in {**batch._asdict(), **extras}.items()]
    if isinstance(batch, Mapping | tuple | list):
        items = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
        return [(key, f"{name}[{key!r}]", x) for key, x in items]
    return None


def columns_of(batch: Any, name: str = "batch") -> Iterator[tuple[str, Any]]:
    """Go through tensors and other values in any nest of dicts, tuples and batches, by name."""
    if (parts := _parts_of(batch, name)) is None:
        yield name, batch
    for _, inner_name, x in parts or ():
        yield from columns_of(x, inner_name)


def _with_columns(batch: Any, columns: Mapping[str, Any], name: str = "batch") -> Any:
    """Return a batch of the same nesting with other columns."""
    if (parts := _parts_of(batch, name)) is None:
        return columns.get(name, batch)
    found = {key: _with_columns(x, columns, inner_name) for key, inner_name, x in parts}
    if hasattr(batch, "_replace"):
        return batch._replace(**found)
    return found if isinstance(batch, Mapping) else type(batch)(found.values())


def row_weights(columns: Mapping[str, Any]) -> Any:
    """Return the column by which rows count, if there is one."""
    return columns.get("batch.weights", columns.get("batch['weights']"))


def read_result(result: Any) -> dict[str, Tensor]:
    """Return what a loss function returned, by name; ValueError if that is not scalars."""
    loss, scalars = result if isinstance(result, tuple) else (result, {})
    found = {"loss": loss, **{k: torch.as_tensor(x) for k, x in scalars.items() if k != "loss"}}
    for name, x in found.items():
        if not isinstance(x, Tensor) or x.ndim:
            what = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"{type(x)}"
            raise ValueError(f"{name!r} of the loss has {what}, expected a tensor (): use .mean()")
    return found


class _Called(nn.Module):
    """Calls a function with a module, of which `functional_call` exchanges the tensors."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[nn.Module], Any]) -> Any:
        return function(self.module)


class CompiledGradient:
    """A compiled gradient of batches with columns like those of the one that it is made for.

    It raises `Refusal` if there is none. `weights` are `FlatParameters`; `num_parts` parts of the
    rows have a thread each; `note` says how it was made.
    """

    def __init__(self, weights: Any, loss: Any, batch: Any, dtype: Any, threads: int, log: Any):
        self._weights, module, columns = weights, weights.module, dict(columns_of(batch))
        self._names = list[str]()
        for name, x in columns.items():
            if not isinstance(x, (Tensor, *_PLAIN)):
                what = f"{name} is a {type(x).__name__}"
                raise Refusal(f"{what}, expected tensors, numbers, and nests of them")
        frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
        paths = [*frozen, *(name for name, _ in module.named_buffers())]
        splits = [(path, *path.rpartition(".")) for path in paths]
        self._state = {path: (module.get_submodule(of), name) for path, of, _, name in splits}
        parts = self._split(columns, threads)
        self._kinds, self.num_parts, inputs = self._kinds_of(columns), len(parts), parts[0]
        self._is_weighted = len(parts) > 1 and row_weights(columns) is not None
        if any(x.layout != torch.strided for x in inputs):
            raise Refusal("there are sparse tensors in the module or the batch")
        graph = _trace(self._function(loss, batch, dtype), inputs)
        self._watch, started = Watch(loss, module), time.perf_counter()
        self._runs, how = _runs_of(graph, inputs, self.num_parts, log)
        self.note = f"{how} in {time.perf_counter() - started:.1f} s"
        if threads > 1:
            why = "one thread: two need equal halves of rows, on the CPU, and set_num_threads(1)"
            self.note += f", {why if len(parts) == 1 else 'two halves of the rows by two threads'}"

    def _given(self) -> list[Any]:
        """Return weights, frozen parameters and buffers."""
        state = [getattr(holder, name, None) for holder, name in self._state.values()]
        return [self._weights.values, *state]

    def _kinds_of(self, columns: Mapping[str, Any]) -> list[Any]:
        """Return what has to be the same in each call."""
        return [*columns, *map(_kind_of, [*self._given(), *columns.values()])]

    def _split(self, columns: Mapping[str, Any], num_parts: int) -> list[Any]:
        """Return inputs: of equal shares of the rows of tensors (B, ...), or of all of them.

        They are without gaps, as machine code takes their strides to be the first ones.
        """
        tensors, state = [x for x in columns.values() if isinstance(x, Tensor)], self._given()
        sizes, parts = {len(x) for x in tensors if x.ndim}, [tensors]
        is_split = num_parts == 2 and not state[0].is_cuda and torch.get_num_threads() == 1
        if is_split and len(sizes) == 1 and sizes.pop() % 2 == 0:  # a tensor () goes to both
            parts = zip(*(x.chunk(2) if x.ndim else (x, x) for x in tensors), strict=True)
        given = [[*state, *part] for part in parts]
        return [[x.contiguous() if x.layout == torch.strided else x for x in y] for y in given]

    def _function(self, loss: Any, batch: Any, dtype: torch.dtype) -> Callable[..., Any]:
        """Return a function of the vector of weights, the module's other tensors and the batch's.

        It returns the vector of the gradient (W,), and float32 (2 + S,) of the loss, the scalars,
        and the share of the rows: all are multiplied by it, so that those of halves add up.
        """
        called, share = _Called(self._weights.module), 1 / self.num_parts
        names = [name for name, x in columns_of(batch) if isinstance(x, Tensor)]

        def gradient_of(vector: Tensor, *others: Tensor) -> Any:
            found = dict(zip([*self._state, *names], others, strict=True))
            given = {path: found[path] for path in self._state}

            def loss_of(module: nn.Module) -> Any:
                result = loss(module, _with_columns(batch, found))
                for path, (holder, name) in self._state.items():
                    if getattr(holder, name) is not given[path]:
                        raise Refusal(f"computing the loss changes the buffer {path}")
                return result

            def scalar_loss(params: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
                exchanged = {f"module.{name}": x for name, x in {**params, **given}.items()}
                with torch.autocast(vector.device.type, dtype, enabled=dtype != vector.dtype):
                    scalars = read_result(functional_call(called, exchanged, (loss_of,)))
                if not scalars["loss"].requires_grad:
                    raise Refusal("the loss gives no gradient to the weights")
                self._names = [*scalars]
                return scalars["loss"], torch.stack([x.to(vector) for x in scalars.values()])

            params = dict(self._weights.named(vector))
            grads, (_, values) = grad_and_value(scalar_loss, has_aux=True)(params)
            gradient = torch.cat([grad.reshape(-1) for grad in grads.values()])
            values = torch.cat([values, torch.ones_like(values[:1])])
            if not self._is_weighted:
                return gradient * share, values * share
            weight = row_weights(found).sum().to(vector)  # of no rows a mean is NaN
            return tuple(torch.where(weight > 0, x * weight, 0.0) for x in (gradient, values))

        return gradient_of

    def why_not(self, columns: Mapping[str, Any]) -> str:
        """Return why it can't compute the gradient of a batch, or ""."""
        if self._kinds_of(columns) != self._kinds:
            return "sizes, nesting, numbers or dtypes of batch or buffers differ from the first"
        changed = self._watch.changed()
        return changed and f"{changed} is not what it was when the loss was compiled"

    @torch.no_grad()
    def __call__(self, columns: Mapping[str, Any]) -> dict[str, Tensor]:
        """Write the gradient; return the loss and the scalars."""
        first, *others = self._split(columns, self.num_parts)
        waiting = [_helper(os.getpid()).submit(self._runs[1], *inputs) for inputs in others]
        gradient, values = self._runs[0](*first)
        for half in waiting:
            more, more_values = half.result(_LAST_S)
            gradient, values = gradient.add_(more), values + more_values
        if self._is_weighted:
            gradient, values = gradient.div_(values[-1]), values / values[-1]
        self._weights.gradient.copy_(gradient)
        return dict(zip(self._names, values[:-1].unbind(), strict=True))


@cache  # of a process, as a fork has no threads
def _helper(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "gradient", torch.set_num_threads, (1,))


def _kind_of(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return type(value), value if isinstance(value, _PLAIN) else id(value)
    return value.shape, value.dtype, value.device


def _trace(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
    """Return the graph of a function, which depends on its inputs alone, and changes none."""
    is_on_cpu, copies = inputs[0].device.type == "cpu", [x.detach().clone() for x in inputs]
    table = {torch.ops.aten.tanh.default: _tanh} if is_on_cpu else {}
    try:
        with (
            torch.random.fork_rng([] if is_on_cpu else [inputs[0].device]),
            torch.inference_mode(mode=False),
            torch.enable_grad(),
            no_validation(),
        ):
            graph = make_fx(function, decomposition_table=table)(*copies)
    except Refusal:
        raise
    except Exception as error:
        raise Refusal(f"the loss can't be traced ({first_line(error)})") from error
    pairs = zip(copies, inputs, strict=True)
    if not all(bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in pairs):
        raise Refusal("computing the loss changes buffers of the module, or the batch")
    graph.graph.eliminate_dead_code()
    fresh: Any = torch.ops.aten.lift_fresh_copy.default  # a number that became a tensor
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise Refusal(f"the loss draws random numbers ({node.target}); put them in the batch")
        tensor = getattr(graph, node.target) if node.op == "get_attr" else None
        if isinstance(tensor, Tensor) and any(user.target is not fresh for user in node.users):
            what = f"a tensor {tuple(tensor.shape)} that is neither in the module that it is given"
            raise Refusal(f"the loss reads {what} nor in the batch; make it a buffer, or a column")
    return graph


def _tanh(x: Tensor) -> Tensor:
    """Compute tanh by one exponential, off by 2e-7 at most: torch's takes a sixth of a gradient."""
    if x.dtype not in (torch.float32, torch.bfloat16):
        return NotImplemented
    return (2 * torch.sigmoid(2 * x.float()) - 1).to(x.dtype)


def _runs_of(graph: Any, inputs: Any, count: int, log: Callable[[str], Any]) -> tuple[Any, str]:
    """Load a graph's package so many times, compiled now if it is not in the cache folder."""
    folder, device = _cache_folder(), inputs[0].device
    kept = folder / f"{_key_of(graph, inputs)}.pt2"
    if kept.is_file():
        try:
            os.utime(kept)
            return [load_package(kept, device) for _ in range(count)], "loaded"
        except Exception:  # the file is damaged
            kept.unlink(missing_ok=True)
    log(f"gradient: compiling for batches of {len(inputs[-1]) if inputs[-1].ndim else 1} rows")
    try:
        with tempfile.TemporaryDirectory(dir=folder) as aside:  # where no other process looks
            file = Path(aside, "gradient.pt2")
            compile_graph(graph, [x.detach().clone() for x in inputs], file)
            os.replace(file, kept)
        runs = [load_package(kept, device) for _ in range(count)]
    except Exception as error:
        reason = first_line(error)
        if "InvalidCxxCompiler" in reason:
            reason = "no C++ compiler was found: install g++, or set CXX"
        raise Refusal(f"the loss does not compile ({reason})") from error
    for old in sorted(folder.glob("*.pt2"), key=lambda file: file.stat().st_mtime)[:-_KEPT]:
        old.unlink(missing_ok=True)
    return runs, "compiled"


def _cache_folder() -> Path:
    """Return the folder of compiled gradients, which this user alone can write to."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "vecenv" / "gradients"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise Refusal(f"{folder} can't be used ({error}); set XDG_CACHE_HOME") from None
    if os.name == "posix" and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise Refusal(f"others than you can write to {folder}, whose files are run")
    return folder


def _key_of(graph: Any, inputs: Sequence[Tensor]) -> str:
    """Hash of all that machine code depends on."""
    cpuinfo = Path("/proc/cpuinfo")  # of the first processor; another one may share the folder
    lines = cpuinfo.read_text().split("\n\n")[0].splitlines() if cpuinfo.is_file() else []
    named = "model name", "flags", "Features", "CPU part"
    parts = (
        graph.code, [*map(_kind_of, inputs)], [(k, x.tolist()) for k, x in graph.named_buffers()],
        torch.__version__, torch.get_num_threads(), torch.get_float32_matmul_precision(),
        torch.backends.cpu.get_cpu_capability(), [line for line in lines if line.startswith(named)],
        torch.cuda.get_device_name() if inputs[0].is_cuda else "",
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:40]


def first_line(error: BaseException) -> str:
    """The type and the first line of a message, which of compilers go on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}".rstrip(": ")
