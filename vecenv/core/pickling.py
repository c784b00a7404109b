"""Pickle users' objects for other processes: messages, env factories, env ids."""

from __future__ import annotations

import contextlib
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
    """Pickle a message; by value what plain pickle can't (closures, classes of `__main__`)."""
    try:
        return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:  # pickling runs code of users' classes
        import cloudpickle

        return cloudpickle.dumps(message)


def dump_registry() -> bytes:
    """Pickle the specs of the env ids that this process knows, leaving out those that can't be."""
    import cloudpickle
    import gymnasium

    specs = []
    for spec in list(gymnasium.registry.values()):
        with contextlib.suppress(Exception):  # pickling runs code of users' classes
            specs.append(cloudpickle.dumps(spec))
    return dumps(specs)


def load_registry(registry: bytes) -> None:
    """Register the env ids of `dump_registry` in this process too.

    If a package registers the same ids when it is imported here, as in the other process,
    Gymnasium's warning about each id is suppressed: nothing of the user's is replaced.
    """
    import gymnasium

    repeated = ".*Overriding environment .* already in registry"
    warnings.filterwarnings("ignore", repeated, UserWarning)
    for pickled in loads(registry):
        with contextlib.suppress(Exception):  # of a module missing here: not of these envs
            spec = loads(pickled)
            gymnasium.registry.setdefault(spec.id, spec)


def dump_factories(factories: list[Callable[[], Any]]) -> bytes:
    """Pickle factories, by value where needed: lambdas, closures, classes of `__main__`.

    Classes and functions of modules that exist only in this process (made there, or loaded from
    a file of another name) go by value too. Everything else is pickled as `cloudpickle` does it.
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
    """Whether other processes find the package of a module in the same place."""
    package = name.partition(".")[0]
    try:
        return any(finder.find_spec(package, None) for finder in sys.meta_path)
    except Exception:  # finders may be users' code
        return True


def load_factories(text: bytes) -> list[Callable[[], Any]]:
    """Return factories that another process has pickled.

    Classes and functions of its main script, and of other modules that were pickled by value,
    are registered as this process's own. So their instances (infos, exceptions, attributes)
    become instances of the very same class when they return to that process.
    """
    factories, by_value = pickle.loads(text)
    for module_name, objects in by_value.items():
        module = sys.modules.setdefault(module_name, types.ModuleType(module_name))
        for name, value in objects.items():
            vars(module).setdefault(name, value)
    return factories
