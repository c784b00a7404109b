"""What the buffers share: memory, rows, batches, reading of arguments, checkpoints."""
