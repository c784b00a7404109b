"""Code that all buffers share: memory, rows, batches, checks of arguments, checkpoints."""
