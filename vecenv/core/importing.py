"""Import modules and objects that the user names, also from the working directory."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
import types
from typing import Any

__all__ = ["import_module", "import_object"]


def import_module(name: str) -> types.ModuleType:
    """Import a module, also one in the working directory.

    Raises:
        ImportError: The module can't be imported.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        here, package = os.getcwd(), name.partition(".")[0]
        if error.name != package:
            raise
        if here not in sys.path and "" not in sys.path:
            sys.path.append(here)  # for good, so that worker processes find it too
            importlib.invalidate_caches()
            if importlib.util.find_spec(package) is not None:
                return importlib.import_module(name)
        told = f"{error}: it is neither installed nor in {here}; go to the folder that it is in, "
        raise ModuleNotFoundError(f"{told}or name that in PYTHONPATH", name=package) from None


def import_object(argument: str, text: str) -> Any:
    """Import the object that "module:object" names; messages call the text `argument`.

    Raises:
        ValueError: The text has another form, or the module has no such object.
        ImportError: There is no such module, or it can't be imported.
    """
    module_name, _, path = text.partition(":")
    if not module_name or not path:
        raise ValueError(f"{argument} is {text!r}, expected 'module:object'")
    try:
        found = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ModuleNotFoundError(
                f"{argument} is {text!r}, but there is no module {error.name!r}, neither installed "
                f"nor in {os.getcwd()}",
                name=error.name,
            ) from None
        raise  # it is another module, which that one imports
    for name in path.split("."):
        if not hasattr(found, name):
            own = [key for key in dir(found) if not key.startswith("_")]
            near = difflib.get_close_matches(name, own, 3) or own[:8]
            raise ValueError(
                f"{argument} is {text!r}, but {found!r} has no {name!r}; it has {', '.join(near)}"
            )
        found = getattr(found, name)
    return found
