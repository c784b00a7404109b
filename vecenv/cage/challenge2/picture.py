"""The picture of a network: a panel per subnet, a card per host, truth beside blue's belief."""

from __future__ import annotations

from collections.abc import Iterator

from vecenv.cage.canvas import Canvas
from vecenv.cage.challenge2.network.scenario import Scenario
from vecenv.cage.challenge2.snapshot import Deed, HostView, Snapshot

__all__ = ["draw_snapshot"]

_MARGIN, _GAP = 16, 12
_HEADER, _DEEDS, _LEGEND_ROW, _LEGEND_WIDTH = 62, 58, 26, 720
_CARD_WIDTH, _CARD_HEIGHT = 284, 88
_PANEL_TITLE, _PANEL_GAP = 32, 22
_PANELS_PER_ROW = 4

_BACKGROUND, _PANEL, _CARD = "#eef1f5", "#ffffff", "#f8fafc"
_INK, _FAINT, _LINE = "#1f2933", "#7b8794", "#cbd2d9"
_WHITE = "#ffffff"
_BLUE, _RED, _GREEN = "#1f6feb", "#b3122b", "#2f855a"
_DECOY_FILL = "#e3f4ea"
_ORANGE, _VIOLET, _CRIMSON, _GREY = "#f0a030", "#8a6fc9", "#d64545", "#dfe5ec"
# Equal levels of truth and belief have the same colour, so that differences stand out.
_LEVEL_COLORS = {
    "None": (_INK, _GREY),
    "No": (_INK, _GREY),
    "Unknown": (_WHITE, _VIOLET),
    "User": (_INK, _ORANGE),
    "Privileged": (_WHITE, _CRIMSON),
}
_CARD_COLORS = {"None": _CARD, "User": "#fdf3e0", "Privileged": "#fbe6e6"}
_STRIPE_COLORS = {"None": _LINE, "User": _ORANGE, "Privileged": _CRIMSON}
_SHORT_NAMES = {
    "DiscoverRemoteSystems": "Sweep",
    "DiscoverNetworkServices": "Scan",
    "ExploitRemoteService": "Exploit",
    "PrivilegeEscalate": "Escalate",
}
_AGENTS = {"b_line": "B_line", "meander": "Meander", "sleep": "asleep", "custom": "custom"}


def draw_snapshot(snapshot: Snapshot) -> Canvas:
    """Draw an environment; the size of the picture depends only on the scenario."""
    panels = list(_panels(snapshot.scenario))
    width = max(x for _, x, _, _ in panels) + _CARD_WIDTH + 2 * _GAP + _MARGIN
    width = max(width, _LEGEND_WIDTH)
    below = max(y + panel_height for _, _, y, panel_height in panels)
    height = below + _DEEDS + 2 * _LEGEND_ROW + 8
    canvas = Canvas(width, height + height % 2, _BACKGROUND)  # even, as video formats want it
    _draw_header(canvas, snapshot)
    for subnet, x, y, panel_height in panels:
        _draw_panel(canvas, snapshot, subnet, (x, y, _CARD_WIDTH + 2 * _GAP, panel_height))
    _draw_deeds(canvas, snapshot, below)
    _draw_legend(canvas, below + _DEEDS)
    return canvas


def _panels(scenario: Scenario) -> Iterator[tuple[str, int, int, int]]:
    """Yield each subnet and its panel's left, top and height; red's first subnet comes first."""
    start = scenario.hosts[scenario.host_index(scenario.foothold)].subnet
    order = [start, *(name for name in scenario.subnets if name != start)]
    top = _HEADER
    for first in range(0, len(order), _PANELS_PER_ROW):
        row = order[first : first + _PANELS_PER_ROW]
        most = max(sum(host.subnet == name for host in scenario.hosts) for name in row)
        height = _PANEL_TITLE + most * (_CARD_HEIGHT + _PANEL_GAP) - _PANEL_GAP + 2 * _GAP
        for column, name in enumerate(row):
            yield name, _MARGIN + column * (_CARD_WIDTH + 2 * _GAP + _MARGIN), top, height
        top += height + _MARGIN


def _draw_header(canvas: Canvas, snapshot: Snapshot) -> None:
    scenario = snapshot.scenario
    canvas.text(_MARGIN, 21, scenario.name, _INK, size=20, bold=True)
    agent = _AGENTS[snapshot.red_agent]
    canvas.text(_MARGIN, 45, f"red agent: {agent}   rules: {scenario.rules.name}", _FAINT)
    right = canvas.width - _MARGIN
    numbers = f"step {snapshot.step} / {snapshot.length}"
    x = right - canvas.text_width(numbers, size=16)
    canvas.text(x, 21, numbers, _INK, size=16, bold=True)
    costs = f"reward {snapshot.reward:.1f}   total {snapshot.total:.1f}"
    canvas.text(right - canvas.text_width(costs, size=14), 45, costs, _INK, size=14)


def _draw_panel(
    canvas: Canvas, snapshot: Snapshot, subnet: str, place: tuple[float, float, float, float]
) -> None:
    left, top, _, _ = place
    is_swept = snapshot.red is not None and snapshot.red.target == subnet
    outline, line = (_RED, 2) if is_swept else (_LINE, 1)
    canvas.box(place, _PANEL, outline=outline, line=line, radius=10)
    end = canvas.text(left + _GAP, top + 20, subnet, _INK, size=15, bold=True)
    if subnet in snapshot.known_subnets:
        canvas.text(end + 10, top + 20, "known to red", _FAINT, size=11)
    if is_swept and snapshot.red is not None:
        _draw_tag(canvas, left + place[2] - _GAP, top, snapshot.red, _RED)
    y = top + _PANEL_TITLE + _GAP
    for host in snapshot.hosts:
        if host.subnet == subnet:
            _draw_host(canvas, snapshot, host, left + _GAP, y)
            y += _CARD_HEIGHT + _PANEL_GAP


def _draw_host(canvas: Canvas, snapshot: Snapshot, host: HostView, x: float, y: float) -> None:
    size = (_CARD_WIDTH, _CARD_HEIGHT)
    sides = ((_RED, snapshot.red, x + size[0] - 8), (_BLUE, snapshot.blue, x + 14))
    frames = [(color, deed, end) for color, deed, end in sides if deed and deed.target == host.name]
    canvas.box((x, y, 20, size[1]), _STRIPE_COLORS[host.access], radius=8)
    canvas.box((x + 12, y, size[0] - 12, size[1]), _CARD_COLORS[host.access], radius=8)
    canvas.box((x + 8, y, 16, size[1]), _CARD_COLORS[host.access])
    canvas.box((x, y, *size), outline=_STRIPE_COLORS[host.access], radius=8)
    for number, (color, _, _) in enumerate(frames):
        grow = 2 + 3 * number
        place = (x - grow, y - grow, size[0] + 2 * grow, size[1] + 2 * grow)
        canvas.box(place, outline=color, line=2, radius=9)
    _draw_name(canvas, snapshot, host, x + 18, y + 20)
    canvas.text(x + 18, y + 46, "true", _FAINT, size=11)
    canvas.pill(x + 46, y + 46, host.access.lower(), *_LEVEL_COLORS[host.access])
    canvas.text(x + 150, y + 46, "believed", _FAINT, size=11)
    canvas.pill(x + 202, y + 46, host.compromised.lower(), *_LEVEL_COLORS[host.compromised])
    _draw_traces(canvas, host, x + 18, y + 71)
    for color, deed, end in frames:
        _draw_tag(canvas, end, y - 1, deed, color)


def _draw_name(canvas: Canvas, snapshot: Snapshot, host: HostView, x: float, y: float) -> None:
    end = canvas.text(x, y, host.name, _INK, size=14, bold=True)
    end = canvas.text(end + 8, y, host.os, _FAINT, size=11)
    if host.name == snapshot.scenario.operational_service.host:
        is_up = snapshot.is_service_running
        words = "service up" if is_up else "STOPPED"
        canvas.pill(end + 8, y, words, _WHITE, _GREEN if is_up else _CRIMSON, size=10)
    elif host.name == snapshot.scenario.foothold:
        canvas.text(end + 8, y, "red's foothold", _RED, size=11)


def _draw_traces(canvas: Canvas, host: HostView, x: float, y: float) -> None:
    """Draw the last line of a card: blue's alerts in this step, decoys, red's knowledge."""
    end = x
    if host.activity == "Exploit":
        end = canvas.pill(x, y, "exploit seen", _WHITE, _INK, size=10) + 5
    elif host.activity == "Scan":
        end = canvas.pill(x, y, "scan seen", _INK, _WHITE, size=10, outline=_INK) + 5
    knowledge = "ports known" if host.is_scanned else "address known" if host.is_known else ""
    room = x + _CARD_WIDTH - 30 - canvas.text_width(knowledge, size=10)
    canvas.text(room + 4, y, knowledge, _FAINT, size=10)
    names = [name.removeprefix("Decoy") for name in host.decoys]
    if sum(canvas.text_width(name, size=10) + 14 for name in names) > room - end:
        names = [names[0], f"+{len(names) - 1}"] if len(names) > 1 else ["+1"]
    for name in names:
        end = canvas.pill(end, y, name, _GREEN, _DECOY_FILL, size=10, outline=_GREEN) + 4


def _draw_tag(canvas: Canvas, x: float, y: float, deed: Deed, color: str) -> None:
    """Draw an action on the upper edge of its target; x is its left end, for red its right end."""
    words = _SHORT_NAMES.get(deed.action, deed.action.removeprefix("Decoy"))
    words = f"decoy {words}" if deed.action.startswith("Decoy") else words
    words += " failed" if deed.success == "false" else ""
    left = x if color == _BLUE else x - canvas.text_width(words, size=11) - 11
    canvas.pill(left, y, words, _WHITE, color)


def _draw_deeds(canvas: Canvas, snapshot: Snapshot, top: float) -> None:
    """Write the latest actions of both sides in words."""
    for row, (side, color, deed) in enumerate(
        (("Blue", _BLUE, snapshot.blue), ("Red", _RED, snapshot.red))
    ):
        y = top + 22 + 22 * row
        canvas.pill(_MARGIN, y, side, _WHITE, color)
        if deed is not None:
            canvas.text(_MARGIN + 50, y, deed.with_outcome(), _INK)
    if snapshot.green_target is not None:
        words = f"green scanned {snapshot.green_target}"
        canvas.text(canvas.width - _MARGIN - canvas.text_width(words), top + 22, words, _GREEN)


def _draw_legend(canvas: Canvas, top: float) -> None:
    """Draw the legend of colours and shapes; frames have blanks for words."""
    frame, levels = " " * 6, [name for name in _LEVEL_COLORS if name != "No"]
    x, y = float(_MARGIN), top + _LEGEND_ROW / 2
    for name in levels:
        x = canvas.pill(x, y, name.lower(), *_LEVEL_COLORS[name], size=10) + 5
    canvas.text(
        x + 3, y, "red's access: card and left pill true, right pill believed", _INK, size=11
    )
    x, y = float(_MARGIN), y + _LEGEND_ROW
    for words, color, fill, outline, meaning in (
        ("name", _GREEN, _DECOY_FILL, _GREEN, "decoy in place"),
        (frame, _BLUE, _BACKGROUND, _BLUE, "blue's action"),
        (frame, _RED, _BACKGROUND, _RED, "red's action"),
        ("exploit seen", _WHITE, _INK, None, ""),
        ("scan seen", _INK, _WHITE, _INK, "what blue was shown in this step"),
    ):
        x = canvas.pill(x, y, words, color, fill, size=10, outline=outline) + 5
        x = canvas.text(x + 3, y, meaning, _INK, size=11) + 22 if meaning else x
