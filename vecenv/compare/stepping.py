"""The env to compare, read from text; and what backends do in a round: random steps.

All ways of stepping count env steps alike: a step on which autoreset resets does not count. Actions
are drawn beforehand; for envs with masks they are drawn between steps, among the allowed ones. The
clock stops meanwhile, unless other envs go on.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import Env
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from vecenv.core.arguments import import_module
from vecenv.core.masks import RandomActions
from vecenv.core.spaces import take_rows
from vecenv.make import COMPILED_TWINS, find_env, has_compiled_envs, make_vec

__all__ = [
    "GAMES",
    "BackendUnavailableError",
    "BatchStepper",
    "EnvSource",
    "FirstReadyStepper",
    "LoopStepper",
    "Stepper",
    "did_you_mean",
    "read_env_kwargs",
    "read_source",
    "read_value",
]


_RING = 64  # batches of actions drawn beforehand
_BATCHES_IN_FLIGHT = 4


class Stepper:
    """One way of stepping.

    Args:
        envs: An env, or a vector env; it is reset.
        seed: Seed of the reset and the actions.

    Attributes:
        envs: As given.
        rows_per_call: Approximate number of env steps in one unit of `run`.
        reset_s: Seconds of the first reset of all envs.
        episodes: int64 (num_envs,), number of ended episodes of each env.
    """

    def __init__(self, envs: Any, seed: int) -> None:
        self.envs = envs
        self.rows_per_call = envs.num_envs if isinstance(envs, VectorEnv) else 1
        self._ended = np.zeros(self.rows_per_call, np.bool_)
        self.episodes = np.zeros(self.rows_per_call, np.int64)
        begin = perf_counter()
        obs, infos = envs.reset(seed=seed)
        self.reset_s = perf_counter() - begin
        self._calls = 0
        self._draw = RandomActions(envs, seed)
        self._draw.see(obs, infos)
        self._is_masked = self._draw.are_masked
        self._drawing_s = 0.0  # time for drawing masked actions between steps
        count = _RING if isinstance(envs, VectorEnv) else 16 * _RING
        self._ring = [] if self._is_masked else [self._draw() for _ in range(count)]

    def act(self, env_ids: np.ndarray | None = None) -> Any:
        """Return actions for all envs, or for some; they share memory with those of other calls.

        Args:
            env_ids: Ids of the envs, int64 (B,).
        """
        if self._is_masked:
            begin = perf_counter()
            drawn = self._draw(env_ids)
            self._drawing_s += perf_counter() - begin
            return drawn
        self._calls += 1
        drawn = self._ring[self._calls % len(self._ring)]
        if env_ids is None or (count := len(env_ids)) == self.envs.num_envs:
            return drawn
        if isinstance(drawn, np.ndarray):
            return drawn[:count]  # quicker
        return take_rows(self.envs.single_action_space, drawn, range(count))

    def see(self, obs: Any, infos: Any, env_ids: np.ndarray | None = None) -> None:
        """Note the masks in the results of a step of all envs, or of some."""
        if self._is_masked:
            begin = perf_counter()
            self._draw.see(obs, infos, env_ids)
            self._drawing_s += perf_counter() - begin

    def prepare(self) -> None:
        """Receive results that are ready, before a clock starts."""

    def run(self, count: int) -> tuple[int, float]:
        """Step `count` times; return the number of env steps and their seconds."""
        raise NotImplementedError

    def settle(self) -> None:
        """Receive everything in flight."""


class LoopStepper(Stepper):
    """One env in a loop, as in most first programs."""

    def run(self, count: int) -> tuple[int, float]:
        """Step `count` times; resets in between are not counted."""
        env, act, is_masked, drawing_s, episodes = (
            self.envs, self.act, self._is_masked, self._drawing_s, 0,
        )  # fmt: skip
        assert isinstance(env, Env)
        begin = perf_counter()
        for _ in range(count):
            obs, _, terminated, truncated, info = env.step(act())
            if terminated or truncated:
                obs, info = env.reset()
                episodes += 1
            if is_masked:
                self.see(obs, info)
        seconds = perf_counter() - begin - (self._drawing_s - drawing_s)
        self.episodes += episodes
        return count, seconds


class BatchStepper(Stepper):
    """A vector env that steps all envs at once."""

    def run(self, count: int) -> tuple[int, float]:
        """Step all envs `count` times."""
        envs, act, is_masked, drawing_s = self.envs, self.act, self._is_masked, self._drawing_s
        flags = []
        begin = perf_counter()
        for _ in range(count):
            obs, _, terminations, truncations, infos = envs.step(act())
            flags.append((terminations, truncations))
            if is_masked:
                self.see(obs, infos)
        seconds = perf_counter() - begin - (self._drawing_s - drawing_s)
        is_over = np.array([terminations | truncations for terminations, truncations in flags])
        num_resets = int(self._ended.sum() + is_over[:-1].sum())
        self._ended = is_over[-1]
        self.episodes += is_over.sum(0)
        return is_over.size - num_resets, seconds


class FirstReadyStepper(Stepper):
    """A vector env that returns the envs that are ready first, a quarter of them at a time."""

    def __init__(self, envs: Any, seed: int) -> None:
        super().__init__(envs, seed)
        self.rows_per_call = max(1, envs.num_envs // _BATCHES_IN_FLIGHT)
        self._is_in_flight = False

    def prepare(self) -> None:
        """Send all envs; receive those that became ready before the clock starts."""
        if not self._is_in_flight:
            self.envs.send(self.act())
            self._is_in_flight = True
        batches: list[Any] = []
        while sum(len(batch.env_ids) for batch in batches) < self.envs.num_envs:
            batches.append(self._turn())
        self._count(batches)

    def run(self, count: int) -> tuple[int, float]:
        """Receive and send again, `count` times."""
        batches: list[Any] = []
        begin = perf_counter()
        for _ in range(count):
            batches.append(self._turn())
        seconds = perf_counter() - begin
        return self._count(batches), seconds

    def _turn(self) -> Any:
        batch = self.envs.recv(self.rows_per_call)
        self.see(batch.obs, batch.infos, batch.env_ids)
        self.envs.send(self.act(batch.env_ids), batch.env_ids)
        return batch

    def _count(self, batches: Sequence[Any]) -> int:
        total = 0
        for batch in batches:
            is_over = batch.terminations | batch.truncations
            total += len(batch.env_ids) - int(self._ended[batch.env_ids].sum())
            self._ended[batch.env_ids] = is_over
            self.episodes[batch.env_ids] += is_over
        return total

    def settle(self) -> None:
        """Receive everything in flight."""
        if self._is_in_flight:
            batch = self.envs.recv()
            self.see(batch.obs, batch.infos, batch.env_ids)
            self._count([batch])
            self._is_in_flight = False


GAMES = "agents:"  # prefix of names of games with several agents

__all__ = [
    "GAMES", "BackendUnavailableError", "EnvSource", "did_you_mean", "read_env_kwargs",
    "read_source", "read_value",
]  # fmt: skip


class BackendUnavailableError(Exception):
    """A backend does not support this env; the message says why."""


class EnvSource(NamedTuple):
    """An env that can be made any number of times.

    Attributes:
        name: The name as the user gave it.
        spec: Spec of a registered env; None for a factory.
        factory: Called with `kwargs`; None for a registered env.
        kwargs: For the env's constructor, or the factory.
        kernels: `EnvKernels` of a compiled env; then spec and factory are None.
    """

    name: str
    spec: EnvSpec | None
    factory: Callable[..., Any] | None
    kwargs: dict[str, Any]
    kernels: Any = None

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

    def make_compiled(self, num_envs: int) -> Any:
        """Make the compiled vector env.

        Raises:
            BackendUnavailableError: There is no compiled vector env.
        """
        if self.kernels is not None:
            return make_vec(self.kernels, num_envs, backend="jit", **self.kwargs)
        if self.spec is None:
            raise BackendUnavailableError(
                f"{self.name} is a factory of single envs; compiled ones have ids or are EnvKernels"
            )
        is_it = has_compiled_envs(self.spec)
        if not (compiled := self.spec.id if is_it else COMPILED_TWINS.get(self.spec.id)):
            raise BackendUnavailableError(
                f"{self.spec.id} is not compiled; docs/compiled_envs.md says how to write one"
            )
        return make_vec(compiled, num_envs, backend="jit", **self.kwargs)


def read_source(name: str, kwargs: Mapping[str, Any] | None = None) -> EnvSource:
    """Find a registered id (also "module:id"), or a factory or `EnvKernels` ("module:name").

    "agents:NAME" is a game with several agents; `make_vec_agents` takes NAME. It is made as one
    env, whose steps are those of the game.

    Modules are also looked for in the working directory.

    Raises:
        ValueError: There is no such env; the message lists those that exist.
        ImportError: The module can't be imported.
    """
    if name.startswith(GAMES):
        from vecenv.agents.make import check_name, is_compiled_game, make_game

        game = name.removeprefix(GAMES)
        if is_compiled_game(game):  # its games are stepped as a whole
            return read_source(game, kwargs)
        check_name(game)
        return EnvSource(name, None, partial(make_game, game), dict(kwargs or {}))
    options = dict(kwargs or {})
    try:
        spec = find_env(name)
    except gym.error.Error as error:
        raise ValueError(_unknown(name)) from error
    if type(spec).__name__ == "EnvKernels":  # `isinstance` would load the compiler
        return EnvSource(name, None, None, options, spec)
    if not isinstance(spec, EnvSpec):
        return EnvSource(name, None, spec, options)
    kept = {key: value for key, value in spec.kwargs.items() if key not in options}
    spec.kwargs = {}
    return EnvSource(name, spec, None, {**kept, **options})


def _unknown(name: str) -> str:
    module_name, _, attribute = name.rpartition(":")
    module = import_module(module_name) if module_name else None
    by_lower = {env_id.lower(): env_id for env_id in gym.registry}
    near = did_you_mean(attribute.lower(), by_lower, by_lower)
    if module is None:
        told = near or "vecenv envs --all lists ids, 'module:factory' is one of your own"
        return f"there is no env {name!r}; {told}"
    if (found := getattr(module, attribute, None)) is not None:
        return f"{name!r} is {found!r}, expected a callable that returns an env"
    callables = [k for k, value in vars(module).items() if callable(value) and k[:1] != "_"]
    told = f"callables there: {', '.join(sorted(callables)) or 'none'}"
    return (
        f"module {module.__name__!r} has no callable {attribute!r}, and no env is registered as "
        f"{attribute!r}; {'; '.join(filter(None, (told, near)))}"
    )


def did_you_mean(word: str, known: Collection[str], names: Mapping[str, str] | None = None) -> str:
    """Return a question with at most two known words that may be meant; "" if none is similar.

    Args:
        word: The written word.
        known: Words to choose from; of words that differ only in a final number, the one with the
            greatest number counts.
        names: How to write the known words; None to write them unchanged.
    """
    newest: dict[str, str] = {}
    for one in [word] if word in known else difflib.get_close_matches(word, known, 6):
        base = one.rstrip("0123456789")
        newest[base] = max(newest.get(base, one), one, key=lambda x: int(x[len(base) :] or -1))
    near = [names[one] if names else one for one in list(newest.values())[:2]]
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
        found[name] = read_value(value)
    return found


def read_value(word: str) -> Any:
    """Read a Python literal, otherwise text."""
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word
