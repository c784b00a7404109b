"""Blue's actions: their order, names and numbers."""

from __future__ import annotations

from typing import NamedTuple

from vecenv.cage.challenge2.network.scenario import Scenario
from vecenv.cage.challenge2.rules.codes import ANALYSE, DECOY, MONITOR, REMOVE, RESTORE, SLEEP

__all__ = ["BlueAction", "action_index", "blue_actions"]


class BlueAction(NamedTuple):
    """One blue action.

    Attributes:
        name: "Sleep", "Monitor", "Analyse", "Remove", "Restore" or the name of a decoy.
        kind: SLEEP, MONITOR, ANALYSE, REMOVE, RESTORE, or DECOY + number of the decoy.
        host: Name of the host it is done on; None for Sleep and Monitor.
        host_index: Row of that host; 0 for Sleep and Monitor.
    """

    name: str
    kind: int
    host: str | None
    host_index: int

    def __str__(self) -> str:
        return self.name if self.host is None else f"{self.name} {self.host}"


def blue_actions(scenario: Scenario) -> tuple[BlueAction, ...]:
    """Return all blue actions of a scenario; action number i is entry i.

    Example:
        >>> from vecenv.cage.challenge2.network.cage2 import cage2_scenario
        >>> [str(blue_actions(cage2_scenario())[i]) for i in (0, 28, 144)]
        ['Sleep', 'DecoyApache Defender', 'Restore User4']
    """
    families = [("Analyse", ANALYSE), ("Remove", REMOVE)]
    families += [(decoy.name, DECOY + d) for d, decoy in enumerate(scenario.decoys)]
    families += [("Restore", RESTORE)]
    actions = [BlueAction("Sleep", SLEEP, None, 0), BlueAction("Monitor", MONITOR, None, 0)]
    for name, kind in families:
        actions += [BlueAction(name, kind, h.name, i) for i, h in enumerate(scenario.hosts)]
    return tuple(actions)


def action_index(scenario: Scenario, name: str, host: str | None = None) -> int:
    """Return the number of an action, given the names of action and host.

    Raises:
        ValueError: There is no such action.
    """
    for index, action in enumerate(blue_actions(scenario)):
        if (action.name, action.host) == (name, host):
            return index
    raise ValueError(
        f"no action {name!r} on host {host!r}; actions are Sleep and Monitor (on no host), and "
        f"Analyse, Remove, Restore, {', '.join(d.name for d in scenario.decoys)} on each of "
        f"{', '.join(h.name for h in scenario.hosts)}"
    )
