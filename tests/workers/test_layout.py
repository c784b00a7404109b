"""Arithmetic of the shared memory, and the arena."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import printed

from vecenv.core.batches import chunk_bounds
from vecenv.workers.arena import Arena
from vecenv.workers.layout import ControlLayout
from vecenv.workers.opening import checked_threads, worker_shares


@given(num_envs=st.integers(1, 300), num_chunks=st.integers(1, 40))
def test_chunks_cover_all_envs_evenly(num_envs, num_chunks):
    bounds = chunk_bounds(num_envs, num_chunks)
    sizes = np.diff(bounds)
    assert (bounds[0], bounds[-1], len(sizes)) == (0, num_envs, num_chunks)
    assert sizes.max() - sizes.min() <= 1
    assert sorted(sizes, reverse=True) == sizes.tolist()


@pytest.mark.parametrize("num_workers", [1, 2, 7])
def test_control_words_do_not_overlap(num_workers):
    layout = ControlLayout(num_workers, queue_rows=5, ring_rows=20)
    starts = [5 * 8]
    for worker in range(num_workers):
        starts += [layout.command(worker), layout.completion(worker)]
    assert starts[0] == starts[1]
    assert np.diff(starts[1:]).tolist() == [8] * (2 * num_workers - 1)
    assert layout.queues == starts[-1] + 8
    assert layout.ring == layout.queues + (8 + 5) * num_workers  # a line before each queue
    assert layout.num_words == layout.ring + 4 * 20


@pytest.mark.parametrize("threads", [1, 2, 3, 9])
def test_every_env_has_one_lane_of_its_worker_and_queues_hold_all_of_a_lane(threads):
    bounds = [1, 6, 10]  # the caller has env 0
    layout = ControlLayout.of(bounds, threads, ring_rows=20)
    lanes = layout.env_lanes(bounds)
    assert layout.lanes == min(threads, 5)
    assert lanes[0] == -1
    assert (lanes[1:] // layout.lanes).tolist() == [0] * 5 + [1] * 4
    assert np.bincount(lanes[1:]).max() <= layout.queue_rows
    lines = [line for worker in range(2) for line in layout.lane_queues(worker)]
    assert lines[0] == layout.queues
    assert np.diff([*lines, layout.ring]).tolist() == [8 + layout.queue_rows] * len(lines)


def test_arena_allocates_zeroed_aligned_separate_memory():
    arena = Arena(size_bytes=1 << 20)
    arrays = [arena.allocate((3, k), dtype) for k in (0, 1, 700) for dtype in ("f4", "i1", "f8")]
    for number, array in enumerate(arrays):
        assert not array.any()
        assert array.ctypes.data % 64 == 0
        array[...] = number
    for number, array in enumerate(arrays):
        assert (array == number).all()
        if array.size:
            assert np.shares_memory(arena.view(arena.leaf(array)), array)
    arena.close()
    arena.close()


def test_arena_says_when_it_is_full():
    arena = Arena(size_bytes=1 << 20)
    with pytest.raises(MemoryError, match="ulimit"):
        arena.allocate((1 << 20,), np.float64)
    arena.close()


_LIMITED = """
import resource
from vecenv.workers.arena import Arena

resource.setrlimit(resource.RLIMIT_AS, (1 << 34, 1 << 34))
arenas = [Arena() for _ in range(20)]
print(min(arena.size_bytes for arena in arenas) >= 1 << 26)
"""


@pytest.mark.slow
def test_a_limited_address_space_has_room_for_several_arenas():
    """The first one took half of it, the next half of what was left, and the sixth was refused."""
    assert printed(_LIMITED) == ["True"]


def test_arena_knows_foreign_arrays():
    arena = Arena(size_bytes=1 << 20)
    assert arena.offset(np.zeros(3)) is None
    assert arena.offset(arena.allocate((3,))[1:]) == 4
    arena.close()


def test_shares_of_workers():
    assert worker_shares(5, 9, False, None) == (5, 5)
    assert worker_shares(5, 9, True, None) == (4, 5)
    assert worker_shares(1, 3, True, None) == (1, 1)
    assert worker_shares(64, 8, False, 12) == (8, 1)
    assert worker_shares(64, 8, False, 3) == (3, 1)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="max_concurrency"):
            worker_shares(4, 2, False, wrong)
    for wrong in (0, 2.0, True, "2"):
        with pytest.raises(ValueError, match=f"num_workers is {wrong!r}, expected an integer"):
            worker_shares(4, wrong, False, None)
    shares = worker_shares(4, np.int8(2), False, None)
    assert [type(share) for share in shares] == [int, int]  # int8 would overflow in the layout
    threads = checked_threads(np.int64(4))
    assert type(threads) is int
    assert threads == 4
    for wrong in (0, "many", 1.5, True):
        with pytest.raises(ValueError, match="threads_per_worker"):
            checked_threads(wrong)
