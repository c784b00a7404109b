"""Writing a rollout step by step: who may put what where, and when."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from buffers.columns import Allocate, foreach_copy
from buffers.errors import BufferMisuseError
from buffers.rollout_input import read_env_ids, read_field, read_observations
from buffers.rollout_layout import plan_rollout
from buffers.rollout_storage import RolloutSlot, RolloutStorage

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
    ):
        layout = plan_rollout(num_steps, num_envs, observation_space, action_space, autoreset_mode)
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

    def _name_rows(self) -> None:
        self._obs_rows = self._storage.obs_rows
        self._slots = self._storage.slots
        self._policy_rows = self._storage.policy_rows
        self._action_pages = self._storage.action_pages
        self._action_shape, self._action_dtype = self.actions.shape[1:], self.actions.dtype
        self._row_shape = self.log_probs.shape[1:]
        self._has_policy = bytearray(self.num_steps)
        self._has_results = bytearray(self.num_steps)
        self._is_uploaded = bytearray(self.num_steps + 1)
        # T while steps may be written, else 0: one comparison checks both the range and the time.
        self._open_steps = 0
        self._is_started = False

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
        for marks in (self._has_policy, self._has_results, self._is_uploaded):
            marks[:] = bytes(len(marks))
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
        self._storage.write_obs(t, read_observations(obs, self._layout))
        self._is_uploaded[t] = 0

    def put(self, t: int, *, actions: Any, log_probs: Any, values: Any) -> np.ndarray:
        """Copy what the policy made of the observations of step t.

        Args:
            t: 0 to T - 1.
            actions: (N, *action_shape), of the dtype of the action space or one that casts to it
                without changing kind. Like the others a tensor or an array; gradients are dropped.
            log_probs: float (N,), logarithms of the probabilities (densities) of the actions.
            values: float (N,), estimated values of the observations.

        Returns:
            The actions as a NumPy view (N, *action_shape) of the host pages, for the environment.

        Raises:
            BufferMisuseError: t out of range, wrong shape or dtype, or the rollout is complete or
                was not started; nothing was changed.
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
        if not fits:
            actions = read_field("actions", actions, self._action_shape, self._action_dtype)
            log_probs = read_field("log_probs", log_probs, row_shape, float32)
            values = read_field("values", values, row_shape, float32)
        if torch.is_grad_enabled():
            actions, log_probs, values = actions.detach(), log_probs.detach(), values.detach()
        # One call instead of three: with few environments calls take longer than the copying.
        foreach_copy(self._policy_rows[t], (actions, log_probs, values))
        self._has_policy[t] = 1
        if self._staged:
            self._storage.download_actions(t)
        return self._action_pages[t]

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
        anew in every rollout. Asking for a slot counts as filling it.

        Raises:
            BufferMisuseError: t is outside 0 .. T - 1, or the rollout is complete or not started.
        """
        if 0 <= t < self._open_steps:
            self._has_results[t] = 1
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
        ids = read_env_ids(env_ids, self.num_envs)
        found = read_field("values", values, (len(ids),), torch.float32).detach()
        where = torch.from_numpy(ids).to(self.device)
        self.final_values[t].index_copy_(0, where, found.to(self.device, torch.float32))
        self._storage.columns["has_final"].host[t, ids] = True

    def _require_filled(self, method: str) -> None:
        """Raise unless every step has results, and either all steps or none went through `put`."""
        if not self._is_started:
            raise self._refusal(method, 0, 0)
        if not all(self._has_results):
            raise BufferMisuseError(
                f"{method} needs all {self.num_steps} steps, but {_missing(self._has_results)} "
                "no results; step the environment into slot(t) for each of them"
            )
        if any(self._has_policy) and not all(self._has_policy):
            raise BufferMisuseError(
                f"{method} needs all {self.num_steps} steps, but {_missing(self._has_policy)} "
                "no actions; call put(t, ...) for every step"
            )

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


def _missing(marks: bytearray) -> str:
    """The steps without a mark, as the start of a clause.

    >>> _missing(bytearray([1, 0, 0]))
    'steps 1, 2 have'
    """
    steps = [t for t, is_there in enumerate(marks) if not is_there]
    more = f" and {len(steps) - 5} more" if len(steps) > 5 else ""
    return f"steps {', '.join(map(str, steps[:5]))}{more} have"
