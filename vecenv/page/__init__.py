"""Pages for a browser: one episode with a slider, in one file."""
