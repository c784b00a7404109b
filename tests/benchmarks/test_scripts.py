"""The scripts of `benchmarks/` but for against.py."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_what_make_bench_runs_needs_no_arguments_and_no_other_library():
    recipe = re.search(r"^bench:.*\n(?:\t.*\n)+", (ROOT / "Makefile").read_text(), re.M)
    left_out = re.findall(r"-e (\S+?)[\s)]", recipe[0])
    scripts = [
        path
        for path in sorted((ROOT / "benchmarks").glob("*.py"))
        if '\nif __name__ == "__main__"' in path.read_text()
        and not any(part in f"benchmarks/{path.name}" for part in left_out)
    ]
    assert len(scripts) > 20
    for script in scripts:
        text = script.read_text()
        is_free = "    pip install" not in text.split('"""')[1]
        assert is_free or "find_spec" in text or "except ImportError" in text, script
        command = [sys.executable, script, "--help"]
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert shown.returncode == 0, shown.stderr
        required = shown.stdout.partition("\n\n")[0].partition(script.name)[2]
        assert re.sub(r"\[[^][]*(\[[^][]*\][^][]*)*\]", "", required).strip() == "", required


def printed_by_rooms(*args):
    command = [sys.executable, ROOT / "benchmarks" / "rooms.py", *args]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


@pytest.mark.slow
def test_a_step_of_an_async_env_goes_through_files_of_the_caller_and_of_the_worker():
    title, *files = printed_by_rooms("--calls", "step", "--walk").splitlines()
    assert title.startswith("AsyncVectorEnv.step")
    assert int(title.split()[-2]) == len(files)
    walk = [line.split()[0] for line in files]
    assert walk[:2] == ["vecenv/workers/env.py", "vecenv/core/base.py"]  # the caller's, then:
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
