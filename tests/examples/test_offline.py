"""examples/offline.py: what its data set is, files, what it refuses."""

import json

import numpy as np
import pytest
from example_files import load_example

offline = load_example("offline")


def test_its_data_go_from_random_episodes_to_good_ones(tmp_path):
    data = offline.record(offline.Options(num_episodes=6))
    assert data.episode_lengths.tolist() == [200] * 6
    returns = [episode["rewards"].sum() for episode in data]
    assert max(returns) > -400 > min(returns)
    again = offline.record(offline.Options(num_episodes=6))
    for one, other in zip(data, again, strict=True):
        np.testing.assert_equal(one, other)


def test_a_data_set_that_was_written_is_learned_from(tmp_path):
    pytest.importorskip("h5py")
    path, small = tmp_path / "a.hdf5", {"num_updates": 3, "save": tmp_path / "run"}
    offline.main(offline.Options(num_episodes=3, write=path, **small))
    found = offline.main(offline.Options(data=str(path), **small))
    assert set(found) == {"bc", "td3bc"}
    assert (tmp_path / "run" / "td3bc.pt").exists()
    assert json.loads(found["bc"].to_json())["mean"] == found["bc"].mean


def test_another_env_needs_a_data_set():
    with pytest.raises(SystemExit, match="MountainCarContinuous-v0 has no data set: give one by"):
        offline.main(offline.Options(env_id="MountainCarContinuous-v0"))
