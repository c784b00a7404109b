"""numba-cuda's simulator, which takes its place from the start of a process on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]

_PROGRAM = """
import sys
import numpy as np
from jit.on_device.bundled import MAKERS, check_states, check_step
from vecenv.jit.binding import uncompiled
from vecenv.jit.cuda.env import CudaVectorEnv

name, mode, num_envs = sys.argv[1], sys.argv[2], 6
cpu = MAKERS[name](num_envs, autoreset_mode=mode, max_episode_steps=12)
with uncompiled():
    host = MAKERS[name](1, autoreset_mode=mode, max_episode_steps=12)
device = CudaVectorEnv(host, num_envs)  # 2 blocks of 4 threads: 2 have no row
np.testing.assert_array_equal(device.reset(seed=1)[0], cpu.reset(seed=1)[0])
rng = np.random.default_rng(2)
num_ended = 0
for _ in range(40):
    actions = rng.integers(0, cpu.single_action_space.n, num_envs)
    expected, found = cpu.step(actions), device.step(actions)
    check_step(found, expected)
    over = expected[2] | expected[3]
    num_ended += over.sum()
    if mode == "Disabled" and over.any():
        options = {"reset_mask": over}
        device.reset(options=options)
        cpu.reset(options=options)
assert num_ended >= 12
check_states(device.state_dict(), cpu.state_dict())
print("the same")
"""

_RECORDED = """
from jit.on_device.recorded import RULES_OF_TRACE, count_differences

for name in RULES_OF_TRACE:
    differences, compared = count_differences(name, slice(0, 100, 20))
    assert differences == 0 < compared, name
print("the same")
"""


def test_recorded_episodes_replay():
    check(_RECORDED)


@pytest.mark.parametrize(
    ("name", "mode"), [("cartpole", "NextStep"), ("cage2", "SameStep"), ("cage2", "Disabled")]
)
def test_small_batches_are_those_of_the_processor(name, mode):
    check(_PROGRAM, name, mode)


def check(program, *arguments):
    """Run a program whose devices are the simulator, and which says that all was the same."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip() == "the same", done.stderr
