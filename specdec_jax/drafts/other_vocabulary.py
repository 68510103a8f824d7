"""A model with its own vocabulary as a draft model (TLI, Algorithm 4 of Timor et al., 2025).

Token-level intersection: the distribution of the draft model is restricted to the tokens that both
vocabularies have, renormalized, and expressed in the ids of the target. It is then like any other
q, so that decoding is exact.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from specdec_jax.core.trees import NodeLayout
from specdec_jax.core.types import Model, WrappedModel
from specdec_jax.data.vocabulary import PAD_ID, Vocabulary
from specdec_jax.errors import InputError
from specdec_jax.models.layers import MASKED

MAX_PIECES = 8  # of the draft's vocabulary for one token of a prompt; more are dropped
MAX_GROWTH = 2  # of the length of a prompt, which is truncated if it needs more draft tokens
_UNKNOWN = {"<unk>", "[UNK]"}


class OtherVocabularyParams(NamedTuple):
  """Parameters of an `OtherVocabularyModel`: those of its model, and tables for its V tokens.

  Attributes:
    partners: for each token, the draft token with the same piece; -1 if there is none.
    inputs: for each token, the draft token that the model processes in its place.
    spellings: for each token, the draft tokens that replace it in a prompt, then -1.
  """

  model: Any
  partners: Int[Array, " V"]
  inputs: Int[Array, " V"]
  spellings: Int[Array, "V M"]


@dataclasses.dataclass(frozen=True)
class OtherVocabularyModel(WrappedModel):
  """Model that takes and predicts tokens of the target, and runs a model with other tokens.

  The logits of tokens without a partner are masked. In the text, a token without a partner is
  replaced by one draft token, so that the positions of both models are the same. In the prompt of
  an encoder-decoder, it is replaced by as many draft tokens as its text needs.
  """

  target: Model
  pad_id: int = PAD_ID

  @property
  def vocab_size(self) -> int:
    return self.target.vocab_size

  @property
  def eos_id(self) -> int:
    return self.target.eos_id

  def prompt_tokens(self, prompt: Int[Array, "B P"]) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
    return self.target.prompt_tokens(prompt)

  def prefill(
    self, params: OtherVocabularyParams, prompt: Int[Array, "B P"], num_slots: int
  ) -> tuple[Float[Array, "B C E"], Any]:
    spelled = spell(params.spellings, prompt, self.pad_id)
    return self.model.prefill(params.model, spelled, num_slots)

  def extend(
    self,
    params: OtherVocabularyParams,
    cache: Any,
    tokens: Int[Array, "B K"],
    tree: NodeLayout | None = None,
    first: Int[Array, ""] | int = 0,
  ) -> tuple[Float[Array, "B K V"], Float[Array, "B K E"], Any]:
    inputs, partners = params.inputs[tokens], params.partners
    logits, hidden, cache = self.model.extend(params.model, cache, inputs, tree, first)
    logits = jnp.where(partners >= 0, logits[..., jnp.maximum(partners, 0)], MASKED)
    return logits, hidden, cache


def spell(
  spellings: Int[Array, "V M"], prompt: Int[Array, "B P"], pad_id: int = PAD_ID
) -> Int[Array, "B spelled"]:
  """Replace the tokens of prompts by their spellings, and pad the rows to MAX_GROWTH times P.

  With spellings of at most one token, the length does not change. A row with more tokens is
  truncated, but keeps its last one, which is EOS.
  """
  length = prompt.shape[1] * min(MAX_GROWTH, spellings.shape[1])
  tokens = spellings[prompt].reshape(len(prompt), -1)  # [B, P * M]
  is_token = tokens >= 0
  count = jnp.cumsum(is_token, axis=1)
  is_last = count == count[:, -1:]
  slot = jnp.where(is_last, jnp.minimum(count, length), count) - 1
  slot = jnp.where(is_token & (is_last | (slot < length - 1)), slot, length)  # `length`: no slot
  spelled = jnp.full((len(prompt), length), pad_id, jnp.int32)
  return spelled.at[jnp.arange(len(prompt))[:, None], slot].set(tokens, mode="drop")


def other_vocabulary_params(
  params: Any,
  target: Vocabulary,
  draft: Vocabulary,
  has_encoder: bool,
  starts: tuple[int | None, int | None] = (PAD_ID, PAD_ID),
) -> OtherVocabularyParams:
  """Return the parameters of an `OtherVocabularyModel`.

  EOS corresponds to EOS and padding to padding (in a decoder-only model, the start token to the
  start token). Other tokens correspond if they have the same piece; or, for vocabularies of
  different types, if they have the same text inside a text. If several tokens have the same text,
  only the first one has a partner. A token without a partner is spelled with as few draft tokens as
  possible. If it cannot be spelled, it becomes the unknown token, or the start token if there is no
  unknown token. `inputs` has the last token of each spelling. `starts` are the start tokens of
  texts of the target and of the draft if they are encoder-decoders.
  """
  pads, text_starts = (target.pad_id, draft.pad_id), (target.start_id, draft.start_id)
  roles = dict([pads if has_encoder else text_starts])
  roles[target.eos_id] = draft.eos_id
  texts = target.pieces(range(len(target)))
  draft_texts = draft.pieces(range(len(draft)))
  names, draft_names = texts, draft_texts
  if type(target) is type(draft):
    names, draft_names = target.all_pieces(), draft.all_pieces()
  ids = _ids(draft_names, roles.values())
  shared = {i: ids[name] for name, i in _ids(names, roles).items() if name in ids}
  if not shared:
    raise InputError(
      f"The vocabularies {target.path} and {draft.path} have no piece in common, so that a draft "
      "with one cannot propose tokens of the other."
    )
  shared.update(roles)
  ids = _ids(draft_texts, roles.values())
  pieces = draft.all_pieces()
  unknown = next((i for i, piece in enumerate(pieces) if piece in _UNKNOWN), draft.start_id)
  spellings = [
    [shared[i]] if i in shared else _spelling(text, ids) or [unknown]
    for i, text in enumerate(texts)
  ]
  inputs = [spelling[-1] for spelling in spellings]
  if has_encoder:
    of_target, of_draft = starts
    assert of_target is not None and of_draft is not None
    inputs[of_target] = of_draft
    spellings[target.pad_id] = []
  else:
    spellings = [[token] for token in inputs]
  width = min(MAX_PIECES, max(map(len, spellings)))
  table = np.full((len(spellings), width), -1, np.int32)
  for i, spelling in enumerate(spellings):
    table[i, : len(spelling)] = spelling[:width]
  return OtherVocabularyParams(
    model=params,
    partners=jnp.asarray([shared.get(i, -1) for i in range(len(target))], jnp.int32),
    inputs=jnp.asarray(inputs, jnp.int32),
    spellings=jnp.asarray(table),
  )


def _ids(names: list[str], special: Iterable[int]) -> dict[str, int]:
  skipped = {*special}
  ids: dict[str, int] = {}
  for i, name in enumerate(names):
    if name and i not in skipped:
      ids.setdefault(name, i)
  return ids


def _spelling(text: str, ids: Mapping[str, int]) -> list[int] | None:
  """Return the fewest tokens whose texts join to `text`, or None if there are none."""
  best: list[list[int] | None] = [[]]  # of the first n characters, for each n
  for end in range(1, len(text) + 1):
    options = [
      [*before, ids[text[start:end]]]
      for start, before in enumerate(best)
      if before is not None and text[start:end] in ids
    ]
    best.append(min(options, key=len, default=None))
  return best[-1]
