"""CAGE challenges, compiled and batched; see docs/cage2.md.

Names of modules that load the compiler are imported at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vecenv.cage.challenge2.rules.codes import RULES_VERSION
from vecenv.cage.challenge2.scenario import (
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
from vecenv.cage.challenge4.player import Cage4Memory, Cage4Player, save_cage4_defender
from vecenv.cage.challenge4.rules.codes import CAGE4_RULES_VERSION

if TYPE_CHECKING:
    from vecenv.cage.challenge2.env import Cage2Env, Cage2VectorEnv
    from vecenv.cage.challenge2.playing import (
        BatchedPolicy,
        BluePolicy,
        DefenderPolicy,
        evaluate,
        find_policy,
        load_defender,
        play_episode,
        save_defender,
        save_episode_gif,
    )
    from vecenv.cage.challenge2.remembering import BlueMemory
    from vecenv.cage.challenge2.replay import RecordedStep, Replay, replay_episodes
    from vecenv.cage.challenge2.tables import decode
    from vecenv.cage.challenge4.env import Cage4AgentsVectorEnv, Cage4Env, Cage4VectorEnv
    from vecenv.cage.challenge4.observations import Cage4Events, Cage4Graph
    from vecenv.cage.challenge4.original import Cage4ParallelEnv, RawName, plain_raw
    from vecenv.cage.challenge4.playing import Cage4Evaluation, Cage4Policy, evaluate_cage4
    from vecenv.cage.challenge4.replay import (
        TraceDifference,
        TraceError,
        TraceReplay,
        replay_traces,
    )
    from vecenv.cage.playing import Cell, Estimate, Evaluation

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

_HOMES = {
    "challenge2.env": "Cage2Env Cage2VectorEnv",
    "challenge2.playing": "BatchedPolicy BluePolicy DefenderPolicy evaluate find_policy "
    "load_defender play_episode save_defender save_episode_gif",
    "challenge2.remembering": "BlueMemory",
    "challenge2.replay": "RecordedStep Replay replay_episodes",
    "challenge2.tables": "decode",
    "challenge4.env": "Cage4AgentsVectorEnv Cage4Env Cage4VectorEnv",
    "challenge4.observations": "Cage4Events Cage4Graph",
    "challenge4.original": "Cage4ParallelEnv RawName plain_raw",
    "challenge4.playing": "Cage4Evaluation Cage4Policy evaluate_cage4",
    "challenge4.replay": "TraceDifference TraceError TraceReplay replay_traces",
    "playing": "Cell Estimate Evaluation",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
