"""Environments written as Numba functions, run by the thousand; see docs/compiled_envs.md."""

from vecenv.core.compiling import cached_njit
from vecenv.jit.base import Branch
from vecenv.jit.env import JitEnv, JitVectorEnv
from vecenv.jit.errors import KernelCompileError, KernelIndexError, KernelResultError
from vecenv.jit.games import AgentsOf
from vecenv.jit.interpreted import checked_in_trials
from vecenv.jit.kernels import EnvKernels, pack_record, write_bits

__all__ = [
    "AgentsOf",
    "Branch",
    "EnvKernels",
    "JitEnv",
    "JitVectorEnv",
    "KernelCompileError",
    "KernelIndexError",
    "KernelResultError",
    "cached_njit",
    "checked_in_trials",
    "pack_record",
    "write_bits",
]
