"""Additions to JAX: the max dtype, types on a mesh, helpers for primitives. Only here are private JAX names."""
