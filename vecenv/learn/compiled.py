"""The gradient of a loss as a function of tensors alone, compiled ahead of time."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from inspect import getattr_static
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.fx.experimental.proxy_tensor import make_fx

from vecenv.learn.private_torch import compile_graph, load_package, no_validation

__all__ = ["CompiledGradient", "Refusal", "columns_of", "first_line", "read_result", "row_weights"]

_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Tensor)
_LAYERS, _BASE = "torch.nn.modules.", "torch.nn.modules.module"
_FOREIGN, _MOST = {"torch", "numpy", "gymnasium", "builtins"}, 1000  # items of a dict, list or set
_BUILT_IN = type(len), type(().__add__), type(tuple.__add__)  # new objects at each reading
_TABLES = "_modules", "_forward_hooks", "_forward_pre_hooks"  # attributes of a module
_LAST_S = 600.0  # longest wait for one half of a gradient


class Refusal(Exception):
    """A gradient can't be compiled; the message says why."""


def _parts_of(batch: Any, name: str) -> list[tuple[Any, str, Any]] | None:
    """Return the (key, full name, value) items of a nest; None if `batch` is not a nest."""
    if hasattr(batch, "_asdict"):  # batches of `buffers`, and named tuples
        extras = {"extras": x} if (x := getattr(batch, "extras", None)) else {}
        return [(key, f"{name}.{key}", x) for key, x in {**batch._asdict(), **extras}.items()]
    if isinstance(batch, Mapping | tuple | list):
        items = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
        return [(key, f"{name}[{key!r}]", x) for key, x in items]
    return None


def columns_of(batch: Any, name: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yield the full name and the value of each leaf in a nest of dicts, tuples and batches."""
    if (parts := _parts_of(batch, name)) is None:
        yield name, batch
    for _, inner_name, x in parts or ():
        yield from columns_of(x, inner_name)


def _with_columns(batch: Any, columns: Mapping[str, Any], name: str = "batch") -> Any:
    """Return a batch of the same nesting, with its columns replaced."""
    if (parts := _parts_of(batch, name)) is None:
        return columns.get(name, batch)
    found = {key: _with_columns(x, columns, inner_name) for key, inner_name, x in parts}
    if hasattr(batch, "_replace"):
        return batch._replace(**found)
    return found if isinstance(batch, Mapping) else type(batch)(found.values())


def row_weights(columns: Mapping[str, Any]) -> Any:
    """Return the column `weights` of the rows, if there is one."""
    return columns.get("batch.weights", columns.get("batch['weights']"))


def read_result(result: Any) -> dict[str, Tensor]:
    """Return the results of a loss function by name; ValueError if they are not scalars."""
    loss, scalars = result if isinstance(result, tuple) else (result, {})
    found = {"loss": loss, **{k: torch.as_tensor(x) for k, x in scalars.items() if k != "loss"}}
    for name, x in found.items():
        if not isinstance(x, Tensor) or x.ndim:
            what = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"{type(x)}"
            raise ValueError(f"{name!r} of the loss has {what}, expected a tensor (): use .mean()")
    return found


class _Loss(nn.Module):
    """A loss as a module, so that `functional_call` can replace its tensors."""

    def __init__(self, module: nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, batch: Any) -> dict[str, Tensor]:
        before = dict(self.module.named_buffers())
        scalars = read_result(self.loss(self.module, batch))
        for name, buffer in self.module.named_buffers():
            if buffer is not before.get(name):
                raise Refusal(f"computing the loss changes the buffer {name}")
        return scalars


class CompiledGradient:
    """A compiled gradient, for batches whose columns are like those of the batch it is made with.

    Raises `Refusal` if the gradient can't be compiled. `weights` are `FlatParameters`; `num_parts`
    is the number of parts of the rows, a thread each; `note` says how the function was made.
    """

    def __init__(self, weights: Any, loss: Any, batch: Any, dtype: Any, threads: int, log: Any):
        self._weights, module, columns = weights, weights.module, dict(columns_of(batch))
        self._names = list[str]()
        for name, x in columns.items():
            if not isinstance(x, _VALUES):
                raise Refusal(f"{name} is a {type(x).__name__}, expected tensors and numbers")
        state = [*module.named_parameters(), *module.named_buffers()]
        splits = [(path, *path.rpartition(".")) for path, x in state if not x.requires_grad]
        self._state = {path: (module.get_submodule(of), name) for path, of, _, name in splits}
        parts = self._split(columns, threads)
        self._kinds, self.num_parts, inputs = self._kinds_of(columns), len(parts), parts[0]
        self._is_weighted = len(parts) > 1 and row_weights(columns) is not None
        graph = _trace(self._function(loss, batch, dtype), inputs)
        self._watch, started = _Watch(loss, module), time.perf_counter()
        self._runs, how = _runs_of(graph, inputs, self.num_parts, log)
        self.note = f"{how} in {time.perf_counter() - started:.1f} s, threads: {self.num_parts}"

    def _given(self) -> list[Any]:
        state = [getattr(holder, name, None) for holder, name in self._state.values()]
        return [self._weights.values, *state]

    def _kinds_of(self, columns: Mapping[str, Any]) -> list[Any]:
        return [*columns, *map(_kind_of, [*self._given(), *columns.values()])]

    def _split(self, columns: Mapping[str, Any], num_parts: int) -> list[Any]:
        """Return the inputs of each part: an equal share of rows of tensors (B, ...), or all rows.

        They are contiguous, because the machine code assumes the strides of the first call.
        """
        tensors, state = [x for x in columns.values() if isinstance(x, Tensor)], self._given()
        sizes, parts = {len(x) for x in tensors if x.ndim}, [tensors]
        is_split = num_parts == 2 and not state[0].is_cuda and torch.get_num_threads() == 1
        if is_split and len(sizes) == 1 and sizes.pop() % 2 == 0:  # a tensor () goes to both halves
            parts = zip(*(x.chunk(2) if x.ndim else (x, x) for x in tensors), strict=True)
        return [[x.contiguous() for x in (*state, *part)] for part in parts]

    def _function(self, loss: Any, batch: Any, dtype: torch.dtype) -> Callable[..., Any]:
        """Return a function of the vector of weights, the module's other tensors and the batch's.

        It returns the gradient (W,), and float32 (2 + S,): the loss, the scalars, and the share of
        the rows. Gradient, loss and scalars are multiplied by the share, so halves can be added.
        """
        called, share = _Loss(self._weights.module, loss), 1 / self.num_parts
        names = [name for name, x in columns_of(batch) if isinstance(x, Tensor)]

        def gradient_of(vector: Tensor, *others: Tensor) -> Any:
            found = dict(zip([*self._state, *names], others, strict=True))
            state = {path: found[path] for path in self._state}

            def scalar_loss(params: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
                exchanged = {f"module.{name}": x for name, x in {**params, **state}.items()}
                with torch.autocast(vector.device.type, dtype, enabled=dtype != vector.dtype):
                    scalars = functional_call(called, exchanged, (_with_columns(batch, found),))
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
            weight = row_weights(found).sum().to(vector)  # 0 if no row counts: then the mean is NaN
            return tuple(torch.where(weight > 0, x * weight, 0.0) for x in (gradient, values))

        return gradient_of

    def why_not(self, columns: Mapping[str, Any]) -> str:
        """Return why this can't compute the gradient of a batch; "" if it can."""
        if self._kinds_of(columns) != self._kinds:
            return "sizes, nesting, numbers or dtypes of batch or buffers differ from the first"
        changed = self._watch.changed()
        return changed and f"{changed} is not what it was when the loss was compiled"

    @torch.no_grad()
    def __call__(self, columns: Mapping[str, Any]) -> dict[str, Tensor]:
        """Write the gradient; return the loss and the scalars."""
        first, *others = self._split(columns, self.num_parts)
        waiting = [second_thread(os.getpid()).submit(self._runs[1], *inputs) for inputs in others]
        gradient, values = self._runs[0](*first)
        for half in waiting:
            more, more_values = half.result(_LAST_S)
            gradient, values = gradient.add_(more), values + more_values
        if self._is_weighted:
            gradient, values = gradient.div_(values[-1]), values / values[-1]
        self._weights.gradient.copy_(gradient)
        return dict(zip(self._names, values[:-1].unbind(), strict=True))


@cache  # one per process: threads do not survive a fork
def second_thread(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "gradient", torch.set_num_threads, (1,))


def _kind_of(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return type(value), value if isinstance(value, _VALUES) else id(value)
    return value.shape, value.dtype, value.device, value.layout


def _trace(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
    """Trace a function to a graph; `Refusal` if it reads more than its inputs, or changes them."""
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
    fresh: Any = torch.ops.aten.lift_fresh_copy.default  # op for a number that became a tensor
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise Refusal(f"the loss draws random numbers ({node.target}); put them in the batch")
        tensor = getattr(graph, node.target) if node.op == "get_attr" else None
        if isinstance(tensor, Tensor) and any(user.target is not fresh for user in node.users):
            what = f"a tensor {tuple(tensor.shape)} that is neither in the module that it is given"
            raise Refusal(f"the loss reads {what} nor in the batch; make it a buffer, or a column")
    return graph


def _tanh(x: Tensor) -> Tensor:
    """Compute tanh by one exponential, error up to 2e-7: torch's takes a sixth of a gradient."""
    if x.dtype not in (torch.float32, torch.bfloat16):
        return NotImplemented
    return (2 * torch.sigmoid(2 * x.float()) - 1).to(x.dtype)


def _runs_of(graph: Any, inputs: Any, count: int, log: Callable[[str], Any]) -> tuple[Any, str]:
    """Load the package of a graph `count` times; compile it if it is not in the cache folder."""
    folder, device = _cache_folder(), inputs[0].device
    kept = folder / f"{_key_of(graph, inputs)}.pt2"
    if kept.is_file():
        try:
            return [load_package(kept, device) for _ in range(count)], "loaded"
        except Exception:  # the file is damaged
            kept.unlink(missing_ok=True)
    log(f"gradient: compiling for batches of {len(inputs[-1]) if inputs[-1].ndim else 1} rows")
    try:
        with tempfile.TemporaryDirectory(dir=folder) as aside:  # no other process reads here
            compile_graph(graph, [x.detach().clone() for x in inputs], file := Path(aside, "g.pt2"))
            os.replace(file, kept)  # other processes never see half a file
        runs = [load_package(kept, device) for _ in range(count)]
    except Exception as error:
        raise Refusal(f"the loss does not compile ({first_line(error)})") from error
    return runs, "compiled"


def _cache_folder() -> Path:
    """Return the cache folder of compiled gradients; only this user can write to it."""
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
    """Return a hash of all that the machine code depends on."""
    cpuinfo = Path("/proc/cpuinfo")  # the first processor; other machines may share the folder
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
    """Return the type and first line of an error; compilers write pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}".rstrip(": ")


class _Watch:
    """Watch what a loss and its module read apart from tensors: compiled code keeps the old values.

    It follows names in the code: from loss and module to closures, globals, attributes, methods
    and layers. Not noticed are: attributes read by `getattr`; objects that no name leads to;
    items of long lists and of collections other than dicts, lists and sets; and the inside of
    objects of torch (except layers), NumPy and Gymnasium.
    """

    def __init__(self, loss: Any, module: nn.Module) -> None:
        self._names = {"forward", "__call__", "training"}
        self._places: dict[tuple[int, str], tuple[str, Callable[[], Any], Any]] = {}
        size = -1
        while size != (size := len(self._names) + len(self._places)):  # until nothing new is found
            self._seen: dict[int, Any] = {}  # by id; keeps them alive, so that no id is reused
            queue = [("the loss", loss), ("module", module)]
            for label, value in queue:  # the queue grows meanwhile
                if not isinstance(value, _VALUES) and id(value) not in self._seen:
                    self._seen[id(value)] = value
                    queue.extend(self._look_into(value, label))

    def changed(self) -> str:
        """Return the name of something that has changed since, or ""."""
        for label, read, before in self._places.values():
            now = read()
            if now is not before and not _is_same(now, before):
                return label
        return ""

    def _watch(self, holder: Any, key: str, read: Callable[[], Any], label: str) -> tuple[str, Any]:
        """Watch one place; return its label and its value."""
        if not isinstance(value := read(), Tensor | ModuleType):
            self._places.setdefault((id(holder), key), (label, read, value))
        return label, value

    def _look_into(self, value: Any, label: str) -> Iterator[tuple[str, Any]]:
        """Watch the contents of a value; yield them with their labels."""
        if isinstance(value, partial):
            value = value.func, value.args, value.keywords
        elif isinstance(value, MethodType):
            value, label = (value.__func__, value.__self__), label.rpartition(".")[0]
        if isinstance(value, tuple):
            yield from ((label, x) for x in value)
        elif isinstance(value, dict | list | set):
            if len(value) <= _MOST:
                self._watch(value, "items", value.copy, label)
                items = value.items() if isinstance(value, dict) else enumerate(value)
                yield from ((f"{label}.{key}", x) for key, x in items)
        elif _is_watched(value) and isinstance(value, FunctionType):
            given, code = value.__globals__, value.__code__
            self._names.update(names := dict.fromkeys(_names_of(code)))
            for name in filter(given.__contains__, names):
                yield self._watch(given, name, partial(given.get, name), name)
            for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
                yield self._watch(cell, name, partial(getattr, cell, "cell_contents", None), name)
        elif _is_watched(value):
            yield from self._of_object(value, label)

    def _of_object(self, owner: Any, label: str) -> Iterator[tuple[str, Any]]:
        """Watch those attributes of an object, class or Python module whose names are known."""
        if isinstance(owner, nn.Module):
            yield from ((label, getattr(owner, table)) for table in _TABLES)
        for name in [*self._names, *(["__init__"] if isinstance(owner, type) else [])]:
            found = getattr(owner, "__dict__", {}).get(name, getattr_static(owner, name, None))
            if isinstance(found, FunctionType | staticmethod | classmethod | property):
                yield name, getattr(found, "fget", getattr(found, "__func__", found))
            elif found is not None and not isinstance(found, _BUILT_IN):
                read = partial(getattr, owner, name, None)
                yield self._watch(owner, name, read, f"{label}.{name}")


def _is_same(now: Any, before: Any) -> bool:
    """Return whether a value is unchanged; another object with its own attributes counts as new."""
    if now is before or type(now) is not type(before):
        return now is before
    if isinstance(now, dict):
        return [*now] == [*before] and all(map(_is_same, now.values(), before.values()))
    if isinstance(now, list):
        return len(now) == len(before) and all(map(_is_same, now, before))
    return isinstance(now, (*_VALUES, set)) and not isinstance(now, Tensor) and now == before


def _is_watched(value: Any) -> bool:
    """Return whether an object, function, class or module is the user's, or a layer's."""
    is_code = isinstance(value, type | FunctionType | ModuleType)
    holder: Any = value if is_code else type(value)
    name = str(getattr(holder, "__name__" if isinstance(value, ModuleType) else "__module__"))
    package, is_layer = name.partition(".")[0], name.startswith(_LAYERS) and name != _BASE
    return is_layer or not (package in _FOREIGN or (is_code and package in sys.stdlib_module_names))


def _names_of(code: CodeType) -> Iterator[str]:
    yield from (name for name in code.co_names if not name.startswith("__"))
    for inner in code.co_consts:
        yield from _names_of(inner) if isinstance(inner, CodeType) else ()
