"""Rounds of a decoded text, token by token, and as colored lines as in Figure 1 of the paper."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from specdec_jax.core.types import DecodeResult

ACCEPTED, REJECTED, CORRECTED = "green", "red strike", "bold blue"

UNVERIFIED = "dim"  # draft tokens of a tree that were not verified

LEGEND = Text.assemble(
  ("accepted", ACCEPTED),
  ", ",
  ("[-rejected]", REJECTED),
  ", ",
  ("[+the target's token]", CORRECTED),
)
TREE_LEGEND = Text.assemble(LEGEND, ", ", ("not verified", UNVERIFIED))


class Branch(NamedTuple):
  """Branch of a tree: consecutive draft tokens that did not enter the text.

  Attributes:
    depth: number of draft tokens on the path before the branch.
    rejected: first token of the branch if it was verified, otherwise None. It was verified if it is
      an earlier sibling of an accepted node or, if the target's token was emitted, a child of the
      last accepted node.
    unverified: tokens of the branch that were not verified.
  """

  depth: int
  rejected: str | None
  unverified: tuple[str, ...]


class Round(NamedTuple):
  """A round of one row. Tokens are written as they appear inside a text.

  Attributes:
    accepted: draft tokens that entered the text.
    rejected: in a chain, the draft token that was rejected, if any.
    unverified: in a chain, the remaining draft tokens.
    target_token: token sampled from the target; None if the text ended before it.
    branches: in a tree, the branches of draft tokens that were not accepted, the deepest first.
  """

  accepted: tuple[str, ...]
  rejected: str | None
  unverified: tuple[str, ...]
  target_token: str | None
  branches: tuple[Branch, ...] = ()

  @property
  def emitted(self) -> tuple[str, ...]:
    """Tokens that the round committed."""
    return self.accepted if self.target_token is None else (*self.accepted, self.target_token)


class Example(NamedTuple):
  """A decoded text and its rounds."""

  source: str
  translation: str
  temperature: float  # 0 means argmax
  gamma: int  # number of draft tokens per round, or the depth of a tree
  rounds: tuple[Round, ...]
  num_nodes: int | None = None  # of the tree, including the last committed token; None for a chain

  @property
  def proposal(self) -> str:
    """Description of the draft tokens of a round."""
    return f"gamma {self.gamma}" if self.num_nodes is None else f"a tree of {self.num_nodes} nodes"

  @property
  def cost(self) -> str:
    """Number of tokens and of target forward passes, in words."""
    tokens = sum(len(r.emitted) for r in self.rounds)
    return f"{tokens} tokens from {len(self.rounds)} target forward passes"


def read_rounds(
  decoded: DecodeResult,
  row: int,
  pieces: Callable[[Sequence[int]], list[str]],
  parents: Sequence[int] = (),
) -> tuple[Round, ...]:
  """Return the rounds of a row in order, up to the end of its text.

  Args:
    decoded: result of decoding, on the host.
    pieces: function from token ids to the text of each token (`Vocabulary.pieces`).
    parents: `Tree.parents` of a static tree; a chain or a dynamic tree needs none.
  """
  rounds = []
  draft_tokens, num_accepted, next_token, num_emitted, *_ = (
    np.asarray(x)[:, row] for x in decoded.rounds if x is not None
  )
  path = None if decoded.rounds.path is None else np.asarray(decoded.rounds.path)[:, row]
  for r in np.flatnonzero(num_emitted):
    proposed = (
      draft_tokens[r] if path is not None else draft_tokens[r][draft_tokens[r] >= 0]
    )  # -1: not proposed
    words = tuple(pieces([draft_token])[0] if draft_token >= 0 else "" for draft_token in proposed)
    n = min(num_accepted[r], num_emitted[r])
    target_token = None if num_emitted[r] == n else pieces([next_token[r]])[0]
    if path is not None:
      nodes = path[r, :n].tolist()
      dynamic = decoded.rounds.parents
      round_parents = [*parents] if dynamic is None else np.asarray(dynamic)[r, row].tolist()
      branches = _branches(round_parents, words, nodes, target_token is not None)
      accepted = tuple(words[node - 1] for node in nodes)
      rounds.append(Round(accepted, None, (), target_token, branches))
    elif target_token is None:  # the text ended within the accepted draft tokens
      rounds.append(Round(words[:n], None, words[n:], None))
    else:
      rejected = words[n] if n < len(words) else None
      rounds.append(Round(words[:n], rejected, words[n + 1 :], target_token))
  return tuple(rounds)


def _branches(
  parents: Sequence[int], words: Sequence[str], accepted: list[int], has_target_token: bool
) -> tuple[Branch, ...]:
  """Return the branches of a tree other than the accepted path; word i is that of node i + 1."""
  paths: list[list[int]] = [[]]  # from the root to each node
  for node, parent in enumerate(parents, 1):
    paths.append([*paths[parent], node])
  leaf_paths = [path for node, path in enumerate(paths) if node not in parents]
  branches, shown = [], {*accepted}
  # Paths that leave the accepted path deepest come first.
  for path in sorted(leaf_paths, key=lambda path: [(node not in shown, node) for node in path]):
    new_nodes = [node for node in path if node not in shown]
    if new_nodes:
      shown |= {*new_nodes}
      depth = len(path) - len(new_nodes)
      # Children of the last accepted node were verified if the target's token followed. Siblings of
      # an accepted node were verified if they come before it.
      verified = path[:depth] == accepted[:depth] and (
        has_target_token if depth == len(accepted) else new_nodes[0] < accepted[depth]
      )
      first, *others = (words[node - 1] for node in new_nodes)
      unverified = others if verified else [first, *others]
      branches.append(Branch(depth, first if verified else None, tuple(unverified)))
  return tuple(branches)


def round_text(r: Round) -> Text:
  """Format a round as a colored line; each branch of a tree is on its own line below.

  Brackets mark a rejected token and the target's token, in case colors are not visible. Unverified
  tokens of a chain are left out. A branch begins in the column where it leaves the line above.
  """
  parts = [(piece, ACCEPTED) for piece in r.accepted]
  parts += _rejected(r.rejected)
  parts += [] if r.target_token is None else [(f"[+{r.target_token}]", CORRECTED)]
  text = Text.assemble(*parts)
  columns = [*itertools.accumulate(map(cell_len, r.accepted), initial=0)]
  for branch in r.branches:
    del columns[branch.depth + 1 :]
    text.append("\n" + " " * columns[-1])
    unverified = [(piece, UNVERIFIED) for piece in branch.unverified]
    for piece, style in (*_rejected(branch.rejected), *unverified):
      text.append(piece, style)
      columns.append(columns[-1] + cell_len(piece))
  return text


def _rejected(piece: str | None) -> list[tuple[str, str]]:
  return [] if piece is None else [(f"[-{piece}]", REJECTED)]
