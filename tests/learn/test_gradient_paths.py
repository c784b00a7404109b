"""Gradients of every path against autograd's, parameter by parameter, and why a path is taken."""

import copy
import dataclasses
import functools
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from buffers import RolloutBatch
from vecenv.learn import Adam, Gradient, compiled, gradient_options, private_torch
from vecenv.learn import gradient as gradient_module
from vecenv.learn.private_torch import load_library

ROWS, CLIP = 64, 0.2
needs_compiler = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6), reason="AOTInductor came with 2.6"
)
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
    return Agent(Recurrent() if kind == "gru" else nn.Identity())


def make_batch(kind="mlp", rows=ROWS, seed=0, weights=None):
    extras = {}
    generator = torch.Generator().manual_seed(seed)
    shape = {"cnn": (2, 5, 5), "gru": (3, 3)}.get(kind, (6,))

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
    grads = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    return grads, {name: value.detach() for name, value in found}


def assert_equal(gradient, batch, tolerance=1e-4):
    """Each parameter's gradient, by its norm, and each scalar, are autograd's in float32."""
    expected, scalars = autograd(gradient.module, gradient.loss, batch)
    found = gradient(batch)
    whole = torch.cat([grad.flatten() for grad in expected.values()]).norm()
    for name in expected:
        parameter = gradient.module.get_parameter(name)
        error = (parameter.grad - expected[name]).norm()
        assert expected[name].any() and parameter.grad.any(), name
        assert error <= tolerance * (expected[name].norm() + 0.1 * whole), name
    assert list(found) == list(scalars)
    for name, value in scalars.items():
        assert float(found[name]) == pytest.approx(float(value), rel=tolerance, abs=tolerance), name


@pytest.fixture
def graphs_as_they_are(monkeypatch):
    """What would be compiled runs as torch's operations, one after the other, in no time."""

    def runs_of(graph, inputs, count, log):
        return [graph] * count, "compiled"

    monkeypatch.setattr(compiled, "_runs_of", runs_of)


@pytest.fixture(
    params=["traced", pytest.param("compiled", marks=[pytest.mark.slow, needs_compiler])]
)
def traced_or_compiled(request):
    """Run what would be compiled as it was traced; in slow tests compile it."""
    if request.param == "traced":
        request.getfixturevalue("graphs_as_they_are")


@pytest.mark.usefixtures("traced_or_compiled")
def test_weighted_rows_in_two_threads_have_the_gradient_of_autograd():
    agent, said = make_agent(), []
    weights = torch.rand(ROWS, generator=torch.Generator().manual_seed(1)) + 0.5

    def loss(agent, batch):
        error = (agent.value(batch.obs) - batch.returns).square()
        chosen = agent.policy(batch.obs).log_prob(batch.actions)
        policy_loss = -weighted_mean(batch.advantages * chosen, batch.weights)
        return policy_loss + weighted_mean(error, batch.weights), {"policy_loss": policy_loss}

    gradient = Gradient(agent, loss, compile=True, threads=2, log=said.append)
    assert gradient.path is None
    before = torch.get_float32_matmul_precision(), torch.get_num_threads()
    batch = make_batch(weights=weights)
    assert_equal(gradient, batch)
    assert gradient.path == "compiled" and gradient.num_threads == 2, gradient.reason
    assert "threads: 2" in said[-1]
    num_said = len(said)

    half = weights.clone()
    half[ROWS // 2 :] = 0  # padding, of which a half may consist
    padded = make_batch(seed=1, weights=half)
    padded.obs[ROWS // 2 :] = 0
    assert_equal(gradient, padded)

    optimizer = Adam(gradient.parameters(), lr=0.05)  # the graph sees new weights
    optimizer.step()
    assert_equal(gradient, batch)

    assert_equal(gradient, make_batch(rows=ROWS - 2, weights=weights[2:]))  # by autograd, as is
    assert_equal(gradient, make_batch(rows=ROWS - 4, weights=weights[4:]))
    assert len(said) == num_said + 1 and "call 4 goes through autograd: sizes" in said[-1]

    batch.returns[5] = torch.inf
    with pytest.raises(FloatingPointError, match=r"in call 6.*batch\.returns"):
        gradient(batch)
    assert agent.actor[0].weight.grad is None
    batch.returns[5] = 0.0
    assert_equal(gradient, batch)
    assert (torch.get_float32_matmul_precision(), torch.get_num_threads()) == before


@pytest.mark.usefixtures("traced_or_compiled")
@pytest.mark.parametrize(
    ("kind", "threads", "dtype"),
    [
        ("mlp", 2, torch.bfloat16),
        ("cnn", 2, torch.float32),
        ("gru", 2, torch.float32),
        ("masks", 1, torch.float32),
    ],
)
def test_gradients_are_those_of_autograd(kind, threads, dtype):
    rows = 1024 if kind == "mlp" else ROWS
    gradient = Gradient(make_agent(kind), ppo_loss, compile=True, threads=threads, dtype=dtype)
    for seed in range(2):
        tolerance = 1e-4 if dtype == torch.float32 else 0.2
        assert_equal(gradient, make_batch(kind, rows=rows, seed=seed), tolerance)
    assert gradient.path == "compiled", gradient.reason
    assert gradient.num_threads == threads, gradient.reason


def square_loss(module: Any, batch: Any) -> Any:
    return (module(batch["x"]) - batch["y"]).square().mean()


def make_layers(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), *(between or [nn.Tanh()]), nn.Linear(8, 6))


def make_square_batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(ROWS, 6, generator=generator) for name in ("x", "y")}


class Noisy(nn.Module):
    """A buffer that a trainer anneals, and a target that follows the weights."""

    def __init__(self):
        super().__init__()
        self.layers = make_layers()
        self.target = copy.deepcopy(self.layers).requires_grad_(False)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("rare", None)

    def forward(self, x):
        return self.layers(x) * self.scale + self.target(x)


@pytest.mark.usefixtures("traced_or_compiled")
def test_buffers_and_targets_that_change_are_inputs():
    module, said = Noisy(), []
    gradient = Gradient(module, square_loss, compile=True, threads=2, log=said.append)
    optimizer = Adam(gradient.parameters(), lr=0.05)
    for seed in range(5):
        assert_equal(gradient, make_square_batch(seed))
        optimizer.step()
        module.scale.fill_(1 / (seed + 2))
        if seed == 2:
            module.scale = module.scale * 3  # another tensor in its place
        with torch.no_grad():
            pairs = zip(module.target.parameters(), module.layers.parameters(), strict=True)
            for slow, quick in pairs:
                slow.lerp_(quick, 0.5)
    assert gradient.path == "compiled" and len(said) <= 2, said
    module.scale = module.scale.double()
    assert_equal(gradient, make_square_batch(5))
    assert "goes through autograd" in said[-1]


@dataclasses.dataclass
class Settings:
    clip: float = 0.2
    more: dict[str, float] = dataclasses.field(default_factory=lambda: {"weight": 1.0})
    scale: ClassVar[float] = 1.0


class Scaled:
    """What a loss makes anew in each call, as distributions are."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return self.factor * SCALE * x


SCALE, NAMESPACE, MEMBERS = 1.0, SimpleNamespace(weight=1.0), {1}


def set_loss(agent, batch, settings):
    loss, _ = ppo_loss(agent, batch)
    loss = Scaled(NAMESPACE.weight * len(MEMBERS))(loss)
    value = agent.value(batch.obs).clamp(-settings.clip, settings.clip)
    return loss + settings.scale * settings.more["weight"] * value.square().mean()


@pytest.mark.usefixtures("graphs_as_they_are")
def test_what_a_loss_reads_beside_the_batch_may_change(monkeypatch):
    """Numbers, options, a global, a variable of a closure, and whether the module trains."""
    agent, settings, said = make_agent(), Settings(), []
    agent.features, factor = nn.Dropout(0.0), 1.0

    def loss(agent, batch, settings):
        return factor * set_loss(agent, batch, settings)

    loss = functools.partial(loss, settings=settings)
    agent.eval()
    gradient = Gradient(agent, loss, compile=True, log=said.append)
    for change in (
        lambda: None,
        lambda: setattr(agent, "entropy_weight", 0.5),
        lambda: setattr(agent, "entropy_weight", 0.01),
        lambda: setattr(settings, "clip", 0.01),
        lambda: setattr(settings, "clip", 0.2),
        lambda: settings.more.update(weight=0.0),
        lambda: settings.more.update(weight=1.0),
        lambda: settings.more.update(other=2.0),
        lambda: settings.more.pop("other"),
        lambda: setattr(Settings, "scale", 2.0),
        lambda: setattr(Settings, "scale", 1.0),
        lambda: setattr(settings, "scale", 3.0),  # hides that of the class
        lambda: delattr(settings, "scale"),
        lambda: setattr(NAMESPACE, "weight", 5.0),
        lambda: setattr(NAMESPACE, "weight", 1.0),
        lambda: MEMBERS.add(2),
        lambda: MEMBERS.discard(2),
    ):
        change()
        assert_equal(gradient, make_batch())
    for name, value in {"CLIP": 0.05, "SCALE": 3.0}.items():
        with monkeypatch.context() as patched:
            patched.setattr(sys.modules[__name__], name, value)
            assert_equal(gradient, make_batch(seed=3))
        assert_equal(gradient, make_batch(seed=3))
    factor = 3.0
    assert_equal(gradient, make_batch(seed=4))
    names = "module.entropy_weight settings.clip settings.more settings.scale NAMESPACE.weight"
    for name in (*names.split(), "CLIP", "SCALE", "MEMBERS", "factor"):
        assert any(f"{name} is not what it was" in line for line in said), (name, said)
    assert gradient.path == "compiled"


@pytest.mark.slow
@needs_compiler
def test_a_second_gradient_loads_what_the_first_compiled_and_is_the_same_bit_for_bit(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    batches, said = [make_batch(seed=seed, rows=1024) for seed in range(3)], []

    def train(threads):
        agent = make_agent()
        gradient = Gradient(agent, ppo_loss, compile=True, threads=threads, log=said.append)
        optimizer = Adam(gradient.parameters(), lr=0.01, max_grad_norm=0.5)
        for batch in batches:
            gradient(batch)
            optimizer.step()
        return [*agent.parameters()]

    found = [train(threads) for threads in (2, 2, 1, 2)]
    for k in (1, 3):
        assert all(map(torch.equal, found[0], found[k]))
    kinds = [line.split()[1] for line in said]
    assert kinds == [*["compiling", "compiled", "loaded"], *["compiling", "compiled", "loaded"]]
    packages = [*Path(tmp_path).rglob("*")]
    assert sum(file.suffix == ".pt2" for file in packages) == 2  # and nothing else but folders
    assert sum(file.is_file() for file in packages) == 2
    for file in packages:
        if file.is_file():
            file.write_bytes(file.read_bytes()[: -1 << 10])  # damaged: it is compiled again
    private_torch._library_of.cache_clear()  # as in another process
    assert all(map(torch.equal, found[0], train(2)))
    assert said[-1].startswith("gradient: compiled")


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x


def reason_of(agent, loss, batch, **options):
    said = []
    gradient = Gradient(agent, loss, compile=True, log=said.append, **options)
    assert_equal(gradient, batch)
    assert gradient.path == "autograd" and said[-1] == f"gradient: by autograd, {gradient.reason}"
    return gradient.reason


@pytest.mark.usefixtures("graphs_as_they_are")
def test_a_loss_that_draws_random_numbers_goes_through_autograd_and_draws_them_once():
    def noisy(module, batch):
        return square_loss(module, batch | {"x": batch["x"] + torch.randn(ROWS, 6)})

    module, said = make_layers(), []
    gradient = Gradient(module, noisy, compile=True, log=said.append)
    for seed in range(2):
        torch.manual_seed(seed)
        gradient(make_square_batch(0))
        found = module[0].weight.grad.clone()
        torch.manual_seed(seed)
        expected, _ = autograd(module, noisy, make_square_batch(0))
        torch.testing.assert_close(found, expected["0.weight"])
    assert len(said) == 1 and "the loss draws random numbers (aten.randn" in said[0]


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param("compiler", marks=[needs_compiler, pytest.mark.slow]),
        pytest.param("torch", marks=needs_compiler),
        "folder",
        "killed",
    ],
)
def test_without_a_compiler_autograd_goes_on_and_says_why(lost, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if lost == "folder":
        folder = tmp_path / "vecenv" / "gradients"
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    if lost == "compiler":
        from torch._inductor import config as inductor_config  # takes a second

        monkeypatch.setattr(inductor_config.cpp, "cxx", ("no-such-compiler",))
    if lost == "torch":
        from torch import _inductor

        monkeypatch.delattr(_inductor, "aoti_compile_and_package")
    if lost == "killed":

        def killed(*_):
            raise RuntimeError("C++ compile error\n\nCommand: g++: fatal error: Killed signal")

        monkeypatch.setattr(compiled, "compile_graph", killed)
    expected = {
        "compiler": "No working C++ compiler found",
        "torch": "ImportError: cannot import name 'aoti_compile_and_package'",
        "folder": "others than you can write to",
        "killed": "the loss does not compile (RuntimeError: C++ compile error)",
    }[lost]
    assert expected in reason_of(make_agent(), ppo_loss, make_batch())
    assert not [*tmp_path.rglob("*.pt2")]


def test_arguments_are_checked():
    agent: Any = make_agent()
    for wrong, message in [
        ({"compile": "auto"}, "compile is 'auto', expected True or False"),
        ({"dtype": torch.float16}, "dtype is torch.float16"),
        ({"dtype": "auto"}, "dtype is auto, expected torch.float32 or torch.bfloat16"),
        ({"threads": 0}, "threads is 0, expected 1 or 2"),
    ]:
        options: Any = wrong
        with pytest.raises(ValueError, match=message):
            Gradient(agent, ppo_loss, **options)
    with pytest.raises(ValueError, match="parameters with requires_grad are none"):
        Gradient(nn.Tanh(), ppo_loss)
    with pytest.raises(ValueError, match=r"torch\.float64.* expected some, torch\.float32"):
        Gradient(make_agent().double(), ppo_loss)


def test_options_follow_sizes(monkeypatch):
    monkeypatch.setattr(gradient_module, "usable_cores", lambda: 2)
    small: Any = {"num_calls": 15_000, "num_rows": 256}
    assert gradient_options("auto", **small) == {"compile": False, "threads": 1}
    assert gradient_options("on", **small) == {"compile": True, "threads": 1}
    wide = {**small, "num_weights": 62_500}
    found = gradient_options("auto", **wide | {"num_calls": 15_625})
    assert found == {"compile": True, "threads": 2}
    assert gradient_options("off", **wide, may_split=False) == {"compile": False, "threads": 1}
    monkeypatch.setattr(gradient_module, "usable_cores", lambda: 1)
    assert gradient_options("on", **wide) == {"compile": True, "threads": 1}


@pytest.mark.gpu
@needs_compiler
def test_gradients_on_a_cuda_device_are_those_of_autograd():
    agent = make_agent().cuda()
    gradient = Gradient(agent, ppo_loss, compile=True)
    for seed in range(3):
        batch = make_batch(seed=seed)
        columns = {name: column.cuda() for name, column in batch._asdict().items()}
        assert_equal(gradient, batch._replace(**columns))
    assert gradient.path == "compiled", gradient.reason


def test_a_package_that_needs_the_loader_of_torch_is_left_to_it(tmp_path, name="x.blob"):
    """Run without, it would end the interpreter."""
    with zipfile.ZipFile(tmp_path / "gradient.pt2", "w") as package:
        package.writestr("gradient/data/aotinductor/model/x.wrapper.so", b"")
        package.writestr(f"gradient/data/aotinductor/model/{name}", b"{}")
    with pytest.raises(NotImplementedError, match=name):
        load_library(tmp_path / "gradient.pt2")


@pytest.mark.usefixtures("graphs_as_they_are")
def test_what_does_not_compile_goes_through_autograd_and_the_reason_is_said():
    batch, agent = make_batch(), make_agent()
    for effect in (Counting(), nn.BatchNorm1d(6)):
        reason = reason_of(Agent(effect), ppo_loss, batch)
        assert "changes buffers of the module" in reason or "in-place operation" in reason
    counts = Agent(Counting())
    Gradient(counts, ppo_loss, compile=True)(batch)
    assert counts.features.count == 2  # of policy and value: trying has left no trace
    pairs = [(p, p.detach().clone()) for p in agent.parameters()]
    factors = torch.linspace(0, 1, ROWS)

    def anchored(agent, batch):  # by weights that are not those of the module it is given
        return ppo_loss(agent, batch)[0] + sum((p - x).square().sum() for p, x in pairs)

    def captured(agent, batch):
        return ppo_loss(agent, batch)[0] + (agent.value(batch.obs) * factors).mean()

    def counted(agent, batch):
        return ppo_loss(agent, batch)[0] * (2 if batch.returns.sum() > 1e9 else 1)

    def of_arrays(agent, batch):
        x = torch.from_numpy(batch["x"])
        return agent.value(x).mean() + agent.policy(x).logits.square().mean()

    needed = "that is neither in the module that it is given nor in the batch"
    assert f"a tensor (16, 6) {needed}" in reason_of(agent, anchored, batch)
    assert f"a tensor (64,) {needed}" in reason_of(make_agent(), captured, batch)
    assert "the loss can't be traced (" in reason_of(make_agent(), counted, batch)
    arrays = {"x": batch.obs.numpy()}
    assert "batch['x'] is a ndarray" in reason_of(make_agent(), of_arrays, arrays)


@pytest.mark.usefixtures("graphs_as_they_are")
@pytest.mark.parametrize("scalar", [False, True])
def test_a_loss_that_is_no_mean_is_left_to_autograd_in_the_first_call(scalar):
    def summed(module, batch):
        loss = square_loss(module, batch)
        return (loss, {"root": loss.sqrt()}) if scalar else loss * len(batch["x"])

    gradient = Gradient(make_layers(), summed, compile=True, threads=2)
    batch = {
        name: x * torch.linspace(0, 9, ROWS)[:, None] for name, x in make_square_batch(0).items()
    }
    assert_equal(gradient, batch)
    assert gradient.path == "autograd"
    assert gradient.reason.startswith(
        "as in call 1 " + ("root is off" if scalar else "the gradient")
    )
