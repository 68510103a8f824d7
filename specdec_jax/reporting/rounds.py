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
    unused: guesses behind: not judged after a rejected one, else past the end of the text.
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
  guesses, num_accepted, next_token, num_emitted = (np.asarray(x)[:, row] for x in decoded.rounds)
  for r in np.flatnonzero(num_emitted):
    words = tuple(pieces([guess])[0] for guess in guesses[r])
    n = min(num_accepted[r], num_emitted[r])
    if num_emitted[r] == n:  # the text ended among the accepted guesses
      rounds.append(Round(words[:n], None, words[n:], None))
    else:
      rejected = words[n] if n < len(words) else None
      rounds.append(Round(words[:n], rejected, words[n + 1 :], pieces([next_token[r]])[0]))
  return tuple(rounds)


def round_text(r: Round) -> Text:
  """A round as a coloured line, marked so that it reads without colour too."""
  parts = [(piece, ACCEPTED) for piece in r.accepted]
  parts += [] if r.rejected is None else [(f"[-{r.rejected}]", REJECTED)]
  parts += [] if r.own is None else [(f"[+{r.own}]", CORRECTED)]
  return Text.assemble(*parts)
