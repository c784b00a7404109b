"""What the commands `vecenv compare` and `vecenv trace` do: check paths, run, print, write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from vecenv.backends import TIMED
from vecenv.command import progress_bar
from vecenv.compare.comparison import Options, run_comparison
from vecenv.compare.processes import RunnerError, RunnerProcess
from vecenv.compare.result import Comparison, check_picture
from vecenv.compare.serving import Setting
from vecenv.compare.source import read_source
from vecenv.core.arguments import read_count
from vecenv.files import require_writable
from vecenv.timing.trace import write_events

__all__ = ["compare_and_show", "read_list", "read_numbers", "trace_and_show"]

_WARM_UP_S = 0.3


def compare_and_show(
    options: Options, *, json_path: Path | None, plot_path: Path | None, trace_path: Path | None
) -> Comparison:
    """Run a comparison with a progress bar, print it, and write the files asked for.

    Raises:
        ValueError: There is no such env, or no picture format of that name.
        OSError: One of the paths can't be written; found before anything is run.
        ImportError: The env's module, or matplotlib, is missing.
    """
    for path in filter(None, (json_path, plot_path, trace_path)):
        require_writable(path)
    if plot_path is not None:
        check_picture(plot_path)
    events: list[dict[str, Any]] | None = None if trace_path is None else []
    with progress_bar() as bar:
        task = bar.add_task("starting", total=1.0)

        def show(what: str, share: float) -> None:
            bar.update(task, description=what, completed=share)

        result = run_comparison(options, on_progress=show, events=events)
    Console().print(result)
    if json_path is not None:
        result.to_json(json_path)
    if plot_path is not None and result.measured:
        result.plot(plot_path)
    if trace_path is not None and events is not None:
        write_events(events, trace_path)
    return result


def trace_and_show(setting: Setting, *, num_steps: int, out: Path, timeout: float) -> None:
    """Step an env with timing on, print where the time went, and write the timeline.

    Raises:
        ValueError: There is no such env or backend; too few steps.
        OSError: The file can't be written; found before anything is run.
        RuntimeError: The backend can't be had for this env, or the env failed.
    """
    if setting.backend not in TIMED:
        raise ValueError(f"backend is {setting.backend!r}, expected one of {', '.join(TIMED)}")
    read_count("num_envs", setting.num_envs)
    read_count("steps", num_steps)
    require_writable(out)
    read_source(setting.env, setting.env_kwargs)
    process = RunnerProcess()
    try:
        process.call("open", setting, timeout=timeout)
        process.call("warm_up", _WARM_UP_S, timeout=timeout)
        report, events = process.call("trace", num_steps, timeout=timeout)
    except RunnerError as error:
        raise RuntimeError(f"{setting.backend}: {error}") from error
    except BaseException:
        process.kill()
        raise
    finally:
        process.close()
    write_events(events, out)
    Console().print(report)


def read_list(text: str) -> list[str]:
    """Read "a,b,c".

    Example:
        >>> read_list("loop, sync,")
        ['loop', 'sync']
    """
    return [part.strip() for part in text.split(",") if part.strip()]


def read_numbers(name: str, text: str) -> list[int]:
    """Read "1,8,64".

    Raises:
        ValueError: A part is no integer.
    """
    try:
        return [int(part) for part in read_list(text)]
    except ValueError as error:
        raise ValueError(f"{name} is {text!r}, expected integers such as 1,8,64") from error
