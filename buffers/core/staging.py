"""Host pages on their way to a device: copied in one piece, and written again when that is done."""

from __future__ import annotations

import torch

__all__ = ["StagingBlock"]


class StagingBlock:
    """Host pages, and their twin on a device.

    Args:
        num_bytes: Of both.
        device: Where the twin lies.
        is_staged: False if the host pages are their own twin.

    Attributes:
        host: uint8 (num_bytes,), pinned if the device is a GPU.
        device: uint8 (num_bytes,) on the device.
    """

    def __init__(self, num_bytes: int, device: torch.device, *, is_staged: bool = True):
        pinned = device.type == "cuda"
        # A device that is the default in a `with` does not count here.
        self.host = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self.device = self.host
        if is_staged:
            self.device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if pinned else None

    @property
    def nbytes(self) -> int:
        """Bytes held, on host and device together."""
        return self.host.nbytes * (1 if self.device is self.host else 2)

    def wait(self) -> None:
        """Wait until the host pages may be written again."""
        if self._copied is not None:
            self._copied.synchronize()

    def upload(self, begin: int, end: int) -> None:
        """Enqueue the copy of bytes begin .. end - 1, if there are two memories."""
        if self.device is not self.host:
            self.device[begin:end].copy_(self.host[begin:end], non_blocking=True)
        if self._copied is not None:  # of the stream that copies, which is that of its device
            self._copied.record(torch.cuda.current_stream(self.device.device))
