"""TransitionWriter against what each environment did by itself, whatever resets it.

A counter env observes (name, episode, step), so what its transitions are is known beforehand: they
are the same under every autoreset mode and however the steps were split into sends.
"""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from envs import MODES, CounterEnv, counters, mode_id
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import buffers
import vecenv
from buffers import BufferMisuseError, EpisodicReplayBuffer, SharedReplayBuffer, TransitionWriter

NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode
LENGTHS = [3, 1, 5, 2]
MAKERS = {"gymnasium": gym.vector.SyncVectorEnv, "vecenv": vecenv.SyncVectorEnv}


class Recorder:
    """Copies every transition out, row by row."""

    def __init__(self):
        self.rows = []

    def add(self, *, env_ids, **columns):
        count = len(env_ids)
        assert all(len(column) == count for column in columns.values())
        for row in range(count):
            values = {name: np.array(column[row]) for name, column in columns.items()}
            self.rows.append((int(env_ids[row]), values))

    def of_env(self, env_id):
        return [values for found, values in self.rows if found == env_id]


def make_envs(maker, mode, lengths=LENGTHS, **kwargs):
    return MAKERS[maker](counters(lengths, **kwargs), autoreset_mode=mode, copy=False)


def check_against_model(rows, name, length, truncates, actions):
    """Compare one env's transitions with what the env does by itself."""
    env = CounterEnv(name, length, truncates)
    obs, _ = env.reset()
    for row, action in zip(rows, actions, strict=True):
        next_obs, reward, terminated, truncated, _ = env.step(action)
        assert row["obs"].tolist() == obs.tolist()
        assert row["next_obs"].tolist() == next_obs.tolist()
        assert (row["actions"], row["rewards"]) == (action, reward)
        assert (row["terminations"], row["truncations"]) == (terminated, truncated)
        obs = next_obs if not terminated | truncated else env.reset()[0]


def reset_ended(envs, writer, over):
    if writer.autoreset_mode is DISABLED and over.any():
        obs, _ = envs.reset(options={"reset_mask": over.copy()})
        writer.reset(obs, over)


@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=mode_id)
@pytest.mark.parametrize("maker", MAKERS)
def test_full_steps_give_the_transitions_of_each_env(maker, mode, truncates):
    # Gymnasium's own vector env loses final observations of envs that reuse their memory.
    reuses_obs = maker == "vecenv" or mode is not SAME_STEP
    envs = make_envs(maker, mode, truncates=truncates, reuses_obs=reuses_obs)
    recorder = Recorder()
    writer = TransitionWriter(envs, recorder)
    rng = np.random.default_rng(0)
    writer.reset(envs.reset(seed=0)[0])
    taken = [[] for _ in LENGTHS]
    over_before = np.zeros(4, bool)
    for _ in range(40):
        actions = rng.integers(0, 10, 4)
        result = envs.step(actions)
        writer.step(actions, *result)
        for i in np.flatnonzero(~(over_before & (mode is NEXT_STEP))):
            taken[i].append(actions[i])
        over_before = result[2] | result[3]
        reset_ended(envs, writer, over_before)
    for i, length in enumerate(LENGTHS):
        check_against_model(recorder.of_env(i), i, length, truncates, taken[i])
    assert writer.num_transitions == len(recorder.rows) == sum(map(len, taken))


@pytest.mark.parametrize("min_envs", [1, 3])
@pytest.mark.parametrize("mode", MODES, ids=mode_id)
def test_first_ready_batches_give_the_transitions_of_each_env(mode, min_envs):
    envs, recorder = make_envs("vecenv", mode), Recorder()
    writer = TransitionWriter(envs, recorder)
    rng = np.random.default_rng(min_envs)
    writer.reset(envs.reset(seed=0)[0])
    taken, over = [[] for _ in LENGTHS], np.zeros(4, bool)
    idle, sent = list(range(4)), {}
    for _ in range(60):
        if mode is DISABLED and over[idle].any():
            mask = np.zeros(4, bool)
            mask[idle] = over[idle]
            writer.reset(envs.reset(options={"reset_mask": mask})[0], np.flatnonzero(mask))
            over[mask] = False
        chosen = rng.permutation(idle)[: rng.integers(1, len(idle) + 1)] if idle else []
        if len(chosen):
            actions = rng.integers(0, 10, len(chosen))
            envs.send(actions, chosen)
            writer.sent(actions, chosen)
            sent |= dict(zip(chosen.tolist(), actions.tolist(), strict=True))
            actions[:] = -1  # the caller may use the memory again
            idle = [i for i in idle if i not in sent]
        if len(sent) < min_envs:
            continue
        batch = envs.recv(min_envs)
        writer.received(batch)
        for i, ended in zip(batch.env_ids, batch.terminations | batch.truncations, strict=True):
            if not (over[i] and mode is NEXT_STEP):
                taken[i].append(sent[i])
            over[i] = ended
            del sent[i]
            idle.append(int(i))
    assert min(map(len, taken)) > 5
    for i, length in enumerate(LENGTHS):
        check_against_model(recorder.of_env(i), i, length, False, taken[i])


def test_a_buffer_without_add_is_refused():
    with pytest.raises(BufferMisuseError, match=r"a dict, has no method add\(\*\*columns\)"):
        TransitionWriter(make_envs("vecenv", NEXT_STEP), {})


def make_writer(mode=SAME_STEP):
    envs, recorder = make_envs("vecenv", mode), Recorder()
    writer = TransitionWriter(envs, recorder)
    writer.reset(envs.reset(seed=0)[0])
    return envs, writer, recorder


def ended_result(infos):
    obs = np.zeros((4, 3), np.float32)
    flags = np.array([False, True, False, False])
    return obs, np.zeros(4), flags, np.zeros(4, bool), infos


def test_a_step_without_an_agent_ends_its_episode_in_the_buffer():
    envs, recorder, cuts = make_envs("vecenv", NEXT_STEP), Recorder(), []
    recorder.cut_episodes = lambda env_ids: cuts.append(env_ids.tolist())
    writer, no = TransitionWriter(envs, recorder), np.zeros(4, bool)
    writer.reset(envs.reset(seed=0)[0])
    for valid in ([True] * 4, [True, False, True, False]):
        obs = np.zeros((4, 3), np.float32)
        writer.step(np.zeros(4, int), obs, np.zeros(4), no, no, {}, valid=np.array(valid))
    assert [env_id for env_id, _ in recorder.rows] == [0, 1, 2, 3, 0, 2]
    assert cuts == [[0, 1, 2, 3], [1, 3]]  # of the reset, and of the dead


BAD_RESULTS = {
    "no final_obs": (ended_result({}), "the episode of env 1 ended, but infos"),
    "empty final_obs": (ended_result({"final_obs": np.full(4, None)}), "the episode of env 1"),
    "final_obs of wrong shape": (
        ended_result({"final_obs": [None, np.zeros(2, np.float32), None, None]}),
        r"final_obs has shape \(2,\), expected \(3,\)",
    ),
    "too few rows": ((np.zeros((3, 3)), *ended_result({})[1:]), r"obs has shape \(3, 3\)"),
    "rewards": ((*ended_result({})[:1], np.zeros(3), *ended_result({})[2:]), "rewards has shape"),
    "flags": (
        (*ended_result({})[:2], np.zeros(4), *ended_result({})[3:]),
        "terminations has dtype",
    ),
}


@pytest.mark.parametrize("result, message", BAD_RESULTS.values(), ids=BAD_RESULTS)
def test_bad_results_are_refused_and_change_nothing(result, message):
    envs, writer, recorder = make_writer()
    actions = np.zeros(4, int)
    with pytest.raises(BufferMisuseError, match=message):
        writer.step(actions, *result)
    assert recorder.rows == []
    writer.step(actions, *envs.step(actions))
    assert [row["obs"][2] for _, row in recorder.rows] == [0, 0, 0, 0]


def test_calls_out_of_order_are_refused():
    envs = make_envs("vecenv", DISABLED)
    writer, actions = TransitionWriter(envs, Recorder()), np.zeros(4, int)
    obs, _ = envs.reset(seed=0)
    result = envs.step(actions)
    with pytest.raises(BufferMisuseError, match=r"envs \[0, 1, 2, 3\] began with are not known"):
        writer.step(actions, *result)
    writer.reset(obs)
    writer.step(actions, *result)
    with pytest.raises(BufferMisuseError, match=r"rows \[1\] have ended and autoreset is disabled"):
        writer.step(actions, *result)
    with pytest.raises(BufferMisuseError, match="call sent"):
        writer.received(SimpleNamespace(env_ids=np.array([0])))
    writer.sent(actions[:1], [2])
    with pytest.raises(BufferMisuseError, match=r"envs \[2\] are in flight"):
        writer.sent(actions, None)
    with pytest.raises(BufferMisuseError, match=r"step while envs \[2\] are in flight"):
        writer.step(actions, *result)
    with pytest.raises(BufferMisuseError, match="expected different numbers from 0 to 3"):
        writer.reset(obs, [4])
    with pytest.raises(BufferMisuseError, match="actions has dtype"):
        writer.sent(np.zeros(1), [0])
    envs, writer, _ = make_writer(NEXT_STEP)
    writer.sent(actions[:1], [2])  # where no episode has ended, so that steps are quick
    no = np.zeros(4, bool)
    with pytest.raises(BufferMisuseError, match=r"step while envs \[2\] are in flight"):
        writer.step(actions, obs, np.zeros(4), no, no, {})


# Extra columns.

EXTRA = {"twice": spaces.Box(0, 100, (2,)), "thrice": spaces.Box(-100, 100, ())}


def twice(actions):
    return np.stack([2 * actions, 2 * actions], 1).astype(np.float32)


def check_extras(rows):
    assert len(rows) > 10
    for row in rows:
        assert row["twice"].tolist() == [2 * row["actions"]] * 2
        assert row["thrice"] == 3 * row["rewards"]


def rows_of(buffer):
    """Transitions a buffer holds, as dicts."""
    if isinstance(buffer, Recorder):
        return [values for _, values in buffer.rows]
    if isinstance(buffer, EpisodicReplayBuffer):
        buffer.cut_episodes()
        batch = buffer.sample_sequences(200, 1)
        columns = [batch.actions, batch.rewards, batch.extras["twice"], batch.extras["thrice"]]
        columns = [column[:, 0].numpy() for column in columns]
    else:
        batch = buffer.get(buffer.order())
        columns = [batch.actions, batch.rewards, batch.extras["twice"], batch.extras["thrice"]]
        columns = [column.numpy() for column in columns]
    names = ["actions", "rewards", "twice", "thrice"]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def make_buffer(kind, envs):
    given = envs.single_observation_space, envs.single_action_space
    options = {"num_envs": 4, "extra_columns": EXTRA, "seed": 0}
    return kind() if kind is Recorder else kind(400, *given, **options)


BUFFERS = [SharedReplayBuffer, EpisodicReplayBuffer, Recorder]


@pytest.mark.parametrize("kind", BUFFERS)
def test_extra_columns_wait_for_the_results_of_envs_in_flight(kind):
    envs, rng = make_envs("vecenv", NEXT_STEP), np.random.default_rng(0)
    buffer = make_buffer(kind, envs)
    writer = TransitionWriter(envs, buffer)
    writer.reset(envs.reset(seed=0)[0])
    ready = np.arange(4)
    for _ in range(40):
        actions = rng.integers(0, 10, len(ready))
        envs.send(actions, ready)
        writer.sent(actions, ready, twice=twice(actions))
        batch = envs.recv(min_envs=2)
        writer.received(batch, thrice=3 * batch.rewards)
        ready = rng.permutation(batch.env_ids)
    check_extras(rows_of(buffer))


def test_bad_extra_columns_are_refused_and_change_nothing():
    envs = make_envs("vecenv", NEXT_STEP)
    buffer = make_buffer(buffers.SharedReplayBuffer, envs)
    writer = TransitionWriter(envs, buffer)
    writer.reset(envs.reset(seed=0)[0])
    actions = np.zeros(4, int)
    result = envs.step(actions)
    for extras, message in [
        (
            {"twice": np.zeros((3, 2))},
            r"twice has shape \(3, 2\), expected \(4, ...\): one row per",
        ),
        ({"twice": np.zeros((4, 2))}, r"missing: \['thrice'\]"),
        ({}, r"missing: \['thrice', 'twice'\]"),
        ({"twice": twice(actions), "thrice": np.zeros(4), "x": np.zeros(4)}, r"unknown: \['x'\]"),
    ]:
        with pytest.raises(BufferMisuseError, match=message):
            writer.step(actions, *result, **extras)
    assert len(buffer) == writer.num_transitions == 0
    writer.sent(actions[:2], [0, 1], twice=twice(actions[:2]))
    with pytest.raises(BufferMisuseError, match="as for the envs in flight; give the same ones"):
        writer.sent(actions[2:], [2, 3], thrice=np.zeros(2))
    writer.sent(actions[2:], [2, 3], twice=twice(actions[2:]))


def test_a_buffer_for_another_autoreset_mode_is_refused():
    buffer = Recorder()
    buffer.autoreset_mode = "SameStep"
    TransitionWriter(make_envs("vecenv", SAME_STEP), buffer)
    with pytest.raises(BufferMisuseError, match="mode 'SameStep', but the envs have 'NextStep'"):
        TransitionWriter(make_envs("vecenv", NEXT_STEP), buffer)


class Shelf:
    """A buffer that takes tensors of its device, which is the host's here, as they are."""

    device = torch.device("cpu")
    takes_tensors = True

    def __init__(self):
        self.rows = []

    def add(self, *, env_ids=None, **columns):
        self.rows.append(
            {name: (given, np.asarray(given).copy()) for name, given in columns.items()}
        )


def on_a_device(buffer, num_envs=3):
    """A writer of envs whose results lie where the buffer is."""
    space = spaces.Box(-9, 9, (2,), np.float32)
    like = SimpleNamespace(
        metadata={"autoreset_mode": SAME_STEP},
        num_envs=num_envs,
        single_observation_space=space,
        single_action_space=spaces.Discrete(4),
        device=getattr(buffer, "device", torch.device("cpu")),
    )
    return TransitionWriter(like, buffer)


def a_step(number, num_envs=3, over=1):
    """Actions, results and infos of a step in which one env ends, as tensors."""
    obs = torch.full((num_envs, 2), float(number))
    ends = torch.arange(num_envs) == over
    infos = {"final_obs": obs + 5, "_final_obs": ends}
    actions, rewards = torch.full((num_envs,), number % 4), torch.arange(num_envs) + 0.5
    return actions, obs, rewards, ends, torch.zeros(num_envs, dtype=torch.bool), infos


def hosts(step):
    return (step[0].numpy(), *step[1:])


def with_other_finals(step):
    return (*step[:-1], {**step[-1], "final_obs": step[-1]["final_obs"].double()})


def with_flags_as_numbers(step):
    return (*step[:-1], {**step[-1], "_final_obs": step[-1]["_final_obs"].to(torch.int64)})


@pytest.mark.parametrize("changed", [hosts, with_other_finals, with_flags_as_numbers])
def test_a_step_that_does_not_fit_the_devices_path_is_written_all_the_same(changed):
    shelf = Shelf()
    writer = on_a_device(shelf)
    writer.reset(torch.zeros(3, 2))
    writer.step(*a_step(1))
    writer.step(*changed(a_step(2)))
    writer.step(*a_step(3))
    assert writer.num_transitions == 9
    obs = [row["obs"][1][:, 0].tolist() for row in shelf.rows]
    following = [row["next_obs"][1][:, 0].tolist() for row in shelf.rows]
    assert obs == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]
    assert following == [[1, 6, 1], [2, 7, 2], [3, 8, 3]]
    assert [torch.is_tensor(row["obs"][0]) for row in shelf.rows] == [True, False, False]


def test_a_reset_of_some_envs_keeps_the_observations_of_the_others_on_a_device():
    shelf = Shelf()
    writer = on_a_device(shelf)
    writer.reset(torch.zeros(3, 2))
    writer.step(*a_step(1))
    writer.reset(torch.full((3, 2), 8.0), [2])
    writer.step(*a_step(2))
    assert [row["obs"][1][:, 0].tolist() for row in shelf.rows] == [[0, 0, 0], [1, 1, 8]]
    assert torch.is_tensor(shelf.rows[1]["obs"][0])


def test_tensors_are_read_for_a_buffer_that_takes_none():
    recorder = Recorder()
    writer = on_a_device(recorder)
    writer.reset(torch.zeros(3, 2))
    writer.step(*a_step(1))
    assert [row["next_obs"][0] for _, row in recorder.rows] == [1, 6, 1]
