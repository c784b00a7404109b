"""The picture of a network: a panel per subnet, a card per host, truth beside blue's belief."""

from __future__ import annotations

from collections.abc import Iterator

from vecenv.cage.canvas import Canvas
from vecenv.cage.challenge2.network.scenario import Scenario
from vecenv.cage.challenge2.snapshot import Deed, HostView, Snapshot

__all__ = ["draw_snapshot"]

_MARGIN, _GAP = 16, 12
_HEADER, _DEEDS, _LEGEND_ROW = 62, 58, 26
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
    below = max(y + panel_height for _, _, y, panel_height in panels)
    height = int(_draw_legend(Canvas(width, 2, _BACKGROUND), below + _DEEDS))
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
    blue, red = snapshot.blue, snapshot.red
    is_red_here = red is not None and red.target == host.name
    is_blue_here = blue is not None and blue.target == host.name
    canvas.box((x, y, 20, size[1]), _STRIPE_COLORS[host.access], radius=8)
    canvas.box((x + 12, y, size[0] - 12, size[1]), _CARD_COLORS[host.access], radius=8)
    canvas.box((x + 8, y, 16, size[1]), _CARD_COLORS[host.access])
    canvas.box((x, y, *size), outline=_STRIPE_COLORS[host.access], radius=8)
    if is_red_here:
        canvas.box((x - 2, y - 2, size[0] + 4, size[1] + 4), outline=_RED, line=2, radius=9)
    if is_blue_here:
        grow = 5 if is_red_here else 2
        place = (x - grow, y - grow, size[0] + 2 * grow, size[1] + 2 * grow)
        canvas.box(place, outline=_BLUE, line=2, radius=9)
    _draw_name(canvas, snapshot, host, x + 18, y + 20)
    canvas.text(x + 18, y + 46, "true", _FAINT, size=11)
    canvas.pill(x + 46, y + 46, host.access.lower(), *_LEVEL_COLORS[host.access])
    canvas.text(x + 150, y + 46, "believed", _FAINT, size=11)
    canvas.pill(x + 202, y + 46, host.compromised.lower(), *_LEVEL_COLORS[host.compromised])
    _draw_traces(canvas, host, x + 18, y + 71)
    if is_blue_here and blue is not None:
        _draw_tag(canvas, x + 14, y - 1, blue, _BLUE, from_left=True)
    if is_red_here and red is not None:
        _draw_tag(canvas, x + size[0] - 8, y - 1, red, _RED)


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
    for count, name in enumerate(names):
        left_over = f"+{len(names) - count}"
        width = canvas.text_width(name, size=10) + 14
        if end + width > room - (24 if count + 1 < len(names) else 0):
            canvas.pill(end, y, left_over, _GREEN, _DECOY_FILL, size=10, outline=_GREEN)
            return
        end = canvas.pill(end, y, name, _GREEN, _DECOY_FILL, size=10, outline=_GREEN) + 4


def _draw_tag(
    canvas: Canvas, x: float, y: float, deed: Deed, color: str, *, from_left: bool = False
) -> None:
    """Draw an action on the upper edge of its target; x is the tag's left or right end."""
    words = _SHORT_NAMES.get(deed.action, deed.action.removeprefix("Decoy"))
    words = f"decoy {words}" if deed.action.startswith("Decoy") else words
    words += " failed" if deed.success == "false" else ""
    width = canvas.text_width(words, size=11) + 11
    canvas.pill(x if from_left else x - width, y, words, _WHITE, color)


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


def _draw_legend(canvas: Canvas, top: float) -> float:
    """Draw the legend of colours and shapes; return the y of its lower end.

    Each entry is a list of swatches (words, colour, fill, outline) and their meaning; frames have
    blanks for words.
    """
    levels = [(name.lower(), *_LEVEL_COLORS[name], None) for name in _LEVEL_COLORS if name != "No"]
    entries = (
        (levels, "red's access: card and left pill true, right pill believed"),
        ([("name", _GREEN, _DECOY_FILL, _GREEN)], "decoy in place"),
        ([(" " * 6, _BLUE, _BACKGROUND, _BLUE)], "blue's action"),
        ([(" " * 6, _RED, _BACKGROUND, _RED)], "red's action"),
        (
            [("exploit seen", _WHITE, _INK, None), ("scan seen", _INK, _WHITE, _INK)],
            "what blue was shown in this step",
        ),
    )
    x, y, end = float(_MARGIN), top + _LEGEND_ROW / 2, canvas.width - _MARGIN

    def room_for(x: float, y: float, width: float) -> tuple[float, float]:
        """Return the start of an item of this width: (x, y), or the next row if it does not fit."""
        is_here = x == _MARGIN or x + width <= end
        return (x, y) if is_here else (float(_MARGIN), y + _LEGEND_ROW)

    for swatches, meaning in entries:
        width = sum(canvas.text_width(words, size=10) + 15 for words, *_ in swatches)
        x, y = room_for(x, y, width + canvas.text_width(meaning, size=11) + 3)
        for words, color, fill, outline in swatches:
            x, y = room_for(x, y, canvas.text_width(words, size=10) + 10)
            x = canvas.pill(x, y, words, color, fill, size=10, outline=outline) + 5
        x, y = room_for(x, y, canvas.text_width(meaning, size=11) + 3)
        x = canvas.text(x + 3, y, meaning, _INK, size=11) + 22
    return y + _LEGEND_ROW / 2 + 8
