"""Checkpoint files: states written by `torch.save`, aside and then renamed, and read in safety."""

from __future__ import annotations

import errno
import os
import pickle
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from buffers.core.errors import CheckpointError
from vecenv.files import whole_file

__all__ = ["read_state", "write_state"]


def write_state(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write a state into a file, all or nothing: the old file stays until the new one is safe.

    Args:
        path: The file; what was there is replaced. Of a link, the file that it leads to.
        state: Tensors, numbers, strings, lists and dicts. Of a view all of its memory is written.

    Raises:
        OSError: The disk is full, or the folder is not there, or what is there is no regular file.
    """
    if os.path.exists(path):
        _require_regular(path)
    with whole_file(Path(path)) as aside:
        try:
            with aside.open("wb") as file:
                torch.save(dict(state), file)
                file.flush()
                os.fsync(file.fileno())
        except RuntimeError as error:  # of torch's writer, when the disk refuses
            raise OSError(f"{path} can't be written: {str(error).splitlines()[0]}") from error


def read_state(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """What `write_state` wrote, mapped into memory; nothing in it is executed, or believed.

    Args:
        path: The file, which others must not write to meanwhile.
        kind: The entry of that name, which tells the class of the buffer.

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
        if not isinstance(state, dict):
            raise TypeError(f"it has a {type(state).__name__}")
    except OSError as error:
        if error.errno != errno.EINVAL:  # a place that the file does not have
            raise
        reason = "it is cut off"
    except (
        RuntimeError, ValueError, KeyError, EOFError, TypeError, AttributeError, IndexError,
        NotImplementedError, OverflowError, pickle.UnpicklingError, zipfile.BadZipFile,
    ) as error:  # fmt: skip
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    else:
        if type(found := state.get("kind")) is str and found == kind:
            return state
        raise CheckpointError(f"{path} is of a {found!r:.99}, expected a {kind}")
    raise CheckpointError(
        f"{path} is damaged, cut off, or no checkpoint of a buffer: {reason:.200}"
    )


def _require_regular(path: str | os.PathLike[str]) -> None:
    """Raise OSError for what can't be read as a whole; a pipe is not waited for."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        why = "is no regular file, which a checkpoint has to be"
        raise OSError(errno.EINVAL, why, str(path))
