"""Collectives of FP8 codes on 8 CPU devices."""
