"""Bind the templates of `driver` to the kernels of one kind of env, and compile."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
from numba import from_dtype, njit
from numba import types as numba_types

from vecenv.core.compiling import (
    FIXED_PACKAGES,
    announced,
    cached_njit,
    fingerprint,
    is_jit_off,
    is_lasting,
)
from vecenv.core.masks import mask_starts, mask_width
from vecenv.jit import driver
from vecenv.jit.driver import JOB_DTYPE, NO_LIMIT, RUN_DTYPE
from vecenv.jit.errors import KernelIndexError, explain, reached, refuse_foreign_draws
from vecenv.jit.games import GameLayout, as_njit, game_kernels
from vecenv.jit.interpreted import interpretable, try_out
from vecenv.jit.kernels import ARGUMENTS, EnvKernels, arguments_of

Parts = tuple[dict[str, Any], dict[str, Any]]  # kernels by name, constants of the templates


class Loop(NamedTuple):
    """The loop over envs, bound to the kernels of one kind of env."""

    is_ours: bool  # no kernel calls a function outside of this package
    run_rows: Any  # plain Python; None if it is not needed
    attend: Any  # compiled for its only signature; None with the JIT off or for debugging
    tried: set[Any]  # parameters of the dry runs so far


_is_uncompiled: ContextVar[bool] = ContextVar("is_uncompiled", default=False)
_loops: dict[tuple[str, bool], Loop] = {}  # by fingerprint and whether it is compiled


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Compile nothing for envs made inside: their parts are for a device."""
    token = _is_uncompiled.set(True)
    try:
        yield
    finally:
        _is_uncompiled.reset(token)


def bind_loop(
    kernels: EnvKernels,
    params: np.ndarray | None,
    *,
    max_episode_steps: int = NO_LIMIT,
    debug: bool = False,
    dry_run: bool = True,
) -> Loop:
    """Return the loop over envs for these kernels: from memory, from disk, or compiled now.

    `params` is the (1,) parameter record of the first env, or None if the kernels take none. See
    `JitVectorEnv` about the others; kernels of this package are not tried out.

    Raises:
        TypeError: A kernel takes the wrong number of arguments.
        KernelIndexError: A kernel uses an index out of range; found by the dry run.
        KernelResultError: A kernel returns a wrong result or leaves memory unwritten; likewise.
        KernelCompileError: A kernel failed to compile, returns a wrong type, or draws random
            numbers from another stream than its env's.
    """
    is_compiled = not (debug or is_jit_off() or _is_uncompiled.get())
    functions, constants = parts_of(kernels, params)
    key = fingerprint([*functions.values(), *constants.values()]), is_compiled
    loop = _loops.get(key)
    if loop is None:
        _check_arguments(kernels, params is not None)
        refuse_foreign_draws(kernels, functions)
        run_rows = bound_scope(functions, constants, lambda function: function)["run_rows"]
        found = {(one.__module__ or "").partition(".")[0] for one in reached(run_rows)}
        is_ours = found <= {"vecenv", *FIXED_PACKAGES}
        is_tried = not (is_compiled and is_ours)
        loop = Loop(is_ours, interpretable(run_rows, kernels) if is_tried else None, None, set())
    tried = (None if params is None else params.tobytes(), max_episode_steps)
    dry_run = dry_run and not is_jit_off() and not (debug and loop.is_ours)
    if dry_run and loop.run_rows and tried not in loop.tried:
        try:
            try_out(kernels, loop.run_rows, params, max_episode_steps)
        except KernelIndexError:
            if not debug:  # else it is an IndexError of the call that uses it
                raise
        loop.tried.add(tried)
    if is_compiled and loop.attend is None:
        loop = loop._replace(attend=_compiled(kernels, params))
    # Without the compiler, functions may close over values that the fingerprint does not cover.
    if not is_jit_off() and is_lasting(key[0]):
        _loops[key] = loop
    return loop


def parts_of(kernels: EnvKernels, params: np.ndarray | None) -> Parts:
    """Return kernels of one env by name, and the global constants of the templates.

    For a game the kernels are those that `game_kernels` makes.
    """
    functions = {name: getattr(kernels, name) for name in ARGUMENTS}
    if kernels.groups is not None:
        functions |= game_kernels(GameLayout.of(kernels.groups), functions)
    functions["action_mask"] = functions["action_mask"] or driver.no_mask
    if functions["sampler"] is None:
        del functions["sampler"]
    starts: tuple[int, ...] = (0, 0)
    if kernels.action_mask is not None:
        starts = *map(int, mask_starts(kernels.action_space)), mask_width(kernels.action_space)
    return functions, {
        "STATE_DTYPE": kernels.state_dtype,
        "RUN_DTYPE": RUN_DTYPE,
        "OBS_DTYPE": kernels.observation_space.dtype,
        "OBS_SHAPE": kernels.observation_space.shape,
        "ACTION_DTYPE": kernels.action_space.dtype,
        "ACTION_SHAPE": kernels.action_space.shape,
        "PARAMS_DTYPE": None if params is None else params.dtype,
        "MASK_STARTS": starts,
    }


def njit_parts(kernels: EnvKernels, params: np.ndarray | None) -> Parts:
    """Return `parts_of` with functions for compiled code to call."""
    functions, constants = parts_of(kernels, params)
    return {name: as_njit(function) for name, function in functions.items()}, constants


def _compiled(kernels: EnvKernels, params: np.ndarray | None) -> Any:
    """Compile `attend` for these kernels, or load it from disk."""
    functions, constants = njit_parts(kernels, params)
    finish = functools.partial(njit, inline="always")
    scope = bound_scope(functions, constants, finish, own_params=driver.guessed_params)
    attend = cached_njit(rebound(driver.attend, scope), nogil=True)
    job_array = numba_types.Array(from_dtype(JOB_DTYPE), 1, "C")
    words = numba_types.Array(numba_types.int64, 1, "C")
    try:
        with announced(
            kernels.name,
            is_compiling=lambda: bool(attend.stats.cache_misses),
            is_kept=lambda: attend._cache.cache_path is not None,
        ):
            attend.compile((words, job_array, numba_types.int64, numba_types.int64))
    except Exception as error:  # Numba lets KeyError and others through
        explain(kernels, functions, constants, error)
    attend.disable_compile()
    return attend


def bound_scope(
    functions: dict[str, Any],
    constants: dict[str, Any],
    finish: Callable[[Any], Any],
    view: Callable[[Any, tuple[int, ...]], Any] = driver.array_maker,
    own_params: Any = driver.own_params,
) -> dict[str, Any]:
    """Return the global names of the templates, bound to these kernels and constants.

    `finish` is called with each function between `attend` and the kernels. Numba inlines these
    functions; else LLVM would optimize the kernels again at each call level. `view` and
    `own_params` do what the functions of these defaults do.
    """
    has_params = constants["PARAMS_DTYPE"] is not None
    scope = {**vars(driver), **constants}
    kind = "with" if has_params else "without"
    adapters = {"step": scope[f"_step_{kind}_params"], "sampler": scope["_sample_params"]}
    scope["env_sampler"] = finish(rebound(scope["_keep_params"], {}))
    for name, kernel in functions.items():
        adapter = adapters.get(name, scope[f"_pair_{kind}_params"])
        scope[f"env_{name}"] = finish(
            rebound(adapter, {"kernel": kernel, "own_params": own_params})
        )
    scope["obs_row"] = driver.scalar_row if constants["OBS_SHAPE"] == () else driver.array_row
    scope["action_row"] = driver.array_row
    scope["allows_something"] = njit(rebound(driver.any_in_each_part, constants))
    rows = {
        "states_at": (constants["STATE_DTYPE"], ()),
        "runs_at": (RUN_DTYPE, ()),
        "params_at": (constants["PARAMS_DTYPE"] if has_params else np.float64, ()),
        "actions_at": (constants["ACTION_DTYPE"], constants["ACTION_SHAPE"]),
        "obs_at": (constants["OBS_DTYPE"], constants["OBS_SHAPE"]),
        "masks_at": (np.bool_, (constants["MASK_STARTS"][-1],)),
        **{f"{kind}_at": (kind, ()) for kind in ("int64", "float32", "float64", "bool")},
    }
    scope |= {name: view(*row) for name, row in rows.items()}
    for template in (driver.run_rows, driver.unpack):
        scope[template.__name__] = finish(rebound(template, scope))
    return scope


def rebound(template: Any, scope: dict[str, Any]) -> types.FunctionType:
    """Copy a template so that it reads its global names from `scope`."""
    copy = types.FunctionType(template.__code__, scope, template.__name__)
    copy.__module__ = template.__module__
    return copy


def _check_arguments(kernels: EnvKernels, has_params: bool) -> None:
    """Raise if a kernel, or `render`, can't be called with its arguments."""
    for name in (*ARGUMENTS, "render"):
        expected = arguments_of(name, has_params=has_params)
        if kernels.groups is not None and name in ("observe", "action_mask"):
            expected = ("state", "agent", *expected[1:])
        given = getattr(kernels, name)
        for function in given.values() if isinstance(given, Mapping) else [given]:
            if function is None:
                continue
            signature = inspect.signature(getattr(function, "py_func", function))
            try:
                signature.bind(*expected)
            except TypeError as error:
                why = f" ({'with params, as' if has_params else 'no'} `params` was given)"
                raise TypeError(
                    f"{kernels.name}: kernel {name}{signature} must take "
                    f"({', '.join(expected)}){why}"
                ) from error
