"""CAGE challenges, compiled and batched; see docs/cage2.md.

Names are imported at their first use, so that importing this package does not load the compiler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vecenv.cage.challenge2.env import Cage2Env, Cage2VectorEnv
    from vecenv.cage.challenge2.network.scenario import (
        FIRST_HOST,
        NEXT_HOST,
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
        action_index,
        blue_actions,
        blue_choices,
        cage2_scenario,
    )
    from vecenv.cage.challenge2.network.state import decode
    from vecenv.cage.challenge2.play.playing import evaluate, play_episode, save_episode_gif
    from vecenv.cage.challenge2.play.policies import (
        BatchedPolicy,
        BluePolicy,
        DefenderPolicy,
        find_policy,
        load_defender,
        save_defender,
    )
    from vecenv.cage.challenge2.remembering import BlueMemory
    from vecenv.cage.challenge2.replay import RecordedStep, Replay, replay_episodes
    from vecenv.cage.challenge4.env import Cage4AgentsVectorEnv, Cage4Env, Cage4VectorEnv
    from vecenv.cage.challenge4.events import Cage4Events
    from vecenv.cage.challenge4.graph import Cage4Graph
    from vecenv.cage.challenge4.parallel import Cage4ParallelEnv
    from vecenv.cage.challenge4.play.player import Cage4Memory, Cage4Player, save_cage4_defender
    from vecenv.cage.challenge4.play.playing import Cage4Evaluation, evaluate_cage4
    from vecenv.cage.challenge4.play.policies import Cage4Policy
    from vecenv.cage.challenge4.raw import RawName, plain_raw
    from vecenv.cage.challenge4.replay import (
        TraceDifference,
        TraceError,
        TraceReplay,
        replay_traces,
    )
    from vecenv.cage.evaluation import Cell, Estimate, Evaluation
    from vecenv.cage.identity import CAGE4_RULES_VERSION, RULES_VERSION

__all__ = [
    "CAGE4_RULES_VERSION", "FIRST_HOST", "NEXT_HOST", "RULES_VERSION", "BLinePlan",
    "BatchedPolicy", "BlueMemory", "BluePolicy", "Cage2Env", "Cage2VectorEnv",
    "Cage4AgentsVectorEnv", "Cage4Env", "Cage4Evaluation", "Cage4Events", "Cage4Graph",
    "Cage4Memory", "Cage4ParallelEnv", "Cage4Player", "Cage4Policy", "Cage4VectorEnv", "Cell",
    "Decoy", "DefenderPolicy", "Estimate", "Evaluation", "Exploit", "Host", "MeanderPlan",
    "OperationalService", "PlanStep", "RawName", "RecordedStep", "Replay", "Rules", "Scenario",
    "ScenarioError", "Service", "TraceDifference", "TraceError", "TraceReplay", "TrafficRule",
    "action_index", "blue_actions", "blue_choices", "cage2_scenario", "decode", "evaluate",
    "evaluate_cage4", "find_policy", "load_defender", "plain_raw",
    "play_episode", "replay_episodes", "replay_traces", "save_cage4_defender", "save_defender",
    "save_episode_gif",
]  # fmt: skip

_SCENARIO = "challenge2.network.scenario"  # module of all names that the table below lacks
_HOMES = {
    "challenge2.env": "Cage2Env Cage2VectorEnv",
    "challenge2.network.state": "decode",
    "challenge2.remembering": "BlueMemory",
    "challenge2.play.playing": "evaluate play_episode save_episode_gif",
    "challenge2.play.policies": "BatchedPolicy BluePolicy DefenderPolicy find_policy load_defender "
    "save_defender",
    "challenge2.replay": "RecordedStep Replay replay_episodes",
    "challenge4.env": "Cage4AgentsVectorEnv Cage4Env Cage4VectorEnv",
    "challenge4.events": "Cage4Events",
    "challenge4.graph": "Cage4Graph",
    "challenge4.parallel": "Cage4ParallelEnv",
    "challenge4.play.player": "Cage4Memory Cage4Player save_cage4_defender",
    "challenge4.play.playing": "Cage4Evaluation evaluate_cage4",
    "challenge4.play.policies": "Cage4Policy",
    "challenge4.raw": "RawName plain_raw",
    "challenge4.replay": "TraceDifference TraceError TraceReplay replay_traces",
    "evaluation": "Cell Estimate Evaluation",
    "identity": "CAGE4_RULES_VERSION RULES_VERSION",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _HOME_OF.get(name, _SCENARIO)
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
