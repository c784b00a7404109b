"""A drawing surface with the few shapes of network pictures, and GIF animations of the pictures.

Only this module uses Pillow, which the extra `plots` installs. Nothing here needs a display.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from vecenv.files import require_writable, whole_file

_SCALE = 2  # pictures are drawn larger by this factor, then reduced: smooth edges
_NUM_COLORS = 255  # of an animation; GIF needs one more colour for unchanged pixels


@functools.cache
def pillow() -> Any:
    """Return the Pillow modules that this module uses.

    Raises:
        ImportError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise ImportError(
            "pictures need Pillow, which is not installed; install the extra `plots`: "
            'pip install "vecenv[plots]"'
        ) from error
    return SimpleNamespace(Image=Image, ImageDraw=ImageDraw, ImageFont=ImageFont)


@functools.cache
def _font(size: int) -> Any:
    return pillow().ImageFont.load_default(size * _SCALE)


class Canvas:
    """A picture to draw on; lengths are pixels, colours "#rrggbb".

    Args:
        width: In pixels.
        height: In pixels.
        background: Colour of the background.
    """

    def __init__(self, width: int, height: int, background: str) -> None:
        self.width, self.height = width, height
        size = (width * _SCALE, height * _SCALE)
        self._image = pillow().Image.new("RGB", size, background)
        self._draw = pillow().ImageDraw.Draw(self._image)

    def box(
        self,
        place: tuple[float, float, float, float],
        fill: str | None = None,
        *,
        outline: str | None = None,
        line: float = 1.0,
        radius: float = 0.0,
    ) -> None:
        """Draw a box with round corners; `place` is left, top, width, height."""
        left, top, width, height = (value * _SCALE for value in place)
        corners = (left, top, left + width - 1, top + height - 1)
        self._draw.rounded_rectangle(corners, radius * _SCALE, fill, outline, round(line * _SCALE))

    def text(
        self, x: float, y: float, words: str, color: str, *, size: int = 13, bold: bool = False
    ) -> float:
        """Write words with left edge x and middle y; return the x of their right edge."""
        place, how = (x * _SCALE, y * _SCALE), {"anchor": "lm", "stroke_fill": color}
        stroke = 0.3 * _SCALE if bold else 0
        self._draw.text(place, words, color, _font(size), stroke_width=stroke, **how)
        return x + self.text_width(words, size=size)

    def text_width(self, words: str, *, size: int = 13) -> float:
        """Return the width of words."""
        return self._draw.textlength(words, _font(size)) / _SCALE

    def pill(
        self,
        x: float,
        y: float,
        words: str,
        color: str,
        fill: str,
        *,
        size: int = 11,
        outline: str | None = None,
    ) -> float:
        """Write words on a round box with left edge x and middle y; return its right edge."""
        width, height = self.text_width(words, size=size) + size, size + 7
        place = (x, y - height / 2, width, height)
        self.box(place, fill, outline=outline, radius=height / 2)
        self.text(x + size / 2, y, words, color, size=size)
        return x + width

    def to_array(self) -> np.ndarray:
        """Return the picture, uint8 (height, width, 3)."""
        return np.array(self._image.reduce(_SCALE))


def require_gif(path: str | Path) -> None:
    """Check, before any frame is made, that an animation can be written.

    Raises:
        ValueError: The file name does not end in .gif.
        OSError: The file can't be written.
    """
    if Path(path).suffix.lower() != ".gif":
        raise ValueError(f"the animation's file is {str(path)!r}, expected an ending of .gif")
    require_writable(Path(path))


def save_gif(frames: Iterable[np.ndarray], path: str | Path, *, fps: float = 2.0) -> None:
    """Write a GIF animation that repeats forever.

    Args:
        frames: Pictures uint8 (height, width, 3), all of one size.
        path: File to write; an existing file is replaced.
        fps: Pictures per second; the last picture stays for two seconds more.

    Raises:
        ValueError: There is no picture, or `fps` is not positive.
    """
    if not fps > 0:
        raise ValueError(f"fps is {fps!r}, expected a positive number")
    pictures = _with_one_palette(frames)
    if not pictures:
        raise ValueError("frames is empty, expected at least one picture")
    milliseconds = [round(1000 / fps)] * len(pictures)
    milliseconds[-1] += 2000
    with whole_file(path) as aside:
        # `optimize` writes only what changes.
        how: Any = {"format": "GIF", "save_all": True, "loop": 0, "optimize": True}
        pictures[0].save(aside, append_images=pictures[1:], duration=milliseconds, **how)


def _with_one_palette(frames: Iterable[np.ndarray]) -> list[Any]:
    """Reduce pictures to one palette, so that unchanged pixels are equal in all of them."""
    pictures, counts = [], Counter[tuple[int, int, int]]()
    for frame in frames:
        picture = pillow().Image.fromarray(frame)
        own = Counter({color: number for number, color in picture.getcolors(frame.size)})
        counts.update(own)
        pictures.append(_reduced(picture, own))
    return [_reduced(picture.convert("RGB"), counts) for picture in pictures]


def _reduced(picture: Any, counts: Counter[tuple[int, int, int]]) -> Any:
    """Reduce a picture to the most frequent colours; those colours stay exact."""
    palette = pillow().Image.new("P", (1, 1))
    palette.putpalette([part for color, _ in counts.most_common(_NUM_COLORS) for part in color])
    return picture.quantize(palette=palette, dither=0)
