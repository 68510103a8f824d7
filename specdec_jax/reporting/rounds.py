"""The rounds of a decoded text, token by token and as coloured lines (the paper's Figure 1)."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from specdec_jax.core.types import DecodeResult

ACCEPTED, REJECTED, CORRECTED = "green", "red strike", "bold blue"

UNUSED = "dim"  # guesses of a tree that were not judged

LEGEND = Text.assemble(
  ("accepted", ACCEPTED),
  ", ",
  ("[-rejected]", REJECTED),
  ", ",
  ("[+the target's token]", CORRECTED),
)
TREE_LEGEND = Text.assemble(LEGEND, ", ", ("not judged", UNUSED))


class Branch(NamedTuple):
  """Guesses of a tree, each after the one before, that did not enter the text.

  Attributes:
    depth: how many guesses lie before them; these are of the branch above.
    rejected: the first of them, if it was judged: a child of the last accepted guess, or a sibling
      that came before an accepted one.
    unused: those that were not.
  """

  depth: int
  rejected: str | None
  unused: tuple[str, ...]


class Round(NamedTuple):
  """A round of one row, token by token, each as it reads inside a text.

  Attributes:
    accepted: guesses that entered the text.
    rejected: of a chain, the guess after them, unless all were accepted or the text ended before.
    unused: of a chain, guesses behind: not judged after a rejected one, else past the end of the
      text.
    own: the target's own token, unless the text ended before it.
    branches: of a tree, all other guesses: the accepted ones are its first branch, and others
      follow from the accepted_path up.
  """

  accepted: tuple[str, ...]
  rejected: str | None
  unused: tuple[str, ...]
  own: str | None
  branches: tuple[Branch, ...] = ()

  @property
  def emitted(self) -> tuple[str, ...]:
    """The tokens that entered the text."""
    return self.accepted if self.own is None else (*self.accepted, self.own)


def read_rounds(
  decoded: DecodeResult,
  row: int,
  pieces: Callable[[Sequence[int]], list[str]],
  parents: Sequence[int] = (),
) -> tuple[Round, ...]:
  """The rounds of a row, first to last.

  Args:
    decoded: on the host.
    row: which row of the batch.
    pieces: token ids -> how each reads inside a text (`Vocabulary.pieces`).
    parents: where guesses are trees, those of their nodes, [N] (`Tree.parents`). Of trees that
      change from round to round they are in the record.
  """
  rounds = []
  guesses, num_accepted, next_token, num_emitted, *_ = (
    np.asarray(x)[:, row] for x in decoded.rounds if x is not None
  )
  path = None if decoded.rounds.path is None else np.asarray(decoded.rounds.path)[:, row]
  for r in np.flatnonzero(num_emitted):
    words = tuple(pieces([guess])[0] for guess in guesses[r])
    n = min(num_accepted[r], num_emitted[r])
    own = None if num_emitted[r] == n else pieces([next_token[r]])[0]
    if path is not None:
      nodes = path[r, :n].tolist()
      changing = decoded.rounds.parents
      of_round = [*parents] if changing is None else np.asarray(changing)[r, row].tolist()
      branches = _branches(of_round, words, nodes, own is not None)
      rounds.append(Round(tuple(words[i - 1] for i in nodes), None, (), own, branches))
    elif own is None:  # the text ended among the accepted guesses
      rounds.append(Round(words[:n], None, words[n:], None))
    else:
      rejected = words[n] if n < len(words) else None
      rounds.append(Round(words[:n], rejected, words[n + 1 :], own))
  return tuple(rounds)


def _branches(
  parents: Sequence[int], words: Sequence[str], accepted: list[int], has_own: bool
) -> tuple[Branch, ...]:
  """What a tree has beside the accepted nodes, after which the target's own token may come."""
  ways: list[list[int]] = [[]]  # to each node
  for node, parent in enumerate(parents, 1):
    ways.append([*ways[parent], node])
  leaves = [way for node, way in enumerate(ways) if node not in parents]
  branches, shown = [], {*accepted}
  for way in sorted(leaves, key=lambda way: [(node not in shown, node) for node in way]):
    new = [node for node in way if node not in shown]
    if new:
      shown |= {*new}
      depth = len(way) - len(new)
      judged = way[:depth] == accepted[:depth] and (
        has_own if depth == len(accepted) else new[0] < accepted[depth]
      )
      first, *others = (words[node - 1] for node in new)
      behind = others if judged else [first, *others]
      branches.append(Branch(depth, first if judged else None, tuple(behind)))
  return tuple(branches)


def round_text(r: Round) -> Text:
  """A round as a coloured line, marked so that it reads without colour too.

  Below it the other branches of a tree, each in the column where it leaves the one above.
  """
  parts = [(piece, ACCEPTED) for piece in r.accepted]
  parts += _rejected(r.rejected)
  parts += [] if r.own is None else [(f"[+{r.own}]", CORRECTED)]
  text = Text.assemble(*parts)
  columns = [*itertools.accumulate(map(cell_len, r.accepted), initial=0)]
  for branch in r.branches:
    del columns[branch.depth + 1 :]
    text.append("\n" + " " * columns[-1])
    for piece, style in (*_rejected(branch.rejected), *((p, UNUSED) for p in branch.unused)):
      text.append(piece, style)
      columns.append(columns[-1] + cell_len(piece))
  return text


def _rejected(piece: str | None) -> list[tuple[str, str]]:
  return [] if piece is None else [(f"[-{piece}]", REJECTED)]
