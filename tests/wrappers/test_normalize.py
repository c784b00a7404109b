"""Normalisers against moments of all rows at once, fed with what a bare vector env returned."""

import functools

import numpy as np
import pytest
import torch
from agents.games import runners
from wrappers.slides import MODES, make_bare, slot_of

import vecenv
from vecenv import wrappers
from vecenv.learn import Moments


class Slow:
    """What the wrappers do, with every row that ever counted in a list."""

    def __init__(self, envs, gamma, clip):
        self.envs, self.gamma, self.clip = envs, gamma, clip
        self.mode = envs.metadata["autoreset_mode"].value
        self.rows, self.returns = [], []
        self.running = [0.0] * envs.num_envs
        self.over = [False] * envs.num_envs
        self.obs_moments = None

    @property
    def has_agents(self):
        return hasattr(self.envs, "valid")

    def dead(self, env_id):
        return self.has_agents and not (self.envs.valid[env_id] or self.envs.alive[env_id])

    def normal(self, obs, env_ids):
        mean, variance = self.obs_moments
        found = np.clip((obs - mean) / np.sqrt(variance + 1e-8), -self.clip, self.clip)
        for row, env_id in enumerate(env_ids):
            if self.dead(env_id):
                found[row] = 0
        return found

    def refresh(self):
        rows = np.array(self.rows, np.float64)
        self.obs_moments = rows.mean(0), rows.var(0)

    def reset(self, obs, mask):
        is_partial = not mask.all()
        found = self.normal(obs, range(len(obs))) if is_partial else None
        for env_id in np.flatnonzero(mask):
            if not self.dead(env_id):
                self.rows.append(obs[env_id])
            self.running[env_id], self.over[env_id] = 0.0, False
        if is_partial:
            return found
        self.refresh()
        return self.normal(obs, range(len(obs)))

    def step(self, obs, rewards, terminations, truncations, env_ids, valid):
        for row, env_id in enumerate(env_ids):
            acted = valid[row] if self.has_agents else not self.over[env_id]
            if not self.dead(env_id):
                self.rows.append(obs[row])
            if acted:
                self.running[env_id] = self.running[env_id] * self.gamma + rewards[row]
                self.returns.append(self.running[env_id])
            ends = terminations[row] or truncations[row]
            if ends or not acted:
                self.running[env_id] = 0.0
            self.over[env_id] = ends and self.mode != "SameStep"
        self.refresh()
        scale = 1.0 / np.sqrt((np.var(self.returns) if self.returns else 1.0) + 1e-8)
        return self.normal(obs, env_ids), np.clip(rewards * scale, -self.clip, self.clip)


SOURCES = {
    "sync": functools.partial(make_bare, "sync", 4),
    "async": functools.partial(make_bare, "async", 4),
    "jit": functools.partial(make_bare, "jit", 4),
    "agents": lambda mode: vecenv.make_vec_agents(runners, 3, backend="sync", autoreset_mode=mode),
    "agents async": lambda mode: vecenv.make_vec_agents(
        runners, 3, backend="async", autoreset_mode=mode
    ),
}


def sources_and_modes():
    """All modes where wrappers and envs differ; for other backends of the same, one is fast."""
    fast = {"jit": "NextStep", "async": "SameStep", "agents async": "Disabled"}
    for source in SOURCES:
        for mode in MODES:
            is_slow = fast.get(source, mode) != mode
            marks = [pytest.mark.slow] if is_slow else []
            yield pytest.param(source, mode, marks=marks, id=f"{source}-{mode}")


@pytest.mark.parametrize(("source", "mode"), [*sources_and_modes()])
def test_normalisers_are_those_of_all_valid_rows(source, mode):  # noqa: PLR0915  # its functions'
    bare, inner = SOURCES[source](mode), SOURCES[source](mode)
    envs = wrappers.NormalizeReward(wrappers.NormalizeObservation(inner, clip=2.0), 0.9, clip=2.0)
    slow = Slow(bare, 0.9, 2.0)
    rng, count = np.random.default_rng(5), bare.num_envs
    num_games = getattr(bare, "num_games", count)
    slot = slot_of(envs)
    if "agents" in source:
        slot = vecenv.agents.AgentSlot(*slot, np.zeros(count, bool))
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
    raw, _ = bare.reset(seed=3)
    close(envs.reset(seed=3)[0], slow.reset(raw, np.ones(count, bool)))
    num_ends = 0
    for _ in range(50):
        bare.action_space.seed(int(rng.integers(1000)))
        actions = bare.action_space.sample()
        kind, is_over = rng.random(), np.zeros(count, bool)
        if kind < 0.4:
            games = rng.permutation(num_games)[: rng.integers(1, num_games + 1)]
            rows = bare.group.rows(games) if "agents" in source else games
            results = []
            for one in (bare, envs):
                one.send(actions[rows], games)
                batch = one.recv()
                order = np.argsort(batch.env_ids)
                values = [part[order] for part in batch[:4]]
                results.append((*values, batch.infos, batch.env_ids[order], order, batch))
            theirs, ours = results
            ids, valid = theirs[5], theirs[7].valid[theirs[6]] if "agents" in source else None
            finals = [infos[4].get("final_obs") for infos in results]
            finals = [f if f is None else f[r[6]] for f, r in zip(finals, results, strict=True)]
        else:
            theirs = bare.step(actions)
            ours = envs.step(actions, out=slot) if kind < 0.7 else envs.step(actions)
            ids, valid = np.arange(count), bare.valid.copy() if "agents" in source else None
            finals = [infos.get("final_obs") for infos in (theirs[4], ours[4])]
            if "agents" in source and kind < 0.7:
                assert (slot.valid == bare.valid).all()
        if finals[0] is not None:  # by the moments before this step, whose rows come after
            given = [i for i, obs in enumerate(finals[0]) if obs is not None]
            assert given == [i for i, obs in enumerate(finals[1]) if obs is not None]
            mean, variance = slow.obs_moments
            for i in given:
                expected = (finals[0][i] - mean) / np.sqrt(variance + 1e-8)
                close(finals[1][i], np.clip(expected, -2, 2))
        obs, rewards = slow.step(*theirs[:4], ids, valid)
        close(ours[0], obs)
        close(ours[1], rewards)
        assert (ours[2] == theirs[2]).all() and (ours[3] == theirs[3]).all()
        is_over[ids] = theirs[2] | theirs[3]
        num_ends += is_over.sum()
        if mode == "Disabled":
            games = is_over
            if "agents" in source:
                games = ~bare.alive.reshape(num_games, -1).any(axis=1)
            if games.any():
                before = ours[0].copy() if len(ids) == count else None
                raw, _ = bare.reset(options={"reset_mask": games})
                found, _ = envs.reset(options={"reset_mask": games})
                rows = np.repeat(games, count // num_games)
                close(found, slow.reset(raw, rows))
                if before is not None:
                    np.testing.assert_array_equal(found[~rows], before[~rows])
    assert num_ends > 5
    moments = envs.env.moments
    assert moments.count == len(slow.rows) and envs.moments.count == len(slow.returns)
    close(moments.mean, np.mean(slow.rows, 0))
    bare.close()
    envs.close()


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.float64, np.int64])
@pytest.mark.parametrize("width", [1, 5])
def test_numpy_and_torch_have_the_same_moments(dtype, width):
    rng = np.random.default_rng(1)
    running, module = wrappers.RunningMoments((width,)), Moments(width)
    seen = []
    for size in (1, 7, 40, 3):
        x = (rng.normal(100, 20, (size, width))).astype(dtype)
        counts = rng.random(size) < 0.7
        running.update(x, counts)
        module.update(torch.from_numpy(x), torch.from_numpy(counts))
        seen.append(x[counts])
    rows = np.concatenate(seen).astype(np.float64)
    assert running.count == len(rows) == int(module.count)
    np.testing.assert_allclose(running.mean, rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(running.variance, rows.var(0), rtol=1e-9)
    np.testing.assert_allclose(module.mean, rows.mean(0), rtol=1e-6)
    module.load_state_dict({k: torch.as_tensor(v) for k, v in running.state_dict().items()})
    np.testing.assert_allclose(module.variance, rows.var(0), rtol=1e-6)


def test_rows_with_nan_are_refused_and_change_nothing():
    x = np.random.default_rng(2).normal(5, 3, (9, 4)).astype(np.float32)
    running = wrappers.RunningMoments((4,))
    running.update(x)
    before = running.state_dict()
    x[-1, -1] = np.nan
    assert not running.update(x)
    for key, value in running.state_dict().items():
        np.testing.assert_array_equal(value, before[key])


def test_a_huge_offset_loses_no_digits():
    rng = np.random.default_rng(2)
    running, rows = wrappers.RunningMoments(), 1e9 + rng.normal(0, 0.01, 5000)
    for batch in np.split(rows, 50):
        running.update(batch)
    np.testing.assert_allclose(running.variance, rows.var(), rtol=1e-6)


def test_evaluation_goes_on_with_the_moments_of_the_training():
    train = wrappers.NormalizeObservation(make_bare("sync", 3, "NextStep"))
    train.reset(seed=1)
    for _ in range(20):
        train.step(train.action_space.sample())
    test = wrappers.NormalizeObservation(make_bare("jit", 8, "NextStep"))
    test.moments.load_state_dict(train.moments.state_dict())
    test.update_running_mean = False
    raw = make_bare("jit", 8, "NextStep").reset(seed=7)[0]
    found = test.reset(seed=7)[0]
    mean, variance = train.moments.mean, train.moments.variance
    np.testing.assert_allclose(found, (raw - mean) / np.sqrt(variance + 1e-8), rtol=1e-4, atol=1e-5)
    assert test.moments.count == train.moments.count == 63
