"""What bounds the score of CAGE Challenge 4: a planner that sees everything and simulates ahead.

    python benchmarks/cage4_planner.py
    python benchmarks/cage4_planner.py --clairvoyant --copies 1 --horizon 499 --errors 0

Rules and planner play the same episodes. When an agent is free and red is in its zones, the planner
tries in copies what the rules do, the same without Restore, and Restore of each host with a session
of red; then the rules (those of `Cage4Memory`, compiled) play on. The best on average over the same
futures goes if that is clear. A clairvoyant knows the game's own future.
"""

import numpy as np
import tyro
from numba import njit

from vecenv.cage.challenge4.env import Cage4Options, compile_rules
from vecenv.cage.challenge4.rules import codes, dynamics, events
from vecenv.cage.challenge4.rules.state import STATE_DTYPE
from vecenv.jit.random import RNG_DTYPE, open_block, seed_key, word_of

RULES, NO_RESTORE = np.int64(-1), np.int64(-2)  # instead of a choice
REMOVES, RESTORES, DECOYS = 1, 2, 3  # what a choice does: place * 4 + this, or 0 to analyse
LOOK, REMOVE, RESTORE, KNOWN, SOURCE = (np.int64(1 << bit) for bit in range(5))
SLEEPS, NUM_ACTIONS = np.array(codes.SLEEPS), np.array(codes.NUM_ACTIONS)
# When all sources are restored, by unit: zones of agents 0 to 3, then those of agent 4.
FIRST, LAST = np.array([(0, 0), (107, 334), (0, 0), (274, 500), (0, 0), (0, 0), (0, 0)]).T
FIELDS = [(name, STATE_DTYPE[name]) for name in STATE_DTYPE.names or ()]
FIELDS += [("tasks", np.uint8, (112,)), ("placed", np.uint8, (112,)), ("restored", np.int32, (7,))]
STATE = np.dtype([*FIELDS, ("score", np.int32)], align=True)


@njit
def note(state):  # noqa: C901
    """Remember what the step told of hosts, as `Cage4Memory.note` does."""
    tasks, t = state.tasks, np.int64(state.t)
    for agent in range(5 if t else 0):
        place = events.PLACE[state.blue_target[agent]]
        family = codes.SLEEP if state.blue_left[agent] else state.blue_family[agent]
        if family == codes.ANALYSE:
            files, known = np.int64(state.analysed[agent]), tasks[place] & KNOWN
            tasks[place] &= ~LOOK
            if files & codes.ESCALATE_FILE or (files & codes.CMD_FILE and not known):
                tasks[place] |= RESTORE
        elif family == codes.REMOVE:
            tasks[place] = (tasks[place] | LOOK) & ~REMOVE
        elif family == codes.RESTORE:
            tasks[place] = state.placed[place] = 0
    for index in range(np.int64(state.num_events)):
        event = state.events[index]
        node, far, host = np.int64(event.node), event.remote_port, np.int64(event.remote)
        if event.kind == events.SESSION:
            tasks[events.PLACE[node]] |= REMOVE | KNOWN
        elif event.kind == events.CONNECTION:
            is_open, is_host = far != codes.BLOCKED_PORT, node < events.FIRST_ROUTER
            if event.local_port > 0 or (is_open and far < codes.FIRST_PORT):
                tasks[events.PLACE[node] if is_host else 0] |= LOOK if is_host else 0
            zone = node >> 4 if is_host else node - events.FIRST_ROUTER
            if is_open and host != node and events.WATCHER[host >> 4] == events.WATCHER[zone]:
                tasks[events.PLACE[host]] |= LOOK | SOURCE
    for place in range(112):
        is_due = place < 64 and t >= 90 and state.restored[place >> 4] < 3
        if tasks[place] & SOURCE and (is_due or FIRST[place >> 4] <= t < LAST[place >> 4]):
            tasks[place] |= RESTORE


@njit
def choose(state, agent, may_restore):
    """Return what the rules choose, as `Cage4Memory.rule_choices` does."""
    best, found, first = np.int64(0), np.int64(0), agent * 16
    for place in range(first, 112 if agent == 4 else first + 16):
        does, wanted = np.int64(state.tasks[place]), 2 - np.int64(state.placed[place])
        stale, kind = 1 + np.int64(state.shown[events.SINCE_ANALYSE + place]), 0
        haste = stale * (1 if place & 15 < codes.MAX_SERVERS else 4)
        if does & RESTORE and may_restore:
            haste, kind = 8192 + stale, RESTORES
        elif does & REMOVE:
            haste, kind = 6144 + stale, REMOVES
        elif does & LOOK:
            haste += 4096
        elif wanted > 0:
            haste, kind = 2048 + wanted, DECOYS
        if state.shown[place] and haste > best:  # a host that is there
            best, found = haste, (place - first) * 4 + kind
    return found


@njit
def act(state, agent, choice):
    """Return an agent's action, and note what it begins, as `Cage4Memory.act` does."""
    if state.blue_success[agent] == codes.IN_PROGRESS:
        return SLEEPS[agent]
    choice = choice if choice >= 0 else choose(state, agent, choice == RULES)
    size, place, kind = 48 if agent == 4 else 16, choice >> 2, choice & 3
    if kind == RESTORES:
        state.tasks[agent * 16 + place] &= ~RESTORE
        state.restored[agent + (place >> 4)] += 1
    state.placed[agent * 16 + place] += kind == DECOYS
    return place + (0, size + 1, 2 * size + 1, NUM_ACTIONS[agent] - size)[kind]


@njit
def play(state, said, num_steps, rng, rules):
    """Play steps, the first as is said; return their rewards without the contractors' Impact."""
    own, actions = np.int64(0), np.zeros(10, np.int64)
    for step in range(min(num_steps, rules.steps - 1 - np.int64(state.t))):
        open_block(rng)
        for agent in range(5):
            actions[agent] = act(state, agent, RULES if step else said[agent])
        dynamics.apply(state, actions, (rng, None), rules)
        note(state)
        own += np.int64(state.reward)
        for red in range(6):
            zone = np.int64(state.done_target[red]) >> 4
            if state.done_type[red] == codes.IMPACT and state.active[red] and zone == codes.CON:
                own -= codes.IMPACT_REWARD[np.int64(state.phase), zone]
        state.score += state.reward if state.t < rules.steps - 1 else 0
    return own


@njit
def plan(games, raw, streams, rules, copies, how):
    """Say what the agents do in games[0], int64 (5,); games[1] is for copies; raw: their bytes."""
    game, said, tried = games[0], np.full(5, RULES), np.full(50, RULES)
    gains, base, (horizon, errors, clairvoyant) = np.zeros(copies), np.zeros(copies), how
    for agent in np.flatnonzero(game.blue_success != codes.IN_PROGRESS):
        num = 1 + np.int64(choose(game, agent, True) & 3 == RESTORES)
        tried[1] = NO_RESTORE
        for place in range(48 if agent == 4 else 16):
            host = events.WATCHED[agent * 16 + place]
            if np.int64(game.red_hosts[host >> 4]) >> (host & 15) & 1:
                tried[num], num = place * 4 + RESTORES, num + 1
        best, found = 0.0, RULES
        for index in range(num if num > 1 and copies else 0):
            said[agent] = tried[index]
            for copy in range(copies):
                streams[1] = streams[0]
                for byte in range(raw.shape[1]):
                    raw[1, byte] = raw[0, byte]
                if not clairvoyant:
                    word = word_of(streams[0].key, ~streams[0].counter - np.uint64(copy))
                    streams[1].key = seed_key(word)
                gains[copy] = play(games[1], said, horizon, streams[1], rules)
            base[:] = gains if index == 0 else base
            gains -= base
            if gains.mean() > max(best, errors * gains.std() / copies**0.5):
                best, found = gains.mean(), tried[index]
        said[agent] = found
    return said


def main(
    episodes: int = 100,
    copies: int = 100,  # of a game, for everything that is tried
    horizon: int = 50,  # steps that are played in a copy
    errors: float = 1.0,  # standard errors by which something must be better than the rules
    clairvoyant: bool = False,  # whether copies have the game's own luck
    seed: int = 1000,
) -> None:
    """Print score, that without the contractors' Impact, number of choices unlike the rules'."""
    rules, found = compile_rules(Cage4Options(log=True)), np.zeros((2, episodes, 3))
    for num, part in zip((0, copies), found, strict=True):
        for episode in range(episodes):
            raw = np.zeros((2, STATE.itemsize), np.uint8)
            games, streams = raw.view(STATE)[:, 0].view(np.recarray), np.zeros(2, RNG_DTYPE)
            streams = streams.view(np.recarray)
            streams["key"] = seed_key(np.uint64(seed + episode))
            open_block(streams[0])
            dynamics.reset(games[0], streams[0], rules)
            while games[0].t < rules.steps - 1:
                said = plan(games, raw, streams, rules, num, (horizon, errors, clairvoyant))
                part[episode, 1] += play(games[0], said, 1, streams[0], rules)
                part[episode, 2] += (said != RULES).sum()
            part[episode, 0] = games[0].score
    for name, part in (("rules", found[0]), ("planner", found[1]), ("gain", found[1] - found[0])):
        halves = 1.96 * part.std(axis=0, ddof=1) / episodes**0.5
        print(name, *(f"{m:.2f} ± {h:.2f}" for m, h in zip(part.mean(0), halves, strict=True)))


if __name__ == "__main__":
    tyro.cli(main)
