"""Shows any env while a policy plays: as text in the terminal, or as an animated picture."""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.error import DependencyNotInstalled
from gymnasium.vector import AutoresetMode
from rich.console import Console
from rich.live import Live
from rich.text import Text

from vecenv.command import progress_bar
from vecenv.compare.source import EnvSource, read_env_kwargs, read_source
from vecenv.core.base import VecEnv
from vecenv.core.importing import import_object
from vecenv.core.random_actions import RandomActions
from vecenv.make import COMPILED_TWINS, has_compiled_envs, make_vec
from vecenv.page.episode import EpisodePage, record, takes_report
from vecenv.page.frames import check_frame
from vecenv.page.human import Game, env_orders, serve
from vecenv.page.names import action_names

__all__ = [
    "PAGE_FPS",
    "frame_of",
    "new_page",
    "page_fps",
    "play_as_human",
    "progress_of",
    "record_env",
    "save_page",
    "serve_game",
    "show",
    "show_texts",
]

PAGE_FPS = 10.0  # at most, of a page to scrub through, where actions are to be seen


def show(
    env: str,
    env_kwargs: Sequence[str],
    gif: Path | None,
    html: Path | None,
    fps: float | None,
    **play: Any,
) -> int:
    """Do what `vecenv watch` does for envs other than CAGE 2.

    Args:
        env: See `vecenv.compare.source.read_source`.
        env_kwargs: "name=value".
        gif: File for an animation.
        html: File for a page.
        fps: Pictures per second; None for those of the env.
        **play: `policy` is "random" or None, or "module:function": a function from observations
            (1, ...) to actions (1, ...); `num_steps`; `seed` of the env and of random actions.

    Raises:
        ValueError: The env does not render so, or the name of the file does not end in .gif.
        OSError: The file can't be written.
        ImportError: Pictures need the extra `plots`.
    """
    kwargs = read_env_kwargs(env_kwargs)
    policy = play["policy"]
    if policy not in (None, "random") and Path(policy).exists():
        raise ValueError(
            f"policy is {policy!r}, a file or folder; watch takes 'random' or 'module:function'. A "
            f"trained policy is shown by: vecenv play {env} --policy {policy} --html episode.html "
            "(or --gif episode.gif, or --text)"
        )
    if html is not None:
        page = new_page(env, play["policy"] or "random", play["seed"])
        with progress_of(page, play["num_steps"]):
            record_env(page, env, kwargs, fps=fps, **play)
        save_page(page, html)
        if gif is None:
            return 0
    from vecenv.cage.canvas import require_gif, save_gif

    if gif is not None:
        require_gif(gif)
    render_mode = "ansi" if gif is None else "rgb_array"
    envs = _make(read_source(env, kwargs), render_mode)
    try:
        fps = fps or float(envs.metadata.get("render_fps") or 10)
        frames = _play_frames(envs, env, render_mode, **play)
        if gif is None:
            show_texts(frames, fps)
            return 0
        save_gif(frames, gif, fps=fps)
    finally:
        envs.close()
    _say(f"animation: {gif}")
    return 0


def _play_frames(
    envs: VecEnv, env: str, render_mode: str, *, policy: str | None, num_steps: int, seed: int
) -> Iterator[Any]:
    """Yield what an env renders after a reset and after each step; episodes follow each other."""
    act, see = _find_policy(policy, envs, seed)
    obs, infos = envs.reset(seed=seed)
    yield frame_of(envs, env, render_mode)
    for _ in range(num_steps):
        see(obs, infos)
        obs, *_, infos = envs.step(act(obs))
        yield frame_of(envs, env, render_mode)


def new_page(env: str, policy: str, seed: int, fps: float = PAGE_FPS, **about: str) -> EpisodePage:
    """Return an empty page for an episode of an env."""
    facts = {"policy": policy, **about, "seed": str(seed)}
    return EpisodePage(f"{env}, an episode", facts, fps=fps)


def page_fps(envs: Any) -> float:
    """Return how many steps per second a page shows: as many as the env asks for, at most 10."""
    return min(PAGE_FPS, float(envs.metadata.get("render_fps") or PAGE_FPS))


@contextlib.contextmanager
def progress_of(page: EpisodePage, num_steps: int) -> Iterator[None]:
    """Show on a terminal how far the recording of a page is."""
    with progress_bar() as bar:
        task = bar.add_task("making the env", total=num_steps + 1)
        page.on_show = lambda: bar.update(task, advance=1, description="playing and drawing")
        yield


def save_page(page: EpisodePage, path: Path) -> None:
    """Write a page, and say where it is and what was left out."""
    page.save(path)
    size = f"{path.stat().st_size / 1e6:.2f} MB" if path.is_file() else ""
    words = f"page: {path} ({page.num_steps} steps{size and ', ' + size}); open it in a browser"
    for line in (words, *page.notes()):
        _say(line)


def record_env(
    page: EpisodePage,
    env: str,
    env_kwargs: Mapping[str, Any],
    *,
    policy: str | None = None,
    num_steps: int = 50,
    seed: int = 0,
    fps: float | None = None,
) -> None:
    """Play one episode of an env into a page; `policy`, `num_steps` and `seed` as for `show`."""
    envs = _make(read_source(env, env_kwargs), "rgb_array")
    page.fps = fps or page_fps(envs)
    try:
        chosen, see = _find_policy(policy, envs, seed)
        gives = takes_report(chosen)

        def act(obs: Any, is_first: bool, report: dict[str, Any]) -> Any:
            return chosen(obs, **({"report": report} if gives else {}))

        names = action_names(envs, env)
        picture = functools.partial(frame_of, envs, env, "rgb_array")
        record(page, envs, act, names, picture, seed=seed, num_steps=num_steps, see=see)
    finally:
        envs.close()


def play_as_human(
    env: str, env_kwargs: Mapping[str, Any], *, port: int, seed: int, max_idle_s: float = 3600.0
) -> None:
    """Serve an env for a person to play, until Ctrl-C, or until nobody has played for a while.

    Raises:
        ValueError: The env draws no pictures, or its actions are none for a person.
        OSError: The port is busy.
    """
    envs = _make(read_source(env, env_kwargs), "rgb_array", AutoresetMode.DISABLED)
    try:
        names = action_names(envs, env)
        picture = functools.partial(frame_of, envs, env, "rgb_array")
        game = Game(f"{env}, you play", envs, env_orders(envs, names), picture, seed=seed)
        serve_game(game, port, max_idle_s)
    finally:
        envs.close()


def serve_game(game: Game, port: int, max_idle_s: float = 3600.0) -> None:
    """Serve a game, and say where it is and why it has ended."""

    def tell(url: str) -> None:
        _say(f"open {url} in a browser on this machine; Ctrl-C ends it")

    reason = serve(game, port=port, idle_s=max_idle_s, on_start=tell)
    _say(f"the end: {reason}")


def _say(words: str) -> None:
    """Print a line as it is, names of files and envs included."""
    Console(soft_wrap=True).print(words, markup=False, emoji=False, highlight=False)


def show_texts(frames: Iterable[str], fps: float) -> None:
    """Show texts one after the other in the terminal, or the last one where there is none."""
    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        for frame in frames:
            live.update(Text.from_ansi(frame), refresh=True)
            if console.is_terminal:
                time.sleep(1 / fps)
    console.print()


def _make(
    source: EnvSource, render_mode: str, mode: AutoresetMode = AutoresetMode.NEXT_STEP
) -> VecEnv:
    """Make a vector env of one env that renders, or does not: `frame_of` says that."""
    kwargs = {**source.kwargs, "render_mode": render_mode, "autoreset_mode": mode}
    if source.kernels is not None:
        return make_vec(source.kernels, backend="jit", **kwargs)
    if source.spec is None:
        assert source.factory is not None
        own = functools.partial(source.factory, **{**source.kwargs, "render_mode": render_mode})
        return make_vec(own, backend="sync", autoreset_mode=mode)
    backend = "jit" if has_compiled_envs(source.spec, kwargs) else "sync"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*not in the possible render_modes", UserWarning)
        return make_vec(source.spec, backend=backend, **kwargs)


def frame_of(envs: VecEnv, name: str, render_mode: str) -> Any:
    """Return a picture or a text of the only env.

    Raises:
        ValueError: The env does not render in this mode, or draws something else than pictures.
        ModuleNotFoundError: It draws with a package that is not installed.
        RuntimeError: MuJoCo found no OpenGL.
    """
    modes = envs.metadata.get("render_modes") or [render_mode]
    try:
        frames = envs.render() if render_mode in modes else None
    except DependencyNotInstalled as error:
        twin = COMPILED_TWINS.get(name.rpartition(":")[2])
        told = f"; {twin} is the same env and draws itself" if twin else ""
        raise ModuleNotFoundError(f"{error}{told}") from error
    except NotImplementedError:  # of Gymnasium's base class
        frames = None
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "mujoco":
            raise
        raise RuntimeError(
            f"{name} can't draw: {error}; without a display, MUJOCO_GL=egl or MUJOCO_GL=osmesa in "
            "the environment may help"
        ) from error
    frame = frames[0] if frames else None
    if render_mode == "ansi" and not isinstance(frame, str):
        raise ValueError(
            f"{name} does not render as text (render_mode='ansi'); --gif FILE makes an animation"
        )
    if render_mode == "rgb_array" and not isinstance(frame, np.ndarray):
        raise ValueError(f"{name} does not render pictures (render_mode='rgb_array')")
    return check_frame(frame) if render_mode == "rgb_array" else frame


def _find_policy(
    policy: str | None, envs: VecEnv, seed: int
) -> tuple[Callable[..., Any], Callable[[Any, Any], None]]:
    """Return a function from observations to actions, and one to call before with all results."""
    if policy is None or policy == "random":
        draw = RandomActions(envs, seed)
        return lambda obs: draw(), draw.see
    if ":" not in policy:
        raise ValueError(f"policy is {policy!r}, expected 'random' or 'module:function'")
    found = import_object("policy", policy)
    if not callable(found):
        raise ValueError(f"policy {policy!r} is {found!r}, expected a function of observations")
    return found, lambda obs, infos: None
