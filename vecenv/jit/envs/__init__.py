"""Bundled compiled envs, one per module; `vecenv.jit.cartpole` is another."""
