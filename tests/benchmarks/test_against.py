"""benchmarks/against.py: what it concludes from times, and that it measures what it says."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "against.py"


@pytest.fixture(scope="module")
def against():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        yield importlib.import_module("against")


def found(against, **seconds):
    """Two generations of three rounds; each process takes as long in all of them."""
    one = against.Found("gae 128 x 8", "call")
    for process in against.ORDER:
        one.seconds[process] = [[seconds[process]] * 3, [seconds[process]] * 3]
    return one


def test_the_ratio_is_the_time_of_b_over_that_of_a(against):
    one = found(against, A1=1.0, B1=1.2, B2=1.4, A2=1.0)
    assert one.ratio == pytest.approx(1.3)
    assert one.control == 0.0
    assert one.is_slower


def test_what_the_control_does_too_is_no_finding(against):
    one = found(against, A1=1.0, B1=1.1, B2=1.1, A2=1.1)
    assert one.ratio == pytest.approx(1.1 / 1.05)
    assert one.control == pytest.approx(0.1)
    assert not one.is_slower
    assert not found(against, A1=1.0, B1=1.02, B2=1.02, A2=1.0).is_slower


@pytest.mark.slow
def test_a_tree_against_itself(tmp_path):
    options = ["--rows", "sync NullEnv 8", "import vecenv", "--rounds", "2", "--generations", "1"]
    options += ["--round-s", "0.02", "--wait-idle", "0", "--json", str(tmp_path / "found.json")]
    command = [sys.executable, str(SCRIPT), str(ROOT), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode in {0, 1}, done.stderr  # 1: it seemed slower than itself
    assert "2 rows measured" in done.stdout
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["sync NullEnv 8", "import vecenv"]
    assert all(
        len(row["seconds"][p][0]) == 2 and not row["error"] for row in rows for p in ["A1", "B2"]
    )
