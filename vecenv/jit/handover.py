"""How a job passes from the thread that calls `step` to helper threads, and back.

The caller publishes a job under a new ticket and opens it. A helper that sees the ticket first
counts itself in and then looks whether the job is (still) open; the caller first closes it and then
waits until nobody is counted in. So no helper ever reads a job that is being changed, and one that
wakes late finds it closed and costs nobody time. Rows are claimed in chunks, so the caller does
whatever helpers do not.
"""

from numba import njit
from numba.np.numpy_support import carray

from vecenv.core.atomics import exchange, fetch_add, load, pause, pointer, store
from vecenv.jit.job import ACTIVE, ENDED, FIRST_PART, LINE, OPEN, STEP, TICKET


@njit
def sleep_word(control, thread):
    """Index of the control word that is 1 while helper `thread` sleeps."""
    num_threads = (control.shape[0] - FIRST_PART) // (2 * LINE)
    return FIRST_PART + (num_threads + thread) * LINE


@njit
def first_invalid_row(actions, bounds):
    """First row of actions (R, ...) with an element out of bounds int64 (2, K), or -1.

    bounds[0] and bounds[1] are the lowest and highest values of the K elements of one action, in C
    order; with K = 0 nothing is checked.
    """
    width = bounds.shape[1]
    if width == 0:
        return -1
    flat = actions.reshape(actions.size)
    num_bad = 0
    if width == 1:
        low, high = bounds[0, 0], bounds[1, 0]
        for k in range(flat.size):
            num_bad += (flat[k] < low) | (flat[k] > high)
    if width == 1 and num_bad == 0:
        return -1
    for k in range(flat.size):
        if flat[k] < bounds[0, k % width] or flat[k] > bounds[1, k % width]:
            return k // width
    return -1


@njit
def copied(actions, address):
    """Copy actions to an address, where there is room for them; return the copy."""
    flat = actions.reshape(actions.size)
    own = carray(pointer(address), (actions.size,), actions.dtype)
    for k in range(flat.size):  # an assignment of arrays would look for overlaps first
        own[k] = flat[k]
    return own.reshape(actions.shape)


@njit
def publish(control, jobs, actions, bounds, obs, rewards, terminations, truncations):
    """Check the actions, fill in the job and, if it has several parts, open it to helpers.

    Actions with bounds are copied, and the copies are checked and used: another thread may change
    the caller's array at any time.

    Args:
        control: Control words int64, see `job`.
        jobs: JOB_DTYPE (1,); op, num_rows, num_parts and chunk_rows are set.
        actions: (R, ...).
        bounds: int64 (2, K), see `first_invalid_row`.
        obs: (R, ...), where the job writes, as the next three.
        rewards: float32 or float64 (R,).
        terminations: bool (R,).
        truncations: bool (R,).

    Returns:
        A bit set of the sleeping helpers to wake (bit t is thread t), or -1 - row if the action of
        that row is out of bounds; the job is not open then.
    """
    job = jobs[0]
    if job.op == STEP:
        if bounds.shape[1] > 0:
            actions = copied(actions, job.own_actions)
        bad_row = first_invalid_row(actions, bounds)
        if bad_row >= 0:
            return -1 - bad_row
    job.actions = actions.ctypes.data
    job.obs = obs.ctypes.data
    is_float32 = rewards.itemsize == 4
    job.rewards32 = rewards.ctypes.data if is_float32 else 0
    job.rewards64 = 0 if is_float32 else rewards.ctypes.data
    job.terminations = terminations.ctypes.data
    job.truncations = truncations.ctypes.data
    store(control, ENDED, 0)
    for part in range(job.num_parts):
        store(control, FIRST_PART + part * LINE, part * job.num_rows // job.num_parts)
    to_wake = 0
    if job.num_parts > 1:
        store(control, OPEN, 1)
        fetch_add(control, TICKET, 1)
        for thread in range(1, job.num_parts):
            if job.may_wake != 0 and exchange(control, sleep_word(control, thread), 0) == 1:
                to_wake |= 1 << thread
    return to_wake


@njit
def join(control, jobs, thread, ticket, num_spins):
    """Wait for a job after the one of `ticket`, and enter it.

    Returns:
        The ticket of the job; or -1 if none came for `num_spins` rounds. Then the helper counts as
        asleep: it must wait for its lock, which the caller of `step` releases for the next job.
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
    """Count out a helper that a kernel's exception threw out of a job."""
    fetch_add(control, ACTIVE, -1)
