"""From a snapshot to what people look at: text, a picture, an animation."""

from __future__ import annotations

from typing import Any

from vecenv.cage.challenge2.view.snapshot import Snapshot
from vecenv.cage.challenge2.view.text import overview, to_text

__all__ = ["RENDER_FPS", "RENDER_MODES", "render_snapshot"]

RENDER_MODES = ("ansi", "rgb_array")
RENDER_FPS = 2


def render_snapshot(snapshot: Snapshot, mode: str) -> Any:
    """Return a text (str) for mode "ansi", a picture (uint8, height x width x 3) for "rgb_array".

    Raises:
        ValueError: Unknown mode.
        ImportError: "rgb_array" needs the extra `plots`.
    """
    if mode == "ansi":
        return to_text(overview(snapshot))
    if mode == "rgb_array":
        from vecenv.cage.challenge2.view.picture import draw_snapshot

        return draw_snapshot(snapshot).to_array()
    raise ValueError(f"mode is {mode!r}, expected one of {', '.join(RENDER_MODES)}")
