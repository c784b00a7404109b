"""The registry of backends: the one list of all methods of stepping envs.

`make_vec`, `vecenv compare` and `bench`, the advice of timing reports and the conformance
matrix of the tests (tests/test_backends.py) read it. Rows stand in the order of tables, and those
that ask less of a user before others, as `bench` advises the first that is about as fast as any. A
further backend is a row here, and a module or folder of its own. Classes are named by strings, as
entry points are, and imported on first use.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from gymnasium.envs.registration import load_env_creator

__all__ = ["BACKENDS", "COMPARED", "MADE", "TIMED", "Backend", "is_for_compiled", "is_on_device"]


class Backend(NamedTuple):
    """A method of stepping envs.

    Attributes:
        name: Name in `make_vec`, `vecenv compare`, tables and plots.
        takes: Argument of its vector env: "factories" of single envs, a "compiled" vector env
            (one that an id has, or `EnvKernels`), or "either".
        makes: "module:class" of the vector env; empty where there is none.
        is_made: Whether `make_vec` makes it.
        stepping: How `vecenv compare` steps it: one env in a "loop", all envs with "step", or with
            send and recv, "first-ready". None if it is not compared.
        is_timed: Whether `envs.timing` splits up its time.
        imports: Modules that making its envs imports; loading them does not count as its start.
        colour: Colour in plots.
        use: How a user is told to choose it, by the advice of reports (vecenv/timing/advice.py) and
            by `vecenv bench`; empty where neither advises it.
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
    imports=("vecenv.workers.pool",),
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
        use="backend='async' and first-ready (send/recv)",
    ),
    Backend(
        "jit",
        takes="compiled",
        makes="vecenv.jit.env:JitVectorEnv",
        imports=("vecenv.jit",),
        colour="#e76f51",
        use="compiled kernels (backend='jit')",
    ),
    Backend(
        "cuda",
        takes="compiled",
        makes="vecenv.jit.cuda.env:CudaVectorEnv",
        stepping=None,
        is_timed=False,
        imports=("vecenv.jit", "torch"),
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


def is_for_compiled(name: str | None) -> bool:
    """Whether a backend steps compiled envs all together, or (None, "auto") may choose that."""
    return name in (None, "auto") or (name in BACKENDS and BACKENDS[name].takes == "compiled")


def is_on_device(name: str | None, device: Any) -> bool:
    """Whether envs are asked for on a CUDA device, by a backend or as `device`."""
    return name == "cuda" or (device is not None and str(device).partition(":")[0] != "cpu")
