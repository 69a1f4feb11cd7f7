"""A real text that needs no download, Python's own reference manual: the one of `python -m jaxfp8.compare`."""

from jaxfp8.compare import Corpus as Corpus
