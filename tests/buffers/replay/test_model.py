"""Replay buffers against lists, through any calls; and adds of a buffer's own rows."""

import numpy as np
import pytest
from fuzz.replays import run_case
from gymnasium.spaces import Discrete

from buffers import PerEnvReplayBuffer, SharedReplayBuffer

CLASSES = {"shared": SharedReplayBuffer, "per_env": PerEnvReplayBuffer}


@pytest.mark.parametrize("number", range(30))
def test_any_calls_leave_what_the_lists_have(number):
    """Rings in memory, in files, of several writers; with all that they can do."""
    run_case(number, 60)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("kind", CLASSES)
def test_rows_of_the_buffer_itself_are_added_as_they_were(kind, staged):
    """Also more than it holds: the first pieces overwrite what the others are views of."""
    spaces = Discrete(3), Discrete(4)

    def filled():
        rng = np.random.default_rng(0)
        more = {"over": "envs"} if kind == "per_env" else {"n_step": 2, "gamma": 0.9}
        buffer = CLASSES[kind](6, *spaces, num_envs=3, seed=0, staged=staged, **more)
        for _ in range(9):
            obs, next_obs = rng.integers(0, 3, (2, 3))
            no = np.zeros(3, bool)
            actions = rng.integers(0, 4, 3)
            buffer.add(
                obs=obs, next_obs=next_obs, actions=actions, rewards=rng.random(3),
                terminations=no, truncations=no,
            )  # fmt: skip
        return buffer

    def add(buffer, is_copied):
        own = buffer.rows()["obs"].numpy()
        own = own.copy() if is_copied else own
        count = len(own)
        no, zeros = np.zeros(count, bool), np.zeros(count)
        buffer.add(
            obs=own, next_obs=own, actions=np.zeros(count, np.int64), rewards=zeros,
            terminations=no, truncations=no, env_ids=own,
        )  # fmt: skip
        return {name: rows.numpy().copy() for name, rows in buffer.rows().items()}

    found, expected = add(filled(), is_copied=False), add(filled(), is_copied=True)
    for name, rows in expected.items():
        np.testing.assert_array_equal(found[name], rows, err_msg=name)
