"""examples/laplacian.py: the env, what is exact, the sampler, and (slow) the score."""

import numpy as np
import pytest
from example_files import load_example

from vecenv.check import check_vector_env
from vecenv.jit import JitVectorEnv

laplacian = load_example("laplacian")
pytestmark = pytest.mark.usefixtures("one_torch_thread")

MOVES = [(0, 1), (0, -1), (1, 0), (-1, 0)]  # of the actions: rows, columns
IS_WALL, CELLS = laplacian.IS_WALL, laplacian.CELLS


def make_envs(num_envs, **kwargs):
    return JitVectorEnv(laplacian.KERNELS, num_envs, params=laplacian.PARAMS, **kwargs)


def walk(row, column, action):
    """The rules of the env, in plain Python."""
    to_row, to_column = row + MOVES[action][0], column + MOVES[action][1]
    return (row, column) if IS_WALL[to_row, to_column] else (to_row, to_column)


def test_env_walks_as_a_plain_one():
    envs = make_envs(7, max_episode_steps=9)
    rng = np.random.default_rng(1)
    envs.reset(seed=3)
    places = list(zip(envs.states["row"].tolist(), envs.states["column"].tolist(), strict=True))
    for t in range(9):
        actions = rng.integers(4, size=7)
        obs, rewards, terminations, truncations, _ = envs.step(actions)
        places = [walk(*place, a) for place, a in zip(places, actions.tolist(), strict=True)]
        expected = 2 * np.array(places) / (np.array(IS_WALL.shape) - 1) - 1
        np.testing.assert_allclose(obs, expected, atol=1e-6)
        assert not rewards.any() and not terminations.any()
        assert truncations.all() == truncations.any() == (t == 8)


def test_env_keeps_the_rules_of_vector_envs():
    check_vector_env(make_envs(5, max_episode_steps=30))


def test_episodes_begin_in_all_cells_equally_often():
    envs = make_envs(200 * len(CELLS))
    envs.reset(seed=0)
    counts = np.zeros(IS_WALL.shape)
    np.add.at(counts, (envs.states["row"], envs.states["column"]), 1)
    assert counts[IS_WALL].sum() == 0
    chi_square = ((counts[~IS_WALL] - 200) ** 2 / 200).sum()
    assert chi_square < len(CELLS) + 4 * np.sqrt(2 * len(CELLS))


def test_transition_matrix_is_that_of_the_rules():
    cells = [tuple(cell) for cell in CELLS.tolist()]
    expected = np.zeros((len(cells), len(cells)))
    for i, cell in enumerate(cells):
        for action in range(4):
            expected[i, cells.index(walk(*cell, action))] += 0.25
    np.testing.assert_array_equal(laplacian.transition_matrix(), expected)


@pytest.mark.parametrize("discount", [0.3, 0.8, 1.0])
def test_offset_weights_are_those_of_the_sampler(discount):
    buffer = laplacian.collect(num_envs=10, num_rounds=2, length=6, seed=1)
    assert buffer.episode_lengths.tolist() == [6] * 20
    offsets = buffer.sample(100_000, discount).offsets.numpy()
    expected = 100_000 * laplacian.offset_weights(discount, 6)
    found = np.bincount(offsets, minlength=6)[1:]
    assert ((found - expected) ** 2 / expected).sum() < 18.5  # 4 degrees of freedom, p < 0.001


def test_eigenvectors_are_those_of_the_matrix_of_pairs():
    matrix, weights = laplacian.transition_matrix(), laplacian.offset_weights(0.9, 30)
    pairs = sum(w * np.linalg.matrix_power(matrix, k + 1) for k, w in enumerate(weights))
    values, vectors = laplacian.exact_eigensystem(matrix, weights)
    np.testing.assert_allclose(vectors - pairs @ vectors, vectors * values, atol=1e-9)
    np.testing.assert_allclose(vectors.T @ vectors / len(matrix), np.eye(len(matrix)), atol=1e-9)
    assert np.diff(values[:13]).min() > 0.01  # no two of the first are close


@pytest.mark.learn
@pytest.mark.timeout(900)
def test_eigenvectors_are_learned(tmp_path):
    found = laplacian.main(laplacian.Options(save=tmp_path))
    assert found.min() >= 0.95
    assert (tmp_path / "laplacian.png").read_bytes().startswith(b"\x89PNG")
