"""Every draw of the rules: from the env's own random stream, or from a recorded tape.

`chance` is (rng, tape). In ordinary runs the tape is None; the compiler then drops what reads it.
A tape is a pair (entries TAPE_DTYPE (L,), cursor record CURSOR_DTYPE). Each draw must match the
next entry's site, actor and number of choices. The cursor records the first mismatch; that draw
and all later ones give 0, or the nearest possible value.
"""

import numpy as np
from numba import njit

from vecenv.cage.challenge4.rules import codes
from vecenv.cage.challenge4.rules.state import nth
from vecenv.jit.random import integers, integers_at, uniform, uniform_at

TAPE_DTYPE = np.dtype(
    [("site", np.uint8), ("actor", np.uint8), ("n", np.uint8), ("value", np.float32)], align=True
)
CURSOR_DTYPE = np.dtype(
    [
        ("position", np.int64),
        ("end", np.int64),  # of this step's draws
        ("num_wrong", np.int64),
        # of the first wrong draw: where, what the rules asked for
        ("wrong_position", np.int64),
        ("wrong_site", np.int64),
        ("wrong_actor", np.int64),
        ("wrong_n", np.int64),
    ],
    align=True,
)


@njit
def _read(tape, site, actor, n):
    """Value float64 of the next entry, -1.0 if the entry does not match this draw."""
    if tape is None:  # never called so, but Numba compiles the calls
        return -1.0
    else:
        entries, cursor = tape
        position = cursor.position
        if position < cursor.end and cursor.num_wrong == 0:
            entry = entries[position]
            cursor.position = position + 1
            if entry.site == site and entry.actor == actor and entry.n == n:
                return np.float64(entry.value)
        if cursor.num_wrong == 0:
            cursor.wrong_position = position
            cursor.wrong_site = site
            cursor.wrong_actor = actor
            cursor.wrong_n = n
        cursor.num_wrong += 1
        return -1.0


@njit
def _is_next(tape, site):
    """Whether the next entry of a tape, if there is one, is of this site."""
    if tape is None:
        return False
    else:
        entries, cursor = tape
        return cursor.position < cursor.end and entries[cursor.position].site == site


@njit
def _next_slot(state):
    slot = np.int64(state.num_slots)
    state.num_slots = slot + 1
    return slot


@njit
def draw_index(chance, site, actor, n):
    """Draw an int64, uniform in [0, n)."""
    rng, tape = chance
    if tape is None:
        return integers(rng, n)
    index = np.int64(_read(tape, site, actor, n))
    return index if 0 <= index < n else np.int64(0)


@njit
def draw_unit(chance, site, actor):
    """Draw a float64, uniform in [0, 1)."""
    rng, tape = chance
    return uniform(rng) if tape is None else max(_read(tape, site, actor, 0), 0.0)


@njit
def draw_unused(chance, site, actor):
    """Skip a draw that changes nothing and exists only on tapes."""
    if chance[1] is not None:
        _read(chance[1], site, actor, 0)


@njit
def draw_cell(chance, actor, variant, own):
    """Draw one of the filled cells, int64, for a state of a red variant (SPEC_RED 7.5)."""
    rng, tape = chance
    n, cell = codes.NUM_CELLS[variant, own], np.int64(0)
    if tape is None:
        value = uniform(rng)
        while cell < n - 1 and value >= codes.CELL_CUMULATIVE[variant, own, cell]:
            cell += 1
        return cell
    cell = np.int64(_read(tape, codes.FSM_ACTION, actor, n))
    return cell if 0 <= cell < n else np.int64(0)


@njit
def draw_pid_step(chance, actor):
    """Draw the distance int64 of a new process id from the largest one, 1..9."""
    rng, tape = chance
    if tape is None:
        return integers(rng, codes.MAX_PID_STEP) + 1
    value = np.int64(_read(tape, codes.PID, actor, codes.MAX_PID_STEP))
    return value if 1 <= value <= codes.MAX_PID_STEP else np.int64(1)


@njit
def draw_decoy(chance, site, actor, possible, n):
    """Draw one of the n decoys in the set `possible` int64."""
    rng, tape = chance
    if tape is None:
        return nth(possible, integers(rng, n))
    decoy = np.int64(_read(tape, site, actor, n))
    is_possible = 0 <= decoy < codes.NUM_DECOYS and (possible >> decoy) & 1 == 1
    return decoy if is_possible else np.int64(codes.NUM_DECOYS - 1)


@njit
def draw_port(state, chance, actor):
    """Draw a port int64 that only raw observations show; tapes may lack it."""
    rng, tape = chance
    if _is_next(tape, codes.PORT):
        return np.int64(_read(tape, codes.PORT, actor, 0))
    num_ports = np.int64(codes.PORT_STOP - codes.FIRST_PORT)
    return codes.FIRST_PORT + integers_at(rng, _next_slot(state), num_ports)


@njit
def draw_hop(state, chance, actor):
    """Draw a float64 for the alarm of a node that only raw observations show."""
    if chance[1] is None:
        return uniform_at(chance[0], _next_slot(state))
    return draw_unit(chance, codes.SSH_HOP, actor)
