"""Per-env info dicts -> the batched info dict with masks, as Gymnasium defines it.

On every backend the batched infos equal what `add_info` makes of the envs' own dicts, entered in
the order of the rows. Backends with envs in other processes send those dicts here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vecenv.core.errors import InfoError
from vecenv.core.spaces import short

__all__ = ["InfosApart", "add_info", "copy_value", "keep_info", "take_infos"]

_SCALARS = (int, float, bool)
_PLAIN = frozenset((float, int, bool, str, np.float64, np.float32, np.int64))  # without parts


def add_info(
    infos: dict[str, Any],
    info: dict[str, Any],
    index: int,
    num_envs: int,
    env_id: int | None = None,
    path: tuple[Any, ...] = (),
) -> None:
    """Enter one env's info into the batched infos, in place.

    The rules are those of `gymnasium.vector.VectorEnv._add_info`: each key holds an array with one
    row per env, and a boolean mask `_key`; numbers and arrays keep their dtype, dicts are batched
    recursively, everything else and `final_obs` goes into an object array. The first env that has a
    key decides dtype and shape; later values are cast as NumPy does.

    Args:
        infos: Batched infos so far; changed in place.
        info: The info of one env: arrays, lists, tuples and dicts in it are copied.
        index: Row of this env.
        num_envs: Rows of every array.
        env_id: The env's number in error messages; None for `index`.
        path: Keys of the dicts around `info`.

    Raises:
        InfoError: A value can't be assigned to the array that an earlier env's value made.
    """
    who = index if env_id is None else env_id
    if info.__class__ is not dict and not isinstance(info, Mapping):
        raise InfoError(
            f"env {who} returned the infos {short(info)} of type {type(info).__name__}, "
            "expected a dict"
        )
    for key, value in info.items():
        is_plain = value.__class__ in _PLAIN
        column = infos.get(key)
        try:
            if not is_plain and isinstance(value, dict) and key != "final_obs":
                if column is None:
                    column = infos[key] = {}
                elif not isinstance(column, dict):
                    raise TypeError("an array, and now a dict")
                add_info(column, value, index, num_envs, env_id, (*path, key))
            else:
                if column is None:
                    column = infos[key] = _new_column(key, value, num_envs)
                if not is_plain and (isinstance(column, dict) or column.dtype.hasobject):
                    value = copy_value(value)
                column[index] = value
            mask = infos.get(mask_key := f"_{key}")
            if mask is None:
                mask = infos[mask_key] = np.zeros(num_envs, dtype=np.bool_)
            mask[index] = True
        except InfoError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise _misfit((*path, key), value, column, who) from error


def _new_column(key: str, value: Any, num_envs: int) -> np.ndarray:
    """Make an array that can hold `value` for each of the envs."""
    if key != "final_obs":
        if type(value) in _SCALARS or isinstance(value, np.number):
            return np.zeros(num_envs, dtype=type(value))
        if isinstance(value, np.ndarray):
            return np.zeros((num_envs, *value.shape), dtype=value.dtype)
    return np.full(num_envs, fill_value=None, dtype=object)


def _misfit(path: tuple[Any, ...], value: Any, column: Any, env_id: int) -> InfoError:
    """Return the error for a value that does not fit into the batched infos."""
    name = "".join(f"[{key!r}]" for key in path)
    came, rows = f"the {type(value).__name__} {short(value)}", f"a {type(column).__name__}"
    if isinstance(value, np.ndarray):
        came = f"an array of dtype {value.dtype} and shape {value.shape}"
    if isinstance(column, np.ndarray):
        rows = f"{column.dtype} of shape {column.shape[1:]} per env"
        rows = rows if column.ndim > 1 else f"one {column.dtype} per env"
    return InfoError(
        f"infos{name} of env {env_id} is {came}, but the batched infos hold {rows} there, as the "
        "first env with this key decides; let a key have one type and shape, or a list, which is "
        "kept as it is"
    )


def copy_value(value: Any) -> Any:
    """Return a value with arrays, dicts, lists, tuples and sets copied, other objects as they are.

    An env may reuse what it returned at the next step, and may change what it is given; so both
    are copied.
    """
    kind = value.__class__
    if kind in _PLAIN:
        return value
    if kind is np.ndarray or kind is set:
        return value.copy()
    if kind is dict:
        return {key: copy_value(part) for key, part in value.items()}
    if isinstance(value, dict):
        parts = copy.copy(value)  # keeps the type, such as OrderedDict
        parts.update((key, copy_value(part)) for key, part in value.items())
        return parts
    return kind(map(copy_value, value)) if kind is list or kind is tuple else value


class InfosApart(dict[int, dict[str, Any]]):
    """Infos that are not batched yet, by row.

    Vector envs in other processes return this, so that infos are batched only once.
    """

    def enter(
        self,
        infos: dict[str, Any],
        rows: Sequence[int] | np.ndarray,
        num_rows: int,
        env_ids: Sequence[int] | np.ndarray,
    ) -> None:
        """Enter the infos into batched infos of `num_rows` rows, in place.

        `rows` gives the row there of each row here; `env_ids` gives the env, for errors.
        """
        for row, info in self.items():
            add_info(infos, info, int(rows[row]), num_rows, int(env_ids[row]))


def keep_info(infos: dict[int, Any], info: Any, index: int, num_envs: int) -> None:
    """Keep an info as `add_info` does, but unbatched."""
    infos[index] = copy_value(info)


def take_infos(infos: dict[str, Any], env_ids: np.ndarray) -> dict[str, Any]:
    """Return rows of batched infos, int64 (B,), in this order: a new dict with copies."""
    return {
        key: take_infos(value, env_ids) if isinstance(value, dict) else value[env_ids]
        for key, value in infos.items()
    }
