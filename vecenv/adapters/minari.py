"""export_episodes, deprecated: the episodes of a buffer as a Minari dataset."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium import Env
from gymnasium.envs.registration import EnvSpec

from vecenv.adapters import load_library

__all__ = ["export_episodes"]


def export_episodes(
    buffer: Any,
    dataset_id: str,
    *,
    episodes: Iterable[int] | None = None,
    env: str | EnvSpec | Env | None = None,
    **options: Any,
) -> Any:
    """Deprecated: use `buffers.datasets.to_minari`, which takes replay buffers and folders too.

    Writes episodes of an `EpisodicReplayBuffer` into a new local Minari dataset.
    Observations (one more than steps), actions, rewards and both flags are written; boundaries and
    extra columns go into the infos as "boundaries" and under their own names. Steps of episodes
    still open are not in it. Each episode is copied once.

    Args:
        buffer: The buffer; any object with `num_episodes`, `episode(i)`, `observation_space` and
            `action_space` of its kind will do.
        dataset_id: Minari's id, such as "cage/b_line/trained-v0"; must be new.
        episodes: Numbers of the episodes wanted, in this order, -1 the newest; None for all.
        env: Where the episodes come from, so that Minari can make the env again: an id, without
            "module:" in front, a spec or an env. None stores the buffer's spaces only.
        **options: Further arguments of `minari.create_dataset_from_buffers`, such as
            `algorithm_name`, `author`, `description` and `data_format`.

    Returns:
        The `minari.MinariDataset`.

    Raises:
        ModuleNotFoundError: minari is not installed, or h5py, which its default format needs.
        IndexError: There is no such episode.
        ValueError: No episodes; the id exists or is malformed (Minari's).
    """
    warnings.warn(
        "export_episodes is deprecated: use buffers.datasets.to_minari(buffer, dataset_id)",
        DeprecationWarning,
        stacklevel=2,
    )
    minari = load_library("minari", "minari")
    numbers = list(range(buffer.num_episodes) if episodes is None else episodes)
    if not numbers:
        raise ValueError(
            "there are no episodes to export; those still open don't count, end them with "
            "cut_episodes"
        )
    kind = load_library("minari.data_collector.episode_buffer", "minari").EpisodeBuffer
    exported = [
        kind(id=place, **_episode(buffer.episode(number))) for place, number in enumerate(numbers)
    ]
    return minari.create_dataset_from_buffers(
        dataset_id,
        exported,
        env=env,
        observation_space=buffer.observation_space,
        action_space=buffer.action_space,
        **options,
    )


def _episode(episode: dict[str, Any]) -> dict[str, Any]:
    """Return an episode of T steps as Minari's fields, NumPy arrays of T or T + 1 rows."""
    fields = {name: _arrays(value) for name, value in episode.items()}
    fields.pop("bounds", None)  # computed from the boundaries
    observations, actions = fields.pop("obs"), fields.pop("actions")
    steps = {name: fields.pop(name) for name in ("rewards", "terminations", "truncations")}
    # Minari has as many infos as observations; the first is that of the reset.
    infos = {name: np.concatenate([np.zeros_like(a[:1]), a]) for name, a in fields.items()}
    return {"observations": observations, "actions": actions, "infos": infos, **steps}


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _arrays(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_arrays(part) for part in value)
    return value.cpu().numpy()
