"""JitVectorEnv: environments written as Numba functions, thousands in one compiled call."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode

from vecenv.core.arguments import read_autoreset_mode, read_count
from vecenv.core.base import StepBatch, StepResult
from vecenv.core.masks import allow_something, mask_starts, none_allowed
from vecenv.core.rows import Outputs, aligned_zeros, check_slot_array, slot_outputs
from vecenv.core.spaces import BatchedSpaces
from vecenv.jit.arrays import ActionReader
from vecenv.jit.base import MODES, CompiledVecEnv
from vecenv.jit.binding import bind_loop, play_episodes
from vecenv.jit.branches import copy_records, take_records
from vecenv.jit.episodes import MASK, NO_LIMIT, OBSERVE, RESET, RUN_DTYPE, STEP
from vecenv.jit.games import state_writer
from vecenv.jit.kernels import EnvKernels, empty_batch
from vecenv.jit.runner import Runner
from vecenv.jit.worlds import as_sampler, read_params

__all__ = ["JitVectorEnv"]

_RENDER_MODES = ("rgb_array", "ansi")
_RENDER_FPS = 10
_NUM_EMPTY = 20  # empty compiled calls, to measure the cost of a time stamp
_BOOL = np.dtype(np.bool_)


class JitVectorEnv(CompiledVecEnv):
    """Many environments of one kind, in compiled code.

    A step of all envs is one call into machine code: it checks the actions, steps the envs, resets
    those that are due, counts returns and lengths, and writes the results into the output arrays.
    Long calls are split among threads. An env's trajectory depends only on its seed and actions:
    not on the number of envs or threads, nor on how envs are grouped into sends.

    Args:
        kernels: The kind of environment.
        num_envs: Number of copies.
        params: Parameters for the kernels, copied. A record for all envs (see `pack_record`); or an
            array of records (num_envs,), one per env; or a dict of names to values, for all envs or
            one per env, that replace those of `kernels.params`. None for `kernels.params`.
        sampler: A kernel `(params, rng)` that writes an env's parameters before each reset; or a
            dict of ranges such as {"gravity": (5.0, 15.0)}, from which each episode draws them.
            None for the kernels' own sampler, unless `params` are given; False for none.
        on_episode_end: Called as `on_episode_end(envs, env_ids)` after a step in which episodes
            ended, env_ids int64 (B,): for curricula by `set_params`. The next episodes begin after
            this call, except in SAME_STEP mode, where they have begun.
        max_episode_steps: Truncate episodes at this length; None leaves that to `step`.
        autoreset_mode: "NextStep", "SameStep" or "Disabled".
        num_threads: Maximum number of threads; None for one per processor this process may use.
        episode_infos: Whether infos["episode"] reports the return "r" and length "l" of episodes
            that end. `last_returns` and `last_lengths` have them in any case.
        mask_infos: Whether infos["action_mask"] has the envs' action masks after every reset, step
            and `recv`. `action_masks` returns them in any case.
        metadata: Further metadata; None for that of the class.
        render_mode: Type of the frames, "rgb_array" or "ansi"; for kernels with a `render`
            function, or a subclass with a method of its own.
        debug: Whether everything runs as plain Python: slow, but with tracebacks, breakpoints, and
            an IndexError for every index out of range.
        dry_run: Whether kernels first run in Python for a few steps, before compiled code uses
            them. This finds indices out of range (in these steps), wrong results of `step`, and
            memory left unwritten.

    Raises:
        TypeError, ValueError: An argument is invalid; the message names it.
        NoActionMaskError: `mask_infos`, and there is no `action_mask` kernel.
        KernelIndexError: A kernel uses an index that is out of range.
        KernelResultError: A kernel returns something wrong, or leaves `out` or fields unwritten.
        KernelCompileError: A kernel can't be compiled, or draws from `numpy.random` or `random`.

    Attributes:
        agents_class: In a subclass where one agent plays all: the subclass of the same games whose
            kernels have `groups`, made by `vecenv.make_vec_agents` for the same id. None if there
            is none, or for that subclass itself.
    """

    agents_class: ClassVar[type[JitVectorEnv] | None] = None

    def __init__(
        self,
        kernels: EnvKernels,
        num_envs: int = 1,
        *,
        params: Any = None,
        sampler: Any = None,
        on_episode_end: Callable[[Any, np.ndarray], Any] | None = None,
        max_episode_steps: int | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        num_threads: int | None = None,
        episode_infos: bool = False,
        mask_infos: bool = False,
        metadata: dict[str, Any] | None = None,
        render_mode: str | None = None,
        debug: bool = False,
        dry_run: bool = True,
    ) -> None:
        _check_kernels(kernels)
        num_envs = read_count("num_envs", num_envs)
        mode = read_autoreset_mode(autoreset_mode)
        limit = NO_LIMIT
        if max_episode_steps is not None:
            limit = min(read_count("max_episode_steps", max_episode_steps), NO_LIMIT)
        threads = (
            _default_threads() if num_threads is None else read_count("num_threads", num_threads)
        )
        if sampler is False or (sampler is None and params is not None):
            kernels = kernels.having(sampler=None)
        elif sampler is not None:
            kernels = kernels.having(sampler=as_sampler(kernels, sampler))
        has_sampler = kernels.sampler is not None
        self._params = read_params(kernels, params, num_envs, per_env=has_sampler)
        if has_sampler and self._params is None:
            raise TypeError(f"{kernels.name} has a sampler, but no params that it could write")
        self._has_own_params = has_sampler or (self._params is not None and len(self._params) > 1)
        all_metadata = {**type(self).metadata, **(metadata or {})}
        spaces = BatchedSpaces.of(kernels.observation_space, kernels.action_space, num_envs)
        self._set_up(
            num_envs, spaces, mode, _with_rendering(kernels, all_metadata, render_mode), render_mode
        )
        self.kernels = kernels
        self.max_episode_steps = max_episode_steps
        self.episode_infos, self.mask_infos = episode_infos, mask_infos
        if mask_infos:
            self.require_masks()
        self._on_episode_end = on_episode_end
        self._allocate_envs()
        first = None if self._params is None else self._params[:1]
        loop = bind_loop(kernels, first, max_episode_steps=limit, debug=debug, dry_run=dry_run)
        self._batch = empty_batch(kernels)._replace(  # a step of all envs
            op=STEP, autoreset_mode=MODES[mode], max_episode_steps=limit, states=self._states,
            runs=self._runs, params=self._params, final_obs=self._final_obs,
        )  # fmt: skip
        self._runner = Runner(loop, self._batch, self._reader.bounds, threads, self._calls.give_up)

    def _allocate_envs(self) -> None:
        """Make the arrays that have one row per env."""
        num_envs, obs_shape = self.num_envs, self._obs_shape
        is_same_step = self.autoreset_mode is AutoresetMode.SAME_STEP
        self._states = aligned_zeros((num_envs,), self.kernels.state_dtype)
        self._runs = aligned_zeros((num_envs,), RUN_DTYPE)
        self._runs["last_return"] = np.nan
        self._over = self._runs["episode_over"]
        self._final_obs = self.allocate(
            (num_envs if is_same_step else 0, *obs_shape[1:]), self._obs_dtype
        )
        self._reader = ActionReader(self.kernels.action_space, num_envs)
        self._row = (obs_shape[1:], self._obs_dtype)
        self._unused = self._new_outputs(0)  # for jobs that do not write these outputs
        self._is_disabled = self.autoreset_mode is AutoresetMode.DISABLED

    def _new_outputs(self, num_rows: int) -> Outputs:
        """Return uninitialised arrays for results."""
        shape, dtype = self._row
        return Outputs(
            np.empty((num_rows, *shape), dtype),
            np.empty(num_rows, np.float64),
            np.empty(num_rows, _BOOL),
            np.empty(num_rows, _BOOL),
        )

    @property
    def params(self) -> np.ndarray | None:
        """The parameter record, (1,), or one per env, (num_envs,): a live view; None if none.

        Values written here, `envs.params.gravity = 1.6`, count from the next step on. `state_dict`
        includes the parameters if each env has its own.
        """
        return None if self._params is None else self._params.view(np.recarray)

    @property
    def states(self) -> np.ndarray:
        """The state records (num_envs,): a live view. After changing it, call `observe`."""
        return self._states.view(np.recarray)

    def _run(self, op: int, num_rows: int, **arrays: Any) -> int:
        outputs = self._unused
        if "obs" in arrays:
            outputs = outputs._replace(obs=arrays.pop("obs"))
        job = self._batch._replace(op=op, **arrays)
        return self._runner.run(job, num_rows, self._batch.actions, outputs)

    def _begin(self, reset_mask: np.ndarray | None) -> np.ndarray:
        obs = self._new_obs()
        if reset_mask is None:
            self._run(RESET, self.num_envs, obs=obs)
        else:
            chosen = np.flatnonzero(reset_mask)
            self._run(RESET, len(chosen), obs=obs[: len(chosen)], env_ids=chosen)
            self._run(OBSERVE, self.num_envs, obs=obs)
        return obs

    def begin_episodes(self, env_ids: np.ndarray) -> np.ndarray:
        """Reset envs whose episodes have ended, in autoreset mode DISABLED, as autoreset would.

        Their random streams continue; envs in flight stay in flight.

        Args:
            env_ids: int64 (B,).

        Returns:
            Their observations (B, *obs_shape).
        """
        obs = np.empty((len(env_ids), *self._row[0]), self._obs_dtype)
        self._run(RESET, len(env_ids), obs=obs, env_ids=env_ids)
        return obs

    def _read(self, name: str, rows: np.ndarray | None = None) -> np.ndarray:
        records = getattr(self, f"_{name}")
        if rows is None:
            return records.copy()
        return take_records(records, rows if len(records) == self.num_envs else np.zeros_like(rows))

    def _stored(self, records: np.ndarray) -> np.ndarray:
        return records

    def _copy(self, name: str, targets: np.ndarray, stored: Any, sources: Any) -> None:
        copy_records(getattr(self, f"_{name}"), targets, stored, sources)

    def _spread_params(self) -> None:
        self._params = read_params(self.kernels, self._params, self.num_envs, per_env=True)
        self._batch = self._batch._replace(params=self._params)

    @property
    def _params_dtype(self) -> np.dtype:
        assert self._params is not None
        return self._params.dtype

    def _run_field(self, name: str) -> np.ndarray:
        return self._runs[name]

    def _new_obs(self) -> np.ndarray:
        return np.empty(self._obs_shape, self._obs_dtype)

    def _checked(
        self, name: str, array: Any, shape: tuple[int, ...], dtypes: Any = ()
    ) -> np.ndarray:
        return check_slot_array(name, array, shape, dtypes or (self._obs_dtype,))

    # -- masks --------------------------------------------------------------------------------

    def _action_masks(self, env_ids: np.ndarray | None, out: np.ndarray | None) -> np.ndarray:
        self.require_masks()
        if out is None:
            count = self.num_envs if env_ids is None else len(env_ids)
            out = self.allocate((count, self._mask_width), np.int8)
        plain = np.asarray(out)
        if self._write_masks(plain, env_ids):
            row = int(np.flatnonzero(~allow_something(plain.view(_BOOL), self._mask_starts))[0])
            raise none_allowed(f"env {row if env_ids is None else env_ids[row]}")
        return out

    @cached_property
    def _mask_starts(self) -> np.ndarray:
        return mask_starts(self.single_action_space)

    def _write_masks(self, masks: np.ndarray, env_ids: np.ndarray | None) -> int:
        masks = masks.view(_BOOL)
        arrays = {} if env_ids is None else {"env_ids": env_ids}
        num_empty = self._run(MASK, len(masks), masks=masks, **arrays)
        if len(self._mask_starts) > 1:  # the compiled loop only checks whole masks
            is_over = self._over[slice(None) if env_ids is None else env_ids]
            lacks = ~allow_something(masks, self._mask_starts)
            masks[lacks & is_over] = True  # their actions do not matter
            num_empty = int(np.count_nonzero(lacks & ~is_over))
        return num_empty

    # -- steps --------------------------------------------------------------------------------

    def _step(self, actions: Any, out: Any) -> StepResult:
        if self._is_disabled:
            self._refuse_over(self._over)
        if out is None:
            outputs = self._new_outputs(self.num_envs)
        else:
            outputs = slot_outputs(out, self._obs_shape, (self._obs_dtype,))
        given = self._reader.read(actions)
        num_ended = self._runner.run(self._batch, self.num_envs, given, outputs)
        if num_ended < 0:
            self._reader.refuse(actions, -1 - num_ended, -1 - num_ended)
        infos: dict[str, Any] = self._end_infos(outputs, None) if num_ended else {}
        if self.mask_infos:
            infos = self._with_masks(infos, None, np.ones(self.num_envs, np.bool_))
        slot = outputs if out is None else out
        return slot.obs, slot.rewards, slot.terminations, slot.truncations, infos

    def _hold(self, env_ids: np.ndarray, actions: np.ndarray) -> None:
        if self._is_disabled:
            is_over = np.zeros_like(self._over)
            is_over[env_ids] = self._over[env_ids]
            self._refuse_over(is_over)
        self._reader.check(actions, env_ids)
        if self._held is None:
            empty = self._batch.actions
            self._held = np.zeros((self.num_envs, *empty.shape[1:]), empty.dtype)
        self._held[env_ids] = actions

    def _step_some(self, env_ids: np.ndarray) -> StepBatch:
        count = len(env_ids)
        outputs = self._new_outputs(count)
        job = self._batch._replace(env_ids=env_ids)
        num_ended = self._runner.run(job, count, self._held[env_ids], outputs)
        infos: dict[str, Any] = self._end_infos(outputs, env_ids) if num_ended else {}
        if self.mask_infos:
            infos = self._with_masks(infos, env_ids, np.ones(count, np.bool_))
        return StepBatch(*outputs, infos, env_ids)

    def _refuse_over(self, is_over: np.ndarray) -> None:
        """Raise if autoreset is disabled and an env to step has ended its episode, bool (N,)."""
        if is_over.any():
            stuck = np.flatnonzero(is_over)
            listed = ", ".join(map(str, stuck[:8].tolist())) + ", ..." * (len(stuck) > 8)
            raise ResetNeeded(
                f"The episodes of envs [{listed}] have ended and autoreset is disabled; "
                "reset them with reset(options={'reset_mask': mask}) before the next step. "
                "Nothing was stepped."
            )

    def _end_infos(self, outputs: Outputs, env_ids: np.ndarray | None) -> dict[str, Any]:
        """Return the infos of a step in which episodes ended; call `on_episode_end`.

        Args:
            outputs: The results.
            env_ids: int64 (R,), the envs of the rows; None for all envs in order.
        """
        is_same_step = self.autoreset_mode is AutoresetMode.SAME_STEP
        if not (self.episode_infos or is_same_step or self._on_episode_end):
            return {}
        is_over = outputs.terminations | outputs.truncations
        rows = np.flatnonzero(is_over)
        ended = rows if env_ids is None else env_ids[rows]
        infos: dict[str, Any] = {}
        if self.episode_infos:
            returns, lengths = np.zeros(len(is_over)), np.zeros(len(is_over), np.int64)
            returns[rows] = self._runs["last_return"][ended]
            lengths[rows] = self._runs["last_length"][ended]
            infos = {"episode": {"r": returns, "l": lengths}, "_episode": is_over}
        if is_same_step:
            objects = np.full(len(is_over), None, dtype=object)
            objects[rows] = np.fromiter(self._final_obs[ended], dtype=object, count=len(rows))
            infos = {
                **infos,
                "final_obs": objects,
                "_final_obs": is_over,
                "final_info": infos,
                "_final_info": is_over,
            }
        if self._on_episode_end is not None:
            self._on_episode_end(self, ended)
        return infos

    def state_writer(self) -> Callable[..., None]:
        """Return a function that writes the central states of records (B,) into an array (B, ...).

        The function's third argument is env ids int64 (B,), or None for all in order. For games
        with a `central_state` kernel, see `EnvKernels`.
        """
        has_params, debug = self._params is not None, self._runner.is_python
        write: Any = state_writer(self.kernels.central_state, has_params=has_params, debug=debug)

        def write_states(
            states: np.ndarray, out: np.ndarray, env_ids: np.ndarray | None = None
        ) -> None:
            if self._params is None:
                write(states, out)
            else:
                is_part = env_ids is not None and len(self._params) > 1
                params = take_records(self._params, env_ids) if is_part else self._params  # type: ignore[arg-type]  # there
                write(states, out, params.view(np.recarray))

        return write_states

    def play_in_python(self, seconds: float) -> int | None:
        """Play whole episodes of one separate env in plain Python, where indices are checked.

        The vector env itself does not change. `vecenv.check_vector_env` calls this.

        Args:
            seconds: Time limit; otherwise it ends after three episodes with random actions.

        Returns:
            The number of episodes that ended; None for bundled kernels, which are not played.

        Raises:
            KernelIndexError: An index is out of range; names file and line.
            KernelResultError: `step` returns something wrong.
        """
        limit = NO_LIMIT if self.max_episode_steps is None else self.max_episode_steps
        return play_episodes(self.kernels, self._params, min(limit, NO_LIMIT), seconds)

    def _begin_stamps(self) -> int:
        """Stamp compiled calls instead of envs; return the time of an empty call, in ns."""
        self._calls.require_open("timing.enable")
        lengths_ns: list[int] = []
        self._runner.stamp(lambda begin_ns, end_ns: lengths_ns.append(end_ns - begin_ns))
        for _ in range(_NUM_EMPTY):
            self._run(OBSERVE, 0)
        timing = self.timing  # a reference to self would be a cycle and delay the env's deletion

        def note(begin_ns: int, end_ns: int) -> None:
            timing.log.note_wait(begin_ns, end_ns)  # the calling thread

        self._runner.stamp(note)
        return sorted(lengths_ns)[_NUM_EMPTY // 2]

    def _end_stamps(self) -> None:
        self._runner.stamp(None)

    def close(self, **kwargs: Any) -> None:
        """Close the envs and end the helper threads; may be called twice."""
        super().close()  # the arguments are for workers
        if hasattr(self, "_runner"):
            self._runner.stop()


def _with_rendering(
    kernels: EnvKernels, metadata: dict[str, Any], render_mode: str | None
) -> dict[str, Any]:
    """Add render modes and frame rate if the kernels have a `render` function; check the mode."""
    if kernels.render is not None:
        metadata = {"render_modes": list(_RENDER_MODES), "render_fps": _RENDER_FPS, **metadata}
    if "render_modes" in metadata and render_mode not in (None, *metadata["render_modes"]):
        modes = ", ".join(metadata["render_modes"])
        hint = "; with the command vecenv by --gif FILE or --html FILE"
        raise ValueError(
            f"render_mode is {render_mode!r}, expected one of {modes}"
            f"{hint if render_mode == 'ansi' else ''}"
        )
    return metadata


def _check_kernels(kernels: Any) -> None:
    """Raise TypeError for anything but an `EnvKernels`."""
    if isinstance(kernels, EnvKernels):
        return
    given = f"got {type(kernels).__name__}"
    if isinstance(kernels, list | tuple) and any(isinstance(one, EnvKernels) for one in kernels):
        given = f"got a {type(kernels).__name__} of {len(kernels)}: pass one of them and num_envs"
    raise TypeError(f"kernels must be one EnvKernels, of which num_envs copies are made; {given}")


def _default_threads() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
