"""Find a policy from a name, file or object, and let it play envs, for any challenge."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vecenv.core.arguments import import_object

__all__ = ["Seat", "called", "found_policy", "name_of"]


def found_policy(
    policy: Any,
    expected: str,
    *,
    ready: Mapping[str, Callable[[], Any]],
    files: tuple[str, ...],
    load: Callable[[Path], Any],
    make: Callable[[type], Any],
    convert: Callable[[Any], Any],
) -> Any:
    """Return the policy for a name, file, "module:object", class, object or function.

    Args:
        policy: See above; hyphens in names count as underscores.
        expected: Description of the accepted values, in words.
        ready: Makers of the built-in policies, by name with underscores.
        files: Paths at which a run folder may hold a policy.
        load: Reads a policy from a file.
        make: Makes a policy from a class.
        convert: Makes a policy from any other object; returns None if it can't.

    Raises:
        ValueError: No policy or file has this name, or the file holds no policy.
        TypeError: The object can't be used as a policy.
        ImportError: The module does not exist, or a library that the file needs is missing.
        OSError: The file can't be read.
    """
    found = policy
    if isinstance(policy, str | Path):
        text = str(policy)
        if maker := ready.get(text.replace("-", "_")):
            return maker()
        for path in (Path(text), *(Path(text) / name for name in files)):
            if path.is_file():
                return load(path)
        if ":" not in text:
            is_folder = Path(text).is_dir()
            what = f"a folder without a {files[0]}" if is_folder else "no built-in policy, no file"
            names = ", ".join(sorted(name.replace("_", "-") for name in ready))
            raise ValueError(
                f"policy is {text!r}, {what}; expected a file with a saved policy, or its run "
                f"folder, 'module:object', or one of {names}"
            )
        policy = found = import_object("policy", text)
    found = make(found) if isinstance(found, type) else found
    if not (hasattr(found, "act") and hasattr(found, "reset")):
        found = convert(found)
    if found is None:
        lacks = "; it has act, but no reset" if hasattr(policy, "act") else ""
        raise TypeError(f"policy is {policy!r:.200}, expected {expected}{lacks}")
    return found


def called(kind: type, **given: Any) -> Any:
    """Call a class with the given arguments that it has parameters for."""
    wanted = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in given.items() if name in wanted})


def name_of(policy: Any) -> str:
    """Return the name of a policy or red agent for tables."""
    if isinstance(policy, str | Path):
        return str(policy)
    return getattr(policy, "__name__", type(policy).__name__)


class Seat:
    """A policy and the vector envs that it plays; all episodes begin and end together.

    Each challenge has a subclass that queries the policy. As a context manager it closes the envs.

    Args:
        policy: See the challenge's `find_policy`.
        envs: Vector envs without autoreset.

    Attributes:
        policy, envs: As given.
    """

    def __init__(self, policy: Any, envs: Any) -> None:
        self.policy, self.envs = policy, envs
        try:
            self._reports = "report" in inspect.signature(policy.act).parameters
        except (TypeError, ValueError):  # functions written in C may have no signature
            self._reports = False

    def begin(self) -> None:
        """Tell the policy that all envs have been reset."""
        self.policy.reset()

    def ask(self, obs: np.ndarray, more: dict[str, Any]) -> np.ndarray:
        """Return the policy's actions; `more` may hold the argument `report` of its `act`."""
        raise NotImplementedError

    def tell(self) -> Mapping[str, str]:
        """Return the actions of both sides in the first env's latest step, by name."""
        return {}

    def act(
        self, obs: np.ndarray, is_first: bool = False, report: dict[str, Any] | None = None
    ) -> np.ndarray:
        """Return actions for the envs' latest observations.

        Args:
            obs: (N, ...); the policy may keep this array, so the caller must not change it.
            is_first: Whether these are the first observations of episodes.
            report: A dict that some policies fill, see docs/watch.md.
        """
        if is_first:
            self.begin()
        return self.ask(obs, {} if report is None or not self._reports else {"report": report})

    def play(self, seed: int | None) -> Iterator[Any]:
        """Play one episode in every env; yield None after reset, then each step's rewards (N,)."""
        obs, _ = self.envs.reset(seed=seed)
        yield None
        is_first, is_over = True, False
        while not is_over:
            # Without `out`, every step returns a new array, which the policy may keep.
            obs, rewards, ends, cuts, _ = self.envs.step(self.act(obs, is_first))
            is_first, is_over = False, bool((ends | cuts).all())
            yield rewards

    def __enter__(self) -> Seat:
        return self

    def __exit__(self, *_: Any) -> None:
        self.envs.close()
