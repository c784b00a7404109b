"""The command `vecenv`; its parts share one progress bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["progress"]


@contextmanager
def progress(what: str, total: float | None = None) -> Iterator[Callable[..., Any]]:
    """Show a progress bar on stderr, if that is a terminal.

    Args:
        what: The first work.
        total: All work; None if it is not known yet.

    Yields:
        A function to call with `description`, `advance`, `completed` or `total`.
    """
    console = Console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()
    options: Any = {"console": console, "transient": True, "disable": not console.is_terminal}
    with Progress(*columns, **options) as bar:
        yield partial(bar.update, bar.add_task(what, total=total))
