"""CudaVectorEnv: compiled envs whose state and results are on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium.error import ResetNeeded
from torch import Tensor

from vecenv.core.arguments import Seed, read_count
from vecenv.core.errors import ActionError, ActionMaskError
from vecenv.core.rows import StepSlot
from vecenv.core.spaces import BatchedSpaces
from vecenv.jit.arrays import element_bounds
from vecenv.jit.base import MODES, CompiledVecEnv
from vecenv.jit.binding import uncompiled
from vecenv.jit.cuda.device import Device, DeviceActions, checked_tensor, open_device
from vecenv.jit.cuda.driver import ARGUMENTS, BAD_ACTION, BAD_MASK, FAULT_SHIFT, IS_OVER
from vecenv.jit.env import JitVectorEnv
from vecenv.jit.episodes import NO_LIMIT, OBSERVE, RESET, RUN_DTYPE, STEP
from vecenv.jit.kernels import EnvKernels

__all__ = ["CudaVectorEnv"]

_PLACE = {name: place for place, name in enumerate(ARGUMENTS)}
# Arguments that differ between calls: the first two are numbers, the others tensors.
_OF_A_CALL = (
    "op", "num_rows", "rewards32", "rewards64", "actions", "obs", "terminations", "truncations",
    "masks", "env_ids", "chosen",
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
        settings = {
            "autoreset_mode": MODES[self.autoreset_mode],
            "max_episode_steps": min(self.max_episode_steps or NO_LIMIT, NO_LIMIT),
            "num_envs": self.num_envs,
            "states": _address(states),
            "runs": _address(runs),
            "bounds": _address(self._bounds),
            "final_obs": _address(self._final_obs),
            "faults": _address(self._faults),
        }
        self._arguments = np.array([settings.get(name, 0) for name in ARGUMENTS], np.int64)
        if records is not None:
            self._params_moved()
            if self.has_own_params:
                self._separate_params()
        self._launch = self._memory.load(self.kernels, host.params)

    def _params_moved(self) -> None:
        rows = self._rows["params"]
        self._arguments[_PLACE["params"]] = _address(rows)
        self._arguments[_PLACE["num_params"]] = len(rows)

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
        """Launch one job; `arrays` are tensors by the names of ARGUMENTS."""
        is_float32 = rewards is not None and rewards.element_size() == 4
        arrays["rewards32" if is_float32 else "rewards64"] = rewards
        if env_ids is not None:
            arrays["env_ids"] = self._memory.put(env_ids)
        addresses = [_address(arrays.get(name)) for name in _OF_A_CALL[2:]]
        self._arguments[_PLACES_OF_A_CALL] = [op, num_rows, *addresses]
        if num_rows:
            (launch or self._launch)(num_rows, self._arguments)
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
