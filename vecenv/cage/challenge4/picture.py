"""Picture of the network: zones with their hosts, sessions, decoys, blocked links, phase."""

from __future__ import annotations

from typing import Any

import numpy as np

from vecenv.cage.canvas import Canvas
from vecenv.cage.challenge4.rules import codes
from vecenv.cage.challenge4.rules.codes import host_name

_WIDTH, _HEIGHT = 1000, 640
_INK, _GREY, _PAPER, _ZONE = "#1d3557", "#8d99ae", "#ffffff", "#f4f6f8"
_CLEAN, _HELD, _OWNED = "#cfe8d5", "#f4a261", "#c1121f"
_ALARM, _CONTACT, _FAILED, _DECOY = "#e63946", "#457b9d", "#9b2226", "#2a9d8f"
_ZONES = {  # title, column, row, agent
    codes.RZA: ("Restricted zone A", 0, 0, "blue 0"),
    codes.OZA: ("Operational zone A", 0, 1, "blue 1"),
    codes.RZB: ("Restricted zone B", 1, 0, "blue 2"),
    codes.OZB: ("Operational zone B", 1, 1, "blue 3"),
    codes.CON: ("Contractors", 2, 0, "nobody"),
    codes.PUB: ("Public access", 3, 0, "blue 4"),
    codes.ADM: ("Administration", 2, 1, "blue 4"),
    codes.OFF: ("Office", 3, 1, "blue 4"),
}
_ZONE_WIDTH, _ZONE_HEIGHT, _GAP, _TOP = 236, 214, 8, 56
_CELL, _HOST = 36, 28


def draw_state(state: Any, steps: int) -> Canvas:
    """Draw the current state of a game.

    Args:
        state: STATE_DTYPE record.
        steps: The option `steps`; an episode has one step less.
    """
    canvas = Canvas(_WIDTH, _HEIGHT, _PAPER)
    _draw_head(canvas, state, steps)
    levels = _session_levels(state)
    for zone, (_, column, row, _) in _ZONES.items():
        left = 16 + column * (_ZONE_WIDTH + _GAP)
        top = _TOP + row * (_ZONE_HEIGHT + _GAP)
        _draw_zone(canvas, state, zone, left, top, levels)
    _draw_foot(canvas, state)
    return canvas


def _draw_head(canvas: Canvas, state: Any, steps: int) -> None:
    x = canvas.text(16, 20, f"step {int(state['t'])} of {steps - 1}", _INK, size=16)
    phase = int(state["phase"])
    note = ("", ", zone A counts most", ", zone B counts most")[phase]
    x = canvas.pill(x + 14, 20, f"phase {phase}{note}", "#ffffff", _INK, size=12)
    parts = [int(part) for part in state["reward_parts"]]
    names = ("work", "access", "impact", "restore")
    shown = ", ".join(f"{name} {part}" for name, part in zip(names, parts, strict=True) if part)
    reward = f"reward {int(state['reward'])}" + (f": {shown}" if shown else "")
    canvas.text(x + 14, 20, reward, _FAILED if state["reward"] < 0 else _GREY, size=13)
    x = 16
    for words, fill, outline in (
        ("clean", _CLEAN, None), ("red session", _HELD, None), ("privileged", _OWNED, None),
        ("process alarm", None, _ALARM), ("connection alarm", None, _CONTACT),
    ):  # fmt: skip
        canvas.box((x, 38, 10, 10), fill, outline=outline, line=2, radius=2)
        x = canvas.text(x + 15, 43, words, _GREY, size=11) + 14
    canvas.box((x, 40, 5, 5), _DECOY, radius=2.5)
    x = canvas.text(x + 10, 43, "decoy", _GREY, size=11) + 14
    x = canvas.text(x, 43, "!", _FAILED, size=13, bold=True)
    x = canvas.text(x + 5, 43, "green fails", _GREY, size=11) + 14
    canvas.text(x, 43, "% of services left, OT stopped", _GREY, size=11)


def _session_levels(state: Any) -> np.ndarray:
    """Return int (128,), by host: 0 no session, 1 a session, 2 a privileged session."""
    levels = np.zeros(len(state["svc"]), np.int64)
    for agent in range(codes.NUM_RED):
        size = int(state["num_sessions"][agent])
        hosts = state["session_host"][agent, :size]
        own = 1 + (state["session_flags"][agent, :size] & codes.PRIVILEGED != 0)
        np.maximum.at(levels, hosts, own)
    return levels


def _draw_zone(
    canvas: Canvas, state: Any, zone: int, left: float, top: float, levels: np.ndarray
) -> None:
    canvas.box((left, top, _ZONE_WIDTH, _ZONE_HEIGHT), _ZONE, radius=8)
    title, _, _, agent = _ZONES[zone]
    end = canvas.text(left + 10, top + 14, title, _INK, size=13, bold=True)
    canvas.text(end + 8, top + 14, agent, _GREY, size=11)
    exists = int(state["exists"][zone])
    for k in range(codes.HOSTS_PER_SUBNET):
        if not exists >> k & 1:
            continue
        is_server = k >= codes.FIRST_SERVER
        number = k - codes.FIRST_SERVER if is_server else k
        column, row = (number, 0) if is_server else (number % 5, 1 + number // 5)
        place = (left + 12 + column * _CELL, top + 30 + row * (_CELL + 8))
        _draw_host(canvas, state, zone, k, place, int(levels[zone * codes.HOSTS_PER_SUBNET + k]))
    blocked, y = int(state["blocks"][zone]), top + _ZONE_HEIGHT - 16
    if blocked:
        x = canvas.text(left + 10, y, "no traffic from", _GREY, size=11) + 5
        names = [name for k, name in enumerate(codes.SUBNET_NAMES) if blocked >> k & 1]
        words = "all" if len(names) == codes.NUM_ZONES - 1 else " ".join(names)
        canvas.text(x, y, words, _FAILED, size=11)


def _draw_host(
    canvas: Canvas, state: Any, zone: int, k: int, place: tuple[float, float], level: int
) -> None:
    left, top = place
    host = zone * codes.HOSTS_PER_SUBNET + k

    def has(name: str) -> bool:
        return bool(int(state[name][zone]) >> k & 1)

    outline = _ALARM if has("process_events") else None
    outline = _CONTACT if outline is None and has("connection_events") else outline
    fill = (_CLEAN, _HELD, _OWNED)[level]
    radius = 4 if k >= codes.FIRST_SERVER else _HOST / 2
    canvas.box((left, top, _HOST, _HOST), fill, outline=outline, line=3, radius=radius)
    color = "#ffffff" if level == 2 else _INK
    word = int(state["svc"][host])
    percent = 100 * (word & codes.LEVEL_BITS) // codes.FULL
    name = f"s{k - codes.FIRST_SERVER}" if k >= codes.FIRST_SERVER else f"u{k}"
    shown, x = (name, left + 8) if percent >= 100 else (f"{percent}", left + 5)
    canvas.text(x, top + _HOST / 2, shown, color, size=10)
    if int(state["services"][host]) & codes.OT and not word & codes.OT_RUNNING:
        canvas.text(left, top + _HOST + 6, "OT", _FAILED, size=9)
    for number in range(int(state["decoys"][host]).bit_count()):
        canvas.box((left + _HOST - 5 * number - 5, top - 4, 5, 5), _DECOY, radius=2.5)
    if has("work_failed") or has("access_failed"):
        canvas.text(left + _HOST + 1, top + 8, "!", _FAILED, size=15, bold=True)


def _draw_foot(canvas: Canvas, state: Any) -> None:
    """Write the blue agents' actions and messages."""
    top = _TOP + 2 * (_ZONE_HEIGHT + _GAP) + 14
    for agent in range(codes.NUM_BLUE):
        y = top + 24 * agent
        x = canvas.pill(16, y, f"blue {agent}", "#ffffff", _CONTACT, size=11)
        canvas.text(x + 8, y, _doing(state, agent), _INK, size=12)
        if state["messages"][agent]:
            canvas.text(640, y, f"says {int(state['messages'][agent]):08b}", _GREY, size=11)


def _doing(state: Any, agent: int) -> str:
    """Return the action that an agent has begun or done in the latest step."""
    family = int(state["blue_family"][agent])
    words = codes.FAMILY_NAMES[family]
    if state["t"] == 0 or family == codes.SLEEP:
        return "Sleep"
    target = int(state["blue_target"][agent])
    if family in (codes.ALLOW, codes.BLOCK):
        source = int(state["blue_source"][agent])
        words += f" into {codes.SUBNET_NAMES[target]} from {codes.SUBNET_NAMES[source]}"
    elif family != codes.MONITOR:
        words += f" {host_name(target).replace('_subnet', '').replace('_', ' ')}"
    left = int(state["blue_left"][agent])
    return words + (f", {left} more" if left else "")
