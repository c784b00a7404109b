"""Rows of agents that die and come: what is learned from, against lists of the agents' lives."""

import numpy as np
import pytest
import torch
from agent_games import DISABLED, MODES, NEXT_STEP, AgentGames
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st
from staged_rollouts import make_rollout

from buffers import BufferMisuseError
from buffers.rollout.storage import UNWRITTEN_FLAG

GAMMA, LAMBDA = 0.9, 0.8
OBS, ACTIONS = Box(-np.inf, np.inf, (1,), np.float32), Discrete(5)
ANY = -np.inf, np.inf
DEAD = 1e5  # what the critic makes of a dead agent's observation: it must show nowhere


def remember(state, obs):
    """What a policy with memory has after an observation; its value of it too."""
    return 0.5 * state + np.where(obs == 0.0, DEAD, np.sin(obs))


class Learner:
    """Collects rollouts of agents' rows with a policy that has memory.

    Args:
        games: Where steps come from.
        num_steps: T.
        options: Of the buffer.
    """

    def __init__(self, games, num_steps, **options):
        self.games = games
        self.rollout = make_rollout(
            num_steps, games.num_envs, OBS, ACTIONS, autoreset_mode=games.mode, gamma=GAMMA,
            gae_lambda=LAMBDA, seed=1, extra_columns={"hidden": Box(*ANY, (), np.float64)},
            game_columns={"state": Box(*ANY, (2,), np.float64)}, agents_per_game=games.agents,
            **options,
        )  # fmt: skip
        self.rollout.start(games.obs)
        self.memory = np.zeros(games.num_envs)
        self.begin = 0  # first step of the rollout

    def values(self, t):
        """Values of the observations before step t; the memory moves on."""
        obs = self.rollout.obs_at(t).cpu().numpy()[:, 0].astype(float)
        self.before = np.where(self.rollout.is_first_at(t).cpu().numpy(), 0.0, self.memory)
        self.memory = remember(self.before, obs)
        return self.memory.astype(np.float32)

    def collect(self):
        rollout, games = self.rollout, self.games
        self.begin = games.t + 1
        for t in range(rollout.num_steps):
            values = self.values(t)
            state = np.stack([np.arange(games.num_games), np.full(games.num_games, t)], axis=1)
            rollout.put(
                t, actions=np.full(games.num_envs, t % 5), log_probs=-values, values=values,
                hidden=self.before, state=state,
            )  # fmt: skip
            self.write(t, games.step())
        memory = self.memory
        rollout.compute_advantages(self.values(rollout.num_steps))
        self.memory = memory  # the next rollout begins with the same observations

    def write(self, t, step):
        rollout, games, slot = self.rollout, self.games, self.rollout.slot(t)
        slot.obs[:], slot.rewards[:] = step.obs, step.rewards
        if games.agents > 1:  # else as single envs, whose steps that only reset the buffer knows
            slot.valid[:] = step.valid
        slot.terminations[:], slot.truncations[:] = step.terminations, step.truncations
        if step.has_final.any():
            finals = remember(self.memory, step.final_obs[:, 0])[step.has_final]
            rollout.set_final_values(t, step.has_final, finals.astype(np.float32))
        if games.mode == DISABLED and games.over.any():
            ended = games.reset_rows & (step.terminations | step.truncations)
            finals = remember(self.memory, step.obs[:, 0])[ended]
            rollout.set_final_values(t, ended, finals.astype(np.float32))
            rollout.write_obs(t + 1, games.reset())


def values_of(life):
    """Values of a life's observations, one by one; of the last next_obs too."""
    memory, values = 0.0, []
    for obs in [*(step.obs for step in life), life[-1].next_obs]:
        memory = float(remember(memory, obs))
        values.append(memory)
    return values


def model_of(games, begin, num_steps):
    """Valid rows, advantages and returns (T, N) by loops, and where the lives begin."""
    shape = num_steps, games.num_envs
    valid, firsts = np.zeros(shape, bool), np.zeros(shape, bool)
    advantages, returns = np.zeros((2, *shape))
    for row, lives in enumerate(games.lives):
        for life in lives:
            values = values_of(life)
            firsts[[s.t - begin for s in life[:1] if 0 <= s.t - begin < num_steps], row] = True
            following = 0.0
            for k in reversed(range(len(life))):
                step = life[k]
                if not 0 <= step.t - begin < num_steps:
                    continue
                delta = step.reward - values[k]
                if not step.terminated:
                    delta += GAMMA * values[k + 1]
                following = delta + (0.0 if step.is_over else GAMMA * LAMBDA * following)
                place = step.t - begin, row
                valid[place] = True
                advantages[place], returns[place] = following, following + values[k]
    return valid, advantages, returns, firsts


def ended_lives(games, begin, num_steps):
    """Returns and lengths of the lives that ended in some steps, by time, then by row."""
    found = [
        (life[-1].t, row, sum(step.reward for step in life), len(life))
        for row, lives in enumerate(games.lives)
        for life in lives
        if life[-1].is_over and begin <= life[-1].t < begin + num_steps
    ]
    return [(total, length) for _, _, total, length in sorted(found)]


def check(learner):
    """A rollout that was collected, against the lives."""
    rollout, games = learner.rollout, learner.games
    model = model_of(games, learner.begin, rollout.num_steps)
    valid, advantages, returns, firsts = model
    assert (rollout.valid.numpy() == valid).all()
    assert rollout.num_valid == valid.sum()
    np.testing.assert_allclose(rollout.advantages.numpy(), advantages, rtol=1e-4, atol=1e-4)
    close = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(rollout.returns.numpy()[valid], returns[valid], **close)
    stats = rollout.episodes()
    expected = ended_lives(games, learner.begin, rollout.num_steps)
    assert stats.lengths.tolist() == [length for _, length in expected]
    np.testing.assert_allclose(stats.returns, [total for total, _ in expected], **close)
    for t in range(rollout.num_steps):
        assert (rollout.is_first_at(t).numpy()[valid[t]] == firsts[t][valid[t]]).all()
    check_batches(rollout, games, valid)


def check_batches(rollout, games, valid):
    """Batches have the valid rows once each, and the game columns of their games."""
    rows = np.flatnonzero(valid).tolist()
    for fixed in (False, True):
        seen = []
        for batch in rollout.minibatches(
            min(3, valid.size), fixed=fixed, normalize_advantages=True
        ):
            own = torch.ones(len(batch)) if batch.weights is None else batch.weights
            is_own = own > 0
            seen += batch.indices[is_own].tolist()
            assert valid.reshape(-1)[batch.indices.numpy()].all()
            raw = rollout.advantages.flatten()[batch.indices[is_own]].double()
            deviation = raw.std() if len(raw) > 1 else torch.tensor(0.0)
            expected = (raw - raw.mean()) / (deviation + 1e-8)
            if len(raw) > 1 and deviation > 1e-2:
                found = batch.advantages[is_own].double()
                torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
            check_states(batch, games)
        assert sorted(seen) == rows
    for length in {1, min(3, rollout.num_steps), rollout.num_steps}:
        check_sequences(rollout, games, length, rows)


def check_sequences(rollout, games, length, rows):
    """Sequences have the valid rows once each, and what the policy remembered."""
    firsts, seen = torch.stack([rollout.is_first_at(t) for t in range(rollout.num_steps)]), []
    number = min(2, -(-rollout.num_steps // length) * rollout.num_envs)
    for batch in rollout.sequences(number, length=length, initial_states=["hidden"]):
        times, envs = batch.indices // rollout.num_envs, batch.indices % rollout.num_envs
        assert (times[0] % length == 0).all() and (envs == envs[0]).all()
        last = torch.tensor(rollout.num_steps - 1)
        assert times.equal((times[0] + torch.arange(length)[:, None]).minimum(last))
        assert batch.is_first.equal(firsts[times, envs])
        seen += batch.indices[batch.weights > 0].tolist()
        check_states(batch, games)
        memory = batch.initial_states["hidden"].numpy()
        for obs, is_first, values, weights in zip(
            batch.obs, batch.is_first, batch.values, batch.weights, strict=True
        ):
            memory = remember(np.where(is_first, 0.0, memory), obs.numpy()[:, 0].astype(float))
            is_own = (weights > 0).numpy()
            np.testing.assert_allclose(memory[is_own], values.numpy()[is_own], rtol=1e-5)
    assert sorted(seen) == rows


def check_states(batch, games):
    t, row = torch.div(batch.indices, games.num_envs, rounding_mode="floor"), batch.indices
    game = torch.div(row % games.num_envs, games.agents, rounding_mode="floor")
    assert batch.extras["state"].equal(torch.stack([game, t], dim=-1).double())


@settings(max_examples=10, deadline=None)
@given(
    mode=st.sampled_from(MODES),
    num_games=st.integers(1, 4),
    agents=st.integers(1, 4),
    num_steps=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
    staged=st.booleans(),
)
def test_rollouts_learn_from_what_agents_did_and_nothing_else(
    mode, num_games, agents, num_steps, seed, staged
):
    learner = Learner(AgentGames(mode, num_games, agents, seed), num_steps, staged=staged)
    for _ in range(3):
        learner.collect()
        check(learner)
        learner.rollout.advance()


@pytest.mark.parametrize("mode", ["SameStep", "Disabled"])
def test_truncation_without_final_value_is_refused_and_can_be_mended(mode):
    rollout = make_rollout(2, 2, OBS, ACTIONS, autoreset_mode=mode, gamma=1.0)
    rollout.start(np.zeros((2, 1), np.float32))
    for t in range(2):
        rollout.slot(t).truncations[:] = [False, t == 1]
        rollout.slot(t).terminations[:] = [t == 0, False]
        rollout.slot(t).rewards[:] = 0
    with pytest.raises(BufferMisuseError, match="env 1 was truncated in step 1, but the value"):
        rollout.compute_advantages(np.zeros(2), policy_outputs=False)
    rollout.set_final_values(1, [1], [8.0])
    rollout.compute_advantages(np.zeros(2), policy_outputs=False)
    assert rollout.advantages[1].tolist() == [0.0, 8.0]


@pytest.mark.gpu
@pytest.mark.parametrize("agents", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_cuda_rollouts_equal_those_of_the_cpu(mode, agents):
    host, device = (Learner(AgentGames(mode, 4, agents, 1), 9, device=d) for d in ("cpu", "cuda"))
    for _ in range(3):
        for learner in (host, device):
            learner.collect()
        pairs = zip(host.rollout.minibatches(3), device.rollout.minibatches(3), strict=True)
        for left, right in pairs:
            for one, other in zip(left, right, strict=True):
                torch.testing.assert_close(one, other.cpu(), rtol=1e-5, atol=1e-5)
        for learner in (host, device):
            learner.rollout.advance()


def filled(rollout, valid=None, terminations=False, truncations=False):
    """Fill all steps; valid (T, N) if given."""
    num_envs = rollout.num_envs
    for t in range(rollout.num_steps):
        zeros = torch.zeros(num_envs)
        rollout.put(t, actions=zeros.long(), log_probs=zeros, values=zeros + t)
        slot = rollout.slot(t)
        slot.obs[:], slot.rewards[:] = 0.0, 1.0
        slot.terminations[:] = np.broadcast_to(terminations, (rollout.num_steps, num_envs))[t]
        slot.truncations[:] = np.broadcast_to(truncations, (rollout.num_steps, num_envs))[t]
        if valid is not None:
            slot.valid[:] = valid[t]
    return rollout


def made(mode=NEXT_STEP, num_steps=4, num_envs=3, **options):
    rollout = make_rollout(num_steps, num_envs, OBS, ACTIONS, autoreset_mode=mode, **options)
    rollout.start(np.zeros((num_envs, 1), np.float32))
    return rollout


@pytest.mark.parametrize("method", ["compute_advantages", "episodes", "advance"])
def test_valid_that_is_written_in_part_is_refused_with_step_and_rows(method):
    rollout = filled(made(), np.ones((4, 3), bool))
    for t in range(4):
        rollout.slot(t)
    filled(rollout)  # written again
    rollout._storage.acting.fill_(UNWRITTEN_FLAG)
    for t in (0, 1, 3):
        rollout.slot(t).valid[:] = True
    rollout.slot(2).valid[1] = True
    arguments = [torch.zeros(3)] if method == "compute_advantages" else []
    with pytest.raises(BufferMisuseError, match=r"env 0 in step 2 had no valid, but others"):
        getattr(rollout, method)(*arguments)
    rollout.slot(2).valid[:] = [True, False, True]
    getattr(rollout, method)(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"game_columns": {"s": OBS}}, "game_columns needs agents_per_game"),
        ({"agents_per_game": 4}, "agents_per_game is 4, which does not divide num_envs = 6"),
        ({"agents_per_game": 0}, "agents_per_game must be a positive integer"),
        ({"game_columns": {"obs": OBS}, "agents_per_game": 2}, "game column 'obs' has a name"),
        (
            {"game_columns": {"s": OBS}, "extra_columns": {"s": OBS}, "agents_per_game": 2},
            "game column 's' has a name that is taken",
        ),
    ],
)
def test_game_columns_that_do_not_fit_are_refused(options, message):
    with pytest.raises(BufferMisuseError, match=message):
        make_rollout(4, 6, OBS, ACTIONS, autoreset_mode=NEXT_STEP, **options)


def test_game_columns_have_a_row_per_game_and_are_no_initial_states():
    rollout = made(num_envs=6, game_columns={"s": OBS}, agents_per_game=3)
    with pytest.raises(BufferMisuseError, match=r"s has shape \(6, 1\), expected \(2, 1\)"):
        rollout.put(0, s=np.zeros((6, 1)))
    rollout.put(0, s=np.zeros((2, 1)))
    with pytest.raises(BufferMisuseError, match="steps 1, 2, 3 have no s, but others have"):
        filled(rollout).compute_advantages(torch.zeros(6))
    rollout.extras["s"][:] = 3.0
    for t in range(4):
        rollout.put(t, s=np.zeros((2, 1)))
    rollout.compute_advantages(torch.zeros(6))
    with pytest.raises(BufferMisuseError, match=r"initial_states has 's', expected names of extra"):
        rollout.sequences(1, initial_states="s")


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((0,), {}, "num_minibatches must be a positive integer, got 0"),
        ((5,), {}, "num_minibatches is 5, but the rollout has 4 sequences of 6 steps"),
        ((9,), {"length": 3}, "num_minibatches is 9, but the rollout has 8 sequences"),
        ((1,), {"length": 7}, "length is 7, but the rollout has 6 steps"),
        ((1,), {"length": 0}, "length must be a positive integer, got 0"),
        ((1,), {"initial_states": ["state"]}, r"'state', expected .* \['hidden'\]"),
    ],
)
def test_mistakes_of_sequences_are_named_at_the_call(args, options, message):
    rollout = filled(made(num_steps=6, num_envs=4, extra_columns={"hidden": OBS}))
    rollout.compute_advantages(torch.zeros(4))
    with pytest.raises(BufferMisuseError, match=message):
        rollout.sequences(*args, **options)
