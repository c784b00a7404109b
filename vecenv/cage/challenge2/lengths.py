"""Episodes that draw their length: the kernels of the simulator with a limit of their own.

Plain functions, which `vecenv.jit` compiles; they call the kernels they are made from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vecenv.cage.challenge2.network.tables import TABLES_DTYPE
from vecenv.cage.challenge2.options import MAX_LENGTHS
from vecenv.cage.challenge2.rules.slots import CUSTOM_SLOT
from vecenv.jit.kernels import EnvKernels
from vecenv.jit.random import integers_at

__all__ = ["LENGTH_FIELD", "add_lengths", "with_drawn_lengths"]

LENGTH_FIELD = "length_index"  # the field of the state that says which length an episode has drawn
LENGTH_SLOT = CUSTOM_SLOT - 1
# The new fields come first: Numba takes a record that another one begins with for its subtype, and
# would run code compiled for the one with the other.
_DTYPE = np.dtype(
    [
        ("num_lengths", np.int64),
        ("lengths", np.uint16, (MAX_LENGTHS,)),
        *((name, TABLES_DTYPE[name]) for name in TABLES_DTYPE.names or ()),
    ],
    align=True,
)
_made: dict[Any, tuple[Any, Any]] = {}  # by step kernel, so that equal envs share their code


def add_lengths(tables: Any, lengths: Sequence[int]) -> np.record:
    """Return the tables with the lengths that episodes draw from, uniformly."""
    array = np.zeros(1, _DTYPE).view(np.recarray)
    for name in TABLES_DTYPE.names or ():
        array[name][0] = tables[name]
    array["num_lengths"] = len(lengths)
    array["lengths"][0, : len(lengths)] = lengths
    array.flags.writeable = False
    return array[0]


def with_drawn_lengths(kernels: EnvKernels) -> EnvKernels:
    """Return kernels that truncate each episode at a length drawn at its reset.

    Args:
        kernels: Those of the simulator; the new ones need what `add_lengths` returns as params.
    """
    if kernels.step not in _made:
        _made[kernels.step] = _make(kernels.reset, kernels.step)
    reset, step = _made[kernels.step]
    # Not `dataclasses.replace`: what else a kind of env may have does not know of these lengths.
    return EnvKernels(
        kernels.state_dtype,
        kernels.observation_space,
        kernels.action_space,
        reset,
        step,
        kernels.observe,
        kernels.action_mask,
        name=kernels.name,
    )


def _make(core_reset: Any, core_step: Any) -> tuple[Any, Any]:
    def reset(state, rng, tables):
        core_reset(state, rng, tables)
        state.length_index = np.uint64(integers_at(rng, LENGTH_SLOT, tables.num_lengths))

    def step(state, action, rng, tables):
        reward, terminated, _ = core_step(state, action, rng, tables)
        length = tables.lengths[np.uint64(state.length_index)]
        return reward, terminated, np.uint64(state.step) >= np.uint64(length)

    return reset, step
