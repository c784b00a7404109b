"""RecordVideo: record episodes of one env in files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.error import AlreadyPendingCallError

from vecenv.core.arguments import read_count
from vecenv.core.base import VecEnv
from vecenv.wrappers.base import Part, VecWrapper

__all__ = ["RecordVideo"]


class RecordVideo(VecWrapper):
    """Films one of the envs, and writes each recording to a GIF file.

    A recording begins with an episode for which `episode_trigger` is true, and ends with it, or has
    `video_length` frames, if that is given. The frames are rendered after the env's resets and
    steps. Under SAME_STEP the env is reset in the step that ends an episode, so the last frame of
    an episode is missing. `render` of a vector env renders all envs, so filmed steps are slow.

    With `send` and `recv` a frame is taken whenever the env comes back and no other env is in
    flight, as envs in flight can't be rendered; the other frames are counted in `num_missed`.

    Args:
        env: The vector env; its `render_mode` is "rgb_array".
        video_folder: Folder for the files; it is created.
        episode_trigger: Called with the number of an episode of the env, from 0; None for the cubes
            0, 1, 8, 27, ... and then every 1000th.
        video_length: Number of frames of a recording; None for whole episodes.
        name_prefix: Files are `{name_prefix}-episode-{number}.gif`.
        fps: Frames per second; None for `metadata["render_fps"]`, or 30.
        env_id: The env to film, or the row of an agent, whose game is filmed then.

    Attributes:
        paths: The files written so far.
        num_missed: Frames that could not be taken.

    Raises:
        ValueError: The envs do not render pictures, or an argument is out of range.
        OSError: A file can't be written.
        ImportError: Pillow is not installed (the extra `plots`).
    """

    def __init__(
        self,
        env: VecEnv,
        video_folder: str | Path,
        *,
        episode_trigger: Callable[[int], bool] | None = None,
        video_length: int | None = None,
        name_prefix: str = "rl-video",
        fps: float | None = None,
        env_id: int = 0,
    ) -> None:
        from vecenv.cage.canvas import pillow

        name = type(self).__name__
        super().__init__(env)
        if env.render_mode != "rgb_array":
            raise ValueError(
                f"{name} needs envs that render pictures: make them with render_mode='rgb_array' "
                f"(theirs is {env.render_mode!r})"
            )
        if not 0 <= env_id < self.num_envs:
            raise ValueError(f"{name}: env_id is {env_id}, expected 0 to {self.num_envs - 1}")
        if video_length is not None:
            read_count(f"{name}: video_length", video_length)
        if fps is not None and not fps > 0:
            raise ValueError(f"{name}: fps is {fps}, expected a number above 0")
        self._prefix = Path(video_folder) / name_prefix
        self._prefix.parent.mkdir(parents=True, exist_ok=True)
        pillow()  # raises if it is missing
        self._episode_trigger = episode_trigger or _is_cube
        self._length, self._env_id, self._episode = video_length, env_id, -1
        self._fps = float(fps or self.metadata.get("render_fps") or 30)
        self._frames: list[np.ndarray] = []
        self._file: Path | None = None  # of the current recording
        self.paths: list[Path] = []
        self.num_missed = 0

    def restart(self, rows: np.ndarray) -> None:
        """Begin an episode, if the filmed env is among the rows."""
        if rows[self._env_id]:
            self._begin_episode()
            self._take_frame()

    def infos(self, infos: dict[str, Any], rewards: np.ndarray, part: Part) -> dict[str, Any]:
        """Take a frame, if the filmed env is among the rows."""
        for begins in part.begins[np.arange(self.num_envs)[part.rows] == self._env_id]:
            if begins:
                self._begin_episode()
            self._take_frame()
        return infos

    def _begin_episode(self) -> None:
        self._episode += 1
        if self._length is None:
            self._stop()
        if self._episode_trigger(self._episode):
            self._stop()
            self._file = Path(f"{self._prefix}-episode-{self._episode}.gif")

    def _take_frame(self) -> None:
        if self._file is None:
            return
        try:
            frames: Any = self.env.render()
        except AlreadyPendingCallError:
            self.num_missed += 1
            return
        from vecenv.page import check_frame

        frame = frames[
            self._env_id * len(frames) // self.num_envs
        ]  # of the game, if rows are agents
        self._frames.append(check_frame(frame).copy())
        if len(self._frames) == self._length:
            self._stop()

    def _stop(self) -> None:
        """Write the current recording, if there is one."""
        frames, self._frames, path, self._file = self._frames, [], self._file, None
        if frames and path is not None:
            from vecenv.cage.canvas import save_gif

            save_gif(frames, path, fps=min(self._fps, 50.0))  # viewers slow down faster ones
            self.paths.append(path)

    def close(self, **kwargs: Any) -> None:
        """Write the current recording and close the env; may be called twice."""
        try:
            self._stop()
        finally:
            super().close(**kwargs)


def _is_cube(episode: int) -> bool:
    """Whether an episode is filmed by default."""
    return episode % 1000 == 0 if episode >= 1000 else round(episode ** (1 / 3)) ** 3 == episode
