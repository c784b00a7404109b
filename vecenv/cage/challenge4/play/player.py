"""A trained defender of CAGE Challenge 4 that needs nothing but NumPy.

This file imports nothing else, so that it can be carried, with a saved defender beside it, into any
program that has the vectors and masks of the five blue agents. Each agent acts on what it has seen
itself; nothing passes between agents.

A *unit* is a subnet that blue watches: RZA, OZA, RZB, OZB of the agents 0 to 3, then ADM, OFF, PUB
of agent 4. A *choice* of an agent is what it can do when it is free: per unit and host Remove,
Restore or DeployDecoy (48 of a unit), then per unit 8 that block or allow the traffic from another
zone, whichever changes it, and one Sleep after those of all units.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Cage4Memory", "Cage4Player", "defender_logits", "save_cage4_defender"]

NUM_AGENTS, NUM_UNITS, NUM_HOSTS, NUM_ZONES = 5, 7, 16, 9
UNITS = (slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 4), slice(4, 7))  # of each agent
_AGENT_OF_UNIT = np.array([0, 1, 2, 3, 4, 4, 4])
_OWN_ZONE = np.array([7, 4, 8, 5, 0, 3, 6])  # place of a unit in the sorted order of zones
_ZONE_NAMES = ("ADM", "CON", "INT", "OFF", "OZA", "OZB", "PUB", "RZA", "RZB")  # sorted
_UNIT_NAMES = [_ZONE_NAMES[own] for own in _OWN_ZONE]
_ZONES = np.arange(NUM_ZONES)
OTHER_ZONES = np.array([_ZONES[own != _ZONES] for own in _OWN_ZONE])  # (7, 8)
_FIRST_SERVERS = 6  # servers are the first 6 hosts of a unit, users the 10 that follow
_UNIT_VALUES = 59  # of a vector
HOST_CHOICES, TRAFFIC_CHOICES = 3, 8
UNIT_CHOICES = HOST_CHOICES * NUM_HOSTS + TRAFFIC_CHOICES
NUM_CHOICES = (UNIT_CHOICES + 1, 3 * UNIT_CHOICES + 1)  # of agents 0 to 3, of agent 4
_REMOVE, _RESTORE, _DECOY = range(HOST_CHOICES)
_TICKS = np.array([3, 5, 2])  # of these
_MAX_DECOYS = 4
_LONG = 500.0  # steps since something that has not been seen
NUM_HOST_FEATURES, NUM_UNIT_FEATURES = 19, 7 * 3 + 3 + 2 * TRAFFIC_CHOICES
_PHASES = (0, 167, 334, 500)


class Cage4Memory:
    """What the five agents remember of an episode, of many games at a time.

    Call `begin` with the masks, then `note` with each observation, and `act` with each choice.

    Args:
        num_games: N.

    Attributes:
        busy: int (N, 5), steps until an agent is free again.
        is_free: bool (N, 5), whether an agent is free to begin an action; else it sleeps.
        time: Steps played.
        phase: int (N, 5), of the mission, as each agent sees it.
        blocked: bool (N, 7, 8), whether traffic into a unit from each other zone is.
        num_host_features, num_unit_features: Lengths of the features.
    """

    num_host_features, num_unit_features = NUM_HOST_FEATURES, NUM_UNIT_FEATURES

    def __init__(self, num_games: int) -> None:
        self.num_games = num_games

    def begin(self, masks: Sequence[np.ndarray]) -> None:
        """Begin new episodes in all games.

        Args:
            masks: Of each agent bool (N, 82) or (N, 242).
        """
        num, shape = self.num_games, (self.num_games, NUM_UNITS, NUM_HOSTS)
        own = [np.asarray(mask)[:, : NUM_HOSTS * _num_units(a)] for a, mask in enumerate(masks)]
        self._exists = np.concatenate(own, axis=1).reshape(shape).astype(bool)
        self.busy = np.zeros((num, NUM_AGENTS), np.int64)
        self.is_free = self.busy == 0
        self.time = 0
        self._target = np.full((num, NUM_AGENTS), -1)  # host among those of all units
        self._is_restored = np.zeros((num, NUM_AGENTS), bool)  # whether its target is being
        float_zeros = [np.zeros(shape, np.float32) for _ in range(6)]
        self._process_count, self._connection_count, self._both_count = float_zeros[:3]
        self._source_count, self._decoys, self._removed = float_zeros[3:]
        self._since_process, self._since_connection = (
            np.full(shape, _LONG, np.float32) for _ in range(2)
        )
        self._since_restore = np.zeros(shape, np.float32)

    def note(self, observations: Sequence[np.ndarray]) -> None:
        """Note what the agents see: after `begin`, and after each step.

        Args:
            observations: Of each agent (N, 92) or (N, 210).
        """
        rows = [np.asarray(row) for row in observations]
        units = [row[:, 1 : 1 + _UNIT_VALUES * _num_units(a)] for a, row in enumerate(rows)]
        seen = np.concatenate(units, axis=1).reshape(self.num_games, NUM_UNITS, _UNIT_VALUES)
        self.phase = np.stack([row[:, 0] for row in rows], axis=1).astype(np.int64)
        places = np.broadcast_to(NUM_ZONES + OTHER_ZONES, (self.num_games, NUM_UNITS, 8))
        self.blocked = np.take_along_axis(seen, places, axis=2).astype(bool)
        self._process = process = seen[:, :, 27:43].astype(np.float32)
        self._connection = connection = seen[:, :, 43:59].astype(np.float32)
        self._both = both = process * connection
        # An exploit over SSH alarms its target twice and its source once.
        self._source = connection * (1 - process) * both.any(axis=2, keepdims=True)
        self._finish()
        for count, event in (
            (self._process_count, process),
            (self._connection_count, connection),
            (self._both_count, both),
            (self._source_count, self._source),
        ):
            count += event
        for since, event in (
            (self._since_process, process),
            (self._since_connection, connection),
        ):
            since += 1
            since[event > 0] = 0
        self._removed[process > 0] = 0
        self._since_restore += 1
        self.is_free = self.busy == 0

    def _finish(self) -> None:
        """Forget what was of a host that a Restore has cleaned in the latest step."""
        done = self._is_restored & (self.busy == 0) & (self._target >= 0)
        if done.any():
            games, agents = np.nonzero(done)
            place = games * (NUM_UNITS * NUM_HOSTS) + self._target[games, agents]
            for memory in (
                self._process_count,
                self._connection_count,
                self._both_count,
                self._source_count,
                self._decoys,
                self._removed,
                self._since_restore,
            ):
                memory.reshape(-1)[place] = 0
            for since in (self._since_process, self._since_connection):
                since.reshape(-1)[place] = _LONG
        self._target[self.busy == 0] = -1

    def host_features(self) -> np.ndarray:
        """Return what is remembered of hosts, float32 (N, 7, 16, F)."""
        out = np.empty((self.num_games, NUM_UNITS, NUM_HOSTS, NUM_HOST_FEATURES), np.float32)
        out[..., 0] = self._exists
        out[..., 1] = self._exists
        out[..., 1][..., :_FIRST_SERVERS] = 0  # users
        out[..., 2] = 0
        out[..., 0, 2] = 1  # the server that links subnets
        out[..., 3], out[..., 4], out[..., 5] = self._process, self._connection, self._both
        out[..., 6] = np.minimum(self._process_count / 3, 1)
        out[..., 7] = np.minimum(self._connection_count / 4, 1)
        out[..., 8] = np.minimum(self._both_count / 2, 1)
        out[..., 9] = np.minimum(self._source_count / 2, 1)
        out[..., 10] = np.exp(self._since_process * (-1 / 8))
        out[..., 11] = np.exp(self._since_connection * (-1 / 8))
        out[..., 12] = np.exp(self._since_restore * (-1 / 10))
        out[..., 13] = np.minimum(self._since_restore / 200, 1)
        out[..., 14] = self._decoys / _MAX_DECOYS
        out[..., 15] = self._decoys > 0
        out[..., 16] = self._removed
        out[..., 17] = self._source
        out[..., 18] = np.minimum(self._both_count, 1)
        return out

    def unit_features(self) -> np.ndarray:
        """Return what is known of units, float32 (N, 7, F)."""
        out = np.zeros((self.num_games, NUM_UNITS, NUM_UNIT_FEATURES), np.float32)
        phase = self.phase[:, _AGENT_OF_UNIT]
        begin, end = np.array(_PHASES)[phase], np.array(_PHASES)[phase + 1]
        place = np.arange(NUM_UNITS) * 3 + phase
        np.put_along_axis(out, place[..., None], 1, axis=2)
        out[..., 21] = self.time / 500
        out[..., 22] = (self.time - begin) / (end - begin)
        out[..., 23] = np.minimum(end - self.time, 20) / 20
        out[..., 24:32] = self.blocked
        out[..., 32:40] = 1 - 2 * self.blocked.astype(np.float32)
        return out

    def useless(self) -> np.ndarray:
        """Which choices of units make no sense, bool (N, 7, 56)."""
        out = np.zeros((self.num_games, NUM_UNITS, UNIT_CHOICES), bool)
        hosts = out[..., : HOST_CHOICES * NUM_HOSTS].reshape(*self._exists.shape, HOST_CHOICES)
        hosts[:] = ~self._exists[..., None]
        hosts[..., _REMOVE] |= (self._process_count == 0) | (self._removed > 0)
        hosts[..., _DECOY] |= self._decoys >= _MAX_DECOYS
        return out

    def act(self, choices: np.ndarray) -> np.ndarray:
        """Turn choices into actions, and note what was begun.

        Args:
            choices: int (N, 5); those of agents that are not free do not count.

        Returns:
            Indices int64 (N, 5) into the agents' own actions.
        """
        actions = np.zeros((self.num_games, NUM_AGENTS), np.int64)
        for agent in range(NUM_AGENTS):
            actions[:, agent] = self._act(agent, np.asarray(choices)[:, agent])
        self.busy = np.maximum(self.busy - 1, 0)
        self.time += 1
        return actions

    def restores(self, actions: np.ndarray) -> np.ndarray:
        """Return which actions (N, 5) are Restore of a host, which costs 1; bool (N, 5)."""
        sizes = np.array([NUM_HOSTS * _num_units(agent) for agent in range(NUM_AGENTS)])
        return (actions >= 2 * sizes + 1) & (actions < 3 * sizes + 1)

    def _act(self, agent: int, choices: np.ndarray) -> np.ndarray:
        """Return an agent's actions (N,) for its choices (N,)."""
        num_units = _num_units(agent)
        size = NUM_HOSTS * num_units
        sleep = 3 * size + 1
        is_free = self.busy[:, agent] == 0
        unit, rest = np.divmod(choices, UNIT_CHOICES)
        acts = is_free & (unit < num_units)
        host, kind = np.divmod(rest, HOST_CHOICES)
        on_host = acts & (host < NUM_HOSTS)
        place = unit * NUM_HOSTS + host
        actions = np.full(self.num_games, sleep)
        bases = np.array([size + 1, 2 * size + 1, 3 * size + 2 + 2 * TRAFFIC_CHOICES * num_units])
        actions[on_host] = (bases[kind] + place)[on_host]
        games = np.flatnonzero(on_host)
        kinds, units = kind[games], UNITS[agent].start + unit[games]
        hosts = host[games]
        self.busy[games, agent] = _TICKS[kinds]
        self._target[games, agent] = units * NUM_HOSTS + hosts
        self._is_restored[games, agent] = kinds == _RESTORE
        places = kinds == _DECOY
        self._decoys[games[places], units[places], hosts[places]] += 1
        removes = kinds == _REMOVE
        self._removed[games[removes], units[removes], hosts[removes]] = 1
        games = np.flatnonzero(acts & ~on_host)
        if len(games):
            zone = (rest - HOST_CHOICES * NUM_HOSTS)[games]
            own = unit[games]
            allows = self.blocked[games, UNITS[agent].start + own, zone]
            start = np.where(allows, sleep + 1, sleep + 1 + TRAFFIC_CHOICES * num_units)
            actions[games] = start + TRAFFIC_CHOICES * own + zone
            self.busy[games, agent] = 1
        return actions


def _choice_labels(agent: int) -> list[str]:
    """Return what the choices of an agent are called."""
    labels = []
    for unit in range(UNITS[agent].start, UNITS[agent].stop):
        for host in range(NUM_HOSTS):
            server = host < _FIRST_SERVERS
            name = f"server {host}" if server else f"user {host - _FIRST_SERVERS}"
            place = f"{_UNIT_NAMES[unit]} {name}"
            labels += [f"{kind} {place}" for kind in ("Remove", "Restore", "Decoy")]
        zones = [_ZONE_NAMES[zone] for zone in OTHER_ZONES[unit]]
        labels += [f"Block or allow {_UNIT_NAMES[unit]} from {zone}" for zone in zones]
    return [*labels, "Sleep"]


def _num_units(agent: int) -> int:
    return 3 if agent == NUM_AGENTS - 1 else 1


def defender_logits(
    weights: dict[str, np.ndarray], hosts: np.ndarray, units: np.ndarray
) -> np.ndarray:
    """Return logits (B, U * 56 + 1) of the choices of agents with U units.

    Args:
        weights: Matrices by name, as `vecenv.train.cage4_defender` saves them.
        hosts: (B, U, 16, F) of `Cage4Memory.host_features`.
        units: (B, U, F) of `Cage4Memory.unit_features`.
    """

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    first = np.maximum(linear("host", hosts) + linear("unit", units)[:, :, None], 0)
    pooled = np.concatenate([first.mean(axis=2), first.max(axis=2)], axis=2)
    second = np.maximum(linear("again", first) + linear("pooled", pooled)[:, :, None], 0)
    on_hosts = linear("act", second)
    whole = np.maximum(linear("whole", np.concatenate([pooled, units], axis=2)), 0)
    rest = linear("rest", whole) + linear("direct", units)  # 8, 8 and Sleep
    sign = units[..., 32:40]
    traffic = rest[..., :8] + sign * rest[..., 8:16]
    shape = (len(hosts), hosts.shape[1], HOST_CHOICES * NUM_HOSTS)
    logits = np.concatenate([on_hosts.reshape(shape), traffic], axis=2)
    sleep = rest[..., 16].mean(axis=1, keepdims=True)
    return np.concatenate([logits.reshape(len(hosts), -1), sleep], axis=1)


def _wrong_weights(weights: dict[str, np.ndarray]) -> str:
    """Return what is wrong with the weights of a defender, "" if nothing is."""
    first = weights.get("host.weight", np.zeros(0))
    width = len(first) if first.ndim == 2 else 0
    inputs = {
        "host": (width, NUM_HOST_FEATURES),
        "unit": (width, NUM_UNIT_FEATURES),
        "again": (width, width),
        "pooled": (width, 2 * width),
        "act": (HOST_CHOICES, width),
        "whole": (width, 2 * width + NUM_UNIT_FEATURES),
        "rest": (2 * TRAFFIC_CHOICES + 1, width),
        "direct": (2 * TRAFFIC_CHOICES + 1, NUM_UNIT_FEATURES),
    }
    shapes = {f"{name}.weight": shape for name, shape in inputs.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in inputs.items()}
    if weights.keys() != shapes.keys():
        return f"it has the weights {', '.join(sorted(weights)) or 'none'}"
    for name, shape in shapes.items():
        if weights[name].shape != shape or not np.isfinite(weights[name]).all():
            return f"{name} is of shape {weights[name].shape}, expected {shape}, or not finite"
    return ""


def save_cage4_defender(path: str | Path, weights: dict[str, np.ndarray], **facts: Any) -> None:
    """Write a defender that `Cage4Player` plays, an npz archive without pickles.

    Args:
        path: File to write; the ending is taken as it is.
        weights: Matrices and biases by name, as `vecenv.train.cage4_defender` trains them.
        **facts: What else to keep, such as the steps it was trained for.

    Raises:
        ValueError: The weights are not those of a defender.
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
    """Plays a saved defender: vectors and masks in, indices out.

    Args:
        path: File that `vecenv.train.cage4_defender` has saved.
        temperature: 0 plays the likeliest choices, 1 draws choices with the probabilities that were
            learnt, numbers between sharpen these; None takes what the file says, or 0.
        seed: Of these draws.

    Raises:
        ValueError: The file holds something else.
        OSError: The file can't be read.

    Example:
        Of one game, with the five agents' unpadded vectors and masks::

            player = Cage4Player("defender.npz")
            player.reset(masks)
            for step in range(499):
                actions = player.act(observations)  # five indices
                observations = env.step(actions)
    """

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
        except Exception as error:  # whatever reading a file of unknown origin leads to
            raise ValueError(f"{path} is no defender of CAGE Challenge 4: {error}") from error
        is_told = isinstance(self.facts, dict)
        wrong = _wrong_weights(self.weights) if is_told else "its facts are no dict"
        if wrong:
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
            masks: Of each agent (82,) or (242,); (N, ...) of N games at a time.
        """
        rows = [np.atleast_2d(np.asarray(mask)) for mask in masks]
        self._memory = Cage4Memory(len(rows[0]))
        self._memory.begin(rows)

    def act(self, observations: Sequence[Any], report: dict[str, Any] | None = None) -> np.ndarray:
        """Return an index for each agent, int64 (5,), or (N, 5) of N games at a time.

        Args:
            observations: Of each agent (92,) or (210,), or (N, ...).
            report: Gets "probabilities", of each agent float (N, choices), NaN where it is not free
                to choose; "labels", what its choices are; and "chosen", int64 (N, 5).
        """
        if self._memory is None:
            raise ValueError("act before reset; call reset with the masks first")
        memory, rows = self._memory, [np.atleast_2d(np.asarray(row)) for row in observations]
        memory.note(rows)
        hosts, units, useless = memory.host_features(), memory.unit_features(), memory.useless()
        choices = np.zeros((memory.num_games, NUM_AGENTS), np.int64)
        for group in (slice(0, 4), slice(4, 5)):
            first, last = UNITS[group.start].start, UNITS[group.stop - 1].stop
            size = last - first if group.start == 4 else 1
            rows_of = (-1, size)
            logits = defender_logits(
                self.weights,
                hosts[:, first:last].reshape(*rows_of, *hosts.shape[2:]),
                units[:, first:last].reshape(*rows_of, units.shape[2]),
            )
            bad = useless[:, first:last].reshape(len(logits), -1)
            logits[:, :-1][bad] = -np.inf
            if report is not None:
                shares = np.exp(
                    (logits - logits.max(axis=1, keepdims=True)) / (self.temperature or 1)
                )
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
