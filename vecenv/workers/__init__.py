"""Gymnasium envs in worker processes over shared memory."""
