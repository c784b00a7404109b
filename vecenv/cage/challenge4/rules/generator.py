"""The network of an episode, drawn as SPEC 2 says. For compiled code."""

import numpy as np
from numba import njit

from vecenv.cage.challenge4.rules.bits import count, nth
from vecenv.cage.challenge4.rules.codes import (
    CON,
    FIRST_SERVER,
    MAX_EXTRAS,
    MAX_SERVERS,
    MAX_USERS,
    NUM_HOSTS,
    NUM_RED,
    OT,
    OZA,
    OZB,
    PUB,
    RED_SUBNETS,
    SSH,
    WEB,
)
from vecenv.jit.random import integers

MIN_USERS, MIN_SERVERS = 3, 1
_NUM_HQ_SUBNETS = 3


@njit
def _draw_services(subnet, rng):
    """Draw the set int64 of services of a host."""
    services = np.int64(SSH)
    if subnet in (OZA, OZB):
        services |= OT
    extras = np.int64(0)  # of web, database, mail
    for _ in range(integers(rng, MAX_EXTRAS + 1)):
        left = 0b111 & ~extras
        extras |= 1 << nth(left, integers(rng, count(left)))
    return services | (extras * WEB)


@njit
def generate(state, rng):
    """Draw a network and the subnets that red agents know; return agent 0's host int64."""
    for host in range(NUM_HOSTS):
        state.services[host] = 0
    for subnet in range(NUM_HOSTS // 16):
        num_users = MIN_USERS + integers(rng, MAX_USERS - MIN_USERS + 1)
        num_servers = MIN_SERVERS + integers(rng, MAX_SERVERS - MIN_SERVERS + 1)
        state.num_users[subnet], state.num_servers[subnet] = num_users, num_servers
        users, servers = (1 << num_users) - 1, (1 << num_servers) - 1
        state.exists[subnet] = users | (servers << FIRST_SERVER)
        for k in range(num_users):
            state.services[subnet * 16 + k] = _draw_services(subnet, rng)
        for k in range(FIRST_SERVER, FIRST_SERVER + num_servers):
            state.services[subnet * 16 + k] = _draw_services(subnet, rng)
    for agent in range(NUM_RED - 1):
        state.known_subnets[agent] = RED_SUBNETS[agent]
    state.known_subnets[NUM_RED - 1] = 1 << (PUB + integers(rng, _NUM_HQ_SUBNETS))
    hosts = np.int64(state.exists[CON])
    return np.int64(CON * 16) + nth(hosts, integers(rng, count(hosts)))
