"""Sphinx: pages in Markdown, and the reference from docstrings. `make docs` builds it,
with warnings as errors.
"""

import inspect
import pathlib
import re
import sys
import tomllib

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

import docstrings  # noqa: E402
import messages  # noqa: E402
import reference  # noqa: E402

PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]

project = "jaxfp8"
release = PROJECT["version"]
html_title = f"jaxfp8 {release}"
html_theme = "furo"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
# Without a repository in `[project.urls]` the site has no link to it, and no "edit" and
# "view" of its pages.
if repository := PROJECT.get("urls", {}).get("Repository"):
    html_theme_options = {
        "source_repository": repository,
        "source_branch": "main",
        "source_directory": "docs/",
    }
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
nitpicky = True
# Types in signatures are those of other projects, and aliases such as ArrayLike that
# have no page.
nitpick_ignore_regex = [("py:.*", r"(?!jaxfp8\.).*"), ("py:.*", r"jaxfp8\..*\._.*")]
# Where a link in a page to a heading goes.
myst_heading_anchors = 3
# Notebooks are committed without their outputs and run each time the site is built.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
# Output and errors, and the prompt of a shell, are not copied.
copybutton_selector = (
    "div.highlight-python pre, div.highlight-sh pre, div.highlight-ipython3 pre"
)
# As lists, not as fields of their own: an entry may be about several names.
napoleon_use_param = False
napoleon_custom_sections = [("Attributes", "params_style")]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88


def links_out_of_docs(app, name, source):
    """Pages link to files of the repository; of those in Markdown the site has the name
    alone.
    """
    link = re.compile(r"\[([^\]]+)\]\(\.\./([\w./]+\.md)(?:#[\w-]+)?\)")
    source[0] = link.sub(
        lambda m: f"`{m[2]}`" if m[1] == m[2] else f"{m[1]} (`{m[2]}`)", source[0]
    )


def skip_fields(app, what, name, value, skip, options):
    """Of the members of a class methods and properties: the docstring of the class has
    its fields.
    """
    return skip or not (inspect.isroutine(value) or isinstance(value, property))


def setup(app):
    app.connect("source-read", links_out_of_docs)
    app.connect("autodoc-skip-member", skip_fields)
    # Before napoleon, which reads Google's sections.
    app.connect("autodoc-process-docstring", docstrings.to_rst, priority=400)
    reference.write_pages(HERE / "api")
    messages.write_page(HERE / "api" / "messages.rst")
