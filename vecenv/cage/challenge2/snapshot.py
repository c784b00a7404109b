"""One environment's state in words, as text tables, and as a picture, for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from vecenv.cage.canvas import Canvas
from vecenv.cage.challenge2.rules import codes
from vecenv.cage.challenge2.scenario import Scenario, blue_actions
from vecenv.cage.challenge2.tables import decode
from vecenv.cage.playing import as_text

ACCESS_NAMES = ("None", "User", "Privileged")
ACTIVITY_NAMES = {0: "None", codes.ACTIVITY_SCAN: "Scan", codes.ACTIVITY_EXPLOIT: "Exploit"}
BELIEF_NAMES = {
    0: "No",
    codes.BELIEF_UNKNOWN: "Unknown",
    codes.BELIEF_USER: "User",
    codes.BELIEF_PRIVILEGED: "Privileged",
}
_OUTCOMES = {"true": ", succeeded", "false": ", failed", "unknown": ""}


@dataclass(frozen=True, slots=True)
class HostView:
    """One host.

    Attributes:
        name, subnet, os: As in the scenario.
        activity: Activity that blue saw in this step: "None", "Scan" or "Exploit".
        compromised: Blue's belief: "No", "Unknown", "User" or "Privileged".
        access: Red's highest access: "None", "User" or "Privileged".
        is_known: Whether red knows its address.
        is_scanned: Whether red has seen its ports.
        decoys: Names of the decoys in place.
    """

    name: str
    subnet: str
    os: str
    activity: str
    compromised: str
    access: str
    is_known: bool
    is_scanned: bool
    decoys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Deed:
    """The action of one side in the latest step.

    Attributes:
        action: Name of the action.
        target: Its target, a host or subnet, or None.
        success: "true", "false" or "unknown".
        exploit: Name of the exploit that red used, or "".
    """

    action: str
    target: str | None
    success: str
    exploit: str = ""

    def __str__(self) -> str:
        words = self.action if self.target is None else f"{self.action} {self.target}"
        return f"{words} ({self.exploit})" if self.exploit else words

    def with_outcome(self) -> str:
        """Return the action in words, with its outcome if known."""
        return f"{self}{_OUTCOMES[self.success]}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One environment after a step.

    Attributes:
        scenario: Its tables.
        length: Number of steps after which its episode is truncated.
        total: Sum of the rewards so far.
        step: Steps made in this episode.
        reward: Reward of the latest step.
        red_agent: Name of red's agent.
        blue, red: Their actions in the latest step; None at the start of an episode.
        green_target: Host that green scanned in the latest step, or None.
        is_service_running: Whether the operational service is running.
        known_subnets: Names of the subnets that red knows.
        hosts: The hosts, in the order of the scenario.
    """

    scenario: Scenario = field(repr=False)
    length: int
    total: float
    step: int
    reward: float
    red_agent: str
    blue: Deed | None
    red: Deed | None
    green_target: str | None
    is_service_running: bool
    known_subnets: tuple[str, ...]
    hosts: tuple[HostView, ...]


def take_snapshot(state: Any, scenario: Scenario, length: int, total: float) -> Snapshot:
    """Describe one environment in words.

    Args:
        state: STATE_DTYPE record; its values are copied.
        scenario: Scenario of the state.
        length, total: See `Snapshot`.
    """
    has_begun, green = int(state["step"]) > 0, int(state["green_target"])
    action, outcome = blue_actions(scenario)[int(state["blue_action"])], int(state["blue_success"])
    blue = Deed(action.name, action.host, codes.SUCCESS_NAMES[outcome])
    return Snapshot(
        scenario=scenario,
        length=length,
        total=total,
        step=int(state["step"]),
        reward=int(state["reward10"]) / 10,
        red_agent=codes.RED_AGENT_NAMES[int(state["red_agent"])],
        blue=blue if has_begun else None,
        red=_red_deed(state, scenario) if has_begun else None,
        green_target=scenario.hosts[green].name if has_begun and green >= 0 else None,
        is_service_running=bool(state["ot_running"]),
        known_subnets=tuple(
            name for k, name in enumerate(scenario.subnets) if int(state["known_subnet"]) >> k & 1
        ),
        hosts=tuple(_host_views(state, scenario)),
    )


def _host_views(state: Any, scenario: Scenario) -> Iterator[HostView]:
    true = decode(np.asarray(state), scenario)
    for index, host in enumerate(scenario.hosts):
        seen = int(state["obs_bits"]) >> codes.BITS_PER_HOST * index
        decoys = int(true["decoys"][index])
        yield HostView(
            name=host.name,
            subnet=host.subnet,
            os=host.os,
            activity=ACTIVITY_NAMES.get(seen & codes.ACTIVITY_BITS, "None"),
            compromised=BELIEF_NAMES[seen & codes.BELIEF_BITS],
            access=ACCESS_NAMES[true["access"][index]],
            is_known=bool(true["known_ip"][index]),
            is_scanned=bool(true["table_scanned"][index]),
            decoys=tuple(d.name for k, d in enumerate(scenario.decoys) if decoys >> k & 1),
        )


def _red_deed(state: Any, scenario: Scenario) -> Deed:
    kind, target = int(state["red_type"]), int(state["red_target"])
    names = scenario.subnets if kind == codes.SWEEP else [host.name for host in scenario.hosts]
    has_target = kind != codes.RED_SLEEP and 0 <= target < len(names)
    exploit = int(state["red_exploit"])
    return Deed(
        codes.RED_ACTION_NAMES[kind],
        names[target] if has_target else None,
        codes.SUCCESS_NAMES[int(state["red_success"])],
        scenario.exploits[exploit].name if exploit >= 0 else "",
    )


_STYLES = {
    **dict.fromkeys(("Scan", "User"), "yellow"),
    **dict.fromkeys(("Exploit", "Privileged"), "bold red"),
    **dict.fromkeys(("None", "No"), "dim"),
    "Unknown": "magenta",
}


def to_text(snapshot: Snapshot) -> str:
    """Return truth beside blue's view, and the latest actions; 80 columns wide, in colours."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("Host", "Access", "Red knows", "Activity", "Compromised", "Decoys"):
        table.add_column(name, no_wrap=name != "Decoys")
    scenario = snapshot.scenario
    for subnet in scenario.subnets:
        table.add_row(Text(subnet, style="bold"))
        for host in snapshot.hosts:
            if host.subnet == subnet:
                knows = "ports" if host.is_scanned else "address" if host.is_known else ""
                words = (host.access, knows, host.activity, host.compromised)
                cells = [Text(word, style=_STYLES.get(word, "")) for word in words]
                decoys = ", ".join(name.removeprefix("Decoy") for name in host.decoys)
                table.add_row(Text(f"  {host.name}"), *cells, Text(decoys))
        table.add_section()
    lines = [
        Text.assemble((f"{side}: ", f"bold {side.lower()}"), deed.with_outcome() if deed else "")
        for side, deed in (("Blue", snapshot.blue), ("Red", snapshot.red))
    ]
    if snapshot.green_target is not None:
        lines.append(Text(f"Green: scanned {snapshot.green_target}"))
    if not snapshot.is_service_running:
        service = scenario.operational_service.host
        lines.append(Text(f"The operational service on {service} is stopped", style="bold red"))
    facts = (
        f"red agent {snapshot.red_agent}, step {snapshot.step}/{snapshot.length}, "
        f"reward {snapshot.reward:.1f}, total {snapshot.total:.1f}"
    )
    title = Text(f"{scenario.name}, {scenario.rules.name} rules", "bold")
    return as_text(Group(title, Text(facts), table, *lines), "standard")


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
