"""Tables of the rules against the list of actions of the original, and against each other."""

import json

import numpy as np
from cage.golden import FOLDER4

from vecenv.cage.challenge4.env import Cage4Options, compile_rules
from vecenv.cage.challenge4.rules import codes
from vecenv.cage.challenge4.rules.state import STATE_DTYPE
from vecenv.jit.driver import RUN_DTYPE


def test_actions_are_those_of_the_original():
    listed = json.loads((FOLDER4 / "actions.json").read_text())
    for agent, described in enumerate(listed["agents"]):
        labels = [label(agent, index) for index in range(codes.NUM_ACTIONS[agent])]
        assert labels == described["actions"]
        assert codes.OBS_LENGTHS[agent] == described["obs_len"]
        assert (codes.ACTION_FAMILY[agent, codes.NUM_ACTIONS[agent] :] == codes.SLEEP).all()
    assert listed["duration"] == codes.BLUE_TICKS.tolist()


def label(agent, index):
    family = codes.ACTION_FAMILY[agent, index]
    target, source = codes.ACTION_TARGET[agent, index], codes.ACTION_SOURCE[agent, index]
    name = codes.FAMILY_NAMES[family]
    if family in {codes.SLEEP, codes.MONITOR}:
        return [name]
    if family in {codes.ALLOW, codes.BLOCK}:
        return [name, codes.SUBNET_NAMES[target], codes.SUBNET_NAMES[source]]
    subnet, k = codes.SUBNET_NAMES[target // 16], target % 16
    host = f"user{k}" if k < 10 else f"server{k - 10}"
    return [name, f"{subnet}.{host}"]


def test_routes_are_as_long_as_in_the_network():
    links = {codes.INT: (codes.RZA, codes.RZB, codes.CON, codes.PUB)}
    links |= {codes.RZA: (codes.OZA,), codes.RZB: (codes.OZB,), codes.PUB: (codes.ADM, codes.OFF)}
    parent = {child: node for node, children in links.items() for child in children}

    def ancestors(node):
        return [node] + (ancestors(parent[node]) if node in parent else [])

    for a in range(8):
        for b in range(8):
            up, down = ancestors(a), ancestors(b)
            meeting = next(node for node in up if node in down)
            assert codes.NODES_BETWEEN[a, b] == up.index(meeting) + down.index(meeting) + 1


def test_phases_divide_the_steps_as_the_original_does():
    for steps, lengths in ((500, (167, 167, 166)), (100, (34, 33, 33)), (101, (34, 34, 33))):
        rules = compile_rules(Cage4Options(steps=steps))
        ends = (rules.second_phase, rules.third_phase, steps)
        assert tuple(np.diff([0, *ends])) == lengths


def test_a_game_takes_at_most_24_kilobytes():
    assert STATE_DTYPE.itemsize + RUN_DTYPE.itemsize + codes.OBS_LENGTH <= 24_000
