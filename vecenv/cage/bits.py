"""Sets in the bits of a byte, as a table."""

import numpy as np

__all__ = ["nth_members_of_bytes"]


def nth_members_of_bytes(dtype: type[np.integer]) -> np.ndarray:
    """Return (256, 8) of a dtype: where the n-th set bit of a byte is; 0 where there is none."""
    table = np.zeros((256, 8), dtype)
    for byte in range(256):
        members = [bit for bit in range(8) if byte >> bit & 1]
        table[byte, : len(members)] = members
    return table
