"""Gradients of every path against autograd's, parameter by parameter, and why a path is taken."""

import copy
import dataclasses
import gc
import json
import os
import subprocess
import sys
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from buffers import RolloutBatch
from vecenv.learn import Adam, Gradient

ROWS, CLIP = 64, 0.2
pytestmark = pytest.mark.usefixtures("one_torch_thread")


class Agent(nn.Module):
    """Actor and critic over features (B, 6), with a mask of actions."""

    def __init__(self, features=None, width=6):
        super().__init__()
        self.features = features or nn.Identity()
        self.actor = nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, 4))
        self.critic = nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, 1))
        self.entropy_weight = 0.01

    def policy(self, obs, mask=None):
        logits = self.actor(self.features(obs))
        if mask is not None:
            logits = torch.where(mask, logits, -1e8)
        return torch.distributions.Categorical(logits=logits)

    def value(self, obs):
        return self.critic(self.features(obs)).squeeze(-1)


class Recurrent(nn.Module):
    """What a cell makes of sequences (B, L, 3) of features."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 6)

    def forward(self, obs):
        state = obs.new_zeros(len(obs), 6)
        for step in obs.unbind(1):
            state = self.cell(step, state)
        return state


class WholeGru(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 6, batch_first=True)

    def forward(self, obs):
        return self.gru(obs)[0][:, -1]


def weighted_mean(values, weights):
    return values.mean() if weights is None else (values * weights).sum() / weights.sum()


def ppo_loss(agent, batch):
    mask = batch.extras.get("mask")
    policy = agent.policy(batch.obs, mask)
    ratio = (policy.log_prob(batch.actions) - batch.log_probs).exp()
    gain = torch.min(ratio * batch.advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * batch.advantages)
    error = (agent.value(batch.obs) - batch.returns).square()
    scalars = {
        "policy_loss": -weighted_mean(gain, batch.weights),
        "value_loss": weighted_mean(error, batch.weights) / 2,
        "entropy": weighted_mean(policy.entropy(), batch.weights),
    }
    loss = scalars["policy_loss"] + scalars["value_loss"]
    return loss - agent.entropy_weight * scalars["entropy"], scalars


def make_agent(kind="mlp"):
    torch.manual_seed(3)
    if kind == "cnn":
        return Agent(nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten()), 36)
    return Agent({"gru": Recurrent, "nn.GRU": WholeGru}.get(kind, nn.Identity)())


def make_batch(kind="mlp", rows=ROWS, seed=0, weights=None):
    extras = {}
    generator = torch.Generator().manual_seed(seed)
    shape = {"cnn": (2, 5, 5), "gru": (7, 3), "nn.GRU": (7, 3)}.get(kind, (6,))

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    if kind == "masks":
        extras["mask"] = torch.rand(rows, 4, generator=generator) < 0.5
        extras["mask"][:, 1] = True
    actions = torch.randint(0, 4, (rows,), generator=generator)
    if kind == "masks":
        actions[:] = 1
    columns = [normal(rows) for _ in range(4)]
    columns[0] = columns[0] * 0.1 - 1.4
    return RolloutBatch(normal(rows, *shape), actions, *columns, weights=weights, extras=extras)


def autograd(module, loss, batch):
    module = copy.deepcopy(module)
    result = loss(module, batch)
    loss, scalars = result if isinstance(result, tuple) else (result, {})
    loss.backward()
    found = {"loss": loss, **scalars}.items()
    grads = {name: p.grad for name, p in module.named_parameters()}
    return grads, {name: value.detach() for name, value in found}


def assert_equal(gradient, batch, tolerance=1e-4):
    """Each parameter's gradient, by its norm, and each scalar, are autograd's in float32."""
    expected, scalars = autograd(gradient.module, gradient.loss, batch)
    found = gradient(batch)
    whole = torch.cat([grad.flatten() for grad in expected.values()]).norm()
    for name, parameter in gradient.module.named_parameters():
        error = (parameter.grad - expected[name]).norm()
        assert expected[name].any() and parameter.grad.any(), name
        assert error <= tolerance * (expected[name].norm() + 0.1 * whole), name
    assert list(found) == list(scalars)
    for name, value in scalars.items():
        assert float(found[name]) == pytest.approx(float(value), rel=tolerance, abs=tolerance), name


@pytest.mark.slow
def test_compiled_weighted_rows_in_two_threads_have_the_gradient_of_autograd():
    """The first graph of all: everything that a compiled gradient can come to at once."""
    agent, said = make_agent(), []
    weights = torch.rand(ROWS, generator=torch.Generator().manual_seed(1)) + 0.5

    def loss(agent, batch):
        error = (agent.value(batch.obs) - batch.returns).square()
        chosen = agent.policy(batch.obs).log_prob(batch.actions)
        policy_loss = -weighted_mean(batch.advantages * chosen, batch.weights)
        return policy_loss + weighted_mean(error, batch.weights), {"policy_loss": policy_loss}

    gradient = Gradient(agent, loss, compile="on", threads=2, log=said.append)
    before = torch.get_float32_matmul_precision(), torch.get_num_threads()
    batch = make_batch(weights=weights)
    assert_equal(gradient, batch)
    plan = gradient.plan
    assert plan is not None
    assert [plan[key] for key in ("path", "threads", "parts", "combine")] == [
        "compiled", 2, 2, "weights",
    ], plan  # fmt: skip
    assert json.loads(json.dumps(plan)) == plan
    assert len(said) == 2 and "compiled, float32, 2 parts of the rows by 2 threads" in said[1]

    half = weights.clone()
    half[ROWS // 2 :] = 0  # padding, of which a part may consist
    padded = make_batch(seed=1, weights=half)
    padded.obs[ROWS // 2 :] = 0
    assert_equal(gradient, padded)

    optimizer = Adam(gradient.parameters(), lr=0.05)  # the graph sees new weights
    optimizer.step()
    assert_equal(gradient, batch)

    assert_equal(gradient, make_batch(rows=ROWS - 2, weights=weights[2:]))  # by autograd, as is
    assert_equal(gradient, make_batch(rows=ROWS - 4, weights=weights[4:]))
    assert len(said) == 3 and "another size" in said[2]

    batch.returns[5] = torch.inf
    with pytest.raises(FloatingPointError, match=r"in call 6.*batch\.returns at \(5,\)"):
        gradient(batch)
    assert agent.actor[0].weight.grad is None
    batch.returns[5] = 0.0
    assert_equal(gradient, batch)
    assert (torch.get_float32_matmul_precision(), torch.get_num_threads()) == before


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["mlp", "cnn", "gru", "masks"])
def test_compiled_gradients_are_those_of_autograd(kind, threads, dtype):
    rows = 1024 if kind == "mlp" else ROWS
    gradient = Gradient(
        make_agent(kind), ppo_loss, compile="on", threads=threads, dtype=dtype, log=None
    )
    for seed in range(2):
        tolerance = 1e-4 if dtype == torch.float32 else 0.2
        assert_equal(gradient, make_batch(kind, rows=rows, seed=seed), tolerance)
    assert gradient.plan is not None
    assert gradient.plan["path"] == "compiled", gradient.plan
    assert gradient.plan["parts"] == threads, gradient.plan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mlp", "cnn", "gru", "masks", "nn.GRU"])
def test_autograd_paths_have_the_gradient_of_backward(kind, dtype):
    gradient = Gradient(make_agent(kind), ppo_loss, compile="off", dtype=dtype)
    rows = 1024 if kind == "mlp" else ROWS  # of which products may have another precision
    assert_equal(gradient, make_batch(kind, rows=rows), 1e-4 if dtype == torch.float32 else 0.2)
    assert gradient.plan is not None and gradient.plan["reason"] == "compile is off"


class Named(NamedTuple):
    obs: torch.Tensor
    rest: Any


@dataclasses.dataclass
class Record:
    obs: torch.Tensor
    target: torch.Tensor
    unread: Any = None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (
            lambda x, y: Named(x, {"y": [y]}),
            lambda agent, batch: (agent.value(batch.obs) - batch.rest["y"][0]).square().mean(),
        ),
        (
            lambda x, y: (Record(x, y, object()), 0.5),
            lambda agent, batch: (
                (agent.value(batch[0].obs) - batch[0].target).abs().mean() * batch[1]
            ),
        ),
    ],
)
def test_batches_of_any_nesting_are_compiled_with_their_attributes(make, loss):
    agent = make_agent()
    del agent.actor
    gradient = Gradient(agent, loss, compile="on", threads=1)
    for seed in range(2):
        rollout = make_batch(seed=seed)
        assert_equal(gradient, make(rollout.obs, rollout.returns))
    assert gradient.plan is not None and gradient.plan["path"] == "compiled", gradient.plan


@pytest.mark.slow
def test_a_tensor_that_was_in_two_places_of_a_batch_may_be_two_later():
    agent = make_agent()
    del agent.actor
    first, second = make_batch(seed=0), make_batch(seed=1)

    def loss(agent: Any, batch: Any) -> Any:
        return (
            (agent.value(batch["a"]) * 2 + agent.value(batch["b"]) - batch["target"]).abs().mean()
        )

    gradient = Gradient(agent, loss, compile="on", threads=1)
    for a, b in ((first, first), (first, second), (second, second)):
        assert_equal(gradient, {"a": a.obs, "b": b.obs, "target": first.returns})
    assert gradient.plan is not None and gradient.plan["path"] == "compiled", gradient.plan


def square_loss(module: Any, batch: Any) -> Any:
    return (module(batch["x"]) - batch["y"]).square().mean()


def make_square_batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(ROWS, 6, generator=generator) for name in ("x", "y")}


@pytest.mark.slow
def test_all_shares_count_where_torch_runs_the_function_as_it_is():
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    gradient = Gradient(module, square_loss, compile="on", threads=2)
    assert_equal(gradient, make_square_batch(0))
    assert gradient.plan is not None and gradient.plan["parts"] == 2, gradient.plan
    torch.compiler.set_stance("force_eager")
    try:
        assert_equal(gradient, make_square_batch(1))
    finally:
        torch.compiler.set_stance("default")
    assert_equal(gradient, make_square_batch(2))


@pytest.mark.slow
def test_a_compiled_gradient_sees_that_its_module_has_changed():
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    gradient = Gradient(module, square_loss, compile="on", threads=1)
    assert_equal(gradient, make_square_batch(0))
    assert gradient.plan is not None and gradient.plan["path"] == "compiled", gradient.plan
    module[1] = nn.ReLU()
    assert_equal(gradient, make_square_batch(1))
    module[1].register_forward_hook(lambda _module, _args, result: 2 * result)
    assert_equal(gradient, make_square_batch(2))


@pytest.mark.slow
def test_a_compiled_gradient_sees_that_numbers_of_its_modules_have_changed():
    slope = nn.LeakyReLU(0.1)
    module = nn.Sequential(nn.Linear(6, 8), slope, nn.LayerNorm(8), nn.Linear(8, 6))
    gradient = Gradient(module, square_loss, compile="on", threads=1)
    for seed, slope.negative_slope in enumerate((0.1, 0.1, 0.5, 0.5, 0.1)):
        assert_equal(gradient, make_square_batch(seed))
    assert gradient.plan is not None and gradient.plan["path"] == "compiled", gradient.plan


@pytest.mark.slow
def test_a_compiled_gradient_is_freed_with_its_module():
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    gradient = Gradient(module, square_loss, compile="on", threads=1)
    for seed in range(3):
        assert_equal(gradient, make_square_batch(seed))
    found = weakref.ref(module)
    del gradient, module
    gc.collect()
    assert found() is None


@pytest.mark.slow
def test_a_batch_may_share_tensors_with_the_loss_and_require_gradients():
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    batch = make_square_batch(0)
    batch["y"].requires_grad_()
    kept = batch["x"]
    gradient = Gradient(
        module, lambda m, b: (m(b["x"]) - b["y"] * kept).square().mean(), compile="on", threads=1
    )
    assert_equal(gradient, batch)
    assert_equal(gradient, make_square_batch(1) | {"y": batch["y"]})
    assert gradient.plan is not None and gradient.plan["path"] == "compiled", gradient.plan


@pytest.mark.slow
def test_a_loss_that_fails_on_half_of_the_rows_is_not_split():
    module, target = nn.Linear(6, 6), torch.ones(ROWS, 6)
    gradient = Gradient(
        module, lambda m, b: (m(b["x"]) - target).square().mean(), compile="on", threads=2
    )
    assert_equal(gradient, make_square_batch(0))
    assert gradient.plan is not None and gradient.plan["parts"] == 1
    assert "the loss fails on a part" in gradient.plan["reason"]


@pytest.mark.slow
def test_what_a_loss_reads_beside_the_batch_may_change(monkeypatch):
    """Numbers, buffers, and whether the module trains; graphs of two objects keep apart."""
    agents, gradients = [make_agent(), make_agent()], []
    for agent in agents:
        agent.features = nn.Dropout(1e-9)
        gradients.append(Gradient(agent, ppo_loss, compile="on", threads=1))
        assert_equal(gradients[-1], make_batch())
        assert gradients[-1].plan["path"] == "compiled", gradients[-1].plan
    agents[0].entropy_weight = 0.5
    for gradient in gradients:
        assert_equal(gradient, make_batch(seed=1))
    agents[0].eval()
    assert_equal(gradients[0], make_batch(seed=2))
    for value in range(6):
        agents[1].entropy_weight = float(value)
        assert_equal(gradients[1], make_batch(seed=value))
    monkeypatch.setattr(sys.modules[__name__], "CLIP", 0.05)
    assert_equal(gradients[0], make_batch(seed=3))


@pytest.mark.slow
def test_hooks_added_after_compiling_are_called():
    """Those of a layer before its `forward`, and on a parameter's gradient."""
    agent = make_agent()
    gradient = Gradient(agent, ppo_loss, compile="on", threads=1)
    assert_equal(gradient, make_batch())
    assert gradient.plan is not None and gradient.plan["path"] == "compiled", gradient.plan
    doubling = agent.critic[0].register_forward_pre_hook(lambda _, given: (2 * given[0],))
    assert_equal(gradient, make_batch(seed=1))
    doubling.remove()
    weight, batch = agent.actor[0].weight, make_batch(seed=2)
    gradient(batch)
    expected = 2 * weight.grad
    weight.register_hook(lambda grad: 2 * grad)
    gradient(batch)
    torch.testing.assert_close(weight.grad, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_plan_is_followed_and_results_are_the_same_bit_for_bit():
    batches = [make_batch(seed=seed, rows=1024) for seed in range(3)]

    def train(agent, gradient, batches):
        optimizer = Adam(gradient.parameters(), lr=0.01, max_grad_norm=0.5)
        for batch in batches:
            gradient(batch)
            optimizer.step()

    agent = make_agent()
    first = Gradient(agent, ppo_loss, compile="on")
    train(agent, first, batches)
    assert first.plan is not None and first.plan["path"] == "compiled"
    again = make_agent()
    second = Gradient(again, ppo_loss, plan=json.loads(json.dumps(first.plan)), num_calls=1)
    second(make_batch(rows=ROWS))  # of another size, and not what the plan is for
    assert second.plan is None
    train(again, second, batches)
    assert second.plan is not None and second.plan["path"] == "compiled"
    for ours, theirs in zip(agent.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def normalized_loss(agent, batch):
    advantages = (batch.advantages - batch.advantages.mean()) / batch.advantages.std()
    chosen = agent.policy(batch.obs).log_prob(batch.actions)
    return ((agent.value(batch.obs) - batch.returns).square() - advantages * chosen).mean()


class Normalized(nn.BatchNorm1d):
    pass


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x


def reason_of(agent, loss, batch, **options):
    gradient = Gradient(agent, loss, **{"compile": "on", **options})
    assert_equal(gradient, batch)
    assert gradient.plan is not None and gradient.plan["path"] == "autograd"
    return gradient.plan["reason"]


def test_what_does_not_compile_goes_through_autograd_and_the_reason_is_said():
    from torch._inductor import config as inductor_config  # takes a second, as below

    batch = make_batch()
    assert "nn.GRU" in reason_of(make_agent("nn.GRU"), ppo_loss, make_batch("nn.GRU"))
    for effect, name in [(Counting(), "count"), (nn.BatchNorm1d(6), "running_mean")]:
        agent = Agent(effect)
        assert f"changes the buffers features.{name}" in reason_of(agent, ppo_loss, batch)
    counts = Agent(Counting())
    Gradient(counts, ppo_loss)(batch)
    assert counts.features.count == 2  # of policy and value: trying has left no trace
    reason = reason_of(make_agent(), ppo_loss, batch, compile="auto", num_calls=10)
    assert reason.startswith("10 calls of")
    agent = make_agent()
    own, anchors = list(agent.parameters()), [p.detach().clone() for p in agent.parameters()]

    def anchored(agent, batch):  # nothing in the first call, by which a gradient is compared
        pairs = zip(own, anchors, strict=True)
        return ppo_loss(agent, batch)[0] + sum((a - b).square().sum() for a, b in pairs)

    reason = reason_of(agent, anchored, batch)
    assert reason.startswith("the loss reads ") and reason.endswith("module that it is given")
    arrays = {"x": batch.obs.numpy()}

    def of_arrays(agent, batch):
        found = agent.value(torch.from_numpy(batch["x"])).mean()
        return found + agent.policy(torch.from_numpy(batch["x"])).logits.square().mean()

    assert "batch['x'] is a ndarray" in reason_of(make_agent(), of_arrays, arrays)
    with inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert "no C++ compiler" in reason_of(make_agent(), ppo_loss, batch)


def test_a_loss_that_is_not_a_mean_over_rows_is_not_split(monkeypatch):
    from vecenv.learn import choosing

    tested = []
    monkeypatch.setattr(
        choosing._Choice, "_compile",
        lambda self, plan, combine, why, *_: (tested.append((combine, why)), (plan, None))[1],
    )  # fmt: skip

    def summed(agent, batch):
        return ppo_loss(agent, batch)[0] * len(batch)

    def rms(agent, batch):
        loss = ppo_loss(agent, batch)[0]
        return loss, {"rms": (agent.value(batch.obs) - batch.returns).square().mean().sqrt()}

    def importance(agent, batch):  # a mean over rows, not a weighted one
        chosen = agent.policy(batch.obs).log_prob(batch.actions)
        return (
            ((agent.value(batch.obs) - batch.returns).square() - chosen).mul(batch.weights).mean()
        )

    weights = torch.ones(ROWS)
    for loss in (ppo_loss, importance, normalized_loss, summed, rms):
        gradient = Gradient(make_agent(), loss, compile="on", threads=2)
        gradient(make_batch(weights=weights) if loss is importance else make_batch())
    assert [combine for combine, _ in tested] == ["rows", "rows", None, None, None]
    assert "loss of all rows is not the mean" in tested[2][1]
    assert "not split: loss" in tested[3][1] and "not split: rms" in tested[4][1]


@pytest.mark.slow
def test_a_mean_that_only_parts_of_the_first_batch_share_is_left_to_autograd_later():
    said = []

    def masked(agent, batch):
        errors = (agent.value(batch["x"]) - 1).square() * batch["mask"]
        return errors.sum() / batch["mask"].sum() + 0 * agent.policy(batch["x"]).logits.sum()

    agent, mask = make_agent(), torch.ones(ROWS)
    gradient = Gradient(agent, masked, compile="on", threads=2, log=said.append)
    gradient({"x": make_batch().obs, "mask": mask})
    assert gradient.plan["parts"] == 2
    mask = mask.clone()
    mask[: ROWS // 2 - 1] = 0
    batch = {"x": make_batch().obs, "mask": mask}
    scalars = gradient(batch)
    found = [p.grad.clone() for p in agent.parameters()]
    loss = masked(agent, batch)
    expected = torch.autograd.grad(loss, [*agent.parameters()])
    torch.testing.assert_close(scalars["loss"], loss.detach())
    torch.testing.assert_close(found, [*expected])
    assert gradient.plan["path"] == "autograd" and "not a mean over rows" in said[-1]


def test_the_compiled_tanh_is_that_of_torch_to_float32():
    x = torch.cat([torch.linspace(-12, 12, 100_001), torch.tensor([torch.inf, -torch.inf])])
    assert (tanh_by_polynomials(x).double() - x.double().tanh()).abs().max() < 4e-7
    assert tanh_by_polynomials(torch.tensor([torch.nan])).isnan().all()


def test_layers_are_compiled_as_products_and_sums():
    from torch._inductor import decomposition  # takes a second, in each process of a test run

    x, weight, bias = torch.randn(2, 5, 3), torch.randn(2, 3, 4), torch.randn(2, 1, 4)
    torch.testing.assert_close(
        product_and_sum(bias, x, weight), torch.baddbmm(bias, x, weight), rtol=1e-5, atol=1e-6
    )
    layer = bias[0, 0], x[0], weight[0]
    torch.testing.assert_close(product_and_sum(*layer), torch.addmm(*layer), rtol=1e-5, atol=1e-6)
    assert product_and_sum(*layer, beta=2) is NotImplemented
    assert product_and_sum(bias[0, 0, :1], x[0], weight[0, :, :1]) is NotImplemented
    table = decomposition.decompositions
    before = dict(table)
    with quick_parts(torch.device("cpu")):
        assert table[torch.ops.aten.addmm.default] is product_and_sum
    assert table == before
    with quick_parts(torch.device("cuda")):
        assert table == before


def test_arguments_are_checked():
    agent = make_agent()
    for wrong, message in [
        ({"compile": True}, "compile is True"),
        ({"dtype": torch.float16}, "dtype is torch.float16"),
        ({"dtype": "auto"}, "dtype is auto, expected torch.float32 or torch.bfloat16"),
        ({"threads": 0}, "threads is 0"),
        ({"plan": {"path": "compiled"}}, "expected what Gradient.plan was"),
    ]:
        with pytest.raises(ValueError, match=message):
            Gradient(agent, ppo_loss, **wrong)
    with pytest.raises(ValueError, match="no parameter with requires_grad"):
        Gradient(nn.Tanh(), ppo_loss)
    with pytest.raises(ValueError, match=r"are torch\.float64, expected torch\.float32"):
        Gradient(make_agent().double(), ppo_loss)


@pytest.mark.parametrize(
    ("width", "seconds", "expected"),
    [(250, [2.0, 1.0], "medium"), (250, [2.0, 1.9], None), (100, [], None)],
)
def test_few_rows_of_wide_layers_take_the_quicker_products(width, seconds, expected, monkeypatch):
    class Kept:  # so that no processor rounds
        def __init__(self, *wanted):
            asked.append(wanted[0])

        __enter__ = __exit__ = lambda self, *_: None

    asked, seconds = [], 5 * seconds  # in turns
    monkeypatch.setattr(choosing, "Settings", Kept)
    monkeypatch.setattr(choosing._Choice, "time_autograd", lambda self, num_calls: seconds.pop(0))
    gradient = Gradient(nn.Linear(width, width), lambda m, x: m(x).square().mean(), compile="off")
    gradient(torch.rand(300, width))
    assert gradient.plan["precision"] == expected
    assert not seconds
    assert asked == (["medium", *[None, "medium"] * 5] if width == 250 else [])


@pytest.mark.gpu
def test_gradients_on_a_cuda_device_are_those_of_autograd():
    agent = make_agent().cuda()
    gradient = Gradient(agent, ppo_loss, compile="on")
    for seed in range(3):
        batch = make_batch(seed=seed)
        columns = {name: column.cuda() for name, column in batch._asdict().items()}
        assert_equal(gradient, batch._replace(**columns))
    assert gradient.plan is not None and gradient.plan["path"] == "compiled", gradient.plan


def test_only_libraries_that_cannot_be_loaded_are_removed(tmp_path):
    library, other = tmp_path / "a.main.so", tmp_path / "b.so"
    library.touch()
    other.touch()
    assert remove_torn_library(RuntimeError(f"{other}: undefined symbol: f")) is None
    assert remove_torn_library(ImportError(f"{tmp_path / 'none.so'}: file too short")) is None
    assert (
        remove_torn_library(ImportError(f"inductor raised:\n{library}: file too short")) == library
    )
    assert not library.exists() and other.exists()


COMPILES = """
import torch
from vecenv.learn import Gradient

torch.manual_seed(0)
module = torch.nn.Linear(8, 1)
gradient = Gradient(module, lambda module, x: module(x).square().mean(), compile="on", log=None)
gradient(torch.ones(64, 8))
print(gradient.plan["path"], gradient.plan["reason"])
"""


@pytest.mark.slow
def test_what_a_killed_compiler_has_left_is_compiled_again(tmp_path):
    found = []
    for _ in range(2):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", COMPILES], env=environment, capture_output=True, text=True,
            timeout=200, check=True,
        )  # fmt: skip
        found.append(done.stdout)
        # Others are of torch's checks for instructions, such as those of bfloat16.
        libraries = list(tmp_path.rglob("*.main.so"))
        assert libraries and all(library.stat().st_size for library in libraries)
        for library in libraries:
            library.write_bytes(b"")
    assert all(line.startswith("compiled") for line in found), found
