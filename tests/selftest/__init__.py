"""`python -m jaxfp8.selftest`: that it passes here, that it goes red for what is
broken, and its programs for GPUs.
"""
