"""Gradients of every path against `loss.backward()`, parameter by parameter."""

import copy

import pytest
import torch
from learn.test_gradient_paths import assert_equal, make_layers, make_square_batch
from torch import nn

from vecenv.learn import Adam, Gradient

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def squared_error(module, batch):
    loss = (module(batch["x"]) - batch["y"]).square().mean()
    return loss, {"error": loss.sqrt()}


def test_gradients_are_those_of_backward_and_are_overwritten():
    gradient = Gradient(make_layers(), squared_error)
    for _ in range(2):
        assert_equal(gradient, make_square_batch(0))
    assert not gradient(make_square_batch(0))["loss"].requires_grad


def test_the_weights_are_views_of_the_vector_that_the_optimizer_updates():
    module, batch = make_layers(), make_square_batch(0)
    twin = copy.deepcopy(module)
    gradient = Gradient(module, squared_error)
    optimizer = Adam(gradient.parameters(), lr=0.1, eps=1e-5, max_grad_norm=0.5)
    reference = torch.optim.Adam(twin.parameters(), lr=0.1, eps=1e-5)
    for _ in range(3):
        gradient(batch)
        optimizer.step()
        optimizer.zero_grad()
        reference.zero_grad()
        squared_error(twin, batch)[0].backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        reference.step()
    torch.testing.assert_close([*module.parameters()], [*twin.parameters()])
    module.load_state_dict(make_layers().state_dict())
    assert_equal(gradient, batch)


def test_parameters_without_a_gradient_are_named_unless_they_are_frozen():
    module, batch = make_layers(), make_square_batch(0)
    module.spare = nn.Linear(2, 2)

    def loss(module, batch):
        return module[2](module[1](module[0](batch["x"]))).square().mean()

    with pytest.raises(ValueError, match=r"spare\.weight, spare\.bias: the loss gives no gradient"):
        Gradient(module, loss)(batch)
    module.spare.requires_grad_(False)
    Gradient(module, loss)(batch)
    frozen = make_layers()
    frozen[0].requires_grad_(False)
    Gradient(frozen, squared_error)(batch)
    assert frozen[0].weight.grad is None


def test_a_loss_that_detaches_its_weights_is_an_error():
    def detached(module, batch):
        return module(batch["x"]).detach().mean()

    for compile in (False, True):
        with pytest.raises(ValueError, match=r"0\.weight, .*: the loss gives no gradient to these"):
            Gradient(make_layers(), detached, compile=compile)(make_square_batch(0))


def test_a_loss_that_is_not_finite_is_an_error_and_changes_nothing():
    module, batch = make_layers(), make_square_batch(0)
    gradient = Gradient(module, squared_error)
    optimizer = Adam(gradient.parameters(), max_grad_norm=1.0)
    gradient(batch)
    optimizer.step()
    before = copy.deepcopy(module.state_dict())
    batch["x"][3, 2] = torch.nan
    with pytest.raises(FloatingPointError, match=r"in call 2 the loss is nan.*\['x'\]"):
        gradient(batch)
    assert module[0].weight.grad is None
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


class RunningMean(nn.Module):
    """Puts other tensors in the place of its buffers, as `self.mean = ...` does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("latest", None)

    def forward(self, x):
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.num_calls, self.latest = self.num_calls + 1, x.sum(0)
        return self.linear(x - self.mean)


@pytest.mark.parametrize("compile", [False, True])
def test_a_module_may_replace_its_buffers_once_a_call(compile):
    torch.manual_seed(0)
    module, batch = RunningMean(), make_square_batch(0)
    other = copy.deepcopy(module)
    gradient = Gradient(module, squared_error, compile=compile)
    for count in (1, 2):
        scalars = gradient(batch)
        assert scalars["loss"] == squared_error(other, batch)[0]
        assert module.num_calls == count
        for name, expected in other.named_buffers():
            assert torch.equal(module.get_buffer(name), expected)
    assert gradient.path == "autograd"
    assert ("changes the buffer mean" in gradient.reason) == compile


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda module, batch: module(batch["x"]), r"shape \(64, 6\), expected a tensor \(\)"),
        (lambda module, batch: 1.0, "expected a tensor"),
        (lambda module, batch: (module(batch["x"]).mean(), {"a": batch["y"]}), "'a' of the loss"),
    ],
)
def test_a_loss_of_another_shape_is_an_error(loss, message):
    with pytest.raises(ValueError, match=message):
        Gradient(make_layers(), loss)(make_square_batch(0))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda m: m[1].register_parameter("slope", nn.Parameter(torch.ones(()))), r"1\.slope: "),
        (lambda m: setattr(m[0], "bias", nn.Parameter(torch.zeros(8))), r"0\.bias: "),
        (
            lambda m: m.load_state_dict(m.state_dict(), assign=True),
            r"0\.weight, 0\.bias, 2\.weight",
        ),
        (lambda m: m[2].requires_grad_(False), r"2\.weight, 2\.bias: "),
        (lambda m: m.append(nn.Linear(6, 6)), r"3\.weight, 3\.bias: "),
        (lambda m: m.double(), r"0\.weight, 0\.bias, 2\.weight, 2\.bias: .* moved \(by \.to\(\)"),
    ],
)
def test_parameters_that_change_afterwards_are_an_error(change, names):
    module = make_layers()
    gradient = Gradient(module, squared_error)
    gradient(make_square_batch(0))
    change(module)
    with pytest.raises(RuntimeError, match=f"^{names}"):
        for _ in range(16):  # parameters that are added are seen in one of 16 calls
            gradient(make_square_batch(0))
