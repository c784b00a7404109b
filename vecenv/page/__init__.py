"""One episode as a page for a browser, with a slider: a single HTML file that needs nothing else.

Its pictures are kept within a number of bytes, as data URIs.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Discrete, MultiBinary, MultiDiscrete

from vecenv.cage.canvas import pillow
from vecenv.files import write_text

__all__ = [
    "MAX_BYTES", "ActionNames", "EpisodePage", "Frames", "Part", "action_names", "check_frame",
    "record",
]  # fmt: skip

MAX_BYTES = 5_000_000
_MOST_SHOWN = 8  # most choices shown per part of an action; most facts per step
_LONGEST = 120  # most letters of a text from the env
_NO_FACTS = {"action_mask", "episode", "final_obs", "final_info"}
_TEMPLATE = Path(__file__).with_name("viewer.html")


class EpisodePage:
    """Collects the steps of an episode, and writes them as a page.

    Args:
        title: Title of the page.
        about: Further facts of the episode, by name.
        fps: Steps per second at first.
        max_bytes: Size limit of the file: pictures are reduced until they fit, see `Frames`. Texts
            are not reduced; they take less than 1 kB per step.

    Attributes:
        fps: Steps per second at first.
        on_show: Called after each picture, to show progress.

    Example:
        >>> import numpy as np
        >>> page = EpisodePage("A square", {"seed": "0"}, fps=2)
        >>> page.show(np.zeros((4, 4, 3), np.uint8))
        >>> page.choose(
        ...     "left", [("", "probability", [("left", 0.75, True), ("right", 0.25, False)])]
        ... )
        >>> page.show(np.ones((4, 4, 3), np.uint8), reward=1.0)
        >>> page.to_html()[:15]
        '<!doctype html>'
    """

    def __init__(
        self, title: str, about: Mapping[str, str], *, fps: float, max_bytes: int = MAX_BYTES
    ) -> None:
        self._title, self._about, self.fps = title, dict(about), fps
        self._max_bytes = max_bytes
        self.on_show: Callable[[], Any] = lambda: None
        self._frames = Frames()
        self._steps: list[dict[str, Any]] = []

    @property
    def num_steps(self) -> int:
        """Number of steps shown, without the beginning."""
        return max(0, len(self._steps) - 1)

    def show(
        self,
        frame: np.ndarray,
        *,
        reward: float | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        """Append the picture after a reset or a step.

        Args:
            frame: uint8 (height, width, 3).
            reward: Reward of the step; None after the reset.
            facts: Further facts, by name.

        Raises:
            ValueError: The picture has another form.
        """
        self._frames.add(frame)
        step: dict[str, Any] = {}
        if reward is not None:
            step["reward"] = _finite(reward)
        if facts:
            shown = list(facts.items())[:_MOST_SHOWN]
            step["facts"] = [[str(k)[:_LONGEST], str(v)[:_LONGEST]] for k, v in shown]
        self._steps.append(step)
        self.on_show()

    def choose(
        self,
        action: str,
        parts: Sequence[tuple[str, str, Sequence[tuple[str, float, bool]]]] = (),
        value: float | None = None,
    ) -> None:
        """Add the policy's choice after the latest picture.

        Args:
            action: The action in words.
            parts: For each choice: its title; the kind of its numbers ("probability" or "value");
                names, numbers, and whether each was chosen. The largest numbers are shown.
            value: The policy's estimate of the future return.
        """
        step = self._steps[-1]
        step["action"] = action[: 4 * _LONGEST]
        shown = []
        for title, kind, choices in parts:
            order = sorted(choices, key=lambda c: (c[2], c[1]), reverse=True)[:_MOST_SHOWN]
            order.sort(key=lambda c: c[1], reverse=True)
            rows = [[name[:_LONGEST], _finite(x), int(chosen)] for name, x, chosen in order]
            shown.append([title[:_LONGEST], kind, rows, len(choices)])
        if shown:
            step["parts"] = shown
        if value is not None:
            step["value"] = _finite(value)

    def notes(self) -> list[str]:
        """Return sentences about reductions of the pictures, made so that the file fits."""
        if self._frames.is_exact:
            return []
        told = "The pictures are compressed with losses"
        if (stride := self._frames.stride) > 1:
            told = f"Only every {stride}th step has a picture, compressed with losses"
        return [f"{told}, so that the page has {self._max_bytes / 1e6:.3g} MB."]

    def to_html(self) -> str:
        """Return the page.

        Raises:
            ValueError: No picture was shown.
        """
        if self._frames.shape is None:
            raise ValueError("the page has nothing to show; call show() first")
        height, width = self._frames.shape
        facts: dict[str, Any] = {
            "title": self._title[: 4 * _LONGEST],
            "about": [[str(k), str(v)[: 4 * _LONGEST]] for k, v in self._about.items()],
            "fps": self.fps,
            "width": width,
            "height": height,
            "steps": self._steps,
        }
        room = self._max_bytes - len(_filled(facts).encode()) - 1000  # for notes
        facts["frames"] = self._frames.to_list(room)
        facts |= {"stride": self._frames.stride, "notes": self.notes()}
        return _filled(facts)

    def save(self, path: str | Path) -> None:
        """Write the page, completely or not at all.

        Raises:
            OSError: It can't be written.
        """
        write_text(path, self.to_html())


# -- the names of an env's actions ---------------------------------------------------------------

_METHOD = "get_action_meanings"  # as in Atari's envs
# For Gymnasium's envs, which have no names, and their compiled twins ("Jit" before the name); and
# for the bundled games with several agents.
_KNOWN = {
    "CartPole": ("left", "right"),
    "MountainCar": ("left", "none", "right"),
    "Acrobot": ("-1", "none", "+1"),
    "LunarLander": ("none", "left engine", "main engine", "right engine"),
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CliffWalkingSlippery": ("up", "right", "down", "left"),
    "Taxi": ("down", "up", "right", "left", "pick up", "drop off"),
    "Blackjack": ("stick", "hit"),
    "Pursuit": ("left", "right", "down", "up", "none"),
    "Spread": ("none", "left", "right", "down", "up"),
}
_MOST = 4096  # most names of one part


class Part(NamedTuple):
    """One choice of an action.

    Attributes:
        title: The choosing part's title, "" if there is only one.
        names: Names of the choices.
        start: Number of the first choice.
    """

    title: str
    names: tuple[str, ...]
    start: int = 0


class ActionNames(NamedTuple):
    """The names of an env's actions.

    Attributes:
        parts: Parts of Discrete and MultiDiscrete actions; empty for others.
        are_named: False if the env named neither parts nor the choices of several parts.
        busy: Returns, by title, what parts do that take no action now.
    """

    parts: tuple[Part, ...]
    are_named: bool = True
    busy: Callable[[], Mapping[str, str]] = dict

    def describe(self, action: Any) -> str:
        """Return the name of one action.

        Args:
            action: Action of one env, as in its action space.
        """
        if not self.parts:
            return _numbers(action)
        indices = np.asarray(action).reshape(-1)[: len(self.parts)]
        if not self.are_named:
            return f"({', '.join(map(str, indices.tolist()))})"
        words, busy = [], self.busy()
        for part, index in zip(self.parts, indices.tolist(), strict=True):
            number = int(index) - part.start
            name = part.names[number] if 0 <= number < len(part.names) else str(index)
            words.append(f"{part.title}: {busy.get(part.title, name)}" if part.title else name)
        return "; ".join(words)


def action_names(envs: Any, name: str) -> ActionNames:
    """Return the names of the actions of a vector env.

    Envs may have a method `get_action_meanings`: it returns a name for each action, or, for
    MultiDiscrete actions, a dict of lists of names by part title. Vector envs whose parts can be
    busy have `get_busy_parts`: it returns what these parts of the first env do instead.

    Args:
        envs: A vector env of one env.
        name: Name of the env, as the user gave it.
    """
    space = envs.single_action_space
    given = _meanings(envs)
    if isinstance(space, Discrete):
        count, start = int(space.n), int(space.start)
        kind = name.rpartition(":")[2].rpartition("-v")[0].removeprefix("Jit")
        known = _KNOWN.get(kind, ())
        own = _texts(given, count) or _texts(known, count)
        own = own or tuple(str(start + k) for k in range(min(count, _MOST)))
        return ActionNames((Part("", own, start),))
    if isinstance(space, MultiDiscrete | MultiBinary):
        is_binary = isinstance(space, MultiBinary)
        counts = [2] * int(np.prod(space.shape)) if is_binary else space.nvec.reshape(-1).tolist()
        starts = [0] * len(counts) if is_binary else space.start.reshape(-1).tolist()
        titled = given if isinstance(given, dict) and len(given) == len(counts) else {}
        titles = list(map(str, titled)) or [f"part {k}" for k in range(len(counts))]
        lists = list(titled.values()) or [None] * len(counts)
        parts = []
        for title, names, count, start in zip(titles, lists, counts, starts, strict=True):
            plain = tuple(str(start + k) for k in range(min(count, _MOST)))
            parts.append(Part(title, _texts(names, count) or plain, int(start)))
        return ActionNames(tuple(parts), bool(titled), getattr(envs, "get_busy_parts", dict))
    return ActionNames(())


def _meanings(envs: Any) -> Any:
    """Return the env's own names of its actions, or None."""
    if hasattr(envs, _METHOD):
        return getattr(envs, _METHOD)()
    try:
        return envs.call(_METHOD)[0]
    except Exception:  # the env has none, the backend can't be asked, or the user's code fails
        return None


def _texts(names: Any, count: int) -> tuple[str, ...]:
    """Return names as text if there are `count` of them; otherwise none."""
    if not isinstance(names, Sequence) or isinstance(names, str) or len(names) != count:
        return ()
    return tuple(map(str, names))


def _numbers(action: Any) -> str:
    if isinstance(action, np.ndarray | np.generic | int | float) and np.size(action) <= 32:
        return ", ".join(f"{number:.3g}" for number in np.ravel(action).tolist())
    return str(action)[:200]


# -- playing ---------------------------------------------------------------------------------------


def record(
    page: EpisodePage,
    envs: Any,
    act: Callable[[Any, bool, dict[str, Any]], Any],
    names: ActionNames,
    frame_of: Callable[[], np.ndarray],
    *,
    seed: int | None,
    num_steps: int,
    see: Callable[[Any, Any], None] | None = None,
    tell: Callable[[], Mapping[str, str]] = dict,
) -> None:
    """Play one episode into a page.

    Args:
        page: An empty page.
        envs: A vector env of one env, which is reset. It must not reset itself within a step.
        act: Called with the observation, whether it begins the episode, and a dict to report into;
            returns actions for `envs.step`. The dict may get "probabilities" or "action_values",
            float (1, A), or a sequence of these for a MultiDiscrete action; "values", float (1,),
            the expected return; and, if these are not about the env's own actions, "labels", the
            names of the choices, and "chosen", int (1,), or sequences of these.
        names: Names of the actions.
        frame_of: Returns the current picture.
        seed: Seed of the episode.
        num_steps: Most steps.
        see: Called with observations and infos before each `act`.
        tell: Returns further facts of the latest step, by name.
    """
    obs, infos = envs.reset(seed=seed)
    page.show(frame_of(), facts=_facts(infos))
    for step in range(num_steps):
        report: dict[str, Any] = {}
        if see is not None:
            see(obs, infos)
        actions = act(obs, step == 0, report)
        action = np.asarray(actions)[0] if not isinstance(actions, tuple | dict) else actions
        value = report.get("values")
        page.choose(
            names.describe(action),
            _parts_of(report, action, names),
            None if value is None else float(np.asarray(value).reshape(-1)[0]),
        )
        obs, rewards, terminations, truncations, infos = envs.step(actions)
        facts = {**tell(), **_facts(infos)}
        page.show(frame_of(), reward=float(rewards[0]), facts=facts)
        if terminations[0] or truncations[0]:
            break


def _filled(facts: Mapping[str, Any]) -> str:
    """Return the page with its data, and a policy that forbids all else.

    No data can become markup or code: they are JSON without "<", which the page's script reads and
    shows as text, and the policy forbids all other scripts.
    """
    text = _TEMPLATE.read_text(encoding="utf-8")
    script = text.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    policy = (
        f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; "
    )
    parts = {"POLICY": policy, "TITLE": html.escape(facts["title"]), "DATA": _json(facts)}
    # One pass, because a title may contain one of these words; the scripts contain none.
    return re.sub("|".join(parts), lambda found: parts[found[0]], text)


def _json(thing: Any) -> str:
    text = json.dumps(thing, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(number: float) -> Any:
    """Return a number in valid JSON, rounded to six digits; NaN and infinity as text."""
    number = float(number)
    return float(f"{number:.6g}") if math.isfinite(number) else str(number)


def _facts(infos: Mapping[str, Any]) -> dict[str, str]:
    """Return those infos of the first env that are a number or a short text."""
    found = {}
    for name, given in infos.items():
        name = str(name)
        if name.startswith("_") or name in _NO_FACTS or isinstance(given, dict):
            continue
        is_there = infos.get(f"_{name}")
        try:
            value = given[0] if is_there is None or is_there[0] else None
        except (TypeError, IndexError, KeyError):
            continue
        if isinstance(value, str):
            found[name] = value
        elif isinstance(value, bool | int | float | np.number | np.bool_):
            found[name] = f"{value:.5g}" if isinstance(value, float | np.floating) else f"{value}"
    return found


def _parts_of(
    report: Mapping[str, Any], action: Any, names: ActionNames
) -> list[tuple[str, str, list[tuple[str, float, bool]]]]:
    """Return the policy's report in the form for `EpisodePage.choose`."""
    kind = "probability" if "probabilities" in report else "value"
    given = report.get("probabilities", report.get("action_values"))
    if given is None:
        return []
    rows = list(given) if isinstance(given, list | tuple) else [given]
    labels = report.get("labels")
    labels = labels if labels is None or len(rows) > 1 else [labels]
    chosen = report.get("chosen")
    if chosen is None:
        starts = [part.start for part in names.parts]
        chosen = np.asarray(action).reshape(-1)[: len(starts)] - starts
    chosen = np.asarray(chosen).reshape(-1)
    parts = []
    for k, row in enumerate(rows):
        numbers = np.asarray(row, np.float64).reshape(-1).tolist()
        own = labels[k] if labels is not None else names.parts[k].names if names.parts else ()
        title = names.parts[k].title if k < len(names.parts) else ""
        choices = [
            (str(own[i]) if i < len(own) else str(i), number, i == int(chosen[k]))
            for i, number in enumerate(numbers)
            if not math.isnan(number)
        ]
        if choices:  # an agent may have no choice in this step
            parts.append((title, kind, choices))
    return parts


class Frames:
    """Pictures, kept encoded. In the page they are exact if they fit.

    If they do not fit, all are encoded again with losses. If that is not enough, only every second
    picture is kept, or every fourth, and so on; the last picture is always kept.

    Attributes:
        stride: 1, or n if every n-th picture is in the page.
        is_exact: Whether no picture in the page has been encoded with losses.
        shape: Height and width; None before the first picture.
    """

    def __init__(self) -> None:
        self.stride, self.is_exact = 1, True
        self.shape: tuple[int, int] | None = None
        self._files: list[bytes] = []  # empty where the previous picture stays
        self._latest = np.empty(0)

    def add(self, frame: np.ndarray) -> None:
        """Append a picture.

        Args:
            frame: uint8 (height, width, 3), all of one size; copied.

        Raises:
            ValueError: The picture has another form.
        """
        frame = check_frame(frame)
        self.shape = self.shape or frame.shape[:2]
        if frame.shape[:2] != self.shape:
            raise ValueError(
                f"the env drew a picture of {frame.shape[1]} x {frame.shape[0]} after ones of "
                f"{self.shape[1]} x {self.shape[0]}; expected all of one size"
            )
        stays = np.array_equal(frame, self._latest)
        self._latest = frame.copy()
        self._files.append(b"" if stays else _encoded(frame, lossless=True, quality=90))

    def to_list(self, room: int) -> list[str | int]:
        """Return the data URI of each picture, or 0 where the previous one stays.

        They take at most `room` bytes, as far as a single picture allows.
        """
        files, last = self._files, len(self._files) - 1
        self.stride, self.is_exact = 1, _size(files) <= room
        if not self.is_exact:
            files, latest = [], b""
            for file in self._files:
                latest = _encoded(_decoded(file), quality=55) if file else latest
                files.append(latest)
        while self.stride < len(files) and _size(files) > room:
            self.stride *= 2
            files = [x if k % self.stride == 0 or k == last else b"" for k, x in enumerate(files)]
        head = "data:image/webp;base64,"
        return [head + base64.b64encode(x).decode("ascii") if x else 0 for x in files]


def _size(files: Sequence[bytes]) -> int:
    """Return the bytes of pictures in the page."""
    return sum(45 + (len(file) + 2) // 3 * 4 if file else 2 for file in files)


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
    pillow().Image.fromarray(pixels).save(stream, format="WEBP", method=2, **options)
    return stream.getvalue()


def _decoded(file: bytes) -> np.ndarray:
    return np.asarray(pillow().Image.open(io.BytesIO(file)).convert("RGB"))
