"""The driver: what one call does to a batch of envs, by the kernels of one kind, on CPU threads.

`run_rows` holds the rules of episodes: autoreset, the limit, which results are written. `attend`
does a job by it: alone, or shared with helper threads.

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

`run_rows`, `unpack` and `attend` are templates: `binding` copies them for each kind of env and
binds their global names to its kernels, dtypes and shapes. `run_rows` also runs uncompiled.
"""

from typing import Any, NamedTuple, cast

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
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
from vecenv.jit.random import RNG_DTYPE, open_block

# Values of `op`: what a call does.
STEP, RESET, OBSERVE, MASK = 0, 1, 2, 3

# The three modes of `gymnasium.vector.AutoresetMode`, as numbers.
NEXT_STEP, SAME_STEP, DISABLED = 0, 1, 2

NO_LIMIT = 2**62

RUN_DTYPE = np.dtype(
    [
        ("seed", np.uint64),
        *((name, RNG_DTYPE[name]) for name in ("key", "counter")),  # the env's random stream
        ("episode_return", np.float64),  # of the current episode
        ("last_return", np.float64),  # of the last episode that ended; NaN before
        ("episode_length", np.int64),
        ("last_length", np.int64),  # 0 before the first episode has ended
        ("num_episodes", np.int32),  # number of ended episodes
        ("episode_over", np.bool_),  # whether the episode ended and no reset followed
    ],
    align=True,
)


class Batch(NamedTuple):
    """The arrays of one call with R rows, of N envs.

    Outputs that the op does not write may have any length; behind the first axis, `obs` and
    `actions` have the shape of their single space.
    """

    op: Any
    autoreset_mode: Any
    max_episode_steps: Any
    states: Any  # (N,) state records
    runs: Any  # (N,) RUN_DTYPE
    params: Any  # (1,) parameter record, or (N,), one per env; unused if the kernels take none
    env_ids: Any  # int64 (R,), or (0,): row i is env i
    actions: Any  # (R, ...)
    obs: Any  # (R, ...)
    rewards32: Any  # float32 (R,) or (0,): unused
    rewards64: Any  # float64 (R,) or (0,): unused
    terminations: Any  # bool (R,)
    truncations: Any  # bool (R,)
    final_obs: Any  # (N, ...), by env; written in SAME_STEP mode only
    masks: Any  # bool (R, A)


# `binding` puts kernels here, and functions from an address and a number of rows to an array.
env_reset = env_step = env_observe = env_action_mask = env_sampler = kernel = cast("Any", None)
obs_row = action_row = allows_something = cast("Any", None)
states_at = runs_at = params_at = actions_at = obs_at = masks_at = cast("Any", None)
int64_at = float32_at = float64_at = bool_at = cast("Any", None)
MASK_STARTS = (0, 0)  # where the parts of a mask begin, and its width


def run_rows(batch, start, stop):
    """Do `batch.op` for rows start <= row < stop; return how many episodes ended.

    For MASK, return the number of rows whose episode goes on, though some part of the action has no
    valid value.
    """
    op, mode, params = batch.op, batch.autoreset_mode, batch.params
    num_ended = 0
    # Unsigned: signed indices might count from the end, which needs a test.
    for row in range(np.uint64(start), np.uint64(stop)):
        env = row
        if batch.env_ids.shape[0] > 0:
            env = np.uint64(batch.env_ids[row])
        state, run = batch.states[env], batch.runs[env]
        if op == MASK:
            mask = batch.masks[row]
            env_action_mask(state, mask, params, env)
            if not allows_something(mask):
                if run.episode_over:  # the action does not matter
                    mask[:] = True
                else:
                    num_ended += 1
            continue
        begins = op == RESET
        if op == STEP:
            reward, terminated, truncated = 0.0, False, False
            begins = mode == NEXT_STEP and run.episode_over
            if not begins:
                open_block(run)  # so draws depend only on the number of steps and resets
                action = action_row(batch.actions, row)
                reward, is_terminal, is_cut = env_step(state, action, run, params, env)
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
                        env_observe(state, obs_row(batch.final_obs, env), params, env)
                        begins = True
            if batch.rewards32.shape[0] > 0:
                batch.rewards32[row] = reward
            else:
                batch.rewards64[row] = reward
            batch.terminations[row] = terminated
            batch.truncations[row] = truncated
        if begins:
            open_block(run)
            env_sampler(run, params, env)  # first: the reset may read the parameters
            env_reset(state, run, params, env)
            run.episode_return = 0.0
            run.episode_length = 0
            run.episode_over = False
        env_observe(state, obs_row(batch.obs, row), params, env)
    return num_ended


@njit(inline="always")  # device functions return no arrays
def scalar_row(array, row):
    """Return the row of a batch of numbers as a view of length 1, for `observe` to write into."""
    return array[row : row + 1]


@njit(inline="always")
def array_row(array, row):
    """Return the row of a batch: a view of arrays, a number of numbers."""
    return array[row]


@njit
def own_params(params, env):
    """Return the parameter record of an env, from (1,) or (N,) records."""
    return params[env if params.shape[0] > 1 else env - env]


# Templates of the calls of kernels from `run_rows`; of a kind without sampler, the last is called.


def _step_with_params(state, action, rng, params, env):
    return kernel(state, action, rng, own_params(params, env))


def _step_without_params(state, action, rng, params, env):
    return kernel(state, action, rng)


def _pair_with_params(state, other, params, env):
    return kernel(state, other, own_params(params, env))


def _pair_without_params(state, other, params, env):
    return kernel(state, other)


def _sample_params(rng, params, env):
    kernel(own_params(params, env), rng)


def _keep_params(rng, params, env):
    pass


def any_in_each_part(mask):
    """Return whether a mask, bool (A,), has a True in each part; it becomes `allows_something`."""
    for part in range(len(MASK_STARTS) - 1):
        has_any = False
        for k in range(MASK_STARTS[part], MASK_STARTS[part + 1]):
            if mask[k]:
                has_any = True
                break
        if not has_any:
            return False
    return True


@njit
def no_mask(state, out, *params):
    """Write nothing: the mask of an env that has none."""


# -- bounds of actions ----------------------------------------------------------------------------


def element_bounds(space: Space) -> np.ndarray:
    """Return lowest and highest value of each element of one action in C order, int64 (2, K).

    K = 0 if any value is allowed. For uint64, values from 2**63 on are not allowed: raises
    ValueError if an element has only such values.
    """
    low: Any
    high: Any
    # In Python ints: NumPy would add uint64 and int64 as float64.
    if isinstance(space, Discrete):
        low, high = int(space.start), int(space.start) + int(space.n) - 1
    elif isinstance(space, MultiDiscrete):
        low = space.start.astype(object)
        high = low + space.nvec.astype(object) - 1
    elif isinstance(space, MultiBinary):
        low, high = np.zeros(space.shape), np.ones(space.shape)
    elif isinstance(space, Box) and np.dtype(space.dtype).kind in "iu":
        low, high = space.low, space.high
    else:
        return np.zeros((2, 0), dtype=np.int64)
    bounds = np.stack([np.asarray(bound).astype(object).reshape(-1) for bound in (low, high)])
    most = np.iinfo(np.int64).max
    if (bounds[0] > most).any():
        raise ValueError(f"the action space {space} begins at 2**63 or above; use smaller numbers")
    return np.minimum(bounds, most).astype(np.int64)


def first_invalid_row(actions: np.ndarray, bounds: np.ndarray) -> int:
    """Return the first row of actions (R, ...) with an element out of bounds int64 (2, K), or -1.

    With K = 1 the bounds are those of all elements; with K = 0 nothing is checked.
    """
    if bounds.shape[1] == 0 or actions.size == 0:
        return -1
    elements = actions.reshape(len(actions), -1)
    is_bad = ((elements < bounds[0]) | (elements > bounds[1])).any(axis=1)
    return int(np.argmax(is_bad)) if is_bad.any() else -1


@njit
def find_invalid_row(elements, bounds, num_rows):
    """Compute `first_invalid_row` of flat actions, for K > 0, in compiled code."""
    size, num_bounds = elements.shape[0], bounds.shape[1]
    if num_bounds == 1:  # one pass compares many at once
        low, high = bounds[0, 0], bounds[1, 0]
        num_bad = 0
        for k in range(size):
            num_bad += (elements[k] < low) | (elements[k] > high)
        if num_bad == 0:
            return -1
    row_size = size // num_rows
    for row in range(num_rows):
        for k in range(row_size):
            bound = k if num_bounds > 1 else 0
            element = elements[row * row_size + k]
            if element < bounds[0, bound] or element > bounds[1, bound]:
                return row
    return -1


# -- jobs -----------------------------------------------------------------------------------------

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
def guessed_params(params, env):
    """Return what `own_params` returns: a processor guesses this branch.

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
