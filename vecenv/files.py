"""Files written as a whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["require_writable", "whole_file", "write_text"]


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Give another path to write to, and put that file in the place of `path` at the end.

    If something goes wrong on the way, on a full disk for example, `path` is as it was. The other
    name has the same ending. What is no regular file, such as /dev/stdout, is written to itself,
    and so is a file in a folder where no other can be made.

    Raises:
        OSError: It can't be written; names the file.
    """
    path = Path(path)
    final = path.resolve()  # of a link, what it leads to
    if path.exists() and not (path.is_file() and os.access(final.parent, os.W_OK)):
        yield path
        return
    aside = final.with_name(f".{final.stem}.{os.getpid()}{final.suffix}")
    try:
        yield aside
        if final.exists():
            shutil.copymode(final, aside)
        aside.replace(final)
    except OSError as error:
        if error.filename in (None, str(aside)):
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, UTF-8, as a whole or not at all.

    Raises:
        OSError: It can't be written; names the file.
    """
    with whole_file(path) as aside:
        aside.write_text(text, encoding="utf-8")


def require_writable(path: Path) -> None:
    """Find out now whether a file can be written; one that exists keeps what is in it.

    Raises:
        OSError: It can't.
    """
    existed = path.exists()
    with path.open("a"):
        pass
    if not existed:
        path.unlink()
