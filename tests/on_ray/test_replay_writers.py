"""Actors of Ray as writers of a replay buffer in shared memory."""

import time

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from buffers import MultiprocessReplayBuffer

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

NUM_ACTORS, NUM_ADDS, ROWS = 2, 20, 5


class Actor:
    """Adds rows of which every column tells the actor and the number."""

    def __init__(self, writer, index):
        self.writer, self.index = writer, index

    def add(self, first, count):
        numbers = 1000 * self.index + first + np.arange(count)
        obs = np.repeat(numbers[:, None], 3, 1).astype(np.float32)
        never = np.zeros(count, np.bool_)
        self.writer.add(
            obs=obs, next_obs=obs + 0.5, actions=numbers % 2, rewards=numbers.astype(float),
            terminations=never, truncations=never,
        )  # fmt: skip
        return self.writer.index

    def is_closed(self):
        try:
            self.add(0, 1)
        except Exception as error:
            return type(error).__name__
        return None


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_actors_on_the_same_machine_are_writers_and_one_takes_the_place_of_another(local_ray):
    buffer = MultiprocessReplayBuffer(
        400, Box(-np.inf, np.inf, (3,)), Discrete(2), num_writers=NUM_ACTORS, seed=0
    )
    make = local_ray.remote(max_restarts=0)(Actor).remote
    actors = [make(buffer.writer(), index) for index in range(NUM_ACTORS)]
    pending = [actor.add.remote(ROWS * i, ROWS) for i in range(NUM_ADDS) for actor in actors]
    slots = local_ray.get(pending, timeout=120)
    assert sorted(set(slots)) == [0, 1]
    assert len(buffer) == buffer.num_added == NUM_ACTORS * NUM_ADDS * ROWS

    batch = buffer.sample(4000)
    numbers = batch.rewards.numpy()
    np.testing.assert_array_equal(batch.obs.numpy(), np.repeat(numbers[:, None], 3, 1))
    np.testing.assert_array_equal(batch.actions.numpy(), numbers.astype(int) % 2)
    rows = np.arange(NUM_ADDS * ROWS)
    assert set(numbers.tolist()) == {*rows.tolist(), *(1000 + rows).tolist()}

    local_ray.kill(actors[0])  # as by the system: nothing is closed
    successor = make(buffer.writer(), 2)

    def is_in():
        try:
            return local_ray.get(successor.add.remote(0, ROWS), timeout=60) == slots[0]
        except local_ray.exceptions.RayTaskError:  # the process has not ended yet
            return False

    wait_for(is_in)
    assert buffer.num_added == NUM_ACTORS * NUM_ADDS * ROWS + ROWS
    buffer.close()
    assert local_ray.get(actors[1].is_closed.remote(), timeout=60) == "BufferClosedError"
    for actor in (actors[1], successor):
        local_ray.kill(actor)
