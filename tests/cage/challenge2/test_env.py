"""The CAGE 2 vector env and the single env."""

import hashlib
import io

import gymnasium as gym
import numpy as np
import pytest
from cage.challenge2.free_run import own_red
from cage.challenge2.harbour import HARBOUR
from cage.golden import COMPACT_FIELDS
from envs import begun
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from jit.toy_rolls import assert_same

import vecenv
from vecenv.cage import (
    RULES_VERSION,
    Cage2Env,
    Cage2VectorEnv,
    blue_actions,
    cage2_scenario,
    replay_episodes,
)
from vecenv.cage.challenge2.env import STEP_INFOS
from vecenv.cage.challenge2.rules.codes import B_LINE, CUSTOM, MEANDER, NO_RED
from vecenv.check import check_vector_env
from vecenv.core.compiling import is_jit_off

MODES = list(AutoresetMode)
NUM_ACTIONS = 145
SOME, MANY = (20, 300) if is_jit_off() else (200, 3000)  # plain Python is slow


def random_actions(num_steps, num_envs, seed=0):
    return np.random.default_rng(seed).integers(0, NUM_ACTIONS, (num_steps, num_envs))


def roll(envs, actions, seed=3):
    """Reset and step; return every array that comes back."""
    frames = [envs.reset(seed=seed)[0]]
    for row in actions:
        frames += envs.step(row)[:4]
    return frames


@pytest.mark.parametrize("rules", ["faithful", "debugged"])
@pytest.mark.parametrize("green", [False, True])
def test_free_running_equals_the_replay_of_what_it_drew(rules, green):
    num_envs, num_steps = SOME, 60
    names = [name for name in STEP_INFOS if name.startswith(("red_", "green_"))]
    envs = Cage2VectorEnv(
        num_envs, red_agent=("mixed", "sleep"), rules=rules, green=green, step_infos=names
    )
    envs.reset(seed=11)
    agents = envs.true_state["red_agent"].copy()
    recorded = {name: np.zeros((num_envs, num_steps), np.int64) for name in [*names, "blue_action"]}
    fields = {name: [] for name in ("obs", "reward10", *COMPACT_FIELDS)}
    for t, row in enumerate(random_actions(num_steps, num_envs)):
        obs, rewards, _, _, infos = envs.step(row)
        recorded["blue_action"][:, t] = row
        for name in names:
            assert infos[f"_{name}"].all()
            recorded[name][:, t] = infos[name]
        for name, rows in {"obs": obs, "reward10": rewards * 10, **envs.decoded_state()}.items():
            fields[name].append(rows)
    recorded["red_agent"] = agents

    result = replay_episodes(recorded, cage2_scenario(rules), green=green)

    assert set(agents) == {NO_RED, B_LINE, MEANDER}
    assert (recorded["green_target"] >= 0).any() == green
    for name, rows in fields.items():
        expected = result.fields[name]
        np.testing.assert_array_equal(np.stack(rows, axis=1).round(6), expected, err_msg=name)
    assert not result.errors.any()
    assert result.policy_agrees.all()


@pytest.mark.parametrize(
    ("mode", "episode_length"), list(zip(MODES, [(3, 5, 11), 7, (3, 5, 11)], strict=True))
)
def test_keeps_the_rules_of_vector_envs(mode, episode_length):
    options = {"episode_length": episode_length, "autoreset_mode": mode, "episode_infos": True}
    envs = Cage2VectorEnv(3, red_agent="mixed", step_infos=STEP_INFOS, **options)
    report = check_vector_env(envs, num_steps=40)
    assert "the same seed gives the same run" in report.passed


def test_is_made_by_gymnasium():
    envs = gym.make_vec("vecenv:Cage2-v0", num_envs=2, red_agent="meander", rules="debugged")
    assert isinstance(envs, Cage2VectorEnv)
    assert (envs.num_envs, envs.scenario.rules.name) == (2, "debugged")
    assert envs.single_observation_space == gym.spaces.Box(0, 1, (52,), np.float32)
    assert envs.single_action_space == gym.spaces.Discrete(NUM_ACTIONS)
    assert envs.reset(seed=1)[0].shape == (2, 52)


@pytest.mark.parametrize("options", [{}, {"red_agent": "mixed", "observation": "memory"}])
def test_single_env_passes_gymnasiums_check(options):
    env = gym.make("vecenv:Cage2-v0", **options)
    assert isinstance(env.unwrapped, Cage2Env)
    check_env(env.unwrapped)


def test_single_env_does_what_a_vector_env_does():
    envs = Cage2VectorEnv(4, red_agent="mixed", step_infos=["red_type"], episode_length=20)
    env = Cage2Env(red_agent="mixed", step_infos=["red_type"], episode_length=20)
    obs, _ = envs.reset(seed=5)
    np.testing.assert_array_equal(env.reset(seed=5 + 3)[0], obs[3])
    for row in random_actions(20, 4):
        obs, rewards, _, truncations, infos = envs.step(row)
        alone = env.step(row[3])
        np.testing.assert_array_equal(alone[0], obs[3])
        assert alone[1:4] == (rewards[3], False, truncations[3])
        assert alone[4] == {"red_type": infos["red_type"][3]}
        np.testing.assert_array_equal(env.action_masks(), envs.action_masks()[3])
        assert env.true_state == envs.true_state[3]
    assert truncations.all()
    with pytest.raises(ResetNeeded, match="episode is over"):
        env.step(0)
    assert env.reset()[0].shape == (52,)
    np.testing.assert_array_equal(env.decoded_state()["known_ip"].nonzero()[0], [8])


def test_an_env_depends_on_its_seed_alone():
    options = {"red_agent": "mixed"}
    actions = random_actions(30, 50)
    frames = roll(Cage2VectorEnv(50, **options), actions)
    for env_id in (0, 31, 49):
        alone = roll(Cage2VectorEnv(1, **options), actions[:, [env_id]], seed=3 + env_id)
        assert_same([frame[[env_id]] for frame in frames], alone)


def test_threads_change_nothing():
    actions = random_actions(40, MANY)
    frames = [roll(Cage2VectorEnv(MANY, red_agent="mixed", num_threads=n), actions) for n in (1, 2)]
    assert_same(*frames)


def test_every_episode_draws_its_length():
    lengths = {4, 6, 9}
    envs = begun(Cage2VectorEnv(SOME, episode_length=lengths, episode_infos=True), seed=2)
    ended = []
    for row in random_actions(60, SOME):
        drawn = np.array([envs.episode_length_of(i) for i in range(SOME)])
        *_, truncations, infos = envs.step(row)
        if truncations.any():
            over = infos["_episode"]
            np.testing.assert_array_equal(infos["episode"]["l"][over], drawn[over])
            ended += infos["episode"]["l"][over].tolist()
    assert set(ended) == lengths
    assert envs.num_episodes.min() >= 60 // (max(lengths) + 1)
    assert len(set(envs.num_episodes.tolist())) > 1, "an env draws anew in every episode"


@pytest.mark.parametrize(
    ("red_agent", "expected"),
    [
        ("b_line", {B_LINE}),
        ("meander", {MEANDER}),
        ("sleep", {NO_RED}),
        ("mixed", {B_LINE, MEANDER}),
        (["mixed", "sleep"], {NO_RED, B_LINE, MEANDER}),
    ],
)
def test_red_agents_are_drawn_per_episode(red_agent, expected):
    envs = begun(Cage2VectorEnv(MANY, red_agent=red_agent), seed=4)
    agents, counts = np.unique(envs.true_state["red_agent"], return_counts=True)
    assert set(agents) == expected
    share = MANY / len(expected)
    assert (abs(counts - share) < 4 * np.sqrt(share)).all()


def test_red_policy_of_ones_own():
    facts = ["red_type", "red_target"]
    envs = begun(Cage2VectorEnv(2, red_agent=own_red, step_infos=facts))
    assert (envs.true_state["red_agent"] == CUSTOM).all()
    *_, infos = envs.step([0, 0])
    assert infos["red_type"].tolist() == [1, 1]
    obs, *_, infos = envs.step([0, 0])
    assert (infos["red_type"].tolist(), infos["red_target"].tolist()) == ([2, 2], [10, 10])
    assert obs[:, 40:44].tolist() == [[1, 0, 0, 0]] * 2


@pytest.mark.parametrize("rules", ["faithful", "debugged"])
def test_masks_say_which_decoys_can_be_placed(rules):
    envs = Cage2VectorEnv(SOME, red_agent="mixed", rules=rules, step_infos=["blue_success"])
    is_decoy = np.array([a.name.startswith("Decoy") for a in blue_actions(envs.scenario)])
    envs.reset(seed=0)
    masks = envs.action_masks()
    assert masks[:, ~is_decoy].all()
    assert (masks == masks[0]).all()
    assert 0 < masks[0, is_decoy].sum() < is_decoy.sum()
    for row in random_actions(50, SOME):
        envs.action_masks(out=masks)
        *_, infos = envs.step(row)
        chosen = masks[np.arange(SOME), row]
        decoys = is_decoy[row]
        np.testing.assert_array_equal(infos["blue_success"][decoys] == 1, chosen[decoys])


def test_true_state_is_the_live_memory():
    envs = begun(Cage2VectorEnv(5))
    state = envs.true_state
    assert np.shares_memory(state, envs.states)
    assert envs.true_state is state
    with pytest.raises(ValueError, match="read-only"):
        state["ot_running"][0] = 0
    for _ in range(3):
        envs.step(np.zeros(5, int))
    assert (state["step"] == 3).all()
    assert set(envs.decoded_state([1, 2])) == set(COMPACT_FIELDS)
    assert envs.decoded_state([1, 2])["access"].shape == (2, 13)


@pytest.mark.parametrize("observation", ["bits", "memory"])
def test_names_each_column_of_the_observation(observation):
    envs = Cage2VectorEnv(1, observation=observation)
    labels = envs.observation_labels()
    assert (len(set(labels)),) == (len(labels),) == envs.single_observation_space.shape
    assert labels[5] == f"{envs.scenario.hosts[1].name} exploit"
    one = Cage2Env(observation=observation)
    assert one.observation_labels() == labels
    assert one.get_action_meanings() == envs.get_action_meanings()


def test_send_and_recv_report_steps_too():
    options = {"red_agent": "mixed", "step_infos": ["red_type", "red_target"]}
    whole, parts = Cage2VectorEnv(4, **options), Cage2VectorEnv(4, **options)
    assert_same([whole.reset(seed=1)[0]], [parts.reset(seed=1)[0]])
    for row in random_actions(10, 4):
        obs, *_, infos = whole.step(row)
        parts.send(row[[3, 0, 2, 1]], env_ids=[3, 0, 2, 1])
        for _ in range(2):
            batch = parts.recv(min_envs=2)
            np.testing.assert_array_equal(batch.obs, obs[batch.env_ids])
            for name in options["step_infos"]:
                np.testing.assert_array_equal(batch.infos[name], infos[name][batch.env_ids])


BAD_OPTIONS = [
    ({"red_agent": "bline"}, ValueError, "red_agent is 'bline'.*'b_line'"),
    ({"red_agent": []}, ValueError, "red_agent is empty"),
    ({"red_agent": len}, TypeError, "red_agent is <built-in function len>.*state, rng, tables"),
    ({"red_agent": lambda state: (0, 0)}, TypeError, r"red_agent is <lambda>\(state\), expected"),
    (
        {"red_agent": [lambda s, r, t: (0, 0), lambda s, r, t: (1, 2)]},
        ValueError,
        "red_agent has 2 compiled policies",
    ),
    ({"rules": "bugged"}, ValueError, "rules is 'bugged'.*faithful, debugged"),
    ({"rules": "faithful", "scenario": cage2_scenario()}, ValueError, "rules is 'faithful', but"),
    ({"scenario": "cage2"}, TypeError, "scenario is 'cage2'"),
    ({"observation": "pixels"}, ValueError, "observation is 'pixels'.*bits, memory"),
    ({"episode_length": 0}, ValueError, "episode_length is 0"),
    ({"episode_length": []}, ValueError, "episode_length has 0 entries"),
    ({"episode_length": range(1, 400)}, ValueError, "episode_length has 399 entries"),
    ({"episode_length": 70_000}, ValueError, "episode_length is 70000"),
    ({"episode_length": 30.0}, TypeError, "episode_length is 30.0"),
    ({"green": "yes"}, TypeError, "green is 'yes'"),
    ({"step_infos": ["red_typ"]}, ValueError, "step_infos is 'red_typ'"),
    ({"render_mode": "human"}, ValueError, "render_mode is 'human'"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS)
def test_bad_options_are_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        Cage2VectorEnv(**options)


def test_no_episode_is_longer_than_max_episode_steps():
    for envs in (
        vecenv.make_vec("Cage2-v0", 3, max_episode_steps=20),
        vecenv.make_vec("Cage2-v0", 3, max_episode_steps=20, backend="sync"),
        gym.make_vec("Cage2-v0", 3, max_episode_steps=20),
        Cage2VectorEnv(3, episode_length=[30, 50], max_episode_steps=20),
    ):
        envs.reset(seed=1)
        ends = [envs.step(np.zeros(3, int))[3].tolist() for _ in range(20)]
        assert ends == [[False] * 3] * 19 + [[True] * 3]
    envs = begun(Cage2VectorEnv(200, episode_length=[10, 30, 50], max_episode_steps=40), seed=1)
    assert {envs.episode_length_of(i) for i in range(200)} == {10, 30, 40}
    assert Cage2VectorEnv(1, max_episode_steps=10**9).episode_length_of(0) == 100
    for wrong in (0, 2.0, True, "20"):
        with pytest.raises(ValueError, match="max_episode_steps is"):
            Cage2VectorEnv(1, max_episode_steps=wrong)


def play_on(env, num_steps):
    """Everything that can be seen of the next steps, and of the reset after them."""
    rng = np.random.default_rng(4)
    frames = [env.step(int(rng.integers(0, 145))) for _ in range(num_steps)]
    return [*frames, env.unwrapped.true_state.tobytes(), env.reset()[0].tobytes(), env.step(3)[:4]]


def restored(env, **options):
    other = begun(gym.make("vecenv:Cage2-v0", **options), seed=99)
    file = io.BytesIO()
    np.savez(file, **env.unwrapped.state_dict())
    file.seek(0)
    with np.load(file) as state:
        other.unwrapped.load_state_dict(state)
    return other


def test_a_single_env_goes_on_exactly_where_it_was():
    options = {"red_agent": "mixed", "episode_length": 30, "step_infos": "red_type"}
    env = begun(gym.make("vecenv:Cage2-v0", **options), seed=7)
    for action in range(12):
        obs, *_ = env.step(action)
    other = restored(env, **options)
    np.testing.assert_array_equal(other.unwrapped.observe(), obs)
    assert repr(play_on(env, 17)) == repr(play_on(other, 17))
    assert repr(play_on(env, 17)) == repr(play_on(other, 17)), "and none touches the other"


def test_states_that_no_env_was_ever_in_are_refused():
    envs = begun(Cage2VectorEnv(2, red_agent="mixed", episode_length=(30, 50)))
    state = envs.state_dict()
    names = ("length_index", "red_agent", "blue_action", "red_type", "blue_success", "first_host")
    for name in (*names, "red_exploit", "green_target", "red_target"):
        changed = state["states"].copy()
        changed[name][1] = 255 if changed[name].dtype.kind == "u" else -2
        with pytest.raises(ValueError, match=rf"state\['states'\] has {name} from"):
            envs.load_state_dict({**state, "states": changed})
    for facts in ("[" * 100_000, "[]", '{"made_for": 3}', '{"hosts": [1]}', "x" * (1 << 19)):
        with pytest.raises(ValueError, match=r"state\['scenario'\]"):
            envs.load_state_dict({**state, "scenario": np.array(facts)})
    for name, found in envs.state_dict().items():
        assert repr(found.tolist()) == repr(state[name].tolist())  # bytes between fields may differ


def test_states_of_another_network_are_refused_and_of_other_rules_told():
    envs = begun(Cage2VectorEnv(2, rules="debugged"))
    state = envs.state_dict()
    other = Cage2VectorEnv(2)
    with pytest.warns(UserWarning, match="state was made for 'CAGE Challenge 2' with 'debugged'"):
        other.load_state_dict(state)
    network = Cage2VectorEnv(2, scenario=HARBOUR, obs_dtype=np.uint8)
    with pytest.raises(ValueError, match=r"the hosts Defender.*; expected desk0, desk1"):
        network.load_state_dict(state)


@pytest.mark.parametrize(
    ("rules", "play", "tables"),
    [
        ("faithful", "f5af160e3fef5ecc", "9b7a28894160398e"),
        ("debugged", "fa4413969998986a", "d03d1923d0c044f1"),
    ],
)
def test_the_version_of_the_rules_is_raised_when_they_change(rules, play, tables):
    """If this fails, raise RULES_VERSION: scores and policies of before are not comparable."""
    scenario = cage2_scenario(rules)
    agents = ("mixed", "sleep")
    envs = Cage2VectorEnv(20, red_agent=agents, scenario=scenario, green=True)
    obs, _ = envs.reset(seed=5)
    digest = hashlib.sha256(obs.astype(np.uint8).tobytes())
    rng = np.random.default_rng(6)
    for _ in range(60):
        obs, rewards, *_ = envs.step(rng.integers(0, NUM_ACTIONS, 20))
        rows = obs.astype(np.uint8)
        digest.update(rows.tobytes() + (rewards * 10).round().astype(np.int16).tobytes())
    assert (RULES_VERSION, digest.hexdigest()[:16]) == (1, play)
    facts = {"scenario": "CAGE Challenge 2", "rules": rules, "tables": tables}
    assert scenario.identity() == facts | {"rules_version": RULES_VERSION}
