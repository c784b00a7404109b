"""What users' code has made, pickled for other processes: messages, env factories, env ids."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

__all__ = [
    "dump_factories",
    "dump_registry",
    "dumps",
    "load_factories",
    "load_registry",
    "loads",
]

loads = pickle.loads


def dumps(message: Any) -> bytes:
    """Pickle a message; what plain pickle can't (closures, classes of `__main__`) goes by value."""
    try:
        return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:  # pickling runs code of users' classes
        import cloudpickle

        return cloudpickle.dumps(message)


def dump_registry() -> bytes:
    """Pickle the specs of the env ids that this process knows, except those that can't be."""
    import cloudpickle
    import gymnasium

    specs = []
    for spec in list(gymnasium.registry.values()):
        with contextlib.suppress(Exception):  # pickling runs code of users' classes
            late = copy.copy(spec)
            for name in ("entry_point", "vector_entry_point"):
                if callable(entry := getattr(spec, name)):
                    setattr(late, name, functools.partial(_make_late, cloudpickle.dumps(entry)))
            specs.append(cloudpickle.dumps(late))
    return dumps(specs)


def _make_late(pickled: bytes, *args: Any, **kwargs: Any) -> Any:
    """Call an env's class or factory that is imported now: most ids are never asked for.

    Otherwise one id that was registered with a class of a module that imports torch would make
    every worker import torch.
    """
    return loads(pickled)(*args, **kwargs)


def load_registry(registry: bytes) -> None:
    """Register the env ids of `dump_registry` in this process, too.

    A package that does so itself when it is imported here, as it did over there, replaces nothing
    of anybody's: Gymnasium's warning for each of its ids is left out.
    """
    import gymnasium

    repeated = ".*Overriding environment .* already in registry"
    warnings.filterwarnings("ignore", repeated, UserWarning)
    for pickled in loads(registry):
        with contextlib.suppress(Exception):  # of a module that is not here: not of these envs
            spec = loads(pickled)
            gymnasium.registry.setdefault(spec.id, spec)


def dump_factories(factories: list[Callable[[], Any]]) -> bytes:
    """Pickle factories by value as far as needed: lambdas, closures, classes of `__main__`.

    So are classes and functions of modules that only this process has, as it has made them or
    loaded them from a file of another name. Everything else is pickled as `cloudpickle` does it.
    Load with `load_factories`.
    """
    import cloudpickle

    by_value: dict[str, dict[str, Any]] = {"__main__": {}}
    registered: list[types.ModuleType] = []
    is_known = functools.cache(_can_be_imported)

    def note(obj: Any) -> None:
        name, module = obj.__module__, sys.modules.get(obj.__module__)
        if module is None or (name not in by_value and is_known(name)):
            return
        if name not in by_value:
            by_value[name] = {}
            if name not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                registered.append(module)
        if vars(module).get(obj.__name__) is obj:
            by_value[name][obj.__name__] = obj

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, type | types.FunctionType):
                note(obj)
            return super().reducer_override(obj)

    file = io.BytesIO()
    try:
        Pickler(file).dump((factories, by_value))
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue()


def _can_be_imported(name: str) -> bool:
    """Whether the package of a module is where others find it too."""
    package = name.partition(".")[0]
    try:
        return any(finder.find_spec(package, None) for finder in sys.meta_path)
    except Exception:  # finders are anybody's code
        return True


def load_factories(text: bytes) -> list[Callable[[], Any]]:
    """Return factories that another process has pickled.

    Classes and functions of its main script, and of other modules that went by value, become those
    of this process's, so that their instances (infos, exceptions, attributes) find their way back
    to the very same class over there.
    """
    factories, by_value = pickle.loads(text)
    for module_name, objects in by_value.items():
        module = sys.modules.setdefault(module_name, types.ModuleType(module_name))
        for name, value in objects.items():
            vars(module).setdefault(name, value)
    return factories
