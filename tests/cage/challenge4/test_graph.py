"""Graphs that agents of challenge 4 see, against a twin that knows what an agent is told."""

import numpy as np
import pytest
from cage.challenge4.lockstep import Games, as_rows, rows_by_agent

from vecenv import make_vec_agents
from vecenv.cage import Cage4Env, Cage4Graph, Cage4ParallelEnv, Cage4VectorEnv, evaluate_cage4
from vecenv.cage.challenge4.env import Cage4Options
from vecenv.cage.challenge4.rules import codes

SORTED = ("ADM", "CON", "INT", "OFF", "OZA", "OZB", "PUB", "RZA", "RZB")
OWN = (["RZA"], ["OZA"], ["RZB"], ["OZB"], ["ADM", "OFF", "PUB"])
ROUTES = {"INT RZA", "INT RZB", "INT CON", "INT PUB", "RZA OZA", "RZB OZB", "PUB ADM", "PUB OFF"}
NODES, EDGES = Cage4Graph.NODE_FEATURES, Cage4Graph.EDGE_FEATURES
RATES = {"phishing_rate": 0.1, "alarm_rate": 0.05}


class Twin:
    """The graph of one agent in one game, from its vectors, its mask and its own actions."""

    def __init__(self, agent, mask):
        self.zones, self.size = OWN[agent], 16 * len(OWN[agent])
        self.mask = mask
        self.decoys, self.family, self.target, self.left = set(), None, None, 0

    def act(self, action):
        if self.left == 0:
            self.family, self.target = self.read(action)
            ticks = {"analyse": 2, "remove": 3, "restore": 5, "decoy": 2}
            self.left = ticks.get(self.family, 1)
        self.left -= 1
        if self.left == 0 and self.family == "decoy":
            self.decoys.add(self.target)
        if self.left == 0 and self.family == "restore":
            self.decoys.discard(self.target)

    def read(self, action):
        num = len(self.mask)
        starts = {"analyse": 0, "remove": self.size + 1, "restore": 2 * self.size + 1}
        starts["decoy"] = num - self.size
        for family, start in starts.items():
            if action < num and self.mask[action] and start <= action < start + self.size:
                return family, action - start
        return None, None

    def graph(self, vector, room):
        """The parts of a `Cage4Graph` with room for so many own zones, from the vector."""
        nodes = np.zeros((16 * room + 9, len(NODES)), int)
        num_edges = room * 24
        index, edges = np.zeros((2, num_edges), int), np.zeros((num_edges, len(EDGES)), int)
        node_mask, edge_mask = np.zeros(len(nodes), int), np.zeros(num_edges, int)

        def note(row, *names):
            for name in names:
                row[(NODES if len(row) == len(NODES) else EDGES).index(name)] = 1

        for place, zone in enumerate(SORTED):
            node_mask[16 * room + place] = 1
            note(nodes[16 * room + place], "is_zone", f"in_{zone}")
        for unit, zone in enumerate(self.zones):
            seen = vector[1 + 59 * unit :]
            own = 16 * room + SORTED.index(zone)
            note(nodes[own], "is_own")
            for place in range(16):
                k = 16 * unit + place
                index[:, k] = k, own
                if not self.mask[k]:
                    continue
                node_mask[k] = edge_mask[k] = 1
                note(edges[k], "host_in_zone")
                note(nodes[k], "is_server" if place < 6 else "is_user", "is_own", f"in_{zone}")
                nodes[k, NODES.index("process_event")] = seen[27 + place]
                nodes[k, NODES.index("connection_event")] = seen[43 + place]
                nodes[k, NODES.index("has_decoy")] = k in self.decoys
            others = [other for other in SORTED if other != zone]
            for j, other in enumerate(others):
                k, place = 16 * room + 8 * unit + j, SORTED.index(other)
                index[:, k], edge_mask[k] = (16 * room + place, own), 1
                is_route = f"{zone} {other}" in ROUTES or f"{other} {zone}" in ROUTES
                edges[k] = 0, is_route, 1 - seen[18 + place], seen[9 + place]
        if self.left:
            busy = {"analyse": "is_analysed", "remove": "is_removed", "restore": "is_restored"}
            note(nodes[self.target], busy.get(self.family, "gets_decoy"))
        phase = [int(vector[0] == phase) for phase in range(3)]
        return nodes, node_mask, index, edges, edge_mask, [*phase, self.left, *vector[-32:]]


def draw_actions(rng, num_games):
    """Actions of which many have effects that graphs show: on few hosts, blocks, decoys."""
    actions = rng.integers(0, codes.NUM_ACTIONS, (num_games, 5))
    size = np.where(np.arange(5) == 4, 48, 16)
    host = rng.integers(0, 4, actions.shape) + 4
    decoy, restore = codes.NUM_ACTIONS - size + host, 2 * size + 1 + host
    return np.choose(rng.integers(0, 5, actions.shape), [actions, actions, actions, decoy, restore])


class Lockstep:
    """Games with flat observations, and the twins of all their agents."""

    def __init__(self, num_games, seed, **options):
        self.games = Games(num_games, seed=seed, options=Cage4Options(**RATES, **options))
        self.rng, self.num_games = np.random.default_rng(seed), num_games
        self.begin()

    def begin(self):
        masks = self.games.masks
        self.twins = [[Twin(a, masks[a][g]) for a in range(5)] for g in range(self.num_games)]
        self.was_over = False

    def step(self):
        """Play a step; return the actions and messages."""
        actions = draw_actions(self.rng, self.num_games)
        messages = self.rng.integers(0, 256, (self.num_games, 5))
        self.games.step(actions, messages)
        if self.was_over:
            self.begin()
        else:
            for twins, own in zip(self.twins, actions, strict=True):
                for twin, action in zip(twins, own, strict=True):
                    twin.act(action)
            self.was_over = self.games.is_over.all()
        return actions, messages

    def check(self, agent, rows, room=None):
        """Compare the graphs (num_games, length) of an agent with its twins'."""
        room = room or len(OWN[agent])
        vectors, got = self.games.agent_obs(agent), Cage4Graph.of(rows)
        for game, twins in enumerate(self.twins):
            expected = twins[agent].graph(vectors[game].astype(int), room)
            for name, mine, theirs in zip(got._fields, got, expected, strict=True):
                np.testing.assert_array_equal(mine[game], theirs, err_msg=f"{name} of {agent}")


def test_a_graph_has_what_an_agent_is_told_and_has_done():
    lockstep = Lockstep(2, seed=3, steps=11)
    envs = Cage4VectorEnv(2, messages=True, observation="graph", debug=True, steps=11, **RATES)
    obs, _ = envs.reset(seed=3)
    for _ in range(15):  # over the end of an episode
        for agent, rows in enumerate(envs.agent_obs(obs)):
            lockstep.check(agent, rows)
        assert envs.single_observation_space.contains(obs[0])
        obs, rewards, *_ = envs.step(np.concatenate(lockstep.step(), axis=1))
        np.testing.assert_array_equal(rewards, lockstep.games.rewards)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("pad", [False, True])
def test_compiled_graphs_of_agents_have_what_agents_are_told(pad):
    lockstep = Lockstep(8, seed=5, steps=120)
    options = {"steps": 120, "messages": True, "observation": "graph", **RATES}
    envs = make_vec_agents("Cage4-v0", 8, pad=pad, **options)
    obs, _ = envs.reset(seed=5)
    for _ in range(240):
        for agent, part in enumerate(rows_by_agent(obs, 8, pad)):
            lockstep.check(agent, part, 3 if pad else None)
        obs, *_ = envs.step(as_rows(np.stack(lockstep.step(), axis=2), pad))


def test_graphs_are_taken_apart_without_copies_and_only_graphs():
    with Cage4Env(observation="graph", debug=True) as env:
        assert env.observation_space.shape == (4 * 729 + 1737,)
    for length in (729, 1737):
        rows = np.zeros((2, 3, length), np.uint8)
        graph = Cage4Graph.of(rows)
        assert all(np.shares_memory(part, rows) for part in graph)
        assert sum(part[0, 0].size for part in graph) == length
    for wrong in (np.zeros((4, 92)), np.zeros(()), np.zeros(4653)):
        with pytest.raises(ValueError, match=r"expected .* one of the lengths 729, 1737"):
            Cage4Graph.of(wrong)


def test_what_is_no_kind_of_observation_is_refused():
    for make in (Cage4VectorEnv, lambda **options: make_vec_agents("Cage4-v0", 1, **options)):
        for wrong in ("Graph", None, ["graph"]):
            with pytest.raises(ValueError, match="expected one of flat, graph, events"):
                make(observation=wrong)
    with pytest.raises(TypeError, match="observation"):
        Cage4ParallelEnv(observation="graph")
    with pytest.raises(TypeError, match="policies are played with vectors"):
        evaluate_cage4("sleep", episodes=2, observation="graph")
