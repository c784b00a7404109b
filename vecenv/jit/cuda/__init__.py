"""Compiled envs on a CUDA device: a second driver over the same kernels; see docs/gpu.md."""
