"""Checkpoints: the state of a training in a file that is written whole and read unbelieved.

A file is one of `torch.save`, read with `weights_only=True`. Bytes, which is what pickled envs are,
are signed with a key that this user alone has, and read only if the signature is right: unpickling
runs code, so nobody else's pickles are given to anything that would.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import logging
import os
import random
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor, nn

from vecenv.core.errors import EnvStateError
from vecenv.files import whole_file

__all__ = ["CheckpointError", "RunError", "load_checkpoint", "save_checkpoint"]

FORMAT = "vecenv checkpoint 3"
_MARK = "\0what"  # key of a dict that stands for an array (False) or bytes (a signature)
_logger = logging.getLogger("vecenv")


class RunError(RuntimeError):
    """A run can't be begun, saved or resumed; what was in its folder is still there."""


class CheckpointError(RunError):
    """A checkpoint can't be read, can't be written, or is of another training."""


def save_checkpoint(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a checkpoint, as a whole or not at all, and wait until it is on the disk.

    `content` are tensors, arrays, numbers, strings, bytes, None, and dicts, lists and tuples of
    them. TypeError if it has something else; OSError if it can't be written.
    """
    packed = {"format": FORMAT, "content": _pack(dict(content), "state")}
    try:
        with whole_file(path) as aside, aside.open("wb") as file:
            torch.save(packed, file)
            file.flush()
            os.fsync(file.fileno())  # or a power cut might leave an empty file
    except RuntimeError as error:  # of torch's writer, when the disk refuses
        raise OSError(f"{path}: {str(error).splitlines()[0]:.200}") from error


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint; nothing in the file is executed.

    Returns:
        What was saved, tensors on the CPU; None for bytes that this user has not signed. In a
        checkpoint of `Run`, `["state"]` is what `Run.save` was given.

    Raises:
        CheckpointError: It is no checkpoint, of another version, or damaged.
        OSError: It can't be read.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if (found := saved["format"]) != FORMAT:
            raise ValueError(f"it has the format {found!r:.99}, expected {FORMAT!r}")
        return dict(_unpack(saved["content"]))
    except Exception as error:  # torch raises many kinds
        if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
            raise
        what = f"{path} is no checkpoint, or damaged, or of another version ({error!s:.200})"
        raise CheckpointError(f"{what}; take another one, such as best.pt beside it") from error


def states_of(parts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the states of parts and of global random generators, and why envs have none."""
    states, unsaved = {}, {}
    for name, part in parts.items():
        try:
            states[name] = state = _state_of(part)
        except EnvStateError as error:
            states[name], unsaved[name], state = None, str(error), {}
        for entry, tensor in state.items() if isinstance(part, nn.Module) else ():
            if isinstance(tensor, Tensor) and not torch.isfinite(tensor).all():
                what = f"{name} has NaN or infinity in {entry}, so no checkpoint is written"
                raise CheckpointError(f"{what}; go on from the one before with other options")
    streams: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 - code of users' may use it
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        streams["cuda"] = torch.cuda.get_rng_state_all()
    return {"state": states, "unsaved": unsaved, "random": streams}


def restore_parts(parts: Mapping[str, Any], saved: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Bring parts and random generators into their states; return why envs have to be reset."""
    not_restored, name = {}, ""
    try:
        for name, part in parts.items():
            try:
                state = saved["state"].pop(name)
                if name in saved["unsaved"]:
                    raise EnvStateError(saved["unsaved"][name])
                _restore(part, state)
            except EnvStateError as error:
                not_restored[name] = str(error)
                _logger.warning("%s: not as they were, so reset them: %s", name, error)
        name, streams = "the random streams", saved["random"]
        torch.set_rng_state(streams["torch"])
        np.random.set_state(_checked(streams["numpy"]))  # noqa: NPY002
        random.setstate(streams["python"])
        if "cuda" in streams and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(streams["cuda"][: torch.cuda.device_count()])
    except Exception as error:  # any class's load_state_dict, or setter of a random stream
        problem = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        what = f"{path} does not fit {name}: {' '.join(problem.split()):.500}"
        raise CheckpointError(f"{what}; make {name} as it was, or begin anew") from error
    return not_restored


def _state_of(part: Any) -> Any:
    if isinstance(part, torch.Generator | np.random.Generator):
        return part.get_state() if isinstance(part, torch.Generator) else part.bit_generator.state
    if hasattr(part, "load_state_dict"):
        return part.state_dict()
    if isinstance(part, VectorEnv):
        raise EnvStateError(f"{type(part).__name__} has no state_dict")
    return part


def _restore(part: Any, state: Any) -> None:
    """Bring a part into a state; if it does not fit, its class says so in whatever way."""
    if isinstance(part, torch.Generator):
        part.set_state(state)
    elif isinstance(part, np.random.Generator):
        part.bit_generator.state = _checked(state)
    else:
        part.load_state_dict(state)
    found: Any = part.state if isinstance(part, torch.optim.Optimizer) else {}
    for p, of_parameter in found.items():
        for name, x in of_parameter.items():  # torch's fused kernels write beyond shorter ones
            shape = () if name == "step" else p.shape
            if isinstance(x, Tensor) and (x.shape != shape or x.dtype != torch.float32):
                found.clear()
                raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, expected {tuple(shape)}")


def _checked(state: Any) -> Any:
    """Return the state of a generator of NumPy, which reads at the places in it unchecked."""
    place, other = state["state"].get("pos", 0), state.get("buffer_pos", 0)
    if not (type(place) is type(other) is int and 0 <= place <= 624 and 0 <= other <= 4):
        raise ValueError("a wrong position in the random numbers")
    return state


def _pack(value: Any, where: str) -> Any:
    """Return a state of tensors and plain values alone."""
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor) and value.layout == torch.strided:
        plain = value.detach().cpu()
        is_part = plain.untyped_storage().nbytes() != plain.numel() * plain.element_size()
        return plain.clone() if is_part else plain  # torch writes the whole memory
    if isinstance(value, Mapping):
        return {_pack(key, where): _pack(x, f"{where}[{key!r}]") for key, x in value.items()}
    if isinstance(value, list | tuple):
        items = [_pack(item, f"{where}[{n}]") for n, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    signature = False
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        np.lib.format.write_array(file := io.BytesIO(), value, allow_pickle=False)
        content = file.getvalue()
    elif isinstance(value, bytes):
        signature, content = _signature(value, create=True), value
    else:
        wanted = "dense tensors, arrays, numbers, strings, bytes, None, and nests of them"
        raise TypeError(f"{where} is {type(value).__name__}, expected {wanted}")
    return {_MARK: (signature, torch.from_numpy(np.frombuffer(bytearray(content), np.uint8)))}


def _unpack(packed: Any) -> Any:
    """Undo `_pack`; bytes that are not signed become None."""
    if isinstance(packed, list | tuple):
        return type(packed)(map(_unpack, packed))
    if isinstance(packed, Tensor):
        size = packed.numel() * packed.element_size()
        if packed.layout != torch.strided or size > packed.untyped_storage().nbytes():
            raise ValueError(f"a tensor {tuple(packed.shape)} without so much memory")
        return packed.detach()
    if packed is None or type(packed) in (bool, int, float, str):
        return packed
    if not isinstance(packed, dict):
        raise ValueError(f"it has a {type(packed).__name__}")
    if _MARK not in packed:
        return {name: _unpack(item) for name, item in packed.items()}
    signature, tensor = packed[_MARK]
    content = _unpack(tensor).numpy().tobytes()
    if not isinstance(signature, str):
        return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    is_own = signature and hmac.compare_digest(signature, _signature(content))
    return content if is_own else None


def _signature(content: bytes, *, create: bool = False) -> str:
    """Sign with this user's key, made at the first use; "" if there is none."""
    home = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    path = Path(home) / "vecenv" / "checkpoint.key"
    with suppress(OSError):
        if create and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as aside:
                aside.chmod(0o600)
                aside.write_bytes(secrets.token_bytes(32))
        if key := path.read_bytes():
            return hmac.new(key, content, hashlib.sha256).hexdigest()
    return ""
