"""Parameters of compiled envs: one record for all, or one per env, which a sampler may draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.lib.recfunctions import structured_to_unstructured

from vecenv.core.rows import aligned_zeros
from vecenv.jit.games import as_njit
from vecenv.jit.kernels import EnvKernels, as_record
from vecenv.jit.random import uniform

__all__ = ["as_sampler", "flat_params", "read_params", "write_params"]


def read_params(
    kernels: EnvKernels, params: Any, num_envs: int, *, per_env: bool
) -> np.ndarray | None:
    """Return the parameter records of envs, a copy: (num_envs,), or (1,) where all share one.

    kernels: The kind of env; its own `params` supply missing values.
    params: One record; an array (num_envs,) of records; a mapping of field names to values, each
        one for all envs or an array with one value per env along its first axis; or None.
    num_envs: Number of envs.
    per_env: Whether each env must have its own record, because a sampler writes it.

    Raises:
        TypeError, ValueError: A field does not fit the kernels or the number of envs; names it.
    """
    own = kernels.params
    if params is None and own is None:
        return None
    if params is None or isinstance(params, Mapping):
        if own is None:
            raise TypeError(
                f"params must be one record, as `pack_record` makes, or several: {kernels.name} "
                f"has no defaults that a {type(params).__name__} could change"
            )
        given, fields = params or {}, own.dtype
        names = given.keys() & set(fields.names or ())  # `write_params` refuses others
        per_env = per_env or any(np.ndim(given[k]) > fields[k].ndim for k in names)
        found = _repeated(own, num_envs if per_env else 1)
        write_params(found, given, kernels.name)
        return found
    records = np.asarray(params)
    if own is not None and records.dtype.names is not None and records.dtype.base != own.dtype.base:
        raise TypeError(
            f"params have the fields {_listed(records.dtype)}, expected those of {kernels.name}: "
            f"{_listed(own.dtype)}. A dict of some of them will do, too"
        )
    if records.dtype.names is None or records.dtype.hasobject or records.size == 1:
        one = as_record(params)  # raises if it is no record
        return _repeated(one, num_envs if per_env else 1)
    if records.shape != (num_envs,):
        raise ValueError(
            f"params has shape {records.shape}, expected one record, or ({num_envs},): one per env"
        )
    found = aligned_zeros((num_envs,), np.dtype((np.void, records.dtype)))
    found[...] = records
    return found


def _repeated(record: np.ndarray, count: int) -> np.ndarray:
    found = aligned_zeros((count,), record.dtype)
    found[...] = record
    return found


def write_params(records: np.ndarray, values: Any, name: str) -> None:
    """Write parameters into records (B,) of envs of the kind `name`.

    Values are a mapping of field names to values, for all rows or one per row; or records of the
    same dtype. Raises TypeError or ValueError if a name, dtype or shape is wrong.
    """
    if not isinstance(values, Mapping):
        given = np.asarray(values)
        if given.dtype.base != records.dtype.base or given.shape not in ((), (1,), records.shape):
            raise TypeError(
                f"parameters of {name} are {given.dtype} {given.shape}, expected a dict, or "
                f"records with the fields {_listed(records.dtype)}, one or {len(records)}"
            )
        records[:] = given.astype(records.dtype)
        return
    for key, value in values.items():
        if key not in (records.dtype.names or ()):
            raise ValueError(f"{name} has no parameter {key!r}; it has {_listed(records.dtype)}")
        field, array = records[key], np.asarray(value)
        is_number = array.dtype.kind in "biuf" and not (
            array.dtype.kind == "f" and field.dtype.kind in "biu"
        )
        if not is_number and array.dtype.names is None:
            raise TypeError(f"parameter {key!r} of {name} is {array.dtype}, expected {field.dtype}")
        if np.isnan(array).any() if array.dtype.kind == "f" else False:
            raise ValueError(f"parameter {key!r} of {name} is NaN")
        try:
            field[...] = array
        except ValueError as error:
            raise ValueError(
                f"parameter {key!r} of {name} has shape {array.shape}, expected "
                f"{records.dtype[key].shape} for all, or {field.shape}: one per env"
            ) from error


def flat_params(records: np.ndarray) -> np.ndarray:
    """Return the numbers of records (B,) as float32 (B, P), field by field."""
    return structured_to_unstructured(records, dtype=np.float32).reshape(len(records), -1)


def as_sampler(kernels: EnvKernels, sampler: Any) -> Callable[..., Any]:
    """Return a kernel `(params, rng)` for a sampler.

    A sampler is such a kernel; or a mapping of field names to (lowest, highest): each episode draws
    a float uniformly between them, or an integer including both; or a list of texts, "gravity 5
    15". Raises TypeError or ValueError if a range is invalid, or there is no such parameter.
    """
    form = ""
    if isinstance(sampler, tuple | list) and all(isinstance(text, str) for text in sampler):
        form = " (expected NAME LOWEST HIGHEST)"
        sampler = {words[0]: words[1:] for text in sampler if (words := text.split())}
    if not isinstance(sampler, Mapping):
        if not callable(sampler):
            raise TypeError(
                f"sampler is {sampler!r}, expected a kernel (params, rng) that writes parameters, "
                "or a dict such as {'gravity': (5.0, 15.0)}"
            )
        return sampler
    fields = {} if kernels.params is None else kernels.params.dtype.fields or {}
    draw: Callable[..., Any] = _draw_nothing
    for name, ends in sampler.items():
        if name not in fields or fields[name][0].kind not in "iuf":
            numbers = [key for key, (dtype, *_) in fields.items() if dtype.kind in "iuf"]
            has = ", ".join(numbers) or "none: EnvKernels(params=...) gives them their defaults"
            told = f"sampler: {kernels.name} has no number {name!r} among its parameters{form}"
            raise ValueError(f"{told}; it has {has}")
        try:
            low, high = (float(end) for end in ends)
        except (TypeError, ValueError):
            low, high = 1.0, 0.0
        is_float = fields[name][0].kind == "f"
        if (
            not low <= high
            or not np.isfinite([low, high]).all()
            or (not is_float and not (low.is_integer() and high.is_integer()))
        ):
            raise ValueError(
                f"sampler[{name!r}] is {ends!r}, expected (lowest, highest), two finite "
                f"{'numbers' if is_float else 'integers'}"
            )
        draw = _then(draw, name, low, high, is_float)
    return draw


def _draw_nothing(params, rng):
    """Draw nothing: the first link of a chain of samplers."""


def _then(before: Any, name: str, low: float, high: float, is_float: bool) -> Callable[..., Any]:
    """Return a kernel that also draws one more parameter: a float, or an integer with both ends."""
    first, lowest, count = as_njit(before), int(low), int(high) - int(low) + 1

    def draw(params, rng):
        first(params, rng)
        params[name] = low + (high - low) * uniform(rng)

    def draw_whole(params, rng):
        first(params, rng)
        params[name] = lowest + int(uniform(rng) * count)

    return draw if is_float else draw_whole


def _listed(dtype: np.dtype) -> str:
    return ", ".join(dtype.names or ()) or "no fields"
