"""CAGE Challenge 4: the exact simulator, see docs/cage4.md."""
