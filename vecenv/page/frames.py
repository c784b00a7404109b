"""Pictures of an episode, kept within a number of bytes, as data URIs."""

from __future__ import annotations

import base64
import io
from typing import Any, NamedTuple

import numpy as np

from vecenv.cage.canvas import pillow

__all__ = ["Frames", "check_frame"]

_KEY_EVERY = 50  # most patches that the page must draw to show a picture
_LOSSY_QUALITY = 55


class _Patch(NamedTuple):
    """A picture, or its changes since the previous one.

    Attributes:
        whole: Whether it is a complete picture.
        x, y: Its upper left corner.
        webp: Content of the file.
    """

    whole: bool
    x: int
    y: int
    webp: bytes


class Frames:
    """Encodes pictures as they arrive, and keeps only the encoded ones.

    They are exact differences while they fit. If they do not fit, all are encoded again with
    losses. If that is not enough, only every second picture is kept, or every fourth, and so on;
    the last picture is always kept.

    Attributes:
        size: Their bytes in the page.
        stride: 1, or n if every n-th picture is kept.
        is_exact: Whether no picture has been encoded with losses.
        shape: Height and width; None before the first picture.
    """

    def __init__(self) -> None:
        self.size = 0
        self.stride = 1
        self.is_exact = True
        self.shape: tuple[int, int] | None = None
        self._patches: list[_Patch | None] = []
        self._latest: Any = None

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
        index = len(self._patches)
        patch = None
        if not self.is_exact:
            patch = _lossy(frame) if index % self.stride == 0 else None
        elif self._latest is None or index % _KEY_EVERY == 0:
            patch = _Patch(True, 0, 0, _webp(frame))
        else:
            patch = _difference(self._latest, frame)
        self._latest = frame.copy()
        self._patches.append(patch)
        self.size += _size_of(patch)

    def shrink(self, room: int) -> None:
        """Reduce all pictures to at most `room` bytes, as far as a single picture allows."""
        if self.size > room and self.is_exact:
            self._encode_with_losses()
        while self.size > room and self.stride < len(self._patches):
            self.stride *= 2
            for index, patch in enumerate(self._patches):
                if patch is not None and index % self.stride:
                    self.size -= _size_of(patch)
                    self._patches[index] = None

    def to_list(self, room: int) -> list[Any]:
        """Return [is whole, x, y, data URI] for each picture, or 0 where the previous one stays.

        Before, they are reduced to `room` bytes; the last one is always kept.
        """
        self.shrink(room)
        if self.stride > 1 and self._patches[-1] is None:
            self._patches[-1] = _lossy(self._latest)
        return [0 if p is None else [int(p.whole), p.x, p.y, _uri(p.webp)] for p in self._patches]

    def _encode_with_losses(self) -> None:
        """Encode all pictures anew, each as a whole."""
        self.is_exact = False
        image = pillow().Image
        exact, self._patches, self.size = self._patches, [], 0
        canvas: Any = None
        for patch in exact:
            if patch is not None:
                piece = image.open(io.BytesIO(patch.webp)).convert("RGBA")
                canvas = piece if patch.whole else canvas
                if not patch.whole:
                    canvas.alpha_composite(piece, (patch.x, patch.y))
            self._patches.append(_lossy(np.asarray(canvas.convert("RGB"))))
            self.size += _size_of(self._patches[-1])


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


def _encoded(pixels: np.ndarray, **options: Any) -> bytes:
    stream = io.BytesIO()
    pillow().Image.fromarray(pixels).save(stream, **options)
    return stream.getvalue()


def _webp(pixels: np.ndarray) -> bytes:
    return _encoded(pixels, format="WEBP", lossless=True, quality=90, method=2)


def _lossy(frame: np.ndarray) -> _Patch:
    return _Patch(True, 0, 0, _encoded(frame, format="WEBP", quality=_LOSSY_QUALITY, method=2))


def _difference(before: np.ndarray, after: np.ndarray) -> _Patch | None:
    """Return the box that has changed, transparent elsewhere; None if nothing has changed."""
    differs = before != after
    changed = differs[..., 0] | differs[..., 1] | differs[..., 2]  # quicker than `any` over three
    rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
    if not len(rows):
        return None
    box = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
    inside = changed[box]
    pixels = np.zeros((*inside.shape, 4), np.uint8)
    pixels[inside, :3] = after[box][inside]
    pixels[inside, 3] = 255
    return _Patch(False, int(columns[0]), int(rows[0]), _webp(pixels))


def _uri(webp: bytes) -> str:
    return "data:image/webp;base64," + base64.b64encode(webp).decode("ascii")


def _size_of(patch: _Patch | None) -> int:
    return 2 if patch is None else 45 + (len(patch.webp) + 2) // 3 * 4
