"""`python -m jaxfp8.compare`: train one small language model in each precision; print time, memory and loss.

The examples use the classes and functions that are exported here too.
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
