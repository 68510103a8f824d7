"""The rounds of a decoded text in colour, a line a target pass (the paper's Figure 1)."""

from collections.abc import Callable, Sequence

import numpy as np
from rich.text import Text

from specdec_jax.protocols import Decoded

ACCEPTED, REJECTED, CORRECTED = "green", "red strike", "bold blue"

LEGEND = Text.assemble(
  ("accepted", ACCEPTED), ", ", ("[-rejected]", REJECTED), ", ", ("[+the target's own]", CORRECTED)
)


def rounds_text(
  decoded: Decoded, row: int, pieces: Callable[[Sequence[int]], list[str]]
) -> list[Text]:
  """One coloured line for each round of a row, marked so that it reads without colour too.

  Args:
    decoded: on the host.
    row: which row of the batch.
    pieces: token ids -> how each reads inside a text (`Vocabulary.pieces`).
  """
  lines = []
  guesses, num_accepted, next_token, num_emitted = (np.asarray(x)[:, row] for x in decoded.rounds)
  for r in np.flatnonzero(num_emitted):
    n, emitted, line = num_accepted[r], num_emitted[r], Text()
    for piece in pieces(guesses[r][: min(n, emitted)]):
      line.append(piece, ACCEPTED)
    if n < guesses.shape[1] and emitted == n + 1:
      line.append(f"[-{pieces(guesses[r][n : n + 1])[0]}]", REJECTED)
    if emitted == n + 1:
      line.append(f"[+{pieces([next_token[r]])[0]}]", CORRECTED)
    lines.append(line)
  return lines
