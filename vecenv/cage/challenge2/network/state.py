"""The state record of one environment, and its decoding into arrays per host.

Sets of hosts are bit masks (bit h is host h). The record has three cache lines: fields that every
step reads, fields that scans and decoys change, fields that sessions change. Reading a field of an
array of states makes no copy; `decode` makes per-host arrays for people to read.
"""

from __future__ import annotations

import numpy as np

from vecenv.cage.challenge2.network.scenario import Scenario
from vecenv.cage.challenge2.rules.codes import CUSTOM, FAILED, MAX_HOSTS, RED_SLEEP

__all__ = ["STATE_DTYPE", "decode", "host_bits", "impossible_turns", "shell_alerts"]

SCANNED_BIT = 256  # of `red_ports`: set once the host has been scanned

STATE_DTYPE = np.dtype(
    [
        # --- first cache line: fields that every step reads ---
        ("obs_bits", np.uint64),  # the observation: bit i is value i; blue's belief persists here
        ("known_ip", np.uint16),  # hosts whose address red knows
        ("known_host", np.uint16),  # hosts whose name red knows
        ("scanned", np.uint16),  # hosts whose ports red has seen
        ("has_removable", np.uint16),  # hosts with a red session of this kind
        ("has_stuck", np.uint16),
        ("has_priv", np.uint16),
        ("malware", np.uint16),  # hosts with a dropped tool on disk
        ("scanned_ips", np.uint16),  # meander: hosts it has scanned,
        ("exploited_ips", np.uint16),  # attacked and not given up,
        ("escalated_hosts", np.uint16),  # escalated and not given up,
        ("mapped", np.uint16),  # entered at least once;
        ("last_exploited", np.uint16),  # the host that its previous action exploited,
        ("last_escalated", np.uint16),  # or escalated or impacted; empty if it did neither
        ("known_subnet", np.uint8),  # subnets that red knows
        ("scanned_subnets", np.uint8),  # meander: subnets it has swept
        ("plan_step", np.uint8),  # b_line: its latest step
        ("first_host", np.uint8),  # b_line: the drawn user host; MAX_HOSTS before the draw
        ("has_verified", np.uint8),  # b_line: whether it has ever reached `verify_step`
        ("scan_was_empty", np.uint8),  # whether red's latest scan returned nothing
        ("red_agent", np.uint8),  # NO_RED, B_LINE, MEANDER or CUSTOM
        ("ot_running", np.uint8),
        ("ot_stoppable", np.uint8),
        ("ot_known", np.uint8),
        # events of the latest step
        ("blue_action", np.uint8),
        ("blue_success", np.uint8),
        ("red_type", np.uint8),
        ("red_success", np.uint8),
        ("red_target", np.int8),
        ("red_exploit", np.int8),
        ("red_detected", np.int8),
        ("green_target", np.int8),
        ("red_pe_index", np.int16),
        ("reward10", np.int16),
        ("step", np.uint16),  # steps made in this episode; saturates
        ("removable_first", np.uint16),  # hosts with a removable session older than any privileged
        ("stuck_first", np.uint16),  # hosts with a stuck session older than any privileged
        ("length_index", np.uint16),  # index of the length that the episode has drawn
        # --- second: ports and decoys ---
        ("red_ports", np.uint8, (MAX_HOSTS,)),  # ports that red saw at its last scan
        ("decoys", np.uint8, (MAX_HOSTS,)),  # set of decoys in place
        ("n_stacked", np.uint8, (MAX_HOSTS,)),  # placements of the repeatable decoy
        ("last_shell", np.uint16),  # hosts where the shell detected last is still removable
        ("custom", np.uint16, (4,)),  # a custom red policy's own memory
        ("padding", np.uint16, (3,)),  # up to a whole cache line
        # --- third: sessions ---
        ("n_removable", np.uint8, (MAX_HOSTS,)),
        ("n_stuck", np.uint8, (MAX_HOSTS,)),
        # While no session on the host is privileged, bit i says that the i-th oldest is removable.
        # Otherwise the order has no meaning, and this is the number of privileged sessions.
        ("order_or_n_priv", np.uint16, (MAX_HOSTS,)),
    ],
    align=True,
)


def host_bits(masks: np.ndarray, num_hosts: int) -> np.ndarray:
    """Unpack sets of hosts.

    Args:
        masks: Unsigned integers, any shape.
        num_hosts: Number of bits to unpack.

    Returns:
        uint8, shape of `masks` + (num_hosts,), of 0 and 1; fresh memory.
    """
    bits = np.arange(num_hosts, dtype=np.uint16)
    return (masks[..., None] >> bits & 1).astype(np.uint8)


def decode(states: np.ndarray, scenario: Scenario) -> dict[str, np.ndarray]:
    """Decode the true state of some environments into arrays.

    Args:
        states: STATE_DTYPE, any shape S.
        scenario: Scenario of the states, with H hosts and s subnets.

    Returns:
        By name, uint8 (*S, H), but `red_ports` uint16 (*S, H), `known_subnet` (*S, s)
        and `ot_*` (*S); fresh memory. Hosts and subnets are in the order of the scenario. Fields
        without a number below are 0 or 1.

        - `access`: red's highest access on the host: 0 none, 1 user, 2 privileged.
        - `table_access`: the access of red's oldest session there, with the same numbers.
        - `n_removable`, `n_stuck`: numbers of red's user sessions that Remove can end, and cannot.
        - `n_priv`: number of red's privileged sessions.
        - `decoys`: decoys in place: bit i is decoy i of `scenario.decoys`.
        - `n_vsftpd`: placements of the decoy that can be placed again and again.
        - `red_ports`: 0 before red's first scan of the host, else 256 and the bits of the ports
          that its latest scan found.
        - `table_scanned`: whether red has seen the ports of the host.
        - `malware`: whether a tool that red dropped is on the disk.
        - `known_ip`, `known_host`: whether red knows the address, and the name.
        - `known_subnet`: whether red knows the subnet.
        - `ot_running`: whether the operational service runs.
        - `ot_stoppable`: whether red's Impact can still stop it.
        - `ot_known`: whether red knows the service.
    """
    num_hosts, num_subnets = len(scenario.hosts), len(scenario.subnets)

    def unpack(masks: np.ndarray) -> np.ndarray:
        return host_bits(masks, num_hosts)

    def per_host(field: str) -> np.ndarray:
        return states[field][..., :num_hosts]

    has_priv = unpack(states["has_priv"])
    has_any = unpack(states["has_removable"] | states["has_stuck"] | states["has_priv"])
    is_oldest_user = unpack(states["removable_first"] | states["stuck_first"])
    scanned = unpack(states["scanned"])
    ports = per_host("red_ports").astype(np.uint16)
    return {
        "access": has_any + has_priv,
        "table_access": has_any + (has_priv & (1 - is_oldest_user)),
        **{name: per_host(name).copy() for name in ("n_removable", "n_stuck", "decoys")},
        "n_priv": (per_host("order_or_n_priv") * has_priv).astype(np.uint8),
        "n_vsftpd": _num_stacked(states, scenario),
        "red_ports": np.where(scanned == 1, SCANNED_BIT + ports, 0).astype(np.uint16),
        **{name: unpack(states[name]) for name in ("malware", "known_ip", "known_host")},
        "known_subnet": host_bits(states["known_subnet"], num_subnets),
        "table_scanned": scanned,
        **{name: states[name].copy() for name in ("ot_running", "ot_stoppable", "ot_known")},
    }


def _num_stacked(states: np.ndarray, scenario: Scenario) -> np.ndarray:
    """Return placements per host of the repeatable decoy (or of Vsftpd if none is repeatable)."""
    num_hosts = len(scenario.hosts)
    if any(decoy.opens != decoy.checks for decoy in scenario.decoys):
        return states["n_stacked"][..., :num_hosts].copy()
    names = [decoy.name for decoy in scenario.decoys]
    if "DecoyVsftpd" not in names:
        return np.zeros((*states.shape, num_hosts), np.uint8)
    decoys = states["decoys"][..., :num_hosts]
    return decoys >> np.uint8(names.index("DecoyVsftpd")) & np.uint8(1)


def shell_alerts(states: np.ndarray, scenario: Scenario) -> np.ndarray:
    """Return whether blue's monitor saw a reverse shell on each host in the latest step.

    Blue is allowed to know this: the remote port reveals a shell. The 52 bits show it only in part.

    Args:
        states: STATE_DTYPE (N,).
        scenario: Scenario of the states, with H hosts.

    Returns:
        bool (N, H); fresh memory.
    """
    hosts = np.arange(len(scenario.hosts))
    is_detected = (states["red_detected"] == 1)[:, None]
    return is_detected & (states["red_target"][:, None] == hosts)


def impossible_turns(states: np.ndarray) -> np.ndarray:
    """Return whether a custom red policy returned an invalid action in the latest step.

    It was played as Sleep, and only such a Sleep fails.

    Args:
        states: STATE_DTYPE (N,).

    Returns:
        bool (N,); fresh memory.
    """
    is_sleep = (states["red_type"] == RED_SLEEP) & (states["red_success"] == FAILED)
    return is_sleep & (states["red_agent"] == CUSTOM)
