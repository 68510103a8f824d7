"""Hugging Face transformers in PyTorch on the CPU: `generate`, with or without an assistant model.

Settings are the defaults of transformers, except that top-k is off and that the length penalty of
beam search is 0.6. Prompts are not padded.
"""

import functools
import os
import weakref
from typing import Any

from experiments.peers.comparison import Backend, Comparison, Generate, Workload
from specdec_jax.models.simulated import CERTAIN

_PACKAGES, _PROCESS = ("torch", "transformers"), "torch"
# Targets in use, by folder: autoregressive and assisted decoding share one copy of a large target.
_TARGETS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def autoregressive() -> Backend:
  """Return the backend that runs `generate` without an assistant model.

  With beams it uses the beam search of transformers, whose scores and stopping rule differ from
  those of t5x.
  """
  return Backend("hf", _PACKAGES, _load, _PROCESS, searches=True)


def assisted(num_assistant_tokens: int | None = None) -> Backend:
  """Return the backend of assisted generation, with the draft as the assistant.

  Args:
    num_assistant_tokens: number of draft tokens in each round. None for the defaults of
      transformers: up to 20 draft tokens, ending after the first one to which the assistant gives a
      probability below 0.4. With random weights, every probability is below 0.4, so the defaults
      do not support simulated acceptance.
  """
  if num_assistant_tokens is None:
    load = functools.partial(_load, assistant={})
    return Backend("hf_assisted", _PACKAGES, load, _PROCESS, trained_only=True)
  settings = dict(
    num_assistant_tokens=num_assistant_tokens,
    num_assistant_tokens_schedule="constant",
    assistant_confidence_threshold=0.0,
  )
  load = functools.partial(_load, assistant=settings)
  return Backend(f"hf_assisted_{num_assistant_tokens}", _PACKAGES, load, _PROCESS)


def load_model(folder: str) -> Any:
  """Load the T5 in a folder into PyTorch, in float32.

  This also sets the number of PyTorch's threads to the number of available cores.
  """
  import torch
  import transformers

  torch.set_num_threads(len(os.sched_getaffinity(0)))
  transformers.utils.logging.disable_progress_bar()
  transformers.utils.logging.set_verbosity_error()  # its assistant code calls a deprecated function
  load = transformers.T5ForConditionalGeneration.from_pretrained
  return load(folder, local_files_only=True, dtype=torch.float32).eval().requires_grad_(False)


def _load_for_generate(folder: str, stops_at_eos: bool) -> Any:
  """Load a model for `generate`; if `stops_at_eos` is False, its configuration has no EOS."""
  model = load_model(folder)
  # transformers 5 sizes caches by the encoder's depth, and fails where the decoder is deeper.
  model.config.num_layers = model.config.num_decoder_layers
  if not stops_at_eos:
    model.generation_config.eos_token_id = model.config.eos_token_id = None
  return model


def _load(comparison: Comparison, assistant: dict | None = None) -> Generate:
  """Load the target, and return a function (`Generate`) that decodes with it.

  If `assistant` is not None, it has the settings of the assistant model, which is the draft.
  """
  import torch

  workload, stops_at_eos = comparison.workload, comparison.stops_at_eos
  assistant_options = {}
  if assistant is not None:
    assistant_model = _load_for_generate(comparison.draft, stops_at_eos)
    assistant_model.generation_config.update(**assistant)
    assistant_options["assistant_model"] = assistant_model
  model = _TARGETS.get(comparison.target) or _load_for_generate(comparison.target, stops_at_eos)
  _TARGETS[comparison.target] = model
  alpha, num_target_calls = comparison.alpha, [0]

  def after_forward(module, args, kwargs, output):
    num_target_calls[0] += 1
    tokens = kwargs["decoder_input_ids"]
    if alpha is not None and tokens.shape[1] > 1:
      # As in `SimulatedModel`: the logits at the token before a draft token, which verify the draft
      # token, are changed so that the draft token is certain or impossible.
      draft_tokens = tokens[:, 1:, None]
      bonus = torch.where(torch.rand(draft_tokens.shape) < alpha, CERTAIN, -CERTAIN)
      output.logits[:, :-1].scatter_add_(2, draft_tokens, bonus)

  def generate(source, seed, max_new_tokens, temperature):
    num_target_calls[0] = 0
    hook = model.register_forward_hook(after_forward, with_kwargs=True)
    try:
      tokens = _tokens(
        model, workload, source, seed, max_new_tokens, temperature, **assistant_options
      )
    finally:
      hook.remove()
    return tokens, num_target_calls[0]

  return generate


def of_optimum(model: Any, comparison: Comparison) -> Generate:
  """Return a function (`Generate`) that decodes with a model of Optimum.

  Such a model has the method `generate` of transformers.
  """
  if not comparison.stops_at_eos:
    model.generation_config.eos_token_id = model.config.eos_token_id = None

  def generate(*args):
    tokens = _tokens(model, comparison.workload, *args)
    return tokens, len(tokens)

  return generate


def _tokens(
  model: Any,
  workload: Workload,
  source: list[int],
  seed: int,
  max_new_tokens: int,
  temperature: float,
  **options: Any,
) -> list[int]:
  """Return the tokens that `model.generate` returns, without the first token of the decoder."""
  import torch

  torch.manual_seed(seed)
  if temperature:
    options |= dict(do_sample=True, temperature=temperature, top_k=0)
  else:
    options |= dict(do_sample=False)
  if workload.beams:
    options |= dict(num_beams=workload.beams, length_penalty=0.6)
  rows = torch.tensor([source], dtype=torch.long)
  with torch.inference_mode():
    (tokens,) = model.generate(
      rows, attention_mask=torch.ones_like(rows), max_new_tokens=max_new_tokens, **options
    )
  return tokens[1:].tolist()
