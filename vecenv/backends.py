"""The registry of backends: the one list of what envs can be stepped with.

`make_vec`, `vecenv compare` and `vecenv trace`, the advice of timing reports and the conformance
matrix of the tests (tests/test_backends.py) read it. A further backend is a row here, and a module
or folder of its own. Classes are named by strings, as entry points are: nothing is imported before
somebody makes such envs.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from gymnasium.envs.registration import load_env_creator

__all__ = ["BACKENDS", "COMPARED", "MADE", "TIMED", "Backend"]


class Backend(NamedTuple):
    """A way to step envs.

    Attributes:
        name: In `make_vec`, `vecenv compare`, tables and plots.
        takes: What its vector env is made from: "factories" of single envs, a "compiled" vector env
            (one that an id has, or `EnvKernels`), or "either".
        makes: "module:class" of the vector env; empty where there is none.
        is_made: Whether `make_vec` makes it.
        stepping: How `vecenv compare` steps it: one env in a "loop", all envs with "step", or with
            send and recv, "first-ready". None if it is not compared.
        is_timed: Whether `envs.timing` says where its time goes.
        imports: Modules that making its envs imports; loading them does not count as its start.
        colour: In plots.
        use: What a user turns to for it, in advice.
    """

    name: str
    takes: Literal["factories", "compiled", "either"] = "factories"
    makes: str = ""
    is_made: bool = True
    stepping: Literal["loop", "step", "first-ready"] | None = "step"
    is_timed: bool = True
    imports: tuple[str, ...] = ()
    colour: str = "#8d99ae"
    use: str = ""

    def load(self) -> Any:
        """Return the class of the vector env."""
        return load_env_creator(self.makes)


_ASYNC = Backend(
    "async",
    makes="vecenv.workers.env:AsyncVectorEnv",
    imports=("vecenv.workers.opening",),
    colour="#457b9d",
    use="backend='async'",
)
_ROWS = (
    Backend("loop", is_made=False, stepping="loop", is_timed=False, colour="#555555"),
    Backend("sync", makes="vecenv.sync:SyncVectorEnv", colour="#2a9d8f", use="backend='sync'"),
    _ASYNC,
    _ASYNC._replace(
        name="async-first-ready",
        is_made=False,
        stepping="first-ready",
        colour="#1d3557",
        use="first-ready (send/recv)",
    ),
    Backend(
        "jit",
        takes="compiled",
        makes="vecenv.jit.env:JitVectorEnv",
        imports=("vecenv.jit",),
        colour="#e76f51",
        use="the JIT kit",
    ),
    Backend("ray", takes="either", makes="vecenv.ray.env:RayVectorEnv", stepping=None),
    Backend(
        "gymnasium-sync",
        makes="gymnasium.vector:SyncVectorEnv",
        is_made=False,
        is_timed=False,
        colour="#b7b7a4",
    ),
    Backend(
        "gymnasium-async",
        makes="gymnasium.vector:AsyncVectorEnv",
        is_made=False,
        is_timed=False,
        colour="#d4a373",
    ),
)
BACKENDS = {row.name: row for row in _ROWS}
# Their names: of those that make_vec makes, that are compared, and whose time is split up there.
MADE = tuple(row.name for row in _ROWS if row.is_made)
COMPARED = tuple(row.name for row in _ROWS if row.stepping is not None)
TIMED = tuple(name for name in COMPARED if BACKENDS[name].is_timed)
