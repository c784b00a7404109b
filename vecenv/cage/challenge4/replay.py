"""Recorded episodes of the original, played through the simulator, and compared field by field.

The file format is that of the golden traces: one `.npz` per episode, plain arrays, with the
network, blue's actions and messages, the tape of all random draws, and everything to compare. A
recording of raw observations needs no more to compare than those, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vecenv.cage.challenge4.network.state import LOGGED_STATE_DTYPE
from vecenv.cage.challenge4.options import Cage4Options, compile_rules
from vecenv.cage.challenge4.raw import RawNetwork, plain_raw, raw_observations
from vecenv.cage.challenge4.rules.codes import (
    ACTION_FAMILY,
    AGENT_NAMES,
    AGGRESSIVE,
    BLUE_SUBNETS,
    CON,
    DISCOVER,
    FIRST_SERVER,
    HOSTS_PER_SUBNET,
    IMPACT,
    INT,
    MAX_EXTRAS,
    NONE,
    NUM_ACTIONS,
    NUM_BLUE,
    NUM_HOSTS,
    NUM_RED,
    NUM_SPEC_HOSTS,
    NUM_SUBNETS,
    NUM_ZONES,
    OBS_LENGTH,
    OBS_LENGTHS,
    PHISHING_RATE,
    RED_VARIANTS,
    SITE_NAMES,
    STEALTH,
    SUCCEEDED,
)
from vecenv.cage.challenge4.rules.draws import CURSOR_DTYPE, TAPE_DTYPE
from vecenv.cage.challenge4.rules.dynamics import apply, begin
from vecenv.cage.challenge4.rules.observation import observe
from vecenv.core.compiling import cached_njit
from vecenv.files import read_npz
from vecenv.jit.random import RNG_DTYPE

__all__ = ["TraceDifference", "TraceError", "TraceReplay", "replay_traces"]

HOSTS = np.arange(NUM_HOSTS)
SPEC_IDS = (HOSTS // HOSTS_PER_SUBNET) * 17 + 1 + HOSTS % HOSTS_PER_SUBNET  # of our hosts
_WATCHED = np.isin(SPEC_IDS // 17, (CON, INT), invert=True)  # events are kept on these only


class TraceError(ValueError):
    """A file is no trace of the documented format."""


class TraceDifference(NamedTuple):
    """A field that came out differently."""

    path: str
    step: int  # 0-based; -1 for what is there after the reset
    field: str
    expected: Any
    got: Any

    def __str__(self) -> str:
        return (
            f"{self.path}: step {self.step}: {self.field}: "
            f"expected {_short(self.expected)}, got {_short(self.got)}"
        )


def _short(value: Any) -> str:
    if not isinstance(value, np.ndarray | np.generic | int):
        return f"{value!r:.400}"
    text = np.array2string(np.asarray(value), threshold=40, separator=",").replace("\n", "")
    return text if len(text) < 200 else f"{text[:200]}..."


@cached_njit
def begin_rows(states, hosts):
    """Begin an episode in every state (N,), with red agent 0 on hosts int64 (N,)."""
    for row in range(states.shape[0]):
        begin(states[row], hosts[row])


@cached_njit
def apply_rows(states, actions, is_on, streams, entries, cursors, rules):
    """Play a step of every state (N,) whose is_on bool (N,) is set, from its tape."""
    for row in range(states.shape[0]):
        if is_on[row]:
            chance = (streams[row], (entries, cursors[row]))
            apply(states[row], actions[row], chance, rules[row], None, states[row])


@cached_njit
def observe_rows(states, obs, rules):
    """Write the observations uint8 (N, 578) of states (N,)."""
    for row in range(states.shape[0]):
        observe(states[row], obs[row], rules[row])


_STEPS, _AFTER, _DRAWS, _SESSIONS, _ROWS = "steps", "steps + 1", "draws", "sessions", "rows"
_INTEGERS, _NUMBERS, _STRING = "iu", "f", "U"


def _fields() -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Kinds of dtypes and shapes of the arrays of a trace; words stand for lengths."""
    hosts, zones, red, blue = NUM_SPEC_HOSTS, NUM_ZONES, NUM_RED, NUM_BLUE
    shapes: dict[tuple[Any, ...], str] = {
        (): "meta_steps net_red_start_host",
        (_STEPS,): "reward phase",
        (_STEPS, blue): "blue_action blue_msg blue_family blue_left blue_success",
        (_STEPS, 4): "reward_parts",
        (_STEPS, 3, zones): "fail_counts",
        (_STEPS, zones): "blocks",
        (_STEPS, hosts): "green events svc decoys n_vsftpd max_pid",
        (_STEPS, red): "red_choice red_target red_session red_busy red_left red_done "
        "red_done_target red_success red_exploit red_active known_subnets",
        (_STEPS, red, hosts): "fsm",
        (_AFTER,): "tape_off sess_off",
        (_AFTER, blue - 1, OBS_LENGTHS[0]): "obs",
        (_AFTER, OBS_LENGTHS[4]): "obs4",
        (_DRAWS,): "tape_site tape_actor tape_n",
        (_SESSIONS,): "sess_agent sess_ident sess_host sess_flags sess_pid",
        (_ROWS, 3): "fsm_log space_log sus_log",
        (_ROWS, 5): "scan_log",
        (hosts,): "net_exists net_services",
        (red,): "net_red_known_subnets",
        (NUM_ACTIONS[0],): "mask0 mask1 mask2 mask3",
        (NUM_ACTIONS[4],): "mask4",
    }
    fields = {name: (_INTEGERS, shape) for shape, names in shapes.items() for name in names.split()}
    return fields | {"tape_val": (_NUMBERS, (_DRAWS,)), "meta_red": (_STRING, ())}


_FIELDS = _fields()
# Of recordings of raw observations: what is played, and what those tell of the network.
_PLAYED = {
    "meta_steps",
    "meta_red",
    "net_red_start_host",
    "net_red_known_subnets",
    "net_exists",
    "net_services",
    "blue_action",
    "blue_msg",
    "tape_off",
    "tape_site",
    "tape_actor",
    "tape_n",
    "tape_val",
}
_RAW_FIELDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "net_address": (_INTEGERS, (NUM_SPEC_HOSTS,)),
    "net_base_pid": (_INTEGERS, (NUM_SPEC_HOSTS,)),
    "net_blue_pid": (_INTEGERS, (NUM_SPEC_HOSTS,)),
    "net_blue_ident": (_INTEGERS, (NUM_SPEC_HOSTS,)),
    "net_os": (_INTEGERS, (NUM_SPEC_HOSTS,)),
    "net_addon_order": (_INTEGERS, (NUM_SPEC_HOSTS, MAX_EXTRAS)),
    "net_cidr_third_octet": (_INTEGERS, (NUM_ZONES,)),
    "raw": (_INTEGERS, (_ROWS,)),
}
_PLAYED |= set(_RAW_FIELDS)
# Largest values of what is played; the least are 0.
_MOST = dict.fromkeys(("tape_site", "tape_actor", "tape_n"), 255)  # bytes when it is played
_RAW_MOST = {"net_os": 1, "net_address": 2**32 - 1, "net_cidr_third_octet": 255, "raw": 255}


class Trace:
    """One recorded episode: `arrays` by name, and its length."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        try:
            self.arrays = read_npz(path)
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            cause = error.__cause__ or error
            raise TraceError(f"{path} is no trace of CAGE Challenge 4: {cause}") from error
        self._check_fields()
        self._check_values()
        self.raw = self._read_raw()
        red = str(self.arrays["meta_red"])
        if red not in RED_VARIANTS:  # options would import a module that is named there
            raise TraceError(f"{path}: meta_red is {red!r:.99}, expected {', '.join(RED_VARIANTS)}")
        rate = self.arrays.get("meta_phish", np.array(PHISHING_RATE))
        try:
            self.options = Cage4Options(
                steps=int(self.arrays["meta_steps"]),
                red=red,
                phishing_rate=float(rate),
            )
        except (TypeError, ValueError) as error:
            raise TraceError(f"{path}: {error}") from error
        if self.num_steps >= self.options.steps:
            raise TraceError(
                f"{path}: blue_action has {self.num_steps} steps, expected at most "
                f"{self.options.steps - 1} as meta_steps is {self.options.steps}"
            )

    def _check_fields(self) -> None:
        """Raise TraceError unless all that is documented is there, in its shape and kind."""
        arrays = self.arrays
        is_raw = "raw" in arrays
        self.num_steps = _length(arrays, "blue_action")
        lengths = {
            _STEPS: self.num_steps,
            _AFTER: self.num_steps + 1,
            _DRAWS: _length(arrays, "tape_site"),
            _SESSIONS: _length(arrays, "sess_agent"),
        }
        if not self.num_steps:
            raise TraceError(
                f"{self.path} has no steps of blue_action; is this a trace of CAGE Challenge 4?"
            )
        fields: dict[str, tuple[str, tuple[Any, ...]]] = dict(_FIELDS)
        if is_raw:
            fields.update(_RAW_FIELDS)
        for name, (kinds, shape) in fields.items():
            if is_raw and name not in arrays and name not in _PLAYED:
                continue
            lengths[_ROWS] = _length(arrays, name)
            expected = tuple(lengths.get(part, part) for part in shape)
            if name not in arrays:
                raise TraceError(f"{self.path} lacks {name}, expected an array {expected}")
            array = arrays[name]
            if array.shape != expected:
                raise TraceError(
                    f"{self.path}: {name} has shape {array.shape}, expected {expected}"
                )
            if array.dtype.kind not in kinds:
                known = {_INTEGERS: "integers", _NUMBERS: "floats", _STRING: "a string"}[kinds]
                raise TraceError(f"{self.path}: {name} is {array.dtype}, expected {known}")

    def _check_values(self) -> None:
        """Raise TraceError unless what is played is in range."""
        arrays = self.arrays
        for name, size in (("tape_off", "tape_site"), ("sess_off", "sess_agent")):
            if name not in arrays:
                continue
            offsets, num = arrays[name], len(arrays[size])
            if offsets[0] < 0 or (offsets[1:] < offsets[:-1]).any() or offsets[-1] > num:
                raise TraceError(f"{self.path}: {name} does not ascend from 0 to {num}")
        for name, most in (_MOST | (_RAW_MOST if "raw" in arrays else {})).items():
            values = arrays[name]
            if len(values) and (values.min() < 0 or values.max() > most):
                row = int(np.flatnonzero((values < 0) | (values > most))[0])
                raise TraceError(
                    f"{self.path}: {name} is {values[row]} in row {row}, expected 0 to {most}"
                )
        exists = arrays["net_exists"][SPEC_IDS].reshape(NUM_SUBNETS, -1).astype(bool)
        users, servers = exists[:, :FIRST_SERVER], exists[:, FIRST_SERVER:]
        for part in (users, servers):  # those there are come first
            if not (part[:, 0].all() and (np.diff(part.astype(int)) <= 0).all()):
                raise TraceError(f"{self.path}: net_exists is no network of the challenge")
        start = int(arrays["net_red_start_host"])
        if start not in SPEC_IDS or not arrays["net_exists"][start]:
            raise TraceError(f"{self.path}: net_red_start_host is {start}, no host of the network")
        if not (arrays["net_red_known_subnets"] & 255).all():
            raise TraceError(f"{self.path}: net_red_known_subnets has an agent that knows none")

    def _read_raw(self) -> list[dict[str, Any]] | None:
        """Return the recorded raw observations, after reset and each step; None if there are none.

        Raises:
            TraceError: They are no such list.
        """
        if "raw" not in self.arrays:
            return None
        try:
            raw = json.loads(self.arrays["raw"].astype(np.uint8).tobytes())
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{self.path}: raw is no JSON: {error}") from error
        is_list = isinstance(raw, list) and len(raw) == self.num_steps + 1
        if not is_list or not all(
            isinstance(one, dict) and set(AGENT_NAMES) <= set(one) for one in raw
        ):
            raise TraceError(
                f"{self.path}: raw is no list of {self.num_steps + 1} dicts of {AGENT_NAMES}"
            )
        for row, one in enumerate(raw):
            for name in AGENT_NAMES:
                if not isinstance(one[name], dict):
                    raise TraceError(
                        f"{self.path}: raw of {name} is {one[name]!r:.99} at place {row}, expected "
                        "a dict"
                    )
        return raw

    def set_network(self, state: Any) -> int:
        """Write the network into a state record; return red agent 0's host."""
        exists = self.arrays["net_exists"][SPEC_IDS].reshape(NUM_SUBNETS, -1).astype(np.int64)
        masks = (exists << np.arange(HOSTS_PER_SUBNET)).sum(axis=1)
        state["exists"] = masks
        state["num_users"] = exists[:, :FIRST_SERVER].sum(axis=1)
        state["num_servers"] = exists[:, FIRST_SERVER:].sum(axis=1)
        state["services"] = self.arrays["net_services"][SPEC_IDS] & 31
        state["known_subnets"] = self.arrays["net_red_known_subnets"] & 255
        if "net_addon_order" in self.arrays:
            order = self.arrays["net_addon_order"][SPEC_IDS].astype(np.int64)
            order = np.where(order < 0, 3, order & 3)  # 3 is none
            state["extra_order"] = (order << 2 * np.arange(MAX_EXTRAS)).sum(axis=1)
        return int(np.flatnonzero(int(self.arrays["net_red_start_host"]) == SPEC_IDS)[0])


def _length(arrays: Mapping[str, np.ndarray], name: str) -> int:
    """Return how many rows an array has, 0 if it is not there."""
    return len(arrays[name]) if name in arrays and arrays[name].ndim else 0


class _Player:
    """Plays some traces in lockstep and compares all their fields."""

    def __init__(self, traces: list[Trace], max_differences: int) -> None:
        num = len(traces)
        self.traces, self.max_differences = traces, max_differences
        self.states = np.zeros(num, LOGGED_STATE_DTYPE).view(np.recarray)
        self.networks: list[RawNetwork | None] = [None] * num
        self.rules = np.concatenate(
            [np.atleast_1d(np.asarray(compile_rules(trace.options))) for trace in traces]
        ).view(np.recarray)
        self.streams = np.zeros(num, RNG_DTYPE).view(np.recarray)
        self.cursors = np.zeros(num, CURSOR_DTYPE).view(np.recarray)
        self.actions = np.zeros((num, 2 * NUM_BLUE), np.int64)
        self.obs = np.zeros((num, OBS_LENGTH), np.uint8)
        self.entries, self.starts = _join_tapes(traces)
        self.differences: list[TraceDifference] = []
        self.num_compared = 0
        self.logs = [_Logs(trace.arrays) for trace in traces]

    def play(self) -> None:
        hosts = [trace.set_network(self.states[row]) for row, trace in enumerate(self.traces)]
        begin_rows(self.states, np.array(hosts, np.int64))
        for row, trace in enumerate(self.traces):
            if trace.raw is not None:
                self.networks[row] = RawNetwork.recorded(self.states[row], trace.arrays)
        self.is_on = np.ones(len(self.traces), bool)
        self._compare(-1)
        for step in range(max(trace.num_steps for trace in self.traces)):
            for row, trace in enumerate(self.traces):
                self.is_on[row] &= step < trace.num_steps
                if self.is_on[row]:
                    self._feed(row, trace, step)
            if not self.is_on.any():
                return
            apply_rows(
                self.states,
                self.actions,
                self.is_on,
                self.streams,
                self.entries,
                self.cursors,
                self.rules,
            )
            self._compare(step)

    def _feed(self, row: int, trace: Trace, step: int) -> None:
        self.actions[row, :NUM_BLUE] = trace.arrays["blue_action"][step]
        self.actions[row, NUM_BLUE:] = trace.arrays["blue_msg"][step]
        offsets = trace.arrays["tape_off"]
        self.cursors[row].position = self.starts[row] + offsets[step]
        self.cursors[row].end = self.starts[row] + offsets[step + 1]

    def _compare(self, step: int) -> None:
        observe_rows(self.states, self.obs, self.rules)
        for row, trace in enumerate(self.traces):
            if not self.is_on[row]:
                continue
            got = self._fields_of(row, trace, step)
            for name, value in got.items():
                if name == "overflow":  # of no capacity; not recorded
                    self._check(row, step, name, 0, value)
                elif name in trace.arrays:
                    self._check(row, step, name, expected_at(trace.arrays, name, step), value)
            network = self.networks[row]
            if network is not None and trace.raw is not None:
                told = plain_raw(raw_observations(self.states[row], network))
                for agent, name in enumerate(AGENT_NAMES):
                    self._check_raw(row, step, agent, trace.raw[step + 1][name], told[agent])
            if step >= 0:
                self._check_tape(row, step)
                for name, value in self.logs[row].after(self.states[row], step).items():
                    expected = self.logs[row].recorded(name, step)
                    if expected is not None:
                        self._check(row, step, name, expected, value)
            else:
                self.logs[row].after(self.states[row], step)
            count = sum(found.path == trace.path for found in self.differences)
            if count >= self.max_differences:
                self.is_on[row] = False

    def _fields_of(self, row: int, trace: Trace, step: int) -> dict[str, Any]:
        blue4 = OBS_LENGTH - OBS_LENGTHS[4]
        fields: dict[str, Any] = {
            "obs": self.obs[row, :blue4].reshape(NUM_BLUE - 1, OBS_LENGTHS[0]),
            "obs4": self.obs[row, blue4:],
        }
        if step < 0:
            for agent in range(NUM_BLUE):
                fields[f"mask{agent}"] = action_mask(self.states[row], agent)
        else:
            fields.update(spell_out(self.states[row]))
        return fields

    def _check(self, row: int, step: int, name: str, expected: Any, got: Any) -> None:
        self.num_compared += 1
        if not np.array_equal(expected, got):
            path = self.traces[row].path
            self.differences.append(TraceDifference(path, step, name, expected, got))

    def _check_raw(self, row: int, step: int, agent: int, expected: Any, got: Any) -> None:
        """Compare what an agent reads, host by host."""
        for key in sorted({*expected, *got}):
            self.num_compared += 1
            pair = expected.get(key), got.get(key)
            if pair[0] != pair[1]:
                field = f"raw of {AGENT_NAMES[agent]}: {key}"
                path = self.traces[row].path
                self.differences.append(TraceDifference(path, step, field, *pair))

    def _check_tape(self, row: int, step: int) -> None:
        """All draws of the step, and no other, must have been used."""
        self.num_compared += 1
        cursor = self.cursors[row]
        if cursor.num_wrong:
            place = int(cursor.wrong_position)
            asked = (cursor.wrong_site, cursor.wrong_actor, cursor.wrong_n)
            there = "the end of the step's draws"
            if place < cursor.end:
                entry = self.entries[place]
                there = _draw_text(entry.site, entry.actor, entry.n)
            got = _draw_text(*asked)
        elif cursor.position < cursor.end:
            entry = self.entries[int(cursor.position)]
            there, got = _draw_text(entry.site, entry.actor, entry.n), "no draw"
        else:
            return
        path = self.traces[row].path
        self.differences.append(TraceDifference(path, step, "tape", there, got))
        self.is_on[row] = False  # nothing that follows means anything


def _draw_text(site: Any, actor: Any, n: Any) -> str:
    name = SITE_NAMES[int(site)] if int(site) < len(SITE_NAMES) else f"site {int(site)}"
    return f"{name} of actor {int(actor)} with {int(n)} choices"


def _join_tapes(traces: list[Trace]) -> tuple[np.ndarray, np.ndarray]:
    """Return all tapes one after the other, and where each begins."""
    sizes = [len(trace.arrays["tape_site"]) for trace in traces]
    starts = np.cumsum([0, *sizes])[:-1]
    entries = np.zeros(sum(sizes), TAPE_DTYPE)
    for name, source in (("site", "site"), ("actor", "actor"), ("n", "n"), ("value", "val")):
        with np.errstate(over="ignore"):
            entries[name] = np.concatenate([trace.arrays[f"tape_{source}"] for trace in traces])
    return entries.view(np.recarray), starts


def action_mask(state: Any, agent: int) -> np.ndarray:
    """Mask uint8 (82,) or (242,) of a blue agent (SPEC 10.2)."""
    num = NUM_ACTIONS[agent]
    exists = _bits(state["exists"], HOSTS_PER_SUBNET).reshape(-1)
    mask = np.ones(num, np.uint8)
    order = [
        subnet * HOSTS_PER_SUBNET + k
        for subnet in BLUE_SUBNETS[agent]
        for k in (*range(FIRST_SERVER, HOSTS_PER_SUBNET), *range(FIRST_SERVER))
    ]
    there = exists[order]
    size = len(order)
    for start in (0, size + 1, 2 * size + 1, num - size):
        mask[start : start + size] = there
    assert (ACTION_FAMILY[agent, num:] == 0).all()
    return mask


def _bits(masks: np.ndarray, num: int) -> np.ndarray:
    return (np.asarray(masks).astype(np.int64)[..., None] >> np.arange(num) & 1).astype(np.uint8)


def _spread(values: np.ndarray) -> np.ndarray:
    """Put values (..., 128) of our hosts at the 137 host ids of the specification."""
    out = np.zeros((*values.shape[:-1], NUM_SPEC_HOSTS), values.dtype)
    out[..., SPEC_IDS] = values
    return out


def _target_id(kind: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Targets as the specification numbers them: host ids, but subnets of DISCOVER."""
    is_host = (kind != DISCOVER) & (target != NONE)
    hosts = SPEC_IDS[np.where(is_host, target, 0)]
    return np.where(is_host, hosts, target)


def spell_out(state: Any) -> dict[str, np.ndarray]:
    """Return the true state after a step, as the fields of traces name and number it."""
    subnet_bits = {
        name: _bits(state[name], HOSTS_PER_SUBNET).reshape(-1)
        for name in ("exists", "process_events", "connection_events")
    }
    events = subnet_bits["process_events"] + 2 * subnet_bits["connection_events"]
    exists = subnet_bits["exists"].astype(bool)
    done, kind = state["done_type"], state["busy_type"]
    is_busy = state["busy_left"] > 0
    choice = state["choice_type"]
    is_due = done != NONE
    sessions = _sessions_of(state)
    return {
        "reward": state["reward"],
        "reward_parts": state["reward_parts"],
        "fail_counts": _fail_counts(state),
        "phase": state["phase"],
        "blue_family": state["blue_family"],
        "blue_left": state["blue_left"],
        "blue_success": state["blue_success"],
        "green": _spread(state["green"]),
        "red_choice": choice,
        "red_target": _target_id(choice, state["choice_target"]),
        "red_session": state["choice_session"],
        "red_busy": np.where(is_busy, kind, NONE),
        "red_left": state["busy_left"],
        "red_done": done,
        "red_done_target": _target_id(done, state["done_target"]),
        "red_success": np.where(is_due, state["done_success"], NONE),
        "red_exploit": state["red_exploit"],
        "red_active": state["active"],
        "fsm": _spread(state["fsm"]),
        "known_subnets": state["known_subnets"],
        **sessions,
        "events": np.where(_WATCHED, events, 0),
        "svc": np.where(exists, state["svc"], 0),
        "decoys": state["decoys"],
        "n_vsftpd": state["num_vsftpd"],
        "max_pid": state["max_pid"],
        "blocks": state["blocks"],
        "overflow": state["overflow"],
    }


def _fail_counts(state: Any) -> np.ndarray:
    counts = np.zeros((3, NUM_ZONES), np.int64)
    counts[0, :NUM_SUBNETS] = _bits(state["work_failed"], HOSTS_PER_SUBNET).sum(axis=1)
    counts[1, :NUM_SUBNETS] = _bits(state["access_failed"], HOSTS_PER_SUBNET).sum(axis=1)
    for agent in np.flatnonzero((state["done_type"] == IMPACT) & (state["active"] == 1)):
        counts[2, int(state["done_target"][agent]) // HOSTS_PER_SUBNET] += 1
    return counts


def _sessions_of(state: Any) -> dict[str, np.ndarray]:
    sizes = state["num_sessions"]
    agents = np.repeat(np.arange(NUM_RED), sizes)

    def listed(name: str) -> np.ndarray:
        return np.concatenate([state[name][agent, :size] for agent, size in enumerate(sizes)])

    return {
        "sess_agent": agents,
        "sess_ident": listed("session_ident"),
        "sess_host": SPEC_IDS[listed("session_host")],
        "sess_flags": listed("session_flags"),
        "sess_pid": listed("session_pid"),
    }


_HOST_FIELDS = {"decoys", "n_vsftpd", "max_pid", "svc", "events"}


def expected_at(arrays: Mapping[str, np.ndarray], name: str, step: int) -> np.ndarray:
    """Return what a trace recorded of a field after a step, restricted to our hosts."""
    recorded = arrays[name]
    if name in {"obs", "obs4"}:
        return recorded[step + 1]
    if name.startswith("mask"):
        return recorded
    if name.startswith("sess_"):
        offsets = arrays["sess_off"]
        return recorded[offsets[step] : offsets[step + 1]]
    row = recorded[step]
    if name in _HOST_FIELDS:
        row = row[SPEC_IDS]
        return np.where(_WATCHED, row, 0) if name == "events" else row
    return row


class _Logs:
    """What a trace records as lists, derived from how the state grows."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._rows: dict[str, dict[int, np.ndarray]] = {}
        for name in ("fsm_log", "space_log", "scan_log", "sus_log"):
            if name in arrays:
                log = arrays[name]
                steps = np.unique(log[:, 0])
                self._rows[name] = {int(step): log[log[:, 0] == step, 1:] for step in steps}
        self._num_offered = np.zeros(NUM_RED, np.int64)
        self._fsm = np.zeros((NUM_RED, NUM_HOSTS), np.int64)
        self._num_suspicious = 0

    def recorded(self, name: str, step: int) -> np.ndarray | None:
        if name not in self._rows:
            return None
        rows = self._rows[name].get(step, np.zeros((0, 4 if name == "scan_log" else 2), np.int64))
        return rows[np.argsort(rows[:, 0], kind="stable")]

    def after(self, state: Any, step: int) -> dict[str, np.ndarray]:
        fsm_rows, space_rows, scan_rows = [], [], []
        for agent in range(NUM_RED):
            table = state["table"][agent, : state["num_table"][agent]]
            is_new = (self._fsm[agent] == 0) & (state["fsm"][agent] & 15 != 0)
            fsm_rows += [(agent, SPEC_IDS[host]) for host in table if is_new[host]]
            size = int(state["num_offered"][agent])
            new_ids = state["offered"][agent, self._num_offered[agent] : size]
            space_rows += [(agent, int(ident)) for ident in new_ids]
            self._num_offered[agent] = size
            is_scan = state["done_type"][agent] in {AGGRESSIVE, STEALTH}
            if is_scan and state["done_success"][agent] == SUCCEEDED:
                host = SPEC_IDS[state["done_target"][agent]]
                ident, ports = state["busy_session"][agent], state["found_ports"][agent]
                scan_rows.append((agent, int(ident), host, int(ports)))
        self._fsm = state["fsm"].astype(np.int64) & 15
        new = slice(self._num_suspicious, int(state["num_suspicious"]))
        hosts, pids = SPEC_IDS[state["suspicious_host"][new]], state["suspicious_pid"][new]
        self._num_suspicious = int(state["num_suspicious"])
        suspicious = np.stack([hosts, pids.astype(np.int64)], axis=1)
        return {
            "fsm_log": np.array(fsm_rows, np.int64).reshape(-1, 2),
            "space_log": np.array(space_rows, np.int64).reshape(-1, 2),
            "scan_log": np.array(scan_rows, np.int64).reshape(-1, 4),
            "sus_log": suspicious[np.argsort(suspicious[:, 0], kind="stable")],
        }


class TraceReplay(NamedTuple):
    """What a replay found.

    Attributes:
        differences: Fields that came out differently, see `TraceDifference`.
        num_episodes: Files that were played.
        num_steps: Steps in them.
        num_compared: Fields that were compared.
    """

    differences: list[TraceDifference]
    num_episodes: int
    num_steps: int
    num_compared: int


def replay_traces(
    paths: Iterable[str | Path], *, batch: bool = True, max_differences: int = 20
) -> TraceReplay:
    """Play recorded episodes of CAGE Challenge 4 and compare every field of every step.

    Args:
        paths: Files of the format of the golden traces.
        batch: Whether all are played in lockstep, in one array of states; else one by one.
        max_differences: An episode is left once it has so many differences, or draws differently.

    Raises:
        TraceError: A file is damaged, or something else.
        OSError: A file can't be read.
    """
    if max_differences < 1:
        raise ValueError(f"max_differences is {max_differences}, expected at least 1")
    traces = [Trace(path) for path in paths]
    groups = [traces] if batch else [[trace] for trace in traces]
    differences: list[TraceDifference] = []
    num_compared = 0
    for group in filter(None, groups):
        player = _Player(group, max_differences)
        player.play()
        differences += player.differences
        num_compared += player.num_compared
    num_steps = sum(trace.num_steps for trace in traces)
    return TraceReplay(differences, len(traces), num_steps, num_compared)
