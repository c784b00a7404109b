"""Scenarios are data: the tables of CAGE 2, another scenario, and tables that make no sense."""

from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
from cage.challenge2.free_run import FreeRun
from cage.challenge2.harbour import HARBOUR
from cage.golden import load_json

from vecenv import cage
from vecenv.cage import action_index, blue_actions, cage2_scenario
from vecenv.cage.challenge2.playing import POLICY_NAMES, find_policy
from vecenv.cage.challenge2.replay import RecordedStep, Replay
from vecenv.cage.challenge2.rules.codes import B_LINE, MEANDER, RED_ACTION_NAMES
from vecenv.cage.challenge2.scenario import RULE_SETS
from vecenv.cage.challenge2.tables import compile_tables, decode, tracked_ports

CAGE2 = cage2_scenario()


def test_names_and_order_are_those_of_the_original():
    names = load_json("actions.json")
    assert [h.name for h in CAGE2.hosts] == names["hosts"]
    assert list(CAGE2.subnets) == names["subnets"]
    assert [e.name for e in CAGE2.exploits] == names["exploits"]
    assert [d.name for d in CAGE2.decoys] == names["decoys"]
    assert list(tracked_ports(CAGE2)) == names["red_port_bits"]
    assert list(RED_ACTION_NAMES) == names["red_action_types"]
    actions = blue_actions(CAGE2)
    assert len(actions) == 145
    for action, expected in zip(actions, names["blue_actions"], strict=True):
        assert (action.name, action.host) == (expected["action"], expected["host"])
        index = action_index(CAGE2, expected["action"], expected["host"])
        assert index == expected["index"]


def test_unknown_rules_are_refused():
    with pytest.raises(ValueError, match="rules is 'fixed', expected one of faithful, debugged"):
        cage2_scenario("fixed")


def test_the_corrected_rules_differ_where_they_should():
    faithful, debugged = (compile_tables(cage2_scenario(rules)) for rules in RULE_SETS)
    changed = {
        name for name in faithful.dtype.names if not np.array_equal(faithful[name], debugged[name])
    }
    assert changed == {
        "genuine_ports",  # User3's mysql
        "exploit_result",  # there, and EternalBlue on Enterprise1 and 2
        "decoy_ports",  # Vsftpd
        "catching_decoys",
        "stackable_decoys",
        "activity",
        "charges_user_access",
        "remove_reports_last_shell",
    }


def test_another_scenario_runs_to_its_end():
    """B_line by hand: sweep, scan, exploit, escalate, on and on to the service."""
    replay = Replay(1, HARBOUR, red_agents=B_LINE)
    desk2, bench1, plc0 = 2, 4, 5
    samba, guess = 0, 2
    steps = [
        (1, 0, -1, 0, ""),
        (2, desk2, -1, 0, "desk2 1000"),
        (3, desk2, samba, -2, "desk2 1101"),
        (4, desk2, -1, -2, "desk2 0001"),
        (2, bench1, -1, -2, "desk2 0001, bench1 1000"),
        (3, bench1, samba, -7, "desk2 0001, bench1 1101"),
        (4, bench1, -1, -7, "desk2 0001, bench1 0001"),
        (2, plc0, -1, -7, "desk2 0001, bench1 0001, plc0 1000"),
        (3, plc0, guess, -7, "desk2 0001, bench1 0001, plc0 1101"),
        (4, plc0, -1, -27, "desk2 0001, bench1 0001, plc0 0001"),
        (5, plc0, -1, -77, "desk2 0001, bench1 0001, plc0 0001"),
    ]
    names = [host.name for host in HARBOUR.hosts]
    for t, (red_type, target, exploit, reward10, seen) in enumerate(steps):
        types, options = replay.red_options()
        assert types[0] == red_type and options[0, target], t
        assert options[0].sum() == (2 if t == 1 else 1)
        replay.red_commit(red_type, target)
        result = replay.step(RecordedStep(0, red_type, target, exploit, 1, 0))
        assert result.errors[0] == 0 and result.red_success[0] == 1
        assert result.reward10[0] == reward10, t
        shown = {
            names[i]: "".join(map(str, bits)) for i, bits in enumerate(result.obs.reshape(7, 4))
        }
        shown = {name: bits for name, bits in shown.items() if bits != "0000"}
        assert shown == dict(part.split() for part in seen.split(", ") if part), t
    restore = action_index(HARBOUR, "Restore", "plc0")
    assert restore == len(blue_actions(HARBOUR)) - 2
    assert replay.step(RecordedStep(restore, 5, plc0)).reward10[0] == -17
    assert replay.true_state()["ot_stoppable"][0] == 0


def test_traffic_rules_of_another_scenario_hold():
    """Plant and Vault open one after the other; a host that listens on nothing stays empty."""
    replay = Replay(1, HARBOUR)
    replay.states["known_ip"] = replay.states["known_host"] = 0b1111111
    for host, open_ports in ((4, 256 + 2), (5, 0), (6, 0)):
        replay.step(RecordedStep(0, 2, host))
        assert replay.true_state()["red_ports"][0, host] & 256 == open_ports & 256
    replay.step(RecordedStep(0, 3, 4, 0, 1))  # a session on bench1
    replay.step(RecordedStep(0, 2, 5))
    replay.step(RecordedStep(0, 2, 6))
    assert (replay.true_state()["red_ports"][0, 5:] > 0).tolist() == [True, False]
    replay.step(RecordedStep(0, 3, 5, 2))  # and one on plc0
    result = replay.step(RecordedStep(0, 2, 6))
    assert replay.true_state()["red_ports"][0, 6] == 256
    assert (result.obs[0, 24:] == 0).all()
    assert replay.step(RecordedStep(0, 3, 6)).errors[0] == 0  # no candidate, no draw


@pytest.mark.parametrize(
    ("agent", "policy"), [*zip(cycle((B_LINE, MEANDER)), POLICY_NAMES, strict=False)]
)
def test_another_scenario_runs_freely(agent, policy):
    options = {"obs_dtype": np.uint8}  # compiled for other tests, too
    run = FreeRun(200, (agent,), scenario=HARBOUR, seed=1, **options)
    rewards = run.play(find_policy(policy, HARBOUR, seed=1), 60)
    assert run.obs.shape == (200, 28)
    assert (rewards <= 0).all() and rewards.min() >= -4.4 - 5.0 - 1.0
    state = decode(run.states, HARBOUR)
    assert state["access"].shape == (200, 7) and state["known_subnet"].shape == (200, 4)
    assert (state["access"][:, 0] == 2).all() and (state["access"][:, 6] == 0).all()
    if policy == "sleep":
        assert (state["ot_running"] == 0).all()  # nobody stops red


def replaced(field, index, **changes):
    rows = list(getattr(CAGE2, field))
    rows[index] = replace(rows[index], **changes)
    return replace(CAGE2, **{field: tuple(rows)})


def with_plan(**changes):
    return replace(CAGE2, b_line=replace(CAGE2.b_line, **changes))


def with_plan_step(index, **changes):
    steps = list(CAGE2.b_line.steps)
    steps[index] = replace(steps[index], **changes)
    return with_plan(steps=tuple(steps))


BAD_TABLES = {
    "subnet twice": (replace(CAGE2, subnets=("User", *CAGE2.subnets)), r"subnets\[3\] is 'User'"),
    "decoy of no process": (replaced("decoys", 1, process=""), r"decoys\[1\].process"),
    "plan that verifies nothing": (with_plan(verify_step=15), "b_line.verify_step is 15"),
    "subnet nobody is in": (
        replace(CAGE2, subnets=(*CAGE2.subnets, "Guests")),
        r"subnets\[3\] is 'Guests', but no host is in it",
    ),
    "host in two subnets": (
        replace(CAGE2, hosts=(*CAGE2.hosts, replace(CAGE2.hosts[9], subnet="Enterprise"))),
        r"hosts\[13\] is 'User1' again, in subnet 'Enterprise' after 'User'; a host is in exactly",
    ),
    "host with two subnets": (
        replaced("hosts", 3, subnet=("User", "Enterprise")),
        r"hosts\[3\].subnet is \('User', 'Enterprise'\)",
    ),
    "nameless host": (replaced("hosts", 3, name=""), r"hosts\[3\] is named ''"),
    "too many hosts": (
        replace(
            CAGE2,
            hosts=CAGE2.hosts + tuple(replace(CAGE2.hosts[0], name=f"More{i}") for i in range(4)),
        ),
        r"hosts has 17 rows, expected 1 to 16",
    ),
    "odd value": (replaced("hosts", 3, value=0.25), r"hosts\[3\].value is 0.25"),
    "service without port": (
        replaced("hosts", 3, services=(cage.Service(None, "ssh"),)),
        r"hosts\[3\].services\[0\].port is None",
    ),
    "reveals nobody": (replaced("hosts", 3, reveals=("X",)), r"hosts\[3\].reveals names 'X'"),
    "rule within a subnet": (replaced("traffic", 0, target="User"), r"traffic\[0\] is from 'User'"),
    "rule twice": (
        replace(CAGE2, traffic=CAGE2.traffic * 2),
        r"traffic\[1\] is a second rule from 'User' to 'Operational'",
    ),
    "exploit without a port": (
        replaced("exploits", 2, port=None),
        r"exploits\[2\].port is None, expected a port number in 1..65535",
    ),
    "exploit that needs an impossible port": (
        replaced("exploits", 2, needs_one_of=(80, "x")),
        r"exploits\[2\].needs_one_of is 'x'",
    ),
    "exploit of no process": (replaced("exploits", 2, process=""), r"exploits\[2\].process"),
    "exploits out of order": (
        replaced("exploits", 2, weight=6.5),
        r"exploits\[2\].weight is 6.5, expected less than 6.0",
    ),
    "too many exploits": (
        replace(CAGE2, exploits=(*CAGE2.exploits, cage.Exploit("X", 0.01, 22, "ssh"))),
        r"exploits has 9 rows, expected 1 to 8",
    ),
    "decoy without a port": (replaced("decoys", 1, opens=None), r"decoys\[1\].opens is None"),
    "two decoys without limit": (replaced("decoys", 1, checks=22), r"decoys\[7\] opens another"),
    "too many ports": (
        replaced("decoys", 1, opens=5, checks=5),
        r"exploits and decoys are about 9 different ports",
    ),
    "service nowhere": (
        replace(CAGE2, operational_service=cage.OperationalService("X", 10.0)),
        r"operational_service.host names 'X'",
    ),
    "impossible chance": (
        replace(CAGE2, detection_probability=1.5),
        r"detection_probability is 1.5, expected a number in \[0, 1\]",
    ),
    "plan too short for its jumps": (with_plan(on_failure=(0,)), "b_line.on_failure has 1 rows"),
    "plan that jumps ahead": (
        with_plan(on_failure=(3, *CAGE2.b_line.on_failure[1:])),
        r"b_line.on_failure\[0\] is 3",
    ),
    "plan that does not know what": (
        with_plan_step(4, action="phone"),
        r"b_line.steps\[4\].action is 'phone', expected one of sweep, scan",
    ),
    "plan that sweeps a host": (with_plan_step(7, target="User1"), r"b_line.steps\[7\].target"),
    "plan that hurries": (
        with_plan_step(0, action="scan", target=cage.NEXT_HOST),
        rf"b_line.steps\[0\].target is '{cage.NEXT_HOST}' before any step has '{cage.FIRST_HOST}'",
    ),
    "plan without a first host": (
        with_plan(steps=(cage.PlanStep("sweep", "User"),) * 15),
        f"b_line.steps never targets '{cage.FIRST_HOST}'",
    ),
    "plan that leads nowhere": (with_plan(next_hosts=()), "b_line.next_hosts has 0 rows"),
    "plan that verifies no scan": (with_plan(verify_step=3), "b_line.verify_step is 3"),
    "plan that restarts ahead": (with_plan(restart_step=12), "b_line.restart_step is 12"),
    "meander forgets nobody known": (
        replace(CAGE2, meander=replace(CAGE2.meander, forget_next=("X",))),
        "meander.forget_next names 'X'",
    ),
}


@pytest.mark.parametrize("problem", BAD_TABLES)
def test_contradictory_tables_are_refused_by_field(problem):
    scenario, message = BAD_TABLES[problem]
    with pytest.raises(cage.ScenarioError, match=f"^{message}"):
        compile_tables(scenario)


def test_compiled_tables_are_read_only_and_made_once_for_each_scenario():
    tables = compile_tables(CAGE2)
    with pytest.raises(ValueError, match="read-only"):
        tables.gate[0] = 1
    assert compile_tables(replace(CAGE2)) is tables is not compile_tables(CAGE2, green=True)
    assert compile_tables(replace(CAGE2, hosts=list(CAGE2.hosts))) == tables  # can't be hashed
