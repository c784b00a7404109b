"""The driver on CPU threads: one thread does a job, or shares it with helper threads.

    caller (`Runner.run`)         memory that `Runner` owns         helper thread t
      describes the job  ------>  job record: addresses, counts
      `publish`          ------>  parts, OPEN = 1, TICKET + 1 --->  `join`: counts itself in
      `attend`: claims   <----->  next row of each part  <------->  `attend`: claims chunks of rows
      `settle`: closes   ------>  OPEN = 0
                waits    <------  ACTIVE = 0              <-------  counts itself out

A *job* says what to do (`op`), to which envs, and where the arrays are: as addresses, so a thread
needs no Python object. The order matters: a helper counts itself in before it checks whether the
job is open, and the caller closes a job before it waits until no helper is counted in. So no helper
reads a record while it changes, and a late helper delays no one.

`unpack` and `attend` are templates, like `episodes.run_rows`: `binding` copies them for each kind
of env and binds the global names below to its dtypes and shapes.
"""

from typing import Any, cast

import numpy as np
from numba import njit

from vecenv.core.atomics import (
    address_of,
    array_at,
    exchange,
    fetch_add,
    keep_branch,
    load,
    pause,
    store,
)
from vecenv.jit.arrays import find_invalid_row
from vecenv.jit.episodes import STEP, Batch

ADDRESSES = (  # 0 for what a job does not use; without `env_ids`, row i is env i
    *("states", "runs", "params", "env_ids", "actions", "obs", "rewards32", "rewards64"),
    *("terminations", "truncations", "final_obs", "masks"),
)
NUMBERS = (
    *("op", "autoreset_mode", "max_episode_steps", "num_envs", "num_rows"),
    "num_params",  # 1: all envs share one record
    "num_parts",  # threads that may take part
    "chunk_rows",  # rows that a thread claims at a time
)
JOB_DTYPE = np.dtype([(name, np.int64) for name in (*NUMBERS, *ADDRESSES)])

# Control words, each on its own cache line: threads that write different words don't interfere.
LINE = 8
TICKET = 0 * LINE  # number of the latest job offered to helpers
OPEN = 1 * LINE  # 1 while helper threads may join it
ACTIVE = 2 * LINE  # number of helper threads inside the job
ENDED = 3 * LINE  # number of episodes that ended in the job
STOP = 4 * LINE  # 1: helper threads must return
FIRST_PART = 5 * LINE  # then one line per part: next row to claim
# Behind them: one line per helper thread, 1 while it sleeps.


def control_words(num_threads: int) -> int:
    """Length of the control array for this many threads."""
    return FIRST_PART + 2 * num_threads * LINE


# `binding` puts the loop here, and functions from an address and a number of rows to an array.
run_rows = states_at = runs_at = params_at = actions_at = obs_at = masks_at = cast("Any", None)
int64_at = float32_at = float64_at = bool_at = cast("Any", None)


@njit
def sleep_word(control, thread):
    """Index of the control word that is 1 while helper `thread` sleeps."""
    num_threads = (control.shape[0] - FIRST_PART) // (2 * LINE)
    return FIRST_PART + (num_threads + thread) * LINE


@njit
def publish(control, jobs, bounds, actions, obs, rewards, terminations, truncations):
    """Check the actions, fill in the job and, if it has several parts, open it to helpers.

    It is compiled for each combination of dtypes and array layouts; the functions it calls are not.
    In `jobs` op, counts and the arrays of all calls are set; `bounds` is None if any action is
    allowed, else int64 (2, K) with K > 0, see `first_invalid_row`.

    Returns:
        A bit set of the sleeping helpers to wake (bit t is thread t), or -1 - row if the action of
        that row is out of bounds; the job is not open then.
    """
    job = jobs[0]
    job.actions = address_of(actions)
    if bounds is not None and job.op == STEP:
        given = array_at(job.actions, (actions.size,), actions.dtype)
        bad_row = find_invalid_row(given, bounds, job.num_rows)
        if bad_row >= 0:
            return -1 - bad_row
    job.obs = address_of(obs)
    is_float32 = rewards.itemsize == 4
    job.rewards32 = address_of(rewards) if is_float32 else 0
    job.rewards64 = 0 if is_float32 else address_of(rewards)
    job.terminations = address_of(terminations)
    job.truncations = address_of(truncations)
    store(control, ENDED, 0)
    for part in range(job.num_parts):
        store(control, FIRST_PART + part * LINE, part * job.num_rows // job.num_parts)
    to_wake = 0
    if job.num_parts > 1:
        store(control, OPEN, 1)
        fetch_add(control, TICKET, 1)
        for thread in range(1, job.num_parts):
            if exchange(control, sleep_word(control, thread), 0) == 1:
                to_wake |= 1 << thread
    return to_wake


@njit
def join(control, jobs, thread, ticket, num_spins):
    """Wait for a job later than number `ticket`, and enter it.

    Returns:
        The ticket of the job; or -1 if none came in `num_spins` rounds. Then the helper counts as
        asleep: it must wait for its lock, which the caller of `step` releases for a later job.
    """
    while True:
        for _ in range(num_spins):
            latest = load(control, TICKET)
            if latest != ticket:
                fetch_add(control, ACTIVE, 1)
                if load(control, OPEN) == 1 and thread < jobs[0].num_parts:
                    return load(control, TICKET)
                fetch_add(control, ACTIVE, -1)
                ticket = latest
            pause()
        store(control, sleep_word(control, thread), 1)
        if (
            load(control, TICKET) == ticket
            or exchange(control, sleep_word(control, thread), 0) == 0
        ):
            return -1


@njit
def settle(control, num_spins):
    """Close the job; return how many episodes ended, or -1 if helpers are still inside."""
    store(control, OPEN, 0)
    for _ in range(num_spins):
        if load(control, ACTIVE) == 0:
            return load(control, ENDED)
        pause()
    return -1


@njit
def leave(control):
    """Count out a helper that left a job by a kernel's exception."""
    fetch_add(control, ACTIVE, -1)


@njit
def own_params(params, env):
    """Return what `episodes.own_params` returns: a processor guesses this branch.

    Else it would compute the record's address before each step: 4 % of the time of CAGE 2's.
    """
    if params.shape[0] > 1:
        keep_branch()
        return params[env]
    return params[0]


def array_maker(dtype: Any, inner: tuple[int, ...], array_at: Any = array_at) -> Any:
    """Return a function from an address and a number of rows to an array (rows, *inner)."""
    dtype = np.dtype(dtype)

    def view(address, rows):
        return array_at(address, (rows, *inner), dtype)

    return njit(view, inline="always")


def unpack(job, op):
    """Make the `Batch` of a job record, from the addresses in it, to do `op`."""
    rows, num_envs = job.num_rows, job.num_envs
    return Batch(
        op,
        job.autoreset_mode,
        job.max_episode_steps,
        states_at(job.states, num_envs),
        runs_at(job.runs, num_envs),
        params_at(job.params, job.num_params),
        int64_at(job.env_ids, rows if job.env_ids != 0 else 0),
        actions_at(job.actions, rows),
        obs_at(job.obs, rows),
        float32_at(job.rewards32, rows if job.rewards32 != 0 else 0),
        float64_at(job.rewards64, rows if job.rewards64 != 0 else 0),
        bool_at(job.terminations, rows),
        bool_at(job.truncations, rows),
        obs_at(job.final_obs, num_envs),
        masks_at(job.masks, rows),
    )


@njit
def attend(control, jobs, thread, num_spins):
    """Do parts of jobs.

    Thread 0, the caller of `step`, does one job, with the helpers that join; returns the number of
    episodes that ended, or -1 if helpers are still busy after `num_spins` rounds (ask `settle`).
    Other threads are helpers: they take part in all jobs offered, until none has come for
    `num_spins` rounds; return 0.
    """
    ticket = np.int64(-1)  # typed, as a literal would compile `join` a second time
    while True:
        if thread > 0:
            ticket = join(control, jobs, thread, ticket, num_spins)
            if ticket < 0:
                return 0
        job = jobs[0]
        batch = unpack(job, job.op)
        parts, rows, chunk = job.num_parts, job.num_rows, job.chunk_rows
        num_ended = 0
        for k in range(parts):  # first the thread's own part, then the rest of the others
            part = (thread + k) % parts
            end = (part + 1) * rows // parts
            start = fetch_add(control, FIRST_PART + part * LINE, chunk)
            while start < end:
                num_ended += run_rows(batch, start, min(start + chunk, end))
                start = fetch_add(control, FIRST_PART + part * LINE, chunk)
        fetch_add(control, ENDED, num_ended)
        if thread == 0:
            return settle(control, num_spins)
        fetch_add(control, ACTIVE, -1)
