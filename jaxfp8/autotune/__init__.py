"""The cuBLASLt algorithm of each FP8 product: measured on a GPU, kept in files."""

from ._autotune import AutotuneReport, autotune
