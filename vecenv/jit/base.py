"""CompiledVecEnv: what vector envs of compiled kernels share, wherever their memory is.

CompiledVecEnv      calls, seeds, infos, parameters, copies, saved states
  memory            makes arrays: `HostMemory`, or `cuda.device.Device`
  rows              "states", "runs" (streams, statistics), "params": a record per env as bytes
  JitVectorEnv      rows in NumPy arrays; a `Runner` does the jobs, on threads or in Python
  CudaVectorEnv     rows in tensors on a device; a job is one launch, with a thread per env
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from gymnasium import logger
from gymnasium.vector import AutoresetMode
from numpy.lib.recfunctions import structured_to_unstructured

from vecenv.core.arguments import Seed, check_choice, seed_per_env
from vecenv.core.base import StepBatch, StepResult, VecEnv
from vecenv.core.compiling import cached_njit
from vecenv.core.errors import NoActionMaskError
from vecenv.core.masks import MASK_KEY, allow_something, mask_starts, none_allowed
from vecenv.core.rows import StepSlot, aligned_zeros, slot_outputs
from vecenv.files import read_entry
from vecenv.jit import random
from vecenv.jit.driver import DISABLED, MASK, NEXT_STEP, OBSERVE, RUN_DTYPE, SAME_STEP
from vecenv.jit.kernels import EnvKernels, draw, write_params

MODES = {
    AutoresetMode.NEXT_STEP: NEXT_STEP,
    AutoresetMode.SAME_STEP: SAME_STEP,
    AutoresetMode.DISABLED: DISABLED,
}
_MAX_SEED = 2**64 - 1
_seed_streams = cached_njit(random.seed_streams)
_draw_seeds = cached_njit(random.draw_seeds)


class Branch(NamedTuple):
    """Copies of B envs, from `snapshot`: their states, episodes, random streams and parameters.

    Attributes:
        name: Name of the kind of env.
        states: (B,) state records.
        runs: (B,) RUN_DTYPE, random streams and statistics.
        params: (B,) parameter records; None if all envs share one, or have none.
        facts: Further entries in the `state_dict` of this kind of env.
    """

    name: str
    states: np.ndarray
    runs: np.ndarray
    params: np.ndarray | None
    facts: Mapping[str, np.ndarray]


class HostMemory:
    """NumPy arrays; `cuda.device.Device` does the same with tensors on a device."""

    flag: Any = np.bool_
    reward: Any = np.float64
    empty = staticmethod(np.empty)
    zeros = staticmethod(aligned_zeros)
    where = staticmethod(np.where)

    @staticmethod
    def put(array: np.ndarray) -> np.ndarray:
        """Return a NumPy array in this memory."""
        return array

    get = put  # returns an array of this memory as a NumPy array

    @staticmethod
    def as_rows(records: np.ndarray) -> np.ndarray:
        """Return records (B,) as rows of bytes."""
        return records.view(np.dtype((np.void, records.dtype.itemsize)))

    @staticmethod
    def field(rows: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
        """Return a live view of a field of the records in rows."""
        return rows.view(dtype)[name]


class CompiledVecEnv(VecEnv):
    """A vector env of compiled kernels; the base of `JitVectorEnv` and `CudaVectorEnv`.

    For authors of another subclass: call `_set_up`, then `_allocate`.

    Attributes:
        kernels: The kind of env.
        has_own_params: Whether each env has its own parameters: given as records, set later, or
            drawn.
    """

    kernels: EnvKernels
    has_own_params: bool
    max_episode_steps: int | None
    episode_infos: bool
    mask_infos: bool
    _memory: Any = HostMemory
    _on_episode_end: Callable[[Any, np.ndarray], Any] | None = None
    _order: np.ndarray = np.zeros(0, np.int64)  # envs in the order of sending
    _is_seeded = False

    # What depends on where the memory is.
    _run: Callable[..., int]  # do a job on envs, int64 (B,), or all; arrays are named as in `Batch`
    _begin: Callable[[Any, Any], None]  # reset the envs of a mask, or all; write all observations
    _step_rows: Callable[[Any, StepSlot, Any], dict[str, Any]]  # step envs, int64 (B,), or all
    _final_infos: Callable[[Any, Any], Any]  # return infos["final_obs"] of rows
    _params_moved: Callable[[], None]  # let later jobs read the parameters from their new rows

    def _settle(self) -> None:
        """Raise an error that a job on a device has noted."""

    # -- memory -------------------------------------------------------------------------------

    def _allocate(self, states: Any, runs: Any, params: np.ndarray | None) -> None:
        """Make what has a row per env, beside states and runs; `params` are records, or None."""
        memory, num_envs = self._memory, self.num_envs
        self._rows = {"states": states, "runs": runs}
        self._dtypes = {"states": self.kernels.state_dtype, "runs": RUN_DTYPE}
        if params is not None:
            self._rows["params"] = memory.as_rows(params)
            self._dtypes["params"] = np.dtype((np.void, params.dtype))
        self.last_returns[:] = np.nan
        obs_space, space = self.single_observation_space, self.single_action_space
        self._obs_shape, self._obs_dtype = obs_space.shape or (), np.dtype(obs_space.dtype)
        self._all_obs = (num_envs, *self._obs_shape), (self._obs_dtype,)
        self._is_same_step = self.autoreset_mode is AutoresetMode.SAME_STEP
        self._has_end_infos = self._is_same_step or self.episode_infos
        self._has_end_infos |= self._on_episode_end is not None
        has_final = num_envs if self._is_same_step else 0
        self._final_obs = memory.zeros((has_final, *self._obs_shape), self._obs_dtype)
        # Actions of envs in flight.
        self._held = memory.zeros((num_envs, *(space.shape or ())), np.dtype(space.dtype))

    def _new_obs(self) -> Any:
        return self._memory.empty((self.num_envs, *self._obs_shape), self._obs_dtype)

    def _new_outputs(self, count: int) -> StepSlot:
        """Return uninitialised memory for the results of a step."""
        empty, flag = self._memory.empty, self._memory.flag
        return StepSlot(
            empty((count, *self._obs_shape), self._obs_dtype),
            empty(count, self._memory.reward),
            empty(count, flag),
            empty(count, flag),
        )

    def _read(self, name: str, env_ids: np.ndarray | None = None) -> np.ndarray:
        """Return copies of the records "states", "runs" or "params" of some envs, or of all."""
        rows = self._rows[name]
        ids = np.arange(self.num_envs) if env_ids is None else env_ids
        if len(rows) < self.num_envs:  # all envs share one
            ids = np.zeros_like(ids)
        found = self._memory.get(rows[self._memory.put(ids)])
        return found.view(self._dtypes[name]).reshape(len(ids))

    def _write(self, name: str, env_ids: np.ndarray, rows: Any) -> None:
        self._rows[name][self._memory.put(env_ids)] = rows

    def _field(self, records: str, name: str) -> Any:
        return self._memory.field(self._rows[records], self._dtypes[records], name)

    def state_field(self, name: str) -> Any:
        """Return a live view of one field of the states, (num_envs, *field_shape).

        After changing it, call `observe`.

        Raises:
            KeyError: There is no such field.
            TypeError: torch has no such dtype, or the field or the records are not aligned to it.
        """
        if name not in (names := self.kernels.state_dtype.names):
            raise KeyError(f"the state has no field {name!r}; it has {', '.join(names)}")
        return self._field("states", name)

    # -- statistics ---------------------------------------------------------------------------

    @property
    def last_returns(self) -> Any:
        """Return of each env's last episode that ended, float64 (num_envs,), NaN before; live."""
        return self._field("runs", "last_return")

    @property
    def last_lengths(self) -> Any:
        """Length of each env's last episode that ended, int64 (num_envs,), 0 before; live."""
        return self._field("runs", "last_length")

    @property
    def num_episodes(self) -> Any:
        """How many episodes of each env have ended, int32 (num_envs,): a live view."""
        return self._field("runs", "num_episodes")

    @property
    def episode_lengths(self) -> Any:
        """Steps taken in the episodes under way, int64 (num_envs,): a live view."""
        return self._field("runs", "episode_length")

    @property
    def episode_over(self) -> Any:
        """Whether an env's episode has ended and no reset followed, bool (num_envs,): live."""
        return self._field("runs", "episode_over")

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
            self._seed(None, None)
        return tuple(self._read("runs")["seed"].tolist())

    def _seed(self, seed: Any, reset_mask: np.ndarray | None) -> None:
        """Begin random streams as `reset` says; at first all, with random seeds if none are given.

        Raises:
            ValueError: A seed is not a 64-bit number.
        """
        given = seed_per_env(seed, self.num_envs)
        ids = range(self.num_envs) if reset_mask is None else np.flatnonzero(reset_mask).tolist()
        seeds: dict[int, int] = {i: one for i in ids if (one := given[i]) is not None}
        for one in seeds.values():
            if not 0 <= one <= _MAX_SEED:
                raise ValueError(f"an env has the seed {one}, expected one from 0 to {_MAX_SEED}")
        self._settle()
        if not self._is_seeded:
            first = secrets.randbits(62)
            seeds = {i: first + i for i in range(self.num_envs)} | seeds
        self._set_streams(np.array([*seeds], np.int64), np.array([*seeds.values()], np.uint64))

    def _set_streams(self, env_ids: np.ndarray, seeds: np.ndarray) -> None:
        """Begin the random streams of envs, int64 (B,), from seeds uint64 (B,)."""
        self._is_seeded = True
        if len(env_ids):
            runs = self._read("runs", env_ids)
            runs["seed"] = seeds
            _seed_streams(runs.view(np.recarray), seeds)
            self._write("runs", env_ids, self._memory.as_rows(runs))

    def _reset(
        self, seed: Seed, options: dict[str, Any] | None, reset_mask: np.ndarray | None
    ) -> tuple[Any, dict[str, Any]]:
        if options:
            raise ValueError(f"options has {sorted(options)}; compiled envs know only 'reset_mask'")
        self._seed(seed, reset_mask)
        obs = self._new_obs()
        self._begin(obs, None if reset_mask is None or reset_mask.all() else reset_mask)
        is_there = np.ones(self.num_envs, np.bool_) if reset_mask is None else reset_mask
        return obs, self._with_masks({}, None, self._memory.put(is_there))

    def observe(self, *, out: Any = None) -> Any:
        """Return the observations of the current states; nothing is stepped.

        Args:
            out: Memory (num_envs, *obs_shape) to write into, C-contiguous, on the envs' device;
                None for a new array.
        """
        self._calls.require_ready("observe")
        obs = self._new_obs() if out is None else self._check_array("obs", out, *self._all_obs)
        self._run(OBSERVE, self.num_envs, obs=obs)
        return obs if out is None else out

    # -- steps and sends ----------------------------------------------------------------------

    def _step(self, actions: Any, out: Any) -> StepResult:
        if out is None:
            outputs = self._new_outputs(self.num_envs)
            return (*outputs, self._step_rows(actions, outputs, None))
        outputs = slot_outputs(out, *self._all_obs, self._check_array)
        infos = self._step_rows(actions, outputs, None)
        return out.obs, out.rewards, out.terminations, out.truncations, infos

    def _sent_ids(self) -> np.ndarray:
        """Return the envs in flight in the order of sending, int64 (B,)."""
        self._order = self._order[self._calls.in_flight[self._order]]
        return self._order

    def _send(self, actions: Any, env_ids: np.ndarray) -> None:
        """Keep the actions; `recv` steps these envs."""
        self._settle()
        self._held[self._memory.put(env_ids)] = actions
        self._order = np.concatenate([self._sent_ids(), env_ids])

    def _recv(self, count: int, most: int, timeout: float | None) -> StepBatch:
        """Step the first `count` envs in the order of sending."""
        cut = "a `recv` was interrupted, and its results are lost"
        self._calls.unfinished = partial(self._calls.give_up, cut)
        ids = self._sent_ids()[:count]
        outputs = self._new_outputs(count)
        infos = self._step_rows(self._held[self._memory.put(ids)], outputs, ids)
        return StepBatch(*outputs, infos, ids)

    def _end_infos(self, outputs: StepSlot, env_ids: np.ndarray | None) -> dict[str, Any]:
        """Return the infos of a step of envs, int64 (R,), about ends; call `on_episode_end`."""
        over, infos = outputs.terminations | outputs.truncations, {}
        rows = slice(None) if env_ids is None else self._memory.put(env_ids)
        if self.episode_infos:
            returns, lengths = self.last_returns[rows], self.last_lengths[rows]
            where = self._memory.where
            episode = {"r": where(over, returns, 0.0), "l": where(over, lengths, 0)}
            infos = {"episode": episode, "_episode": over}
        if self._is_same_step:
            final_obs = self._final_infos(self._final_obs[rows], over)
            final = {"final_obs": final_obs, "_final_obs": over}  # in Gymnasium's order
            infos = {**infos, **final, "final_info": infos, "_final_info": over}
        if self._on_episode_end is not None:
            ended = np.flatnonzero(self._memory.get(over))
            if len(ended):
                self._on_episode_end(self, ended if env_ids is None else env_ids[ended])
        return infos

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

    def _action_masks(self, env_ids: np.ndarray | None, out: Any) -> Any:
        self.require_masks()
        self._settle()
        count = self.num_envs if env_ids is None else len(env_ids)
        masks = self.allocate((count, self._mask_width), np.int8) if out is None else out
        if self._write_masks(masks, env_ids):
            bits = np.asarray(masks).view(np.bool_)
            is_bad = ~allow_something(bits, mask_starts(self.single_action_space))
            row = int(np.flatnonzero(is_bad)[0])
            raise none_allowed(f"env {row if env_ids is None else env_ids[row]}")
        return masks

    def _write_masks(self, masks: Any, env_ids: np.ndarray | None) -> int:
        """Write masks int8 (B, width); return how many wrongly allow no action, on the CPU."""
        return self._run(MASK, len(masks), env_ids, masks=masks.view(self._memory.flag))

    def _with_masks(self, infos: dict, env_ids: np.ndarray | None, is_there: Any) -> dict[str, Any]:
        """Add, with `mask_infos`, the masks of these envs, or of all, and which rows are valid."""
        if not self.mask_infos:
            return infos
        masks = self.allocate((len(is_there), self._mask_width), np.int8)
        self._write_masks(masks, env_ids)
        return {**infos, MASK_KEY: masks, f"_{MASK_KEY}": is_there}

    def render(self) -> tuple[Any, ...] | None:
        """Return the frame of each env from `kernels.render`, in the form of `render_mode`.

        Raises:
            NotImplementedError: The kernels have no `render` function.
            TypeError: `render` returns another type than `render_mode` requires.
        """
        if self.render_mode is None:
            logger.warn("render_mode is None: make the vector env with 'rgb_array' or 'ansi'")
            return None
        return tuple(self._frames())

    def _frames(self) -> Iterator[Any]:
        """Return the frames of all envs, see `render`."""
        if self.kernels.render is None:
            raise NotImplementedError(
                f"{self.kernels.name} can't be drawn: give EnvKernels a `render` function, or a "
                "subclass of JitVectorEnv a method of its own"
            )
        self._calls.require_ready("render")
        names = [name for name in ("states", "params") if name in self._rows]
        each = zip(*(self._read(name).view(np.recarray) for name in names), strict=True)
        return (draw(self.kernels, str(self.render_mode), *one) for one in each)

    # -- parameters ---------------------------------------------------------------------------

    def _require_params(self) -> None:
        if "params" not in self._rows:
            raise TypeError(f"{self.kernels.name} takes no params")

    def _separate_params(self) -> None:
        """Give each env its own parameter record."""
        self.has_own_params, rows = True, self._rows["params"]
        if len(rows) < self.num_envs:
            self._rows["params"] = rows[self._memory.put(np.zeros(self.num_envs, np.int64))]
            self._params_moved()

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
        chosen = _read_rows("rows", rows, self.num_envs)
        records = self._read("params", chosen)
        write_params(records, values, self.kernels.name)
        self._separate_params()
        self._write("params", chosen, self._memory.as_rows(records))

    def params_of(self, rows: Any = None) -> Any:
        """Return the parameters of some envs as numbers, as inputs of buffers and critics.

        Args:
            rows: Env ids (B,), a mask, or None for all envs.

        Returns:
            float32 (B, P), a new array: all numbers of a record, field by field.
        """
        self._require_params()
        records = self._read("params", _read_rows("rows", rows, self.num_envs))
        numbers = structured_to_unstructured(records, dtype=np.float32)
        return self._memory.put(numbers.reshape(len(records), -1))

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
        sources, targets = self._read_copies(source, target, self.num_envs, luck)
        self._refuse_copies("copy_rows", sources, targets)
        shared = () if self.has_own_params else ("params",)
        stored = {name: rows for name, rows in self._rows.items() if name not in shared}
        self._put(targets, stored, sources, luck)

    def snapshot(self, rows: Any = None) -> Branch:
        """Return copies of envs in mid-episode, on the CPU, for `restore`.

        Args:
            rows: Env ids (B,), a mask, or None for all envs.

        Raises:
            As `copy_rows`.
        """
        found = _read_rows("rows", rows, self.num_envs)
        self._refuse_copies("snapshot", found, np.unique(found))
        params = self._read("params", found) if self.has_own_params else None
        states, runs = self._read("states", found), self._read("runs", found)
        return Branch(self.kernels.name, states, runs, params, self.described_state({}))

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
        if not isinstance(branch, Branch):
            raise TypeError(f"branch is a {type(branch).__name__}, expected what snapshot returned")
        own = self._dtypes["params"] if self.has_own_params else None
        given = None if branch.params is None else branch.params.dtype
        name = self.kernels.name
        if (branch.name, branch.states.dtype, given) != (name, self.kernels.state_dtype, own):
            raise ValueError(
                f"the branch is of {branch.name}, of another kind than {name} here, or one of them "
                "has parameters per env and the other has not"
            )
        count = len(branch.states)
        sources, targets = self._read_copies(np.arange(count), rows, count, luck)
        self._refuse_copies("restore", targets[:0], targets)
        if branch.facts:
            self.check_state(branch.facts, branch.states)
        found = {"states": branch.states, "runs": branch.runs, "params": branch.params}
        stored = {k: self._memory.as_rows(one) for k, one in found.items() if one is not None}
        self._put(targets, stored, sources, luck)

    def _read_copies(
        self, source: Any, target: Any, num_sources: int, luck: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return sources and targets of copies, int64 (B,) each; one source goes to all targets."""
        check_choice("luck", luck, ("same", "fresh"))
        sources = _read_rows("source", source, num_sources)
        targets = _read_rows("target", target, self.num_envs)
        if len(sources) == 1:
            sources = np.repeat(sources, len(targets))
        if len(sources) != len(targets):
            raise ValueError(
                f"{len(sources)} sources for {len(targets)} targets, expected as many, or one "
                "source"
            )
        return sources, targets

    def _refuse_copies(self, call: str, sources: np.ndarray, targets: np.ndarray) -> None:
        """Raise for envs in flight, or never reset, and for sources whose episodes have ended."""
        calls = self._calls
        if len(targets):
            calls.check_env_ids(targets, call)  # raises if an id comes twice
        if len(sources) and (calls.num_in_flight or calls.unreset):
            calls.check_env_ids(np.unique(sources), call)
        if (over := self._memory.get(self.episode_over)[sources]).any():
            ended = np.unique(sources[over])
            raise ValueError(
                f"{call} of envs {', '.join(map(str, ended[:8].tolist()))}, whose episodes have "
                "ended: branches are of episodes that go on; take other envs, or step or reset "
                "these first"
            )

    def _put(self, targets: np.ndarray, stored: Any, sources: np.ndarray, luck: str) -> None:
        """Copy rows `stored[name][sources]` to envs."""
        seeds = np.zeros(len(targets), np.uint64)
        if luck == "fresh":
            _draw_seeds(self._read("runs", targets).view(np.recarray), targets, seeds)
        self._settle()
        for name, rows in stored.items():
            self._write(name, targets, rows[self._memory.put(sources)])
        if luck == "fresh":
            self._set_streams(targets, seeds)

    def described_state(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the arrays of a state plus entries that identify its env; here there are none."""
        return arrays

    def check_state(self, state: Mapping[str, np.ndarray], states: np.ndarray) -> None:
        """Raise ValueError if a state is of other envs, or has invalid records `states` (N,).

        Kernels use them unchecked.
        """

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
        is_left_out = not self.has_own_params and "params" not in state
        dtypes = {k: v for k, v in self._dtypes.items() if k != "params" or not is_left_out}
        for name in dtypes.keys() - state.keys():
            raise KeyError(f"state has no entry {name!r}; pass what `state_dict` returned")
        found = {name: self._read_entry(state, name, dtype) for name, dtype in dtypes.items()}
        self.check_state(state, found["states"])
        self._settle()
        self._calls.forget_reset("`load_state_dict` did not come to its end")
        if "params" in found:
            self._separate_params()
        for name, records in found.items():
            self._write(name, np.arange(self.num_envs), self._memory.as_rows(records))
        self._is_seeded = True
        self._calls.mark_reset()

    def _read_entry(self, state: Mapping[str, np.ndarray], name: str, wanted: Any) -> np.ndarray:
        """Return the records (num_envs,) of a state; raises ValueError as `load_state_dict`."""

        def accepts(dtype: np.dtype, shape: tuple[int, ...]) -> bool:
            if (dtype, shape) == (wanted, (self.num_envs,)):
                return True
            told = f"has shape {shape}, expected ({self.num_envs},)"
            if dtype != wanted:
                told = f"has dtype {dtype!s:.300}, expected {wanted!s:.300}"
            raise ValueError(f"state[{name!r}] {told}: {self.num_envs} envs of the same kind")

        return read_entry(state, name, accepts)


def _read_rows(name: str, rows: Any, num_envs: int) -> np.ndarray:
    """Return the env ids of an argument, int64 (B,), given as ids, one id, a mask, or None for all.

    Raises:
        TypeError, ValueError: It is none of these.
    """
    if rows is None:
        return np.arange(num_envs)
    ids = np.asarray(rows)
    if ids.dtype.kind == "b" and ids.shape == (num_envs,):
        return np.flatnonzero(ids)
    if ids.dtype.kind not in "iu" or ids.ndim > 1:
        raise TypeError(
            f"{name} is {ids.dtype} {ids.shape}, expected env ids, or a mask bool ({num_envs},)"
        )
    ids = np.atleast_1d(ids).astype(np.int64)
    if len(ids) and not 0 <= ids.min() <= ids.max() < num_envs:
        bad = ids[(ids < 0) | (ids >= num_envs)][0]
        raise ValueError(f"{name} has {bad}, expected env ids from 0 to {num_envs - 1}")
    return ids
