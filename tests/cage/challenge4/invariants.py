"""What holds after every step of any game."""

import numpy as np

from vecenv.cage.challenge4.rules import codes


def check(states):
    """Assert it of state records (N,)."""
    exists = bits(states["exists"])
    sizes = states["num_sessions"]
    for row, state in enumerate(states):
        held = set()
        for agent in range(codes.NUM_RED):
            size = state["num_sessions"][agent]
            idents = state["session_ident"][agent, :size]
            hosts = state["session_host"][agent, :size]
            held |= set(hosts.tolist())
            assert len(set(idents)) == size and (size == 0 or 0 in idents)
            assert (codes.RED_OF_SUBNET[hosts >> 4] == agent).all()
            table = state["table"][agent, : state["num_table"][agent]]
            assert len(set(table)) == len(table) and (state["fsm"][agent, table] & 15 != 0).all()
            offered = state["offered"][agent, : state["num_offered"][agent]]
            assert len(set(offered)) == len(offered)
        assert held == set(np.flatnonzero(bits(state["red_hosts"])))
        assert exists[row, list(held)].all()
    assert ((states["active"] == 1) == (sizes > 0)).all()
    assert (states["reward"] <= 0).all() and (states["overflow"] == 0).all()
    assert (states["decoys"][exists == 0] == 0).all() and (states["svc"][exists == 0] == 0).all()
    levels = states["svc"] & 7
    assert (levels <= codes.FULL).all()
    degraded = np.zeros(exists.shape, bool)
    for decoy in range(codes.NUM_DECOYS):
        level = states["svc"] >> (4 + 3 * decoy) & 7
        is_there = states["decoys"] >> decoy & 1 == 1
        assert (is_there | (states["decoy_pid"][..., decoy] == 0)).all()
        degraded |= is_there & (level < codes.FULL)
    degraded |= (exists == 1) & (levels < codes.FULL)
    assert (bits(states["degraded"]) == degraded).all()
    ways = states["blocks"][:, :8, None] >> np.arange(8) & 1
    barred = ((ways | ways.transpose(0, 2, 1)) << np.arange(8)).sum(axis=2)
    assert (states["barred"] == barred).all()


def bits(masks):
    spread = masks.astype(np.int64)[..., None] >> np.arange(16) & 1
    return spread.reshape(*masks.shape[:-1], 128)
