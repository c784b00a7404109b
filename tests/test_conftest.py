"""The suite's own set-up: tests that end their process are told once, and the others run."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ENDS_ITS_PROCESS = """
import os
import pytest

@pytest.mark.parametrize("number", range(4))
def test_number(number):
    if number == {}:
        os._exit(1)
"""
# What hands out tests hears late that a process has ended, and sends it more.
HEARS_LATE = """
import os
import time
from xdist.workermanage import Marker, WorkerController

hear = WorkerController.process_from_remote

def hear_late(self, said):
    if said is Marker.END:
        time.sleep(2)
    hear(self, said)

WorkerController.process_from_remote = hear_late

def pytest_runtest_logreport():
    if "PYTEST_XDIST_WORKER" not in os.environ:
        time.sleep(0.1)
"""
SETTINGS = '[tool.pytest.ini_options]\ntestpaths = ["tests"]\nmarkers = ["linux", "cuda", "gpu"]\n'


@pytest.mark.slow
@pytest.mark.parametrize("controller", ["", HEARS_LATE], ids=["usual", "late"])
def test_a_test_that_ends_its_process_is_told_once_and_the_others_run(tmp_path, controller):
    tests = tmp_path / "tests"
    tests.mkdir()
    shutil.copy(Path(__file__).with_name("conftest.py"), tests)
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    (tmp_path / "conftest.py").write_text(controller)
    for name, number in (("a", 2), ("b", -1), ("c", 0), ("d", -1)):
        (tests / f"test_{name}.py").write_text(ENDS_ITS_PROCESS.format(number))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert "2 failed, 14 passed" in done.stdout
