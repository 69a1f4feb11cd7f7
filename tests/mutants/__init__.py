"""Negative controls: the suite's own checks, run against a package that is wrong on
purpose.
"""
