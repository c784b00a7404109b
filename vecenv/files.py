"""Files written as a whole or not at all; arrays in files that are read without believing them.

Saved policies are NumPy archives (npz) of plain arrays and a text of JSON, without pickles and not
compressed, so that no file takes more memory than it has bytes, and none can run code.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
    "write_npz",
    "write_text",
]

_FORMAT = "vecenv arrays 1"
_MAX_DEPTH = 50  # of lists and dicts
_MAX_NAMED = 32  # letters of the name that the name aside has
# What `numpy.save` writes for arrays of numbers and strings, and nothing else.
_NPY_HEADER = re.compile(
    rb"\{'descr': '([<>|][biufU][0-9]{1,9})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:[0-9]{1,19},? ?){0,32})\), \} *\n"
)
_NPY_MAGICS = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4}  # and bytes of the length


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
            with suppress(OSError):
                aside.unlink(missing_ok=True)


def _new_beside(final: Path) -> tuple[Path, int | None]:
    """Create an empty file of a new name in the folder of another one.

    Returns:
        Where it is, and the mode that it is to have at the end, if there is a file that it
        replaces: until then it has that too, but that its owner may read and write it.
    """
    name = f".{final.stem[:_MAX_NAMED]}.{secrets.token_hex(8)}{final.suffix}"
    aside = final.with_name(name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    try:
        try:
            old = os.stat(final)
        except FileNotFoundError:
            os.close(os.open(aside, flags, 0o666))
            return aside, None
        number = os.open(aside, flags, 0o600)
    except OSError as error:
        error.filename = str(final)
        raise
    try:
        mode = stat.S_IMODE(old.st_mode) & 0o777
        if hasattr(os, "fchown") and os.fstat(number).st_gid != old.st_gid:
            try:
                os.fchown(number, -1, old.st_gid)
            except OSError:
                mode &= ~stat.S_IRWXG  # meant for another group
        with suppress(OSError):  # some file systems have no modes
            os.chmod(number if os.chmod in os.supports_fd else aside, mode | 0o600)
    finally:
        os.close(number)
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
        if final.exists():
            if not os.access(final, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        _new_beside(final)[0].unlink()
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
        left = os.fstat(file.fileno()).st_size if max_bytes is None else max_bytes
        arrays = {}
        try:
            with zipfile.ZipFile(file) as archive:
                for member in archive.infolist():
                    left -= member.file_size
                    if max_bytes is None and member.compress_type != zipfile.ZIP_STORED:
                        raise ValueError(f"{member.filename!r:.99} is compressed")
                    if left < 0:
                        bound = "the file" if max_bytes is None else f"{max_bytes} bytes"
                        raise ValueError(f"its parts are larger than {bound}")
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


def _read_npy(stream: Any, size: int) -> np.ndarray:
    """Read an array of `size` bytes, its header included, of which only one form is taken."""
    length_bytes = _NPY_MAGICS[stream.read(8)]
    length = int.from_bytes(stream.read(length_bytes), "little")
    header = _NPY_HEADER.fullmatch(stream.read(min(length, 4096)))
    if header is None:
        raise ValueError("an array has a header that numpy.save does not write")
    dtype = np.dtype(header[1].decode())
    shape = tuple(int(n) for n in header[3].decode().replace(",", " ").split())
    nbytes = math.prod(shape) * dtype.itemsize
    if not dtype.itemsize or nbytes != size - 8 - length_bytes - length:
        raise ValueError(f"an array is said to be {dtype} {shape}, which its bytes are not")
    array = np.empty(shape[::-1] if header[2] == b"True" else shape, dtype)
    bytes_of: Any = array.reshape(-1).view(np.uint8) if nbytes else b""
    pages = memoryview(bytes_of)
    while pages:
        count = stream.readinto(pages[: 1 << 20])
        if not count:
            raise ValueError("an array is cut off")
        pages = pages[count:]
    stream.read(1)  # the checksum is looked at where the end is
    if dtype.kind == "b" and nbytes and array.view(np.uint8).max() > 1:
        raise ValueError("an array of bools has bytes that are none")
    return array.T if header[2] == b"True" else array


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
    if isinstance(state, np.lib.npyio.NpzFile):
        try:
            archive: Any = state.zip
            accepted = accepts(*_npy_kind(archive, name))
            found = np.array(state[name]) if accepted else None
        except Exception as error:  # whatever reading a file of unknown origin leads to
            raise ValueError(f"state[{name!r}] can't be read: {error!s:.300}") from error
    else:
        found = np.asarray(state[name])
        found = np.array(found) if accepts(found.dtype, found.shape) else None
    if found is None:
        raise ValueError(f"state[{name!r}] is not what was expected")
    for path in _bools_of(found.dtype):
        field = found
        for part in path:
            field = field[part]
        if field.size and np.ascontiguousarray(field).view(np.uint8).max() > 1:
            raise ValueError(f"state[{name!r}] has bytes in place of bools that are none")
    return found


def _npy_kind(archive: zipfile.ZipFile, name: str) -> tuple[np.dtype, tuple[int, ...]]:
    """The dtype and shape of an array in an archive."""
    form = np.lib.format
    names = archive.namelist()
    with archive.open(name if name in names else f"{name}.npy") as stream:
        version = form.read_magic(stream)
        read = {(1, 0): form.read_array_header_1_0, (2, 0): form.read_array_header_2_0}[version]
        shape, _, dtype = read(stream)
    return dtype, shape


def _bools_of(dtype: np.dtype, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The fields of bools of a record, or of what is none."""
    if dtype.base.kind == "b":
        yield path
    for name, (field, *_) in (dtype.base.fields or {}).items():
        yield from _bools_of(field, (*path, name))


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


def _unpacked(value: Any, arrays: dict[str, np.ndarray], depth: int = 0) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError("it has too many lists and dicts in one another")
    if not isinstance(value, list):
        if isinstance(value, dict):
            raise ValueError("it has a dict where none belongs")
        return value
    kind, content = value
    if kind == "dict" and isinstance(content, dict):
        return {key: _unpacked(item, arrays, depth + 1) for key, item in content.items()}
    if kind == "list" and isinstance(content, list):
        return [_unpacked(item, arrays, depth + 1) for item in content]
    if kind == "array" and isinstance(content, str):
        return arrays[content]
    raise ValueError(f"it has a part {kind!r:.99}")
