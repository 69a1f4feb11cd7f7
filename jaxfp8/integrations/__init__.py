"""Other libraries' ways to say what this one does. Nothing here imports them."""

from . import qwix as qwix
