"""Adapters: vector envs in the forms that other libraries need; see docs/adapters.md.

One module per library, which imports it. The functions here are shared by these modules, and can
serve adapters to further libraries.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

__all__ = [
    "load_library", "read_attr", "require_mode", "rows_of", "split_infos", "write_attr",
]  # fmt: skip


def load_library(module: str, extra: str) -> Any:
    """Import a module of an optional library.

    Args:
        module: Dotted name.
        extra: The extra of this package that installs the library.

    Raises:
        ModuleNotFoundError: The library is not installed; the message says how to install it.
    """
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != library:
            raise  # the library lacks a module that it needs
        raise ModuleNotFoundError(
            f"this adapter needs {library}, which is not installed: pip install 'vecenv[{extra}]'",
            name=error.name,
        ) from None


def require_mode(envs: Any, mode: AutoresetMode, library: str) -> None:
    """Raise for vector envs that a library would misread.

    Raises:
        TypeError: `envs` is not a Gymnasium vector env.
        ValueError: It has another autoreset mode, or reuses the memory of its observations.
    """
    if not isinstance(envs, VectorEnv):
        raise TypeError(
            f"envs is {type(envs).__name__}, expected a gymnasium.vector.VectorEnv; the function "
            "that makes envs for it takes ids and factories"
        )
    if (found := (envs.metadata or {}).get("autoreset_mode")) is not mode:
        raise ValueError(
            f"envs has autoreset_mode {found}, expected {mode.name}, by which {library} resets; "
            f'pass autoreset_mode="{mode.value}"'
        )
    if getattr(envs.unwrapped, "copy", True) is False:
        raise ValueError(
            f"envs has copy=False: {library} keeps observations over the next step, which would "
            "overwrite them; make the envs with copy=True"
        )


def split_infos(
    infos: dict[str, Any], num_envs: int, env_ids: np.ndarray | None = None
) -> list[dict[str, Any]]:
    """Turn batched infos into one dict per env.

    Args:
        infos: Batched infos; a mask `_key` says which envs have `key`; without a mask, all have it.
        num_envs: Number of rows in every array.
        env_ids: int (B,), the envs to return; None for all in order.

    Returns:
        New dicts, B or `num_envs`; array values are views of the batched arrays.

    Example:
        >>> split_infos({"lives": np.array([3, 0]), "_lives": np.array([True, False])}, 2)
        [{'lives': np.int64(3)}, {}]
    """
    ids = list(range(num_envs)) if env_ids is None else env_ids.tolist()
    rows: list[dict[str, Any]] = [{} for _ in ids]
    for key, values in infos.items():
        if key[:1] == "_" and key[1:] in infos:
            continue
        if isinstance(values, dict):
            found = split_infos(values, num_envs, env_ids)
        else:
            found = values if env_ids is None else [values[index] for index in ids]
        mask = infos.get(f"_{key}")
        has_key = [True] * len(ids) if mask is None else mask[ids].tolist()
        for row, value, has in zip(rows, found, has_key, strict=True):
            if has:
                row[key] = value
    return rows


def rows_of(value: Any, num_envs: int) -> list[Any]:
    """Split a value of a whole vector env into one value per env.

    An array, list or tuple of `num_envs` items is split; any other value is repeated.
    """
    is_batched = isinstance(value, np.ndarray | list | tuple) and len(value) == num_envs
    return list(value) if is_batched else [value] * num_envs


def read_attr(envs: VectorEnv, name: str) -> list[Any]:
    """Return an attribute of each env; compiled envs share theirs, see `rows_of`.

    Raises:
        AttributeError: There is no attribute of this name.
    """
    whole: Any = envs.unwrapped
    if hasattr(whole, "get_attr"):
        return list(whole.get_attr(name))
    return rows_of(getattr(whole, name), whole.num_envs)


def write_attr(envs: VectorEnv, name: str, value: Any, env_ids: Sequence[int]) -> None:
    """Set an attribute of some envs to one value; compiled envs have no attributes to set."""
    whole: Any = envs.unwrapped
    if not hasattr(whole, "set_attr"):
        raise TypeError(
            f"cannot set {name!r}: the envs of {type(whole).__name__} are rows of arrays and have "
            "no attributes; change the vector env itself"
        )
    values = list(whole.get_attr(name)) if len(env_ids) < whole.num_envs else [None] * len(env_ids)
    for index in env_ids:
        values[index] = value
    whole.set_attr(name, values)
