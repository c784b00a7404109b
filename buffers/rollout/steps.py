"""Writing a rollout step by step: who may put what where, and when."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from buffers.core.arguments import read_distinct_ids
from buffers.core.columns import Allocate, foreach_copy
from buffers.core.errors import BufferMisuseError
from buffers.rollout.input import read_field, read_observations
from buffers.rollout.kernels import UNWRITTEN, are_all_finite, mark_dead_steps
from buffers.rollout.layout import RolloutLayout, parse_autoreset_mode, plan_rollout
from buffers.rollout.storage import RolloutSlot, RolloutStorage

__all__ = ["RolloutSteps"]


class RolloutSteps:
    """The collecting half of `RolloutBuffer`, whose docstring explains arguments and attributes.

    A rollout is first not started, then open for writing, then complete. Calls at the wrong time
    are refused before anything is changed.
    """

    def __init__(
        self,
        num_steps: int,
        num_envs: int,
        observation_space: Space,
        action_space: Space,
        *,
        autoreset_mode: AutoresetMode | str,
        device: torch.device | str,
        allocate: Allocate | None,
        staged: bool,
        extra_columns: Mapping[str, Space] | None,
    ):
        spaces = observation_space, action_space
        layout = plan_rollout(num_steps, num_envs, *spaces, autoreset_mode, extra_columns)
        _check_mode_of_owner(allocate, layout)
        self.num_steps, self.num_envs = layout.num_steps, layout.num_envs
        self.observation_space, self.action_space = observation_space, action_space
        self.autoreset_mode = layout.autoreset_mode
        self.device = torch.device(device)
        self._layout = layout
        self._staged = staged or self.device.type != "cpu"
        with torch.inference_mode(False):  # the tensors outlive the mode they were made in
            self._storage = RolloutStorage(
                layout, self.device, staged=self._staged, allocate=allocate
            )
            self._name_tensors()
        self._name_rows()

    def _name_tensors(self) -> None:
        storage = self._storage
        self.obs = storage.obs_tensor()
        self.actions = storage.tensor("actions")
        self.log_probs = storage.tensor("log_probs")
        self.values = storage.tensor("values")
        self.rewards = storage.tensor("rewards")
        self.terminations = storage.tensor("terminations")
        self.truncations = storage.tensor("truncations")
        self.valid = storage.tensor("valid")
        self.valid_pages = storage.columns["valid"].host
        uses_final = self._layout.uses_final_values
        self.final_values = storage.tensor("final_values") if uses_final else None
        self.advantages = storage.tensor("advantages")
        self.returns = storage.tensor("returns")
        self.extras = storage.extras

    def _name_rows(self) -> None:
        self._obs_rows = self._storage.obs_rows
        self._slots = self._storage.slots
        self._policy_rows = self._storage.policy_rows
        self._action_pages = self._storage.action_pages
        self._action_shape, self._action_dtype = self.actions.shape[1:], self.actions.dtype
        self._row_shape = self.log_probs.shape[1:]
        self._has_policy = bytearray(self.num_steps)
        self._has_extras = {name: bytearray(self.num_steps) for name in self.extras}
        self._is_uploaded = bytearray(self.num_steps + 1)
        # T while steps may be written, else 0: one comparison checks both the range and the time.
        self._open_steps = 0
        self._is_started = self._has_marks = False

    def start(self, obs: Any) -> None:
        """Begin with the observations of a reset of all environments; drops what was collected.

        Args:
            obs: (N, *obs_shape), nested like the observation space; copied.

        Raises:
            BufferMisuseError: Structure, shape or dtype does not fit; nothing was changed.
        """
        leaves = read_observations(obs, self._layout)
        self._storage.write_obs(0, leaves)
        for name in ("over_before", "running_returns", "running_lengths"):
            self._storage.columns[name].host.fill(0)
        self._begin()

    def _begin(self) -> None:
        """Open all steps for writing."""
        self._storage.wait_for_device()
        for marks in (self._has_policy, self._is_uploaded, *self._has_extras.values()):
            marks[:] = bytes(len(marks))
        self._storage.mark_policy_outputs()
        self._has_marks = False  # rewards can be read until the first slot is taken
        self.valid_pages.fill(True)
        if self._layout.uses_final_values:
            self._storage.columns["has_final"].host.fill(False)
        self._open_steps = self.num_steps
        self._is_started = True

    def _complete(self) -> None:
        """Close all steps for writing, until the next rollout begins."""
        self._open_steps = 0

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
        if self._staged and self._open_steps:
            self._storage.upload_obs(t)
            self._is_uploaded[t] = 1
        return self._obs_rows[t]

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
        self._storage.write_obs(t, read_observations(obs, self._layout))
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
            extras: Extra columns by name, (N, ...), all of them or some.

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
            actions = read_field("actions", actions, self._action_shape, self._action_dtype)
            log_probs = read_field("log_probs", log_probs, row_shape, float32)
            values = read_field("values", values, row_shape, float32)
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
                    f"there is no extra column {name!r}, {declared}; name it in extra_columns of "
                    "the constructor"
                )
            read[name] = read_field(name, given, column.shape[1:], column.dtype).detach()
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
                self._storage.mark_rewards()
                self._has_marks = True
            return self._slots[t]
        raise self._refusal("slot", t, self.num_steps - 1)

    def set_final_values(self, t: int, env_ids: Any, values: Any) -> None:
        """Give the values of the observations that episodes truncated in step t ended with.

        Args:
            t: 0 to T - 1.
            env_ids: int (K,), the environments; or a mask bool (N,), as `infos["_final_obs"]`.
            values: float (K,), estimated values of their final observations.

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
        ids = read_distinct_ids(env_ids, self.num_envs)
        found = read_field("values", values, (len(ids),), torch.float32).detach()
        where = torch.from_numpy(ids).to(self.device)
        self.final_values[t].index_copy_(0, where, found.to(self.device, torch.float32))
        self._storage.columns["has_final"].host[t, ids] = True

    def _require_started(self, method: str) -> None:
        if not self._is_started:
            raise self._refusal(method, 0, 0)

    def _has_any_results(self) -> bool:
        """Whether anything was written into a slot since the rollout began."""
        return self._has_marks and bool((self._storage.reward_bits != UNWRITTEN).any())

    def _require_results(self, method: str) -> None:
        """Raise unless every environment has written every step, with a finite reward where valid.

        Complete `valid` between the two: flags of steps that nobody wrote must not clear it.
        """
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
        rewards = self._storage.columns["rewards"].host
        wrong = np.argwhere(~np.isfinite(rewards) & self.valid_pages)
        if len(wrong):
            t, env_id = wrong[0].tolist()
            raise BufferMisuseError(
                f"{method}: the reward of env {env_id} in step {t} is {rewards[t, env_id]}, "
                "expected finite numbers; find what makes it, or leave the row out by "
                f"valid_pages[{t}, {env_id}] = False"
            )

    def _mark_valid(self) -> None:
        """Clear `valid` in the dead steps of NEXT_STEP; elements the user cleared stay so."""
        if self.autoreset_mode is AutoresetMode.NEXT_STEP:
            flags = self._storage.flags
            mark_dead_steps(
                flags("terminations"), flags("truncations"), flags("over_before"), flags("valid")
            )

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
            is_needed = {"log_probs": self.valid_pages, "values": np.ones_like(self.valid_pages)}
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
        """Let log_probs and values that were not written be zero."""
        if 0 in self._has_policy:
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
