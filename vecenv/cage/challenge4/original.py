"""A game as the original presents it: a PettingZoo `ParallelEnv`, and raw observations.

Names, spaces, padding, labels and infos of the agents match the original's flat wrapper. This
module does not import PettingZoo; the class only has the methods of a `ParallelEnv`.

Raw observations are dicts of hosts with processes, connections, files. The game's state has the
events (`rules.events`). `RawNetwork` keeps the network's addresses, operating systems and first
process ids, which affect nothing else. They are drawn from the distributions of the original's
generator, or taken from a recording.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import Enum
from ipaddress import IPv4Address, IPv4Network
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Discrete, MultiDiscrete

from vecenv.cage.challenge4.env import METADATA, Cage4VectorEnv
from vecenv.cage.challenge4.rules import codes
from vecenv.cage.challenge4.rules.codes import (
    ZONE_NAMES,
    action_labels,
    host_name,
    observation_labels,
)
from vecenv.cage.challenge4.rules.events import ALARM, CONNECTION, FIRST_ROUTER


class Cage4ParallelEnv:
    """One game, with the interface of PettingZoo's `ParallelEnv`.

    Agents are "blue_agent_0" to "blue_agent_4". Observations are int64 vectors (92,), for agent 4
    (210,); an action is an index. Agents without an action sleep. Agents written for the original's
    evaluation, with `get_action(observation, action_space)`, can be used here.

    Args:
        raw: Whether observations are dicts of hosts, as the original returns without its flat
            wrapper; see docs/cage4.md. The games are the same.
        pad_spaces: Whether all vectors are padded with zeros to 210 values, and the actions of all
            agents to 242. Actions that an agent does not have act as Sleep.
        render_mode: "rgb_array" or None.
        debug: Whether the rules run as plain Python with every index checked, which is slow.
        **options: `steps`, `red`, `phishing_rate`, `alarm_rate`, `greens_one_by_one`.

    Attributes:
        possible_agents, agents: Names of agents.

    Example:
        >>> env = Cage4ParallelEnv(steps=10, debug=True)
        >>> observations, infos = env.reset(seed=0)
        >>> observations["blue_agent_4"].shape, env.action_space("blue_agent_4")
        ((210,), Discrete(242))
        >>> env.action_labels("blue_agent_0")[16:18]
        ['Monitor', 'Remove restricted_zone_a_subnet_server_host_0']
        >>> observations, rewards, terminations, truncations, infos = env.step({})
        >>> rewards["blue_agent_0"]
        0.0
    """

    metadata: dict[str, Any] = {**METADATA, "name": "Cage4-v0", "is_parallelizable": True}

    def __init__(
        self,
        *,
        raw: bool = False,
        pad_spaces: bool = False,
        render_mode: str | None = None,
        debug: bool = False,
        **options: Any,
    ) -> None:
        self.possible_agents = list(codes.AGENT_NAMES)
        self.agents: list[str] = []
        self.render_mode = render_mode
        if not isinstance(raw, bool | np.bool_):
            raise TypeError(f"raw must be True or False, got {raw!r:.200}")
        self._pad, self._raw = pad_spaces, bool(raw)
        self._envs = Cage4VectorEnv(
            1,
            messages=True,
            observation="flat",
            autoreset_mode="Disabled",
            num_threads=1,
            render_mode=render_mode,
            debug=debug,
            log=self._raw,
            **options,
        )
        self._sizes, lengths = (
            sizes[-1:] * codes.NUM_BLUE if pad_spaces else sizes
            for sizes in (codes.NUM_ACTIONS, codes.OBS_LENGTHS)
        )
        self._spaces = {
            name: _AnyDict() if raw else MultiDiscrete([3] + [2] * (length - 1))
            for name, length in zip(codes.AGENT_NAMES, lengths, strict=True)
        }
        self._action_spaces = dict(zip(codes.AGENT_NAMES, map(Discrete, self._sizes), strict=True))
        self._actions = np.zeros((1, 2 * codes.NUM_BLUE), np.int64)
        self._masks: dict[str, np.ndarray] = {}

    def observation_space(self, agent: str) -> Any:
        """Return the observation space: MultiDiscrete, as in the original; if raw, any dict."""
        return self._spaces[_known(agent)]

    def action_space(self, agent: str) -> Any:
        """Return the action space: Discrete(82); Discrete(242) for agent 4 or if padded."""
        return self._action_spaces[_known(agent)]

    def action_labels(self, agent: str) -> list[str]:
        """Return a label for each action of an agent, as in the original.

        Labels of traffic actions lack the original's addresses in parentheses. After the first
        reset, labels of actions on absent hosts begin with "[Invalid]".
        """
        index = codes.AGENT_NAMES.index(_known(agent))
        labels = action_labels(index, self._masks.get(agent))
        return labels + ["[Padding] Sleep"] * (self._sizes[index] - len(labels))

    def observation_labels(self, agent: str) -> list[str]:
        """Return a label for each value of an agent's vector, padding left out."""
        return observation_labels(codes.AGENT_NAMES.index(_known(agent)))

    def action_mask(self, agent: str) -> list[bool]:
        """Return which actions of an agent have an effect; constant throughout an episode."""
        return self._masks[_known(agent)].tolist()

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Begin an episode on a new network.

        Returns:
            Observations and infos by agent; each info has "action_mask", bool.
        """
        obs, _ = self._envs.reset(seed=seed)
        self.agents = list(codes.AGENT_NAMES)
        masks = zip(codes.AGENT_NAMES, self._envs.agent_masks(), self._sizes, strict=True)
        self._masks = {name: _padded(mask[0], size) for name, mask, size in masks}
        if self._raw:
            self._network = RawNetwork.of_game(self.true_state)
        return self._observations(obs), self._infos()

    def step(
        self, actions: Mapping[str, Any], messages: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], ...]:
        """Play one step.

        Args:
            actions: Indices by agent. Actions that the mask forbids act as Sleep. Agents that are
                left out sleep.
            messages: 8 bits by agent, as arrays of 0 and 1 or of bools; zeros for other agents.

        Returns:
            Observations, rewards (the same for all), terminations, truncations and infos by agent.

        Raises:
            ValueError: An agent is unknown, an action out of range, or a message of another shape.
            gymnasium.error.ResetNeeded: The episode is over or has not begun.
        """
        if not self.agents:
            raise ResetNeeded("the episode is over, or has not begun; call reset")
        row = self._actions[0]
        row[: codes.NUM_BLUE] = codes.SLEEPS
        row[codes.NUM_BLUE :] = 0
        for name, action in actions.items():
            agent = codes.AGENT_NAMES.index(_known(name))
            row[agent] = self._index(agent, action)
        for name, message in (messages or {}).items():
            row[codes.NUM_BLUE + codes.AGENT_NAMES.index(_known(name))] = _bits(name, message)
        obs, *results, _ = self._envs.step(self._actions)
        of_all = [dict.fromkeys(codes.AGENT_NAMES, result[0].item()) for result in results]
        if results[1][0] or results[2][0]:
            self.agents = []
        return self._observations(obs), *of_all, self._infos()

    def _index(self, agent: int, action: Any) -> int:
        """Return an agent's action as one that it has."""
        name = codes.AGENT_NAMES[agent]
        space: Any = self._action_spaces[name]
        given = np.asarray(action)
        is_whole = given.dtype.kind in "iub" and given.ndim == 0
        if not (is_whole and space.contains(given.astype(np.int64))):
            told = f"expected an integer from 0 to {space.n - 1}"
            raise ValueError(f"the action of {name} is {action!r}, {told}")
        return int(given) if given < codes.NUM_ACTIONS[agent] else codes.SLEEPS[agent]

    @property
    def true_state(self) -> np.record:
        """The true state, as a live record; see `Cage4VectorEnv`."""
        return self._envs.states[0]

    def render(self) -> Any:
        """Return a picture, uint8 (height, width, 3); None without a render mode."""
        return None if self.render_mode is None else self._envs.render()[0]

    def close(self) -> None:
        """Close the env; may be called twice."""
        self._envs.close()

    @property
    def unwrapped(self) -> Cage4ParallelEnv:
        """The env itself."""
        return self

    @property
    def num_agents(self) -> int:
        """Number of agents that act in the next step."""
        return len(self.agents)

    @property
    def max_num_agents(self) -> int:
        """Number of possible agents: five."""
        return codes.NUM_BLUE

    def _observations(self, obs: np.ndarray) -> dict[str, Any]:
        if self._raw:
            told = raw_observations(self.true_state, self._network)
            return dict(zip(codes.AGENT_NAMES, told, strict=True))
        length = codes.OBS_LENGTHS[-1] if self._pad else 0
        vectors = zip(codes.AGENT_NAMES, self._envs.agent_obs(obs.astype(np.int64)), strict=True)
        return {name: _padded(row[0], length) for name, row in vectors}

    def _infos(self) -> dict[str, dict[str, Any]]:
        return {name: {"action_mask": mask.copy()} for name, mask in self._masks.items()}


class _AnyDict(Space[Any]):
    """Space of all dicts; it can't be sampled."""

    def contains(self, x: Any) -> bool:
        """Return whether x is a dict."""
        return isinstance(x, dict)


def _padded(row: np.ndarray, length: int) -> np.ndarray:
    """Return a copy of a row (n,), with zeros up to a length."""
    return np.pad(row, (0, max(0, length - len(row))))


def _known(agent: Any) -> str:
    if agent not in codes.AGENT_NAMES:
        raise ValueError(
            f"there is no agent {agent!r}, expected one of {', '.join(codes.AGENT_NAMES)}"
        )
    return agent


def _bits(name: str, message: Any) -> int:
    bits = np.asarray(message)
    is_row = bits.shape == (codes.MESSAGE_BITS,) and bits.dtype.kind in "iubf"
    if not is_row or not np.isin(bits, (0, 1)).all():
        raise ValueError(
            f"the message of {name} is {message!r}, expected {codes.MESSAGE_BITS} bits"
        )
    return int((bits.astype(np.int64) << np.arange(codes.MESSAGE_BITS)).sum())


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
        size, exists = codes.HOSTS_PER_SUBNET, state["exists"].tolist()
        by_zone = [
            [FIRST_ROUTER + zone, *(zone * size + k for k in range(size) if hosts >> k & 1)]
            for zone, hosts in enumerate(exists)
        ]
        self.nodes = [
            [node for zone in sorted(zones) for node in by_zone[zone]]
            for zones in codes.BLUE_SUBNETS
        ]
        octets = rng.choice(256, codes.INT + 1, replace=False)
        self.zones = [IPv4Network((f"10.0.{octet}.0", 24)) for octet in octets]
        self.addresses: dict[int, IPv4Address] = {}
        self.base_pids = np.zeros(_NUM_NODES, np.int64)
        self.blue_pids = np.zeros(_NUM_NODES, np.int64)
        pids = iter(rng.permutation(np.arange(1000, 10000)).tolist())
        for zone, nodes in enumerate(by_zone):
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
