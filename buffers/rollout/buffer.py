"""RolloutBuffer: the steps of one on-policy update, in memory that is allocated once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from buffers.core.columns import Allocate
from buffers.core.copies import Rebuilt
from buffers.core.errors import BufferMisuseError
from buffers.core.guard import Guard, exclusive
from buffers.rollout.gae import fill_advantages_torch
from buffers.rollout.gae_arguments import check_discounts
from buffers.rollout.gae_kernels import fill_advantages
from buffers.rollout.input import read_field
from buffers.rollout.kernels import (
    collect_rows,
    finished_episodes,
    first_missing_final,
)
from buffers.rollout.layout import plan_rollout
from buffers.rollout.minibatches import MinibatchSampler, RolloutBatch
from buffers.rollout.state import restore_rollout_state, rollout_state
from buffers.rollout.steps import RolloutSteps

__all__ = ["EpisodeStats", "RolloutBuffer"]

_BATCH_FIELDS = ("actions", "log_probs", "values", "advantages", "returns")

_COUNTS = (
    *("gamma", "gae_lambda", "_is_started", "_open_steps", "_has_marks"),
    *("_is_computed", "_is_counted", "_num_valid", "_num_episodes"),
)


class EpisodeStats(NamedTuple):
    """The episodes that ended in a rollout, in order of time; valid until `advance` or `start`."""

    returns: np.ndarray  # float64 (K,), undiscounted sums of rewards
    lengths: np.ndarray  # int64 (K,), numbers of steps


class RolloutBuffer(RolloutSteps, Rebuilt):
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

    With a device other than the CPU the environment still writes into host pages (pinned, unless
    `allocate` supplied them). `obs_at` enqueues the copy of one row, `compute_advantages` that of
    rewards and flags; `put` and `env_actions` wait for the device, as the environment needs the
    actions, and `minibatches` waits once to send the order of rows.

    Attributes:
        obs: (T + 1, N, *obs_shape), nested like the space. Like all below a tensor on `device`, and
            on the CPU over the same memory as the slots. Write into it; putting another in its
            place has no effect.
        actions: (T, N, *action_shape), of the dtype of the space.
        log_probs: float32 (T, N).
        values: float32 (T + 1, N).
        rewards: float32 (T, N).
        terminations: bool (T, N).
        truncations: bool (T, N).
        valid: bool (T, N), complete after `compute_advantages`.
        valid_pages: The same as a NumPy array of host pages, for rows to leave out.
        final_values: float32 (T, N), or None under NEXT_STEP.
        advantages: float32 (T, N).
        returns: float32 (T, N), advantages + values.
        extras: The extra columns by name, (T, N, ...).

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
        allocate: `envs.allocate`, so that the environment can write without a copy: called with
            (shape, dtype) for observations, actions, rewards and flags. None for own memory.
        extra_columns: Names and spaces of further values per step, such as costs: `put` writes
            them, batches have them in `extras`.
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
        staged: bool = False,
    ):
        gamma, gae_lambda = check_discounts(gamma, gae_lambda)
        self._guard = Guard()
        super().__init__(
            num_steps,
            num_envs,
            observation_space,
            action_space,
            autoreset_mode=autoreset_mode,
            device=device,
            allocate=allocate,
            staged=staged,
            extra_columns=extra_columns,
        )
        self.gamma, self.gae_lambda = gamma, gae_lambda
        self._gae_inputs = self._storage.gae_inputs()
        storage = self._storage
        self._sampler = MinibatchSampler(
            observation_space,
            storage.obs,
            storage.column_list(_BATCH_FIELDS),
            storage.extras,
            storage.columns["rows"],
            seed,
        )
        self._is_computed = self._is_counted = False
        self._num_valid = self._num_episodes = 0
        self._remember(
            RolloutBuffer, num_steps, num_envs, observation_space, action_space,
            autoreset_mode=autoreset_mode, gamma=gamma, gae_lambda=gae_lambda, device=device,
            extra_columns=extra_columns, staged=staged,
        )  # fmt: skip

    @staticmethod
    def nbytes_for(
        num_steps: int,
        num_envs: int,
        observation_space: Space,
        action_space: Space,
        *,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        extra_columns: Mapping[str, Space] | None = None,
        staged: bool = False,
    ) -> int:
        """Bytes the constructor would allocate, batches not included; allocates nothing.

        >>> from gymnasium.spaces import Box, Discrete
        >>> RolloutBuffer.nbytes_for(128, 2048, Box(-1, 1, (52,)), Discrete(7))
        69412864
        """
        spaces = observation_space, action_space
        layout = plan_rollout(num_steps, num_envs, *spaces, autoreset_mode, extra_columns)
        return layout.nbytes(staged)

    @property
    def nbytes(self) -> int:
        """Bytes held now, batches included."""
        return sum(self.memory().values())

    def memory(self) -> dict[str, int]:
        """Bytes held now by name of column, host and device together, and by "minibatches"."""
        sizes = {name: column.nbytes for name, column in self._storage.columns.items()}
        return {**sizes, "minibatches": self._sampler.nbytes}

    @property
    def num_valid(self) -> int:
        """Number of valid rows, which `minibatches` draws from; after `compute_advantages`."""
        self._require_computed("num_valid")
        return self._num_valid

    @exclusive
    def advance(self) -> None:
        """Begin the next rollout where this one ended: its last observations become the first.

        Log_probs and values are marked as not written; `obs`, `rewards`, flags, `advantages` and
        `returns` can be read until they are written anew.

        Raises:
            BufferMisuseError: An environment has not written a step yet; nothing was changed.
        """
        self._episodes()  # carries the sums of unfinished episodes on
        columns = self._storage.columns
        self._storage.write_obs(0, [column.host[-1] for column in self._storage.obs])
        terminations, truncations = columns["terminations"].host, columns["truncations"].host
        np.logical_or(terminations[-1], truncations[-1], out=columns["over_before"].host)
        self._begin()

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
        last = read_field("last_values", last_values, self._row_shape, torch.float32)
        self._compute(last, policy_outputs)

    @exclusive
    def _compute(self, last: torch.Tensor, policy_outputs: bool) -> None:
        self._require_results("compute_advantages")
        if policy_outputs:
            self._require_policy_outputs("compute_advantages")
        self._require_final_values()
        if not policy_outputs:
            self._clear_policy_marks()
        self.values[-1].copy_(last)
        if self._staged:
            self._fill_on_device()
        else:
            self._fill_on_host()
        rows = self._storage.columns["rows"].host
        self._sampler.stop()
        self._num_valid = int(collect_rows(self._storage.flags("valid").reshape(-1), rows))
        self._is_computed = True
        self._complete()

    def _fill_on_host(self) -> None:
        columns = self._storage.columns
        outputs = columns["advantages"].host, columns["returns"].host
        decay = np.float32(self.gamma * self.gae_lambda)
        fill_advantages(*self._gae_inputs, np.float32(self.gamma), decay, *outputs)

    def _fill_on_device(self) -> None:
        for t in range(self.num_steps + 1):
            if not self._is_uploaded[t]:
                self._storage.upload_obs(t)
        self._storage.upload_results()
        results = self.advantages, self.returns
        fill_advantages_torch(self._gae_inputs, *results, self.gamma, self.gae_lambda)

    def _require_final_values(self) -> None:
        if not self._layout.uses_final_values:
            return
        names = ("terminations", "truncations", "valid", "has_final")
        row = int(first_missing_final(*(self._storage.flags(name).reshape(-1) for name in names)))
        if row >= 0:
            t, env_id = divmod(row, self.num_envs)
            raise BufferMisuseError(
                f"env {env_id} was truncated in step {t}, but the value of its final observation "
                f"is missing; call set_final_values({t}, [{env_id}], values) with the value of "
                f"infos['final_obs'][{env_id}] (under DISABLED: of the observation before reset)"
            )

    @exclusive
    def episodes(self) -> EpisodeStats:
        """Returns and lengths of the episodes that ended in this rollout, wherever they began.

        Rewards are added up across rollouts from `start` on. Dead steps and rows left out of
        `valid` do not count, and an episode ending in a row left out by the user is dropped.

        Raises:
            BufferMisuseError: An environment has not written a step yet, or a reward is not finite.
        """
        return self._episodes()

    def _episodes(self) -> EpisodeStats:
        self._require_started("episodes")
        columns, flags = self._storage.columns, self._storage.flags
        returns, lengths = columns["episode_returns"].host, columns["episode_lengths"].host
        if not self._is_counted:
            self._require_results("episodes")
            self._num_episodes = finished_episodes(
                columns["rewards"].host,
                flags("terminations"),
                flags("truncations"),
                flags("valid"),
                columns["running_returns"].host,
                columns["running_lengths"].host,
                returns,
                lengths,
            )
            self._is_counted = True
        return EpisodeStats(returns[: self._num_episodes], lengths[: self._num_episodes])

    def minibatches(
        self, num_minibatches: int | None = None, *, batch_size: int | None = None
    ) -> Iterator[RolloutBatch]:
        """Go once through all valid rows in random order.

        The batches of one pass differ in size by one row at most, also where the number of valid
        rows is no multiple: none is left with a few rows only.

        Args:
            num_minibatches: Number of batches, 1 to T * N; fewer if there are fewer valid rows.
            batch_size: Instead: the largest size of a batch, 1 to T * N.

        Yields:
            Batches in memory of their own: it is used again once nobody refers to a batch or to a
            part of it any more, so `list(...)` may keep them all. One pass at a time: beginning
            another shuffles the rows anew, and going on with the first then is an error.

        Raises:
            BufferMisuseError: `compute_advantages` has not been called, or not exactly one number
                is given; or, at the next batch, another pass or rollout has begun.
            BufferMemoryError: Memory for the batches is missing.
        """
        self._require_computed("minibatches")
        number = self._sampler.count_batches(num_minibatches, batch_size, self._num_valid)
        return self._sampler.draw(self._num_valid, number)

    def _require_computed(self, method: str) -> None:
        if not self._is_computed:
            raise BufferMisuseError(
                f"{method} needs a complete rollout; call compute_advantages(last_values) first"
            )

    def _begin(self) -> None:
        super()._begin()
        self._sampler.stop()
        self._is_computed = self._is_counted = False

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
            **marks,
            "counts": counts,
            "shuffle": self._sampler.generator.words,
        }

    def _take_copied_state(self, state: dict[str, Any]) -> None:
        for name, pages in state["columns"].items():
            self._storage.columns[name].take_copied_pages(pages)
        self._has_policy[:] = state["has_policy"]
        self._is_uploaded[:] = state["is_uploaded"]
        for name, marks in state["has_extras"].items():
            self._has_extras[name][:] = marks
        for name, count in state["counts"].items():
            setattr(self, name, count)
        self._sampler.generator.words[:] = state["shuffle"]

    @exclusive
    def state_dict(self) -> dict[str, Any]:
        """What the next rollout starts from: random state, observations, unfinished episodes.

        Only tensors, numbers, strings and a dict, all copies, so that `torch.save` and safe loading
        work. Steps are not saved: call it between rollouts, right after `advance` or `start`.

        Raises:
            BufferMisuseError: A rollout is in progress or complete, or none was started.
        """
        if not self._open_steps or any(self._has_policy) or self._has_any_results():
            raise BufferMisuseError(
                "state_dict is possible between rollouts only; call it right after advance() or "
                "start(obs)"
            )
        return rollout_state(self._storage, self._sampler.generator.words, self._settings())

    def _settings(self) -> dict[str, Any]:
        """Settings that a state must share with the buffer it is loaded into."""
        _, _, made = self._made_by  # gamma and lambda may have been changed since
        settings = {name: made[name] for name in ("gamma", "gae_lambda")}
        return {"autoreset_mode": self.autoreset_mode.value, **settings}

    @exclusive
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin a rollout where the buffer stood that `state_dict` was called on.

        Raises:
            BufferMisuseError: The state is of another version, or of a buffer with another
                autoreset mode, discount, lambda, space or number of environments; nothing was
                changed.
        """
        restore_rollout_state(self._storage, self._sampler.generator.words, self._settings(), state)
        self._begin()
