"""The rules, as kernels and nothing else."""
