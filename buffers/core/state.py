"""States of buffers, as a dict, a file or a copy; a state is checked before it is loaded.

Sizes, ranges and row numbers of a state are checked, so that it can't make a buffer read or write
other memory. Whether transitions really follow one another is not checked. `torch.save` writes
files under a temporary name, which is then changed; nothing in a file is executed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from gymnasium import Space

from buffers.core.arguments import resolve_device
from buffers.core.errors import BufferMisuseError, CheckpointError
from buffers.core.generator import other_generator
from buffers.core.spaces import describe_space, space_of
from vecenv.files import whole_file

__all__ = [
    "Block", "LoadedState", "SavedBuffer", "StatefulBuffer", "Wanted", "check_bools",
    "check_settings", "contradiction", "read_state",
]  # fmt: skip

Block = np.ndarray | torch.Tensor
_MADE_WITH = "made_with"  # the arguments of the constructor, in files only
_MALFORMED = (
    AssertionError, AttributeError, IndexError, KeyError, OverflowError, RecursionError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip
Wanted = dict[str, tuple[np.dtype, tuple[int | None, ...]]]


class LoadedState(NamedTuple):
    """A state to be restored, after checks of names, dtypes and shapes."""

    small: dict[str, np.ndarray]  # copies of all arrays except the large ones
    large: Mapping[str, Sequence[np.ndarray]]  # the large arrays, each as consecutive blocks


class StatefulBuffer:
    """Mixin with `state_dict` and `load_state_dict`.

    A class defines its state by the methods that raise NotImplementedError here. For `copy` and
    pickle, its constructor ends with `self._remember(TheClass, *arguments, **options)`: the
    arguments, without `seed`, that make an empty buffer of the same kind. A copy is a new buffer
    that is then filled, so that all of its views are views of its own memory. Attributes that a
    user has added are not copied.
    """

    _made_by: tuple[type, tuple[Any, ...], dict[str, Any]]

    _large: tuple[str, ...] = ()  # names of arrays that are too large to copy while loading
    _growing: tuple[str, ...] = ()  # names of arrays of any length

    def _remember(self, maker: type, *arguments: Any, **options: Any) -> None:
        self._made_by = maker, arguments, options

    def _check_copyable(self) -> None:
        """Raise if the object can't be copied."""

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_copyable()
        return _rebuild, (type(self), *self._made_by), self._copied_blocks()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._take_state(state)

    def _described(self) -> dict[str, Any]:
        """Entries of a state besides arrays: version, settings, fields; all valid in JSON."""
        raise NotImplementedError

    def _check_described(self, meta: Mapping[str, Any]) -> None:
        """Raise BufferMisuseError unless a state was made by a buffer like this one."""
        check_settings(meta, self._described())

    def _saved_arrays(self) -> dict[str, list[Block]]:
        """Arrays by name, each as consecutive blocks; may be views."""
        raise NotImplementedError

    def _wanted_arrays(self) -> Wanted:
        """Dtype and shape of the arrays of a state, None for lengths that may differ."""
        wanted: Wanted = {}
        for name, (first, *_) in self._saved_arrays().items():
            length = None if name in self._growing else len(first)
            wanted[name] = _on_host(first[:0]).dtype, (length, *first.shape[1:])
        return wanted

    def _check_arrays(self, state: LoadedState) -> None:
        """Raise BufferMisuseError unless a state fits this buffer and is consistent."""
        raise NotImplementedError

    def _take(self, state: LoadedState) -> None:
        """Take over a checked state; raise BufferMemoryError before anything is changed."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Copy the contents of the buffer: a dict of tensors, numbers, strings, lists and dicts."""
        state = self._copied_blocks()
        return {
            name: torch.from_numpy(np.concatenate(value)) if _is_array(value) else value
            for name, value in state.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned.

        Raises:
            BufferMisuseError: The state is of another kind of buffer, version or device, of a
                buffer with other spaces, sizes or options (the message lists them), or
                inconsistent; nothing was changed.
        """
        self._take_state(state)

    def _copied_blocks(self) -> dict[str, Any]:
        """As `state_dict`, with lists of arrays; on the host they are views, not copies."""
        saved = self._saved_arrays().items()
        return {**self._described(), **{name: [*map(_on_host, blocks)] for name, blocks in saved}}

    def _take_state(self, state: Mapping[str, Any]) -> None:
        self._check_described(state)
        wanted = self._wanted_arrays()
        found = {name for name, value in state.items() if _is_array(value) or name in wanted}
        if found != set(wanted):
            raise BufferMisuseError(
                f"state has the columns {sorted(found)}, but a buffer like this one saves "
                f"{sorted(wanted)}; pass what state_dict() returned"
            )
        blocks = {name: _state_blocks(name, state[name], *like) for name, like in wanted.items()}
        small = {name: np.concatenate(blocks[name]) for name in blocks if name not in self._large}
        loaded = LoadedState(small, {n: blocks[n] for n in self._large if n in blocks})
        self._check_arrays(loaded)
        self._take(loaded)


def _rebuild(
    cls: type[Any], maker: type[Any], arguments: tuple[Any, ...], options: Mapping[str, Any]
) -> Any:
    """Make an object of `cls` by the constructor of `maker`, which is one of its bases."""
    made = object.__new__(cls)
    maker.__init__(made, *arguments, **options)
    return made


class SavedBuffer(StatefulBuffer):
    """Mixin that adds `save`, `load` and `from_file`.

    Attributes:
        _kind: Name of the class in files.
        _options_in_files: Names of the constructor's arguments that are saved in files.
    """

    _kind: str
    _options_in_files: frozenset[str]

    def _file_state(self) -> dict[str, Any]:
        """The content of a file of `save`."""
        state = {"kind": self._kind, **self._copied_blocks(), _MADE_WITH: self._made_with()}
        return {n: [*map(torch.from_numpy, v)] if _is_array(v) else v for n, v in state.items()}

    def _made_with(self) -> dict[str, Any] | None:
        """Return the constructor's arguments for `from_file`; None if they do not make a buffer."""
        _, (capacity, *spaces), options = self._made_by
        made = {name: options[name] for name in sorted(self._options_in_files & options.keys())}
        return _plain(made | {"capacity": int(capacity), "spaces": spaces})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the contents of the buffer into a file, atomically.

        Raises:
            OSError: The disk is full or the folder is missing; an old file is kept.
        """
        if os.path.exists(path):
            _require_regular(path)
        state = self._file_state()
        with whole_file(Path(path)) as aside:
            try:
                with aside.open("wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
            except RuntimeError as error:  # torch's writer raises this for a full disk
                raise OSError(f"{path} can't be written: {str(error).splitlines()[0]}") from error

    def load(self, path: str | os.PathLike[str]) -> None:
        """Restore the contents that `save` wrote.

        The file is checked before use, but must not be written to meanwhile.

        Raises:
            CheckpointError: The file is damaged, truncated, no checkpoint, or does not fit this
                buffer, as in `load_state_dict`; nothing was changed.
            BufferMemoryError: There is no memory for arrays that have grown in the saved buffer;
                nothing was changed.
            OSError: The file cannot be opened.
        """
        self._load(read_state(path, self._kind), os.fspath(path))

    def _load(self, state: Mapping[str, Any], name: str) -> None:
        try:
            self._take_state(state)
        except BufferMisuseError as error:
            raise CheckpointError(f"{name}: {error}") from None

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str], *, device: torch.device | str | None = None
    ) -> Self:
        """Make a buffer from a file of `save`: with its size, spaces, options and contents.

        The file is checked before use, but must not be written to meanwhile.

        Args:
            path: The file.
            device: Device of the new buffer; None takes that of the saved one. It must be of the
                same kind as the old device, because the generator's state is restored.

        Raises:
            CheckpointError: The file is damaged, truncated or no checkpoint, of another class, or
                of a buffer whose rows are in a folder.
            BufferMemoryError: There is no memory for such a buffer.
            BufferMisuseError: There is no such device.
            OSError: The file cannot be opened.

        >>> import tempfile
        >>> from buffers import SharedReplayBuffer
        >>> from gymnasium.spaces import Box, Discrete
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     SharedReplayBuffer(1000, Box(-1, 1, (4,)), Discrete(2)).save(f"{folder}/replay.pt")
        ...     SharedReplayBuffer.from_file(f"{folder}/replay.pt").capacity
        1000
        """
        state, name = read_state(path, getattr(cls, "_kind", cls.__name__)), os.fspath(path)
        own_device = {} if device is None else {"device": resolve_device(device)}
        if not isinstance(made := state.get(_MADE_WITH), Mapping):
            raise CheckpointError(
                f"{name} does not say how its buffer was made, as of one with storage='memmap', "
                "whose rows are in its folder; make that buffer, and call its load"
            )
        try:
            given: dict[str, Any] = {k: made[k] for k in cls._options_in_files & made.keys()}
            if given.get("extra_columns") is not None:
                extras = given["extra_columns"].items()
                given["extra_columns"] = {column: space_of(found) for column, found in extras}
            make: Any = cls  # subclasses have other arguments
            spaces = map(space_of, made["spaces"])
            buffer = make(made["capacity"], *spaces, **{**given, **own_device})
        except _MALFORMED as error:
            raise CheckpointError(f"{name} says wrongly how its buffer was made: {error}") from None
        buffer._load(state, name)
        return buffer


def _plain(value: Any) -> Any:
    """An argument of a constructor as numbers, strings, lists, dicts and tensors."""
    if isinstance(value, Space):
        return describe_space(value)
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [*map(_plain, value)]
    if isinstance(value, torch.device):
        return str(value)
    return value.item() if isinstance(value, np.generic) else value


def read_state(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """Map a file that `save` wrote for a buffer of `kind`; nothing in it is executed.

    Raises:
        CheckpointError: The file is no such checkpoint, or of another kind.
        OSError: The file can't be opened, or is no regular file.
    """
    path = Path(path)
    _require_regular(path)
    with path.open("rb"):  # raises if it can't be opened
        pass
    try:
        with zipfile.ZipFile(path) as archive:  # torch does not verify checksums
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("it is compressed, which torch.save does not do")
            if (changed := archive.testzip()) is not None:
                raise ValueError(f"the bytes of {changed} have changed")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        found = state.get("kind")
    except (
        OSError, RuntimeError, ValueError, KeyError, EOFError, TypeError, AttributeError,
        IndexError, OverflowError, pickle.UnpicklingError, zipfile.BadZipFile,
    ) as error:  # fmt: skip
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # of offsets past the end
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path} is damaged, cut off, or no checkpoint of a buffer: {reason:.200}"
        ) from None
    if type(found) is str and found == kind:
        return state
    raise CheckpointError(f"{path} is of a {found!r:.99}, expected a {kind}")


def _require_regular(path: str | os.PathLike[str]) -> None:
    """Raise OSError unless the path is a regular file; opening a pipe would wait."""
    os.stat(path)
    if not os.path.isfile(path):
        why = "is no regular file, which a checkpoint has to be"
        raise OSError(errno.EINVAL, why, str(path))


def check_settings(state: Any, own: Mapping[str, Any]) -> None:
    """Raise BufferMisuseError, with a list of differences, for a state with other settings.

    `own` are the settings that the state must have, in the form in which JSON returns them.
    """
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        raise BufferMisuseError(f"state is a {kind}, expected what state_dict() returned")
    if differences := _differences("", {name: state.get(name) for name in own}, own):
        raise BufferMisuseError(
            f"state differs from this buffer: {'; '.join(differences[:20])}; load it into a buffer "
            "made with the same spaces, sizes and options"
        )


def _differences(path: str, found: Any, own: Any) -> list[str]:
    if isinstance(found, Mapping) and isinstance(own, Mapping):
        names = [*own, *(name for name in found if name not in own)]
        parts = (_differences(f"{path} {n!s:.99}".strip(), found.get(n), own.get(n)) for n in names)
        return [difference for part in parts for difference in part]
    is_same_kind = type(found) is type(own) or {type(found), type(own)} == {int, float}
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # of lists with arrays
        if is_same_kind and bool(found == own):
            return []
    return [f"{path} is {found!s:.200}, expected {own}"]


def check_bools(
    name: str, blocks: Iterable[np.ndarray], places: Iterable[tuple[int, int | None]] = ((0, None),)
) -> None:
    """Raise BufferMisuseError if rows (K, ...) of a state have bools that are neither 0 nor 1.

    `places` are the first byte of bools in a row, and their number; None means to the end.
    """
    places = list(places)
    for block in blocks:
        rows = block.view(np.uint8).reshape(len(block), block[:1].nbytes)
        for begin, size in places:
            if (rows[:, begin : None if size is None else begin + size] > 1).any():
                raise contradiction(f"bytes of bools in {name} are no bools")


def contradiction(reason: str) -> BufferMisuseError:
    """Return the error for an inconsistent state."""
    return BufferMisuseError(f"state contradicts itself; it was changed since: {reason}")


def _on_host(block: Block) -> np.ndarray:
    return block if isinstance(block, np.ndarray) else block.cpu().numpy()


def _is_array(value: Any) -> bool:
    """Whether an entry of a state is an array, or blocks of one."""
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, torch.Tensor | np.ndarray)


def _state_blocks(
    name: str, value: Any, dtype: np.dtype, shape: tuple[int | None, ...]
) -> list[np.ndarray]:
    """Convert an entry of a state to consecutive arrays, without copies if possible.

    Raises:
        BufferMisuseError: A block has another dtype or shape; None in `shape` is any length.
    """
    is_list = isinstance(value, list) and value and (len(value) == 1 or shape[0] is None)
    blocks: list[np.ndarray] = []
    block: Any
    for block in value if is_list else [value]:
        found = block
        if isinstance(block, torch.Tensor) and block.layout == torch.strided:
            with contextlib.suppress(TypeError, RuntimeError):  # bfloat16 and the like
                found = block.detach().cpu().numpy()
        fits = isinstance(found, np.ndarray) and (found.dtype, found.ndim) == (dtype, len(shape))
        if not fits or any(n not in (None, m) for n, m in zip(shape, found.shape, strict=True)):
            if name == "generator":
                raise other_generator()
            is_shaped = hasattr(block, "shape")
            told = f"{block.dtype} {tuple(block.shape)}" if is_shaped else f"{block!r:.200}"
            wanted = tuple("any" if n is None else n for n in shape)
            raise BufferMisuseError(
                f"state holds {told} for {name}, expected {dtype} {wanted}; pass what "
                "state_dict() returned"
            )
        blocks.append(np.ascontiguousarray(found))
    return blocks
