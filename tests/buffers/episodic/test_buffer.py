"""EpisodicReplayBuffer against brute force: bounds, laws of drawing, windows, goals, eviction."""

import numpy as np
import pytest
import torch
from episodes import fill, make_buffer, make_episode, slow_bound
from gymnasium.spaces import Box, Discrete
from replay_model import check_law

from buffers import BufferMemoryError, BufferMisuseError, EpisodicReplayBuffer
from buffers.core.kernels import random_word, unit_float


@pytest.fixture(params=[False, True], ids=["compiled", "staged"])
def staged(request):
    return request.param


@pytest.mark.parametrize(
    ("discount", "staged"), [(0.0, False), (0.6, True), (0.95, False), (1.0, True)]
)
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
            check_law(counts[law > 0], law[law > 0])
    eligible = np.array([slow_bound(length, boundaries, t) > t for t in range(length)])
    check_law(np.bincount(steps, minlength=length), eligible)


@pytest.mark.parametrize("over", ["steps", "episodes"])
@pytest.mark.parametrize("discount", [0.0, 0.5, 0.99995, 1.0])
def test_pairs_equal_those_of_a_slow_twin(discount, over):
    """Number by number of the random stream, of a ring whose end is within an episode."""
    buffer, boundaries, starts = make_buffer(20), [2, 5], []
    for number, length in enumerate((19, 15, 9, 1, 3)):
        own = [place for place in boundaries if place < length]
        buffer.add_episode(make_episode(number, length, own))
        rooms = [(number, t, slow_bound(length, own, t) - t) for t in range(length)]
        starts.append([start for start in rooms if start[2] > 0])
    kept, count = starts[-buffer.num_episodes :], 300  # the first were overwritten
    starts = [found for found in kept if found]
    assert starts[0][0][0] == 2 and len(starts) == 2
    key, counter = buffer._generator.words.copy()
    with np.errstate(over="ignore"):
        words = [random_word(key, counter + np.uint64(k)) for k in range(3 * count)]
    uniforms = [unit_float(np.uint64(word)) for word in words]
    flat, expected = [start for found in starts for start in found], []
    for b in range(count):
        start, place = flat[int(uniforms[b] * len(flat))], uniforms[count + b]
        if over == "episodes":
            found = starts[int(uniforms[b] * len(starts))]
            start, place = found[int(place * len(found))], uniforms[2 * count + b]
        law = discount ** np.arange(start[2])
        offset = 1 + int(np.searchsorted(np.cumsum(law / law.sum()), place, side="right"))
        expected.append([*start[:2], start[1] + offset])
    batch = buffer.sample(count, discount, over=over)
    assert torch.cat([batch.obs, batch.future_obs[:, 1:]], 1).tolist() == expected


def test_episodes_are_equally_likely_if_asked_for_whatever_their_lengths(staged):
    buffer, lengths, law = make_buffer(staged=staged), (3, 9, 1, 2), np.zeros((4, 20))
    for number, length in enumerate(lengths):
        buffer.add_episode(make_episode(number, length))
        law[number, : length - 1] = 1 / max(length - 1, 1)
    batch = buffer.sample(6000, 1.0, over="episodes")
    drawn = batch.obs.long().numpy()
    check_law(np.bincount(20 * drawn[:, 0] + drawn[:, 1], minlength=80), law.reshape(-1))


def lengths_by_number(buffer):
    episodes = map(buffer.episode, range(buffer.num_episodes))
    return {int(e["obs"][0, 0]): len(e["rewards"]) for e in episodes}


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
    check_law(np.bincount((20 * numbers + first).numpy(), minlength=80), law)
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
