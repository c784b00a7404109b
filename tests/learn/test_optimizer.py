"""Adam against torch's, with `clip_grad_norm_` before it."""

import copy

import pytest
import torch
from torch import nn

from vecenv.learn import Adam


def networks():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    return network, copy.deepcopy(network)


def give_gradients(*networks, seed, scale):
    for network in networks:
        generator = torch.Generator().manual_seed(seed)
        for p in network.parameters():
            p.grad = torch.randn(p.shape, generator=generator) * scale


@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1, "eps": 1e-5}, {"amsgrad": True}, {"fused": False}]
)
def test_steps_and_gradients_are_those_of_clipping_and_of_torch(options):
    ours, theirs = networks()
    optimizer = Adam(ours.parameters(), lr=0.01, max_grad_norm=0.5, **options)
    reference = torch.optim.Adam(theirs.parameters(), lr=0.01, **options)
    for seed, scale in enumerate([1.0, 0.01, 10.0, 0.05]):
        give_gradients(ours, theirs, seed=seed, scale=scale)
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        reference.step()
        optimizer.step()
        torch.testing.assert_close(optimizer.grad_norm, norm)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close([a.grad, a], [b.grad, b])
    saved = copy.deepcopy(reference.state_dict())
    optimizer.load_state_dict(saved)  # the same layout, either way
    assert optimizer.state_dict()["state"].keys() == saved["state"].keys()
    give_gradients(ours, theirs, seed=9, scale=0.01)
    reference.step()
    optimizer.step()
    torch.testing.assert_close(ours[0].weight, theirs[0].weight)


def test_a_norm_that_is_not_finite_changes_nothing():
    network, before = networks()
    optimizer = Adam(network.parameters(), max_grad_norm=1.0)
    give_gradients(network, seed=0, scale=1.0)
    network[0].bias.grad[2] = torch.nan
    with pytest.raises(FloatingPointError, match="norm of the gradients is nan"):
        optimizer.step()
    assert all(map(torch.equal, network.parameters(), before.parameters()))
    assert not optimizer.state
    network.zero_grad()
    optimizer.step()  # nothing to apply


def test_max_grad_norm_is_checked():
    with pytest.raises(ValueError, match=r"max_grad_norm is 0\.0, expected a number above 0"):
        Adam(networks()[0].parameters(), max_grad_norm=0.0)
