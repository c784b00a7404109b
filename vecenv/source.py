"""Envs named by text, as commands and `vecenv.compare` take them."""

from __future__ import annotations

import ast
import contextlib
import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
from gymnasium import Env
from gymnasium.envs.registration import EnvSpec

from vecenv.core.arguments import import_module
from vecenv.core.base import VecEnv
from vecenv.make import COMPILED_TWINS, find_env, has_compiled_envs, make_vec

__all__ = [
    "GAMES", "BackendUnavailableError", "EnvSource", "did_you_mean", "is_ours", "read_env_kwargs",
    "read_source",
]  # fmt: skip

GAMES = "agents:"  # prefix of names of games with several agents


class BackendUnavailableError(Exception):
    """A backend does not support this env; the message says why."""


class EnvSource(NamedTuple):
    """An env that can be made any number of times.

    Attributes:
        name: The name as the user gave it.
        spec: Spec of a registered env, else None.
        factory: Called with `kwargs`; None for a registered env and for kernels.
        kwargs: For the env's constructor, or the factory.
        kernels: `EnvKernels` of a compiled env; then spec and factory are None.
    """

    name: str
    spec: EnvSpec | None
    factory: Callable[..., Any] | None
    kwargs: dict[str, Any]
    kernels: Any = None

    def make(self, num_envs: int, **kwargs: Any) -> VecEnv:
        """Make a vector env, compiled if there is one; `kwargs` are further ones of the env."""
        kwargs = {**self.kwargs, **kwargs}
        if self.factory is not None:
            return make_vec(partial(self.factory, **kwargs), num_envs)
        env: Any = self.kernels or self.spec
        return make_vec(env, num_envs, **kwargs)

    def env_fn(self) -> Callable[[], Env]:
        """Return a function that makes one env, without Gymnasium's checker; it can be pickled.

        Raises:
            BackendUnavailableError: This kind has no single envs.
        """
        if self.factory is not None:
            return partial(self.factory, **self.kwargs)
        if self.spec is None or not self.spec.entry_point:
            raise BackendUnavailableError(
                f"{self.name} is compiled and has no single envs; only the backend jit has it"
            )
        return partial(gym.make, self.spec, **{"disable_env_checker": True, **self.kwargs})

    def make_compiled(self, num_envs: int) -> VecEnv:
        """Make the compiled vector env.

        Raises:
            BackendUnavailableError: There is none.
        """
        if self.factory is not None:
            raise BackendUnavailableError(
                f"{self.name} is a factory of single envs; compiled ones have ids or are EnvKernels"
            )
        if self.spec is None or has_compiled_envs(self.spec):
            return self.make(num_envs)
        if (twin := COMPILED_TWINS.get(self.spec.id)) is None:
            raise BackendUnavailableError(
                f"{self.spec.id} is not compiled; docs/compiled_envs.md says how to write one"
            )
        return make_vec(twin, num_envs, **self.kwargs)


def read_source(name: str, kwargs: Mapping[str, Any] | None = None) -> EnvSource:
    """Find a registered id (also "module:id"), or a factory or `EnvKernels` ("module:name").

    "agents:NAME" is a game with several agents; `make_vec_agents` takes NAME. It is made as one
    env, whose steps are those of the game. Modules are also looked for in the working directory.

    Raises:
        ValueError: There is no such env; the message lists those that exist.
        ImportError: The module can't be imported.
    """
    options = dict(kwargs or {})
    if name.startswith(GAMES):
        from vecenv.agents.make import game_maker

        if (make := game_maker(name.removeprefix(GAMES))) is None:  # stepped as a whole
            return read_source(name.removeprefix(GAMES), kwargs)
        return EnvSource(name, None, make, options)
    try:
        found = find_env(name)
    except gym.error.Error as error:
        raise ValueError(_unknown(name)) from error
    if isinstance(found, EnvSpec):
        options, found.kwargs = {**found.kwargs, **options}, {}
        return EnvSource(name, found, None, options)
    if type(found).__name__ == "EnvKernels":  # `isinstance` would load the compiler
        return EnvSource(name, None, None, options, found)
    return EnvSource(name, None, found, options)


def is_ours(spec: EnvSpec | None) -> bool:
    """Whether a registered env is one of this package."""
    points = () if spec is None else (spec.entry_point, spec.vector_entry_point)
    return any(str(point).startswith("vecenv.") for point in points)


def _unknown(name: str) -> str:
    module, _, attribute = name.rpartition(":")
    near = did_you_mean(attribute, gym.registry)
    if not module:
        told = near or "vecenv envs --all lists ids, 'module:factory' is one of your own"
        return f"there is no env {name!r}; {told}"
    own = vars(import_module(module))
    if (found := own.get(attribute)) is not None:
        return f"{name!r} is {found!r}, expected a callable that returns an env"
    callables = sorted(k for k, value in own.items() if callable(value) and k[:1] != "_")
    return (
        f"module {module!r} has no callable {attribute!r}, and no env is registered as "
        f"{attribute!r}; callables there: {', '.join(callables) or 'none'}{near and '; ' + near}"
    )


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Return a question with at most two known words that may be meant; "" if none is similar.

    Case does not matter. Of words that differ only in a final number, the greatest counts.
    """
    names, word = {one.lower(): one for one in known}, word.lower()
    newest: dict[str, str] = {}
    for one in [word] if word in names else difflib.get_close_matches(word, names, 6):
        base = one.rstrip("0123456789")
        newest[base] = max(newest.get(base, one), one, key=lambda x: int(x[len(base) :] or -1))
    near = [names[one] for one in list(newest.values())[:2]]
    return f"did you mean {' or '.join(near)}?" if near else ""


def read_env_kwargs(texts: Sequence[str]) -> dict[str, Any]:
    """Read "name=value", or names and values in turn; values are Python literals, otherwise text.

    Raises:
        ValueError: A name has no value, or comes twice.

    Example:
        >>> read_env_kwargs(["cpu_ms=0.2", "obs_shape=(84,84)", "kind=slow"])
        {'cpu_ms': 0.2, 'obs_shape': (84, 84), 'kind': 'slow'}
    """
    found: dict[str, Any] = {}
    rest = iter(texts)
    for text in rest:
        name, equals, value = text.partition("=")
        value = value if equals else next(rest, None)
        if value is None or not name.isidentifier():
            raise ValueError(f"env_kwargs has {text!r}, expected NAME=VALUE such as cpu_ms=0.2")
        if name in found:
            raise ValueError(f"env_kwargs has {name!r} twice")
        found[name] = value
        with contextlib.suppress(ValueError, SyntaxError):
            found[name] = ast.literal_eval(value)
    return found
