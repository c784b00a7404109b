"""`vecenv envs`: registered envs as a table."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from vecenv.make import COMPILED_TWINS, has_compiled_envs, make_vec
from vecenv.source import is_ours

__all__ = ["list_envs"]


def list_envs(words: Sequence[str] = (), *, has_all: bool = False) -> Table:
    """Return a table of registered envs.

    Args:
        words: Parts of names, in any case; lists only envs with one of them. Empty lists all.
        has_all: Also list the newest versions of Gymnasium's and other registered envs.
    """
    specs = [gym.registry[name] for name in sorted(gym.registry)]
    specs = [spec for spec in specs if is_ours(spec) or (has_all and _is_newest(spec))]
    specs = [s for s in specs if not words or any(word.lower() in s.id.lower() for word in words)]
    if not specs:
        hint = "" if has_all else "; --all lists Gymnasium's, too"
        raise ValueError(f"no env has {' or '.join(words)} in its name{hint}")
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("id", no_wrap=True, overflow="fold")  # ids are for copying
    # Long reasons why an env is not available share the rest of the width with the last column.
    table.add_column("observations", min_width=13 if has_all else 19, overflow="fold")
    table.add_column("actions", min_width=16, overflow="fold")
    table.add_column("", overflow="fold")
    for spec in sorted(specs, key=lambda spec: (not is_ours(spec), spec.id)):
        table.add_row(*map(Text, (spec.id, *_cells(spec))))  # no markup: "gymnasium[mujoco]"
    return table


def _is_newest(spec: EnvSpec) -> bool:
    alike = [s for s in gym.registry.values() if s.namespace == spec.namespace]
    return (spec.version or 0) == max(s.version or 0 for s in alike if s.name == spec.name)


def _cells(spec: EnvSpec) -> list[str]:
    """Return the spaces of an env, and whether it is compiled; makes an env for this."""
    from vecenv.jit.binding import uncompiled

    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            is_compiled = has_compiled_envs(spec.id)
            with uncompiled() if is_compiled else contextlib.nullcontext():  # compiling takes long
                envs = make_vec(spec.id, 1, backend="jit" if is_compiled else "sync")
            spaces = envs.single_observation_space, envs.single_action_space
            envs.close()
    except Exception as error:  # missing packages lead to many types
        told = (str(error.__cause__ or error).strip() or type(error).__name__).splitlines()[0]
        return [f"not to be had: {told}", "", ""]
    twin = COMPILED_TWINS.get(spec.id)
    told = "compiled" if is_compiled else f"compiled: {twin}" if twin else ""
    return [*map(_shown, spaces), told]


def _shown(space: Any) -> str:
    """Return a short text for a space."""
    name = type(space).__name__
    if name in ("Box", "MultiBinary"):
        dtype = "" if str(space.dtype) in ("float32", "int8") else f" {space.dtype}"  # as is usual
        return f"{name}({'x'.join(map(str, space.shape))}){dtype}"
    if name in ("Discrete", "MultiDiscrete"):
        return f"{name}({space.n if name == 'Discrete' else space.nvec.size})"
    return f"{name} of {len(space.spaces)}" if name in ("Dict", "Tuple") else name
