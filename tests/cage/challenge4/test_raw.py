"""What the original's blue agents read: dicts, and events made of them."""

import enum
import ipaddress
import json
import pickle

import numpy as np
import pytest
from cage.challenge4.lockstep import as_rows, rows_by_agent
from cage.challenge4.test_replay import changed
from cage.golden import FOLDER4

from vecenv import make_vec_agents
from vecenv.cage import (
    Cage4Events,
    Cage4ParallelEnv,
    Cage4VectorEnv,
    RawName,
    TraceError,
    evaluate_cage4,
    replay_traces,
)
from vecenv.cage.challenge4.player import RawEvents
from vecenv.cage.challenge4.playing import find_policy
from vecenv.cage.challenge4.rules.codes import action_labels

RECORDINGS = [FOLDER4 / f"raw_{name}_80.npz" for name in ("mix_discovery", "hunt_fsm")]
NAMES = Cage4Events.NODE_FEATURES
RATES = {"phishing_rate": 0.1, "alarm_rate": 0.05}


def test_agents_read_what_they_read_in_the_original():
    result = replay_traces(RECORDINGS)
    assert [str(found) for found in result.differences] == []
    assert result.num_steps == 160
    assert result.num_compared > 160 * 5 * 3


def put(name, value, dtype=np.uint8):
    """A change of row 3 of an array."""

    def change(arrays, raw):
        arrays[name] = arrays[name].astype(dtype)
        arrays[name][3] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays, raw: raw[:-1], "raw is no list of 81 dicts"),
        (lambda arrays, raw: [{}] * 81, "raw of blue_agent_0 is no dict at place 0"),
        (lambda arrays, raw: arrays.pop("net_os") * 0 == 1, "lacks net_os"),
        (lambda arrays, raw: arrays.pop("tape_n") * 0 == 1, "lacks tape_n"),
        (put("net_os", 2), "net_os is 2 in row 3, expected 0 to 1"),
        (put("net_os", -1, np.int8), "net_os is -1 in row 3, expected 0 to 1"),
        (
            put("net_address", 1 << 32, np.int64),
            "net_address is 4294967296 in row 3, expected 0 to",
        ),
        (
            put("net_cidr_third_octet", 256, np.int16),
            "third_octet is 256 in row 3, expected 0 to 255",
        ),
        (
            lambda arrays, raw: raw[2].update(blue_agent_1=7),
            "raw of blue_agent_1 is no dict at place 2",
        ),
    ],
)
def test_a_damaged_recording_is_refused(tmp_path, change, message):
    def in_json(arrays):
        raw = json.loads(arrays["raw"].tobytes())
        found = change(arrays, raw)
        raw = found if isinstance(found, list) else raw
        arrays["raw"] = np.frombuffer(json.dumps(raw).encode(), np.uint8)

    with pytest.raises(TraceError, match=message):
        replay_traces([changed(tmp_path, "raw_mix_discovery_80", in_json)])


def random_actions(env, rng):
    return {name: int(rng.integers(env.action_space(name).n)) for name in env.agents}


LOG = {"keeps_log", "num_events", "num_slots", "analysed", "new_decoy", "last_event"}
LOG |= {"shown", "events", "files"}


@pytest.mark.parametrize("red", ["fsm", "discovery"])
def test_games_with_raw_observations_are_the_same_games(red):
    raw, flat = Cage4ParallelEnv(raw=True, red=red, **RATES), Cage4ParallelEnv(red=red, **RATES)
    rng = np.random.default_rng(0)
    raw.reset(seed=4)
    vectors, infos = flat.reset(seed=4)
    assert set(infos) == set(vectors)
    for _ in range(200):
        actions = random_actions(flat, rng)
        _, rewards, *_ = raw.step(actions)
        _, expected, *_ = flat.step(actions)
        assert rewards == expected
    for name in set(flat.true_state.dtype.names) - LOG:
        np.testing.assert_array_equal(raw.true_state[name], flat.true_state[name])


def test_the_first_observation_tells_the_agents_part_of_the_network():
    env = Cage4ParallelEnv(raw=True)
    observations, _ = env.reset(seed=3)
    seen = {}
    for agent, observation in observations.items():
        assert observation.pop("success") == "UNKNOWN"
        num = sum(env.action_mask(agent)[: 48 if agent[-1] == "4" else 16])
        assert len(observation) == num + (3 if agent[-1] == "4" else 1)  # routers
        idents = sorted(entry["Sessions"][0]["session_id"] for entry in observation.values())
        assert idents == list(range(len(observation)))
        for name, entry in observation.items():
            (interface,) = entry["Interface"]
            assert interface["ip_address"] in interface["Subnet"]
            seen[interface["ip_address"]] = name
            kind = entry["Sessions"][0]["Type"].name
            assert (kind == "VELOCIRAPTOR_SERVER") == (entry["Sessions"][0]["session_id"] == 0)
            assert entry["System info"]["Hostname"] == name
    assert all(isinstance(address, ipaddress.IPv4Address) for address in seen)
    assert len(seen) == sum(map(len, observations.values()))  # of which all differ


class Reader:
    """An agent of the original, which reads dicts: it restores hosts with files, else analyses."""

    def __init__(self, name):
        self.labels = action_labels(int(name[-1]))
        self.reset()

    def reset(self):
        self.turn = 0

    def get_action(self, observation, action_space):
        hosts = {name: entry for name, entry in observation.items() if "_host_" in name}
        found = [name for name, entry in hosts.items() if "Files" in entry]
        self.turn += 1
        choices = [k for k, label in enumerate(self.labels) if label.startswith("Analyse")]
        if found and observation["success"] == Ternary.TRUE:
            return self.labels.index(f"Restore {found[0]}")
        return choices[self.turn // 2 % len(choices)]


class Ternary(enum.Enum):
    TRUE, UNKNOWN, FALSE, IN_PROGRESS = range(1, 5)


def test_an_agent_that_reads_dicts_plays_and_is_evaluated():
    """By hand, and as a policy: an object for each agent, made anew of its class or given."""
    env, total = Cage4ParallelEnv(raw=True, steps=100), np.zeros(2)
    agents = {name: Reader(name) for name in env.possible_agents}
    told = set()
    for episode in range(2):
        observations, _ = env.reset(seed=3 + episode)
        for agent in agents.values():
            agent.reset()
        while env.agents:
            actions = {
                name: agent.get_action(observations[name], env.action_space(name))
                for name, agent in agents.items()
            }
            observations, rewards, *_ = env.step(actions)
            total[episode] += rewards["blue_agent_0"]
            told |= {str(seen.get("action"))[:7] for seen in observations.values()}
    assert {"Restore", "Analyse"} <= told
    for policy in (Reader, agents):
        result = evaluate_cage4(policy, episodes=2, seed=3, steps=100)
        assert result.total.mean == total.mean() and result.total.sd == total.std(ddof=1)
    with pytest.raises(ValueError, match="policy has the agents blue_agent_0, expected blue_"):
        evaluate_cage4({"blue_agent_0": Reader("blue_agent_0")}, episodes=2)


class Still:
    """An agent that reads vectors, and is told of no episode."""

    observation = "flat"

    def get_action(self, observation, action_space):
        assert observation.dtype == np.int64 and len(observation) in (92, 210)
        return 145 if action_space.n == 242 else 49


def test_an_agent_of_the_original_may_read_vectors():
    result, expected = (evaluate_cage4(p, episodes=2, steps=40) for p in (Still, "sleep"))
    assert (result.policy, result.total) == ("Still", expected.total)


def test_names_stand_for_members_of_enums():
    name = RawName("TRUE")
    assert name == "TRUE"
    assert name == Ternary.TRUE
    assert name == True  # noqa: E712  as the original's
    assert name != Ternary.FALSE
    assert name != False  # noqa: E712
    assert RawName("LINUX") != True  # noqa: E712
    assert (name.name, str(name), json.dumps(name)) == ("TRUE", "TRUE", '"TRUE"')
    assert {name: 1}["TRUE"] == 1


def test_the_space_of_raw_observations_has_all_dicts():
    env = Cage4ParallelEnv(raw=True)
    obs, _ = env.reset(seed=0)
    for name, told in obs.items():
        space = pickle.loads(pickle.dumps(env.observation_space(name)))
        assert told in space and [told] not in space


def test_raw_is_true_or_false():
    with pytest.raises(TypeError, match="raw must be True or False, got 'yes'"):
        Cage4ParallelEnv(raw="yes")


# --- events ---


def readers_of(told, steps):
    """What makes events of the dicts of each agent: it knows hosts by the first ones."""
    hosts = {
        entry["Interface"][0]["ip_address"]: name
        for observation in told.values()
        for name, entry in observation.items()
        if isinstance(entry, dict)
    }
    return [RawEvents(agent, hosts, steps=steps) for agent in range(5)]


@pytest.mark.parametrize(("red", "seed"), [("fsm", 0), ("discovery", 1)])
def test_events_say_what_the_dicts_say(red, seed):
    options = {"red": red, "steps": 200, **RATES}
    env = Cage4ParallelEnv(raw=True, **options)
    envs = Cage4VectorEnv(1, messages=True, observation="events", **options)
    flat = Cage4VectorEnv(1, messages=True, **options)
    rng = np.random.default_rng(seed)
    told, _ = env.reset(seed=seed)
    rows, vectors = envs.reset(seed=seed)[0], flat.reset(seed=seed)[0]
    twins = readers_of(told, steps=200)
    foreign = [NAMES.index(name) for name in NAMES if name == "source" or name[:5] == "from_"]
    seen = np.zeros(len(NAMES), bool)
    while True:
        for agent, twin in enumerate(twins):
            events = Cage4Events.of(envs.agent_obs(rows)[agent])
            vector, context, nodes = Cage4Events.of(twin.read(told[f"blue_agent_{agent}"]))
            got = events.nodes[0].copy()
            # Addresses of CON's hosts, which nobody watches, are not among those told.
            unknown = got[:, NAMES.index("from_CON")] > 0
            got[unknown[:, None] & np.isin(np.arange(len(NAMES)), foreign)] = 0
            nodes[unknown[:, None] & np.isin(np.arange(len(NAMES)), foreign)] = 0
            np.testing.assert_array_equal(got, nodes)
            np.testing.assert_array_equal(events.context[0, 1:], context[1:])
            assert events.vector[0, 0] == vector[0]  # the phase
            np.testing.assert_array_equal(events.vector, flat.agent_obs(vectors)[agent])
            assert envs.single_observation_space.contains(rows[0])
            seen |= (events.nodes[0] > 0).any(axis=0)
        if not env.agents:
            break
        actions = random_actions(env, rng)
        told, *_ = env.step(actions)
        row = np.array([[*actions.values(), 0, 0, 0, 0, 0]])
        rows, vectors = envs.step(row)[0], flat.step(row)[0]
    unseen = {name for name, is_seen in zip(NAMES, seen, strict=True) if not is_seen}
    assert unseen <= {"local_drawn"}  # of exploits that a decoy caught


@pytest.mark.parametrize("pad", [pytest.param(False, marks=pytest.mark.slow), True])
def test_agents_rows_are_the_events_of_the_team(pad):
    agents = make_vec_agents("Cage4-v0", 3, observation="events", pad=pad, steps=50)
    team = Cage4VectorEnv(3, messages=True, observation="events", steps=50)
    found, expected = agents.reset(seed=2)[0], team.reset(seed=2)[0]
    for _ in range(20):
        pairs = zip(team.agent_obs(expected), rows_by_agent(found, 3, pad), strict=True)
        for part, row in (map(Cage4Events.of, pair) for pair in pairs):
            num = part.vector.shape[1]
            np.testing.assert_array_equal(row.vector[:, :num], part.vector)
            assert not row.vector[:, num:].any()
            np.testing.assert_array_equal(row.context, part.context)
            own = part.nodes.shape[1] // 17 * 16  # hosts, then routers
            room = row.nodes.shape[1] // 17 * 16
            np.testing.assert_array_equal(row.nodes[:, :own], part.nodes[:, :own])
            routers = part.nodes.shape[1] - own
            np.testing.assert_array_equal(row.nodes[:, room : room + routers], part.nodes[:, own:])
        actions = np.tile([3, 3, 3, 3, 9], (3, 1))  # Analyse
        expected = team.step(np.pad(actions, ((0, 0), (0, 5))))[0]  # nobody says anything
        found = agents.step(as_rows(actions, pad))[0]


def test_rows_of_another_length_are_no_events():
    with pytest.raises(ValueError, match=r"obs has shape \(4, 92\), expected .*='events'"):
        Cage4Events.of(np.zeros((4, 92)))


def test_a_player_acts_on_dicts_as_it_does_on_rows():
    env = Cage4ParallelEnv(raw=True, steps=100, **RATES)
    envs = Cage4VectorEnv(1, messages=True, observation="events", steps=100, **RATES)
    told, rows = env.reset(seed=4)[0], envs.reset(seed=4)[0]
    readers = readers_of(told, steps=100)
    of_dicts, of_rows = find_policy("defender"), find_policy("defender")
    of_dicts.reset([env.action_mask(name) for name in env.agents])
    of_rows.reset(envs.agent_masks())
    families = set()
    while env.agents:
        found = [reader.read(told[f"blue_agent_{k}"]) for k, reader in enumerate(readers)]
        actions = of_dicts.act(found)
        np.testing.assert_array_equal(actions, of_rows.act(envs.agent_obs(rows))[0])
        families |= {env.action_labels("blue_agent_4")[actions[4]].split()[0]}
        told, *_ = env.step(dict(zip(env.agents, actions.tolist(), strict=True)))
        rows = envs.step(np.array([[*actions, 0, 0, 0, 0, 0]]))[0]
    assert {"Analyse", "DeployDecoy"} <= families
