"""The generators of buffers: one stream of random words on the host, torch's on devices."""

from __future__ import annotations

import numpy as np
import torch

from buffers.core.errors import BufferMisuseError

__all__ = ["DeviceGenerator", "HostGenerator", "other_generator"]

_NUM_WORDS = 624
_MT19937 = np.dtype([("seed", "<u8"), ("left", "<i4"), ("is_seeded", "<i4"), ("place", "<u8")])


class HostGenerator:
    """The random stream of compiled code.

    Args:
        seed: None takes entropy of the system.

    Attributes:
        words: uint64 (2,), key and counter, see `core.kernels`; kernels advance the counter.
    """

    def __init__(self, seed: int | None):
        self.words = np.array([_seed_word(seed), 0], np.uint64)

    def get_state(self) -> np.ndarray:
        """Return the state, uint64 (2,); a copy."""
        return self.words.copy()

    def accepts_state(self, state: np.ndarray) -> bool:
        """Whether `set_state` accepts the state."""
        return (state.dtype, state.shape) == (self.words.dtype, self.words.shape)

    def set_state(self, state: np.ndarray) -> None:
        """Continue from a state of `get_state`."""
        self.words[:] = state


class DeviceGenerator:
    """The random stream of a device, with the methods of `HostGenerator`.

    Attributes:
        torch: The generator of torch.
    """

    def __init__(self, seed: int | None, device: torch.device):
        self.torch = torch.Generator(device)
        self.torch.manual_seed(int(_seed_word(seed) >> np.uint64(1)))

    def get_state(self) -> np.ndarray:
        """Return the state, uint8 (K,); a copy."""
        return self.torch.get_state().numpy().copy()

    def accepts_state(self, state: np.ndarray) -> bool:
        """Whether `set_state` accepts the state.

        On the CPU torch does not check the place of the next word among its 624 words; this does.
        """
        own = self.get_state()
        if (state.dtype, state.shape) != (own.dtype, own.shape):
            return False
        try:
            torch.Generator(self.torch.device).set_state(torch.from_numpy(state.copy()))
        except RuntimeError:
            return False
        if self.torch.device.type != "cpu":
            return True
        _, left, is_seeded, place = np.frombuffer(state.tobytes(), _MT19937, 1)[0].tolist()
        # All words are used, or place and number of words left agree; `left` counts the next one.
        fits = 1 <= left <= _NUM_WORDS and place == _NUM_WORDS + 1 - left
        return is_seeded == 1 and (fits or (left, place) == (1, 0))

    def set_state(self, state: np.ndarray) -> None:
        """Continue from a state of `get_state`."""
        self.torch.set_state(torch.from_numpy(state.copy()))


def _seed_word(seed: int | None) -> np.uint64:
    return np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]


def other_generator() -> BufferMisuseError:
    """Return the error for a state whose generator can't be restored here."""
    return BufferMisuseError(
        "state has a generator of another device, or none that works; load it into a buffer on the "
        "device it was made on"
    )
