"""Transitions of agents that die and come: what buffers store, against lists of their lives."""

from types import SimpleNamespace

import numpy as np
import pytest
from agent_games import DISABLED, MODES, SAME_STEP, AgentGames
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_model import ACTIONS, OBS, CountingEnvs, columns_of

from buffers import BufferMisuseError, EpisodicReplayBuffer, SharedReplayBuffer, TransitionWriter

GAMMA = 0.9
SEEN = Box(-np.inf, np.inf, (1,), np.float32)


def steps_of(envs, ids, valid):
    """A step of each of some envs; one that is not valid has nothing to do with the others."""
    steps = []
    for env, is_valid in zip(ids.tolist(), valid.tolist(), strict=True):
        if not is_valid:
            envs.cut(env)
        steps += envs.random_steps([env])
        if not is_valid:
            envs.cut(env)
    return steps


WRONG = [
    (np.ones(3, bool), r"valid has shape \(3,\), expected \(4,\)"),
    (np.ones((4, 1), bool), r"valid has shape \(4, 1\), expected \(4,\)"),
    (np.ones(4), "valid has dtype float64, expected bool"),
    (np.array([0, 1, 2, 1]), "valid has 2, expected bool, or integers 0 and 1"),
]


@pytest.mark.parametrize(("valid", "message"), WRONG)
@pytest.mark.parametrize("kind", [SharedReplayBuffer, EpisodicReplayBuffer])
def test_valid_that_does_not_fit_is_refused_and_changes_nothing(kind, valid, message):
    buffer, envs = kind(10, OBS, ACTIONS, num_envs=4), CountingEnvs(4)
    steps = [envs.step(env, True, False) for env in range(4)]
    with pytest.raises(BufferMisuseError, match=message):
        buffer.add(**columns_of(steps), valid=valid)
    assert len(buffer) == 0
    buffer.add(**columns_of(steps))


def episodes_of(buffer):
    """All episodes held, as lists of the numbers of their observations and their flags."""
    found = []
    for k in range(buffer.num_episodes):
        episode = buffer.episode(k)
        flags = [episode[name][-1].item() for name in ("terminations", "truncations")]
        found.append((episode["obs"][:, 0].tolist(), *flags))
    return sorted(found)


def lists_of(lives):
    """The same of lists of transitions."""
    return sorted(
        ([*(s.obs for s in life), life[-1].next_obs], life[-1].terminated, life[-1].truncated)
        for life in lives
    )


@settings(max_examples=8, deadline=None)
@given(num_envs=st.integers(1, 4), staged=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_episodes_begin_and_end_with_the_valid_rows(num_envs, staged, seed):
    envs, rng = CountingEnvs(num_envs, seed), np.random.default_rng(seed)
    buffer = EpisodicReplayBuffer(500, OBS, ACTIONS, num_envs=num_envs, staged=staged, seed=0)
    done, current = [], [[] for _ in range(num_envs)]
    for _ in range(20):
        ids = rng.permutation(num_envs)[: rng.integers(1, num_envs + 1)]
        valid = rng.random(len(ids)) < 0.7
        steps = steps_of(envs, ids, valid)
        for env, is_valid, step in zip(ids.tolist(), valid.tolist(), steps, strict=True):
            if is_valid:
                current[env].append(step)
            if current[env] and (not is_valid or step.terminated or step.truncated):
                done.append(current[env])
                current[env] = []
        buffer.add(ids, **columns_of(steps), valid=valid)
        assert buffer.open_lengths.tolist() == [len(steps) for steps in current]
        assert episodes_of(buffer) == lists_of(done)


def made(mode, games=3, agents=2, seed=1):
    """Games, and what a writer asks of the vector env."""
    played = AgentGames(mode, games, agents, seed)
    envs = SimpleNamespace(
        metadata={"autoreset_mode": mode}, num_envs=played.num_envs,
        single_observation_space=SEEN, single_action_space=Discrete(3),
    )  # fmt: skip
    return played, envs


def play(games, writer, num_steps, *, by_halves=False):
    """Write some steps, whole or as sent and received."""
    everyone = np.arange(games.num_envs)
    for _ in range(num_steps):
        step = games.step()
        actions = np.full(games.num_envs, games.t % 3)
        results = step.obs, step.rewards, step.terminations, step.truncations
        if not by_halves:
            writer.step(actions, *results, step.infos, valid=step.valid)
        else:
            order = games.rng.permutation(games.num_envs)
            writer.sent(actions, everyone)
            for ids in np.array_split(order, 2):
                infos = {name: values[ids] for name, values in step.infos.items()}
                parts = [column[ids] for column in results]
                names = "obs", "rewards", "terminations", "truncations"
                batch = SimpleNamespace(**dict(zip(names, parts, strict=True)))
                batch.infos, batch.env_ids, batch.valid = infos, ids, step.valid[ids]
                writer.received(batch)
        if games.mode == DISABLED and games.over.any():
            rows = games.reset_rows
            writer.reset(games.reset(), rows)


@settings(max_examples=8, deadline=None)
@given(
    mode=st.sampled_from(MODES),
    num_games=st.integers(1, 3),
    agents=st.integers(1, 4),
    by_halves=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_writer_stores_the_lives_of_agents(mode, num_games, agents, by_halves, seed):
    games, envs = made(mode, num_games, agents, seed)
    size = games.num_envs
    episodes = EpisodicReplayBuffer(5000, SEEN, Discrete(3), num_envs=size, seed=0)
    shared = SharedReplayBuffer(
        5000, SEEN, Discrete(3), num_envs=size, n_step=3, gamma=GAMMA, store_next=seed % 2 == 0
    )
    buffers = [episodes, shared]  # one stream of steps into both
    writers = [TransitionWriter(envs, buffer) for buffer in buffers]
    for writer in writers:
        writer.reset(games.obs)
    play(games, Several(writers), 25, by_halves=by_halves)
    lives = [life for row in games.lives for life in row]
    assert episodes_of(episodes) == lists_of(life for life in lives if life[-1].is_over)
    open_lives = [row[-1] if row and not row[-1][-1].is_over else [] for row in games.lives]
    assert episodes.open_lengths.tolist() == [len(life) for life in open_lives]
    number = sum(map(len, lives))
    assert [writer.num_transitions for writer in writers] == [number] * 2
    check_windows(shared, lives)


def check_windows(buffer, lives):
    """Windows of three steps, of all transitions there are."""
    batch = buffer.get(buffer.order())
    expected = {}
    for life in lives:
        for k, step in enumerate(life):
            window = life[k : k + 3]
            total = sum(GAMMA**i * made.reward for i, made in enumerate(window))
            discount = 0.0 if window[-1].terminated else GAMMA ** len(window)
            expected[step.obs] = total, discount, window[-1].next_obs
    assert sorted(batch.obs[:, 0].tolist()) == sorted(expected)
    for obs, *found in zip(
        batch.obs[:, 0].tolist(), batch.rewards.tolist(), batch.discounts.tolist(),
        batch.next_obs[:, 0].tolist(), strict=True,
    ):  # fmt: skip
        np.testing.assert_allclose(found, expected[obs], rtol=1e-5, atol=1e-5)


class Several:
    """Passes each call on to several writers."""

    def __init__(self, writers):
        self.writers = writers

    def __getattr__(self, name):
        def call(*args, **kwargs):
            for writer in self.writers:
                getattr(writer, name)(*args, **kwargs)

        return call


def test_a_writer_under_same_step_needs_final_obs_of_games_that_were_reset():
    _, envs = made(SAME_STEP, 1, 2)
    buffer = SharedReplayBuffer(50, SEEN, Discrete(3))
    writer = TransitionWriter(envs, buffer)
    obs, no = np.ones((2, 1), np.float32), np.zeros(2, bool)
    writer.reset(obs)
    ended = np.array([True, False])
    writer.step(np.zeros(2, int), obs, np.zeros(2), ended, no, {}, valid=~no)
    with pytest.raises(BufferMisuseError, match=r"rows \[0\] have ended and act again"):
        writer.step(np.zeros(2, int), obs, np.zeros(2), no, no, {}, valid=~no)
    writer.step(np.zeros(2, int), obs, np.zeros(2), no, no, {}, valid=~ended)
    writer.step(np.zeros(2, int), obs, np.zeros(2), no, no, {}, valid=~no)  # begun anew meanwhile
    assert len(buffer) == 5
