import numpy as np
import pytest
from envs import NUM_ENVS, RandomEnv, random_envs
from gymnasium import spaces

from vecenv.adapters import load_library, split_infos

ROWS = np.arange(3)


def test_masks_say_who_has_a_key():
    infos = {"a": ROWS, "_a": ROWS != 1, "b": ROWS * 2.0}
    assert split_infos(infos, 3) == [{"a": 0, "b": 0.0}, {"b": 2.0}, {"a": 2, "b": 4.0}]


def test_nested_infos_and_private_keys_without_a_partner():
    infos = {"deep": {"x": ROWS, "_x": ROWS == 2}, "_deep": ROWS > 0, "_alone": ROWS}
    assert split_infos(infos, 3) == [
        {"_alone": 0},
        {"deep": {}, "_alone": 1},
        {"deep": {"x": 2}, "_alone": 2},
    ]


def test_splitting_undoes_batching():
    envs = random_envs(spaces.Discrete(3))
    twins = [RandomEnv(spaces.Discrete(3)) for _ in range(NUM_ENVS)]
    _, infos = envs.reset(seed=5)
    expected = [twin.reset(seed=5 + i)[1] for i, twin in enumerate(twins)]
    for info, original in zip(split_infos(infos, NUM_ENVS), expected, strict=True):
        np.testing.assert_equal(info, original)
    envs.close()


def test_a_missing_library_names_the_extra():
    with pytest.raises(
        ModuleNotFoundError, match=r"needs nosuchlib.*pip install 'vecenv\[nosuch\]'"
    ):
        load_library("nosuchlib.part", "nosuch")
