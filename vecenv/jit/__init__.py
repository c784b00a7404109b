"""Environments written as Numba functions, run by the thousand; see docs/compiled_envs.md."""

from vecenv.fingerprint import cached_njit
from vecenv.jit.env import JitVectorEnv
from vecenv.jit.failures import KernelCompileError
from vecenv.jit.games import AgentsOf
from vecenv.jit.interpreted import KernelIndexError
from vecenv.jit.kernels import EnvKernels, pack_record

__all__ = [
    "AgentsOf",
    "EnvKernels",
    "JitVectorEnv",
    "KernelCompileError",
    "KernelIndexError",
    "cached_njit",
    "pack_record",
]
