"""JitVectorEnv: environments written as Numba functions, thousands in one compiled call."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
from gymnasium import logger
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode

from vecenv.core.arguments import read_autoreset_mode, read_count
from vecenv.core.base import StepBatch, StepResult, VecEnv
from vecenv.core.compiling import cached_njit
from vecenv.core.errors import NoActionMaskError
from vecenv.core.masks import MASK_KEY, allow_something, mask_starts, none_allowed
from vecenv.core.rows import Outputs, aligned_zeros, check_slot_array, slot_outputs
from vecenv.core.seeding import Seed
from vecenv.core.spaces import BatchedSpaces
from vecenv.files import read_entry
from vecenv.jit import random
from vecenv.jit.arrays import ActionReader, new_outputs
from vecenv.jit.binding import Loop, bind_loop, play_episodes
from vecenv.jit.branches import (
    Branch,
    copy_records,
    draw_seeds,
    read_branch,
    read_rows,
    read_sources,
    refuse_branches,
    take_records,
)
from vecenv.jit.episodes import (
    DISABLED,
    MASK,
    NEXT_STEP,
    NO_LIMIT,
    OBSERVE,
    RESET,
    RUN_DTYPE,
    SAME_STEP,
    STEP,
)
from vecenv.jit.games import state_writer
from vecenv.jit.kernels import EnvKernels, draw
from vecenv.jit.runner import CompiledRunner, Fixed, Job, PythonRunner
from vecenv.jit.worlds import as_sampler, flat_params, read_params, write_params

__all__ = ["MODES", "JitVectorEnv", "read_seeds", "read_state"]

MODES = {
    AutoresetMode.NEXT_STEP: NEXT_STEP,
    AutoresetMode.SAME_STEP: SAME_STEP,
    AutoresetMode.DISABLED: DISABLED,
}
_RENDER_MODES = ("rgb_array", "ansi")
_RENDER_FPS = 10
_NUM_EMPTY = 20  # compiled calls that do nothing, to measure the time of stamping itself
_MAX_SEED = 2**64 - 1
_BOOL = np.dtype(np.bool_)
_seed_streams = cached_njit(random.seed_streams)
_alive: weakref.WeakValueDictionary[int, JitVectorEnv] = weakref.WeakValueDictionary()  # by id


class JitVectorEnv(VecEnv):
    """Many environments of one kind, in compiled code.

    A step of all envs is one call into machine code: it checks the actions, steps the envs, resets
    those that are due, counts returns and lengths, and writes the results into the output arrays.
    Long calls are shared among threads. The trajectory of an env depends only on its seed and its
    actions: not on the number of envs or threads, nor on how they are split into sends.

    Args:
        kernels: The kind of environment.
        num_envs: Number of copies.
        params: Parameters for the kernels, copied: a record for all envs (see `pack_record`); an
            array of records (num_envs,), one per env; or a dict from names to values, one for all
            envs or one per env, of what differs from `kernels.params`. None for these.
        sampler: A kernel `(params, rng)` that writes an env's parameters before each reset; or a
            dict of ranges such as {"gravity": (5.0, 15.0)}, from which each episode draws them.
            None for that of the kernels, unless `params` are given; False for none.
        on_episode_end: Called as `on_episode_end(envs, env_ids)` after a step in which episodes
            ended, env_ids int64 (B,): for curricula by `set_params`. Next episodes begin after it,
            but in SAME_STEP mode, where they have begun.
        max_episode_steps: Truncate episodes at this length; None leaves that to `step`.
        autoreset_mode: "NextStep", "SameStep" or "Disabled".
        num_threads: Maximum number of threads; None for one per processor this process may use.
        episode_infos: Whether infos["episode"] reports the return "r" and length "l" of episodes
            that end. `last_returns` and `last_lengths` have them in any case.
        mask_infos: Whether infos["action_mask"] has the envs' action masks after every reset, step
            and `recv`. `action_masks` returns them in any case.
        metadata: Further metadata; None for the class's.
        render_mode: Type of the frames, "rgb_array" or "ansi"; for kernels with a `render`
            function, or a subclass with a method of its own.
        debug: Whether everything runs as plain Python: slowly, but with tracebacks, breakpoints,
            and an IndexError for every index out of range.
        dry_run: Whether kernels are first tried out in Python for a few steps, which finds such
            indices (where these steps reach them), wrong results of `step`, and memory left
            unwritten, before compiled code uses them.

    Raises:
        TypeError, ValueError: An argument is invalid; the message names it.
        NoActionMaskError: `mask_infos`, and there is no `action_mask` kernel.
        KernelIndexError: A kernel uses an index that is out of range.
        KernelResultError: A kernel returns something wrong, or leaves `out` or fields unwritten.
        KernelCompileError: A kernel can't be compiled, or draws from `numpy.random` or `random`.

    Attributes:
        agents_class: Of a subclass in which one agent plays all: the subclass of the same games
            whose kernels have `groups`, which `vecenv.make_vec_agents` makes for the same id. None
            if there is none, or this is it.
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
        found = read_params(kernels, params, num_envs, per_env=has_sampler)
        if has_sampler and found is None:
            raise TypeError(f"{kernels.name} has a sampler, but no params that it could write")
        all_metadata = _with_rendering(
            kernels, {**type(self).metadata, **(metadata or {})}, render_mode
        )
        spaces = BatchedSpaces.of(kernels.observation_space, kernels.action_space, num_envs)
        self._set_up(num_envs, spaces, mode, all_metadata, render_mode)
        self.kernels = kernels
        self.max_episode_steps = max_episode_steps
        self.episode_infos = episode_infos
        self.mask_infos = mask_infos
        if mask_infos:
            self.require_masks()
        self._params, self._on_episode_end = found, on_episode_end
        self._has_own_params = kernels.sampler is not None or (found is not None and len(found) > 1)
        self._reader = ActionReader(kernels.action_space, num_envs)
        self._allocate_envs()
        first = None if found is None else found[:1]
        loop = bind_loop(kernels, first, max_episode_steps=limit, debug=debug, dry_run=dry_run)
        self._runner = self._make_runner(loop, limit, found, threads)
        _alive[id(self)] = self

    def _make_runner(
        self, loop: Loop, max_episode_steps: int, params: np.ndarray | None, num_threads: int
    ) -> CompiledRunner | PythonRunner:
        fixed = Fixed(
            MODES[self.autoreset_mode],
            max_episode_steps,
            self._states,
            self._runs,
            params,
            self._reader.bounds,
            self._final_obs,
            self._no_actions,
        )
        if loop.attend is None:
            return PythonRunner(loop.run_rows, fixed)
        return CompiledRunner(loop.attend, fixed, num_threads)

    def _allocate_envs(self) -> None:
        """Make the arrays with one row per env."""
        num_envs, obs_shape = self.num_envs, self.single_observation_space.shape
        assert obs_shape is not None
        self._obs_shape = (num_envs, *obs_shape)
        self._obs_dtype = np.dtype(self.single_observation_space.dtype)
        self._states = aligned_zeros((num_envs,), self.kernels.state_dtype)
        self._runs = aligned_zeros((num_envs,), RUN_DTYPE)
        self._runs["last_return"] = np.nan
        has_final_obs = self.autoreset_mode is AutoresetMode.SAME_STEP
        self._final_obs = self.allocate(
            (num_envs if has_final_obs else 0, *obs_shape), self._obs_dtype
        )
        self._unused = self._new_outputs(0)  # for jobs that do not write them
        self._no_actions = self._reader.no_actions
        self._is_seeded = False
        # Env ids, actions, and how many envs are in flight with these. What `_calls` does not know
        # of was interrupted.
        self._sent: list[tuple[np.ndarray, np.ndarray, int]] = []
        # Ended episodes that wait for a reset, if autoreset is disabled; -1: to be counted.
        self._num_over = 0

    def _new_outputs(self, num_rows: int) -> Outputs:
        return new_outputs(num_rows, self._obs_shape[1:], self._obs_dtype)

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]  # a tuple, of all envs
        """Seeds of the envs' random streams."""
        if not self._is_seeded:
            self._set_streams(*read_seeds(None, None, self.num_envs, is_first=True))
            self._is_seeded = True
        return tuple(self._runs["seed"].tolist())

    @property
    def params(self) -> np.ndarray | None:
        """The parameter record, (1,), or one per env, (num_envs,): a live view; None if none.

        What is written here, `envs.params.gravity = 1.6`, counts from the next step on. It is part
        of `state_dict` where each env has its own.
        """
        return None if self._params is None else self._params.view(np.recarray)

    @property
    def has_own_params(self) -> bool:
        """Whether each env has parameters of its own: records were given, or set, or drawn."""
        return self._has_own_params

    def _separate_params(self) -> np.ndarray:
        """Give each env a record of its own, and return them (num_envs,)."""
        if self._params is None:
            raise TypeError(f"{self.kernels.name} takes no params")
        self._has_own_params = True
        if len(self._params) < self.num_envs:
            self._params = read_params(self.kernels, self._params, self.num_envs, per_env=True)
            assert self._params is not None
            self._runner.set_params(self._params)
        return self._params

    def set_params(self, rows: Any, values: Any) -> None:
        """Change parameters of some envs, which count from the next step on; nothing is compiled.

        Envs that have shared one record have records of their own from then on. What a sampler
        draws it draws anew at the next reset.

        Args:
            rows: Env ids (B,), a mask bool (num_envs,), or None for all envs.
            values: A dict from names to values, one for all these envs or one per env; or records.

        Raises:
            TypeError, ValueError: A name, dtype or shape is wrong; nothing was changed.
        """
        self._calls.require_open("set_params")
        chosen = read_rows("rows", rows, self.num_envs)
        write_params(self._separate_params(), chosen, values, self.kernels.name)

    def params_of(self, rows: Any = None) -> np.ndarray:
        """Return the parameters of some envs as numbers, for buffers and critics.

        Args:
            rows: Env ids (B,), a mask, or None for all envs.

        Returns:
            float32 (B, P), the caller's: every number of a record, field by field.
        """
        if self._params is None:
            raise TypeError(f"{self.kernels.name} takes no params")
        chosen = read_rows("rows", rows, self.num_envs)
        shared = chosen if self.has_own_params else np.zeros_like(chosen)
        return flat_params(self._params[shared])

    @property
    def states(self) -> np.ndarray:
        """The state records (num_envs,): a live view. After changing it, call `observe`."""
        return self._states.view(np.recarray)

    @property
    def last_returns(self) -> np.ndarray:
        """Return of each env's last episode that ended, float64 (num_envs,), NaN before; live."""
        return self._runs["last_return"]

    @property
    def last_lengths(self) -> np.ndarray:
        """Length of each env's last episode that ended, int64 (num_envs,), 0 before; live."""
        return self._runs["last_length"]

    @property
    def num_episodes(self) -> np.ndarray:
        """How many episodes of each env have ended, int32 (num_envs,): a live view."""
        return self._runs["num_episodes"]

    @property
    def episode_lengths(self) -> np.ndarray:
        """Steps taken in the episodes under way, int64 (num_envs,): a live view."""
        return self._runs["episode_length"]

    @property
    def episode_over(self) -> np.ndarray:
        """Whether an env's episode has ended and it was not reset since, bool (num_envs,): live."""
        return self._runs["episode_over"]

    @property
    def final_obs(self) -> np.ndarray:
        """Final observations (num_envs, *obs_shape) where an episode ended in the last step.

        SAME_STEP only. The same as infos["final_obs"] without an object per env; a live view, valid
        in rows whose episode ended, until the next step.
        """
        return self._final_obs

    def observe(self, *, out: np.ndarray | None = None) -> np.ndarray:
        """Return the observations of the states as they are; nothing is stepped.

        Args:
            out: (num_envs, *obs_shape) to write into, C-contiguous; None for a new array.
        """
        self._calls.require_ready("observe")
        if out is None:
            out = np.empty(self._obs_shape, self._obs_dtype)
        else:
            given = check_slot_array("obs", out, self._obs_shape, (self._obs_dtype,))
            self._run_without_actions(OBSERVE, self.num_envs, obs=given)
            return out
        self._run_without_actions(OBSERVE, self.num_envs, obs=out)
        return out

    @property
    def has_action_masks(self) -> bool:
        """Whether the env has an `action_mask` kernel."""
        return self.kernels.action_mask is not None

    def _action_masks(self, env_ids: np.ndarray | None, out: np.ndarray | None) -> np.ndarray:
        self.require_masks()
        if out is None:
            count = self.num_envs if env_ids is None else len(env_ids)
            out = np.zeros((count, self._mask_width), np.int8)
        plain = np.asarray(out).view(_BOOL)
        if self._write_masks(plain, env_ids):
            row = int(np.flatnonzero(~allow_something(plain, self._mask_starts))[0])
            raise none_allowed(f"env {row if env_ids is None else env_ids[row]}")
        return out

    @cached_property
    def _mask_starts(self) -> np.ndarray:
        return mask_starts(self.single_action_space)

    def _write_masks(self, masks: np.ndarray, env_ids: np.ndarray | None) -> int:
        """Write masks, bool (B, width); return how many allow nothing though they should."""
        arrays = {} if env_ids is None else {"env_ids": env_ids}
        num_empty = self._run_without_actions(MASK, len(masks), masks=masks, **arrays)
        if len(self._mask_starts) > 1:  # the compiled loop looks at whole masks only
            is_over = self._runs["episode_over"][slice(None) if env_ids is None else env_ids]
            lacks = ~allow_something(masks, self._mask_starts)
            masks[lacks & is_over] = True  # whose actions do not matter
            num_empty = int(np.count_nonzero(lacks & ~is_over))
        return num_empty

    def state_writer(self) -> Callable[..., None]:
        """Return a function that writes the central states of records (B,) into an array (B, ...).

        Its third argument has the envs int64 (B,), or None for all in order. Of games with a
        `central_state` kernel, see `EnvKernels`.
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

    def begin_episodes(self, env_ids: np.ndarray) -> np.ndarray:
        """Reset envs whose episodes have ended, in autoreset mode DISABLED, as autoreset would.

        Their random streams go on; envs that are in flight stay so.

        Args:
            env_ids: int64 (B,).

        Returns:
            Their observations (B, *obs_shape).
        """
        obs = np.empty((len(env_ids), *self._obs_shape[1:]), self._obs_dtype)
        self._run_without_actions(RESET, len(env_ids), obs=obs, env_ids=env_ids)
        self._count_over()
        return obs

    def play_in_python(self, seconds: float) -> int | None:
        """Play whole episodes of one separate env in plain Python, where indices are checked.

        The envs themselves are left alone. `vecenv.check_vector_env` calls it.

        Args:
            seconds: At most so long; three episodes otherwise, with random actions.

        Returns:
            How many episodes have ended; None of bundled kernels, which are not played.

        Raises:
            KernelIndexError: An index is out of range; names file and line.
            KernelResultError: `step` returns something wrong.
        """
        limit = NO_LIMIT if self.max_episode_steps is None else self.max_episode_steps
        return play_episodes(self.kernels, self._params, min(limit, NO_LIMIT), seconds)

    def require_masks(self) -> None:
        """Raise NoActionMaskError unless there is an `action_mask` kernel."""
        if self.kernels.action_mask is None:
            raise NoActionMaskError(
                f"{self.kernels.name} has no action_mask kernel; give its EnvKernels "
                "action_mask=..., a function (state, out) that writes which actions are valid"
            )

    def _with_masks(
        self, infos: dict[str, Any], env_ids: np.ndarray | None, is_there: np.ndarray
    ) -> dict[str, Any]:
        """Return infos with the masks of these envs, or all, and where they belong to a result."""
        masks = np.zeros((len(is_there), self._mask_width), np.int8)
        self._write_masks(masks.view(_BOOL), env_ids)
        return {**infos, MASK_KEY: masks, f"_{MASK_KEY}": is_there}

    def render(self) -> tuple[Any, ...] | None:
        """Return what `kernels.render` draws of each env, as `render_mode` says.

        Raises:
            NotImplementedError: The kernels have no `render` function.
            TypeError: It returns something else than `render_mode` says.
        """
        if self.render_mode is None:
            logger.warn("render_mode is None: make the vector env with 'rgb_array' or 'ansi'")
            return None
        if self.kernels.render is None:
            raise NotImplementedError(
                f"{self.kernels.name} can't be drawn: give EnvKernels a `render` function, or a "
                "subclass of JitVectorEnv a method of its own"
            )
        self._calls.require_ready("render")
        states = self._states.copy().view(np.recarray)
        if self._params is None:
            return tuple(draw(self.kernels, self.render_mode, state) for state in states)
        params = np.resize(self._params, self.num_envs).view(np.recarray)
        pairs = zip(states, params, strict=True)
        return tuple(draw(self.kernels, self.render_mode, *pair) for pair in pairs)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the whole state as arrays: envs, random streams and statistics (copies).

        An env of the same kind, with any number of threads, goes on from it bit for bit after
        `load_state_dict`. The arrays can be stored with `numpy.savez`.
        """
        self._calls.require_ready("state_dict")
        own = {"params": self._params.copy()} if self._params is not None else {}
        arrays = {"states": self._states.copy(), "runs": self._runs.copy()}
        return self.described_state({**arrays, **(own if self.has_own_params else {})})

    def copy_rows(self, source: Any, target: Any, *, luck: str = "same") -> None:
        """Copy envs to others in the midst of their episodes: states, statistics, parameters.

        `observe` gives their observations. Sources stay as they are, also where they are targets
        of others. To look ahead, copy an env to many, and step these with different actions.

        Args:
            source: Env ids (B,), or one of which all targets get a copy, or a mask.
            target: Different env ids (B,), or a mask.
            luck: "same": copies have the random stream of their source, so equal actions give equal
                steps, bit for bit. "fresh": each has a stream of its own, which only depends on
                that of the env that was there, and its number.

        Raises:
            TypeError, ValueError: Ids are wrong, or the episode of a source has ended.
            ResetNeeded, AlreadyPendingCallError: There was no reset, or an env is in flight.
        """
        sources, targets = read_sources(source, target, self.num_envs, self.num_envs, luck)
        refuse_branches(self._calls, "copy_rows", sources, targets, self.episode_over)
        own = self._params if self.has_own_params else None
        self._put(targets, self._states, self._runs, own, sources, luck)

    def snapshot(self, rows: Any = None) -> Branch:
        """Return copies of envs in the midst of their episodes, for `restore`.

        Args:
            rows: Env ids (B,), a mask, or None for all envs.

        Raises:
            As `copy_rows`.
        """
        found = read_rows("rows", rows, self.num_envs)
        refuse_branches(self._calls, "snapshot", found, np.unique(found), self.episode_over)
        params, facts = None, self.described_state({})
        if self._params is not None and self.has_own_params:
            params = take_records(self._params, found)
        states, runs = (take_records(records, found) for records in (self._states, self._runs))
        return Branch(self.kernels.name, states, runs, params, facts)

    def restore(self, rows: Any, branch: Branch, *, luck: str = "same") -> None:
        """Put the copies of a `snapshot`, also of another vector env of this kind, into envs.

        Args:
            rows: Different env ids, as many as the branch has, or any number if that has one; None
                for all envs.
            branch: See `snapshot`; it stays as it is, to be restored again.
            luck: See `copy_rows`.

        Raises:
            TypeError, ValueError: Ids are wrong, or the branch is of another kind of env.
            ResetNeeded, AlreadyPendingCallError: There was no reset, or an env is in flight.
        """
        own = self._params if self.has_own_params else None
        branch = read_branch(branch, self.kernels.name, self._states.dtype, own)
        every, count = np.arange(len(branch.states)), len(branch.states)
        sources, targets = read_sources(every, rows, count, self.num_envs, luck)
        refuse_branches(self._calls, "restore", targets[:0], targets, self.episode_over)
        if branch.facts:
            self.check_state(branch.facts, branch.states)
        self._put(targets, branch.states, branch.runs, branch.params, sources, luck)

    def _put(
        self, targets: np.ndarray, states: np.ndarray, runs: np.ndarray,
        params: np.ndarray | None, sources: np.ndarray, luck: str,
    ) -> None:  # fmt: skip
        """Copy records[sources] to envs; see `copy_rows`."""
        seeds = draw_seeds(self._runs[targets], targets) if luck == "fresh" else None
        self._runner.end_cut_job()
        copy_records(self._states, targets, states, sources)
        copy_records(self._runs, targets, runs, sources)
        if self._params is not None and params is not None:
            copy_records(self._params, targets, params, sources)
        if seeds is not None:
            self._set_streams(targets, seeds)
        self._count_over()

    def described_state(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the arrays of a state with what says whose they are; here nothing does."""
        return arrays

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore a state that `state_dict` returned; `observe` returns its observations.

        Raises:
            KeyError: An entry is missing.
            ValueError: An entry has another shape or dtype than this env's.

        Kernels do not check the state: if they use fields of it as indices, load only states that
        you trust.
        """
        self._calls.require_idle("load_state_dict")
        states, runs = read_state(state, self.num_envs, self.kernels.state_dtype)
        self.check_state(state, states)
        params: np.ndarray | None = None
        if self._params is not None and (self.has_own_params or "params" in state):
            params = read_array(state, "params", self.num_envs, self._params.dtype)
        self._calls.has_reset = self._calls.is_ready = False  # until everything is restored
        try:
            self._runner.end_cut_job()
            self._states[:] = states
            self._runs[:] = runs
            if params is not None:
                self._separate_params()[:] = params
            self._count_over()
            self._is_seeded = True
        except BaseException as error:
            self._calls.forget_reset(error)
            raise
        self._calls.mark_reset()

    def _begin_stamps(self) -> int:
        """Stamp compiled calls, not envs; return the time of a call that does nothing, in ns."""
        self._calls.require_open("timing.enable")
        lengths_ns: list[int] = []
        self._runner.stamp(lambda begin_ns, end_ns: lengths_ns.append(end_ns - begin_ns))
        for _ in range(_NUM_EMPTY):
            self._run_without_actions(OBSERVE, 0, obs=self._unused.obs)
        timing = self.timing  # not self: a cycle would delay the deletion of the env

        def note(begin_ns: int, end_ns: int) -> None:
            timing.log.note_wait(begin_ns, end_ns)  # of the thread that calls

        self._runner.stamp(note)
        return sorted(lengths_ns)[_NUM_EMPTY // 2]

    def _end_stamps(self) -> None:
        self._runner.stamp(None)

    def check_state(self, state: Mapping[str, np.ndarray], states: np.ndarray) -> None:
        """Raise ValueError if a state is of other envs, or has invalid records `states` (N,)."""
        self._check_states(states)

    def _check_states(self, states: np.ndarray) -> None:
        """Raise ValueError for invalid states (N,), which kernels would use unchecked."""

    def close(self, **kwargs: Any) -> None:
        """Close the envs; every later call raises ClosedEnvironmentError. May be called twice."""
        try:
            super().close(**kwargs)
        finally:
            self.close_extras()  # once more, if it was interrupted

    def close_extras(self, **kwargs: Any) -> None:
        """End the helper threads."""
        if hasattr(self, "_runner"):
            self._runner.stop()

    def _reset(
        self, seed: Seed, options: dict[str, Any] | None, reset_mask: np.ndarray | None
    ) -> tuple[Any, dict[str, Any]]:
        if options:
            raise ValueError(f"options has {sorted(options)}; compiled envs know only 'reset_mask'")
        begins = read_seeds(seed, reset_mask, self.num_envs, is_first=not self._is_seeded)
        obs = np.empty(self._obs_shape, self._obs_dtype)
        self._calls.has_reset = self._calls.is_ready = False  # until the reset is complete
        try:
            self._runner.end_cut_job()
            self._set_streams(*begins)
            self._is_seeded = True
            if reset_mask is None or reset_mask.all():
                self._sent.clear()
                self._run_without_actions(RESET, self.num_envs, obs=obs)
            else:
                chosen = np.flatnonzero(reset_mask)
                some = obs[: len(chosen)]
                self._run_without_actions(RESET, len(chosen), obs=some, env_ids=chosen)
                self._run_without_actions(OBSERVE, self.num_envs, obs=obs)
            self._count_over()
            infos: dict[str, Any] = {}
            if self.mask_infos:
                chosen = np.ones(self.num_envs, np.bool_) if reset_mask is None else reset_mask
                infos = self._with_masks(infos, None, chosen.copy())
        except BaseException as error:  # perhaps Ctrl-C
            self._calls.forget_reset(error)
            raise
        return obs, infos

    def _run_without_actions(
        self, op: int, num_rows: int, *, obs: np.ndarray | None = None, **arrays: np.ndarray
    ) -> int:
        """Do a job that steps no env, and return what it does; `arrays` are of `Job`."""
        outputs = self._unused if obs is None else self._unused._replace(obs=obs)
        return self._runner.run(Job(op, num_rows, **arrays), self._no_actions, outputs)

    def _set_streams(self, env_ids: np.ndarray, seeds: np.ndarray) -> None:
        self._runs["seed"][env_ids] = seeds
        _seed_streams(self._runs.view(np.recarray), env_ids, seeds)

    def _step(self, actions: Any, out: Any) -> StepResult:
        if self._num_over:
            self._refuse_over(None)
        if out is None:
            outputs = self._new_outputs(self.num_envs)
        else:
            outputs = slot_outputs(out, self._obs_shape, self._obs_dtype)
        infos: dict[str, Any] = {}
        try:
            num_ended = self._runner.step(self._reader.read(actions), outputs)
            if num_ended:
                if num_ended < 0:
                    row = -1 - num_ended
                    self._reader.refuse(actions, row, row)
                infos = self._end_infos(num_ended, outputs, None)
                self._tell_of_ends(outputs, None)
            if self.mask_infos:
                infos = self._with_masks(infos, None, np.ones(self.num_envs, np.bool_))
        except BaseException as error:  # perhaps Ctrl-C, perhaps after the step
            self._num_over = -1
            if self._runner.is_cut:
                self._calls.has_reset = self._calls.is_ready = False
                self._calls.forget_reset(error)
            raise
        given = outputs if out is None else out
        return given.obs, given.rewards, given.terminations, given.truncations, infos

    def _count_over(self) -> None:
        is_counted = self.autoreset_mode is AutoresetMode.DISABLED
        self._num_over = int(np.count_nonzero(self._runs["episode_over"])) if is_counted else 0

    def _refuse_over(self, env_ids: np.ndarray | None) -> None:
        """With autoreset disabled, refuse to step envs whose episode has ended."""
        if self._num_over < 0:
            self._count_over()
            if not self._num_over:
                return
        is_over = self._runs["episode_over"]
        stuck = np.flatnonzero(is_over) if env_ids is None else env_ids[is_over[env_ids]]
        if len(stuck):
            raise ResetNeeded(
                f"The episodes of envs {_listed(stuck)} have ended and autoreset is disabled; "
                "reset them with reset(options={'reset_mask': mask}) before the next step. "
                "Nothing was stepped."
            )

    def _end_infos(
        self, num_ended: int, outputs: Outputs, env_ids: np.ndarray | None
    ) -> dict[str, Any]:
        """Return the infos of a step in which episodes ended.

        Args:
            num_ended: Number of ended episodes.
            outputs: The results.
            env_ids: int64 (R,), the envs of the rows; None for all envs in order.
        """
        if self.autoreset_mode is AutoresetMode.DISABLED:
            self._num_over += num_ended
        if not self.episode_infos and self.autoreset_mode is not AutoresetMode.SAME_STEP:
            return {}
        is_over = outputs.terminations | outputs.truncations
        infos: dict[str, Any] = {}
        if self.episode_infos:
            runs = self._runs if env_ids is None else self._runs[env_ids]
            returns = np.where(is_over, runs["last_return"], 0.0)
            lengths = np.where(is_over, runs["last_length"], 0)
            infos = {"episode": {"r": returns, "l": lengths}, "_episode": is_over}
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            rows = np.flatnonzero(is_over)
            final_obs = self._final_obs[rows if env_ids is None else env_ids[rows]]
            objects = np.full(len(is_over), None, dtype=object)
            objects[rows] = np.fromiter(final_obs, dtype=object, count=len(rows))
            infos = {
                **infos,
                "final_obs": objects,
                "_final_obs": is_over,
                "final_info": infos,
                "_final_info": is_over,
            }
        return infos

    def _tell_of_ends(self, outputs: Outputs, env_ids: np.ndarray | None) -> None:
        """Call `on_episode_end` with the envs of the rows whose episodes have ended."""
        if self._on_episode_end is not None:
            rows = np.flatnonzero(outputs.terminations | outputs.truncations)
            self._on_episode_end(self, rows if env_ids is None else env_ids[rows])

    def _send(self, actions: Any, env_ids: np.ndarray) -> None:
        """Keep the actions; `recv` steps these envs."""
        if self._num_over:
            self._refuse_over(env_ids)
        own = actions.copy()  # before the check: another thread may change the caller's array
        self._reader.check(own, env_ids)
        cast = self._reader.read(own)
        self._drop_interrupted()
        in_flight = self._calls.num_in_flight + len(env_ids)
        self._sent.append((env_ids, cast if cast is own else cast.copy(), in_flight))

    def _drop_interrupted(self) -> int:
        """Drop sends that a reset or an interrupt has cancelled; return how many envs are left."""
        while self._sent and self._sent[-1][2] > self._calls.num_in_flight:
            self._sent.pop()
        return self._sent[-1][2] if self._sent else 0

    def _recv(self, count: int, most: int, timeout: float | None) -> StepBatch:
        """Step the first `count` envs in the order of sending."""
        calls = self._calls
        if not calls.has_reset or self._drop_interrupted() != calls.num_in_flight:
            calls.give_up(RuntimeError("a `recv` was interrupted, and its results are lost"))
            calls.require_ready("recv")
        env_ids = np.concatenate([ids for ids, _, _ in self._sent])
        actions = np.concatenate([part for _, part, _ in self._sent])
        outputs = self._new_outputs(count)
        chosen = env_ids[:count]
        num_left = len(env_ids) - count
        calls.has_reset = False  # until the step is complete
        try:
            job = Job(STEP, count, chosen)
            num_ended = self._runner.run(job, actions[:count], outputs)
            self._sent = [(env_ids[count:], actions[count:], num_left)] if num_left else []
            infos = self._end_infos(num_ended, outputs, chosen) if num_ended else {}
            if num_ended:
                self._tell_of_ends(outputs, chosen)
            if self.mask_infos:
                infos = self._with_masks(infos, chosen, np.ones(count, np.bool_))
        except BaseException as error:  # perhaps Ctrl-C
            self._num_over = -1
            calls.give_up(error)
            raise
        calls.has_reset = True
        return StepBatch(*outputs, infos, chosen)


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
    """Refuse anything but an `EnvKernels`."""
    if isinstance(kernels, EnvKernels):
        return
    given = f"got {type(kernels).__name__}"
    if isinstance(kernels, list | tuple) and any(isinstance(one, EnvKernels) for one in kernels):
        given = f"got a {type(kernels).__name__} of {len(kernels)}: pass one of them and num_envs"
    raise TypeError(f"kernels must be one EnvKernels, of which num_envs copies are made; {given}")


def read_seeds(
    seed: Seed, reset_mask: np.ndarray | None, num_envs: int, *, is_first: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the envs whose random streams a reset begins, int64 (B,), and their seeds, uint64.

    Args:
        seed: As given to `reset`.
        reset_mask: bool (num_envs,), or None for all.
        num_envs: Number of envs.
        is_first: Whether no stream has begun: then all do, where no seed is given with random ones.

    Raises:
        ValueError: A seed is no 64-bit number.
    """
    chosen = np.arange(num_envs) if reset_mask is None else np.flatnonzero(reset_mask)
    if isinstance(seed, int):
        _check_seeds(seed, seed + num_envs - 1)
        ids, seeds = chosen, np.uint64(seed) + chosen.astype(np.uint64)
    else:
        given = {} if seed is None else {i: seed[i] for i in chosen.tolist() if seed[i] is not None}
        _check_seeds(*given.values())
        ids, seeds = np.array(list(given), np.int64), np.array(list(given.values()), np.uint64)
    if not is_first:
        return ids, seeds
    every = np.arange(num_envs)
    of_all = secrets.randbits(62) + every.astype(np.uint64)
    of_all[ids] = seeds
    return every, of_all


def _check_seeds(*seeds: int | None) -> None:
    """Refuse seeds that are no 64-bit numbers."""
    for seed in seeds:
        if seed is not None and not 0 <= seed <= _MAX_SEED:
            raise ValueError(f"an env has the seed {seed}, expected one from 0 to {_MAX_SEED}")


def read_state(
    state: Mapping[str, np.ndarray], num_envs: int, state_dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Return the records of envs and of their streams, (N,) each, in what `state_dict` returned.

    Raises:
        KeyError: An entry is missing.
        ValueError: An entry has another shape or dtype.
    """
    read = partial(read_array, state, num_envs=num_envs)
    return read("states", dtype=state_dtype), read("runs", dtype=RUN_DTYPE)


def read_array(
    state: Mapping[str, np.ndarray], name: str, num_envs: int, dtype: np.dtype
) -> np.ndarray:
    """Return an entry (num_envs,) of a state; raises as `read_state`."""
    if name not in state:
        raise KeyError(f"state has no entry {name!r}; pass what `state_dict` returned")

    def accepts(found: np.dtype, shape: tuple[int, ...]) -> bool:
        if shape == (num_envs,) and found == dtype:
            return True
        told = f"has shape {shape}, expected {(num_envs,)}"
        if found != dtype:
            told = f"has dtype {found!s:.300}, expected {dtype!s:.300}"
        raise ValueError(f"state[{name!r}] {told}: {num_envs} envs of the same kind")

    return read_entry(state, name, accepts)


def _default_threads() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _note_fork() -> None:
    """In a forked process, require a reset of the envs that other threads were stepping."""
    for envs in list(_alive.values()):
        if envs._runner.note_fork():
            envs._calls.give_up(RuntimeError("this process was forked during a step of these envs"))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def _listed(env_ids: np.ndarray) -> str:
    """Name the first few ids, for a message."""
    shown = ", ".join(map(str, env_ids[:8].tolist()))
    return f"[{shown}{', ...' if len(env_ids) > 8 else ''}]"
