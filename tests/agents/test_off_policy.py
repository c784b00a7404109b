"""What a `TransitionWriter` makes of vector envs of agents: the lives of agents that come back."""

import numpy as np
import pytest
from agents.games import Game
from envs import MODES
from gymnasium.spaces import Box, Discrete

from buffers import EpisodicReplayBuffer, TransitionWriter
from vecenv import make_vec_agents

NEXT_STEP, SAME_STEP, DISABLED = MODES
LENGTH = 9


class Shifts(Game):
    """All observe the time. One agent stays; one works for two steps and is away in the third."""

    possible_agents = ["stays", "works"]
    _spaces = dict.fromkeys(possible_agents, (Box(-9, 99, (1,), np.float32), Discrete(3)))

    def reset(self, seed=None, options=None):
        self.time = 0
        self.agents = ["stays", "works"]
        return self.observed(self.agents), {}

    def step(self, actions):
        acted, self.time = self.agents, self.time + 1
        is_over, is_shift_over = self.time == LENGTH, self.time % 3 == 2
        ends = {agent: is_over or (is_shift_over and agent != "stays") for agent in acted}
        self.agents = [] if is_over else ["stays"] if is_shift_over else ["stays", "works"]
        rewards, no = dict.fromkeys(acted, 1.0), dict.fromkeys(acted, False)
        return self.observed({*acted, *self.agents}), rewards, ends, no, {}

    def observed(self, agents):
        return {agent: np.array([self.time], np.float32) for agent in agents}


STAYS = [list(range(LENGTH + 1))]
WORKS = [[k, k + 1, k + 2] for k in range(0, LENGTH, 3)]
GAMES = {
    "comes back": ({}, [STAYS + WORKS]),
    "two groups": ({"groups": {"s": ["stays"], "w": ["works"]}}, [STAYS, WORKS]),
}


def written(envs, make, by):
    """Buffers, one per group, that were filled from two games of each of two envs."""
    is_one, names = hasattr(envs, "group"), list(envs.groups)
    sources = {name: envs if is_one else envs.groups[name] for name in names}
    buffers = {name: make(source) for name, source in sources.items()}
    writers = {name: TransitionWriter(sources[name], buffers[name]) for name in names}

    def part(whole, name):
        return whole if is_one else whole.get(name, {})

    def reset():
        obs, _ = envs.reset(seed=1)
        for name in names:
            writers[name].reset(part(obs, name))

    reset()
    for t in range(2 * (LENGTH + (envs.autoreset_mode is NEXT_STEP))):
        if envs.autoreset_mode is DISABLED and t == LENGTH:
            reset()
        actions = {name: np.zeros(source.num_envs, int) for name, source in sources.items()}
        if by == "step":
            *results, infos = envs.step(actions[names[0]] if is_one else actions)
            for name in names:
                found = [part(result, name) for result in (*results, infos)]
                writers[name].step(actions[name], *found, valid=part(envs.valid, name))
            continue
        envs.send(actions[names[0]] if is_one else actions)
        for name in names:
            writers[name].sent(actions[name])
        for _ in range(2):  # games one by one
            batch = envs.recv(1)
            for name in names:
                writers[name].received(batch if is_one else batch.of(name))
    return list(buffers.values())


@pytest.mark.parametrize(("mode", "by"), [*zip(MODES, ("received", "step", "step"), strict=True)])
@pytest.mark.parametrize(("options", "lives"), GAMES.values(), ids=GAMES)
def test_each_life_is_an_episode(options, lives, mode, by):
    envs = make_vec_agents(Shifts, 2, backend="sync", autoreset_mode=mode, **options)

    def episodes(source):
        spaces = source.single_observation_space, source.single_action_space
        return EpisodicReplayBuffer(999, *spaces, num_envs=source.num_envs)

    for buffer, expected in zip(written(envs, episodes, by), lives, strict=True):
        found = [buffer.episode(k) for k in range(buffer.num_episodes)]
        assert sorted(episode["obs"][:, 0].tolist() for episode in found) == sorted(4 * expected)
        assert all(episode["terminations"][-1] for episode in found)
        assert not buffer.open_lengths.any()
