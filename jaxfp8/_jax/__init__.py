"""Additions to JAX: the max dtype, types on a mesh, helpers for primitives. Private JAX
names appear only here.
"""
