"""Policies and envs of any challenge brought together: how a policy is found, and how it plays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vecenv.core.importing import import_object

__all__ = ["PolicyKinds", "Seat", "called", "name_of"]


class PolicyKinds(NamedTuple):
    """What counts as a policy in a challenge.

    Attributes:
        ready: Makes the ready-made ones, by name with underscores.
        files: Where a policy lies in a run folder.
        load: Reads a policy of a file.
        make: Makes what plays of a class.
        protocol: What an object has to have.
        convert: Makes a policy of an object that is none; None if it can't.
        expected: What may be given, in words.
    """

    ready: Mapping[str, Callable[[], Any]]
    files: tuple[str, ...]
    load: Callable[[Path], Any]
    make: Callable[[type], Any]
    protocol: type
    convert: Callable[[Any], Any]
    expected: str

    def find(self, policy: Any) -> Any:
        """Return the policy of a name, a file, "module:object", a class, an object or a function.

        Args:
            policy: See above; hyphens in names are underscores.

        Raises:
            ValueError: No such policy and no such file, or a file of something else.
            TypeError: Something else.
            ImportError: There is no such module, or a library that a file needs is missing.
            OSError: The file can't be read.
        """
        if isinstance(policy, str | Path):
            text = str(policy)
            if make := self.ready.get(text.replace("-", "_")):
                return make()
            for path in (Path(text), *(Path(text) / name for name in self.files)):
                if path.is_file():
                    return self.load(path)
            if ":" not in text:
                raise ValueError(self._unknown(text))
            policy = import_object("policy", text)
            if isinstance(policy, str | Path):
                raise TypeError(f"policy is {text!r}, which is {policy!r}, no policy")
        found = self.make(policy) if isinstance(policy, type) else policy
        if not isinstance(found, self.protocol):
            found = self.convert(found)
        if found is None:
            raise TypeError(f"policy is {policy!r:.200}, expected {self.expected}")
        return found

    def _unknown(self, text: str) -> str:
        folder = f"a folder without a {self.files[0]}"
        what = folder if Path(text).is_dir() else "but there is no such file"
        names = ", ".join(sorted(name.replace("_", "-") for name in self.ready))
        return (
            f"policy is {text!r}, {what}; expected a file with a saved policy, or its run "
            f"folder, 'module:object', or one of {names}"
        )


def called(kind: type, **given: Any) -> Any:
    """Call a class with those of the arguments that it has parameters for."""
    wanted = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in given.items() if name in wanted})


def name_of(policy: Any) -> str:
    """Return what a policy or a red agent is called in tables."""
    if isinstance(policy, str | Path):
        return str(policy)
    return getattr(policy, "__name__", type(policy).__name__)


class Seat:
    """A policy in front of vector envs whose episodes all begin and end together.

    A challenge's own says how the policy is asked. It closes the envs as a context manager.

    Args:
        policy: See the challenge's `find_policy`.
        envs: Without autoreset.

    Attributes:
        policy, envs: As given.
    """

    def __init__(self, policy: Any, envs: Any) -> None:
        self.policy, self.envs = policy, envs
        try:
            self._reports = "report" in inspect.signature(policy.act).parameters
        except (TypeError, ValueError):  # functions written in C need not tell
            self._reports = False

    def begin(self) -> None:
        """Tell the policy that all envs have been reset."""
        self.policy.reset()

    def ask(self, obs: np.ndarray, more: dict[str, Any]) -> np.ndarray:
        """Return the policy's actions; `more` may have the `report` that its `act` takes."""
        raise NotImplementedError

    def tell(self) -> Mapping[str, str]:
        """Return what both sides did in the latest step of the first env, by name."""
        return {}

    def act(
        self, obs: np.ndarray, is_first: bool = False, report: dict[str, Any] | None = None
    ) -> np.ndarray:
        """Return actions for the envs' latest observations.

        Args:
            obs: (N, ...), the caller's to lose: the policy may keep them.
            is_first: Whether these are the first of episodes.
            report: Filled by policies that have something to say, see docs/watch.md.
        """
        if is_first:
            self.begin()
        return self.ask(obs, {} if report is None or not self._reports else {"report": report})

    def play(self, seed: int | None) -> Iterator[Any]:
        """Play one episode in every env: yield None after reset, the rewards (N,) of each step."""
        obs, _ = self.envs.reset(seed=seed)
        yield None
        is_first, is_over = True, False
        while not is_over:
            # Without `out`: every observation is an array of its own.
            obs, rewards, ends, cuts, _ = self.envs.step(self.act(obs, is_first))
            is_first, is_over = False, bool((ends | cuts).all())
            yield rewards

    def pictures(self, seed: int | None) -> Iterator[np.ndarray]:
        """Play one episode and yield a picture of the first env after reset and each step."""
        with self:
            for _ in self.play(seed):
                yield self.envs.render()[0]

    def __enter__(self) -> Seat:
        return self

    def __exit__(self, *_: Any) -> None:
        self.envs.close()
