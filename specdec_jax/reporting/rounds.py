"""The rounds of a decoded text, token by token and as coloured lines (the paper's Figure 1)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from rich.text import Text

from specdec_jax.protocols import Decoded

ACCEPTED, REJECTED, CORRECTED = "green", "red strike", "bold blue"

LEGEND = Text.assemble(
  ("accepted", ACCEPTED), ", ", ("[-rejected]", REJECTED), ", ", ("[+the target's own]", CORRECTED)
)


class Round(NamedTuple):
  """A round of one row, token by token, each as it reads inside a text.

  Attributes:
    accepted: guesses that entered the text.
    rejected: the guess after them, unless all were accepted or the text ended before it.
    unused: guesses behind: not judged after a rejected one, else past the end of the text. Of a
      tree, which may have more than one next to an accepted guess, all that did not enter the text.
    own: the target's own token, unless the text ended before it.
  """

  accepted: tuple[str, ...]
  rejected: str | None
  unused: tuple[str, ...]
  own: str | None

  @property
  def emitted(self) -> tuple[str, ...]:
    """The tokens that entered the text."""
    return self.accepted if self.own is None else (*self.accepted, self.own)


def read_rounds(
  decoded: Decoded, row: int, pieces: Callable[[Sequence[int]], list[str]]
) -> tuple[Round, ...]:
  """The rounds of a row, first to last.

  Args:
    decoded: on the host.
    row: which row of the batch.
    pieces: token ids -> how each reads inside a text (`Vocabulary.pieces`).
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
      on_path = [node - 1 for node in path[r, :n]]
      others = tuple(word for i, word in enumerate(words) if i not in on_path)
      rounds.append(Round(tuple(words[i] for i in on_path), None, others, own))
    elif own is None:  # the text ended among the accepted guesses
      rounds.append(Round(words[:n], None, words[n:], None))
    else:
      rejected = words[n] if n < len(words) else None
      rounds.append(Round(words[:n], rejected, words[n + 1 :], own))
  return tuple(rounds)


def round_text(r: Round) -> Text:
  """A round as a coloured line, marked so that it reads without colour too."""
  parts = [(piece, ACCEPTED) for piece in r.accepted]
  parts += [] if r.rejected is None else [(f"[-{r.rejected}]", REJECTED)]
  parts += [] if r.own is None else [(f"[+{r.own}]", CORRECTED)]
  return Text.assemble(*parts)
