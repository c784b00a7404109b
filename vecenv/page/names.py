"""Names of an env's actions, for readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Discrete, MultiBinary, MultiDiscrete

__all__ = ["ActionNames", "Part", "action_names"]

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
