"""Flat arrays into buffers and back: where episodes end, and what is refused."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from replay_model import assert_equal_batches

from buffers import (
    BufferMisuseError,
    EpisodicReplayBuffer,
    PerEnvReplayBuffer,
    RolloutBuffer,
    SharedReplayBuffer,
)
from buffers.datasets import DatasetError, from_arrays, from_buffer

OBS = spaces.Dict(
    place=spaces.Box(-99, 99, (2,), np.float32),
    more=spaces.Tuple([spaces.Discrete(200), spaces.MultiBinary(3)]),
)
ACTIONS = spaces.Box(-1, 1, (2,), np.float32)
EXTRA = {"effort": spaces.Box(0, 9, (), np.float64)}


def flat(ends, count, *, with_next=True, seed=0):
    """Arrays of `count` steps whose episodes end with those in `ends`, in turn by each flag."""
    rng = np.random.default_rng(seed)
    terminals, timeouts = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    terminals[ends[::2]], timeouts[ends[1::2]] = True, True

    def observations():
        bits = rng.integers(0, 2, (count, 3), dtype=np.int8)
        place = rng.uniform(-9, 9, (count, 2)).astype(np.float32)
        return {"place": place, "more": {"0": rng.integers(0, 200, count), "1": bits}}

    obs, following = observations(), observations()
    goes_on = np.flatnonzero(~(terminals | timeouts)[:-1])
    for get in (lambda o: o["place"], lambda o: o["more"]["0"], lambda o: o["more"]["1"]):
        get(following)[goes_on] = get(obs)[goes_on + 1]
    arrays = {
        "observations": obs,
        "actions": rng.uniform(-1, 1, (count, 2)).astype(np.float32),
        "rewards": rng.normal(size=count).astype(np.float32),
        "terminals": terminals,
        "timeouts": timeouts,
        "infos/effort": rng.random(count),
    }
    return arrays | ({"next_observations": following} if with_next else {})


def opened(arrays, **options):
    return from_arrays(arrays, OBS, ACTIONS, **{"extra_columns": EXTRA, **options})


def assert_same(first, second):
    first, second = list(first), list(second)
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert set(one) == set(other)
        np.testing.assert_equal(one, other)


def test_episodes_come_back_bit_for_bit_from_every_buffer(tmp_path):
    data = opened(flat([3, 10, 11, 29], 40))
    assert data.episode_lengths.tolist() == [4, 7, 1, 18, 10]
    episodic = data.to_buffer(EpisodicReplayBuffer)
    assert (len(episodic), episodic.num_episodes) == (40, 5)
    assert_same(data, from_buffer(episodic))
    assert_same(data, from_buffer(data.to_buffer(SharedReplayBuffer)))
    stored_once = data.to_buffer(SharedReplayBuffer, num_envs=1, store_next=False)
    assert_same(data, from_buffer(stored_once))
    disk = data.to_buffer(SharedReplayBuffer, storage="memmap", folder=tmp_path / "replay")
    assert_same(data, from_buffer(disk))
    disk.close()


def test_several_recordings_are_read_one_after_the_other():
    parts = [flat([3, 10], 14), flat([0], 1, seed=1), flat([5], 9, seed=2)]
    data = opened(parts)
    assert data.episode_lengths.tolist() == [4, 7, 3, 1, 6, 3]
    assert_same(data, [episode for part in parts for episode in opened(part)])
    assert_same(data, from_buffer(data.to_buffer(EpisodicReplayBuffer)))
    parts[2]["rewards"][4] = np.nan
    with pytest.raises(DatasetError, match="episode 0, step 4: rewards is nan"):
        opened(parts).to_buffer(SharedReplayBuffer)
    assert opened(parts[:2]).name == "arrays and 1 more"
    with pytest.raises(DatasetError, match="list of recordings is empty"):
        opened([])


def test_without_next_observations_only_a_termination_keeps_its_last_step():
    arrays = flat([3, 10, 11, 29], 40, with_next=False)
    data = opened(arrays)
    assert data.episode_lengths.tolist() == [4, 6, 1, 17, 9]
    first, second, *_ = data
    assert first["terminations"].tolist() == [False, False, False, True]
    place = arrays["observations"]["place"]
    np.testing.assert_array_equal(first["obs"]["place"], place[[0, 1, 2, 3, 3]])
    assert not (second["terminations"] | second["truncations"]).any()
    np.testing.assert_array_equal(second["obs"]["place"], place[4:11])
    ring = data.to_buffer(SharedReplayBuffer, num_envs=1, n_step=5, gamma=0.9)
    batch = ring.get(np.arange(4, 10))  # windows end with the episode that was cut
    last = np.float32(0.9) ** np.array([5, 5, 4, 3, 2, 1])
    np.testing.assert_allclose(batch.discounts.numpy(), last, rtol=1e-6)


def test_episodes_by_index_and_frames_by_number():
    arrays = flat([], 12)
    del arrays["terminals"], arrays["timeouts"], arrays["next_observations"]
    arrays |= {"episode_index": np.repeat([4, 7, 8], [5, 6, 1])}
    arrays |= {"frame_index": np.concatenate([np.arange(5), np.arange(6), [0]])}
    assert opened(arrays).episode_lengths.tolist() == [4, 5]
    for place, wrong, message in [
        (2, 3, r"episode 4, step 2: frame_index is 3, expected 2; rows are missing"),
        (5, 1, r"episode 7, step 0: frame_index is 1, expected 0"),
    ]:
        changed = arrays | {"frame_index": arrays["frame_index"].copy()}
        changed["frame_index"][place] = wrong
        refused(changed, message)
    refused(arrays | {"episode_index": np.repeat([4, 7, 4], [5, 6, 1])}, "from 7 back to 4")
    arrays["episode_index"] = arrays["episode_index"][:, None]  # one number per step as well
    assert opened(arrays).episode_lengths.tolist() == [4, 5]


def refused(arrays, message, **options):
    buffer = SharedReplayBuffer(100, OBS, ACTIONS, extra_columns=EXTRA, num_envs=1, seed=0)
    with pytest.raises(DatasetError, match=message) as error:
        opened(arrays, **options).fill(buffer)
    assert len(buffer) == 0 and "\n" not in str(error.value)


def changed(path, place, value, **options):
    arrays = flat([3, 10, 11, 29], 40, **options)
    holder, (*keys, last) = arrays, path.split(".")
    for key in keys:
        holder = holder[key]
    holder[last] = holder[last].copy()
    holder[last][place] = value
    return arrays


BAD = {
    "NaN obs": (
        lambda: changed("observations.place", (6, 1), np.nan, with_next=False),
        r"arrays, episode 1, step 2: obs\['place'\]\[1\] is nan, expected finite numbers",
    ),
    "NaN reward": (
        lambda: changed("rewards", 35, np.nan),
        "arrays, episode 4, step 5: rewards is nan, expected finite",
    ),
    "action out of bounds": (
        lambda: changed("actions", (0, 0), 1.5),
        r"episode 0, step 0: actions\[0\] is 1.5, expected values of Box.*check_bounds=False",
    ),
    "rows missing": (
        lambda: {k: removed(v, 7) for k, v in flat([3, 10, 11, 29], 40).items()},
        r"episode 1, step 2: next_obs\['place'\] is not obs\['place'\] of step 3, so steps",
    ),
    "one column cut": (
        lambda: flat([3], 40) | {"rewards": np.zeros(39)},
        "'rewards' has 39 rows, but '.*' 40; the file was cut",
    ),
    "field missing": (
        lambda: {k: v for k, v in flat([3], 40).items() if k != "actions"},
        r"the field actions is missing, looked for 'actions' or 'action'; there is \[",
    ),
    "nothing ends": (
        lambda: {k: v for k, v in flat([3], 40).items() if k not in ("terminals", "timeouts")},
        "nothing tells where episodes end",
    ),
    "other nest": (
        lambda: flat([3], 40) | {"observations": {"place": np.zeros((40, 2))}},
        "the field obs is missing, looked for .* with .*'more/0'",
    ),
    "flags of two columns": (
        lambda: flat([3], 40) | {"timeouts": np.zeros((40, 2), np.bool_)},
        r"timeouts has dtype bool and shape \(40, 2\), expected one number per step",
    ),
    "halves of episodes": (
        lambda: flat([3], 40) | {"episode_index": np.arange(40) / 2},
        "arrays: episode_index is 0.5 in row 1, expected whole numbers",
    ),
    "rows of different lengths": (
        lambda: flat([3], 40) | {"actions": [[0.0, 0.0]] * 39 + [[0.0]]},
        "arrays: actions is no array: ",
    ),
    "text": (
        lambda: flat([3], 40) | {"rewards": np.full(40, "x")},
        "rewards has dtype <U1 and shape",
    ),
    "empty": (
        lambda: {k: removed(v, slice(None)) for k, v in flat([3], 40).items()},
        "has no step",
    ),
}


def removed(tree, place):
    if isinstance(tree, dict):
        return {key: removed(value, place) for key, value in tree.items()}
    return np.delete(tree, place, axis=0)


@pytest.mark.parametrize("make, message", BAD.values(), ids=BAD)
def test_bad_data_is_refused_and_changes_nothing(make, message):
    refused(make(), message)


def test_bounds_need_not_be_looked_at_and_columns_can_have_other_names():
    arrays = changed("actions", (0, 0), 1.5)
    assert opened(arrays, check_bounds=False).episode_lengths.sum() == 40
    renamed = {"act" if k == "actions" else k: v for k, v in flat([3], 9).items() if k != "rewards"}
    data = opened(renamed, columns={"actions": "act", "rewards": None})
    assert next(iter(data))["rewards"].tolist() == [0.0] * 4
    halves = flat([3], 9) | {"rewards": torch.full((9,), 0.5, dtype=torch.bfloat16)}
    assert next(iter(opened(halves)))["rewards"].tolist() == [0.5] * 4
    with pytest.raises(DatasetError, match="columns has None for obs, which is needed"):
        opened(renamed, columns={"actions": "act", "obs": None})
    large = np.repeat(np.array([1 << 63, (1 << 63) + 1], np.uint64), [4, 5])
    numbered = opened(
        renamed | {"episode_index": large}, columns={"actions": "act", "rewards": None}
    )
    assert list(numbered.episode_lengths) == [4, 5]
    with pytest.raises(DatasetError, match="columns has 'reward', expected some of"):
        opened(renamed, columns={"reward": "x"})


def test_a_buffer_that_does_not_fit_is_refused():
    data = opened(flat([3, 10], 20))
    rollout = RolloutBuffer(20, 1, OBS, ACTIONS, autoreset_mode="NextStep")
    with pytest.raises(DatasetError, match="can't be read into a RolloutBuffer, but into Shared"):
        data.fill(rollout)
    for buffer, message in [
        (SharedReplayBuffer(19, OBS, ACTIONS, extra_columns=EXTRA), "20 steps, but .* room for 19"),
        (SharedReplayBuffer(99, OBS, spaces.Box(-2, 2, (2,)), extra_columns=EXTRA), "another env"),
        (SharedReplayBuffer(99, OBS, ACTIONS), "extra columns"),
        (EpisodicReplayBuffer(99, OBS, ACTIONS, max_episodes=2, extra_columns=EXTRA), "3 episodes"),
        (PerEnvReplayBuffer(11, OBS, ACTIONS, num_envs=2, extra_columns=EXTRA), "13 steps, but"),
    ]:
        with pytest.raises(DatasetError, match=message):
            data.fill(buffer)
        assert len(buffer) == 0
    for wrong in ("2", -2, 1.5, 0):
        with pytest.raises(BufferMisuseError, match=r"num_envs .*, got"):
            data.to_buffer(PerEnvReplayBuffer, num_envs=wrong)


def stacked(ends, count, axis=0, *, with_next=True, seed=0):
    """Arrays of `count` steps whose observations are stacks of 3 frames, and their space."""
    rng = np.random.default_rng(seed)
    terminals, timeouts = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    terminals[ends[::2]], timeouts[ends[1::2]] = True, True
    obs, following, frames = [], [], None
    for over in terminals | timeouts:
        frames = rng.integers(0, 256, (3, 2, 5), np.uint8) if frames is None else frames
        moved = np.concatenate([frames[1:], rng.integers(0, 256, (1, 2, 5), np.uint8)])
        obs.append(frames)
        following.append(moved)
        frames = None if over else moved
    arrays = {
        "observations": np.moveaxis(np.array(obs), 1, axis + 1),
        "actions": rng.uniform(-1, 1, (count, 2)).astype(np.float32),
        "rewards": rng.normal(size=count).astype(np.float32),
        "terminals": terminals,
        "timeouts": timeouts,
    }
    if with_next:
        arrays["next_observations"] = np.moveaxis(np.array(following), 1, axis + 1)
    return arrays, spaces.Box(0, 255, arrays["observations"].shape[1:], np.uint8)


@pytest.mark.parametrize(
    ("kind", "axis", "options"),
    [
        (SharedReplayBuffer, 0, {"track_env": True}),
        (PerEnvReplayBuffer, 1, {"store_next": False, "track_episodes": True}),
    ],
)
def test_stacks_come_out_of_a_buffer_of_frames_as_they_were(kind, axis, options):
    arrays, space = stacked([3, 10, 11, 29], 40, axis)
    data = from_arrays(arrays, space, ACTIONS)
    options = {"num_envs": 2, "seed": 3, **options}
    twin = data.to_buffer(kind, **options)
    once = kind(twin.capacity, space, ACTIONS, frame_stack=3, **options)
    with pytest.raises(DatasetError, match="make the buffer without frame_stack"):
        data.fill(once)
    for number, episode in enumerate(data):
        obs, ids = episode.pop("obs"), np.full(len(episode["rewards"]), number % 2)
        del episode["boundaries"]
        once.add(obs=obs[:-1], next_obs=obs[1:], env_ids=ids, **episode)
        once.cut_episodes([number % 2])
    assert_equal_batches(once.get(once.order()), twin.get(twin.order()))
    assert_same(from_buffer(once), from_buffer(twin))


def plain_arrays(**changes):
    """Two episodes of three steps, the first of which terminates."""
    flags = np.zeros(6, bool), np.zeros(6, bool)
    flags[0][2] = flags[1][5] = True
    arrays = {
        "observations": np.arange(6.0)[:, None], "actions": np.arange(6) % 2,
        "rewards": np.ones(6), "terminals": flags[0], "timeouts": flags[1],
    }  # fmt: skip
    return {**arrays, **changes}


LINE, TWO = spaces.Box(-np.inf, np.inf, (1,)), spaces.Discrete(2)


def test_replay_buffers_of_data_have_one_env_unless_told_otherwise():
    data = from_arrays(plain_arrays(), LINE, TWO)
    buffer = data.to_buffer(SharedReplayBuffer, n_step=3, gamma=0.5)
    batch = buffer.get(np.arange(2))
    assert batch.rewards.tolist() == [1.75, 1.5]
    assert data.to_buffer(PerEnvReplayBuffer).num_envs == 1


@pytest.mark.parametrize("name", ["episode_index", "frame_index"])
def test_extra_columns_have_no_name_that_files_use(name):
    arrays = plain_arrays(**{name: np.zeros(6, np.int64)})
    with pytest.raises(BufferMisuseError, match=f"extra column '{name}' has a name that is taken"):
        from_arrays(arrays, LINE, TWO, extra_columns={name: TWO})


def test_rings_that_do_not_know_their_envs_are_refused():
    with pytest.raises(DatasetError, match=r"does not know of which .* make it with num_envs=1"):
        from_buffer(SharedReplayBuffer(9, LINE, TWO))


def test_bad_episodes_are_left_out_when_asked_for_and_told_of():
    arrays = flat([3, 10, 11, 29], 40)
    arrays["observations"]["place"][5, 1] = np.nan
    arrays["actions"][35] = 7
    data = opened(arrays)
    with pytest.raises(DatasetError, match=r"episode 1, step 1: obs.*nan"):
        data.to_buffer(SharedReplayBuffer)
    with pytest.warns(UserWarning, match=r"left out: .*episode [14]") as told:
        buffer = data.without_bad().to_buffer(EpisodicReplayBuffer)
    assert buffer.num_episodes == 3 and len(told) >= 2
    good = [episode for number, episode in enumerate(opened(flat([3, 10, 11, 29], 40)))
            if number in (0, 2, 3)]  # fmt: skip
    assert_same(good, from_buffer(buffer))


def test_a_folder_that_holds_rows_is_not_filled_again(tmp_path):
    data = opened(flat([3, 10], 20))
    place = {"storage": "memmap", "folder": tmp_path / "replay", "capacity": 100}
    data.to_buffer(SharedReplayBuffer, **place).close()
    with pytest.raises(DatasetError, match=r"holds 20 transitions already.*fill"):
        data.to_buffer(SharedReplayBuffer, **place)
    again = SharedReplayBuffer(
        100, OBS, ACTIONS, num_envs=1, extra_columns=EXTRA, storage="memmap",
        folder=place["folder"],
    )  # fmt: skip
    assert len(again) == 20
    again.close()


def test_a_buffer_of_several_steps_is_not_read():
    data = from_arrays(*stacked([3, 10, 11, 29], 40), ACTIONS)
    with pytest.raises(DatasetError, match=r"n_step=3, so .* make it with n_step=1$"):
        from_buffer(data.to_buffer(SharedReplayBuffer, n_step=3, gamma=0.9))


@pytest.mark.parametrize("actions", [np.arange(6)[:, None] % 2, np.arange(6.0) % 2])
def test_numbers_of_actions_as_files_have_them_are_taken(actions):
    episodes = list(from_arrays(plain_arrays(actions=actions), LINE, TWO))
    assert episodes[0]["actions"].tolist() == [0, 1, 0]
    assert episodes[0]["actions"].dtype == np.int64
