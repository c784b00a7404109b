"""Games that read all draws from tapes, which are written while they are played.

What a step will draw is known from asking: it is played from a copy of the state with the tape so
far, and the cursor notes which draw was missing. That one is drawn, with another generator than the
simulator's and by the laws of SPEC and TRACES alone, and the step is played again. Draws that are
likely to follow are written at once; if others follow, these take their places.
"""

import numpy as np
from cage.challenge4.lockstep import Games
from numba import njit

from vecenv.cage.challenge4.options import compile_rules
from vecenv.cage.challenge4.replay import observe_rows
from vecenv.cage.challenge4.rules import codes
from vecenv.cage.challenge4.rules.draws import CURSOR_DTYPE, TAPE_DTYPE
from vecenv.cage.challenge4.rules.dynamics import apply
from vecenv.cage.challenge4.rules.processes import possible_decoys
from vecenv.jit.kernels import as_record
from vecenv.jit.random import RNG_DTYPE

_MAX_DRAWS = 1000  # of a step; at most 249 have been recorded
_CHANCES = np.zeros((10, codes.MAX_CELLS))  # SPEC_RED 7.5
for _state, _chances in {
    codes.K: (0.5, 0.25, 0.25),
    codes.KD: (0.5, 0.5),
    codes.S: (0.25, 0.5, 0.25),
    codes.SD: (0.75, 0.25),
    codes.U: (0.5, 0.5),
    codes.UD: (1.0,),
    codes.R: (0.5, 0.25, 0.25),
    codes.RD: (0.5, 0.5),
}.items():
    _CHANCES[_state, : len(_chances)] = _chances


class TapeFed:
    """Games with the interface of `lockstep.Games`, on networks that are drawn from a seed.

    Attributes:
        num_draws: That have been written.
    """

    def __init__(self, num_games, *, seed, options):
        games = Games(num_games, seed=seed, options=options)
        self.states, self.masks = games.envs.states.copy().view(np.recarray), games.masks
        self.obs = games.obs.copy()
        games.close()
        self.rules = np.repeat(as_record(compile_rules(options)), num_games).view(np.recarray)
        self.streams = np.zeros(num_games, RNG_DTYPE).view(np.recarray)
        self.entries = np.zeros(_MAX_DRAWS, TAPE_DTYPE).view(np.recarray)
        self.cursors = np.zeros(num_games, CURSOR_DTYPE).view(np.recarray)
        self.trial = self.states[:1].copy().view(np.recarray)
        self.num_draws, self.rng = 0, np.random.default_rng(seed)

    def step(self, actions):
        both = np.concatenate([actions, np.zeros_like(actions)], axis=1)
        draws = _play(
            self.rng,
            self.states,
            both,
            self.trial,
            self.streams,
            self.entries,
            self.cursors,
            self.rules,
        )
        assert draws >= 0, "a step asked for more draws than any has"
        self.num_draws += draws
        observe_rows(self.states, self.obs, self.rules)


@njit
def _play(rng, states, actions, trial, streams, entries, cursors, rules):
    """Play a step of every game; return how many draws that took, -1 if too many."""
    total = 0
    for row in range(states.shape[0]):
        state, cursor, num = states[row], cursors[row], 0
        for actor in range(codes.FIRST_GREEN_ACTOR, codes.FIRST_GREEN_ACTOR + sum(state.num_users)):
            num = _write(entries, num, codes.GREEN_ACTION, actor, 3, rng.integers(0, 3))
        while True:
            trial[0] = state
            cursor.position, cursor.end, cursor.num_wrong = 0, num, 0
            apply(trial[0], actions[row], (streams[row], (entries, cursor)), rules[row])
            if cursor.num_wrong == 0:
                break
            num = cursor.wrong_position  # what is there, if anything, was written on a guess
            if num + 4 > len(entries):
                return -1
            site, actor, n = cursor.wrong_site, cursor.wrong_actor, cursor.wrong_n
            value = _draw(rng, site, actor, n, state, trial[0], entries, num)
            num = _write(entries, num, site, actor, n, value)
            if site == codes.WORK_SERVICE:  # most work goes on with these draws
                reliability = rng.integers(0, 100)
                num = _write(entries, num, codes.WORK_RELIABILITY, actor, 100, reliability)
                num = _write(entries, num, codes.WORK_ALARM, actor, 0, _unit(rng))
                num = _write(entries, num, codes.WORK_PHISH, actor, 0, _unit(rng))
            elif site == codes.ACCESS_DEST:
                num = _write(entries, num, codes.ACCESS_ALARM, actor, 0, _unit(rng))
        states[row] = trial[0]
        total += cursor.position
    return total


@njit
def _write(entries, num, site, actor, n, value):
    entries[num].site, entries[num].actor = site, actor
    entries[num].n, entries[num].value = n, value
    return num + 1


@njit
def _unit(rng):
    return rng.integers(0, 1 << 24) / (1 << 24)  # a float32 below 1


@njit
def _draw(rng, site, actor, n, before, trial, entries, num):
    """Draw the value of an entry, as TRACES defines it."""
    if site == codes.PID:
        return rng.integers(1, 10)
    if site == codes.DECOY_TYPE:
        host = np.int64(before.blue_target[actor])  # chosen a step before: it takes two ticks
        possible = possible_decoys(before, host)
        while True:
            decoy = rng.integers(0, codes.NUM_DECOYS)
            if possible >> decoy & 1:
                return decoy
    if site == codes.FSM_ACTION:
        agent = actor - codes.FIRST_RED_ACTOR
        host = trial.table[agent, np.int64(entries[num - 1].value)]  # of the draw before
        share, cell = rng.random(), 0
        while share >= _CHANCES[trial.fsm[agent, host] & codes.STATE_BITS, cell]:
            share -= _CHANCES[trial.fsm[agent, host] & codes.STATE_BITS, cell]
            cell += 1
        return cell
    if n == 0:
        return _unit(rng)
    return rng.integers(0, n)
