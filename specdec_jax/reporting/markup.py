"""HTML in pieces: what is not `Markup` is text, and escaped where it enters."""

import html


class Markup(str):
  """HTML as it goes into a page."""


def join(*parts: object) -> Markup:
  """Parts one after another."""
  return Markup("".join(p if isinstance(p, Markup) else html.escape(str(p)) for p in parts))


def tag(name: str, *inside: object, **attributes: object) -> Markup:
  """An element; `class_` is written class, `aria_label` aria-label, and None is left out."""
  written = ""
  for attribute, value in attributes.items():
    if value is not None:
      value = f"{value:.1f}" if isinstance(value, float) else str(value)
      written += f' {attribute.strip("_").replace("_", "-")}="{html.escape(value)}"'
  return Markup(f"<{name}{written}>{join(*inside)}</{name}>")


def scrolled(label: str, table: Markup) -> Markup:
  """A table as wide as it takes, which scrolls by itself."""
  # The keyboard, too, can scroll what has a tabindex.
  return tag("div", table, class_="scroll", role="region", aria_label=label, tabindex=0)
