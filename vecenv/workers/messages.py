"""What travels through pipes: pickled, with a deadline, and only when a bit has announced it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from vecenv.core.faults import EnvFault
from vecenv.core.pickling import dumps
from vecenv.workers.actions import ActionLeaves
from vecenv.workers.layout import Leaf

__all__ = [
    "INTERRUPTED",
    "MAY_MAKE",
    "NOTHING",
    "Answer",
    "EnvSpaces",
    "Layout",
    "ResetRequest",
    "SlotLeaves",
    "answer_bytes",
    "message_head",
    "split_message",
]


# Outcomes of a chunk's command, see `chunk.Outcome`: nothing to say beyond numbers; and for the
# caller's own chunk, Ctrl-C came, and how far it was is unknown.
NOTHING = (0, 0, None)
INTERRUPTED = (-1, -1, None)
MAY_MAKE = b"make"  # what workers wait for before they make envs
_HEAD = struct.Struct("<qq")


def message_head(position: int, sequence: int) -> bytes:
    """Return what an answer's bytes begin with: its ring row, or its command's sequence number."""
    return _HEAD.pack(position, sequence)


def split_message(message: bytes) -> tuple[int, int, memoryview]:
    """Return position, sequence (-1 for the one that it is not), and the pickled answer."""
    return (*_HEAD.unpack_from(message), memoryview(message)[_HEAD.size :])


class EnvSpaces(NamedTuple):
    """What a worker reports when its envs have been made.

    Attributes:
        spaces: Distinct (observation space, action space) pairs.
        which: For each env the position of its pair.
        metadata: Of the first env.
        render_mode: Of the first env.
        published: Named spaces of arrays that the first env publishes.
    """

    spaces: list[tuple[Space, Space]]
    which: list[int]
    metadata: dict[str, Any]
    render_mode: str | None
    published: dict[str, Space]


class SlotLeaves(NamedTuple):
    """Arrays that the results of a step are written into, all (num_envs, ...)."""

    obs: tuple[Leaf, ...]
    rewards: Leaf
    terminations: Leaf
    truncations: Leaf


class Layout(NamedTuple):
    """What a worker must know before its envs can be stepped.

    Attributes:
        observation_space: Of one env.
        action_space: Of one env.
        own: Slot 0, the pool's own rows.
        actions: Leaves of the actions; None if they travel by message.
        ring_leaves: int64 (L, 3) table for first-ready rows.
        published: Array (num_envs, *shape) of every name that envs publish.
        autoreset_mode: When ended envs are reset.
        row_forms: Forms of the envs' infos, int64 (num_envs,), where a chunk's differ.
    """

    observation_space: Space
    action_space: Space
    own: SlotLeaves
    actions: ActionLeaves | None
    ring_leaves: Leaf
    published: dict[str, Leaf]
    autoreset_mode: AutoresetMode
    row_forms: Leaf


class Answer(NamedTuple):
    """What a worker sends after a command that has more to say than numbers.

    Attributes:
        result: Of a message; None for a step.
        infos: What of the infos is not in columns: by row of the chunk, or of the one env whose
            ring row it is; see `info_columns.ChunkInfos`.
        objects: Observations of leaves without fixed shape, one list per leaf.
        errors: Faults of single envs.
    """

    result: Any = None
    infos: Any = None
    objects: Sequence[Sequence[Any]] = ()
    errors: Sequence[Any] = ()


def answer_bytes(answer: Answer, first: int, worker: int) -> bytes:
    """Pickle an answer; if that fails, pickle a fault of the env to blame.

    Args:
        answer: What the envs of a chunk (or one of them) have to say.
        first: The first of these envs.
        worker: Whose answer it is.
    """
    try:
        return dumps(answer)
    except BaseException as error:  # code of users' classes
        fault = EnvFault.of(error, first + _culprit(answer), worker, "the answer of")
        return dumps(answer._replace(result=None, infos=None, objects=(), errors=[fault]))


def _culprit(answer: Answer) -> int:
    """Return the first env whose part of an answer can't be pickled; 0 if unknown."""
    parts: list[Any] = [enumerate(items) for items in (answer.result or (), *answer.objects)]
    if isinstance(answer.infos, dict):  # by row; those of a single env are a list
        parts.append(answer.infos.items())
    for part in parts:
        for index, item in part:
            try:
                dumps(item)
            except BaseException:  # code of users' classes
                return index
    return 0


class ResetRequest(NamedTuple):
    """Arguments of a reset for one chunk; `drop` gives up what is queued."""

    seeds: Sequence[int | None]
    options: dict[str, Any] | None
    reset_mask: np.ndarray | None
    drop: bool
