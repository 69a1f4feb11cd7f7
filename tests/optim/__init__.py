"""Optimizer states in FP8."""
