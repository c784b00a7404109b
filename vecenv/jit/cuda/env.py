"""CudaVectorEnv: compiled envs whose state and results are on a CUDA device.

torch owns memory and streams. Launches go to torch's current stream: so they are ordered with
torch's other work, and become part of a CUDA graph that is being captured. Nothing waits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.spaces import MultiBinary

from vecenv.core import cuda
from vecenv.core.arguments import Seed, read_count
from vecenv.core.cuda import DeviceError
from vecenv.core.errors import ActionError, ActionMaskError, ActionTypeError, SlotError
from vecenv.core.rows import StepSlot
from vecenv.core.spaces import BatchedSpaces
from vecenv.jit.base import MODES, CompiledVecEnv
from vecenv.jit.binding import uncompiled
from vecenv.jit.cuda import compiler
from vecenv.jit.cuda.compiler import ARGUMENTS, BAD_ACTION, BAD_MASK, FAULT_SHIFT, IS_OVER
from vecenv.jit.driver import NO_LIMIT, OBSERVE, RESET, RUN_DTYPE, STEP, element_bounds
from vecenv.jit.env import JitVectorEnv
from vecenv.jit.kernels import EnvKernels

try:
    import torch
    from torch import Tensor
except ImportError as missing:
    raise ModuleNotFoundError(
        'compiled envs on a CUDA device need torch: pip install "vecenv[cuda]"', name="torch"
    ) from missing

BLOCK_SIZE = 128  # threads per block


def open_device(device: Any) -> Device:
    """Return the device of this name; raises as `CudaVectorEnv`. "cuda" is the current device."""
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

    def load(self, kernels: EnvKernels, params: np.ndarray | None) -> Callable[..., None]:
        """Compile or load the driver with these kernels; return the function that launches it.

        It takes the number of rows, and int64 arguments in the order of ARGUMENTS.
        """
        code = compiler.kept_code(kernels, params, self.capability)
        device = self.torch_device
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # creates torch's context, into which the code is loaded
            loaded = cuda.loaded(kernels.name, code, compiler.ENTRY)

        def launch(num_rows: int, arguments: np.ndarray) -> None:
            places = np.arange(len(arguments)) * arguments.itemsize + arguments.ctypes.data
            stream = torch.cuda.current_stream(device).cuda_stream
            with torch.cuda.device(device):  # the call copies the arguments before it returns
                loaded(-(-num_rows // BLOCK_SIZE), BLOCK_SIZE, stream, places.ctypes.data)

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
        self._kinds = "b" * isinstance(space, MultiBinary)
        self._kinds += "fi" if self._dtype.is_floating_point else "i"

    def check(self, actions: Any, env_ids: np.ndarray | None = None) -> Tensor:
        """Return actions (B, *action_shape) as a contiguous tensor of the space's dtype.

        Raises:
            ActionError: Wrong count, shape or dtype, or a tensor on another device.
        """
        shape = (self._shape[0] if env_ids is None else len(env_ids), *self._shape[1:])
        try:
            if isinstance(actions, np.ndarray) or not hasattr(actions, "__dlpack__"):
                array = np.ascontiguousarray(np.asarray(actions))
                actions = torch.from_numpy(array).to(self._device)
            elif not isinstance(actions, Tensor):
                actions = torch.from_dlpack(actions)
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
            if ("b" if actions.dtype == torch.bool else kind) not in self._kinds:
                raise ActionTypeError(
                    f"actions has dtype {actions.dtype}, expected {self._dtype} for {self._space}"
                )
            actions = actions.to(self._dtype)
        return actions.detach().contiguous()


class CudaVectorEnv(CompiledVecEnv):
    """Many envs of one kind on a CUDA device, one thread each; see docs/gpu.md.

    States, random streams and statistics stay on the device. With the same seed and actions it does
    what a `JitVectorEnv` does: bit for bit if its kernels compute with integers; up to the rounding
    of fused multiply-adds if they compute with floats.

    Calls return before the device is done; their work is ordered with torch's current stream. So an
    action out of bounds can't be refused at once: that env is not stepped, its row has reward 0 and
    the previous observation, and a later call raises ActionError (at the latest `check`, which
    waits). The same holds for ResetNeeded, if autoreset is disabled.

    Args:
        kernels: The kind of env, or a `JitVectorEnv` that supplies kernels, parameters and all
            options.
        num_envs: Number of copies.
        device: "cuda", "cuda:1" or a `torch.device`.
        **options: As for `JitVectorEnv`; `num_threads` has no effect.

    Raises:
        TypeError, ValueError: An argument is invalid; the message names it.
        ModuleNotFoundError: torch or numba-cuda is not installed.
        DeviceError: There is no such device, or it is too old.
        KernelCompileError: A kernel uses a feature that devices lack; names file and line.
        torch.OutOfMemoryError: There is too little memory.

    Attributes:
        device: The `torch.device`.
        kernels: The kind of env.
        on_host: One such env on the CPU, for attributes of its class, like CAGE 2's `scenario`. It
            belongs to this vector env: do not step it.
    """

    @torch.inference_mode(mode=False)  # tensors made in it can't be changed outside
    def __init__(
        self,
        kernels: EnvKernels | JitVectorEnv,
        num_envs: int = 1,
        *,
        device: Any = "cuda",
        **options: Any,
    ) -> None:
        self._memory: Device = open_device(device)
        if isinstance(kernels, JitVectorEnv):
            if options:
                raise TypeError(f"{', '.join(options)} given beside a vector env, which has them")
            host = kernels
        else:
            with uncompiled():
                host = JitVectorEnv(kernels, num_envs if "params" in options else 1, **options)
        self.on_host = host  # arguments, and all that the CPU draws or reads
        self.kernels, self.max_episode_steps = host.kernels, host.max_episode_steps
        self.has_own_params = host.has_own_params
        self.episode_infos, self.mask_infos = host.episode_infos, host.mask_infos
        self._on_episode_end = host._on_episode_end
        self.device = self._memory.torch_device
        self._set_up(
            read_count("num_envs", num_envs),
            BatchedSpaces.of(host.single_observation_space, host.single_action_space, num_envs),
            host.autoreset_mode,
            host.metadata,
            host.render_mode,
        )
        self._actions: Any = DeviceActions(self.single_action_space, self.num_envs, self.device)
        sizes = self.kernels.state_dtype.itemsize, RUN_DTYPE.itemsize
        states, runs = (self._memory.zeros((self.num_envs, size), np.uint8) for size in sizes)
        records = host.params
        if records is not None and len(records) != num_envs:
            records = records[:1]
        self._allocate(states, runs, None if records is None else np.array(records))
        self._faults = self._memory.host_zeros(1)  # in host memory, so reading it does not wait
        self._fault_word = self._faults.numpy()
        self._bounds = self._memory.put(element_bounds(self.single_action_space).reshape(-1))
        own = {"states": states, "runs": runs, "bounds": self._bounds, "faults": self._faults}
        own["final_obs"] = self._final_obs
        self._job = {name: _address(tensor) for name, tensor in own.items()}  # of all launches
        self._job["autoreset_mode"] = MODES[self.autoreset_mode]
        self._job["max_episode_steps"] = min(self.max_episode_steps or NO_LIMIT, NO_LIMIT)
        self._job["num_envs"] = self.num_envs
        if records is not None:
            self._params_moved()
            if self.has_own_params:
                self._separate_params()
        self._launch = self._memory.load(self.kernels, host.params)

    def _params_moved(self) -> None:
        rows = self._rows["params"]
        self._job |= {"params": _address(rows), "num_params": len(rows)}

    def described_state(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the arrays of a state plus entries that identify its env, see `JitVectorEnv`."""
        return self.on_host.described_state(arrays)

    def check_state(self, state: Mapping[str, np.ndarray], states: np.ndarray) -> None:
        """Raise ValueError if a state is of other envs, or has invalid records."""
        self.on_host.check_state(state, states)

    def reset(
        self, *, seed: Seed = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all envs, or some, and return the observations and infos of all.

        Args:
            seed: As for every vector env.
            options: `options["reset_mask"]`, bool (num_envs,), may be a tensor on the device, and
                no call waits for it; not together with a seed, nor with envs in flight.
        """
        mask = None if options is None else options.get("reset_mask")
        if not isinstance(mask, Tensor) or mask.device != self.device:
            if isinstance(mask, Tensor):
                options = {**(options or {}), "reset_mask": mask.cpu().numpy()}
            return super().reset(seed=seed, options=options)
        if seed is not None or len(options or ()) > 1:
            raise ValueError(
                "a reset_mask on the device comes without a seed and other options; pass a NumPy "
                "array"
            )
        if mask.dtype != torch.bool or mask.shape != (self.num_envs,):
            raise ValueError(
                f"reset_mask is {mask.dtype} {tuple(mask.shape)}, expected bool ({self.num_envs},)"
            )
        self._calls.require_ready("reset")
        self._settle()
        obs = self._new_obs()
        self._run(RESET, self.num_envs, obs=obs, chosen=mask.contiguous())
        return obs, self._with_masks({}, None, mask.clone())

    def _begin(self, obs: Tensor, reset_mask: np.ndarray | None) -> None:
        chosen = None if reset_mask is None else self._memory.put(reset_mask)
        self._run(RESET, self.num_envs, obs=obs, chosen=chosen)

    def _step_rows(self, actions: Any, outputs: StepSlot, env_ids: np.ndarray | None) -> dict:
        """Infos have the same keys after every step: no call waits to see what has ended."""
        self._settle()
        self._run(STEP, len(actions), env_ids, actions=actions, **outputs._asdict())
        infos = self._end_infos(outputs, env_ids) if self._has_end_infos else {}
        return self._with_masks(infos, env_ids, torch.ones_like(outputs.terminations))

    def _final_infos(self, final_obs: Tensor, over: Tensor) -> Tensor:
        return final_obs

    def observer(self, kernels: EnvKernels) -> Callable[[Tensor], Any]:
        """Return a function that writes what other kernels observe, see `JitVectorEnv`."""
        launch = self._memory.load(kernels, self.on_host.params)
        return lambda obs: self._run(OBSERVE, self.num_envs, obs=obs, launch=launch)

    def check(self) -> None:
        """Wait until all steps are done; raise the errors of rows that could not be stepped.

        Raises:
            ActionError: An env was given an action out of bounds, or NaN, and was not stepped.
            ActionMaskError: A mask allows no action.
            ResetNeeded: An env whose episode is over was stepped with autoreset disabled.
            ClosedEnvironmentError: After `close`.
        """
        self._calls.require_open("check")
        self._wait()
        self._settle()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _settle(self) -> None:
        """Raise the errors noted by rows of earlier calls; this waits for nothing."""
        if self._fault_word[0] == 0:
            return
        self._wait()
        word = int(self._fault_word[0])
        self._fault_word[0] = 0
        kind, env_id = word >> FAULT_SHIFT, word & ((1 << FAULT_SHIFT) - 1)
        late = (
            "; that env was not stepped, the others were. This is said by a later call, as no call "
            "waits for the device; `check` after a step waits"
        )
        if kind == BAD_ACTION:
            raise ActionError(
                f"env {env_id} was given an action out of bounds, or NaN, in an earlier step, "
                f"expected one of {self.single_action_space}{late}"
            )
        if kind == IS_OVER:
            raise ResetNeeded(
                f"the episode of env {env_id} had ended when it was stepped, and autoreset is "
                f"disabled; reset it with reset(options={{'reset_mask': mask}}){late}"
            )
        assert kind == BAD_MASK
        raise ActionMaskError(
            f"the action mask of env {env_id} allows no action, though its episode goes on"
        )

    def close_extras(self, **kwargs: Any) -> None:
        """Release the memory."""
        if hasattr(self, "on_host"):
            self.on_host.close()
        for name in ("_rows", "_final_obs", "_held", "_launch"):
            if name in vars(self):
                delattr(self, name)

    def _run(
        self,
        op: int,
        num_rows: int,
        env_ids: np.ndarray | None = None,
        *,
        rewards: Any = None,
        launch: Any = None,
        **arrays: Any,
    ) -> int:
        """Launch one job; `arrays` are tensors, or None, by the names of ARGUMENTS."""
        if rewards is not None:
            arrays["rewards32" if rewards.element_size() == 4 else "rewards64"] = rewards
        if env_ids is not None:
            arrays["env_ids"] = self._memory.put(env_ids)
        job = {**self._job, "op": op, "num_rows": num_rows}
        job |= {name: _address(tensor) for name, tensor in arrays.items()}
        if num_rows:
            arguments = np.array([job.get(name, 0) for name in ARGUMENTS], np.int64)
            (launch or self._launch)(num_rows, arguments)
        return 0

    def allocate(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
        """Return zeroed memory on the device that this backend writes into without a copy."""
        return self._memory.zeros(shape, dtype)

    def _check_array(  # pyright: ignore[reportIncompatibleVariableOverride]  # for tensors
        self, name: str, array: Any, shape: tuple[int, ...], dtypes: tuple[np.dtype, ...]
    ) -> Tensor:
        return checked_tensor(name, array, shape, dtypes, self.device)


def _address(tensor: Any) -> int:
    return 0 if tensor is None else tensor.data_ptr()
