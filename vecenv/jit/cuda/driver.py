"""The driver on a device: one thread does one row of a job, by the rules in `jit.episodes`.

`run_thread` is a template, like `episodes.run_rows`: `compiler` copies it for each kind of env and
binds the global names below. All arguments are int64, by value: settings, counts and addresses. So
a launch copies nothing else to the device, and a CUDA graph keeps all of it.

A device can't raise errors. A row that can't be stepped (its action is out of bounds, or its
episode is over while autoreset is disabled) is left unchanged and noted in the word `faults`, which
lies in host memory; the env raises the error at the next call.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, cast

from vecenv.jit.driver import JOB_DTYPE
from vecenv.jit.episodes import DISABLED, MASK, OBSERVE, RESET, STEP

__all__ = ["ARGUMENTS", "BAD_ACTION", "BAD_MASK", "FAULT_SHIFT", "IS_OVER", "run_thread"]

ARGUMENTS = (
    *(JOB_DTYPE.names or ()),  # the parts and chunks of threads of the host are not used
    "bounds",  # int64 (2, NUM_BOUNDS), see `arrays.element_bounds`
    "chosen",  # bool (num_rows,), or 0: rows that RESET resets; it only observes the others
    "faults",  # int64 (1,)
)
Job = namedtuple("Job", ARGUMENTS)  # all fields are numbers

# Values of `faults`: one of these, shifted, plus the number of the env.
BAD_ACTION, IS_OVER, BAD_MASK = 1, 2, 3
FAULT_SHIFT = 56

# Bound by `compiler`; the views are those of `jit.driver`.
cuda = run_rows = unpack = is_allowed = runs_at = elements_at = cast("Any", None)
int64_at = float32_at = float64_at = bool_at = cast("Any", None)
NUM_BOUNDS = NUM_ELEMENTS = 0  # of an action


def run_thread(*arguments):
    """Do one row of a job; see ARGUMENTS."""
    job = Job(*arguments)
    row = cuda.grid(1)
    if row >= job.num_rows:  # the last block has spare threads
        return
    env = row if job.env_ids == 0 else int64_at(job.env_ids, job.num_rows)[row]
    op, fault = job.op, 0
    if op == STEP:
        elements = elements_at(job.actions, job.num_rows * NUM_ELEMENTS)
        if not is_allowed(elements, row, int64_at(job.bounds, 2 * NUM_BOUNDS)):
            fault = BAD_ACTION
        if job.autoreset_mode == DISABLED and runs_at(job.runs, job.num_envs)[env]["episode_over"]:
            fault = IS_OVER
        if fault != 0:
            op = OBSERVE  # the env is not stepped
            if job.rewards32 != 0:
                float32_at(job.rewards32, job.num_rows)[row] = 0.0
            else:
                float64_at(job.rewards64, job.num_rows)[row] = 0.0
            bool_at(job.terminations, job.num_rows)[row] = False
            bool_at(job.truncations, job.num_rows)[row] = False
    elif op == RESET and job.chosen != 0 and not bool_at(job.chosen, job.num_rows)[row]:
        op = OBSERVE
    count = run_rows(unpack(job, op), row, row + 1)
    if op == MASK and count != 0:
        fault = BAD_MASK
    if fault != 0:
        int64_at(job.faults, 1)[0] = fault << FAULT_SHIFT | env  # threads may race: one stays


def action_is_allowed(elements, row, bounds):
    """Return whether no element of a row's action is NaN or beyond bounds int64 (2 * NUM_BOUNDS,).

    It becomes `is_allowed`.
    """
    for k in range(NUM_ELEMENTS):
        element = elements[row * NUM_ELEMENTS + k]
        if element != element:
            return False
        if NUM_BOUNDS > 0 and (element < bounds[k] or element > bounds[NUM_BOUNDS + k]):
            return False
    return True
