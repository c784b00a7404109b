"""Which actions do something (SPEC 10.2). For compiled code."""

import numpy as np
from numba import njit

from vecenv.cage.challenge4.rules.codes import HOSTS_PER_SUBNET, NUM_ACTIONS, NUM_BLUE, NUM_ZONES
from vecenv.cage.challenge4.rules.observation import BLUE_SUBNET_ORDER, vector_order

_SIZES = np.array(NUM_ACTIONS, np.int64)


@njit
def _write_hosts(out, start, bits):
    for i in range(HOSTS_PER_SUBNET):
        out[start + i] = (bits >> i) & 1 == 1


@njit
def mask_agent(state, agent, out, width):
    """Write which of an agent's actions do something.

    Args:
        state: STATE_DTYPE record.
        agent: 0 to 4.
        out: bool (width,), or longer: what follows is true, as any message may be sent.
        width: int64, 82 or 242; more than the agent has for padding, which is false.
    """
    num = 3 if agent == NUM_BLUE - 1 else 1
    size = HOSTS_PER_SUBNET * num
    traffic = 2 * (NUM_ZONES - 1) * num
    for place in range(out.shape[0]):
        out[place] = place < _SIZES[agent] or place >= width
    for unit in range(num):
        exists = vector_order(np.int64(state.exists[BLUE_SUBNET_ORDER[agent + unit]]))
        start = HOSTS_PER_SUBNET * unit
        _write_hosts(out, start, exists)
        _write_hosts(out, size + 1 + start, exists)
        _write_hosts(out, 2 * size + 1 + start, exists)
        _write_hosts(out, 3 * size + 2 + traffic + start, exists)


@njit
def mask_all(state, out):
    """Write the masks of all agents, 570 values one after the other; what follows is true."""
    start = np.int64(0)
    for agent in range(NUM_BLUE):
        width = _SIZES[agent]
        mask_agent(state, agent, out[start : start + width], width)
        start += width
    for place in range(start, out.shape[0]):
        out[place] = True  # messages
