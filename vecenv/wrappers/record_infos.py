"""RecordInfos: means of numbers in infos, for the log of a training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from vecenv.core.base import VecEnv
from vecenv.wrappers.base import Part, VecWrapper

__all__ = ["RecordInfos"]


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
