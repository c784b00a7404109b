"""Games with several agents, in PettingZoo's form but without PettingZoo; little is imported."""

import os
import signal
import time

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete

FINE, RAISE, DIE, HANG, LACK, STRANGER, GROW, NO_REWARD, NO_DICTS, NAN = range(10)


class Game:
    """What games have in common; `_spaces` are those of observations and actions by agent."""

    metadata = {}

    def observation_space(self, agent):
        return self._spaces[agent][0]

    def action_space(self, agent):
        return self._spaces[agent][1]

    def close(self):
        pass


class Tag(Game):
    """Runners and a catcher; who dies, leaves or comes is drawn, and actions are observed.

    The generator goes on from game to game, so that what `reset(seed)` gives depends on the past:
    each reset draws how many earlier games there were. Dead agents get NaN.
    """

    metadata = {"name": "tag", "render_modes": ["ansi"]}
    render_mode = "ansi"

    def __init__(self, num_runners=3, length=9, with_catcher=True, late=True, forgets=False):
        self.runners = [f"runner_{k}" for k in range(num_runners)]
        self.possible_agents = self.runners + (["catcher_0"] if with_catcher else [])
        self.length, self.late = length, late
        self.forgets = forgets  # so that a seed alone says what comes
        self.num_games = 0
        self.agents = []
        self.rng = np.random.default_rng(0)
        self.state_space = Box(-np.inf, np.inf, (2,), np.float64)
        self._spaces = {
            agent: (Box(-9, 99, (3,), np.float32), Discrete(4))
            if agent in self.runners
            else (Box(-9, 99, (2, 2), np.float32), Box(-1, 1, (2,), np.float32))
            for agent in self.possible_agents
        }

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng([seed, 0 if self.forgets else self.num_games])
        self.num_games += 1
        self.count = 0
        self.options = options
        # The last runner comes later.
        self.waiting = self.runners[-1:] if self.late else []
        self.agents = [agent for agent in self.possible_agents if agent not in self.waiting]
        self.last = {}
        return {agent: self._observe(agent) for agent in self.agents}, self._infos(self.agents)

    def _observe(self, agent):
        drawn = self.rng.random()
        if agent in self.runners:
            return np.array([self.count, drawn, self.last.get(agent, -1)], np.float32)
        x, y = self.last.get(agent, (0, 0))
        return np.array([[self.count, drawn], [x, y]], np.float32)

    def _infos(self, agents):
        infos = {agent: {} for agent in agents}
        for agent in agents[::2]:
            infos[agent] = {"drawn": self.rng.random(), "place": np.arange(2) + self.count}
            infos[agent]["more"] = {"name": agent}
        if self.count % 2:
            infos["common"] = {"count": self.count}
        return infos

    def step(self, actions):
        assert actions.keys() == set(self.agents), (actions.keys(), self.agents)
        self.count += 1
        for agent, action in actions.items():
            self.last[agent] = action
        is_over = self.count >= self.length
        acted, dead = self.agents, {a for a in self.agents if self.rng.random() < 0.15}
        leavers = {a for a in self.agents if a not in dead and self.rng.random() < 0.05}
        if self.waiting and self.rng.random() < 0.4:
            acted, self.waiting = [*acted, *self.waiting], []
            acted = [agent for agent in self.possible_agents if agent in acted]
        everyone = self.possible_agents
        obs = {a: self._observe(a) if a in acted else None for a in everyone}
        rewards = {a: self.rng.normal() if a in acted else np.nan for a in everyone}
        terminations = {a: a in dead for a in everyone}
        truncations = {a: is_over and a not in dead for a in everyone}
        self.agents = [] if is_over else [a for a in acted if a not in dead | leavers]
        return obs, rewards, terminations, truncations, self._infos(acted)

    def state(self):
        return np.array([self.count, self.num_games], np.float64)

    def render(self):
        return f"count {self.count}"


def runners(num_runners=3, **options):
    """A game of one group, which observes vectors and acts in Discrete(4)."""
    return Tag(num_runners, with_catcher=False, **options)


class Reusing(Game):
    """Two players that are given the same dict of the same arrays at every step and reset."""

    possible_agents = ["player_0", "player_1"]
    _spaces = dict.fromkeys(possible_agents, (Box(-9, 9, (2,), np.float32), Discrete(2)))

    def __init__(self):
        self.obs = {agent: np.zeros(2, np.float32) for agent in self.possible_agents}

    def _set(self, value):
        for array in self.obs.values():
            array[:] = value
        return self.obs

    def reset(self, seed=None, options=None):
        self.agents = self.possible_agents
        return self._set(7), {agent: {} for agent in self.agents}

    def step(self, actions):
        agents, self.agents = self.agents, []
        no, yes = dict.fromkeys(agents, False), dict.fromkeys(agents, True)
        return self._set(3), dict.fromkeys(agents, 0.0), yes, no, {agent: {} for agent in agents}


class Crowd(Game):
    """Walkers with names of their own, without `possible_agents`: one more at each step."""

    def __init__(self, stay=3, length=8):
        self.stay, self.length = stay, length

    def reset(self, seed=None, options=None):
        self.count, self.born = 0, {"walker-0": 0}
        self.agents = list(self.born)
        return {a: self._observe(a) for a in self.agents}, {}

    def _observe(self, agent):
        return np.array([int(agent.rpartition("-")[2]), self.count], np.float32)

    def step(self, actions):
        self.count += 1
        acted = list(self.agents)
        new = f"walker-{self.count}"
        self.born[new] = self.count
        over = dict.fromkeys(acted, self.count >= self.length)
        gone = {a: self.count - self.born[a] >= self.stay for a in acted}
        self.agents = [a for a in acted if not (gone[a] or over[a])]
        if self.count < self.length:
            self.agents.append(new)
        obs = {a: self._observe(a) for a in {*acted, *self.agents}}
        return obs, dict.fromkeys(acted, 1.0), gone, over, {}


class Faulty(Game):
    """Two bots that count; an action says what goes wrong, of the bot whose action it is."""

    possible_agents = ["bot_0", "bot_1"]
    agents = ()
    _spaces = dict.fromkeys(possible_agents, (Box(-1, 999, (2,), np.float32), Discrete(10)))

    def __init__(self, length=100, num_agents_at_reset=2):
        self.length, self.num_agents_at_reset = length, num_agents_at_reset

    def reset(self, seed=None, options=None):
        self.count = 0
        self.agents = self.possible_agents[: self.num_agents_at_reset]
        return {a: np.zeros(2, np.float32) for a in self.agents}, {}

    def step(self, actions):
        self.count += 1
        obs = {a: np.full(2, self.count, np.float32) for a in self.agents}
        rewards = dict.fromkeys(self.agents, 1.0)
        is_over = self.count >= self.length
        terminations = dict.fromkeys(self.agents, is_over)
        truncations = dict.fromkeys(self.agents, False)
        for agent, action in actions.items():
            if action == RAISE:
                raise KeyError(f"{agent} has no such arm")
            if action == DIE:
                os.kill(os.getpid(), signal.SIGKILL)
            if action == HANG:
                time.sleep(60)
            if action == LACK:
                del obs[agent]
            if action == STRANGER:
                obs["bot_9"] = obs[agent]
            if action == GROW:
                obs[agent] = np.zeros(3, np.float32)
            if action == NO_REWARD:
                del rewards[agent]
            if action == NAN:
                obs[agent] *= np.nan
                rewards[agent] = np.nan
            if action == NO_DICTS:
                return [obs], rewards, terminations, truncations, {}
        if is_over:
            self.agents = []
        return obs, rewards, terminations, truncations, {}


class Mixed(Game):
    """Agents of different spaces, for padding."""

    possible_agents = ["short", "long"]

    def __init__(self, kind="discrete"):
        spaces = {
            "discrete": (Discrete(2), Discrete(5)),
            "several": (MultiDiscrete([2, 3]), MultiDiscrete([4, 3])),
            "vectors": (Box(-1, 1, (1,), np.float32), Box(-1, 1, (3,), np.float32)),
            "unlike": (Discrete(2), Box(-1, 1, (3,), np.float32)),
        }[kind]
        seen = Box(1, 5, (2,), np.float32), Box(0, 9, (4,), np.float32)
        self._spaces = dict(zip(self.possible_agents, zip(seen, spaces, strict=True), strict=True))
        self.seen = []

    def _observe(self):
        return {"short": np.full(2, 3, np.float32), "long": np.full(4, 7, np.float32)}

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        return self._observe(), {}

    def step(self, actions):
        self.seen.append(actions)
        for agent, action in actions.items():
            assert self.action_space(agent).contains(action), (agent, action)
        flags = dict.fromkeys(self.agents, False)
        return self._observe(), dict.fromkeys(self.agents, 1.0), flags, dict(flags), {}


class Turns:
    """What an AEC env looks like from outside."""

    metadata = {"name": "turns_v0", "is_parallelizable": False}
    possible_agents = ["white", "black"]

    def agent_iter(self):
        raise NotImplementedError

    def __str__(self):
        return "turns_v0"

    def reset(self, seed=None, options=None):
        raise NotImplementedError

    def step(self, action):
        raise NotImplementedError
