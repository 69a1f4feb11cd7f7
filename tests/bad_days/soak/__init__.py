"""A long random run, every step compared with numpy:
`python -m tests.bad_days.soak --steps 500 --seed 0`.
"""
