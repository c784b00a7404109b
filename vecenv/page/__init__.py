"""Pages for a browser: an episode to scrub through, in one file."""
