"""A training that is killed and resumed ends with the weights of one that ran through."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from equality import assert_same
from learn.training import Options, train

from vecenv.files import read_npz

ROOT = Path(__file__).parents[2]
BACKENDS = [("JitCartPole-v1", "jit"), ("CartPole-v1", "sync"), ("CartPole-v1", "async")]


class Killed(BaseException):
    """Ends a training where it is, without a save."""


def kill_at(point):
    def kill(run, steps):
        if steps >= point:
            raise Killed

    return kill


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize(
    ("env_id", "backend"), [pytest.param(*BACKENDS[0], marks=pytest.mark.slow), BACKENDS[1]]
)
def test_a_training_cut_off_twice_ends_as_one_that_ran_through(env_id, backend, tmp_path):
    expected = train(Options(tmp_path / "through", env_id, backend))
    folder = tmp_path / "cut"
    for point, resume in ((300, False), (700, True)):
        with pytest.raises(Killed):
            train(Options(folder, env_id, backend, resume=resume), kill_at(point))
        with (folder / "metrics.jsonl").open("a") as metrics:
            metrics.write('{"steps": 9999, "seconds": 1.0}\n{"steps"')
    assert_same(train(Options(folder, env_id, backend, resume=True)), expected)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    others = (tmp_path / "through" / "metrics.jsonl").read_text().splitlines()
    found, wanted = ([json.loads(line) for line in text] for text in (lines, others))
    assert [line | {"seconds": 0} for line in found] == [line | {"seconds": 0} for line in wanted]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("env_id", "backend"), BACKENDS)
def test_a_training_killed_by_signals_ends_as_one_that_ran_through(env_id, backend, tmp_path):
    """At three random points, by SIGTERM, SIGKILL and SIGINT; then it is let go on to its end."""
    rng = np.random.default_rng()
    seed = int(rng.integers(1 << 30))
    print("points drawn with seed", seed)  # noqa: T201 - to repeat a failure
    points = np.sort(np.random.default_rng(seed).integers(1, 200, 3))

    def begin(folder, *more):
        command = [sys.executable, "-m", "learn.training", str(folder), "--env-id", env_id]
        command += ["--backend", backend, "--total-steps", str(64 * 220), *more]
        path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
        changed = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=os.environ | changed)

    assert begin(tmp_path / "through").wait(300) == 0
    folder = tmp_path / "killed"
    for number, point in zip((signal.SIGTERM, signal.SIGKILL, signal.SIGINT), points, strict=True):
        # A line more than the last process has left is the next one's own, which handles signals.
        point = max(point, count_lines(folder / "metrics.jsonl") + 1)
        process = begin(folder, "--resume")
        while process.poll() is None and count_lines(folder / "metrics.jsonl") < point:
            time.sleep(0.001)
        process.send_signal(number)
        assert process.wait(100) == (-number if number == signal.SIGKILL else 0)
        assert count_lines(folder / "metrics.jsonl") < 220, "it was over before it was killed"
    assert begin(folder, "--resume").wait(300) == 0
    found, expected = (read_npz(path / "weights.npz") for path in (folder, tmp_path / "through"))
    assert_same(found, expected)


def count_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0
