"""Hugging Face's transformers in PyTorch on the CPU: `generate`, plain or with an assistant model.

Settings are transformers' own defaults, top-k off; the prompt comes without padding.
"""

import functools
import os
import weakref
from typing import Any

from specdec_jax.models.simulated import CERTAIN
from specdec_jax.peers.contest import Competitor, Contest, Generate

_PACKAGES, _PROCESS = ("torch", "transformers"), "torch"
# By folder, while anyone uses them: a large target is in memory once, plain and assisted.
_TARGETS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def plain() -> Competitor:
  """One token a pass of the target; with beams its own search, which has other rules than t5x's."""
  return Competitor("hf", _PACKAGES, _load, _PROCESS, searches=True)


def assisted(num_assistant_tokens: int | None = None) -> Competitor:
  """Assisted generation, the draft being the assistant.

  Args:
    num_assistant_tokens: so many guesses in each round. None for transformers' defaults: up to 20,
      and none after one that the assistant gave less than 0.4. Random weights are never as sure as
      that, so with simulated acceptance the defaults have no part.
  """
  if num_assistant_tokens is None:
    load = functools.partial(_load, assistant={})
    return Competitor("hf_assisted", _PACKAGES, load, _PROCESS, trained_only=True)
  how = dict(
    num_assistant_tokens=num_assistant_tokens,
    num_assistant_tokens_schedule="constant",
    assistant_confidence_threshold=0.0,
  )
  load = functools.partial(_load, assistant=how)
  return Competitor(f"hf_assisted_{num_assistant_tokens}", _PACKAGES, load, _PROCESS)


def load_model(folder: str) -> Any:
  """PyTorch's T5 of a folder, float32; from now on PyTorch has a thread for each core."""
  import torch
  import transformers

  torch.set_num_threads(len(os.sched_getaffinity(0)))
  transformers.utils.logging.disable_progress_bar()
  transformers.utils.logging.set_verbosity_error()  # its own assistant calls it in an old way
  load = transformers.T5ForConditionalGeneration.from_pretrained
  return load(folder, local_files_only=True, dtype=torch.float32).eval().requires_grad_(False)


def _generator(folder: str, ends: bool) -> Any:
  """A model to `generate` with; unless it `ends`, it knows no EOS."""
  model = load_model(folder)
  # transformers 5 makes caches as deep as the encoder, and fails where the decoder is deeper.
  model.config.num_layers = model.config.num_decoder_layers
  if not ends:
    model.generation_config.eos_token_id = model.config.eos_token_id = None
  return model


def _load(contest: Contest, assistant: dict | None = None) -> Generate:
  """Decoding of the target; with the settings of an `assistant`, assisted by the draft."""
  import torch

  common = {}
  if assistant is not None:
    common["assistant_model"] = _generator(contest.draft, contest.ends)
    common["assistant_model"].generation_config.update(**assistant)
  model = _TARGETS.get(contest.target) or _generator(contest.target, contest.ends)
  _TARGETS[contest.target] = model
  alpha, num_passes = contest.alpha, [0]

  def after_pass(module, args, kwargs, output):
    num_passes[0] += 1
    tokens = kwargs["decoder_input_ids"]
    if alpha is not None and tokens.shape[1] > 1:
      # As `SimulatedModel`: each logit of a guess, which the one before it judges, is certain
      # or impossible.
      guesses = tokens[:, 1:, None]
      bonus = torch.where(torch.rand(guesses.shape) < alpha, CERTAIN, -CERTAIN)
      output.logits[:, :-1].scatter_add_(2, guesses, bonus)

  @torch.inference_mode()
  def generate(source, seed, max_new_tokens, temperature):
    num_passes[0] = 0
    torch.manual_seed(seed)
    how = dict(do_sample=False)
    if temperature:
      how = dict(do_sample=True, temperature=temperature, top_k=0)
    if contest.beams:
      how |= dict(num_beams=contest.beams, length_penalty=0.6)
    hook = model.register_forward_hook(after_pass, with_kwargs=True)
    try:
      rows = torch.tensor([source], dtype=torch.long)
      (tokens,) = model.generate(rows, max_new_tokens=max_new_tokens, **how, **common)
    finally:
      hook.remove()
    return tokens[1:].tolist(), num_passes[0]

  return generate
