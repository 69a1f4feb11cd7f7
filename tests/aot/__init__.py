"""Programs compiled for H200s on a machine that has none: what is in them, not how fast
they are.
"""
