"""Bundled compiled games with several agents."""
