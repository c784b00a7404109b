"""Infos of rows whose info dicts lie in columns and messages, put together as `add_info` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vecenv.core.infos import InfosApart, add_info
from vecenv.workers.fields import DICT, OBJECT, Field, rebuild

__all__ = ["NO_INFO", "FormsDiffer", "InfoRows", "Read", "ReadyColumn", "objects_of"]

NO_INFO = 0  # in place of the number of a form


class ReadyColumn(NamedTuple):
    """A column as the caller has it.

    Attributes:
        rows: (num_envs, ...) per number or array of numbers in a value.
        ring: (ring rows, ...) likewise.
    """

    rows: list[np.ndarray]
    ring: list[np.ndarray]


class FormsDiffer(Exception):
    """A key is a dict in one env and something else in another."""


# Returns the arrays of a column, with a row per row of the batch; views or copies.
Read = Callable[[ReadyColumn], Sequence[np.ndarray]]


class InfoRows:
    """Infos of the rows of a batch, wherever they are.

    Args:
        forms: int64 (B,).
        messages: By row, see `ChunkInfos`.
        read: Returns the arrays of a column.
        env_ids: Whose the rows are.
        fields: Of every form.
    """

    def __init__(
        self,
        forms: np.ndarray,
        messages: dict[int, list[Any]],
        read: Read,
        env_ids: Sequence[int] | np.ndarray,
        fields: dict[int, list[Field]],
    ) -> None:
        self._forms, self._messages, self._env_ids = forms, messages, env_ids
        self._read, self._fields = read, fields
        self._arrays: dict[int, Sequence[np.ndarray]] = {}

    def drop_lost(self, num_others: dict[int, int]) -> None:
        """Leave out rows whose message was lost with a worker that died, and was replaced."""
        for form in set(self._forms.tolist()) - {NO_INFO}:
            if num_others[form]:
                for row in np.flatnonzero(self._forms == form).tolist():
                    if row not in self._messages:
                        self._forms[row] = NO_INFO

    def by_form(self) -> list[tuple[list[Field], np.ndarray]]:
        """Return the fields of every form and its rows, in the order of the first rows."""
        found = dict.fromkeys(self._forms.tolist())
        found.pop(NO_INFO, None)
        return [(self._fields[form], np.flatnonzero(self._forms == form)) for form in found]

    def merge(
        self,
        infos: dict[str, Any],
        groups: list[tuple[list[Field], np.ndarray]],
        path: tuple[Any, ...],
    ) -> None:
        """Enter fields key by key: what all rows have in one column as a whole, others one by one.

        Raises:
            FormsDiffer: A key is a dict for some rows only.
        """
        num_rows = len(self._forms)
        uses: dict[Any, list[tuple[Field, np.ndarray]]] = {}
        for fields, rows in groups:
            for field in fields:
                uses.setdefault(field.key, []).append((field, rows))
        for key, found in uses.items():
            first = found[0][0]
            rows = (
                found[0][1] if len(found) == 1 else np.sort(np.concatenate([r for _, r in found]))
            )
            is_dict = [field.kind == DICT for field, _ in found]
            if any(is_dict):
                if not all(is_dict):
                    raise FormsDiffer
                inner = infos[key] = {}
                self.merge(inner, [(field.template, r) for field, r in found], (*path, key))
            elif first.target is None or any(f.target is not first.target for f, _ in found):
                for row, field in sorted(
                    ((row, field) for field, r in found for row in r.tolist()), key=_first_item
                ):
                    info = {key: self._value(field, row)}
                    add_info(infos, info, row, num_rows, int(self._env_ids[row]), path)
                continue
            elif first.kind == OBJECT:
                leaves = self._leaves(first.target)
                infos[key] = objects_of(first.template, leaves, rows.tolist(), num_rows)
            else:
                (values,) = self._leaves(first.target)
                array = infos[key] = np.zeros((num_rows, *values.shape[1:]), values.dtype)
                array[rows] = values[rows]
            mask = infos[first.mask_key] = np.zeros(num_rows, np.bool_)
            mask[rows] = True

    def _leaves(self, column: ReadyColumn) -> Sequence[np.ndarray]:
        found = self._arrays.get(id(column))
        if found is None:
            found = self._arrays[id(column)] = self._read(column)
        return found

    def _value(self, field: Field, row: int) -> Any:
        """Return what an env had in a field, with its type."""
        if field.kind == DICT:
            return {inner.key: self._value(inner, row) for inner in field.template}
        if field.target is None:
            return self._messages[row][field.template]
        return rebuild(field.template, iter(self._leaves(field.target)), row)

    def _infos_of(self, row: int) -> list[dict[str, Any]]:
        """Return the info dicts of an env, mostly one."""
        form = int(self._forms[row])
        if form == NO_INFO:
            return self._messages.get(row, [])
        return [{field.key: self._value(field, row) for field in self._fields[form]}]

    def apart(self) -> InfosApart:
        """Return the info dicts."""
        found = ((row, self._infos_of(row)) for row in range(len(self._forms)))
        return InfosApart({row: infos for row, infos in found if infos})

    def enter_each(self) -> dict[str, Any]:
        """Return the infos batched one by one."""
        infos: dict[str, Any] = {}
        num_rows = len(self._forms)
        for row in range(num_rows):
            for info in self._infos_of(row):
                add_info(infos, info, row, num_rows, int(self._env_ids[row]))
        return infos


def _first_item(pair: tuple[int, Field]) -> int:
    return pair[0]


def objects_of(
    template: Any, leaves: Sequence[np.ndarray], rows: Sequence[int], num_rows: int
) -> np.ndarray:
    """Return an object array with the values of some rows, None in others."""
    items = np.full(num_rows, None, dtype=object)
    for row in rows:
        items[row] = rebuild(template, iter(leaves), row)
    return items
