"""Events of an agent, worked out from the dicts that it reads: what `write_events` must say."""

import numpy as np

ZONES = {
    "restricted_zone_a": 0, "operational_zone_a": 1, "restricted_zone_b": 2,
    "operational_zone_b": 3, "contractor_network": 4, "public_access_zone": 5, "admin_network": 6,
    "office_network": 7,
}  # fmt: skip
OWN = ((0,), (1,), (2,), (3,), (6, 7, 5))
PORTS = {22: "ssh", 1: "ot", 80: "http", 443: "https", 3390: "sql", 25: "mail"}
DECOYS = {"apache2": "apache", "tomcat": "tomcat", "haraka": "haraka", "vsftpd": "vsftpd"}
OUTCOMES = {
    "Analyse": "is_analysed", "Remove": "is_removed", "Restore": "is_restored",
    "DeployDecoy": "gets_decoy",
}  # fmt: skip
SINCE = {"Analyse": "since_analyse", "Restore": "since_restore", "DeployDecoy": "since_decoy"}


def node_of(name, agent):
    """Place of a host or router among an agent's nodes, and 1 + its number; by its name."""
    zone, _, rest = name.partition("_subnet_")
    unit = OWN[agent].index(ZONES[zone]) if ZONES[zone] in OWN[agent] else None
    if rest == "router":
        return len(OWN[agent]) * 16 + unit, 0
    kind, _, k = rest.split("_")
    number = 1 + 16 * ZONES[zone] + int(k) + (10 if kind == "server" else 0)
    place = int(k) + (6 if kind == "user" else 0)
    return None if unit is None else unit * 16 + place, number


class EventsOfRaw:
    """One agent's events through an episode.

    Args:
        agent: 0 to 4.
        names: Of the features of a node.
        hosts: Names of hosts by address, of all or of the agent's own.
    """

    def __init__(self, agent, names, hosts):
        self.agent, self.hosts = agent, {str(address): name for address, name in hosts.items()}
        self.place = {name: place for place, name in enumerate(names)}
        self.since, self.there, self.decoys = None, None, None

    def read(self, observation):
        """Return nodes uint8 (17 or 51, F) and context uint8 (5,), without ticks left."""
        num = 17 * len(OWN[self.agent])
        nodes = np.zeros((num, len(self.place)), np.uint8)
        at = self.place
        hosts = {k: v for k, v in observation.items() if k not in ("success", "action", "message")}
        if self.there is None:  # the first one lists all
            self.there = np.array([node_of(name, self.agent)[0] for name in hosts])
            self.since = {name: np.full(num, 255) for name in SINCE.values()}
            self.decoys = np.zeros((num, 4), bool)
        else:
            self._read_events(hosts, nodes)
            self._read_outcome(observation, nodes)
        nodes[self.there, at["exists"]] = 1
        for name, steps in self.since.items():
            nodes[self.there, at[name]] = steps[self.there]
        nodes[:, at["has_apache"] : at["has_apache"] + 4] = self.decoys
        context = np.zeros(5, np.uint8)
        order = ("FALSE", "TRUE", "UNKNOWN", "IN_PROGRESS")
        context[1 + order.index(getattr(observation["success"], "name", None))] = 1
        return nodes, context

    def _read_events(self, hosts, nodes):
        at = self.place
        for name, entry in hosts.items():
            node, _ = node_of(name, self.agent)
            for process in entry.get("Processes", ()):
                if "service_name" in process:  # the decoy that the agent has placed
                    continue
                if "PID" in process:
                    nodes[node, at["session"]] += 1
                    continue
                connection = process["Connections"][0]
                if "remote_address" not in connection:
                    nodes[node, at["alarm"]] += 1
                    continue
                self._read_connection(node, connection, nodes)

    def _read_connection(self, node, connection, nodes):
        at = self.place
        port = connection.get("local_port")
        kind = "none" if port is None else PORTS.get(port, "drawn")
        nodes[node, at[f"local_{kind}"]] += 1
        port = connection["remote_port"]
        kind = {22: "ssh", 8800: "blocked"}.get(port, "drawn")
        nodes[node, at[f"remote_{kind}"]] += 1
        remote = self.hosts.get(str(connection["remote_address"]))
        if remote is None:
            return
        source, number = node_of(remote, self.agent)
        nodes[node, at["from_RZA"] + (number - 1) // 16] = 1
        if kind == "blocked":
            return
        nodes[node, at["source"]] = max(nodes[node, at["source"]], number)
        if source is not None and source != node:
            nodes[source, at["is_source"]] += 1

    def _read_outcome(self, observation, nodes):
        at = self.place
        for steps in self.since.values():
            np.minimum(steps + 1, 255, out=steps)
        family, _, name = str(observation.get("action", "")).partition(" ")
        if family not in OUTCOMES:
            return
        node, _ = node_of(name, self.agent)
        nodes[node, at[OUTCOMES[family]]] = 1
        if family in SINCE:
            self.since[SINCE[family]][node] = 0
        for file in observation.get(name, {}).get("Files", ()):
            nodes[node, at["has_" + file["File Name"].split(".")[0]]] = 1
        if family == "Restore":
            self.decoys[node] = False
        for process in observation.get(name, {}).get("Processes", ()):
            if "service_name" in process:
                decoy = ("apache", "tomcat", "haraka", "vsftpd").index(
                    DECOYS[process["service_name"]]
                )
                self.decoys[node, decoy] = True
