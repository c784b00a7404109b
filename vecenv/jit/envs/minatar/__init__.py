"""MinAtar's Asterix, Freeway, Seaquest and Space Invaders, one per module.

The rules are those of K. Young and T. Tian, "MinAtar: An Atari-Inspired Testbed for Thorough and
Reproducible Reinforcement Learning Experiments", 2019 (arXiv 1903.03176), as of version 1.0.15.
"""
