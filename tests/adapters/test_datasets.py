"""Data sets in files of other libraries: Minari, HDF5 as D4RL's, Parquet as LeRobot's."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from episodes import filled_from
from gymnasium import spaces

import vecenv
from buffers import EpisodicReplayBuffer, PerEnvReplayBuffer, SharedReplayBuffer
from buffers.datasets import (
    DatasetError,
    from_buffer,
    from_hdf5,
    from_minari,
    from_parquet,
    to_hdf5,
    to_minari,
    to_parquet,
)

# Minari would like to know the author and where the code is.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`.*` is set to None"),
    pytest.mark.filterwarnings("ignore:env_spec is None"),
]
NESTED = spaces.Dict(
    near=spaces.Box(-1, 1, (2,), np.float64),
    picture=spaces.Box(0, 255, (8, 8, 3), np.uint8),
    far=spaces.Dict(x=spaces.Discrete(9), y=spaces.Tuple([spaces.MultiBinary(2)])),
)
ACTIONS = spaces.Box(-1, 1, (3,), np.float32)
EXTRA = {"option": spaces.Discrete(5), "weight": spaces.Box(-9, 9, (2,), np.float64)}


@pytest.fixture
def minari(tmp_path, monkeypatch):
    pytest.importorskip("h5py")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return pytest.importorskip("minari")


@pytest.fixture
def h5py():
    return pytest.importorskip("h5py")


def nested_buffer(count=6):
    buffer = EpisodicReplayBuffer(500, NESTED, ACTIONS, extra_columns=EXTRA, seed=0)
    rng = np.random.default_rng(0)
    for number in range(count):
        length = int(rng.integers(1, 20))
        last = np.arange(length) == length - 1
        buffer.add_episode({
            "obs": {
                "near": rng.uniform(-1, 1, (length + 1, 2)),
                "picture": rng.integers(0, 256, (length + 1, 8, 8, 3), dtype=np.uint8),
                "far": {
                    "x": rng.integers(0, 9, length + 1),
                    "y": (rng.integers(0, 2, (length + 1, 2), dtype=np.int8),),
                },
            },
            "actions": rng.uniform(-1, 1, (length, 3)).astype(np.float32),
            "rewards": rng.normal(size=length).astype(np.float32),
            "terminations": last & (number % 3 == 0),
            "truncations": last & (number % 3 == 1),  # of every third neither: it was cut
            "boundaries": rng.random(length) < 0.2,
            "option": rng.integers(0, 5, length),
            "weight": rng.uniform(-9, 9, (length, 2)),
        })  # fmt: skip
    return buffer


def assert_same(first, second):
    first, second = list(first), list(second)
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        assert set(one) == set(other)
        np.testing.assert_equal(one, other)
        for name in set(one) - {"obs"}:
            assert one[name].dtype == other[name].dtype


@pytest.mark.parametrize("data_format", ["hdf5", "arrow"])
def test_a_round_trip_through_minari_changes_no_bit(minari, data_format):
    if data_format == "arrow":
        pytest.importorskip("pyarrow")
    buffer = nested_buffer()
    made = to_minari(buffer, "nested/all-v0", data_format=data_format)
    assert (made.total_episodes, made.total_steps) == (buffer.num_episodes, len(buffer))
    data = from_minari("nested/all-v0", extra_columns=EXTRA)
    assert data.observation_space == NESTED and data.action_space == ACTIONS
    again = data.to_buffer(EpisodicReplayBuffer, seed=0)
    assert_same(from_buffer(buffer), from_buffer(again))
    assert again.num_episodes == again.max_episodes == 6
    one, other = buffer.sample(64, 0.9), again.sample(64, 0.9)
    assert (one.obs["near"] == other.obs["near"]).all() and (one.rewards == other.rewards).all()
    to_minari(again, "nested/again-v0", data_format=data_format)
    assert_same(data, from_minari("nested/again-v0", extra_columns=EXTRA))
    both = from_minari(["nested/all-v0", "nested/again-v0"], extra_columns=EXTRA)
    assert_same(both, [*data, *data])
    to_minari(filled_from(vecenv.make_vec("CartPole-v1", 2), 20), "pole/other-v0")
    with pytest.raises(DatasetError, match=r"pole/other-v0 has the observation_space .*envs"):
        from_minari(["nested/all-v0", "pole/other-v0"])


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_steps_of_running_envs_are_what_minari_has(minari, mode):
    envs = vecenv.make_vec("CartPole-v1", 3, backend="sync", autoreset_mode=mode)
    buffer = filled_from(envs, 100)
    to_minari(buffer, "pole/random-v0", env="CartPole-v1", algorithm_name="random")
    dataset = minari.load_dataset("pole/random-v0")
    assert dataset.total_episodes == buffer.num_episodes > 5
    assert dataset.storage.metadata["algorithm_name"] == "random"
    assert dataset.recover_environment().spec.id == "CartPole-v1"
    for number, read in enumerate(dataset.iterate_episodes()):
        stored = buffer.episode(number)
        assert len(read.observations) == len(read.rewards) + 1
        np.testing.assert_array_equal(read.observations, stored["obs"].numpy())
        np.testing.assert_array_equal(read.infos["boundaries"][1:], stored["boundaries"].numpy())
    long = dataset.filter_episodes(lambda episode: len(episode) > 20)
    assert len(from_minari(long).episode_lengths) == long.total_episodes < dataset.total_episodes
    ring = filled_from(envs, 100, PerEnvReplayBuffer)
    to_minari(ring, "pole/ring-v0")
    ends = [episode["terminations"][-1] for episode in from_minari("pole/ring-v0")]
    assert ends.count(False) == 3  # still open
    assert from_minari("pole/ring-v0").episode_lengths.sum() == 300 - (
        mode == "NextStep"
    ) * ends.count(True)


def test_bad_minari_data_is_refused_by_episode_step_and_field(minari, h5py, tmp_path):
    to_minari(nested_buffer(), "nested/bad-v0")
    file = tmp_path / "minari" / "nested" / "bad-v0" / "data" / "main_data.hdf5"
    ring = SharedReplayBuffer(500, NESTED, ACTIONS)

    def refused(message, **options):
        with pytest.raises(DatasetError, match=message) as error:
            from_minari("nested/bad-v0", **options).fill(ring)
        assert len(ring) == 0 and "\n" not in str(error.value)

    with pytest.raises(DatasetError, match="episode 0: the info 'speed' is missing; there is"):
        list(from_minari("nested/bad-v0", extra_columns={"speed": spaces.Discrete(2)}))
    other = spaces.Box(-1, 1, (4,))
    refused(r"the action_space Box\(-1.0, 1.0, \(4,\).*another env", action_space=other)
    with h5py.File(file, "a") as opened:
        opened["episode_3/observations/near"][1, 0] = np.nan
    refused(r"nested/bad-v0, episode 3, step 1: obs\['near'\]\[0\] is nan, expected finite")
    with h5py.File(file, "a") as opened:
        kept = opened["episode_2/rewards"][:-1]
        del opened["episode_2/rewards"]
        opened["episode_2/rewards"] = kept
    refused(rf"nested/bad-v0, episode 2: obs.* has shape \({len(kept) + 2},\), expected")
    with h5py.File(file, "a") as opened:
        del opened["episode_1"]
    refused("nested/bad-v0, episode 1 can't be read")
    file.write_bytes(file.read_bytes()[:5000])
    refused("nested/bad-v0, episode 0 can't be read: .*truncated")
    with pytest.raises(DatasetError, match=r"no/such-v0 can't be read: .*not found"):
        from_minari("no/such-v0")


FILES = {"hdf5": (to_hdf5, from_hdf5, "h5py"), "parquet": (to_parquet, from_parquet, "pyarrow")}


@pytest.mark.parametrize("block_bytes", [1, 1 << 25])  # an episode at a time, or all
@pytest.mark.parametrize("kind", FILES)
def test_a_round_trip_through_a_file_changes_no_bit(kind, block_bytes, tmp_path, monkeypatch):
    write, read, library = FILES[kind]
    pytest.importorskip(library)
    buffer = nested_buffer()
    monkeypatch.setattr("buffers.datasets.flat.BLOCK_BYTES", block_bytes)
    path = write(buffer, tmp_path / "nested")
    monkeypatch.setattr("buffers.datasets.files.BLOCK_BYTES", 1)  # 256 rows at a time
    data, held = read(path, NESTED, ACTIONS, extra_columns=EXTRA), [*from_buffer(buffer)]
    for episode in held:  # one that was cut is flagged in the file
        episode["truncations"][-1] |= not episode["terminations"][-1]
    assert_same(held, data)
    assert_same([*held, *held], read([path, str(path)], NESTED, ACTIONS, extra_columns=EXTRA))
    assert [file.name for file in tmp_path.iterdir()] == ["nested"]
    with pytest.raises(FileExistsError, match="choose another name"):
        write(buffer, path)
    with pytest.raises(DatasetError, match="EpisodicReplayBuffer has no episode"):
        write(EpisodicReplayBuffer(9, NESTED, ACTIONS), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_parquet_file_has_the_names_of_lerobot(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    lerobot(tmp_path)
    data = from_parquet(tmp_path, STATE, ACTIONS, columns=LEROBOT)
    table = parquet.read_table(to_parquet(data, tmp_path / "all.parquet"))
    assert {"observation.state", "action", "next.reward", "next.terminated"} < {*table.column_names}
    assert table["frame_index"].to_pylist() == [0, 1, 2, 3, 0, 1, 0, 1, 2]
    assert table["episode_index"].to_pylist() == [0] * 4 + [1] * 2 + [2] * 3


def d4rl_file(h5py, path, count=1000, length=100):
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["observations"] = rng.normal(size=(count, 3)).astype(np.float32)
        file["actions"] = rng.uniform(-1, 1, (count, 3)).astype(np.float32)
        file["rewards"] = rng.normal(size=count)
        file["terminals"] = np.zeros(count, np.bool_)
        file["timeouts"] = np.arange(count) % length == length - 1
        file["infos/qpos"] = rng.normal(size=(count, 4))
        file["metadata/algorithm"] = "none"
    return path


def test_d4rl_files_are_read_in_blocks_and_damage_is_named(h5py, tmp_path, monkeypatch):
    space = spaces.Box(-np.inf, np.inf, (3,))
    path = d4rl_file(h5py, tmp_path / "d4rl.hdf5")
    whole = list(from_hdf5(path, space, ACTIONS))
    monkeypatch.setattr("buffers.datasets.files.BLOCK_BYTES", 1)
    data = from_hdf5(path, space, ACTIONS, extra_columns={"qpos": spaces.Box(-9, 9, (4,))})
    assert data.episode_lengths.tolist() == [99] * 10
    for one, other in zip(whole, data, strict=True):
        np.testing.assert_array_equal(one["obs"], other["obs"])
        assert other["qpos"].shape == (99, 4)
    with h5py.File(path, "a") as file:
        file["actions"][607, 2] = np.inf

    def refused(message, file=path):
        with pytest.raises(DatasetError, match=message) as error:
            from_hdf5(file, space, ACTIONS).to_buffer(SharedReplayBuffer)
        assert str(file) in str(error.value) and "\n" not in str(error.value)

    refused(r"d4rl.hdf5, episode 6, step 7: actions\[2\] is inf, expected finite numbers")
    with h5py.File(path, "a") as file:
        del file["rewards"]
        file["rewards"] = np.zeros(999)
    refused("'rewards' has 999 rows, but 'observations' 1000")
    with h5py.File(path, "a") as file:
        del file["rewards"]
        file[b"rew\xffards"] = np.zeros(1000)  # a name that is no text, as of a damaged file
    refused(r"the field rewards is missing, looked for 'rewards' .*columns=\{'rewards': \.\.\.\}")
    path.write_bytes(path.read_bytes()[:20_000])
    refused("can't be read: .*truncated")
    refused("can't be read", tmp_path / "none.hdf5")


STATE = spaces.Box(-9, 9, (2,), np.float32)
LEROBOT = {"rewards": None}


def lerobot(folder, lengths=(5, 3, 4), **changes):
    """LeRobot's layout, each episode in a file but the last two."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    count = sum(lengths)
    rng = np.random.default_rng(0)
    columns = {
        "observation.state": rng.uniform(-9, 9, (count, 2)).astype(np.float32).tolist(),
        "action": rng.uniform(-1, 1, (count, 3)).astype(np.float32).tolist(),
        "timestamp": np.arange(count) / 10,
        "episode_index": np.repeat(np.arange(len(lengths)), lengths),
        "frame_index": np.concatenate([np.arange(length) for length in lengths]),
        "next.done": np.concatenate([np.arange(length) == length - 1 for length in lengths]),
    }
    for name, change in changes.items():
        column = columns[name.replace("__", ".")]
        columns[name.replace("__", ".")] = change(list(column))
    kinds = {"observation.state": pyarrow.list_(pyarrow.float32()),
             "action": pyarrow.list_(pyarrow.float32(), 3)}  # fmt: skip
    (folder / "data" / "chunk-000").mkdir(parents=True, exist_ok=True)
    (folder / "meta").mkdir(exist_ok=True)
    info = {"total_frames": count, "total_episodes": len(lengths)}
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    for number, part in enumerate((slice(0, lengths[0]), slice(lengths[0], None))):
        arrays = {k: pyarrow.array(list(v[part]), kinds.get(k)) for k, v in columns.items()}
        file = folder / "data" / "chunk-000" / f"file-{number:03}.parquet"
        parquet.write_table(pyarrow.table(arrays), file)
    return columns


def test_lerobot_folders_are_read_frame_by_frame(tmp_path):
    columns = lerobot(tmp_path)
    data = from_parquet(tmp_path, STATE, ACTIONS, columns=LEROBOT)
    assert data.episode_lengths.tolist() == [4, 2, 3]
    first = next(iter(data))
    np.testing.assert_array_equal(first["obs"], np.float32(columns["observation.state"][:5]))
    np.testing.assert_array_equal(first["actions"], np.float32(columns["action"][:4]))
    assert not first["rewards"].any() and not first["terminations"].any()
    done = from_parquet(
        tmp_path, STATE, ACTIONS, columns={"terminations": "next.done", "rewards": "timestamp"}
    )
    assert done.episode_lengths.tolist() == [5, 3, 4]
    assert next(iter(done))["terminations"].tolist() == [False] * 4 + [True]
    file = tmp_path / "data" / "chunk-000" / "file-001.parquet"
    assert len(from_parquet(file, STATE, ACTIONS, columns=LEROBOT).episode_lengths) == 2
    space = spaces.Dict(state=STATE)
    assert "state" in next(iter(from_parquet(tmp_path, space, ACTIONS, columns=LEROBOT)))["obs"]


def replaced(place, value):
    def change(column):
        column[place] = value
        return column

    return change


@pytest.mark.parametrize("changes, message", [
    ({"frame_index": replaced(6, 2)}, r"file-001.parquet, episode 1, step 1: frame_index is 2, "),
    ({"action": replaced(6, [0.0, np.nan, 0.0])}, r"episode 1, step 1: actions\[1\] is nan"),
    ({"observation__state": replaced(9, [1.0, 10.0])}, "episode 2, step 1: .* is 10.0, expected"),
    ({"episode_index": replaced(9, 0)}, "episode_index goes from 2 back to 0"),
])  # fmt: skip
def test_bad_frames_are_refused_and_change_nothing(tmp_path, changes, message):
    lerobot(tmp_path, **changes)
    ring = SharedReplayBuffer(50, STATE, ACTIONS)
    with pytest.raises(DatasetError, match=message) as error:
        from_parquet(tmp_path, STATE, ACTIONS, columns=LEROBOT).fill(ring)
    assert len(ring) == 0 and "\n" not in str(error.value)


def test_files_that_are_missing_or_cut_are_named(tmp_path):
    lerobot(tmp_path)
    file = tmp_path / "data" / "chunk-000" / "file-001.parquet"
    with pytest.raises(DatasetError, match=r"the field rewards is missing.*columns="):
        from_parquet(tmp_path, STATE, ACTIONS)
    whole = file.read_bytes()
    file.write_bytes(whole[:-50])
    with pytest.raises(DatasetError, match=r"file-001.parquet can't be read: "):
        from_parquet(tmp_path, STATE, ACTIONS, columns=LEROBOT)
    file.unlink()
    with pytest.raises(DatasetError, match=r"meta/info.json tells 12 frames, but the files have 5"):
        from_parquet(tmp_path, STATE, ACTIONS, columns=LEROBOT)
    with pytest.raises(DatasetError, match=r"has no \.parquet file"):
        from_parquet(tmp_path / "meta", STATE, ACTIONS)
    with pytest.raises(DatasetError, match=r"can.t be read: .*[Nn]o such file"):
        from_parquet(file, STATE, ACTIONS)


@pytest.mark.parametrize("call, library", [
    (lambda: from_minari("x-v0"), "minari"),
    (lambda: from_hdf5("x", STATE, ACTIONS), "h5py"),
    (lambda: from_parquet("x", STATE, ACTIONS), "pyarrow"),
])  # fmt: skip
def test_what_is_not_installed_is_named_with_its_extra(call, library, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=rf"{library}.*pip install 'vecenv\[datasets\]'"):
        call()


def test_what_the_page_shows_runs(minari, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "datasets.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^(?:```python[^\n]*|<!-- setup)\n(.*?)^(?:```|-->)$", page, re.S | re.M)
    assert len(blocks) == 5
    scope = {"__name__": "page"}
    for block in blocks:
        exec(block, scope)
    assert len(scope["replay"]) == 990
