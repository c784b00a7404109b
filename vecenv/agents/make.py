"""make_vec_agents: a vector env of games with several agents."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode

from vecenv.agents.env import AgentRowsVecEnv, AgentsVecEnv
from vecenv.agents.game import GameEnv
from vecenv.agents.grouping import Grouping
from vecenv.core.importing import import_module
from vecenv.make import make_vec

__all__ = ["make_vec_agents"]


def make_vec_agents(
    env: Any,
    num_games: int | None = None,
    *,
    backend: str = "auto",
    autoreset_mode: str | AutoresetMode | None = None,
    groups: Grouping = None,
    central_state: bool = False,
    vector_kwargs: Mapping[str, Any] | None = None,
    **env_kwargs: Any,
) -> AgentsVecEnv | AgentRowsVecEnv:
    """Make a vector env of games with several agents.

    Args:
        env: A PettingZoo registry id such as "sisl/pursuit-v5", a module with `parallel_env`, its
            name such as "mpe2.simple_spread_v3", a factory of `ParallelEnv`s, or a list of these;
            the `EnvKernels` of a compiled game, or its id, such as "Pursuit-v0", "module:id" too.
        num_games: How many games; 1 if not given, or the length of the list.
        backend: See `vecenv.make_vec`; an env there is a game here.
        autoreset_mode: "NextStep" (the default), "SameStep" or "Disabled".
        groups: Which agents form a group; None for those of equal spaces. See `group_agents`.
        central_state: Whether `envs.state()` returns the games' central state.
        vector_kwargs: Further arguments of the vector env's class.
        **env_kwargs: For the game's constructor; of kernels, for `JitVectorEnv`.

    Returns:
        A `VecEnv` of rows if there is one group, else an `AgentsVecEnv`.

    Raises:
        TypeError: `env` is none of the above.
        EnvCreationError: Making a game failed.
    """
    games: Any
    if is_compiled := _is_compiled(env):
        if groups is not None:
            raise ValueError("a compiled game has its own groups; leave out groups")
        if backend not in ("auto", "jit"):
            raise ValueError(f"the game is compiled and got backend {backend!r}; use 'jit'")
        games = _make_compiled(env, num_games, autoreset_mode, vector_kwargs, env_kwargs)
    else:
        factories = _read_factories(env, num_games, env_kwargs)
        makers = [
            functools.partial(_make_game, factory, groups, central_state) for factory in factories
        ]
        games = make_vec(
            makers,
            backend=backend,
            autoreset_mode=autoreset_mode,
            vector_kwargs=vector_kwargs,
        )
    try:
        members = games.members if is_compiled else games.get_attr("members")[0]
        agents = AgentsVecEnv(games, members)
        return AgentRowsVecEnv(agents) if len(agents.groups) == 1 else agents
    except BaseException:
        games.close()
        raise


def _is_compiled(env: Any) -> bool:
    """Whether these are kernels, or the id of a vector env in Gymnasium's registry."""
    if isinstance(env, str):
        return ":" in env or env in gym.registry
    kernels = sys.modules.get("vecenv.jit.kernels")  # loads no compiler
    return kernels is not None and isinstance(env, kernels.EnvKernels)


def _make_compiled(
    env: Any,
    num_games: int | None,
    autoreset_mode: str | AutoresetMode | None,
    vector_kwargs: Mapping[str, Any] | None,
    env_kwargs: dict[str, Any],
) -> Any:
    from vecenv.agents.compiled import CompiledGames  # loads the compiler

    envs: Any = make_vec(
        env,
        num_games,
        backend="jit",
        autoreset_mode=autoreset_mode,
        vector_kwargs=vector_kwargs,
        **env_kwargs,
    )
    try:
        return CompiledGames(envs)
    except BaseException:
        envs.close()
        raise


def _make_game(factory: Callable[..., Any], groups: Grouping, central_state: bool) -> GameEnv:
    return GameEnv(factory(), groups=groups, central_state=central_state)


def _read_factories(
    env: Any, num_games: int | None, kwargs: dict[str, Any]
) -> list[Callable[..., Any]]:
    if isinstance(env, Sequence) and not isinstance(env, str):
        if num_games is not None and num_games != len(env):
            raise ValueError(f"num_games is {num_games}, but {len(env)} factories were given")
        return [_factory(one, kwargs) for one in env]
    if num_games is not None and (isinstance(num_games, bool) or num_games < 1):
        raise ValueError(f"num_games is {num_games!r}, expected an integer of at least 1")
    return [_factory(env, kwargs)] * (1 if num_games is None else num_games)


def _factory(env: Any, kwargs: dict[str, Any]) -> Callable[..., Any]:
    if isinstance(env, str):
        if "/" in env:
            return functools.partial(_make_registered, env, **kwargs)
        module = import_module(env)
        return functools.partial(_parallel_env(module), **kwargs)
    if isinstance(env, types.ModuleType):
        return functools.partial(_parallel_env(env), **kwargs)
    if callable(env):
        return functools.partial(env, **kwargs)
    raise TypeError(
        f"env must be an id, a module with parallel_env, or a factory of ParallelEnvs, got {env!r}"
    )


def _parallel_env(module: Any) -> Callable[..., Any]:
    found = getattr(module, "parallel_env", None)
    if found is None:
        raise TypeError(f"module {module.__name__} has no parallel_env")
    return found


def _make_registered(name: str, **kwargs: Any) -> Any:
    pettingzoo = importlib.import_module("pettingzoo")
    return pettingzoo.make("parallel", name, **kwargs)
