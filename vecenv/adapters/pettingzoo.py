"""GameView: one game of a vector env of agents, as a PettingZoo `ParallelEnv`."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from vecenv import ActionError
from vecenv.adapters import load_library, split_infos
from vecenv.agents import AgentRowsVecEnv, AgentsVecEnv

_library = load_library("pettingzoo", "agents")

__all__ = ["GameView"]


class GameView(_library.ParallelEnv):
    """The single game of a vector env of agents as a PettingZoo `ParallelEnv`.

    Code for a `ParallelEnv` can use games of any backend this way: TorchRL's `PettingZooWrapper`,
    RLlib's `ParallelPettingZooEnv`, PettingZoo's tests and wrappers. Spaces and groups are those of
    the vector env; agents that it pads have padded spaces here, too.

    Args:
        envs: A vector env of one game, in autoreset mode DISABLED or NEXT_STEP. `close` closes it.

    Attributes:
        envs: The vector env, in its form with dicts by group.
        agents: The agents that act next.
        possible_agents: All agents.

    Raises:
        TypeError: `envs` is not a vector env of agents.
        ValueError: It has several games, or resets a game in the step that ends it.

    Example:
        envs = vecenv.make_vec_agents("sisl/pursuit-v5", autoreset_mode="Disabled")
        game = GameView(envs)
    """

    def __init__(self, envs: AgentsVecEnv | AgentRowsVecEnv) -> None:
        if not isinstance(envs, AgentsVecEnv | AgentRowsVecEnv):
            raise TypeError(f"envs is {type(envs).__name__}, expected what make_vec_agents returns")
        self.envs = envs.agents if isinstance(envs, AgentRowsVecEnv) else envs
        if self.envs.num_games != 1:
            raise ValueError(
                f"envs has {self.envs.num_games} games, expected one; a view is of a single game"
            )
        if self.envs.autoreset_mode is AutoresetMode.SAME_STEP:
            raise ValueError(
                "envs has autoreset_mode SAME_STEP, in which a game that has ended is gone; pass "
                'autoreset_mode="Disabled"'
            )
        self.possible_agents: list[Any] = [
            agent for group in self.envs.groups.values() for agent in group.agents
        ]
        self.agents: list[Any] = []
        self.metadata = dict(self.envs.metadata)
        self.render_mode = self.envs.render_mode
        self._places = {
            agent: (name, k)
            for name, group in self.envs.groups.items()
            for k, agent in enumerate(group.agents)
        }

    def observation_space(self, agent: Any) -> Space:
        """Return the observation space of an agent."""
        return self.envs.groups[self._places[agent][0]].single_observation_space

    def action_space(self, agent: Any) -> Space:
        """Return the action space of an agent."""
        return self.envs.groups[self._places[agent][0]].single_action_space

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Reset the game; return the observations and infos of its agents."""
        obs, infos = self.envs.reset(seed=seed, options=options)
        self.agents = self._alive()
        return self._rows(obs, self.agents), self._split(infos, self.agents)

    def step(self, actions: dict[Any, Any]) -> tuple[dict[Any, Any], ...]:
        """Step the game.

        Args:
            actions: Actions of the agents that are alive; others are ignored. If no agent is alive,
                nothing is stepped.

        Returns:
            Observations, rewards, terminations, truncations and infos of the agents that acted, and
            observations of agents that joined.

        Raises:
            ValueError: The action of an agent that is alive is missing.
            ActionError: An action does not fit its space in size or kind, or is NaN.
        """
        if not self.agents:
            return {}, {}, {}, {}, {}
        if missing := [agent for agent in self.agents if agent not in actions]:
            raise ValueError(f"actions has {list(actions)}, but no action of {missing}")
        acted = set(self.agents)
        batched = {}
        for name, group in self.envs.groups.items():
            space = group.single_action_space
            batch = np.zeros((group.num_envs, *(space.shape or ())), space.dtype)
            for k, agent in enumerate(group.agents):
                if agent in acted:
                    batch[k] = _checked(agent, actions[agent], space)
            batched[name] = batch
        obs, rewards, terminations, truncations, infos = self.envs.step(batched)
        self.agents = self._alive()
        known = [agent for agent in self.possible_agents if agent in acted or agent in self.agents]
        return (
            self._rows(obs, known),
            {agent: float(value) for agent, value in self._rows(rewards, known).items()},
            {agent: bool(value) for agent, value in self._rows(terminations, known).items()},
            {agent: bool(value) for agent, value in self._rows(truncations, known).items()},
            self._split(infos, known),
        )

    @property
    def state_space(self) -> Space:
        """The space of the central state.

        Raises:
            AttributeError: The vector env was not made with `central_state=True`.
        """
        if self.envs.state_space is None:
            raise AttributeError("no central state: make the vector env with central_state=True")
        return self.envs.state_space

    def state(self) -> np.ndarray:
        """Return the central state."""
        return self.envs.state()[0]

    def render(self) -> Any:
        """Return the frame of the game."""
        return self.envs.render()[0]

    def close(self) -> None:
        """Close the vector env; may be called twice."""
        self.envs.close()

    def _alive(self) -> list[Any]:
        groups = self.envs.groups
        return [agent for agent, (name, k) in self._places.items() if groups[name].alive[k]]

    def _rows(self, batches: dict[str, Any], agents: list[Any]) -> dict[Any, Any]:
        """Return the rows of some agents as a dict by agent."""
        places = {agent: self._places[agent] for agent in agents}
        return {agent: _row(batches[name], k) for agent, (name, k) in places.items()}

    def _split(self, infos: dict[str, Any], agents: list[Any]) -> dict[Any, Any]:
        """Return the infos by agent, and those of the game as "common"."""
        rows = {
            name: split_infos(infos.get(name, {}), group.num_envs)
            for name, group in self.envs.groups.items()
        }
        found = self._rows(rows, agents)
        common = split_infos({k: v for k, v in infos.items() if k not in rows}, 1)[0]
        if common:
            found["common"] = common.pop("common", {}) | common
        return found


def _checked(agent: Any, action: Any, space: Any) -> np.ndarray:
    """Return an action as an array of the space's shape."""
    array = np.asarray(action)
    size = np.prod(space.shape or (), dtype=int)
    kinds = "biuf" if space.dtype.kind == "f" else "biu"
    if array.size != size or array.dtype.kind not in kinds:
        raise ActionError(
            f"the action of agent {agent!r} is {action!r}, of shape {array.shape} and dtype "
            f"{array.dtype}; expected one of {space}"
        )
    return array.reshape(space.shape)


def _row(batch: Any, k: int) -> Any:
    if isinstance(batch, dict):
        return {key: _row(part, k) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_row(part, k) for part in batch)
    return batch[k]
