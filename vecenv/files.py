"""Files written as a whole or not at all; arrays in files that are read without believing them.

Saved policies are NumPy archives (npz) of plain arrays and a text of JSON, without pickles and not
compressed, so that no file takes more memory than it has bytes, and none can run code.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import stat
import zipfile
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "load_arrays",
    "read_entry",
    "read_npz",
    "require_writable",
    "save_arrays",
    "whole_file",
    "write_json",
    "write_npz",
    "write_text",
]

_FORMAT = "vecenv arrays 1"
_MAX_DEPTH = 50  # of lists and dicts
_MAX_NAMED = 32  # letters of a file's name in that of the file beside it


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Give another path to write to, and put that file in the place of `path` at the end.

    If something goes wrong on the way, on a full disk for example, `path` is as it was. The other
    name is one that nobody can guess and has the same ending; an empty file of that name is there
    already, which nobody can read who may not read `path`. What is no regular file, such as
    /dev/stdout, is written to itself, and so is a file in a folder where no other can be made.

    Raises:
        OSError: It can't be written; names the file.
    """
    path = Path(path)
    final = Path(os.path.realpath(path))  # of a link, what it leads to
    if path.exists() and not (path.is_file() and os.access(final.parent, os.W_OK)):
        yield path
        return
    aside = None
    try:
        aside, mode = _new_beside(final)
        yield aside
        if mode is not None:
            with suppress(OSError):  # some file systems have no modes
                aside.chmod(mode)
        aside.replace(final)
    except OSError as error:
        if error.errno and error.filename in (None, str(aside), str(final)):
            error.filename = str(path)
            if error.filename2 is not None:
                del error.filename2
        raise
    finally:
        if aside is not None:
            aside.unlink(missing_ok=True)


def _new_beside(final: Path) -> tuple[Path, int | None]:
    """Create an empty file of a new name in the folder of another one.

    Returns:
        Where it is, and the mode that it is to have at the end, if there is a file that it
        replaces: until then it has that too, but that its owner may read and write it.
    """
    name = f".{final.stem[:_MAX_NAMED]}.{secrets.token_hex(8)}{final.suffix}"
    aside = final.with_name(name)
    old = final.stat() if final.exists() else None
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # which follow no link
        os.close(os.open(aside, flags, 0o666 if old is None else 0o600))
    except OSError as error:
        error.filename = str(final)
        raise
    if old is None:
        return aside, None
    mode = stat.S_IMODE(old.st_mode) & 0o777
    if aside.stat().st_gid != old.st_gid:
        mode &= ~stat.S_IRWXG  # meant for another group
    with suppress(OSError):  # some file systems have no modes
        aside.chmod(mode | 0o600)
    return aside, mode


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, UTF-8, as a whole or not at all.

    Raises:
        OSError: It can't be written; names the file.
    """
    with whole_file(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(
    content: Any, path: str | Path | None, default: Callable[[Any], Any] | None = None
) -> str:
    """Return results as JSON, and write them to a file if there is a path.

    Args:
        content: Numbers, strings, lists and dicts.
        path: Of the file, or None.
        default: What to do with anything else; None refuses it.

    Raises:
        OSError: The file can't be written; names it.
    """
    text = json.dumps(content, indent=2, default=default)
    if path is not None:
        write_text(path, text + "\n")
    return text


def require_writable(path: Path) -> None:
    """Find out now whether a file can be written; nothing that is there is changed or removed.

    Raises:
        OSError: It can't.
    """
    final = Path(os.path.realpath(path))
    try:
        if final.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not final.exists():
            _new_beside(final)[0].unlink()
        elif not os.access(final, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        reason = error.strerror if final.parent.is_dir() else f"there is no folder {final.parent}"
        error.filename, error.strerror = str(path), f"it can't be written ({reason})"
        raise


def write_npz(path: str | Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays into a file that `read_npz` reads, as a whole or not at all.

    Args:
        path: The file; its ending is taken as it is.
        arrays: Numbers, bools or strings, of any shape, by name.

    Raises:
        OSError: It can't be written; names the file.
    """
    with whole_file(path) as aside, aside.open("wb") as file:
        np.savez(file, **arrays)


def read_npz(path: str | Path, *, max_bytes: int | None = None) -> dict[str, np.ndarray]:
    """Read a file of arrays that may have been written by anybody.

    Nothing in it is executed, and it takes no more memory than the file has bytes, or `max_bytes`.

    Args:
        path: The file, of `numpy.savez` with arrays of numbers, bools or strings.
        max_bytes: Size of all arrays up to which the file may be one of `savez_compressed`; None:
            it must not be compressed.

    Returns:
        The arrays by name, writable.

    Raises:
        ValueError: It is something else, or damaged.
        OSError: It can't be read.
    """
    if Path(path).exists() and not Path(path).is_file():  # a pipe would be waited for
        raise ValueError(f"{path} is no archive of arrays, but a folder, a device or a pipe")
    with Path(path).open("rb") as file:
        most = os.fstat(file.fileno()).st_size if max_bytes is None else max_bytes
        arrays = {}
        try:
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
                if max_bytes is None and any(one.compress_type for one in members):
                    raise ValueError("it is compressed")
                if sum(one.file_size for one in members) > most:
                    raise ValueError(f"its parts are larger than {most} bytes")
                for member in members:
                    name = member.filename.removesuffix(".npy")
                    if name in arrays or name == member.filename:
                        raise ValueError(f"{member.filename!r:.99} is no array, or is there twice")
                    with archive.open(member) as stream:
                        arrays[name] = _read_npy(stream, member.file_size)
        except Exception as error:  # whatever reading a file of unknown origin leads to
            raise ValueError(
                f"{path} is no archive of arrays as `numpy.savez` writes them: {error!s:.300}"
            ) from error
        return arrays


def _read_header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return the shape of an array in a file, whether it is in Fortran's order, and its dtype."""
    form = np.lib.format
    read = {(1, 0): form.read_array_header_1_0, (2, 0): form.read_array_header_2_0}
    return read[form.read_magic(stream)](stream)


def _read_npy(stream: Any, size: int) -> np.ndarray:
    """Read an array of numbers, bools or strings of `size` bytes, its header included."""
    shape, is_fortran, dtype = _read_header(stream)
    nbytes = math.prod(shape) * dtype.itemsize
    is_known = dtype.kind in "biufU" and dtype.itemsize > 0
    if not is_known or min(shape, default=0) < 0 or nbytes != size - stream.tell():
        raise ValueError(f"an array is said to be {dtype} {shape!r:.99}, which its bytes are not")
    array = np.empty(shape[::-1] if is_fortran else shape, dtype)
    if stream.readinto(array.reshape(-1).view(np.uint8) if nbytes else bytearray()) != nbytes:
        raise ValueError("an array is cut off")
    stream.read(1)  # the checksum is looked at where the end is
    _require_bools(array)
    return array.T if is_fortran else array


def _require_bools(array: np.ndarray) -> None:
    """Refuse bytes in place of bools that are none, also in fields of records."""
    for name in array.dtype.names or ():
        _require_bools(array[name])
    if array.dtype.kind == "b" and np.ascontiguousarray(array).view(np.uint8).max(initial=0) > 1:
        raise ValueError("it has bytes in place of bools that are none")


def read_entry(
    state: Mapping[str, Any], name: str, accepts: Callable[[np.dtype, tuple[int, ...]], bool]
) -> np.ndarray:
    """Return a copy of an array in a mapping, such as what `numpy.load` made of a file.

    Of an npz archive nothing is read that isn't wanted, however small it is on disk.

    Args:
        state: Arrays by name.
        name: Which.
        accepts: Called with its dtype and shape; raises, or says whether the array is wanted.

    Raises:
        ValueError: It isn't wanted, can't be read, or has bytes in place of bools that are none.
    """
    try:
        if isinstance(state, np.lib.npyio.NpzFile):
            archive: Any = state.zip
            with archive.open(name if name in archive.namelist() else f"{name}.npy") as stream:
                shape, _, dtype = _read_header(stream)
        else:
            shape, dtype = np.shape(state[name]), np.asarray(state[name]).dtype
        if not accepts(dtype, shape):
            raise ValueError("it is not what was expected")
        found = np.array(state[name])
        _require_bools(found)
        return found
    except Exception as error:  # whatever reading a file of unknown origin leads to
        raise ValueError(f"state[{name!r}] can't be read: {error!s:.1000}") from error


def save_arrays(path: str | Path, saved: Any) -> None:
    """Write a nest of dicts, lists and arrays, as a whole or not at all.

    It is an npz archive without pickles; see `load_arrays`.

    Args:
        path: The file; its ending is taken as it is.
        saved: Dicts with strings as keys, lists and tuples, of arrays (whatever `numpy.asarray`
            makes one of without Python objects, such as tensors on the CPU), numbers, strings,
            bools and None.

    Raises:
        TypeError: It holds something else.
        OSError: It can't be written; names the file.
    """
    arrays: dict[str, np.ndarray] = {}
    facts = json.dumps(_packed(saved, arrays))
    write_npz(path, {"format": np.array(_FORMAT), "facts": np.array(facts), **arrays})


def load_arrays(path: str | Path) -> Any:
    """Read what `save_arrays` wrote; the file may come from anybody.

    Nothing in it is executed, and it takes no more memory than a few times its bytes.

    Returns:
        The same, with NumPy arrays, and lists for tuples.

    Raises:
        ValueError: The file holds something else, or is damaged.
        OSError: It can't be read.
    """
    arrays = read_npz(path)
    try:
        if str(arrays.pop("format")) != _FORMAT:
            raise ValueError(f"its format is not {_FORMAT!r}")
        return _unpacked(json.loads(str(arrays.pop("facts"))), arrays)
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is no file of `vecenv.files.save_arrays`: {error!s:.300}"
        ) from None


def _packed(value: Any, arrays: dict[str, np.ndarray], depth: int = 0) -> Any:
    """As JSON: what is no plain value becomes a list of what it is and what is in it."""
    if depth > _MAX_DEPTH:
        raise TypeError(f"more than {_MAX_DEPTH} lists and dicts in one another can't be saved")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"a dict with the keys {list(value)!r:.200}, expected strings")
        return ["dict", {key: _packed(item, arrays, depth + 1) for key, item in value.items()}]
    if isinstance(value, list | tuple):
        return ["list", [_packed(item, arrays, depth + 1) for item in value]]
    array = np.asarray(value)
    if array.dtype.kind not in "biufU":
        raise TypeError(f"{type(value).__name__} can't be saved: an array of {array.dtype}")
    name = f"array{len(arrays)}"
    arrays[name] = array
    return ["array", name]


def _unpacked(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, dict):
        raise ValueError("it has a dict where none belongs")
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == "dict" and isinstance(content, dict):
        return {key: _unpacked(item, arrays) for key, item in content.items()}
    if kind == "list" and isinstance(content, list):
        return [_unpacked(item, arrays) for item in content]
    if kind == "array" and isinstance(content, str):
        return arrays[content]
    raise ValueError(f"it has a part {kind!r:.99}")
