"""Raw observations, as in the original: dicts of hosts with processes, connections, files.

The game's state has the events (`rules.events`). This module keeps the network's addresses,
operating systems and first process ids, which affect nothing else. They are drawn from the
distributions of the original's generator, or taken from a recording.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import Enum
from ipaddress import IPv4Address, IPv4Network
from typing import Any

import numpy as np

from vecenv.cage.challenge4.rules import codes
from vecenv.cage.challenge4.rules.codes import ZONE_NAMES, host_name
from vecenv.cage.challenge4.rules.events import ALARM, CONNECTION, FIRST_ROUTER

__all__ = ["RawName", "RawNetwork", "plain_raw", "raw_observations"]


class RawName(str):
    """The name of a member of one of the original's enums, e.g. "TRUE" of TernaryEnum.

    It equals that string and any enum member of this name. As in the original, "TRUE" and "FALSE"
    also equal bools.
    """

    __slots__ = ()
    __hash__ = str.__hash__

    @property
    def name(self) -> str:
        """The name as a plain string."""
        return str(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Enum):
            return other.name == str(self)
        if isinstance(other, bool):
            return str(self) == str(other).upper()
        return str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other


_SUCCESS = tuple(map(RawName, ("FALSE", "TRUE", "UNKNOWN", "IN_PROGRESS")))
_UNKNOWN = RawName("UNKNOWN")
_SYSTEMS = ((RawName("UBUNTU"), _UNKNOWN), (RawName("KALI"), RawName("K2019_4")))
_ACTIONS = {codes.ALLOW: "AllowTrafficZone", codes.BLOCK: "BlockTrafficZone"}
_USERS = (("root", 0), ("user", 1))
# by decoy: service, type of the properties
_DECOYS = (("apache2", True), ("tomcat", True), ("haraka", False), ("vsftpd", True))
_FILES = {codes.CMD_FILE: "cmd.sh", codes.ESCALATE_FILE: "escalate.sh"}
_ENDS = ("local", "remote")
_NUM_NODES = FIRST_ROUTER + codes.NUM_SUBNETS + 1  # hosts, routers, the internet's


def _node_name(node: int) -> str:
    if node < FIRST_ROUTER:
        return host_name(node)
    return f"{ZONE_NAMES[node - FIRST_ROUTER]}_router"


class RawNetwork:
    """Data of a network in raw observations, by node: hosts 0..127, then routers by zone.

    Attributes:
        nodes: The nodes that each blue agent watches, in the original's order.
        addresses: IPv4Address of each existing node.
        base_pids: int64 (137,), largest initial process id; ids in states are relative to it.
    """

    def __init__(self, state: Any, seed: Any) -> None:
        """Draw the data of the network that the state does not have.

        Args:
            state: Record with the network.
            seed: Seed for `numpy.random.default_rng`.
        """
        rng = np.random.default_rng(seed)
        self._list_nodes(state)
        octets = rng.choice(256, codes.INT + 1, replace=False)
        self.zones = [IPv4Network((f"10.0.{octet}.0", 24)) for octet in octets]
        self.addresses: dict[int, IPv4Address] = {}
        self.base_pids = np.zeros(_NUM_NODES, np.int64)
        self.blue_pids = np.zeros(_NUM_NODES, np.int64)
        pids = iter(rng.permutation(np.arange(1000, 10000)).tolist())
        for zone, nodes in enumerate(self._by_zone):
            left = list(range(1, 255))
            for node in nodes:
                is_host = node < FIRST_ROUTER
                is_server = is_host and node % codes.HOSTS_PER_SUBNET >= codes.FIRST_SERVER
                place = -1 if is_server else int(rng.integers(len(left)))
                self.addresses[node] = self.zones[zone][left.pop(place)]
                steps = rng.integers(1, codes.MAX_PID_STEP + 1, 2).tolist()
                if is_host:
                    services = [codes.SSH, *([codes.OT] if zone in (1, 3) else []), 4, 8, 16]
                    drawn = {service: next(pids) for service in services}
                    there = int(state["services"][node])
                    self.base_pids[node] = max(drawn[one] for one in services if there & one)
                if zone != codes.CON:
                    self.base_pids[node] += steps[0]
                    self.blue_pids[node] = self.base_pids[node]
                if is_host and not is_server:
                    self.base_pids[node] += steps[1]
        self.is_kali = rng.integers(2, size=_NUM_NODES)
        self.blue_idents = np.zeros(_NUM_NODES, np.int64)
        for nodes in self.nodes:
            parent = int(rng.integers(len(nodes)))
            others = nodes[:parent] + nodes[parent + 1 :]
            self.blue_idents[others] = np.arange(1, len(nodes))

    def _list_nodes(self, state: Any) -> None:
        """List the existing nodes by zone and by agent."""
        size, exists = codes.HOSTS_PER_SUBNET, state["exists"].tolist()
        self._by_zone = [
            [FIRST_ROUTER + zone, *(zone * size + k for k in range(size) if hosts >> k & 1)]
            for zone, hosts in enumerate(exists)
        ]
        self.nodes = [
            [node for zone in sorted(zones) for node in self._by_zone[zone]]
            for zones in codes.BLUE_SUBNETS
        ]

    @classmethod
    def of_game(cls, state: Any) -> RawNetwork:
        """Return the network of a game; equal seeds and episodes give equal networks."""
        digest = hashlib.blake2b(state["extra_order"].tobytes(), digest_size=8).digest()
        return cls(state, int.from_bytes(digest, "little"))

    @classmethod
    def recorded(cls, state: Any, arrays: Mapping[str, np.ndarray]) -> RawNetwork:
        """Return the network of a recording, see docs/cage4.md.

        Args:
            state: Record with the network.
            arrays: Arrays of the recording, by the original's host ids: net_address uint32 (137,),
                net_cidr_third_octet (9,), net_base_pid, net_blue_pid, net_blue_ident and net_os
                (137,).
        """
        network = cls(state, 0)
        ids = codes.spec_id(np.arange(codes.NUM_HOSTS))
        order = np.concatenate([ids, np.arange(codes.NUM_SUBNETS + 1) * 17])
        octets = arrays["net_cidr_third_octet"].tolist()
        network.zones = [IPv4Network((f"10.0.{octet}.0", 24)) for octet in octets]
        found = arrays["net_address"][order].tolist()
        network.addresses = {node: IPv4Address(found[node]) for node in network.addresses}
        network.base_pids = arrays["net_base_pid"][order].astype(np.int64)
        network.blue_pids = arrays["net_blue_pid"][order].astype(np.int64)
        network.blue_idents = arrays["net_blue_ident"][order].astype(np.int64)
        network.is_kali = arrays["net_os"][order].astype(np.int64)
        return network

    def system_info(self, node: int) -> dict[str, Any]:
        """Return a new dict for a host's entry "System info"."""
        distribution, version = _SYSTEMS[self.is_kali[node]]
        return {
            "Hostname": _node_name(node),
            "OSType": RawName("LINUX"),
            "OSDistribution": distribution,
            "OSVersion": version,
            "Architecture": RawName("x64"),
            "position": np.zeros(2),
        }

    def first_observation(self, agent: int) -> dict[str, Any]:
        """Return an agent's observation after reset."""
        observation: dict[str, Any] = {"success": _UNKNOWN}
        for node in self.nodes[agent]:
            pid, ident = int(self.blue_pids[node]), int(self.blue_idents[node])
            zone = node - FIRST_ROUTER if node >= FIRST_ROUTER else node // codes.HOSTS_PER_SUBNET
            interface = {
                "interface_name": "eth0",
                "ip_address": self.addresses[node],
                "Subnet": self.zones[zone],
            }
            session = {
                "session_id": ident,
                "username": "ubuntu",
                "timeout": 0,
                "PID": pid,
                "Type": _UNKNOWN if ident else RawName("VELOCIRAPTOR_SERVER"),
                "agent": codes.AGENT_NAMES[agent],
            }
            observation[_node_name(node)] = {
                "Interface": [interface],
                "Sessions": [session],
                "Processes": [{"PID": pid, "username": "ubuntu"}],
                "User Info": [
                    {"username": name, "Groups": [{"GID": group}]} for name, group in _USERS
                ],
                "System info": self.system_info(node),
            }
        return observation


def raw_observations(state: Any, network: RawNetwork) -> list[dict[str, Any]]:
    """Return each blue agent's raw observation after a step, as the original's `get_observation`.

    Args:
        state: STATE_DTYPE record.
        network: Network of the state.
    """
    if not state["t"]:
        return [network.first_observation(agent) for agent in range(codes.NUM_BLUE)]
    seen = _monitored(state, network)
    observations = []
    for agent in range(codes.NUM_BLUE):
        success = int(state["blue_success"][agent])
        observation: dict[str, Any] = {"success": _SUCCESS[success]}
        if success != codes.IN_PROGRESS:
            _add_outcome(observation, state, network, agent)
        for node in filter(seen.__contains__, network.nodes[agent]):
            processes, addresses = seen[node]
            entry = observation.setdefault(_node_name(node), {})
            entry["Processes"] = entry.get("Processes", []) + processes
            if addresses:
                entry["Interface"] = [{"ip_address": one} for one in addresses]
            entry["System info"] = network.system_info(node)
        bits = state["messages"][np.arange(codes.NUM_BLUE) != agent]
        observation["message"] = list(bits[:, None] >> np.arange(codes.MESSAGE_BITS) & 1 == 1)
        observations.append(observation)
    return observations


def _add_outcome(observation: dict[str, Any], state: Any, network: RawNetwork, agent: int) -> None:
    """Add the outcome of an agent's action that took effect."""
    family, target = int(state["blue_family"][agent]), int(state["blue_target"][agent])
    action = _ACTIONS.get(family, codes.FAMILY_NAMES[family])
    if family not in (codes.SLEEP, codes.MONITOR, codes.ALLOW, codes.BLOCK):
        action = f"{action} {host_name(target)}"
    files, decoy = int(state["analysed"][agent]), int(state["new_decoy"][agent])
    file = {"Path": "/tmp/", "Known Path": RawName("TEMP"), "Known File": _UNKNOWN, "Density": 0.9}
    found = [{**file, "File Name": name} for one, name in _FILES.items() if files & one]
    if found:
        ordered = found[::-1] if files & codes.CMD_IS_LAST else found
        observation[host_name(target)] = {"Files": ordered}
    if decoy != codes.NONE:
        service, has_properties = _DECOYS[decoy]
        process = {
            "PID": int(network.base_pids[target] + state["decoy_pid"][target, decoy]),
            "PPID": 1,
            "service_name": service,
            "username": "ubuntu",
        }
        process |= {"Properties": ["rfi"]} if has_properties else {}
        observation[host_name(target)] = {"Processes": [process]}
    observation["action"] = action


def _monitored(state: Any, network: RawNetwork) -> dict[int, tuple[list[Any], dict[Any, None]]]:
    """Return the monitor's report by node: processes, and addresses by their last mention."""
    num = int(state["num_events"])
    names = ("kind", "node", "local", "local_port", "remote", "remote_port", "pid")
    events = state["events"][:num]
    columns = [events[name].tolist() for name in names]
    # Users act in the order of their hosts, then red agents. Connections come first in the list.
    order = np.lexsort((events["actor"], events["kind"] != CONNECTION))
    seen: dict[int, tuple[list[Any], dict[Any, None]]] = {}
    for index in order.tolist():
        kind, node, local, local_port, remote, remote_port, pid = (one[index] for one in columns)
        processes, mentioned = seen.setdefault(node, ([], {}))
        if kind > ALARM:
            processes.append({"PID": int(network.base_pids[node] + pid)})
            continue
        address, ports = network.addresses[local], (local_port, remote_port)
        connection = {f"{end}_port": p for end, p in zip(_ENDS, ports, strict=True) if p}
        connection["local_address"] = address
        if kind == CONNECTION:
            connection["remote_address"] = network.addresses[remote]
        processes.append({"Connections": [connection]})
        mentioned.pop(address, None)
        mentioned[address] = None
    return seen


def plain_raw(value: Any) -> Any:
    """Convert a raw observation, or a part of one, to JSON types: addresses and names as strings.

    Observations of the original are converted to the same result.
    """
    if isinstance(value, Mapping):
        return {str(key): plain_raw(part) for key, part in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain_raw(part) for part in value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, np.generic):
        return value.item()
    return value if isinstance(value, bool | int | float) or value is None else str(value)
