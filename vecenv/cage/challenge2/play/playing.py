"""Let a policy play: what counts as a policy, and one episode of it to look at."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.cage.challenge2.env import Cage2VectorEnv
from vecenv.cage.challenge2.network.cage2 import cage2_scenario
from vecenv.cage.challenge2.network.scenario import Scenario
from vecenv.cage.challenge2.options import read_object, read_scenario
from vecenv.cage.challenge2.play.defender import TRAINED_DEFENDER, is_defender_file, load_defender
from vecenv.cage.challenge2.play.policies import POLICY_NAMES, make_policy
from vecenv.cage.challenge2.view.snapshot import Snapshot
from vecenv.cage.saved import is_sb3_file, load_policy, load_sb3_policy

__all__ = ["BatchedPolicy", "Player", "Policy", "find_policy", "play_episode", "save_episode_gif"]


@runtime_checkable
class BatchedPolicy(Protocol):
    """Chooses blue's actions for a batch of envs; `vecenv.cage.BluePolicy` is one.

    The arrays it is given are its own to keep and to change; what it returns is read at once.

    Two attributes may say what it needs: `observation`, "bits" or "extended", and `uses_masks`; if
    that is True, `act` is called with a third argument, `Cage2VectorEnv.action_masks()`, int8.
    """

    def act(self, obs: np.ndarray, alerts: np.ndarray, /) -> Any:
        """Return actions, integers (N,), for obs (N, ...) and alerts bool (N, hosts)."""
        ...

    def reset(self) -> None:
        """Forget everything: all envs are about to begin an episode."""
        ...


Policy = str | Path | BatchedPolicy | Callable[..., Any]


class _FunctionPolicy:
    """A function of the observations."""

    def __init__(self, function: Callable[[np.ndarray], Any]) -> None:
        self._function = function
        self.observation = getattr(function, "observation", "bits")
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def act(self, obs: np.ndarray, alerts: np.ndarray, /) -> Any:
        """Ask the function."""
        return self._function(obs)

    def reset(self) -> None:
        """Do nothing: it remembers nothing."""


def find_policy(
    policy: Policy, scenario: Scenario | None = None, *, seed: int | None = None
) -> BatchedPolicy:
    """Return what plays.

    Args:
        policy: Name of a ready-made policy ("react_restore" or "react-restore"; "random" is
            "uniform"; "defender" the trained one that comes along); name of a file with a saved
            policy, of `examples/ppo.py`, of `save_defender` or of stable-baselines3; an object with
            `act` and `reset`; a function from observations (N, ...) to actions (N,); a class of
            either, which is called, with `scenario` and `seed` if it has parameters of these names;
            or "module:object" for one of these, looked for in the working directory too.
        scenario: What it is to play in; CAGE 2 by default.
        seed: For policies that draw.

    Raises:
        ValueError: No such policy and no such file, or a file for another env.
        TypeError: Something else.
        ImportError: There is no such module, or a library that a file needs is missing.
    """
    scenario = cage2_scenario() if scenario is None else scenario
    if isinstance(policy, str | Path):
        return _named_policy(str(policy), scenario, seed)
    if isinstance(policy, type):
        given: dict[str, Any] = {"scenario": scenario, "seed": seed}
        wanted = inspect.signature(policy).parameters
        policy = policy(**{name: value for name, value in given.items() if name in wanted})
    if isinstance(policy, BatchedPolicy):
        return policy
    if callable(policy):
        return _FunctionPolicy(policy)
    raise TypeError(
        f"policy is {policy!r}, expected a name, a file, an object with `act` and `reset`, or a "
        "function from observations to actions"
    )


def _named_policy(text: str, scenario: Scenario, seed: int | None) -> BatchedPolicy:
    """Return the policy of a name, of a file, or of "module:object"."""
    name = text.replace("-", "_")
    name = "uniform" if name == "random" else name
    if name in POLICY_NAMES:
        return make_policy(name, scenario, seed=seed)
    if name == "defender":
        return load_defender(TRAINED_DEFENDER, scenario)
    if Path(text).is_file():
        if is_defender_file(text):
            return load_defender(text, scenario)
        return load_sb3_policy(text, scenario) if is_sb3_file(text) else load_policy(text, scenario)
    if ":" in text:
        found = read_object("policy", text)
        if isinstance(found, str | Path):
            raise TypeError(f"policy is {text!r}, which is {found!r}, no policy")
        return find_policy(found, scenario, seed=seed)
    known = (*(set(POLICY_NAMES) - {"uniform"}), "random", "defender")
    names = ", ".join(sorted(name.replace("_", "-") for name in known))
    raise ValueError(
        f"policy is {text!r}, but there is no such file; expected a file with a saved policy, "
        f"'module:object', or one of {names}"
    )


class Player:
    """A policy in a vector env whose envs all begin and end together."""

    def __init__(self, policy: BatchedPolicy, envs: Cage2VectorEnv) -> None:
        self._policy: Any = policy
        self._envs = envs
        self._uses_masks = bool(getattr(policy, "uses_masks", False))

    def begin(self) -> None:
        """Tell the policy that all envs have been reset."""
        self._policy.reset()

    def act(self, obs: np.ndarray) -> Any:
        """Return the policy's actions for obs (N, ...), the latest observations."""
        alerts = self._envs.shell_alerts()
        if self._uses_masks:
            return self._policy.act(obs, alerts, self._envs.action_masks())
        return self._policy.act(obs, alerts)


def play_episode(
    policy: Policy, *, seed: int | None = None, observation: str | None = None, **options: Any
) -> Iterator[Snapshot]:
    """Play one episode and yield the env after its reset and after each step.

    Args:
        policy: See `find_policy`.
        seed: Of the episode.
        observation: What the policy gets; None for what it says it needs, or "bits".
        **options: `red_agent`, `episode_length`, `rules`, `scenario`, `green` as for
            `Cage2VectorEnv`.
    """
    scenario = read_scenario(options.pop("scenario", None), options.pop("rules", None))
    player = find_policy(policy, scenario, seed=seed)
    options["observation"] = observation or getattr(player, "observation", "bits")
    mode = AutoresetMode.DISABLED
    envs = Cage2VectorEnv(1, scenario=scenario, autoreset_mode=mode, **options)
    try:
        blue = Player(player, envs)
        obs, _ = envs.reset(seed=seed)
        blue.begin()
        yield envs.snapshot()
        for _ in range(envs.episode_length_of(0)):
            obs, *_ = envs.step(blue.act(obs))
            yield envs.snapshot()
    finally:
        envs.close()


def save_episode_gif(policy: Policy, path: str | Path, *, fps: float = 2.0, **options: Any) -> None:
    """Play one episode and write it as an animated GIF.

    Args:
        policy: See `find_policy`.
        path: File to write, replaced if it is there.
        fps: Steps per second.
        **options: As for `play_episode`.

    Raises:
        ValueError: The name of the file does not end in .gif.
        FileNotFoundError: There is no folder for the file.
        ImportError: Pictures need the extra `plots`.
    """
    from vecenv.cage.canvas import save_gif
    from vecenv.cage.challenge2.view.picture import draw_snapshot

    if Path(path).suffix.lower() != ".gif":
        raise ValueError(
            f"the animation's file is {str(path)!r}, expected a name that ends in .gif"
        )
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(
            f"the animation's file is {str(path)!r}, but {Path(path).parent} is no folder"
        )
    snapshots = play_episode(policy, **options)
    save_gif((draw_snapshot(snapshot).to_array() for snapshot in snapshots), path, fps=fps)
