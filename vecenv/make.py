"""make_vec: a vector env from an id, a spec, or factories."""

from __future__ import annotations

import contextlib
import copy as copying
import dataclasses
import difflib
import functools
import inspect
import itertools
import logging
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import gymnasium as gym
from gymnasium import Env
from gymnasium.envs.registration import (
    EnvSpec,
    find_highest_version,
    get_env_id,
    load_env_creator,
    parse_env_id,
)
from gymnasium.vector import AutoresetMode

from vecenv.backends import BACKENDS, MADE, is_for_compiled, is_on_device
from vecenv.choose import Choice, choose_backend
from vecenv.core.arguments import import_module, read_autoreset_mode, read_count
from vecenv.core.base import VecEnv
from vecenv.core.errors import EnvCreationError
from vecenv.core.masks import MaskInfos
from vecenv.core.spaces import ObservationMode

if TYPE_CHECKING:
    from vecenv.jit.kernels import EnvKernels  # loads the compiler

__all__ = ["make_vec"]

EnvFactory = Callable[[], Env]
EnvSource = str | EnvSpec | EnvFactory | Sequence[EnvFactory]
Wrapper = Callable[[Env], Env]

_CLASSIC = "CartPole-v1 Pendulum-v1 MountainCar-v0 MountainCarContinuous-v0 Acrobot-v1 "
_TOY_TEXT = "FrozenLake-v1 FrozenLake8x8-v1 CliffWalking-v1 CliffWalkingSlippery-v1 Taxi-v4"
# Ids whose compiled vector envs have ids of their own: equal rules, other random numbers.
COMPILED_TWINS = {name: f"Jit{name}" for name in (_CLASSIC + _TOY_TEXT).split()}
# Arguments of stable-baselines3's `make_vec_env`, and their names here.
_RENAMED = {
    "n_envs": "write num_envs=",
    "vec_env_cls": 'write backend="sync" or "async"',
    "vec_env_kwargs": "write vector_kwargs=",
    "env_kwargs": "write the env's arguments themselves; of a factory, functools.partial(Env, ...)",
    "wrapper_class": "write wrappers=[...]",
    "wrapper_kwargs": "write wrappers=[functools.partial(Wrapper, ...)]",
}
_logger = logging.getLogger("vecenv")


def make_vec(
    env: EnvSource | EnvKernels,
    num_envs: int | None = None,
    *,
    backend: str | None = None,
    num_workers: int | None = None,
    device: Any = None,
    wrappers: Sequence[Wrapper] = (),
    copy: bool | None = None,
    observation_mode: ObservationMode | None = None,
    autoreset_mode: str | AutoresetMode | None = None,
    mask_infos: bool = False,
    vector_kwargs: Mapping[str, Any] | None = None,
    **env_kwargs: Any,
) -> VecEnv:
    """Make a vector env.

    Args:
        env: A registered id (also "module:id"), an `EnvSpec`, a factory (called once per env), a
            list of factories (one env each), the `EnvKernels` of a compiled env, or "module:name"
            of a factory or of kernels.
        num_envs: Number of envs; 1 if not given, or the length of the list.
        backend: "sync" steps the envs in this process, "async" in worker processes; "jit" uses the
            compiled vector env of the id, a `JitVectorEnv` that its entry point makes; "ray" puts
            vector envs into actors of a Ray cluster, the compiled one of the id if there is one and
            no wrappers are given; "cuda" steps compiled envs on a CUDA device, see `device`. None
            is "async" if an argument is given that only `AsyncVectorEnv` has; else "jit" if there
            is one; else "sync". "auto" is as None, but instead of "sync" it may choose "async" for
            several envs, by a trial: it makes and steps an env in a short-lived process, which may
            leave traces (files, videos, games on a server), and the log gives the reason of the
            choice. If the envs then can't be made together, each gets a worker. All other backends
            make exactly `num_envs` envs, and step none before the caller does.
        num_workers: Number of worker processes (backend "async"), or of actors ("ray").
        device: Device of compiled envs: "cuda" or another CUDA device makes a `CudaVectorEnv` with
            results that are tensors (docs/gpu.md); "cpu" is this process. For other envs it is an
            argument of their constructor.
        wrappers: Applied to every env in this order; not allowed with "jit".
        copy: Whether returned observations are copies, which the caller may keep (the default).
        observation_mode: How observation spaces are batched, see `SyncVectorEnv`.
        autoreset_mode: "NextStep" (the default), "SameStep" or "Disabled".
        mask_infos: Whether every reset and step reports infos["action_mask"]: single envs are
            wrapped in `MaskInfos`, after `wrappers`; compiled ones do so themselves.
        vector_kwargs: Further arguments of the vector env's class, such as the `worker_env` or
            `lazy` of `AsyncVectorEnv`.
        **env_kwargs: For the env's constructor or `gymnasium.make`; ids and specs only. Gymnasium's
            passive checker wraps the first env only, unless `disable_env_checker` is given. For
            kernels: arguments of `JitVectorEnv`.

    Raises:
        ValueError: The backend or autoreset mode is unknown, the number of envs is below 1 or not
            the list's, or "jit" is given for an env that isn't compiled, or with wrappers.
        TypeError: `env` is none of the above, a factory comes with keyword arguments, or there are
            options of workers, for another backend.
        EnvCreationError: Making an env failed.

    Example:
        >>> envs = make_vec("CartPole-v1", num_envs=2)
        >>> envs
        SyncVectorEnv(CartPole-v1, num_envs=2)
        >>> envs.close()
    """
    if backend not in (None, "auto", *MADE):
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(('auto', *MADE))}")
    if callable(wrappers) or not all(map(callable, wrappers)):
        raise TypeError(
            f"wrappers is {wrappers!r}, expected a list of functions or classes that wrap an env, "
            "such as [gymnasium.wrappers.FlattenObservation]"
        )
    if renamed := sorted(_RENAMED.keys() & env_kwargs.keys()):
        raise TypeError("; ".join(f"no argument {name}: {_RENAMED[name]}" for name in renamed))
    source = _read_source(env, num_envs, env_kwargs, tuple(wrappers))
    if device is not None and not (is_for_compiled(backend) and _is_compiled(source, backend)):
        env_kwargs, device = {**env_kwargs, "device": device}, None
        source = _read_source(env, num_envs, env_kwargs, tuple(wrappers))
    given = {"copy": copy, "observation_mode": observation_mode, "num_workers": num_workers}
    if autoreset_mode is not None:
        given["autoreset_mode"] = read_autoreset_mode(autoreset_mode)
    source.options.update(vector_kwargs or {})
    source.options.update({name: value for name, value in given.items() if value is not None})
    choice, is_compiled = _decide(source, backend, device, env)
    if mask_infos and is_compiled:
        source.options["mask_infos"] = True
    elif mask_infos:
        source = source._replace(wrappers=(*source.wrappers, MaskInfos))
    try:
        try:
            return _make(source, choice.backend, is_compiled=is_compiled)
        except EnvCreationError as error:
            # A TypeError is no clash of two envs in a process, but a factory's mistake.
            if not choice.is_tried or isinstance(error.__cause__, TypeError):
                raise
            told = "backend 'auto' gives each env a worker, as they can't be made together: %s"
            _logger.info(told, error)
            source.options.pop("caller_steps", None)
            source.options["num_workers"] = len(source.factories)
            return _make(source, "async", is_compiled=False)
    except (EnvCreationError, TypeError) as error:
        if told := _about_options(env_kwargs):
            error.add_note(f"If the env does not take it: {told}")
        raise


class _Source(NamedTuple):
    """What envs to make; `factories` make single envs without `wrappers`."""

    factories: list[EnvFactory]
    spec: EnvSpec | None  # with the env's kwargs only
    wrappers: tuple[Wrapper, ...]
    options: dict[str, Any]  # for the vector env
    kernels: Any = None  # the EnvKernels, if given

    @property
    def name(self) -> str:
        """Name for messages."""
        if self.kernels is not None:
            return self.kernels.name
        return "a factory" if self.spec is None else self.spec.id

    @property
    def has_single_envs(self) -> bool:
        """Whether single envs can be made."""
        return self.kernels is None and (self.spec is None or self.spec.entry_point is not None)

    @property
    def twin(self) -> str | None:
        """The id of a compiled env with the rules of the spec's single envs."""
        return None if self.spec is None else COMPILED_TWINS.get(self.spec.id)

    def wrapped_factories(self) -> list[EnvFactory]:
        """Return the factories of the envs with their wrappers."""
        if not self.wrappers:
            return self.factories
        return [functools.partial(_wrapped, make, self.wrappers) for make in self.factories]


def _wrapped(factory: EnvFactory, wrappers: tuple[Wrapper, ...]) -> Env:
    """Make an env and wrap it."""
    return functools.reduce(lambda env, wrap: wrap(env), wrappers, factory())


# -- the choice of the backend ---------------------------------------------------------------------


def _decide(source: _Source, backend: str | None, device: Any, env: Any) -> tuple[Choice, bool]:
    """Return the backend, chosen if none is named, and whether compiled envs are made.

    Raises if that backend can't run these envs, or does not take these options.
    """
    if device is not None:
        backend = "cuda" if is_on_device(backend, device) else "jit"
        source.options.update({"device": device} if backend == "cuda" else {})
    may_be_compiled = backend in (None, "auto") or BACKENDS[backend].takes != "factories"
    is_compiled = may_be_compiled and not source.wrappers and _is_compiled(source, backend)
    choice = Choice(backend or "", {}, "it is named")
    if backend in (None, "auto"):
        if named := sorted(_of_workers() & source.options.keys()):
            choice = Choice("async", {}, f"only AsyncVectorEnv takes {', '.join(named)}")
        elif is_compiled:
            choice = Choice("jit", {}, "it is compiled")
        elif backend is None:
            choice = Choice("sync", {}, 'it is the default, and "auto" would try out workers')
        else:
            choice = choose_backend(source.wrapped_factories())
        source.options.update(choice.options)
        chooser = "make_vec" if backend is None else "backend 'auto'"
        _logger.info("%s chose %r for %s: %s", chooser, choice.backend, env, choice.reason)
        if source.twin is not None:
            told = "a compiled env has the same rules, and other random numbers: make_vec(%r)"
            _logger.info(told, source.twin)
    name, takes = choice.backend, BACKENDS[choice.backend].takes
    is_compiled = is_compiled and takes != "factories"
    given = f"{len(source.wrappers)} wrappers"
    if not source.has_single_envs and not is_compiled:
        raise ValueError(
            f"{source.name} has no single envs, and got backend {name!r} and {given}; use "
            "backend='jit' if it is compiled, else gymnasium.make_vec, and vector wrappers"
        )
    if takes == "compiled" and not is_compiled:
        advice = "backend='sync'"
        if source.twin:
            advice = f"{source.twin!r}, which has the same rules (other random numbers), or 'sync'"
        raise ValueError(
            f"backend {name!r} needs an env with compiled kernels and no wrappers, got "
            f"{source.name} with {given}; use {advice}"
        )
    if names := sorted((_of_workers() & source.options.keys()) - _parameters(name)):
        raise TypeError(
            f"vector_kwargs has {', '.join(names)}, which backend {name!r} does not take: only "
            "AsyncVectorEnv does, whose workers it is about (backend='async')"
        )
    return choice, is_compiled


def _parameters(backend: str) -> set[str]:
    """Return the names of the arguments of a backend's vector env."""
    return set(inspect.signature(BACKENDS[backend].load()).parameters)


def _of_workers() -> set[str]:
    """Return the arguments that only `AsyncVectorEnv` has, so that giving one means workers."""
    return _parameters("async") - _parameters("sync")


def has_compiled_envs(env: str | EnvSpec) -> bool:
    """Whether `make_vec(env)` makes compiled envs."""
    return _is_compiled(_read_source(env, 1, {}, ()), None)


def _is_compiled(source: _Source, backend: str | None) -> bool:
    """Whether the vector env of a spec is a `JitVectorEnv`; none is made to see.

    A class, or the return annotation of a function, tells. Any other function is taken for one that
    makes compiled envs if "jit" is requested or there are no single envs.
    """
    if source.kernels is not None:
        return True
    if source.spec is None or source.spec.vector_entry_point is None:
        return False
    is_needed = backend in ("jit", "cuda") or not source.has_single_envs
    try:
        made = creator = _creator(source.spec)
        if "vecenv.jit.env" not in sys.modules and (isinstance(creator, type) or not is_needed):
            return False  # without importing the compiler
        jit_class = BACKENDS["jit"].load()
        if not isinstance(creator, type):
            with contextlib.suppress(Exception):  # names that exist for type checkers only
                made = typing.get_type_hints(creator).get("return")
            if not isinstance(made, type) or made in (Any, *jit_class.__mro__[1:]):
                return is_needed
        return issubclass(made, jit_class)
    except Exception as error:
        if is_needed:
            raise
        _logger.info("the vector env of %s can't be made: %r", source.name, error)
        return False


# -- making ----------------------------------------------------------------------------------------


def _make(source: _Source, name: str, *, is_compiled: bool) -> VecEnv:
    """Make the vector env of a backend."""
    backend, num_envs, options = BACKENDS[name], len(source.factories), source.options
    if name == "jit":
        envs = _make_compiled(source, options, num_envs)
        if not isinstance(envs.unwrapped, BACKENDS["jit"].load()):
            envs.close()
            raise ValueError(
                f"the vector env of {source.name}, a {type(envs).__name__}, has no compiled "
                "kernels; use gymnasium.make_vec"
            )
    elif not is_compiled:
        envs = backend.load()(source.wrapped_factories(), **options)
    elif name == "cuda":
        from vecenv.jit.binding import uncompiled  # imports the compiler

        own, rest = _split(options, {"device"})
        with uncompiled():  # the device's envs are made from one on the CPU
            host = _make_compiled(source, rest, num_envs if "params" in rest else 1)
        envs = backend.load()(host, num_envs, **own)
    else:
        own, rest = _split(options, _parameters(name))
        rest.setdefault("num_threads", max(1, int(options.get("cpus_per_worker", 1))))
        envs = backend.load()(_compiled_maker(source, rest), num_envs=num_envs, **own)
    envs.spec = source.spec
    return envs


def _split(options: dict[str, Any], names: set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options with these names, and the other options."""
    own = {name: value for name, value in options.items() if name in names}
    return own, {name: value for name, value in options.items() if name not in names}


def _compiled_maker(source: _Source, options: dict[str, Any]) -> Callable[..., VecEnv]:
    """Return a function from `num_envs` to the compiled vector env."""
    # Compiled envs return memory that the caller may keep, and all envs have the same space.
    options = _split(options, {"copy", "observation_mode"})[1]
    spec = source.spec
    if spec is None:
        return functools.partial(BACKENDS["jit"].load(), source.kernels, **options)
    if spec.max_episode_steps is not None:
        options.setdefault("max_episode_steps", spec.max_episode_steps)
    kwargs = _split(spec.kwargs, {"disable_env_checker"})[1]
    return functools.partial(_creator(spec), **{**options, **kwargs})


def _make_compiled(source: _Source, options: dict[str, Any], num_envs: int) -> VecEnv:
    """Make compiled envs; a keyword that they do not take is answered with those that they take."""
    make: Any = _compiled_maker(source, options)
    try:
        return make(num_envs=num_envs)
    except TypeError as error:
        word = str(error).partition("unexpected keyword argument ")[2].strip("'")
        if not word or not isinstance(make.func, type):
            raise
        kinds = [kind for kind in make.func.__mro__ if "__init__" in vars(kind)]
        named = (inspect.signature(kind.__init__).parameters.values() for kind in kinds)
        known = sorted({x.name for x in itertools.chain(*named) if x.kind is x.KEYWORD_ONLY})
        near = [name for name in known if name.startswith(word)]
        near += difflib.get_close_matches(word, known, 1)
        told = f"did you mean {near[0]!r}? " if near else ""
        if str(error).partition(".")[0] in {kind.__name__ for kind in kinds}:
            told += f"It takes {', '.join(known)}"
        else:  # another class takes some of them
            told += f"help({make.func.__module__}.{make.func.__name__}) lists them"
        if "params" in known:
            told += "; values of the kernels' parameters go into params={...}"
        raise TypeError(f"{source.name} takes no argument {word!r}; {told}") from None


def _creator(spec: EnvSpec) -> Any:
    """Return the function or class that makes the vector env of a spec, or None."""
    entry = spec.vector_entry_point
    return load_env_creator(entry) if isinstance(entry, str) else entry


# -- what users may pass ---------------------------------------------------------------------------


class _MakeSpec(NamedTuple):
    """Factory of one env of a spec, with a short `repr` for messages; it can be pickled."""

    spec: EnvSpec
    kwargs: dict[str, Any]

    def __call__(self) -> Env:
        return gym.make(self.spec, **self.kwargs)

    def __repr__(self) -> str:
        return f"gymnasium.make({self.spec.id!r}, **{self.kwargs})"


def _read_source(
    source: EnvSource | EnvKernels,
    num_envs: int | None,
    kwargs: dict[str, Any],
    wrappers: tuple[Wrapper, ...],
) -> _Source:
    """Read the forms in which users may name envs."""
    count = read_count("num_envs", 1 if num_envs is None else num_envs)
    if _is_kernels(source):
        return _Source([_no_single_env] * count, None, wrappers, kwargs, kernels=source)
    env = cast("EnvSource", source)
    if isinstance(env, str | EnvSpec):
        spec = find_env(env) if isinstance(env, str) else copying.deepcopy(env)
        if not isinstance(spec, EnvSpec):  # kernels or a factory, handled below
            if kwargs and not _is_kernels(spec):
                spec, kwargs = functools.partial(spec, **kwargs), {}
            return _read_source(spec, count, kwargs, wrappers)
        kwargs, spec.kwargs = {**spec.kwargs, **kwargs}, {}
        first = _MakeSpec(spec, kwargs)
        others = _MakeSpec(spec, {"disable_env_checker": True, **kwargs})
        return _Source(
            [first, *[others] * (count - 1)],
            dataclasses.replace(spec, kwargs=kwargs),
            wrappers,
            {},
        )
    if kwargs:
        rest = ", ".join(sorted(kwargs.keys() - _vector_parameters()))
        told = (
            f"{rest} would go to the constructor of a registered env; a factory takes none: bind "
            "them with functools.partial"
        )
        problems = "; ".join(filter(None, (_about_options(kwargs), rest and told)))
        raise TypeError(f"unexpected keyword arguments: {problems}")
    if callable(env):
        return _Source([env] * count, None, wrappers, {})
    if not isinstance(env, Sequence) or not all(map(callable, env)):
        given = env if isinstance(env, Sequence) else [env]
        is_env = any(isinstance(one, Env) for one in given)
        hint = "; that is an env already: pass what makes one, such as `lambda: MyEnv()`"
        raise TypeError(
            "env must be a registered id, an EnvSpec, a factory or a list of factories, or "
            f"EnvKernels, got {env!r}{hint if is_env else ''}"
        )
    if num_envs is not None and num_envs != len(env):
        raise ValueError(f"num_envs is {num_envs}, but {len(env)} factories were given")
    read_count("num_envs", len(env))
    return _Source(list(env), None, wrappers, {})


def _is_kernels(source: Any) -> bool:
    """Whether this is an `EnvKernels`; imports no compiler."""
    return type(source).__name__ == "EnvKernels"


def _no_single_env() -> Env:
    """Stand for the factories of compiled envs, which are only counted."""
    raise AssertionError("compiled envs are made all at once")


def _about_options(kwargs: dict[str, Any]) -> str:
    """Return how to pass keyword arguments that are options of a vector env, not of the env."""
    told = []
    if options := _split(kwargs, _vector_parameters())[0]:
        kind = "are options" if len(options) > 1 else "is an option"
        names = ", ".join(sorted(options))
        told.append(f"{names} {kind} of vector envs: pass vector_kwargs={options!r}")
    if "device" in kwargs:
        told.append(
            "device= is where compiled envs are, and an argument of the env otherwise; leave it "
            "out and copy observations to the device, or write the env with the kit "
            "(docs/compiled_envs.md)"
        )
    return "; ".join(told)


def _vector_parameters() -> set[str]:
    """Return the names of the arguments of all vector envs."""
    single = [name for name in MADE if BACKENDS[name].takes != "compiled"]  # imports no compiler
    return set().union(*map(_parameters, single)) | {"num_threads"}


def find_spec(env_id: str) -> EnvSpec:
    """Return a copy of the spec of an id; "module:id" and ids without version work too.

    The module is searched in the working directory too.

    Raises:
        gymnasium.error.Error: There is no such id; lists those there are.
        ImportError: The module can't be imported.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        import_module(module)
    if name not in gym.registry:
        namespace, base, version = parse_env_id(name)
        latest = find_highest_version(namespace, base)
        if version is None and latest is not None:
            name = get_env_id(namespace, base, latest)
    return copying.deepcopy(gym.spec(name))


def find_env(name: str) -> Any:
    """Return the `EnvSpec` of an id, or the factory or `EnvKernels` named by "module:name".

    Raises:
        gymnasium.error.Error: There is neither; lists those there are.
        ImportError: The module can't be imported.
    """
    try:
        return find_spec(name)
    except gym.error.Error as error:
        module, _, attribute = name.rpartition(":")
        found = getattr(import_module(module), attribute, None) if module else None
        if _is_kernels(found) or callable(found):
            return found
        if module:
            error.add_note(f"And the module {module} has no factory or EnvKernels {attribute!r}.")
        raise
