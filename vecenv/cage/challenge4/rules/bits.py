"""Sets of at most 16 hosts in the bits of an int64. For compiled code."""

import numpy as np
from numba import njit

_MEMBERS_OF_BYTE = np.array([bin(byte).count("1") for byte in range(256)], np.int64)
_MEMBERS = [[bit for bit in range(8) if byte >> bit & 1] for byte in range(256)]
_NTH_MEMBER = np.array([[*members, *[0] * 8][:8] for members in _MEMBERS], np.int64)


@njit
def count(members):
    """Number of members, int64, of a set int64 of at most 16."""
    return _MEMBERS_OF_BYTE[members & 255] + _MEMBERS_OF_BYTE[(members >> 8) & 255]


@njit
def nth(members, n):
    """The n-th member (from 0) of a set int64 of at most 16."""
    num_low = _MEMBERS_OF_BYTE[members & 255]
    if n < num_low:
        return _NTH_MEMBER[members & 255, n & 7]
    return _NTH_MEMBER[(members >> 8) & 255, (n - num_low) & 7] + 8


@njit
def put_host(sets, host):
    """Add a host int64 to its subnet's set; `sets` is (subnets,)."""
    sets[host >> 4] = np.int64(sets[host >> 4]) | (1 << (host & 15))


@njit
def drop_host(sets, host):
    """Remove a host int64 from its subnet's set; `sets` is (subnets,)."""
    sets[host >> 4] = np.int64(sets[host >> 4]) & ~(1 << (host & 15))


@njit
def has(members, k):
    """Whether k int64 is in a set int64."""
    return (members >> k) & 1 == 1
