"""Tables for people to read: what blue sees, what is true, and both on one page."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from vecenv.cage.challenge2.view.snapshot import Deed, HostView, Snapshot, draw_addresses

__all__ = ["blue_table", "overview", "to_text", "true_table"]

_WIDTH = 100
_FIRST_COLUMNS = ("Subnet", "IP Address", "Hostname")
_STYLES = {
    "Scan": "yellow",
    "Exploit": "bold red",
    "Unknown": "magenta",
    "User": "yellow",
    "Privileged": "bold red",
}


def blue_table(snapshot: Snapshot) -> Table:
    """Return what blue sees: the observation for people."""
    table = Table(*_FIRST_COLUMNS, "Activity", "Compromised", title="Blue's view")
    subnets, addresses = draw_addresses(snapshot.scenario, snapshot.episode.key)
    for host in snapshot.hosts:
        cells = _cell(host.activity), _cell(host.compromised)
        table.add_row(subnets[host.subnet], addresses[host.name], host.name, *cells)
    return table


def true_table(snapshot: Snapshot) -> Table:
    """Return what is true: what red knows and holds. Access is that of its oldest session."""
    table = Table(*_FIRST_COLUMNS, "Known", "Scanned", "Access", title="True state")
    subnets, addresses = draw_addresses(snapshot.scenario, snapshot.episode.key)
    for host in snapshot.hosts:
        cells = str(host.is_known), str(host.is_scanned), _cell(host.oldest_access)
        table.add_row(subnets[host.subnet], addresses[host.name], host.name, *cells)
    return table


def overview(snapshot: Snapshot) -> RenderableType:
    """Return truth and blue's view side by side, with what was just done; 80 columns wide."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("Host", "Access", "Red knows", "Activity", "Compromised"):
        table.add_column(name, no_wrap=True)
    table.add_column("Decoys")
    for subnet in snapshot.scenario.subnets:
        table.add_row(Text(subnet, style="bold"))
        for host in snapshot.hosts:
            if host.subnet == subnet:
                table.add_row(*_cells(host))
        table.add_section()
    return Group(*_title(snapshot), table, *_events(snapshot))


def _cells(host: HostView) -> list[Text]:
    knows = "ports" if host.is_scanned else "address" if host.is_known else ""
    decoys = ", ".join(name.removeprefix("Decoy") for name in host.decoys)
    words = (host.access, knows, host.activity, host.compromised)
    return [Text(f"  {host.name}"), *map(_cell, words), Text(decoys)]


def to_text(renderable: RenderableType) -> str:
    """Return a table as text with colour codes."""
    console = Console(
        file=io.StringIO(),
        width=_WIDTH,
        force_terminal=True,
        color_system="standard",
        legacy_windows=False,
    )
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def _cell(word: str) -> Text:
    return Text(word, style=_STYLES.get(word, "dim" if word in ("None", "No") else ""))


def _title(snapshot: Snapshot) -> list[Text]:
    scenario, episode = snapshot.scenario, snapshot.episode
    return [
        Text(f"{scenario.name}, {scenario.rules.name} rules", "bold"),
        Text(
            f"red agent {snapshot.red_agent}, step {snapshot.step}/{episode.length}, "
            f"reward {snapshot.reward:.1f}, total {episode.total:.1f}"
        ),
    ]


def _events(snapshot: Snapshot) -> list[Text]:
    service = snapshot.scenario.operational_service.host
    sides = (("Blue", "bold blue", snapshot.blue), ("Red", "bold red", snapshot.red))
    lines = [_deed_line(*side) for side in sides]
    if snapshot.green_target is not None:
        lines.append(Text(f"Green: scanned {snapshot.green_target}"))
    if not snapshot.is_service_running:
        lines.append(Text(f"The operational service on {service} is stopped", style="bold red"))
    return lines


def _deed_line(side: str, style: str, deed: Deed | None) -> Text:
    line = Text(f"{side}: ", style=style)
    if deed is not None:
        line.append(deed.with_outcome(), style="default not bold")
    return line
