"""Environments written as Numba functions, run by the thousand; see docs/compiled_envs.md."""

from vecenv.fingerprint import cached_njit
from vecenv.jit.binding import KernelCompileError
from vecenv.jit.env import JitVectorEnv
from vecenv.jit.kernels import EnvKernels, pack_record

__all__ = ["EnvKernels", "JitVectorEnv", "KernelCompileError", "cached_njit", "pack_record"]
