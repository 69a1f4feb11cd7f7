"""jaxfp8.ragged_dot: products of groups of rows, each with a matrix of its own."""
