"""The network that is played in: its tables in names, and as records for compiled code."""
