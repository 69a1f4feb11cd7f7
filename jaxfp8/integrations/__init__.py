"""Other libraries' ways to say what this one does. None of them is imported before it is asked for."""

from . import maxtext as maxtext, qwix as qwix
