"""Integrations: jaxfp8 through the configuration of other libraries, imported only when they are asked for."""

from . import maxtext as maxtext, qwix as qwix
