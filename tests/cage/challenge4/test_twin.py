"""The slow twin against the recordings, and the compiled rules against episodes that it plays."""

import random

import numpy as np
import pytest
from cage.challenge4 import slow_twin
from cage.challenge4.slow_twin import Chance, Network, SlowCage4, draw_network
from cage.golden import FOLDER4

from vecenv.cage import replay_traces

NUM_HOSTS = 137
SERVICE_BITS = {"web": 4, "database": 8, "mail": 16}
LOGS = {"fsm_log": 3, "space_log": 3, "scan_log": 5, "sus_log": 3}


class Tape:
    """Recorded draws, which must be asked for as they were."""

    def __init__(self, arrays):
        parts = [arrays[f"tape_{name}"].tolist() for name in ("site", "actor", "n")]
        kinds = zip(*parts, strict=True)
        self.entries = [*zip(kinds, arrays["tape_val"].tolist(), strict=True)]
        self.tape = []

    def __call__(self, site, actor, n, among=None):
        kind, value = self.entries[len(self.tape)]
        assert kind == (site, actor, n)
        self.tape.append((*kind, value))
        return value if n == 0 else int(value)


def network_of(arrays):
    exists = arrays["net_exists"][:136].reshape(8, 17)
    known = [
        {zone for zone in range(9) if bits >> zone & 1}
        for bits in arrays["net_red_known_subnets"].tolist()
    ]
    network = Network(
        exists[:, 1:11].sum(axis=1).tolist(),
        exists[:, 11:].sum(axis=1).tolist(),
        {},
        int(arrays["net_red_start_host"]),
        known,
    )
    for host in network.hosts:
        order = arrays["net_addon_order"][host]
        network.extras[host] = [slow_twin.EXTRAS[extra] for extra in order if extra >= 0]
    return network


def by_host(values):
    row = np.zeros(NUM_HOSTS, np.int64)
    row[[*values]] = [*values.values()]
    return row


def record(game, actions, messages):
    """Play a game; return it in the format of the recordings."""
    network, draw = game.network, game.draw
    rows, tape_off, sess_off, sessions = [], [0], [0], []
    obs = [[game.observe(agent) for agent in range(5)]]
    masks = {f"mask{agent}": np.array(game.mask(agent), np.uint8) for agent in range(5)}
    for action, message in zip(actions.tolist(), messages.tolist(), strict=True):
        row = game.step(action, message)
        row["green"] = by_host(row["green"])
        row["fsm"] = np.stack([by_host(table) for table in row["fsm"]])
        services = {host: game.services(host) for host in game.hosts}
        for place, name in enumerate(("svc", "decoys", "n_vsftpd", "max_pid")):
            row[name] = by_host({host: found[place] for host, found in services.items()})
        row["events"] = by_host(dict.fromkeys(game.process_events, 1))
        row["events"] += by_host(dict.fromkeys(game.connection_events, 2))
        rows.append(row)
        obs.append([game.observe(agent) for agent in range(5)])
        sessions += game.sessions()
        tape_off.append(len(draw.tape))
        sess_off.append(len(sessions))
    tape = np.array(draw.tape, np.float64).reshape(-1, 4)
    listed = np.array(sessions, np.int64).reshape(-1, 5)
    names = ("agent", "ident", "host", "flags", "pid")
    return {
        **{name: np.array([row[name] for row in rows]) for name in rows[0]},
        **{
            name: np.array(game.logs[name], np.int64).reshape(-1, size)
            for name, size in LOGS.items()
        },
        **{f"sess_{name}": listed[:, place] for place, name in enumerate(names)},
        **masks,
        "obs": np.array([row[:4] for row in obs], np.uint8),
        "obs4": np.array([row[4] for row in obs], np.uint8),
        "tape_off": np.array(tape_off),
        "sess_off": np.array(sess_off),
        "tape_site": tape[:, 0].astype(np.uint8),
        "tape_actor": tape[:, 1].astype(np.uint8),
        "tape_n": tape[:, 2].astype(np.uint8),
        "tape_val": tape[:, 3].astype(np.float32),
        "blue_action": actions,
        "blue_msg": messages,
        "meta_steps": np.array(game.steps),
        "meta_red": np.array(game.variant),
        "meta_phish": np.array(game.phishing),
        "net_exists": by_host(dict.fromkeys([*game.hosts, *range(0, 137, 17)], 1)),
        "net_services": by_host(
            {
                host: 1 + 2 * ("ot" in found.services) + sum(map(SERVICE_BITS.get, found_extras))
                for host, found in game.hosts.items()
                for found_extras in [network.extras[host]]
            }
        ),
        "net_red_start_host": np.array(network.start),
        "net_red_known_subnets": np.array([sum(1 << z for z in known) for known in network.known]),
    }


def comparable(name, array):
    """Return what the recordings say of a field: logs by agent or host, events that blue sees."""
    if name in LOGS:
        return array[np.lexsort((array[:, 1], array[:, 0]))]
    if name == "events":
        return np.delete(array, [*range(17 * slow_twin.CON, 17 * slow_twin.PUB), 136], axis=1)
    if name == "net_services":
        return np.delete(array, [*range(0, 137, 17)])
    return array


@pytest.mark.parametrize("name", ["mix_fsm_100", "stress_phish_120", "mix_discovery_120"])
def test_the_twin_plays_recorded_episodes_as_the_original_does(name):
    with np.load(FOLDER4 / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    game = SlowCage4(
        network_of(arrays),
        Tape(arrays),
        steps=int(arrays["meta_steps"]),
        red=str(arrays["meta_red"]),
        phishing=float(arrays["meta_phish"]),
    )
    found = record(game, arrays["blue_action"], arrays["blue_msg"])
    differing = [
        field
        for field in found.keys() & arrays.keys()
        if not np.array_equal(comparable(field, found[field]), comparable(field, arrays[field]))
    ]
    assert differing == []
    assert len(found.keys() & arrays.keys()) > 50


FAMILIES = {
    "any": range(8),
    "cleaner": [slow_twin.REMOVE, slow_twin.RESTORE, slow_twin.SLEEP, slow_twin.SLEEP],
    "remover": [slow_twin.REMOVE, slow_twin.REMOVE, slow_twin.DECOY],
    "blocker": [slow_twin.BLOCK, slow_twin.BLOCK, slow_twin.ALLOW],
    "decoys": [slow_twin.DECOY, slow_twin.DECOY, slow_twin.REMOVE],
    "sleep": [slow_twin.SLEEP],
}
NETWORKS = {"small": (3, 1), "large": (10, 6), "drawn": None}


def play(number, num_steps):
    """Play an episode that is drawn from a number; return it as a recording."""
    rng = random.Random(number)
    network = draw_network(rng)
    style, size = rng.choice([*FAMILIES]), NETWORKS[rng.choice([*NETWORKS])]
    if size is not None:
        network.users, network.servers = [size[0]] * 8, [size[1]] * 8
        network.start = 17 * slow_twin.CON + 1
        network.extras = {
            host: rng.sample(slow_twin.EXTRAS, rng.randint(0, 3)) for host in network.hosts
        }
    game = SlowCage4(
        network,
        Chance(rng),
        steps=num_steps + 1 + rng.choice([0, 100]),
        red=rng.choice(["fsm", "discovery"]),
        phishing=rng.choice([0.0, 0.01, 0.15, 1.0]),
    )
    favourites = rng.sample(range(48), 3)
    actions = np.zeros((num_steps, 5), np.int64)
    for step in range(num_steps):
        for agent, listed in enumerate(slow_twin.ACTIONS):
            family = rng.choice(FAMILIES[style])
            places = [place for place, action in enumerate(listed) if action[0] == family]
            often = [places[k % len(places)] for k in favourites]
            actions[step, agent] = rng.choice(often if rng.random() < 0.5 else places)
    messages = np.array([rng.choices(range(256), k=5) for _ in range(num_steps)])
    return record(game, actions, messages)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "num_steps"), [(range(8), 40), (range(100, 112), 300)], ids=["short", "long"]
)
def test_compiled_rules_play_the_episodes_of_the_twin(numbers, num_steps, tmp_path):
    paths = [tmp_path / f"{number}.npz" for number in numbers]
    for number, path in zip(numbers, paths, strict=True):
        np.savez(path, **play(number, num_steps))
    result = replay_traces(paths)
    assert result.num_steps == len(paths) * num_steps
    assert result.num_compared > 37 * result.num_steps
    assert [str(found) for found in result.differences] == []
