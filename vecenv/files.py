"""Write files as a whole or not at all; store arrays in files that can't run code when loaded.

Saved policies are NumPy archives (npz) of plain arrays and a JSON text, without pickles.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "load_arrays",
    "read_entry",
    "read_npz",
    "require_writable",
    "save_arrays",
    "whole_file",
    "write_json",
    "write_text",
]

_MAX_NAMED = 32  # letters of a file's name that the temporary name contains


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield another path to write to, and move that file to `path` at the end.

    If something fails on the way, such as a full disk, `path` is unchanged. The other name can't
    be guessed and has the same ending; an empty file of the same mode has it already. If `path` is
    no regular file, such as /dev/stdout, it is written directly, and so is a file in a folder in
    which no file can be created.

    Raises:
        OSError: The file can't be written; names the file.
    """
    path = Path(path)
    final = Path(os.path.realpath(path))  # the target of a link
    if path.exists() and not (path.is_file() and os.access(final.parent, os.W_OK)):
        yield path
        return
    name = f".{final.stem[:_MAX_NAMED]}.{secrets.token_hex(8)}{final.suffix}"
    aside, is_made = final.with_name(name), False
    try:
        aside.open("xb").close()  # follows no link
        is_made = True
        if final.exists():
            shutil.copymode(final, aside)
        yield aside
        aside.replace(final)
    except OSError as error:
        if error.errno and error.filename in (None, str(aside), str(final)):
            error.filename = str(path)
            if error.filename2 is not None:
                del error.filename2
        raise
    finally:
        if is_made:
            aside.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file (UTF-8) as a whole or not at all; errors name it."""
    with whole_file(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(
    content: Any, path: str | Path | None, default: Callable[[Any], Any] | None = None
) -> str:
    """Return results as JSON, and write them to a file if there is a path.

    `default` converts what is no number, string, list or dict; None refuses it.
    """
    text = json.dumps(content, indent=2, default=default)
    if path is not None:
        write_text(path, text + "\n")
    return text


def require_writable(path: Path) -> None:
    """Raise OSError if a file can't be written; nothing that exists is changed or removed."""
    final = Path(os.path.realpath(path))
    if final.is_dir():
        number = errno.EISDIR
    elif not final.parent.is_dir():
        number = errno.ENOENT
    elif os.access(final if final.exists() else final.parent, os.W_OK):
        return
    else:
        number = errno.EACCES
    told = f"there is no folder {final.parent}" if number == errno.ENOENT else os.strerror(number)
    raise OSError(number, f"it can't be written ({told})", str(path))


def read_npz(path: str | Path) -> dict[str, np.ndarray]:
    """Read arrays by name, writable, as `numpy.savez` writes them; no code in the file is run.

    Raises:
        ValueError: The file is something else, or damaged.
    """
    with Path(path).open("rb") as file:
        try:
            with np.load(file, allow_pickle=False) as archive:
                return {name: _with_bools(archive[name]) for name in archive}
        except Exception as error:  # reading a file of unknown origin may raise anything
            raise ValueError(
                f"{path} is no archive of arrays as `numpy.savez` writes them: {error!s:.300}"
            ) from error


def _with_bools(array: np.ndarray) -> np.ndarray:
    """Return an array of numbers, bools or strings; refuse other dtypes, and bools not 0 or 1."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biufU":
        raise ValueError("it has a part that is no array of numbers, bools or strings")
    if array.dtype.kind == "b" and np.ascontiguousarray(array).view(np.uint8).max(initial=0) > 1:
        raise ValueError("it has bytes in place of bools that are none")
    return array


def read_entry(
    state: Mapping[str, Any], name: str, accepts: Callable[[np.dtype, tuple[int, ...]], bool]
) -> np.ndarray:
    """Return a copy of an array in a mapping, such as the result of `numpy.load`.

    Raises:
        ValueError: It can't be read, has bools that are not 0 or 1, or `accepts(dtype, shape)`
            returns False or raises.
    """
    try:
        found = np.array(state[name])
        if not accepts(found.dtype, found.shape):
            raise ValueError("it is not what was expected")
        if found.dtype.names is None:
            return _with_bools(found) if found.dtype.kind != "V" else found
        for field in found.dtype.names:
            if found.dtype[field].kind == "b":
                _with_bools(found[field])
        return found
    except Exception as error:  # reading a file of unknown origin may raise anything
        raise ValueError(f"state[{name!r}] can't be read: {error!s:.1000}") from error


def save_arrays(
    path: str | Path, arrays: Mapping[str, Any], facts: Mapping[str, Any] | None = None
) -> None:
    """Write arrays by name and facts, as a whole or not at all, into a file for `load_arrays`.

    It is an npz archive without pickles.

    Args:
        path: The file; its ending is not changed.
        arrays: What `numpy.asarray` converts to numbers, bools or strings, such as CPU tensors; no
            name is "facts".
        facts: Numbers, strings, lists and dicts, kept as JSON.

    Raises:
        TypeError: An array, or a fact, is something else.
    """
    found: dict[str, Any] = {name: np.asarray(array) for name, array in arrays.items()}
    for name, array in found.items():
        if array.dtype.kind not in "biufU":
            raise TypeError(f"{name} can't be saved: it is an array of {array.dtype}")
    text = json.dumps(dict(facts or {}))
    with whole_file(path) as aside, aside.open("wb") as file:
        np.savez(file, facts=np.array(text), **found)


def load_arrays(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read arrays and facts from a file of `save_arrays`, from any source: no code in it is run.

    Raises:
        ValueError: The file holds something else, or is damaged.
    """
    arrays = read_npz(path)
    with contextlib.suppress(LookupError, ValueError, RecursionError):
        if isinstance(facts := json.loads(str(arrays.pop("facts"))), dict):
            return arrays, facts
    raise ValueError(f"{path} has no facts beside its arrays, as `save_arrays` writes them")
