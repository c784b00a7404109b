"""From kernels to compiled code: bind the templates of `driver`, compile them, explain failures."""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numba import from_dtype, njit
from numba import types as numba_types
from numba.core.dispatcher import Dispatcher
from numba.core.errors import NumbaExperimentalFeatureWarning

from vecenv.fingerprint import (
    cached_njit,
    importable_dynamic_module,
    is_jit_off,
    without_own_caches,
)
from vecenv.jit import driver
from vecenv.jit.cache_files import tidy
from vecenv.jit.job import JOB_DTYPE, RUN_DTYPE
from vecenv.jit.kernels import EnvKernels

__all__ = ["CompiledLoop", "KernelCompileError", "bind_loop"]

_ARGUMENTS = {
    "reset": ("state", "rng"),
    "step": ("state", "action", "rng"),
    "observe": ("state", "out"),
    "action_mask": ("state", "out"),
}
_KERNEL_NAMES = {
    "reset": "env_reset",
    "step": "env_step",
    "observe": "env_observe",
    "action_mask": "env_mask",
}  # in the templates
_REASON_LINES = 8
_DETAILS = (
    *(
        "There are",
        "- Of which",
        "Overload",
        "With argument",
        "No match",
        "Rejected",
        "raised from",
    ),
    *("During: Pass", "During: resolving", "During: typing"),
)


class KernelCompileError(RuntimeError):
    """A kernel can't be compiled; names the function, its argument types and the reason."""


class CompiledLoop(NamedTuple):
    """The loop over envs, bound to the kernels of one kind of env; see `driver`."""

    run_rows: Callable[..., Any]
    attend: Any  # compiled for its only signature; None with the JIT off


_loops: dict[tuple[Any, ...], CompiledLoop] = {}


def bind_loop(kernels: EnvKernels, params_dtype: np.dtype | None) -> CompiledLoop:
    """Return the loop over envs for these kernels: from memory, from disk, or compiled now.

    Raises:
        TypeError: A kernel takes the wrong number of arguments.
        KernelCompileError: A kernel failed to compile or does not return what it should.
    """
    constants = _constants(kernels, params_dtype)
    functions = {name: getattr(kernels, name) for name in _ARGUMENTS}
    key = (*functions.values(), *constants.values())
    if key not in _loops:
        for name, function in functions.items():
            if function is not None:
                _check_arguments(kernels, name, function, params_dtype is not None)
        _loops[key] = _bind(kernels, functions, constants)
    return _loops[key]


def _constants(kernels: EnvKernels, params_dtype: np.dtype | None) -> dict[str, Any]:
    """Return the global constants of the templates."""
    mask_space = kernels.action_space if kernels.action_mask is not None else None
    return {
        "STATE_DTYPE": kernels.state_dtype,
        "RUN_DTYPE": RUN_DTYPE,
        "OBS_DTYPE": kernels.observation_space.dtype,
        "OBS_SHAPE": kernels.observation_space.shape,
        "ACTION_DTYPE": kernels.action_space.dtype,
        "ACTION_SHAPE": kernels.action_space.shape,
        "PARAMS_DTYPE": params_dtype,
        "NUM_MASKED_ACTIONS": 0 if mask_space is None else int(mask_space.n),  # type: ignore
    }


def _bind(
    kernels: EnvKernels, functions: dict[str, Any], constants: dict[str, Any]
) -> CompiledLoop:
    functions = {**functions, "action_mask": functions["action_mask"] or driver.no_mask}
    compiled = {name: _as_njit(function) for name, function in functions.items()}
    scope = _bound_scope(compiled, constants)
    if is_jit_off():
        return CompiledLoop(scope["run_rows"], None)
    attend = cached_njit(_rebound(driver.attend, scope), nogil=True)
    try:
        _compile_or_load(attend)
    except Exception as error:  # Numba lets KeyError and others through
        _explain(kernels, compiled, constants, error)
    attend.disable_compile()
    return CompiledLoop(scope["run_rows"], attend)


def _compile_or_load(attend: Any) -> None:
    """Compile `attend` for its only signature; twice, if it may be the cache that is broken."""
    job_array = numba_types.Array(from_dtype(JOB_DTYPE), 1, "C")
    words = numba_types.Array(numba_types.int64, 1, "C")
    signature = (words, job_array, numba_types.int64, numba_types.int64)
    with (
        without_own_caches([attend.py_func]),
        importable_dynamic_module(),
        warnings.catch_warnings(),
    ):
        # A function compiled for a record also serves one with more fields, which is right.
        warnings.simplefilter("ignore", NumbaExperimentalFeatureWarning)
        try:
            attend.compile(signature)
        except Exception:
            attend._cache.flush()
            attend.compile(signature)
    tidy(attend)


def _bound_scope(compiled: dict[str, Any], constants: dict[str, Any]) -> dict[str, Any]:
    """Return the global names of the templates, bound to these kernels and constants.

    What stands between `attend` and the kernels is inlined by Numba: LLVM would optimize the
    kernels once more with each function on the way.
    """
    scope = {**vars(driver), **constants}
    if constants["PARAMS_DTYPE"] is None:
        scope["PARAMS_DTYPE"] = np.dtype(np.float64)
        step_adapter, pair_adapter = driver.step_without_params, driver.pair_without_params
    else:
        step_adapter, pair_adapter = driver.step_with_params, driver.pair_with_params
    for name, kernel in compiled.items():
        adapter = _rebound(step_adapter if name == "step" else pair_adapter, {"kernel": kernel})
        scope[_KERNEL_NAMES[name]] = njit(adapter, inline="always")
    scope["obs_row"] = driver.scalar_row if constants["OBS_SHAPE"] == () else driver.array_row
    scope["action_row"] = driver.array_row
    for name in ("run_rows", "unpack"):
        scope[name] = njit(_rebound(getattr(driver, name), scope), inline="always")
    return scope


def _as_njit(function: Any) -> Any:
    """Compile a plain function; a division by zero gives inf or NaN, as kernels must not raise."""
    return function if isinstance(function, Dispatcher) else njit(function, error_model="numpy")


def _rebound(template: Any, scope: dict[str, Any]) -> types.FunctionType:
    """Copy a template so that it reads its global names from `scope`."""
    template = getattr(template, "py_func", template)
    copy = types.FunctionType(template.__code__, scope, template.__name__)
    copy.__module__ = template.__module__
    return copy


def _check_arguments(kernels: EnvKernels, name: str, function: Any, has_params: bool) -> None:
    """Refuse a kernel that can't be called with the arguments it will get."""
    expected = (*_ARGUMENTS[name], *(("params",) if has_params else ()))
    signature = inspect.signature(getattr(function, "py_func", function))
    try:
        signature.bind(*expected)
    except TypeError as error:
        why = " (with params, as `params` was given)" if has_params else ""
        raise TypeError(
            f"{kernels.name}: kernel {name}{signature} must take ({', '.join(expected)}){why}"
        ) from error


def _explain(
    kernels: EnvKernels, compiled: dict[str, Any], constants: dict[str, Any], error: Exception
) -> NoReturn:
    """Compile kernel by kernel to find the one at fault, and say what is wrong with it."""
    state, rng = from_dtype(constants["STATE_DTYPE"]), from_dtype(RUN_DTYPE)
    params = [] if constants["PARAMS_DTYPE"] is None else [from_dtype(constants["PARAMS_DTYPE"])]
    action = from_dtype(constants["ACTION_DTYPE"])
    if constants["ACTION_SHAPE"]:
        action = numba_types.Array(action, len(constants["ACTION_SHAPE"]), "C")
    obs = numba_types.Array(
        from_dtype(constants["OBS_DTYPE"]), max(1, len(constants["OBS_SHAPE"])), "C"
    )
    mask = numba_types.Array(numba_types.boolean, 1, "C")
    calls = {
        "reset": [state, rng, *params],
        "step": [state, action, rng, *params],
        "observe": [state, obs, *params],
        "action_mask": [state, mask, *params],
    }
    for name, types_all in calls.items():
        if getattr(kernels, name) is None:
            continue
        kernel = compiled[name]
        names = [*_ARGUMENTS[name], "params"]
        listed = ", ".join(f"{a}: {_type_text(t)}" for a, t in zip(names, types_all, strict=False))
        try:
            with without_own_caches([kernel]):
                kernel.compile(tuple(types_all))
        except Exception as reason:
            raise KernelCompileError(
                f"{kernels.name}: kernel {name}({listed}) can't be compiled:\n{_reason(reason)}"
            ) from error
        if name == "step":
            _check_step_result(kernels, kernel.overloads[tuple(types_all)].signature.return_type)
    raise KernelCompileError(
        f"{kernels.name}: each kernel can be compiled, the loop over them can't: {error}"
    ) from error


def _check_step_result(kernels: EnvKernels, came: Any) -> None:
    """Refuse a step that does not return what the loop unpacks."""
    parts = getattr(came, "types", ()) if isinstance(came, numba_types.BaseTuple) else ()
    is_number = [isinstance(part, numba_types.Number | numba_types.Boolean) for part in parts]
    if is_number == [True, True, True]:
        return
    raise KernelCompileError(
        f"{kernels.name}: kernel step returns {came}, "
        "expected a tuple (reward, terminated, truncated) of a number and two bools"
    )


def _reason(error: Exception) -> str:
    """What Numba says is wrong, without the overloads that it tried."""
    if isinstance(error, KeyError):
        return f"a record has no field {error}"
    lines = str(error).strip().splitlines()
    told = [line for line in lines if line.strip() and not line.strip().startswith(_DETAILS)]
    return "\n".join(told[:_REASON_LINES])


def _type_text(kind: Any) -> str:
    """Numba's name of a type, records as their fields."""
    if kind == from_dtype(RUN_DTYPE):
        return "random stream"
    if isinstance(kind, numba_types.Record):
        return "{" + ", ".join(f"{name}: {kind.typeof(name)}" for name in kind.fields) + "}"
    return str(kind)
