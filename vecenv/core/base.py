"""VecEnv: the interface that every backend shares."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import cached_property, wraps
from typing import Any, NamedTuple, TypeVar

import numpy as np
from gymnasium.error import AlreadyPendingCallError, ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv

from vecenv.core.actions import ActionBatcher
from vecenv.core.arguments import (
    Seed,
    checked_seed,
    read_autoreset_mode,
    read_timeout,
    split_reset_mask,
)
from vecenv.core.errors import EnvStateError, NoActionMaskError, SlotError
from vecenv.core.masks import (
    LatestMasks,
    mask_width,
)
from vecenv.core.protocol import CallProtocol
from vecenv.core.replacing import read_reopened
from vecenv.core.rows import (
    StepRows,
    StepSlot,
    aligned_zeros,
    check_slot_array,
    slot_rows,
)
from vecenv.core.spaces import BatchedSpaces
from vecenv.timing import Timing
from vecenv.timing.calls import RECV, RESET, SEND, STEP, CallLog
from vecenv.timing.stamps import EnvStamps, WorkerProcess

__all__ = ["GymVecEnv", "StepBatch", "StepResult", "StepSlot", "VecEnv", "forwarding"]

_NOT_LOGGED: AbstractContextManager[None] = nullcontext()
_ALL = slice(None)
_MASK_DTYPES = (np.dtype(np.int8), np.dtype(np.bool_))

Method = TypeVar("Method", bound=Callable[..., Any])
StepResult = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]


class StepBatch(NamedTuple):
    """Results of the B envs that `recv` returns, in the order in which they became ready.

    Observations are nested as the space is; rewards are float64, the flags bool and `env_ids`, the
    env of each row, int64 (B,).
    """

    obs: Any
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray
    infos: dict[str, Any]
    env_ids: np.ndarray


class VecEnv(VectorEnv[Any, Any, np.ndarray]):
    """A Gymnasium vector env that can also step some of its envs, and write into given memory.

    Beyond `gymnasium.vector.VectorEnv`:

    - `step(actions, out=slot)` writes the results into the slot's arrays and returns those;
    - `send(actions, env_ids)` starts stepping some envs, `recv(min_envs, max_envs=)` returns
      those that are ready first;
    - `allocate(shape, dtype)` returns memory for such a slot, on the device of the envs;
    - `action_masks()` returns which actions the envs allow;
    - `reopen(rows, factories)` replaces the envs of some rows (backends sync and async);
    - `timing` says where the time goes.

    Equal seeds give equal trajectories on every backend, however steps are split into sends.

    For authors of a backend: call `_set_up` in `__init__`, then implement `_reset`, `_step`,
    `_send` and `_recv`, for masks `_action_masks` and `has_action_masks`, and for timing
    `_begin_stamps`, `_end_stamps` and, with workers, `_env_chunks` and `_worker_processes`. The
    public methods check arguments and the state of calls before they call these.
    """

    autoreset_mode: AutoresetMode
    timing: Timing
    _check_array: Any = staticmethod(check_slot_array)  # of what is written into

    def _set_up(
        self,
        num_envs: int,
        spaces: BatchedSpaces,
        autoreset_mode: AutoresetMode,
        metadata: dict[str, Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        """Set the attributes that all vector envs have; `metadata` is copied."""
        self.num_envs = num_envs
        self.single_observation_space = spaces.single_observation_space
        self.observation_space = spaces.observation_space
        self.single_action_space = spaces.single_action_space
        self.action_space = spaces.action_space
        self.autoreset_mode = autoreset_mode
        self.metadata = {**(metadata or {}), "autoreset_mode": autoreset_mode}
        self.render_mode = render_mode
        self.timing = Timing(self)
        self._log: CallLog | None = None  # while timing is on
        self._calls = CallProtocol(num_envs)
        self._actions = ActionBatcher(self.single_action_space, self.action_space, num_envs)

    def reset(
        self, *, seed: Seed = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all envs, or some, and return the observations and infos of all.

        Args:
            seed: None lets the envs' generators go on; an integer s seeds env i with s + i; a list
                gives one seed (or None) per env.
            options: Passed on to the envs. `options["reset_mask"]`, bool (num_envs,), resets only
                the envs where it is True; the others keep their state and their row.

        Returns:
            obs (num_envs, *obs_shape), and the batched infos of the envs that were reset. A full
            reset gives up envs in flight since `send`.

        Raises:
            AlreadyPendingCallError: Another call is pending, or a masked env is in flight.
        """
        seed = checked_seed(seed, self.num_envs)
        reset_mask, rest = split_reset_mask(options, self.num_envs)
        self._calls.begin_reset(reset_mask)
        try:
            with self._logged(RESET):
                result = self._reset(seed, rest, reset_mask)
        except KeyboardInterrupt as error:  # nobody knows which envs have been reset
            self._calls.forget_reset(error)
            raise
        self._calls.mark_reset()
        return result

    def step(self, actions: Any, *, out: Any = None) -> StepResult:
        """Step every env once.

        Args:
            actions: One action per env, also for envs that are about to reset.
            out: Where to write the results: an object with arrays `obs, rewards, terminations,
                truncations` such as `StepSlot`, owned by the caller.

        Returns:
            obs (num_envs, *obs_shape), rewards float64 (num_envs,), terminations and truncations
            bool (num_envs,), infos. With `out` these are out's own arrays.

        Raises:
            ActionError: Actions of wrong shape, dtype or count, or NaN. Nothing was stepped.
            SlotError: `out` can't be written into, or is of a buffer for another autoreset mode.
                Nothing was stepped.
            ResetNeeded: Before the first `reset`, or an episode has ended and autoreset is off.
        """
        self._calls.require_ready("step")
        if out is not None:
            self._check_slot_mode(out)
        with self._logged(STEP):
            return self._step(self._actions.check(actions), out)

    def send(self, actions: Any, env_ids: Any = None) -> None:
        """Start stepping some envs and return at once.

        Args:
            actions: One action per env of `env_ids`; copied, so the caller may reuse the memory.
            env_ids: Distinct ids, integer (B,); None for all envs.

        Raises:
            ActionError, ResetNeeded: As for `step`.
            AlreadyPendingCallError: One of these envs is already in flight.
        """
        ids = self._calls.check_env_ids(env_ids)
        with self._logged(SEND):
            self._send(self._actions.check(actions, ids), ids)
        self._calls.mark_sent(ids)

    def recv(
        self,
        min_envs: int | None = None,
        timeout: float | None = None,
        *,
        max_envs: int | None = None,
    ) -> StepBatch:
        """Return the results of the envs in flight that are ready first.

        Args:
            min_envs: Wait until at least this many are ready; None for all in flight, or for
                `max_envs` of them if that is given and is fewer.
            timeout: Longest wait in seconds; None waits without limit.
            max_envs: Return at most this many; the remaining ready envs come first in the next
                `recv`. None for all that are ready. `recv(max_envs=16)` returns 16 envs each time,
                as long as 16 are in flight, so that batches have one shape.

        Raises:
            NoAsyncCallError: Nothing is in flight.
        """
        count, most = self._calls.check_recv(min_envs, max_envs)
        timeout = read_timeout("timeout", timeout)
        with self._logged(RECV):
            batch = self._recv(count, most, timeout)
            if self._log is not None:
                self.timing.log.note_rows(len(batch.env_ids))
        self._calls.mark_received(batch.env_ids)
        return batch

    @property
    def has_action_masks(self) -> bool:
        """Whether the envs give action masks.

        For single envs that give masks in infos, this is known after their first `reset`.
        """
        return False

    def action_masks(self, env_ids: Any = None, *, out: np.ndarray | None = None) -> np.ndarray:
        """Return which actions the envs allow in their latest observations: 0 or 1 per action.

        After an autoreset the masks are those of the new episode. sb3-contrib accepts the rows. For
        Discrete actions `single_action_space.sample(mask=row)` accepts a row, and
        `action_space.sample(mask=tuple(masks))` all of them. Where a mask must be bool, as in
        `masked_fill`, `~` or an index, use `masks.view(bool)`, which copies nothing.

        Single envs give masks as `info["action_mask"]`, as a part "action_mask" of their Dict
        observations, or by a method `action_masks()`. The method is called now, unless `MaskInfos`
        puts its result into the infos. Compiled envs have an `action_mask` kernel.

        Args:
            env_ids: Distinct ids, integer (B,), such as `batch.env_ids` of `recv`, none of them in
                flight; None for all envs, with none in flight.
            out: An array int8 or bool (B, width) to write into, C-contiguous; None for a new one.

        Returns:
            int8 (B, width), the caller's to keep, or `out`; the width is n for Discrete,
            sum(nvec) for MultiDiscrete and 2 n for MultiBinary actions, see `mask_width`. Where an
            episode has ended, so that the action is ignored, a mask that is missing or all 0
            becomes all 1.

        Raises:
            NoActionMaskError: The envs give no masks; says what an env must provide.
            ActionMaskError: A mask does not fit the action space, is missing, or allows no action;
                names the env.
        """
        ids, count = None, self.num_envs
        if env_ids is None:
            self._calls.require_ready("action_masks")
        else:
            ids = self._calls.check_env_ids(env_ids, "action_masks")
            count = len(ids)
        if out is not None:
            self._check_array("masks", out, (count, self._mask_width), _MASK_DTYPES)
        return self._action_masks(ids, out)

    @cached_property
    def _mask_width(self) -> int:
        """Length of a mask."""
        return mask_width(self.single_action_space)

    def allocate(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """Return zeroed memory, owned by the caller, for slots of `step`, on the envs' device."""
        return aligned_zeros(shape, dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as copies: envs, their random streams, progress of episodes.

        After `load_state_dict`, vector envs made with the same arguments continue from it bit for
        bit. Compiled envs return arrays; `SyncVectorEnv` and `AsyncVectorEnv` return pickled envs,
        and each loads what the other saved.

        Raises:
            EnvStateError: An env can't be saved; names the first.
        """
        raise EnvStateError(f"{type(self).__name__} can't save the state of its envs")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned; no `reset` is needed before.

        Envs that are stepped one by one are saved as pickles: loading them runs code, so load only
        states that you have saved yourself. If that raises EnvStateError, reset the envs.
        """
        raise EnvStateError(f"{type(self).__name__} can't load the state of its envs")

    def reopen(self, rows: Any, factories: Any) -> None:
        """Close the envs of some rows and make new ones there, without touching other rows.

        The rows must be reset before they are stepped, by `options={"reset_mask": mask}` or a full
        reset; their latest observations stay until then. The new envs must have the spaces of the
        vector env. Each old env is closed before the new one is made, however long that takes. If
        the env of a row can't be made, the row has none until it is reopened: its resets raise, or,
        with `on_error="restart"`, its observations are zeros and its steps truncated.

        Args:
            rows: One id, or distinct ids, integer (B,).
            factories: One factory for all of these rows, or a sequence of one per row. Workers
                get them pickled by cloudpickle.

        Raises:
            EnvCreationError: A factory raised, or made an env of other spaces; names the env. The
                other rows have been reopened.
        """
        calls, is_one = self._calls, isinstance(rows, int | np.integer)
        calls.require_open("reopen")
        if calls.is_started:
            calls.require_idle("reopen")
        ids = calls.distinct_ids([rows] if is_one else rows, "rows")
        self._reopen(read_reopened(ids, factories))

    def _reopen(self, factories: dict[int, Callable[[], Any]]) -> None:
        """Do what `reopen` says; add the rows to `_calls.unreset` before any change."""
        raise NotImplementedError(
            f"{type(self).__name__} can't reopen rows; make the envs with backend='sync' or 'async'"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles, as dropping a copy would close the envs of both."""
        if type(self).__getstate__ is not object.__getstate__:  # as EzPickle's
            return super().__reduce_ex__(protocol)
        raise TypeError(
            f"a {type(self).__name__} can't be copied or pickled: make another one with the same "
            "arguments, and give it state_dict() of this one by load_state_dict to go on from here"
        )

    def close(self, **kwargs: Any) -> None:
        """Close the envs; every later call raises ClosedEnvironmentError. May be called twice."""
        try:
            if getattr(self, "_log", None) is not None and not self.closed:
                self.timing.note_end()
            super().close(**kwargs)
        finally:
            self.closed = True
            if hasattr(self, "_calls"):
                self._calls.is_closed = True

    def _check_slot_mode(self, out: Any) -> None:
        """Raise SlotError if `out` is of a buffer of another autoreset mode: targets were wrong."""
        own = self.autoreset_mode
        given = getattr(out, "autoreset_mode", None) or own
        if given is not own and (mode := read_autoreset_mode(given)) is not own:
            raise SlotError(
                f"out is of a buffer with autoreset mode {mode.value!r}, but the envs have "
                f"{own.value!r}; make the buffer with autoreset_mode=envs.autoreset_mode"
            )

    def _logged(self, kind: int) -> AbstractContextManager[CallLog | None]:
        """Return a context that is logged as a call, if timing is on."""
        return _NOT_LOGGED if self._log is None else self.timing.call(kind)

    def _waiting(self) -> AbstractContextManager[None]:
        """Return a context for the part of the logged call that waits for envs."""
        return _NOT_LOGGED if self._log is None else self.timing.log.waiting()

    def _begin_stamps(self) -> EnvStamps | int | None:
        """Begin to stamp env steps; return the rings of stamps, or None if there are none.

        If compiled calls are stamped, return the nanoseconds of a call that does nothing instead.
        """
        return None

    def _end_stamps(self) -> None:
        """Stop stamping; if this raises, nothing has changed."""

    def _env_chunks(self) -> list[int]:
        """Return W + 1 bounds: envs bounds[w], ..., bounds[w + 1] - 1 are stepped by worker w."""
        return [0, self.num_envs]

    def _worker_processes(self) -> list[WorkerProcess | None]:
        """Return the process of each worker; None where the worker is the caller."""
        return [None]

    def _reset(
        self, seed: Seed, options: dict[str, Any] | None, reset_mask: np.ndarray | None
    ) -> tuple[Any, dict[str, Any]]:
        """Do what `reset` says; `options` no longer has `reset_mask`."""
        raise NotImplementedError

    def _step(self, actions: Any, out: Any) -> StepResult:
        """Do what `step` says; `actions` have been checked, `out` has not."""
        raise NotImplementedError

    def _send(self, actions: Any, env_ids: np.ndarray) -> None:
        """Start stepping `env_ids`, int64 (B,); copy `actions`, which are the caller's memory."""
        raise NotImplementedError

    def _recv(self, count: int, most: int, timeout: float | None) -> StepBatch:
        """Return at least `count` of the envs in flight, and at most `most`."""
        raise NotImplementedError

    def _refuse_ended(self, env_ids: np.ndarray | slice = _ALL) -> None:
        """Raise ResetNeeded if autoreset is disabled and an episode of these envs has ended."""
        if self.autoreset_mode is AutoresetMode.DISABLED and self._is_over(env_ids).any():
            stuck = sorted(np.arange(self.num_envs)[env_ids][self._is_over(env_ids)].tolist())
            listed = ", ".join(map(str, stuck[:8])) + ", ..." * (len(stuck) > 8)
            raise ResetNeeded(
                f"The episodes of envs [{listed}] have ended and autoreset is disabled; reset "
                "them with reset(options={'reset_mask': mask}) before the next step. "
                "Nothing was stepped."
            )

    def _is_over(self, env_ids: np.ndarray | slice = _ALL) -> np.ndarray:
        """Return whose latest result has ended the episode, bool (B,); False after a reset."""
        raise NotImplementedError

    def _action_masks(self, env_ids: np.ndarray | None, out: np.ndarray | None) -> np.ndarray:
        """Do what `action_masks` says; `env_ids` and `out` have been checked."""
        raise NoActionMaskError(f"{type(self).__name__} has no action masks")


class GymVecEnv(VecEnv):
    """A `VecEnv` of Gymnasium's envs, in whatever process; its latest results are kept in rows.

    For authors of a backend: call `_bind_rows` after `_set_up`; implement `call` and `_set_attr`.
    Masks are recorded if `_reset` calls `_note_reset`, and `_step` and `_recv` return what
    `_results` and `_batch_of` return.

    Attributes:
        copy: Whether returned observations are copies, which the caller may keep.
    """

    copy: bool = True

    def _bind_rows(self, rows: StepRows) -> None:
        """Set the rows for results."""
        self._rows = rows
        if not hasattr(self, "_masks"):  # lazy vector envs call this twice
            spaces = self.single_action_space, self.single_observation_space
            me = weakref.ref(self)  # a cycle would keep a dropped vector env open
            self._masks = LatestMasks(self.num_envs, *spaces, lambda *args: me().call(*args))  # type: ignore[union-attr]  # it is alive

    def _is_over(self, env_ids: np.ndarray | slice = _ALL) -> np.ndarray:
        """Return whose latest result has ended the episode, bool (B,); False after a reset."""
        return self._rows.terminations[env_ids] | self._rows.truncations[env_ids]

    def _slot(self, out: Any) -> StepSlot | None:
        """Check `out` of a step before anything is stepped; return its arrays as plain ones."""
        return None if out is None else slot_rows(out, self._rows.obs)

    def _observations(self) -> Any:
        """Return the observations in the rows."""
        rows = self._rows.obs
        if rows.array is not None:
            return rows.array.copy() if self.copy else rows.array
        return deepcopy(rows.batch()) if self.copy else rows.batch()

    def _results(self, out: Any, slot: StepSlot | None, infos: dict[str, Any]) -> StepResult:
        """Return the results of `step`; copy them to `out`, whose rows are `slot`, if given."""
        rows = self._rows
        self._masks.note(infos)
        if slot is None:
            ends = rows.terminations.copy(), rows.truncations.copy()
            return self._observations(), rows.rewards.copy(), *ends, infos
        ends = rows.terminations, rows.truncations
        slot.put(range(self.num_envs), (rows.obs.batch(), rows.rewards, *ends))
        return out.obs, out.rewards, out.terminations, out.truncations, infos

    def _batch_of(self, env_ids: np.ndarray, infos: dict[str, Any]) -> StepBatch:
        """Return the results of `recv` from the rows."""
        rows = self._rows
        self._masks.note(infos, env_ids)
        ends = rows.terminations[env_ids], rows.truncations[env_ids]
        return StepBatch(rows.obs.take(env_ids), rows.rewards[env_ids], *ends, infos, env_ids)

    def _note_reset(self, infos: dict[Any, Any], env_ids: np.ndarray | slice) -> None:
        """Record a reset of these envs, and masks in its infos, which have rows of all envs."""
        self._rows.terminations[env_ids] = self._rows.truncations[env_ids] = False
        self._masks.note_reset(infos, env_ids)

    @property
    def has_action_masks(self) -> bool:
        """See `VecEnv.has_action_masks`."""
        return self._masks.is_there

    def _action_masks(self, env_ids: np.ndarray | None, out: np.ndarray | None) -> np.ndarray:
        rows, in_flight = _ALL if env_ids is None else env_ids, self._calls.num_in_flight
        if in_flight and self._masks.is_asked_for:
            raise AlreadyPendingCallError(
                f"`action_masks` has to ask the envs for their masks, and {in_flight} of them are "
                "in flight since `send`; `recv` them first, or let masks come with the results: "
                "wrap each env in vecenv.MaskInfos (make_vec(..., mask_infos=True))",
                "send",
            )
        found = self._masks.read(rows, self._is_over(rows), self._rows.obs.batch())
        if out is None:
            return found
        out[...] = found
        return out

    def _notes(self) -> tuple[Any, ...]:
        """Return what the state needs beside observations, for `_take_notes`."""
        return self._is_over(), self._masks.state()

    def _take_notes(self, is_over: np.ndarray, masks: tuple[Any, ...]) -> None:
        """Restore what `_notes` returned."""
        self._rows.terminations[...], self._rows.truncations[...] = is_over, False
        self._masks.restore(*masks)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env, or read an attribute, and return the results."""
        raise NotImplementedError

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every env, to one value or to one per env (a list or tuple)."""
        self._calls.require_idle("set_attr")
        if not isinstance(values, list | tuple):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {self.num_envs} environments."
            )
        self._set_attr(name, values)

    def _set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Set an attribute of every env to its own value."""
        raise NotImplementedError

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]  # a tuple, of all envs
        """Seeds of the envs' generators."""
        return self.get_attr("np_random_seed")

    @property
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]  # a tuple, of all envs
        """The envs' generators; copies of them if the envs are in other processes."""
        return self.get_attr("np_random")

    def render(self) -> tuple[Any, ...]:
        """Return what each env renders."""
        self._calls.require_idle("render")
        return self.call("render")

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every env."""
        return self.call(name)


def forwarding(attribute: str) -> Callable[[Method], Method]:
    """Return a function that makes, of a method, one that calls it of the object's attribute."""

    def forward(method: Method) -> Method:
        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(getattr(self, attribute), method.__name__)(*args, **kwargs)

        return call  # type: ignore[return-value]  # it has the method's signature

    return forward
