"""Typeset equations as SVG while the site is built.

Pages need neither JavaScript nor a network to show an equation. LaTeX that cannot be typeset
raises, which fails the build. The LaTeX source is kept as the label that screen readers read.
"""

import html

import ziamath
from docutils import nodes
from sphinx.application import Sphinx

SIZE = 17  # pixels of an em; the text around it has 16
ziamath.config.math.color = "currentColor"
ziamath.config.svg2 = False  # paths, which every browser draws


def _svg(latex: str, inline: bool) -> str:
  equation = ziamath.Latex(latex, size=SIZE, inline=inline)
  style = f' style="vertical-align:{equation.getyofst():.2f}px"' if inline else ""
  label = html.escape(" ".join(latex.split()), quote=True)
  opening = f'<svg role="img" aria-label="{label}" class="math"{style} '
  return equation.svg().replace("<svg ", opening, 1)


def visit_inline(translator, node: nodes.math) -> None:
  translator.body.append(_svg(node.astext(), inline=True))
  raise nodes.SkipNode


def visit_display(translator, node: nodes.math_block) -> None:
  number = f'<span class="eqno">({node["number"]})</span>' if node.get("number") else ""
  anchor = f' id="{node["ids"][0]}"' if node["ids"] else ""
  svg = _svg(node.astext(), inline=False)
  translator.body.append(f'<div class="math-display"{anchor}>{svg}{number}</div>')
  raise nodes.SkipNode


def setup(app: Sphinx) -> dict:
  app.add_html_math_renderer("svg", (visit_inline, None), (visit_display, None))
  return {"parallel_read_safe": True, "parallel_write_safe": True}
