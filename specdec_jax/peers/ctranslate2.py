"""CTranslate2 on the CPU: float32, greedy or by beams, converted from what transformers reads."""

import os
import tempfile

from specdec_jax.peers.contest import Competitor, Contest, Generate


def greedy() -> Competitor:
  """Without temperature: a sample could not be drawn again, since its generator is seeded once."""
  packages = "ctranslate2", "torch", "transformers"
  return Competitor("ctranslate2", packages, _load, "ctranslate2", greedy_only=True, searches=True)


def _convert(folder: str, converted: str) -> None:
  """Write what transformers reads from `folder` to `converted`, as CTranslate2 has it."""
  from ctranslate2.converters.transformers import T5Loader

  from specdec_jax.peers.huggingface import load_model

  model, loader = load_model(folder), T5Loader()
  # transformers 5 says True of every T5; what it stood for is whether logits are scaled.
  model.config.tie_word_embeddings = model.config.scale_decoder_outputs
  spec = loader.get_model_spec(model)
  # A token's name is its number: no vocabulary is needed.
  loader.set_vocabulary(spec, [str(i) for i in range(model.config.vocab_size)])
  spec.config.decoder_start_token = spec.config.bos_token = "0"
  spec.config.eos_token, spec.config.unk_token = "1", "2"
  spec.validate()
  spec.save(converted)


def _load(contest: Contest) -> Generate:
  import ctranslate2

  with tempfile.TemporaryDirectory() as folder:
    _convert(contest.target, folder)
    threads = len(os.sched_getaffinity(0))
    translator = ctranslate2.Translator(
      folder, device="cpu", compute_type="float32", inter_threads=1, intra_threads=threads
    )

  def generate(source, seed, max_new_tokens, temperature):
    (result,) = translator.translate_batch(
      [[str(token) for token in source]],
      beam_size=contest.beams or 1,
      length_penalty=0.6 if contest.beams else 1,
      max_decoding_length=max_new_tokens,
      min_decoding_length=0 if contest.ends else max_new_tokens,
      return_end_token=True,
    )
    tokens = [int(token) for token in result.hypotheses[0]]
    return tokens, len(tokens)

  return generate
