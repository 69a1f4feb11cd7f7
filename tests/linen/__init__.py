"""Tests of the Linen adapters: layers, and FP8 state under Flax's lifted
transformations.
"""
