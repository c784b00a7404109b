"""RolloutBuffer filled from Gymnasium's vector envs, against a model made of lists."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from staged_rollouts import make_rollout

from buffers import BufferMisuseError

GAMMA, LAMBDA = 0.9, 0.8
MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]
OBS_SPACE = Box(-np.inf, np.inf, (3,), np.float32)


class CounterEnv(gym.Env):
    """Observes (env, episode, step); episodes last 1 to 5 steps and end by turns in both ways."""

    observation_space = OBS_SPACE
    action_space = Discrete(7)

    def __init__(self, env_id):
        self.env_id, self.episode, self.count = env_id, -1, 0

    def observe(self):
        return np.array([self.env_id, self.episode, self.count], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.count = self.episode + 1, 0
        return self.observe(), {}

    def step(self, action):
        self.count += 1
        over = self.count == 1 + (3 * self.env_id + 2 * self.episode) % 5
        is_truncated = self.episode % 2 == 1
        reward = 1.0 + self.count + 0.5 * self.env_id + 0.25 * int(action)
        return self.observe(), reward, over and not is_truncated, over and is_truncated, {}


def policy(obs):
    """Deterministic actions, log_probs and values (N,) of observations (N, 3)."""
    obs = np.asarray(obs, np.float64)
    actions = (obs @ [1, 2, 3] % 7).astype(np.int64)
    values = (obs @ [0.3, 0.7, -0.4] + 0.1).astype(np.float32)
    return actions, (-values / 3).astype(np.float32), values


class Row:
    """One transition of the model."""

    def __init__(self, obs, action, log_prob, value, reward, bootstrap, over):
        self.obs, self.action, self.log_prob, self.value = obs, action, log_prob, value
        self.reward, self.bootstrap, self.over = reward, bootstrap, over  # bootstrap: 0 at the end
        self.advantage = 0.0


def compute_model(rows):
    """Advantages of the rows of one environment in one rollout, backwards."""
    following = 0.0
    for row in reversed(rows):
        delta = row.reward + GAMMA * row.bootstrap - row.value
        row.advantage = following = delta + GAMMA * LAMBDA * following * (not row.over)


class Collector:
    """Steps a vector env into a rollout buffer and, beside it, into lists."""

    def __init__(self, num_envs, num_steps, mode, **options):
        factories = [lambda i=i: CounterEnv(i) for i in range(num_envs)]
        self.envs = SyncVectorEnv(factories, autoreset_mode=mode)
        self.rollout = make_rollout(
            num_steps, num_envs, OBS_SPACE, Discrete(7), autoreset_mode=mode, gamma=GAMMA,
            gae_lambda=LAMBDA, seed=1, **options,
        )  # fmt: skip
        self.mode, self.num_envs, self.num_steps = mode, num_envs, num_steps
        self.obs = self.envs.reset(seed=0)[0]
        self.rollout.start(self.obs)
        self.is_dead = np.zeros(num_envs, bool)
        self.sums, self.lengths = [0.0] * num_envs, [0] * num_envs

    def collect(self):
        """One rollout; the model's rows by environment, and its episodes as (return, length)."""
        rows, episodes = [[] for _ in range(self.num_envs)], []
        for t in range(self.num_steps):
            np.testing.assert_array_equal(self.rollout.obs_at(t).numpy(), self.obs)
            before, outputs = self.obs, policy(self.obs)
            actions = self.rollout.put(
                t, actions=torch.from_numpy(outputs[0]), log_probs=outputs[1], values=outputs[2]
            )
            obs, rewards, terminations, truncations, infos = self.envs.step(actions)
            slot = self.rollout.slot(t)
            for target, source in zip(slot, (obs, rewards, terminations, truncations), strict=True):
                np.copyto(target, source, casting="same_kind")
            final = self.final_observations(t, obs, terminations, truncations, infos)
            over = terminations | truncations
            for i in range(self.num_envs):
                if self.is_dead[i]:
                    continue
                bootstrap = 0.0 if terminations[i] else policy(final[i : i + 1])[2][0]
                details = rewards[i], bootstrap, over[i]
                rows[i].append(Row(before[i].copy(), *(o[i] for o in outputs), *details))
                self.sums[i] += rewards[i]
                self.lengths[i] += 1
                if over[i]:
                    episodes.append((self.sums[i], self.lengths[i]))
                    self.sums[i], self.lengths[i] = 0.0, 0
            self.is_dead = over & (self.mode is AutoresetMode.NEXT_STEP)
        for env_rows in rows:
            compute_model(env_rows)
        return rows, episodes

    def final_observations(self, t, obs, terminations, truncations, infos):
        """The true successors (N, 3); tells the buffer their values, and resets, as the mode wants.

        `infos["final_obs"]` holds an object per env.
        """
        self.obs, final = obs.copy(), obs.copy()
        if self.mode is AutoresetMode.SAME_STEP and "final_obs" in infos:
            for i in np.flatnonzero(infos["_final_obs"]):
                final[i] = infos["final_obs"][i]
        if self.mode is not AutoresetMode.NEXT_STEP and truncations.any():
            self.rollout.set_final_values(t, truncations, policy(final[truncations])[2])
        over = terminations | truncations
        if self.mode is AutoresetMode.DISABLED and over.any():
            self.obs = self.envs.reset(options={"reset_mask": over})[0].copy()
            self.rollout.write_obs(t + 1, self.obs)
        return final


def key(obs):
    return tuple(int(number) for number in obs)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(("num_envs", "num_steps"), [(1, 1), (5, 16)])
@pytest.mark.parametrize("mode", MODES)
def test_rollouts_match_the_model(mode, num_envs, num_steps, staged):
    collector = Collector(num_envs, num_steps, mode, staged=staged)
    rollout = collector.rollout
    seen = 0
    for _ in range(4):
        rows, episodes = collector.collect()
        rollout.compute_advantages(torch.from_numpy(policy(collector.obs)[2]))
        expected = {key(row.obs): row for env_rows in rows for row in env_rows}
        assert rollout.num_valid == len(expected) == int(rollout.valid.sum())
        found = 0
        for batch in rollout.minibatches(min(2, num_envs * num_steps)):
            for k in range(len(batch.actions)):
                row = expected.pop(key(batch.obs[k]))  # raises if it comes twice
                assert batch.actions[k] == row.action
                assert batch.log_probs[k] == row.log_prob
                assert batch.values[k] == row.value
                assert batch.advantages[k] == pytest.approx(row.advantage, rel=1e-4, abs=1e-4)
                wanted = row.advantage + row.value
                assert batch.returns[k] == pytest.approx(wanted, rel=1e-4, abs=1e-4)
                found += 1
        assert (found, expected) == (rollout.num_valid, {})
        stats = rollout.episodes()
        np.testing.assert_allclose(stats.returns, [r for r, _ in episodes])
        np.testing.assert_array_equal(stats.lengths, [n for _, n in episodes])
        seen += len(episodes)
        rollout.advance()
    assert seen > 0 or num_steps == 1


@pytest.mark.parametrize("mode", ["SameStep", "Disabled"])
def test_truncation_without_final_value_is_refused_and_can_be_mended(mode):
    rollout = make_rollout(2, 2, OBS_SPACE, Discrete(2), autoreset_mode=mode, gamma=1.0)
    rollout.start(np.zeros((2, 3), np.float32))
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
@pytest.mark.parametrize("mode", MODES)
def test_cuda_rollouts_equal_those_of_the_cpu(mode):
    host, device = Collector(4, 9, mode), Collector(4, 9, mode, staged=True)
    device.rollout = make_rollout(
        9, 4, OBS_SPACE, Discrete(7), autoreset_mode=mode, gamma=GAMMA, gae_lambda=LAMBDA, seed=1,
        device="cuda",
    )  # fmt: skip
    device.rollout.start(device.obs)
    real_obs_at = device.rollout.obs_at
    device.rollout.obs_at = lambda t: real_obs_at(t).cpu()
    for _ in range(3):
        for collector in (host, device):
            collector.collect()
            collector.rollout.compute_advantages(policy(collector.obs)[2])
        for left, right in zip(
            host.rollout.minibatches(3), device.rollout.minibatches(3), strict=True
        ):
            for one, other in zip(left, right, strict=True):
                torch.testing.assert_close(one, other.cpu(), rtol=1e-5, atol=1e-5)
        host.rollout.advance()
        device.rollout.advance()
