"""The scripts that `make bench` runs: they need no arguments, and no library of others."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_what_make_bench_runs_can_be_run():
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
