"""Building blocks of HTML. Everything that is not `Markup` is text and is escaped."""

import html


class Markup(str):
  """HTML that is inserted without escaping."""


def join(*parts: object) -> Markup:
  """Concatenate parts, and escape those that are not `Markup`."""
  return Markup("".join(p if isinstance(p, Markup) else html.escape(str(p)) for p in parts))


def tag(name: str, *children: object, **attributes: object) -> Markup:
  """Return an element.

  The attribute `class_` is written as class and `aria_label` as aria-label. Attributes that are
  None are omitted.
  """
  text = ""
  for attribute, value in attributes.items():
    if value is not None:
      value = f"{value:.1f}" if isinstance(value, float) else str(value)
      text += f' {attribute.strip("_").replace("_", "-")}="{html.escape(value)}"'
  return Markup(f"<{name}{text}>{join(*children)}</{name}>")


def scrollable(label: str, table: Markup) -> Markup:
  """Return a table in a region that scrolls horizontally on its own."""
  # An element with a tabindex can also be scrolled with the keyboard.
  return tag("div", table, class_="scroll", role="region", aria_label=label, tabindex=0)
