"""A trained defender of CAGE Challenge 4 that needs nothing but NumPy.

This file imports nothing else: copy it, with a saved defender, into any program that has the events
of the five blue agents, or runs the original: `RawEvents` makes events from the dicts that the
original returns. Each agent acts on its own observations; agents do not communicate.

A *unit* is a subnet that blue watches: RZA, OZA, RZB, OZB of the agents 0 to 3, then ADM, OFF, PUB
of agent 4. A *choice* is an action that a free agent can begin: Analyse, Remove, Restore or
DeployDecoy on one host of a unit, so 64 choices per unit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Cage4Memory", "Cage4Player", "RawEvents", "defender_logits", "save_cage4_defender"]

NUM_AGENTS, NUM_UNITS, NUM_HOSTS = 5, 7, 16
UNITS = (slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 4), slice(4, 7))  # of each agent
_AGENT_OF_UNIT = np.array([0, 1, 2, 3, 4, 4, 4])
_UNIT_NAMES = ("RZA", "OZA", "RZB", "OZB", "ADM", "OFF", "PUB")
_NUM_SERVERS = 6  # servers are the first 6 hosts of a unit, users the 10 that follow
# Rows of events, see `Cage4Events`: a vector, context, and features of hosts and routers.
_VECTOR_LENGTHS, _NUM_CONTEXT, _IN_PROGRESS, _NUM_EVENTS = (92, 92, 92, 92, 210), 5, 4, 37
EVENTS = {  # the fields read here
    "exists": 0, "alarm": 1, "session": 2, "is_source": 23, "is_analysed": 24, "has_cmd": 25,
    "has_escalate": 26, "is_removed": 27, "is_restored": 28, "since_analyse": 34,
    "since_restore": 35,
}  # fmt: skip
# Connections to a service, and from the port of SSH: only red makes them.
ATTACKS = (4, 5, 6, 7, 8, 9, 10, 11)
_PLACES = np.array([*EVENTS.values(), *ATTACKS])
KINDS = ("Analyse", "Remove", "Restore", "Decoy")
ANALYSE, REMOVE, RESTORE, DECOY = range(4)
UNIT_CHOICES = len(KINDS) * NUM_HOSTS
_NUM_ACTIONS = (82, 82, 82, 82, 242)
_SINCE = np.arange(256, dtype=np.float32)
_FADES, _STEPS = np.exp(-_SINCE / 8), np.minimum(_SINCE / 100, 1)  # of steps since
MAX_DECOYS = 4
_LONG = 255  # steps since an event that was never seen
_PHASES = (0, 167, 334, 500)
# By unit, when the rules restore every source: from 60 steps before the zone's mission to its end;
# and how many hosts of the zone may have been restored if they restore one at other times.
_FIRST, _LAST = np.array([(0, 0), (107, 334), (0, 0), (274, 500), (0, 0), (0, 0), (0, 0)]).T
_FEW, _BEGIN = np.array([3, 3, 3, 3, 0, 0, 0]), 90
_OF_USERS = np.where(np.arange(NUM_HOSTS) < _NUM_SERVERS, 1, 4)  # haste of the rules to look again
_PRIORITY = 2048  # of one work over the next, above any number of steps


HOST_FEATURES = (
    "exists", "is_user",
    "is_first",  # the server that links subnets
    "look", "remove", "restore", "known",  # see `Cage4Memory`
    "was_removed", "had_cmd", "had_escalate",  # since the latest Restore
    "is_attacked", "is_source", "session", "alarm",  # in this step
    "decoys_0", "decoys_1", "decoys_2",  # whether there are 0, 1, 2
    "sessions", "attacks", "sources",  # since the latest Restore, numbers of steps
    *(
        f"{name}_{how}"  # of steps since
        for name in ("session", "attack", "source", "analyse", "restore")
        for how in ("fades", "steps")
    ),
    "session_is_new", "attack_is_new", "source_is_new",  # later than the latest Analyse
    "stale",  # haste of the rules to look again, divided by that of the agent's stalest host
    "stalest",
    *(f"rule_{kind.lower()}" for kind in KINDS),  # what the rules choose
)  # fmt: skip


class Cage4Memory:
    """The memory of the five agents during an episode, for many games at a time.

    Call `begin` with the masks, then `note` with each observation, and `act` with each choice.

    Args:
        num_games: Number of games, N.

    Attributes:
        is_free: bool (N, 5), whether an agent can begin an action; otherwise it sleeps.
        time: Steps played.
        phase: int64 (N, 5), the mission phase that each agent sees.
        look, remove, restore, known: bool (N, 7, 16), by unit and host: whether the rules ask for
            Analyse, Remove or Restore there; whether Remove knows the process id.
        decoys: int64 (N, 7, 16), number of decoys placed since the latest Restore.
        restored: int64 (N, 7), number of Restores begun in each unit.
        num_host_features, num_unit_features: Number of features per host, per unit.
    """

    num_host_features, num_unit_features = len(HOST_FEATURES), 7 * 3 + 4

    def __init__(self, num_games: int) -> None:
        self.num_games = num_games

    def begin(self, masks: Sequence[np.ndarray]) -> None:
        """Begin new episodes in all games.

        Args:
            masks: One per agent, bool (N, 82) or (N, 242).
        """
        num, shape = self.num_games, (self.num_games, NUM_UNITS, NUM_HOSTS)
        own = [np.asarray(mask)[:, : NUM_HOSTS * _num_units(a)] for a, mask in enumerate(masks)]
        self.exists = np.concatenate(own, axis=1).reshape(shape).astype(bool)
        self.time = 0
        self.is_free = np.ones((num, NUM_AGENTS), bool)
        none = [np.zeros(shape, bool) for _ in range(7)]
        self.look, self.remove, self.restore, self.known = none[:4]
        self._removed, self._has_cmd, self._has_escalate = none[4:]
        self.decoys, self._sessions, self._attacks, self._sources = (
            np.zeros(shape, np.int64) for _ in range(4)
        )
        self.restored = np.zeros((num, NUM_UNITS), np.int64)
        since = [np.full(shape, _LONG) for _ in range(3)]
        self._since_session, self._since_attack, self._since_source = since

    def note(self, observations: Sequence[np.ndarray]) -> None:
        """Record the agents' observations; call it after `begin` and after each step.

        Args:
            observations: Rows of events, uint8 (N, 726) for agents 0 to 3, (N, 2102) for agent 4.

        Raises:
            ValueError: A row has the wrong length.
        """
        num = self.num_games
        told = np.empty((len(_PLACES), num, NUM_UNITS, NUM_HOSTS), np.uint8)
        self.phase = np.empty((num, NUM_AGENTS), np.int64)
        for agent, units in enumerate(UNITS):
            row, start = np.asarray(observations[agent]), _VECTOR_LENGTHS[agent]
            size = _num_units(agent)
            length = start + _NUM_CONTEXT + _NUM_EVENTS * (NUM_HOSTS + 1) * size
            if row.shape != (num, length):
                raise ValueError(
                    f"the observation of agent {agent} has shape {row.shape}, expected "
                    f"{(num, length)}: rows of events, as with observation='events'"
                )
            nodes = row[:, start + _NUM_CONTEXT :].reshape(num, _NUM_EVENTS, -1)
            hosts = nodes[:, _PLACES, : NUM_HOSTS * size].swapaxes(0, 1)
            told[:, :, units] = hosts.reshape(-1, num, size, NUM_HOSTS)
            self.phase[:, agent] = row[:, 0]
            self.is_free[:, agent] = row[:, start + _IN_PROGRESS] == 0
        self._now = {name: told[place] for place, name in enumerate(EVENTS)}
        is_now = {name: count > 0 for name, count in self._now.items()}
        self._attacked = told[len(EVENTS) :].any(axis=0)
        self._note_for_rules(is_now)
        for count, since, event in (
            (self._sessions, self._since_session, is_now["session"]),
            (self._attacks, self._since_attack, self._attacked),
            (self._sources, self._since_source, is_now["is_source"]),
        ):
            np.add(since, 1, out=since, where=since < _LONG)
            count[is_now["is_restored"]] = 0
            since[is_now["is_restored"]] = _LONG
            count += event
            since[event] = 0
        is_due = (self.time >= _BEGIN) & (self.restored < _FEW)
        is_due |= (self.time >= _FIRST) & (self.time < _LAST)
        self.restore |= (self._sources > 0) & is_due[..., None]

    def _note_for_rules(self, is_now: dict[str, np.ndarray]) -> None:
        """Update which actions the rules ask for."""
        self.look &= ~is_now["is_analysed"]
        self.look |= is_now["is_removed"]
        self.restore |= is_now["has_escalate"] | (is_now["has_cmd"] & ~self.known)
        self.remove &= ~is_now["is_removed"]
        self._removed |= is_now["is_removed"]
        self._has_cmd |= is_now["has_cmd"]
        self._has_escalate |= is_now["has_escalate"]
        for memory in (
            self.look, self.remove, self.known, self.restore,
            self._removed, self._has_cmd, self._has_escalate,
        ):  # fmt: skip
            memory &= ~is_now["is_restored"]
        self.decoys[is_now["is_restored"]] = 0
        self.remove |= is_now["session"]
        self.known |= is_now["session"]
        self.look |= self._attacked | is_now["is_source"]

    def rule_choices(self, num_decoys: int = 2) -> np.ndarray:
        """Return the choices of the rules, int64 (N, 5), see `rules`; they are not recorded."""
        stale = 1 + self._now["since_analyse"].astype(np.int64)
        scores = np.zeros((*self.exists.shape, len(KINDS)), np.int64)
        scores[..., RESTORE] = self.restore * (4 * _PRIORITY + stale)
        scores[..., REMOVE] = self.remove * (3 * _PRIORITY + stale)
        scores[..., ANALYSE] = self.look * (2 * _PRIORITY) + stale * _OF_USERS
        wanted = num_decoys - self.decoys
        scores[..., DECOY] = (wanted > 0) * (_PRIORITY + wanted)
        scores *= self.exists[..., None]
        return np.stack(
            [scores[:, units].reshape(self.num_games, -1).argmax(axis=1) for units in UNITS], axis=1
        )

    def host_features(self) -> np.ndarray:
        """Return the features of hosts, float32 (N, 7, 16, F), see `HOST_FEATURES`."""
        now, num, shape = self._now, self.num_games, self.exists.shape
        out = np.zeros((len(HOST_FEATURES), *shape), np.float32)  # contiguous by feature
        out[0] = self.exists
        out[1, ..., _NUM_SERVERS:] = self.exists[..., _NUM_SERVERS:]
        out[2, ..., 0] = 1
        flags = (
            self.look, self.remove, self.restore, self.known, self._removed, self._has_cmd,
            self._has_escalate, self._attacked, now["is_source"], now["session"], now["alarm"],
        )  # fmt: skip
        out[3:14] = flags
        np.minimum(out[11:14], 3, out=out[11:14])
        for number in range(3):
            out[14 + number] = self.decoys == number
        out[17:20] = self._sessions / 2, self._attacks / 4, self._sources / 3
        np.minimum(out[17:20], 2, out=out[17:20])
        stale = now["since_analyse"]
        sinces = self._since_session, self._since_attack, self._since_source, stale
        for place, since in enumerate((*sinces, now["since_restore"])):
            out[20 + 2 * place], out[21 + 2 * place] = _FADES[since], _STEPS[since]
        for place, since in enumerate(sinces[:3]):
            out[30 + place] = since < stale
        age = (1 + stale.astype(np.float32)) * self.exists * _OF_USERS
        hosts = np.arange(3 * NUM_HOSTS)
        for units in UNITS:
            own = age[:, units].reshape(num, -1)
            size, longest = own.shape[1], own.max(axis=1, keepdims=True)
            out[33, :, units] = (own / longest).reshape(num, -1, NUM_HOSTS)
            is_first = own.argmax(axis=1)[:, None] == hosts[:size]
            out[34, :, units] = is_first.reshape(num, -1, NUM_HOSTS)
        for agent, choice in enumerate(self.rule_choices().T):
            host, kind = np.divmod(choice, len(KINDS))
            unit, place = np.divmod(host, NUM_HOSTS)
            out[35 + kind, np.arange(num), UNITS[agent].start + unit, place] = 1
        return np.ascontiguousarray(np.moveaxis(out, 0, -1))

    def unit_features(self) -> np.ndarray:
        """Return the features of units, float32 (N, 7, F)."""
        out = np.zeros((self.num_games, NUM_UNITS, self.num_unit_features), np.float32)
        phase = self.phase[:, _AGENT_OF_UNIT]
        begin, end = np.array(_PHASES)[phase], np.array(_PHASES)[phase + 1]
        place = np.arange(NUM_UNITS) * 3 + phase
        np.put_along_axis(out, place[..., None], 1, axis=2)
        out[..., 21] = self.time / 500
        out[..., 22] = (self.time - begin) / (end - begin)
        out[..., 23] = np.minimum(end - self.time, 20) / 20
        out[..., 24] = np.minimum(self.restored, 8) / 4
        return out

    def useless(self) -> np.ndarray:
        """Return which choices make no sense, bool (N, 7, 64), by unit."""
        out = np.zeros((*self.exists.shape, len(KINDS)), bool)
        out[:] = ~self.exists[..., None]
        out[..., REMOVE] |= ~self.known
        out[..., DECOY] |= self.decoys >= MAX_DECOYS
        return out.reshape(self.num_games, NUM_UNITS, UNIT_CHOICES)

    def restores(self, actions: np.ndarray) -> np.ndarray:
        """Return which actions (N, 5) are Restore of a host, which costs 1; bool (N, 5)."""
        sizes = np.array([NUM_HOSTS * _num_units(agent) for agent in range(NUM_AGENTS)])
        return (actions >= 2 * sizes + 1) & (actions < 3 * sizes + 1)

    def act(self, choices: np.ndarray) -> np.ndarray:
        """Turn choices into actions, and record the actions begun.

        Args:
            choices: int (N, 5); choices of agents that are not free are ignored.

        Returns:
            int64 (N, 5), indices into each agent's own actions.
        """
        actions = np.empty((self.num_games, NUM_AGENTS), np.int64)
        for agent, units in enumerate(UNITS):
            size = NUM_HOSTS * (units.stop - units.start)
            bases = np.array([0, size + 1, 2 * size + 1, _NUM_ACTIONS[agent] - size])
            host, kind = np.divmod(np.asarray(choices)[:, agent], len(KINDS))
            acts = self.is_free[:, agent]
            actions[:, agent] = np.where(acts, bases[kind] + host, 3 * size + 1)
            unit, place = np.divmod(host, NUM_HOSTS)
            unit += units.start
            games = np.flatnonzero(acts & (kind == DECOY))
            self.decoys[games, unit[games], place[games]] += 1
            games = np.flatnonzero(acts & (kind == RESTORE))
            self.restore[games, unit[games], place[games]] = False
            self.restored[games, unit[games]] += 1
        self.time += 1
        return actions


def _choice_labels(agent: int) -> list[str]:
    """Return the labels of an agent's choices."""
    names = [f"server {k}" for k in range(_NUM_SERVERS)]
    names += [f"user {k}" for k in range(NUM_HOSTS - _NUM_SERVERS)]
    units = _UNIT_NAMES[UNITS[agent]]
    return [f"{kind} {unit} {name}" for unit in units for name in names for kind in KINDS]


def _num_units(agent: int) -> int:
    return UNITS[agent].stop - UNITS[agent].start


def defender_logits(
    weights: dict[str, np.ndarray], hosts: np.ndarray, units: np.ndarray
) -> np.ndarray:
    """Return logits (B, U * 64) of the choices of agents with U units.

    Args:
        weights: Matrices by name, as `vecenv.train.cage4_defender` saves them.
        hosts: (B, U, 16, F), see `Cage4Memory.host_features`.
        units: (B, U, F), see `Cage4Memory.unit_features`.
    """

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    first = np.maximum(linear("host", hosts) + linear("unit", units)[:, :, None], 0)
    pooled = np.concatenate([first.mean(axis=2), first.max(axis=2)], axis=2)
    second = np.maximum(linear("again", first) + linear("pooled", pooled)[:, :, None], 0)
    logits = linear("act", second) + linear("direct", hosts)
    return logits.reshape(len(hosts), -1)


def _wrong_weights(weights: dict[str, np.ndarray]) -> str:
    """Return an error message about the weights of a defender; "" if they are valid."""
    hosts, units = Cage4Memory.num_host_features, Cage4Memory.num_unit_features
    width, kinds = np.size(weights.get("host.bias", ())), len(KINDS)
    inputs = {"host": (width, hosts), "unit": (width, units), "direct": (kinds, hosts)}
    inputs |= {"again": (width, width), "pooled": (width, 2 * width), "act": (kinds, width)}
    shapes = {f"{name}.weight": shape for name, shape in inputs.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in inputs.items()}
    if weights.keys() != shapes.keys():
        return f"it has the weights {', '.join(sorted(weights)) or 'none'}"
    for name, shape in shapes.items():
        if weights[name].shape != shape or not np.isfinite(weights[name]).all():
            return f"{name} is of shape {weights[name].shape}, expected {shape}, or not finite"
    return ""


def save_cage4_defender(path: str | Path, weights: dict[str, np.ndarray], **facts: Any) -> None:
    """Save a defender for `Cage4Player` as an npz archive without pickles.

    Args:
        path: File to write; no suffix is added.
        weights: Matrices and biases by name, as `vecenv.train.cage4_defender` trains them.
        **facts: Further values to save, such as the number of training steps.

    Raises:
        ValueError: The weights do not form a defender.
    """
    if wrong := _wrong_weights(weights):
        raise ValueError(f"these are not the weights of a defender: {wrong}")
    arrays: dict[str, Any] = {
        f"weights.{name}": np.asarray(matrix, np.float32) for name, matrix in weights.items()
    }
    beside = Path(f"{path}.part")
    with beside.open("wb") as file:
        np.savez(file, facts=np.array(json.dumps(facts)), **arrays)
    beside.replace(path)


class Cage4Player:
    """Play a saved defender: from events and masks to action indices.

    Args:
        path: File that `vecenv.train.cage4_defender` has saved.
        temperature: 0 plays the likeliest choices; 1 draws with the learned probabilities; values
            between sharpen these. None takes the temperature in the file, or else 0.
        seed: Seed of these draws.

    Raises:
        ValueError: The file does not hold a defender.
        OSError: The file can't be read.

    Example:
        One game, with the five agents' events and unpadded masks::

            player = Cage4Player("defender.npz")
            player.reset(masks)
            for step in range(499):
                actions = player.act(observations)  # five indices
                observations = env.step(actions)
    """

    observation = "events"

    def __init__(
        self, path: str | Path, temperature: float | None = None, seed: int | None = 0
    ) -> None:
        try:
            with Path(path).open("rb") as stream, np.load(stream, allow_pickle=False) as file:
                self.weights = {
                    name.removeprefix("weights."): file[name].astype(np.float32)
                    for name in file.files
                    if name.startswith("weights.")
                }
                self.facts: dict[str, Any] = json.loads(str(file["facts"]))
        except OSError:
            raise
        except Exception as error:  # a file of unknown origin can raise anything
            raise ValueError(f"{path} is no defender of CAGE Challenge 4: {error}") from error
        is_told = isinstance(self.facts, dict)
        if wrong := _wrong_weights(self.weights) if is_told else "its facts are no dict":
            raise ValueError(f"{path} is no defender of CAGE Challenge 4: {wrong}")
        given = self.facts.get("temperature", 0.0) if temperature is None else temperature
        if not 0 <= given < np.inf:
            raise ValueError(f"temperature is {given!r}, expected a number of at least 0")
        self.temperature = float(given)
        self._rng = np.random.default_rng(seed)
        self._memory: Cage4Memory | None = None

    def reset(self, masks: Sequence[Any]) -> None:
        """Begin new episodes.

        Args:
            masks: One per agent, (82,) or (242,); (N, ...) for N games at a time.
        """
        rows = [np.atleast_2d(np.asarray(mask)) for mask in masks]
        self._memory = Cage4Memory(len(rows[0]))
        self._memory.begin(rows)

    def act(self, observations: Sequence[Any], report: dict[str, Any] | None = None) -> np.ndarray:
        """Return an action index per agent, int64 (5,), or (N, 5) for N games at a time.

        Args:
            observations: Rows of events, one per agent, uint8 (length,) or (N, length).
            report: Dict to fill: "probabilities", per agent float (N, choices), NaN where it is not
                free; "labels", the labels of its choices; and "chosen", int64 (N, 5).
        """
        if self._memory is None:
            raise ValueError("act before reset; call reset with the masks first")
        memory, rows = self._memory, [np.atleast_2d(np.asarray(row)) for row in observations]
        memory.note(rows)
        hosts, units, useless = memory.host_features(), memory.unit_features(), memory.useless()
        choices = np.zeros((memory.num_games, NUM_AGENTS), np.int64)
        for group in (slice(0, 4), slice(4, 5)):
            first, last = UNITS[group.start].start, UNITS[group.stop - 1].stop
            rows_of = (-1, last - first if group.start == 4 else 1)
            own_hosts = hosts[:, first:last].reshape(*rows_of, *hosts.shape[2:])
            own_units = units[:, first:last].reshape(*rows_of, units.shape[2])
            logits = defender_logits(self.weights, own_hosts, own_units)
            logits[useless[:, first:last].reshape(len(logits), -1)] = -np.inf
            if report is not None:
                sharp = (logits - logits.max(axis=1, keepdims=True)) / (self.temperature or 1)
                shares = np.exp(sharp)
                shares /= shares.sum(axis=1, keepdims=True)
                shares = shares.reshape(memory.num_games, -1, logits.shape[1])
                shares = np.where(memory.is_free[:, group, None], shares, np.nan)
                report.setdefault("probabilities", []).extend(shares.swapaxes(0, 1))
            if self.temperature:
                logits += self.temperature * self._rng.gumbel(size=logits.shape)
            choices[:, group] = logits.argmax(axis=1).reshape(memory.num_games, -1)
        if report is not None:
            report["labels"] = [_choice_labels(agent) for agent in range(NUM_AGENTS)]
            report["chosen"] = choices
        actions = memory.act(choices)
        return actions if np.ndim(observations[0]) == 2 else actions[0]


# --- events from raw observations ---

_ZONES = {
    "restricted_zone_a": 0, "operational_zone_a": 1, "restricted_zone_b": 2,
    "operational_zone_b": 3, "contractor_network": 4, "public_access_zone": 5, "admin_network": 6,
    "office_network": 7,
}  # fmt: skip
_OWN = ((0,), (1,), (2,), (3,), (6, 7, 5))
_LOCAL_PORTS = {22: 4, 1: 5, 80: 6, 443: 7, 3390: 8, 25: 9}  # places of features
_REMOTE_PORTS = {22: 11, 8800: 12}
_NO_PORT, _DRAWN, _DRAWN_REMOTE, _FROM, _SOURCE, _HAS_DECOY = 3, 10, 13, 14, 22, 30
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

    def __init__(self, agent: int, hosts: Mapping[Any, str], steps: int = 500) -> None:
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
        nodes = np.zeros((_NUM_EVENTS, self._num), np.uint8)
        hosts = {name: entry for name, entry in observation.items() if "_subnet_" in name}
        if self._t < 0:  # the first one lists all
            self._there = np.array([self._node_of(name)[0] for name in hosts])
        else:
            self._read_events(hosts, nodes)
            self._read_outcome(observation, nodes)
        nodes[0, self._there] = 1
        nodes[EVENTS["since_analyse"] :, self._there] = self._since[:, self._there]
        nodes[_HAS_DECOY : _HAS_DECOY + 4] = self._decoys
        start = _VECTOR_LENGTHS[self.agent]
        head = np.zeros(start + _NUM_CONTEXT, np.uint8)
        head[0] = sum(max(self._t, 0) >= end for end in self._ends)
        success = observation["success"]
        head[
            _VECTOR_LENGTHS[self.agent] + 1 + _SUCCESS.index(getattr(success, "name", success))
        ] = 1
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
                    nodes[EVENTS["session" if "PID" in process else "alarm"], node] += 1

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
            nodes[EVENTS["is_source"], source] += 1

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
