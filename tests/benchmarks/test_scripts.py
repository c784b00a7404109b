"""benchmarks/rooms.py: the walks of the guide."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def printed_by_rooms(*args):
    command = [sys.executable, ROOT / "benchmarks" / "rooms.py", *args]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


@pytest.mark.slow
def test_a_step_of_an_async_env_goes_through_files_of_the_caller_and_of_the_worker():
    title, *files = printed_by_rooms("--calls", "step", "--walk").splitlines()
    assert title.startswith("AsyncVectorEnv.step")
    assert int(title.split()[-2]) == len(files)
    walk = [line.split()[0] for line in files]
    assert walk[:2] == ["vecenv/core/base.py", "vecenv/core/actions.py"]  # the caller's, then:
    workers = ["vecenv/workers/worker.py", "vecenv/workers/chunk.py", "vecenv/core/autoreset.py"]
    assert walk[-3:] == workers


@pytest.mark.slow
@pytest.mark.linux  # elsewhere workers and callers wait otherwise
def test_the_walks_of_the_guide_are_those_of_the_code():
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    walks = printed_by_rooms("--markdown")
    assert guide.endswith(walks)
    for title, files in re.findall(r"`([^`\n]+)`\n\n```\n(.*?)\n```", walks, re.DOTALL):
        assert f"| {title} | {len(files.splitlines())} |" in guide
