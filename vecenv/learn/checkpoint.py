"""Checkpoints: the state of a training in a file that is written whole and read unbelieved.

A file is an npz archive without pickles, see `vecenv.files`. Bytes in a state, which is what
pickled envs are, are signed with a key that this user alone has, and read only if the signature is
right: unpickling runs code, so nobody else's pickles are given to anything that would.
"""

from __future__ import annotations

import contextlib
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

from vecenv.files import load_arrays, save_arrays, whole_file

__all__ = [
    "CheckpointError",
    "RunError",
    "load_checkpoint",
    "random_streams",
    "restore_random_streams",
    "save_checkpoint",
    "why_not_numpy_state",
]

FORMAT = "vecenv checkpoint 1"
_KEY_BYTES = 32
_PLAIN_KINDS = "biufU"  # of arrays, as `vecenv.files` takes them


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
        save_arrays(aside, {"format": FORMAT, "content": packed})
        with aside.open("rb+") as file:  # or a power cut might leave an empty file
            os.fsync(file.fileno())


def load_checkpoint(path: str | Path, *, allow_pickle: bool = False) -> dict[str, Any]:
    """Read a checkpoint; nothing in the file is executed.

    Args:
        path: The file, such as `folder/checkpoint/best.npz`.
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
        saved = load_arrays(path)
        if (found := saved["format"]) != FORMAT:
            raise CheckpointError(
                f"{path} has the format {found!r:.99}, expected {FORMAT!r}: it was written by "
                "another version of vecenv; go on with that one"
            )
        content = _unpack(saved["content"], None if allow_pickle else _key(create=False))
        if not isinstance(content, dict):
            raise ValueError("it is no dict")
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, RuntimeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no checkpoint, or damaged ({error!s:.200}); take another one, such as "
            "best.npz beside it"
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
        LookupError, TypeError, ValueError, RuntimeError: It is something else.
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


# -- a state as what `save_arrays` takes -----------------------------------------------------------
#
# What is no plain value becomes a list of what it is and what is in it.


def _pack(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            raise TypeError(
                f"{where} is a tensor of the layout {value.layout}, expected torch.strided; save "
                "its to_dense()"
            )
        return _pack_tensor(value)
    if isinstance(value, np.ndarray | np.generic):
        return _pack_array(value, where)
    if isinstance(value, bytes):
        return ["bytes", np.frombuffer(value, np.uint8), _signature(value, _key(create=True))]
    if isinstance(value, Mapping):
        keys = [_pack(key, where) for key in value]
        return ["dict", keys, [_pack(item, f"{where}[{key!r}]") for key, item in value.items()]]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_pack(item, f"{where}[{n}]") for n, item in enumerate(value)]]
    if isinstance(value, str):  # of a subclass, such as an enum's
        return str.__str__(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    raise TypeError(
        f"{where} is {type(value).__name__}, expected tensors, arrays, numbers, strings, bools, "
        "bytes, None, and dicts, lists and tuples of them; give what its `state_dict()` returns"
    )


def _pack_tensor(tensor: torch.Tensor) -> Any:
    dtype = str(tensor.dtype).removeprefix("torch.")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    try:
        array = plain.numpy()
        if array.dtype.kind in _PLAIN_KINDS:
            return ["tensor", dtype, list(plain.shape), array]
    except TypeError:  # bfloat16 and the like
        pass
    return ["tensor", dtype, list(plain.shape), plain.reshape(-1).view(torch.uint8).numpy()]


def _unpack_tensor(dtype: str, shape: list[int], array: np.ndarray) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{dtype!r:.99} is no dtype of torch")
    tensor = torch.from_numpy(array)
    if tensor.dtype != kind:
        tensor = tensor.reshape(-1).view(kind)
    return tensor.reshape(tuple(shape))


def _pack_array(array: Any, where: str) -> Any:
    is_scalar = isinstance(array, np.generic)
    array = np.asarray(array)
    if array.dtype.hasobject:
        raise TypeError(f"{where} is an array of Python objects, expected numbers, bools or text")
    if array.dtype.kind in _PLAIN_KINDS:
        return ["scalar" if is_scalar else "array", array]
    described = np.lib.format.dtype_to_descr(array.dtype)
    items = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    return ["records", _as_lists(described), list(array.shape), items]


def _unpack_records(described: Any, shape: list[int], items: np.ndarray) -> np.ndarray:
    dtype = np.lib.format.descr_to_dtype(_as_described(described))
    if dtype.hasobject or not dtype.itemsize:
        raise ValueError(f"{dtype!s:.99} is no dtype of numbers")
    return np.frombuffer(bytearray(items.tobytes()), dtype).reshape(tuple(shape))


def _as_lists(described: Any) -> Any:
    is_nest = isinstance(described, list | tuple)
    return [_as_lists(part) for part in described] if is_nest else described


def _as_described(lists: Any) -> Any:
    """Undo `_as_lists`: fields are tuples, in lists, and so are shapes."""
    if isinstance(lists, str):
        return lists
    fields = []
    for name, kind, *shape in lists:
        fields.append((name, _as_described(kind), *(tuple(lengths) for lengths in shape)))
    return fields


def _unpack(packed: Any, key: bytes | None) -> Any:
    """Undo `_pack`; bytes are believed if they are signed with the key, or if it is None."""
    if not isinstance(packed, list):
        return packed
    kind, *rest = packed
    if kind == "dict":
        keys, items = rest
        pairs = zip(keys, items, strict=True)
        return {_unpack(k, key): _unpack(item, key) for k, item in pairs}
    if kind in ("list", "tuple"):
        found = (_unpack(item, key) for item in rest[0])
        return list(found) if kind == "list" else tuple(found)
    if kind == "tensor":
        return _unpack_tensor(*rest)
    if kind == "array":
        return rest[0]
    if kind == "scalar":
        return rest[0][()]
    if kind == "records":
        return _unpack_records(*rest)
    if kind == "bytes":
        content = rest[0].tobytes()
        return content if key is None or _is_signed(content, rest[1], key) else None
    raise ValueError(f"it has a part {kind!r:.99}")


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
