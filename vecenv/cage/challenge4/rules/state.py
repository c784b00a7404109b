"""The state record of one game, and the sets of hosts in it.

Hosts are the indices of `codes`; sets of the hosts of one subnet are bit masks (bit k). The first
fields are read in every step, the last ones in few steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from vecenv.cage.challenge4.rules import codes

_SUBNET_MASKS = (np.uint16, (codes.NUM_SUBNETS,))
_BLUE_BYTES = (np.uint8, (codes.NUM_BLUE,))
_RED_BYTES = (np.uint8, (codes.NUM_RED,))
_HOST_BYTES = (np.uint8, (codes.NUM_HOSTS,))
_HOST_WORDS = (np.uint16, (codes.NUM_HOSTS,))


def _each(names: str, kind: Any, shape: tuple[int, ...]) -> list[tuple[str, Any, Any]]:
    return [(name, kind, shape) for name in names.split()]


_FIELDS = [
    # --- what every step reads ---
    ("t", np.uint16),  # steps played
    ("phase", np.uint8),
    ("overflow", np.uint8),  # bits of `codes`: a capacity was too small, the game is not exact
    ("reward", np.int16),  # of the latest step
    ("reward_parts", np.int16, (4,)),  # LocalWork, AccessService, Impact, cost of actions
    ("quiet_greens", np.int32),  # greens to skip before the next with an effect
    ("blocks", np.uint16, (codes.NUM_ZONES,)),  # by `to`: set of the zones `from` that are blocked
    ("barred", *_SUBNET_MASKS),  # subnets that block this one, or that it blocks
    ("exists", *_SUBNET_MASKS),
    ("num_users", np.uint8, (codes.NUM_SUBNETS,)),
    ("num_servers", np.uint8, (codes.NUM_SUBNETS,)),
    ("num_destinations", np.uint8, (3, codes.NUM_SUBNETS)),  # of a subnet's users, by phase
    ("red_hosts", *_SUBNET_MASKS),  # with a session of any red agent
    ("degraded", *_SUBNET_MASKS),  # with a service below 100 %
    ("process_events", *_SUBNET_MASKS),  # of this step
    ("connection_events", *_SUBNET_MASKS),
    ("work_failed", *_SUBNET_MASKS),
    ("access_failed", *_SUBNET_MASKS),
    ("phished", *_SUBNET_MASKS),  # users whose work asks for phishing
    # blue: the action in progress, or the one that took effect in the latest step
    ("blue_family", *_BLUE_BYTES),
    ("blue_target", *_BLUE_BYTES),  # host, or the zone `to`
    ("blue_source", *_BLUE_BYTES),  # the zone `from`
    ("blue_left", *_BLUE_BYTES),
    ("blue_success", *_BLUE_BYTES),
    ("messages", *_BLUE_BYTES),
    # red: its choice in the latest step; the action in progress; the one due in the latest step
    *_each("choice_type choice_target choice_session", *_RED_BYTES),
    *_each("busy_type busy_target busy_session busy_left", *_RED_BYTES),
    *_each("done_type done_target done_success", *_RED_BYTES),
    ("red_exploit", np.int8, (codes.NUM_RED,)),
    ("found_ports", *_RED_BYTES),  # by the scan of the latest step
    ("found_name", *_RED_BYTES),  # whether the latest action found its target's name
    ("found_links", *_RED_BYTES),  # whether it revealed hosts
    ("active", *_RED_BYTES),
    ("has_digested", *_RED_BYTES),
    ("gained", *_RED_BYTES),  # whether it has a session that it has not seen yet
    ("lost", *_RED_BYTES),  # whether sessions may have gone since it last looked
    ("known_subnets", *_RED_BYTES),
    *_each("num_sessions num_memory num_offered num_table num_handed", *_RED_BYTES),
    ("num_foreign", np.uint8),  # sessions of this step that are another agent's
    ("num_suspicious", np.uint16),
    ("num_old_vsftpd", np.uint16),
    # --- hosts ---
    ("services", *_HOST_BYTES),  # genuine ones
    ("decoys", *_HOST_BYTES),  # set of decoy services
    ("decoy_order", *_HOST_BYTES),  # their ids in the order of creation, two bits each
    ("svc", *_HOST_WORDS),  # levels of services, see `codes`
    ("max_pid", *_HOST_WORDS),  # relative to the host's base
    ("num_vsftpd", *_HOST_WORDS),  # processes
    ("green", *_HOST_BYTES),  # results; written where greens are drawn one by one
    # --- red's tables, in order ---
    # state of a host, and whether its name is known
    ("fsm", np.uint8, (codes.NUM_RED, codes.NUM_HOSTS)),
    ("table", np.uint8, (codes.NUM_RED, codes.MAX_TABLE)),  # known hosts that are not in state F
    *_each(
        "session_ident session_host session_flags", np.uint8, (codes.NUM_RED, codes.MAX_SESSIONS)
    ),
    ("session_pid", np.uint16, (codes.NUM_RED, codes.MAX_SESSIONS)),
    ("memory_ident", np.uint8, (codes.NUM_RED, codes.MAX_MEMORY)),  # session that scanned
    ("memory_host", np.uint8, (codes.NUM_RED, codes.MAX_MEMORY)),
    ("memory_ports", np.uint8, (codes.NUM_RED, codes.MAX_MEMORY)),
    ("offered", np.uint8, (codes.NUM_RED, codes.MAX_OFFERED)),
    # hosts of sessions handed over in this step
    ("handed", np.uint8, (codes.NUM_RED, codes.MAX_HANDED)),
    # --- processes ---
    ("decoy_pid", np.uint16, (codes.NUM_HOSTS, codes.NUM_DECOYS)),
    ("suspicious_pid", np.uint16, (codes.MAX_SUSPICIOUS,)),
    ("suspicious_host", np.uint8, (codes.MAX_SUSPICIOUS,)),
    ("old_vsftpd_host", np.uint8, (codes.MAX_OLD_VSFTPD,)),
    ("old_vsftpd_pid", np.uint16, (codes.MAX_OLD_VSFTPD,)),
]
_EVENT = np.dtype(
    [
        ("node", np.uint8),
        ("actor", np.uint8),
        ("kind", np.uint8),
        ("local", np.uint8),
        ("remote", np.uint8),
        ("local_port", np.uint16),
        ("remote_port", np.uint16),
        ("pid", np.uint16),
        ("before", np.uint16),  # 1 + the event before it on a node of the same agent; 0: none
    ],
    align=True,
)
_FIELDS += [  # what `rules.events` keeps
    # whether it does; else what is below is as `reset` left it, or useless
    ("keeps_log", np.uint8),
    ("num_events", np.uint16),
    ("num_slots", np.uint16),  # draws of this step that change nothing else
    ("analysed", *_BLUE_BYTES),  # files that an Analyse of this step found, and WAS_ANALYSED
    ("new_decoy", *_BLUE_BYTES),  # that was placed in this step, or NONE
    ("last_event", np.uint16, (codes.NUM_BLUE,)),  # 1 + the latest on a node of the agent
    ("shown", np.uint8, (codes.NUM_SHOWN * codes.NUM_WATCHED,)),  # of hosts, as rows have it
    ("events", _EVENT, (codes.MAX_EVENTS,)),  # in the order in which they happened
    ("files", *_HOST_BYTES),  # that red has dropped
    ("extra_order", *_HOST_BYTES),  # of web, database and mail among processes, two bits each
]
STATE_DTYPE = np.dtype(_FIELDS, align=True)


_MEMBERS_OF_BYTE = np.array([bin(byte).count("1") for byte in range(256)], np.int64)
_MEMBERS = [[bit for bit in range(8) if byte >> bit & 1] for byte in range(256)]
_NTH_MEMBER = np.array([[*members, *[0] * 8][:8] for members in _MEMBERS], np.int64)


@njit
def count(members):
    """Number of members, int64, of a set int64 of at most 16."""
    return _MEMBERS_OF_BYTE[members & 255] + _MEMBERS_OF_BYTE[(members >> 8) & 255]


@njit
def nth(members, n):
    """The n-th member (from 0) of a set int64 of at most 16."""
    num_low = _MEMBERS_OF_BYTE[members & 255]
    if n < num_low:
        return _NTH_MEMBER[members & 255, n & 7]
    return _NTH_MEMBER[(members >> 8) & 255, (n - num_low) & 7] + 8


@njit
def put_host(sets, host):
    """Add a host int64 to its subnet's set; `sets` is (subnets,)."""
    sets[host >> 4] = np.int64(sets[host >> 4]) | (1 << (host & 15))


@njit
def drop_host(sets, host):
    """Remove a host int64 from its subnet's set; `sets` is (subnets,)."""
    sets[host >> 4] = np.int64(sets[host >> 4]) & ~(1 << (host & 15))


@njit
def has(members, k):
    """Whether k int64 is in a set int64."""
    return (members >> k) & 1 == 1
