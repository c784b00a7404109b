"""CAGE Challenge 2, compiled and batched; see docs/cage2.md.

Names are looked up when they are first used, so that importing this package loads no compiler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vecenv.cage.challenge2.env import Cage2VectorEnv
    from vecenv.cage.challenge2.network.actions import action_index, blue_actions
    from vecenv.cage.challenge2.network.cage2 import cage2_scenario
    from vecenv.cage.challenge2.network.scenario import (
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
    from vecenv.cage.challenge2.network.state import decode
    from vecenv.cage.challenge2.play.blue_memory import BlueMemory, blue_choices
    from vecenv.cage.challenge2.play.defender import DefenderPolicy, load_defender, save_defender
    from vecenv.cage.challenge2.play.playing import (
        BatchedPolicy,
        find_policy,
        play_episode,
        save_episode_gif,
    )
    from vecenv.cage.challenge2.play.policies import BluePolicy, make_policy
    from vecenv.cage.challenge2.replay import RecordedStep, Replay, replay_episodes
    from vecenv.cage.challenge2.single import Cage2Env
    from vecenv.cage.evaluation import Cell, Evaluation, evaluate

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
    "challenge2.network.actions": ("action_index", "blue_actions"),
    "challenge2.play.blue_memory": ("BlueMemory", "blue_choices"),
    "challenge2.network.cage2": ("cage2_scenario",),
    "challenge2.play.defender": ("DefenderPolicy", "load_defender", "save_defender"),
    "challenge2.env": ("Cage2VectorEnv",),
    "evaluation": ("Cell", "Evaluation", "evaluate"),
    "challenge2.play.playing": ("BatchedPolicy", "find_policy", "play_episode", "save_episode_gif"),
    "challenge2.play.policies": ("BluePolicy", "make_policy"),
    "challenge2.replay": ("RecordedStep", "Replay", "replay_episodes"),
    "challenge2.network.scenario": (
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
    "challenge2.single": ("Cage2Env",),
    "challenge2.network.state": ("decode",),
}
_HOME_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
