import numpy as np
import pytest
from gymnasium import spaces

from buffers import EpisodicReplayBuffer
from vecenv.adapters.minari import export_episodes

minari = pytest.importorskip("minari")
pytest.importorskip("h5py")

# Minari would like to know the author and where the code is.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`.*` is set to None"),
    pytest.mark.filterwarnings("ignore:env_spec is None"),
    pytest.mark.filterwarnings("ignore:export_episodes is deprecated"),
]


@pytest.fixture(autouse=True)
def datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))


def test_nested_spaces_boundaries_and_extra_columns():
    space = spaces.Dict(near=spaces.Box(-1, 1, (2,)), far=spaces.Dict(x=spaces.Discrete(9)))
    extra = {"option": spaces.Discrete(5)}
    buffer = EpisodicReplayBuffer(100, space, spaces.Box(-1, 1, (3,)), extra_columns=extra)
    rng = np.random.default_rng(0)
    near = rng.uniform(-1, 1, (7, 2)).astype(np.float32)
    steps = {
        "obs": {"near": near, "far": {"x": np.arange(7)}},
        "actions": rng.uniform(-1, 1, (6, 3)).astype(np.float32),
        "rewards": np.arange(6.0),
        "boundaries": np.arange(6) == 2,
        "option": np.array([1, 1, 1, 4, 4, 4]),
    }
    buffer.add_episode(steps)
    export_episodes(buffer, "nested-v0")
    (episode,) = minari.load_dataset("nested-v0").iterate_episodes()
    np.testing.assert_equal(episode.observations, steps["obs"])
    np.testing.assert_equal(episode.actions, steps["actions"])
    assert episode.infos["boundaries"].tolist() == [False, *steps["boundaries"]]
    assert episode.infos["option"].tolist() == [0, *steps["option"]]


def test_it_is_deprecated():
    buffer = EpisodicReplayBuffer(100, spaces.Discrete(2), spaces.Discrete(2))
    with (
        pytest.warns(DeprecationWarning, match=r"use buffers\.datasets\.to_minari"),
        pytest.raises(ValueError, match="no episodes"),
    ):
        export_episodes(buffer, "none-v0")
