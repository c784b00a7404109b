"""Info fields of fixed shape in shared memory.

A field of the batched infos whose values are built of numbers (also `final_obs`, and dicts for the
sake of their masks) gets a column when it is first seen: arrays with a row per env, and a mask. The
order in which fields stood in the infos of a chunk is called their form, and has a number. From
then on workers write into the columns and say with one number which form it was. Whatever else is
in the infos travels in a message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vecenv.shm.arena import Arena
from vecenv.shm.fields import (
    FlatInfos,
    Path,
    enter,
    fields,
    is_numeric,
    leaf_dtypes,
    rebuild,
    store,
    template_of,
)
from vecenv.shm.layout import Leaf
from vecenv.shm.messages import Column

__all__ = ["ChunkInfos", "ColumnReader", "ColumnWriter"]

_MOST_COLUMNS = 64
_MOST_FORMS = 256

Form = tuple[Path, ...]


class ChunkInfos(NamedTuple):
    """What is known of the infos of some rows.

    Attributes:
        form: Number of the form; 0 if the message holds all fields.
        message: Fields that travelled by message.
        rows: Slice or int64 (B,): which rows of the batch these are.
    """

    form: int
    message: FlatInfos
    rows: Any


class ColumnWriter:
    """A worker's end."""

    def __init__(self, view: Callable[[Leaf], np.ndarray], first: int, last: int) -> None:
        self._view = view
        self._rows = slice(first, last)
        self._columns: dict[Path, tuple[Column, list[np.ndarray], np.ndarray]] = {}
        self._forms: dict[Form, int] = {}

    def add(self, columns: Sequence[Column], forms: Sequence[Form]) -> None:
        """Learn of new columns and forms."""
        for column in columns:
            values = [self._view(leaf)[self._rows] for leaf in column.values]
            self._columns[column.path] = (column, values, self._view(column.mask)[self._rows])
        for form in forms:
            self._forms[form] = len(self._forms) + 1

    def write(self, infos: dict[str, Any], index: int | None = None) -> tuple[int, FlatInfos]:
        """Write the fields that have a column, of all envs of the chunk or of one.

        Returns:
            The number of the form, 0 if it is unknown; and the fields that are left, with the rows
            of the chunk or the one of the env.
        """
        found = list(fields(infos))
        form = self._forms.get(tuple(path for path, _, _ in found), 0)
        rows = slice(None) if index is None else slice(index, index + 1)
        rest: FlatInfos = {}
        for path, value, mask in found:
            column = self._columns.get(path) if form else None
            if column is None or not _write(column, value, mask, rows):
                rest[path] = ({} if isinstance(value, dict) else value[rows], mask[rows])
        return form, rest


def _write(
    column: tuple[Column, list[np.ndarray], np.ndarray], value: Any, mask: np.ndarray, rows: slice
) -> bool:
    """Write some rows of a field into its column; return whether they fit."""
    about, leaves, mask_rows = column
    if about.kind == "dict" or isinstance(value, dict):
        if about.kind != "dict" or not isinstance(value, dict):
            return False
    elif about.kind == "numbers":
        leaf = leaves[0]
        if value.dtype != leaf.dtype or value.shape != leaf.shape:
            return False
        leaf[rows] = value[rows]
    else:
        present = (np.flatnonzero(mask[rows]) + (rows.start or 0)).tolist()
        if value.dtype != object:
            return False
        if any(template_of(value[row]) != about.template for row in present):
            return False
        for row in present:
            store(value[row], iter(leaves), row)
    mask_rows[rows] = mask[rows]
    return True


class ColumnReader:
    """The caller's end: makes columns, and puts the batched infos together.

    Attributes:
        columns: All of them.
        forms: All of them; the first has number 1.
        has_unsent: Whether there are some that the workers have not been told of.
    """

    def __init__(self, arena: Arena, num_envs: int, ring_rows: int) -> None:
        self._arena = arena
        self._num_envs = num_envs
        self._ring_rows = ring_rows
        self.columns: list[Column] = []
        self.forms: list[Form] = []
        self._sent = (0, 0)
        self.has_unsent = False
        self._ready: dict[Path, _ReadyColumn] = {}

    def take_unsent(self) -> tuple[list[Column], list[Form]]:
        """Return what the workers have not been told of; from now on they have."""
        columns, forms = self._sent
        self.has_unsent = False
        self._sent = len(self.columns), len(self.forms)
        return self.columns[columns:], self.forms[forms:]

    def all_sent(self) -> tuple[list[Column], list[Form]]:
        """Return what the workers have been told, for one that starts anew."""
        return self.columns[: self._sent[0]], self.forms[: self._sent[1]]

    def ring_arrays(self, column: Column) -> list[np.ndarray]:
        """Return where the values of a column are in the ring, (ring rows, ...) per leaf."""
        return self._ready[column.path].ring

    def _learn(self, message: FlatInfos, form: int) -> None:
        """Make columns for fields that came by message, and note their form if it has none."""
        for path, (value, mask) in message.items():
            if len(self.columns) < _MOST_COLUMNS and path not in self._ready:
                self._make(path, value, mask)
        if not form and len(self.forms) < _MOST_FORMS:
            new = tuple(message)
            if new not in self.forms and any(path in self._ready for path in new):
                self.forms.append(new)
                self.has_unsent = True

    def _make(self, path: Path, value: Any, mask: np.ndarray) -> None:
        """Make a column if the values of this field are of fixed shape."""
        kind, template, leaves = "dict", None, []
        if is_numeric(value):
            kind, leaves = "numbers", [(value.dtype.str, value.shape[1:])]
        elif not isinstance(value, dict):
            templates = {template_of(item) for item in value[mask]}
            template = templates.pop() if len(templates) == 1 else None
            if template is None:
                return
            kind, leaves = "objects", list(leaf_dtypes(template))
        if any(0 in shape for _, shape in leaves):
            return
        allocate, num_envs = self._arena.allocate, self._num_envs
        values = [allocate((num_envs, *shape), dtype) for dtype, shape in leaves]
        mask_rows = allocate((num_envs,), np.bool_)
        ring = [allocate((self._ring_rows, *shape), dtype) for dtype, shape in leaves]
        places = tuple(map(self._arena.leaf, values))
        self.has_unsent = True
        self.columns.append(Column(path, kind, template, places, self._arena.leaf(mask_rows)))
        self._ready[path] = _ReadyColumn(kind, template, values, mask_rows, ring)

    def collect(self, chunks: Sequence[ChunkInfos], infos: dict[str, Any]) -> None:
        """Put the infos of all chunks together, in the order of their rows.

        Args:
            chunks: `rows` are slices.
            infos: Batched infos of all envs; changed in place.
        """
        if not chunks:
            return
        first = chunks[0].form
        is_all = sum(chunk.rows.stop - chunk.rows.start for chunk in chunks) == self._num_envs
        if is_all and all(chunk.form == first and not chunk.message for chunk in chunks):
            chunks = [ChunkInfos(first, {}, slice(0, self._num_envs))]
        for chunk in chunks:
            if chunk.message:
                self._learn(chunk.message, chunk.form)
            self._enter(chunk, infos, self._num_envs, lambda column, rows: column.rows(rows))

    def collect_ring(
        self, chunks: Sequence[ChunkInfos], places: np.ndarray, infos: dict[str, Any]
    ) -> None:
        """Put the infos of rows of the ring together.

        Args:
            chunks: `rows` are int64 (B,), rows of the batch.
            places: int64 (rows of the batch,), where these are in the ring.
            infos: Batched infos; changed in place.
        """
        for chunk in chunks:
            if chunk.message:
                self._learn(chunk.message, chunk.form)
            self._enter(
                chunk, infos, len(places), lambda column, rows: column.ring_rows(places[rows])
            )

    def _enter(
        self,
        chunk: ChunkInfos,
        infos: dict[str, Any],
        num_rows: int,
        read: Callable[[_ReadyColumn, Any], tuple[Any, np.ndarray]],
    ) -> None:
        """Enter one chunk's infos: its form says in which order, its message what is not here."""
        form, message, rows = chunk
        for path in self.forms[form - 1] if form else message:
            if path in message:
                value, mask = message[path]
            elif path in self._ready:
                value, mask = read(self._ready[path], rows)
            else:
                continue  # its message was lost with a worker that died, and was replaced
            enter(infos, path, value, mask, rows, num_rows)


class _ReadyColumn(NamedTuple):
    """A column as the caller has it.

    Attributes:
        kind, template: See `Column`.
        values: (num_envs, ...) per leaf.
        mask: bool (num_envs,).
        ring: (ring rows, ...) per leaf.
    """

    kind: str
    template: Any
    values: list[np.ndarray]
    mask: np.ndarray
    ring: list[np.ndarray]

    def rows(self, rows: slice) -> tuple[Any, np.ndarray]:
        """Return the values and the mask of some envs."""
        mask = self.mask[rows]
        return self._values([leaf[rows] for leaf in self.values], mask), mask

    def ring_rows(self, places: np.ndarray) -> tuple[Any, np.ndarray]:
        """Return the values in some rows of the ring, and a mask that is True."""
        mask = np.ones(len(places), np.bool_)
        return self._values([leaf[places] for leaf in self.ring], mask), mask

    def _values(self, leaves: list[np.ndarray], mask: np.ndarray) -> Any:
        if self.kind == "dict":
            return {}
        if self.kind == "numbers":
            return leaves[0]
        items = np.full(len(mask), None, dtype=object)
        for row in np.flatnonzero(mask).tolist():
            items[row] = rebuild(self.template, iter(leaves), row)
        return items
