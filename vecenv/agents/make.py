"""make_vec_agents: a vector env of games with several agents."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import inspect
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import AutoresetMode

from vecenv.agents.env import AgentRowsVecEnv, AgentsVecEnv
from vecenv.agents.game import GameEnv
from vecenv.agents.grouping import Grouping, Members
from vecenv.backends import is_for_compiled, is_on_device
from vecenv.core.arguments import import_module, import_object, read_count
from vecenv.core.spaces import is_same
from vecenv.make import find_spec, has_compiled_envs, make_vec

__all__ = ["game_maker", "make_vec_agents"]


def make_vec_agents(
    env: Any,
    num_games: int | None = None,
    *,
    backend: str | None = None,
    device: Any = None,
    autoreset_mode: str | AutoresetMode | None = None,
    groups: Grouping = None,
    pad: bool = False,
    agent_indicator: bool = False,
    central_state: bool = False,
    mask_infos: bool = False,
    max_agents: int | None = None,
    agent_spaces: tuple[Space, Space] | None = None,
    vector_kwargs: Mapping[str, Any] | None = None,
    **env_kwargs: Any,
) -> AgentsVecEnv | AgentRowsVecEnv:
    """Make a vector env of games with several agents.

    Args:
        env: A PettingZoo registry id such as "sisl/pursuit-v5"; a module with `parallel_env`, its
            name such as "mpe2.simple_spread_v3"; a factory of `ParallelEnv`s, or a list of these;
            the `EnvKernels` of a compiled game, or its id in Gymnasium's registry, such as
            "Pursuit-v0" or "Cage4-v0" ("module:id" too); or "module:name" of a factory or kernels.
            An AEC env is converted if its game can be played in parallel; games in which
            agents take turns are refused.
        num_games: Number of games; 1 if not given, or as many as the list has.
        backend: See `vecenv.make_vec`; here an env is a game. Compiled games are stepped together,
            by "jit", "cuda", None or "auto"; other backends are for games in Python.
        device: Device of compiled games, see `vecenv.make_vec`: "cuda" or another CUDA device makes
            a `CudaAgentsVecEnv`, or its rows, with results that are tensors. For other games
            it is an argument of their constructor.
        autoreset_mode: "NextStep" (the default), "SameStep" or "Disabled".
        groups: The groups: a dict from names of groups to names of agents, or a function from an
            agent to the name of its group. None groups agents with equal spaces.
        pad: Pad the spaces of a group, and without `groups` those of all agents, to be equal:
            observations with zeros, Discrete actions with more numbers, which masks forbid.
            Compiled games can be padded only if their class has an option `pad`.
        agent_indicator: Append to observations, which must be vectors, the one-hot index of the
            observing agent in its group, for policies that agents share.
        central_state: Whether `envs.state()` returns the games' central state.
        mask_infos: Whether every reset and step reports infos["action_mask"].
        max_agents: For games without `possible_agents`: the largest number of agents at a time.
            An agent takes the first free row and keeps it; when it takes the row,
            `infos["agent"]` has its name.
        agent_spaces: For such games, the observation space and the action space of every agent.
        vector_kwargs: Further arguments of the vector env's class.
        **env_kwargs: For the game's constructor; with kernels, for `JitVectorEnv`.

    Returns:
        A `VecEnv` of rows if there is one group, else an `AgentsVecEnv`.

    Raises:
        TypeError: `env` is none of the above.
        ValueError: There is no such id (the message has the nearest), or the games' agents differ.
        ModuleNotFoundError: A module is missing; says how to install it.
        EnvCreationError: Making a game failed: it has no `possible_agents`, agents take turns, or
            its agents' spaces fit no group; says what to do.
    """
    options = {
        "groups": groups,
        "agent_indicator": agent_indicator,
        "max_agents": max_agents,
        "agent_spaces": agent_spaces,
    }
    given = {"backend": backend, "autoreset_mode": autoreset_mode}
    env = _named(env)
    if _is_compiled(env):
        if wrong := [name for name, option in options.items() if option not in (None, False)]:
            raise _not_for_compiled(*wrong)
        kwargs = _with_padding(env, env_kwargs) if pad else env_kwargs
        about = {"mask_infos": mask_infos, "central_state": central_state}
        return _compiled(env, num_games, device, vector_kwargs, kwargs, about, **given)
    options.update(pad=pad, central_state=central_state)
    if device is not None:
        env_kwargs = {**env_kwargs, "device": device}
    factories = _read_factories(env, num_games, env_kwargs)
    makers = [_Maker(factory, index, options) for index, factory in enumerate(factories)]
    try:
        games: Any = make_vec(makers, vector_kwargs=vector_kwargs, **given)
    except Exception as error:
        error.add_note("An env here is a game of several agents.")
        raise
    with _closed_on_error(games):
        members = _same_members(games.get_attr("members"))
        return _as_rows(AgentsVecEnv(games, members, mask_infos=mask_infos))


def _compiled(
    env: Any,
    num_games: int | None,
    device: Any,
    vector_kwargs: Mapping[str, Any] | None,
    kwargs: dict[str, Any],
    about: dict[str, bool],
    *,
    backend: str | None,
    autoreset_mode: Any,
) -> Any:
    """Make compiled games, on the CPU or a device."""
    if not is_for_compiled(backend):
        raise ValueError(
            f"backend {backend!r} steps games one by one on the CPU; compiled games are stepped "
            "together: backend 'jit', or device='cuda'"
        )
    is_there = is_on_device(backend, device)
    if isinstance(env, str):
        env = find_spec(env)
        env.vector_entry_point = _vector_class(env)
        if not has_compiled_envs(env):
            raise TypeError(f"{env.id} has no groups of agents: make it with make_vec")
    games: Any = make_vec(
        env,
        num_games,
        backend="cuda" if is_there else "jit",
        device="cuda" if is_there and device is None else device,
        autoreset_mode=autoreset_mode,
        vector_kwargs=vector_kwargs,
        **kwargs,
    )
    with _closed_on_error(games):
        if is_there:
            from vecenv.agents.compiled import CudaAgentsVecEnv  # needs torch

            return _as_rows(CudaAgentsVecEnv(games, **about))
        from vecenv.agents.compiled import CompiledAgentsVecEnv  # imports the compiler

        return _as_rows(CompiledAgentsVecEnv(games, **about))


def _as_rows(agents: AgentsVecEnv) -> AgentsVecEnv | AgentRowsVecEnv:
    """Return a vector env of rows if there is one group of agents."""
    return AgentRowsVecEnv(agents) if len(agents.groups) == 1 else agents


def _named(env: Any) -> Any:
    """Return the factory or kernels named by "module:name"; ids and other values unchanged."""
    if not isinstance(env, str) or ":" not in env:
        return env
    try:
        import_module(env.partition(":")[0])  # which may register the id
        find_spec(env)
    except (gym.error.Error, ModuleNotFoundError):
        return import_object("env", env)
    return env


def game_maker(name: str) -> Callable[..., GameEnv] | None:
    """Return what makes a single game as an env of columns; None for a compiled game.

    Raises:
        ValueError, ImportError, TypeError: There is no game of this name, see `make_vec_agents`.
    """
    env = _named(name)
    return None if _is_compiled(env) else _Maker(_factory(env, {}), 0, {})


class _Maker:
    """Makes one game; vector envs call it."""

    def __init__(self, factory: Callable[..., Any], index: int, options: dict[str, Any]) -> None:
        self._factory, self._index, self._options = factory, index, options

    def __repr__(self) -> str:
        return f"which makes game {self._index} by {self._factory!r}"

    def __call__(self, **env_kwargs: Any) -> GameEnv:
        game = self._factory(**env_kwargs)
        try:
            return GameEnv(_as_parallel(game), **self._options)
        except BaseException:
            if hasattr(game, "close"):
                game.close()
            raise


def _as_parallel(game: Any) -> Any:
    """Return a game that is stepped with the actions of all agents at once."""
    if not callable(getattr(game, "agent_iter", None)):
        if not callable(getattr(game, "step", None)) or not hasattr(game, "reset"):
            raise TypeError(f"expected a ParallelEnv, got {type(game).__name__} {game!r}")
        return game
    if not (getattr(game, "metadata", None) or {}).get("is_parallelizable", False):
        raise TypeError(
            f"in {game} agents take turns (it is an AEC env, and its metadata do not say "
            "is_parallelizable); vector envs step the agents of a game at the same time: take a "
            "ParallelEnv"
        )
    return importlib.import_module("pettingzoo.utils.conversions").aec_to_parallel(game)


def _same_members(found: Sequence[Mapping[str, Members]]) -> Mapping[str, Members]:
    """Return the groups of the games, which must be equal."""
    first = found[0]
    for game, other in enumerate(found):
        if list(other) != list(first) or not is_same(other, first):
            shown = [
                {name: list(own.agents) for name, own in one.items()} for one in (other, first)
            ]
            raise ValueError(
                f"game {game} has the agents {shown[0]} by group, game 0 {shown[1]}; games of a "
                "vector env have the same agents"
            )
    return first


def _is_compiled(env: Any) -> bool:
    """Whether these are kernels, or an id in Gymnasium's registry; imports no compiler."""
    if isinstance(env, str):
        return ":" in env or env in gym.registry
    kernels = sys.modules.get("vecenv.jit.kernels")
    return kernels is not None and isinstance(env, kernels.EnvKernels)


@contextlib.contextmanager
def _closed_on_error(envs: Any) -> Iterator[None]:
    """Close envs if making something of them fails."""
    try:
        yield
    except BaseException:
        envs.close()
        raise


def _vector_class(spec: EnvSpec) -> Any:
    """Return what makes the vector env of a spec, if its kernels have groups of agents."""
    entry = spec.vector_entry_point
    creator = load_env_creator(entry) if isinstance(entry, str) else entry
    return getattr(creator, "agents_class", None) or creator


def _with_padding(env: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the options with which a compiled game is padded."""
    creator = _vector_class(find_spec(env)) if isinstance(env, str) else None
    if creator is None or "pad" not in inspect.signature(creator).parameters:
        raise _not_for_compiled("pad")
    return {**kwargs, "pad": True}


def _not_for_compiled(*given: str) -> ValueError:
    return ValueError(
        f"a compiled game has groups of its own and got {', '.join(given)}, which is for games in "
        "Python"
    )


def _read_factories(
    env: Any, num_games: int | None, kwargs: dict[str, Any]
) -> list[Callable[..., Any]]:
    if isinstance(env, Sequence) and not isinstance(env, str):
        if num_games is not None and num_games != len(env):
            raise ValueError(f"num_games is {num_games}, but {len(env)} games were given")
        if not env:
            raise ValueError("env is an empty list, expected at least one factory")
        return [_factory(one, kwargs) for one in env]
    return [_factory(env, kwargs)] * read_count("num_games", 1 if num_games is None else num_games)


def _factory(env: Any, kwargs: dict[str, Any]) -> Callable[..., Any]:
    env = _named(env)
    if isinstance(env, str):
        if "/" in env:
            make = _registry(env).make
            return functools.partial(make, "parallel", env, **kwargs)
        return functools.partial(_parallel_env(_module(env)), **kwargs)
    if isinstance(env, types.ModuleType):
        return functools.partial(_parallel_env(env), **kwargs)
    if callable(env):
        return functools.partial(env, **kwargs)
    raise TypeError(
        f"env must be an id, a module with parallel_env, or a factory of ParallelEnvs, got {env!r}"
    )


def _module(name: str) -> types.ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        root = name.partition(".")[0]
        if error.name == root:
            near = difflib.get_close_matches(name, gym.registry, 1)  # of compiled games
            told = f"did you mean {near[0]}? " if near else ""
            raise ModuleNotFoundError(
                f"env is {name!r}, but there is no module {root!r}; {told}PettingZoo's games are "
                "in the packages pettingzoo and mpe2: pip install 'vecenv[agents]'",
                name=root,
            ) from None
        if error.name != name:
            raise
        package, _, last = name.rpartition(".")
        paths = getattr(import_module(package), "__path__", ())
        there = [one.name for one in pkgutil.iter_modules(paths)]
        near = difflib.get_close_matches(last, there, 1)
        told = f"env is {name!r}, but {package} has no such module"
        told += f"; did you mean {near[0]}?" if near else ""
        raise ModuleNotFoundError(told, name=name) from None


def _parallel_env(module: Any) -> Callable[..., Any]:
    found = getattr(module, "parallel_env", None) or getattr(module, "env", None)
    if not callable(found):
        raise TypeError(f"module {module.__name__} has no parallel_env")
    return found


def _registry(name: str) -> Any:
    """Return PettingZoo, after a check that its registry has this id; names the nearest ones."""
    try:
        pettingzoo: Any = importlib.import_module("pettingzoo")
        known = sorted(pettingzoo.parallel_registry)
    except (ModuleNotFoundError, AttributeError) as error:
        if getattr(error, "name", "") not in ("pettingzoo", "parallel_registry"):
            raise
        raise ModuleNotFoundError(
            f"{name!r} is an id of PettingZoo's registry (1.27 or newer), which is not installed: "
            "pip install 'vecenv[agents]'",
            name="pettingzoo",
        ) from None
    if name in known:
        return pettingzoo
    if name in pettingzoo.aec_registry:
        raise ValueError(
            f"in {name!r} agents take turns (it is an AEC env); vector envs step the agents of "
            "a game at the same time"
        )
    near = difflib.get_close_matches(name, known, 3, 0.5) or known
    raise ValueError(f"PettingZoo has no {name!r}; it has {', '.join(near)}")
