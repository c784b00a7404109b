"""Actions in shared memory, in the dtype in which the caller gave them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Dict, Tuple
from gymnasium.vector.utils import batch_space, iterate

from vecenv.core.rows import is_array_space
from vecenv.workers.layout import Leaf

__all__ = ["ActionLeaves", "ActionReader", "ActionWriter", "action_leaves"]

# A dtype is sent as its position here; whatever else is cast to the space's own.
_DTYPES = tuple(
    map(np.dtype, ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"))
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_ELEMENT_BYTES = 8
_TEXT_LENGTH = 200

ActionLeaves = list[tuple[tuple[Any, ...], Leaf]]


def action_leaves(
    space: Space,
    num_envs: int,
    allocate: Callable[[tuple[int, ...], Any], np.ndarray],
    describe: Callable[[np.ndarray], Leaf],
) -> ActionLeaves | None:
    """Reserve a row per env for every leaf of an action space.

    Returns:
        The path to each leaf in a nested action, and its array of uint8 (num_envs, 1 + bytes / 8
        rounded up, 8): the code of the dtype, then the elements. None if some leaf has no fixed
        shape; actions travel by message then.
    """
    found: ActionLeaves = []
    for path, leaf in _paths(space, ()):
        if not is_array_space(leaf) or leaf.dtype not in _CODES:
            return None
        size = max(1, int(np.prod(leaf.shape or (), dtype=np.int64)))
        array = allocate((num_envs, 1 + size, _ELEMENT_BYTES), np.uint8)
        found.append((path, describe(array)))
    return found


def _paths(space: Space, path: tuple[Any, ...]) -> Iterable[tuple[tuple[Any, ...], Space]]:
    if isinstance(space, Dict):
        for key, part in space.spaces.items():
            yield from _paths(part, (*path, key))
    elif isinstance(space, Tuple):
        for index, part in enumerate(space.spaces):
            yield from _paths(part, (*path, index))
    else:
        yield path, space


def _leaf_space(space: Any, path: tuple[Any, ...]) -> Space:
    for key in path:
        space = space.spaces[key]
    return space


class _LeafRows:
    """One leaf's rows: the codes, and a view of the elements for every dtype."""

    def __init__(self, rows: np.ndarray, space: Space) -> None:
        assert space.shape is not None
        self.codes = rows[:, 0, 0]
        self._elements = rows[:, 1:]
        self._shape = space.shape
        self._views: dict[int, np.ndarray] = {}
        self.own_dtype = np.dtype(space.dtype)

    def view(self, code: int) -> np.ndarray:
        """Return the elements (num_envs, *shape) as this dtype; rows are contiguous."""
        view = self._views.get(code)
        if view is None:
            dtype = _DTYPES[code]
            first = self._elements.reshape(len(self._elements), -1)[:, : dtype.itemsize].view(dtype)
            view = self._views[code] = np.lib.stride_tricks.as_strided(
                first,
                (len(self._elements), *self._shape),
                (self._elements.strides[0], *np.empty(self._shape, dtype).strides),
            )
        return view


class ActionWriter:
    """The caller's end: writes checked actions of all envs or of some."""

    def __init__(
        self, space: Space, leaves: ActionLeaves, view: Callable[[Leaf], np.ndarray]
    ) -> None:
        self._leaves = [
            (path, _LeafRows(view(leaf), _leaf_space(space, path))) for path, leaf in leaves
        ]
        # Of a space that is one leaf: dtype of the last batch, and the view it was written to.
        self._latest: tuple[Any, Any] = (None, None)

    def write(self, actions: Any, env_ids: np.ndarray | None = None) -> None:
        """Write one action per env, or one per entry of `env_ids`."""
        if env_ids is None and actions.__class__ is np.ndarray and self._latest[0] is actions.dtype:
            self._latest[1][...] = actions
            return
        self._latest = (None, None)
        chosen = slice(None) if env_ids is None else env_ids
        for path, rows in self._leaves:
            array = actions
            for key in path:
                array = array[key]
            dtype = array.dtype if array.dtype in _CODES else rows.own_dtype
            code = _CODES[dtype]
            rows.codes[chosen] = code
            rows.view(code)[chosen] = array
            if env_ids is None and not path and array.dtype == dtype:
                self._latest = (array.dtype, rows.view(code))

    def text(self, env_id: int) -> str:
        """Return a short text of the latest action of one env."""
        texts = []
        for path, rows in self._leaves:
            action = rows.view(int(rows.codes[env_id]))[env_id].tolist()
            texts.append("".join(f"{key}: " for key in path[-1:]) + str(action))
        joined = ", ".join(texts)
        return joined if len(joined) <= _TEXT_LENGTH else f"{joined[:_TEXT_LENGTH]}..."


class ActionReader:
    """A worker's end: hands out copies of its envs' actions, as `SyncVectorEnv` would."""

    def __init__(
        self,
        space: Space,
        leaves: ActionLeaves,
        view: Callable[[Leaf], np.ndarray],
        first: int,
        last: int,
    ) -> None:
        self._leaves = [
            (path, _LeafRows(view(leaf)[first:last], _leaf_space(space, path)))
            for path, leaf in leaves
        ]
        self._space = batch_space(space, last - first)
        self._count = last - first
        self._is_single = bool(leaves) and not leaves[0][0]
        if self._is_single:
            self._rows = self._leaves[0][1]
            codes: Any = self._rows.codes
            self._code_view: Any = memoryview(codes)

    def all(self) -> Iterable[Any]:
        """Return the actions of all envs of the chunk, for a batch written in one go."""
        if self._is_single:
            view = self._rows.view(self._code_view[0])
            return view if view.ndim == 1 else view.copy()  # its items are copies anyway
        if not self._leaves:  # of a space without parts, which can't be iterated over
            return [self.one(index) for index in range(self._count)]
        parts = [(path, rows.view(int(rows.codes[0])).copy()) for path, rows in self._leaves]
        return iterate(self._space, _nested(self._space, dict(parts)))

    def one(self, index: int) -> Any:
        """Return the action of one env of the chunk."""
        if self._is_single:
            return _owned(self._rows.view(self._code_view[index])[index])
        parts = {
            path: _owned(rows.view(int(rows.codes[index]))[index]) for path, rows in self._leaves
        }
        return _nested(self._space, parts)


def _owned(action: Any) -> Any:
    return action.copy() if isinstance(action, np.ndarray) else action


def _nested(space: Any, parts: dict[tuple[Any, ...], Any], path: tuple[Any, ...] = ()) -> Any:
    if path in parts:
        return parts[path]
    if isinstance(space, Dict):
        return {key: _nested(part, parts, (*path, key)) for key, part in space.spaces.items()}
    return tuple(_nested(part, parts, (*path, k)) for k, part in enumerate(space.spaces))
