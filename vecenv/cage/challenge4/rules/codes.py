"""Numbers that kernels, tables and tests share, each with its place in the specification.

A *host* is an index 16 * subnet + k, where k = 0..9 is a user host and 10..15 a server host. The
ascending order is the original's order of hosts. Routers and the internet host have no state and no
index: no agent sees what happens to them. The specification's host id is 17 * subnet + 1 + k.
"""

from __future__ import annotations

from typing import Any

import numpy as np

CAGE4_RULES_VERSION = 1
"""Version of CAGE Challenge 4's simulator, raised as `RULES_VERSION` is."""

# --- subnets (SPEC 1.1) ---
RZA, OZA, RZB, OZB, CON, PUB, ADM, OFF, INT = range(9)
SUBNET_NAMES = ("RZA", "OZA", "RZB", "OZB", "CON", "PUB", "ADM", "OFF", "INT")
NUM_SUBNETS = 8  # subnets that have hosts
NUM_ZONES = 9  # including the internet
SORTED_SUBNETS = (ADM, CON, INT, OFF, OZA, OZB, PUB, RZA, RZB)
SORTED = np.array(SORTED_SUBNETS, np.int64)

# --- hosts (SPEC 1.2) ---
HOSTS_PER_SUBNET = 16
NUM_HOSTS = NUM_SUBNETS * HOSTS_PER_SUBNET
NUM_SPEC_HOSTS = 137
MAX_USERS, MAX_SERVERS = 10, 6
FIRST_SERVER = MAX_USERS  # k of server host 0
USER_BITS = (1 << MAX_USERS) - 1
PLACES = (*range(FIRST_SERVER, HOSTS_PER_SUBNET), *range(FIRST_SERVER))  # order of actions (10.1)

# --- agents (SPEC 1.1) ---
NUM_BLUE, NUM_RED = 5, 6
AGENT_NAMES = tuple(f"blue_agent_{agent}" for agent in range(NUM_BLUE))
BLUE_SUBNETS = ((RZA,), (OZA,), (RZB,), (OZB,), (ADM, OFF, PUB))  # in alphabetical order
WATCHED_ZONES = np.concatenate(BLUE_SUBNETS)  # of all blue agents
RED_OF_SUBNET = np.array([1, 2, 3, 4, 0, 5, 5, 5], np.int64)
RED_SUBNETS = np.array([1 << CON, 1 << RZA, 1 << OZA, 1 << RZB, 1 << OZB, 0b11100000], np.int64)

# --- routes (SPEC 1.3): from a zone to the internet, by routers ---
TO_INTERNET = {
    RZA: (RZA, INT), OZA: (OZA, RZA, INT), RZB: (RZB, INT), OZB: (OZB, RZB, INT),
    CON: (CON, INT), PUB: (PUB, INT), ADM: (ADM, PUB, INT), OFF: (OFF, PUB, INT),
}  # fmt: skip
MAX_ROUTE = 5


def _routes():
    """Zones whose routers lie between two hosts (8, 8, 5), INT the internet's; and their number."""
    routes = np.zeros((NUM_SUBNETS, NUM_SUBNETS, MAX_ROUTE), np.int64)
    num = np.zeros((NUM_SUBNETS, NUM_SUBNETS), np.int64)
    for a, up in TO_INTERNET.items():
        for b, down in TO_INTERNET.items():
            top = next(zone for zone in up if zone in down)  # the network is a tree
            route = up[: up.index(top) + 1] + down[: down.index(top)][::-1]
            routes[a, b, : len(route)], num[a, b] = route, len(route)
    return routes, num


ROUTES, NODES_BETWEEN = _routes()

# --- services (SPEC 1.4), bits of `services` ---
SSH, OT, WEB, DATABASE, MAIL = 1, 2, 4, 8, 16
EXTRAS = WEB | DATABASE | MAIL
MAX_EXTRAS = 3

SERVICE_PORTS = np.array([22, 1, 80, 3390, 25], np.int64)  # by bit
EXTRA_ORDERS = np.array(  # of web, database and mail, two bits each
    [0b100100, 0b011000, 0b100001, 0b001001, 0b010010, 0b000110], np.int64
)

# --- what only raw observations show ---
FIRST_PORT, PORT_STOP = 49152, 60000  # of the ports that are drawn
BLOCKED_PORT = 8800
CMD_FILE, ESCALATE_FILE, CMD_IS_LAST, WAS_ANALYSED = 1, 2, 4, 8  # bits of files on a host

# --- decoys (SPEC 1.5) ---
APACHE, TOMCAT, HARAKA, VSFTPD = range(4)
NUM_DECOYS = 4
DECOY_NAMES = ("apache", "tomcat", "haraka", "vsftpd")
DECOY_PORTS = np.array([80, 443, 25, 80], np.int64)

# --- state of services: the word `svc` of a host (TRACES, field svc), in steps of 20 % ---
FULL = 5  # 100 %
LEVEL = 20
LEVEL_BITS = 7
OT_RUNNING = 8
DECOY_SHIFT = 4  # level of decoy d is at bit 4 + 3 * d

# --- ports that red remembers of a host (TRACES, scan_log) ---
PORT_22, PORT_80, PORT_443, PORT_3390, PORT_25, PORT_OT = 1, 2, 4, 8, 16, 32

# --- blue actions (SPEC 1.7, 5, 10.1) ---
SLEEP, MONITOR, ANALYSE, REMOVE, RESTORE, ALLOW, BLOCK, DECOY = range(8)
_FAMILIES = "Sleep Monitor Analyse Remove Restore AllowTraffic BlockTraffic DeployDecoy"
FAMILY_NAMES = tuple(_FAMILIES.split())
BLUE_TICKS = np.array([1, 1, 2, 3, 5, 1, 1, 2], np.int64)
FAILED, SUCCEEDED, UNKNOWN, IN_PROGRESS, DROPPED = 0, 1, 2, 3, 4
NUM_ACTIONS = (82, 82, 82, 82, 242)
MAX_ACTIONS = 242
SLEEPS = (49, 49, 49, 49, 145)  # index of Sleep of each agent
OBS_LENGTHS = (92, 92, 92, 92, 210)
OBS_LENGTH = 578  # of all agents
MESSAGE_BITS = 8
RESTORE_COST = 1  # SPEC 9, per submission


def _action_tables():
    """Family, host or `to`, and `from`, of every action of every blue agent (SPEC 10.1)."""
    family = np.zeros((NUM_BLUE, MAX_ACTIONS), np.int64)
    target = np.zeros((NUM_BLUE, MAX_ACTIONS), np.int64)
    source = np.zeros((NUM_BLUE, MAX_ACTIONS), np.int64)
    for agent, subnets in enumerate(BLUE_SUBNETS):
        hosts = [subnet * HOSTS_PER_SUBNET + k for subnet in subnets for k in PLACES]
        pairs = [(to, other) for to in subnets for other in SORTED_SUBNETS if other != to]
        rows = [(ANALYSE, host, 0) for host in hosts] + [(MONITOR, 0, 0)]
        rows += [(REMOVE, host, 0) for host in hosts] + [(RESTORE, host, 0) for host in hosts]
        rows += [(SLEEP, 0, 0)]
        rows += [(ALLOW, *pair) for pair in pairs] + [(BLOCK, *pair) for pair in pairs]
        rows += [(DECOY, host, 0) for host in hosts]
        assert len(rows) == NUM_ACTIONS[agent]
        for index, row in enumerate(rows):
            family[agent, index], target[agent, index], source[agent, index] = row
    return family, target, source


ACTION_FAMILY, ACTION_TARGET, ACTION_SOURCE = _action_tables()  # Sleep where an agent has no action

# --- red actions (SPEC 1.7, SPEC_RED 2) ---
DISCOVER, AGGRESSIVE, STEALTH, DECEPTION, EXPLOIT, ESCALATE, IMPACT, DEGRADE = range(8)
_RED_ACTIONS = (
    "DiscoverRemoteSystems AggressiveServiceDiscovery StealthServiceDiscovery "
    "DiscoverDeception ExploitRemoteService PrivilegeEscalate Impact DegradeServices"
)
RED_ACTION_NAMES = tuple(_RED_ACTIONS.split())
WITHDRAW = 8  # exists, but is never chosen
RED_TICKS = np.array([1, 1, 3, 2, 4, 2, 2, 2], np.int64)
INACTIVE, NONE = 254, 255  # of `choice_type` and the like; NONE: busy, or nothing
IMPOSSIBLE = 253  # of `choice_session`, with NONE: a custom red agent's choice does not exist
HTTP, HTTPS, SSH_EXPLOIT, SQL, MAIL_EXPLOIT = range(5)
NO_EXPLOIT = -1

# --- red sessions (SPEC_RED 1; TRACES, sess_flags) ---
KIND_A, PRIVILEGED, ABSTRACT, SSH_SHELL, REVERSE_SHELL = map(np.int64, (1, 2, 4, 8, 16))
PRIMARY = 0  # id of the primary session

# --- red's probabilities (SPEC_RED 2) ---
AGGRESSIVE_DETECTION, STEALTH_DETECTION = 0.75, 0.25
DECEPTION_HIT, DECEPTION_FALSE = 0.5, 0.1
SSH_MISSED, SQL_MISSED = 0.05, 0.05  # no event below
MAX_PID_STEP = 9  # SPEC 3.3

# --- the finite-state red agent (SPEC_RED 7): states of a host in its table ---
UNKNOWN_HOST, K, KD, S, SD, U, UD, R, RD, F = range(10)
STATE_BITS = 15
NAME_KNOWN = 16
FSM_RED, DISCOVERY_RED, SLEEPING_RED = 0, 1, 2
RED_VARIANTS = ("fsm", "discovery", "sleep")


def _next_states():
    """State after an action of red succeeded (SPEC_RED 7.1), uint8 (10, 8)."""
    table = np.repeat(np.arange(10)[:, None], 8, axis=1)
    for state, action, after in (
        (K, DISCOVER, KD), (K, AGGRESSIVE, S), (K, STEALTH, S), (KD, AGGRESSIVE, SD),
        (KD, STEALTH, SD), (S, DISCOVER, SD), (S, EXPLOIT, U), (SD, EXPLOIT, UD),
        (U, DISCOVER, UD), (U, ESCALATE, R), (UD, ESCALATE, RD), (R, DISCOVER, RD),
    ):  # fmt: skip
        table[state, action] = after
    return table.astype(np.uint8)


NEXT_STATE = _next_states()
MAX_CELLS = 4
# The filled cells of a row, in the order of the columns, with their probabilities (SPEC_RED 7.5).
_DEFAULT_CHOICES = {
    K: ((DISCOVER, 0.5), (AGGRESSIVE, 0.25), (STEALTH, 0.25)),
    KD: ((AGGRESSIVE, 0.5), (STEALTH, 0.5)),
    S: ((DISCOVER, 0.25), (EXPLOIT, 0.5), (DECEPTION, 0.25)),
    SD: ((EXPLOIT, 0.75), (DECEPTION, 0.25)),
    U: ((DISCOVER, 0.5), (ESCALATE, 0.5), (WITHDRAW, 0.0)),
    UD: ((ESCALATE, 1.0), (WITHDRAW, 0.0)),
    R: ((DISCOVER, 0.5), (DEGRADE, 0.25), (IMPACT, 0.25), (WITHDRAW, 0.0)),
    RD: ((DEGRADE, 0.5), (IMPACT, 0.5), (WITHDRAW, 0.0)),
}
_DISCOVERY_CHOICES = {  # SPEC_RED 7.7
    K: ((DISCOVER, 0.25), (AGGRESSIVE, 0.75), (STEALTH, 0.0)),
    KD: ((AGGRESSIVE, 1.0), (STEALTH, 0.0)),
    S: ((DISCOVER, 0.25), (EXPLOIT, 0.75), (DECEPTION, 0.0)),
    SD: ((EXPLOIT, 1.0), (DECEPTION, 0.0)),
    U: ((DISCOVER, 0.0), (ESCALATE, 1.0), (WITHDRAW, 0.0)),
    UD: ((ESCALATE, 1.0), (WITHDRAW, 0.0)),
    R: ((DISCOVER, 1.0), (DEGRADE, 0.0), (IMPACT, 0.0), (WITHDRAW, 0.0)),
    RD: ((DEGRADE, 0.5), (IMPACT, 0.5), (WITHDRAW, 0.0)),
}


def _choice_tables():
    """Number of cells (2, 10), action of a cell and cumulative probability (2, 10, 4)."""
    num = np.ones((2, 10), np.int64)
    actions = np.zeros((2, 10, MAX_CELLS), np.int64)
    cumulative = np.ones((2, 10, MAX_CELLS))
    for variant, choices in enumerate((_DEFAULT_CHOICES, _DISCOVERY_CHOICES)):
        for state, cells in choices.items():
            num[variant, state] = len(cells)
            actions[variant, state, : len(cells)] = [action for action, _ in cells]
            cumulative[variant, state, : len(cells)] = np.cumsum([share for _, share in cells])
    return num, actions, cumulative


NUM_CELLS, CELL_ACTION, CELL_CUMULATIVE = _choice_tables()
STATE_WEIGHT = np.array([0, 20, 20, 20, 20, 10, 10, 0, 0, 0], np.int64)  # SPEC_RED 7.7
SERVER_FIRST = 0.75


def _set(*subnets):
    return sum(1 << subnet for subnet in subnets)


# Subnets whose server 0 is revealed by escalating server 0 of a subnet (SPEC_RED 2).
_LINKS = ((OZA, CON), (RZA,), (OZB, CON), (RZB,), (RZA, RZB, PUB), (CON, ADM, OFF), (PUB,), (PUB,))
REVEALS = np.array([_set(*subnets) for subnets in _LINKS], np.int64)

# --- green (SPEC 6) ---
ACCESS_SERVICE, LOCAL_WORK, GREEN_SLEEP = range(3)
GREEN_NONE, GREEN_SLEPT, WORK_DONE, WORK_FAILED, ACCESS_DONE, ACCESS_FAILED = range(6)
PHISHING_RATE, ALARM_RATE = 0.01, 0.01
_HQ = (PUB, ADM, OFF)
_ALLOWED = {  # SPEC 6.3, by phase
    RZA: [(RZA, OZA, RZB, CON, *_HQ), (RZA, *_HQ), (RZA, OZA, CON, *_HQ)],
    OZA: [(RZA, OZA), (OZA,), (RZA, OZA)],
    RZB: [(RZA, RZB, OZB, CON, *_HQ), (RZB, OZB, CON, *_HQ), (RZB, *_HQ)],
    OZB: [(RZB, OZB), (RZB, OZB), (OZB,)],
    CON: [(RZA, RZB, CON, *_HQ), (RZB, CON, *_HQ), (RZA, CON, *_HQ)],
    **{own: [(RZA, RZB, CON, own)] * 3 for own in _HQ},
}
GREEN_ALLOWED = np.array(
    [[_set(*_ALLOWED[own][phase]) for own in range(8)] for phase in range(3)], np.int64
)

# --- rewards (SPEC 9), by phase and subnet ---
WORK_REWARD, ACCESS_REWARD, IMPACT_REWARD = np.array([
    [[-1, -1, -1, -1, 0, -1, -1, -1],
     [-2, -10, -1, -1, 0, -1, -1, -1],
     [-1, -1, -2, -10, 0, -1, -1, -1]],
    [[-3, -1, -3, -1, -5, -1, -1, -1],
     [-1, 0, -1, -1, 0, -1, -1, -1],
     [-3, -1, -1, 0, 0, -1, -1, -1]],
    [[-1, -1, -1, -1, -5, -3, -3, -3],
     [-3, -10, -1, -1, 0, -3, -3, -3],
     [-3, -1, -3, -10, 0, -3, -3, -3]],
], np.int64)  # fmt: skip


def _not_linked():
    """Policy entries of the observation (SPEC 10.3): bit i is sorted subnet i."""
    core = (INT, *_HQ, CON, RZA, RZB)
    links = {frozenset((a, b)) for a in core for b in core if a != b}
    links |= {frozenset((RZA, OZA)), frozenset((RZB, OZB))}
    cut = {
        0: set(),
        1: {frozenset((RZA, other)) for other in (OZA, CON, RZB, INT)},
        2: {frozenset((RZB, other)) for other in (OZB, CON, RZA, INT)},
    }
    table = np.zeros((3, NUM_SUBNETS), np.int64)
    for phase in range(3):
        for subnet in range(NUM_SUBNETS):
            for bit, other in enumerate(SORTED_SUBNETS):
                is_linked = frozenset((subnet, other)) in links - cut[phase]
                table[phase, subnet] |= (not is_linked) << bit
    return table


NOT_LINKED = _not_linked()
SORTED_PLACE = np.array([SORTED_SUBNETS.index(subnet) for subnet in range(9)], np.int64)

# --- capacities (SPEC 13.1); `overflow` says which one was exceeded ---
MAX_SESSIONS = 80  # of one red agent
MAX_MEMORY = 128  # port memory entries of one red agent
MAX_OFFERED = 160  # session ids on offer of one red agent
MAX_TABLE = 52  # hosts in the table of one red agent
MAX_HANDED = 8  # exploit sessions handed over to one red agent in one step
MAX_SUSPICIOUS = 512
MAX_OLD_VSFTPD = 1280  # processes replaced by newer ones; 5 agents place at most 250 each
MAX_IDENT = 255
# Of hosts that blue watches: whether there is one, its four decoys, steps since three actions.
NUM_WATCHED, NUM_SHOWN = HOSTS_PER_SUBNET * sum(map(len, BLUE_SUBNETS)), 1 + NUM_DECOYS + 3
MAX_EVENTS = 512  # per step, where events are kept; a scan has one per listening process
# bits of `overflow`
SESSIONS_FULL, MEMORY_FULL, OFFERED_FULL, SUSPICIOUS_FULL = (1 << bit for bit in range(4))
VSFTPD_FULL, IDENT_FULL, PID_FULL, EVENTS_FULL = (1 << bit for bit in range(4, 8))
_CAPACITIES = (
    "red sessions, port memory, session ids on offer, suspicious ids, old vsftpd processes, "
    "session id, process id, events of a step"
)
OVERFLOW_NAMES = tuple(_CAPACITIES.split(", "))

# --- sites of draws (TRACES, tape_site) ---
# int64, because Numba would compile a function anew for each plain int argument.
(
    GREEN_ACTION, FSM_STATE, FSM_HOST, FSM_SERVER, FSM_ACTION, FSM_SUBNET, FSM_SESSION, DECOY_TYPE,
    PID, WORK_SERVICE, WORK_RELIABILITY, WORK_ALARM, WORK_PHISH, PHISH_AGENT, ACCESS_DEST,
    ACCESS_ALARM, SCAN_DETECT, DECEPTION_HIT_SITE, DECEPTION_FALSE_SITE, EXPLOIT_CHOICE,
    EXPLOIT_TOP, SSH_HOP, EXPLOIT_SUCCESS, EXPLOIT_DETECT, ESCALATE_SESSION, NEW_PRIMARY, PORT,
) = map(np.int64, range(27))  # fmt: skip
_SITES = (
    "green_action fsm_state fsm_host fsm_server fsm_action fsm_subnet fsm_session decoy_type pid "
    "work_service work_reliability work_alarm work_phish phish_agent access_dest access_alarm "
    "scan_detect deception_hit deception_false exploit_choice exploit_top ssh_hop exploit_success "
    "exploit_detect pe_session new_primary port"
)
SITE_NAMES = tuple(_SITES.split())
FIRST_RED_ACTOR, FIRST_GREEN_ACTOR = 5, 11


ZONE_NAMES = (
    "restricted_zone_a_subnet", "operational_zone_a_subnet", "restricted_zone_b_subnet",
    "operational_zone_b_subnet", "contractor_network_subnet", "public_access_zone_subnet",
    "admin_network_subnet", "office_network_subnet", "internet_subnet",
)  # fmt: skip


def spec_id(hosts: np.ndarray) -> np.ndarray:
    """Return the specification's ids, int64, of hosts int64 (16 * subnet + k)."""
    return hosts // HOSTS_PER_SUBNET * 17 + 1 + hosts % HOSTS_PER_SUBNET


def host_name(host: int) -> str:
    """Return the name of a host, 16 * subnet + k."""
    subnet, k = divmod(host, HOSTS_PER_SUBNET)
    kind, number = ("user", k) if k < FIRST_SERVER else ("server", k - FIRST_SERVER)
    return f"{ZONE_NAMES[subnet]}_{kind}_host_{number}"


def action_labels(agent: int, mask: Any = None) -> list[str]:
    """Return a label for each action of a blue agent.

    Args:
        agent: 0 to 4.
        mask: bool (actions,), or longer; actions with a false entry get the prefix "[Invalid] ".
    """
    labels = []
    for index in range(NUM_ACTIONS[agent]):
        family, target = (int(ACTION_FAMILY[agent, index]), int(ACTION_TARGET[agent, index]))
        name = FAMILY_NAMES[family]
        if family in (ALLOW, BLOCK):
            source = int(ACTION_SOURCE[agent, index])
            label = f"{name}Zone {ZONE_NAMES[target]} <- {ZONE_NAMES[source]}"
        elif family in (SLEEP, MONITOR):
            label = name
        else:
            label = f"{name} {host_name(target)}"
        labels.append(label if mask is None or mask[index] else f"[Invalid] {label}")
    return labels


def observation_labels(agent: int) -> list[str]:
    """Return a label for each of the 92 or 210 values that a blue agent, 0 to 4, observes."""
    labels, zones = ["phase"], [ZONE_NAMES[zone] for zone in SORTED]
    for subnet in BLUE_SUBNETS[agent]:
        labels += [f"{ZONE_NAMES[subnet]}: zone is {zone}" for zone in zones]
        labels += [f"traffic {ZONE_NAMES[subnet]} <- {zone} is blocked" for zone in zones]
        labels += [f"policy does not link {ZONE_NAMES[subnet]} and {zone}" for zone in zones]
        hosts = [host_name(HOSTS_PER_SUBNET * subnet + place) for place in PLACES]
        for event in ("process", "connection"):
            labels += [f"{event} event on {host}" for host in hosts]
    senders = [sender for sender in range(NUM_BLUE) if sender != agent]
    return labels + [f"bit {k} from blue_agent_{s}" for s in senders for k in range(MESSAGE_BITS)]
