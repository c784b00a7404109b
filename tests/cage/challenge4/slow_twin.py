"""CAGE Challenge 4 once more, slowly and in plain words: lists, sets, dicts; one game.

Written from the specification alone and sharing nothing with `vecenv.cage`, to compare it with.
Hosts are numbered as there: 17 * subnet + slot, slot 0 a router, 1 to 10 users, 11 to 16 servers,
and 136 the internet. `draw(site, actor, n)` gives every draw, with the numbers of TRACES: from a
recorded tape, or `Chance`, which draws by the laws of the specification and writes a tape.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

RZA, OZA, RZB, OZB, CON, PUB, ADM, OFF, INT = range(9)
ALPHABETICAL = [ADM, CON, INT, OFF, OZA, OZB, PUB, RZA, RZB]
ZONES_OF_BLUE = [[RZA], [OZA], [RZB], [OZB], [ADM, OFF, PUB]]
RED_OF = {CON: 0, RZA: 1, OZA: 2, RZB: 3, OZB: 4, PUB: 5, ADM: 5, OFF: 5}
UPLINK = {OZA: RZA, OZB: RZB, ADM: PUB, OFF: PUB, RZA: INT, RZB: INT, CON: INT, PUB: INT}
NO_BLUE = (CON, INT)
SLOTS = [*range(11, 17), *range(1, 11)]  # in vectors and lists of actions: servers first

SLEEP, MONITOR, ANALYSE, REMOVE, RESTORE, ALLOW, BLOCK, DECOY = range(8)
BLUE_TICKS = [1, 1, 2, 3, 5, 1, 1, 2]
DISCOVER, AGGRESSIVE, STEALTH, DECEPTION, EXPLOIT, ESCALATE, IMPACT, DEGRADE = range(8)
RED_TICKS = [1, 1, 3, 2, 4, 2, 2, 2]
INACTIVE, BUSY, NOTHING = 254, 255, 255
APACHE, TOMCAT, HARAKA, VSFTPD = range(4)
PORT_OF_DECOY = [80, 443, 25, 80]
EXTRAS = ["web", "database", "mail"]
PORT_OF = {"ssh": 22, "ot": 1, "web": 80, "database": 3390, "mail": 25}
PORT_BITS = {22: 1, 80: 2, 443: 4, 3390: 8, 25: 16, 1: 32}

# Sites of draws.
(
    GREEN_ACTION, FSM_STATE, FSM_HOST, FSM_SERVER, FSM_ACTION, FSM_SUBNET, FSM_SESSION, DECOY_TYPE,
    PID, WORK_SERVICE, WORK_RELIABILITY, WORK_ALARM, WORK_PHISH, PHISH_AGENT, ACCESS_DEST,
    ACCESS_ALARM, SCAN_DETECT, DECEPTION_HIT, DECEPTION_FALSE, EXPLOIT_CHOICE, EXPLOIT_TOP, SSH_HOP,
    EXPLOIT_SUCCESS, EXPLOIT_DETECT, PE_SESSION, NEW_PRIMARY,
) = range(26)  # fmt: skip

REACHED = [  # by green users of a subnet, in phases 0, 1, 2
    {
        RZA: [RZA, OZA, RZB, CON, PUB, ADM, OFF],
        OZA: [RZA, OZA],
        RZB: [RZA, RZB, OZB, CON, PUB, ADM, OFF],
        OZB: [RZB, OZB],
        CON: [RZA, RZB, CON, PUB, ADM, OFF],
    },
    {
        RZA: [RZA, PUB, ADM, OFF],
        OZA: [OZA],
        RZB: [RZB, OZB, CON, PUB, ADM, OFF],
        OZB: [RZB, OZB],
        CON: [RZB, CON, PUB, ADM, OFF],
    },
    {
        RZA: [RZA, OZA, CON, PUB, ADM, OFF],
        OZA: [RZA, OZA],
        RZB: [RZB, PUB, ADM, OFF],
        OZB: [OZB],
        CON: [RZA, CON, PUB, ADM, OFF],
    },
]
for _phase in REACHED:
    _phase.update({zone: [RZA, RZB, CON, zone] for zone in (PUB, ADM, OFF)})

_REST = dict.fromkeys((PUB, ADM, OFF), (-1, -1, -3))
REWARDS = [  # failed work, failed access, Impact, in phases 0, 1, 2
    {RZA: (-1, -3, -1), OZA: (-1, -1, -1), RZB: (-1, -3, -1), OZB: (-1, -1, -1),
     CON: (0, -5, -5), INT: (0, 0, -1), **_REST},
    {RZA: (-2, -1, -3), OZA: (-10, 0, -10), RZB: (-1, -1, -1), OZB: (-1, -1, -1),
     CON: (0, 0, 0), INT: (0, 0, 0), **_REST},
    {RZA: (-1, -3, -3), OZA: (-1, -1, -1), RZB: (-2, -1, -3), OZB: (-10, 0, -10),
     CON: (0, 0, 0), INT: (0, 0, 0), **_REST},
]  # fmt: skip

K, KD, S, SD, U, UD, R, RD, F = range(1, 10)
AFTER = {  # a success on a host in a state
    DISCOVER: {K: KD, KD: KD, S: SD, SD: SD, U: UD, UD: UD, R: RD, RD: RD, F: F},
    AGGRESSIVE: {K: S, KD: SD},
    STEALTH: {K: S, KD: SD},
    DECEPTION: {S: S, SD: SD},
    EXPLOIT: {S: U, SD: UD},
    ESCALATE: {U: R, UD: RD},
    IMPACT: {R: R, RD: RD},
    DEGRADE: {R: R, RD: RD},
}
WITHDRAW = 8
CHOICES = {  # of actions in a state, in the order of the cells that are filled
    "fsm": {
        K: [(DISCOVER, 0.5), (AGGRESSIVE, 0.25), (STEALTH, 0.25)],
        KD: [(AGGRESSIVE, 0.5), (STEALTH, 0.5)],
        S: [(DISCOVER, 0.25), (EXPLOIT, 0.5), (DECEPTION, 0.25)],
        SD: [(EXPLOIT, 0.75), (DECEPTION, 0.25)],
        U: [(DISCOVER, 0.5), (ESCALATE, 0.5), (WITHDRAW, 0)],
        UD: [(ESCALATE, 1), (WITHDRAW, 0)],
        R: [(DISCOVER, 0.5), (DEGRADE, 0.25), (IMPACT, 0.25), (WITHDRAW, 0)],
        RD: [(DEGRADE, 0.5), (IMPACT, 0.5), (WITHDRAW, 0)],
    },
    "discovery": {
        K: [(DISCOVER, 0.25), (AGGRESSIVE, 0.75), (STEALTH, 0)],
        KD: [(AGGRESSIVE, 1), (STEALTH, 0)],
        S: [(DISCOVER, 0.25), (EXPLOIT, 0.75), (DECEPTION, 0)],
        SD: [(EXPLOIT, 1), (DECEPTION, 0)],
        U: [(DISCOVER, 0), (ESCALATE, 1), (WITHDRAW, 0)],
        UD: [(ESCALATE, 1), (WITHDRAW, 0)],
        R: [(DISCOVER, 1), (DEGRADE, 0), (IMPACT, 0), (WITHDRAW, 0)],
        RD: [(DEGRADE, 0.5), (IMPACT, 0.5), (WITHDRAW, 0)],
    },
}
STATE_WEIGHTS = {K: 20, KD: 20, S: 20, SD: 20, U: 10, UD: 10, R: 0, RD: 0}
REVEALS = {
    CON: [RZA, RZB, PUB], RZA: [OZA, CON], OZA: [RZA], RZB: [OZB, CON], OZB: [RZB],
    PUB: [CON, ADM, OFF], ADM: [PUB], OFF: [PUB],
}  # fmt: skip


@dataclass
class Network:
    """What is drawn at a reset: services of each host that is there, in drawn order."""

    users: list[int]  # of subnets 0 to 7
    servers: list[int]
    extras: dict[int, list[str]]
    start: int
    known: list[set[int]]  # subnets that each red agent knows

    @property
    def hosts(self) -> list[int]:
        """Users and servers, in host order."""
        return [
            17 * zone + slot
            for zone in range(8)
            for slot in (*range(1, 1 + self.users[zone]), *range(11, 11 + self.servers[zone]))
        ]


def draw_network(rng: random.Random) -> Network:
    """Draw a network."""
    users = [rng.randint(3, 10) for _ in range(8)]
    servers = [rng.randint(1, 6) for _ in range(8)]
    network = Network(users, servers, {}, 0, [])
    network.extras = {host: rng.sample(EXTRAS, rng.randint(0, 3)) for host in network.hosts}
    network.start = rng.choice([host for host in network.hosts if host // 17 == CON])
    network.known = [{CON}, {RZA}, {OZA}, {RZB}, {OZB}, {rng.choice([PUB, ADM, OFF])}]
    return network


class Chance:
    """Draws by the laws of the specification; `tape` has them: (site, actor, n, value)."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.tape = rng, []

    def __call__(self, site, actor, n, among=None):
        """Draw; `among` are the decoys to choose from, or weights of the choices."""
        if n == 0:
            value = self.rng.randrange(1 << 24) / (1 << 24)  # a float32
        elif site == PID:
            value = self.rng.randint(1, 9)
        elif site == DECOY_TYPE:
            value = self.rng.choice(among)
        elif among is not None and sum(among):
            (value,) = self.rng.choices(range(n), among)
        else:
            value = self.rng.randrange(n)
        self.tape.append((site, actor, n, value))
        return value


@dataclass(eq=False)
class Session:
    """Of a red agent; `kind` is 4 for an abstract one, 8 for an SSH shell, 16 for a reverse one."""

    ident: int
    host: int
    pid: int
    kind: int = 4
    is_privileged: bool = False
    ports: dict[int, set[int]] = field(default_factory=dict)

    @property
    def is_abstract(self) -> bool:
        return self.kind == 4


@dataclass(eq=False)
class Decoy:
    """A process of a decoy."""

    what: int
    pid: int


class Host:
    """A user's host or a server."""

    def __init__(self, number: int, extras: list[str]) -> None:
        self.number, self.zone = number, number // 17
        self.is_user = number % 17 < 11
        self.services = ["ssh", *(["ot"] if self.zone in (OZA, OZB) else []), *extras]
        self.suspicious: list[int] = []
        self.restore()

    def restore(self) -> None:
        self.level, self.has_ot_running = 100, "ot" in self.services
        self.processes: list[Session | Decoy] = []  # of red and decoys, in order of creation
        self.decoys: dict[int, list] = {}  # services: [process, level]

    @property
    def running(self) -> list[str]:
        return [name for name in self.services if name != "ot" or self.has_ot_running]

    @property
    def max_pid(self) -> int:
        return max([0, *(process.pid for process in self.processes)])

    @property
    def decoy_processes(self) -> list[Decoy]:
        return [process for process in self.processes if isinstance(process, Decoy)]

    @property
    def open_ports(self) -> set[int]:
        ports = {PORT_OF[name] for name in self.running}
        return ports | {PORT_OF_DECOY[process.what] for process in self.decoy_processes}

    def possible_decoys(self) -> list[int]:
        ports = self.open_ports
        return [d for d in range(4) if d == VSFTPD or PORT_OF_DECOY[d] not in ports]


class Red:
    """A red agent: what it has, and what it believes."""

    def __init__(self, number: int, known: set[int]) -> None:
        self.number, self.known = number, set(known)
        self.sessions: list[Session] = []
        self.offered: list[int] = []
        self.table: dict[int, int] = {}  # host: state, in order of discovery
        self.named: set[int] = set()
        self.seen: list[tuple[int, bool]] = []  # in the last step: host, whether with its name
        self.result: tuple[int, int, bool] | None = None  # of the last step: action, target
        self.action: tuple[int, int, int] | None = None  # in progress: action, target, session
        self.ticks = 0
        self.is_active = self.has_been_called = False

    def owns(self, host: int) -> bool:
        return RED_OF[host // 17] == self.number

    def session(self, ident: int) -> Session | None:
        return next((one for one in self.sessions if one.ident == ident), None)

    def on(self, host: int) -> list[Session]:
        return [one for one in self.sessions if one.host == host]

    def new_ident(self) -> int:
        return 1 + max((one.ident for one in self.sessions), default=-1)

    def offer(self, idents: list[int]) -> None:
        self.offered += [i for i in dict.fromkeys(idents) if i not in self.offered]


def route(source: int, target: int) -> list[int]:
    """Return all nodes on the way, both ends too."""

    def upwards(host: int) -> list[int]:
        zone, nodes = host // 17, [host]
        while zone != INT:
            nodes.append(17 * zone)
            zone = UPLINK[zone]
        return [*nodes, 136]

    if source == target:
        return [source]
    there, back = upwards(source), upwards(target)
    meeting = next(node for node in there if node in back)
    return there[: there.index(meeting) + 1] + back[: back.index(meeting)][::-1]


def blue_actions(agent: int) -> list[tuple[int, int, int]]:
    """Return family, host or `to`, and `from` of each action."""
    zones = ZONES_OF_BLUE[agent]
    hosts = [17 * zone + slot for zone in zones for slot in SLOTS]
    pairs = [(to, other) for to in zones for other in ALPHABETICAL if other != to]
    return [
        *((ANALYSE, host, 0) for host in hosts),
        (MONITOR, 0, 0),
        *((REMOVE, host, 0) for host in hosts),
        *((RESTORE, host, 0) for host in hosts),
        (SLEEP, 0, 0),
        *((ALLOW, *pair) for pair in pairs),
        *((BLOCK, *pair) for pair in pairs),
        *((DECOY, host, 0) for host in hosts),
    ]


ACTIONS = [blue_actions(agent) for agent in range(5)]


def are_linked(a: int, b: int, phase: int) -> bool:
    """Return whether the policy that blue observes links two subnets."""
    pair = {a, b}
    if len(pair) == 1:
        return False
    cut = {1: (RZA, [OZA, CON, RZB, INT]), 2: (RZB, [OZB, CON, RZA, INT])}
    if phase in cut and cut[phase][0] in pair and (pair & set(cut[phase][1])):
        return False
    return pair in ({RZA, OZA}, {RZB, OZB}) or pair <= {INT, ADM, OFF, PUB, CON, RZA, RZB}


class SlowCage4:
    """One game.

    Args:
        network: Where it is played.
        draw: `draw(site, actor, n, among)`; see `Chance`.
        steps: Length of the episode, and one more.
        red: "fsm" or "discovery".
        phishing: Rate of phishing.
    """

    def __init__(self, network, draw, *, steps=500, red="fsm", phishing=0.01):
        self.network, self.draw, self.steps, self.variant = network, draw, steps, red
        self.phishing, self.t, self.phase = phishing, 0, 0
        self.hosts = {number: Host(number, network.extras[number]) for number in network.hosts}
        self.greens = [number for number in self.hosts if number % 17 < 11]
        self.blocks: set[tuple[int, int]] = set()  # (to, from)
        self.reds = [Red(number, network.known[number]) for number in range(6)]
        self.blues: list[list] = [[None, 0] for _ in range(5)]  # action in progress, ticks left
        self.process_events: set[int] = set()
        self.connection_events: set[int] = set()
        self.messages = [0] * 5
        first = self.reds[0]
        self._open(first, network.start, 4, 0)
        first.offered, first.seen, first.is_active = [0], [(network.start, True)], True
        self.logs = {"fsm_log": [], "scan_log": [], "sus_log": [], "space_log": [(-1, 0, 0)]}

    # --- a step ---

    def step(self, actions, messages=(0,) * 5):
        """Play a step; return what it was, as TRACES names it."""
        sizes = [-(-(self.steps - k) // 3) for k in range(3)]
        self.phase = 0 if self.t < sizes[0] else 1 if self.t < sizes[0] + sizes[1] else 2
        self.process_events, self.connection_events = set(), set()
        self.alarms: list[tuple[int, int]] = []  # process events with an id: host, id
        self.handed: list[tuple[int, int]] = []  # exploit sessions: agent, id
        self.parts, self.fails = [0, 0, 0, 0], [[0] * 9 for _ in range(3)]
        self.exploits = [-1] * 6
        chosen = [self._submitted(agent, actions[agent]) for agent in range(5)]
        wishes = [self.draw(GREEN_ACTION, 11 + number, 3) for number in range(len(self.greens))]
        found = self._red_turn()
        due_blue = self._blue_turn(chosen)
        due_red = [self._tick(red) for red in self.reds]
        is_dropped = [
            due is not None and red.session(due[2]) is None
            for red, due in zip(self.reds, due_red, strict=True)
        ]
        found["blue_success"] = self._blue_effects(due_blue)
        greens = {}
        for number, host in enumerate(self.greens):
            greens[host] = self._green(11 + number, self.hosts[host], wishes[number])
        success = [NOTHING] * 6
        for red, due in zip(self.reds, due_red, strict=True):
            if due is not None:
                success[red.number] = 4 if is_dropped[red.number] else self._act(red, *due)
        self._reassign()
        self._end_of_turn()
        self.t += 1
        for red, due in zip(self.reds, due_red, strict=True):
            if due is not None and due[0] == IMPACT and red.is_active:
                self._pay(2, due[1] // 17)
        self.messages = list(messages)
        return found | {
            "reward": sum(self.parts),
            "reward_parts": self.parts,
            "fail_counts": self.fails,
            "phase": self.phase,
            "blue_family": [blue[0][0] for blue in self.blues],
            "blue_left": [blue[1] for blue in self.blues],
            "green": greens,
            "red_busy": [red.action[0] if red.ticks else NOTHING for red in self.reds],
            "red_left": [red.ticks for red in self.reds],
            "red_done": [NOTHING if due is None else due[0] for due in due_red],
            "red_done_target": [NOTHING if due is None else due[1] for due in due_red],
            "red_success": success,
            "red_exploit": self.exploits,
            "red_active": [int(red.is_active) for red in self.reds],
            "known_subnets": [sum(1 << zone for zone in red.known) for red in self.reds],
            "blocks": [sum(1 << b for a, b in self.blocks if a == to) for to in range(9)],
        }

    def _red_turn(self):
        """Let red choose; return what it chose, and its tables."""
        found = {"red_choice": [], "red_target": [], "red_session": []}
        for red in self.reds:
            choice = (INACTIVE, NOTHING, NOTHING)
            if red.is_active:
                self._digest(red)
                choice = (BUSY, NOTHING, NOTHING) if red.ticks else self._choose(red)
            for name, value in zip(found, choice, strict=True):
                found[name].append(value)
            if choice[0] < INACTIVE:
                red.action, red.ticks = choice, RED_TICKS[choice[0]]
        found["fsm"] = [
            {h: s + 16 * (h in red.named) for h, s in red.table.items()} for red in self.reds
        ]
        return found

    def _tick(self, red):
        """Return the action that takes effect in this step."""
        red.seen, red.result = [], None
        if not red.ticks:
            return None
        red.ticks -= 1
        return None if red.ticks else red.action

    # --- blue ---

    def _submitted(self, agent, index):
        action = ACTIONS[agent][index]
        has_host = action[0] in (ANALYSE, REMOVE, RESTORE, DECOY)
        if has_host and action[1] not in self.hosts:
            return (SLEEP, 0, 0)
        if action[0] == RESTORE:
            self.parts[3] -= 1
        return action

    def _blue_turn(self, chosen):
        for blue, action in zip(self.blues, chosen, strict=True):
            if not blue[1]:
                blue[:] = [action, BLUE_TICKS[action[0]]]
            blue[1] -= 1
        return [None if left else action for action, left in self.blues]

    def _blue_effects(self, due):
        success = [3 if action is None else 1 for action in due]
        for agent, action in enumerate(due):
            if action is None or action[0] == SLEEP:
                success[agent] = 3 if action is None else 2
            elif action[0] in (ALLOW, BLOCK):
                pair = action[1:]
                success[agent] = int((pair in self.blocks) == (action[0] == ALLOW))
                if action[0] == BLOCK:
                    self.blocks.add(pair)
                else:
                    self.blocks.discard(pair)
        for agent, action in enumerate(due):
            if action is not None and action[0] in (REMOVE, RESTORE, DECOY):
                host = self.hosts[action[1]]
                if action[0] == REMOVE:
                    self._remove(agent, host)
                elif action[0] == RESTORE:
                    for process in host.processes:
                        if isinstance(process, Session):
                            self._forget(process)
                    host.restore()
                else:
                    possible = host.possible_decoys()
                    what = self.draw(DECOY_TYPE, agent, len(possible), possible)
                    process = Decoy(what, self._new_pid(host, agent))
                    host.processes.append(process)
                    host.decoys[what] = [process, 100]
        return success

    def _remove(self, agent, host):
        for pid in host.suspicious:
            process = next((one for one in host.processes if one.pid == pid), None)
            if isinstance(process, Session) and not process.is_privileged:
                host.processes.remove(process)
                self._forget(process)
            elif isinstance(process, Decoy):
                host.processes.remove(process)
                service = host.decoys[process.what]
                if service[0] is process:
                    service[0] = Decoy(process.what, self._new_pid(host, agent))
                    host.processes.append(service[0])

    def _forget(self, session):
        for red in self.reds:
            if session in red.sessions:
                red.sessions.remove(session)

    def _new_pid(self, host, actor):
        return host.max_pid + self.draw(PID, actor, 9)

    # --- green ---

    def _green(self, actor, host, wish):
        if wish == 2:
            return 1
        if wish == 1:
            services = [host.level] * len(host.running) + [s[1] for s in host.decoys.values()]
            level = services[self.draw(WORK_SERVICE, actor, len(services))]
            if self.draw(WORK_RELIABILITY, actor, 100) >= level:
                self._pay(0, host.zone)
                return 3
            if self.draw(WORK_ALARM, actor, 0) < 0.01:
                self.process_events.add(host.number)
            if self.draw(WORK_PHISH, actor, 0) < self.phishing:
                self._phish(actor, host)
            return 2
        zones = REACHED[self.phase][host.zone]
        servers = [h for h in self.hosts if h // 17 in zones and h % 17 >= 11 and h != host.number]
        target = servers[self.draw(ACCESS_DEST, actor, len(servers))]
        zone = target // 17
        if (host.zone, zone) in self.blocks or (zone, host.zone) in self.blocks:
            self._pay(1, host.zone)
            self.connection_events.add(target)
            return 5
        if self.draw(ACCESS_ALARM, actor, 0) < 0.01:
            self.connection_events.add(target)
        return 4

    def _pay(self, what, zone):
        self.fails[what][zone] += 1
        self.parts[what] += REWARDS[self.phase][zone][what]

    def _phish(self, actor, host):
        pairs = sorted({(one.host, red.number) for red in self.reds for one in red.sessions})
        if not pairs or any(number == host.number for number, _ in pairs):
            return
        if near := [number for number, _ in pairs if number // 17 == host.zone]:
            agent = min(a for number, a in pairs if number == near[-1])
        else:
            agent = pairs[self.draw(PHISH_AGENT, actor, len(pairs))][1]
        self._open(self.reds[agent], host.number, 4, self._new_pid(host, actor))

    def _open(self, red, number, kind, pid):
        session = Session(red.new_ident(), number, pid, kind)
        red.sessions.append(session)
        self.hosts[number].processes.append(session)
        return session

    # --- red acts ---

    def _act(self, red, action, target, ident):
        """Let an action take effect; return 1 if it succeeds, else 0."""
        is_success = self._takes_effect(red, action, target, ident)
        red.result = (action, target, is_success)
        return int(is_success)

    def _takes_effect(self, red, action, target, ident):
        given = red.session(ident)
        if action == DISCOVER:
            if given is None:
                return False
            red.seen += [(h, False) for h in self.hosts if h // 17 == target]
            return True
        host = self.hosts[target]
        if action in (AGGRESSIVE, STEALTH):
            return self._scan(red, given, host, 0.75 if action == AGGRESSIVE else 0.25)
        if action == DECEPTION:
            return self._probe(red, given, host)
        if action == EXPLOIT:
            return self._exploit(red, given, host)
        if action == ESCALATE:
            return self._escalate(red, given, host)
        if not any(one.is_privileged for one in red.on(target)):
            return False
        if action == DEGRADE:
            host.level = max(0, host.level - 20)
            for service in host.decoys.values():
                service[1] = max(0, service[1] - 20)
            return True
        if not host.has_ot_running or given is None:
            return False
        host.has_ot_running = False
        return True

    def _is_blocked(self, session, host):
        return (host.zone, session.host // 17) in self.blocks

    def _scan(self, red, given, host, chance):
        if given is None or not given.is_abstract or self._is_blocked(given, host):
            return False
        is_noticed = self.draw(SCAN_DETECT, 5 + red.number, 0) <= chance
        given.ports[host.number] = ports = host.open_ports
        bits = sum(PORT_BITS[port] for port in ports)
        self.logs["scan_log"].append((self.t, red.number, given.ident, host.number, bits))
        if is_noticed or host.decoy_processes:
            self.connection_events.add(host.number)
        red.seen.append((host.number, False))
        return True

    def _probe(self, red, given, host):
        if given is None:
            return False
        others = len(host.running) + (host.zone not in NO_BLUE) + host.is_user
        is_noticed = False
        for process in [None] * others + host.processes:
            is_decoy = isinstance(process, Decoy)
            is_hit = self.draw(DECEPTION_HIT, 5 + red.number, 0) <= 0.5 and is_decoy
            if not is_hit:
                is_hit = self.draw(DECEPTION_FALSE, 5 + red.number, 0) <= 0.1 and not is_decoy
            is_noticed |= is_hit
        if is_noticed:
            red.seen.append((host.number, True))
        return True

    def _exploit(self, red, given, host):
        actor, number = 5 + red.number, host.number
        if given is None or not given.is_abstract or number not in given.ports:
            return False
        if self._is_blocked(given, host):
            return False
        ports = given.ports[number]
        is_web = 80 in ports or 443 in ports
        options = [
            (0, 3, 80 in ports),
            (1, 4, 443 in ports),
            (2, 0.1, 22 in ports),
            (3, 5, 3390 in ports and is_web),
            (4, 6, 25 in ports),
        ]
        options = [(what, weight) for what, weight, is_there in options if is_there]
        what = options[0][0]
        if len(options) > 1:
            options.remove(max(options, key=lambda option: option[1]))
            what = options[self.draw(EXPLOIT_CHOICE, actor, len(options))][0]
            self.draw(EXPLOIT_TOP, actor, 0)
        self.exploits[red.number] = what
        if what == 2:
            for node in route(given.host, number):
                if self.draw(SSH_HOP, actor, 0) > 0.05:
                    self.connection_events.add(node)
            self.connection_events.add(number)
            session = self._open(red, number, 8, self._new_pid(host, actor))
            self._alarm(session)
        elif what == 3:
            self.draw(EXPLOIT_SUCCESS, actor, 0)
            session = self._open(red, number, 16, self._new_pid(host, actor))
            if self.draw(EXPLOIT_DETECT, actor, 0) > 0.05:
                self._alarm(session)
        else:
            genuine = {0: "web", 4: "mail"}.get(what)
            lures = {0: {APACHE, VSFTPD}, 1: {TOMCAT}, 4: {HARAKA}}[what]
            if genuine not in host.services and lures & set(host.decoys):
                self.draw(EXPLOIT_SUCCESS, actor, 0)
                self.connection_events.add(number)
            return False
        red.seen += [(number, True), (given.host, False)]
        return True

    def _alarm(self, session):
        self.process_events.add(session.host)
        self.alarms.append((session.host, session.pid))

    def _escalate(self, red, given, host):
        there = red.on(host.number)
        if not there:
            return False
        if not any(one.is_privileged for one in there):
            chosen = there[self.draw(PE_SESSION, 5 + red.number, len(there))]
            if given is None or not given.is_abstract:
                return False
            chosen.is_privileged = True
        red.seen.append((host.number, True))
        if given is not None and host.number % 17 == 11:
            red.seen += [(17 * zone + 11, True) for zone in sorted(REVEALS[host.zone])]
        return True

    # --- the end of a turn ---

    def _reassign(self):
        moves = [(r, one) for r in self.reds for one in r.sessions if not r.owns(one.host)]
        for red, old in moves:
            red.sessions.remove(old)
            owner = self.reds[RED_OF[old.host // 17]]
            new = Session(owner.new_ident(), old.host, old.pid, 4, old.is_privileged)
            owner.sessions.append(new)
            processes = self.hosts[old.host].processes
            processes[processes.index(old)] = new
            if not old.is_abstract:
                owner.seen.append((old.host, True))
                self.handed.append((owner.number, new.ident))
        for red in self.reds:
            red.is_active = bool(red.sessions)

    def _end_of_turn(self):
        for host, pid in self.alarms:
            if host // 17 not in NO_BLUE:
                self.hosts[host].suspicious.append(pid)
                self.logs["sus_log"].append((self.t, host, pid))
        for red in self.reds:
            if not red.is_active:
                continue
            if red.session(0) is None:
                chosen = self.draw(NEW_PRIMARY, 5 + red.number, len(red.sessions))
                session = red.sessions.pop(chosen)
                session.ident = 0
                red.sessions.append(session)
            red.seen += [(one.host, True) for one in red.sessions]
            red.known |= {one.host // 17 for one in red.sessions}
            by_host: dict[int, list[int]] = {}
            for one in red.sessions:
                by_host.setdefault(one.host, []).extend([one.ident] * one.is_abstract)
            before = len(red.offered)
            red.offer([ident for agent, ident in self.handed if agent == red.number])
            red.offer([ident for idents in by_host.values() for ident in idents])
            new = red.offered[before:]
            self.logs["space_log"] += [(self.t, red.number, ident) for ident in new]

    # --- red chooses ---

    def _digest(self, red):
        if red.result is not None:
            action, target, is_success = red.result
            hosts = [target] if action != DISCOVER else [h for h in red.table if h // 17 == target]
            for host in hosts:
                state = red.table[host]
                if is_success and state in AFTER[action]:
                    state = AFTER[action][state]
                    red.table[host] = F if state == U and not red.owns(host) else state
        for host, has_name in red.seen:
            if host not in red.table:
                red.table[host] = K if red.has_been_called else U
                self.logs["fsm_log"].append((self.t, red.number, host))
            if has_name:
                red.named.add(host)
        red.has_been_called = True
        for host, state in red.table.items():
            if state in (U, UD, R, RD) and not red.on(host):
                red.table[host] = KD

    def _choose(self, red):
        actor = 5 + red.number
        hosts = [host for host, state in red.table.items() if state != F]
        if self.variant == "discovery":
            states = list(dict.fromkeys(red.table[host] for host in hosts))
            weights = [STATE_WEIGHTS[state] for state in states]
            state = states[self.draw(FSM_STATE, actor, len(states), weights)]
            hosts = [host for host in hosts if red.table[host] == state]
            servers = [host for host in hosts if host in red.named and host % 17 >= 11]
            if len(hosts) > 1 and servers:
                others = [host for host in hosts if host not in servers]
                is_server = self.draw(FSM_SERVER, actor, 0) <= 0.75
                hosts = servers if is_server or not others else others
        target = hosts[self.draw(FSM_HOST, actor, len(hosts))]
        cells = CHOICES[self.variant][red.table[target]]
        action = cells[self.draw(FSM_ACTION, actor, len(cells), [c for _, c in cells])][0]
        if action == DISCOVER:
            zones = sorted(red.known)
            target = zones[self.draw(FSM_SUBNET, actor, len(zones))]
        ident = red.offered[self.draw(FSM_SESSION, actor, len(red.offered))]
        return action, target, ident

    # --- what is seen ---

    def observe(self, agent):
        """Return the vector of a blue agent."""
        found = [self.phase]
        for zone in ZONES_OF_BLUE[agent]:
            found += [int(other == zone) for other in ALPHABETICAL]
            found += [int((zone, other) in self.blocks) for other in ALPHABETICAL]
            found += [int(not are_linked(zone, other, self.phase)) for other in ALPHABETICAL]
            for events in (self.process_events, self.connection_events):
                found += [int(17 * zone + slot in events) for slot in SLOTS]
        for sender in range(5):
            if sender != agent:
                found += [self.messages[sender] >> bit & 1 for bit in range(8)]
        return found

    def mask(self, agent):
        """Return which actions a blue agent has."""
        with_host = (ANALYSE, REMOVE, RESTORE, DECOY)
        return [int(f not in with_host or h in self.hosts) for f, h, _ in ACTIONS[agent]]

    def sessions(self):
        """Return rows of all sessions: agent, id, host, flags, process id."""
        return [
            (red.number, one.ident, one.host, one.is_abstract + 2 * one.is_privileged + one.kind,
             one.pid)
            for red in self.reds
            for one in red.sessions
        ]  # fmt: skip

    def services(self, number):
        """Return a host's word of services, decoys, vsftpd processes and largest id."""
        host = self.hosts[number]
        word = host.level // 20 + 8 * host.has_ot_running
        for what, (_, level) in host.decoys.items():
            word += level // 20 << 4 + 3 * what
        stack = sum(process.what == VSFTPD for process in host.decoy_processes)
        return word, sum(1 << what for what in host.decoys), stack, host.max_pid
