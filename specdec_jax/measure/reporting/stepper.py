"""Rounds of decoded texts as HTML, to step through one by one. A tree is shown as a table."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from specdec_jax.measure.reporting.markup import Markup, join, scrollable, tag
from specdec_jax.measure.reporting.rounds import Round

# CSS class of a token -> its mark and its name.
_KINDS = {
  "accepted": ("✓", "accepted"),
  "rejected": ("✗", "rejected"),
  "unverified": ("·", "not verified"),
  "target": ("+", "the target's token"),
}
_TREE_LEGEND = (
  " In a tree, a column holds the draft tokens at one depth, and a row holds a branch. A branch "
  "begins in the column where it leaves the row above. The accepted tokens come first. Later "
  "siblings of an accepted token and descendants of a rejected token are not verified."
)


class Example(NamedTuple):
  """A decoded text and its rounds.

  Attributes:
    source: input text.
    translation: output text.
    temperature: sampling temperature; 0 means argmax.
    gamma: number of draft tokens per round, or the depth of a tree.
    rounds: rounds of this text in order.
    num_nodes: number of nodes of the tree, including the last committed token; None for a chain.
  """

  source: str
  translation: str
  temperature: float
  gamma: int
  rounds: tuple[Round, ...]
  num_nodes: int | None = None

  @property
  def proposal(self) -> str:
    """Description of the draft tokens of a round."""
    return f"gamma {self.gamma}" if self.num_nodes is None else f"a tree of {self.num_nodes} nodes"

  @property
  def cost(self) -> str:
    """Number of tokens and of target forward passes, in words."""
    tokens = sum(len(r.emitted) for r in self.rounds)
    return f"{tokens} tokens from {len(self.rounds)} target forward passes"


def stepper(examples: Sequence[Example]) -> Markup:
  """Return the rounds of texts with controls to step through them; nothing if there is no text."""
  if not examples:
    return join()
  sources = (textwrap.shorten(e.source, 70, placeholder=" …") for e in examples)
  options = (f"Temperature {e.temperature:g}: {text}" for e, text in zip(examples, sources))
  controls = tag(
    "div",
    tag("label", "Text ", tag("select", *(tag("option", option) for option in options))),
    tag("button", "← Previous", type="button", data_step=-1),
    tag("output", aria_live="polite"),
    tag("button", "Next →", type="button", data_step=1),
    class_="controls",
    hidden="",  # the script removes this attribute
  )
  legend = tag(
    "p",
    "A round is one target forward pass over the draft tokens: ",
    *(_token(kind, f" {name}") for kind, (_, name) in _KINDS.items()),
    ". Draft tokens after a rejected one, or past the end of the text, are not verified. "
    "A token close to the one before it continues its word. The arrow keys also step.",
    "" if all(e.num_nodes is None for e in examples) else _TREE_LEGEND,
    class_="note",
  )
  return tag("div", legend, controls, *map(_article, examples), id="stepper")


def _article(example: Example) -> Markup:
  setting = f"temperature {example.temperature:g}, {example.proposal}"
  return tag(
    "article",
    tag("h3", example.source, dir="auto"),
    tag("p", example.translation, dir="auto"),
    tag("p", f"{example.cost}; {setting}.", class_="note"),
    tag("ol", *_rounds(example.rounds), class_="rounds"),
  )


def _rounds(rounds: Sequence[Round]) -> Iterable[Markup]:
  so_far: list[str] = []
  for i, r in enumerate(rounds, 1):
    before, new = "".join(so_far), "".join(r.emitted)
    so_far += r.emitted
    space = " " if new.startswith(" ") else ""  # outside the underlined span
    target = Markup("nothing, the text has ended")
    if r.target_token is not None:
      target = _token("target", r.target_token)
    count = f"{len(so_far)} tokens so far from {i} target {'pass' if i == 1 else 'passes'}"
    yield tag(
      "li",
      tag("p", f"Round {i} of {len(rounds)}: {count}", class_="note"),
      tag("p", before, space, tag("span", new.lstrip(" "), class_="now"), dir="auto"),
      _labelled("Tree", _tree(r, target)) if r.branches else _chain(r, target),
    )


def _labelled(label: str, tokens: Markup) -> Markup:
  return tag("div", tag("span", label, class_="label"), tokens, class_="tokens")


def _chain(r: Round, target: Markup) -> Markup:
  draft_tokens = tag("span", *_tokens(r.accepted, r.rejected, r.unverified))
  return join(_labelled("Draft", draft_tokens), _labelled("Target", tag("span", target)))


def _tree(r: Round, target: Markup) -> Markup:
  """Return the tree of a round as a table with one column per depth.

  The first row has the accepted tokens and the target's token. Each other row has a branch.
  """
  rows = [(0, [*_tokens(r.accepted, None, ()), target])]
  rows += [(b.depth, _tokens((), b.rejected, b.unverified)) for b in r.branches]
  lines = (
    tag("tr", *[tag("td", colspan=depth)] * (depth > 0), *(tag("td", cell) for cell in cells))
    for depth, cells in rows
  )
  return scrollable("Tree of guesses", tag("table", *lines, class_="tree"))


def _tokens(
  accepted: Sequence[str], rejected: str | None, unverified: Sequence[str]
) -> list[Markup]:
  """Return the tokens as elements; the first of each kind names the kind for screen readers."""
  markup: list[Markup] = []
  kinds = ("accepted", accepted), ("rejected", (rejected,)), ("unverified", unverified)
  for kind, tokens in kinds:
    elements = [_token(kind, token) for token in tokens if token is not None]
    if elements:
      name = tag("span", f"{_KINDS[kind][1]}: ", class_="screen-reader")
      elements[0] = join(name, elements[0])
    markup += elements
  return markup


def _token(kind: str, token: str) -> Markup:
  joined = "" if token.startswith(" ") else " joined"
  mark = tag("b", _KINDS[kind][0], aria_hidden="true")
  return tag("span", mark, token.strip() or "␣", class_=f"token {kind}{joined}")
