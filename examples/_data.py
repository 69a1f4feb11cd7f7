"""The text of `python -m jaxfp8.compare`, which needs no download: Python's own reference manual."""

from jaxfp8.compare import Corpus as Corpus
