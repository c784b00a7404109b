import numpy as np
import pytest

from vecenv.cage import BlueMemory, Cage2VectorEnv, blue_actions, blue_choices, cage2_scenario
from vecenv.cage.challenge2.network.state import host_bits

NUM_ENVS = 40


def play(red_agent, num_steps, *, seed=1, restores=True):
    """Make random choices and yield memory and envs after every step."""
    envs = Cage2VectorEnv(NUM_ENVS, red_agent=red_agent, episode_length=num_steps)
    memory = BlueMemory(NUM_ENVS)
    rng = np.random.default_rng(seed)
    allowed = [k for k, c in enumerate(memory.choices) if restores or c.name != "Restore"]
    obs, _ = envs.reset(seed=seed)
    for _ in range(num_steps):
        features = memory.features(obs)
        obs, *_ = envs.step(memory.act(rng.choice(allowed, NUM_ENVS)))
        memory.note(obs)
        yield memory, envs, features
    envs.close()


@pytest.mark.parametrize("red_agent", ["b_line", "meander"])
def test_it_knows_which_decoys_are_in_place(red_agent):
    names = [host.name for host in cage2_scenario().hosts]
    for memory, envs, _ in play(red_agent, 60):
        in_place = host_bits(envs.decoded_state()["decoys"], 8).sum(-1)
        assert (in_place == memory._placed).all()
        useless = memory.useless()
        for number, choice in enumerate(memory.choices):
            if choice.name == "Decoy":
                is_full = in_place[:, names.index(choice.host)] == len(choice.actions)
                assert (useless[:, number] == is_full).all()
            else:
                assert not useless[:, number].any()


def test_a_decoy_that_is_chosen_can_always_be_placed():
    scenario = cage2_scenario()
    for choice in blue_choices(scenario):
        if choice.name == "Decoy":
            envs = Cage2VectorEnv(1, red_agent="sleep", step_infos="blue_success")
            envs.reset(seed=1)
            for action in choice.actions:
                *_, infos = envs.step([action])
                assert infos["blue_success"][0] == 1
            envs.close()


def test_choices_stand_for_actions_of_their_name():
    scenario = cage2_scenario()
    actions = blue_actions(scenario)
    for choice in blue_choices(scenario):
        for number in choice.actions:
            expected = "Decoy" if choice.name == "Decoy" else str(choice.name)
            assert actions[number].name.startswith(expected)
            assert actions[number].host == choice.host
    fallible = {c.host for c in blue_choices(scenario)} - {None}
    assert fallible == {h.name for h in scenario.hosts} - {"Defender", "User0"}


@pytest.mark.parametrize("agent", ["b_line", "meander", "sleep"])
def test_attackers_give_themselves_away(agent):
    *_, (memory, *_) = play(agent, 50)
    assert (memory._is_wandering == (agent == "meander")).all()
    # A decoy may have caught the first exploit.
    assert (memory._is_direct.mean() > 0.8) if agent == "b_line" else not memory._is_direct.any()


def test_features_are_what_was_seen_and_remembered():
    memory = BlueMemory(2)
    obs = np.zeros((2, 52), np.float32)
    restore = next(k for k, c in enumerate(memory.choices) if c[:2] == ("Restore", "User3"))
    decoy = next(k for k, c in enumerate(memory.choices) if c[:2] == ("Decoy", "User3"))
    memory.act(np.array([decoy, 0]))
    obs[0, 4 * 11 : 4 * 11 + 2] = 1  # an exploit on User3
    obs[1, 4 * 12] = 1  # a scan of User4
    memory.note(obs)
    out = np.full((2, memory.num_features), np.nan, np.float32)
    features = memory.features(obs, out=out)
    assert features is out and not np.isnan(out).any()
    groups = out[:, 52 : 52 + 7 * 13].reshape(2, 7, 13)
    scanned, last, placed, full, exploited, exploits, stale = groups.transpose(1, 0, 2)
    assert scanned.nonzero() == last.nonzero() == (np.array([1]), np.array([12]))
    assert placed[0, 11] == 0.5 and exploits[0, 11] == 0.5 and stale[0, 11] == 1
    assert exploited.nonzero() == (np.array([0]), np.array([11]))
    assert full[0, 11] == 1 and full[1, 11] == 0
    memory.act(np.array([restore, 0]))
    memory.note(np.zeros_like(obs))
    groups = memory.features(obs)[:, 52 : 52 + 7 * 13].reshape(2, 7, 13)
    assert groups[0, 2, 11] == groups[0, 4, 11] == groups[0, 5, 11] == 0 and groups[0, 6, 11] == 1
    assert groups[1, 0, 12] == groups[1, 1, 12] == 1  # still the last scan


def test_forgetting_some_episodes_leaves_the_others():
    *_, (memory, _, _) = play("meander", 12)
    before = memory.features(np.zeros((NUM_ENVS, 52)))
    begins = np.arange(NUM_ENVS) % 2 == 0
    memory.forget(begins)
    after = memory.features(np.zeros((NUM_ENVS, 52)))
    fresh = BlueMemory(NUM_ENVS).features(np.zeros((NUM_ENVS, 52)))
    assert (after[begins] == fresh[begins]).all() and (after[~begins] == before[~begins]).all()
    memory.forget()
    assert (memory.features(np.zeros((NUM_ENVS, 52))) == fresh).all()
