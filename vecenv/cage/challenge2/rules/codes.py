"""Numbers that kernels, tables and tests share: limits, kinds of action, flags, bits, slots."""

import numpy as np

RULES_VERSION = 1
"""Version of CAGE Challenge 2's simulator.

The version is raised when equal tables, actions and random numbers no longer give equal
observations and rewards: scores of different versions are not comparable.
"""

# Limits of a compiled scenario: sets of hosts are bit masks of 16 bits, the others of 8.
MAX_HOSTS = 16
MAX_SUBNETS = 8
MAX_EXPLOITS = 8
MAX_DECOYS = 8
MAX_PORTS = 8  # distinct ports of all exploits and decoys
MAX_PLAN_STEPS = 16
MAX_ACTIONS = 256
MAX_LENGTHS = 256  # the index of an episode's length has 8 bits
MAX_COUNT = 255  # counters saturate here
HOST_BITS = np.uint64(MAX_HOSTS - 1)  # mask that makes any number a valid index

# Kinds of blue action; decoy d is DECOY + d.
SLEEP, MONITOR, ANALYSE, REMOVE, RESTORE, DECOY = 0, 1, 2, 3, 4, 5

# Kinds of red action.
RED_SLEEP, SWEEP, SCAN, EXPLOIT, ESCALATE, IMPACT = 0, 1, 2, 3, 4, 5
_RED_ACTIONS = (
    "Sleep DiscoverRemoteSystems DiscoverNetworkServices ExploitRemoteService "
    "PrivilegeEscalate Impact"
)
RED_ACTION_NAMES = tuple(_RED_ACTIONS.split())

# Success flags.
FAILED, SUCCEEDED, UNKNOWN = 0, 1, 2
SUCCESS_NAMES = ("false", "true", "unknown")

# Red agents; a scenario's own policy is CUSTOM.
NO_RED, B_LINE, MEANDER, CUSTOM = 0, 1, 2, 3
RED_AGENT_NAMES = ("sleep", "b_line", "meander", "custom")

# What an exploit finds on a host without decoys.
NO_SERVICE, ALWAYS_FAILS, USER_SHELL, SSH_SESSION, PRIVILEGED_SHELL = 0, 1, 2, 3, 4

# Kinds of red session.
REMOVABLE, STUCK, PRIVILEGED = 0, 1, 2

# The observation has four bits per host: two of activity, two of blue's belief.
ACTIVITY_SCAN, ACTIVITY_EXPLOIT = 0b0001, 0b0011
BELIEF_UNKNOWN, BELIEF_USER, BELIEF_PRIVILEGED = 0b0100, 0b1000, 0b1100
ACTIVITY_BITS, BELIEF_BITS = 0b0011, 0b1100
BITS_PER_HOST = 4

# Index into the table of activities: distinct ports (3 for more), then these.
MANY_EVENTS, SHELL_SEEN, DECOY_PLACED = 0b00100, 0b01000, 0b10000
MANY = 3  # events, or distinct ports, that look like a scan

# What a blue agent remembers, see `BlueMemory`.
EPISODE_LENGTHS = (30, 50, 100)  # of the challenge
OPENING_STEPS = 6  # in which red's actions reveal its agent
FIRST_EXPLOIT_STEP = 3  # B_line's; Meander scans the whole subnet before it
EARLY_STEPS = 10
MANY_EXPLOITS = 4  # seen since the last Restore; more count as this

# Value of `red_exploit` and similar fields when there was none.
NONE = -1

# Error flags of `apply`.
BAD_EXPLOIT, BAD_DETECTION, BAD_SESSION, BAD_RED_ACTION = 1, 2, 4, 8

# Slots of the draws of a step, see `vecenv.jit.random.word_at`. Each draw has its own slot, so that
# no draw depends on whether another draw was needed.
RED_TARGET_SLOT = 0  # B_line's user host, Meander's target
TOP_EXPLOIT_SLOT = 1  # whether red uses its preferred exploit
OTHER_EXPLOIT_SLOT = 2  # otherwise: which other exploit
DETECTION_SLOT = 3  # whether a reverse shell is noticed
SESSION_SLOT = 4  # which session is escalated
GREEN_SLOT = 5  # whether green acts
GREEN_HOST_SLOT = 6  # which host green scans
RED_AGENT_SLOT = 7  # at reset: the episode's red agent
LENGTH_SLOT = 15  # at reset: the episode's length, if lengths are drawn
CUSTOM_SLOT = 16  # first slot that a custom red policy may use
