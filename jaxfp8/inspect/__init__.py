"""Seeing what FP8 does to a model: what saturates, what becomes zero, when scales change."""

from ._counters import with_counters as with_counters, without_counters as without_counters
