"""Configuration of the documentation site.

python -m sphinx -W --keep-going -c docs . build/site

The source folder is the root of the repository: pages under docs/ and experiments/ link to each
other and to source files by relative paths, which also work where the repository is browsed, and
the build fails if a link leads nowhere.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_extensions")]

import specdec_jax  # noqa: E402  (after the path is set)

project = "specdec_jax"
author = copyright = "The specdec_jax Authors"
version = release = specdec_jax.__version__

root_doc = "docs/index"
include_patterns = [
  "CHANGELOG.md",
  "CONTRIBUTING.md",
  "README.md",
  "configs/README.md",
  "docs/**.md",
  "experiments/**.md",
  "specdec_jax/assets/**.md",
]
exclude_patterns = [".*", "build", "runs", "**/.*"]

extensions = [
  "myst_parser",
  "sphinx.ext.autodoc",
  "sphinx.ext.napoleon",
  "sphinx.ext.viewcode",
  "sphinx_copybutton",
  "svg_math",
]
myst_enable_extensions = ["amsmath", "attrs_inline", "deflist", "dollarmath"]
myst_heading_anchors = 4  # links such as data.md#references
myst_fence_as_directive = []
suppress_warnings = ["toc.no_title"]  # experiments/tpu_v4/table2.md is one table

default_role = "py:obj"  # `Sampling` in a docstring links to it if it is public
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True  # as written in the source: some are paths of this machine
autodoc_inherit_docstrings = False
autodoc_default_options = {"members": True, "exclude-members": "__new__, count, index"}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
maximum_signature_line_length = 130  # of names with their modules, which are not shown
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "specdec_jax"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "svg"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True


def _write_redirect(app, exception) -> None:
  """Make the root of the site lead to the start page."""
  if exception is None and app.builder.format == "html":
    page = '<!doctype html><meta charset="utf-8"><title>specdec_jax</title>'
    page += '<meta http-equiv="refresh" content="0; url=docs/index.html">'
    page += '<a href="docs/index.html">specdec_jax</a>\n'
    (pathlib.Path(app.outdir) / "index.html").write_text(page)


def _skip_tuple_fields(app, what, name, member, skip, options) -> bool | None:
  """Leave out fields of named tuples: the docstring of their class describes them."""
  return True if type(member).__name__ == "_tuplegetter" else None


def _hide_protocol_signature(app, what, name, obj, options, signature, returns):
  """Leave out the constructor of a protocol, which takes anything."""
  return ("", None) if getattr(obj, "_is_protocol", False) else None


def _shorten_array_types(app, page_name, template_name, context, doctree) -> None:
  """Write jaxtyping's annotations as in the source: Int[Array, 'B P']."""
  if page_name.startswith("docs/api/"):
    context["body"] = (
      context["body"].replace("jaxtyping.", "").replace("jaxlib._jax.Array", "Array")
    )


def setup(app) -> None:
  app.connect("autodoc-process-signature", _hide_protocol_signature)
  app.connect("html-page-context", _shorten_array_types)
  app.connect("autodoc-skip-member", _skip_tuple_fields)
  app.connect("build-finished", _write_redirect)
