"""Checkpoint files: npz archives of a buffer's columns, written aside and then renamed.

    header.json                 version, kind of the buffer, and whatever it adds (fields, settings)
    state.npy, rows.npy, ...    the columns, not compressed; `numpy.load` reads them

Nothing in such a file is executed when it is read, its checksums are looked at before, and the
memory needed does not grow with the columns.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
import torch
from numpy.lib import format as npy

from buffers.core.errors import BufferMisuseError, CheckpointError
from vecenv.files import whole_file

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

FORMAT_VERSION = 2

_HEADER = "header.json"
_CHUNK_BYTES = 1 << 21  # what is held besides the columns; small enough to stay in the cache
_MAX_HEADER_BYTES = 1 << 23  # as objects of Python it takes thirty times as much
PLAIN_DTYPE = re.compile(r"\|[biu]1|<[iu][248]|<f[248]|<f16")  # others have a syntax of their own

Block = np.ndarray | torch.Tensor
Watcher = Callable[[np.ndarray], None]


def save_checkpoint(
    path: str | os.PathLike[str],
    kind: str,
    meta: Mapping[str, Any],
    columns: Mapping[str, Sequence[Block]],
) -> None:
    """Write columns into a file, all or nothing: the old file stays until the new one is safe.

    It is written into another file of the folder, which a save that is killed leaves behind. Nobody
    may read that who might not read the old file.

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
    final = Path(os.path.realpath(path))
    if final.exists() and not final.is_file():
        raise _no_regular_file(path)
    header = {"version": FORMAT_VERSION, "kind": kind, "meta": dict(meta)}
    text = json.dumps(header, allow_nan=False).encode()
    if len(text) > _MAX_HEADER_BYTES:
        raise BufferMisuseError(
            f"the description of the columns takes {len(text)} bytes, expected at most "
            f"{_MAX_HEADER_BYTES}; use spaces of fewer arrays"
        )
    with whole_file(final) as aside, open(aside, "wb") as file:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(zipfile.ZipInfo(_HEADER), text)  # without the time of day
            for name, blocks in columns.items():
                member = zipfile.ZipInfo(f"{name}.npy")
                with archive.open(member, "w", force_zip64=True) as stream:
                    _write_column(stream, blocks)
        file.flush()
        os.fsync(file.fileno())


def _write_column(stream: IO[bytes], blocks: Sequence[Block]) -> None:
    shape = sum(map(len, blocks)), *blocks[0].shape[1:]
    descr = npy.dtype_to_descr(_dtype_of(blocks[0]))
    described = {"descr": descr, "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(stream, described)  # pyright: ignore[reportArgumentType]
    for block in blocks:
        for chunk in _chunks(block):
            stream.write(memoryview(chunk))  # pyright: ignore[reportArgumentType, reportCallIssue]


def _no_regular_file(path: str | os.PathLike[str]) -> OSError:
    return OSError(errno.EINVAL, "is no regular file, which a checkpoint has to be", str(path))


def _open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading; a pipe is not waited for.

    Raises:
        OSError: It can't be opened, or is something else.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    number = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise _no_regular_file(path)
    return open(number, "rb")


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
    with _open_regular(path) as file:
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
        self._path = path
        with self._refusing():
            self._archive = zipfile.ZipFile(file)
            members = {member.filename: member for member in self._archive.infolist()}
            size = members[_HEADER].file_size
            if size > _MAX_HEADER_BYTES or len(members) != len(self._archive.infolist()):
                raise ValueError("its list of members is not that of a checkpoint")
            header = json.loads(self._archive.read(_HEADER))
            if not isinstance(header, dict):
                raise ValueError(f"its header is {shortened(header)}")
        if header.get("version") != FORMAT_VERSION:
            raise self.refusal(
                f"has format version {shortened(header.get('version'))}, expected "
                f"{FORMAT_VERSION}; load it with the release that wrote it"
            )
        if header.get("kind") != kind:
            raise self.refusal(f"holds a {shortened(header.get('kind'), str)}, expected a {kind}")
        with self._refusing():
            self.meta: dict[str, Any] = dict(header["meta"])
            self.columns: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
            for name in members.keys() - {_HEADER}:
                self.columns[name.removesuffix(".npy")] = self._kind_of(members[name])

    def refusal(self, reason: str) -> CheckpointError:
        """The error for this file."""
        return CheckpointError(f"checkpoint {self._path!r} {reason}")

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Raise CheckpointError for whatever reading a file of unknown origin leads to."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise
            reason = f"{type(error).__name__}: {shortened(error, str)}"
            raise self.refusal(
                f"is no checkpoint of a buffer, or cut off or damaged ({reason})"
            ) from None

    def _kind_of(self, member: zipfile.ZipInfo) -> tuple[np.dtype, tuple[int, ...]]:
        """Dtype and shape of a column, which its bytes must have."""
        with self._archive.open(member) as stream:
            if npy.read_magic(stream) != (1, 0) or member.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{shortened(member.filename)} is no column")
            shape, is_fortran, dtype = npy.read_array_header_1_0(stream)
            size = member.file_size - stream.tell()
        is_plain = (
            PLAIN_DTYPE.fullmatch(dtype.str) and not is_fortran and min(shape, default=0) >= 0
        )
        if not is_plain or math.prod(shape) * dtype.itemsize != size:
            raise ValueError(
                f"column {shortened(member.filename)} of {size} bytes is said to be "
                f"{shortened(dtype, str)} {shortened(shape)}"
            )
        return dtype, shape

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[IO[bytes]]:
        """The bytes of a column, whose checksum is looked at at the end."""
        with self._refusing(), self._archive.open(f"{name}.npy") as stream:
            npy.read_magic(stream)
            npy.read_array_header_1_0(stream)
            yield stream
            stream.read(1)

    def read(self, name: str, blocks: Sequence[Block]) -> None:
        """Read a column into blocks of memory that follow one another along the first axis.

        Args:
            name: The column.
            blocks: Arrays or tensors of any device, C-contiguous, owned by the caller; together
                they have the rows of the column.

        Raises:
            CheckpointError: The column is not there or does not fit; nothing was written.
        """
        column = self.columns.get(name)
        if column is None:
            raise self.refusal(f"has no column {name!r}, only {sorted(self.columns)}")
        dtype = _dtype_of(blocks[0])
        wanted = dtype, (sum(len(block) for block in blocks), *blocks[0].shape[1:])
        if column != wanted:
            raise self.refusal(
                f"holds {column[0]} {column[1]} for {name!r}, expected {dtype} {wanted[1]}"
            )
        with self._opened(name) as stream:
            for block in blocks:
                self._fill(stream, block)

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

    def check_columns(self, watchers: Mapping[str, Watcher]) -> None:
        """Raise CheckpointError unless every column has the checksum that was saved with it.

        Args:
            watchers: By column, what is called with one piece of it after the other, whole rows
                uint8 (K, bytes per row) in memory that is used again.
        """
        for name, (dtype, shape) in self.columns.items():
            left, watch = math.prod(shape) * dtype.itemsize, watchers.get(name)
            row_bytes = left // max(1, shape[0]) if shape else left
            rows = max(1, _CHUNK_BYTES // max(1, row_bytes))
            memory = np.empty(min(left, rows * row_bytes), np.uint8)
            with self._opened(name) as stream:
                while left:
                    piece = memory[: min(left, len(memory))]
                    self._read_into(stream, piece)
                    if watch is not None:
                        watch(piece.reshape(-1, row_bytes))
                    left -= len(piece)

    def _fill(self, stream: IO[bytes], block: Block) -> None:
        if isinstance(block, torch.Tensor) and block.device.type == "cpu":
            block = block.detach().numpy()
        if isinstance(block, np.ndarray):
            self._read_into(stream, block.reshape(-1).view(np.uint8))
            return
        rows = max(1, _CHUNK_BYTES // max(1, block[:1].nbytes))
        pages = np.empty((min(rows, len(block)), *block.shape[1:]), _dtype_of(block))
        for begin in range(0, len(block), rows):
            target = block[begin : begin + rows]
            self._read_into(stream, pages[: len(target)].reshape(-1).view(np.uint8))
            target.copy_(torch.from_numpy(pages[: len(target)]))

    def _read_into(self, stream: IO[bytes], pages: np.ndarray) -> None:
        for begin in range(0, len(pages), _CHUNK_BYTES):
            piece = pages[begin : begin + _CHUNK_BYTES]
            content = stream.read(len(piece))
            if len(content) < len(piece):
                raise self.refusal("became shorter while it was read")
            piece[:] = np.frombuffer(content, np.uint8)


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
