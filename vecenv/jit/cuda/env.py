"""CudaVectorEnv: compiled envs whose state and results are on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.spaces import MultiBinary
from gymnasium.vector import AutoresetMode

from vecenv.core.arguments import read_count
from vecenv.core.base import StepBatch, StepResult
from vecenv.core.errors import ActionError, ActionMaskError, ActionTypeError, SlotError
from vecenv.core.rows import Outputs, aligned_zeros, slot_arrays
from vecenv.core.seeding import Seed
from vecenv.core.spaces import BatchedSpaces
from vecenv.jit.arrays import element_bounds
from vecenv.jit.base import MODES, CompiledVecEnv
from vecenv.jit.binding import uncompiled
from vecenv.jit.cuda.devices import Device, open_device, torch_dtype
from vecenv.jit.cuda.driver import ARGUMENTS, BAD_ACTION, BAD_MASK, FAULT_SHIFT, IS_OVER
from vecenv.jit.env import JitVectorEnv
from vecenv.jit.episodes import MASK, NO_LIMIT, OBSERVE, RESET, RUN_DTYPE, STEP
from vecenv.jit.kernels import EnvKernels

if TYPE_CHECKING:
    import torch

__all__ = ["CudaVectorEnv", "DeviceActions", "checked_tensor"]

_FIELDS: Any = RUN_DTYPE.fields
_PLACE = {name: place for place, name in enumerate(ARGUMENTS)}
# Arguments that differ between calls: the first two are numbers, the others tensors.
_OF_A_CALL = (
    "op", "num_rows", "rewards32", "rewards64", "actions", "obs", "terminations", "truncations",
    "masks", "env_ids", "chosen", "over", "over_returns", "over_lengths",
)  # fmt: skip
_PLACES_OF_A_CALL = np.array([_PLACE[name] for name in _OF_A_CALL])


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
        results: "torch" returns tensors on the device (other libraries take them by DLPack);
            "numpy" returns arrays, and every call waits for the device.
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

    def __init__(
        self,
        kernels: EnvKernels | JitVectorEnv,
        num_envs: int = 1,
        *,
        device: Any = "cuda",
        results: str = "torch",
        **options: Any,
    ) -> None:
        if results not in ("torch", "numpy"):
            raise ValueError(f"results is {results!r}, expected 'torch' or 'numpy'")
        self._device: Device = open_device(device)
        if isinstance(kernels, JitVectorEnv):
            if options:
                raise TypeError(f"{', '.join(options)} given beside a vector env, which has them")
            host = kernels
        else:
            with uncompiled():
                host = JitVectorEnv(kernels, num_envs if "params" in options else 1, **options)
        self._host = self.on_host = host  # arguments, and all that the CPU draws or reads
        self.kernels = host.kernels
        self._has_own_params = host.has_own_params
        self.max_episode_steps = host.max_episode_steps
        self.episode_infos, self.mask_infos = host.episode_infos, host.mask_infos
        self.device = self._device.torch_device
        self._is_numpy = results == "numpy"
        self._set_up(
            read_count("num_envs", num_envs),
            BatchedSpaces.of(host.single_observation_space, host.single_action_space, num_envs),
            host.autoreset_mode,
            host.metadata,
            host.render_mode,
        )
        self._actions: Any = DeviceActions(self.single_action_space, self.num_envs, self.device)
        import torch

        with torch.inference_mode(False):  # its tensors can't be changed outside it
            self._allocate_envs()
        self._launch = self._device.load(self.kernels, host.params)

    def _allocate_envs(self) -> None:
        """Make the tensors that have one row per env."""
        host, device, num_envs = self._host, self._device, self.num_envs
        self._states = device.zeros((num_envs, self.kernels.state_dtype.itemsize), np.uint8)
        self._runs = device.zeros((num_envs, RUN_DTYPE.itemsize), np.uint8)
        has_final = host.autoreset_mode is AutoresetMode.SAME_STEP
        self._final_obs = device.zeros(
            (num_envs if has_final else 0, *self._obs_shape[1:]), self._obs_dtype
        )
        self._faults = device.host_zeros(1)  # in host memory, so reading it does not wait
        self._fault_word = self._faults.numpy()
        self._bounds = self._upload(element_bounds(self.single_action_space).reshape(-1))
        self._params = None
        if host.params is not None:
            records = host.params if len(host.params) == num_envs else host.params[:1]
            self._params = self._stored(np.array(records))
            if self.has_own_params and len(records) < num_envs:
                self._params = self._params.repeat(num_envs, 1)
        self.last_returns.fill_(np.nan)
        limit = NO_LIMIT if host.max_episode_steps is None else host.max_episode_steps
        settings = {
            "autoreset_mode": MODES[self.autoreset_mode],
            "max_episode_steps": min(limit, NO_LIMIT),
            "num_envs": num_envs,
            "states": _address(self._states),
            "runs": _address(self._runs),
            "params": _address(self._params),
            "num_params": 0 if self._params is None else len(self._params),
            "bounds": _address(self._bounds),
            "final_obs": _address(self._final_obs),
            "faults": _address(self._faults),
        }
        self._arguments = np.array([settings.get(name, 0) for name in ARGUMENTS], np.int64)

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        """Return a copy of an array as a tensor on the device; the caller may change the array."""
        import torch

        return torch.from_numpy(np.array(array)).to(self.device)

    def _read(self, name: str, rows: np.ndarray | None = None) -> np.ndarray:
        stored = getattr(self, f"_{name}")
        dtypes = {"states": self.kernels.state_dtype, "runs": RUN_DTYPE}
        if rows is not None:
            stored = stored[self._upload(rows if len(stored) == self.num_envs else rows * 0)]
        found = aligned_zeros((len(stored),), dtypes.get(name) or self._params_dtype)
        _bytes(found)[...] = stored.cpu().numpy()
        return found

    def _stored(self, records: np.ndarray) -> torch.Tensor:
        return self._upload(_bytes(records) if records.dtype.names else records)

    def _copy(self, name: str, targets: np.ndarray, stored: Any, sources: Any) -> None:
        getattr(self, f"_{name}")[self._upload(targets)] = stored[self._upload(sources)]

    def _spread_params(self) -> None:
        self._params = self._params.repeat(self.num_envs, 1)
        self._arguments[_PLACE["params"]] = _address(self._params)
        self._arguments[_PLACE["num_params"]] = self.num_envs

    @property
    def _params_dtype(self) -> np.dtype:
        assert self._host.params is not None
        return np.dtype((np.void, self._host.params.dtype))

    def described_state(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the arrays of a state plus entries that identify its env, see `JitVectorEnv`."""
        return self._host.described_state(arrays)

    def check_state(self, state: Mapping[str, np.ndarray], states: np.ndarray) -> None:
        """Raise ValueError if a state is of other envs, or has invalid records."""
        self._host.check_state(state, states)

    def _run_field(self, name: str) -> torch.Tensor:
        dtype, offset = _FIELDS[name][:2]
        return self._runs.view(torch_dtype(dtype))[:, offset // dtype.itemsize]

    def state_field(self, name: str) -> torch.Tensor:
        """Return a live view of one field of the states, (num_envs, *field_shape).

        After changing it, call `observe`.

        Raises:
            KeyError: There is no such field.
            TypeError: torch has no such dtype, or the field or the records are not aligned to it.
        """
        fields: dict[str, Any] = dict(self.kernels.state_dtype.fields or {})
        if name not in fields:
            raise KeyError(f"the state has no field {name!r}; it has {', '.join(fields)}")
        dtype, offset = fields[name][:2]
        base, size = torch_dtype(dtype.base), dtype.base.itemsize
        if offset % size or self._states.shape[1] % size:
            raise TypeError(
                f"field {name!r} is at byte {offset} of records of {self._states.shape[1]} bytes, "
                f"which are not aligned to {dtype.base}; give EnvKernels the fields as a list"
            )
        first = offset // size
        columns = self._states.view(base)[:, first : first + dtype.itemsize // size]
        return columns.reshape(self.num_envs, *dtype.shape)

    def reset(
        self, *, seed: Seed = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all envs, or some, and return the observations and infos of all.

        Args:
            seed: As for every vector env.
            options: `options["reset_mask"]`, bool (num_envs,), may be a tensor on the device, and
                no call waits for it; not together with a seed, nor with envs in flight.
        """
        import torch

        mask = None if options is None else options.get("reset_mask")
        if not isinstance(mask, torch.Tensor):
            return super().reset(seed=seed, options=options)
        if mask.device != self.device:
            return super().reset(
                seed=seed, options={**(options or {}), "reset_mask": mask.cpu().numpy()}
            )
        rest = sorted((options or {}).keys() - {"reset_mask"})
        if rest or seed is not None:
            raise ValueError(
                f"a reset_mask on the device comes without {', '.join(rest) or 'seed'}; pass a "
                "NumPy array"
            )
        if mask.dtype != torch.bool or mask.shape != (self.num_envs,):
            raise ValueError(
                f"reset_mask is {mask.dtype} {tuple(mask.shape)}, expected bool ({self.num_envs},)"
            )
        self._calls.require_ready("reset")
        self._settle()
        obs = self._new_obs()
        self._run(RESET, self.num_envs, obs=obs, chosen=mask.contiguous())
        infos = self._with_masks({}, None, mask.clone()) if self.mask_infos else {}
        return self._result(obs), infos

    def _begin(self, reset_mask: np.ndarray | None) -> torch.Tensor:
        obs = self._new_obs()
        chosen = None if reset_mask is None else self._upload(reset_mask)
        self._run(RESET, self.num_envs, obs=obs, chosen=chosen)
        return obs

    def _step(self, actions: Any, out: Any) -> StepResult:
        self._settle()
        outputs = self._new_outputs(self.num_envs) if out is None else self._slot(out)
        infos = self._run_step(self.num_envs, actions, outputs)
        if out is None:
            obs, rewards, terminations, truncations = map(self._result, outputs)
            return obs, rewards, terminations, truncations, infos
        return out.obs, out.rewards, out.terminations, out.truncations, infos

    def _hold(self, env_ids: np.ndarray, actions: Any) -> None:
        self._settle()
        if self._held is None:
            import torch

            with torch.inference_mode(False):
                self._held = torch.zeros_like(actions[:1]).repeat_interleave(self.num_envs, 0)
        self._held[self._upload(env_ids)] = actions

    def _step_some(self, env_ids: np.ndarray) -> StepBatch:
        self._settle()
        outputs, rows = self._new_outputs(len(env_ids)), self._upload(env_ids)
        infos = self._run_step(len(env_ids), self._held[rows], outputs, rows)
        obs, rewards, terminations, truncations = map(self._result, outputs)
        return StepBatch(obs, rewards, terminations, truncations, infos, env_ids)

    def _run_step(
        self, count: int, actions: Any, outputs: Outputs, rows: torch.Tensor | None = None
    ) -> dict[str, Any]:
        """Step all envs, or those of `rows`, int64 (R,), and return the infos.

        They have the same keys after every step: no call waits to see whether an episode ended.
        """
        is_same_step = self.autoreset_mode is AutoresetMode.SAME_STEP
        ended: dict[str, torch.Tensor] = {}
        if self.episode_infos or is_same_step:
            ended["over"] = self._empty((count,), np.bool_)
        if self.episode_infos:
            ended["over_returns"] = self._empty((count,), np.float64)
            ended["over_lengths"] = self._empty((count,), np.int64)
        given = outputs._asdict() | ended
        self._run(STEP, count, actions=actions, env_ids=rows, **given)
        infos: dict[str, Any] = {}
        if self.episode_infos:
            found = {"r": ended["over_returns"], "l": ended["over_lengths"]}
            episode = {name: self._result(one) for name, one in found.items()}
            infos = {"episode": episode, "_episode": self._result(ended["over"])}
        if is_same_step:
            final_obs = self._final_obs if rows is None else self._final_obs[rows]
            infos = {
                **infos,
                "final_obs": self._result(final_obs),
                "_final_obs": self._result(ended["over"]),
                "final_info": infos,
                "_final_info": self._result(ended["over"]),
            }
        if self.mask_infos:
            infos = self._with_masks(infos, rows, outputs.terminations.new_ones(count))
        return infos

    def observer(self, kernels: EnvKernels) -> Callable[[torch.Tensor], None]:
        """Return a function that writes the observations of other kernels for the current states.

        Args:
            kernels: Kernels with the same state record and parameters.

        Returns:
            A function of a tensor (num_envs, *obs_shape) on the device, of the observations' dtype.
        """
        launch = self._device.load(kernels, self._host.params)
        arguments = self._arguments.copy()

        def write(obs: torch.Tensor) -> None:
            arguments[:] = self._arguments
            arguments[_PLACES_OF_A_CALL] = 0
            settings = {"op": OBSERVE, "num_rows": self.num_envs, "obs": obs.data_ptr()}
            for name, value in settings.items():
                arguments[_PLACE[name]] = value
            launch(self.num_envs, arguments)

        return write

    def action_masks(self, env_ids: Any = None, *, out: Any = None) -> Any:
        """Return which actions the envs allow, int8 (B, width), see `VecEnv.action_masks`.

        A mask that allows nothing makes a later call raise ActionMaskError.
        """
        rows, count = None, self.num_envs
        if env_ids is None:
            self._calls.require_ready("action_masks")
        else:
            ids = self._calls.check_env_ids(env_ids, "action_masks")
            rows, count = self._upload(ids), len(ids)
        self.require_masks()
        self._settle()
        shape, dtypes = (count, self._mask_width), (np.dtype(np.int8), np.dtype(np.bool_))
        masks = (
            self.allocate(shape, np.int8)
            if out is None
            else self._checked("masks", out, shape, dtypes)
        )
        self._write_masks(masks, rows)
        return self._result(masks) if out is None else out

    def _write_masks(self, masks: Any, env_ids: Any) -> int:
        import torch

        return self._run(MASK, len(masks), masks=masks.view(torch.bool), env_ids=env_ids)

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
            import torch

            torch.cuda.synchronize(self.device)

    def _settle(self) -> None:
        """Raise the errors noted by rows of earlier calls; this waits for nothing."""
        word = int(self._fault_word[0])
        if word == 0:
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
        if hasattr(self, "_host"):
            self._host.close()
        for name in ("_states", "_runs", "_final_obs", "_params", "_held", "_launch"):
            if name in vars(self):
                delattr(self, name)

    def _run(self, op: int, num_rows: int, *, rewards: Any = None, **arrays: Any) -> int:
        """Launch one job; `arrays` are tensors by the names of ARGUMENTS."""
        rewards_at = _address(rewards)
        is_float32 = rewards is not None and rewards.element_size() == 4
        self._arguments[_PLACES_OF_A_CALL] = [
            op,
            num_rows,
            rewards_at if is_float32 else 0,
            0 if is_float32 else rewards_at,
            *[_address(arrays.get(name)) for name in _OF_A_CALL[4:]],
        ]
        if num_rows:
            self._launch(num_rows, self._arguments)
        return 0

    def _new_obs(self) -> torch.Tensor:
        return self._empty(self._obs_shape, self._obs_dtype)

    def _new_outputs(self, count: int) -> Outputs:
        return Outputs(
            self._empty((count, *self._obs_shape[1:]), self._obs_dtype),
            self._empty((count,), np.float32),
            self._empty((count,), np.bool_),
            self._empty((count,), np.bool_),
        )

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
        import torch

        return torch.empty(shape, dtype=torch_dtype(dtype), device=self.device)

    def allocate(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
        """Return zeroed memory on the device that this backend writes into without a copy."""
        return self._device.zeros(shape, dtype)

    def _result(self, array: torch.Tensor) -> Any:
        return array.cpu().numpy() if self._is_numpy else array

    def _slot(self, out: Any) -> Outputs:
        """Return the tensors of `out`.

        Raises:
            SlotError: A tensor is missing, or has another device, shape, dtype or layout.
        """
        try:
            outputs = Outputs(out.obs, out.rewards, out.terminations, out.truncations)
        except AttributeError:
            slot_arrays(out, self.num_envs)  # raises
            raise
        shape, flags = (self.num_envs,), (np.dtype(np.bool_),)
        self._checked("obs", outputs.obs, self._obs_shape)
        rewards = (np.dtype(np.float32), np.dtype(np.float64))
        self._checked("rewards", outputs.rewards, shape, rewards)
        self._checked("terminations", outputs.terminations, shape, flags)
        self._checked("truncations", outputs.truncations, shape, flags)
        if outputs.terminations.data_ptr() == outputs.truncations.data_ptr():
            raise SlotError(
                "out.terminations and out.truncations share memory, so one would overwrite the "
                "other; give each a tensor of its own"
            )
        return outputs

    def _checked(
        self, name: str, array: Any, shape: tuple[int, ...], dtypes: Any = ()
    ) -> torch.Tensor:
        return checked_tensor(name, array, shape, dtypes or (self._obs_dtype,), self.device)


def checked_tensor(
    name: str, tensor: Any, shape: tuple[int, ...], dtypes: tuple[np.dtype, ...], device: Any
) -> Any:
    """Return a tensor of a slot, if it can be written into.

    Raises:
        SlotError: It is not a tensor, or has another device, shape, dtype or layout.
    """
    import torch

    wanted = [torch_dtype(one) for one in dtypes]
    is_tensor = isinstance(tensor, torch.Tensor)
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
        import torch

        self._space = space
        self._shape = (num_envs, *(space.shape or ()))
        self._dtype = torch_dtype(space.dtype)
        self._device = device
        is_binary = isinstance(space, MultiBinary)
        self._kinds = [*("fi" if self._dtype.is_floating_point else "i"), *[torch.bool] * is_binary]

    def check(self, actions: Any, env_ids: np.ndarray | None = None) -> torch.Tensor:
        """Return actions (B, *action_shape) as a contiguous tensor of the space's dtype.

        Raises:
            ActionError: Wrong count, shape or dtype, or a tensor on another device.
        """
        import torch

        count = self._shape[0] if env_ids is None else len(env_ids)
        shape = (count, *self._shape[1:])
        if not isinstance(actions, torch.Tensor):
            if hasattr(actions, "__dlpack__") and not isinstance(actions, np.ndarray):
                actions = torch.from_dlpack(actions)
            else:
                try:
                    array = np.asarray(actions)
                    actions = torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
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


def _address(tensor: Any) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _bytes(records: np.ndarray) -> np.ndarray:
    """Return a view of records as rows of bytes."""
    return records.view(np.uint8).reshape(len(records), -1)
