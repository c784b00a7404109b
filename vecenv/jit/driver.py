"""The compiled loop over environments, as templates.

`run_rows`, `unpack` and `attend` call the kernels of one kind of env by the global names below and
know its dtypes and shapes as global constants. `binding` makes, for each kind of env, copies of
them with these names bound, and compiles the copies; `run_rows` also runs uncompiled.

All rules about episodes stand in `run_rows`: autoreset, the episode limit, what is returned when.
"""

from typing import Any

import numpy as np
from numba import njit
from numba.np.numpy_support import carray

from vecenv.core.atomics import fetch_add, pointer
from vecenv.jit.handover import join, settle
from vecenv.jit.job import (
    ACTIVE,
    CALLER,
    ENDED,
    FIRST_PART,
    LINE,
    MASK,
    NEXT_STEP,
    RESET,
    SAME_STEP,
    STEP,
    Batch,
)
from vecenv.jit.random import open_block

# `binding` puts kernels here.
env_reset: Any = None
env_step: Any = None
env_observe: Any = None
env_mask: Any = None
obs_row: Any = None
action_row: Any = None
kernel: Any = None
STATE_DTYPE = RUN_DTYPE = PARAMS_DTYPE = OBS_DTYPE = ACTION_DTYPE = np.dtype(np.float64)
OBS_SHAPE: tuple[int, ...] = ()
ACTION_SHAPE: tuple[int, ...] = ()
NUM_MASKED_ACTIONS = 0

FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
BOOL = np.dtype(np.bool_)
INT64 = np.dtype(np.int64)


@njit
def run_rows(batch, start, stop):
    """Do the job for rows start <= row < stop of a `Batch`; return how many episodes ended."""
    op, mode, params = batch.op, batch.autoreset_mode, batch.params
    num_ended = 0
    # Unsigned numbers, because signed ones could be indices that count from the end.
    for row in range(np.uint64(start), np.uint64(stop)):
        env = row
        if batch.env_ids.shape[0] > 0:
            env = np.uint64(batch.env_ids[row])
        state, run = batch.states[env], batch.runs[env]
        if op == MASK:
            env_mask(state, batch.masks[row], params)
            continue
        begins = op == RESET
        if op == STEP:
            reward, terminated, truncated = 0.0, False, False
            begins = mode == NEXT_STEP and run.episode_over
            if not begins:
                open_block(run)
                action = action_row(batch.actions, row)
                reward, is_terminal, is_cut = env_step(state, action, run, params)
                terminated, truncated = bool(is_terminal), bool(is_cut)
                run.episode_return += reward
                run.episode_length += 1
                if run.episode_length >= batch.max_episode_steps:
                    truncated = True
                if terminated or truncated:
                    num_ended += 1
                    run.num_episodes += 1
                    run.last_return = run.episode_return
                    run.last_length = run.episode_length
                    run.episode_over = True
                    if mode == SAME_STEP:
                        env_observe(state, obs_row(batch.final_obs, env), params)
                        begins = True
            if batch.rewards32.shape[0] > 0:
                batch.rewards32[row] = reward
            else:
                batch.rewards64[row] = reward
            batch.terminations[row] = terminated
            batch.truncations[row] = truncated
        if begins:
            open_block(run)
            env_reset(state, run, params)
            run.episode_return = 0.0
            run.episode_length = 0
            run.episode_over = False
        env_observe(state, obs_row(batch.obs, row), params)
    return num_ended


@njit
def unpack(job):
    """Make the `Batch` of a job record from the addresses in it."""
    rows = job.num_rows
    rows32 = rows if job.rewards32 != 0 else 0
    rows64 = rows if job.rewards64 != 0 else 0
    return Batch(
        job.op,
        job.autoreset_mode,
        job.max_episode_steps,
        carray(pointer(job.states), (job.num_envs,), STATE_DTYPE),
        carray(pointer(job.runs), (job.num_envs,), RUN_DTYPE),
        carray(pointer(job.params), (1,), PARAMS_DTYPE),
        carray(pointer(job.env_ids), (job.num_ids,), INT64),
        carray(pointer(job.actions), (rows, *ACTION_SHAPE), ACTION_DTYPE),
        carray(pointer(job.obs), (rows, *OBS_SHAPE), OBS_DTYPE),
        carray(pointer(job.rewards32), (rows32,), FLOAT32),
        carray(pointer(job.rewards64), (rows64,), FLOAT64),
        carray(pointer(job.terminations), (rows,), BOOL),
        carray(pointer(job.truncations), (rows,), BOOL),
        carray(pointer(job.final_obs), (job.num_envs, *OBS_SHAPE), OBS_DTYPE),
        carray(pointer(job.masks), (rows, NUM_MASKED_ACTIONS), BOOL),
    )


@njit
def attend(control, jobs, thread, num_spins):
    """Do a share of jobs.

    Thread 0, the caller of `step`, does one job with whatever help there is. Any other is a helper:
    it takes part in all jobs offered until none has come for `num_spins` rounds of waiting.

    Args:
        control: Control words int64, see `job`.
        jobs: JOB_DTYPE (1,).
        thread: 0 or the number of a helper.
        num_spins: Rounds to wait for a job (helpers) or for the helpers inside it (thread 0).

    Returns:
        Thread 0: number of episodes that ended, or -1 if helpers are still busy (ask `settle`).
        Helpers: 0.
    """
    ticket = -1
    while True:
        if thread > 0:
            ticket = join(control, jobs, thread, ticket, num_spins)
            if ticket < 0:
                return 0
        else:
            control[CALLER] = 1
        job = jobs[0]
        batch = unpack(job)
        parts, rows, chunk = job.num_parts, job.num_rows, job.chunk_rows
        num_ended = 0
        for k in range(parts):  # first the thread's own part, then what others have left of theirs
            part = (thread + k) % parts
            end = (part + 1) * rows // parts
            start = fetch_add(control, FIRST_PART + part * LINE, chunk)
            while start < end:
                num_ended += run_rows(batch, start, min(start + chunk, end))
                start = fetch_add(control, FIRST_PART + part * LINE, chunk)
        fetch_add(control, ENDED, num_ended)
        if thread == 0:
            control[CALLER] = 0
            return settle(control, num_spins)
        fetch_add(control, ACTIVE, -1)


@njit
def scalar_row(array, row):
    """Where `observe` writes if an observation is one number: a view of length 1."""
    return array[row : row + 1]


@njit
def array_row(array, row):
    """Row of a batch of arrays, as a view; of a batch of numbers, the number."""
    return array[row]


@njit
def step_with_params(state, action, rng, params):
    """Call a step kernel that takes a parameter record."""
    return kernel(state, action, rng, params[0])


@njit
def step_without_params(state, action, rng, params):
    """Call a step kernel that takes none."""
    return kernel(state, action, rng)


@njit
def pair_with_params(state, other, params):
    """Call any other kernel that takes a parameter record."""
    return kernel(state, other, params[0])


@njit
def pair_without_params(state, other, params):
    """Call any other kernel that takes none."""
    return kernel(state, other)


@njit
def no_mask(state, out, *params):
    """Stand in for the action mask of an env that has none."""
