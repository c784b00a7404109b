"""Replay buffers: one table of rows, with different draws and memory."""
