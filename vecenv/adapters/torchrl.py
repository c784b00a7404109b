"""as_tensordict: buffers and their batches under TorchRL's names, without copying.

Vector envs need no adapter: TorchRL's `GymWrapper` takes them as they are.
"""

from __future__ import annotations

from typing import Any

from gymnasium.vector import AutoresetMode

from vecenv.adapters import load_library

__all__ = ["as_tensordict"]

# Our names to TorchRL's.
_OBSERVATIONS = {"obs": "observation", "future_obs": "future_obs", "goal_obs": "goal_obs"}
# These get a last dimension of size 1.
_COLUMNS = {"values": "state_value", "advantages": "advantage", "returns": "value_target"}
_OF_THE_STEP = {"rewards": "reward", "terminations": "terminated", "truncations": "truncated"}
_UNCHANGED = (
    *("valid", "boundaries", "steps", "mask", "offsets", "relabelled"),
    *("discounts", "env_ids", "indices", "weights"),
)


def as_tensordict(source: Any) -> Any:
    """Return a TensorDict of views of a buffer's tensors, under the names that TorchRL expects.

    Args:
        source: A batch from a buffer of `buffers`, or a `RolloutBuffer`. Any object works that has
            tensors `actions` and `rewards` or `advantages`, and other tensors by the same names.

    Returns:
        A `tensordict.TensorDict` of batch size (B,), or (B, L) for sequences, or (T, N) for a
        rollout (TorchRL's estimators need `.transpose(0, 1)` of it). It shares the source's memory,
        and changes with it. New are only `("next", "done")`, the union of the two flags, and
        "discounts" of a replay buffer without gamma. Dict observations have their keys at the root,
        as with `GymWrapper`.

        `("next", "observation")` is the true next observation. So a rollout has it under NEXT_STEP
        only: in other modes, the row after an end belongs to the next episode. Its "valid" is False
        in rows that are not transitions.

    Raises:
        ModuleNotFoundError: tensordict is not installed.
        TypeError: Observations are tuples, or `source` lacks these tensors.
    """
    new = load_library("tensordict", "torchrl").TensorDict
    batch_size = _batch_size(source)
    entries = _before(source, batch_size[0])
    if following := _after(source):
        entries["next"] = new(following, batch_size)
    return new(entries, batch_size)


def _before(source: Any, num_rows: int) -> dict[str, Any]:
    """Return the entries at the root; those with a row too many, like values, lose the last."""
    entries: dict[str, Any] = {}
    for name, new_name in _OBSERVATIONS.items():
        if (obs := getattr(source, name, None)) is not None:
            entries.update(_observations(new_name, obs, slice(num_rows)))
    for name, new_name in {**_COLUMNS, **{name: name for name in _UNCHANGED}}.items():
        if (tensor := getattr(source, name, None)) is not None:
            rows = tensor[:num_rows]
            entries[new_name] = rows.unsqueeze(-1) if name in _COLUMNS else rows
    for name, new_name in (("actions", "action"), ("log_probs", _log_prob_name())):
        if (tensor := getattr(source, name, None)) is not None:
            entries[new_name] = tensor
    return {**entries, **(getattr(source, "extras", None) or {})}


def _after(source: Any) -> dict[str, Any]:
    """Return the entries under "next", the results of the steps."""
    entries: dict[str, Any] = {}
    if all(getattr(source, name, None) is None for name in ("next_obs", "terminations")):
        return entries  # a minibatch of a rollout, with rewards for other uses
    if getattr(source, "next_obs", None) is not None:
        entries = _observations("observation", source.next_obs, slice(None))
    elif getattr(source, "autoreset_mode", None) is AutoresetMode.NEXT_STEP:
        entries = _observations("observation", source.obs, slice(1, None))
    for name, new_name in _OF_THE_STEP.items():
        if (tensor := getattr(source, name, None)) is not None:
            entries[new_name] = tensor.unsqueeze(-1)
    if "terminated" in entries and "truncated" in entries:
        entries["done"] = entries["terminated"] | entries["truncated"]
    return entries


def _batch_size(source: Any) -> tuple[int, ...]:
    for name in ("rewards", "advantages"):
        tensor: Any = getattr(source, name, None)
        if hasattr(tensor, "data_ptr") and hasattr(source, "actions"):
            return tuple(tensor.shape)
    raise TypeError(
        f"source is {type(source).__name__}, expected a batch of a buffer or a RolloutBuffer: an "
        "object with tensors actions and rewards or advantages. Of a replay buffer pass what "
        "`sample` returned"
    )


def _observations(name: str, obs: Any, rows: slice) -> dict[str, Any]:
    if isinstance(obs, dict):
        parts = {key: _observations(key, part, rows)[key] for key, part in obs.items()}
        return parts if name == "observation" else {name: parts}
    if isinstance(obs, tuple):
        raise TypeError("observations are tuples, which a TensorDict can't hold; use a Dict space")
    return {name: obs[rows]}


def _log_prob_name() -> str:
    """Return the name of an action's log-probability in TorchRL's losses."""
    is_aggregated = load_library("tensordict.nn", "torchrl").composite_lp_aggregate()
    return "sample_log_prob" if is_aggregated else "action_log_prob"
