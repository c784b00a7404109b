"""One game of CAGE Challenge 4 as a PettingZoo `ParallelEnv`.

Names, spaces, padding, labels and infos of the agents match the original's flat wrapper. This
module does not import PettingZoo; the class only has the methods of a `ParallelEnv`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Discrete, MultiDiscrete

from vecenv.cage.challenge4.env import METADATA, Cage4VectorEnv, vectors_of
from vecenv.cage.challenge4.kernels import PADDED
from vecenv.cage.challenge4.raw import RawNetwork, raw_observations
from vecenv.cage.challenge4.rules import codes
from vecenv.cage.challenge4.rules.codes import action_labels, observation_labels

__all__ = ["Cage4ParallelEnv"]


class Cage4ParallelEnv:
    """One game, with the interface of PettingZoo's `ParallelEnv`.

    Agents are "blue_agent_0" to "blue_agent_4". Observations are int64 vectors (92,), for agent 4
    (210,); an action is an index. Agents without an action sleep. Agents written for the original's
    evaluation, with `get_action(observation, action_space)`, can be used here.

    Args:
        raw: Whether observations are dicts of hosts, as the original returns without its flat
            wrapper; see docs/cage4.md. The games are the same.
        pad_spaces: Whether all vectors are padded with zeros to 210 values, and the actions of all
            agents to 242. Actions that an agent does not have act as Sleep.
        render_mode: "rgb_array" or None.
        debug: Whether the rules run as plain Python with every index checked, which is slow.
        **options: `steps`, `red`, `phishing_rate`, `alarm_rate`, `greens_one_by_one`.

    Attributes:
        possible_agents, agents: Names of agents.

    Example:
        >>> env = Cage4ParallelEnv(steps=10, debug=True)
        >>> observations, infos = env.reset(seed=0)
        >>> observations["blue_agent_4"].shape, env.action_space("blue_agent_4")
        ((210,), Discrete(242))
        >>> env.action_labels("blue_agent_0")[16:18]
        ['Monitor', 'Remove restricted_zone_a_subnet_server_host_0']
        >>> observations, rewards, terminations, truncations, infos = env.step({})
        >>> rewards["blue_agent_0"]
        0.0
    """

    metadata: dict[str, Any] = {**METADATA, "name": "Cage4-v0", "is_parallelizable": True}

    def __init__(
        self,
        *,
        raw: bool = False,
        pad_spaces: bool = False,
        render_mode: str | None = None,
        debug: bool = False,
        **options: Any,
    ) -> None:
        self.possible_agents = list(codes.AGENT_NAMES)
        self.agents: list[str] = []
        self.render_mode = render_mode
        if not isinstance(raw, bool | np.bool_):
            raise TypeError(f"raw must be True or False, got {raw!r:.200}")
        self._pad, self._raw = pad_spaces, bool(raw)
        self._envs = Cage4VectorEnv(
            1,
            messages=True,
            observation="flat",
            autoreset_mode="Disabled",
            num_threads=1,
            render_mode=render_mode,
            debug=debug,
            log=self._raw,
            **options,
        )
        self._sizes = (
            [codes.MAX_ACTIONS] * codes.NUM_BLUE if pad_spaces else list(codes.NUM_ACTIONS)
        )
        self._spaces = {name: self._space_of(k) for k, name in enumerate(codes.AGENT_NAMES)}
        self._action_spaces: dict[str, Space[Any]] = {
            name: Discrete(size) for name, size in zip(codes.AGENT_NAMES, self._sizes, strict=True)
        }
        self._actions = np.zeros((1, 2 * codes.NUM_BLUE), np.int64)
        self._masks: dict[str, np.ndarray] = {}

    def _space_of(self, agent: int) -> Space[Any]:
        if self._raw:
            return _AnyDict()
        length = PADDED if self._pad else codes.OBS_LENGTHS[agent]
        return MultiDiscrete([3] + [2] * (length - 1))

    def observation_space(self, agent: str) -> Any:
        """Return the observation space: MultiDiscrete, as in the original; if raw, any dict."""
        return self._spaces[_known(agent)]

    def action_space(self, agent: str) -> Any:
        """Return the action space: Discrete(82); Discrete(242) for agent 4 or if padded."""
        return self._action_spaces[_known(agent)]

    def action_labels(self, agent: str) -> list[str]:
        """Return a label for each action of an agent, as in the original.

        Labels of traffic actions lack the original's addresses in parentheses. After the first
        reset, labels of actions on absent hosts begin with "[Invalid]".
        """
        index = codes.AGENT_NAMES.index(_known(agent))
        mask = self._masks.get(agent)
        labels = action_labels(index, mask)
        return labels + ["[Padding] Sleep"] * (self._sizes[index] - len(labels))

    def observation_labels(self, agent: str) -> list[str]:
        """Return a label for each value of an agent's vector, padding left out."""
        return observation_labels(codes.AGENT_NAMES.index(_known(agent)))

    def action_mask(self, agent: str) -> list[bool]:
        """Return which actions of an agent have an effect; constant throughout an episode."""
        return self._masks[_known(agent)].tolist()

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Begin an episode on a new network.

        Returns:
            Observations and infos by agent; each info has "action_mask", bool.
        """
        obs, _ = self._envs.reset(seed=seed)
        self.agents = list(codes.AGENT_NAMES)
        masks = zip(codes.AGENT_NAMES, self._envs.agent_masks(), self._sizes, strict=True)
        self._masks = {name: _padded(mask[0], size) for name, mask, size in masks}
        if self._raw:
            self._network = RawNetwork.of_game(self.true_state)
        return self._observations(obs), self._infos()

    def step(
        self, actions: Mapping[str, Any], messages: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], ...]:
        """Play one step.

        Args:
            actions: Indices by agent. Actions that the mask forbids act as Sleep. Agents that are
                left out sleep.
            messages: 8 bits by agent, as arrays of 0 and 1 or of bools; zeros for other agents.

        Returns:
            Observations, rewards (the same for all), terminations, truncations and infos by agent.

        Raises:
            ValueError: An agent is unknown, an action out of range, or a message of another shape.
            gymnasium.error.ResetNeeded: The episode is over or has not begun.
        """
        if not self.agents:
            raise ResetNeeded("the episode is over, or has not begun; call reset")
        row = self._actions[0]
        row[: codes.NUM_BLUE] = codes.SLEEPS
        row[codes.NUM_BLUE :] = 0
        for name, action in actions.items():
            agent = codes.AGENT_NAMES.index(_known(name))
            row[agent] = self._index(agent, action)
        for name, message in (messages or {}).items():
            row[codes.NUM_BLUE + codes.AGENT_NAMES.index(_known(name))] = _bits(name, message)
        obs, *results, _ = self._envs.step(self._actions)
        of_all = [dict.fromkeys(codes.AGENT_NAMES, result[0].item()) for result in results]
        if results[1][0] or results[2][0]:
            self.agents = []
        return self._observations(obs), *of_all, self._infos()

    def _index(self, agent: int, action: Any) -> int:
        """Return an agent's action as one that it has."""
        name = codes.AGENT_NAMES[agent]
        space: Any = self._action_spaces[name]
        given = np.asarray(action)
        is_whole = given.dtype.kind in "iub" and given.ndim == 0
        if not (is_whole and space.contains(given.astype(np.int64))):
            told = f"expected an integer from 0 to {space.n - 1}"
            raise ValueError(f"the action of {name} is {action!r}, {told}")
        return int(given) if given < codes.NUM_ACTIONS[agent] else codes.SLEEPS[agent]

    @property
    def true_state(self) -> np.record:
        """The true state, as a live record; see `Cage4VectorEnv`."""
        return self._envs.states[0]

    def render(self) -> Any:
        """Return a picture, uint8 (height, width, 3); None without a render mode."""
        return None if self.render_mode is None else self._envs.render()[0]

    def close(self) -> None:
        """Close the env; may be called twice."""
        self._envs.close()

    @property
    def unwrapped(self) -> Cage4ParallelEnv:
        """The env itself."""
        return self

    @property
    def num_agents(self) -> int:
        """Number of agents that act in the next step."""
        return len(self.agents)

    @property
    def max_num_agents(self) -> int:
        """Number of possible agents: five."""
        return codes.NUM_BLUE

    def _observations(self, obs: np.ndarray) -> dict[str, Any]:
        if self._raw:
            told = raw_observations(self.true_state, self._network)
            return dict(zip(codes.AGENT_NAMES, told, strict=True))
        vectors = zip(codes.AGENT_NAMES, vectors_of(obs.astype(np.int64)), strict=True)
        return {name: _padded(row[0], PADDED if self._pad else 0) for name, row in vectors}

    def _infos(self) -> dict[str, dict[str, Any]]:
        return {name: {"action_mask": mask.copy()} for name, mask in self._masks.items()}


class _AnyDict(Space[Any]):
    """Space of all dicts; it can't be sampled."""

    def contains(self, x: Any) -> bool:
        """Return whether x is a dict."""
        return isinstance(x, dict)


def _padded(row: np.ndarray, length: int) -> np.ndarray:
    """Return a copy of a row (n,), with zeros up to a length."""
    return np.pad(row, (0, max(0, length - len(row))))


def _known(agent: Any) -> str:
    if agent not in codes.AGENT_NAMES:
        raise ValueError(
            f"there is no agent {agent!r}, expected one of {', '.join(codes.AGENT_NAMES)}"
        )
    return agent


def _bits(name: str, message: Any) -> int:
    bits = np.asarray(message)
    is_row = bits.shape == (codes.MESSAGE_BITS,) and bits.dtype.kind in "iubf"
    if not is_row or not np.isin(bits, (0, 1)).all():
        raise ValueError(
            f"the message of {name} is {message!r}, expected {codes.MESSAGE_BITS} bits"
        )
    return int((bits.astype(np.int64) << np.arange(codes.MESSAGE_BITS)).sum())
