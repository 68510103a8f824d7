"""The paper's Figure 1: the rounds of a text that a pair decodes."""

from experiments.figures import figures
from specdec_jax.commands.translate import decode_lines
from specdec_jax.core.loading import DecodeSettings
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.errors import InputError, require_count
from specdec_jax.measure.reporting.rounds import read_rounds
from specdec_jax.pairs import LoadedPair


def trace(pair: LoadedPair, text: str, gamma: int = 7, temperature: float = 0.0, seed: int = 0):
  """Return a figure of the rounds in which a text is decoded.

  Args:
    pair: target and draft.
    text: the source; for a decoder-only pair, the text to continue.
    gamma: number of draft tokens per round.
    temperature: sampling temperature.
    seed: random seed.

  Raises:
    InputError: `gamma` is not a positive integer, or the pair cannot decode an empty text.
  """
  require_count("gamma", gamma)
  if not pair.can_decode(text):
    raise InputError("The text is empty; give a sentence to translate.")
  settings = DecodeSettings(Sampling(temperature), max_new_tokens=64, seed=seed)
  ((_, (decoded,)),) = decode_lines(pair, [text], chain(gamma), settings)
  rounds = read_rounds(decoded, 0, pair.vocabulary.pieces)
  count = f"{int(decoded.lengths[0])} tokens from {len(rounds)} target forward passes"
  title = f"{count}, γ = {gamma}, temperature {temperature:g}"
  if pair.continues and text:
    title += f", after '{text}'"
  return figures.trace_figure(rounds, title)
