"""RolloutBuffer: the steps of one on-policy update, in memory that is allocated once."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from buffers.core.arguments import read_distinct_ids, read_nest, read_tensor, resolve_device
from buffers.core.columns import Allocate, foreach_copy
from buffers.core.errors import BufferMisuseError
from buffers.core.generator import other_generator
from buffers.core.state import (
    Block,
    LoadedState,
    StatefulBuffer,
    Wanted,
    check_bools,
    check_settings,
    contradiction,
)
from buffers.rollout.gae import check_discounts, fill_advantages_there
from buffers.rollout.kernels import (
    UNWRITTEN,
    UNWRITTEN_FLAG,
    are_all_finite,
    collect_rows,
    fill_advantages,
    finished_episodes,
    first_missing_final,
    mark_dead_steps,
)
from buffers.rollout.layout import RolloutLayout, parse_autoreset_mode, plan_rollout
from buffers.rollout.minibatches import MinibatchSampler, RolloutBatch, RolloutRows
from buffers.rollout.on_device import (
    NO_FINAL,
    NO_LOG_PROBS,
    NO_RESULTS,
    NO_VALID,
    NO_VALUES,
    WRONG_REWARD,
    DeviceRows,
)
from buffers.rollout.sequences import RolloutSequenceBatch, SequenceSampler
from buffers.rollout.storage import RolloutSlot, RolloutStorage

__all__ = ["EpisodeStats", "RolloutBuffer"]

_STATE_VERSION = 1
_CARRIED = ("over_before", "running_returns", "running_lengths")

_COUNTS = (
    *("gamma", "gae_lambda", "_is_started", "_open_steps", "_has_marks", "_num_taken"),
    *("_is_computed", "_is_counted", "_num_valid", "_num_episodes"),
)


class EpisodeStats(NamedTuple):
    """The episodes that ended in a rollout, in order of time; valid until `advance` or `start`."""

    returns: np.ndarray  # float64 (K,), undiscounted sums of rewards
    lengths: np.ndarray  # int64 (K,), numbers of steps


class _Result:
    """A column of results: what the env has written is on the device when it is looked at."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, rollout: Any, owner: type) -> Any:
        if rollout is None:
            return self
        storage = rollout._storage
        if rollout._staged and rollout._open_steps:
            return storage.upload_result(self._name, rollout._num_taken)
        return storage.tensor(self._name)

    def __set__(self, rollout: Any, tensor: Any) -> None:
        """Let `rollout.rewards /= 10` pass, which changes the tensor and puts it back."""
        if tensor is not rollout._storage.tensor(self._name):
            raise AttributeError(
                f"{self._name} is memory of the buffer: write into it, as by rollout.{self._name}"
                "[:] = ..."
            )


class RolloutBuffer(StatefulBuffer):
    """T steps of N environments, their advantages, and minibatches of them.

    One update is: for each t from 0 to T - 1 `obs_at(t)`, `put(t, ...)` and an environment step
    into `slot(t)`; then `compute_advantages`, `minibatches` as often as wanted, `advance`.
    Everything is allocated by the constructor, except that `minibatches` allocates its batch when
    first asked for a larger one; after that no update allocates memory for arrays.

    A rollout begins with log_probs and values marked as not written; they read as NaN. Its first
    slot marks the rewards likewise. What the environment did not write into `slot(t)`, or the
    policy's outputs that were neither `put` nor written into the tensors below, is an error when
    advantages are computed, never trained on.

    Which rows are transitions follows from the autoreset mode. NEXT_STEP: the step after the end of
    an episode only resets; it is left out (`valid` False), and as the final observation is the next
    row, its value bootstraps a truncation. SAME_STEP and DISABLED: all rows are transitions, and
    the value of the true final observation of every truncated episode must be given to
    `set_final_values`. To leave out more rows set elements of `valid_pages` to False before
    `compute_advantages`.

    Where a row is an agent of a game, agents die before their game ends, and others come later. The
    environment then writes into `slot(t).valid` which rows acted in step t; the others are no
    transitions. Every step of a rollout must have it, or none. The value of the observation an
    agent's life was cut off with is that of the next row, unless its game was reset in that step,
    as under SAME_STEP: then give it to `set_final_values`.

    With a device other than the CPU the environment still writes into host pages (pinned, unless
    `allocate` supplied them). `obs_at` enqueues the copy of one row, `compute_advantages` that of
    rewards and flags, unless these were changed on the device; `put` and `env_actions` wait for the
    device, as the environment needs the actions, and `minibatches` waits once to send the order of
    rows.

    With `allocate=envs.allocate` of an environment on the same device nothing but that passes
    through the host while steps are made: observations and actions are there only, and rewards and
    flags, 6 bytes per env and step, are copied to the host once per rollout, for checks, statistics
    of episodes and the list of valid rows.

    With `deferred=True` nothing is: the device marks rows, adds up episodes and shuffles. No call
    waits then but `check`, `episodes`, `num_valid`, `state_dict` and `set_final_values` with ids,
    and all that is made from `obs_at` to `advance` can be captured in CUDA graphs (register
    `generator` with that of the minibatches). What would be an error is found on the device, and
    raised by `check`. Rows are left out by `valid`; `episodes` are those that were counted last.

    Attributes:
        obs: (T + 1, N, *obs_shape), nested like the space. Like all below a tensor on `device`, and
            on the CPU over the same memory as the slots. Write into it; putting another in its
            place has no effect, or is an error.
        actions: (T, N, *action_shape), of the dtype of the space.
        log_probs: float32 (T, N).
        values: float32 (T + 1, N).
        rewards: float32 (T, N). On another device each look at this, and the next two, enqueues the
            copy of what the env has written; what is then changed there counts.
        terminations: bool (T, N).
        truncations: bool (T, N).
        valid: bool (T, N), complete after `compute_advantages`.
        valid_pages: The same as a NumPy array of host pages, for rows to leave out.
        final_values: float32 (T, N), or None under NEXT_STEP.
        advantages: float32 (T, N).
        returns: float32 (T, N), advantages + values.
        extras: The extra columns by name, (T, N, ...); and game columns, (T, N / A, ...).

    Args:
        num_steps: T.
        num_envs: N.
        observation_space: Of a single environment: Box, Discrete, MultiDiscrete, MultiBinary, or
            Dict and Tuple of these.
        action_space: Of a single environment: Box, Discrete, MultiDiscrete or MultiBinary.
        autoreset_mode: `envs.metadata["autoreset_mode"]`, or its string value. That of the vector
            env is compared with it where both are known: with `allocate=envs.allocate`, and in
            `step(out=rollout.slot(t))`.
        gamma: Discount.
        gae_lambda: Lambda of generalised advantage estimation.
        device: Where the tensors live.
        seed: Of the order of rows in minibatches; None takes entropy of the system.
        allocate: `envs.allocate`, so that what a device's envs write needs no copy: called with
            (shape, dtype) for observations, actions, rewards and flags. None for own memory. If
            `envs.device` is `device`, not the CPU, slots, and actions that `put` returns, are
            tensors there.
        extra_columns: Names and spaces of further values per step, such as costs: `put` writes
            them, batches have them in `extras`.
        game_columns: The same of values that a game's agents share, such as its state for a central
            critic: stored once per game, (T, N / agents_per_game, ...), and given so to `put`;
            batches have in `extras` for every row those of its game.
        agents_per_game: So many neighbouring rows of a step are one game.
        deferred: Leave to the device what the host does otherwise, see above; with envs there.
        staged: Keep host pages apart from the tensors on the CPU too, to test what other devices
            do.

    Raises:
        BufferMisuseError: An argument that does not fit.
        BufferMemoryError: More memory is needed than is free. Nothing was allocated.

    >>> from gymnasium.spaces import Box, Discrete
    >>> rollout = RolloutBuffer(2, 3, Box(-1, 1, (4,)), Discrete(2), autoreset_mode="NextStep")
    >>> rollout.start(np.zeros((3, 4), np.float32))  # the observations of a reset
    >>> for t in range(2):
    ...     obs = rollout.obs_at(t)  # a tensor (3, 4), for the policy
    ...     actions, log_probs, values = torch.ones(3).long(), torch.zeros(3), torch.zeros(3)
    ...     env_actions = rollout.put(t, actions=actions, log_probs=log_probs, values=values)
    ...     slot = rollout.slot(t)  # envs.step(env_actions, out=slot) fills it
    ...     slot.rewards[:] = 1.0
    >>> rollout.compute_advantages(last_values=torch.zeros(3))
    >>> [tuple(batch.obs.shape) for batch in rollout.minibatches(2)]
    [(3, 4), (3, 4)]
    >>> rollout.advance()
    """

    rewards = _Result()
    terminations = _Result()
    truncations = _Result()

    def __init__(
        self,
        num_steps: int,
        num_envs: int,
        observation_space: Space,
        action_space: Space,
        *,
        autoreset_mode: AutoresetMode | str,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        device: torch.device | str = "cpu",
        seed: int | None = None,
        allocate: Allocate | None = None,
        extra_columns: Mapping[str, Space] | None = None,
        game_columns: Mapping[str, Space] | None = None,
        agents_per_game: int | None = None,
        deferred: bool = False,
        staged: bool = False,
    ):
        gamma, gae_lambda = check_discounts(gamma, gae_lambda)
        spaces = observation_space, action_space
        layout = plan_rollout(
            num_steps, num_envs, *spaces, autoreset_mode, extra_columns,
            game_columns=game_columns, agents_per_game=agents_per_game,
        )  # fmt: skip
        _check_mode_of_owner(allocate, layout)
        self.num_steps, self.num_envs = layout.num_steps, layout.num_envs
        self.observation_space, self.action_space = observation_space, action_space
        self.autoreset_mode = layout.autoreset_mode
        self.device = resolve_device(device)
        self.gamma, self.gae_lambda = gamma, gae_lambda
        self._layout = layout
        self._staged = staged or self.device.type != "cpu"
        with torch.inference_mode(False):  # the tensors outlive the mode they were made in
            self._storage = RolloutStorage(
                layout, self.device, staged=self._staged, allocate=allocate
            )
            self._name_tensors()
            self._deferred = self._make_deferred(seed) if deferred else None
        self._name_rows()
        self._gae_inputs = self._storage.gae_inputs()
        storage = self._storage
        self._rows = RolloutRows(
            observation_space, storage.obs, storage.columns, storage.extras, storage.games
        )
        self._sampler = MinibatchSampler(self._rows, seed, self._deferred)
        self._sequence_samplers: dict[tuple[str, ...], SequenceSampler] = {}
        self._is_computed = self._is_counted = False
        self._num_valid = self._num_episodes = 0
        self._remember(
            RolloutBuffer, num_steps, num_envs, observation_space, action_space,
            autoreset_mode=autoreset_mode, gamma=gamma, gae_lambda=gae_lambda, device=device,
            extra_columns=extra_columns, game_columns=game_columns,
            agents_per_game=agents_per_game, deferred=deferred, staged=staged,
        )  # fmt: skip

    def _make_deferred(self, seed: int | None) -> DeviceRows:
        if not self._storage.is_env_on_device:
            raise BufferMisuseError(
                "deferred=True is for envs on the buffer's device; pass allocate=envs.allocate of "
                "such and device=envs.device, or leave deferred out"
            )
        return DeviceRows(self._layout, self._storage, seed)

    def _name_tensors(self) -> None:
        storage = self._storage
        self.obs = storage.obs_tensor()
        self.actions = storage.tensor("actions")
        self.log_probs = storage.tensor("log_probs")
        self.values = storage.tensor("values")
        self.valid = storage.tensor("valid")
        self.valid_pages = storage.pages["valid"]
        uses_final = self._layout.uses_final_values
        self.final_values = storage.tensor("final_values") if uses_final else None
        self.advantages = storage.tensor("advantages")
        self.returns = storage.tensor("returns")
        self.extras = {**storage.extras, **storage.games}

    def _name_rows(self) -> None:
        self._obs_rows = self._storage.obs_rows
        self._slots = self._storage.slots
        self._pages, self._flags = self._storage.pages, self._storage.flags
        self._policy_rows = self._storage.policy_rows
        self._action_pages = self._storage.action_pages
        self._action_shape, self._action_dtype = self.actions.shape[1:], self.actions.dtype
        self._row_shape = self.log_probs.shape[1:]
        self._has_policy = bytearray(self.num_steps)
        self._has_extras = {name: bytearray(self.num_steps) for name in self.extras}
        self._is_uploaded = bytearray(self.num_steps + 1)
        # T while steps may be written, else 0: one comparison checks both the range and the time.
        self._open_steps = self._num_taken = 0  # the latter: steps whose slots were taken
        self._is_started = self._has_marks = False

    @staticmethod
    def nbytes_for(
        num_steps: int,
        num_envs: int,
        observation_space: Space,
        action_space: Space,
        *,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        extra_columns: Mapping[str, Space] | None = None,
        game_columns: Mapping[str, Space] | None = None,
        agents_per_game: int | None = None,
        staged: bool = False,
    ) -> int:
        """Bytes the constructor would allocate, batches not included; allocates nothing.

        >>> from gymnasium.spaces import Box, Discrete
        >>> RolloutBuffer.nbytes_for(128, 2048, Box(-1, 1, (52,)), Discrete(7))
        69677056
        """
        spaces = observation_space, action_space
        layout = plan_rollout(
            num_steps, num_envs, *spaces, autoreset_mode, extra_columns,
            game_columns=game_columns, agents_per_game=agents_per_game,
        )  # fmt: skip
        return layout.nbytes(staged)

    @property
    def nbytes(self) -> int:
        """Bytes held now, batches included."""
        return sum(self.memory().values())

    def memory(self) -> dict[str, int]:
        """Bytes held now by name of column, host and device together, and by "minibatches"."""
        sizes = {name: column.nbytes for name, column in self._storage.columns.items()}
        sizes["valid"] += self._storage.written_valid.nbytes
        samplers = self._sampler, *self._sequence_samplers.values()
        if self._deferred is not None:
            sizes["deferred"] = self._deferred.nbytes
        return {**sizes, "minibatches": sum(sampler.nbytes for sampler in samplers)}

    @property
    def num_valid(self) -> int:
        """Number of valid rows, which `minibatches` draws from; after `compute_advantages`."""
        if self._deferred is not None:
            return int(self._deferred.num_valid)
        self._require_computed("num_valid")
        return self._num_valid

    def start(self, obs: Any) -> None:
        """Begin with the observations of a reset of all environments; drops what was collected.

        Args:
            obs: (N, *obs_shape), nested like the observation space; copied.

        Raises:
            BufferMisuseError: Structure, shape or dtype does not fit; nothing was changed.
        """
        leaves = self._read_obs(obs)
        self._storage.wait_for_device()
        self._storage.write_obs(0, leaves)
        if self._deferred is not None:
            self._deferred.start()
            self._begin()
            return
        for name in ("over_before", "running_returns", "running_lengths"):
            self._pages[name].fill(0)
        self._pages["is_first"][0] = True
        self._begin()

    def _begin(self) -> None:
        """Open all steps for writing; the device has been waited for."""
        for marks in (self._has_policy, self._is_uploaded, *self._has_extras.values()):
            marks[:] = bytes(len(marks))
        self._has_marks = False  # rewards can be read until the first slot is taken
        if self._deferred is not None:
            self._deferred.begin()
        else:
            self._storage.mark_policy_outputs()
            self.valid_pages.fill(True)
            if self.final_values is not None:
                self._pages["has_final"].fill(False)
        self._open_steps, self._num_taken = self.num_steps, 0
        self._storage.begin_results()
        self._is_started = True
        self._stop_passes()
        self._is_computed = self._is_counted = False

    def _stop_passes(self) -> None:
        """Let no pass through minibatches go on."""
        for sampler in (self._sampler, *self._sequence_samplers.values()):
            sampler.passes.stop()

    def obs_at(self, t: int) -> Any:
        """Observations before step t, or after the last step for t = T.

        Returns:
            Tensors (N, *obs_shape) on `device`, nested like the space: views made once. On another
            device than the CPU this enqueues the copy from the host pages.

        Raises:
            BufferMisuseError: t is outside 0 .. T, or nothing was started.
        """
        if not (0 <= t <= self.num_steps and self._is_started):
            raise self._refusal("obs_at", t, self.num_steps)
        if self._staged and self._open_steps and not self._storage.is_env_on_device:
            self._storage.upload_obs(t)
            self._is_uploaded[t] = 1
        return self._obs_rows[t]

    def is_first_at(self, t: int) -> torch.Tensor:
        """Whether the observations before step t are the first of an episode, as after `start`.

        A recurrent policy forgets its state there, when it acts as when it learns. It follows from
        the flags of the steps before t, which must have been made. NEXT_STEP: the observation after
        the one that ended the episode. DISABLED: as if envs were reset right after the end.

        Where the env writes `slot(t).valid`, also the rows that did not act in the step before:
        those that begin to act in this step, and those that still do not. Under SAME_STEP and
        DISABLED an agent that was truncated observes the end of its life, unless
        `set_final_values` was given the value of that.

        Args:
            t: 0 to T; T for the values of the last observations.

        Returns:
            bool (N,) on `device`: a view, written anew by the next call for t.

        Raises:
            BufferMisuseError: t is outside 0 .. T, or nothing was started.
        """
        if not (0 <= t <= self.num_steps and self._is_started):
            raise self._refusal("is_first_at", t, self.num_steps)
        t = operator.index(t)
        if self._deferred is not None:
            return self._deferred.mark_first(t)
        self._mark_first(t)
        return self._storage.upload_first(t)

    def _mark_first(self, t: int) -> None:
        """Fill row t of `is_first`; row 0 is that of the last rollout's end."""
        pages = self._pages
        # Under NEXT_STEP there is a step in between, which only resets.
        last = t - 2 if self.autoreset_mode is AutoresetMode.NEXT_STEP else t - 1
        if last >= 0:
            if self._open_steps:
                self._storage.download_results(("terminations", "truncations"), last)
            flags = pages["terminations"][last], pages["truncations"][last]
            np.logical_or(*flags, out=pages["is_first"][t])
        elif t > 0:
            pages["is_first"][t] = pages["over_before"]
        if t > 0 and self._open_steps:
            self._storage.written_valid.download(slice(t - 1, t))
        acted = self._storage.written_valid.written_row(t - 1) if t > 0 else None
        if acted is not None:
            is_first = pages["is_first"][t]
            if self.autoreset_mode is not AutoresetMode.NEXT_STEP:
                np.logical_and(pages["truncations"][t - 1], pages["has_final"][t - 1], out=is_first)
                is_first |= pages["terminations"][t - 1]
            is_first |= ~acted

    def _read_obs(self, obs: Any) -> list[Any]:
        layout, device = self._layout, self.device
        if (  # nothing passes through the host
            self._storage.is_env_on_device
            and isinstance(obs, torch.Tensor)
            and isinstance(self.obs, torch.Tensor)
            and (obs.device, obs.dtype) == (device, self.obs.dtype)
            and obs.shape == self.obs.shape[1:]
        ):
            return [obs.detach()]
        return read_nest(
            "obs", obs, self.observation_space, layout.obs_leaves, self.num_envs, device
        )

    def write_obs(self, t: int, obs: Any) -> None:
        """Replace the observations before step t, as after resetting some envs under DISABLED.

        Args:
            t: 0 to T.
            obs: (N, *obs_shape) of all environments, nested like the observation space; copied.

        Raises:
            BufferMisuseError: t out of range, or obs does not fit; nothing was changed.
        """
        if not (0 <= t <= self.num_steps and self._open_steps):
            raise self._refusal("write_obs", t, self.num_steps)
        t = operator.index(t)  # what is equal to an integer indexes otherwise
        leaves = self._read_obs(obs)
        self._take_back_obs(t)
        self._storage.write_obs(t, leaves)

    def _take_back_obs(self, t: int) -> None:
        """Let the host pages of observations t be written that may be on their way to a device."""
        if self._is_uploaded[t]:
            self._storage.wait_for_device()
            self._is_uploaded[t] = 0

    def put(
        self,
        t: int,
        *,
        actions: Any = None,
        log_probs: Any = None,
        values: Any = None,
        **extras: Any,
    ) -> np.ndarray:
        """Copy what the policy made of the observations of step t.

        Extra columns that are known only after the step, such as costs, may come in a second call,
        without the policy's outputs.

        Args:
            t: 0 to T - 1.
            actions: (N, *action_shape), of the dtype of the action space or one that casts to it
                without changing kind. Like the others a tensor or an array; gradients are dropped.
            log_probs: float (N,), logarithms of the probabilities (densities) of the actions.
            values: float (N,), estimated values of the observations.
            extras: Extra columns by name, (N, ...), all of them or some; and game columns, one row
                per game.

        Returns:
            The actions as a NumPy view (N, *action_shape) of the host pages, for the environment.

        Raises:
            BufferMisuseError: t out of range, wrong shape or dtype, an unknown column, or the
                rollout is complete or was not started; nothing was changed.
        """
        if not 0 <= t < self._open_steps:
            raise self._refusal("put", t, self.num_steps - 1)
        row_shape, float32 = self._row_shape, torch.float32
        try:
            fits = (
                actions.dtype is self._action_dtype
                and log_probs.dtype is float32
                and values.dtype is float32
                and actions.shape == self._action_shape
                and log_probs.shape == row_shape
                and values.shape == row_shape
            )
        except AttributeError:  # neither tensors nor arrays
            fits = False
        read = self._read_extras(extras) if extras else None
        if not fits:
            if read and actions is None and log_probs is None and values is None:
                self._write_extras(t, read)
                return self._action_pages[t]
            given = {"actions": actions, "log_probs": log_probs, "values": values}
            if missing := [name for name, column in given.items() if column is None]:
                raise BufferMisuseError(
                    f"put({t}) was given no {' and no '.join(missing)}; expected actions, "
                    "log_probs and values together, or extra columns alone"
                )
            actions = read_tensor("actions", actions, self._action_shape, self._action_dtype)
            log_probs = read_tensor("log_probs", log_probs, row_shape, float32)
            values = read_tensor("values", values, row_shape, float32)
            # As they are stored: older torch copies several of mixed dtypes out of bounds.
            actions, log_probs, values = (
                given.to(row.dtype)
                for given, row in zip(
                    (actions, log_probs, values), self._policy_rows[t], strict=True
                )
            )
        if torch.is_grad_enabled():
            actions, log_probs, values = actions.detach(), log_probs.detach(), values.detach()
        # One call instead of three: with few environments calls take longer than the copying.
        foreach_copy(self._policy_rows[t], (actions, log_probs, values))
        if read:
            self._write_extras(t, read)
        self._has_policy[t] = 1
        if self._staged:
            self._storage.download_actions(t)
        return self._action_pages[t]

    def _read_extras(self, extras: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Extra columns of one step as tensors that fit."""
        read = {}
        for name, given in extras.items():
            column = self.extras.get(name)
            if column is None:
                declared = f"only {sorted(self.extras)}" if self.extras else "and none was declared"
                raise BufferMisuseError(
                    f"there is no extra column {name!r}, {declared}; name it in extra_columns or "
                    "game_columns of the constructor"
                )
            read[name] = read_tensor(name, given, column.shape[1:], column.dtype)
        return read

    def _write_extras(self, t: int, read: Mapping[str, torch.Tensor]) -> None:
        for name, column in read.items():
            self._storage.extra_rows[name][t].copy_(column)
            self._has_extras[name][t] = 1

    def env_actions(self, t: int) -> np.ndarray:
        """The actions of step t as a NumPy view (N, *action_shape) of the host pages.

        `put` returns them too; this is for actions written into `actions[t]` directly.

        Raises:
            BufferMisuseError: t is outside 0 .. T - 1, or the rollout is complete or not started.
        """
        if not 0 <= t < self._open_steps:
            raise self._refusal("env_actions", t, self.num_steps - 1)
        if self._staged:
            self._storage.download_actions(t)
        return self._action_pages[t]

    def slot(self, t: int) -> RolloutSlot:
        """Where the environment writes the results of step t.

        Observations go into row t + 1, the rest into row t. The views are made once and written
        anew in every rollout. Asking for a slot does not count as filling it: the first one taken
        in a rollout marks all rewards as not written (they read as NaN), and `compute_advantages`,
        `episodes` and `advance` refuse while such marks are left, as after an environment that
        raised. Take the slot again then, and step into it.

        Raises:
            BufferMisuseError: t is outside 0 .. T - 1, or the rollout is complete or not started.
        """
        if 0 <= t < self._open_steps:
            if not self._has_marks:
                (self._deferred or self._storage).mark_results()
                self._has_marks = True
            if self._staged and not self._storage.is_env_on_device:
                self._take_slot(operator.index(t))
            return self._slots[t]
        raise self._refusal("slot", t, self.num_steps - 1)

    def _take_slot(self, t: int) -> None:
        self._take_back_obs(t + 1)
        if t < self._num_taken:
            self._storage.forget_step(t)
        self._num_taken = max(self._num_taken, t + 1)

    def set_final_values(self, t: int, env_ids: Any, values: Any) -> None:
        """Give the values of the observations that episodes truncated in step t ended with.

        Args:
            t: 0 to T - 1.
            env_ids: int (K,), the environments; or a mask bool (N,), as `infos["_final_obs"]`. A
                tensor on a device is waited for, unless the buffer is deferred.
            values: float (K,), estimated values of their final observations. Of a deferred buffer,
                for which the mask is a tensor on the device: (N,), of which those are taken.

        Raises:
            BufferMisuseError: t out of range, env_ids or values do not fit, or the mode is
                NEXT_STEP, where the final observation is the next row and has its value already.
                Nothing was changed.
        """
        if not 0 <= t < self._open_steps:
            raise self._refusal("set_final_values", t, self.num_steps - 1)
        if self.final_values is None:
            raise BufferMisuseError(
                "set_final_values is not for autoreset NEXT_STEP: there the final observation is "
                "the next row, and values[t + 1] its value; leave the call out"
            )
        t = operator.index(t)
        if env_ids is None:
            raise BufferMisuseError(
                "env_ids is None, expected the envs whose episodes were truncated: their ids, or a "
                'mask such as infos["_final_obs"]'
            )
        if self._deferred is not None and self._is_mask_there(env_ids):
            found = read_tensor("values", values, self._row_shape, torch.float32)
            given = found.detach().to(self.device, torch.float32)
            self._deferred.set_final_values(t, env_ids, given)
            return
        ids = read_distinct_ids(env_ids, self.num_envs, self.device)
        found = read_tensor("values", values, (len(ids),), torch.float32)
        where = torch.from_numpy(ids).to(self.device)
        self.final_values[t].index_copy_(0, where, found.to(self.device, torch.float32))
        if self._deferred is not None and self._deferred.has_final is not None:
            self._deferred.has_final[t].index_fill_(0, where, True)
        else:
            self._pages["has_final"][t, ids] = True

    def _is_mask_there(self, mask: Any) -> bool:
        """Whether it is a mask bool (N,) on the device."""
        is_tensor = isinstance(mask, torch.Tensor) and mask.device == self.device
        return is_tensor and mask.dtype == torch.bool and mask.shape == self._row_shape

    def advance(self) -> None:
        """Begin the next rollout where this one ended: its last observations become the first.

        Log_probs and values are marked as not written; `obs`, `rewards`, flags, `advantages` and
        `returns` can be read until they are written anew.

        Raises:
            BufferMisuseError: An environment has not written a step yet; nothing was changed.
        """
        if self._deferred is not None:
            self._require_started("advance")
            self._deferred.advance()
            self._storage.write_obs(0, self._storage.last_obs())
            self._begin()
            return
        self._episodes()  # carries the sums of unfinished episodes on
        self._storage.wait_for_device()
        pages = self._pages
        self._storage.write_obs(0, self._storage.last_obs())
        self._mark_first(self.num_steps)
        terminations, truncations = pages["terminations"], pages["truncations"]
        np.logical_or(terminations[-1], truncations[-1], out=pages["over_before"])
        self._begin()
        pages["is_first"][0] = pages["is_first"][-1]  # which is not on its way to a device now

    def compute_advantages(self, last_values: Any, *, policy_outputs: bool = True) -> None:
        """Fill `valid`, `advantages` and `returns`; the rollout is complete after this.

        It may be called again, say after writing new `values`.

        Args:
            last_values: float (N,), values of `obs_at(T)`.
            policy_outputs: False if the rollout needs no actions, log_probs and values: those that
                were not written are zero then, instead of an error.

        Raises:
            BufferMisuseError: Steps without results or policy outputs, a reward that is not finite,
                wrong shape or dtype, or a truncated episode without final value. The rollout can be
                continued.
        """
        self._require_started("compute_advantages")
        last = read_tensor("last_values", last_values, self._row_shape, torch.float32)
        self._compute(last, policy_outputs)

    def _compute(self, last: torch.Tensor, policy_outputs: bool) -> None:
        if self._deferred is not None:
            self._compute_deferred(self._deferred, last, policy_outputs)
            return
        self._require_results("compute_advantages")
        if policy_outputs:
            self._require_policy_outputs("compute_advantages")
        self._require_final_values()
        self._clear_policy_marks()
        self.values[-1].copy_(last)
        self._fill_final_values()
        if self._staged:
            self._fill_on_device()
        else:
            self._fill_on_host()
        rows = self._pages["rows"]
        self._stop_passes()
        self._num_valid = int(collect_rows(self._flags["valid"].reshape(-1), rows))
        self._is_computed = True
        self._open_steps = 0  # until the next rollout begins

    def _compute_deferred(self, rows: DeviceRows, last: torch.Tensor, policy_outputs: bool) -> None:
        if not policy_outputs:
            self._clear_marks()
        self.values[-1].copy_(last)
        rows.complete()
        results = self.advantages, self.returns
        fill_advantages_there(self._gae_inputs, *results, self.gamma, self.gae_lambda)
        self._stop_passes()
        self._is_computed = True
        self._open_steps = 0

    def _fill_on_host(self) -> None:
        outputs = self._pages["advantages"], self._pages["returns"]
        decay = np.float32(self.gamma * self.gae_lambda)
        fill_advantages(*self._gae_inputs, np.float32(self.gamma), decay, *outputs)

    def _fill_on_device(self) -> None:
        for t in range(self.num_steps + 1):
            if not self._is_uploaded[t]:
                self._storage.upload_obs(t)
        for name in ("rewards", "terminations", "truncations"):
            self._storage.upload_result(name, self.num_steps)
        self._storage.upload("valid")
        results = self.advantages, self.returns
        fill_advantages_there(self._gae_inputs, *results, self.gamma, self.gae_lambda)

    def check(self) -> None:
        """Wait, and raise what `compute_advantages` of a deferred buffer has found since last time.

        Other buffers raise at once; for them this does nothing.

        Raises:
            BufferMisuseError: As `compute_advantages` says, of the first row that lacks something.
        """
        if self._deferred is None:
            return
        rows = self._deferred.faults.tolist()
        found = [(kind, row) for kind, row in enumerate(rows) if row < len(self._pages["rows"])]
        if not found:
            return
        self._deferred.forget_faults()
        kind, row = found[0]
        t, env_id = divmod(row, self.num_envs)
        if kind == NO_FINAL:
            raise _missing_final(t, env_id)
        what = {
            NO_RESULTS: "no results; step the environment into slot(t) for each step",
            WRONG_REWARD: "a reward that is not finite; find what makes it, or clear "
            f"valid[{t}, {env_id}]",
            NO_LOG_PROBS: "no log_probs; call put(t, ...) for every step",
            NO_VALUES: "no values; call put(t, ...) for every step",
            NO_VALID: "no valid; an env that writes into slot(t).valid must write all its rows",
        }
        raise BufferMisuseError(
            f"env {env_id} in step {t} had {what[kind]}. This is said later, as the buffer is "
            "deferred: the advantages of that rollout were wrong"
        )

    def _require_final_values(self) -> None:
        if self.final_values is None:
            return
        if self._has_written_valid():
            self._require_final_values_of_games()
            return
        names = ("terminations", "truncations", "valid", "has_final")
        row = int(first_missing_final(*(self._flags[name].reshape(-1) for name in names)))
        if row >= 0:
            raise _missing_final(*divmod(row, self.num_envs))

    def _require_final_values_of_games(self) -> None:
        """The same where an agent's final observation is the next row, if its game goes on.

        An agent that acts in the next step again was in a game that was reset, so that its next row
        has another observation; in the last step that is not known.
        """
        pages, acts = self._pages, self._storage.written_valid.allocated()
        is_cut = pages["truncations"] & ~pages["terminations"] & self.valid_pages
        missing = np.argwhere((is_cut & ~pages["has_final"])[:-1] & acts[1:])
        if len(missing):
            raise _missing_final(*missing[0].tolist())

    def _fill_final_values(self) -> None:
        """Take the next rows' values for those that were not given, if agents' games go on."""
        if self.final_values is None or not self._has_written_valid():
            return
        is_given = torch.from_numpy(self._pages["has_final"]).to(self.device)
        torch.where(is_given, self.final_values, self.values[1:], out=self.final_values)

    def count_episodes(self) -> None:
        """Add up the episodes for `episodes`, which, or `compute_advantages`, does it otherwise.

        Call it before rewards are changed that are to count as they came. A deferred buffer does
        not wait for it.

        Raises:
            BufferMisuseError: As `episodes`.
        """
        self._require_started("count_episodes")
        if self._deferred is not None:
            self._deferred.count_episodes()
        else:
            self._episodes()

    def episodes(self) -> EpisodeStats:
        """Returns and lengths of the episodes that ended in this rollout, wherever they began.

        Rewards are added up across rollouts from `start` on, as they are when this is called, or
        `count_episodes`. Of a deferred buffer they are those that were counted last. Dead steps
        and rows left out of `valid` do not count, and an episode ending in a row left out by the
        user is dropped.

        Raises:
            BufferMisuseError: An environment has not written a step yet, or a reward is not finite.
        """
        return self._episodes()

    def _episodes(self) -> EpisodeStats:
        self._require_started("episodes")
        if self._deferred is not None:
            ended = self._deferred.ended
            found = self._deferred.returns[ended], self._deferred.lengths[ended]
            return EpisodeStats(*(tensor.cpu().numpy() for tensor in found))
        pages, flags = self._pages, self._flags
        returns, lengths = pages["episode_returns"], pages["episode_lengths"]
        if not self._is_counted:
            self._require_results("episodes")
            self._num_episodes = finished_episodes(
                pages["rewards"],
                flags["terminations"],
                flags["truncations"],
                flags["valid"],
                pages["running_returns"],
                pages["running_lengths"],
                returns,
                lengths,
            )
            self._is_counted = True
        return EpisodeStats(returns[: self._num_episodes], lengths[: self._num_episodes])

    def minibatches(
        self,
        num_minibatches: int | None = None,
        *,
        batch_size: int | None = None,
        fixed: bool = False,
        normalize_advantages: bool = False,
        columns: Iterable[str] | None = None,
    ) -> Iterator[RolloutBatch]:
        """Go once through all valid rows in random order.

        The batches of one pass differ in size by one row at most, also where the number of valid
        rows is no multiple: none is left with a few rows only.

        With `fixed` all batches of all rollouts have one size instead, so that a compiled learner
        sees one shape: `batch_size`, or T * N / num_minibatches rounded up. Valid rows are spread
        as evenly as without, and some of a batch are repeated, evenly too, to fill it.
        `batch.weights` float32 (B,) is 1 where a row comes first and 0 where it is repeated, so
        that means are ``(weights * x).sum() / weights.sum()``; one of a batch is 1 at least.
        Without `fixed` weights are None.

        Args:
            num_minibatches: Number of batches, 1 to T * N; fewer if there are fewer valid rows.
            batch_size: Instead: the largest size of a batch, 1 to T * N.
            fixed: Make all batches of one size.
            normalize_advantages: Subtract from a batch's advantages their mean, and divide them by
                their standard deviation (unbiased, + 1e-8), over its rows of weight 1. By
                minibatch, as in baselines, CleanRL and stable-baselines3; `rollout.advantages`
                remain as they are.
            columns: Names of the columns to gather, extra and game columns among them, such as
                ("obs", "actions"); None for all. `indices`, and `weights` with `fixed`, always
                come. The rows are the same whatever columns are named.

        Yields:
            Batches in memory of their own: it is used again once nobody refers to a batch or to a
            part of it any more, so `list(...)` may keep them all. One pass at a time: beginning
            another shuffles the rows anew, and going on with the first then is an error.

        Raises:
            BufferMisuseError: `compute_advantages` has not been called, not exactly one number
                is given, or there is no such column; or, at the next batch, another pass or
                rollout has begun.
            BufferMemoryError: Memory for the batches is missing.
        """
        self._require_computed("minibatches")
        if self._deferred is not None and not fixed:
            raise BufferMisuseError(
                "a deferred buffer does not know how many rows are valid: pass fixed=True"
            )
        plan = self._sampler.plan(
            num_minibatches, batch_size, self._num_valid,
            fixed=fixed, normalizes=normalize_advantages, columns=columns,
        )  # fmt: skip
        return self._sampler.draw(plan)

    def sequences(
        self,
        num_minibatches: int | None = None,
        *,
        batch_size: int | None = None,
        length: int | None = None,
        initial_states: Sequence[str] = (),
        normalize_advantages: bool = False,
        columns: Iterable[str] | None = None,
    ) -> Iterator[RolloutSequenceBatch]:
        """Go once through the rollout in sequences of steps of one environment, in random order.

        The rollout is cut every `length` steps. All batches of all rollouts have the same shape,
        (length, sequences of a batch, ...): where a sequence is shorter its last step is repeated,
        and where sequences are too few for the batches some are repeated (of a deferred buffer also
        if there are fewer than batches: the host does not know). `batch.weights` float32
        (L, S) is 0 there and where rows are not valid (the step of NEXT_STEP that only resets), and
        1 elsewhere. Sequences without valid row are left out, so that each batch has a weight of 1.

        Args:
            num_minibatches: Number of batches, 1 to the number of sequences; fewer if there are
                fewer with valid rows.
            batch_size: Instead: the number of sequences of a batch.
            length: L, 1 to T; None for T, which splits the rollout by environments.
            initial_states: Names of extra columns that hold the state of the policy before each
                step: of these a batch has the first rows only, (S, ...), in `initial_states`
                instead of `extras`.
            normalize_advantages: As in `minibatches`, over the rows of weight 1.
            columns: As in `minibatches`; `is_first`, `weights` and `initial_states` always come.

        Yields:
            Batches with `is_first` bool (L, S): where True the policy begins with a new state.
            Their memory is like that of `minibatches`; one pass at a time.

        Raises:
            BufferMisuseError: `compute_advantages` has not been called, a number is out of range,
                there is no such column; or, at the next batch, another pass or rollout has begun.
            BufferMemoryError: Memory for the batches is missing.
        """
        self._require_computed("sequences")
        names = (initial_states,) if isinstance(initial_states, str) else tuple(initial_states)
        for name in names:
            if name not in self._storage.extras:
                raise BufferMisuseError(
                    f"initial_states has {name!r}, expected names of extra columns, which are "
                    f"{sorted(self._storage.extras)}; name it in extra_columns of the constructor"
                )
        sampler = self._sequence_samplers.get(names)
        if sampler is None:
            sampler = self._sequence_samplers[names] = SequenceSampler(
                self._rows,
                names,
                valid=self._flags["valid"],
                generator=self._sampler.generator,
                deferred=self._deferred,
            )
        plan = sampler.plan(
            num_minibatches, batch_size, length, normalizes=normalize_advantages, columns=columns
        )
        if self._deferred is not None:
            self._deferred.mark_all_first()
            return sampler.draw(plan)
        for t in range(self.num_steps + 1):
            self._mark_first(t)
        self._storage.upload("is_first")
        return sampler.draw(plan)

    def _require_started(self, method: str) -> None:
        if not self._is_started:
            raise self._refusal(method, 0, 0)

    @property
    def generator(self) -> torch.Generator | None:
        """Of a deferred buffer the generator of minibatches, to register with a CUDA graph."""
        return None if self._deferred is None else self._deferred.generator.torch

    def _has_any_results(self) -> bool:
        """Whether anything was written into a slot since the rollout began."""
        if self._has_marks:
            self._storage.download_results(("rewards",))
        return self._has_marks and bool((self._storage.reward_bits != UNWRITTEN).any())

    def _require_results(self, method: str) -> None:
        """Raise unless every environment has written every step, with a finite reward where valid.

        Complete `valid` between the two: flags of steps that nobody wrote must not clear it.
        """
        self._storage.download_results()
        bits = self._storage.reward_bits
        if self._has_marks and are_all_finite(bits.reshape(-1)):
            self._mark_valid()
            return
        unwritten = (bits == UNWRITTEN) | (not self._has_marks)  # no slot was taken
        if unwritten.any():
            raise BufferMisuseError(
                f"{method} needs all {self.num_steps} steps, but {_missing_rows(unwritten)} no "
                "results; step the environment into slot(t) for each of them"
            )
        self._mark_valid()
        rewards = self._pages["rewards"]
        wrong = np.argwhere(~np.isfinite(rewards) & self.valid_pages)
        if len(wrong):
            t, env_id = wrong[0].tolist()
            raise BufferMisuseError(
                f"{method}: the reward of env {env_id} in step {t} is {rewards[t, env_id]}, "
                "expected finite numbers; find what makes it, or leave the row out by "
                f"valid_pages[{t}, {env_id}] = False"
            )

    def _mark_valid(self) -> None:
        """Clear `valid` in dead steps; elements the user cleared stay so."""
        if self.autoreset_mode is AutoresetMode.NEXT_STEP:
            flags = self._flags
            mark_dead_steps(
                flags["terminations"], flags["truncations"], flags["over_before"], flags["valid"]
            )
        if self._has_written_valid():
            self.valid_pages &= self._storage.written_valid.allocated()

    def _has_written_valid(self) -> bool:
        """Whether the env has written which rows acted.

        Raises:
            BufferMisuseError: In some steps only, or of some envs.
        """
        flags = self._storage.written_valid.flags
        if flags is None:
            return False
        unwritten = flags == UNWRITTEN_FLAG
        if unwritten.any() and not unwritten.all():
            raise BufferMisuseError(
                f"{_missing_rows(unwritten)} no valid, but others have; an env that writes into "
                "slot(t).valid must write all its rows in every step"
            )
        return not unwritten.any()

    def _require_policy_outputs(self, method: str) -> None:
        """Raise unless every step went through `put`, or was written into the columns directly.

        Only steps that did not go through `put` are looked for; on another device than the CPU that
        waits for the device.
        """
        advice = (
            f"call put(t, actions=..., log_probs=..., values=...) for every step; {method}(..., "
            "policy_outputs=False) takes zeros where nothing was written"
        )
        if 0 in self._has_policy:
            # Values are needed in dead steps too, as those of final observations.
            is_valued = np.ones_like(self.valid_pages)
            if self._has_written_valid():
                is_valued[:] = self.valid_pages
                is_valued[1:] |= self.valid_pages[:-1]
            is_needed = {"log_probs": self.valid_pages, "values": is_valued}
            for (name, needed), bits in zip(
                is_needed.items(), self._storage.policy_bits, strict=True
            ):
                marks = (bits[: self.num_steps] == UNWRITTEN).cpu().numpy()
                if (marks & needed).any():
                    missing = _missing_rows(marks & needed, ~needed)
                    raise BufferMisuseError(f"{method}: {missing} no {name}; {advice}")
        for name, marks in self._has_extras.items():
            if 0 in marks and 1 in marks:  # none at all: written into `extras` directly
                raise BufferMisuseError(
                    f"{method}: {_missing_steps(marks)} no {name}, but others have; pass "
                    f"{name}=... to put(t, ...) for every step"
                )

    def _clear_policy_marks(self) -> None:
        """Let log_probs and values that were not written, and need not be, be zero."""
        if 0 in self._has_policy:
            self._clear_marks()

    def _clear_marks(self) -> None:
        for bits in self._storage.policy_bits:
            bits.masked_fill_(bits == UNWRITTEN, 0)

    def _refusal(self, method: str, t: Any, last: int) -> BufferMisuseError:
        """The error for a call with a step out of range or at the wrong time."""
        if not self._is_started:
            return BufferMisuseError(
                f"{method} before the first rollout; call start(obs) with the observations of a "
                "reset first"
            )
        if 0 <= t <= last:
            return BufferMisuseError(
                f"{method}: this rollout is complete; call advance() to go on where it ended, or "
                "start(obs) after a reset"
            )
        return BufferMisuseError(f"{method}: step {t} is out of range, expected 0 to {last}")

    def _require_computed(self, method: str) -> None:
        # Of a deferred buffer it may be a graph that has computed them.
        if not self._is_computed and self._deferred is None:
            raise BufferMisuseError(
                f"{method} needs a complete rollout; call compute_advantages(last_values) first"
            )

    def _check_copyable(self) -> None:
        if self._storage.is_env_on_device:
            raise BufferMisuseError(
                "this rollout's memory is that of an env on the device; load its state_dict() into "
                "a buffer made for the other env instead of copying it"
            )

    def _copied_state(self) -> dict[str, Any]:
        columns = self._storage.columns.items()
        marks = {
            "has_policy": bytes(self._has_policy),
            "has_extras": {name: bytes(marks) for name, marks in self._has_extras.items()},
            "is_uploaded": bytes(self._is_uploaded),
        }
        counts = {name: getattr(self, name) for name in _COUNTS}
        pages = {name: column.copied_pages() for name, column in columns}
        return {
            "columns": pages,
            "written_valid": self._storage.written_valid.flags,
            **marks,
            "counts": counts,
            "shuffle": self._sampler.generator.words,
        }

    def _take_copied_state(self, state: dict[str, Any]) -> None:
        for name, pages in state["columns"].items():
            self._storage.columns[name].take_copied_pages(pages)
        if state["written_valid"] is not None:
            self._storage.written_valid.allocated().view(np.uint8)[:] = state["written_valid"]
        self._has_policy[:] = state["has_policy"]
        self._is_uploaded[:] = state["is_uploaded"]
        for name, marks in state["has_extras"].items():
            self._has_extras[name][:] = marks
        for name, count in state["counts"].items():
            setattr(self, name, count)
        self._sampler.generator.words[:] = state["shuffle"]

    def state_dict(self) -> dict[str, Any]:
        """What the next rollout starts from: random state, observations, unfinished episodes.

        Only tensors, numbers, strings and a dict, all copies, so that `torch.save` and safe loading
        work. Steps are not saved: call it between rollouts, right after `advance` or `start`.

        Raises:
            BufferMisuseError: A rollout is in progress or complete, or none was started.
        """
        return super().state_dict()

    def _described(self) -> dict[str, Any]:
        if not self._open_steps or any(self._has_policy) or self._has_any_results():
            raise BufferMisuseError(
                "state_dict is possible between rollouts only; call it right after advance() or "
                "start(obs)"
            )
        key, counter = self._sampler.generator.words.tolist()
        shuffle = key | counter << 64
        return {"version": _STATE_VERSION, "settings": self._settings(), "shuffle": shuffle}

    def _settings(self) -> dict[str, Any]:
        """Settings that a state must share with the buffer it is loaded into."""
        _, _, made = self._made_by  # gamma and lambda may have been changed since
        settings = {name: made[name] for name in ("gamma", "gae_lambda")}
        return {"autoreset_mode": self.autoreset_mode.value, **settings}

    def _check_described(self, meta: Mapping[str, Any]) -> None:
        version, shuffle = meta.get("version"), meta.get("shuffle")
        if type(version) is not int or version != _STATE_VERSION or shuffle is None:
            raise BufferMisuseError(
                f"state has version {version!r:.99}, expected {_STATE_VERSION}; pass what "
                "state_dict() returned"
            )
        if type(shuffle) is not int or not 0 <= shuffle < 2**128:
            raise BufferMisuseError(f"state holds {shuffle!r:.99} for shuffle, expected 128 bits")
        own = self._settings()
        made = meta.get("settings", own)  # those of the first release have none
        check_settings(made if isinstance(made, Mapping) else {"settings": made}, own)

    def _carried(self) -> dict[str, np.ndarray]:
        """What the next rollout starts from, as views."""
        storage = self._storage
        obs = [pages[0] for pages in storage.obs_pages]
        if storage.is_env_on_device:
            obs = [column.tensor[0].cpu().numpy() for column in storage.obs]
        leaves = zip(self._layout.obs_leaves, obs, strict=True)
        rows = {name: self._pages[name] for name in _CARRIED}
        rows["is_first"] = self._pages["is_first"][0]
        if self._deferred is not None:
            rows = {**self._deferred.carry(), "order": self._deferred.generator.get_state()}
        return {**rows, **{leaf.path: row for leaf, row in leaves}}

    def _saved_arrays(self) -> dict[str, list[Block]]:
        return {name: [row] for name, row in self._carried().items()}

    def _wanted_arrays(self) -> Wanted:
        return {name: (row.dtype, row.shape) for name, row in self._carried().items()}

    def _check_arrays(self, state: LoadedState) -> None:
        for name, row in state.small.items():
            if row.dtype == np.bool_:
                check_bools(name, [row])
        if state.small["running_lengths"].min(initial=0) < 0:
            raise contradiction("it has negative running_lengths")
        if self._deferred is not None and not self._deferred.generator.accepts_state(
            state.small["order"]
        ):
            raise other_generator()

    def _take(self, state: LoadedState) -> None:
        shuffle = state.meta["shuffle"]
        self._storage.wait_for_device()
        for name, row in self._carried().items():
            row[...] = state.small[name]
        if self._deferred is not None:
            self._deferred.take_carry(state.small)
            self._deferred.generator.set_state(state.small["order"])
        if self._storage.is_env_on_device:
            paths = [leaf.path for leaf in self._layout.obs_leaves]
            self._storage.write_obs(0, [np.array(state.small[path]) for path in paths])
        self._sampler.generator.words[:] = shuffle % 2**64, shuffle >> 64
        self._begin()


def _check_mode_of_owner(allocate: Allocate | None, layout: RolloutLayout) -> None:
    """Raise BufferMisuseError if `allocate` is a method of a vector env of another mode."""
    envs = getattr(allocate, "__self__", None)
    metadata = getattr(envs, "metadata", None)
    given = metadata.get("autoreset_mode") if isinstance(metadata, Mapping) else None
    if given is not None and (mode := parse_autoreset_mode(given)) is not layout.autoreset_mode:
        raise BufferMisuseError(
            f"autoreset_mode is {layout.autoreset_mode.value!r}, but {type(envs).__name__}, whose "
            f"allocate was given, has {mode.value!r}; pass autoreset_mode=envs.autoreset_mode"
        )


def _missing_final(t: int, env_id: int) -> BufferMisuseError:
    """The error for a truncated episode without the value of its final observation."""
    return BufferMisuseError(
        f"env {env_id} was truncated in step {t}, but the value of its final observation "
        f"is missing; call set_final_values({t}, [{env_id}], values) with the value of "
        f"infos['final_obs'][{env_id}] (under DISABLED: of the observation before reset)"
    )


def _missing_steps(marks: bytearray) -> str:
    """The steps without a mark, as the start of a clause.

    >>> _missing_steps(bytearray([1, 0, 0]))
    'steps 1, 2 have'
    """
    return f"steps {_few([t for t, is_there in enumerate(marks) if not is_there])} have"


def _missing_rows(is_missing: np.ndarray, is_ignored: np.ndarray | bool = False) -> str:
    """The steps where rows bool (T, N) are missing, as the start of a clause.

    >>> _missing_rows(np.array([[True, True], [False, False], [True, True]]))
    'steps 0, 2 have'
    >>> _missing_rows(np.array([[False, False, False], [True, False, True]]))
    'envs 0, 2 in step 1 have'
    """
    steps = np.flatnonzero(is_missing.any(axis=1)).tolist()
    partial = [t for t in steps if not (is_missing | is_ignored)[t].all()]
    if partial:
        env_ids = np.flatnonzero(is_missing[partial[0]])
        return f"envs {_few(env_ids.tolist())} in step {partial[0]} have"
    return f"steps {_few(steps)} have"


def _few(numbers: list[int]) -> str:
    """The first numbers of a list, and how many more there are.

    >>> _few([4, 5])
    '4, 5'
    >>> _few(list(range(100)))
    '0, 1, 2, 3, 4 and 95 more'
    """
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    return f"{', '.join(map(str, numbers[:5]))}{more}"
