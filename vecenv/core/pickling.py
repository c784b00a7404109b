"""What users' code has made, pickled for other processes: messages, env factories, env ids."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import sys
import types
import warnings
from collections import ChainMap
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
    for spec in list(gymnasium.registry.values()):  # which another thread may add to
        with contextlib.suppress(Exception):  # pickling runs code of users' classes
            late, entries = copy.copy(spec), {}
            for name in ("entry_point", "vector_entry_point"):
                if callable(entry := getattr(spec, name)):
                    entries[name] = cloudpickle.dumps(entry)
                    setattr(late, name, None)
            specs.append((cloudpickle.dumps(late), entries))
    return dumps(specs)


class _LateEntryPoint:
    """An env's class or factory that is imported when it is asked for: most ids never are.

    Otherwise one id that was registered with a class of a module that imports torch would make
    every worker import torch.
    """

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return loads(self._pickled)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_pickled" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(loads(self._pickled), name)

    def __reduce__(self) -> Any:
        return loads, (self._pickled,)  # elsewhere it is itself again


def load_registry(registry: bytes) -> None:
    """Register the env ids of `dump_registry` in this process, too.

    A package that does so itself when it is imported here, as it did over there, replaces nothing
    of anybody's: Gymnasium's warning for each of its ids is left out.
    """
    import gymnasium

    repeated = ".*Overriding environment .* already in registry"
    warnings.filterwarnings("ignore", repeated, UserWarning)
    for pickled_spec, entries in loads(registry):
        with contextlib.suppress(Exception):  # of a module that is not here: not of these envs
            spec = loads(pickled_spec)
            for name, pickled_entry in entries.items():
                setattr(spec, name, _LateEntryPoint(pickled_entry))
            gymnasium.registry.setdefault(spec.id, spec)


def dump_factories(factories: list[Callable[[], Any]]) -> bytes:
    """Pickle factories by value as far as needed: lambdas, closures, classes of `__main__`.

    So are classes and functions of modules that only this process has, as it has made them or
    loaded them from a file of another name.

    Locks, queues, pipes and shared values are handed over as if a process of theirs were started;
    everything else, tensors and bound methods too, as `cloudpickle` does it.
    Load with `load_factories`.
    """
    import multiprocessing.resource_sharer

    import cloudpickle
    import multiprocess.context

    libraries = (multiprocessing, multiprocess)
    names = {"socket", *(library.__name__ for library in libraries)}
    theirs: dict[Any, Any] = {}
    for library in libraries:
        reducers: dict[type, Any] = library.reduction.ForkingPickler._extra_reducers
        for kind, reducer in reducers.items():  # among them those that torch and others have added
            is_shared_value = reducer.__module__ == f"{library.__name__}.sharedctypes"
            if is_shared_value or kind.__module__.partition(".")[0] in names:
                theirs[kind] = reducer

    by_value = _ByValue()

    class Pickler(cloudpickle.Pickler):
        dispatch_table: Any = ChainMap(theirs, cloudpickle.Pickler.dispatch_table)  # type: ignore[arg-type]  # a ChainMap itself

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, type | types.FunctionType):
                by_value.note(obj)
            return super().reducer_override(obj)

    file = io.BytesIO()
    # Stands for a process being started; file descriptors reach it by a thread and a socket.
    spawning = types.SimpleNamespace(
        DupFd=multiprocessing.resource_sharer.DupFd, duplicate_for_child=lambda fd: fd
    )
    for library in libraries:
        library.context.set_spawning_popen(spawning)
    try:
        Pickler(file).dump((factories, by_value.objects))
    finally:
        for library in libraries:
            library.context.set_spawning_popen(None)
        by_value.end()
    return file.getvalue()


class _ByValue:
    """Classes and functions that are pickled by value.

    Attributes:
        objects: By module and name.
    """

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {"__main__": {}}
        self._known: set[str] = set()  # modules that others can import
        self._registered: list[types.ModuleType] = []

    def note(self, obj: Any) -> None:
        """Take notice of a class or function before it is pickled."""
        import cloudpickle

        name = obj.__module__
        module = sys.modules.get(name)
        if name in self._known or module is None:
            return
        if name not in self.objects:
            if _can_be_imported(name):
                self._known.add(name)
                return
            self.objects[name] = {}
            if name not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                self._registered.append(module)
        if vars(module).get(obj.__name__) is obj:
            self.objects[name][obj.__name__] = obj

    def end(self) -> None:
        """Leave modules to be pickled as before."""
        import cloudpickle

        for module in self._registered:
            cloudpickle.unregister_pickle_by_value(module)


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
