"""Moments: running mean and variance against NumPy's of all rows at once."""

import numpy as np
import pytest
import torch

from vecenv.learn import Moments


@pytest.mark.parametrize(("shape", "offset"), [((3,), 0.0), ((), 1e4), ((2, 4), -50.0)])
def test_moments_of_batches_are_those_of_all_rows(shape, offset):
    rng = np.random.default_rng(1)
    sizes = [1, 2, 300, 1, 7, 4096]
    batches = [offset + rng.normal(2, 3, (size, *shape)) for size in sizes]
    moments = Moments(shape)
    for batch in batches:
        moments.update(torch.from_numpy(batch).float())
    rows = np.concatenate(batches).astype(np.float32).astype(np.float64)
    assert int(moments.count) == len(rows)
    np.testing.assert_allclose(moments.mean, rows.mean(0), rtol=2e-7, atol=1e-6)
    np.testing.assert_allclose(moments.variance, rows.var(0), rtol=1e-5)
    x = torch.from_numpy(batches[2]).float()
    expected = (x.double().numpy() - rows.mean(0)) / rows.std(0)
    np.testing.assert_allclose(moments.normalize(x), expected, atol=abs(offset) * 1e-6 + 1e-5)
    scaled = (x.double().numpy() / rows.std(0)).clip(-10, 10)
    np.testing.assert_allclose(moments.scale(x), scaled, rtol=1e-4)


def test_masked_rows_do_not_count_and_may_be_nan():
    x = torch.tensor([[[1.0], [float("nan")]], [[3.0], [9.0]]])
    moments = Moments(1)
    moments.update(x, torch.tensor([[True, False], [True, False]]))
    assert (moments.mean.item(), moments.variance.item(), moments.count.item()) == (2, 1, 2)
    moments.update(x, torch.zeros(2, 2, dtype=torch.bool))
    assert moments.count.item() == 2
    with pytest.raises(ValueError, match="x has NaN or infinity"):
        moments.update(x)
    assert (moments.mean.item(), moments.variance.item(), moments.count.item()) == (2, 1, 2)


def test_what_never_changes_becomes_zero_and_what_is_far_off_is_clipped():
    moments = Moments(2, clip=5.0)
    assert moments(torch.tensor([3.0, -9.0])).tolist() == [3, -5]  # nothing was seen yet
    moments.update(torch.tensor([[7.0, 1.0], [7.0, 3.0]]))
    assert moments(torch.tensor([[7.0, 2.0], [8.0, 1e9]])).tolist() == [[0, 0], [5, 5]]


@pytest.mark.parametrize(
    ("x", "mask", "message"),
    [
        (torch.zeros(4, 2), None, r"x has shape \(4, 2\), expected \(\.\.\., \*\(3,\)\)"),
        (torch.zeros(4, 3), torch.ones(3, dtype=torch.bool), r"expected bool \(4,\)"),
        (torch.zeros(4, 3), torch.ones(4), "mask is torch.float32"),
    ],
)
def test_wrong_shapes_are_refused(x, mask, message):
    with pytest.raises(ValueError, match=message):
        Moments(3).update(x, mask)
