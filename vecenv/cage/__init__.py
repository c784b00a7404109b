"""CAGE Challenge 2, compiled and batched; see docs/cage2.md.

Names are looked up when they are first used, so that importing this package loads no compiler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vecenv.cage.actions import action_index, blue_actions
    from vecenv.cage.blue_memory import BlueMemory, blue_choices
    from vecenv.cage.cage2 import cage2_scenario
    from vecenv.cage.defender import DefenderPolicy, load_defender, save_defender
    from vecenv.cage.env import Cage2VectorEnv
    from vecenv.cage.evaluation import Cell, Evaluation, evaluate
    from vecenv.cage.playing import BatchedPolicy, find_policy, play_episode, save_episode_gif
    from vecenv.cage.policies import BluePolicy, make_policy
    from vecenv.cage.replay import RecordedStep, Replay, replay_episodes
    from vecenv.cage.scenario import (
        FIRST_HOST,
        NEXT_HOST,
        RULES_VERSION,
        BLinePlan,
        Decoy,
        Exploit,
        Host,
        MeanderPlan,
        OperationalService,
        PlanStep,
        Rules,
        Scenario,
        ScenarioError,
        Service,
        TrafficRule,
    )
    from vecenv.cage.single import Cage2Env
    from vecenv.cage.state import decode

__all__ = [
    "FIRST_HOST",
    "NEXT_HOST",
    "RULES_VERSION",
    "BLinePlan",
    "BatchedPolicy",
    "BlueMemory",
    "BluePolicy",
    "Cage2Env",
    "Cage2VectorEnv",
    "Cell",
    "Decoy",
    "DefenderPolicy",
    "Evaluation",
    "Exploit",
    "Host",
    "MeanderPlan",
    "OperationalService",
    "PlanStep",
    "RecordedStep",
    "Replay",
    "Rules",
    "Scenario",
    "ScenarioError",
    "Service",
    "TrafficRule",
    "action_index",
    "blue_actions",
    "blue_choices",
    "cage2_scenario",
    "decode",
    "evaluate",
    "find_policy",
    "load_defender",
    "make_policy",
    "play_episode",
    "replay_episodes",
    "save_defender",
    "save_episode_gif",
]

_MODULES = {
    "actions": ("action_index", "blue_actions"),
    "blue_memory": ("BlueMemory", "blue_choices"),
    "cage2": ("cage2_scenario",),
    "defender": ("DefenderPolicy", "load_defender", "save_defender"),
    "env": ("Cage2VectorEnv",),
    "evaluation": ("Cell", "Evaluation", "evaluate"),
    "playing": ("BatchedPolicy", "find_policy", "play_episode", "save_episode_gif"),
    "policies": ("BluePolicy", "make_policy"),
    "replay": ("RecordedStep", "Replay", "replay_episodes"),
    "scenario": (
        "FIRST_HOST",
        "NEXT_HOST",
        "RULES_VERSION",
        "BLinePlan",
        "Decoy",
        "Exploit",
        "Host",
        "MeanderPlan",
        "OperationalService",
        "PlanStep",
        "Rules",
        "Scenario",
        "ScenarioError",
        "Service",
        "TrafficRule",
    ),
    "single": ("Cage2Env",),
    "state": ("decode",),
}
_HOME_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
