"""The files of examples/, as modules."""

import importlib.util
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def load_example(name):
    """Import an example once for all tests: some register envs, which can't be done twice."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and registered ids look their module up
        spec.loader.exec_module(module)
    return sys.modules[name]
