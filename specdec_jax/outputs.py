"""Outputs of generation: texts with their tokens, rounds and log-probabilities."""

import dataclasses
import io
from collections.abc import Callable
from typing import Literal

import numpy as np
from rich.console import Console
from rich.text import Text

from specdec_jax.core.types import Rounds
from specdec_jax.errors import InputError
from specdec_jax.reporting.rounds import Round, round_text

FinishReason = Literal["eos", "length", "stop_string"]


@dataclasses.dataclass(frozen=True, eq=False)
class Output:
  """Output for one text. `str(output)` and `print(output)` give its text.

  Attributes:
    text: the text.
    tokens: [T], tokens of the text; EOS is last unless the output ended for another reason.
    finish_reason: "eos", "length" (the limit was reached) or "stop_string".
    rounds: `core.types.Rounds` of this text, with fields [R, ...]; None for a beam search.
    logprobs: [T], log-probability of each token under the target, in nats, after logits processors
      and the sampling method (at temperature 0, after processors only). None by default.
    model_logprobs: the same before logits processors and the sampling method.
    score: for a beam search, log-probability under the target, divided by the length penalty (see
      `BeamResult.scores`); otherwise None.
  """

  text: str
  tokens: np.ndarray
  finish_reason: FinishReason
  rounds: Rounds | None = None
  logprobs: np.ndarray | None = None
  model_logprobs: np.ndarray | None = None
  score: float | None = None
  _read: Callable[[], tuple[Round, ...]] | None = dataclasses.field(default=None, repr=False)

  def __str__(self) -> str:
    return self.text

  @property
  def logprob(self) -> float | None:
    """Sum of `logprobs`; None if the output has none."""
    return None if self.logprobs is None else float(self.logprobs.sum())

  @property
  def words(self) -> tuple[Round, ...]:
    """The rounds with tokens as text (`reporting.rounds.Round`); empty for a beam search."""
    return self._read() if self._read else ()

  @property
  def acceptance_length(self) -> float:
    """Mean number of tokens per round; a round is one target forward pass."""
    if self.rounds is None:
      raise InputError("The output of a beam search has no rounds.")
    return len(self.tokens) / len(self.rounds.num_emitted)

  def show(self, console: Console | None = None) -> None:
    """Print each round: accepted tokens, [-rejected], [+the target's token]; see `round_text`."""
    console = console or Console()
    lines = [round_text(words) for words in self.words]
    console.print(Text("\n").join(lines), soft_wrap=True)

  def _repr_html_(self) -> str:
    """Return HTML for notebooks."""
    # With force_jupyter, the console would also display each line in the notebook.
    console = Console(record=True, file=io.StringIO(), force_jupyter=False)
    console.print(Text(self.text), soft_wrap=True)
    self.show(console)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
