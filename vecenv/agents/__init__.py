"""Envs with several agents: one row per agent, on every backend."""

from vecenv.agents.env import AgentBatch, AgentGroup, AgentRowsVecEnv, AgentSlot, AgentsVecEnv
from vecenv.agents.game import GameEnv
from vecenv.agents.make import make_vec_agents

__all__ = [
    "AgentBatch",
    "AgentGroup",
    "AgentRowsVecEnv",
    "AgentSlot",
    "AgentsVecEnv",
    "GameEnv",
    "make_vec_agents",
]
