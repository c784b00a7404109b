"""Write a skeleton of kernels for a Python env: spaces, state record, functions, a test."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

from vecenv.jit.games import COLUMNS
from vecenv.port.sides import RESET, PythonSide

__all__ = ["Guess", "guess_fields", "write_skeleton"]

_NUM_CALLS = 200
_LARGEST = 10_000  # most elements of an array that may be state
_LIBRARIES = ("numpy", "gymnasium", "builtins", "pygame", "enum", "collections", "logging")
_NOT_STATE = re.compile("np_random|render|window|clock|screen|metadata|spec$|space")

_KERNELS = '''"""Kernels of {source}: fill in what says TODO, then run

    vecenv port {source} {module}:KERNELS
"""

import numpy as np
from gymnasium.spaces import {spaces_used}

from vecenv.jit import {classes}
from vecenv.jit.random import integers, uniform  # noqa: F401  # draw in the order of the env

# Where the env has the fields of the state: a path, or a function of the env without wrappers.
# `vecenv port` compares them after each reset and step.
FIELDS = {{
{paths}}}
{constants}

def reset(state, rng):
{sets}    # TODO: as the env's `reset`, with its draws in the same order


def step(state, {action}, rng):
{game}    return 0.0, False, False  # TODO: reward, terminated, truncated, as the env's `step`


def observe(state, {observe}):
    out[:] = 0  # TODO: the observation{agent}

{mask}
KERNELS = EnvKernels(
    [
{record}    ],
{spaces}    reset=reset,
    step=step,
    observe=observe,
{has_mask}    name={name!r},
)
'''

_GAME = """    # actions{k} is that of agent k; write its results into state.rewards[k],
    # state.terminations[k] and state.truncations[k], which are 0 before
"""

_MASK = """
def action_mask(state, out):
    out[:] = True  # TODO: the env's action mask

"""

_TEST = '''"""The kernels do what {source} does."""

{imported}
from {module} import FIELDS, KERNELS

from vecenv.port import prove


def test_the_port_is_the_env():
    proof = prove({made}, KERNELS, fields=FIELDS, minutes=0.1, has_free_runs=False)
    assert proof.is_proven, str(proof)
'''


def _values(found: Any, path: str, depth: int) -> Iterator[tuple[str, str, np.ndarray | None]]:
    """Yield path, type and value of what an object holds; None for all but numbers and arrays."""
    for name, value in list(getattr(found, "__dict__", {}).items()):
        if _NOT_STATE.search(name):
            continue
        full = f"{path}.{name}" if path else name
        if isinstance(value, bool | int | float | np.number | np.bool_ | list | tuple | np.ndarray):
            try:
                array = np.array(value)
            except ValueError:  # a ragged list has no array
                array = np.array(None)
            is_numbers = array.dtype.kind in "biuf" and 0 < array.size <= _LARGEST
            yield full, type(value).__name__, array if is_numbers else None
        elif isinstance(value, str | dict | set | deque):
            yield full, type(value).__name__, None
        elif depth and (type(value).__module__ or "").split(".")[0] not in _LIBRARIES:
            yield from _values(value, full, depth - 1)


class Guess(NamedTuple):
    """Attributes of an env that may be state.

    Attributes:
        changing: By path, a value of each that changes.
        constant: By path, each number that does not.
        others: By path, the type of everything else: texts, lists of objects or of changing length.
        has_mask: Whether the env gives action masks.
    """

    changing: dict[str, np.ndarray]
    constant: dict[str, Any]
    others: dict[str, str]
    has_mask: bool


def guess_fields(side: PythonSide) -> Guess:
    """Play an env; return those of its attributes that may be state."""
    seen = side(RESET, 0)
    first = {k: v for k, _, v in _values(side.inner, "", 2) if v is not None}
    changing, types = dict[str, np.ndarray](), dict[str, str]()
    kept, has_mask, spaces = set(first), "mask" in seen, side.spaces.values()
    rng = np.random.default_rng(0)
    for _ in range(_NUM_CALLS):
        if side.is_over(seen) or rng.random() < 0.05:
            seen = side(RESET)
        else:
            seen = side(np.concatenate([np.reshape(space.sample(), -1) for _, space in spaces]))
        has_mask |= "mask" in seen
        now = list(_values(side.inner, "", 2))
        types |= {k: name for k, name, _ in now}
        values = {k: v for k, _, v in now if k in kept and v is not None}
        kept = {k for k, v in values.items() if v.shape == first[k].shape}
        changing |= {k: values[k] for k in kept if not np.array_equal(values[k], first[k])}
    constant = {
        k: v.item() for k, v in first.items() if k in kept - changing.keys() and v.ndim == 0
    }
    others = {k: name for k, name in types.items() if k not in kept}
    return Guess({k: v for k, v in changing.items() if k in kept}, constant, others, has_mask)


def _names(paths: Any) -> dict[str, str]:
    """Return a field name for each path: its last part, or more if that name is taken."""
    names: dict[str, str] = {}
    for path in paths:
        parts, count = [part.lstrip("_") or part for part in path.split(".")], 1
        taken = {*names.values(), *COLUMNS}
        while (name := "_".join(parts[-count:])) in taken and count < len(parts):
            count += 1
        names[path] = name + "_" * (name in taken)
    return names


def _field_source(name: str, value: np.ndarray) -> str:
    """Return the state record's line for a field with this value."""
    dtype = {"f": "np.float64", "b": "np.int8" if value.ndim else "np.bool_"}
    shape = f", {value.shape}" if value.ndim else ""
    return f"        ({name!r}, {dtype.get(value.dtype.kind, 'np.int64')}{shape}),\n"


def _space_source(space: Any) -> str:
    """Return the Python expression that makes a space."""
    if isinstance(space, Discrete):
        return f"Discrete({int(space.n)}{f', start={int(space.start)}' if space.start else ''})"
    if isinstance(space, MultiDiscrete):
        return f"MultiDiscrete({space.nvec.tolist()}, dtype=np.{space.dtype})"
    if isinstance(space, MultiBinary):
        return f"MultiBinary({space.n})"
    if not isinstance(space, Box):
        raise ValueError(
            f"the env has the space {space}, which kernels can't have: wrap the env so that it "
            "has a Box, Discrete, MultiDiscrete or MultiBinary (FlattenObservation, for one)"
        )
    dtype = np.dtype(space.dtype).name.replace("bool", "bool_")
    bounds = []
    for bound in (space.low, space.high):
        is_one = (bound == bound.flat[0]).all()
        text = repr(bound.flat[0].item()) if is_one else f"np.array({bound.tolist()}, np.{dtype})"
        bounds.append(re.sub(r"\binf\b", "np.inf", text))
    return f"Box({', '.join(bounds)}, {space.shape}, np.{dtype})"


def write_skeleton(make: Callable[[], Any], source: str, folder: Path) -> tuple[Path, Path]:
    """Write kernels to fill in, and a test; return the two files.

    Args:
        make: Makes the Python env.
        source: The env's name in the command line.
        folder: Target folder.

    Raises:
        ValueError: The env has spaces that kernels do not support.
        FileExistsError: One of the files exists already.
    """
    side = PythonSide(make)
    base = type(side.inner).__name__
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", base).lower() + "_kernels"
    files = folder / f"{module}.py", folder / f"test_{module}.py"
    for file in files:
        if file.exists():
            raise FileExistsError(17, "there is such a file already", str(file))
    kinds: dict[str, list[str]] = {}
    for name, pair in side.spaces.items():
        kinds.setdefault(", ".join(map(_space_source, pair)), []).append(name)
    is_game = "" not in side.spaces
    if is_game:
        groups = [
            f"        'group_{k}': AgentsOf({kinds[one]!r}, {one}),\n"
            for k, one in enumerate(kinds)
        ]
        made = f"    groups={{\n{''.join(groups)}    }},\n"
    else:
        pair = [_space_source(space) for space in side.spaces[""]]
        made = "    observation_space={},\n    action_space={},\n".format(*pair)
    changing, constant, others, has_mask = guess_fields(side)
    side.env.close()
    names = _names(changing)
    fields = {names[path]: value for path, value in changing.items()} or {"steps": np.array(0)}
    used = sorted(set(re.findall(r"\b(Box|Discrete|MultiBinary|MultiDiscrete)\(", made)))
    told = "".join(f"# {path} = {value!r}\n" for path, value in constant.items())
    told = f"\n# What stayed as it was: constants, or fields of `params`:\n{told}" if told else ""
    untold = ", ".join(f"{path} ({kind})" for path, kind in others.items())
    text = _KERNELS.format(
        source=source,
        module=module,
        spaces_used=", ".join(used),
        classes="AgentsOf, EnvKernels" if is_game else "EnvKernels",
        paths="".join(f"    {name!r}: {path!r},\n" for path, name in names.items())
        + (f"    # not guessed: {untold}\n" if untold else ""),
        constants=told,
        sets="".join(f"    state.{k}{'[:]' if v.ndim else ''} = 0\n" for k, v in fields.items()),
        action="actions" if is_game else "action",
        game=_GAME.format(k="[group][k]" if len(kinds) > 1 else "[k]") if is_game else "",
        observe="agent, out" if is_game else "out",
        agent=" of one agent" if is_game else "",
        mask=_MASK if has_mask else "",
        record="".join(_field_source(name, value) for name, value in fields.items()),
        spaces=made,
        has_mask="    action_mask=action_mask,\n" if has_mask else "",
        name=base,
    )
    folder.mkdir(parents=True, exist_ok=True)
    files[0].write_text(text)
    place, _, made = source.partition(":")
    imported = f"from {place} import {made}" if made.isidentifier() else "import gymnasium"
    made = made if made.isidentifier() else f"lambda: gymnasium.make({source!r})"
    files[1].write_text(_TEST.format(source=source, module=module, imported=imported, made=made))
    return files
