"""Elements of HTML and SVG. Text that is not `Markup` is escaped."""

from markupsafe import Markup, escape


def join(*parts: object) -> Markup:
  """Concatenate parts, and escape those that are not `Markup`."""
  return Markup("").join(map(escape, parts))


def tag(name: str, *children: object, **attributes: object) -> Markup:
  """Return an element with the given name, children and attributes.

  In the names of attributes, outer underscores are dropped and inner ones become hyphens: `class_`
  is written as class, and `aria_label` as aria-label. Attributes that are None are omitted, and
  floats are written with one decimal.
  """
  text = Markup("")
  for attribute, value in attributes.items():
    if value is not None:
      value = f"{value:.1f}" if isinstance(value, float) else value
      text += Markup(' {}="{}"').format(attribute.strip("_").replace("_", "-"), value)
  return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), text, join(*children))


def scrollable(label: str, table: Markup) -> Markup:
  """Return a region that contains a table and scrolls horizontally, independently of the page."""
  # An element with a tabindex can also be scrolled with the keyboard.
  return tag("div", table, class_="scroll", role="region", aria_label=label, tabindex=0)
