"""EpisodicReplayBuffer against brute force: bounds, laws of drawing, windows, goals, eviction."""

import numpy as np
import pytest
import torch
from episodes import fill, make_buffer, make_episode, one_step
from gymnasium import spaces
from gymnasium.spaces import Box, Discrete

from buffers import BufferMemoryError, BufferMisuseError, EpisodicReplayBuffer
from buffers.episodic import draws
from buffers.episodic.draws import offsets_below


def slow_bound(length, boundaries, t):
    ahead = [place for place in sorted(boundaries) if place >= t]
    return [length - 1, *ahead[:1], *ahead[1:2]][min(len(ahead), 2)]


def chi_square_fits(counts, probabilities):
    """Whether counts are within five standard deviations of what the law gives."""
    counts, probabilities = np.asarray(counts, float), np.asarray(probabilities, float)
    assert counts[probabilities == 0].sum() == 0
    counts, probabilities = counts[probabilities > 0], probabilities[probabilities > 0]
    expected = counts.sum() * probabilities / probabilities.sum()
    assert expected.min() > 5
    freedom = len(counts) - 1
    return ((counts - expected) ** 2 / expected).sum() < freedom + 5 * np.sqrt(2 * freedom)


@pytest.fixture(params=[False, True], ids=["compiled", "staged"])
def staged(request):
    return request.param


@pytest.mark.parametrize("seed", range(4))
def test_bound_is_the_second_next_boundary_else_the_next_else_the_last_step(seed, staged):
    rng = np.random.default_rng(seed)
    buffer = make_buffer(staged=staged)
    expected = []
    for number in range(20):
        length = int(rng.integers(1, 30))
        boundaries = np.flatnonzero(rng.random(length) < rng.choice([0, 0.1, 0.5, 1]))
        buffer.add_episode(make_episode(number, length, boundaries))
        expected.append([slow_bound(length, boundaries, t) for t in range(length)])
    found = [buffer.episode(i)["bounds"].tolist() for i in range(20)]
    assert found == expected


@pytest.mark.parametrize("discount", [0.0, 0.6, 0.95, 1.0])
def test_offsets_follow_the_truncated_geometric_law(discount, staged):
    buffer = make_buffer(staged=staged)
    boundaries, length = [4, 9, 20], 30
    buffer.add_episode(make_episode(0, length, boundaries))
    batch = buffer.sample(120_000, discount)
    steps, offsets = batch.obs[:, 1].numpy().astype(int), batch.offsets.numpy()
    np.testing.assert_array_equal(batch.future_obs[:, 1].numpy(), steps + offsets)
    for t in range(length):
        room = slow_bound(length, boundaries, t) - t
        chosen = offsets[steps == t]
        if room == 0:
            assert len(chosen) == 0
        elif discount == 0 or room == 1:
            assert (chosen == 1).all()
        else:
            law = discount ** np.arange(room)
            law[len(chosen) * law / law.sum() < 6] = 0  # too rare to test, but possible
            counts = np.bincount(chosen - 1, minlength=room)
            assert len(counts) == room
            assert chi_square_fits(counts[law > 0], law[law > 0])
    eligible = np.array([slow_bound(length, boundaries, t) > t for t in range(length)])
    assert chi_square_fits(np.bincount(steps, minlength=length), eligible)


@pytest.mark.parametrize("discount", [1e-300, 0.5, 1 - 1e-12, np.nextafter(1, 0)])
def test_offsets_stay_within_room_for_extreme_numbers(discount):
    uniforms = torch.tensor([0.0, 0.3, 1 - 2.0**-53], dtype=torch.float64).repeat(4)
    rooms = torch.tensor([1, 2, 10**6, 2**31 - 2]).repeat_interleave(3)
    by_torch = offsets_below(uniforms, rooms, discount)
    compiled = [
        draws.offset_below(u, room, np.log(discount))
        for u, room in zip(uniforms.tolist(), rooms.tolist(), strict=True)
    ]
    assert ((by_torch >= 1) & (by_torch <= rooms)).all()
    np.testing.assert_allclose(by_torch.numpy(), compiled, rtol=1e-6, atol=1)  # of rounding


def lengths_by_number(buffer):
    episodes = map(buffer.episode, range(buffer.num_episodes))
    return {int(e["obs"][0, 0]): len(e["rewards"]) for e in episodes}


@pytest.mark.parametrize("length", [1, 4, 19])
def test_sequences_are_contiguous_and_stay_in_one_episode(length, staged):
    buffer = fill(make_buffer(150, staged=staged))
    lengths = lengths_by_number(buffer)
    batch = buffer.sample_sequences(300, length)
    numbers, steps = batch.obs[..., 0], batch.obs[..., 1].long()
    assert batch.mask.all()
    assert (numbers == numbers[:, :1]).all()
    assert (steps == steps[:, :1] + torch.arange(length)).all()
    torch.testing.assert_close(batch.steps.long(), steps)
    torch.testing.assert_close(batch.next_obs[..., 1].long(), steps + 1)
    torch.testing.assert_close(batch.actions, steps)
    ends = torch.tensor([lengths[int(n)] for n in numbers[:, 0]])[:, None]
    torch.testing.assert_close(batch.terminations, steps == ends - 1)


@pytest.mark.parametrize("over", ["steps", "episodes"])
def test_all_windows_are_drawn_and_no_other_wherever_the_ring_begins(over, staged):
    for offset in range(1, 8):
        buffer = make_buffer(14, staged=staged)
        lengths = [offset, 6, 5, 3]
        for number, length in enumerate(lengths):
            buffer.add_episode(make_episode(number, length))
        wanted = {(n, step) for n in (1, 2, 3) for step in range(lengths[n] - 1)}
        batch = buffer.sample_sequences(400, 2, over=over)
        assert set(zip(*batch.obs[:, 0].long().T.tolist(), strict=True)) == wanted
        assert torch.equal(batch.obs[:, 1], batch.next_obs[:, 0])


def test_padded_sequences_end_with_the_episode(staged):
    buffer = fill(make_buffer(150, staged=staged))
    lengths = lengths_by_number(buffer)
    batch = buffer.sample_sequences(400, 8, pad=True)
    first = batch.steps[:, 0].long()
    left = torch.tensor([lengths[int(n)] for n in batch.obs[:, 0, 0]]) - first
    torch.testing.assert_close(batch.mask, torch.arange(8) < left[:, None])
    outside = ~batch.mask
    for field in (batch.obs, batch.next_obs, batch.actions, batch.rewards, batch.terminations):
        assert not field[outside].any()
    assert (batch.next_obs[batch.mask][:, 1] == batch.obs[batch.mask][:, 1] + 1).all()


@pytest.mark.parametrize(("burn_in", "overlap", "pad"), [(0, 0, False), (2, 3, True), (3, 1, True)])
def test_overlapping_windows_are_uniform_and_know_what_to_learn_from(burn_in, overlap, pad, staged):
    buffer = make_buffer(staged=staged)
    lengths, size = [3, 2, 12, 5], 5
    for number, length in enumerate(lengths):
        buffer.add_episode(make_episode(number, length))
    batch = buffer.sample_sequences(30_000, size, burn_in=burn_in, overlap=overlap, pad=pad)
    first, numbers = batch.steps[:, 0].long(), batch.obs[:, 0, 0].long()
    law = np.zeros(80)
    for number, length in enumerate(lengths):
        for step in range(0, length, size - overlap):
            if length - step >= size or (pad and (step == 0 or length - step > burn_in)):
                law[20 * number + step] = 1
    assert chi_square_fits(np.bincount((20 * numbers + first).numpy(), minlength=80), law)
    is_late = torch.arange(size) >= torch.where(first == 0, 0, burn_in)[:, None]
    assert torch.equal(batch.learn_mask, batch.mask & is_late)
    assert batch.learn_mask.any(1).all()
    assert torch.equal(batch.is_first, batch.mask & (batch.steps == 0))
    assert torch.equal(batch.indices >= 0, batch.mask)


def test_stored_states_are_refreshed_where_their_episode_is_still_there(staged):
    buffer = EpisodicReplayBuffer(
        20, Box(-np.inf, np.inf, (1,)), Discrete(2), staged=staged, seed=0, max_episodes=9,
        extra_columns={"state": Box(-np.inf, np.inf, (2,))},
    )  # fmt: skip

    def add(number, length):
        obs = number * 100 + np.arange(length + 1, dtype=np.float32)[:, None]
        columns = {"actions": np.zeros(length, int), "rewards": np.zeros(length)}
        buffer.add_episode({"obs": obs, **columns, "state": np.repeat(obs[:-1], 2, 1)})

    for number, length in enumerate((6, 7, 5)):
        add(number, length)
    batch = buffer.sample_sequences(60, 4, pad=True, initial_states="state")
    assert torch.equal(batch.initial_states["state"], batch.obs[:, 0].repeat(1, 2))
    assert not batch.extras
    add(3, 6)  # in place of the first episode
    buffer.refresh_states(batch, state=-batch.obs.repeat(1, 1, 2).double())  # of another dtype
    is_drawn = set(batch.obs[batch.mask][:, 0].tolist())
    for index in range(buffer.num_episodes):
        episode = buffer.episode(index)
        for obs, state in zip(episode["obs"][:, 0].tolist(), episode["state"], strict=False):
            assert state.tolist() == [-obs if obs in is_drawn else obs] * 2
    with pytest.raises(BufferMisuseError, match="not a copy"):
        buffer.refresh_states(buffer.sample_sequences(2, 2)._replace(), state=0)
    buffer.load_state_dict(buffer.state_dict())
    with pytest.raises(BufferMisuseError, match="before a state was loaded"):
        buffer.refresh_states(batch, state=-batch.obs.repeat(1, 1, 2))


def test_every_kind_of_space_comes_back(staged):
    nested = spaces.Dict(
        image=spaces.Box(0, 255, (3, 2, 2), np.uint8),
        pair=spaces.Tuple([spaces.Discrete(5), spaces.Box(-1, 1, (), np.float64)]),
        bits=spaces.MultiBinary(3),
    )
    extra = {"log_probs": spaces.Box(-9, 9, ()), "legal": spaces.MultiBinary(2)}
    buffer = EpisodicReplayBuffer(
        60,
        nested,
        spaces.Box(-1, 1, (3,), np.float16),
        extra_columns=extra,
        seed=1,
        staged=staged,
    )
    nested.seed(0)
    rng = np.random.default_rng(0)
    episodes = []
    for length in (20, 3, 30, 25):
        obs = [nested.sample() for _ in range(length + 1)]
        episode = {
            "obs": {
                "image": np.stack([o["image"] for o in obs]),
                "pair": tuple(np.stack([o["pair"][i] for o in obs]) for i in range(2)),
                "bits": np.stack([o["bits"] for o in obs]),
            },
            "actions": rng.normal(size=(length, 3)).astype(np.float16),
            "rewards": rng.normal(size=length),
            "log_probs": rng.normal(size=length).astype(np.float32),
            "legal": rng.integers(0, 2, (length, 2), dtype=np.int8),
        }
        episodes.append(episode)
        buffer.add_episode(episode)
    assert buffer.episode_lengths.tolist() == [3, 30, 25]
    for index, episode in enumerate(episodes[1:]):
        found = buffer.episode(index)
        np.testing.assert_array_equal(found["obs"]["image"], episode["obs"]["image"])
        for i in range(2):
            np.testing.assert_array_equal(found["obs"]["pair"][i], episode["obs"]["pair"][i])
        for name in ("actions", "log_probs", "legal"):
            np.testing.assert_array_equal(found[name], episode[name])
        assert found["truncations"].tolist() == [False] * (len(episode["rewards"]) - 1) + [True]
    batch = buffer.sample(16, 0.9)
    assert batch.obs["image"].shape == batch.future_obs["image"].shape == (16, 3, 2, 2)
    assert batch.obs["pair"][1].dtype == torch.float64
    assert (batch.extras["legal"].shape, batch.extras["log_probs"].shape) == ((16, 2), (16,))


def test_draws_depend_on_the_seed_alone(staged):
    torch.manual_seed(3)
    first, second = (fill(make_buffer(staged=staged, seed=5)) for _ in range(2))
    state = torch.get_rng_state()
    np.random.default_rng(0)
    a, b = first.sample(32, 0.9), second.sample(32, 0.9)
    assert all(map(torch.equal, a, b))
    assert not torch.equal(first.sample(32, 0.9).obs, a.obs)
    other = fill(make_buffer(staged=staged, seed=6)).sample(32, 0.9)
    assert not torch.equal(other.obs, a.obs)
    assert torch.equal(torch.get_rng_state(), state)


def test_bytes_are_listed_and_refused_if_too_many(staged, set_free_bytes):
    buffer = make_buffer(500, staged=staged)
    held = sum(buffer.memory()[name] for name in ("rows", "table"))
    assert buffer.nbytes == sum(buffer.memory().values())
    set_free_bytes(held - 1)
    with pytest.raises(
        BufferMemoryError, match=r"with capacity .* needs .* free; use a smaller capacity"
    ):
        make_buffer(500, staged=staged)
    make_buffer(499, staged=staged)


def test_an_episode_as_long_as_the_capacity_is_stored_in_pieces(staged):
    buffer = make_buffer(5, staged=staged)
    for step in range(12):
        buffer.add(**one_step(1, step, over=step == 11))
    assert buffer.episode_lengths.tolist() == [2]
    assert buffer.episode(0)["obs"][:, 0].tolist() == [10, 11, 12]


def test_more_steps_than_capacity_ending_at_once_leave_the_newest_episodes(staged):
    buffer = make_buffer(50, staged=staged)
    for step in range(20):
        columns = one_step(6, step, over=step == 19)
        columns["actions"][:] = np.arange(6)
        buffer.add(**columns)
    assert buffer.episode_lengths.tolist() == [20, 20]
    assert [buffer.episode(i)["actions"][0].item() for i in range(2)] == [4, 5]


@pytest.mark.gpu
def test_on_a_gpu_pairs_are_drawn_without_waiting_and_in_a_graph():
    buffer = fill(make_buffer(150, device="cuda"))
    lengths = lengths_by_number(buffer)
    buffer.sample(4096, 0.9)
    torch.cuda.set_sync_debug_mode("error")
    try:
        buffer.sample(4096, 0.9)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(buffer.generator)
    with torch.cuda.graph(graph):
        out = buffer.sample(4096, 0.9)
    seen = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        seen.append(out.obs.cpu())
        assert torch.equal(out.future_obs[:, 1], out.obs[:, 1] + out.offsets)
        assert torch.equal(out.future_obs[:, 0], out.obs[:, 0])
        assert all(step < lengths[int(n)] - 1 for n, step in seen[-1].tolist())
    assert not torch.equal(seen[0], seen[1])
