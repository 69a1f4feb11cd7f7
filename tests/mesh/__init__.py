"""Training on meshes of 8 CPU devices."""
