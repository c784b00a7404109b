"""StepsBar: the env steps of a training as a bar, and how fast they are made."""

from __future__ import annotations

import time

from rich.progress import Progress

__all__ = ["StepsBar"]


class StepsBar:
    """A bar on the terminal, inside of ``with``; see `Run.progress`."""

    def __init__(self, name: str, steps: int, total_steps: int, *, is_shown: bool = True) -> None:
        self._name, self._first, self._is_shown = name, steps, is_shown
        self._progress = Progress(refresh_per_second=4, disable=not is_shown)
        self._task = self._progress.add_task(name, total=total_steps, completed=steps)
        self._begin_s = time.perf_counter()

    def __enter__(self) -> StepsBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def speed(self, steps: int) -> float:
        """Return the env steps made per second since this was made."""
        return (steps - self._first) / (time.perf_counter() - self._begin_s)

    def show(self, steps: int, text: str | None = None) -> None:
        """Show how many steps are made, and with a text how it goes."""
        description = None if text is None else f"{self._name}: {text}"
        self._progress.update(self._task, completed=steps, description=description)

    def fill(self, steps: int) -> None:
        """Show that no more steps are made than these."""
        self._progress.update(self._task, total=steps)

    def print(self, text: str) -> None:
        """Print a line above the bar."""
        if self._is_shown:
            self._progress.print(text)
