"""Challenge 4 with an agent per row, as PettingZoo's env, and as one agent's: the same games."""

import numpy as np
import pytest
from cage.challenge4.lockstep import as_rows
from envs import begun
from gymnasium.error import ResetNeeded

from vecenv import make_vec_agents
from vecenv.cage import Cage4ParallelEnv, Cage4VectorEnv
from vecenv.cage.challenge4.rules import codes

STEPS = 30  # an episode has 29
ZONES, HEADQUARTERS = "blue_agent", "blue_agent_4"


@pytest.fixture(scope="module")
def episode():
    """What one agent sees that plays all of blue, game by game, over the end of an episode."""
    envs = Cage4VectorEnv(3, messages=True, steps=STEPS)
    rng = np.random.default_rng(0)
    seen = [(envs.reset(seed=7)[0], envs.agent_masks(), None)]
    actions = [rng.integers(0, [*codes.NUM_ACTIONS] + [256] * 5, (3, 10)) for _ in range(40)]
    for action in actions:
        obs, rewards, terminations, truncations, _ = envs.step(action)
        seen.append((obs, envs.agent_masks(), (rewards, terminations, truncations)))
    return actions, seen


def vectors_of(whole):
    return np.split(whole, [92, 184, 276, 368], axis=1)


@pytest.mark.slow
def test_rows_of_agents_are_the_games_of_the_team(episode):
    actions, seen = episode
    envs = make_vec_agents("Cage4-v0", 3, steps=STEPS, messages=True)
    obs, _ = envs.reset(seed=7)
    results = None
    for step, (whole, masks, result) in enumerate(seen):
        vectors = vectors_of(whole)
        zones = np.stack(vectors[:4], axis=1).reshape(12, 92)
        assert obs[ZONES].dtype == np.uint8
        np.testing.assert_array_equal(obs[ZONES], zones)
        np.testing.assert_array_equal(obs[HEADQUARTERS], vectors[4])
        if envs.groups[ZONES].alive.all():
            own = envs.groups[ZONES].action_masks()
            np.testing.assert_array_equal(own[:, :82], np.stack(masks[:4], 1).reshape(12, 82))
            assert own.shape == (12, 82 + 256) and own[:, 82:].all()
            own = envs.groups[HEADQUARTERS].action_masks()
            np.testing.assert_array_equal(own[:, :242], masks[4])
        if result is not None:
            _, rewards, terminations, truncations, _ = results
            for name, count in ((ZONES, 4), (HEADQUARTERS, 1)):
                np.testing.assert_array_equal(rewards[name], np.repeat(result[0], count))
                np.testing.assert_array_equal(terminations[name], np.repeat(result[1], count))
                np.testing.assert_array_equal(truncations[name], np.repeat(result[2], count))
                is_reset = step == STEPS
                assert (envs.groups[name].valid == (not is_reset)).all()
        if step < len(actions):
            pairs = np.stack(np.split(actions[step], 2, axis=1), axis=2)
            results = envs.step(as_rows(pairs, pad=False))
            obs = results[0]
    assert envs.games.states["t"].tolist() == [len(actions) - STEPS] * 3


def test_rows_of_agents_are_drawn_and_tell_rewards_by_zone():
    envs = make_vec_agents("Cage4-v0", 1, vector_kwargs={"debug": True, "render_mode": "rgb_array"})
    envs.reset(seed=0)
    picture = envs.render()[0]
    assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.std() > 0
    assert envs.games.zone_rewards().shape == (1, 8, 3)


@pytest.mark.slow
def test_the_parallel_env_plays_one_of_these_games(episode):
    actions, seen = episode
    env = Cage4ParallelEnv(steps=STEPS)
    observations, infos = env.reset(seed=8)  # game 1
    for step in range(STEPS - 1):
        whole, masks, _ = seen[step]
        for agent, name in enumerate(env.possible_agents):
            assert observations[name].dtype == np.int64
            assert env.observation_space(name).contains(observations[name])
            np.testing.assert_array_equal(observations[name], vectors_of(whole)[agent][1])
            np.testing.assert_array_equal(infos[name]["action_mask"], masks[agent][1])
            assert env.action_mask(name) == masks[agent][1].tolist()
        acts, said = actions[step][1, :5], actions[step][1, 5:]
        results = env.step(
            dict(zip(env.agents, acts.tolist(), strict=True)),
            {name: said[k] >> np.arange(8) & 1 for k, name in enumerate(env.agents)},
        )
        observations, rewards, terminations, truncations, infos = results
        assert set(rewards.values()) == {float(seen[step + 1][2][0][1])}
    assert env.agents == [] and all(terminations.values()) and all(truncations.values())
    with pytest.raises(ResetNeeded, match="call reset"):
        env.step({})


def test_agents_with_get_action_play():
    class Agent:
        def get_action(self, observation, action_space):
            return int(observation[0]) + action_space.n - 1  # DeployDecoy, or beyond in phase 1

    env = Cage4ParallelEnv(steps=STEPS, pad_spaces=True, debug=True)
    observations, _ = env.reset(seed=0)
    agents = {name: Agent() for name in env.agents}
    while env.agents and observations["blue_agent_0"][0] == 0:
        actions = {
            name: agent.get_action(observations[name], env.action_space(name))
            for name, agent in agents.items()
        }
        observations, *_ = env.step(actions)
        assert observations["blue_agent_0"].shape == (210,)
    for action in (242, 3.7, "3", None, [1, 2]):
        with pytest.raises(ValueError, match=r"action of blue_agent_0 is .*expected an integer"):
            env.step({"blue_agent_0": action})
    for message in ([0.99] * 8, [0, 1], None, "1" * 8):
        with pytest.raises(ValueError, match=r"message of blue_agent_1 is .*, expected 8 bits"):
            env.step({}, messages={"blue_agent_1": message})


@pytest.mark.slow
@pytest.mark.parametrize("pad", [False, True])
def test_pettingzoo_s_own_test_passes(pad):
    testing = pytest.importorskip("pettingzoo.test")
    env = Cage4ParallelEnv(steps=STEPS, pad_spaces=pad)
    testing.parallel_api_test(env, num_cycles=100)


@pytest.mark.slow
def test_labels_say_what_actions_do():
    env = Cage4ParallelEnv(steps=STEPS, pad_spaces=True)
    labels = env.action_labels("blue_agent_4")
    assert labels[0] == "Analyse admin_network_subnet_server_host_0"
    assert labels[145] == "Sleep" and labels[48] == "Monitor"
    assert labels[170] == "BlockTrafficZone admin_network_subnet <- contractor_network_subnet"
    assert env.action_labels("blue_agent_1")[82:] == ["[Padding] Sleep"] * 160
    env.reset(seed=0)
    mask = env.action_mask("blue_agent_4")
    is_valid = [not label.startswith("[Invalid]") for label in env.action_labels("blue_agent_4")]
    assert is_valid == mask and not all(mask)


def test_labels_say_what_values_are():
    """A value that is 1 says what the simulator's state has."""
    env = Cage4ParallelEnv(steps=STEPS)
    obs, _ = env.reset(seed=3)
    labels = {name: env.observation_labels(name) for name in env.agents}
    assert [len(labels[name]) for name in env.agents] == [len(obs[name]) for name in env.agents]
    assert all(len(set(names)) == len(names) for names in labels.values())
    told = set()
    block = env.action_labels("blue_agent_4").index(
        "BlockTrafficZone office_network_subnet <- internet_subnet"
    )
    for t in range(STEPS - 2):
        actions = {"blue_agent_4": block} if t == 0 else {}
        messages = {"blue_agent_2": np.eye(8, dtype=np.int64)[3]}
        obs, *_ = env.step(actions, messages)
        for name, values in obs.items():
            told |= {f"{name}: {labels[name][k]}" for k in np.flatnonzero(values)}
    assert "blue_agent_4: traffic office_network_subnet <- internet_subnet is blocked" in told
    assert "blue_agent_0: bit 3 from blue_agent_2" in told
    assert "blue_agent_1: operational_zone_a_subnet: zone is operational_zone_a_subnet" in told
    assert not any("zone is restricted" in label for label in told if "agent_4" in label)
    assert any("event on" in label for label in told)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda env: env.step({"blue_agent_7": 0}), "no agent 'blue_agent_7'"),
        (lambda env: env.step({"blue_agent_0": 82}), "blue_agent_0 is 82, expected an integer"),
        (lambda env: env.step({}, {"blue_agent_0": [2] * 8}), "message of blue_agent_0 .* 8 bits"),
        (lambda env: env.action_space("red_agent_0"), "no agent 'red_agent_0'"),
    ],
)
def test_wrong_arguments_are_refused(call, match):
    env = begun(Cage4ParallelEnv(steps=STEPS))
    with pytest.raises(ValueError, match=match):
        call(env)


@pytest.mark.slow
def test_rewards_by_zone_add_up(episode):
    actions, _ = episode
    envs = begun(Cage4VectorEnv(3, messages=True, steps=STEPS, phishing_rate=0.5), seed=1)
    total = 0
    for action in actions[: STEPS - 1]:
        _, rewards, *_ = envs.step(action)
        parts = envs.zone_rewards()
        total += -parts.sum()
        np.testing.assert_array_equal(parts.sum(axis=1), envs.states["reward_parts"][:, :3])
        cost = envs.states["reward_parts"][:, 3]
        np.testing.assert_array_equal(parts.sum(axis=(1, 2)) + cost, rewards)
    assert total > 50
