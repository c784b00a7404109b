"""Replay: one table of rows, and the buffers that are this table with other draws or memory."""
