"""Targets that write given texts: outputs, acceptance, and the settings of a pair."""

import numpy as np
import pytest
import tiny_pair

from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import branching, chain
from specdec_jax.drafts.prompt_lookup import prompt_lookup
from specdec_jax.errors import InputError
from specdec_jax.pairs import replayed_pair

GREEDY = Sampling(0.0)
TEXTS = tiny_pair.SENTENCES[:5]
LIMIT = 12


@pytest.mark.parametrize(
  "kind, tree, batch_size",
  [("model", chain(3), 5), ("prompt lookup", branching(2, 1), 1)],
  ids=["model", "prompt lookup"],
)
def test_outputs_and_rounds_are_those_of_the_given_pair(kind, tree, batch_size):
  """The draft model reads no state of the target, so it is accepted as often as before."""
  pair = tiny_pair.pair("near")
  if kind == "prompt lookup":
    pair = pair.with_draft(prompt_lookup(pair.loaded_target))
  replayed = replayed_pair(pair, TEXTS, size="tiny", max_new_tokens=LIMIT)
  assert replayed.target_name == "t5_1.1_tiny" and replayed.task == f"{pair.task}, replayed"
  for i in range(0, len(TEXTS), batch_size):
    texts = TEXTS[i : i + batch_size]
    prompt, keys = pair.prompt(texts), row_keys(0, i, len(texts))
    want, got = (
      each.decode_fn(GREEDY, tree)(prompt, keys, max_new_tokens=LIMIT) for each in (pair, replayed)
    )
    for name in ("tokens", "lengths", "num_rounds"):
      np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    np.testing.assert_array_equal(got.rounds.num_emitted, want.rounds.num_emitted)


def test_decoder_only_pairs_and_empty_texts_are_rejected():
  pair = tiny_pair.pair("near")
  for wrong, texts in ((pair, []), (pair._replace(continues=True), TEXTS)):
    with pytest.raises(InputError, match="needs texts and an encoder-decoder"):
      replayed_pair(wrong, texts, size="tiny")
