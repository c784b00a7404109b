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
import io
import os
import random
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import nn

from vecenv.core.errors import EnvStateError
from vecenv.files import whole_file

__all__ = [
    "CheckpointError",
    "RunError",
    "load_checkpoint",
    "random_streams",
    "restore_part",
    "restore_random_streams",
    "save_checkpoint",
    "states_of",
]

FORMAT = "vecenv checkpoint 3"
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


# -- parts of a training, by their kind ------------------------------------------------------------


def states_of(
    parts: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, dict[str, Any]], dict[str, str]]:
    """Return the states of parts by name; what vector envs are, and why some have no state.

    Raises:
        CheckpointError: A module has NaN or infinity in it.
    """
    states, kinds, unsaved = {}, {}, {}
    for name, part in parts.items():
        if isinstance(part, VectorEnv):
            kinds[name] = _kind_of(part)
        try:
            states[name] = _state_of(part)
        except EnvStateError as error:
            states[name], unsaved[name] = None, str(error)
        if isinstance(part, nn.Module):
            for entry, tensor in states[name].items():
                is_float = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
                if is_float and not torch.isfinite(tensor).all():
                    raise CheckpointError(
                        f"{name} has NaN or infinity in {entry}, so no checkpoint is written; the "
                        "one before is kept: go on from it with other options (a lower learning "
                        "rate)"
                    )
    return states, kinds, unsaved


def _state_of(part: Any) -> Any:
    if isinstance(part, torch.Generator):
        return part.get_state()
    if isinstance(part, np.random.Generator):
        return part.bit_generator.state
    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        return part.state_dict()
    if isinstance(part, VectorEnv):
        raise EnvStateError(f"{type(part).__name__} has no state_dict")
    return part


def _kind_of(envs: VectorEnv) -> dict[str, Any]:
    return {
        "number of envs": envs.num_envs,
        "observation space": str(envs.single_observation_space),
        "action space": str(envs.single_action_space),
        "autoreset mode": str(envs.metadata.get("autoreset_mode")),
    }


def restore_part(part: Any, state: Any, kind: Mapping[str, Any] | None) -> str | None:
    """Bring a part into a state; return why that can't be, of envs that have to be reset.

    Args:
        part: The object.
        state: What `states_of` returned for it.
        kind: Of envs, what `states_of` returned.

    Raises:
        Exception: The state does not fit, in whatever way its class says so.
    """
    if isinstance(part, torch.Generator):
        part.set_state(state)
    elif isinstance(part, np.random.Generator):
        _require_numpy_state(state)
        part.bit_generator.state = state
    elif isinstance(part, VectorEnv):
        for key, own in _kind_of(part).items():
            found = None if kind is None else kind.get(key)
            if found != own:
                raise ValueError(f"it has {key} {found!s:.300}, expected {own!s:.300}")
        envs: Any = part
        try:
            envs.load_state_dict(state)
        except EnvStateError as error:
            return str(error)
    elif isinstance(part, torch.optim.Optimizer):
        _require_optimizer_state(part, state)
        part.load_state_dict(state)
    else:
        part.load_state_dict(state)
    return None


def _require_optimizer_state(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Compare shapes, which torch's fused kernels take for right, and would write beyond."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    if len(indices) != len(parameters):
        raise ValueError(f"it has {len(indices)} parameters, expected {len(parameters)}")
    for number, (index, parameter) in enumerate(zip(indices, parameters, strict=True)):
        for name, tensor in state["state"].get(index, {}).items():
            if not isinstance(tensor, torch.Tensor):
                continue
            if tensor.shape != (() if name == "step" else parameter.shape):
                found, expected = tuple(tensor.shape), tuple(parameter.shape)
                raise ValueError(f"{name} of parameter {number} is {found}, expected {expected}")
            if name == "step" and tensor.dtype != torch.float32:
                raise ValueError(f"the steps of parameter {number} are {tensor.dtype}")


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
        Exception: It is something else, as the generators' own setters say.
    """
    _require_numpy_state(streams["numpy"])
    torch.set_rng_state(streams["torch"])
    np.random.set_state(streams["numpy"])  # noqa: NPY002
    random.setstate(streams["python"])
    if "cuda" in streams and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(streams["cuda"][: torch.cuda.device_count()])


def _require_numpy_state(state: Any) -> None:
    """Look at the places in a generator's numbers, which NumPy takes over, and reads, unchecked."""
    place, other = state["state"].get("pos", 0), state.get("buffer_pos", 0)
    if not (type(place) is type(other) is int and 0 <= place <= 624 and 0 <= other <= 4):
        raise ValueError("a wrong position in the random numbers")


# -- a state as what `torch.load` reads without executing anything ---------------------------------
#
# Arrays, scalars of NumPy and bytes become a dict of one entry, `_MARK`: their kind and content.


def _pack(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            kind = f"is a tensor of the layout {value.layout}, expected torch.strided"
            raise TypeError(f"{where} {kind}; save its to_dense()")
        plain = value.detach().cpu().resolve_conj().resolve_neg()
        is_part = plain.untyped_storage().nbytes() != plain.numel() * plain.element_size()
        return plain.clone() if is_part else plain  # torch writes the whole memory
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            raise TypeError(f"{where} is an array of objects, expected numbers, bools or text")
        file = io.BytesIO()
        np.lib.format.write_array(file, np.asarray(value), allow_pickle=False)
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {_MARK: (kind, _as_tensor(file.getvalue()))}
    if isinstance(value, bytes):
        return {_MARK: ("bytes", _as_tensor(value), _signature(value, _key(create=True)))}
    if isinstance(value, Mapping):
        packed = {_pack(key, where): _pack(x, f"{where}[{key!r}]") for key, x in value.items()}
        if _MARK in packed:
            raise TypeError(f"{where} is a dict with the key {_MARK!r}, which is taken")
        return packed
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
    kind, tensor, *more = packed[_MARK]
    content = _unpack(tensor, key).numpy().tobytes()
    if kind == "bytes":
        if key is None or (key and hmac.compare_digest(str(*more), _signature(content, key))):
            return content
        return None
    array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
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
        return key if len(key) == _KEY_BYTES else b""
    return b""


def _signature(content: bytes, key: bytes) -> str:
    return hmac.new(key, content, hashlib.sha256).hexdigest() if key else ""
