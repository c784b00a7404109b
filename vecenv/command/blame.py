"""Where in a user's own files an error came from: a wrong argument needs no place, a bug does."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

__all__ = ["place_of"]

_INSTALLED = {"site-packages", "dist-packages"}


def place_of(error: BaseException) -> str | None:
    """Return the innermost line of a user's own files that an error passed; None if none did.

    Example:
        >>> place_of(ValueError("raised by nobody")) is None
        True
    """
    package = Path(__file__).parents[1]
    ours = [package, package.parent / "buffers", package.parent / "examples"]
    paths = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if (
            path.is_file()  # not one of "<string>", say
            and not _INSTALLED & set(path.parts)
            and not any(path.resolve().is_relative_to(one.resolve()) for one in [*ours, *paths])
        ):
            return f'File "{path}", line {frame.lineno}, in {frame.name}'
    return None
