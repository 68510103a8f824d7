"""The task specdec_lm1b of seqio: TFDS's lm1b in the word pieces of the GPT-like models.

Inputs are empty: the models generate unconditionally.
"""

import pathlib

import seqio
import tensorflow as tf

from specdec_jax.data import tasks


class WordPieceVocabulary(seqio.BertWordPieceVocabulary):
  """Seqio's vocabulary of word pieces, corrected for words that consist of several pieces.

  Encoding returns a flat sequence of ids, and decoding joins the pieces of a word. The ids equal
  the ids of `pieces.WordPieces`, except for characters that tensorflow_text normalizes and
  BERT's tokenizer does not, such as \u00df (to ss) and \u2026 (to three full stops).
  """

  @property
  def _base_vocab_size(self):
    return super()._base_vocab_size - 1  # tensorflow_text counts a bucket of unknown words

  def _encode_tf(self, s):
    return tf.cast(self.tf_tokenizer.tokenize(s).flat_values, tf.int32)

  def _decode_tf(self, ids):
    words = self.tf_tokenizer.detokenize(ids[None])
    return tf.strings.reduce_join(words.flat_values, separator=" ")


WORD_PIECES = WordPieceVocabulary(
  str(pathlib.Path(__file__).parent / "weights" / "vocabulary.txt"),
  lower_case=True,
  start_of_sequence_id=0,
  end_of_sequence_id=1,
)

_lm1b = tasks.prepared_tfds("lm1b:1.1.0", ("train", "test"))
tasks.add_task("specdec_lm1b", _lm1b, "", None, "text", WORD_PIECES)
