"""Parts of results: the rows of some envs, to be put into the batches of all envs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from vecenv.core.base import StepSlot, VecEnv
from vecenv.core.infos import InfosApart
from vecenv.core.rows import StepRows, rows_of
from vecenv.core.spaces import leaf_by_leaf
from vecenv.sync import SyncVectorEnv

__all__ = ["Fragment", "checked_rows", "infos_by_env"]


def infos_by_env(envs: VecEnv, infos: dict[Any, Any], env_ids: np.ndarray) -> InfosApart:
    """Return infos of a vector env in an actor as dicts by env.

    Args:
        envs: The vector env: a `SyncVectorEnv` has unbatched infos already, others batch them.
        infos: Row k belongs to the env `env_ids[k]`.
        env_ids: int64 (B,), counted from the actor's first env.
    """
    if isinstance(envs, SyncVectorEnv):
        return InfosApart({int(env_ids[row]): info for row, info in infos.items()})
    found = ((env_id, _row_of(infos, row)) for row, env_id in enumerate(env_ids.tolist()))
    return InfosApart({env_id: info for env_id, info in found if info})


def _row_of(infos: dict[str, Any], row: int) -> dict[str, Any]:
    """Return one row of batched infos, with the keys that it has."""
    found: dict[str, Any] = {}
    for key, column in infos.items():
        if f"_{key}" not in infos or not infos[f"_{key}"][row]:
            continue
        if isinstance(column, dict):
            found[key] = _row_of(column, row)
        else:  # a bit as `bool`, so that a column of bits is made again
            is_bits = column.dtype == np.bool_ and column.ndim == 1
            found[key] = bool(column[row]) if is_bits else column[row]
    return found


class Fragment(NamedTuple):
    """The results of T steps of n envs.

    Attributes:
        obs: After every step, (T, n, *obs_shape), nested as the space is.
        rewards: float64 (T, n).
        terminations: bool (T, n).
        truncations: bool (T, n).
        fields: Fields recorded by the policy, arrays (T, n, ...) by name.
        infos: Infos of the steps that had any.
    """

    obs: Any
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray
    fields: dict[str, np.ndarray]
    infos: dict[int, InfosApart]

    @staticmethod
    def of(envs: VecEnv, num_steps: int) -> Fragment:
        """Allocate a fragment of `num_steps` steps of all envs; it has no fields yet.

        Raises:
            TypeError: Observations have no fixed shape.
        """
        shape, space = (num_steps, envs.num_envs), envs.single_observation_space
        rows = StepRows.make(space, num_steps * envs.num_envs, envs.allocate)

        def by_step(array: Any) -> np.ndarray:
            if not isinstance(array, np.ndarray) or array.dtype == object:
                raise TypeError(f"fragments hold observations of fixed shape; {space} has none")
            return array.reshape(*shape, *array.shape[1:])

        obs, rewards = leaf_by_leaf(by_step, rows.obs.batch()), by_step(rows.rewards)
        flags = by_step(rows.terminations), by_step(rows.truncations)
        return Fragment(obs, rewards, *flags, {}, {})

    def slot(self, t: int) -> StepSlot:
        """Return the results of one step: views, which may be passed as `out`."""
        obs = leaf_by_leaf(lambda array: array[t], self.obs)
        return StepSlot(obs, self.rewards[t], self.terminations[t], self.truncations[t])

    def record(self, t: int, fields: dict[str, Any]) -> None:
        """Copy the policy's fields of step t: arrays or CPU tensors (n, ...)."""
        size = self.rewards.shape
        for name, value in fields.items():
            array, kept = np.asarray(value), self.fields.get(name)
            if t == 0 and array.shape[:1] == size[1:]:
                kept = self.fields[name] = np.zeros((*size, *array.shape[1:]), array.dtype)
            if kept is None or kept.shape[1:] != array.shape or kept.dtype != array.dtype:
                before = "one row per env" if kept is None else f"{kept.dtype} {kept.shape[1:]}"
                raise ValueError(
                    f"the policy's field {name!r} is {array.dtype} {array.shape} in step {t}, "
                    f"expected {before}: the same in every step for {size[1]} envs"
                )
            kept[t] = array

    def copy_fields(self, targets: dict[str, np.ndarray], envs: range) -> None:
        """Copy the requested fields into arrays (T, N, ...) of all envs.

        Raises:
            ValueError: The policy did not record a field, or recorded another shape.
        """
        for name, target in targets.items():
            came = self.fields.get(name)
            if came is None or came.shape[2:] != target.shape[2:]:
                shapes = {key: array.shape[2:] for key, array in self.fields.items()}
                raise ValueError(
                    f"fields[{name!r}] has the shape {target.shape[2:]} per step and env, but the "
                    f"policy recorded {shapes}"
                )
            target[:, rows_of(envs)] = came


def checked_rows(name: str, rows: Any, size: tuple[int, int]) -> np.ndarray:
    """Return an array over the memory of an array or tensor (T, N, ...)."""
    if not hasattr(rows, "dtype"):
        raise ValueError(f"{name} is a {type(rows).__name__}, expected an array or a CPU tensor")
    array = np.asarray(rows)
    if array.shape[:2] != size:
        raise ValueError(f"{name} has shape {array.shape}, expected {size} first: (steps, envs)")
    return array
