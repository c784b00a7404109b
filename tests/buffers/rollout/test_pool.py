"""Rows gathered for batches, by one compiled call or by torch, are those of the columns."""

import pytest
import torch

from buffers.rollout import pool as pools
from buffers.rollout.pool import BatchPool


@pytest.mark.parametrize("small_bytes", [0, 2**20])
@pytest.mark.parametrize("sharing", [1, 3])
def test_rows_of_all_columns_are_gathered(sharing, small_bytes, monkeypatch):
    monkeypatch.setattr(pools, "_SMALL_BYTES", small_bytes)
    generator = torch.Generator().manual_seed(0)
    shapes = [(60, 7), (60,), (60, 3, 41), (60, 0), (60 // sharing, 5)]
    kinds = [torch.uint8, torch.int64, torch.float32, torch.float64, torch.bool]
    columns = [
        torch.randint(0, 200, shape, generator=generator).to(kind)
        for shape, kind in zip(shapes, kinds, strict=True)
    ]
    pool = BatchPool(columns, is_host=True, num_shared=1, sharing=sharing)
    pool.reserve(64)
    held = []
    for count in (64, 1, 0, 20):
        rows = torch.randint(0, 60, (count,), generator=generator)
        held.append((rows, pool.gather(rows)))
    for rows, found in held:  # which are kept, so no two are of the same memory
        for column, gathered in zip(columns[:-1], found, strict=False):
            assert torch.equal(gathered, column[rows])
        assert torch.equal(found[-1], columns[-1][rows // sharing])
