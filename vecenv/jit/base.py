"""CompiledVecEnv: what vector envs of compiled kernels share, wherever their memory is.

CompiledVecEnv   seeds, parameters, branches, saved states, sends; it works on records (N,) of
                 states, of streams and statistics (`runs`), and of parameters
  JitVectorEnv   records in NumPy arrays; a `Runner` does the jobs, on threads or in Python
  CudaVectorEnv  records as rows of bytes on a device; each job is one launch, a thread per env
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np
from gymnasium import logger
from gymnasium.vector import AutoresetMode

from vecenv.core.base import StepBatch, VecEnv
from vecenv.core.compiling import cached_njit
from vecenv.core.errors import NoActionMaskError
from vecenv.core.masks import MASK_KEY
from vecenv.core.seeding import Seed
from vecenv.files import read_entry
from vecenv.jit import random
from vecenv.jit.branches import (
    Branch,
    draw_seeds,
    read_branch,
    read_rows,
    read_sources,
    refuse_branches,
)
from vecenv.jit.episodes import DISABLED, NEXT_STEP, OBSERVE, RUN_DTYPE, SAME_STEP
from vecenv.jit.kernels import EnvKernels, draw
from vecenv.jit.worlds import flat_params, write_params

__all__ = ["MODES", "CompiledVecEnv"]

MODES = {
    AutoresetMode.NEXT_STEP: NEXT_STEP,
    AutoresetMode.SAME_STEP: SAME_STEP,
    AutoresetMode.DISABLED: DISABLED,
}
_MAX_SEED = 2**64 - 1
_seed_streams = cached_njit(random.seed_streams)


class CompiledVecEnv(VecEnv):
    """A vector env of compiled kernels; the base of `JitVectorEnv` and `CudaVectorEnv`.

    For authors of another subclass: set `kernels`, `episode_infos`, `mask_infos`, `_states`,
    `_runs`, `_params`, `_final_obs`, `_has_own_params`, then call `_set_up`. Implement `_step` and
    the methods that raise NotImplementedError here.
    """

    kernels: EnvKernels
    episode_infos: bool
    mask_infos: bool
    _states: Any  # (N,) records
    _runs: Any  # (N,) RUN_DTYPE
    _params: Any  # (1,) or (N,) records, or None
    _final_obs: Any
    _has_own_params: bool
    _held: Any = None  # (N, *action_shape), actions of envs in flight
    _order: np.ndarray = np.zeros(0, np.int64)  # envs in the order of sending
    _is_seeded = False

    # -- what depends on where the memory is ---------------------------------------------------

    def _run(self, op: int, num_rows: int, **arrays: Any) -> int:
        """Do a job on envs `env_ids`, or all in order; `arrays` are named as in `Batch`."""
        raise NotImplementedError

    def _settle(self) -> None:
        """Raise an error that a job on a device has noted."""

    def _begin(self, reset_mask: np.ndarray | None) -> Any:
        """Reset the envs of a mask, or all; return the observations of all envs."""
        raise NotImplementedError

    def _read(self, name: str, rows: np.ndarray | None = None) -> np.ndarray:
        """Return copies of records "states", "runs" or "params", all or of some envs."""
        raise NotImplementedError

    def _stored(self, records: np.ndarray) -> Any:
        """Return records (B,) in the form of `stored` in `_copy`."""
        raise NotImplementedError

    def _copy(self, name: str, targets: np.ndarray, stored: Any, sources: Any) -> None:
        """Copy `stored[sources]` to the records of the envs `targets`."""
        raise NotImplementedError

    def _spread_params(self) -> None:
        """Replace the shared parameter record by one copy per env."""
        raise NotImplementedError

    def _run_field(self, name: str) -> Any:
        """Return a live view of a field of the statistics, (num_envs,)."""
        raise NotImplementedError

    def _new_obs(self) -> Any:
        """Return memory for the observations of all envs."""
        raise NotImplementedError

    def _checked(self, name: str, array: Any, shape: tuple[int, ...], dtypes: Any = ()) -> Any:
        """Return the caller's output memory if it fits, else raise SlotError."""
        raise NotImplementedError

    def _result(self, array: Any) -> Any:
        """Convert an array to the type that the caller gets."""
        return array

    def _hold(self, env_ids: np.ndarray, actions: Any) -> None:
        """Keep the actions of envs in flight in `_held`."""
        raise NotImplementedError

    def _step_some(self, env_ids: np.ndarray) -> StepBatch:
        """Step these envs with the actions held for them."""
        raise NotImplementedError

    # -- statistics ---------------------------------------------------------------------------

    @cached_property
    def _obs_shape(self) -> tuple[int, ...]:
        return (self.num_envs, *(self.single_observation_space.shape or ()))

    @cached_property
    def _obs_dtype(self) -> np.dtype:
        return np.dtype(self.single_observation_space.dtype)

    @property
    def last_returns(self) -> Any:
        """Return of each env's last episode that ended, float64 (num_envs,), NaN before; live."""
        return self._run_field("last_return")

    @property
    def last_lengths(self) -> Any:
        """Length of each env's last episode that ended, int64 (num_envs,), 0 before; live."""
        return self._run_field("last_length")

    @property
    def num_episodes(self) -> Any:
        """How many episodes of each env have ended, int32 (num_envs,): a live view."""
        return self._run_field("num_episodes")

    @property
    def episode_lengths(self) -> Any:
        """Steps taken in the episodes under way, int64 (num_envs,): a live view."""
        return self._run_field("episode_length")

    @property
    def episode_over(self) -> Any:
        """Whether an env's episode has ended and no reset followed, bool (num_envs,): live."""
        return self._run_field("episode_over")

    @property
    def final_obs(self) -> Any:
        """Final observations (num_envs, *obs_shape) where an episode ended in the last step.

        SAME_STEP only. On the CPU these are the values of infos["final_obs"], without an object per
        env. A live view: rows whose episode ended are valid until the next step.
        """
        return self._final_obs

    # -- resets and seeds ---------------------------------------------------------------------

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]  # a tuple, of all envs
        """Seeds of the envs' random streams."""
        if not self._is_seeded:
            self._set_streams(*_read_seeds(None, None, self.num_envs, is_first=True))
        return tuple(self._read("runs")["seed"].tolist())

    def _set_streams(self, env_ids: np.ndarray, seeds: np.ndarray) -> None:
        """Begin the random streams of envs, int64 (B,), from seeds uint64 (B,)."""
        self._is_seeded = True
        if not len(env_ids):
            return
        runs = self._read("runs", env_ids)
        runs["seed"] = seeds
        _seed_streams(runs.view(np.recarray), np.arange(len(env_ids)), seeds)
        self._write("runs", env_ids, runs)

    def _write(self, name: str, env_ids: np.ndarray, records: np.ndarray) -> None:
        self._copy(name, env_ids, self._stored(records), np.arange(len(records)))

    def _reset(
        self, seed: Seed, options: dict[str, Any] | None, reset_mask: np.ndarray | None
    ) -> tuple[Any, dict[str, Any]]:
        if options:
            raise ValueError(f"options has {sorted(options)}; compiled envs know only 'reset_mask'")
        begins = _read_seeds(seed, reset_mask, self.num_envs, is_first=not self._is_seeded)
        self._settle()
        self._set_streams(*begins)
        obs = self._begin(None if reset_mask is None or reset_mask.all() else reset_mask)
        infos: dict[str, Any] = {}
        if self.mask_infos:
            is_there = np.ones(self.num_envs, np.bool_) if reset_mask is None else reset_mask
            infos = self._with_masks(infos, None, self._stored(is_there.copy()))
        return self._result(obs), infos

    def observe(self, *, out: Any = None) -> Any:
        """Return the observations of the current states; nothing is stepped.

        Args:
            out: Memory (num_envs, *obs_shape) to write into, C-contiguous, on the envs' device;
                None for a new array.
        """
        self._calls.require_ready("observe")
        obs = self._new_obs() if out is None else self._checked("obs", out, self._obs_shape)
        self._run(OBSERVE, self.num_envs, obs=obs)
        return self._result(obs) if out is None else out

    # -- sends --------------------------------------------------------------------------------

    def _sent_ids(self) -> np.ndarray:
        """Return the envs in flight in the order of sending, int64 (B,)."""
        self._order = self._order[self._calls.in_flight[self._order]]
        return self._order

    def _send(self, actions: Any, env_ids: np.ndarray) -> None:
        """Keep the actions; `recv` steps these envs."""
        self._hold(env_ids, actions)
        self._order = np.concatenate([self._sent_ids(), env_ids])

    def _recv(self, count: int, most: int, timeout: float | None) -> StepBatch:
        """Step the first `count` envs in the order of sending."""
        cut = "a `recv` was interrupted, and its results are lost"
        self._calls.unfinished = partial(self._calls.give_up, cut)
        return self._step_some(self._sent_ids()[:count])

    # -- masks and pictures -------------------------------------------------------------------

    @property
    def has_action_masks(self) -> bool:
        """Whether the env has an `action_mask` kernel."""
        return self.kernels.action_mask is not None

    def require_masks(self) -> None:
        """Raise NoActionMaskError unless there is an `action_mask` kernel."""
        if self.kernels.action_mask is None:
            raise NoActionMaskError(
                f"{self.kernels.name} has no action_mask kernel; give its EnvKernels "
                "action_mask=..., a function (state, out) that writes which actions are valid"
            )

    def _write_masks(self, masks: Any, env_ids: Any) -> int:
        """Write masks int8 (B, width); return how many wrongly allow no action."""
        raise NotImplementedError

    def _with_masks(self, infos: dict[str, Any], env_ids: Any, is_there: Any) -> dict[str, Any]:
        """Return infos with the masks of these envs, or of all, and which rows are valid."""
        masks = self.allocate((len(is_there), self._mask_width), np.int8)
        self._write_masks(masks, env_ids)
        return {**infos, MASK_KEY: self._result(masks), f"_{MASK_KEY}": self._result(is_there)}

    def render(self) -> tuple[Any, ...] | None:
        """Return the frame of each env from `kernels.render`, in the form of `render_mode`.

        Raises:
            NotImplementedError: The kernels have no `render` function.
            TypeError: `render` returns another type than `render_mode` requires.
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
        names = ("states",) if self._params is None else ("states", "params")
        every = np.arange(self.num_envs)
        records = [self._read(name, every).view(np.recarray) for name in names]
        each = zip(*records, strict=True)
        return tuple(draw(self.kernels, self.render_mode, *one) for one in each)

    # -- parameters ---------------------------------------------------------------------------

    @property
    def has_own_params(self) -> bool:
        """Whether each env has its own parameters: given as records, set later, or drawn."""
        return self._has_own_params

    def _require_params(self) -> None:
        if self._params is None:
            raise TypeError(f"{self.kernels.name} takes no params")

    def _separate_params(self) -> None:
        self._has_own_params = True
        if len(self._params) < self.num_envs:
            self._spread_params()

    def set_params(self, rows: Any, values: Any) -> None:
        """Change parameters of some envs from the next step on; nothing is compiled.

        If all envs shared one record, each has its own record from then on. A sampler
        overwrites its parameters at the next reset. On a device this call waits. A CUDA graph that
        was captured while all envs shared one record keeps reading that record.

        Args:
            rows: Env ids (B,), a mask bool (num_envs,), or None for all envs.
            values: A dict of names to values, one for all these envs or one per env; or records.

        Raises:
            TypeError, ValueError: A name, dtype or shape is wrong; nothing was changed.
        """
        self._calls.require_open("set_params")
        self._require_params()
        chosen = read_rows("rows", rows, self.num_envs)
        records = self._read("params", chosen)
        write_params(records, values, self.kernels.name)
        self._separate_params()
        self._write("params", chosen, records)

    def params_of(self, rows: Any = None) -> Any:
        """Return the parameters of some envs as numbers, as inputs of buffers and critics.

        Args:
            rows: Env ids (B,), a mask, or None for all envs.

        Returns:
            float32 (B, P), a new array: all numbers of a record, field by field.
        """
        self._require_params()
        chosen = read_rows("rows", rows, self.num_envs)
        return self._result(self._stored(flat_params(self._read("params", chosen))))

    # -- branches and saved states ------------------------------------------------------------

    def copy_rows(self, source: Any, target: Any, *, luck: str = "same") -> None:
        """Copy envs to other envs in mid-episode: states, statistics, parameters.

        `observe` then gives the observations. An env may be source and target: sources are read
        first. To look ahead, copy an env to many, and step the copies with different actions.

        Args:
            source: Env ids (B,), or a single one to copy to all targets, or a mask.
            target: Distinct env ids (B,), or a mask.
            luck: "same": copies have the random stream of their source, so equal actions give equal
                steps, bit for bit. "fresh": each copy gets a new stream, which depends only on the
                target env's previous stream and its number.

        Raises:
            TypeError, ValueError: Ids are wrong, or the episode of a source has ended.
            ResetNeeded, AlreadyPendingCallError: There was no reset, or an env is in flight.
        """
        sources, targets = read_sources(source, target, self.num_envs, self.num_envs, luck)
        over = self.episode_over
        over = over if isinstance(over, np.ndarray) else over.cpu().numpy()
        refuse_branches(self._calls, "copy_rows", sources, targets, over[sources])
        own = self._params if self.has_own_params else None
        self._put(targets, (self._states, self._runs, own), sources, luck)

    def snapshot(self, rows: Any = None) -> Branch:
        """Return copies of envs in mid-episode, on the CPU, for `restore`.

        Args:
            rows: Env ids (B,), a mask, or None for all envs.

        Raises:
            As `copy_rows`.
        """
        found = read_rows("rows", rows, self.num_envs)
        runs = self._read("runs", found)
        refuse_branches(self._calls, "snapshot", found, np.unique(found), runs["episode_over"])
        params = self._read("params", found) if self.has_own_params else None
        states, facts = self._read("states", found), self.described_state({})
        return Branch(self.kernels.name, states, runs, params, facts)

    def restore(self, rows: Any, branch: Branch, *, luck: str = "same") -> None:
        """Write the copies of a `snapshot`, also from another vector env of this kind, into envs.

        Args:
            rows: Distinct env ids, as many as the branch has, or any number if the branch has one;
                None for all envs.
            branch: See `snapshot`; it is not changed and can be restored again.
            luck: See `copy_rows`.

        Raises:
            TypeError, ValueError: Ids are wrong, or the branch is of another kind of env.
            ResetNeeded, AlreadyPendingCallError: There was no reset, or an env is in flight.
        """
        params = self._params_dtype if self.has_own_params else None
        branch = read_branch(branch, self.kernels.name, self.kernels.state_dtype, params)
        every, count = np.arange(len(branch.states)), len(branch.states)
        sources, targets = read_sources(every, rows, count, self.num_envs, luck)
        refuse_branches(self._calls, "restore", targets[:0], targets, targets[:0] > 0)
        if branch.facts:
            self.check_state(branch.facts, branch.states)
        given = (branch.states, branch.runs, branch.params)
        stored = [None if records is None else self._stored(records) for records in given]
        self._put(targets, stored, sources, luck)

    def _put(self, targets: np.ndarray, stored: Any, sources: np.ndarray, luck: str) -> None:
        """Copy `stored[sources]` (states, streams, and parameters or None) to envs."""
        seeds = draw_seeds(self._read("runs", targets), targets) if luck == "fresh" else None
        self._settle()
        for name, records in zip(("states", "runs", "params"), stored, strict=True):
            if records is not None:
                self._copy(name, targets, records, sources)
        if seeds is not None:
            self._set_streams(targets, seeds)

    @property
    def _params_dtype(self) -> np.dtype:
        raise NotImplementedError

    def described_state(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the arrays of a state plus entries that identify its env; here there are none."""
        return arrays

    def check_state(self, state: Mapping[str, np.ndarray], states: np.ndarray) -> None:
        """Raise ValueError if a state is of other envs, or has invalid records `states` (N,)."""
        self._check_states(states)

    def _check_states(self, states: np.ndarray) -> None:
        """Raise ValueError for invalid states (N,): kernels would use them unchecked."""

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the whole state as arrays: envs, random streams and statistics (copies).

        After `load_state_dict`, an env of the same kind continues from it bit for bit, with any
        number of threads or on a device. The arrays can be stored with `numpy.savez`.
        """
        self._calls.require_ready("state_dict")
        names = ("states", "runs", "params") if self.has_own_params else ("states", "runs")
        arrays = {name: self._read(name) for name in names}
        self._settle()
        return self.described_state(arrays)

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore a state that `state_dict` returned; `observe` returns its observations.

        Raises:
            KeyError: An entry is missing.
            ValueError: An entry has another shape or dtype than this env's.

        Kernels do not check the state. If they use its fields as indices, load only states that you
        trust.
        """
        self._calls.require_idle("load_state_dict")
        dtypes = {"states": self.kernels.state_dtype, "runs": RUN_DTYPE}
        if self._params is not None and (self.has_own_params or "params" in state):
            dtypes["params"] = self._params_dtype
        found = {k: _read_array(state, k, self.num_envs, dtype) for k, dtype in dtypes.items()}
        self.check_state(state, found["states"])
        self._settle()
        self._calls.forget_reset("`load_state_dict` did not come to its end")
        if "params" in found:
            self._separate_params()
        for name, records in found.items():
            self._write(name, np.arange(self.num_envs), records)
        self._is_seeded = True
        self._calls.mark_reset()


def _read_seeds(
    seed: Seed, reset_mask: np.ndarray | None, num_envs: int, *, is_first: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the envs whose random streams a reset begins, int64 (B,), and their seeds, uint64.

    Args:
        seed: As given to `reset`.
        reset_mask: bool (num_envs,), or None for all.
        num_envs: Number of envs.
        is_first: Whether no stream has begun: then all begin, with random seeds where none are
            given.

    Raises:
        ValueError: A seed is not a 64-bit number.
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
    for seed in seeds:
        if seed is not None and not 0 <= seed <= _MAX_SEED:
            raise ValueError(f"an env has the seed {seed}, expected one from 0 to {_MAX_SEED}")


def _read_array(
    state: Mapping[str, np.ndarray], name: str, num_envs: int, dtype: np.dtype
) -> np.ndarray:
    """Return the records (num_envs,) of a state; raises as `load_state_dict`."""
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
