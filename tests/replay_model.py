"""A slow replay buffer of Python lists, and environments that number all they do."""

from typing import NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete

from buffers import PerEnvReplayBuffer, PrioritizedReplayBuffer, SharedReplayBuffer

OBS = Box(-np.inf, np.inf, (3,), np.float32)
NESTED = Dict({"image": Box(0, 255, (2, 2), np.uint8), "speed": Box(-np.inf, np.inf, (1,), float)})
# Between its parts there are four bytes of nothing.
ACTIONS = Discrete(5)
RINGS = [SharedReplayBuffer, PerEnvReplayBuffer, PrioritizedReplayBuffer]


class Transition(NamedTuple):
    env: int
    obs: int
    next_obs: int
    reward: float
    terminated: bool
    truncated: bool
    number: int  # of the step in its episode

    @property
    def follows(self):
        """The one before it in its env, in the same episode."""
        return self.number > 0


def encode(numbers, space=OBS):
    """Observations that carry a number each."""
    numbers = np.asarray(numbers)
    if space is OBS:
        return np.stack([numbers, -numbers, numbers % 7], 1).astype(np.float32)
    image = np.stack([numbers % 251, numbers // 251, numbers % 3, numbers % 5], 1)
    image = image.reshape(-1, 2, 2).astype(np.uint8)
    return {"image": image, "speed": numbers[:, None].astype(np.float64)}


def decode(obs):
    """The numbers again, checked in every element."""
    if isinstance(obs, dict):
        numbers = obs["speed"][:, 0].numpy().astype(np.int64)
        again = encode(numbers, NESTED)
        assert all((obs[key].numpy() == again[key]).all() for key in obs)
    else:
        numbers = obs[:, 0].numpy().astype(np.int64)
        assert (obs.numpy() == encode(numbers)).all()
    return numbers


class CountingEnvs:
    """Streams of transitions; every observation ever made has a number of its own."""

    def __init__(self, num_envs, seed=0):
        self.rng = np.random.default_rng(seed)
        self.made = 0
        self.current = [self.new() for _ in range(num_envs)]
        self.numbers = [0] * num_envs  # of the next steps

    def new(self):
        self.made += 1
        return self.made

    def cut(self, env):
        """Reset in the middle of an episode; the observation is another."""
        self.current[env], self.numbers[env] = self.new(), 0

    def step(self, env, terminated, truncated):
        obs, following = self.current[env], self.new()
        over = terminated or truncated
        self.current[env] = self.new() if over else following
        reward = float(self.rng.integers(-8, 9))
        made = Transition(env, obs, following, reward, terminated, truncated, self.numbers[env])
        self.numbers[env] = 0 if over else self.numbers[env] + 1
        return made

    def random_steps(self, envs, p=0.15):
        return [self.step(env, *(self.rng.random(2) < p)) for env in envs]


def columns_of(transitions, space=OBS):
    column = {name: [getattr(t, name) for t in transitions] for name in Transition._fields}
    return {
        "obs": encode(column["obs"], space),
        "next_obs": encode(column["next_obs"], space),
        "actions": np.array(column["obs"], np.int64) % 5,
        "rewards": np.array(column["reward"], np.float32),
        "terminations": np.array(column["terminated"], bool),
        "truncations": np.array(column["truncated"], bool),
    }


class ListModel:
    """The newest `capacity` transitions, of all envs together or of each."""

    def __init__(self, capacity, num_envs, per_env):
        self.capacity, self.per_env = capacity, per_env
        self.rings = [[] for _ in range(num_envs if per_env else 1)]

    def add(self, transitions):
        for made in transitions:
            ring = self.rings[made.env if self.per_env else 0]
            ring.append(made)
            del ring[: -self.capacity]

    def live(self):
        return [made for ring in self.rings for made in ring]

    def run(self, first, num_steps):
        """The transitions of an episode from one on, `num_steps` at most."""
        of_env = [made for made in self.live() if made.env == first.env]
        window = [first]
        for made in of_env[of_env.index(first) + 1 :]:
            last = window[-1]
            if len(window) == num_steps or last.terminated or last.truncated or not made.follows:
                break
            window.append(made)
        return window

    def starts(self, length, burn_in, overlap, pad):
        """The first transitions of sequences."""
        period, found = 1 if overlap is None else length - overlap, []
        for made in self.live():
            count = len(self.run(made, length))
            is_enough = count == length or (pad and (count > burn_in or made.number == 0))
            if is_enough and made.number % period == 0:
                found.append(made)
        return found

    def window(self, first, num_steps, gamma):
        """The last transition of a window, its rewards summed up, and its discount."""
        window = self.run(first, num_steps)
        total = sum(gamma**k * made.reward for k, made in enumerate(window))
        last = window[-1]
        return last, total, 0.0 if last.terminated else gamma ** len(window)


class TornModel(ListModel):
    """Rows that a torn add may have overwritten are not drawn."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.added, self.begun = [0] * len(self.rings), [0] * len(self.rings)

    def tear(self, transitions):
        for ring, added in enumerate(self.added):
            of_ring = [t for t in transitions if not self.per_env or t.env == ring]
            self.begun[ring] = max(self.begun[ring], added + len(of_ring))
        self.limit()

    def add(self, transitions):
        super().add(transitions)
        for made in transitions:
            ring = made.env if self.per_env else 0
            self.added[ring] += 1
            self.begun[ring] = max(self.begun[ring], self.added[ring])
        self.limit()

    def limit(self):
        for ring, added in enumerate(self.added):
            left = max(added - max(self.begun[ring] - self.capacity, 0), 0)
            self.rings[ring] = self.rings[ring][len(self.rings[ring]) - left :]


def check_against(buffer, model, num_steps=1, gamma=None):
    """Compare every row of a buffer with the model, in order."""
    live = model.live()
    assert len(buffer) == len(live)
    if not live:
        return
    batch = buffer.get(buffer.order())
    lasts, totals, discounts = zip(
        *(model.window(made, num_steps, gamma or 1.0) for made in live), strict=True
    )
    assert decode(batch.obs).tolist() == [made.obs for made in live]
    assert decode(batch.next_obs).tolist() == [made.next_obs for made in lasts]
    assert batch.actions.tolist() == [made.obs % 5 for made in live]
    np.testing.assert_allclose(batch.rewards, totals, rtol=1e-6, atol=1e-5)
    assert batch.terminations.tolist() == [made.terminated for made in lasts]
    assert batch.truncations.tolist() == [made.truncated for made in lasts]
    if gamma is not None:
        np.testing.assert_allclose(batch.discounts, discounts, rtol=1e-6)
    if batch.env_ids is not None:
        assert batch.env_ids.tolist() == [made.env for made in live]


def assert_equal_batches(one, other):
    """Require the same bytes, but of the rows, which differ between kinds of buffers."""
    names = {*one._asdict(), "env_ids"} - {"indices", "weights", "drawn_from", "extras"}
    for name in names | set(one.extras):
        left, right = getattr(one, name), getattr(other, name)
        assert torch.is_tensor(left) == torch.is_tensor(right), name
        if torch.is_tensor(left):
            assert (left.dtype, left.shape) == (right.dtype, right.shape), name
            assert left.numpy().tobytes() == right.numpy().tobytes(), name


def check_law(counts, probabilities):
    """Raise unless counts fit: chi square below mean plus five standard deviations."""
    counts, probabilities = np.asarray(counts, float), np.asarray(probabilities, float)
    assert counts[probabilities == 0].sum() == 0
    expected = counts.sum() * probabilities / probabilities.sum()
    possible = expected > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = max(possible.sum() - 1, 1)
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)
