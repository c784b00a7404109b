"""The recordings that the simulator must reproduce, as plain arrays."""

import functools
import json
import pathlib

import numpy as np

from vecenv.cage import cage2_scenario, decode
from vecenv.cage.challenge2.tables import STATE_DTYPE

FOLDER = pathlib.Path(__file__).parent / "golden"
FOLDER4 = pathlib.Path(__file__).parent / "golden4"  # of CAGE Challenge 4
COMPACT_FIELDS = tuple(decode(np.zeros(1, STATE_DTYPE), cage2_scenario()))
RULES_OF_TRACE = {"shared": "faithful", "randomred": "faithful", "debugged": "debugged"}


@functools.cache
def load_trace(name):
    """Entries by name, each an array (episodes, steps, ...), read-only."""
    with np.load(FOLDER / f"traces_{name}.npz") as archive:
        trace = {key: archive[key] for key in archive.files}
    for array in trace.values():
        array.flags.writeable = False
    return trace


@functools.cache
def load_json(name):
    """Contents of a JSON file."""
    return json.loads((FOLDER / name).read_text())
