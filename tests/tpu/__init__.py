"""Programs compiled for TPUs on a machine that has none: what is in them, not how fast
they are.
"""
