"""Checkpoint files: raw columns behind a small checked header, written aside and then renamed.

    magic (8 bytes) | size of the header (uint64) | header (JSON) | checksum of the header | padding
    column, padded to 64 bytes | next column | ... | one checksum (uint64) for each column

The header names the version, the kind of buffer, the columns with dtype and shape, and whatever the
buffer adds (spaces, generator). All numbers are little-endian. Nothing in the format is executed
when it is read, and the memory needed does not grow with the columns.
"""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
import secrets
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from buffers.checkpoint_kernels import CHECKSUM_LANES, mix_words
from buffers.errors import BufferMisuseError, CheckpointError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

__all__ = [
    "CheckpointReader",
    "check_settings",
    "name_fields",
    "open_checkpoint",
    "save_checkpoint",
]

FORMAT_VERSION = 1

_MAGIC = b"RLBUFFER"
_ALIGNMENT = 64
_CHUNK_BYTES = 1 << 22  # what is held besides the columns; small enough to stay in the cache
_MAX_HEADER_BYTES = 1 << 26

Block = np.ndarray | torch.Tensor


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
    removed by the next save to the same path; a save that is under way locks its own.

    Args:
        path: The file; what was there is replaced.
        kind: Name of the buffer class; `open_checkpoint` refuses another.
        meta: What else is to be kept: anything JSON has.
        columns: For each name the blocks that follow one another along the first axis: arrays of
            the same dtype and row shape, C-contiguous, or tensors of any device. At least one.

    Raises:
        OSError: The disk is full or the folder is not there. The old file is untouched.
    """
    path = Path(path)
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
    _remove_left_parts(path)
    _drop_cached(path)
    with _part_of(path) as file:
        _write_all(file, header, columns)
        os.fsync(file.fileno())
    _sync_folder(path.parent)


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
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def _locked_part(path: Path) -> tuple[BinaryIO, Path]:
    while True:
        aside = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
        file = open(aside, "xb", buffering=0)  # noqa: SIM115
        # Before it is locked another save may take it for one left behind.
        if _lock(file) is not False and os.fstat(file.fileno()).st_nlink:
            return file, aside
        file.close()


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
            with contextlib.suppress(OSError), open(part, "r+b", buffering=0) as file:
                if _lock(file):
                    os.unlink(part)


def _write_all(
    file: BinaryIO, header: Mapping[str, Any], columns: Mapping[str, Sequence[Block]]
) -> None:
    text = json.dumps(header, allow_nan=False).encode()
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
        with contextlib.suppress(OSError), open(path, "rb") as file:
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
        self._lanes = np.arange(CHECKSUM_LANES, dtype=np.uint64)
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
        single = np.zeros(CHECKSUM_LANES, np.uint64)
        for lane in lanes:  # in order, through one lane
            single[0] ^= lane
            mix_words(folded, single)
        return int(single[0]).to_bytes(8, "little")


def _words(content: np.ndarray) -> np.ndarray:
    """Bytes as words; copied where the memory is not aligned to them."""
    if content.ctypes.data % 8 or not content.flags.writeable:
        content = content.copy()
    return content.view(np.uint64)


def _checksum_of(text: bytes) -> bytes:
    return zlib.crc32(text).to_bytes(8, "little")


@contextlib.contextmanager
def open_checkpoint(path: str | os.PathLike[str], kind: str) -> Iterator[CheckpointReader]:
    """Open a checkpoint and check all of it, columns included, before anything is read.

    Args:
        path: The file.
        kind: What `save_checkpoint` was given.

    Yields:
        A reader, with `meta` and `read`.

    Raises:
        CheckpointError: The file is no checkpoint, of another version or kind, cut off or damaged.
        OSError: It cannot be opened.
    """
    with open(path, "rb", buffering=0) as file:
        reader = CheckpointReader(file, os.fspath(path), kind)
        reader.check_columns()
        yield reader


def check_settings(found: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a state, from a file or not, of a buffer that was made otherwise than this one.

    Args:
        found: The settings in the state: numbers, strings, lists or dicts of these.
        own: Those of the buffer, as JSON gives them back.

    Raises:
        BufferMisuseError: Some differ; the message lists them.
    """
    differences = list(_differences("", found, own))
    if differences:
        raise BufferMisuseError(
            f"state differs from this buffer: {'; '.join(differences)}; load it into a buffer made "
            "with the same spaces, sizes and options"
        )


def name_fields(described: Iterable[Any] | None) -> dict[str, str]:
    """Dtype and shape of the fields of a row by name, for `check_settings`.

    Args:
        described: Path, shape, dtype and offset of each.

    >>> name_fields([["obs['speed']", [3], "<f4", 16]])
    {"obs['speed']": 'float32 (3,)'}
    """
    return {
        str(path): f"{np.dtype(dtype)} {tuple(shape)}" for path, shape, dtype, _ in described or ()
    }


def _differences(path: str, found: Any, own: Any) -> Iterator[str]:
    if isinstance(found, Mapping) and isinstance(own, Mapping):
        for name in dict.fromkeys((*own, *found)):
            place = f"{path} {name}".strip()
            yield from _differences(place, found.get(name), own.get(name))
    elif found != own:
        yield f"{path} is {found}, expected {own}"


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
                f"has format version {header.get('version')!r}, expected {FORMAT_VERSION}; load it "
                "with the release that wrote it"
            )
        if header.get("kind") != kind:
            raise self.refusal(f"holds a {header.get('kind')}, expected a {kind}")
        try:
            self._columns, end = _lay_out(header["columns"], start)
            self.meta: dict[str, Any] = header["meta"]
        except (KeyError, TypeError, ValueError) as error:
            raise self.refusal(f"has a header that cannot be read: {error!r}") from None
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

    def check_columns(self) -> None:
        """Raise CheckpointError unless every column has the checksum that was saved with it."""
        self._file.seek(self._trailer)
        saved = self._file.read(8 * len(self._columns))
        pages = np.empty(_CHUNK_BYTES, np.uint8)
        for number, column in enumerate(self._columns.values()):
            checksum, left = _Checksum(), column.nbytes
            self._file.seek(column.start)
            while left:
                piece = pages[: min(left, _CHUNK_BYTES)]
                self._read_into(piece)
                checksum.add(piece)
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
        return json.loads(rest[:size]), end + -end % _ALIGNMENT

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
        column = _Column(str(name), np.dtype(dtype), tuple(int(n) for n in shape), start)
        if column.dtype.hasobject or min(column.shape, default=0) < 0:
            raise ValueError(f"column {name!r} has dtype {dtype!r} and shape {shape!r}")
        columns[column.name] = column
        start += column.nbytes + -column.nbytes % _ALIGNMENT
    return columns, start


assert sys.byteorder == "little", "checkpoints are written as the memory is, little-endian"
