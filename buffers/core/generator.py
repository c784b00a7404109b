"""The generators of buffers: one stream of random words on the host, torch's on devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from buffers.core.errors import BufferMisuseError

__all__ = ["DeviceGenerator", "HostGenerator", "other_generator", "restore_generator"]

_NUM_WORDS = 624
_MT19937 = np.dtype([("seed", "<u8"), ("left", "<i4"), ("is_seeded", "<i4"), ("place", "<u8")])


class HostGenerator:
    """The random stream of compiled code.

    Args:
        seed: None takes entropy of the system.
        saved_as: Dtype of its two words in a state.

    Attributes:
        words: uint64 (2,), see `core.kernels`; kernels move it on.
    """

    def __init__(self, seed: int | None, saved_as: type = np.uint8):
        self.words = np.array([_seed_word(seed), 0], np.uint64)
        self._saved_as = saved_as

    def get_state(self) -> np.ndarray:
        """Where it stands, as an array; a copy."""
        return self.words.view(self._saved_as).copy()

    def accepts_state(self, state: np.ndarray) -> bool:
        """Whether `set_state` would take it."""
        own = self.words.view(self._saved_as)
        return (state.dtype, state.shape) == (own.dtype, own.shape)

    def set_state(self, state: np.ndarray) -> None:
        """Continue where another generator stood."""
        self.words[:] = np.ascontiguousarray(state).view(np.uint64)


class DeviceGenerator:
    """The random stream of a device; the methods are those of the other.

    Attributes:
        torch: The generator itself.
    """

    def __init__(self, seed: int | None, device: torch.device):
        self.torch = torch.Generator(device)
        # States on devices look like that of the host's generator: this tells them apart.
        kind = b"" if device.type == "cpu" else device.type.encode().ljust(8)
        self._kind = np.frombuffer(kind, np.uint8)
        self.torch.manual_seed(int(_seed_word(seed) >> np.uint64(1)))

    def get_state(self) -> np.ndarray:
        """Where it stands, uint8 (K,); a copy."""
        return np.concatenate([self.torch.get_state().numpy(), self._kind])

    def accepts_state(self, state: np.ndarray) -> bool:
        """Whether `set_state` would take it."""
        end = len(state) - len(self._kind)
        return np.array_equal(state[end:], self._kind) and _is_state(state[:end], self.torch)

    def set_state(self, state: np.ndarray) -> None:
        """Continue where another generator stood."""
        restore_generator(self.torch, state[: len(state) - len(self._kind)])


def _seed_word(seed: int | None) -> np.uint64:
    return np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]


def other_generator() -> BufferMisuseError:
    """The error for a state with a generator that ours cannot go on from."""
    return BufferMisuseError(
        "state has a generator of another device, or none that works; load it into a buffer on the "
        "device it was made on"
    )


def _is_state(state: Any, generator: torch.Generator) -> bool:
    """Whether a generator of torch could go on from a state, uint8 (K,).

    On the CPU torch does not look at where in its table of 624 words the next one is taken from.
    """
    own = generator.get_state().cpu().numpy()
    if not isinstance(state, np.ndarray) or (state.dtype, state.shape) != (own.dtype, own.shape):
        return False
    try:
        torch.Generator(generator.device).set_state(torch.from_numpy(state.copy()))
    except RuntimeError:
        return False
    if generator.device.type != "cpu":
        return True
    _, left, is_seeded, place = np.frombuffer(state.tobytes(), _MT19937, 1)[0].tolist()
    # All words are used up, or the place says how many are left; `left` counts the next one, too.
    fits = (left, place) == (1, 0) or (1 <= left <= _NUM_WORDS and place == _NUM_WORDS + 1 - left)
    return is_seeded == 1 and fits


def restore_generator(generator: torch.Generator, state: Any) -> None:
    """Let a generator of torch go on from a state that may come from anybody.

    Args:
        generator: Changed.
        state: uint8 (K,), array or tensor, of `generator.get_state()`.

    Raises:
        BufferMisuseError: It is not the state of a generator of this device.
    """
    found = state.cpu().numpy() if isinstance(state, torch.Tensor) else state
    if not _is_state(found, generator):
        raise BufferMisuseError(
            "the state is not that of a generator of this device; pass what get_state() returned"
        )
    generator.set_state(torch.from_numpy(np.array(found)))
