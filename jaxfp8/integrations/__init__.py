"""Integrations: run jaxfp8 through the configuration of other libraries, which are
imported only when used.
"""

from . import maxtext

__all__ = ["maxtext"]
