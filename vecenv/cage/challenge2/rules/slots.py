"""Which draw of a step is which, see `vecenv.jit.random.word_at`.

Each has its own number, so that no draw depends on whether another one was needed.
"""

RED_TARGET_SLOT = 0  # B_line's user host, Meander's target
TOP_EXPLOIT_SLOT = 1  # whether the exploit red prefers
OTHER_EXPLOIT_SLOT = 2  # else which of the others
DETECTION_SLOT = 3  # whether a reverse shell is noticed
SESSION_SLOT = 4  # which session is escalated
GREEN_SLOT = 5  # whether green acts
GREEN_HOST_SLOT = 6  # and where
RED_AGENT_SLOT = 7  # at reset: which agent this episode has
CUSTOM_SLOT = 16  # the first of those that a custom red policy may use
