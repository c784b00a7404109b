"""A module with `parallel_env`, as PettingZoo's games are."""

from agents.games import runners as parallel_env

__all__ = ["parallel_env"]
