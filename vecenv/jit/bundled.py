"""What bundled envs share: their class; and pictures of strokes and cells, by NumPy alone."""

from typing import Any

import numpy as np

from vecenv.jit.env import JitVectorEnv
from vecenv.jit.kernels import EnvKernels, read_params

PICTURES = {"render_modes": ["rgb_array"], "render_fps": 10}  # metadata of envs drawn here
Point = tuple[float, float]  # x to the right, y downwards, in pixels
Color = tuple[int, int, int]


class BundledVectorEnv(JitVectorEnv):
    """Many envs of one bundled kind.

    Args:
        num_envs: Number of envs.
        **options: Parameters of the kind by name, for all envs; and those of `JitVectorEnv`.

    Attributes:
        kind: The kernels, whose `params` are the defaults.
        length: The usual limit of episodes.
        fps: Pictures per second of an animation.
    """

    metadata: dict[str, Any] = PICTURES
    kind: EnvKernels
    length: int | None = None
    fps: int

    def __init_subclass__(cls) -> None:
        if "fps" in vars(cls):
            cls.metadata = {**cls.metadata, "render_fps": cls.fps}

    def __init__(self, num_envs: int = 1, **options: Any) -> None:
        kind = self.kind
        if kind.params is not None:
            names = options.keys() & set(kind.params.dtype.names)
            given = {name: options.pop(name) for name in names}
            kind = kind.having(params=read_params(kind, given, 1, per_env=False))
        super().__init__(kind, num_envs, **{"max_episode_steps": self.length, **options})


def draw_stroke(picture: np.ndarray, start: Point, end: Point, width: float, color: Color) -> None:
    """Draw a line with round ends and soft edges; a disc if start and end are one point."""
    reach = width / 2 + 1.0
    box = []  # rows and columns of the picture that the line may touch
    for k, most in ((1, picture.shape[0]), (0, picture.shape[1])):
        low, high = min(start[k], end[k]) - reach, max(start[k], end[k]) + reach
        box.append(slice(min(max(int(low), 0), most), min(max(int(high) + 1, 0), most)))
    part = picture[tuple(box)]
    rows, columns = np.mgrid[tuple(box)] + 0.5
    (x, y), dx, dy = start, end[0] - start[0], end[1] - start[1]
    length = max(dx * dx + dy * dy, 1e-9)
    along = np.clip(((columns - x) * dx + (rows - y) * dy) / length, 0.0, 1.0)
    distance = np.hypot(columns - x - along * dx, rows - y - along * dy)
    share = np.clip(width / 2 + 0.5 - distance, 0.0, 1.0)[..., None]
    part[:] = np.rint(part * (1.0 - share) + np.asarray(color) * share)


def enlarge(cells: np.ndarray, size: int, line: Color | None = None) -> np.ndarray:
    """Return a picture with a square for each cell's colour, uint8 (rows, columns, 3).

    Args:
        cells: Colours.
        size: Edge of a square, in pixels.
        line: Colour of the lines between squares; None for no lines.
    """
    picture = cells.repeat(size, axis=0).repeat(size, axis=1)
    if line is not None:
        picture[::size] = picture[:, ::size] = line
    return picture
