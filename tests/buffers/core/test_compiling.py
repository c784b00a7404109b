"""Code on disk for one layout of rows beside code that is compiled for another."""

import os
import subprocess
import sys

import pytest

KERNEL = """
import numpy as np
from buffers.core.kernels import random_word

print(random_word(np.uint64(7), np.uint64(3)))
"""
LIMITED = """
import logging, resource, sys
import numba, torch
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # nothing can be written, as on a full disk
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_full_disk_or_damaged_files_of_the_cache_are_not_in_the_way(tmp_path):
    def run(program):
        env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", program]
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False, env=env
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout.splitlines()

    warning, *whole = run(LIMITED + KERNEL)
    assert warning.startswith("WARNING") and "is not kept on disk" in warning
    assert not list(tmp_path.rglob("*.nbi"))
    assert run(KERNEL) == whole
    saved = [*tmp_path.rglob("*.nbi"), *tmp_path.rglob("*.nbc")]
    assert saved
    for file in saved:
        file.write_bytes(file.read_bytes()[:60])
    assert run(LIMITED + KERNEL)[-1:] == whole  # damaged, and no room to mend it
    assert run(KERNEL) == whole
