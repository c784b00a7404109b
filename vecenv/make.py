"""make_vec: a vector env from an id, a spec, or factories."""

from __future__ import annotations

import copy as copying
import dataclasses
import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import Env
from gymnasium.envs.registration import (
    EnvSpec,
    find_highest_version,
    get_env_id,
    parse_env_id,
)
from gymnasium.vector import AutoresetMode

from vecenv.base import VecEnv
from vecenv.spaces import ObservationMode
from vecenv.sync import SyncVectorEnv

__all__ = ["make_vec"]

EnvFactory = Callable[[], Env]
EnvSource = str | EnvSpec | EnvFactory | Sequence[EnvFactory]
Wrapper = Callable[[Env], Env]

_BACKENDS = ("auto", "sync")
_VECTOR_OPTIONS = ("num_envs", "vectorization_mode", "vector_kwargs", "wrappers")
_logger = logging.getLogger("vecenv")


def make_vec(
    env: EnvSource,
    num_envs: int | None = None,
    *,
    backend: str = "auto",
    wrappers: Sequence[Wrapper] = (),
    copy: bool = True,
    observation_mode: ObservationMode = "same",
    autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    **env_kwargs: Any,
) -> VecEnv:
    """Make a vector env.

    Args:
        env: A registered id (also "module:id"), an `EnvSpec`, a factory (called once per env), or a
            list of factories (one env each).
        num_envs: How many envs; 1 if not given, or the length of the list.
        backend: "sync" steps the envs in this process; "auto" picks a backend.
        wrappers: Applied to every env in this order.
        copy: Whether observations returned are the caller's to keep.
        observation_mode: How observation spaces are batched, see `SyncVectorEnv`.
        autoreset_mode: "NextStep", "SameStep" or "Disabled".
        **env_kwargs: For the env's constructor; ids and specs only. Gymnasium's passive checker
            wraps the first env only, unless `disable_env_checker` is given.

    Raises:
        ValueError: Unknown backend or autoreset mode, or a number of envs below 1 or other than the
            list's.
        TypeError: `env` is none of the above, or a factory was given keyword arguments.
        EnvCreationError: Making an env failed.

    Example:
        >>> envs = make_vec("CartPole-v1", num_envs=4)
        >>> envs
        SyncVectorEnv(CartPole-v1, num_envs=4)
        >>> envs.close()
    """
    if backend not in _BACKENDS:
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(_BACKENDS)}")
    mode = AutoresetMode(autoreset_mode)
    factories, spec = _factories(env, num_envs, env_kwargs)
    if wrappers:
        factories = [_Wrapped(factory, tuple(wrappers)) for factory in factories]
    if backend == "auto":
        _logger.info("backend 'auto' chose 'sync' for %s: it is the only one for Python envs", env)
    envs = SyncVectorEnv(
        factories, copy=copy, observation_mode=observation_mode, autoreset_mode=mode
    )
    if spec is not None:
        spec.kwargs = {**spec.kwargs, "num_envs": envs.num_envs, "vectorization_mode": "sync"}
        envs.spec = spec
    return envs


class _MakeSpec:
    """Factory of one env of a spec; a class rather than a closure so that it can be pickled."""

    def __init__(self, spec: EnvSpec, kwargs: dict[str, Any]) -> None:
        self._spec = spec
        self._kwargs = kwargs

    def __call__(self) -> Env:
        return gym.make(self._spec, **self._kwargs)

    def __repr__(self) -> str:
        return f"gymnasium.make({self._spec.id!r}, **{self._kwargs})"


class _Wrapped:
    """Factory that wraps what another factory makes."""

    def __init__(self, factory: EnvFactory, wrappers: tuple[Wrapper, ...]) -> None:
        self._factory = factory
        self._wrappers = wrappers

    def __call__(self) -> Env:
        env = self._factory()
        for wrapper in self._wrappers:
            env = wrapper(env)
        return env


def _factories(
    env: EnvSource, num_envs: int | None, kwargs: dict[str, Any]
) -> tuple[list[EnvFactory], EnvSpec | None]:
    """Return one factory per env, and the spec if there is one."""
    if isinstance(env, str | EnvSpec):
        spec = find_spec(env) if isinstance(env, str) else copying.deepcopy(env)
        kwargs = {**spec.kwargs, **kwargs}
        # The spec of a vector env has its options too, see `VectorEnv.spec`.
        options = {option: kwargs.pop(option, None) for option in _VECTOR_OPTIONS}
        spec.kwargs = {}
        count = _checked_count(num_envs if num_envs is not None else options["num_envs"] or 1)
        factories = _spec_factories(spec, kwargs, count)
        return factories, dataclasses.replace(spec, kwargs=kwargs)
    if kwargs:
        raise TypeError(
            f"Keyword arguments {sorted(kwargs)} go to the constructor of a registered env; "
            "a factory takes none: bind them with functools.partial"
        )
    if callable(env):
        return [env] * _checked_count(1 if num_envs is None else num_envs), None
    if not isinstance(env, Sequence) or not all(callable(factory) for factory in env):
        raise TypeError(
            "env must be a registered id, an EnvSpec, a factory or a list of factories, "
            f"got {env!r}"
        )
    factories = list(env)
    if num_envs is not None and num_envs != len(factories):
        raise ValueError(f"num_envs is {num_envs}, but {len(factories)} factories were given")
    _checked_count(len(factories))
    return factories, None


def find_spec(env_id: str) -> EnvSpec:
    """Return a copy of the spec of an id, "module:id" and ids without version included.

    Raises:
        gymnasium.error.Error: No such id; says what there is.
        ImportError: The module can't be imported.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    if name not in gym.registry:
        namespace, base, version = parse_env_id(name)
        latest = find_highest_version(namespace, base)
        if version is None and latest is not None:
            name = get_env_id(namespace, base, latest)
    return copying.deepcopy(gym.spec(name))


def _spec_factories(spec: EnvSpec, kwargs: dict[str, Any], count: int) -> list[EnvFactory]:
    first: EnvFactory = _MakeSpec(spec, kwargs)
    if "disable_env_checker" in kwargs:
        return [first] * count
    others: EnvFactory = _MakeSpec(spec, {**kwargs, "disable_env_checker": True})
    return [first] + [others] * (count - 1)


def _checked_count(num_envs: Any) -> int:
    if isinstance(num_envs, bool) or not isinstance(num_envs, int | np.integer) or num_envs < 1:
        raise ValueError(f"num_envs is {num_envs!r}, expected an integer of at least 1")
    return int(num_envs)
