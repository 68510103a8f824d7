"""Rounds on a page, to step through one by one: a line of a chain, a table of a tree."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from specdec_jax.reporting.markup import Markup, join, scrolled, tag
from specdec_jax.reporting.rounds import Round

# Class of a token -> its mark, and what it is called.
_KINDS = {
  "accepted": ("✓", "accepted"),
  "rejected": ("✗", "rejected"),
  "unused": ("·", "not judged"),
  "own": ("+", "the target's token"),
}
_OF_TREES = (
  " In a tree, a column holds guesses at one depth, and a row a branch, which leaves the row above "
  "it where it begins; the accepted ones come first. Siblings behind an accepted one, and what "
  "follows a rejected one, are not judged."
)


class Example(NamedTuple):
  """A text and how it came about.

  Attributes:
    source: what was decoded.
    translation: the output.
    temperature: 0 means argmax.
    gamma: guesses a round; of a tree, its depth.
    rounds: of this text, first to last.
    num_nodes: of the tree of guesses, the newest token counted; None for a chain.
  """

  source: str
  translation: str
  temperature: float
  gamma: int
  rounds: tuple[Round, ...]
  num_nodes: int | None = None

  @property
  def guesses(self) -> str:
    """What was guessed in a round."""
    return f"gamma {self.gamma}" if self.num_nodes is None else f"a tree of {self.num_nodes} nodes"

  @property
  def cost(self) -> str:
    """Its tokens and target passes, as a reader is told."""
    tokens = sum(len(r.emitted) for r in self.rounds)
    return f"{tokens} tokens from {len(self.rounds)} passes of the target"


def stepper(examples: Sequence[Example]) -> Markup:
  """The rounds of some texts to step through; nothing without texts."""
  if not examples:
    return join()
  short = lambda text: textwrap.shorten(text, 70, placeholder=" …")
  options = (f"Temperature {e.temperature:g}: {short(e.source)}" for e in examples)
  controls = tag(
    "div",
    tag("label", "Text ", tag("select", *(tag("option", option) for option in options))),
    tag("button", "← Previous", type="button", data_step=-1),
    tag("output", aria_live="polite"),
    tag("button", "Next →", type="button", data_step=1),
    class_="controls",
    hidden="",  # until the script that they need runs
  )
  legend = tag(
    "p",
    "A round is one pass of the target over the draft's guesses: ",
    *(_token(kind, f" {name}") for kind, (_, name) in _KINDS.items()),
    ". A guess is not judged behind a rejected one, nor past the end of the text. "
    "A token close to the one before it continues its word. The arrow keys step, too.",
    "" if all(e.num_nodes is None for e in examples) else _OF_TREES,
    class_="note",
  )
  return tag("div", legend, controls, *map(_article, examples), id="stepper")


def _article(example: Example) -> Markup:
  at = f"temperature {example.temperature:g}, {example.guesses}"
  return tag(
    "article",
    tag("h3", example.source, dir="auto"),
    tag("p", example.translation, dir="auto"),
    tag("p", f"{example.cost}; {at}.", class_="note"),
    tag("ol", *_rounds(example.rounds), class_="rounds"),
  )


def _rounds(rounds: Sequence[Round]) -> Iterable[Markup]:
  so_far: list[str] = []
  for i, r in enumerate(rounds, 1):
    before, new = "".join(so_far), "".join(r.emitted)
    so_far += r.emitted
    space = " " if new.startswith(" ") else ""  # not underlined
    own = Markup("nothing, the text has ended") if r.own is None else _token("own", r.own)
    count = f"{len(so_far)} tokens so far from {i} target {'pass' if i == 1 else 'passes'}"
    yield tag(
      "li",
      tag("p", f"Round {i} of {len(rounds)}: {count}", class_="note"),
      tag("p", before, space, tag("span", new.lstrip(" "), class_="now"), dir="auto"),
      _who("Tree", _tree(r, own)) if r.branches else _chain(r, own),
    )


def _who(name: str, shown: Markup) -> Markup:
  return tag("div", tag("span", name, class_="who"), shown, class_="tokens")


def _chain(r: Round, own: Markup) -> Markup:
  guesses = tag("span", *_tokens(r.accepted, r.rejected, r.unused))
  return join(_who("Draft", guesses), _who("Target", tag("span", own)))


def _tree(r: Round, own: Markup) -> Markup:
  """A row for each branch, a column for each depth; the target's own token is in the first row."""
  rows = [(0, [*_tokens(r.accepted, None, ()), own])]
  rows += [(b.depth, _tokens((), b.rejected, b.unused)) for b in r.branches]
  lines = (
    tag("tr", *[tag("td", colspan=depth)] * (depth > 0), *(tag("td", cell) for cell in cells))
    for depth, cells in rows
  )
  return scrolled("Tree of guesses", tag("table", *lines, class_="tree"))


def _tokens(accepted: Sequence[str], rejected: str | None, unused: Sequence[str]) -> list[Markup]:
  """The first of a kind with what the kind is called, for ears."""
  tokens: list[Markup] = []
  of_kinds = ("accepted", accepted), ("rejected", (rejected,)), ("unused", unused)
  for kind, of_kind in of_kinds:
    shown = [_token(kind, token) for token in of_kind if token is not None]
    if shown:
      shown[0] = join(tag("span", f"{_KINDS[kind][1]}: ", class_="say"), shown[0])
    tokens += shown
  return tokens


def _token(kind: str, token: str) -> Markup:
  joined = "" if token.startswith(" ") else " joined"
  mark = tag("b", _KINDS[kind][0], aria_hidden="true")
  return tag("span", mark, token.strip() or "␣", class_=f"token {kind}{joined}")
