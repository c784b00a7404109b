"""TransitionWriter: writes the steps of a vector env into a replay buffer as transitions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from buffers.core.arguments import (
    as_array,
    read_array,
    read_distinct_ids,
    read_nest,
    read_valid,
    tree_leaves,
)
from buffers.core.errors import BufferMisuseError
from buffers.core.spaces import action_leaf, build_tree, space_leaves
from buffers.rollout.storage import parse_autoreset_mode

__all__ = ["TransitionWriter"]

NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode
_BOOL = np.dtype(np.bool_)
_FLAGS = ("terminations", "truncations")


class TransitionWriter:
    """Writes the steps of a running vector env into a buffer, in any autoreset mode.

    The writer keeps the last observation of each environment and pairs it with the next one:

    - NEXT_STEP: the row that only resets is left out; its observation begins the next episode.
    - SAME_STEP: if the episode ended, the next observation is `infos["final_obs"]`; the returned
      observation begins the next episode.
    - DISABLED: call `reset` with the environments that were reset and their observations.

    If rows are agents that die before their game ends, or join late, `valid` says which of them
    acted in a step. The other rows are left out, and the row after a gap begins a new episode: the
    agent is back, or another one has its row. If an agent's episode ends while its game goes on,
    the observation in its row is the final one.

    The writer copies what it keeps, so vector envs may reuse their memory (`copy=False`).

    Call `step(actions, *envs.step(actions))` for a step of all environments. With `send` and `recv`
    call `sent(actions, env_ids)` and `received(envs.recv())`. Pass extra columns of the buffer by
    name, such as `step(actions, *envs.step(actions), log_probs=log_probs)` or `sent(actions,
    env_ids, log_probs=log_probs)`; columns known only with the results go to `received`.

    Results may be tensors on the device of the envs. They are copied to the host and checked there,
    except if the mode is SAME_STEP and the buffer is on the same device and stores them as they are
    (`buffer.takes_tensors`): then `step` does not wait for the device.

    Args:
        envs: Vector env with Gymnasium's interface, or a group of agents (`envs.groups[name]`). The
            writer reads `metadata["autoreset_mode"]`, `num_envs` and the single spaces once.
        buffer: Any object with `add(**columns)`. The columns are `obs, next_obs, actions, rewards,
            terminations, truncations`, and `env_ids` if `add` has a parameter of that name.

    Raises:
        BufferMisuseError: The autoreset mode is missing, unknown or not that of the buffer, or a
            space does not fit.

    >>> from gymnasium.spaces import Box, Discrete
    >>> from gymnasium.vector import SyncVectorEnv
    >>> import gymnasium
    >>> from buffers import EpisodicReplayBuffer
    >>> envs = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 3)
    >>> space, action_space = envs.single_observation_space, envs.single_action_space
    >>> buffer = EpisodicReplayBuffer(10_000, space, action_space, num_envs=3)
    >>> writer = TransitionWriter(envs, buffer)
    >>> obs, _ = envs.reset(seed=0)
    >>> writer.reset(obs)
    >>> for _ in range(100):
    ...     actions = np.ones(3, np.int64)
    ...     writer.step(actions, *envs.step(actions))
    >>> len(buffer) + int(buffer.open_lengths.sum()) == writer.num_transitions
    True
    """

    def __init__(self, envs: Any, buffer: Any):
        metadata = getattr(envs, "metadata", None) or {}
        self.autoreset_mode = parse_autoreset_mode(metadata.get("autoreset_mode", "missing"))
        expected = parse_autoreset_mode(
            getattr(buffer, "autoreset_mode", None) or self.autoreset_mode
        )
        if expected is not self.autoreset_mode:
            raise BufferMisuseError(
                f"the buffer has autoreset mode {expected.value!r}, but the envs have "
                f"{self.autoreset_mode.value!r}; make the buffer for the envs' mode"
            )
        self.num_envs, self.num_transitions = int(envs.num_envs), 0
        self._space = envs.single_observation_space
        self._action = action_leaf(envs.single_action_space)
        self._leaves = space_leaves(self._space, "obs")
        if not hasattr(buffer, "add"):
            raise BufferMisuseError(
                f"the buffer, a {type(buffer).__name__}, has no method add(**columns) for steps"
            )
        self._add, self._buffer = buffer.add, buffer
        self._cut = getattr(buffer, "cut_episodes", None)
        self._device = getattr(envs, "device", None)  # device of the results, if any
        self._passes_ids = "env_ids" in inspect.signature(buffer.add).parameters
        # The newest observations: `obs` of the next `add`.
        self._obs = [np.zeros((self.num_envs, *leaf.shape), leaf.dtype) for leaf in self._leaves]
        self._there: torch.Tensor | None = None  # on the device, instead of `_obs`
        self._all = np.arange(self.num_envs)
        self._is_known, self._is_over, self._is_sent = np.zeros((3, self.num_envs), np.bool_)
        self._sent: dict[str, np.ndarray] = {}  # (N, ...), columns of envs in flight
        takes_steps = getattr(buffer, "takes_steps", None)  # None: not a buffer of this library
        is_flat = build_tree(self._space, self._obs) is self._obs[0]
        self._is_checked = takes_steps is not None and is_flat
        self._step_ids = None if takes_steps else self._all
        self._goes_on = False  # the fast path of `step` is possible

    def reset(self, obs: Any, env_ids: Any = None) -> None:
        """Record the observations of a reset of all or some environments.

        If the buffer has `cut_episodes`, this cuts the open episodes of these environments, also
        those that were open before the writer was made.

        Args:
            obs: (N, *obs_shape) of all environments, nested like the space: what `envs.reset`
                returns, with or without a mask; copied.
            env_ids: The environments that were reset: int (K,), or a mask bool (N,) as in
                `options["reset_mask"]`. None for all.

        Raises:
            BufferMisuseError: Shape, dtype or ids do not fit; nothing was changed.
        """
        ids = read_distinct_ids(env_ids, self.num_envs, self._device)
        leaves = self._read_obs(obs, self.num_envs)
        self._take_back_obs()
        if len(ids) and self._cut is not None:
            self._cut(ids)
        for target, leaf in zip(self._obs, leaves, strict=True):
            target[ids] = leaf[ids]
        self._is_known[ids] = True
        self._is_over[ids] = self._is_sent[ids] = False
        if (
            isinstance(obs, torch.Tensor)
            and self.autoreset_mode is SAME_STEP
            and getattr(self._buffer, "takes_tensors", False)
            and obs.device == self._device == self._buffer.device
            and not self._is_over.any()
        ):
            self._there = torch.from_numpy(self._obs[0]).to(obs.device, copy=True)
        self._note_state()

    def _take_back_obs(self) -> None:
        """Move the observations back to the host, if they are on the device; waits for it."""
        if self._there is not None:
            self._obs[0][...], self._there = self._there.cpu().numpy(), None

    def _note_state(self) -> None:
        """Update `_goes_on`: all envs are in the middle of episodes, and none is in flight."""
        is_running = self._is_known.all() and not (self._is_over.any() or self._is_sent.any())
        self._goes_on = bool(is_running) and self._there is None and self._is_checked

    def step(
        self,
        actions: Any,
        obs: Any,
        rewards: Any,
        terminations: Any,
        truncations: Any,
        infos: Mapping[str, Any],
        *,
        valid: Any = None,
        **extras: Any,
    ) -> None:
        """Write a step of all environments.

        Args:
            actions: Argument of `envs.step`, (N, *action_shape).
            obs: Result of `envs.step`, like the next four, with N rows; copied.
            rewards: float (N,).
            terminations: bool (N,).
            truncations: bool (N,).
            infos: Read for `final_obs`, under SAME_STEP.
            valid: bool (N,), the rows that acted; None for all except rows that only reset.
            extras: Extra columns of the buffer, (N, ...), one row per row of `actions`.

        Raises:
            BufferMisuseError: An argument does not fit, or an environment was not reset; neither
                the writer nor the buffer was changed.
        """
        if self._goes_on and valid is None and not extras:
            newest = self._obs[0]
            # The fast path for most steps, in all modes: no episode ends, and `add` checks columns.
            is_plain = obs.__class__ is np.ndarray and obs.shape == newest.shape
            if is_plain and _is_none(terminations) and _is_none(truncations):
                self._add(
                    obs=newest, next_obs=obs, actions=actions, rewards=rewards,
                    terminations=terminations, truncations=truncations, env_ids=self._step_ids,
                )  # fmt: skip
                newest[...] = obs
                self.num_transitions += self.num_envs
                return
        if self._is_sent.any():
            raise BufferMisuseError(
                f"step while envs {np.flatnonzero(self._is_sent).tolist()} are in flight; pass "
                "what recv returns to received first"
            )
        result = {"rewards": rewards, "terminations": terminations, "truncations": truncations}
        if self._there is not None and valid is None:
            given = {"actions": actions, **result, **extras}
            if self._step_there(self._there, given, obs, infos):
                return
        columns = self._read_sent(actions, extras, self.num_envs)
        self._write(None, columns, obs, result, infos, valid)

    def _step_there(
        self, before: torch.Tensor, columns: Mapping[str, Any], obs: Any, infos: Mapping[str, Any]
    ) -> bool:
        """Add a step whose results are on the device, without waiting; return whether it fits.

        Under SAME_STEP every row is a transition, so the host need not know the flags.
        """
        found: Any = [infos.get(name) for name in ("final_obs", "_final_obs")]
        finals, is_final = found
        fits = self._is_known.all() and all(
            isinstance(tensor, torch.Tensor)
            and tensor.device == before.device
            and tensor.shape[:1] == (self.num_envs,)
            for tensor in (*columns.values(), obs, *found)
        )
        like = before.shape, before.dtype
        if not fits or {(x.shape, x.dtype) for x in (obs, finals)} != {like}:
            return False
        if (is_final.ndim, is_final.dtype) != (1, torch.bool):
            return False
        mask = is_final.view(-1, *[1] * (obs.ndim - 1))
        self._add(obs=before, next_obs=torch.where(mask, finals, obs), **columns)
        before.copy_(obs)
        self.num_transitions += self.num_envs
        return True

    def sent(self, actions: Any, env_ids: Any = None, **extras: Any) -> None:
        """Record actions that were sent.

        Args:
            actions: (B, *action_shape); copied.
            env_ids: int (B,), their environments; None for all.
            extras: Extra columns of the buffer, (B, ...), one row per row of `actions`, with the
                same names in every call; copied.

        Raises:
            BufferMisuseError: An argument does not fit, or one of the environments is in flight;
                nothing was changed.
        """
        ids = read_distinct_ids(env_ids, self.num_envs, self._device)
        if self._is_sent[ids].any():
            in_flight = ids[self._is_sent[ids]].tolist()
            raise BufferMisuseError(f"envs {in_flight} are in flight; receive their results first")
        columns, kept = self._read_sent(actions, extras, len(ids)), self._sent
        columns["actions"] = columns["actions"].astype(self._action.dtype, copy=False)
        kinds, expected = (
            {name: (str(column.dtype), column.shape[1:]) for name, column in part.items()}
            for part in (columns, kept)
        )
        if kinds != expected:
            if self._is_sent.any():
                raise BufferMisuseError(
                    f"extra columns are {kinds} per env, expected {expected} as for the envs in "
                    "flight; give the same ones each time"
                )
            kept = {n: np.zeros((self.num_envs, *c.shape[1:]), c.dtype) for n, c in columns.items()}
        for name, column in columns.items():
            kept[name][ids] = column
        self._sent = kept
        self._is_sent[ids], self._goes_on = True, False

    def received(self, batch: Any, *, valid: Any = None, **extras: Any) -> None:
        """Write the results that `recv` returned for some environments.

        Args:
            batch: Has `obs`, `rewards`, `terminations`, `truncations`, `infos` with B rows, and
                `env_ids` int (B,).
            valid: bool (B,), as in `step`; None takes the attribute `valid` of the batch, if any.
            extras: Extra columns of the buffer that were not given to `sent`, (B, ...), one row per
                row of the batch.

        Raises:
            BufferMisuseError: An argument does not fit, or `sent` got no actions of one of the
                environments; nothing was changed.
        """
        ids = read_distinct_ids(batch.env_ids, self.num_envs, self._device)
        if not self._is_sent[ids].all():
            raise BufferMisuseError(
                f"got results of envs {ids[~self._is_sent[ids]].tolist()}, but not their actions; "
                "call sent(actions, env_ids) with what was sent"
            )
        columns = _read_extras(extras, len(ids), self._device)
        columns |= {name: column[ids] for name, column in self._sent.items()}
        result = {name: getattr(batch, name) for name in ("rewards", *_FLAGS)}
        valid = getattr(batch, "valid", None) if valid is None else valid
        self._write(ids, columns, batch.obs, result, batch.infos, valid)
        self._is_sent[ids] = False
        self._note_state()

    def _read_sent(self, actions: Any, extras: Mapping[str, Any], count: int) -> dict[str, Any]:
        """Actions and extra columns of some envs, by name."""
        _, shape, dtype = self._action
        actions = read_array("actions", actions, (count, *shape), dtype, self._device)
        return {"actions": actions, **_read_extras(extras, count, self._device)}

    def _write(
        self,
        env_ids: np.ndarray | None,
        columns: dict[str, np.ndarray],
        obs: Any,
        result: Mapping[str, Any],
        infos: Mapping[str, Any],
        valid: Any,
    ) -> None:
        """Add the rows that are transitions, then keep the observations.

        `env_ids` are int64 (B,), or None for all. `columns` are checked actions and extra columns,
        `result` has rewards and flags. The other arguments are those of `step`.
        """
        self._take_back_obs()
        ids = self._all if env_ids is None else env_ids
        where = slice(None) if env_ids is None else env_ids
        count, leaves = len(ids), self._read_obs(obs, len(ids))
        for name, column in result.items():
            dtype = _BOOL if name in _FLAGS else np.dtype(np.float64)
            columns[name] = read_array(name, column, (count,), dtype, self._device)
        over, is_left = columns["terminations"] | columns["truncations"], self._is_over[ids]
        is_valid = None if valid is None else read_valid(valid, count, self._device)
        self._require_reset(ids, is_valid)
        if is_valid is not None:
            over, is_left = over & is_valid, is_left | ~is_valid
        following, goes_on = self._successors(leaves, over, ids, infos, is_valid is not None)
        before = self._obs if env_ids is None else [leaf[env_ids] for leaf in self._obs]
        where_added = ids
        if is_left.any():  # leave out rows that only reset (NEXT_STEP), or whose agent is dead
            rows = np.flatnonzero(~is_left)
            columns = {name: column[rows] for name, column in columns.items()}
            before, following = ([leaf[rows] for leaf in part] for part in (before, following))
            where_added = ids[rows]
        if len(where_added):
            added = {"env_ids": where_added} if self._passes_ids else {}
            obs, next_obs = (build_tree(self._space, part) for part in (before, following))
            self._add(obs=obs, next_obs=next_obs, **columns, **added)
            self.num_transitions += len(where_added)
        for target, leaf in zip(self._obs, leaves, strict=True):
            target[where] = leaf
        # Under SAME_STEP, agents that ended in a game that goes on must not act before it is reset.
        # Rows that only reset, or whose agent is away, have no flags: the next row is a transition.
        self._is_over[where] = goes_on if self.autoreset_mode is SAME_STEP else over
        if is_valid is not None and self._cut is not None and not is_valid.all():
            self._cut(ids[~is_valid])
        if env_ids is None:
            self._note_state()

    def _successors(
        self,
        leaves: list[np.ndarray],
        over: np.ndarray,
        ids: np.ndarray,
        infos: Mapping[str, Any],
        has_agents: bool,
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """The true next observations: under SAME_STEP, the final ones where episodes ended.

        Returns also bool (B,): agents that ended while their game goes on, whose row of `leaves`
        is the final observation itself.
        """
        goes_on = np.zeros(len(ids), np.bool_)
        if self.autoreset_mode is not SAME_STEP or not over.any():
            return leaves, goes_on
        finals, is_given = (  # one copy from a device, instead of one per row
            found.cpu() if isinstance(found, torch.Tensor) else found
            for found in (infos.get("final_obs"), infos.get("_final_obs"))
        )
        following = [np.array(a, leaf.dtype) for a, leaf in zip(leaves, self._leaves, strict=True)]
        for row in np.flatnonzero(over).tolist():
            final = _row_of(finals, row)
            if has_agents and (final is None or not (is_given is None or is_given[row])):
                goes_on[row] = True
                continue
            if final is None:
                raise BufferMisuseError(
                    f"the episode of env {ids[row]} ended, but infos['final_obs'] has nothing for "
                    "it; with autoreset SAME_STEP pass the infos of the step as they are"
                )
            values = tree_leaves(self._space, final, "infos['final_obs']")
            for target, leaf, value in zip(following, self._leaves, values, strict=True):
                target[row] = read_array("final_obs", value, leaf.shape, leaf.dtype)
        return following, goes_on

    def _require_reset(self, ids: np.ndarray, is_valid: np.ndarray | None) -> None:
        unknown = ids[~self._is_known[ids]]
        if len(unknown):
            raise BufferMisuseError(
                f"the observations envs {unknown.tolist()} began with are not known; call "
                "reset(obs) with what envs.reset returned first"
            )
        if self.autoreset_mode is NEXT_STEP:
            return
        is_stuck = self._is_over[ids] if is_valid is None else self._is_over[ids] & is_valid
        if is_stuck.any():
            advice = (
                "autoreset is disabled; call reset(obs, mask) with what envs.reset returned after "
                "resetting them. Of agents that have ended in a game that goes on, pass "
                "valid=envs.valid"
                if self.autoreset_mode is DISABLED
                else "act again, so their game was reset, but infos['final_obs'] had nothing for "
                "them; with autoreset SAME_STEP pass the infos of the step as they are"
            )
            stuck = ids[is_stuck].tolist()
            raise BufferMisuseError(f"the episodes of rows {stuck} have ended and {advice}")

    def _read_obs(self, obs: Any, count: int) -> list[np.ndarray]:
        return read_nest("obs", obs, self._space, self._leaves, count, self._device)


def _is_none(flags: Any) -> bool:
    """Whether flags are a NumPy array of bools without a True."""
    return flags.__class__ is np.ndarray and flags.dtype is _BOOL and b"\x01" not in flags.tobytes()


def _read_extras(
    extras: Mapping[str, Any], count: int, device: torch.device | None
) -> dict[str, np.ndarray]:
    """Extra columns as arrays with one row per environment; the buffer checks dtypes and shapes."""
    columns = {name: as_array(name, given, device) for name, given in extras.items()}
    for name, column in columns.items():
        if column.shape[:1] != (count,):
            raise BufferMisuseError(
                f"{name} has shape {column.shape}, expected ({count}, ...): one row per env, like "
                "actions"
            )
    return columns


def _row_of(finals: Any, row: int) -> Any:
    """One row of `infos["final_obs"]`, which is an array of objects or rows, or a nest of them."""
    if finals is None:
        return None
    if isinstance(finals, Mapping):
        return {key: _row_of(value, row) for key, value in finals.items()}
    if isinstance(finals, tuple):
        return tuple(_row_of(value, row) for value in finals)
    return finals[row]
