"""State under JAX's transformations: random programs and written ones, against a simulation in numpy."""
