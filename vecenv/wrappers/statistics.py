"""RecordEpisodeStatistics and RecordInfos: what happens in episodes, in infos and for a log."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.core.base import VecEnv
from vecenv.wrappers.base import Part, VecWrapper

__all__ = ["RecordEpisodeStatistics", "RecordInfos"]


class RecordEpisodeStatistics(VecWrapper):
    """Reports return, length and duration of every episode, in the step that ends it.

    `infos["episode"]` has `"r"` float64 (num_envs,), `"l"` int64 and `"t"` float64, the seconds
    since the episode began. `infos["_episode"]`, bool (num_envs,), marks the envs that have them;
    for other envs they are 0. With SAME_STEP `infos["final_info"]["episode"]` has the same. Steps
    that only reset, and agents that are not alive, do not count. The rewards are those that reach
    this wrapper: for true returns put it next to the env, inside wrappers that change rewards.

    Args:
        env: The vector env.
        buffer_length: Length of the queues.
        stats_key: Name in the infos.

    Attributes:
        return_queue, length_queue, time_queue: Values of the latest ended episodes.
        episode_count: Number of ended episodes.
        episode_returns: float64 (num_envs,), returns of unfinished episodes.

    Raises:
        ValueError: In `step` and `recv`: the infos already have that key.
    """

    def __init__(self, env: VecEnv, buffer_length: int = 100, stats_key: str = "episode") -> None:
        super().__init__(env)
        self._key = stats_key
        self.return_queue: deque[float] = deque(maxlen=buffer_length)
        self.length_queue: deque[int] = deque(maxlen=buffer_length)
        self.time_queue: deque[float] = deque(maxlen=buffer_length)
        self.episode_count = 0
        self.episode_returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, np.int64)
        self._begun_s = np.zeros(self.num_envs)

    def restart(self, rows: np.ndarray) -> None:
        """Begin the episodes of these rows."""
        self.episode_returns[rows] = 0.0
        self._lengths[rows] = 0
        self._begun_s[rows] = time.perf_counter()

    def infos(self, infos: dict[str, Any], rewards: np.ndarray, part: Part) -> dict[str, Any]:
        """Count the step, and report the episodes that have ended."""
        rows = part.rows
        self.episode_returns[rows] += np.where(part.acted, rewards, 0.0)
        self._lengths[rows] += part.acted
        if part.is_over.any():
            infos = self._reported(infos, part)
        if part.begins.any():
            every = np.arange(self.num_envs)[rows]
            self.restart(every[part.begins])
        return infos

    def _reported(self, infos: dict[str, Any], part: Part) -> dict[str, Any]:
        key, is_over = self._key, part.is_over.copy()
        if key in infos or f"_{key}" in infos:
            raise ValueError(
                f"the infos have the key {key!r} already, from a wrapper of the single envs or "
                "episode_infos=True; leave one of them out, or give another stats_key"
            )
        seconds = np.round(time.perf_counter() - self._begun_s[part.rows], 6)
        found = {
            "r": np.where(is_over, self.episode_returns[part.rows], 0.0),
            "l": np.where(is_over, self._lengths[part.rows], 0),
            "t": np.where(is_over, seconds, 0.0),
        }
        queues = self.return_queue, self.length_queue, self.time_queue
        for queue, values in zip(queues, found.values(), strict=True):
            queue.extend(values[is_over].tolist())
        self.episode_count += int(np.count_nonzero(is_over))
        stats = {key: found, f"_{key}": is_over}
        infos = {**infos, **stats}
        if self.autoreset_mode is AutoresetMode.SAME_STEP and "final_info" in infos:
            infos["final_info"] = {**infos["final_info"], **stats}
        return infos

    def own_state(self) -> dict[str, Any]:
        """Return the state of unfinished episodes, without their seconds."""
        return {"returns": self.episode_returns.copy(), "lengths": self._lengths.copy()}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `own_state` returned; seconds count from now."""
        self.restart(np.ones(self.num_envs, np.bool_))
        self.episode_returns[...], self._lengths[...] = state["returns"], state["lengths"]


class RecordInfos(VecWrapper):
    """Averages numbers in the infos of steps, over all envs, until `take` is called.

    Args:
        env: The vector env.
        names: Keys of the infos; "a/b" is key "b" of the dict under "a".

    Attributes:
        seen: Keys of the infos of steps so far.
        missing: Names that have had no number in any step so far.
    """

    def __init__(self, env: VecEnv, names: Iterable[str]) -> None:
        super().__init__(env)
        self._names = tuple(names)
        self.seen: set[str] = set()
        self.missing = list(self._names)
        self._clear()

    def _clear(self) -> None:
        # Sum and count of the values of every step, and of those of steps that end an episode.
        self._totals = {name: np.zeros((2, 2)) for name in self._names}

    def take(self) -> dict[str, float]:
        """Return the means since the last call, and start again.

        Returns:
            Under `NAME` the mean over steps; under `NAME_at_end` the mean over steps that ended an
            episode; without any number, neither.
        """
        found = {}
        for name, totals in self._totals.items():
            for key, (total, count) in zip((name, f"{name}_at_end"), totals, strict=True):
                if count:
                    found[key] = float(total / count)
        self._clear()
        return found

    def infos(self, infos: dict[str, Any], rewards: np.ndarray, part: Part) -> dict[str, Any]:
        """Add the numbers; the infos are unchanged."""
        final = infos.get("final_info") or {}  # SAME_STEP: infos of the step that ended the episode
        is_final = part.is_over & part.begins  # rows whose own infos belong to the reset
        self.seen.update(key for key in (*infos, *final) if not key.startswith("_"))
        for name, totals in self._totals.items():
            for source, rows in (
                (final, part.acted & is_final), (infos, part.acted & ~is_final)
            ):  # fmt: skip
                values, has = _values_of(source, name)
                if values is None:
                    continue
                if name in self.missing:
                    self.missing.remove(name)
                has = has & rows
                for row, chosen in enumerate((has, has & part.is_over)):
                    totals[row] += values[chosen].sum(), np.count_nonzero(chosen)
        return infos


def _values_of(infos: Mapping[str, Any], name: str) -> tuple[np.ndarray | None, Any]:
    """Return the numbers (N,) under a name, or None, and which rows have one, bool (N,)."""
    *parents, key = name.split("/")
    has = None  # mask of the innermost dict that has one
    for parent in parents:
        has, inner = infos.get(f"_{parent}", has), infos.get(parent)
        infos = inner if isinstance(inner, Mapping) else {}
    has, values = infos.get(f"_{key}", has), np.asarray(infos.get(key))
    if has is None or values.ndim != 1 or values.dtype.kind not in "biuf":
        return None, None
    return values.astype(np.float64), np.asarray(has, bool)
