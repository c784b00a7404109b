"""Run: the folder of a training, with its options, scalars, checkpoints and learning curve."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from rich.progress import Progress

from vecenv.files import whole_file, write_json
from vecenv.learn import checkpoint
from vecenv.learn.checkpoint import CheckpointError, RunError
from vecenv.timing.report import new_figure

__all__ = ["Run", "load_options"]

T = TypeVar("T")

_LAST, _BEST = "checkpoint/last.pt", "checkpoint/best.pt"
_METRICS, _OPTIONS = "metrics.jsonl", "options.json"
_logger = logging.getLogger("vecenv")


class Run:
    """The folder of one training, see docs/runs.md.

    In it are `options.json`, see `load_options`; `metrics.jsonl`, a line of JSON per `log`;
    `checkpoint/last.pt` and `checkpoint/best.pt`, see `save`; `curve.png`; and what `write_json`
    writes. In a `with` statement, the first Ctrl-C or SIGTERM sets `should_stop` instead of ending
    the program: the loop saves and ends by itself.

    Args:
        folder: Made if it is not there.
        options: A dataclass or a dict.
        resume: Go on from the last checkpoint, if there is one: `restore` returns it, later lines
            of the metrics are cut.
        may_change: Names of options of which a resumed run may be given other values.
        save_every: Env steps between two checkpoints, for `is_due`; 0 for none on the way.
        tensorboard: Write the scalars for TensorBoard, too.
        overwrite: Delete an earlier run in this folder, which is an error otherwise.

    Attributes:
        should_stop: Whether a signal has asked for the end.
        best_score: The highest score of `save`; None if it was given none.
        not_restored: Of `restore`: names of vector envs that have to be reset, and why.
        curve_steps, curve_returns: Lists of all that `add_episodes` was given.

    Raises:
        RunError: The folder has a run already, or one with other options, or can't be written or
            (a CheckpointError) read; nothing in it was changed.
    """

    def __init__(
        self,
        folder: str | Path,
        options: Any,
        resume: bool = False,
        *,
        may_change: Collection[str] = (),
        save_every: int = 0,
        tensorboard: bool = False,
        overwrite: bool = False,
    ) -> None:
        self.folder, self.save_every, self.should_stop = Path(folder), save_every, False
        self.best_score: float | None = None
        self.not_restored: dict[str, str] = {}
        self.curve_steps, self.curve_returns = list[int](), list[float]()
        self._options = _as_plain(options)
        self._options.pop("resume", None)  # of this session, not of the run
        self._may_change, self._handlers = frozenset(may_change), dict[int, Any]()
        self._begin_s, self._earlier_s = time.perf_counter(), 0.0
        self._saved: dict[str, Any] | None = None
        self._due_at, self._board = 0, cast("Any", None)  # steps of the last checkpoint
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

            first = None if self._saved is None else self._due_at + 1  # it hides later steps
            self._board = SummaryWriter(str(self.folder), purge_step=first)

    def _begin(self, resume: bool, overwrite: bool) -> None:
        """Take over what is in the folder, refuse it, or remove it."""
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
                _logger.warning("%s has no checkpoint yet: the run begins anew", self.folder)
            if metrics.exists():  # cut what is later, and a line that is not whole
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
        for old in self.folder.glob("checkpoint/.*.*.pt"):  # of `whole_file`, when it was killed
            old.unlink(missing_ok=True)
        write_json(own, path)

    def _take_over(self, path: Path) -> int:
        """Read the last checkpoint; return the length of the metrics then."""
        saved = checkpoint.load_checkpoint(path)
        try:
            steps, returns = (column.tolist() for column in saved["curve"])
            self.curve_steps, self.curve_returns = [*map(int, steps)], [*map(float, returns)]
            best, self._earlier_s = saved["best_score"], float(saved["seconds"])
            self.best_score = None if best is None else float(best)
            self._due_at = saved["state"]["steps"] = int(saved["state"]["steps"])
            size = max(int(saved["metrics_bytes"]), 0)
            self._saved = saved | {k: dict(saved[k]) for k in ("unsaved", "random")}
        except Exception as error:  # whatever can be said of values that are others
            raise CheckpointError(f"{path} is no checkpoint of Run: {error!r:.200}") from error
        return size

    def __enter__(self) -> Run:
        self._owner = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) != signal.SIG_IGN:  # as in the background of a script
                    self._handlers[number] = signal.signal(number, self._stop) or signal.SIG_DFL
        return self

    def _stop(self, number: int, frame: Any) -> None:
        """Note that the end is asked for; the next signal acts as without `Run`."""
        for item in self._handlers.items():
            signal.signal(*item)
        self.should_stop = True
        if os.getpid() != self._owner:  # a fork, which has no loop to end
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
        """The command line of this process with `--resume`, to tell how to go on."""
        return shlex.join([*(word for word in sys.orig_argv if word != "--resume"), "--resume"])

    @contextmanager
    def progress(
        self, name: str, steps: int, total: int, *, is_shown: bool = True
    ) -> Iterator[Callable[..., None]]:
        """Show a bar of env steps, `steps` of `total` at first, while a ``with`` statement runs.

        It gives a function `show(steps, text="")` that moves the bar and says how it goes.
        """
        with Progress(refresh_per_second=4, disable=not is_shown) as bar:
            task = bar.add_task(name, total=total, completed=steps)
            yield lambda steps, text="": bar.update(
                task, completed=steps, description=f"{name}: {text}" if text else None
            )

    @property
    def seconds(self) -> float:
        """How long the run has taken, those before it was resumed included."""
        return self._earlier_s + time.perf_counter() - self._begin_s

    def log(self, steps: int, scalars: Mapping[str, Any]) -> None:
        """Add a line to the metrics, `steps`, `seconds` and the scalars, and to TensorBoard.

        `scalars` are numbers, or tensors and arrays of one, by name; NaN and infinity become null.

        Raises:
            OSError: The disk is full; the lines before are whole.
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
        """Add the returns (E,) of episodes that have ended after so many env steps to the curve."""
        values = torch.as_tensor(returns, dtype=torch.float64).flatten().tolist()
        self.curve_steps.extend([int(steps)] * len(values))
        self.curve_returns.extend(values)

    def recent_return(self, count: int = 20) -> float:
        """Return the mean return of the last episodes; NaN if none has ended."""
        last = self.curve_returns[-count:]
        return sum(last) / len(last) if last else math.nan

    def draw_curve(self, title: str = "", baselines: Mapping[str, float] | None = None) -> None:
        """Draw the returns of `add_episodes` into `curve.png`, with their moving average.

        Beside them are lines of `baselines`, returns of other policies by their names. Without
        episodes, or without matplotlib, nothing is drawn.
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
            label = f"{policy}: {value:.1f}"
            axes.axhline(value, color=f"C{number}", linestyle="--", label=label)
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
        """Write the last checkpoint, each as a whole, and the best one if no score was higher.

        Args:
            state: Env steps made so far as "steps", and by name objects with a `state_dict`
                (modules, optimizers, schedulers, buffers, vector envs), generators of torch and
                NumPy, and plain values: tensors, arrays, numbers, strings, bytes, None, dicts,
                lists, tuples. Global random streams are saved, too.
            score: Of an evaluation, higher is better; None if there was none.

        Returns:
            The path of the last checkpoint.

        Raises:
            CheckpointError: The disk is full, or a module has NaN or infinity in it; the
                checkpoint before stays.
            KeyError, TypeError: `state` lacks "steps", or holds what can't be saved.
        """
        steps, last = int(state["steps"]), self.folder / _LAST
        scores = [-math.inf if x is None else float(x) for x in (score, self.best_score)]
        is_best = scores[0] > scores[1]  # never of NaN
        content = {
            **checkpoint.states_of(state),
            "options": self._options,
            "curve": (np.array(self.curve_steps, np.int64), np.array(self.curve_returns)),
            "seconds": self.seconds,
            "metrics_bytes": os.fstat(self._metrics.fileno()).st_size,
            "best_score": scores[0] if is_best else self.best_score,
        }
        if content["unsaved"] and not self._due_at:
            _logger.warning("a resumed run resets what can't be saved: %s", content["unsaved"])
        try:
            if is_best:  # first: killed in between, the run goes on and finds it the best again
                checkpoint.save_checkpoint(self.folder / _BEST, content)
            checkpoint.save_checkpoint(last, content)
        except OSError as error:
            what = f"the checkpoint of step {steps} can't be written: {error}; the one before stays"
            raise CheckpointError(f"{what}: go on with {self.resume_command}") from error
        self.best_score, self._due_at = content["best_score"], steps
        return last

    def restore(self, parts: Mapping[str, Any]) -> dict[str, Any] | None:
        """Bring objects into the state of the last checkpoint, if the run is resumed and has one.

        `parts` are objects by their names in `save`. Global random streams go on from where they
        were, too: call it after all that draws from them has been made.

        Returns:
            The rest of what `save` was given; None if the run begins anew.

        Raises:
            CheckpointError: The checkpoint is of other modules or envs.
        """
        if self._saved is None:
            return None
        self.not_restored = checkpoint.restore_parts(parts, self._saved, self.folder / _LAST)
        return dict(self._saved["state"])


def _with_nulls(value: Any) -> Any:
    """Return plain values as JSON can have them, which has no NaN."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def load_options(folder: str | Path, kind: type[T]) -> T:
    """Return the options that the run in a folder was begun with, `kind` being their dataclass.

    Fields have the values of JSON, but tuples and paths where their defaults are such, and their
    default where the file lacks them: `tyro.cli(Options, default=load_options(folder, Options))`.

    Raises:
        ValueError: The file holds something else than these options; the sentence names it.
        OSError: It can't be read.
    """
    path = Path(folder) / _OPTIONS
    try:
        found, made = _read_options(path), cast("Any", kind)
        for field in dataclasses.fields(made):
            if found.get(field.name) is not None and isinstance(field.default, tuple | Path):
                found[field.name] = type(field.default)(found[field.name])
        return made(**found)
    except (TypeError, ValueError, RunError) as error:
        raise ValueError(
            f"{path} does not hold options of {kind.__name__} ({error!s:.200}); take the program "
            "that wrote it, or another folder"
        ) from error


def _as_plain(options: Any) -> dict[str, Any]:
    """Return options as what JSON has."""
    try:
        found = options if isinstance(options, dict) else vars(options)
        return json.loads(json.dumps(found, default=os.fspath))
    except TypeError as error:
        wanted = "a dataclass or a dict of what JSON has, and paths"
        raise TypeError(f"options are {options!r:.200}, expected {wanted} ({error})") from None


def _read_options(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError, RecursionError) as error:
        what = f"{path} has no options in JSON ({error!s:.200})"
        raise RunError(f"{what}; mend it, or take another folder") from error
