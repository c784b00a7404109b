"""The events of an agent, derived from the dicts that the original returns.

This file imports only NumPy: copy it, with `player.py` and a saved defender, into programs that use
the original. `RawEvents` makes the rows of events that `Cage4Player` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["RawEvents"]

_ZONES = {
    "restricted_zone_a": 0, "operational_zone_a": 1, "restricted_zone_b": 2,
    "operational_zone_b": 3, "contractor_network": 4, "public_access_zone": 5, "admin_network": 6,
    "office_network": 7,
}  # fmt: skip
_OWN = ((0,), (1,), (2,), (3,), (6, 7, 5))
_LOCAL_PORTS = {22: 4, 1: 5, 80: 6, 443: 7, 3390: 8, 25: 9}  # places of features
_REMOTE_PORTS = {22: 11, 8800: 12}
_ALARM, _SESSION, _NO_PORT, _DRAWN, _DRAWN_REMOTE = 1, 2, 3, 10, 13
_FROM, _SOURCE, _IS_SOURCE, _HAS_DECOY, _SINCE = 14, 22, 23, 30, 34
_NUM_FEATURES, _LENGTHS, _STEPS = 37, (92, 92, 92, 92, 210), 500
_DECOYS = ("apache2", "tomcat", "haraka", "vsftpd")
_OUTCOMES = {"Analyse": 24, "Remove": 27, "Restore": 28, "DeployDecoy": 29}
_SINCE_OF = {"Analyse": 0, "Restore": 1, "DeployDecoy": 2}
_FILES = {"cmd.sh": 25, "escalate.sh": 26}
_SUCCESS = ("FALSE", "TRUE", "UNKNOWN", "IN_PROGRESS")


class RawEvents:
    """One agent's events through an episode.

    Args:
        agent: 0 to 4.
        hosts: Host names by address, for all hosts or only for the agent's own.
        steps: The original's S.

    Example:
        In the original, in each step, from `BlueFixedActionWrapper`'s observations::

            rows = [reader.read(observations[f"blue_agent_{k}"]) for k, reader in enumerate(five)]
            actions = player.act(rows)
    """

    def __init__(self, agent: int, hosts: Mapping[Any, str], steps: int = _STEPS) -> None:
        self.agent, self._hosts = agent, {str(key): name for key, name in hosts.items()}
        third, rest = divmod(steps, 3)
        self._ends = third + (rest > 0), 2 * third + rest  # of the first two phases
        self._num, self._t = 17 * len(_OWN[agent]), -1
        self._since = np.full((3, self._num), 255)
        self._decoys = np.zeros((4, self._num), bool)

    def read(self, observation: Mapping[str, Any]) -> np.ndarray:
        """Return the agent's row of events, uint8 (length,); the caller owns it.

        The row's vector has only the phase; its context lacks the number of steps left.

        Args:
            observation: The agent's unchanged observation, after reset and after each step.
        """
        nodes = np.zeros((_NUM_FEATURES, self._num), np.uint8)
        hosts = {name: entry for name, entry in observation.items() if "_subnet_" in name}
        if self._t < 0:  # the first one lists all
            self._there = np.array([self._node_of(name)[0] for name in hosts])
        else:
            self._read_events(hosts, nodes)
            self._read_outcome(observation, nodes)
        nodes[0, self._there] = 1
        nodes[_SINCE:, self._there] = self._since[:, self._there]
        nodes[_HAS_DECOY : _HAS_DECOY + 4] = self._decoys
        head = np.zeros(_LENGTHS[self.agent] + 5, np.uint8)
        head[0] = sum(max(self._t, 0) >= end for end in self._ends)
        success = observation["success"]
        head[_LENGTHS[self.agent] + 1 + _SUCCESS.index(getattr(success, "name", success))] = 1
        self._t += 1
        return np.concatenate([head, nodes.reshape(-1)])

    def _node_of(self, name: str) -> tuple[Any, int]:
        """Return the place of a host or router among the agent's own, and 1 + its number."""
        own, (zone, _, rest) = _OWN[self.agent], name.partition("_subnet_")
        place = own.index(_ZONES[zone]) if _ZONES[zone] in own else None
        if rest == "router":
            return len(own) * 16 + (place or 0), 0
        kind, _, k = rest.split("_")
        number = 1 + 16 * _ZONES[zone] + int(k) + (10 if kind == "server" else 0)
        return None if place is None else place * 16 + int(k) + 6 * (kind == "user"), number

    def _read_events(self, hosts: Mapping[str, Any], nodes: np.ndarray) -> None:
        for name, entry in hosts.items():
            node, _ = self._node_of(name)
            for process in entry.get("Processes", ()):
                if "service_name" in process:  # the decoy that the agent has placed
                    continue
                connection = process["Connections"][0] if "PID" not in process else {}
                if "remote_address" in connection:
                    self._read_connection(node, connection, nodes)
                else:
                    nodes[_SESSION if "PID" in process else _ALARM, node] += 1

    def _read_connection(self, node: int, connection: Any, nodes: np.ndarray) -> None:
        port = connection.get("local_port")
        nodes[_NO_PORT if port is None else _LOCAL_PORTS.get(port, _DRAWN), node] += 1
        port = connection["remote_port"]
        nodes[_REMOTE_PORTS.get(port, _DRAWN_REMOTE), node] += 1
        remote = self._hosts.get(str(connection["remote_address"]))
        if remote is None:
            return
        source, number = self._node_of(remote)
        nodes[_FROM + (number - 1) // 16, node] = 1
        if port in _REMOTE_PORTS and port != 22:  # blocked
            return
        nodes[_SOURCE, node] = max(nodes[_SOURCE, node], number)
        if source is not None and source != node:
            nodes[_IS_SOURCE, source] += 1

    def _read_outcome(self, observation: Mapping[str, Any], nodes: np.ndarray) -> None:
        np.minimum(self._since + 1, 255, out=self._since)
        family, _, name = str(observation.get("action", "")).partition(" ")
        if family not in _OUTCOMES:
            return
        node, told = self._node_of(name)[0], observation.get(name, {})
        nodes[_OUTCOMES[family], node] = 1
        if family in _SINCE_OF:
            self._since[_SINCE_OF[family], node] = 0
        for file in told.get("Files", ()):
            nodes[_FILES[file["File Name"]], node] = 1
        if family == "Restore":
            self._decoys[:, node] = False
        for process in told.get("Processes", ()):
            if "service_name" in process:
                self._decoys[_DECOYS.index(process["service_name"]), node] = True
