"""Copies of compiled envs in the midst of their episodes: rows, snapshots, luck, refusals."""

import numpy as np
import pytest
from envs import begun
from gymnasium.error import AlreadyPendingCallError, ResetNeeded
from gymnasium.vector import AutoresetMode
from jit.toy_env import PARAMS, TOY
from jit.toy_rolls import assert_same, assert_same_states, make

from vecenv import make_vec, make_vec_agents
from vecenv.jit import JitVectorEnv

OWN = TOY.having(params=PARAMS)


@pytest.mark.parametrize(
    ("mode", "sampler"),
    [
        (AutoresetMode.NEXT_STEP, {"cost": (0.05, 0.9)}),
        (AutoresetMode.SAME_STEP, None),
        (AutoresetMode.DISABLED, {"cost": (0.05, 0.9)}),
    ],
)
def test_random_copies_do_what_their_sources_would_have_done(mode, sampler):
    """Each row is compared with a vector env of one, copied by its whole state."""
    rng = np.random.default_rng(7)
    options = {"autoreset_mode": mode, "max_episode_steps": 12, "sampler": sampler}
    num_envs, num_copies = 5, 0
    envs = JitVectorEnv(OWN, num_envs, num_threads=2, **options)
    twins = [JitVectorEnv(OWN, 1, **options) for _ in range(num_envs)]
    envs.reset(seed=11)
    for row, twin in enumerate(twins):
        twin.reset(seed=11 + row)
    kept = {}
    for _ in range(200):
        actions = rng.integers(-1, 2, num_envs)
        over = envs.episode_over.copy()
        if mode is AutoresetMode.DISABLED and over.any():
            envs.reset(options={"reset_mask": over})
            for row in np.flatnonzero(over):
                twins[row].reset(options={"reset_mask": np.ones(1, bool)})
            over[:] = False
        alive, kind = np.flatnonzero(~over), rng.integers(4)
        if kind == 0 and len(alive):
            targets = rng.permutation(num_envs)[: rng.integers(1, num_envs + 1)]
            sources = rng.choice(alive, len(targets))
            states = [twins[row].state_dict() for row in sources]
            envs.copy_rows(sources, targets)
            for row, state in zip(targets, states, strict=True):
                twins[row].load_state_dict(state)
            num_copies += len(targets)
        elif kind == 1 and len(alive):
            rows = rng.choice(alive, rng.integers(1, len(alive) + 1), replace=False)
            kept = {"branch": envs.snapshot(rows), "states": [twins[r].state_dict() for r in rows]}
        elif kind == 2 and kept:
            targets = rng.permutation(num_envs)[: len(kept["states"])]
            envs.restore(targets, kept["branch"])
            for row, state in zip(targets, kept["states"], strict=True):
                twins[row].load_state_dict(state)
        assert_same(envs.observe(), [twin.observe()[0] for twin in twins])
        if mode is AutoresetMode.DISABLED and envs.episode_over.any():
            continue
        found = envs.step(actions)[:4]
        singles = [twin.step(actions[row : row + 1])[:4] for row, twin in enumerate(twins)]
        assert_same(found, [np.concatenate(column) for column in zip(*singles, strict=True)])
        assert_same(envs.action_masks(), [twin.action_masks()[0] for twin in twins])
        assert_same(envs.last_returns, [twin.last_returns[0] for twin in twins])
    assert num_copies > 100


def test_fresh_luck_differs_between_copies_and_depends_on_nothing_else():
    def copies():
        envs = begun(make(6), seed=4)
        envs.step(np.zeros(6, np.int64))
        envs.copy_rows(0, [1, 2, 3], luck="fresh")
        return envs

    envs, again = copies(), copies()
    assert_same(envs.observe()[1:4], envs.observe()[[0, 0, 0]])
    assert len(set(envs.np_random_seed)) == 6 and envs.np_random_seed == again.np_random_seed
    paths = [
        np.stack([one.step(np.zeros(6, np.int64))[1] for _ in range(20)]) for one in (envs, again)
    ]
    assert_same(*paths)
    assert len(np.unique(paths[0][:, :4], axis=1)[0]) == 4
    envs.copy_rows(0, [1, 2], luck="same")
    same = np.stack([envs.step(np.zeros(6, np.int64))[1] for _ in range(20)])
    assert (same[:, 0] == same[:, 1]).all() and (same[:, 0] == same[:, 2]).all()


def test_branches_go_to_other_vector_envs_of_the_kind():
    game, plan = make(1), make(64)
    game.reset(seed=5), plan.reset(seed=9)
    plan.restore(range(64), game.snapshot(), luck="same")
    actions = np.arange(64) % 3 - 1
    obs, rewards, *_ = plan.step(actions)
    expected = game.step([0])
    at = np.flatnonzero(actions == 0)
    assert (rewards[at] == expected[1][0]).all() and (obs[at] == expected[0][0]).all()
    cage, other = make_vec("Cage2-v0", 1), make_vec("Cage2-v0", 4)
    cage.reset(seed=1), other.reset(seed=2)
    other.restore([1, 3], cage.snapshot())
    assert_same(other.observe()[[1, 3]], cage.observe()[[0, 0]])


def test_what_is_no_branch_is_refused_and_nothing_changes():
    envs = make(4, max_episode_steps=3, autoreset_mode="Disabled")
    for call in (lambda: envs.copy_rows(0, 1), envs.snapshot):
        with pytest.raises(ResetNeeded):
            call()
    envs.reset(seed=1)
    branch, before = envs.snapshot([0]), envs.state_dict()
    other = begun(make_vec("JitCartPole-v1", 2), seed=1)
    for call, error, message in (
        (lambda: envs.copy_rows([0, 1], [2]), ValueError, "2 sources for 1 targets"),
        (lambda: envs.copy_rows(0, [1, 1]), ValueError, "repeated ids"),
        (lambda: envs.copy_rows(4, 1), ValueError, "source has 4, expected env ids from 0 to 3"),
        (lambda: envs.copy_rows(0, -1), ValueError, "target has -1"),
        (lambda: envs.copy_rows(0.5, 1), TypeError, "source is float64"),
        (lambda: envs.copy_rows(0, 1, luck="good"), ValueError, "luck is 'good', expected one of"),
        (lambda: envs.restore([0, 1], envs.snapshot([0, 1, 2])), ValueError, "3 sources for 2"),
        (lambda: envs.restore(0, before), TypeError, "branch is a dict, expected what snapshot"),
        (lambda: other.restore(0, branch), ValueError, "branch is of toy, of another kind than"),
        (lambda: JitVectorEnv.restore(envs, 9, branch), ValueError, "target has 9"),
    ):
        with pytest.raises(error, match=message):
            call()
    assert_same_states(envs.state_dict(), before)
    envs.send(np.zeros(1, np.int64), [2])
    for source, target in ((2, 0), (0, 2)):
        with pytest.raises(AlreadyPendingCallError):
            envs.copy_rows(source, target)
    envs.copy_rows(0, [1, 3])
    envs.recv(1)
    envs.reset(seed=1)
    for _ in range(3):
        if not envs.episode_over.any():
            envs.step(np.zeros(4, np.int64))
    over = np.flatnonzero(envs.episode_over).tolist()
    listed = ", ".join(map(str, over))
    with pytest.raises(ValueError, match=f"copy_rows of envs {over[0]}, whose episodes have ended"):
        envs.copy_rows(over[0], 1)
    with pytest.raises(ValueError, match=f"snapshot of envs {listed}, whose"):
        envs.snapshot()
    envs.restore(over, branch)
    assert not envs.episode_over.any()
    envs.step(np.zeros(4, np.int64))


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_random_copies_of_games_do_what_their_sources_would_have_done(mode):
    """Each game is compared with a vector env of one, copied by its whole state."""
    rng, count = np.random.default_rng(3), 4
    envs = make_vec_agents("Spread-v0", count, autoreset_mode=mode, max_cycles=9)
    (group,) = envs.groups.values()
    twins = [
        make_vec_agents("Spread-v0", 1, autoreset_mode=mode, max_cycles=9) for _ in range(count)
    ]
    envs.reset(seed=1)
    for game, twin in enumerate(twins):
        twin.reset(seed=1 + game)
    num_copies, actions = 0, [group.single_action_space.sample for _ in range(group.num_envs)]
    for step in range(60):
        alive = np.flatnonzero(~envs.agents.games.episode_over)
        if step % 3 == 1 and len(alive):
            targets = rng.permutation(count)[: rng.integers(1, count + 1)]
            sources = rng.choice(alive, len(targets))
            states = [twins[game].state_dict() for game in sources]
            envs.copy_rows(sources, targets)
            for game, state in zip(targets, states, strict=True):
                twins[game].load_state_dict(state)
            num_copies += len(targets)
        drawn = np.stack([sample() for sample in actions])
        found = envs.step(drawn)[:4]
        rows = [group.rows([game]) for game in range(count)]
        singles = [twin.step(drawn[own])[:4] for twin, own in zip(twins, rows, strict=True)]
        assert_same(found, [np.concatenate(column) for column in zip(*singles, strict=True)])
        assert_same([envs.alive], [np.concatenate([twin.alive for twin in twins])])
    assert num_copies > 20
