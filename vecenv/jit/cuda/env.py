"""CudaVectorEnv: compiled envs whose state and results are on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode

from vecenv.core.arguments import read_count
from vecenv.core.base import StepBatch, StepResult, VecEnv
from vecenv.core.compiling import cached_njit
from vecenv.core.errors import ActionError, ActionMaskError, ActionTypeError, SlotError
from vecenv.core.masks import MASK_KEY
from vecenv.core.rows import aligned_zeros, slot_arrays
from vecenv.core.seeding import Seed
from vecenv.core.spaces import BatchedSpaces
from vecenv.jit import random
from vecenv.jit.arrays import element_bounds
from vecenv.jit.binding import uncompiled
from vecenv.jit.branches import (
    Branch,
    draw_seeds,
    read_branch,
    read_rows,
    read_sources,
    refuse_branches,
)
from vecenv.jit.cuda.devices import Device, open_device, torch_dtype
from vecenv.jit.cuda.driver import ARGUMENTS, BAD_ACTION, BAD_MASK, FAULT_SHIFT, IS_OVER
from vecenv.jit.env import MODES, JitVectorEnv, read_array, read_seeds, read_state
from vecenv.jit.episodes import MASK, NO_LIMIT, OBSERVE, RESET, RUN_DTYPE, STEP
from vecenv.jit.kernels import EnvKernels
from vecenv.jit.worlds import flat_params, write_params

if TYPE_CHECKING:
    import torch

__all__ = ["CudaVectorEnv", "DeviceActions", "checked_tensor"]

_FIELDS: Any = RUN_DTYPE.fields
_WORD_BYTES = 8
_PLACE = {name: place for place, name in enumerate(ARGUMENTS)}
_OF_A_CALL = (
    "actions", "obs", "terminations", "truncations", "masks", "env_ids", "chosen", "over",
    "over_returns", "over_lengths",
)  # fmt: skip
_FIRST_OF_A_CALL = "op", "num_rows", "rewards32", "rewards64"
_PLACES_OF_A_CALL = np.array([_PLACE[name] for name in (*_FIRST_OF_A_CALL, *_OF_A_CALL)])
_seed_streams = cached_njit(random.seed_streams)


class Outputs(NamedTuple):
    """The tensors that a call with R rows writes."""

    obs: torch.Tensor
    rewards: torch.Tensor
    terminations: torch.Tensor
    truncations: torch.Tensor


class CudaVectorEnv(VecEnv):
    """Many envs of one kind on a CUDA device, one thread each; see docs/gpu.md.

    States, random streams and statistics stay on the device. An env with the same seed and actions
    does what it does as a `JitVectorEnv`: the same bits if its kernels compute with integers, up to
    the rounding of fused multiply-adds if they compute with floats.

    Calls return before the device is done, and are ordered with other work of torch's current
    stream. So an action out of bounds can't be refused at once: that env is not stepped, its row
    has reward 0 and its observation as before, and a later call raises ActionError (`check`, which
    waits, at the latest). Likewise ResetNeeded, where autoreset is disabled.

    Args:
        kernels: The kind of env, or a `JitVectorEnv` from which kernels, parameters and all options
            are taken.
        num_envs: Number of copies.
        device: "cuda", "cuda:1" or a `torch.device`.
        results: "torch" returns tensors on the device (for others through DLPack), "numpy" arrays,
            for which every call waits.
        **options: As for `JitVectorEnv`, of which `num_threads` has no meaning.

    Raises:
        TypeError, ValueError: An argument is invalid; the message names it.
        ModuleNotFoundError: torch or numba-cuda is not installed.
        DeviceError: There is no such device, or it is too old.
        KernelCompileError: A kernel uses what devices lack; names file and line.
        MemoryError: There is too little memory; nothing was allocated.

    Attributes:
        device: The `torch.device`.
        kernels: The kind of env.
        on_host: One such env on the CPU, for what only its class has, as CAGE 2's `scenario`. It is
            this one's: do not step it.
        last_returns: Return of each env's last episode that ended, float64 (num_envs,), NaN before:
            a live tensor, as the next four.
        last_lengths: Its length, int64 (num_envs,), 0 before.
        num_episodes: How many episodes have ended, int32 (num_envs,).
        episode_lengths: Steps taken in the episodes under way, int64 (num_envs,).
        episode_over: Whether an env's episode has ended and it was not reset since, bool
            (num_envs,).
        final_obs: In SAME_STEP mode, final observations (num_envs, *obs_shape) where an episode
            ended in the last step, until the next step.
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
        self._host = self.on_host = host  # arguments, and all that is drawn or read on the CPU
        self.kernels = host.kernels
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
        self._require_memory()
        import torch

        with torch.inference_mode(False):  # what is made in it can't be changed outside
            self._allocate_envs()
        self._launch = self._device.load(self.kernels, host.params)

    def _require_memory(self) -> None:
        """Raise MemoryError if the envs and the results of a step do not fit."""
        obs_bytes = int(np.prod(self._obs_shape[1:], dtype=np.int64)) * self._obs_dtype.itemsize
        has_final = self.autoreset_mode is AutoresetMode.SAME_STEP
        per_env = {
            "state": self.kernels.state_dtype.itemsize,
            "random stream and statistics": RUN_DTYPE.itemsize,
            "observations": obs_bytes * (2 if has_final else 1),
            "rewards and flags": 6,
        }
        needed, free = self.num_envs * sum(per_env.values()), self._device.free_bytes()
        if free is not None and needed > free:
            listed = ", ".join(f"{what} {size:,}" for what, size in per_env.items())
            raise MemoryError(
                f"{self.num_envs:,} envs of {self.kernels.name} need {needed:,} bytes on "
                f"{self.device}, of which {free:,} are free (bytes per env: {listed}); at most "
                f"{free // sum(per_env.values()):,} envs fit"
            )

    @property
    def _obs_shape(self) -> tuple[int, ...]:
        return (self.num_envs, *(self.single_observation_space.shape or ()))

    @property
    def _obs_dtype(self) -> np.dtype:
        return np.dtype(self.single_observation_space.dtype)

    def _allocate_envs(self) -> None:
        """Make the tensors with one row per env."""
        host, device, num_envs = self._host, self._device, self.num_envs
        state_bytes = self.kernels.state_dtype.itemsize
        self._states = device.zeros((num_envs, state_bytes), np.uint8)
        self._runs = device.zeros((num_envs, RUN_DTYPE.itemsize), np.uint8)
        has_final = host.autoreset_mode is AutoresetMode.SAME_STEP
        self.final_obs = device.zeros(
            (num_envs if has_final else 0, *self._obs_shape[1:]), self._obs_dtype
        )
        self._faults = device.host_zeros(1)
        self._fault_word = self._faults.numpy()
        bounds = element_bounds(self.single_action_space)
        self._bounds = self._upload(bounds.reshape(-1))
        self._params: torch.Tensor | None = None
        self._params_dtype = np.dtype([]) if host.params is None else host.params.dtype
        if host.params is not None:
            records = host.params if len(host.params) == num_envs else host.params[:1]
            self._params = self._upload(_bytes(np.array(records)))
            if host.has_own_params:
                self._separate_params()
        self.last_returns = self._run_field("last_return")
        self.last_lengths = self._run_field("last_length")
        self.num_episodes = self._run_field("num_episodes")
        self.episode_lengths = self._run_field("episode_length")
        self.episode_over = self._run_field("episode_over")
        self.last_returns.fill_(np.nan)
        self._is_seeded = False
        self._arguments = np.zeros(len(ARGUMENTS), np.int64)
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
            "final_obs": _address(self.final_obs),
            "faults": _address(self._faults),
        }
        for name, value in settings.items():
            self._arguments[_PLACE[name]] = value
        # Env ids (also on the host), actions, and how many envs are in flight with these.
        self._sent: list[tuple[np.ndarray, torch.Tensor, int]] = []

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        """Return a tensor on the device with what is in an array, which the caller may change."""
        import torch

        return torch.from_numpy(np.array(array)).to(self.device)

    def _run_field(self, name: str) -> torch.Tensor:
        """Return a live view of one field of the statistics, (num_envs,)."""
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

    @property
    def num_envs_in_flight(self) -> int:
        """How many envs have been sent and not received."""
        return self._calls.num_in_flight

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]  # a tuple, of all envs
        """Seeds of the envs' random streams."""
        if not self._is_seeded:
            self._set_streams(*read_seeds(None, None, self.num_envs, is_first=True))
            self._is_seeded = True
        return tuple(self._run_field_words("seed").cpu().numpy().view(np.uint64).tolist())

    def _run_field_words(self, name: str) -> torch.Tensor:
        """Return a live view of a field of uint64, as int64, which torch can index."""
        import torch

        return self._runs.view(torch.int64)[:, _FIELDS[name][1] // _WORD_BYTES]

    def reset(
        self, *, seed: Seed = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all envs, or some, and return the observations and infos of all.

        Args:
            seed: As for every vector env.
            options: `options["reset_mask"]`, bool (num_envs,), may be a tensor on the device, for
                which nothing waits; not together with a seed, nor with envs in flight.
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
        self._raise_faults()
        obs = self._new_obs()
        self._run(RESET, self.num_envs, obs=obs, chosen=mask.contiguous())
        infos = self._with_masks({}, None, mask.clone()) if self.mask_infos else {}
        return self._result(obs), infos

    def _reset(
        self, seed: Seed, options: dict[str, Any] | None, reset_mask: np.ndarray | None
    ) -> tuple[Any, dict[str, Any]]:
        if options:
            raise ValueError(f"options has {sorted(options)}; compiled envs know only 'reset_mask'")
        self._raise_faults()
        begins = read_seeds(seed, reset_mask, self.num_envs, is_first=not self._is_seeded)
        self._set_streams(*begins)
        self._is_seeded = True
        obs = self._new_obs()
        if reset_mask is None or reset_mask.all():
            self._sent.clear()
            self._run(RESET, self.num_envs, obs=obs)
        else:
            self._run(RESET, self.num_envs, obs=obs, chosen=self._upload(reset_mask))
        infos: dict[str, Any] = {}
        if self.mask_infos:
            is_there = np.ones(self.num_envs, np.bool_) if reset_mask is None else reset_mask
            infos = self._with_masks(infos, None, self._upload(is_there))
        return self._result(obs), infos

    def _set_streams(self, env_ids: np.ndarray, seeds: np.ndarray) -> None:
        if not len(env_ids):
            return
        runs = aligned_zeros((len(env_ids),), RUN_DTYPE)
        _seed_streams(runs.view(np.recarray), np.arange(len(env_ids)), seeds)
        runs["seed"] = seeds
        rows = self._upload(env_ids)
        for name in ("seed", "key", "counter"):
            words = self._upload(np.ascontiguousarray(runs[name]).view(np.int64))
            self._run_field_words(name)[rows] = words

    def _step(self, actions: Any, out: Any) -> StepResult:
        self._raise_faults()
        outputs = self._new_outputs(self.num_envs) if out is None else self._slot(out)
        infos = self._run_step(self.num_envs, actions, outputs)
        if out is None:
            obs, rewards, terminations, truncations = map(self._result, outputs)
            return obs, rewards, terminations, truncations, infos
        return out.obs, out.rewards, out.terminations, out.truncations, infos

    def _send(self, actions: Any, env_ids: np.ndarray) -> None:
        """Keep the actions; `recv` steps these envs."""
        self._raise_faults()
        self._drop_given_up()
        in_flight = self._calls.num_in_flight + len(env_ids)
        self._sent.append((env_ids, actions.clone(), in_flight))

    def _drop_given_up(self) -> None:
        """Drop sends that a reset has cancelled."""
        while self._sent and self._sent[-1][2] > self._calls.num_in_flight:
            self._sent.pop()

    def _sent_ids(self) -> np.ndarray:
        """Return the envs in flight in the order of sending, int64 (B,)."""
        self._drop_given_up()
        return np.concatenate([ids for ids, _, _ in self._sent])

    def _recv(self, count: int, most: int, timeout: float | None) -> StepBatch:
        """Step the first `count` envs in the order of sending."""
        import torch

        self._raise_faults()
        env_ids = self._sent_ids()
        actions = torch.cat([part for _, part, _ in self._sent])
        outputs, chosen = self._new_outputs(count), env_ids[:count]
        rows = self._upload(chosen)
        infos = self._run_step(count, actions[:count], outputs, rows)
        num_left = len(env_ids) - count
        self._sent = [(env_ids[count:], actions[count:], num_left)] if num_left else []
        obs, rewards, terminations, truncations = map(self._result, outputs)
        return StepBatch(obs, rewards, terminations, truncations, infos, chosen)

    def _run_step(
        self, count: int, actions: Any, outputs: Outputs, rows: torch.Tensor | None = None
    ) -> dict[str, Any]:
        """Step all envs, or those of `rows`, int64 (R,), and return the infos.

        They have the same keys after every step, as nobody waits to see whether an episode ended.
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
            final_obs = self.final_obs if rows is None else self.final_obs[rows]
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

    def observe(self, *, out: Any = None) -> Any:
        """Return the observations of the states as they are; nothing is stepped.

        Args:
            out: A tensor (num_envs, *obs_shape) on the device to write into; None for a new one.
        """
        self._calls.require_ready("observe")
        obs = self._new_obs() if out is None else self._checked("obs", out, self._obs_shape)
        self._run(OBSERVE, self.num_envs, obs=obs)
        return self._result(obs) if out is None else out

    def observer(self, kernels: EnvKernels) -> Callable[[torch.Tensor], None]:
        """Return a function that writes what other kernels observe of the states as they are.

        Args:
            kernels: Of the same state record and parameters.

        Returns:
            Takes a tensor (num_envs, *obs_shape) on the device of the dtype of their observations.
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

    @property
    def has_action_masks(self) -> bool:
        """Whether the env has an `action_mask` kernel."""
        return self.kernels.action_mask is not None

    def action_masks(self, env_ids: Any = None, *, out: Any = None) -> Any:
        """Return which actions the envs allow, int8 (B, width), see `VecEnv.action_masks`.

        A mask that allows nothing raises ActionMaskError with a later call.
        """
        if env_ids is None:
            self._calls.require_ready("action_masks")
            rows, count = None, self.num_envs
        else:
            ids = self._calls.check_env_ids(env_ids, "action_masks")
            rows, count = self._upload(ids), len(ids)
        self._host.require_masks()
        self._raise_faults()
        shape = (count, self._mask_width)
        if out is None:
            return self._result(self._masks_of(rows, count))
        plain = self._checked("masks", out, shape, (np.dtype(np.int8), np.dtype(np.bool_)))
        self._masks_of(rows, count, plain)
        return out

    def _masks_of(self, rows: torch.Tensor | None, count: int, out: Any = None) -> torch.Tensor:
        """Write masks and return them as int8 (count, width)."""
        import torch

        masks = self._device.zeros((count, self._mask_width), np.int8) if out is None else out
        given = {} if rows is None else {"env_ids": rows}
        self._run(MASK, count, masks=masks.view(torch.bool), **given)
        return masks

    def _with_masks(
        self, infos: dict[str, Any], rows: torch.Tensor | None, is_there: torch.Tensor
    ) -> dict[str, Any]:
        masks = self._masks_of(rows, len(is_there))
        return {**infos, MASK_KEY: self._result(masks), f"_{MASK_KEY}": self._result(is_there)}

    def check(self) -> None:
        """Wait until all steps are done, and raise what one of them could not.

        Raises:
            ActionError: An env was given an action out of bounds, or NaN, and was not stepped.
            ActionMaskError: A mask allows no action.
            ResetNeeded: An env whose episode is over was stepped with autoreset disabled.
            ClosedEnvironmentError: After `close`.
        """
        self._calls.require_open("check")
        self._wait()
        self._raise_faults()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)

    def _raise_faults(self) -> None:
        """Raise what a row of an earlier call has noted; this waits for nothing."""
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

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the whole state as arrays of the host, those of `JitVectorEnv.state_dict`.

        Either kind of vector env goes on from what the other one has returned.
        """
        self._calls.require_ready("state_dict")
        self.check()
        arrays = {
            "states": _records(self._states, self.kernels.state_dtype),
            "runs": _records(self._runs, RUN_DTYPE),
        }
        if self._params is not None and self.has_own_params:
            arrays["params"] = _records(self._params, self._params_dtype)
        return self._host.described_state(arrays)

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore a state that `state_dict` returned; `observe` returns its observations.

        Raises:
            KeyError: An entry is missing.
            ValueError: An entry has another shape or dtype than this env's.
        """
        import torch

        self._calls.require_idle("load_state_dict")
        states, runs = read_state(state, self.num_envs, self.kernels.state_dtype)
        self._host.check_state(state, states)
        if self._params is not None and (self.has_own_params or "params" in state):
            params = read_array(state, "params", self.num_envs, self._params_dtype)
            self._separate_params().copy_(torch.from_numpy(_bytes(params)))
        self._states.copy_(torch.from_numpy(_bytes(states)))
        self._runs.copy_(torch.from_numpy(_bytes(runs)))
        self._is_seeded = True
        self._calls.mark_reset()

    @property
    def has_own_params(self) -> bool:
        """Whether each env has parameters of its own: records were given, or set, or drawn."""
        return self._params is not None and (self._host.has_own_params or len(self._params) > 1)

    def _separate_params(self) -> torch.Tensor:
        """Give each env a record of its own, and return them as bytes (num_envs, size)."""
        if self._params is None:
            raise TypeError(f"{self.kernels.name} takes no params")
        if len(self._params) < self.num_envs:
            self._params = self._params.repeat(self.num_envs, 1)
            self._set_address()
        return self._params

    def _set_address(self) -> None:
        """Tell the launches where the parameters are."""
        if hasattr(self, "_arguments"):
            self._arguments[_PLACE["params"]] = _address(self._params)
            self._arguments[_PLACE["num_params"]] = self.num_envs

    def set_params(self, rows: Any, values: Any) -> None:
        """Change parameters of some envs, see `JitVectorEnv.set_params`; this waits.

        A CUDA graph that was captured while all envs shared one record goes on to read that.
        """
        self._calls.require_open("set_params")
        chosen = read_rows("rows", rows, self.num_envs)
        records = _records(self._separate_params(), self._params_dtype)
        write_params(records, chosen, values, self.kernels.name)
        self._separate_params()[:] = self._upload(_bytes(records))

    def params_of(self, rows: Any = None) -> Any:
        """Return the parameters of some envs as float32 (B, P), see `JitVectorEnv.params_of`."""
        if self._params is None:
            raise TypeError(f"{self.kernels.name} takes no params")
        chosen = read_rows("rows", rows, self.num_envs)
        records = np.resize(_records(self._params, self._params_dtype), self.num_envs)
        return self._result(self._upload(flat_params(records[chosen])))

    def copy_rows(self, source: Any, target: Any, *, luck: str = "same") -> None:
        """Copy envs to others in the midst of their episodes, see `JitVectorEnv.copy_rows`."""
        sources, targets = read_sources(source, target, self.num_envs, self.num_envs, luck)
        over = self.episode_over.cpu().numpy()
        refuse_branches(self._calls, "copy_rows", sources, targets, over)
        own = self._params if self.has_own_params else None
        self._put(targets, (self._states, self._runs, own), sources, luck)

    def snapshot(self, rows: Any = None) -> Branch:
        """Return copies of envs on the CPU, see `JitVectorEnv.snapshot`, which can restore them."""
        found = read_rows("rows", rows, self.num_envs)
        over = self.episode_over.cpu().numpy()
        refuse_branches(self._calls, "snapshot", found, np.unique(found), over)
        at = self._upload(found)
        params = None
        if self._params is not None and self.has_own_params:
            params = _records(self._params[at], self._params_dtype)
        states = _records(self._states[at], self.kernels.state_dtype)
        runs, facts = _records(self._runs[at], RUN_DTYPE), self._host.described_state({})
        return Branch(self.kernels.name, states, runs, params, facts)

    def restore(self, rows: Any, branch: Branch, *, luck: str = "same") -> None:
        """Put the copies of a `snapshot` into envs, see `JitVectorEnv.restore`."""
        own = np.zeros(0, self._params_dtype) if self.has_own_params else None
        branch = read_branch(branch, self.kernels.name, self.kernels.state_dtype, own)
        every, count = np.arange(len(branch.states)), len(branch.states)
        sources, targets = read_sources(every, rows, count, self.num_envs, luck)
        over = np.zeros(self.num_envs, np.bool_)
        refuse_branches(self._calls, "restore", targets[:0], targets, over)
        if branch.facts:
            self._host.check_state(branch.facts, branch.states)
        given = (branch.states, branch.runs, branch.params)
        tensors = [None if one is None else self._upload(_bytes(one)) for one in given]
        self._put(targets, tensors, sources, luck)

    def _put(
        self, targets: np.ndarray, given: Sequence[Any], sources: np.ndarray, luck: str
    ) -> None:
        """Copy rows of bytes to envs; `given` are states, streams and parameters, or None."""
        to, of = self._upload(targets), self._upload(sources)
        seeds = None
        if luck == "fresh":
            seeds = draw_seeds(_records(self._runs[to], RUN_DTYPE), targets)
        for own, rows in zip((self._states, self._runs, self._params), given, strict=True):
            if own is not None and rows is not None:
                own[to] = rows[of]
        if seeds is not None:
            self._set_streams(targets, seeds)

    def render(self) -> tuple[Any, ...] | None:
        """Return what the same envs on the CPU draw, see `JitVectorEnv.render`."""
        if self.render_mode is None or self.kernels.render is None:
            return self._host.render()
        self._calls.require_ready("render")
        frames: list[Any] = []
        for env_id, state in enumerate(_records(self._states, self.kernels.state_dtype)):
            self._host.states[0] = state
            self._host._calls.mark_reset()
            if self._params is not None and self.has_own_params:
                own = _records(self._params[env_id : env_id + 1], self._params_dtype)
                self._host.set_params([0], own)
            frames.extend((self._host.render() or ())[:1])
        return tuple(frames)

    def close_extras(self, **kwargs: Any) -> None:
        """Give the memory back."""
        if hasattr(self, "_host"):
            self._host.close()
        for name in ("_states", "_runs", "final_obs", "_params", "_sent", "_launch"):
            if hasattr(self, name):
                delattr(self, name)
        for name in (
            "last_returns",
            "last_lengths",
            "num_episodes",
            "episode_lengths",
            "episode_over",
        ):
            if hasattr(self, name):
                delattr(self, name)

    def _run(self, op: int, num_rows: int, *, rewards: Any = None, **tensors: Any) -> None:
        """Launch one job; `tensors` are by the names of ARGUMENTS."""
        arguments, rewards_at = self._arguments, _address(rewards)
        is_float32 = rewards is not None and rewards.element_size() == 4
        arguments[_PLACES_OF_A_CALL] = [
            op,
            num_rows,
            rewards_at if is_float32 else 0,
            0 if is_float32 else rewards_at,
            *[_address(tensors.get(name)) for name in _OF_A_CALL],
        ]
        if num_rows:
            self._launch(num_rows, arguments)

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

    def _result(self, tensor: torch.Tensor) -> Any:
        return tensor.cpu().numpy() if self._is_numpy else tensor

    def _slot(self, out: Any) -> Outputs:
        """Return the tensors of `out`.

        Raises:
            SlotError: One is missing, or of another device, shape, dtype or layout.
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
        self, name: str, tensor: Any, shape: tuple[int, ...], dtypes: tuple[np.dtype, ...] = ()
    ) -> Any:
        return checked_tensor(name, tensor, shape, dtypes or (self._obs_dtype,), self.device)


def checked_tensor(
    name: str, tensor: Any, shape: tuple[int, ...], dtypes: tuple[np.dtype, ...], device: Any
) -> Any:
    """Return a tensor of a slot that is written into.

    Raises:
        SlotError: It is of another device, shape, dtype or layout, or no tensor.
    """
    import torch

    wanted = [torch_dtype(one) for one in dtypes]
    if (
        isinstance(tensor, torch.Tensor)
        and tensor.device == device
        and tensor.shape == shape
        and tensor.dtype in wanted
        and tensor.is_contiguous()
        and not tensor.requires_grad
    ):
        return tensor
    listed = " or ".join(map(str, wanted))
    expected = f"expected a contiguous tensor {listed} {shape} on {device}"
    if not isinstance(tensor, torch.Tensor):
        raise SlotError(f"out.{name} is {type(tensor).__name__}, {expected}; nothing was stepped")
    if tensor.requires_grad:
        raise SlotError(f"out.{name} requires gradients, {expected} without; nothing was stepped")
    layout = "" if tensor.is_contiguous() else ", not contiguous"
    raise SlotError(
        f"out.{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}{layout}; "
        f"{expected}; nothing was stepped"
    )


class DeviceActions:
    """Checks batched actions as far as the host knows them, and brings them to the device."""

    def __init__(self, space: Any, num_envs: int, device: torch.device) -> None:
        self._space = space
        self._shape = (num_envs, *(space.shape or ()))
        self._dtype = torch_dtype(space.dtype)
        self._device = device
        self._kinds = "fiu" if np.dtype(space.dtype).kind == "f" else "iu"

    def check(self, actions: Any, env_ids: np.ndarray | None = None) -> torch.Tensor:
        """Return actions (B, *action_shape) as a contiguous tensor of the space's dtype.

        Raises:
            ActionError: Wrong count, shape or dtype, or a tensor of another device.
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
        kind = (
            "f" if actions.dtype.is_floating_point else "b" if actions.dtype == torch.bool else "i"
        )
        is_binary = hasattr(self._space, "n") and len(self._shape) > 1
        if actions.dtype != self._dtype:
            if kind not in self._kinds + ("b" if is_binary else ""):
                raise ActionTypeError(
                    f"actions has dtype {actions.dtype}, expected {self._dtype} for {self._space}"
                )
            actions = actions.to(self._dtype)
        return actions.detach().contiguous()


def _address(tensor: Any) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _records(rows: torch.Tensor, dtype: np.dtype) -> np.ndarray:
    """Copy rows of bytes on the device to records of the host."""
    found = aligned_zeros((len(rows),), dtype)
    _bytes(found)[...] = rows.cpu().numpy()
    return found


def _bytes(records: np.ndarray) -> np.ndarray:
    """Return a view of records as rows of bytes."""
    return records.view(np.uint8).reshape(len(records), -1)
