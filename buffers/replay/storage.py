"""The memory of a replay buffer: packed rows on a device, and how transitions get into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numba import types

from buffers.core.array_objects import (
    are_readable,
    is_array_of,
    kind_of,
    length_of,
    memory_of,
    to_kind,
)
from buffers.core.compiling import njit
from buffers.core.errors import BufferMisuseError
from buffers.core.kernels import (
    address_of,
    array_at,
    bytes_at,
    copy_item_at,
    is_same_at,
    items_at,
    prefetch_to_write,
    scatter_fields,
    words_at,
)
from buffers.core.memory import zeroed_bytes
from buffers.core.rows import RowLayout
from buffers.replay import addresses
from buffers.replay import layout as at
from buffers.replay.addresses import Addresses
from buffers.replay.device_ring import DeviceRing
from buffers.replay.folder import RowFolder
from buffers.replay.frames import Frames
from buffers.replay.layout import ReplayOptions, new_state
from buffers.replay.staging import Staging
from buffers.replay.successors import Successors, keep_successor

__all__ = [
    "ReplayStorage",
    "add_arrays",
    "add_listed",
    "mark_cut",
    "place_rows",
]

_BYTES_AHEAD = 6144  # which a row is asked for before it is written
_LINKS_AHEAD = 12  # rows
BOOL, INT64, FLOAT32, FLOAT64 = (to_kind(np.dtype(code)) for code in ("?", "i8", "f4", "f8"))
# The first rows of `ReplayStorage.columns`, and where those of obs begin.
ENV_IDS, REWARDS, TERMINATIONS, TRUNCATIONS, OBS = range(5)
# The columns of that: see there. Lengths of axes follow.
ARRAY, PLACE, BYTES, PENDING, KIND, AXES, _HEADER = range(7)
_SIGNATURE = types.boolean(types.int64[::1], *[types.int64] * 7)  # of `add_arrays`


class ReplayStorage:
    """Rows, the integers that say what is in them, and what is needed to write them.

    Attributes:
        rows: uint8 (num_rows, stride) on the device.
        table: The same as a NumPy array, if the device is the CPU and nothing is staged.
        state: int64, see `layout`.
        successors: Next observations that no row has, or None if all rows have their own.
        frames: Frames of observations, if they are stored once; else None.
        takes_arrays: Whether `add_arrays` may be used besides `write`.
        takes_lists: The same of `add_listed`.
        addresses: Where table, state, `busy` and what `successors` or `frames` keep lie.
        columns: int64 (F, 6 + D), of each array of an add (see `ENV_IDS`; obs, next_obs, actions,
            extras) where compiled code puts its address, the byte of a row that it goes to, or -1,
            the bytes of an item, the byte of an observation in `pending` of `Successors`, or -1,
            its dtype as `to_kind` has it, the axes of an item, and their lengths. None if it can't
            be read so.
        folder: Where the rows are files, else None.
        ring: What tensors on the device are added by, once some were.
    """

    def __init__(
        self,
        options: ReplayOptions,
        device: torch.device,
        *,
        staged: bool,
        open_folder: Callable[[np.ndarray], RowFolder] | None = None,
        rows: torch.Tensor | None = None,
        busy: np.ndarray | None = None,
    ):
        layout, capacity, num_rings = options.layout, options.capacity, options.num_rings
        self.layout, self.device, self.is_staged = layout, device, staged
        num_rows = capacity * num_rings
        self.state = new_state(layout, capacity, num_rings, options.num_envs)
        self.folder = None if open_folder is None else open_folder(self.state)
        if self.folder is not None:
            self.rows = torch.from_numpy(self.folder.table)
        elif rows is not None:  # of somebody else
            self.rows = rows
        elif device.type == "cpu":
            self.rows = zeroed_bytes(num_rows * layout.stride).view(num_rows, -1)
        else:
            self.rows = torch.zeros((num_rows, layout.stride), dtype=torch.uint8, device=device)
        self.table = np.zeros((0, layout.stride), np.uint8) if staged else self.rows.numpy()
        self.columns = _list_columns(layout)
        self.addresses = Addresses()
        named = {
            addresses.TABLE: self.table,
            addresses.STATE: self.state,
            addresses.BUSY: np.zeros(1, np.int64) if busy is None else busy,
        }
        if self.columns is not None:
            named[addresses.COLUMNS] = self.columns
        self.addresses.name(named)
        self.successors = None
        if layout.has_successors:
            self.successors = Successors(layout, self.state, device, self.addresses, staged=staged)
        self.frames = None
        if layout.frames is not None:
            sizes = num_rows, options.num_envs
            self.frames = Frames(layout.frames, *sizes, device, self.addresses, staged=staged)
        self.staging = Staging(layout, self.rows, self.state) if staged else None
        self.ring: DeviceRing | None = None
        is_here = not staged and self.folder is None and layout.frames is None
        self.takes_lists = is_here and self.columns is not None and are_readable()
        self.takes_arrays = self.takes_lists and layout.obs == ["obs"] and not layout.extras
        if self.takes_arrays:
            add_arrays.compile(_SIGNATURE)
        self._places = layout.places()

    def memory(self) -> dict[str, int]:
        """Bytes held by what they are for."""
        rows = self.rows.nbytes if self.folder is None else self.folder.nbytes
        sizes = {"rows": rows, "state": self.state.nbytes}
        if self.successors is not None:
            sizes["successors"] = self.successors.nbytes
        if self.frames is not None:
            sizes["frames"] = self.frames.nbytes
        if self.staging is not None:
            sizes["staging"] = self.staging.nbytes
        if self.ring is not None:
            sizes["staging"] += self.ring.nbytes
        return sizes

    def cut(self, env_ids: np.ndarray) -> None:
        """Let the next rows of env_ids int64 (K,) begin new episodes."""
        mark_cut(self.state, env_ids)
        if self.ring is not None:
            self.ring.cut(env_ids)
        if self.frames is not None:
            self.frames.cut(env_ids)

    def settle(self) -> None:
        """Let the host know all that was added on the device; waits if it does not."""
        if self.ring is not None:
            self.ring.settle()

    def push(self) -> None:
        """Let the device know what the host has changed."""
        if self.ring is not None:
            self.ring.push()

    @property
    def are_counts_known(self) -> bool:
        """Whether the host knows what rows there are: not once an add was captured in a graph."""
        return self.ring is None or not self.ring.is_captured

    def write(
        self,
        arrays: Mapping[str, np.ndarray],
        env_ids: np.ndarray,
        stops: np.ndarray | None = None,
        cuts: np.ndarray | None = None,
    ) -> None:
        """Write checked transitions.

        Args:
            arrays: (K, ...) by path, C-contiguous, of the dtypes of the layout.
            env_ids: int64 (K,), or (0,) for whole steps.
            stops: bool (K,), rows after which another episode begins besides those with a flag.
            cuts: int64 (C,), environments whose episodes are cut before.

        Raises:
            BufferMemoryError: There is no memory for more final observations or frames, or for
                staging a larger add than before; nothing was changed.
            BufferMisuseError: A stack does not go on from the one before it; nothing was changed.
        """
        count = len(arrays["rewards"])
        if self.folder is not None:
            self._write_folder(self.folder, arrays, env_ids, stops, cuts)
            return
        self.settle()
        is_over = arrays["terminations"] | arrays["truncations"]
        is_over = is_over if stops is None else is_over | stops
        if count and self.frames is not None:
            self._check_frames(self.frames, arrays, env_ids, is_over, cuts)
        if count and self.successors is not None:
            self.successors.reserve(count)
        if count and self.staging is not None:
            self.staging.reserve(count)
        if cuts is not None:
            self.cut(cuts)
        if not count:
            return
        rows, befores, envs = np.empty((3, count), np.int64)
        before = self.state.copy() if self.frames is not None else None
        try:
            place_rows(self.state, env_ids, is_over, rows, befores, envs)
            if self.frames is not None:
                ids = self._keep_frames(self.frames, arrays, env_ids, is_over, rows)
                arrays = {**arrays, "frame_ids": ids}
        except BaseException:  # an interrupt: no row may count whose frames were not kept
            if before is not None:
                self.state[:] = before
            raise
        if self.successors is not None:
            codes = self.successors.keep(arrays, rows, befores, envs)
        else:
            codes = (rows + 1).astype(np.int32)
        if "env_ids" in self.layout.fields:
            arrays = {**arrays, "env_ids": envs.astype(np.int32)}
        if self.staging is not None:
            self.staging.write(arrays, rows, befores, codes)
            if self.ring is not None:
                self.ring.push()
                self.ring.added = torch.from_numpy(rows[rows >= 0]).to(self.device)
            return
        # Views of this buffer's rows are copied first: writing one field must not change another.
        arrays = {
            path: array.copy() if np.may_share_memory(array, self.table) else array
            for path, array in arrays.items()
        }
        scatter_fields(self.table, rows, self._places, arrays)
        if "link" in self.layout.fields:
            offset = self.layout.fields["link"].offset
            write_links(self.table, rows, befores, codes, offset)

    @property
    def takes_tensors(self) -> bool:
        """Whether rows of tensors on the device can be written there; see `write_tensors`."""
        return self.staging is not None and self.frames is None

    def write_tensors(self, columns: Mapping[str, torch.Tensor], env_ids: np.ndarray) -> bool:
        """Write transitions that are on the device already, if the host need not know them.

        Rows that follow on others have to be whole steps.

        Args:
            columns: As of `DeviceRing.add`; no more rows than a ring has.
            env_ids: As in `write`.

        Returns:
            Whether that was done; else nothing was changed.

        Raises:
            BufferMemoryError: There is no memory for the places of rows, or for more final
                observations; nothing was changed.
            BufferMisuseError: A graph is being captured, and the add can't be a part of it; nothing
                was changed.
        """
        assert self.staging is not None
        count, is_capturing = len(columns["rewards"]), self.is_capturing()
        if self.ring is None:
            if is_capturing:
                raise BufferMisuseError(
                    "the first add of tensors takes memory for the places of rows; add some before "
                    "an add is captured in a CUDA graph"
                )
            parts = self.layout, self.state, self.rows, self.staging.counts, self.successors
            self.ring = DeviceRing(*parts)
        ring = self.ring
        if not ring.fits(count, env_ids):
            if is_capturing:
                raise BufferMisuseError(
                    f"add of {count} rows in a CUDA graph: expected whole steps of all "
                    f"{self.state[at.NUM_ENVS]} envs, without env_ids"
                )
            return not ring.is_linked and self._place_tensors(columns, env_ids)
        ring.reserve(count, is_capturing=is_capturing)
        if is_capturing:
            ring.is_captured = True
            if self.successors is not None:
                self.successors.is_captured = True
        ring.add(columns)
        if ring.is_captured:
            return True
        # What is behind the counts, such as the newest rows, is read back from the device.
        if self.state[at.NUM_RINGS] == 1:
            take_rows(self.state, count)
        else:
            rows, befores, envs = np.empty((3, count), np.int64)
            place_rows(self.state, env_ids, np.zeros(count, np.bool_), rows, befores, envs)
        return True

    def _place_tensors(self, columns: Mapping[str, torch.Tensor], env_ids: np.ndarray) -> bool:
        """The same of rows whose places the host says, such as those of some envs only."""
        assert self.staging is not None
        count = len(columns["rewards"])
        self.settle()
        self.staging.reserve_places(count)
        rows, befores, envs = np.empty((3, count), np.int64)
        place_rows(self.state, env_ids, np.zeros(count, np.bool_), rows, befores, envs)
        where = self.staging.write_tensors(columns, rows)
        self.push()
        if self.ring is not None:
            self.ring.added = where
        return True

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def envs_of(self, env_ids: np.ndarray, count: int) -> np.ndarray:
        """int64 (K,), the environment of each of `count` rows of an add."""
        return env_ids if len(env_ids) else np.arange(count) % int(self.state[at.NUM_ENVS])

    def _check_frames(
        self,
        frames: Frames,
        arrays: Mapping[str, np.ndarray],
        env_ids: np.ndarray,
        is_over: np.ndarray,
        cuts: np.ndarray | None,
    ) -> None:
        """Refuse stacks that do not fit, and see to room for their frames."""
        count = len(is_over)
        frames.check(arrays, self.envs_of(env_ids, count), is_over, cuts)
        is_single = self.state[at.NUM_RINGS] == 1
        skipped = max(0, count - int(self.state[at.CAPACITY])) if is_single else 0
        starts = int(is_over.sum()) + int((frames.heads[:, 0] < 0).sum())
        frames.reserve(starts + (0 if cuts is None else len(cuts)), count - skipped, skipped)

    def _keep_frames(
        self,
        frames: Frames,
        arrays: Mapping[str, np.ndarray],
        env_ids: np.ndarray,
        is_over: np.ndarray,
        rows: np.ndarray,
    ) -> np.ndarray:
        """int32 (K, F + 1), where the frames of each row are kept."""
        envs, place = self.envs_of(env_ids, len(rows)), self.layout.fields["frame_ids"].offset // 4
        windows = None if self.is_staged else self.table.view(np.int32)
        return frames.keep(arrays, envs, is_over, rows, windows, place)

    def live_windows(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the frames of all rows that are alive are, int32 (L, F + 1); and the rows."""
        field = self.layout.fields["frame_ids"]
        order = self.oldest_first().sort().values
        ids = self.rows[:, field.offset : field.offset + field.nbytes]
        ids = ids.index_select(0, order.to(self.device)).cpu().numpy()
        return ids.view(np.int32).reshape(len(order), *field.shape), order.numpy()

    def recount_frames(self, num_used: int) -> None:
        """Find out which frames are held, after rows were loaded."""
        assert self.frames is not None
        windows, rows = self.live_windows()
        if not self.is_staged:  # of rows that hold nothing any more
            is_dead = np.ones(len(self.rows), np.bool_)
            is_dead[rows] = False
            field = self.layout.fields["frame_ids"]
            self.table[is_dead, field.offset : field.offset + field.nbytes] = 0
        self.frames.recount(num_used, windows, rows)

    def _write_folder(
        self,
        folder: RowFolder,
        arrays: Mapping[str, np.ndarray],
        env_ids: np.ndarray,
        stops: np.ndarray | None,
        cuts: np.ndarray | None,
    ) -> None:
        """As `write`, in pieces that the folder takes as a whole."""
        folder.check_writable()
        count, num_envs = len(arrays["rewards"]), int(self.state[at.NUM_ENVS])
        if num_envs and not len(env_ids):
            env_ids = np.arange(count) % num_envs
        for begin in range(0, count, folder.log_rows):
            piece = slice(begin, begin + folder.log_rows)
            sequence, before = folder.sequence, self.state.copy()
            try:
                if cuts is not None and not begin:
                    mark_cut(self.state, cuts)
                self._log_piece(
                    folder,
                    {path: array[piece] for path, array in arrays.items()},
                    env_ids[piece],
                    None if stops is None else stops[piece],
                )
                folder.commit(before, self.state, len(arrays["rewards"][piece]))
            except BaseException:
                if folder.sequence == sequence:  # nothing of the piece is written
                    self.state[:] = before
                raise
        if cuts is not None and not count:
            mark_cut(self.state, cuts)

    def _log_piece(
        self,
        folder: RowFolder,
        arrays: Mapping[str, np.ndarray],
        env_ids: np.ndarray,
        stops: np.ndarray | None,
    ) -> None:
        count = len(arrays["rewards"])
        rows, befores, envs = np.empty((3, count), np.int64)
        is_over = arrays["terminations"] | arrays["truncations"]
        is_over = is_over if stops is None else is_over | stops
        place_rows(self.state, env_ids, is_over, rows, befores, envs)
        packed, places = folder.log(rows, befores, (rows + 1).astype(np.int32)), np.arange(count)
        if "env_ids" in self.layout.fields:
            arrays = {**arrays, "env_ids": envs.astype(np.int32)}
        scatter_fields(packed, places, self._places, arrays)

    def live_blocks(self) -> list[torch.Tensor]:
        """The rows that hold transitions, as views of the table in its order."""
        state, capacity = self.state, int(self.state[at.CAPACITY])
        totals = state[state[at.TOTALS] :][: state[at.NUM_RINGS]]
        if (totals >= capacity).all():
            return [self.rows]
        counts = np.minimum(totals, capacity)
        starts = np.flatnonzero(counts) * capacity
        blocks = [self.rows[start : start + counts[start // capacity]] for start in starts.tolist()]
        return blocks or [self.rows[:0]]

    def oldest_first(self) -> torch.Tensor:
        """int64, the live rows, ring by ring from the oldest to the newest, on the CPU."""
        state, capacity = self.state, int(self.state[at.CAPACITY])
        found = []
        for ring in range(int(state[at.NUM_RINGS])):
            total = int(state[state[at.TOTALS] + ring])
            count, pointer = min(total, capacity), int(state[state[at.POINTERS] + ring])
            places = (pointer - count + np.arange(count)) % capacity
            found.append(ring * capacity + places)
        return torch.from_numpy(np.concatenate(found))


def _list_columns(layout: RowLayout) -> np.ndarray | None:
    """What `ReplayStorage.columns` holds, or None if compiled code can't read such arrays."""
    fields, obs = layout.fields, [layout.fields[path] for path in layout.obs]
    places = [(leaf, leaf.offset, -1) for leaf in obs]
    if layout.next_obs:
        following = [fields[path] for path in layout.next_obs]
        places += [(leaf, leaf.offset, -1) for leaf in following]
    else:
        places += [(leaf, -1, leaf.offset - layout.obs_at) for leaf in obs]
    others = [fields[name] for name in ("actions", *layout.extras)]
    places += [(field, field.offset, -1) for field in others]
    num_axes = max(len(field.shape) for field, *_ in places)
    columns = np.zeros((OBS + len(places), _HEADER + num_axes), np.int64)
    for row, (kind, size) in enumerate(((INT64, 8), (0, 0), (BOOL, 1), (BOOL, 1))):
        columns[row, [BYTES, KIND]] = size, kind  # rewards are of either kind
    for column, (field, place, pending) in zip(columns[OBS:], places, strict=True):
        kind, axes = to_kind(field.dtype), len(field.shape)
        if not kind:
            return None
        column[:_HEADER] = 0, place, field.nbytes, pending, kind, axes
        column[_HEADER : _HEADER + axes] = field.shape
    return columns


@njit(nogil=True, cache=True)
def ids_fit(state, env_ids, num_rows):
    """Whether env_ids int64 (K,) are one per row and in range, or none and rows make whole steps.

    Without environments (NUM_ENVS 0) any ids will do.
    """
    num_envs = state[at.NUM_ENVS]
    if env_ids.shape[0] == 0:
        return num_envs == 0 or num_rows % num_envs == 0
    if env_ids.shape[0] != num_rows:
        return False
    if num_envs:
        for i in range(num_rows):
            if env_ids[i] < 0 or env_ids[i] >= num_envs:
                return False
    return True


@njit(nogil=True, cache=True)
def skip_rows(state, num_rows):
    """Pass over the rows of an add that would be overwritten by the same add; return their number.

    Only with a single ring; with one per env, rows are written in order and the last stay.
    """
    skipped = num_rows - state[at.CAPACITY]
    if state[at.NUM_RINGS] > 1 or skipped <= 0:
        return 0
    state[state[at.TOTALS]] += skipped
    state[state[at.POINTERS]] = (state[state[at.POINTERS]] + skipped) % state[at.CAPACITY]
    state[at.ADDED] += skipped
    state[at.COUNT] = min(state[state[at.TOTALS]], state[at.CAPACITY])
    return skipped


@njit(nogil=True, cache=True)
def take_row(state, ring):
    """Give the next row of a ring to a new transition; return it, and its number in the ring."""
    capacity, place = state[at.CAPACITY], state[at.POINTERS] + ring
    pointer = state[place]
    state[place] = pointer + 1 if pointer + 1 < capacity else 0
    if state[state[at.TOTALS] + ring] < capacity:
        state[at.COUNT] += 1
        state[at.IS_TALLIED] = 0
    state[state[at.TOTALS] + ring] += 1
    state[at.ADDED] += 1
    return ring * capacity + pointer, state[state[at.TOTALS] + ring] - 1


@njit(nogil=True, cache=True)
def take_rows(state, count):
    """The same for `count` transitions at once, at most the capacity, if there is one ring.

    Returns:
        The first row, and the number of the row before it.
    """
    capacity, place = state[at.CAPACITY], state[at.POINTERS]
    pointer, total = state[place], state[state[at.TOTALS]]
    state[place] = (pointer + count) % capacity
    state[state[at.TOTALS]] = total + count
    state[at.COUNT] = min(total + count, capacity)
    state[at.ADDED] += count
    state[at.IS_TALLIED] = 0
    return pointer, total - 1


class Cursor(NamedTuple):
    """How far an add has come in giving rows to its transitions."""

    num_envs: int
    capacity: int  # of the ring; 0 if there are several
    step: int  # env of the next transition, if rows are whole steps
    row: int  # of the next transition, if there is one ring
    number: int  # of the row last given, in its ring


# These two are inlined for the reason given at `write_packed`.
@njit(nogil=True, cache=True, forceinline=True)
def start_rows(state, num_rows):
    """Pass over rows as `skip_rows` does; return how many, and the `Cursor` at the first other."""
    first, num_envs = skip_rows(state, num_rows), state[at.NUM_ENVS]
    capacity = state[at.CAPACITY] if state[at.NUM_RINGS] == 1 else 0
    row, number = take_rows(state, num_rows - first) if capacity else (0, 0)
    return first, Cursor(num_envs, capacity, first % num_envs if num_envs else 0, row, number)


@njit(nogil=True, cache=True, forceinline=True)
def next_row(state, env_ids, i, cursor):
    """Give a row to transition i of an add; return its env, its ring, the row and the cursor."""
    num_envs, capacity, step, following, number = cursor
    # Limited, as another thread may have changed it since it was checked.
    env = min(max(env_ids[i], 0), max(num_envs - 1, 0)) if env_ids.shape[0] else step
    step = step + 1 if step + 1 < num_envs else 0
    if capacity:
        ring, row, number = 0, following, number + 1
        following = row + 1 if row + 1 < capacity else 0
    else:
        ring = env
        row, number = take_row(state, ring)
    return env, ring, row, Cursor(num_envs, capacity, step, following, number)


@njit(nogil=True, cache=True)
def follow(state, ring, env, row, number, is_over):
    """Note that `row`, just taken, the row `number` of its ring, is the newest of `env`.

    Returns:
        The row before it in the same env, or -1 if that is not alive; and whether the two lie in
        one episode.
    """
    capacity = state[at.CAPACITY]
    before = state[state[at.LAST] + env] - 1
    is_joined = state[state[at.STOPPED] + env] == 0
    state[state[at.LAST] + env] = number + 1
    state[state[at.STOPPED] + env] = is_over
    distance = number - before
    if before < 0 or distance >= capacity:
        return -1, False
    row_before = row - distance
    if row_before < ring * capacity:
        row_before += capacity
    return row_before, is_joined


@njit(nogil=True, cache=True)
def mark_cut(state, env_ids):
    """Let the next rows of env_ids int64 (K,) begin new episodes."""
    for i in range(env_ids.shape[0]):
        state[state[at.STOPPED] + env_ids[i]] = 1


@njit(nogil=True, cache=True)
def all_finite(rewards):
    """Whether float (K,) have no NaN and nothing that is infinite as float32."""
    total = np.float32(0.0)
    for i in range(rewards.shape[0]):
        total += np.float32(rewards[i]) * np.float32(0.0)
    return total == np.float32(0.0)


@njit(nogil=True, cache=True, inline="always")
def find_rows(where):
    """The table, the state and the flag of the guard that the words of `Addresses` name."""
    table, state = bytes_at(where, addresses.TABLE), items_at(where, addresses.STATE, np.int64)
    return table, state, items_at(where, addresses.BUSY, np.int64)


@njit(nogil=True, cache=True, inline="always")
def find_successors(where):
    """What `Successors` has: slots, pending, finals and free, as `write_packed` takes them."""
    pending, finals = bytes_at(where, addresses.PENDING), bytes_at(where, addresses.FINALS)
    slots = items_at(where, addresses.SLOTS, np.int32)
    return slots, pending, finals, items_at(where, addresses.FREE, np.int64)


@njit(nogil=True, cache=True, forceinline=True)
def lies_in(begin, size, array):
    """Whether `size` bytes from an address on share memory with a C-contiguous array."""
    other = address_of(array)
    return begin < other + array.size * array.itemsize and other < begin + size


@njit(nogil=True, cache=True)
def may_be_written(where, columns):
    """Whether the arrays of an add fit, and lie outside the buffer, and nobody else writes.

    Views of the buffer's own rows are for `ReplayStorage.write`, which copies them first.

    Args:
        where: Words of `Addresses`.
        columns: As of `ReplayStorage`, with the addresses of array objects.
    """
    table, state, busy = find_rows(where)
    pending = bytes_at(where, addresses.PENDING)
    env_ids, rewards = columns[ENV_IDS, ARRAY], columns[REWARDS, ARRAY]
    num_rows, num_ids, kind = length_of(rewards), length_of(env_ids), kind_of(rewards)
    is_float32 = kind == FLOAT32
    if busy[0] != 0 or not (is_float32 or kind == FLOAT64):
        return False
    columns[REWARDS, KIND], columns[REWARDS, BYTES] = kind, 4 if is_float32 else 8
    if state[at.NEXT_AT] < 0 and state[at.NUM_FREE] < num_rows:
        return False
    dims = address_of(columns) + 8 * _HEADER
    for f in range(columns.shape[0]):
        array, size, length = columns[f, ARRAY], columns[f, BYTES], num_rows
        if f == ENV_IDS:
            length = num_ids
        if not is_array_of(array, columns[f, KIND], length, columns[f, AXES], dims):
            return False
        begin, size = memory_of(array), length * size
        if lies_in(begin, size, table) or lies_in(begin, size, pending):
            return False
        dims += 8 * columns.shape[1]
    if not ids_fit(state, array_at(memory_of(env_ids), num_ids, np.int64), num_rows):
        return False
    if is_float32:
        return all_finite(array_at(memory_of(rewards), num_rows, np.float32))
    return all_finite(array_at(memory_of(rewards), num_rows, np.float64))


@njit(nogil=True, cache=True)
def plan_ahead(table, state):
    """Bytes from a row to the one written some rows later, and where the last such row may begin.

    The latter is -1 if there is none to ask for.
    """
    stride, ring = table.shape[1], state[at.CAPACITY] if state[at.NUM_RINGS] > 1 else 1
    ahead = _BYTES_AHEAD // stride * stride * ring
    return ahead, (table.size - stride if ahead else -1)


@njit(nogil=True, cache=True, forceinline=True)
def ask_to_write(table, begin, last, stride):
    """Ask for the row at byte `begin`, as writing has to wait for it, unless `last` is before."""
    if begin <= last:
        for offset in range(begin, begin + stride, 64):
            prefetch_to_write(table, offset)


@njit(nogil=True, cache=True, forceinline=True)
def ask_for_next(table, before, link_at):
    """Ask for a link that is written soon if the rows before, too, lie one behind the other."""
    row = before + _LINKS_AHEAD
    if before >= 0 and row < table.shape[0]:
        prefetch_to_write(table, row * table.shape[1] + link_at)


@njit(cache=True)
def add_arrays(
    where, env_ids, obs, next_obs, actions, rewards, terminations, truncations
):  # fmt: skip
    """Check and write transitions with a single array as observation, and without extra columns.

    It keeps the interpreter's lock, so that no other thread adds or draws meanwhile.

    Args:
        where: Words of `Addresses`: what they name is written, unless busy, the flag of the
            buffer's `Guard`, is set.
        env_ids: `id(array)` of a NumPy array, like all that follow: int64 (K,), or (0,) for whole
            steps.
        obs, next_obs: (K, *obs_shape), of the dtype of the table, like actions (K, *action_shape).
        rewards: float32 or float64 (K,); stored as float32.
        terminations, truncations: bool (K,).

    Returns:
        Whether everything fits, all are C-contiguous and, where observations are stored once, free
        slots are as many as rows; otherwise nothing was written.
    """
    # It is handed on: Numba drops what is written into an array found by its address and not used
    # any more.
    columns = words_at(where, addresses.COLUMNS)
    columns[ENV_IDS, ARRAY], columns[REWARDS, ARRAY] = env_ids, rewards
    columns[TERMINATIONS, ARRAY], columns[TRUNCATIONS, ARRAY] = terminations, truncations
    columns[OBS, ARRAY], columns[OBS + 1, ARRAY], columns[OBS + 2, ARRAY] = obs, next_obs, actions
    fits = may_be_written(where, columns)
    if fits:
        write_packed(where, columns)
    return fits


@njit(cache=True)
def add_listed(where, arrays):
    """As `add_arrays`, of any layout: `id` of arrays int64 (F,), in the order of `columns`."""
    columns = words_at(where, addresses.COLUMNS)
    for f in range(columns.shape[0]):
        columns[f, ARRAY] = arrays[f]
    fits = may_be_written(where, columns)
    if fits:
        write_packed(where, columns)
    return fits


@njit(nogil=True, cache=True)
def write_packed(where, columns):
    """Write checked transitions into rows of any layout.

    Arrays are made here, by their addresses: Numba would count references to those of a caller for
    each row, by operations that wait until all that was written before has reached the cache. In
    the loop there are addresses instead of those that are given, for the same reason.

    Args:
        where: Words of `Addresses`.
        columns: As of `ReplayStorage`, with the addresses of array objects, which become those of
            their memory.
    """
    table, state, _ = find_rows(where)
    slots, pending, finals, free = find_successors(where)
    stride = table.shape[1]
    num_rows, num_ids = length_of(columns[REWARDS, ARRAY]), length_of(columns[ENV_IDS, ARRAY])
    for f in range(columns.shape[0]):
        columns[f, ARRAY] = memory_of(columns[f, ARRAY])
    env_ids = array_at(columns[ENV_IDS, ARRAY], num_ids, np.int64)
    rewards, is_float32 = columns[REWARDS, ARRAY], columns[REWARDS, BYTES] == 4
    floats32 = array_at(rewards, num_rows if is_float32 else 0, np.float32)
    floats64 = array_at(rewards, 0 if is_float32 else num_rows, np.float64)
    terminations = array_at(columns[TERMINATIONS, ARRAY], num_rows, np.bool_)
    truncations = array_at(columns[TRUNCATIONS, ARRAY], num_rows, np.bool_)
    sources = columns[OBS:]
    over_at, obs_bytes = state[at.OVER_AT], state[at.OBS_BYTES]
    link_at, env_at, reward_word = state[at.LINK_AT], state[at.ENV_AT], state[at.REWARD_AT] // 4
    is_once, num_leaves = state[at.NEXT_AT] < 0, 0
    while is_once and sources[num_leaves, PENDING] < 0:
        num_leaves += 1
    floats, words = table.view(np.float32), table.view(np.int32)
    begin, newest, kept = address_of(table), address_of(pending), address_of(finals)
    # Most adds are of these three; known apart from the loop over arrays, they take less time.
    is_plain = sources.shape[0] == 3 and not is_once
    obs, next_obs, actions = sources[0, ARRAY], sources[1, ARRAY], sources[2, ARRAY]
    obs_at, obs_size = sources[0, PLACE], sources[0, BYTES]
    action_at, action_size = sources[2, PLACE], sources[2, BYTES]
    next_at = sources[1, PLACE]
    ahead, last = plan_ahead(table, state)
    first, cursor = start_rows(state, num_rows)
    for i in range(first, num_rows):
        env, ring, row, cursor = next_row(state, env_ids, i, cursor)
        ask_to_write(table, row * stride + ahead, last, stride)
        start = begin + row * stride
        if is_plain:
            copy_item_at(start + obs_at, obs + i * obs_size, obs_size)
            copy_item_at(start + next_at, next_obs + i * obs_size, obs_size)
            copy_item_at(start + action_at, actions + i * action_size, action_size)
        for f in range(0 if is_plain else sources.shape[0]):
            if sources[f, PLACE] >= 0:
                size = sources[f, BYTES]
                copy_item_at(start + sources[f, PLACE], sources[f, ARRAY] + i * size, size)
        floats[row, reward_word] = floats32[i] if is_float32 else np.float32(floats64[i])
        table[row, over_at] = terminations[i]
        table[row, over_at + 1] = truncations[i]
        if env_at >= 0:
            words[row, env_at // 4] = env
        if link_at < 0:
            continue
        words[row, link_at // 4] = 0
        is_over = terminations[i] | truncations[i]
        before, is_joined = follow(state, ring, env, row, cursor.number, is_over)
        code = row + 1 if is_joined else 0
        if is_once:
            place, is_same = newest + env * obs_bytes, is_joined
            for f in range(num_leaves):  # what was given, as the row may be on its way to the cache
                given, size = sources[f, ARRAY], sources[f, BYTES]
                kept_at = place + sources[num_leaves + f, PENDING]
                is_same = is_same and is_same_at(kept_at, given + i * size, size)
            code = keep_successor(state, row, before, is_same, place, obs_bytes, slots, kept, free)
            for f in range(num_leaves, 2 * num_leaves):
                size = sources[f, BYTES]
                copy_item_at(place + sources[f, PENDING], sources[f, ARRAY] + i * size, size)
        if before >= 0 and code != 0:
            words[before, link_at // 4] = code
        ask_for_next(table, before, link_at)


@njit(cache=True)
def place_rows(state, env_ids, is_over, rows, befores, envs):
    """Take rows for transitions that are written field by field.

    Args:
        state: int64, see `layout`; written.
        env_ids: int64 (K,) in range, or (0,) for whole steps.
        is_over: bool (K,), the episode ends with this row.
        rows: int64 (K,), written: the row of the table, or -1 for rows overwritten at once.
        befores: int64 (K,), written: the row that gets a link to this one, or -1. If the two are
            not in one episode it is -2 - row instead.
        envs: int64 (K,), written.
    """
    first, cursor = start_rows(state, rows.shape[0])
    rows[:first] = -1
    befores[:first] = -1
    envs[:first] = 0
    for i in range(first, rows.shape[0]):
        env, ring, row, cursor = next_row(state, env_ids, i, cursor)
        rows[i], befores[i], envs[i] = row, -1, env
        if state[at.LINK_AT] >= 0:
            before, is_joined = follow(state, ring, env, row, cursor.number, is_over[i])
            if before >= 0:
                befores[i] = before if is_joined else -2 - before


@njit(nogil=True, cache=True)
def write_links(table, rows, befores, codes, offset):
    """Clear the codes of rows int64 (K,) and give befores[i] the code codes[i], in this order.

    Codes are int32 at byte `offset` of a row. Negative rows and befores are passed over.
    """
    words = table.view(np.int32)
    for i in range(rows.shape[0]):
        if rows[i] >= 0:
            words[rows[i], offset // 4] = 0
        if befores[i] >= 0:
            words[befores[i], offset // 4] = codes[i]
