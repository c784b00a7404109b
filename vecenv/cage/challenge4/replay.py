"""Replay recorded episodes of the original in the simulator and compare them field by field.

The file format is that of the golden traces: one `.npz` of plain arrays per episode. It has the
network, blue's actions and messages, the tape of all random draws, and the fields to compare. A
recording of raw observations needs only these to compare, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vecenv.cage.challenge4.env import Cage4Options, compile_rules, observer_of_all
from vecenv.cage.challenge4.observations import FLAT, mask_all
from vecenv.cage.challenge4.original import RawNetwork, plain_raw, raw_observations
from vecenv.cage.challenge4.rules import codes
from vecenv.cage.challenge4.rules.draws import CURSOR_DTYPE, TAPE_DTYPE
from vecenv.cage.challenge4.rules.dynamics import apply, begin
from vecenv.cage.challenge4.rules.state import STATE_DTYPE
from vecenv.core.arguments import read_count
from vecenv.files import read_npz
from vecenv.jit import cached_njit
from vecenv.jit.random import RNG_DTYPE

HOSTS = np.arange(codes.NUM_HOSTS)
SPEC_IDS = codes.spec_id(HOSTS)  # of the simulator's hosts
_WATCHED = np.isin(SPEC_IDS // 17, (codes.CON, codes.INT), invert=True)  # hosts that keep events


class TraceError(ValueError):
    """A file is not a trace in the documented format."""


class TraceDifference(NamedTuple):
    """A field whose replayed value differs from the recorded one."""

    path: str
    step: int  # 0-based; -1 for the state after the reset
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


_observe = observer_of_all(FLAT)


@cached_njit
def begin_row(states, host, obs, masks, rules):
    """Begin an episode of a state (1,), with red agent 0 on a host; write what blue is given."""
    begin(states[0], host)
    _observe(states[0], obs, rules[0])
    mask_all(states[0], masks, rules[0])


@cached_njit
def play_row(states, actions, streams, tape, obs, rules):
    """Step a state (1,) with a tape (entries, cursors (1,)); write blue's observation."""
    entries, cursors = tape
    apply(states[0], actions, (streams[0], (entries, cursors[0])), rules[0])
    _observe(states[0], obs, rules[0])


_HOSTS, _ZONES, _RED, _BLUE = codes.NUM_SPEC_HOSTS, codes.NUM_ZONES, codes.NUM_RED, codes.NUM_BLUE


def _by_name(names: dict[tuple[Any, ...], str]) -> dict[str, tuple[Any, ...]]:
    return {name: shape for shape, words in names.items() for name in words.split()}


# Shapes of a trace's arrays; words stand for variable lengths.
_SHAPES = _by_name(
    {
        (): "meta_steps meta_red net_red_start_host",
        ("steps",): "reward phase",
        ("steps", _BLUE): "blue_action blue_msg blue_family blue_left blue_success",
        ("steps", 4): "reward_parts",
        ("steps", 3, _ZONES): "fail_counts",
        ("steps", _ZONES): "blocks",
        ("steps", _HOSTS): "green events svc decoys n_vsftpd max_pid",
        ("steps", _RED): "red_choice red_target red_session red_busy red_left red_done "
        "red_done_target red_success red_exploit red_active known_subnets",
        ("steps", _RED, _HOSTS): "fsm",
        ("steps + 1",): "tape_off sess_off",
        ("steps + 1", _BLUE - 1, codes.OBS_LENGTHS[0]): "obs",
        ("steps + 1", codes.OBS_LENGTHS[4]): "obs4",
        ("draws",): "tape_site tape_actor tape_n tape_val",
        ("sessions",): "sess_agent sess_ident sess_host sess_flags sess_pid",
        ("rows", 3): "fsm_log space_log sus_log",
        ("rows", 5): "scan_log",
        (_HOSTS,): "net_exists net_services",
        (_RED,): "net_red_known_subnets",
        (codes.NUM_ACTIONS[0],): "mask0 mask1 mask2 mask3",
        (codes.NUM_ACTIONS[4],): "mask4",
    }
)
_RAW_SHAPES = _by_name(
    {
        (_HOSTS,): "net_address net_base_pid net_blue_pid net_blue_ident net_os",
        (_HOSTS, codes.MAX_EXTRAS): "net_addon_order",
        (_ZONES,): "net_cidr_third_octet",
        ("rows",): "raw",
    }
)
# Arrays that every recording of raw observations has.
_NEEDED = (
    "meta_steps meta_red net_red_start_host net_red_known_subnets net_exists net_services "
    "blue_action blue_msg tape_off tape_site tape_actor tape_n tape_val"
)
_PLAYED = {*_NEEDED.split(), *_RAW_SHAPES}
_KINDS = {"tape_val": ("f", "floats"), "meta_red": ("U", "a string")}
# Largest valid values of the played arrays; the smallest are 0.
_MOST = dict.fromkeys(("tape_site", "tape_actor", "tape_n"), 255)  # played as bytes
_RAW_MOST = {"net_os": 1, "net_address": 2**32 - 1, "net_cidr_third_octet": 255, "raw": 255}


class Trace:
    """One recorded episode: `arrays` by name, length, options, and any raw observations."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        try:
            self.arrays = read_npz(path)
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            cause = error.__cause__ or error
            raise TraceError(f"{path} is no trace of CAGE Challenge 4: {cause}") from error
        self.num_steps = self._length("blue_action")
        if not self.num_steps:
            self._refuse(" has no steps of blue_action; is this a trace of CAGE Challenge 4?")
        self._check_shapes()
        self._check_values()
        self.raw = self._read_raw() if "raw" in self.arrays else None
        red = str(self.arrays["meta_red"])
        if red not in codes.RED_VARIANTS:  # a "module:function" would be imported
            self._refuse(f": meta_red is {red!r:.99}, expected {', '.join(codes.RED_VARIANTS)}")
        steps = int(self.arrays["meta_steps"])
        rate = self.arrays.get("meta_phish", np.array(codes.PHISHING_RATE))
        try:
            self.options = Cage4Options(steps, red, float(rate), log=True)
        except (TypeError, ValueError) as error:
            raise TraceError(f"{path}: {error}") from error
        if self.num_steps >= steps:
            self._refuse(
                f": blue_action has {self.num_steps} steps, expected at most {steps - 1} as "
                f"meta_steps is {steps}"
            )

    def _refuse(self, problem: str) -> None:
        raise TraceError(f"{self.path}{problem}")

    def _length(self, name: str) -> int:
        """Return an array's number of rows; 0 if it is missing."""
        array = self.arrays.get(name)
        return len(array) if array is not None and array.ndim else 0

    def _check_shapes(self) -> None:
        """Raise TraceError unless all documented arrays exist with their shapes and dtype kinds."""
        lengths = {"steps": self.num_steps, "steps + 1": self.num_steps + 1}
        lengths |= {"draws": self._length("tape_site"), "sessions": self._length("sess_agent")}
        is_raw = "raw" in self.arrays
        for name, shape in (_SHAPES | _RAW_SHAPES if is_raw else _SHAPES).items():
            if is_raw and name not in self.arrays and name not in _PLAYED:
                continue
            lengths["rows"] = self._length(name)
            expected = tuple(lengths.get(part, part) for part in shape)
            if (array := self.arrays.get(name)) is None:
                return self._refuse(f" lacks {name}, expected an array {expected}")
            if array.shape != expected:
                self._refuse(f": {name} has shape {array.shape}, expected {expected}")
            kinds, known = _KINDS.get(name, ("iu", "integers"))
            if array.dtype.kind not in kinds:
                self._refuse(f": {name} is {array.dtype}, expected {known}")

    def _check_values(self) -> None:
        """Raise TraceError unless the values of all played arrays are in range."""
        arrays = self.arrays
        for name, size in (("tape_off", "tape_site"), ("sess_off", "sess_agent")):
            if name in arrays:
                offsets, num = arrays[name], len(arrays[size])
                if offsets[0] < 0 or (offsets[1:] < offsets[:-1]).any() or offsets[-1] > num:
                    self._refuse(f": {name} does not ascend from 0 to {num}")
        for name, most in (_MOST | (_RAW_MOST if "raw" in arrays else {})).items():
            wrong = np.flatnonzero((arrays[name] < 0) | (arrays[name] > most))
            if len(wrong):
                value = arrays[name][wrong[0]]
                self._refuse(f": {name} is {value} in row {wrong[0]}, expected 0 to {most}")
        exists = self._exists()
        for part in (exists[:, : codes.FIRST_SERVER], exists[:, codes.FIRST_SERVER :]):
            if not (part[:, 0].all() and (np.diff(part) <= 0).all()):  # existing ones come first
                self._refuse(": net_exists is no network of the challenge")
        start = int(arrays["net_red_start_host"])
        if start not in SPEC_IDS or not arrays["net_exists"][start]:
            self._refuse(f": net_red_start_host is {start}, no host of the network")
        if not (arrays["net_red_known_subnets"] & 255).all():
            self._refuse(": net_red_known_subnets has an agent that knows none")

    def _exists(self) -> np.ndarray:
        """Return which hosts exist, int64 (8, 16)."""
        exists = self.arrays["net_exists"][SPEC_IDS] != 0
        return exists.reshape(codes.NUM_SUBNETS, -1).astype(np.int64)

    def _read_raw(self) -> list[dict[str, Any]]:
        """Return the recorded raw observations after the reset and after each step.

        Raises:
            TraceError: The array is not a JSON list of raw observations.
        """
        try:
            raw = json.loads(self.arrays["raw"].astype(np.uint8).tobytes())
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{self.path}: raw is no JSON: {error}") from error
        names, num = codes.AGENT_NAMES, self.num_steps + 1
        if not isinstance(raw, list) or len(raw) != num:
            self._refuse(f": raw is no list of {num} dicts")
        for row, one in enumerate(raw):
            for name in names:
                if not isinstance(one, dict) or not isinstance(one.get(name), dict):
                    self._refuse(f": raw of {name} is no dict at place {row}")
        return raw

    def set_network(self, state: Any) -> int:
        """Write the network into a state record; return red agent 0's host."""
        exists = self._exists()
        state["exists"] = (exists << np.arange(codes.HOSTS_PER_SUBNET)).sum(axis=1)
        state["num_users"] = exists[:, : codes.FIRST_SERVER].sum(axis=1)
        state["num_servers"] = exists[:, codes.FIRST_SERVER :].sum(axis=1)
        state["services"] = self.arrays["net_services"][SPEC_IDS] & 31
        state["known_subnets"] = self.arrays["net_red_known_subnets"] & 255
        if "net_addon_order" in self.arrays:
            order = self.arrays["net_addon_order"][SPEC_IDS].astype(np.int64)
            order = np.where(order < 0, 3, order & 3)  # 3: none
            state["extra_order"] = (order << 2 * np.arange(codes.MAX_EXTRAS)).sum(axis=1)
        return int(np.flatnonzero(int(self.arrays["net_red_start_host"]) == SPEC_IDS)[0])

    def tape(self) -> np.ndarray:
        """Return the draws of all steps, TAPE_DTYPE (L,)."""
        entries = np.zeros(self._length("tape_site"), TAPE_DTYPE)
        with np.errstate(over="ignore"):
            for name in ("site", "actor", "n", "value"):
                entries[name] = self.arrays[f"tape_{name.removesuffix('ue')}"]
        return entries


class _Player:
    """Plays a trace and compares all its fields."""

    def __init__(self, trace: Trace, max_differences: int) -> None:
        self.trace, self.max_differences = trace, max_differences
        self.differences: list[TraceDifference] = []
        self.num_compared = 0
        self.states = np.zeros(1, STATE_DTYPE).view(np.recarray)
        self.state: Any = self.states[0]
        self.obs = np.zeros(codes.OBS_LENGTH, np.uint8)
        self.masks = np.zeros(sum(codes.NUM_ACTIONS), np.bool_)
        self.cursors = np.zeros(1, CURSOR_DTYPE).view(np.recarray)
        self.entries = trace.tape().view(np.recarray)
        self.logs = _Logs()

    def play(self) -> None:
        arrays = self.trace.arrays
        rules = np.atleast_1d(np.asarray(compile_rules(self.trace.options))).view(np.recarray)
        streams = np.zeros(1, RNG_DTYPE).view(np.recarray)
        start = self.trace.set_network(self.state)
        begin_row(self.states, start, self.obs, self.masks, rules)
        is_raw = self.trace.raw is not None
        self.network: Any = RawNetwork.recorded(self.state, arrays) if is_raw else None
        actions = np.concatenate([arrays["blue_action"], arrays["blue_msg"]], axis=1)
        offsets, tape = arrays["tape_off"].astype(np.int64), (self.entries, self.cursors)
        self._compare(-1)
        for step, row in enumerate(actions.astype(np.int64)):
            self.cursors[0].position, self.cursors[0].end = offsets[step], offsets[step + 1]
            play_row(self.states, row, streams, tape, self.obs, rules)
            self._compare(step)
            if not self._check_tape(step) or len(self.differences) >= self.max_differences:
                return

    def _compare(self, step: int) -> None:
        trace, blue4 = self.trace, codes.OBS_LENGTH - codes.OBS_LENGTHS[4]
        got: dict[str, Any] = {
            "obs": self.obs[:blue4].reshape(codes.NUM_BLUE - 1, codes.OBS_LENGTHS[0]),
            "obs4": self.obs[blue4:],
        }
        if step < 0:
            self.logs.after(self.state)
            masks = np.split(self.masks, np.cumsum(codes.NUM_ACTIONS)[:-1])
            got |= {f"mask{agent}": mask for agent, mask in enumerate(masks)}
        else:
            got |= _spell_out(self.state) | self.logs.after(self.state)
            self._check(step, "overflow", 0, self.state["overflow"])  # no capacity is exceeded
        for name, value in got.items():
            if name in trace.arrays:
                self._check(step, name, _expected_at(trace.arrays, name, step), value)
        if trace.raw is not None:
            told = plain_raw(raw_observations(self.state, self.network))
            for name, own in zip(codes.AGENT_NAMES, told, strict=True):
                recorded = trace.raw[step + 1][name]
                for key in sorted({*recorded, *own}):
                    pair = recorded.get(key), own.get(key)
                    self._note(step, f"raw of {name}: {key}", *pair, pair[0] == pair[1])

    def _check(self, step: int, name: str, expected: Any, got: Any) -> None:
        self._note(step, name, expected, got, np.array_equal(expected, got))

    def _note(self, step: int, name: str, expected: Any, got: Any, is_equal: bool) -> None:
        self.num_compared += 1
        if not is_equal:
            self.differences.append(TraceDifference(self.trace.path, step, name, expected, got))

    def _check_tape(self, step: int) -> bool:
        """Return whether the step has used exactly its recorded draws."""
        cursor, there, got = self.cursors[0], "the end of the step's draws", "no draw"
        if not cursor.num_wrong and cursor.position == cursor.end:
            self.num_compared += 1
            return True
        place = int(cursor.wrong_position if cursor.num_wrong else cursor.position)
        if place < cursor.end:
            there = _draw_text(*self.entries[place].tolist()[:3])
        if cursor.num_wrong:
            got = _draw_text(cursor.wrong_site, cursor.wrong_actor, cursor.wrong_n)
        self._note(step, "tape", there, got, False)
        return False  # later differences would mean nothing


def _draw_text(site: Any, actor: Any, n: Any) -> str:
    names = codes.SITE_NAMES
    name = names[int(site)] if int(site) < len(names) else f"site {int(site)}"
    return f"{name} of actor {int(actor)} with {int(n)} choices"


def _bits(masks: np.ndarray, num: int) -> np.ndarray:
    return (np.asarray(masks).astype(np.int64)[..., None] >> np.arange(num) & 1).astype(np.uint8)


def _spread(values: np.ndarray) -> np.ndarray:
    """Move values (..., 128) of the simulator's hosts to the specification's 137 host ids."""
    out = np.zeros((*values.shape[:-1], codes.NUM_SPEC_HOSTS), values.dtype)
    out[..., SPEC_IDS] = values
    return out


def _target_id(kind: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return targets in the specification's numbering: host ids, or subnets for DISCOVER."""
    is_host = (kind != codes.DISCOVER) & (target != codes.NONE)
    hosts = SPEC_IDS[np.where(is_host, target, 0)]
    return np.where(is_host, hosts, target)


_AS_THEY_ARE = (
    "reward reward_parts phase blue_family blue_left blue_success red_exploit known_subnets decoys "
    "max_pid blocks"
)


def _spell_out(state: Any) -> dict[str, np.ndarray]:
    """Return the true state after a step, with the names and numbering of trace fields."""
    subnet_bits = {
        name: _bits(state[name], codes.HOSTS_PER_SUBNET).reshape(-1)
        for name in ("exists", "process_events", "connection_events")
    }
    events = subnet_bits["process_events"] + 2 * subnet_bits["connection_events"]
    exists = subnet_bits["exists"].astype(bool)
    done, choice = state["done_type"], state["choice_type"]
    return {
        **{name: state[name] for name in _AS_THEY_ARE.split()},
        "fail_counts": _fail_counts(state),
        "green": _spread(state["green"]),
        "red_choice": choice,
        "red_target": _target_id(choice, state["choice_target"]),
        "red_session": state["choice_session"],
        "red_busy": np.where(state["busy_left"] > 0, state["busy_type"], codes.NONE),
        "red_left": state["busy_left"],
        "red_done": done,
        "red_done_target": _target_id(done, state["done_target"]),
        "red_success": np.where(done != codes.NONE, state["done_success"], codes.NONE),
        "red_active": state["active"],
        "fsm": _spread(state["fsm"]),
        **_sessions_of(state),
        "events": np.where(_WATCHED, events, 0),
        "svc": np.where(exists, state["svc"], 0),
        "n_vsftpd": state["num_vsftpd"],
    }


def _fail_counts(state: Any) -> np.ndarray:
    counts = np.zeros((3, codes.NUM_ZONES), np.int64)
    counts[0, : codes.NUM_SUBNETS] = np.bitwise_count(state["work_failed"])
    counts[1, : codes.NUM_SUBNETS] = np.bitwise_count(state["access_failed"])
    has_hit = (state["done_type"] == codes.IMPACT) & (state["active"] == 1)
    np.add.at(counts[2], state["done_target"][has_hit] // codes.HOSTS_PER_SUBNET, 1)
    return counts


def _sessions_of(state: Any) -> dict[str, np.ndarray]:
    is_there = np.arange(codes.MAX_SESSIONS) < state["num_sessions"][:, None]
    listed = {
        f"sess_{name}": state[f"session_{name}"][is_there]
        for name in ("ident", "host", "flags", "pid")
    }
    listed["sess_host"] = SPEC_IDS[listed["sess_host"]]
    return {"sess_agent": np.nonzero(is_there)[0], **listed}


_HOST_FIELDS = {"decoys", "n_vsftpd", "max_pid", "svc", "events"}


def _expected_at(arrays: Mapping[str, np.ndarray], name: str, step: int) -> np.ndarray:
    """Return a field's recorded value after a step, restricted to the simulator's hosts."""
    recorded = arrays[name]
    if name.startswith("mask"):
        return recorded
    if name.endswith("_log"):
        rows = recorded[recorded[:, 0] == step, 1:]
        return rows[np.argsort(rows[:, 0], kind="stable")]
    if name.startswith("sess_"):
        return recorded[slice(*arrays["sess_off"][step : step + 2])]
    row = recorded[step + 1 if name in {"obs", "obs4"} else step]
    if name in _HOST_FIELDS:
        row = row[SPEC_IDS]
    return np.where(_WATCHED, row, 0) if name == "events" else row


class _Logs:
    """Fields that a trace records as lists, derived from the state's changes."""

    def __init__(self) -> None:
        self._num_offered = np.zeros(codes.NUM_RED, np.int64)
        self._fsm = np.zeros((codes.NUM_RED, codes.NUM_HOSTS), np.int64)
        self._num_suspicious = 0

    def after(self, state: Any) -> dict[str, np.ndarray]:
        fsm_rows, space_rows, scan_rows = [], [], []
        for agent in range(codes.NUM_RED):
            table = state["table"][agent, : state["num_table"][agent]]
            is_new = (self._fsm[agent] == 0) & (state["fsm"][agent] & 15 != 0)
            fsm_rows += [(agent, SPEC_IDS[host]) for host in table if is_new[host]]
            size = int(state["num_offered"][agent])
            new_ids = state["offered"][agent, self._num_offered[agent] : size]
            space_rows += [(agent, int(ident)) for ident in new_ids]
            self._num_offered[agent] = size
            is_scan = state["done_type"][agent] in {codes.AGGRESSIVE, codes.STEALTH}
            if is_scan and state["done_success"][agent] == codes.SUCCEEDED:
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
    """Result of a replay.

    Attributes:
        differences: Fields whose values differ; see `TraceDifference`.
        num_episodes: Number of replayed files.
        num_steps: Number of replayed steps.
        num_compared: Number of compared fields.
    """

    differences: list[TraceDifference]
    num_episodes: int
    num_steps: int
    num_compared: int


def replay_traces(paths: Iterable[str | Path], *, max_differences: int = 20) -> TraceReplay:
    """Play recorded episodes of CAGE Challenge 4 and compare every field of every step.

    Args:
        paths: Files in the format of the golden traces; all are read before the first is played.
        max_differences: An episode ends early at this many differences, or if its draws differ.

    Raises:
        TraceError: A file is damaged or not a trace.
        OSError: A file can't be read.
    """
    read_count("max_differences", max_differences)
    players = [_Player(trace, max_differences) for trace in map(Trace, paths)]
    for player in players:
        player.play()
    return TraceReplay(
        [found for player in players for found in player.differences],
        len(players),
        sum(player.trace.num_steps for player in players),
        sum(player.num_compared for player in players),
    )
