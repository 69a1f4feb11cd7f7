"""Tests of the ops: numbers, transformations, errors, raw custom-call targets and
structure.
"""
