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

from typing import Any

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

ADDRESSES = (
    *("states", "runs", "params", "env_ids", "actions", "obs", "rewards32", "rewards64"),
    *("terminations", "truncations", "final_obs", "masks"),
)
JOB_DTYPE = np.dtype(
    [
        ("op", np.int64),
        ("autoreset_mode", np.int64),
        ("max_episode_steps", np.int64),  # NO_LIMIT for none
        ("num_envs", np.int64),
        ("num_rows", np.int64),
        ("num_ids", np.int64),  # 0: row i is env i
        ("num_params", np.int64),  # 1: all envs share one record
        ("num_parts", np.int64),  # threads that may take part
        ("chunk_rows", np.int64),  # rows that a thread claims at a time
        *((name, np.int64) for name in ADDRESSES),
    ]
)

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


# `binding` puts the loop, dtypes and shapes here.
run_rows: Any = None
STATE_DTYPE = RUN_DTYPE = PARAMS_DTYPE = OBS_DTYPE = ACTION_DTYPE = np.dtype(np.float64)
OBS_SHAPE: tuple[int, ...] = ()
ACTION_SHAPE: tuple[int, ...] = ()
NUM_MASKED_ACTIONS = 0

FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
BOOL = np.dtype(np.bool_)
INT64 = np.dtype(np.int64)


@njit
def sleep_word(control, thread):
    """Index of the control word that is 1 while helper `thread` sleeps."""
    num_threads = (control.shape[0] - FIRST_PART) // (2 * LINE)
    return FIRST_PART + (num_threads + thread) * LINE


@njit
def publish(control, jobs, bounds, actions, obs, rewards, terminations, truncations):
    """Check the actions, fill in the job and, if it has several parts, open it to helpers.

    It is compiled for each combination of dtypes and array layouts; the functions it calls are not.

    Args:
        control: Control words int64.
        jobs: JOB_DTYPE (1,); op, counts and the arrays of all calls are set.
        bounds: int64 (2, K) with K > 0, see `first_invalid_row`; None if any action is allowed.
        actions: (R, ...).
        obs: (R, ...), written by the job, as the next three.
        rewards: float32 or float64 (R,).
        terminations: bool (R,).
        truncations: bool (R,).

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


@njit
def unpack(job):
    """Make the `Batch` of a job record, from the addresses in it."""
    rows = job.num_rows
    rows32 = rows if job.rewards32 != 0 else 0
    rows64 = rows if job.rewards64 != 0 else 0
    return Batch(
        job.op,
        job.autoreset_mode,
        job.max_episode_steps,
        array_at(job.states, (job.num_envs,), STATE_DTYPE),
        array_at(job.runs, (job.num_envs,), RUN_DTYPE),
        array_at(job.params, (job.num_params,), PARAMS_DTYPE),
        array_at(job.env_ids, (job.num_ids,), INT64),
        array_at(job.actions, (rows, *ACTION_SHAPE), ACTION_DTYPE),
        array_at(job.obs, (rows, *OBS_SHAPE), OBS_DTYPE),
        array_at(job.rewards32, (rows32,), FLOAT32),
        array_at(job.rewards64, (rows64,), FLOAT64),
        array_at(job.terminations, (rows,), BOOL),
        array_at(job.truncations, (rows,), BOOL),
        array_at(job.final_obs, (job.num_envs, *OBS_SHAPE), OBS_DTYPE),
        array_at(job.masks, (rows, NUM_MASKED_ACTIONS), BOOL),
    )


@njit
def attend(control, jobs, thread, num_spins):
    """Do parts of jobs.

    Thread 0, the caller of `step`, does one job, with the helpers that join. Other threads are
    helpers: they take part in all jobs offered, until none has come for `num_spins` rounds.

    Args:
        control: Control words int64.
        jobs: JOB_DTYPE (1,).
        thread: 0 or the number of a helper.
        num_spins: Rounds to wait for a job (helpers) or for the helpers inside it (thread 0).

    Returns:
        Thread 0: number of episodes that ended, or -1 if helpers are still busy (ask `settle`).
        Helpers: 0.
    """
    ticket = np.int64(-1)  # typed, as a literal would compile `join` a second time
    while True:
        if thread > 0:
            ticket = join(control, jobs, thread, ticket, num_spins)
            if ticket < 0:
                return 0
        job = jobs[0]
        batch = unpack(job)
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
