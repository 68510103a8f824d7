"""Settings that are read from t5x's gin bindings, such as the sampling method."""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import gin
import seqio
from flax import linen as nn
from t5x import decoding

from specdec_jax.data.vocabularies import count_extra_ids
from specdec_jax.errors import InputError

# Parameters of t5x's decoding functions that `SpeculativeModel` supports.
SETTINGS = {
  decoding.temperature_sample: (
    "temperature",
    "topk",
    "topp",
    "max_decode_steps",
    "rescale_log_probs",
    "logit_callback_fn",
  ),
  decoding.beam_search: ("alpha",),
}


def decode_settings(decode_fn: Callable) -> tuple[Callable, dict[str, Any]]:
  """Return the t5x function that `decode_fn` calls, and the values of its settings.

  Args:
    decode_fn: function of t5x that is in SETTINGS. Parameters may be bound by gin or by
      `functools.partial`.

  Raises:
    InputError: SETTINGS does not contain the function or one of the bound parameters.
  """
  given = {}
  if isinstance(decode_fn, functools.partial):
    given, decode_fn = decode_fn.keywords, decode_fn.func
  # Gin wraps a function once, or twice if the reference has a scope, whose bindings are invisible
  # here.
  function = getattr(decode_fn, "__wrapped__", decode_fn)
  if function not in SETTINGS:
    raise InputError(
      f"decode_fn is {getattr(decode_fn, '__name__', decode_fn)}; SpeculativeModel samples or "
      "searches by beams, so bind models.EncoderDecoderModel.decode_fn = @decoding."
      "temperature_sample or @decoding.beam_search, without a scope, or decode with t5x's "
      "EncoderDecoderModel."
    )
  given, known = bound(function) | given, SETTINGS[function]
  if unknown := sorted(given.keys() - set(known)):
    raise InputError(
      f"decoding.{function.__name__} is bound to {', '.join(unknown)}; SpeculativeModel takes "
      f"{', '.join(known)} from there, and num_decodes and return_all_decodes from "
      "models.EncoderDecoderModel.predict_batch_with_aux."
    )
  parameters = inspect.signature(function).parameters
  return function, {name: parameters[name].default for name in known} | given


def bound(configurable: Callable, *names: str) -> dict[str, Any]:
  """Return gin's bindings of a class or function of t5x or seqio.

  Gin does not apply bindings of a class or method to subclasses and overriding methods.

  Args:
    configurable: the class or function.
    *names: parameters to look up; if there are no names, all parameters are looked up.
  """
  try:
    bindings = gin.get_bindings(configurable, resolve_references=False)
  except ValueError:  # gin does not know it
    return {}
  return copy.deepcopy({name: bindings[name] for name in names or bindings if name in bindings})


def extra_ids(module: nn.Module) -> int:
  """Return the number of sentinels to add to the SentencePiece model that gin binds.

  It is 100, as in T5, if the SentencePiece model has no sentinels and the embedding table of the
  network has exactly the rows that the pieces and 100 sentinels need, with or without padding
  (`count_extra_ids`). Otherwise it is 0.

  Args:
    module: the target's network, whose `config.vocab_size` is the number of rows of its table.

  Raises:
    InputError: gin binds no file to `seqio.SentencePieceVocabulary`.
  """
  name = "sentencepiece_model_file"
  path = bound(seqio.SentencePieceVocabulary, name).get(name)
  if path is None:
    raise InputError(
      f"seqio.SentencePieceVocabulary.{name} is not bound; bind it to the vocabulary's file."
    )
  tokenizer = seqio.SentencePieceVocabulary(path).tokenizer
  pieces = [tokenizer.id_to_piece(i) for i in range(tokenizer.get_piece_size())]
  return count_extra_ids(pieces, module.config.vocab_size)
