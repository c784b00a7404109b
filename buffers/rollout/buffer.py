"""RolloutBuffer: the steps of one on-policy update, in memory that is allocated once.

```
#  policy                      RolloutBuffer                           vector env
#    obs_at(t)   <-- view ---- obs[t]
#    put(t, ...) --- copy ---> actions[t], log_probs[t], values[t]
#                              actions[t] ------- env_actions(t) ------> step(actions, out=slot(t))
#                              obs[t + 1], rewards[t], flags[t] <-- writes into slot(t) --'
#  learner, after T steps
#    compute_advantages -----> valid, advantages, returns
#    minibatches <-- copies -- all rows in which valid is True
#    advance                   obs[T] becomes obs[0] of the next rollout
```

The buffer owns all of this memory, except columns that `allocate` of the envs provides. If envs are
on the CPU and the buffer on another device, both sides have a copy of what they share: see
`RolloutStorage`. `estimate` (gae) computes advantages, `Sampler` (minibatches) makes the batches.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from buffers.core.arguments import (
    read_distinct_ids,
    read_nest,
    read_number,
    read_tensor,
    resolve_device,
)
from buffers.core.batches import read_states
from buffers.core.errors import BufferMisuseError
from buffers.core.generator import other_generator
from buffers.core.memory import Allocate
from buffers.core.state import (
    Block,
    LoadedState,
    StatefulBuffer,
    check_bools,
    check_settings,
    contradiction,
)
from buffers.rollout.gae import estimate
from buffers.rollout.minibatches import RolloutBatch, Sampler
from buffers.rollout.storage import RESULTS, UNWRITTEN, RolloutSlot, RolloutStorage, plan_rollout

__all__ = ["EpisodeStats", "RolloutBuffer"]

_CARRIED = ("over_before", "running_returns", "running_lengths")


class EpisodeStats(NamedTuple):
    """The episodes that ended in a rollout, in order of time."""

    returns: np.ndarray  # float64 (K,), undiscounted sums of rewards
    lengths: np.ndarray  # int64 (K,), numbers of steps


@dataclass(slots=True)
class _Progress:
    """Progress of a rollout."""

    open_steps: int  # T while steps may be written, else 0: checks both the range and the time
    put: dict[str, set[int]] = field(default_factory=dict)  # by column, the steps that were `put`
    uploaded: set[int] = field(default_factory=set)  # rows of observations on the device
    is_computed: bool = False


class RolloutBuffer(StatefulBuffer):
    """T steps of N environments, their advantages, and minibatches of them.

    One update is: for each t from 0 to T - 1 call `obs_at(t)` and `put(t, ...)`, and step the
    environments into `slot(t)`; then `compute_advantages`, `minibatches` any number of times, and
    `advance`.

    At the start of a rollout, log_probs, values and rewards are marked as not written (they read as
    NaN). `compute_advantages` raises for marks that are left. A call with a step out of range, or
    at the wrong time, raises BufferMisuseError and changes nothing.

    The autoreset mode decides which rows are transitions. NEXT_STEP: the step after the end of an
    episode only resets, so it is left out (`valid` False). The final observation is the next row,
    so its value bootstraps a truncation. SAME_STEP and DISABLED: all rows are transitions, and
    `set_final_values` must be given the value of the true final observation of every truncated
    episode. To leave out more rows, set elements of `valid_pages` (with envs on a device: of
    `valid`) to False before `compute_advantages`.

    Agents of a game may die before it ends, or join late. Then the env writes into `slot(t).valid`
    which rows acted, in all steps or in none; the other rows are no transitions. If an agent is
    truncated while its game goes on, the next row is its final observation and gives the value. If
    the game was reset in that step, give the value to `set_final_values`.

    Envs on the CPU write into host pages. If the buffer is on the CPU too, its tensors are views of
    these pages. On another device, `obs_at` enqueues the copy of one row, `compute_advantages` that
    of rewards and flags, and `put` and `env_actions` wait for the actions.

    With `allocate=envs.allocate` of envs on the same device, nothing passes through the host. Only
    these calls wait for the device: `check`, which raises the errors found there, `episodes`,
    `num_valid`, `state_dict`, and `set_final_values` with ids. All calls from `obs_at` to `advance`
    can be captured in CUDA graphs. Minibatches must be `fixed` then, and `generator` registered
    with their graph.

    Attributes:
        obs: (T + 1, N, *obs_shape), nested like the space. This and the attributes below are
            tensors on `device`. Write into them; assigning another tensor has no effect, or raises.
        actions: (T, N, *action_shape), of the dtype of the space.
        log_probs, advantages, returns: float32 (T, N); returns are advantages + values.
        values: float32 (T + 1, N).
        rewards, terminations, truncations: float32 and bool (T, N), where the env writes them: on
            the CPU with envs on the CPU.
        valid: bool (T, N), complete after `compute_advantages`.
        valid_pages: `valid` as a NumPy array, where the env writes; None with envs on a device.
        final_values: float32 (T, N), or None under NEXT_STEP.
        extras: The extra columns by name, (T, N, ...), and the game columns, (T, N / A, ...).

    Args:
        num_steps: T.
        num_envs: N.
        observation_space: Of a single environment: Box, Discrete, MultiDiscrete, MultiBinary, or
            Dict and Tuple of these.
        action_space: Of a single environment: Box, Discrete, MultiDiscrete or MultiBinary.
        autoreset_mode: `envs.metadata["autoreset_mode"]`, or its string value.
            `envs.step(out=rollout.slot(t))` compares it with the mode of the envs.
        gamma, gae_lambda: Discount, and lambda of generalised advantage estimation.
        device: Where the tensors live.
        seed: Seed of the order of rows in minibatches; None takes entropy of the system.
        allocate: `envs.allocate`, so that results need no copy: called with (shape, dtype) for
            observations, actions, rewards and flags. None lets the buffer allocate. If the envs are
            on a device, slots and the actions that `put` returns are tensors there.
        extra_columns: Names and spaces of further values per step, such as costs. `put` writes
            them; batches have them in `extras`.
        game_columns: Names and spaces of values that the agents of a game share, such as its state.
            `put` takes them once per game, (N / A, ...); batches have them for every row.
        agents_per_game: A, the number of neighbouring rows of a step that form one game.

    Raises:
        BufferMisuseError: An argument does not fit.
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

    _is_apart = False  # tests set it, to have separate host pages on the CPU, too

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
    ):
        self.gamma = read_number("gamma", gamma)
        self.gae_lambda = read_number("gae_lambda", gae_lambda)
        columns: Any = {
            "extra_columns": extra_columns,
            "game_columns": game_columns,
            "agents_per_game": agents_per_game,
        }
        sizes = num_steps, num_envs, observation_space, action_space
        layout = plan_rollout(*sizes, autoreset_mode=autoreset_mode, **columns)
        self._layout = layout
        self.num_steps, self.num_envs = layout.num_steps, layout.num_envs
        self.observation_space, self.action_space = observation_space, action_space
        self.autoreset_mode, self.device = layout.autoreset_mode, resolve_device(device)
        is_apart = self._is_apart or self.device.type != "cpu"
        with torch.inference_mode(False):  # the tensors outlive the mode they were made in
            storage = RolloutStorage(layout, self.device, allocate, is_apart=is_apart)
            self._storage, self._sampler = storage, Sampler(storage, seed)
        tensors = storage.tensors
        self.obs, self.actions = storage.obs, tensors["actions"]
        self.log_probs, self.values = tensors["log_probs"], tensors["values"]
        self.advantages, self.returns = tensors["advantages"], tensors["returns"]
        self.valid, self.final_values = tensors["valid"], tensors.get("final_values")
        self.rewards, self.terminations, self.truncations = (storage.at_env[n] for n in RESULTS)
        self.valid_pages: Any = None if storage.is_on_device else storage.columns["valid"].host
        self.extras = {name: tensors[name] for name in (*layout.extras, *layout.games)}
        self._is_started, self._at = False, _Progress(0)
        self._made_with = {"gamma": self.gamma, "gae_lambda": self.gae_lambda}

    def memory(self) -> dict[str, int]:
        """Bytes held on host and device together, by column."""
        return {name: column.nbytes for name, column in self._storage.columns.items()}

    @property
    def num_valid(self) -> int:
        """Number of valid rows, which `minibatches` draws from; after `compute_advantages`."""
        self._require("num_valid", is_computed=True)
        return int(self._storage.num_valid)

    @property
    def generator(self) -> torch.Generator | None:
        """Generator of minibatches, to register with a CUDA graph; None if envs are on the CPU."""
        return self._sampler.generator.torch if self._storage.is_on_device else None

    # Collecting.

    def start(self, obs: Any) -> None:
        """Begin a rollout with the observations of a reset of all envs; drop collected steps.

        Args:
            obs: (N, *obs_shape), nested like the observation space; copied.

        Raises:
            BufferMisuseError: The observations do not fit; nothing was changed.
        """
        leaves = self._read_obs(obs)
        self._storage.wait_for_device()
        self._storage.write_obs(0, leaves)
        self._storage.start()
        self._begin()

    def _begin(self) -> None:
        """Open all steps for writing; the caller must have waited for the device."""
        self._storage.begin()
        self._is_started, self._at = True, _Progress(self.num_steps)

    def obs_at(self, t: int) -> Any:
        """Observations before step t, or after the last step for t = T.

        Returns:
            Tensors (N, *obs_shape) on `device`, nested like the space: views. If host pages are
            separate memory, their copy to these views is enqueued.
        """
        t = self._step("obs_at", t, self.num_steps, self.num_steps)
        if self._storage.is_apart and self._at.open_steps:
            self._storage.upload_obs(t)
            self._at.uploaded.add(t)
        return self._storage.obs_rows[t]

    def is_first_at(self, t: int) -> torch.Tensor:
        """Whether the observations before step t are the first of an episode, as after `start`.

        A recurrent policy resets its state there. The answer follows from the flags of the steps
        before t. NEXT_STEP: the observation after the final one is the first. DISABLED: as if envs
        were reset right after the end. Where the env writes `slot(t).valid`, rows that did not act
        in step t - 1 are first as well. There, under SAME_STEP and DISABLED, a truncated agent
        still has its final observation in the next row, which is not a first one, unless
        `set_final_values` was given its value.

        Returns:
            bool (N,) on `device`: a view, rewritten by the next call with the same t, 0 to T.
        """
        t = self._step("is_first_at", t, self.num_steps, self.num_steps)
        if t > 0:
            self._storage.mark_first(t, t + 1)
        self._storage.upload("is_first", slice(t, t + 1))
        return self._storage.tensors["is_first"][t]

    def _read_obs(self, obs: Any) -> list[Any]:
        own, leaves = self._storage.obs_rows[0], self._layout.obs_leaves
        are_tensors = isinstance(obs, torch.Tensor) and isinstance(own, torch.Tensor)
        if self._storage.is_on_device and are_tensors and _kind(obs) == _kind(own):
            return [obs.detach()]  # nothing passes through the host
        return read_nest("obs", obs, self.observation_space, leaves, self.num_envs, self.device)

    def write_obs(self, t: int, obs: Any) -> None:
        """Replace the observations before step t, as after resetting some envs under DISABLED.

        Args:
            t: 0 to T.
            obs: (N, *obs_shape) of all environments, nested like the observation space; copied.
        """
        t = self._step("write_obs", t, self.num_steps, self._at.open_steps)
        leaves = self._read_obs(obs)  # before anything is changed
        self._take_back_obs(t)
        self._storage.write_obs(t, leaves)

    def _take_back_obs(self, t: int) -> None:
        """Wait until row t of obs was copied to the device, so that its pages may be rewritten."""
        if t in self._at.uploaded:
            self._storage.wait_for_device()
            self._at.uploaded.remove(t)

    def put(
        self,
        t: int,
        *,
        actions: Any = None,
        log_probs: Any = None,
        values: Any = None,
        **extras: Any,
    ) -> np.ndarray:
        """Store the policy's outputs for the observations of step t.

        A second call, such as after the env step, may pass extra columns alone.

        Args:
            t: 0 to T - 1.
            actions: (N, *action_shape), of the dtype of the action space or one that casts to it
                without changing kind. All arguments are tensors or arrays; gradients are dropped.
            log_probs: float (N,), logarithms of the probabilities (densities) of the actions.
            values: float (N,), estimated values of the observations.
            extras: Extra columns by name, (N, ...), and game columns, one row per game.

        Returns:
            The actions for the environment, as `env_actions`.

        Raises:
            BufferMisuseError: t is out of range or the rollout complete, a shape or dtype does not
                fit, or a column is unknown; nothing was changed.
        """
        t = self._step("put", t)
        given = {"actions": actions, "log_probs": log_probs, "values": values, **extras}
        missing = [name for name, column in given.items() if column is None]
        if missing:
            if not extras or len(missing) < 3:
                raise BufferMisuseError(
                    f"put({t}) was given no {' and no '.join(missing)}; expected actions, "
                    "log_probs and values together, or extra columns alone"
                )
            given = extras
        for name in extras:
            if name not in self.extras:
                raise BufferMisuseError(
                    f"there is no extra column {name!r}, only {sorted(self.extras)}; name it in "
                    "extra_columns or game_columns of the constructor"
                )
        pairs = []
        for name, column in given.items():
            row = self._storage.rows[name][t]
            pairs.append((row, read_tensor(name, column, row.shape, row.dtype)))
        for row, column in pairs:  # after all columns were checked
            row.copy_(column)
        for name in extras if missing else ("values", *extras):
            self._at.put.setdefault(name, set()).add(t)
        return self._storage.action_rows[t] if missing else self.env_actions(t)

    def env_actions(self, t: int) -> np.ndarray:
        """The actions of step t, (N, *action_shape), where the envs are: a view.

        `put` returns them too. Call this after writing into `actions[t]` directly.
        """
        t = self._step("env_actions", t)
        if self._storage.is_apart:
            self._storage.at_env["actions"][t].copy_(self.actions[t])
        return self._storage.action_rows[t]

    def slot(self, t: int) -> RolloutSlot:
        """Where the environment writes the results of step t.

        Observations go into row t + 1, the rest into row t. Every rollout overwrites this memory.
        If an environment raises, call `slot(t)` again and repeat the step; until then
        `compute_advantages`, `episodes` and `advance` raise.
        """
        t = self._step("slot", t)
        self._take_back_obs(t + 1)
        return self._storage.slots[t]

    def set_final_values(self, t: int, env_ids: Any, values: Any) -> None:
        """Set the values of the final observations of episodes that were truncated in step t.

        Args:
            t: 0 to T - 1.
            env_ids: int (K,), the environments; or a mask bool (N,), as `infos["_final_obs"]`; None
                for all. The call waits for a tensor on a device, unless it is a mask and the envs
                are on that device.
            values: float (K,), estimated values of their final observations. With such a mask on
                the device: float (N,), read where the mask is True.

        Raises:
            BufferMisuseError: t, env_ids or values do not fit, or the mode is NEXT_STEP, where the
                next row has the value already. Nothing was changed.
        """
        t = self._step("set_final_values", t)
        if self.final_values is None:
            raise BufferMisuseError(
                "set_final_values is not for autoreset NEXT_STEP: there the final observation is "
                "the next row, and values[t + 1] its value; leave the call out"
            )
        row = self.final_values[t]
        is_mask = isinstance(env_ids, torch.Tensor) and self._storage.is_on_device
        if is_mask and _kind(env_ids) == (row.device, torch.bool, row.shape):
            # Nothing passes through the host.
            mask, found = env_ids, read_tensor("values", values, row.shape, row.dtype)
        else:
            mask = torch.zeros(row.shape, dtype=torch.bool, device="cpu")
            ids = torch.from_numpy(read_distinct_ids(env_ids, self.num_envs, self.device))
            given = read_tensor("values", values, ids.shape, row.dtype).to("cpu", row.dtype)
            mask[ids], found = True, torch.zeros(row.shape, device="cpu").index_copy_(0, ids, given)
        torch.where(mask.to(row.device), found.to(row.device, row.dtype), row, out=row)
        has_final: Any = self._storage.has_final
        has_final[t].logical_or_(mask.to(has_final.device))

    def advance(self) -> None:
        """Begin the next rollout where this one ended: its last observations become the first.

        Columns other than log_probs, values and rewards stay readable until they are overwritten.

        Raises:
            BufferMisuseError: An environment has not written a step yet; nothing was changed.
        """
        self._require("advance")
        # First, as `_begin` overwrites the rewards with marks.
        self._storage.count_episodes()
        self._storage.wait_for_device()
        self._storage.advance()
        self._begin()

    # Learning.

    def compute_advantages(self, last_values: Any, *, policy_outputs: bool = True) -> None:
        """Fill `valid`, `advantages` and `returns`; this completes the rollout.

        It may be called again, such as after writing new `values`.

        Args:
            last_values: float (N,), values of `obs_at(T)`.
            policy_outputs: False allows missing policy outputs; log_probs and values that were not
                written become zero.

        Raises:
            BufferMisuseError: A step has no results or policy outputs, a reward is not finite, or a
                truncated episode has no final value. The rollout can be continued.
        """
        self._require("compute_advantages")
        last = read_tensor("last_values", last_values, self.values.shape[1:], torch.float32)
        storage, outputs = self._storage, (self.log_probs, self.values)
        storage.finish()
        # If all values were `put`, none is missing. On a device, steps of a graph call no `put`.
        is_unsure = storage.is_on_device or len(self._at.put.get("values", ())) < self.num_steps
        for name, marks in self._at.put.items() if policy_outputs else ():
            # A column that was never `put` may have been written into `extras` directly.
            if name in self.extras and (missing := sorted({*range(self.num_steps)} - marks)):
                raise BufferMisuseError(
                    f"steps {', '.join(map(str, missing))} have no {name}, but others have; pass "
                    f"{name}=... to put(t, ...) for every step"
                )
        storage.look_for_gaps(*(outputs if policy_outputs and is_unsure else ()))
        storage.count_episodes(is_finished=True)
        if is_unsure:  # marks left at places that are not needed become zeros
            for column in outputs:
                bits = column.view(torch.int32)
                bits.masked_fill_(bits == UNWRITTEN, 0)
        self.values[-1].copy_(last)
        storage.fill_final(self.final_values, self.values)
        if storage.is_apart:  # minibatches need all observations, also those never asked for
            for t in {*range(self.num_steps + 1)} - self._at.uploaded:
                storage.upload_obs(t)
        for name in (*RESULTS, "valid"):
            storage.upload(name)
        there, values, final = storage.tensors, self.values, self.final_values
        ends = there["terminations"], there["truncations"]
        inputs = there["rewards"], values, *ends, final, self.valid
        results, law = (self.advantages, self.returns), (self.gamma, self.gae_lambda)
        is_compiled = not (storage.is_apart or storage.is_on_device)
        estimate(inputs, *results, *law, is_compiled=is_compiled)
        storage.list_valid()
        self._at.is_computed, self._at.open_steps = True, 0  # until the next rollout begins

    def check(self) -> None:
        """With envs on a device: wait, and raise errors that `compute_advantages` has noted since.

        With other envs `compute_advantages` raises BufferMisuseError itself.
        """
        self._storage.raise_faults()

    def count_episodes(self) -> None:
        """Sum up episodes for `episodes` now, such as before rewards are changed; does not wait."""
        self._require("count_episodes")
        self._storage.count_episodes()

    def episodes(self) -> EpisodeStats:
        """Returns and lengths of the episodes that ended in this rollout, wherever they began.

        Rewards are summed across rollouts, from `start` on. They are read at the first call of
        `count_episodes`, `compute_advantages` or, with envs on the CPU, this method.
        Rows that are not `valid` do not count; an episode that ends in such a row is dropped.

        Raises:
            BufferMisuseError: An environment has not written a step yet, or a reward is not finite.
        """
        self._require("episodes")
        if self._storage.is_on_host:
            self._storage.count_episodes()
        return EpisodeStats(*self._storage.episodes())

    def minibatches(
        self,
        num_minibatches: int,
        *,
        fixed: bool = False,
        normalize_advantages: bool = False,
    ) -> Iterator[RolloutBatch]:
        """Iterate once over all valid rows, in random order.

        The batches of one pass differ in size by one row at most. With `fixed`, all batches of all
        rollouts have the size T * N / num_minibatches, rounded up, so that a compiled learner sees
        one shape. Repeated rows, evenly spread, fill a batch: `batch.weights` float32 (B,) is 1 at
        the first place of a row and 0 where it is repeated; each batch has a 1. So means are
        ``(weights * x).sum() / weights.sum()``. Without `fixed` weights are None.

        Args:
            num_minibatches: Number of batches, 1 to T * N; fewer if there are fewer valid rows.
            fixed: Make all batches of one size; needed if envs are on a device.
            normalize_advantages: In each batch, subtract the mean of the advantages and divide by
                their standard deviation (unbiased, + 1e-8), over rows of weight 1, as
                stable-baselines3 does. `rollout.advantages` are not changed.

        Yields:
            Batches in memory of their own. Only the latest pass, of `sequences` too, can be
            continued.

        Raises:
            BufferMisuseError: `compute_advantages` has not been called, or the number does not fit;
                or, at the next batch, another pass or rollout has begun.
            BufferMemoryError: Memory for the batches is missing.
        """
        self._require("minibatches", is_computed=True)
        if not (fixed or self._storage.is_on_host):
            raise BufferMisuseError(
                "the host does not know how many rows are valid of envs on a device; pass "
                "fixed=True"
            )
        return self._sampler.draw(num_minibatches, is_fixed=fixed, normalizes=normalize_advantages)

    def sequences(
        self,
        num_minibatches: int,
        *,
        length: int | None = None,
        initial_states: Sequence[str] = (),
        normalize_advantages: bool = False,
    ) -> Iterator[RolloutBatch]:
        """Iterate once over the rollout in sequences of steps of one env, in random order.

        The rollout is cut every `length` steps. All batches of all rollouts have the same shape,
        (L, S, ...): a short sequence repeats its last step, and some sequences are repeated if
        there are too few for the batches. `batch.weights` float32 (L, S) is 0 at repetitions and at
        rows that are not valid, and 1 elsewhere; each batch has a 1. Where `is_first` bool (L, S)
        is True the policy must begin with a new state.

        Args:
            num_minibatches: Number of batches; fewer if fewer sequences have valid rows. With envs
                on a device the host can't count them, so some sequences are repeated instead.
            length: L, 1 to T; None for T, which splits the rollout by environments.
            initial_states: Names of extra columns with the policy's state before each step. A batch
                has those of the first steps, (S, ...), in `initial_states`, not in `extras`.
            normalize_advantages: As in `minibatches`; so are the yielded batches and the errors.
        """
        self._require("sequences", is_computed=True)
        names = read_states(initial_states, self._layout.extras)
        batches = self._sampler.draw(
            num_minibatches, normalizes=normalize_advantages, states=names,
            length=self.num_steps if length is None else length,
        )  # fmt: skip
        # `draw` returns a generator: it reads `is_first` at the first batch, after these two lines.
        self._storage.mark_first(1, self.num_steps + 1)
        self._storage.upload("is_first")
        return batches

    def _require(self, method: str, *, is_computed: bool = False) -> None:
        """Raise unless the rollout was started, or computed (on devices a graph may compute it)."""
        if not self._is_started:
            raise BufferMisuseError(
                f"{method} before the first rollout; call start(obs) with the observations of a "
                "reset first"
            )
        if is_computed and not self._at.is_computed and self._storage.is_on_host:
            raise BufferMisuseError(
                f"{method} needs a complete rollout; call compute_advantages(last_values) first"
            )

    def _step(self, method: str, t: Any, last: int | None = None, is_open: int = 0) -> int:
        """Return step t, 0 to `last` or T - 1; raise if out of range or the rollout is complete."""
        if last is None:
            last, is_open = self.num_steps - 1, self._at.open_steps
        if 0 <= t <= last and self._is_started and is_open:
            return operator.index(t)  # True equals 1, but would index as a mask
        self._require(method)
        if 0 <= t <= last:
            raise BufferMisuseError(
                f"{method}: this rollout is complete; call advance() to go on where it ended, or "
                "start(obs) after a reset"
            )
        raise BufferMisuseError(f"{method}: step {t} is out of range, expected 0 to {last}")

    def _check_copyable(self) -> None:
        raise BufferMisuseError(
            "a rollout is not copied; load its state_dict(), right after advance() or start(obs), "
            "into another one"
        )

    def state_dict(self) -> dict[str, Any]:
        """State that the next rollout starts from: generator, observations, unfinished episodes.

        Steps are not saved: call it right after `advance` or `start`, else BufferMisuseError.
        """
        return super().state_dict()

    def _described(self) -> dict[str, Any]:
        storage, at = self._storage, self._at
        has_results = not bool(storage.unwritten_rewards().all())
        if not at.open_steps or "values" in at.put or has_results:
            raise BufferMisuseError(
                "state_dict is possible between rollouts only; call it right after advance() or "
                "start(obs)"
            )
        return self._settings()

    def _settings(self) -> dict[str, Any]:
        """Version, and settings that a state must share with the buffer it is loaded into."""
        # `_made_with`, as the attributes gamma and gae_lambda may have been changed since.
        return {"version": 1, "autoreset_mode": self.autoreset_mode.value, **self._made_with}

    def _check_described(self, meta: Mapping[str, Any]) -> None:
        check_settings(meta, self._settings())

    def _carried(self) -> dict[str, torch.Tensor]:
        """Views of what the next rollout starts from."""
        at_env = self._storage.at_env
        firsts = ("is_first", *(leaf.path for leaf in self._layout.obs_leaves))
        return {**{n: at_env[n] for n in _CARRIED}, **{n: at_env[n][0] for n in firsts}}

    def _saved_arrays(self) -> dict[str, list[Block]]:
        rows = {name: row.cpu().numpy() for name, row in self._carried().items()}
        rows["generator"] = self._sampler.generator.get_state()
        return {name: [row] for name, row in rows.items()}

    def _check_arrays(self, state: LoadedState) -> None:
        for name, row in state.small.items():
            check_bools(name, [row] if row.dtype == np.bool_ else [])
        if state.small["running_lengths"].min(initial=0) < 0:
            raise contradiction("it has negative running_lengths")
        if not self._sampler.generator.accepts_state(state.small["generator"]):
            raise other_generator()

    def _take(self, state: LoadedState) -> None:
        self._storage.wait_for_device()
        for name, row in self._carried().items():
            row.copy_(torch.from_numpy(np.array(state.small[name])))
        self._sampler.generator.set_state(state.small["generator"])
        self._begin()


def _kind(tensor: torch.Tensor) -> tuple[torch.device, torch.dtype, torch.Size]:
    return tensor.device, tensor.dtype, tensor.shape
