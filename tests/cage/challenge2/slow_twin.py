"""CAGE Challenge 2 once more, slowly and in plain words: names, lists, sets; one episode.

Written from the rules alone and sharing nothing with `vecenv.cage`, to compare it with.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

DEFENDER, SERVER, FOOTHOLD = "Defender", "Op_Server0", "User0"
SUBNETS = {
    "Enterprise": ["Defender", "Enterprise0", "Enterprise1", "Enterprise2"],
    "Operational": ["Op_Host0", "Op_Host1", "Op_Host2", "Op_Server0"],
    "User": ["User0", "User1", "User2", "User3", "User4"],
}
HOSTS = [host for hosts in SUBNETS.values() for host in hosts]
SUBNET_OF = {host: subnet for subnet, hosts in SUBNETS.items() for host in hosts}
WINDOWS = {"Enterprise1", "Enterprise2", "User0", "User1", "User2"}
SERVERS = ["Enterprise0", "Enterprise1", "Enterprise2"]
VALUE10 = dict.fromkeys(HOSTS, 1) | dict.fromkeys([*SERVERS, SERVER], 10) | {"User0": 0}
PORTS = {host: [22] for host in HOSTS} | {
    "Defender": [22, 53, 53, 68],
    "Enterprise1": [22, 135, 3389, 445, 139, 80, 443],
    "Enterprise2": [22, 135, 3389, 445, 139, 80, 443],
    "User0": [22, 21],
    "User1": [22, 21],
    "User2": [445, 139, 135, 3389],
    "User3": [80, 3389, 443, 25],
    "User4": [22, 80, 3390, 443, 25],
}
LEADS_TO = {
    "Enterprise2": "Op_Server0",
    "User1": "Enterprise1",
    "User2": "Enterprise1",
    "User3": "Enterprise0",
    "User4": "Enterprise0",
}
# exploit: (port, result by host): P privileged shell, u user shell, s SSH session, x always fails
EXPLOITS = ["FTP", "Haraka", "SQL", "HTTPS", "HTTP", "EternalBlue", "BlueKeep", "SSH"]
EXPLOIT_PORT = dict(zip(EXPLOITS, [21, 25, 3390, 443, 80, 139, 3389, 22], strict=True))
RESULTS = {
    "FTP": {"User0": "P", "User1": "P"},
    "Haraka": {"User3": "P", "User4": "P"},
    "SQL": {"User4": "P"},
    "HTTPS": dict.fromkeys(["Enterprise1", "Enterprise2", "User3", "User4"], "u"),
    "HTTP": dict.fromkeys(["Enterprise1", "Enterprise2", "User3", "User4"], "u"),
    "EternalBlue": {"User2": "P"},
    "BlueKeep": {"Enterprise1": "P", "Enterprise2": "P", "User2": "u"},
    "SSH": {h: "s" for h in HOSTS if h not in (DEFENDER, "User2", "User3")} | {DEFENDER: "x"},
}
DECOYS = ["Apache", "Femitter", "Haraka", "Smss", "SSHD", "Svchost", "Tomcat", "Vsftpd"]
DECOY_PORT = dict(zip(DECOYS, [80, 21, 25, 139, 22, 3389, 443, 80], strict=True))
DECOY_OS = {"Femitter": "W", "Smss": "W", "Svchost": "W", "Haraka": "L", "Vsftpd": "L"}
CAUGHT = ["HTTP", "FTP", "Haraka", "EternalBlue", "SSH", "BlueKeep", "HTTPS", "HTTP"]
CATCHES = dict(zip(DECOYS, CAUGHT, strict=True))
FAMILIES = ["Analyse", "Remove", *DECOYS, "Restore"]
MEMORY_PORTS = [21, 22, 25, 80, 139, 443, 3389, 3390]
NO, YES, UNKNOWN = 0, 1, 2


@dataclass
class Event:
    """A network event on a host."""

    local_port: object
    is_shell: bool = False


@dataclass
class SlowCage:
    """One episode; `step` it with everything given."""

    debugged: bool = False
    sessions: dict = field(default_factory=lambda: {h: [] for h in HOSTS})
    decoys: dict = field(default_factory=lambda: {h: [] for h in HOSTS})
    malware: set = field(default_factory=set)
    memory: dict = field(default_factory=dict)  # host -> ports red saw at its last scan
    known_ip: set = field(default_factory=lambda: {FOOTHOLD})
    known_host: set = field(default_factory=lambda: {FOOTHOLD})
    known_subnet: set = field(default_factory=lambda: {"User"})
    belief: dict = field(default_factory=lambda: dict.fromkeys(HOSTS, "No"))
    shells: dict = field(default_factory=lambda: {h: [] for h in HOSTS})  # all ever detected
    ot_running: bool = True
    ot_stoppable: bool = True
    ot_known: bool = False
    red_success: int = UNKNOWN
    blue_success: int = UNKNOWN
    scan_was_empty: bool = False
    obs: list = field(default_factory=lambda: [0] * 52)
    reward10: int = 0

    def __post_init__(self):
        self.sessions[FOOTHOLD] = [{"kind": "P", "primary": True}]
        self.ports = {h: list(ports) for h, ports in PORTS.items()}
        self.results = {e: dict(by_host) for e, by_host in RESULTS.items()}
        self.decoy_port = dict(DECOY_PORT)
        if self.debugged:
            self.ports["User3"] = [80, 3390, 443, 25]
            self.results["SQL"]["User3"] = "P"
            self.results["EternalBlue"] |= {"Enterprise1": "P", "Enterprise2": "P"}
            self.decoy_port["Vsftpd"] = 21

    def listening(self, host):
        """Ports of all listening connections."""
        return self.ports[host] + [self.decoy_port[d] for d in self.decoys[host]]

    def step(self, blue_action, red_type, red_target, exploit, detected, pe_index, green=-1):
        """Outcomes: number of the exploit, 0 or 1, number of the session; green's host or -1."""
        self.events = {h: [] for h in HOSTS}
        placed, found, cost10 = self.blue_turn(blue_action)
        if green >= 0:
            host = HOSTS[green]
            self.events[host] += [Event(port) for port in self.listening(host)]
        self.red_success = self.red_turn(red_type, red_target, exploit, detected, pe_index)
        self.reward10 = self.reward() - cost10
        self.look(blue_action, placed, found)

    # ---- blue

    def blue_turn(self, action):
        placed, found, cost10 = None, None, 0
        self.blue_success = YES
        if action < 2:
            self.blue_success = UNKNOWN if action == 0 else YES
            return placed, found, cost10
        family, host = FAMILIES[(action - 2) // 13], HOSTS[(action - 2) % 13]
        if family == "Analyse":
            found = host if host in self.malware else None
        elif family == "Remove":
            if self.debugged:
                last = self.shells[host][-1] if self.shells[host] else None
                is_alive = any(session is last for session in self.sessions[host])
                self.blue_success = int(last is not None and is_alive and last["kind"] == "R")
            self.sessions[host] = [s for s in self.sessions[host] if s["kind"] != "R"]
        elif family == "Restore":
            cost10 = 10
            self.sessions[host] = [s for s in self.sessions[host] if s.get("primary")]
            self.decoys[host] = []
            self.malware.discard(host)
            if host == SERVER:
                self.ot_running, self.ot_stoppable = True, False
        else:
            needs = DECOY_OS.get(family)
            is_windows = host in WINDOWS
            checked = 21 if family == "Vsftpd" else DECOY_PORT[family]
            fits = needs is None or needs == ("W" if is_windows else "L")
            if fits and checked not in self.listening(host):
                self.decoys[host].append(family)
                placed = host
            else:
                self.blue_success = NO
        return placed, found, cost10

    # ---- red

    def can_reach(self, subnet):
        return subnet != "Operational" or any(self.sessions[h] for h in SERVERS)

    def candidates(self, host):
        """Exploits red would try, best first."""
        if host not in self.memory:
            return []
        known = self.memory[host]
        names = [e for e in EXPLOITS if EXPLOIT_PORT[e] in known]
        if "SQL" in names and not known & {80, 443}:
            names.remove("SQL")
        return names

    def red_turn(self, red_type, target, exploit, detected, pe_index):
        if red_type == 0:
            return UNKNOWN
        if red_type == 1:
            names = list(SUBNETS)
            subnet = names[target] if 0 <= target < 3 else None
            if subnet not in self.known_subnet or not self.can_reach(subnet):
                return NO
            self.known_ip |= set(SUBNETS[subnet])
            return YES
        host = HOSTS[target] if 0 <= target < 13 else None
        if host not in (self.known_ip if red_type in (2, 3) else self.known_host):
            return NO
        if red_type == 2:
            return self.scan(host)
        if red_type == 3:
            return self.exploit(host, exploit, detected)
        if red_type == 4:
            return self.escalate(host, pe_index)
        if host != SERVER or not self.ot_known or not self.sessions[host]:
            return NO
        if self.ot_stoppable:
            self.ot_running = False
        return YES

    def scan(self, host):
        self.scan_was_empty = not self.can_reach(SUBNET_OF[host])
        if not self.scan_was_empty:
            self.memory[host] = set(self.listening(host))
            self.events[host] += [Event(port) for port in self.listening(host)]
        return YES

    def exploit(self, host, number, detected):
        if not self.candidates(host):
            return NO
        name = EXPLOITS[number]
        assert name in self.candidates(host)
        if not self.can_reach(SUBNET_OF[host]):
            return NO
        port = EXPLOIT_PORT[name]
        result = self.results[name].get(host)
        hits_decoy = result is None and any(
            CATCHES[d] == name and self.decoy_port[d] == port for d in self.decoys[host]
        )
        if result is None and not hits_decoy:
            return NO
        if name == "SSH":
            self.events[host] += [Event(22)] * 10
            if result != "s":
                return NO
            self.events[host].append(Event(22))
            self.sessions[host].append({"kind": "K"})
        elif hits_decoy:
            self.events[host] += [Event(port)] * 2
            return NO
        else:
            self.events[host].append(Event(port))
            self.malware.add(host)
            session = {"kind": "P" if result == "P" else "R" if detected else "K"}
            self.sessions[host].append(session)
            if detected:
                self.events[host].append(Event("fresh", is_shell=True))
                self.shells[host].append(session)
        self.known_host.add(host)
        return YES

    def escalate(self, host, pe_index):
        sessions = self.sessions[host]
        if not sessions:
            return NO
        if not any(s["kind"] == "P" for s in sessions):
            sessions[pe_index]["kind"] = "P"
            self.malware.add(host)
        self.known_ip.add(host)
        self.known_subnet.add(SUBNET_OF[host])
        if host in LEADS_TO:
            self.known_ip.add(LEADS_TO[host])
        self.ot_known |= host == SERVER
        return YES

    # ---- reward and table

    def reward(self):
        total = 0
        for host in HOSTS:
            kinds = [s["kind"] for s in self.sessions[host]]
            if "P" in kinds or (self.debugged and kinds):
                total += VALUE10[host]
        return -total - (0 if self.ot_running else 100)

    def activity(self, host, placed):
        events = self.events[host]
        dep = 1 if host == placed else 0
        n, f = len(events) + dep, len({e.local_port for e in events})
        is_shell = any(e.is_shell for e in events)
        if n == 0:
            return "None"
        if self.debugged and is_shell:
            return "Exploit"
        if n >= 3 and f >= 3:
            return "Scan"
        if is_shell or (n >= 3 and f == 1):
            return "Exploit"
        return "None" if dep else "Scan"

    def look(self, blue_action, placed, found):
        family, host = "", ""
        if blue_action >= 2:
            family, host = FAMILIES[(blue_action - 2) // 13], HOSTS[(blue_action - 2) % 13]
        if family == "Restore":
            self.belief[host] = "No"
        if family == "Remove" and self.belief[host] != "No":
            self.belief[host] = "Unknown"
        activities = {h: self.activity(h, placed) for h in HOSTS}
        for h, activity in activities.items():
            if activity == "Exploit":
                self.belief[h] = "User"
        if found:
            self.belief[found] = "Privileged"
        activity_bits = {"None": [0, 0], "Scan": [1, 0], "Exploit": [1, 1]}
        belief_bits = {"No": [0, 0], "Unknown": [1, 0], "User": [0, 1], "Privileged": [1, 1]}
        self.activities = activities
        self.obs = [
            bit for h in HOSTS for bit in activity_bits[activities[h]] + belief_bits[self.belief[h]]
        ]

    def true_state(self):
        """The compact fields, as lists."""
        kinds = {h: [s["kind"] for s in self.sessions[h]] for h in HOSTS}
        counts = {h: Counter(kinds[h]) for h in HOSTS}

        def level(kind):
            return 2 if kind == "P" else 1

        return {
            "access": [max(map(level, kinds[h]), default=0) for h in HOSTS],
            "table_access": [level(kinds[h][0]) if kinds[h] else 0 for h in HOSTS],
            "n_removable": [counts[h]["R"] for h in HOSTS],
            "n_stuck": [counts[h]["K"] for h in HOSTS],
            "n_priv": [counts[h]["P"] for h in HOSTS],
            "decoys": [sum(1 << DECOYS.index(d) for d in set(self.decoys[h])) for h in HOSTS],
            "n_vsftpd": [self.decoys[h].count("Vsftpd") for h in HOSTS],
            "malware": [int(h in self.malware) for h in HOSTS],
            "red_ports": [self.remembered(h) for h in HOSTS],
            "known_ip": [int(h in self.known_ip) for h in HOSTS],
            "known_host": [int(h in self.known_host) for h in HOSTS],
            "known_subnet": [int(s in self.known_subnet) for s in SUBNETS],
            "table_scanned": [int(h in self.memory) for h in HOSTS],
            "ot_running": int(self.ot_running),
            "ot_stoppable": int(self.ot_stoppable),
            "ot_known": int(self.ot_known),
        }

    def remembered(self, host):
        if host not in self.memory:
            return 0
        ports = self.memory[host]
        return 256 + sum(1 << bit for bit, port in enumerate(MEMORY_PORTS) if port in ports)


class SlowBLine:
    """Options of the scripted agent."""

    jump = (0, 1, 2, 2, 2, 2, 5, 5, 5, 5, 9, 9, 9, 12, 13)

    def __init__(self):
        self.k, self.user, self.has_done_12 = 0, None, False

    def options(self, cage):
        self.k = min(self.k + 1, 14) if cage.red_success == YES else self.jump[self.k]
        if self.k == 12 and not self.has_done_12 and cage.scan_was_empty:
            self.k = 1
        if self.k == 1 and self.user is None:
            return 2, ["User1", "User2", "User3", "User4"]
        first, next_host = self.user, LEADS_TO.get(self.user)
        script = [(1, "User"), (2, first), (3, first), (4, first)]
        script += [(2, next_host), (3, next_host), (4, next_host), (1, "Enterprise")]
        script += [(2, "Enterprise2"), (3, "Enterprise2"), (4, "Enterprise2")]
        script += [(2, SERVER), (3, SERVER), (4, SERVER), (5, SERVER)]
        red_type, target = script[self.k]
        return red_type, [target]

    def commit(self, red_type, target):
        if self.k == 1 and self.user is None:
            self.user = target
        self.has_done_12 |= self.k == 12


class SlowMeander:
    """Options of the wandering agent."""

    def __init__(self):
        self.scanned_subnets, self.scanned_ips, self.exploited = set(), set(), set()
        self.escalated, self.mapped = set(), set()
        self.last_host = self.last_ip = None

    def options(self, cage):
        if self.last_ip:
            if cage.red_success == YES:
                self.mapped.add(self.last_ip)
            else:
                self.exploited.discard(self.last_ip)
                lost = self.escalated & set(SUBNETS["Operational"])
                lost = lost or self.escalated & set(SERVERS)
                self.escalated -= lost
                self.exploited -= lost
            self.last_ip = None
        if self.last_host:
            if cage.red_success == NO:
                self.escalated.discard(self.last_host)
                if self.last_host in self.mapped:
                    self.exploited.discard(self.last_host)
            self.last_host = None
        if SERVER in self.escalated:
            return 5, [SERVER]
        for subnet in SUBNETS:
            if subnet in cage.known_subnet and subnet not in self.scanned_subnets:
                return 1, [subnet]
        if cage.known_ip - self.scanned_ips:
            return 2, list(cage.known_ip - self.scanned_ips)
        ready = {
            h
            for h in cage.known_host - self.escalated
            if h not in self.mapped or h in self.exploited
        }
        if ready:
            return 4, list(ready)
        if cage.known_ip - self.exploited:
            return 3, list(cage.known_ip - self.exploited)
        return 0, []

    def commit(self, red_type, target):
        if red_type == 1:
            self.scanned_subnets.add(target)
        elif red_type == 2:
            self.scanned_ips.add(target)
        elif red_type == 3:
            self.exploited.add(target)
            self.last_ip = target
        elif red_type == 4:
            self.escalated.add(target)
            self.last_host = target
        elif red_type == 5:
            self.last_host = target


def draw_outcomes(cage: SlowCage, red_type: int, host: str, rng: random.Random):
    """Exploit, detection and session drawn with the original's odds; -1 for what is not needed."""
    exploit = pe_index = -1
    names = cage.candidates(host) if red_type == 3 else []
    if names:
        name = names[0]
        if len(names) > 1 and rng.random() >= 0.75:
            name = rng.choice(names[1:])
        exploit = EXPLOITS.index(name)
    detected = int(rng.random() < 0.95) if red_type == 3 else -1
    if red_type == 4 and cage.sessions.get(host):
        pe_index = rng.randrange(len(cage.sessions[host]))
    return exploit, detected, pe_index
