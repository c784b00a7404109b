"""Show any env while a policy plays: as text in the terminal, as an animation, as a page."""

from __future__ import annotations

import importlib
import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Env
from gymnasium.error import DependencyNotInstalled
from gymnasium.vector import VectorEnv
from rich.console import Console
from rich.live import Live
from rich.text import Text

from vecenv.agents import AgentsVecEnv
from vecenv.command import progress
from vecenv.core.arguments import import_object
from vecenv.core.masks import RandomActions
from vecenv.make import COMPILED_TWINS
from vecenv.page import EpisodePage, action_names, check_frame, record
from vecenv.source import EnvSource

__all__ = [
    "Shown", "check_draws", "show", "watch", "watch_cage",
]  # fmt: skip

PAGE_FPS = 10.0  # most steps per second on a page, so that actions can be seen


class Shown(NamedTuple):
    """How one episode is shown.

    Attributes:
        policy: Name of the policy on the page.
        num_steps: Most steps to play.
        gif, html: Files for an animation and a page; without both, text in the terminal.
        fps: Steps per second; None for the env's own, on a page at most 10.
    """

    policy: str
    num_steps: int
    gif: Path | None = None
    html: Path | None = None
    fps: float | None = None

    @property
    def render_mode(self) -> str:
        """The render mode that the env needs."""
        return "ansi" if self.gif is None and self.html is None else "rgb_array"


class _NoPage:
    """Replaces a page for `record`, and keeps nothing."""

    def show(self, *_: Any, **__: Any) -> None:
        pass

    choose = show


class _OneGame:
    """One game with several agents as a vector env of one env; rewards are summed over agents."""

    parts = ()

    def __init__(self, envs: AgentsVecEnv, env: str) -> None:
        self._envs = envs
        self._names = {k: action_names(group, env) for k, group in envs.groups.items()}

    def reset(self, *, seed: int | None) -> tuple[Any, dict[str, Any]]:
        return self._envs.reset(seed=seed)[0], {}

    def step(self, actions: Any) -> tuple[Any, ...]:
        obs, rewards, *_ = self._envs.step(actions)
        facts = {f"reward of {k}": x.sum(keepdims=True) for k, x in rewards.items()}
        is_over = np.array([not any(alive.any() for alive in self._envs.alive.values())])
        total = np.array([sum(part.sum() for part in rewards.values())])
        return obs, total, is_over, np.zeros(1, np.bool_), facts if len(rewards) > 1 else {}

    def describe(self, actions: Mapping[str, Any]) -> str:
        """Return what the agents that are alive do; replaces `ActionNames`."""
        return "; ".join(
            f"{agent}: {self._names[name].describe(actions[name][k])}"
            for name, group in self._envs.groups.items()
            for k, agent in enumerate(group.agents)
            if group.alive[k]
        )


def show(
    envs: Any,
    env: str,
    act: Callable[[Any, bool, dict[str, Any]], Any],
    shown: Shown,
    *,
    seed: int,
    see: Callable[[Any, Any], None] | None = None,
    tell: Callable[[], Mapping[str, str]] = dict,
    num_parts: int | None = None,
    **about: str,
) -> None:
    """Play one episode, and show it.

    Args:
        envs: A vector env of one env, or an `AgentsVecEnv` of one game.
        env: Its name, as the user gave it.
        act: See `vecenv.page.record`.
        shown: How to show it.
        seed: Seed of the episode.
        see: See `vecenv.page.record`.
        tell: See `vecenv.page.record`.
        num_parts: Number of parts of an action that are named; None for all.
        **about: Further facts of the episode for the page.
    """
    own_fps, frames = float(envs.metadata.get("render_fps") or 10), list[Any]()
    page: Any = _NoPage()
    if shown.html is not None:
        facts = {"policy": shown.policy, **about, "seed": str(seed)}
        page = EpisodePage(f"{env}, an episode", facts, fps=shown.fps or min(PAGE_FPS, own_fps))
    game = _OneGame(envs, env) if isinstance(envs, AgentsVecEnv) else None
    names: Any = game or action_names(envs, env)
    if num_parts is not None:
        names = names._replace(parts=names.parts[:num_parts])

    def look() -> Any:
        frame = frame_of(envs, env, shown.render_mode)
        if shown.html is None or shown.gif is not None:
            frames.append(frame)
        return frame

    with progress("making the env", shown.num_steps + 1) as update:
        page.on_show = lambda: update(advance=1, description="playing and drawing")
        given: Any = {"seed": seed, "num_steps": shown.num_steps, "see": see, "tell": tell}
        record(page, game or envs, act, names, look, **given)
    if shown.gif is not None:
        from vecenv.cage.canvas import save_gif

        save_gif(frames, shown.gif, fps=shown.fps or own_fps)
        say(f"animation: {shown.gif}")
    if shown.html is not None:
        save_page(page, shown.html)
    elif shown.gif is None:
        show_live(map(Text.from_ansi, frames), shown.fps or own_fps)


def watch_cage(
    challenge: int, name: str, options: Mapping[str, Any], shown: Shown, seed: int
) -> None:
    """Do the work of `vecenv watch` for CAGE 2 (also with the user's network) and CAGE 4.

    Args:
        challenge: 2 or 4.
        name: Name of the env.
        options: Options of the env.
        shown: How to show it; its policy is an argument of the challenge's `find_policy`.
        seed: Seed of the episode, and of policies that draw.
    """
    playing: Any = importlib.import_module(f"vecenv.cage.challenge{challenge}.playing")
    about = {"red": str(options.get("red_agent", options.get("red", "as ever")))}
    more: Any = {**about, **({"num_parts": 5} if challenge == 4 else {})}  # without messages
    seat = playing.seated(shown.policy, seed=seed, render_mode=shown.render_mode, **options)
    with seat:
        show(seat.envs, name, seat.act, shown, seed=seed, tell=seat.tell, **more)


def watch(source: EnvSource, shown: Shown, seed: int) -> None:
    """Do the work of `vecenv watch` for envs other than CAGE.

    Args:
        source: The env.
        shown: How to show it; its policy is "random", or "module:function": a function from
            observations (1, ...) to actions (1, ...).
        seed: Seed of the env and of random actions.
    """
    env, policy, see = source.name, shown.policy, None
    chosen: Any = None
    if policy != "random" and Path(policy).exists():
        raise ValueError(
            f"policy is {policy!r}, a file or folder; watch takes 'random' or 'module:function'. A "
            f"trained policy is shown by: vecenv play {env} --policy {policy} --html episode.html "
            "(or --gif episode.gif, or --text)"
        )
    if policy != "random" and ":" not in policy:
        raise ValueError(f"policy is {policy!r}, expected 'random' or 'module:function'")
    with warnings.catch_warnings():  # `frame_of` raises if it does not draw
        warnings.filterwarnings("ignore", ".*not in the possible render_modes", UserWarning)
        envs = source.make(1, render_mode=shown.render_mode)
    with closing(envs):
        if policy == "random":
            draw = RandomActions(envs, seed)
            chosen, see = (lambda obs: draw()), draw.see
        else:
            chosen = import_object("policy", policy)
        if not callable(chosen):
            raise ValueError(f"policy {policy!r} is {chosen!r}, expected a function")
        gives = False
        with suppress(ValueError):  # some functions written in C have no signature
            gives = policy != "random" and "report" in inspect.signature(chosen).parameters

        def act(obs: Any, is_first: bool, report: dict[str, Any]) -> Any:
            return chosen(obs, report=report) if gives else chosen(obs)

        show(envs, env, act, shown, seed=seed, see=see)


def save_page(page: EpisodePage, path: Path) -> None:
    """Write a page; print where it is and what was left out."""
    page.save(path)
    size = f"{path.stat().st_size / 1e6:.2f} MB" if path.is_file() else ""
    words = f"page: {path} ({page.num_steps} steps{size and ', ' + size}); open it in a browser"
    for line in (words, *page.notes()):
        say(line)


def say(words: str) -> None:
    """Print a line without markup: it may contain names of files and envs."""
    Console(soft_wrap=True).print(words, markup=False, emoji=False, highlight=False)


def show_live(frames: Iterable[Any], fps: float) -> None:
    """Show texts one after the other in the terminal; without a terminal, write all of them."""
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        for frame in frames:
            console.print(frame)
        return
    with Live(console=console, auto_refresh=False) as live:
        for frame in frames:
            live.update(frame, refresh=True)
            time.sleep(1 / fps)
    console.print()


def check_draws(envs: Any, name: str, render_mode: str) -> None:
    """Raise if envs, made without a render mode, would not draw even with this mode."""
    if modes := envs.metadata.get("render_modes"):
        draws = render_mode in modes
    else:  # the mode was forgotten, or the env can't draw
        singles = getattr(envs.unwrapped, "envs", ()) if isinstance(envs, VectorEnv) else ()
        draws = any(type(env.unwrapped).render is not Env.render for env in singles)
        draws = draws or isinstance(envs, AgentsVecEnv)
    if not draws:
        raise _not_drawn(name, render_mode, modes)
    compiled: Any = envs.unwrapped if isinstance(envs, VectorEnv) else None
    kernels: Any = getattr(compiled, "kernels", None)
    if getattr(kernels, "render", None) and "render" not in vars(type(compiled)):
        from vecenv.jit.kernels import draw

        compiled.reset(seed=0)  # a function draws in one of these modes only
        records = (compiled.states, compiled.params)
        draw(kernels, render_mode, *(rows[0] for rows in records if rows is not None))


def _not_drawn(name: str, render_mode: str, modes: Any) -> ValueError:
    words, more = "pictures", ""
    if render_mode == "ansi":
        words, more = "as text", "; --gif FILE makes an animation" * ("rgb_array" in (modes or ()))
    told = f"{name} does not render {words} (render_mode={render_mode!r})"
    return ValueError(f"{told}: its metadata['render_modes'] is {modes}{more}")


def frame_of(envs: Any, name: str, render_mode: str) -> Any:
    """Return a picture or a text of the only env."""
    modes = envs.metadata.get("render_modes")
    try:
        frames = envs.render() if render_mode in (modes or [render_mode]) else None
    except DependencyNotInstalled as error:
        twin = COMPILED_TWINS.get(name.rpartition(":")[2])
        told = f"; {twin} is the same env and draws itself" if twin else ""
        raise ModuleNotFoundError(f"{error}{told}") from error
    except NotImplementedError:  # raised by Gymnasium's base class
        frames = None
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "mujoco":
            raise
        raise RuntimeError(
            f"{name} can't draw: {error}; without a display, MUJOCO_GL=egl or MUJOCO_GL=osmesa in "
            "the environment may help"
        ) from error
    frame = frames[0] if frames else None
    if not isinstance(frame, str if render_mode == "ansi" else np.ndarray):
        raise _not_drawn(name, render_mode, modes)
    return check_frame(frame) if render_mode == "rgb_array" else frame
