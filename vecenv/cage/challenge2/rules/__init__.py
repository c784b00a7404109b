"""The rules of the challenge, as functions of one environment's record for compiled code."""
