"""`python -m jaxfp8.selftest`, which checks every op on this machine against the
reference, and measures it.
"""
