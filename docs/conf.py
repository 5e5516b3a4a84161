"""The documentation site: `make docs` builds it into build/docs and treats every warning as an error."""

from importlib.metadata import version as installed

project = "debubble"
author = "The debubble authors"
version = release = installed("debubble")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 4  # `page.md#a-heading` links as they work on a forge

html_theme = "furo"
html_title = "debubble"
html_show_sourcelink = False

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
