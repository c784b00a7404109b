"""`vecenv port`: prove that kernels behave like a Python env."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vecenv.core.arguments import import_module, import_object
from vecenv.jit.kernels import EnvKernels
from vecenv.port import Difference, Proof, prove
from vecenv.port.deadline import INTERRUPTED, guarded, time_limit
from vecenv.port.sides import call_again, read_kernels
from vecenv.source import read_source

__all__ = ["run_port"]


def _kernels(name: str) -> Any:
    """Return EnvKernels, or a maker of a JitVectorEnv, for "module:name" or a registered id."""
    module, _, attribute = name.partition(":")
    if attribute.isidentifier():
        own = vars(import_module(module))
        found = own.get(attribute)
        if isinstance(found, EnvKernels) or callable(found):
            return found
        told = f"{found!r}" if attribute in own else "missing"
        there = ", ".join(k for k, one in own.items() if isinstance(one, EnvKernels)) or "none"
        raise TypeError(f"kernels {name!r} is {told}; EnvKernels in {module}: {there}")
    from vecenv.make import make_vec

    def make(num_envs: int = 1, *, max_episode_steps: int | None = None, **options: Any) -> Any:
        limit: dict[str, Any] = {"max_episode_steps": max_episode_steps}
        limit = {key: value for key, value in limit.items() if value is not None}
        return make_vec(name, num_envs, vector_kwargs=options, **limit)

    read_source(name)  # raises with a list of what exists
    return make


def _policy(text: str) -> Callable[[Any], Any]:
    """Return a function from observation to action, for "module:function" or a run folder."""
    if Path(text).exists():
        from vecenv.train.policy import load_policy

        return load_policy(text)
    found = import_object("policy", text)
    if not callable(found):
        raise TypeError(f"policy is {text!r}, which is {found!r}, expected a function")
    return found


def run_port(
    env: str,
    kernels: str,
    *,
    fields: str | None,
    policies: Sequence[str],
    env_kwargs: Mapping[str, Any],
    report: Path | None,
    is_guarded: bool,
    say: Callable[[str], Any],
    **options: Any,
) -> int:
    """Prove a port and report; return the exit status.

    Args:
        env: Registered id or "module:factory" of the Python env.
        kernels: "module:name" of EnvKernels, or the id of compiled envs.
        fields: "module:name" of the paths of fields; None for FIELDS beside the kernels, if there.
        policies: Names, each "module:function" or a run folder.
        env_kwargs: For the Python env.
        report: File for the report as JSON, or None.
        is_guarded: Whether to do so in another process, which is ended if it does not return.
        say: Prints a text.
        **options: For `vecenv.port.prove`; `max_episode_steps` and `timeout` also to repeat a call.
    """

    def tell(proof: Proof) -> int:
        say(str(proof))
        if report is not None:
            proof.to_json(report)
        if proof.is_interrupted:
            return 130
        return 0 if proof.is_proven else 1

    def on_end(what: str, ending: str, inputs: Any) -> int:
        """Tell that the process was ended in a call."""
        told = f"{what} {ending}"
        if ending == INTERRUPTED:
            say(told)
            return tell(Proof(env, kernels, is_interrupted=True))
        if inputs is not None:
            with time_limit(options["timeout"]):
                make = read_kernels(_kernels(kernels))
                told += "; " + call_again(make, options["max_episode_steps"], inputs)
        values = (told, "") if "Python env" in what else ("", told)
        return tell(Proof(env, kernels, Difference("deadline", *values)))

    def work() -> int:
        make, found = read_source(env, env_kwargs).env_fn(), _kernels(kernels)
        paths = None
        if fields is not None:
            paths = import_object("fields", fields)
        elif isinstance(found, EnvKernels):
            paths = getattr(import_module(kernels.partition(":")[0]), "FIELDS", None)
        given: dict[str, Any] = {"fields": paths, "policies": [_policy(text) for text in policies]}
        given |= {"names": (env, kernels), "say": lambda text: say(f"{text} ..."), **options}
        return tell(prove(make, found, **given))

    return guarded(work, on_end) if is_guarded and hasattr(os, "fork") else work()
