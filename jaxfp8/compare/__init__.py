"""`python -m jaxfp8.compare`: one small language model, trained in each precision: time, memory and loss.

The text, and what a run is, serve the examples too.
"""

from ._corpus import Corpus as Corpus
from ._report import environment as environment
from ._runs import (
    Run as Run,
    record as record,
    smooth as smooth,
    summarize as summarize,
    validation_of as validation_of,
)
