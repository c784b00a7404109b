"""Several processes that learn together, over gloo, against one that has all of their rows."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import programs
from vecenv.learn import Adam, Gradient, Moments, RankError, Ranks

ROOT = Path(__file__).parents[2]
PPO = ("-m", "vecenv", "train", "CartPole-v1", "--algo", "ppo")
ROWS = [(0, 5), (5, 12)]  # of each rank

# What a rank is asked to do: learn from its rows, say what came out, and go on without the other.
PROGRAM = """
import json, os, sys
rank, port, rows = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
names = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
os.environ.update({name: str(value) for name, value in names.items()})
sys.path.insert(0, os.getcwd())
import torch
torch.set_num_threads(1)
from tests.learn.test_ranks import learn
from vecenv.learn import RankError, Ranks
ranks = Ranks.join(timeout=60)
found = learn(ranks, *rows[rank])
found["sizes"], found["first"] = ranks.gather(rank + 10), ranks.gather(f"of rank {rank}")[0]
print(json.dumps(found), flush=True)
if rank == 0:
    try:
        ranks.gather(0)
    except RankError as error:
        print(error)
"""


def weighted_error(module, batch):
    errors = (module(batch["x"])[:, 0] - batch["y"]).square()
    mean = (errors * batch["weights"]).sum() / batch["weights"].sum()
    return mean, {"largest": (errors * batch["weights"]).sum() / batch["weights"].sum() * 2}


def learn(ranks, begin, end):
    """Make three steps from some of twelve rows; return all that ranks compute together."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    x, y, moments = torch.randn(12, 5), torch.randn(12), Moments(5)
    weights = (torch.arange(12) % 4 != 1).float()  # unequal numbers among the ranks
    batch = {"x": x[begin:end], "y": y[begin:end].clone(), "weights": weights[begin:end]}
    moments.update(batch["x"], batch["weights"] > 0, ranks=ranks)
    ranks.normalize_(batch["y"], batch["weights"])
    gradient = Gradient(module, weighted_error, ranks=ranks)
    optimizer = Adam(gradient.parameters(), lr=0.1, max_grad_norm=0.5)
    losses, grads = [], []
    for _ in range(3):
        scalars = gradient(batch)
        grads.append([p.grad.tolist() for p in module.parameters() if p.grad is not None])
        optimizer.step()
        losses.append([float(scalars[name]) for name in ("loss", "largest")])
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    return {
        "losses": losses,
        "grads": grads,
        "weights": weights.tolist(),
        "bits": weights.view(torch.int32).tolist(),
        "moments": [moments.mean.tolist(), moments.variance.tolist(), int(moments.count)],
        "y": batch["y"].tolist(),
        "variance": float(ranks.variance(batch["x"])),
    }


class Twins(Ranks):
    """One of two ranks that have the same rows."""

    def sum_(self, tensor):
        return tensor.mul_(2)


def test_ranks_compute_from_the_sums_over_all():
    alone, twins = Ranks(), Twins()
    x, weights = torch.arange(6.0).square(), torch.tensor([1.0, 0, 1, 1, 1, 0])
    both = alone.normalize_(torch.cat([x, x]), torch.cat([weights, weights]))
    torch.testing.assert_close(twins.normalize_(x.clone(), weights), both[:6])
    both = alone.variance(torch.cat([x, x]))
    torch.testing.assert_close(twins.variance(x), both)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.slow
def test_two_ranks_learn_as_one_process_with_all_rows_and_notice_that_one_is_gone():
    port = free_port()
    started = [
        programs.Program(PROGRAM, rank, port, json.dumps(ROWS), kind="buffers") for rank in (0, 1)
    ]
    outputs = [program.communicate(timeout=100) for program in started]
    assert [program.returncode for program in started] == [0, 0], outputs
    (found, message), (other,) = [output.strip().splitlines() for output, _ in outputs]
    found, other, alone = json.loads(found), json.loads(other), learn(Ranks(), 0, 12)
    assert found["bits"] == other["bits"]  # ranks never drift apart
    assert found["sizes"] == [10, 11] and found["first"] == other["first"] == "of rank 0"
    assert found["moments"][2] == alone["moments"][2] == 9
    torch.testing.assert_close(found["y"] + other["y"], alone["y"], rtol=1.3e-6, atol=1e-5)
    for name in ("grads", "losses", "weights", "variance"):
        torch.testing.assert_close(found[name], alone[name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["moments"], alone["moments"], rtol=1.3e-6, atol=1e-5)
    assert message.startswith("rank 0 of 2: gathering failed; another one has ended")


def test_what_one_process_computes_is_what_torch_and_the_buffers_compute():
    x, weights = torch.randn(50, generator=torch.manual_seed(0)), torch.ones(50)
    weights[::3] = 0
    ranks, rows = Ranks(), x[weights > 0]
    assert ranks.size == 1 and ranks.gather("a") == ["a"]
    torch.testing.assert_close(ranks.variance(rows).float(), rows.var())
    expected = (rows - rows.mean()) / (rows.std() + 1e-8)
    torch.testing.assert_close(ranks.normalize_(x.clone(), weights)[weights > 0], expected)


def test_ranks_that_are_missing_are_waited_for_until_the_deadline(monkeypatch):
    names = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (names | {"MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match=r"rank 1 of 2: finding each other failed; .* 1 s"):
        Ranks.join(timeout=1)
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(RankError, match="MASTER_ADDR"):
        Ranks.join(timeout=1)

    def refuse(device):
        raise RuntimeError("invalid device ordinal")

    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    with pytest.raises(RankError, match="rank 1 of 2: taking a device of its own failed"):
        Ranks.join("cuda")


# -- vecenv train under torchrun -------------------------------------------------------------------


def torchrun(folder, *options, num_ranks=2):
    """Start a training in some processes; what they print goes to a file beside the folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), *PPO, "--backend", "sync"]
    command += ["--save", str(folder), "--compile", "off", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with Path(f"{folder}.log").open("a") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, cwd=ROOT, start_new_session=True
        )


def ended(process, folder):
    """Wait for the end; return the exit status and what was printed."""
    try:
        process.wait(240)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, Path(f"{folder}.log").read_text()


@pytest.mark.slow
def test_two_ranks_learn_cartpole_and_go_on_where_they_stopped(tmp_path):
    folder = tmp_path / "run"
    status, text = ended(torchrun(folder, "--total-steps", "30000"), folder)
    assert status == 0, text
    status, text = ended(torchrun(folder, "--total-steps", "60000", "--resume"), folder)
    assert status == 0, text
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["steps"] for line in lines]
    assert steps == sorted(steps) and 59_000 < steps[-1] <= 60_000
    mean = json.loads((folder / "evaluation.json").read_text())["mean"]
    assert mean > 150  # by chance it is 22; 500 takes longer, and how long depends on rounding
    assert "reset them" not in text  # each rank's envs went on as they were
    status, text = ended(torchrun(folder, "--resume", num_ranks=3), folder)
    assert status != 0 and "--num-envs: 8 is no multiple of the 3 ranks" in text
    status, text = ended(torchrun(folder, "--resume", num_ranks=4), folder)
    assert status != 0 and "last.pt does not fit" in text
