"""Run: the folder of a training, with its options, scalars, checkpoints and learning curve.

A checkpoint is a file of `torch.save`, written completely or not at all, and read with
`weights_only=True`. Bytes (pickled envs) are signed with a key that only this user can read, and
are read only if the signature is right: unpickling runs code.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import logging
import math
import os
import random
import secrets
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from rich.progress import Progress
from torch import Tensor, nn

from vecenv.core.errors import EnvStateError
from vecenv.files import whole_file, write_json
from vecenv.timing.report import as_number, new_figure

__all__ = ["CheckpointError", "Run", "RunError", "load_checkpoint", "load_options"]

T = TypeVar("T")

_LAST, _BEST = "checkpoint/last.pt", "checkpoint/best.pt"
_METRICS, _OPTIONS = "metrics.jsonl", "options.json"
FORMAT = "vecenv checkpoint 3"
_LINE_S = 30.0  # between lines of progress where there is no terminal
_SIGHUP = getattr(signal, "SIGHUP", None)  # not on Windows
_MARK = "\0what"  # key of a dict that stands for an array (False) or bytes (signature)
_logger = logging.getLogger("vecenv")


class RunError(RuntimeError):
    """A run can't be begun, saved or resumed; its folder keeps its content."""


class CheckpointError(RunError):
    """A checkpoint can't be read, can't be written, or is of another training."""


class Run:
    """The folder of one training, see docs/runs.md.

    It holds `options.json`, see `load_options`; `metrics.jsonl`, a line of JSON per `log`;
    `checkpoint/last.pt` and `checkpoint/best.pt`, see `save`; `curve.png`; and the files of
    `write_json`. In a `with` statement, the first Ctrl-C, SIGTERM or SIGHUP only sets
    `should_stop`: the training loop must then save and end.

    Args:
        folder: Created if missing.
        options: A dataclass or a dict, of JSON values and paths; TypeError for other values.
        resume: Go on from the last checkpoint, if there is one: `restore` returns it, and later
            lines of the metrics are cut off.
        may_change: Names of options that may differ when the run is resumed.
        save_every: Env steps between two checkpoints, for `is_due`; 0 for none before the end.
        tensorboard: Also write the scalars for TensorBoard.
        overwrite: Delete an earlier run in this folder; otherwise an earlier run is an error.

    Attributes:
        should_stop: Whether a signal has asked the run to end.
        best_score: The highest score passed to `save`; None if there was none.
        not_restored: Set by `restore`: names of vector envs that must be reset, with the reason.
        curve_steps, curve_returns: Lists of all values passed to `add_episodes`.

    Raises:
        RunError: The folder has a run already, or one with other options, or can't be written, or
            (a CheckpointError) can't be read; nothing in it was changed.
    """

    def __init__(
        self, folder: str | Path, options: Any, resume: bool = False, *,
        may_change: Collection[str] = (), save_every: int = 0, tensorboard: bool = False,
        overwrite: bool = False,
    ) -> None:  # fmt: skip
        self.folder, self.save_every, self.should_stop = Path(folder), save_every, False
        self.best_score: float | None = None
        self.not_restored: dict[str, str] = {}
        self.curve_steps, self.curve_returns = list[int](), list[float]()
        found = options if isinstance(options, dict) else vars(options)
        self._options = json.loads(json.dumps(found, default=os.fspath))
        self._options.pop("resume", None)  # belongs to this session, not to the run
        self._may_change, self._handlers = frozenset(may_change), dict[int, Any]()
        self._begin_s, self._earlier_s = time.perf_counter(), 0.0
        self._saved: dict[str, Any] | None = None
        self._due_at, self._board = 0, cast("Any", None)  # env steps at the last checkpoint
        if tensorboard and find_spec("tensorboard") is None:
            raise RunError("tensorboard is missing: pip install 'vecenv[tensorboard]'")
        try:
            (self.folder / "checkpoint").mkdir(parents=True, exist_ok=True)
            self._begin(resume, overwrite)
            self._metrics = (self.folder / _METRICS).open("ab", buffering=0)
        except OSError as error:
            where, reason = error.filename or self.folder, error.strerror or error
            raise RunError(f"{where}: {reason}; choose another folder with --save") from error
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            first = None if self._saved is None else self._due_at + 1  # hides the later steps
            self._board = SummaryWriter(str(self.folder), purge_step=first)

    def _begin(self, resume: bool, overwrite: bool) -> None:
        """Take over the run in the folder, refuse it, or delete it."""
        metrics, last, size = self.folder / _METRICS, self.folder / _LAST, 0
        path, own = self.folder / _OPTIONS, self._options
        if resume:
            had = _read_options(path) if path.exists() else own
            for name in sorted({**own, **had}.keys() - self._may_change):
                before, now = (json.dumps(x.get(name, "(nothing)")) for x in (had, own))
                if before != now:
                    told = f"{path} is of a run with {name} = {before:.200}, this one has "
                    told += f"{now:.200}: give the same options (see load_options)"
                    raise RunError(f"{told}, or another folder")
            if last.exists():
                size = self._take_over(last)
            else:
                _logger.warning("%s has no checkpoint yet: --resume begins a new run", self.folder)
            if metrics.exists():  # cut off later lines, and an incomplete last line
                with metrics.open("rb+") as file:
                    file.truncate(file.read()[:size].rfind(b"\n") + 1)
        elif overwrite:
            boards = self.folder.glob("events.out.tfevents.*")
            for old in [last, self.folder / _BEST, metrics, self.folder / "curve.png", *boards]:
                old.unlink(missing_ok=True)
        elif last.exists() or (metrics.exists() and metrics.stat().st_size > 0):
            told = f"{self.folder} has a run already: go on with it by resume=True (--resume), "
            told += "delete it by overwrite=True (--overwrite), or choose another folder (--save)"
            raise RunError(told)
        for old in self.folder.glob("checkpoint/.*.*.pt"):  # left by a killed `whole_file`
            old.unlink(missing_ok=True)
        write_json(own, path)

    def _take_over(self, path: Path) -> int:
        """Read the last checkpoint; return the length of the metrics at that time."""
        saved = load_checkpoint(path)
        try:
            steps, returns = (column.tolist() for column in saved["curve"])
            self.curve_steps, self.curve_returns = [*map(int, steps)], [*map(float, returns)]
            best, self._earlier_s = saved["best_score"], float(saved["seconds"])
            self.best_score = None if best is None else float(best)
            self._due_at = saved["state"]["steps"] = int(saved["state"]["steps"])
            size = max(int(saved["metrics_bytes"]), 0)
            self._saved = saved | {k: dict(saved[k]) for k in ("unsaved", "random")}
        except Exception as error:  # wrong values may raise anything
            raise CheckpointError(f"{path} is no checkpoint of Run: {error!r:.200}") from error
        return size

    def __enter__(self) -> Run:
        self._owner = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in filter(None, (signal.SIGINT, signal.SIGTERM, _SIGHUP)):
                if signal.getsignal(number) != signal.SIG_IGN:  # ignored in a script's background
                    self._handlers[number] = signal.signal(number, self._stop) or signal.SIG_DFL
        return self

    def _stop(self, number: int, frame: Any) -> None:
        """Note the request to end; the next signal acts as without `Run`."""
        for item in self._handlers.items():
            signal.signal(*item)
        self.should_stop = True
        for output in (1, 2) if number == _SIGHUP else ():  # a closed terminal can't be printed to
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        if os.getpid() != self._owner:  # a forked process, which has no loop to end
            signal.raise_signal(number)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and give back the signals. May be called twice."""
        while self._handlers:
            signal.signal(*self._handlers.popitem())
        if self._board is not None:
            self._board.close()
        self._metrics.close()

    @property
    def resume_command(self) -> str:
        """The command line of this process with `--resume`, for messages."""
        words, program = [sys.executable, *sys.orig_argv[1:]], sys.argv[0]
        if os.access(program, os.X_OK) and not program.endswith(".py"):  # installed by pip
            words = sys.argv
        return shlex.join([*(word for word in words if word != "--resume"), "--resume"])

    @contextmanager
    def progress(
        self, name: str, steps: int, total: int, *, is_shown: bool = True
    ) -> Iterator[Callable[..., None]]:
        """Show a progress bar from `steps` to `total` env steps during a ``with`` statement.

        It yields a function `show(steps, text="")` that moves the bar and shows the text. Where
        there is no terminal, such as in a log file, it prints a line every half minute instead.
        """
        with Progress(refresh_per_second=4, disable=not is_shown) as bar:
            task = bar.add_task(name, total=total, completed=steps)
            is_bar = not is_shown or bar.console.is_terminal or bar.console.is_jupyter
            latest = time.perf_counter()

            def show(steps: int, text: str = "") -> None:
                nonlocal latest
                told = f"{name}: {text}" if text else None
                bar.update(task, completed=steps, description=told)
                if not is_bar and told and time.perf_counter() - latest >= _LINE_S:
                    bar.console.out(f"{told}, {steps:,} of {total:,} steps", highlight=False)
                    latest = time.perf_counter()

            yield show

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken, earlier sessions included."""
        return self._earlier_s + time.perf_counter() - self._begin_s

    def log(self, steps: int, scalars: Mapping[str, Any]) -> None:
        """Add a line (`steps`, `seconds` and the scalars) to the metrics, and to TensorBoard.

        `scalars` are numbers, or tensors and arrays of one, by name; NaN and infinity become null.

        Raises:
            OSError: The disk is full; earlier lines are intact.
        """
        numbers = {name: float(getattr(x, "item", lambda x=x: x)()) for name, x in scalars.items()}
        line = {"steps": int(steps), "seconds": round(self.seconds, 3), **_with_nulls(numbers)}
        text, before = json.dumps(line).encode() + b"\n", os.fstat(self._metrics.fileno()).st_size
        if self._metrics.write(text) != len(text):
            self._metrics.truncate(before)
            raise OSError(f"{self.folder / _METRICS}: no space left on the device")
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, int(steps))

    def add_episodes(self, steps: int, returns: Any) -> None:
        """Add the returns (E,) of episodes that ended, at `steps` env steps, to the curve."""
        values = torch.as_tensor(returns, dtype=torch.float64).flatten().tolist()
        self.curve_steps.extend([int(steps)] * len(values))
        self.curve_returns.extend(values)

    def recent_return(self, count: int = 20) -> float:
        """Return the mean return of the last `count` episodes; NaN if none has ended."""
        last = self.curve_returns[-count:]
        return sum(last) / len(last) if last else math.nan

    def draw_curve(self, title: str = "", baselines: Mapping[str, float] | None = None) -> None:
        """Draw the returns of `add_episodes` into `curve.png`, with their moving average.

        `baselines` adds lines: mean returns of other policies by name. Without episodes, or without
        matplotlib, nothing is drawn.
        """
        if not self.curve_steps:
            return
        try:
            figure = new_figure(8, 4.5)
        except ImportError as error:
            return _logger.warning("the curve has not been drawn: %s", error)
        axes = figure.subplots()
        steps, returns = np.array(self.curve_steps), np.array(self.curve_returns)
        window = min(max(20, len(steps) // 100), len(steps))
        means = np.convolve(returns, np.full(window, 1 / window), "valid")
        unit, name = (1e6, "millions") if steps[-1] >= 1e6 else (1e3, "thousands")
        axes.plot(steps / unit, returns, ".", markersize=3, alpha=0.25, label="an episode")
        label = f"mean of the last {window}"
        axes.plot(steps[window - 1 :] / unit, means, color="black", label=label)
        for number, (policy, value) in enumerate((baselines or {}).items(), 1):
            axes.axhline(value, color=f"C{number}", ls="--", label=f"{policy}: {as_number(value)}")
        axes.set(title=title, xlabel=f"env steps ({name})", ylabel="return of an episode")
        axes.legend(loc="best", fontsize="small")
        with whole_file(self.folder / "curve.png") as aside:
            figure.savefig(aside, dpi=150)

    def write_json(self, name: str, value: Any) -> None:
        """Write plain values into `<name>.json`; NaN and infinity are null, as in the metrics."""
        write_json(_with_nulls(value), self.folder / f"{name}.json")

    def is_due(self, steps: int) -> bool:
        """Return whether a multiple of `save_every` was passed since the last checkpoint."""
        return self.save_every > 0 and steps // self.save_every > self._due_at // self.save_every

    def save(self, state: Mapping[str, Any], *, score: float | None = None) -> Path:
        """Write the last checkpoint, and also the best one if no earlier score was as high.

        Args:
            state: Number of env steps so far as "steps". Also, by name: objects with a `state_dict`
                (modules, optimizers, schedulers, buffers, vector envs); generators of torch and
                NumPy; plain values: tensors, arrays, numbers, strings, bytes, None, dicts, lists,
                tuples. Global random streams are always saved.
            score: Score of an evaluation, higher is better; None if there was none.

        Returns:
            The path of the last checkpoint.

        Raises:
            CheckpointError: The disk is full, or a module contains NaN or infinity; the previous
                checkpoint stays.
            ValueError, TypeError: `state` lacks "steps", or holds something that can't be saved.
        """
        if "steps" not in state:
            told = 'give the number of env steps so far, run.save({..., "steps": steps})'
            raise ValueError(f'state lacks "steps": {told}')
        steps, last = int(state["steps"]), self.folder / _LAST
        scores = [-math.inf if x is None else float(x) for x in (score, self.best_score)]
        is_best = scores[0] > scores[1]  # False for NaN
        content = {
            **_states_of(state),
            "options": self._options,
            "curve": (np.array(self.curve_steps, np.int64), np.array(self.curve_returns)),
            "seconds": self.seconds,
            "metrics_bytes": os.fstat(self._metrics.fileno()).st_size,  # a resumed run cuts there
            "best_score": scores[0] if is_best else self.best_score,
        }
        if content["unsaved"] and not self._due_at:
            _logger.warning("a resumed run resets what can't be saved: %s", content["unsaved"])
        try:
            if is_best:  # first: a run killed in between resumes and finds the best again
                save_checkpoint(self.folder / _BEST, content)
            save_checkpoint(last, content)
        except OSError as error:
            what = f"the checkpoint of step {steps} can't be written: {error}; the one before stays"
            raise CheckpointError(f"{what}: go on with {self.resume_command}") from error
        self.best_score, self._due_at = content["best_score"], steps
        return last

    def restore(self, parts: Mapping[str, Any]) -> dict[str, Any] | None:
        """Load the last checkpoint into objects, if the run is resumed and has a checkpoint.

        `parts` are the objects by their names in `save`. Global random streams are restored, too:
        call this after creating everything that draws from them.

        Returns:
            The rest of the `state` of `save`; None if the run begins anew.

        Raises:
            CheckpointError: The checkpoint is of other modules or envs.
        """
        if self._saved is None:
            return None
        saved, path, name = self._saved, self.folder / _LAST, ""
        self.not_restored = {}
        try:
            for name, part in parts.items():
                try:
                    state = saved["state"].pop(name)
                    if name in saved["unsaved"]:
                        raise EnvStateError(saved["unsaved"][name])
                    _restore(part, state)
                except EnvStateError as error:
                    self.not_restored[name] = str(error)
                    _logger.warning("%s: not as they were, they were reset: %s", name, error)
            name, streams = "the random streams", saved["random"]
            torch.set_rng_state(streams["torch"])
            np.random.set_state(_checked(streams["numpy"]))  # noqa: NPY002
            random.setstate(streams["python"])
            if "cuda" in streams and torch.cuda.is_available():
                torch.cuda.set_rng_state_all(streams["cuda"][: torch.cuda.device_count()])
        except Exception as error:  # raised by any `load_state_dict` or setter of a random stream
            problem = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            what = f"{path} does not fit {name}: {' '.join(problem.split()):.500}"
            raise CheckpointError(f"{what}; make {name} as it was, or begin anew") from error
        return dict(saved["state"])


def _with_nulls(value: Any) -> Any:
    """Return plain values with null for NaN and infinity, which JSON lacks."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def load_options(folder: str | Path, kind: type[T]) -> T:
    """Return the options of the run in a folder, as an instance of their dataclass `kind`.

    Fields have JSON values; lists and strings become tuples and paths where their types say so.
    Missing fields get their default: `tyro.cli(Options, default=load_options(folder, Options))`.

    Raises:
        ValueError: The file does not hold these options; the message says why.
        OSError: It can't be read.
    """
    path = Path(folder) / _OPTIONS
    try:
        found, made = _read_options(path), cast("Any", kind)
        for name, hint in get_type_hints(made).items():
            kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
            kind_of: Any = {list: tuple, str: Path}.get(type(found.get(name)))
            if kind_of in [get_origin(one) or one for one in kinds]:
                found[name] = kind_of(found[name])
        return made(**found)
    except (TypeError, ValueError, RunError) as error:
        what = f"{path} does not hold options of {kind.__name__} ({error!s:.200})"
        raise ValueError(f"{what}; take the program that wrote it") from error


def _read_options(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError, RecursionError) as error:
        what = f"{path} has no options in JSON ({error!s:.200})"
        raise RunError(f"{what}; mend it, or take another folder") from error


def save_checkpoint(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a checkpoint, completely or not at all, and wait until it is on the disk.

    `content` may hold tensors, arrays, numbers, strings, bytes, None, and dicts, lists and tuples
    of them. TypeError for other values; OSError if it can't be written.
    """
    packed = {"format": FORMAT, "content": _pack(dict(content), "state")}
    try:
        with whole_file(path) as aside, aside.open("wb") as file:
            torch.save(packed, file)
            file.flush()
            os.fsync(file.fileno())  # without it, a power cut might leave an empty file
    except RuntimeError as error:  # raised by torch's writer if writing fails
        raise OSError(f"{path}: {str(error).splitlines()[0]:.200}") from error


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint; nothing in the file is executed.

    Returns:
        The saved content: tensors on the CPU, None for bytes not signed by this user. In a
        checkpoint of `Run`, `["state"]` is the `state` of `Run.save`.

    Raises:
        CheckpointError: The file is no checkpoint, has another version, or is damaged.
        OSError: It can't be read.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if (found := saved["format"]) != FORMAT:
            raise ValueError(f"it has the format {found!r:.99}, expected {FORMAT!r}")
        return dict(_unpack(saved["content"]))
    except Exception as error:  # torch raises many types
        if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
            raise
        what = f"{path} is no checkpoint, or damaged, or of another version ({error!s:.200})"
        raise CheckpointError(f"{what}; take another one, such as best.pt beside it") from error


def _states_of(parts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the states of parts and of global random streams, and why some envs have no state."""
    states, unsaved = {}, {}
    for name, part in parts.items():
        try:
            states[name] = state = _state_of(part)
        except EnvStateError as error:
            states[name], unsaved[name], state = None, str(error), {}
        for entry, tensor in state.items() if isinstance(part, nn.Module) else ():
            if isinstance(tensor, Tensor) and not torch.isfinite(tensor).all():
                what = f"{name} has NaN or infinity in {entry}, so no checkpoint is written"
                raise CheckpointError(f"{what}; go on from the one before with other options")
    streams: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 - code of users' may use it
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        streams["cuda"] = torch.cuda.get_rng_state_all()
    return {"state": states, "unsaved": unsaved, "random": streams}


def _state_of(part: Any) -> Any:
    if isinstance(part, torch.Generator | np.random.Generator):
        return part.get_state() if isinstance(part, torch.Generator) else part.bit_generator.state
    if hasattr(part, "load_state_dict"):
        return part.state_dict()
    if isinstance(part, VectorEnv):
        raise EnvStateError(f"{type(part).__name__} has no state_dict")
    return part


def _restore(part: Any, state: Any) -> None:
    """Load a state into a part; if it does not fit, the part raises its own error."""
    if isinstance(part, torch.Generator):
        part.set_state(state)
    elif isinstance(part, np.random.Generator):
        part.bit_generator.state = _checked(state)
    else:
        part.load_state_dict(state)
    found: Any = part.state if isinstance(part, torch.optim.Optimizer) else {}
    for p, of_parameter in found.items():
        for name, x in of_parameter.items():  # torch's fused kernels write past shorter ones
            shape = () if name == "step" else p.shape
            if isinstance(x, Tensor) and (x.shape != shape or x.dtype != torch.float32):
                found.clear()
                raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, expected {tuple(shape)}")


def _checked(state: Any) -> Any:
    """Return the state of a NumPy generator after a check: NumPy uses its positions unchecked."""
    place, other = state["state"].get("pos", 0), state.get("buffer_pos", 0)
    if not (type(place) is type(other) is int and 0 <= place <= 624 and 0 <= other <= 4):
        raise ValueError("a wrong position in the random numbers")
    return state


def _pack(value: Any, where: str) -> Any:
    """Convert a state to tensors and plain values only."""
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor) and value.layout == torch.strided:
        plain = value.detach().cpu()
        is_part = plain.untyped_storage().nbytes() != plain.numel() * plain.element_size()
        return plain.clone() if is_part else plain  # torch would write the whole storage
    if isinstance(value, Mapping):
        return {_pack(key, where): _pack(x, f"{where}[{key!r}]") for key, x in value.items()}
    if isinstance(value, list | tuple):
        items = [_pack(item, f"{where}[{n}]") for n, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    signature = False
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        np.lib.format.write_array(file := io.BytesIO(), value, allow_pickle=False)
        content = file.getvalue()
    elif isinstance(value, bytes):
        signature, content = _signature(value, create=True), value
    else:
        wanted = "dense tensors, arrays, numbers, strings, bytes, None, and nests of them"
        raise TypeError(f"{where} is {type(value).__name__}, expected {wanted}")
    return {_MARK: (signature, torch.from_numpy(np.frombuffer(bytearray(content), np.uint8)))}


def _unpack(packed: Any) -> Any:
    """Undo `_pack`; bytes that are not signed become None."""
    if isinstance(packed, list | tuple):
        return type(packed)(map(_unpack, packed))
    if isinstance(packed, Tensor):
        size = packed.numel() * packed.element_size()
        if packed.layout != torch.strided or size > packed.untyped_storage().nbytes():
            raise ValueError(f"a tensor {tuple(packed.shape)} without so much memory")
        return packed.detach()
    if packed is None or type(packed) in (bool, int, float, str):
        return packed
    if not isinstance(packed, dict):
        raise ValueError(f"it has a {type(packed).__name__}")
    if _MARK not in packed:
        return {name: _unpack(item) for name, item in packed.items()}
    signature, tensor = packed[_MARK]
    content = _unpack(tensor).numpy().tobytes()
    if not isinstance(signature, str):
        return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    return content if signature and hmac.compare_digest(signature, _signature(content)) else None


def _signature(content: bytes, *, create: bool = False) -> str:
    """Sign with this user's key, made at the first use; "" if there is none."""
    home = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    path = Path(home) / "vecenv" / "checkpoint.key"
    with suppress(OSError):
        if create and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as aside:
                aside.chmod(0o600)
                aside.write_bytes(secrets.token_bytes(32))
        if key := path.read_bytes():
            return hmac.new(key, content, hashlib.sha256).hexdigest()
    return ""
