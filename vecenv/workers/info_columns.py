"""Infos in shared memory: a number per env and step says which form its info dict has.

The form of an info (see `info_forms`) gets a number when the caller first sees it, and each of its
fields that is built of numbers gets a column: arrays with a row per env. From then on a worker that
is about to report an info of this form writes the numbers into the columns and says the form; what
is not built of numbers travels in a message. An info of unknown form travels as it is.

A column holds values of one type, dtype and shape. So the caller can tell what each env's info
was, and the batched infos are what `vecenv.core.infos.add_info` makes of these, row by row; where
all envs have the same form they are the columns themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from vecenv.core.infos import InfosApart, add_info, copy_value
from vecenv.workers.arena import Arena
from vecenv.workers.info_forms import (
    DICT,
    NUMBERS,
    OBJECT,
    OTHER,
    Column,
    Field,
    FormKey,
    Path,
    compile_form,
    form_of,
    leaf_dtypes,
    rebuild,
    store,
    template_of,
)
from vecenv.workers.layout import Leaf

__all__ = ["ChunkInfos", "ColumnReader", "ColumnWriter", "Noted"]

_MOST_COLUMNS = 64
_MOST_PER_PATH = 4  # arrays whose shape changes all the time shall not fill the memory
_MOST_FORMS = 256
# In place of the number of a form: none, and each env's own; then the first of these numbers.
NO_INFO, MIXED, FIRST_FORM = 0, 1, 2

# What is noted of an env's info: its form; its form and what of it goes by message; or info dicts.
Noted = int | tuple[int, list[Any]] | list[dict[str, Any]]


class ChunkInfos(NamedTuple):
    """What came of the infos of some envs.

    Attributes:
        form: Of all of them; MIXED if each env's is in shared memory.
        message: By row of the chunk, what went by message: the fields that are not built of numbers
            in their order, or, where the form is unknown, the info dicts.
        rows: Which envs these are.
    """

    form: int
    message: dict[int, list[Any]]
    rows: slice


# -- a worker's end --------------------------------------------------------------------------

_SCALAR, _ARRAY = "scalar", "array"  # kinds of NUMBERS


class _Plan:
    """How a worker writes an info dict of one form.

    Attributes:
        number: Of the form.
        keys: Of the info.
        parts: Per field what it is, its type or template, and where it goes.
    """

    __slots__ = ("keys", "number", "parts")

    def __init__(self, number: int, fields: list[Field]) -> None:
        self.number = number
        self.keys = tuple(field.key for field in fields)
        self.parts = [self._part(field) for field in fields]

    def _part(self, field: Field) -> tuple[str, Any, Any]:
        if field.kind == DICT:
            return DICT, None, _Plan(self.number, field.template)
        if field.kind == OBJECT:
            return OBJECT, field.template, field.target
        if field.kind != NUMBERS:  # a dict in place of a value is another form, but for final_obs
            return field.kind, field.key == "final_obs", None
        (rows,) = field.target
        kind, dtype = field.template[:2]
        if kind == "array":
            return _ARRAY, (np.dtype(dtype), field.template[2]), rows
        # Assigning to an item of a memoryview takes half the time of the array's.
        is_python = kind == "python"
        types = {"|b1": bool, "<i8": int, "<f8": float}
        return (
            _SCALAR,
            types[dtype] if is_python else np.dtype(dtype).type,
            memoryview(rows) if is_python else rows,
        )

    def write(  # noqa: C901, PLR0912 - every env's info passes here at every step
        self, info: Any, row: int, others: list[Any]
    ) -> bool:
        """Write an info, and put what goes by message into `others`; return whether it fits."""
        if tuple(info) != self.keys:
            return False
        for value, (kind, about, target) in zip(info.values(), self.parts, strict=True):
            if kind is _SCALAR:
                if value.__class__ is not about:
                    return False
                try:
                    target[row] = value
                except (ValueError, OverflowError):  # an int of more than 64 bits
                    return False
            elif kind is _ARRAY:
                if (
                    value.__class__ is not np.ndarray
                    or value.shape != about[1]
                    or value.dtype != about[0]
                ):
                    return False
                target[row] = value
            elif kind == DICT:
                if not isinstance(value, dict) or not target.write(value, row, others):
                    return False
            elif kind == OBJECT:
                if template_of(value) != about:
                    return False
                store(value, iter(target), row)
            else:
                if isinstance(value, dict) and not about:
                    return False
                if kind == OTHER and value.__class__ is not str and template_of(value) is not None:
                    return False
                others.append(copy_value(value))
        return True


class ColumnWriter:
    """A worker's end.

    Args:
        view: Returns the array of a leaf.
        first, last: Which envs are the chunk's.
        row_forms: Where the form of each env of the pool goes if they differ, int64 (num_envs,).
    """

    def __init__(
        self, view: Callable[[Leaf], np.ndarray], first: int, last: int, row_forms: Leaf
    ) -> None:
        self._view = view
        self._rows = slice(first, last)
        self._row_forms: Any = memoryview(view(row_forms)[self._rows])  # type: ignore[arg-type]  # typeshed before 3.12
        self._columns: dict[tuple[Path, str, Any], list[np.ndarray]] = {}
        self._num_forms = 0
        self._plans: dict[tuple[Any, ...], list[_Plan]] = {}  # by the keys of the info
        count = last - first
        self._latest: list[_Plan | None] = [None] * count  # by env, as is the next
        self._entered: list[Any] = [None] * count

    def add(self, columns: Sequence[Column], forms: Sequence[FormKey], first: int = 0) -> None:
        """Learn of new columns, and of forms from number `first` on; some may be known."""
        for column in columns:
            views = [self._view(leaf)[self._rows] for leaf in column.values]
            self._columns[column.path, column.kind, column.template] = views
        for form in forms[max(self._num_forms - first, 0) :]:
            number = FIRST_FORM + self._num_forms
            self._num_forms += 1
            fields = compile_form(form, lambda *what: self._columns.get(what), count())
            plan = _Plan(number, fields)
            # A list of its own, as threads may be going through the one that is there.
            self._plans[plan.keys] = [*self._plans.get(plan.keys, ()), plan]

    def note(self, noted: dict[int, Noted], info: Any, index: int, num_envs: int) -> None:
        """Take down an env's info, see `EnvGroup`; threads may do so for different envs."""
        if index in noted:
            noted[index] = [copy_value(self._entered[index]), copy_value(info)]
            return
        self._entered[index] = info
        others: list[Any] = []
        plan = self._latest[index]
        if plan is None or not plan.write(info, index, others):
            plan = self._find(info, index, others)
        if plan is None:
            noted[index] = [copy_value(info)]
        else:
            noted[index] = (plan.number, others) if others else plan.number

    def _find(self, info: Any, index: int, others: list[Any]) -> _Plan | None:
        """Write an info by the plan that fits, and return that."""
        if not hasattr(info, "items"):
            add_info({}, info, index, 1, self._rows.start + index)  # says what is wrong
        for plan in self._plans.get(tuple(info), ()):
            others.clear()
            if plan.write(info, index, others):
                self._latest[index] = plan
                return plan
        return None

    def pack(self, noted: dict[int, Noted]) -> tuple[int, dict[int, list[Any]]]:
        """Return the form of the chunk's infos and what goes by message, see `ChunkInfos`."""
        num_envs = len(self._latest)
        first = noted.get(0)
        if isinstance(first, int) and len(noted) == num_envs == list(noted.values()).count(first):
            return first, {}
        message: dict[int, list[Any]] = {}
        forms = self._row_forms
        for index in range(num_envs):
            what = noted.get(index, NO_INFO)
            forms[index], rest = self.split(what)
            if rest:
                message[index] = rest
        return MIXED, message

    @staticmethod
    def split(what: Noted) -> tuple[int, list[Any]]:
        """Return the form of what was noted of an env, and what of it goes by message."""
        if isinstance(what, int):
            return what, []
        return what if isinstance(what, tuple) else (NO_INFO, what)


# -- the caller's end ------------------------------------------------------------------------


class _Column(NamedTuple):
    """A column as the caller has it.

    Attributes:
        rows: (num_envs, ...) per number or array of numbers in a value.
        ring: (ring rows, ...) likewise.
    """

    rows: list[np.ndarray]
    ring: list[np.ndarray]


class _FormsDiffer(Exception):
    """A key is a dict in one env and something else in another."""


# Returns the arrays of a column, with a row per row of the batch; views or copies.
_Read = Callable[[_Column], Sequence[np.ndarray]]


class _InfoRows:
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
        read: _Read,
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
            _FormsDiffer: A key is a dict for some rows only.
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
                    raise _FormsDiffer
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
                infos[key] = _objects_of(first.template, leaves, rows.tolist(), num_rows)
            else:
                (values,) = self._leaves(first.target)
                array = infos[key] = np.zeros((num_rows, *values.shape[1:]), values.dtype)
                array[rows] = values[rows]
            mask = infos[first.mask_key] = np.zeros(num_rows, np.bool_)
            mask[rows] = True

    def _leaves(self, column: _Column) -> Sequence[np.ndarray]:
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


def _objects_of(
    template: Any, leaves: Sequence[np.ndarray], rows: Sequence[int], num_rows: int
) -> np.ndarray:
    """Return an object array with the values of some rows, None in others."""
    items = np.full(num_rows, None, dtype=object)
    for row in rows:
        items[row] = rebuild(template, iter(leaves), row)
    return items


class ColumnReader:
    """The caller's end: makes columns, and puts the batched infos together.

    Attributes:
        columns: All of them.
        forms: All of them, in the order of their numbers.
        has_unsent: Whether there may be some that workers do not know.
        keeps_apart: Whether infos are handed out unbatched, as `InfosApart`.
        row_forms: Where chunks put the form of each env if they differ, int64 (num_envs,).
    """

    def __init__(self, arena: Arena, num_envs: int, ring_rows: int, row_forms: Leaf) -> None:
        self._arena = arena
        self._num_envs = num_envs
        self._ring_rows = ring_rows
        self.row_forms = arena.view(row_forms)
        self.keeps_apart = False
        self.columns: list[Column] = []
        self.forms: list[FormKey] = []
        self._numbers: dict[FormKey, int] = {}
        self._fields: dict[int, list[Field]] = {}  # by number of the form
        self._num_others: dict[int, int] = {}
        self.has_unsent = False
        self._ready: dict[tuple[Path, str, Any], _Column] = {}
        self._per_path: dict[Path, int] = {}

    def ring_arrays(self, column: Column) -> list[np.ndarray]:
        """Return where the values of a column are in the ring, (ring rows, ...) per leaf.

        There are none if it was made in a call that was interrupted then.
        """
        found = self._ready.get((column.path, column.kind, column.template))
        return [] if found is None else found.ring

    def _learn(self, info: Any) -> None:
        """Give the form of an info that came by message a number, and its fields columns."""
        if len(self.forms) >= _MOST_FORMS:
            return
        form = form_of(info)
        if form is None or form in self._numbers:
            return
        # In an order in which it may be interrupted: what is left is done once more.
        number = FIRST_FORM + len(self.forms)
        others = count()
        self.has_unsent = True
        self._fields[number] = compile_form(form, self._column, others)
        self._num_others[number] = next(others)
        self.forms.append(form)
        self._numbers[form] = number

    def _column(self, path: Path, kind: str, template: Any) -> _Column | None:
        """Return the column of a field, made now if there is none; None if there is no room."""
        found = self._ready.get((path, kind, template))
        if found is not None:
            return found
        num_alike = self._per_path.get(path, 0)
        if len(self.columns) >= _MOST_COLUMNS or num_alike >= _MOST_PER_PATH:
            return None
        allocate, leaves = self._arena.allocate, list(leaf_dtypes(template))
        try:
            rows = [allocate((self._num_envs, *shape), dtype) for dtype, shape in leaves]
            ring = [allocate((self._ring_rows, *shape), dtype) for dtype, shape in leaves]
        except MemoryError:  # the mapping is full: whatever is large goes by message
            return None
        places = tuple(map(self._arena.leaf, rows))
        self.columns.append(Column(path, kind, template, places))
        found = self._ready[path, kind, template] = _Column(rows, ring)
        self._per_path[path] = num_alike + 1
        return found

    def collect(self, chunks: Sequence[ChunkInfos], first: int, last: int) -> dict[str, Any]:
        """Return the batched infos of the envs first, ..., last - 1.

        Raises:
            InfoError: They can't be batched; names the env and the key.
        """
        form, num_rows = chunks[0].form, last - first
        covered = 0
        for chunk in chunks:
            covered += chunk.rows.stop - chunk.rows.start
            if chunk.form != form or chunk.message:
                covered = -num_rows
        if covered == num_rows and form >= FIRST_FORM and not self.keeps_apart:
            return self._whole(
                self._fields[form],
                lambda column: [rows[first:last] for rows in column.rows],
                num_rows,
            )
        forms = np.zeros(num_rows, np.int64)
        messages: dict[int, list[Any]] = {}
        for form, message, rows in chunks:
            where = slice(rows.start - first, rows.stop - first)
            forms[where] = self.row_forms[rows] if form == MIXED else form
            for index, rest in message.items():
                messages[where.start + index] = rest
        return self._merge(
            forms,
            messages,
            lambda column: [rows[first:last] for rows in column.rows],
            range(first, last),
        )

    def collect_ring(
        self,
        forms: np.ndarray,
        messages: dict[int, list[Any]],
        places: np.ndarray,
        env_ids: np.ndarray,
    ) -> dict[str, Any]:
        """Return the batched infos of rows of the ring.

        Args:
            forms: int64 (B,).
            messages: By row of the batch, see `ChunkInfos`.
            places: int64 (B,), where the rows are in the ring.
            env_ids: int64 (B,), whose they are.

        Raises:
            InfoError: They can't be batched; names the env and the key.
        """
        return self._merge(
            forms, messages, lambda column: [rows[places] for rows in column.ring], env_ids
        )

    def _whole(self, fields: list[Field], read: _Read, num_rows: int) -> dict[str, Any]:
        """Return the infos of rows that all have one form, with nothing by message."""
        infos: dict[str, Any] = {}
        for key, mask_key, kind, template, column in fields:
            if kind == DICT:
                infos[key] = self._whole(template, read, num_rows)
            elif kind == NUMBERS:
                infos[key] = read(column)[0].copy()
            else:
                infos[key] = _objects_of(template, read(column), range(num_rows), num_rows)
            infos[mask_key] = np.ones(num_rows, np.bool_)
        return infos

    def _merge(
        self,
        forms: np.ndarray,
        messages: dict[int, list[Any]],
        read: _Read,
        env_ids: Sequence[int] | np.ndarray,
    ) -> dict[str, Any]:
        """Return the infos of rows of any forms."""
        rows = _InfoRows(forms, messages, read, env_ids, self._fields)
        rows.drop_lost(self._num_others)
        unknown = [row for row, rest in messages.items() if forms[row] == NO_INFO and rest]
        for row in unknown:
            if len(messages[row]) == 1:
                self._learn(messages[row][0])
        if self.keeps_apart:
            return rows.apart()  # type: ignore[return-value]  # where kept apart, it is what callers take
        if not unknown:
            infos: dict[str, Any] = {}
            try:
                rows.merge(infos, rows.by_form(), ())
                return infos
            except _FormsDiffer:
                pass
        return rows.enter_each()
