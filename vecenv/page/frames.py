"""Pictures of an episode, kept within a number of bytes, as data URIs."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

from vecenv.cage.canvas import pillow

__all__ = ["Frames", "check_frame"]

_EXACT: dict[str, Any] = {"lossless": True, "quality": 90, "method": 2}
_LOSSY: dict[str, Any] = {"quality": 55, "method": 2}


class Frames:
    """Encodes pictures as they arrive, and keeps only the encoded ones.

    They are exact while they fit. If they do not fit, all are encoded again with losses. If that is
    not enough, only every second picture is kept, or every fourth, and so on; the last picture is
    always kept.

    Attributes:
        stride: 1, or n if every n-th picture is kept.
        is_exact: Whether no picture has been encoded with losses.
        shape: Height and width; None before the first picture.
    """

    def __init__(self) -> None:
        self.stride = 1
        self.is_exact = True
        self.shape: tuple[int, int] | None = None
        self._files: list[bytes] = []  # empty where the previous picture stays
        self._latest: Any = None

    @property
    def size(self) -> int:
        """Their bytes in the page."""
        return sum(45 + (len(file) + 2) // 3 * 4 if file else 2 for file in self._files)

    def add(self, frame: np.ndarray) -> None:
        """Append a picture.

        Args:
            frame: uint8 (height, width, 3), all of one size; copied.

        Raises:
            ValueError: The picture has another form.
        """
        frame = check_frame(frame)
        if self.shape is None:
            self.shape = frame.shape[:2]
        elif frame.shape[:2] != self.shape:
            raise ValueError(
                f"the env drew a picture of {frame.shape[1]} x {frame.shape[0]} after ones of "
                f"{self.shape[1]} x {self.shape[0]}; expected all of one size"
            )
        stays = self.is_exact and self._latest is not None and np.array_equal(frame, self._latest)
        is_kept = len(self._files) % self.stride == 0 and not stays
        self._latest = frame.copy()
        options = _EXACT if self.is_exact else _LOSSY
        self._files.append(_encoded(frame, options) if is_kept else b"")

    def shrink(self, room: int) -> None:
        """Reduce all pictures to at most `room` bytes, as far as a single picture allows."""
        if self.is_exact and self.size > room:
            self.is_exact, latest, files = False, b"", self._files
            self._files = []
            for file in files:
                latest = _encoded(_decoded(file), _LOSSY) if file else latest
                self._files.append(latest)
        while self.stride < len(self._files) and self.size > room:
            self.stride *= 2
            self._files = [x if k % self.stride == 0 else b"" for k, x in enumerate(self._files)]

    def to_list(self, room: int) -> list[str | int]:
        """Return the data URI of each picture, or 0 where the previous one stays.

        Before, they are reduced to `room` bytes; the last one is always kept.
        """
        self.shrink(room)
        if self.stride > 1 and not self._files[-1]:
            self._files[-1] = _encoded(self._latest, _LOSSY)
        head = "data:image/webp;base64,"
        return [head + base64.b64encode(x).decode("ascii") if x else 0 for x in self._files]


def check_frame(frame: Any) -> np.ndarray:
    """Return a picture that an env drew, uint8 (height, width, 3).

    Raises:
        ValueError: It has another form.
    """
    array = np.asarray(frame)
    if array.ndim == 3 and array.shape[2] == 4 and array.dtype == np.uint8:
        array = array[:, :, :3]
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
        raise ValueError(
            f"the env drew {array.dtype} {array.shape}, expected a picture uint8 (height, width, 3)"
        )
    return array


def _encoded(pixels: np.ndarray, options: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    pillow().Image.fromarray(pixels).save(stream, format="WEBP", **options)
    return stream.getvalue()


def _decoded(file: bytes) -> np.ndarray:
    return np.asarray(pillow().Image.open(io.BytesIO(file)).convert("RGB"))
