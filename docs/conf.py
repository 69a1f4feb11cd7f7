"""Sphinx: pages in Markdown, and the reference from docstrings. `make docs` builds it, with warnings as errors."""

import inspect
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

import docstrings  # noqa: E402
import reference  # noqa: E402

project = "jaxfp8"
html_title = "jaxfp8"
html_theme = "furo"
html_show_copyright = False
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
# Where a link in a page to a heading goes.
myst_heading_anchors = 3
# As lists, not as fields of their own: an entry may be about several names.
napoleon_use_param = False
napoleon_custom_sections = [("Attributes", "params_style")]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True


def links_out_of_docs(app, name, source):
    """Pages link to files of the repository; of those in Markdown the site has the name alone."""
    link = re.compile(r"\[([^\]]+)\]\(\.\./([\w./]+\.md)(?:#[\w-]+)?\)")
    source[0] = link.sub(lambda m: f"`{m[2]}`" if m[1] == m[2] else f"{m[1]} (`{m[2]}`)", source[0])


def skip_fields(app, what, name, value, skip, options):
    """Of the members of a class methods and properties: the docstring of the class has its fields."""
    return skip or not (inspect.isroutine(value) or isinstance(value, property))


def setup(app):
    app.connect("source-read", links_out_of_docs)
    app.connect("autodoc-skip-member", skip_fields)
    # Before napoleon, which reads Google's sections.
    app.connect("autodoc-process-docstring", docstrings.to_rst, priority=400)
    reference.write_pages(HERE / "api")
