"""States of buffers, as a dict, as a file or in a copy; what is loaded is checked before.

Sizes, ranges and places in a state are looked at, so that none can make a buffer read or write
other memory; whether transitions follow one another as they say is not. Files are written by
`torch.save`, aside and then renamed; nothing in them is executed.
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
    """A state that is about to be taken over."""

    small: dict[str, np.ndarray]  # copies of all arrays but the large ones
    large: Mapping[str, Sequence[np.ndarray]]  # those, as blocks that follow one another


class StatefulBuffer:
    """Gives a buffer `state_dict` and `load_state_dict`.

    A class says what its state is by the methods that raise NotImplementedError here. For copies,
    by `copy` and pickle, it calls `self._remember(TheClass, *arguments)` at the end of its
    constructor, with those, also by name, that make an empty buffer of the same kind, but for
    `seed`: a copy is made anew and filled, so that all views of its memory are of the same memory
    again, and none of the old one's. It lacks attributes that were added.
    """

    _made_by: tuple[type, tuple[Any, ...], dict[str, Any]]

    _large: tuple[str, ...] = ()  # arrays of which there are no copies besides
    _growing: tuple[str, ...] = ()  # arrays of no certain length

    def _remember(self, maker: type, *arguments: Any, **options: Any) -> None:
        self._made_by = maker, arguments, options

    def _check_copyable(self) -> None:
        """Raise if what the object holds is not copied."""

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_copyable()
        return _rebuild, (type(self), *self._made_by), self._copied_blocks()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._take_state(state)

    def _described(self) -> dict[str, Any]:
        """What is saved beside arrays: version, settings, fields; JSON has all of it."""
        raise NotImplementedError

    def _check_described(self, meta: Mapping[str, Any]) -> None:
        """Raise BufferMisuseError unless a state was made by a buffer like this one."""
        check_settings(meta, self._described())

    def _saved_arrays(self) -> dict[str, list[Block]]:
        """The arrays by name, each as blocks that follow one another; views of memory will do."""
        raise NotImplementedError

    def _wanted_arrays(self) -> Wanted:
        """Dtype and shape of the arrays of a state, None for lengths that may differ."""
        wanted: Wanted = {}
        for name, (first, *_) in self._saved_arrays().items():
            length = None if name in self._growing else len(first)
            wanted[name] = _on_host(first[:0]).dtype, (length, *first.shape[1:])
        return wanted

    def _check_arrays(self, state: LoadedState) -> None:
        """Raise BufferMisuseError unless a state fits this buffer, and its parts one another."""
        raise NotImplementedError

    def _take(self, state: LoadedState) -> None:
        """Take over a state that was checked; raise BufferMemoryError, having changed nothing."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """All that is held, as copies: tensors, numbers, strings, lists, dicts."""
        state = self._copied_blocks()
        return {
            name: torch.from_numpy(np.concatenate(value)) if _is_array(value) else value
            for name, value in state.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the buffer stood that `state_dict` was called on.

        Raises:
            BufferMisuseError: The state is of another kind of buffer, version or device, or of one
                made with other spaces, sizes or options, which are listed, or it contradicts
                itself; nothing was changed.
        """
        self._take_state(state)

    def _copied_blocks(self) -> dict[str, Any]:
        """As `state_dict`, of lists of arrays, over the memory itself where that is on the host."""
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
    """An object of a class, as the constructor of `maker`, one of its bases, leaves it."""
    made = object.__new__(cls)
    maker.__init__(made, *arguments, **options)
    return made


class SavedBuffer(StatefulBuffer):
    """Gives a buffer `save` and `load` too.

    Attributes:
        _kind: Of the class, in files.
        _options_in_files: Names of those arguments of the constructor that are in files.
    """

    _kind: str
    _options_in_files: frozenset[str]

    def _file_state(self) -> dict[str, Any]:
        """What `save` writes."""
        state = {"kind": self._kind, **self._copied_blocks(), _MADE_WITH: self._made_with()}
        return {n: [*map(torch.from_numpy, v)] if _is_array(v) else v for n, v in state.items()}

    def _made_with(self) -> dict[str, Any] | None:
        """Return the constructor's arguments for `from_file`; None if they do not make a buffer."""
        _, (capacity, *spaces), options = self._made_by
        made = {name: options[name] for name in sorted(self._options_in_files & options.keys())}
        return _plain(made | {"capacity": int(capacity), "spaces": spaces})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all that is held into a file, all or nothing.

        Raises:
            OSError: The disk is full or the folder is not there; a file that was there stays.
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
            except RuntimeError as error:  # of torch's writer, when the disk refuses
                raise OSError(f"{path} can't be written: {str(error).splitlines()[0]}") from error

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue where the buffer stood that `save` was called on.

        Nothing in a file is believed, but others must not write to it meanwhile.

        Raises:
            CheckpointError: The file is damaged, cut off, no checkpoint, or does not fit this
                buffer, as in `load_state_dict`; nothing was changed.
            BufferMemoryError: It has more of what grows than there is memory for; nothing was
                changed.
            OSError: It cannot be opened.
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
        """Make a buffer of what `save` wrote: of its size, spaces and options, and filled.

        Nothing in a file is believed, but others must not write to it meanwhile.

        Args:
            path: Of the file.
            device: Where the buffer is to live; None takes that of the buffer that was saved. Its
                generator goes on, so that it must be of the same kind.

        Raises:
            CheckpointError: The file is damaged, cut off, or no checkpoint, or of another class, or
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
            make: Any = cls  # whose constructors have other arguments
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
    """What `save` of a buffer of that kind wrote, mapped into memory; nothing in it is executed.

    Raises:
        CheckpointError: It is no such file, or of another kind.
        OSError: It can't be opened, or is no regular file.
    """
    path = Path(path)
    _require_regular(path)
    with path.open("rb"):  # says why it can't be
        pass
    try:
        with zipfile.ZipFile(path) as archive:  # torch does not look at checksums
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
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # of places behind its end
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path} is damaged, cut off, or no checkpoint of a buffer: {reason:.200}"
        ) from None
    if type(found) is str and found == kind:
        return state
    raise CheckpointError(f"{path} is of a {found!r:.99}, expected a {kind}")


def _require_regular(path: str | os.PathLike[str]) -> None:
    """Raise OSError for what can't be read as a whole; a pipe is not waited for."""
    os.stat(path)
    if not os.path.isfile(path):
        why = "is no regular file, which a checkpoint has to be"
        raise OSError(errno.EINVAL, why, str(path))


def check_settings(state: Any, own: Mapping[str, Any]) -> None:
    """Refuse a state, from a file or not, of a buffer that was made otherwise than this one.

    `own` are the settings, as JSON gives them back, that the state is to have; raises
    BufferMisuseError, which lists differences.
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

    `places` say from which byte of a row on bools lie, and how many.
    """
    places = list(places)
    for block in blocks:
        rows = block.view(np.uint8).reshape(len(block), block[:1].nbytes)
        for begin, size in places:
            if (rows[:, begin : None if size is None else begin + size] > 1).any():
                raise contradiction(f"bytes of bools in {name} are no bools")


def contradiction(reason: str) -> BufferMisuseError:
    """The error for a state whose parts do not fit one another."""
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
    """An entry of a state as arrays that follow one another, over the same memory if possible.

    Raises:
        BufferMisuseError: One is no tensor of this dtype and shape, where None is any length.
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
