"""The interface of a vector env and its rules: what every backend shares."""
