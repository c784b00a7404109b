import numpy as np
import pytest
from cage.challenge2.harbour import HARBOUR

from vecenv.cage import BlueMemory, Cage2VectorEnv, blue_choices, cage2_scenario
from vecenv.cage.challenge2.tables import host_bits
from vecenv.core.compiling import is_jit_off

NUM_ENVS = 8 if is_jit_off() else 40


def play(red_agent, num_steps, *, seed=1):
    """Make random choices and yield memory and envs after every step."""
    envs = Cage2VectorEnv(NUM_ENVS, red_agent=red_agent, episode_length=num_steps)
    memory = BlueMemory(NUM_ENVS)
    rng = np.random.default_rng(seed)
    obs, _ = envs.reset(seed=seed)
    for _ in range(num_steps):
        obs, *_ = envs.step(memory.act(rng.choice(len(memory.choices), NUM_ENVS)))
        memory.note(obs)
        yield memory, envs, obs


@pytest.mark.parametrize("red_agent", ["b_line", pytest.param("meander", marks=pytest.mark.slow)])
def test_it_knows_which_decoys_are_in_place(red_agent):
    names = [host.name for host in cage2_scenario().hosts]
    for memory, envs, obs in play(red_agent, 60):
        in_place = host_bits(envs.decoded_state()["decoys"], 8).sum(-1)
        placed = memory.features(obs)[:, 52 + 2 * 13 : 52 + 3 * 13] * 2
        assert (in_place == placed).all()
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


@pytest.mark.parametrize("agent", ["b_line", "meander", "sleep"])
def test_attackers_give_themselves_away(agent):
    *_, (memory, _, obs) = play(agent, 50)
    is_wandering, is_direct = memory.features(obs)[:, memory.step_column - 2 :][:, :2].T
    assert (is_wandering == (agent == "meander")).all()
    # A decoy may have caught the first exploit.
    assert (is_direct.mean() > 0.8) if agent == "b_line" else not is_direct.any()


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


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"green": True, "episode_length": [30, 50]}, marks=pytest.mark.slow)],
    ids=["usual", "green"],
)
@pytest.mark.parametrize(
    "scenario",
    [cage2_scenario(), pytest.param(HARBOUR, marks=pytest.mark.slow)],  # compiled for itself
    ids=["cage2", "harbour"],
)
def test_envs_that_remember_are_the_plain_ones_beside_a_memory(scenario, options):
    options = {"red_agent": "mixed", "scenario": scenario, "autoreset_mode": "Disabled", **options}
    plain = Cage2VectorEnv(NUM_ENVS, **options)
    envs = Cage2VectorEnv(NUM_ENVS, observation="memory", **options)
    memory, rng = BlueMemory(NUM_ENVS, scenario), np.random.default_rng(1)
    assert envs.single_action_space.n == len(memory.choices)
    bits, obs = (made.reset(seed=1)[0] for made in (plain, envs))
    for _ in range(100):
        assert (obs == memory.features(bits)).all() and envs.observation_space.contains(obs)
        assert (envs.action_masks() == ~memory.useless()).all()
        assert (np.round(obs[:, memory.step_column] * 100) == plain.true_state["step"]).all()
        choices = rng.integers(0, len(memory.choices), NUM_ENVS)
        bits, *expected, _ = plain.step(memory.act(choices))
        obs, *found, _ = envs.step(choices)
        memory.note(bits)
        for one, other in zip(found, expected, strict=True):
            assert (one == other).all()
        if (over := expected[2]).any():
            memory.forget(over)
            bits, obs = (made.reset(options={"reset_mask": over})[0] for made in (plain, envs))


def test_envs_that_remember_go_on_from_a_state_and_want_fractions():
    envs, others = (Cage2VectorEnv(4, observation="memory", red_agent="mixed") for _ in range(2))
    envs.reset(seed=1)
    actions = np.random.default_rng(1).integers(0, 44, (20, 4))
    for row in actions:
        envs.step(row)
    others.load_state_dict(envs.state_dict())
    for row in actions:
        for one, other in zip(envs.step(row)[:4], others.step(row)[:4], strict=True):
            assert (one == other).all()
    with pytest.raises(ValueError, match="obs_dtype is int8, expected a floating one"):
        Cage2VectorEnv(1, observation="memory", obs_dtype=np.int8)
