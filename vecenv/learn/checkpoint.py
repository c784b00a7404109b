"""Checkpoints: the state of a training in a file that is written whole and read unbelieved.

A file is one of `torch.save`, which `torch.load` reads with `weights_only=True`. Bytes in a state,
which is what pickled envs are, are signed with a key that this user alone has, and read only if the
signature is right: unpickling runs code, so nobody else's pickles are given to anything that would.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import random
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vecenv.files import whole_file

__all__ = [
    "CheckpointError",
    "RunError",
    "load_checkpoint",
    "random_streams",
    "restore_random_streams",
    "save_checkpoint",
    "why_not_numpy_state",
]

FORMAT = "vecenv checkpoint 2"
_MARK = "\0what"
_KEY_BYTES = 32


class RunError(RuntimeError):
    """A run can't be begun, saved or resumed; what was in its folder is still there."""


class CheckpointError(RunError):
    """A checkpoint can't be read, can't be written, or is of another training."""


def save_checkpoint(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a checkpoint, as a whole or not at all, and wait until it is on the disk.

    Args:
        path: The file.
        content: Dicts, lists and tuples of tensors, arrays without Python objects, numbers,
            strings, bools, bytes and None. Tensors may be on any device.

    Raises:
        TypeError: It holds something else, which is named.
        OSError: It can't be written; the file that was there is as before.
    """
    packed = _pack(dict(content), "state")
    with whole_file(path) as aside:
        try:
            with aside.open("wb") as file:
                torch.save({"format": FORMAT, "content": packed}, file)
                file.flush()
                os.fsync(file.fileno())  # or a power cut might leave an empty file
        except RuntimeError as error:  # of torch's writer, when the disk refuses
            raise OSError(f"{path}: {str(error).splitlines()[0]:.200}") from error


def load_checkpoint(path: str | Path, *, allow_pickle: bool = False) -> dict[str, Any]:
    """Read a checkpoint; nothing in the file is executed.

    Args:
        path: The file, such as `folder/checkpoint/best.pt`.
        allow_pickle: Whether to take over bytes that are not signed by this user, too. They are
            None otherwise. Whoever unpickles them runs what is in them.

    Returns:
        What was saved, tensors on the CPU. In a checkpoint of `Run`, `["state"]` is what `Run.save`
        was given.

    Raises:
        CheckpointError: It is no checkpoint, of another version, or damaged.
        OSError: It can't be read.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if (found := saved["format"]) != FORMAT:
            raise CheckpointError(
                f"{path} has the format {found!r:.99}, expected {FORMAT!r}: it was written by "
                "another version of vecenv; go on with that one"
            )
        content = _unpack(saved["content"], None if allow_pickle else _key(create=False))
        if not isinstance(content, dict):
            raise ValueError("it is no dict")
    except Exception as error:  # torch raises many kinds
        is_elsewhere = isinstance(error, OSError) and error.errno != errno.EINVAL  # not cut off
        if isinstance(error, CheckpointError) or is_elsewhere:
            raise
        raise CheckpointError(
            f"{path} is no checkpoint, or damaged ({error!s:.200}); take another one, such as "
            "best.pt beside it"
        ) from error
    return content


def random_streams() -> dict[str, Any]:
    """Return the states of the global random generators of torch, NumPy and Python."""
    streams: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 - code of users' may use it
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        streams["cuda"] = torch.cuda.get_rng_state_all()
    return streams


def restore_random_streams(streams: Mapping[str, Any]) -> None:
    """Let the global random generators go on from what `random_streams` returned.

    Raises:
        LookupError, TypeError, ValueError, RuntimeError, OverflowError: It is something else.
    """
    if (reason := why_not_numpy_state(streams["numpy"])) is not None:
        raise ValueError(reason)
    torch.set_rng_state(streams["torch"])
    np.random.set_state(streams["numpy"])  # noqa: NPY002  # the global one
    random.setstate(streams["python"])
    if "cuda" in streams and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(streams["cuda"][: torch.cuda.device_count()])


def why_not_numpy_state(state: Any) -> str | None:
    """Say in what a state of a generator of NumPy's has a place outside the generator's memory.

    NumPy takes over such places unchecked, and reads there.
    """
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return "no state of a generator of NumPy's"
    position, place = state["state"].get("pos", 0), state.get("buffer_pos", 0)
    if not (type(position) is int and 0 <= position <= 624 and type(place) is int):
        return "a wrong position in the random numbers"
    return None if 0 <= place <= 4 else "a wrong position in the random numbers"


# -- a state as what `torch.load` reads without executing anything ---------------------------------
#
# Arrays, scalars of NumPy and bytes become a dict of one entry, `_MARK`: their kind and content.


def _pack(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            raise TypeError(
                f"{where} is a tensor of the layout {value.layout}, expected torch.strided; save "
                "its to_dense()"
            )
        plain = value.detach().cpu().resolve_conj().resolve_neg()
        is_part = plain.untyped_storage().nbytes() != plain.numel() * plain.element_size()
        return plain.clone() if is_part else plain  # torch writes the whole memory
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise TypeError(f"{where} is an array of objects, expected numbers, bools or text")
        kind = "scalar" if isinstance(value, np.generic) else "array"
        described = np.lib.format.dtype_to_descr(array.dtype)
        return {_MARK: (kind, described, array.shape, _as_tensor(array.tobytes()))}
    if isinstance(value, bytes):
        return {_MARK: ("bytes", _as_tensor(value), _signature(value, _key(create=True)))}
    if isinstance(value, Mapping):
        return {_pack_key(k, where): _pack(x, f"{where}[{k!r}]") for k, x in value.items()}
    if isinstance(value, list | tuple):
        items = [_pack(item, f"{where}[{n}]") for n, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, str):  # of a subclass, such as an enum's, as are these numbers
        return str.__str__(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    raise TypeError(
        f"{where} is {type(value).__name__}, expected tensors, arrays, numbers, strings, bools, "
        "bytes, None, and dicts, lists and tuples of them; give what its `state_dict()` returns"
    )


def _pack_key(key: Any, where: str) -> Any:
    packed = _pack(key, where)
    if packed == _MARK or isinstance(packed, dict | list | torch.Tensor):
        raise TypeError(f"{where} is a dict with the key {key!r:.99}, expected numbers or text")
    return packed


def _as_tensor(content: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(content), np.uint8))


def _unpack(packed: Any, key: bytes | None) -> Any:
    """Undo `_pack`; bytes are believed if they are signed with the key, or if it is None."""
    if isinstance(packed, list | tuple):
        return type(packed)(_unpack(item, key) for item in packed)
    if isinstance(packed, torch.Tensor):
        size = packed.numel() * packed.element_size()
        if packed.layout != torch.strided or size > packed.untyped_storage().nbytes():
            raise ValueError(f"a tensor {tuple(packed.shape)} without so much memory")
        return packed.detach()
    if packed is None or type(packed) in (bool, int, float, str):
        return packed
    if not isinstance(packed, dict):
        raise ValueError(f"it has a {type(packed).__name__}")
    if _MARK not in packed:
        return {name: _unpack(item, key) for name, item in packed.items()}
    kind, *rest = packed[_MARK]
    if kind == "bytes":
        content = rest[0].numpy().tobytes()
        return content if key is None or _is_signed(content, rest[1], key) else None
    described, shape, content = rest
    dtype = np.lib.format.descr_to_dtype(described)
    if dtype.hasobject:
        raise ValueError(f"{dtype!s:.99} is no dtype of numbers")
    found = np.frombuffer(bytearray(content.numpy().tobytes()), dtype) if dtype.itemsize else None
    array = np.zeros(shape, dtype) if found is None else found.reshape(shape)
    return array[()] if kind == "scalar" else array


# -- signatures ------------------------------------------------------------------------------------


def _key(*, create: bool) -> bytes:
    """Return this user's key; make one at the first use. Empty if there is none."""
    home = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    path = Path(home) / "vecenv" / "checkpoint.key"
    with contextlib.suppress(OSError):
        if create and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(f".{secrets.token_hex(8)}")
            number = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(number, "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
            with contextlib.suppress(FileExistsError):  # another process was first
                os.link(aside, path)
            aside.unlink()
        key = path.read_bytes()
        if len(key) == _KEY_BYTES:
            return key
    return b""


def _signature(content: bytes, key: bytes) -> str:
    return hmac.new(key, content, hashlib.sha256).hexdigest() if key else ""


def _is_signed(content: bytes, signature: Any, key: bytes) -> bool:
    is_text = isinstance(signature, str) and signature.isascii()
    return bool(key) and is_text and hmac.compare_digest(signature, _signature(content, key))
