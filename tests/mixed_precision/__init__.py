"""jaxfp8.mixed_precision: policies, loss scaling, skipped steps, and the numbers of the
formats.
"""
