"""The bad days as a scoreboard: `python -m tests.bad_days` runs each for jaxfp8 and for
Flax's own FP8.
"""
