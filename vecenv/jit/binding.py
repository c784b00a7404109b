"""Bind the templates of `episodes` and `driver` to the kernels of one kind of env, and compile."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
from numba import from_dtype, njit
from numba import types as numba_types

from vecenv.core.announcing import announced
from vecenv.core.compiling import cached_njit, fingerprint, is_jit_off, is_lasting
from vecenv.core.function_copies import FIXED_PACKAGES
from vecenv.core.masks import mask_width
from vecenv.jit import driver, episodes
from vecenv.jit.driver import JOB_DTYPE
from vecenv.jit.episodes import NO_LIMIT, RUN_DTYPE
from vecenv.jit.failures import explain
from vecenv.jit.games import GameLayout, as_njit, game_kernels
from vecenv.jit.interpreted import interpretable
from vecenv.jit.kernels import ARGUMENTS, EnvKernels
from vecenv.jit.reading import reached, refuse_foreign_draws
from vecenv.jit.trials import try_out

__all__ = [
    "Loop",
    "bind_loop",
    "bound_scope",
    "constants_of",
    "functions_of",
    "play_episodes",
    "rebound",
    "uncompiled",
]

_KERNEL_NAMES = {
    "reset": "env_reset",
    "step": "env_step",
    "observe": "env_observe",
    "action_mask": "env_mask",
    "sampler": "env_sampler",
}  # names in the templates
_GAME_ARGUMENTS = {
    **ARGUMENTS,
    "step": ("state", "actions", "rng"),
    "observe": ("state", "agent", "out"),
    "action_mask": ("state", "agent", "out"),
}  # kernels of a game, as its author writes them


class Loop(NamedTuple):
    """The loop over envs, bound to the kernels of one kind of env."""

    run_rows: Callable[..., Any] | None  # plain Python; None if it is not needed
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

    Args:
        kernels: The kind of env.
        params: (1,) parameter record of the first env, or None if the kernels take none.
        max_episode_steps: For the dry run.
        debug: Whether everything runs in Python and nothing is compiled.
        dry_run: Whether to try out kernels in Python first, unless they are part of this package.

    Raises:
        TypeError: A kernel takes the wrong number of arguments.
        KernelIndexError: A kernel uses an index out of range; found by the dry run.
        KernelResultError: A kernel returns a wrong result or leaves memory unwritten; likewise.
        KernelCompileError: A kernel failed to compile, returns a wrong type, or draws random
            numbers from another stream than its env's.
    """
    is_compiled = not (debug or is_jit_off() or _is_uncompiled.get())
    constants = constants_of(kernels, params)
    functions = functions_of(kernels)
    key = fingerprint([*functions.values(), *constants.values()]), is_compiled
    loop = _loops.get(key)
    is_new = loop is None
    if loop is None:
        _check_arguments(kernels, params is not None)
        refuse_foreign_draws(kernels, functions)
        run_rows = bound_scope(functions, constants, lambda function: function)["run_rows"]
        needs_python = not is_compiled or _calls_users_code(run_rows)  # our own need no trial
        loop = Loop(interpretable(run_rows, kernels) if needs_python else None, None, set())
    tried = (None if params is None else params.tobytes(), max_episode_steps)
    if dry_run and not debug and not is_jit_off() and loop.run_rows and tried not in loop.tried:
        try_out(kernels, loop.run_rows, params, max_episode_steps)
        loop.tried.add(tried)
    if is_compiled and is_new:
        loop = loop._replace(attend=_compiled(kernels, functions, constants))
    # Without the compiler, functions may close over values that the fingerprint does not cover.
    if not is_jit_off() and is_lasting(key[0]):
        _loops[key] = loop
    return loop


def _calls_users_code(run_rows: Any) -> bool:
    """Return whether the loop over envs calls any function outside this package."""
    found = {(one.__module__ or "").partition(".")[0] for one in reached(run_rows)}
    return not found <= {"vecenv", *FIXED_PACKAGES}


def play_episodes(
    kernels: EnvKernels, params: np.ndarray | None, max_episode_steps: int, seconds: float
) -> int | None:
    """Play whole episodes of one env in Python, which checks indices.

    Returns:
        The number of episodes that ended within `seconds`, at most NUM_EPISODES; None for kernels
        of this package, which are not played.

    Raises:
        KernelIndexError, KernelResultError: A kernel made this mistake.
    """
    functions, constants = functions_of(kernels), constants_of(kernels, params)
    run_rows = bound_scope(functions, constants, lambda function: function)["run_rows"]
    if not _calls_users_code(run_rows):
        return None
    return try_out(kernels, interpretable(run_rows, kernels), params, max_episode_steps, seconds)


def functions_of(kernels: EnvKernels) -> dict[str, Any]:
    """Return the kernels of one env by name; for a game, those that `game_kernels` makes."""
    functions = {name: getattr(kernels, name) for name in ARGUMENTS}
    if kernels.groups is not None:
        functions |= game_kernels(GameLayout.of(kernels.groups), functions)
    functions["action_mask"] = functions["action_mask"] or episodes.no_mask
    if functions["sampler"] is None:
        del functions["sampler"]
    return functions


def constants_of(kernels: EnvKernels, params: np.ndarray | None) -> dict[str, Any]:
    """Return the global constants of the templates."""
    is_masked = kernels.action_mask is not None
    return {
        "STATE_DTYPE": kernels.state_dtype,
        "RUN_DTYPE": RUN_DTYPE,
        "OBS_DTYPE": kernels.observation_space.dtype,
        "OBS_SHAPE": kernels.observation_space.shape,
        "ACTION_DTYPE": kernels.action_space.dtype,
        "ACTION_SHAPE": kernels.action_space.shape,
        "PARAMS_DTYPE": None if params is None else params.dtype,
        "NUM_MASKED_ACTIONS": mask_width(kernels.action_space) if is_masked else 0,
    }


def _compiled(kernels: EnvKernels, functions: dict[str, Any], constants: dict[str, Any]) -> Any:
    """Compile `attend` for these kernels, or load it from disk."""
    compiled = {name: as_njit(function) for name, function in functions.items()}
    scope = bound_scope(
        compiled,
        constants,
        lambda function: njit(function, inline="always"),
        own_params=driver.own_params,
    )
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
        explain(kernels, compiled, constants, error)
    attend.disable_compile()
    return attend


def bound_scope(
    functions: dict[str, Any],
    constants: dict[str, Any],
    finish: Callable[[Any], Any],
    *,
    own_params: Any = episodes.own_params,
) -> dict[str, Any]:
    """Return the global names of the templates, bound to these kernels and constants.

    `finish` is called with each function between `attend` and the kernels. Numba inlines these
    functions; else LLVM would optimize the kernels again at each call level.
    """
    scope = {**vars(episodes), **vars(driver), **constants}
    if constants["PARAMS_DTYPE"] is None:
        scope["PARAMS_DTYPE"] = np.dtype(np.float64)
        step_adapter, pair_adapter = episodes.step_without_params, episodes.pair_without_params
    else:
        step_adapter, pair_adapter = episodes.step_with_params, episodes.pair_with_params
    scope["env_sampler"] = finish(rebound(episodes.keep_params, {}))
    adapters = {"step": step_adapter, "sampler": episodes.sample_params}
    for name, kernel in functions.items():
        names = {"kernel": kernel, "own_params": own_params}
        scope[_KERNEL_NAMES[name]] = finish(rebound(adapters.get(name, pair_adapter), names))
    scope["obs_row"] = episodes.scalar_row if constants["OBS_SHAPE"] == () else episodes.array_row
    scope["action_row"] = episodes.array_row
    for template in (episodes.run_rows, driver.unpack):
        scope[template.__name__] = finish(rebound(template, scope))
    return scope


def rebound(template: Any, scope: dict[str, Any]) -> types.FunctionType:
    """Copy a template so that it reads its global names from `scope`."""
    template = getattr(template, "py_func", template)
    copy = types.FunctionType(template.__code__, scope, template.__name__)
    copy.__module__ = template.__module__
    return copy


def _check_arguments(kernels: EnvKernels, has_params: bool) -> None:
    """Raise if a kernel, or `render`, can't be called with its arguments."""
    known = ARGUMENTS if kernels.groups is None else _GAME_ARGUMENTS
    for name, arguments in {**known, "render": ("state",)}.items():
        expected = (*arguments, "params") if has_params else arguments
        if name == "sampler":
            expected = ("params", "rng")
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
