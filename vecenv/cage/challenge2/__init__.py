"""CAGE Challenge 2: one blue agent defends 13 hosts."""
