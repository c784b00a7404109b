"""Devices: their memory, the launches of compiled drivers, and the caller's tensors.

torch owns memory and streams. Launches go to torch's current stream: so they are ordered with
torch's other work, and become part of a CUDA graph that is being captured. Nothing waits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
from gymnasium.spaces import MultiBinary

from vecenv.core import cuda
from vecenv.core.cuda import DeviceError
from vecenv.core.errors import ActionError, ActionTypeError, SlotError
from vecenv.jit.cuda import compiler
from vecenv.jit.cuda.driver import ARGUMENTS
from vecenv.jit.kernels import EnvKernels

try:
    import torch
    from torch import Tensor
except ImportError as missing:
    raise ModuleNotFoundError(
        'compiled envs on a CUDA device need torch: pip install "vecenv[cuda]"', name="torch"
    ) from missing

__all__ = ["Device", "DeviceActions", "Launch", "checked_tensor", "open_device", "torch_dtype"]

BLOCK_SIZE = 128  # threads per block

# Launches a driver for a number of rows; the arguments are int64, in the order of ARGUMENTS.
Launch = Callable[[int, np.ndarray], None]


def open_device(device: Any) -> Device:
    """Return the device of this name: "cuda", "cuda:1" or a `torch.device`.

    "cuda" is the device that is current at the time of use.

    Raises:
        ModuleNotFoundError: numba-cuda is not installed.
        DeviceError: There is no such device, or it is too old.
        ValueError: `device` is not a CUDA device.
    """
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError):
        wanted = torch.device("cpu")
    if wanted.type != "cuda":
        raise ValueError(
            f"device is {device!r}, expected a CUDA device: 'cuda', 'cuda:1' or a torch.device"
        )
    cuda.require()
    return Device(wanted)


class Device:
    """A CUDA device: its memory, as `HostMemory` is the host's, and launches of drivers on it."""

    torch_device: torch.device
    flag: Any = torch.bool
    reward: Any = np.float32
    where = staticmethod(torch.where)

    def __init__(self, wanted: torch.device) -> None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            built = "is built for it" if torch.backends.cuda.is_built() else "is a build without it"
            raise DeviceError(
                f"device is {wanted}, but torch {torch.__version__}, which {built}, sees no CUDA "
                "device: is there one, and its driver (nvidia-smi)? make_vec without device= "
                "steps the same envs on the CPU"
            )
        index = torch.cuda.current_device() if wanted.index is None else wanted.index
        if index >= count:
            raise DeviceError(f"device is {wanted}, but there are {count} CUDA devices, from 0 on")
        self.torch_device = torch.device("cuda", index)
        self.capability = torch.cuda.get_device_capability(index)
        if self.capability < cuda.LOWEST:
            own, least = (".".join(map(str, one)) for one in (self.capability, cuda.LOWEST))
            raise DeviceError(
                f"{self.torch_device} ({torch.cuda.get_device_name(index)}) has compute capability "
                f"{own}, kernels need {least} or newer"
            )
        torch.cuda.init()

    def empty(self, shape: Any, dtype: Any) -> Tensor:
        """Return an uninitialised tensor of torch's or NumPy's dtype."""
        return torch.empty(shape, dtype=torch_dtype(dtype), device=self.torch_device)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """Return a tensor of zeros of a NumPy dtype."""
        return torch.zeros(shape, dtype=torch_dtype(dtype), device=self.torch_device)

    def host_zeros(self, count: int) -> Tensor:
        """Return a tensor int64 of zeros in host memory that the device can write to."""
        # Pinned pages have one address for host and device.
        # device="cpu" overrides torch's default device: only host memory can be pinned.
        return torch.zeros(count, dtype=torch.int64, device="cpu", pin_memory=True)

    def put(self, array: np.ndarray) -> Tensor:
        """Return a copy of an array as a tensor; the caller may change the array."""
        return torch.from_numpy(np.array(array)).to(self.torch_device)

    def get(self, tensor: Tensor) -> np.ndarray:
        """Return a tensor as an array of the host; this waits."""
        return tensor.cpu().numpy()

    def as_rows(self, records: np.ndarray) -> Tensor:
        """Return records (B,) as rows of bytes."""
        return self.put(records.view(np.uint8).reshape(len(records), -1))

    def field(self, rows: Tensor, dtype: np.dtype, name: str) -> Tensor:
        """Return a live view of a field of the records in rows; raises as `state_field`."""
        fields: Any = dtype.fields
        kind, offset = fields[name][:2]
        base, size = torch_dtype(kind.base), kind.base.itemsize
        if offset % size or rows.shape[1] % size:
            raise TypeError(
                f"field {name!r} is at byte {offset} of records of {rows.shape[1]} bytes, "
                f"which are not aligned to {kind.base}; give EnvKernels the fields as a list"
            )
        first = offset // size
        columns = rows.view(base)[:, first : first + kind.itemsize // size]
        return columns.reshape(len(rows), *kind.shape)

    def load(self, kernels: EnvKernels, params: np.ndarray | None) -> Launch:
        """Compile or load the driver with these kernels; return the function that launches it."""
        code = compiler.kept_code(kernels, params, self.capability)
        device = self.torch_device
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # creates torch's context, into which the code is loaded
            loaded = cuda.loaded(kernels.name, code, compiler.ENTRY)
        values = np.zeros(len(ARGUMENTS), np.int64)
        places = np.array([values[k:].ctypes.data for k in range(len(values))], np.uint64)
        places_at = places.ctypes.data

        # The default argument keeps `places` alive; its address alone would not.
        def launch(num_rows: int, arguments: np.ndarray, kept: Any = places) -> None:
            values[:] = arguments  # the driver copies them before it returns
            stream = torch.cuda.current_stream(device).cuda_stream
            is_current = torch.cuda.current_device() == device.index
            with nullcontext() if is_current else torch.cuda.device(device):
                loaded(-(-num_rows // BLOCK_SIZE), BLOCK_SIZE, stream, places_at)

        return launch


@functools.cache
def torch_dtype(dtype: Any) -> torch.dtype:
    """Return torch's dtype for one of NumPy's; raise TypeError if torch has none."""
    if isinstance(dtype, torch.dtype):
        return dtype
    dtype = np.dtype(dtype)
    found = getattr(torch, "bool" if dtype.kind == "b" else dtype.name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch has no dtype for NumPy's {dtype}")
    return found


def checked_tensor(
    name: str, tensor: Any, shape: tuple[int, ...], dtypes: tuple[np.dtype, ...], device: Any
) -> Any:
    """Return a tensor of a slot, if it can be written into.

    Raises:
        SlotError: It is not a tensor, or has another device, shape, dtype or layout.
    """
    wanted = [torch_dtype(one) for one in dtypes]
    is_tensor = isinstance(tensor, Tensor)
    fits = is_tensor and tensor.device == device and tensor.dtype in wanted
    if fits and tensor.shape == shape and tensor.is_contiguous() and not tensor.requires_grad:
        return tensor
    came = type(tensor).__name__
    if is_tensor:
        came = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        came += "" if tensor.is_contiguous() else ", not contiguous"
        came += ", with gradients" if tensor.requires_grad else ""
    raise SlotError(
        f"out.{name} is {came}; expected a contiguous tensor {' or '.join(map(str, wanted))} "
        f"{shape} on {device}, without gradients; nothing was stepped"
    )


class DeviceActions:
    """Checks batched actions as far as the host can, and copies them to the device."""

    def __init__(self, space: Any, num_envs: int, device: torch.device) -> None:
        self._space, self._device = space, device
        self._shape = (num_envs, *(space.shape or ()))
        self._dtype = torch_dtype(space.dtype)
        is_binary = isinstance(space, MultiBinary)
        self._kinds = [*("fi" if self._dtype.is_floating_point else "i"), *[torch.bool] * is_binary]

    def check(self, actions: Any, env_ids: np.ndarray | None = None) -> Tensor:
        """Return actions (B, *action_shape) as a contiguous tensor of the space's dtype.

        Raises:
            ActionError: Wrong count, shape or dtype, or a tensor on another device.
        """
        shape = (self._shape[0] if env_ids is None else len(env_ids), *self._shape[1:])
        if not isinstance(actions, Tensor):
            try:
                if hasattr(actions, "__dlpack__") and not isinstance(actions, np.ndarray):
                    actions = torch.from_dlpack(actions)
                else:
                    array = np.ascontiguousarray(np.asarray(actions))
                    actions = torch.from_numpy(array).to(self._device)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ActionError(f"actions can't be made one tensor: {error}") from None
        if actions.device != self._device:
            raise ActionError(
                f"actions is on {actions.device}, expected a tensor on {self._device}: move it "
                f"with actions.to({str(self._device)!r}); nothing was stepped"
            )
        if tuple(actions.shape) != shape:
            raise ActionError(
                f"actions has shape {tuple(actions.shape)}, expected {shape}: one of {self._space} "
                "per env; pass one action per env, including envs about to reset"
            )
        if actions.dtype != self._dtype:
            kind = "f" if actions.dtype.is_floating_point else "i"
            if (torch.bool if actions.dtype == torch.bool else kind) not in self._kinds:
                raise ActionTypeError(
                    f"actions has dtype {actions.dtype}, expected {self._dtype} for {self._space}"
                )
            actions = actions.to(self._dtype)
        return actions.detach().contiguous()
