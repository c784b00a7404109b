"""The registry of backends: the one list of all ways to step envs.

Its readers are `make_vec`, `vecenv compare` and `bench`, the advice of timing reports, and the
conformance matrix of the tests (tests/test_backends.py). Rows are in the order of tables; backends
that ask less of a user come first, as `bench` advises the first that is about as fast as any. A
new backend is a row here, and a module or folder of its own. Classes are named by strings, as in
entry points, and imported on first use.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from gymnasium.envs.registration import load_env_creator

__all__ = ["BACKENDS", "COMPARED", "MADE", "TIMED", "Backend", "is_for_compiled", "is_on_device"]


class Backend(NamedTuple):
    """A way to step envs.

    Attributes:
        name: Name in `make_vec`, `vecenv compare`, tables and plots.
        takes: What its vector env is made from: "factories" of single envs, a "compiled" vector env
            (that of an id, or `EnvKernels`), or "either".
        makes: "module:class" of the vector env; empty if there is none.
        is_made: Whether `make_vec` can make it.
        stepping: How `vecenv compare` steps it: one env in a "loop", all envs with "step", or with
            send and recv, "first-ready". None if it is not compared.
        is_timed: Whether `envs.timing` divides its time into shares.
        imports: Modules that making its envs imports; importing them does not count as its start.
        colour: Colour in plots.
        use: How to choose it, as the advice of reports (vecenv/timing/advice.py) and `vecenv bench`
            tell users; empty if neither advises it.
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
# Names of the backends that `make_vec` makes, that are compared, and that are timed there.
MADE = tuple(row.name for row in _ROWS if row.is_made)
COMPARED = tuple(row.name for row in _ROWS if row.stepping is not None)
TIMED = tuple(name for name in COMPARED if BACKENDS[name].is_timed)


def is_for_compiled(name: str | None) -> bool:
    """Whether a backend steps compiled envs together, or (None, "auto") may choose such a one."""
    return name in (None, "auto") or (name in BACKENDS and BACKENDS[name].takes == "compiled")


def is_on_device(name: str | None, device: Any) -> bool:
    """Whether envs are to be on a CUDA device, by the backend or by `device`."""
    return name == "cuda" or (device is not None and str(device).partition(":")[0] != "cpu")
