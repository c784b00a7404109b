"""The compiled rules against the slow twin, on input that the recordings do not have."""

import random

import numpy as np
import pytest
from cage.challenge2 import slow_twin
from cage.challenge2.slow_twin import FAMILIES, HOSTS, SUBNETS
from cage.golden import COMPACT_FIELDS

from vecenv.cage.challenge2.replay import RecordedStep, Replay
from vecenv.cage.challenge2.scenario import cage2_scenario

NUM_EPISODES = 36
NUM_STEPS = 120


def blue_moves(style, num, rng):
    """Blue actions of an episode, in some style that a uniform blue never shows."""
    favourites = [rng.randrange(145) for _ in range(6)]
    cleaning = [2 + 13 * f + h for f in (1, 10) for h in (1, 2, 3, 7, 9, 10, 11, 12)]
    decoys = range(28, 132)
    pools = {
        "uniform": range(145),
        "sticky": favourites,
        "cleaner": cleaning + [0] * 30,
        "decoys": decoys,
        "analyst": [*range(2, 28), 0, 1],
        "sleep": [0],
        "vsftpd": [2 + 13 * 9 + h for h in (1, 11, 12)] + [2 + 13 * 10 + 11],
    }
    return [rng.choice(list(pools[style])) for _ in range(num)]


STYLES = ("uniform", "sticky", "cleaner", "decoys", "analyst", "sleep", "vsftpd")


class RandomRed:
    """Any action on anything, mostly what is legal and gets it further."""

    def __init__(self, rng):
        self.rng = rng

    def move(self, cage):
        rng = self.rng
        if rng.random() < 0.05:
            return rng.randrange(6), rng.randrange(-2, 18)
        red_type = rng.choice([1, 2, 2, 3, 3, 3, 3, 4, 4, 5])
        if red_type == 1:
            return 1, rng.randrange(3)
        known = sorted(cage.known_ip if red_type < 4 else cage.known_host, key=HOSTS.index)
        return red_type, HOSTS.index(rng.choice(known[-4:]))


def target_index(red_type, target):
    if target is None:
        return -1
    return list(SUBNETS).index(target) if red_type == 1 else HOSTS.index(target)


def run_in_lockstep(debugged, with_green, seed):
    """Both simulators side by side; every output compared after every step."""
    rng = random.Random(seed)
    agents = [index % 3 for index in range(NUM_EPISODES)]  # random red, B_line, Meander
    cages = [slow_twin.SlowCage(debugged) for _ in agents]
    reds = [
        (RandomRed(rng), slow_twin.SlowBLine(), slow_twin.SlowMeander())[agent] for agent in agents
    ]
    blues = [
        blue_moves(STYLES[(i // 3) % len(STYLES)], NUM_STEPS, rng) for i in range(NUM_EPISODES)
    ]
    scenario = cage2_scenario("debugged" if debugged else "faithful")
    replay = Replay(NUM_EPISODES, scenario, red_agents=np.array(agents), green=with_green)
    for t in range(NUM_STEPS):
        red_types, options = replay.red_options()
        inputs = []
        for i, (cage, red) in enumerate(zip(cages, reds, strict=True)):
            if agents[i] == 0:
                red_type, target = red.move(cage)
            else:
                red_type, names = red.options(cage)
                assert red_types[i] == red_type
                indices = {target_index(red_type, name) for name in names}
                assert set(np.flatnonzero(options[i]).tolist()) == indices
                name = rng.choice(sorted(names)) if names else None
                red.commit(red_type, name)
                target = target_index(red_type, name)
            host = HOSTS[target] if 0 <= target < 13 and red_type > 1 else ""
            green = rng.choice([-1, *range(13)]) if with_green else -1
            # blue may end sessions before red draws, so look at what a copy would leave
            outcomes = draw_after_blue(cage, blues[i][t], red_type, host, rng)
            move = (blues[i][t], red_type, target, *outcomes, green)
            cage.step(*move)
            inputs.append(move)
        columns = np.array(inputs).T
        replay.red_commit(columns[1], columns[2])
        result = replay.step(RecordedStep(*columns))
        assert not result.errors.any()
        assert result.obs.tolist() == [cage.obs for cage in cages]
        assert result.reward10.tolist() == [cage.reward10 for cage in cages]
        assert result.blue_success.tolist() == [cage.blue_success for cage in cages]
        assert result.red_success.tolist() == [cage.red_success for cage in cages]
        states = replay.true_state()
        expected = [cage.true_state() for cage in cages]
        for name in COMPACT_FIELDS:
            assert states[name].tolist() == [fields[name] for fields in expected], (t, name)


def draw_after_blue(cage, blue_action, red_type, host, rng):
    """Draw outcomes for the sessions that are left once blue has acted."""
    if red_type != 4 or not cage.sessions.get(host):
        return slow_twin.draw_outcomes(cage, red_type, host, rng)
    family = FAMILIES[(blue_action - 2) // 13] if blue_action >= 2 else ""
    left = cage.sessions[host]
    if blue_action >= 2 and HOSTS[(blue_action - 2) % 13] == host:
        if family == "Remove":
            left = [s for s in left if s["kind"] != "R"]
        elif family == "Restore":
            left = [s for s in left if s.get("primary")]
    return -1, -1, rng.randrange(len(left)) if left else -1


@pytest.mark.parametrize(
    ("debugged", "with_green"),
    [
        (False, True),
        (True, False),
        *(pytest.param(both, both, marks=pytest.mark.slow) for both in (False, True)),
    ],
)
def test_rules_match_slow_twin(debugged, with_green):
    run_in_lockstep(debugged, with_green, seed=7)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("debugged", [False, True])
def test_rules_match_slow_twin_on_many_seeds(debugged, seed):
    run_in_lockstep(debugged, with_green=seed % 2 == 1, seed=100 + seed)


def test_many_sessions_keep_their_order_and_counts():
    """A red player that never stops attacking one host, with Remove now and then."""
    rng = random.Random(3)
    for _ in range(6):
        cage, replay = slow_twin.SlowCage(), Replay(1)
        moves = [(0, 1, 2), (0, 2, 12), (0, 2, 11)]
        for _ in range(60):
            blue = rng.choice([0, 0, 0, 0, 0, 15 + 12])
            moves.append((blue, rng.choice([3, 3, 3, 3, 3, 3, 3, 3, 3, 4]), 12))
        for blue, red_type, target in moves:
            exploit = detected = pe_index = -1
            if red_type == 3:
                exploit, detected = rng.choice([3, 4, 7]), rng.randrange(2)
            if red_type == 4:
                _, _, pe_index = draw_after_blue(cage, blue, red_type, "User4", rng)
            cage.step(blue, red_type, target, exploit, detected, pe_index)
            if len(cage.sessions["User4"]) > 16:
                break  # beyond, the order of the youngest is not kept
            result = replay.step(RecordedStep(blue, red_type, target, exploit, detected, pe_index))
            assert result.errors[0] == 0
            states = replay.true_state()
            for name, expected in cage.true_state().items():
                assert states[name][0].tolist() == expected, name


def test_counts_saturate():
    replay = Replay(3)
    replay.step(RecordedStep(0, 1, 2))
    replay.step(RecordedStep(0, 2, 12))
    kinds = np.array([1, 7, 3])  # privileged; stuck; removable
    replay.step(RecordedStep(0, 3, 12, np.array([1, 7, 3]), 1))
    counts = []
    for _ in range(300):
        replay.step(RecordedStep(15 + 0, 3, 12, kinds, 1))
        replay.step(RecordedStep(119 + 12, 3, 12, kinds, 1))
        state = replay.true_state()
        counts.append(
            [state["n_priv"][0, 12], state["n_stuck"][1, 12], state["n_removable"][2, 12]]
        )
        assert state["table_access"][:, 12].tolist() == [2, 1, 1]
    assert counts[-1] == [255, 255, 255]
    assert (np.diff(np.array(counts, int), axis=0) >= 0).all()
    assert replay.true_state()["n_vsftpd"][0, 12] == 255
    replay.step(RecordedStep(0, 4, 12, red_pe_index=np.array([-1, 254, 254])))
    state = replay.true_state()
    assert state["n_stuck"][1, 12] == 254 and state["n_removable"][2, 12] == 254
    assert (state["access"][:, 12] == 2).all()
    replay.step(RecordedStep(132 + 12, 0, -1))
    state = replay.true_state()
    for name in ("n_priv", "n_stuck", "n_removable", "access", "table_access", "decoys"):
        assert (state[name][:, 12] == 0).all(), name
