"""benchmarks/rooms.py: it counts the files of the caller and of the worker."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "rooms.py"


@pytest.mark.slow
def test_a_step_of_an_async_env_goes_through_files_of_the_caller_and_of_the_worker():
    command = [sys.executable, SCRIPT, "--calls", "step", "--walk"]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    title, *files = printed.splitlines()
    assert title.startswith("AsyncVectorEnv.step")
    assert int(title.split()[-2]) == len(files)
    walk = dict(line.split() for line in files)
    assert walk["vecenv/core/base.py"] == "step"  # the caller's, and in the worker:
    assert "vecenv/core/autoreset.py" in walk
