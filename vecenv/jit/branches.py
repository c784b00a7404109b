"""Branches: copies of envs in mid-episode, to continue from them more than once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vecenv.core.arguments import check_choice
from vecenv.core.compiling import cached_njit
from vecenv.core.protocol import CallProtocol
from vecenv.jit.random import mix, seed_key, word_of

__all__ = [
    "Branch",
    "copy_records",
    "draw_seeds",
    "read_branch",
    "read_rows",
    "read_sources",
    "refuse_branches",
    "take_records",
]


class Branch(NamedTuple):
    """Copies of B envs, from `snapshot`: their states, episodes, random streams and parameters.

    Attributes:
        name: Name of the kind of env.
        states: (B,) state records.
        runs: (B,) RUN_DTYPE, random streams and statistics.
        params: (B,) parameter records; None if all envs share one, or have none.
        facts: Further entries in the `state_dict` of this kind of env.
    """

    name: str
    states: np.ndarray
    runs: np.ndarray
    params: np.ndarray | None
    facts: Mapping[str, np.ndarray]


def read_rows(name: str, rows: Any, num_envs: int) -> np.ndarray:
    """Return the env ids of an argument, int64 (B,), given as ids, one id, a mask, or None for all.

    Raises:
        TypeError, ValueError: It is none of these.
    """
    if rows is None:
        return np.arange(num_envs)
    ids = np.asarray(rows)
    if ids.dtype.kind == "b" and ids.shape == (num_envs,):
        return np.flatnonzero(ids)
    if ids.dtype.kind not in "iu" or ids.ndim > 1:
        raise TypeError(
            f"{name} is {ids.dtype} {ids.shape}, expected env ids, or a mask bool ({num_envs},)"
        )
    ids = np.atleast_1d(ids).astype(np.int64)
    if len(ids) and not 0 <= ids.min() <= ids.max() < num_envs:
        bad = ids[(ids < 0) | (ids >= num_envs)][0]
        raise ValueError(f"{name} has {bad}, expected env ids from 0 to {num_envs - 1}")
    return ids


def read_sources(
    source: Any, target: Any, num_sources: int, num_envs: int, luck: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return sources and targets of copies, int64 (B,) each; one source goes to all targets.

    Raises:
        TypeError, ValueError: Ids are out of range, or the numbers differ.
    """
    check_choice("luck", luck, ("same", "fresh"))
    sources = read_rows("source", source, num_sources)
    targets = read_rows("target", target, num_envs)
    if len(sources) == 1:
        sources = np.repeat(sources, len(targets))
    if len(sources) != len(targets):
        raise ValueError(
            f"{len(sources)} sources for {len(targets)} targets, expected as many, or one source"
        )
    return sources, targets


def refuse_branches(
    calls: CallProtocol, call: str, sources: np.ndarray, targets: np.ndarray, over: np.ndarray
) -> None:
    """Raise for envs in flight, or never reset, and for sources whose episodes have ended.

    `over` bool (B,) marks the sources whose episodes have ended.
    """
    if len(targets):
        calls.check_env_ids(targets, call)  # raises if an id comes twice
    if len(sources) and (calls.num_in_flight or calls.unreset):
        calls.check_env_ids(np.unique(sources), call)
    if over.any():
        ended = np.unique(sources[over])
        raise ValueError(
            f"{call} of envs {', '.join(map(str, ended[:8].tolist()))}, whose episodes have ended: "
            "branches are of episodes that go on; take other envs, or step or reset these first"
        )


def read_branch(branch: Any, name: str, dtype: np.dtype, params: np.dtype | None) -> Branch:
    """Return a branch if it fits this name and state record; `params`: dtype of envs' own ones.

    Raises:
        TypeError, ValueError: It is not a branch, or belongs to another kind of env.
    """
    if not isinstance(branch, Branch):
        raise TypeError(f"branch is a {type(branch).__name__}, expected what snapshot returned")
    own = None if branch.params is None else branch.params.dtype
    if (branch.name, branch.states.dtype, own) != (name, dtype, params):
        raise ValueError(
            f"the branch is of {branch.name}, of another kind than {name} here, or one of them has "
            "parameters per env and the other has not"
        )
    return branch


def copy_records(
    records: np.ndarray, targets: np.ndarray, given: np.ndarray, sources: np.ndarray
) -> None:
    """Copy records `given[sources]` (B,) to `records[targets]`, of the same dtype, as bytes."""
    whole = np.dtype((np.void, records.dtype.itemsize))
    records.view(whole)[targets] = given.view(whole)[sources]


def take_records(records: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return copies of `records[rows]`, (B,), taken as bytes."""
    return records.view(np.dtype((np.void, records.dtype.itemsize)))[rows].view(records.dtype)


def draw_seeds(runs: np.ndarray, env_ids: np.ndarray) -> np.ndarray:
    """Return new seeds uint64 (B,) of envs int64 (B,), each from the env's number and its stream.

    `runs` (B,) contain the streams.
    """
    seeds = np.zeros(len(env_ids), np.uint64)
    _draw_seeds(runs.view(np.recarray), env_ids, seeds)
    return seeds


@cached_njit
def _draw_seeds(streams, env_ids, out):
    for k in range(env_ids.shape[0]):
        stream = streams[k]
        word = word_of(stream.key, ~stream.counter)  # far from the words that the stream draws
        out[k] = mix(word ^ seed_key(np.uint64(env_ids[k])))
