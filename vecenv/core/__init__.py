"""The foundation that every backend shares: the interface of vector envs and its rules."""
