"""examples/laplacian.py: the env, what is exact, the objective, refusals, and (slow) the score."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from example_files import load_example

from vecenv.check import check_vector_env

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SCRIPT = Path(__file__).parents[2] / "examples" / "laplacian.py"
MOVES = [(0, 1), (0, -1), (1, 0), (-1, 0)]  # of the actions: rows, columns
LAYOUTS = {
    "rooms": None,
    "corridor": "######\n#....#\n######",
    "square": "#####\n#...#\n#...#\n#...#\n#####",
    "one cell": "###\n#.#\n###",
}
ONE_CELL = pytest.param("one cell", marks=pytest.mark.slow)
SMALL = {"num_updates": 3, "num_envs": 10, "num_episodes": 20, "episode_steps": 20}


laplacian = load_example("laplacian")


def make_rooms(name):
    """Rooms of a layout; others than the example's are stepped in Python, not compiled each."""
    rooms = laplacian.Rooms(LAYOUTS[name] or laplacian.ROOMS)
    if LAYOUTS[name]:
        rooms.make_envs = functools.partial(rooms.make_envs, debug=True)
    return rooms


def small(folder, **options):
    return laplacian.Options(**{**SMALL, "save": folder, **options})


def walk(is_wall, row, column, action):
    """The rules of the env, in plain Python."""
    to_row, to_column = row + MOVES[action][0], column + MOVES[action][1]
    return (row, column) if is_wall[to_row, to_column] else (to_row, to_column)


def scaled(position, shape):
    return [2 * number / (size - 1) - 1 for number, size in zip(position, shape, strict=True)]


def walked_matrix(rooms):
    """The transition matrix by the rules in plain Python."""
    cells = [tuple(cell) for cell in rooms.cells.tolist()]
    matrix = np.zeros((len(cells), len(cells)))
    for i, cell in enumerate(cells):
        for action in range(4):
            matrix[i, cells.index(walk(rooms.is_wall, *cell, action))] += 0.25
    return matrix


# --------------------------------------------------------------------------- the env


@pytest.mark.parametrize("layout", ["rooms", ONE_CELL])
def test_env_walks_as_a_plain_one(layout):
    rooms = make_rooms(layout)
    envs = rooms.make_envs(7, max_episode_steps=9)
    rng = np.random.default_rng(1)
    obs, _ = envs.reset(seed=3)
    positions = list(zip(envs.states["row"].tolist(), envs.states["column"].tolist(), strict=True))
    for t in range(9):
        actions = rng.integers(4, size=7)
        obs, rewards, terminations, truncations, _ = envs.step(actions)
        positions = [
            walk(rooms.is_wall, *position, action)
            for position, action in zip(positions, actions.tolist(), strict=True)
        ]
        expected = [scaled(position, rooms.is_wall.shape) for position in positions]
        np.testing.assert_allclose(obs, expected, atol=1e-6)
        assert not rewards.any() and not terminations.any()
        assert truncations.all() == truncations.any() == (t == 8)


def test_env_keeps_the_rules_of_vector_envs():
    check_vector_env(make_rooms("rooms").make_envs(5, max_episode_steps=30))


def test_episodes_begin_in_all_cells_equally_often():
    rooms = make_rooms("rooms")
    num_cells = len(rooms.cells)
    envs = rooms.make_envs(200 * num_cells)
    envs.reset(seed=0)
    counts = np.zeros(rooms.is_wall.shape)
    np.add.at(counts, (envs.states["row"], envs.states["column"]), 1)
    assert counts[rooms.is_wall].sum() == 0
    chi_square = ((counts[~rooms.is_wall] - 200) ** 2 / 200).sum()
    assert chi_square < num_cells + 4 * np.sqrt(2 * num_cells)


# --------------------------------------------------------------------------- what is exact


@pytest.mark.parametrize("layout", ["rooms", ONE_CELL])
def test_transition_matrix_is_that_of_the_rules(layout):
    rooms = make_rooms(layout)
    matrix = rooms.transition_matrix()
    np.testing.assert_array_equal(matrix, walked_matrix(rooms))
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_array_equal(matrix.sum(1), 1.0)


def slow_offset_weights(discount, episode_steps):
    weights = np.zeros(episode_steps - 1)
    for longest in range(1, episode_steps):
        law = [discount ** (k - 1) for k in range(1, longest + 1)]
        for k, weight in enumerate(law):
            weights[k] += weight / sum(law) / (episode_steps - 1)
    return weights


@pytest.mark.parametrize("discount", [0, 0.5, 0.9, 1])
@pytest.mark.parametrize("episode_steps", [3, 4, 50])
def test_offset_weights_are_those_of_the_slow_twin(discount, episode_steps):
    found = laplacian.offset_weights(discount, episode_steps)
    np.testing.assert_allclose(found, slow_offset_weights(discount, episode_steps), rtol=1e-9)


def test_offset_weights_are_those_of_the_sampler(tmp_path):
    options = small(tmp_path, discount=0.8, episode_steps=6)
    buffer = laplacian.collect(make_rooms("rooms"), options)
    offsets = buffer.sample(100_000, options.discount).offsets.numpy()
    expected = 100_000 * laplacian.offset_weights(0.8, 6)
    found = np.bincount(offsets, minlength=6)[1:]
    assert ((found - expected) ** 2 / expected).sum() < 18.5  # 4 degrees of freedom, p < 0.001


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["rooms", "corridor", "square", ONE_CELL])
def test_eigenvectors_are_those_of_the_matrix_of_pairs(layout):
    matrix = make_rooms(layout).transition_matrix()
    weights = laplacian.offset_weights(0.9, 30)
    pairs = sum(w * np.linalg.matrix_power(matrix, k + 1) for k, w in enumerate(weights))

    values, vectors = laplacian.exact_eigensystem(matrix, weights)

    size = len(matrix)
    np.testing.assert_allclose(vectors - pairs @ vectors, vectors * values, atol=1e-9)
    np.testing.assert_allclose(vectors.T @ vectors / size, np.eye(size), atol=1e-9)
    assert (np.diff(values) >= 0).all()
    assert abs(values[0]) < 1e-9


def test_eigenvalues_of_a_corridor_are_the_textbook_ones():
    matrix = make_rooms("corridor").transition_matrix()
    values, vectors = laplacian.exact_eigensystem(matrix, laplacian.offset_weights(0, 30))
    j = np.arange(4)
    np.testing.assert_allclose(values, 0.5 * (1 - np.cos(np.pi * j / 4)), atol=1e-12)
    cosine = np.cos(np.pi * (np.arange(4) + 0.5) / 4)
    assert abs(vectors[:, 1] @ cosine) / np.linalg.norm(cosine) == pytest.approx(2.0)


def test_no_two_of_the_first_eigenvalues_are_close():
    matrix = make_rooms("rooms").transition_matrix()
    options = laplacian.Options()
    weights = laplacian.offset_weights(options.discount, options.episode_steps)
    gaps = np.diff(laplacian.exact_eigensystem(matrix, weights).values[:13])
    assert gaps.min() > 0.015


def test_sign_and_length_do_not_change_cosines():
    exact = laplacian.exact_eigensystem(make_rooms("rooms").transition_matrix(), np.ones(1))
    learned = exact.vectors[:, :4] * [1, -1, 3, -0.2]
    np.testing.assert_allclose(laplacian.cosines(learned, exact), 1.0)
    swapped = exact.vectors[:, [0, 2, 1, 3]]
    np.testing.assert_allclose(laplacian.cosines(swapped, exact), [1, 0, 0, 1], atol=1e-9)


def test_of_equal_eigenvalues_the_space_counts():
    exact = laplacian.exact_eigensystem(make_rooms("square").transition_matrix(), np.ones(1))
    assert exact.values[1] == pytest.approx(exact.values[2])
    turned = exact.vectors[:, 1:3] @ np.array([[0.6, 0.8], [-0.8, 0.6]])
    learned = np.column_stack([exact.vectors[:, 0], turned])
    np.testing.assert_allclose(laplacian.cosines(learned, exact), 1.0)


# --------------------------------------------------------------------------- learning, files


def test_buffer_holds_whole_episodes_that_follow_the_rules(tmp_path):
    rooms = make_rooms("rooms")
    buffer = laplacian.collect(rooms, small(tmp_path))
    assert buffer.num_episodes == 20
    assert buffer.episode_lengths.tolist() == [20] * 20
    episode = buffer.episode(7)
    shape = np.array(rooms.is_wall.shape)
    rows = np.rint((episode["obs"].numpy() + 1) / 2 * (shape - 1)).astype(int)
    for t, action in enumerate(episode["actions"].tolist()):
        assert walk(rooms.is_wall, *rows[t], action) == tuple(rows[t + 1])


def test_gradient_is_that_of_the_objective(tmp_path):
    """On outputs themselves: the graph term pulls both ends, a constraint only the later vector."""
    options = small(tmp_path, num_dims=3, batch_size=8, penalty=0.7)
    learner = laplacian.Learner(laplacian.collect(make_rooms("rooms"), options), options)
    outputs = torch.randn(16, 3, requires_grad=True)
    duals = torch.randn(3, 3).tril()
    learner.duals.copy_(duals)
    learner.outputs = lambda _: outputs
    learner.optimizer = torch.optim.SGD([outputs], lr=0.0)

    u = outputs.detach().double().numpy()  # a copy, as the update changes them

    learner.update()

    expected = np.zeros_like(u)
    expected[:8], expected[8:] = (u[:8] - u[8:]) / 8, (u[8:] - u[:8]) / 8
    halves = [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    errors = [u[half].T @ u[half] / 8 - np.eye(3) for half in halves]
    for h, half in enumerate(halves):
        for j in range(3):
            for k in range(j + 1):
                factor = 0.5 * float(duals[j, k]) + 0.7 * errors[1 - h][j, k]
                expected[half, j] += factor * u[half, k] / 8
    np.testing.assert_allclose(outputs.grad.numpy(), expected, rtol=1e-4, atol=1e-6)
    mean = np.tril(errors[0] + errors[1]) / 2
    expected_duals = duals.numpy() + options.dual_rate * mean
    np.testing.assert_allclose(learner.duals.numpy(), expected_duals, atol=1e-6)


@pytest.mark.slow
def test_same_seed_gives_same_eigenvectors_and_files(tmp_path, capsys):
    found = [laplacian.main(small(tmp_path / str(k), seed=k // 2)) for k in range(3)]
    assert found[0].tolist() == found[1].tolist() != found[2].tolist()
    assert (tmp_path / "0" / "laplacian.png").read_bytes().startswith(b"\x89PNG")
    with np.load(tmp_path / "0" / "eigenvectors.npz") as saved:
        np.testing.assert_array_equal(saved["cosines"], found[0])
        assert saved["learned"].shape == (len(saved["cells"]), 10)
    assert "lowest |cosine| of 10" in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_ends_the_learning_and_reports(tmp_path, monkeypatch, capsys):
    update = laplacian.Learner.update

    def interrupted(self):
        if self.updates == 2:
            raise KeyboardInterrupt
        return update(self)

    monkeypatch.setattr(laplacian.Learner, "update", interrupted)
    laplacian.main(small(tmp_path))
    out = capsys.readouterr().out
    assert "stopped by Ctrl-C after 2 updates" in out
    assert (tmp_path / "eigenvectors.npz").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_dims": 101}, r"--num-dims is 101, expected 1 to 100: 100 cells have 100 eig"),
        ({"num_dims": 0}, r"--num-dims is 0, expected 1 to 100"),
        ({"discount": 1.5}, r"--discount is 1.5, expected 0 to 1"),
        ({"discount": float("nan")}, r"--discount is nan, expected 0 to 1"),
        ({"episode_steps": 2}, r"--episode-steps is 2, expected 3 to inf"),
        ({"batch_size": 3}, r"--batch-size is 3, expected 4 to inf"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path, monkeypatch, options, expected):
    monkeypatch.setattr(laplacian, "collect", lambda *_: pytest.fail("it collects"))
    with pytest.raises(SystemExit, match=expected):
        laplacian.main(small(tmp_path, **options))


def test_unwritable_folder_is_refused_before_anything_is_done(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(laplacian, "collect", lambda *_: pytest.fail("it collects"))
    with pytest.raises(SystemExit, match=r"file.*choose another folder with --save"):
        laplacian.main(small(tmp_path / "file" / "runs"))


@pytest.mark.learn
@pytest.mark.timeout(900)
def test_eigenvectors_are_learned(tmp_path):
    assert laplacian.main(laplacian.Options(save=tmp_path)).min() >= 0.95
