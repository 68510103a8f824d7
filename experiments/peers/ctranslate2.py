"""CTranslate2 on the CPU: greedy decoding or beam search.

Weights are converted from the format of transformers.
"""

import functools
import os
import tempfile

from experiments.peers.comparison import Backend, Comparison, Generate


def greedy(compute_type: str = "float32") -> Backend:
  """Return a CTranslate2 backend for greedy decoding and beam search.

  Temperatures above 0 are not supported: CTranslate2 seeds its random number generator once per
  process, so a sample could not be reproduced.

  Args:
    compute_type: format of weights and arithmetic, such as 'int8' (with float32 activations) or
      'int8_bfloat16' on processors for which CTranslate2 supports it. CTranslate2 quantizes weights
      when it loads them.
  """
  is_float32 = compute_type == "float32"
  return Backend(
    "ctranslate2" if is_float32 else f"ctranslate2_{compute_type}",
    ("ctranslate2", "torch", "transformers"),
    functools.partial(_load, compute_type=compute_type),
    "ctranslate2",
    greedy_only=True,
    searches=True,
    float32=is_float32,
  )


def _convert(folder: str, converted: str) -> None:
  """Convert a T5 in the format of transformers to the format of CTranslate2."""
  from ctranslate2.converters.transformers import T5Loader

  from experiments.peers.huggingface import load_model

  model, loader = load_model(folder), T5Loader()
  # The loader takes this field to mean that logits are scaled, but transformers 5 sets it to True
  # for every T5.
  model.config.tie_word_embeddings = model.config.scale_decoder_outputs
  spec = loader.get_model_spec(model)
  # Tokens are named by their ids, so no vocabulary is needed.
  loader.set_vocabulary(spec, [str(i) for i in range(model.config.vocab_size)])
  spec.config.decoder_start_token = spec.config.bos_token = "0"
  spec.config.eos_token, spec.config.unk_token = "1", "2"
  spec.validate()
  spec.save(converted)


def _load(comparison: Comparison, compute_type: str) -> Generate:
  import ctranslate2

  beams = comparison.workload.beams
  with tempfile.TemporaryDirectory() as folder:
    _convert(comparison.target, folder)
    threads = len(os.sched_getaffinity(0))
    translator = ctranslate2.Translator(
      folder, device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=threads
    )

  def generate(source, seed, max_new_tokens, temperature):
    (result,) = translator.translate_batch(
      [[str(token) for token in source]],
      beam_size=beams or 1,
      length_penalty=0.6 if beams else 1,
      max_decoding_length=max_new_tokens,
      min_decoding_length=0 if comparison.stops_at_eos else max_new_tokens,
      return_end_token=True,
    )
    tokens = [int(token) for token in result.hypotheses[0]]
    return tokens, len(tokens)

  return generate
