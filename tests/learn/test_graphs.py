"""Graphs without a GPU: what torch would be called with; and learners that wait for nothing."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vecenv.learn import Adam, Gradient, Graph


class Gpu:
    """What a graph asks torch for, and the order of it."""

    def __init__(self, monkeypatch, failure=None):
        self.seen, self.failure = [], failure
        stream = SimpleNamespace(wait_stream=lambda other: self.seen.append("wait"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda s: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "device", lambda d: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "graph", self.capture)

    def register_generator_state(self, generator):
        self.seen.append(generator)

    @contextlib.contextmanager
    def capture(self, graph):
        assert graph is self
        self.seen.append("begin")
        yield
        self.seen.append("end")
        if self.failure is not None:
            raise self.failure

    def replay(self):
        self.seen.append("replay")


def test_the_third_call_captures_and_others_replay(monkeypatch):
    gpu, generator = Gpu(monkeypatch), torch.Generator()
    results = iter(range(9))
    graph = Graph(lambda: next(results), "cuda:1", generators=[None, generator])
    assert [graph(), graph()] == [0, 1]
    assert gpu.seen == ["wait", "wait"] * 2
    assert not graph.is_captured
    gpu.seen.clear()
    assert [graph(), graph(), graph()] == [2, 2, 2]
    assert gpu.seen == [generator, "begin", "end", "replay", "replay", "replay"]
    assert graph.is_captured


def test_what_cannot_be_captured_is_told_once_and_called(monkeypatch):
    Gpu(monkeypatch, RuntimeError("operation not permitted when stream is capturing\nmore"))
    results, told = iter(range(9)), []

    def draw():
        return next(results)

    graph = Graph(draw, "cuda", log=told.append)
    assert [graph() for _ in range(5)] == [0, 1, 3, 4, 5]
    assert told == [
        "graph: draw can't be captured, so its calls go through Python as before: RuntimeError: "
        "operation not permitted when stream is capturing"
    ]
    assert not graph.is_captured


def test_on_the_processor_the_function_is_called():
    results = iter(range(9))
    graph = Graph(lambda: next(results), torch.device("cpu"))
    assert [graph() for _ in range(4)] == [0, 1, 2, 3]


def learner(**options):
    torch.manual_seed(0)
    module = nn.Linear(3, 1)
    gradient = Gradient(module, lambda m, x: m(x).square().mean(), **options)
    return module, gradient


def test_deferred_learners_do_what_others_do(monkeypatch):
    weights = []
    batches = [torch.randn(8, 3, generator=torch.Generator().manual_seed(k)) for k in range(6)]
    for deferred in (False, True):
        module, gradient = learner(deferred=deferred)
        optimizer = Adam(gradient.parameters(), 0.1, max_grad_norm=0.5, deferred=deferred)
        for number, batch in enumerate(batches):
            optimizer.set_lr(0.1 / (1 + number))
            with monkeypatch.context() as patch:
                if deferred and number:
                    for name in ("__float__", "__bool__", "item", "tolist", "numpy"):
                        patch.setattr(torch.Tensor, name, None)
                gradient(batch)
                optimizer.step()
            if number == 2:  # saved and loaded
                state = optimizer.state_dict()
                assert state["param_groups"][0]["lr"] == pytest.approx(0.1 / 3)
                optimizer.load_state_dict(state)
        gradient.check()
        weights.append(module.weight.detach().clone())
        assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor) == deferred
    torch.testing.assert_close(*weights)


def test_a_deferred_gradient_that_is_not_finite_is_zero_and_told_by_check():
    module, gradient = learner(deferred=True)
    optimizer = Adam(gradient.parameters(), 0.1, max_grad_norm=0.5, deferred=True)
    before = module.weight.detach().clone()
    gradient(torch.full((2, 3), torch.nan))
    optimizer.step()
    assert module.weight.equal(before)
    gradient(torch.ones(2, 3))
    optimizer.step()
    assert not module.weight.equal(before)
    with pytest.raises(FloatingPointError, match="of 1 calls were not finite"):
        gradient.check()
    gradient.check()
