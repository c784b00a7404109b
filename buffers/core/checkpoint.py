"""Checkpoint files: raw columns behind a small checked header, written aside and then renamed.

    magic (8 bytes) | size of the header (uint64) | header (JSON) | checksum of the header | padding
    column, padded to 64 bytes | next column | ... | one checksum (uint64) for each column

The header names the version, the kind of buffer, the columns with dtype and shape, and whatever the
buffer adds (spaces, generator). All numbers are little-endian. Nothing in the format is executed
when it is read, and the memory needed does not grow with the columns.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import math
import os
import re
import secrets
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from buffers.core.compiling import njit
from buffers.core.errors import BufferMisuseError, CheckpointError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

__all__ = [
    "PLAIN_DTYPE",
    "Block",
    "CheckpointReader",
    "Watcher",
    "any_length",
    "is_like",
    "open_checkpoint",
    "save_checkpoint",
    "shortened",
]

FORMAT_VERSION = 1

_MAGIC = b"RLBUFFER"
_ALIGNMENT = 64
_CHUNK_BYTES = 1 << 22  # what is held besides the columns; small enough to stay in the cache
_MAX_HEADER_BYTES = 1 << 23  # as objects of Python it takes thirty times as much
PLAIN_DTYPE = re.compile(r"\|[biu]1|<[iu][248]|<f[248]|<f16")  # others have a syntax of their own
_LANES = 8
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)

Block = np.ndarray | torch.Tensor
Watcher = Callable[[np.ndarray], None]


class _Column(NamedTuple):
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]  # of all blocks together
    start: int  # position in the file

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def save_checkpoint(
    path: str | os.PathLike[str],
    kind: str,
    meta: Mapping[str, Any],
    columns: Mapping[str, Sequence[Block]],
) -> None:
    """Write columns into a file, all or nothing: the old file stays until the new one is safe.

    It is written aside, into a part file beside it. Part files of saves that were killed are
    removed by the next save to the same path; a save that is under way locks its own. Nobody may
    read the part file who might not read the old file.

    Args:
        path: The file; what was there is replaced. Of a link, the file that it leads to.
        kind: Name of the buffer class; `open_checkpoint` refuses another.
        meta: What else is to be kept: anything JSON has.
        columns: For each name the blocks that follow one another along the first axis: arrays of
            the same dtype and row shape, C-contiguous, or tensors of any device. At least one.

    Raises:
        OSError: The disk is full, or the folder is not there, or what is there is no regular file.
            The old file is untouched.
        BufferMisuseError: The header is too large, as of a space with tens of thousands of arrays.
    """
    path = _regular(path)
    described = {
        name: [blocks[0].shape[1:], sum(len(block) for block in blocks), _dtype_of(blocks[0]).str]
        for name, blocks in columns.items()
    }
    header = {
        "version": FORMAT_VERSION,
        "kind": kind,
        "columns": [
            [name, dtype, [rows, *shape]] for name, (shape, rows, dtype) in described.items()
        ],
        "meta": dict(meta),
    }
    text = json.dumps(header, allow_nan=False).encode()
    if len(text) > _MAX_HEADER_BYTES:
        raise BufferMisuseError(
            f"the description of the columns takes {len(text)} bytes, expected at most "
            f"{_MAX_HEADER_BYTES}; use spaces of fewer arrays"
        )
    _remove_left_parts(path)
    _drop_cached(path)
    with _part_of(path) as file:
        _write_all(file, text, columns)
        os.fsync(file.fileno())
    _sync_folder(path.parent)


def _regular(path: str | os.PathLike[str]) -> Path:
    """The file that a path, or a link there, leads to; raise OSError if it is no regular one."""
    final = Path(os.path.realpath(path))
    if final.exists() and not final.is_file():
        raise OSError(errno.EINVAL, "is no regular file, which a checkpoint has to be", str(path))
    return final


@contextlib.contextmanager
def _part_of(path: Path) -> Iterator[BinaryIO]:
    """A locked file beside `path` that takes its place if all goes well, and else disappears."""
    file, aside = _locked_part(path)
    try:
        with file:
            yield file
            if fcntl is not None:  # locked to the end: what is not locked may be removed
                os.replace(aside, path)
        if fcntl is None:  # Windows renames closed files only
            os.replace(aside, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        if isinstance(error, OSError) and error.errno and error.filename is None:  # of a write
            error.filename = str(path)
        raise


def _locked_part(path: Path) -> tuple[BinaryIO, Path]:
    while True:
        aside = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
        file = _new_file(aside, path)
        # Before it is locked another save may take it for one left behind.
        if _lock(file) is not False and os.fstat(file.fileno()).st_nlink:
            return file, aside
        file.close()


def _new_file(aside: Path, path: Path) -> BinaryIO:
    """Create a file that takes the place of another; whoever may not read that, may not read it.

    The name must be free: nothing that lies there is opened, a link neither.
    """
    try:
        old = os.stat(path)
    except FileNotFoundError:
        return open(aside, "xb", buffering=0)
    number = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o600)
    mode = stat.S_IMODE(old.st_mode)
    if hasattr(os, "fchown") and os.fstat(number).st_gid != old.st_gid:
        try:
            os.fchown(number, -1, old.st_gid)
        except OSError:
            mode &= ~stat.S_IRWXG  # meant for another group
    with contextlib.suppress(OSError):  # some file systems have no modes
        os.chmod(aside if not hasattr(os, "fchmod") else number, mode & 0o777)
    return open(number, "wb", buffering=0)


def _lock(file: BinaryIO) -> bool | None:
    """Lock a file; False if somebody else has locked it, None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # of some network file systems
        return None
    return True


def _remove_left_parts(path: Path) -> None:
    """Remove the part files of saves to `path` that did not live to the end."""
    pattern = f".{glob.escape(path.name)}.{'[0-9a-f]' * 12}.part"
    with contextlib.suppress(OSError):
        for part in path.parent.glob(pattern):
            with contextlib.suppress(OSError), _open_regular(part, os.O_RDWR) as file:
                if _lock(file):
                    os.unlink(part)


def _open_regular(path: str | os.PathLike[str], flags: int) -> BinaryIO:
    """Open a regular file; nothing else is waited for, and links are not followed when writing.

    Raises:
        OSError: It can't be opened, or is something else.
    """
    if flags != os.O_RDONLY:
        flags |= _NO_LINK
    flags |= getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # O_NONBLOCK: for FIFOs
    number = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "is no regular file, which a checkpoint has to be", str(path))
    return open(number, "rb" if flags & 3 == os.O_RDONLY else "r+b", buffering=0)


def _write_all(file: BinaryIO, text: bytes, columns: Mapping[str, Sequence[Block]]) -> None:
    start = _MAGIC + len(text).to_bytes(8, "little") + text + _checksum_of(text)
    _write(file, start + bytes(-len(start) % _ALIGNMENT))
    checksums = []
    for blocks in columns.values():
        checksum, size = _Checksum(), 0
        for block in blocks:
            for chunk in _chunks(block):
                checksum.add(chunk)
                _write(file, chunk)
                size += len(chunk)
        _write(file, bytes(-size % _ALIGNMENT))
        checksums.append(checksum.digest())
    _write(file, b"".join(checksums))


def _write(file: BinaryIO, content: bytes | np.ndarray) -> None:
    rest = memoryview(content)  # pyright: ignore[reportArgumentType]
    while rest:  # a single write may end early, above 2 GiB always
        rest = rest[file.write(rest) :]


def _chunks(block: Block) -> Iterator[np.ndarray]:
    """The bytes of a block, in pieces of bounded size."""
    if isinstance(block, torch.Tensor) and block.device.type == "cpu":
        block = block.detach().numpy()
    if isinstance(block, np.ndarray):
        if not block.flags.c_contiguous:
            raise BufferMisuseError("a column must be C-contiguous to be saved; copy it first")
        pages = block.reshape(-1).view(np.uint8)
        for begin in range(0, len(pages), _CHUNK_BYTES):
            yield pages[begin : begin + _CHUNK_BYTES]
        return
    rows = max(1, _CHUNK_BYTES // max(1, block[:1].nbytes))
    for begin in range(0, len(block), rows):
        piece = block[begin : begin + rows].contiguous().cpu().numpy()
        yield piece.reshape(-1).view(np.uint8)


def _dtype_of(block: Block) -> np.dtype:
    if isinstance(block, np.ndarray):
        return block.dtype
    return block.new_empty(0, device="cpu").numpy().dtype


def _drop_cached(path: Path) -> None:
    """Let the system forget what it holds of a file that is to be replaced.

    The new one then takes the same pages; others, which a virtual machine may first have to ask
    its host for, took up to three times as long to write.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError), _open_regular(path, os.O_RDONLY) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _sync_folder(folder: Path) -> None:
    """Make the renaming last, where folders can be synchronised."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _Checksum:
    """Checksum of bytes that come in pieces, all but the last multiples of 8 bytes or carried."""

    def __init__(self):
        self._lanes = np.arange(_LANES, dtype=np.uint64)
        self._carried = b""
        self._size = 0

    def add(self, content: np.ndarray) -> None:
        self._size += len(content)
        if self._carried or len(content) % _ALIGNMENT:
            content = np.concatenate([np.frombuffer(self._carried, np.uint8), content])
        whole = len(content) - len(content) % _ALIGNMENT
        mix_words(_words(content[:whole]), self._lanes)
        self._carried = content[whole:].tobytes()

    def digest(self) -> bytes:
        rest = np.frombuffer(self._carried + bytes(-len(self._carried) % 8), np.uint8)
        lanes = self._lanes.copy()
        mix_words(_words(rest), lanes)
        folded = np.array([self._size], np.uint64)
        single = np.zeros(_LANES, np.uint64)
        for lane in lanes:  # in order, through one lane
            single[0] ^= lane
            mix_words(folded, single)
        return int(single[0]).to_bytes(8, "little")


@njit(nogil=True, cache=True)
def mix_words(words, lanes):
    """Fold words uint64 (K,) into lanes uint64 (8,): lane = (lane + word) * odd, word k in k % 8.

    Each step is one to one, so a change of a single word always changes its lane. Eight lanes hide
    the latency of the multiplication; it runs at the speed of memory.
    """
    a, b, c, d = lanes[0], lanes[1], lanes[2], lanes[3]
    e, f, g, h = lanes[4], lanes[5], lanes[6], lanes[7]
    whole = words.shape[0] - words.shape[0] % 8
    for k in range(0, whole, 8):
        a = np.multiply(np.add(a, words[k]), _MULTIPLIER)
        b = np.multiply(np.add(b, words[k + 1]), _MULTIPLIER)
        c = np.multiply(np.add(c, words[k + 2]), _MULTIPLIER)
        d = np.multiply(np.add(d, words[k + 3]), _MULTIPLIER)
        e = np.multiply(np.add(e, words[k + 4]), _MULTIPLIER)
        f = np.multiply(np.add(f, words[k + 5]), _MULTIPLIER)
        g = np.multiply(np.add(g, words[k + 6]), _MULTIPLIER)
        h = np.multiply(np.add(h, words[k + 7]), _MULTIPLIER)
    lanes[0], lanes[1], lanes[2], lanes[3] = a, b, c, d
    lanes[4], lanes[5], lanes[6], lanes[7] = e, f, g, h
    for k in range(whole, words.shape[0]):
        lanes[k % 8] = np.multiply(np.add(lanes[k % 8], words[k]), _MULTIPLIER)


def _words(content: np.ndarray) -> np.ndarray:
    """Bytes as words; copied where the memory is not aligned to them."""
    if content.ctypes.data % 8 or not content.flags.writeable:
        content = content.copy()
    return content.view(np.uint64)


def _checksum_of(text: bytes) -> bytes:
    return zlib.crc32(text).to_bytes(8, "little")


@contextlib.contextmanager
def open_checkpoint(
    path: str | os.PathLike[str],
    kind: str,
    prepare: Callable[[CheckpointReader], Mapping[str, Watcher]] | None = None,
) -> Iterator[CheckpointReader]:
    """Open a checkpoint and check all of it, columns included, before anything is read.

    A file must not be changed by others while it is read.

    Args:
        path: The file.
        kind: What `save_checkpoint` was given.
        prepare: Called when the header is known and none of the columns, to refuse the file or to
            return, by column, what wants to see the columns as they are checked, see
            `check_columns`.

    Yields:
        A reader, with `meta` and `read`.

    Raises:
        CheckpointError: The file is no checkpoint, of another version or kind, cut off or damaged.
        OSError: It cannot be opened.
    """
    with _open_regular(path, os.O_RDONLY) as file:
        reader = CheckpointReader(file, os.fspath(path), kind)
        reader.check_columns({} if prepare is None else prepare(reader))
        yield reader


class CheckpointReader:
    """An open checkpoint.

    Attributes:
        meta: What was saved beside the columns.
        columns: dtype and shape of each column by name.
    """

    def __init__(self, file: BinaryIO, path: str, kind: str):
        self._file, self._path = file, path
        header, start = self._read_header()
        if header.get("version") != FORMAT_VERSION:
            raise self.refusal(
                f"has format version {shortened(header.get('version'))}, expected "
                f"{FORMAT_VERSION}; load it with the release that wrote it"
            )
        if header.get("kind") != kind:
            raise self.refusal(f"holds a {shortened(header.get('kind'), str)}, expected a {kind}")
        try:
            self._columns, end = _lay_out(header["columns"], start)
            self.meta: dict[str, Any] = dict(header["meta"])
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            reason = shortened(error)
            raise self.refusal(f"has a header that cannot be read: {reason}") from None
        self._trailer = end
        self.columns = {c.name: (c.dtype, c.shape) for c in self._columns.values()}
        expected, found = end + 8 * len(self._columns), os.fstat(file.fileno()).st_size
        if found != expected:
            state = "cut off" if found < expected else "damaged"
            raise self.refusal(f"is {state}: it has {found} bytes, its header says {expected}")

    def refusal(self, reason: str) -> CheckpointError:
        """The error for this file."""
        return CheckpointError(f"checkpoint {self._path!r} {reason}")

    def read(self, name: str, blocks: Sequence[Block]) -> None:
        """Read a column into blocks of memory that follow one another along the first axis.

        Args:
            name: The column.
            blocks: Arrays or tensors of any device, C-contiguous, owned by the caller; together
                they have the rows of the column.

        Raises:
            CheckpointError: The column is not there or does not fit; nothing was written.
        """
        self.expect(name, blocks)
        self._file.seek(self._columns[name].start)
        for block in blocks:
            self._fill(block)

    def expect(self, name: str, blocks: Sequence[Block]) -> None:
        """Raise CheckpointError unless `read` with these arguments would work."""
        column = self._columns.get(name)
        if column is None:
            raise self.refusal(f"has no column {name!r}, only {sorted(self._columns)}")
        wanted = (sum(len(block) for block in blocks), *blocks[0].shape[1:])
        dtype = _dtype_of(blocks[0])
        if (column.dtype, column.shape) != (dtype, wanted):
            raise self.refusal(
                f"holds {column.dtype} {column.shape} for {name!r}, expected {dtype} {wanted}"
            )

    def array(self, name: str) -> np.ndarray:
        """A column as a new array."""
        dtype, shape = self.columns[name]
        found = np.zeros(shape, dtype)
        self.read(name, [found])
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each column by name."""
        return {name: shape for name, (_, shape) in self.columns.items()}

    def require(self, wanted: Mapping[str, tuple[np.dtype, tuple[int | None, ...]]]) -> None:
        """Raise CheckpointError unless there are exactly these columns, before any is read.

        Args:
            wanted: dtype and shape of each; None for a length that is not known.
        """
        if missing := sorted(set(wanted) - set(self.columns)):
            raise self.refusal(f"has no columns {missing}; it is of another kind of buffer")
        if others := sorted(set(self.columns) - set(wanted)):
            raise self.refusal(f"has the columns {shortened(others)} besides, expected none")
        for name, (dtype, shape) in wanted.items():
            found_dtype, found = self.columns[name]
            if found_dtype != dtype or not is_like(found, shape):
                raise self.refusal(
                    f"holds {found_dtype} {found} for {name!r}, expected {dtype} "
                    f"{any_length(shape)}"
                )

    def check_columns(self, watchers: Mapping[str, Watcher] | None = None) -> None:
        """Raise CheckpointError unless every column has the checksum that was saved with it.

        Args:
            watchers: By column, what is called with one piece of it after the other, whole rows
                uint8 (K, bytes per row) in memory that is used again.
        """
        self._file.seek(self._trailer)
        saved = self._file.read(8 * len(self._columns))
        memory = np.empty(0, np.uint8)
        for number, column in enumerate(self._columns.values()):
            checksum, left = _Checksum(), column.nbytes
            row_bytes = column.nbytes // max(1, column.shape[0]) if column.shape else left
            piece_bytes = _piece_bytes(row_bytes)
            if len(memory) < min(left, piece_bytes):
                memory = np.empty(min(left, piece_bytes), np.uint8)
            watch = (watchers or {}).get(column.name)
            self._file.seek(column.start)
            while left:
                piece = memory[: min(left, piece_bytes)]
                self._read_into(piece)
                checksum.add(piece)
                if watch is not None:
                    watch(piece.reshape(-1, row_bytes))
                left -= len(piece)
            if checksum.digest() != saved[8 * number : 8 * number + 8]:
                raise self.refusal(f"is damaged: the checksum of column {column.name!r} differs")

    def _read_header(self) -> tuple[dict[str, Any], int]:
        start = self._file.read(16)
        if len(start) < 16 or not start.startswith(_MAGIC):
            raise self.refusal("is no checkpoint of a buffer, or its beginning is damaged")
        size = int.from_bytes(start[8:], "little")
        rest = self._file.read(size + 8) if size <= _MAX_HEADER_BYTES else b""
        if len(rest) != size + 8:
            raise self.refusal("is cut off or damaged: its header is not complete")
        if rest[size:] != _checksum_of(rest[:size]):
            raise self.refusal("is damaged: the checksum of its header differs")
        end = 16 + size + 8
        try:
            header = json.loads(rest[:size])
        except (ValueError, RecursionError) as error:
            reason = shortened(error)
            raise self.refusal(f"has a header that cannot be read: {reason}") from None
        if not isinstance(header, dict):
            raise self.refusal(f"has a header that is {shortened(header)}")
        return header, end + -end % _ALIGNMENT

    def _fill(self, block: Block) -> None:
        if isinstance(block, torch.Tensor) and block.device.type == "cpu":
            block = block.detach().numpy()
        if isinstance(block, np.ndarray):
            self._read_into(block.reshape(-1).view(np.uint8))
            return
        rows = max(1, _CHUNK_BYTES // max(1, block[:1].nbytes))
        pages = np.empty((min(rows, len(block)), *block.shape[1:]), _dtype_of(block))
        for begin in range(0, len(block), rows):
            target = block[begin : begin + rows]
            self._read_into(pages[: len(target)].reshape(-1).view(np.uint8))
            target.copy_(torch.from_numpy(pages[: len(target)]))

    def _read_into(self, pages: np.ndarray) -> None:
        rest = memoryview(pages)  # pyright: ignore[reportArgumentType]
        while rest:
            count = self._file.readinto(rest)  # pyright: ignore[reportAttributeAccessIssue]
            if not count:
                raise self.refusal("became shorter while it was read")
            rest = rest[count:]


def _lay_out(described: Iterable[Any], start: int) -> tuple[dict[str, _Column], int]:
    """Where the columns of a header lie in the file, and where they end."""
    columns = {}
    for name, dtype, shape in described:
        is_plain = isinstance(name, str) and isinstance(dtype, str) and isinstance(shape, list)
        if not is_plain or name in columns or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError(
                f"column {shortened(name)} has dtype {shortened(dtype)} and shape "
                f"{shortened(shape)}"
            )
        if not PLAIN_DTYPE.fullmatch(dtype):
            raise ValueError(f"column {shortened(name)} has dtype {shortened(dtype)}")
        column = _Column(name, np.dtype(dtype), tuple(shape), start)
        columns[column.name] = column
        start += column.nbytes + -column.nbytes % _ALIGNMENT
    return columns, start


def _piece_bytes(row_bytes: int) -> int:
    """Whole rows that are read at once; where that is possible, whole lines of the checksum."""
    if row_bytes <= 0:
        return _CHUNK_BYTES
    together = math.lcm(row_bytes, _ALIGNMENT)
    unit = together if together <= _CHUNK_BYTES else row_bytes
    return max(1, _CHUNK_BYTES // unit) * unit


def is_like(found: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    """Whether a shape is one that is wanted, where None is any length."""
    return len(found) == len(shape) and all(
        mine in (None, n) for n, mine in zip(found, shape, strict=True)
    )


def any_length(shape: tuple[int | None, ...]) -> str:
    """A shape in a message, where None is any length."""
    lengths = ", ".join("any" if n is None else str(n) for n in shape)
    return f"({lengths},)" if len(shape) == 1 else f"({lengths})"


def shortened(value: Any, show: Callable[[Any], str] = repr) -> str:
    """A value of a file in a message, which is not to be as long as the file."""
    text = show(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


assert sys.byteorder == "little", "checkpoints are written as the memory is, little-endian"
