"""Functions that load pairs and drafts from checkpoints; the default is the bundled pair."""

import dataclasses
import functools
import pathlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.checkpoints import hub
from specdec_jax.checkpoints.checkpoint import (
  Checkpoint,
  LoadedWeights,
  ShardingsFn,
  make_shardings,
)
from specdec_jax.checkpoints.load import (
  checkpoint_name,
  is_in_memory,
  open_checkpoint,
  recorded_path,
)
from specdec_jax.core.loading import DraftFactory, LoadedTarget
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.types import Verifier
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabularies import (
  find_vocabulary,
  open_vocabulary_of_model,
  padded_size,
)
from specdec_jax.data.vocabulary import ModelTokens, Vocabulary
from specdec_jax.drafts.dynamic import model_draft
from specdec_jax.drafts.heads import SpeculatorConfig
from specdec_jax.drafts.other_vocabulary import OtherVocabularyModel, other_vocabulary_params
from specdec_jax.errors import InputError, require_count
from specdec_jax.models.config import GPTConfig, named_dtype
from specdec_jax.models.families import Config, model_of, with_feature_layers
from specdec_jax.models.kernels import skinny
from specdec_jax.pairs.pair import LoadedPair
from specdec_jax.pairs.speculators import config_of, draft_name, speculator

OutputTokens = Callable[[Vocabulary], Sequence[int]]

ASSETS = pathlib.Path(__file__).parents[1] / "assets"
EMBEDDED = ASSETS / "multi30k_ende"


def load_pair(
  target: Any = str(EMBEDDED / "target"),
  draft: Any = str(EMBEDDED / "conditioned"),
  vocabulary: str | None = None,
  task: str | None = None,
  dtype: str = "float32",
  max_source_tokens: int = 128,
  extra_ids: int | Literal["auto"] = "auto",
  shardings: ShardingsFn = None,
  draft_shardings: ShardingsFn = None,
  kernels: str = "auto",
  weights: LoadedWeights = "float",
  draft_weights: LoadedWeights | None = None,
  verifier: Callable[[Sampling], Verifier] = TokenVerifier,
  source_language: str | None = None,
) -> LoadedPair:
  """Load a target and a draft; by default, load the bundled pair.

  The default draft is also the draft of the quickstart: a draft head that was trained on the
  target's hidden states. By default, gin runs use `draft=asset("multi30k_ende/draft")`, a separate
  model (gin/models/bundled.gin).

  Args:
    target: checkpoint of the target (of T5X, Orbax, Hugging Face or this project, local or
      `gs://`), or its name on the Hugging Face Hub; see `checkpoints.load.open_checkpoint`. Or a
      model in memory: a PyTorch model of transformers, or (config, parameters); see
      `checkpoints.huggingface.open_in_memory`.
    draft: checkpoint or name of the draft, which is a separate model or a draft head that was
      trained on this target's hidden states (`train_speculator`); or a model in memory; or a
      function that loads a draft for a `LoadedTarget`.
    vocabulary: path of the vocabulary, or a Hugging Face folder or name; see `open_vocabulary`. By
      default, the vocabulary in the folder of the target or, for pairs of this project, next to it.
      A target in memory requires this argument.
    task: name of the inputs, for records. By default, the bundled target has its own task, and
      other targets have none.
    dtype: 'float32' or 'bfloat16'; 'auto' is float32 on a CPU and bfloat16 elsewhere. On a CPU,
      bfloat16 halves the bytes that are read. Decoding is then faster if the processor multiplies
      in bfloat16 (AVX512-BF16), and slower otherwise.
    max_source_tokens: maximum number of tokens of a source, EOS included.
    extra_ids: number of sentinels after the pieces of the vocabulary. 'auto' adds the 100 sentinels
      of T5 if the target's embedding table has rows for them; see `open_vocabulary_of_model`.
    shardings: function that returns a tree of `jax.sharding.Sharding`, given the tree of shapes of
      the target's parameters and, if it has a parameter `config`, the target's configuration.
      Sharded parameters are not converted for decoding, because that would concatenate matrices
      across shards.
    draft_shardings: function like `shardings` for the parameters of the draft. It is not used for a
      draft head, or for a draft that a function loads.
    kernels: 'xla' for XLA only; 'auto' uses `kernels.skinny` on a CPU, if available and without
      `shardings`, for matmuls with weights, attention and T5's norms.
    weights: how the matrices of the target are kept in memory. With 'float', they have the dtype
      `dtype`. With 'stored', matrices that are stored in bfloat16 stay in bfloat16 when
      `kernels.skinny` is used. This halves the bytes that a step reads, and does not change the
      output. With 'int8', they are quantized when they are loaded (`models.quantization`), and a
      step reads a quarter of the bytes of float32 matrices. The target is then the quantized model,
      and outputs are exactly those of that model.
    draft_weights: the same for a draft that is a separate model; outputs keep the target's
      distribution with any value. By default 'int8' if `weights` is 'int8', or if `dtype` is
      'bfloat16' and `kernels.skinny` is used, which is faster; otherwise 'stored'.
    verifier: verifier that accepts or rejects draft tokens: a class of `core.verify`, or a function
      from a sampling method to a verifier.
    source_language: language of the sources of a multilingual target, by the name of its token,
      such as 'fra_Latn' (NLLB), 'fr_XX' (mBART-50) or 'fr' (M2M100). By default, the language that
      the files of the tokenizer set.

  Raises:
    InputError: a file is missing or damaged, the models do not share the vocabulary, or an argument
      is invalid.
  """
  require_count("max_source_tokens", max_source_tokens)
  dtype = _of_device(dtype)
  of_target, is_path = open_checkpoint(target), isinstance(target, str)
  if not is_path:
    target = of_target.path
    if vocabulary is None:
      raise InputError("The target is a model in memory; give its vocabulary too.")
  file = vocabulary_of(target) if vocabulary is None else hub.resolve(vocabulary, hub.VOCABULARY)
  tokens = model_tokens(of_target, source_language)
  words = open_vocabulary_of_model(file, of_target.config.vocab_size, extra_ids, tokens)
  load = functools.partial(load_for, words=words, dtype=dtype, kernels=kernels)
  config, target_params = load(
    "target",
    target,
    shardings=shardings,
    weights=weights,
    opened=of_target,
  )
  generation = _generation(of_target, words)
  if generation:
    stated = ", ".join(f"{name} {value!r:.60}" for name, value in generation.items())
    warnings.warn(
      f"{of_target.path}/{of_target.generation.file} sets {stated}. transformers applies these in "
      "generate, and so does Pair.generate; the commands of specdec do not, so that outputs may "
      "differ.",
      GenerationWarning,
      stacklevel=2,
    )
  opened = None
  if is_in_memory(draft) or not callable(draft):
    opened = open_checkpoint(draft)
    draft_is_path = isinstance(draft, str)
    draft = draft if draft_is_path else opened.path
    if isinstance(opened.config, SpeculatorConfig):
      draft = functools.partial(speculator, path=draft)
  if callable(draft):
    drafter = draft(LoadedTarget(model_of(config), target_params, words))
  else:
    draft_config, params = load(
      *("draft", draft),
      shardings=draft_shardings,
      weights=draft_weights or ("int8" if weights == "int8" else None),
      opened=opened,
      beside=target_params,
    )
    if draft_config.has_encoder != config.has_encoder:
      raise InputError(
        f"Of {target} and {draft} one is decoder-only and the other is not; target and draft must "
        "be of one kind."
      )
    make = functools.partial(model_draft, model_of(draft_config))
    path = recorded_path(draft) if draft_is_path else None
    drafter = DraftFactory(draft_name(checkpoint_name(draft), draft_config), make, params, path)
  halved = dtype == "float32" and any(
    x.dtype == jnp.bfloat16 for x in jax.tree.leaves(target_params)
  )
  if task is None and is_bundled(target):
    task = EMBEDDED.name
  return LoadedPair(
    target=with_feature_layers(model_of(config), drafter.feature_layers),
    target_params=target_params,
    target_name=checkpoint_name(target),
    target_path=recorded_path(target) if is_path else None,
    draft=drafter.build,
    draft_params=drafter.params,
    draft_name=drafter.name,
    draft_path=drafter.path,
    vocabulary=words,
    task=task,
    dtype=dtype,
    max_source_tokens=max_source_tokens,
    kernels=config.kernels + ("+int8" if weights == "int8" else "+bfloat16" * halved),
    continues=not config.has_encoder,
    verifier=verifier,
    generation=generation,
    tasks=of_target.generation.tasks,
  )


def model_tokens(checkpoint: Checkpoint, source_language: str | None = None) -> ModelTokens:
  """Return the tokens that a model uses, with which its vocabulary is opened.

  Args:
    checkpoint: checkpoint of the model.
    source_language: see `load_pair`.
  """
  return ModelTokens(
    has_encoder=checkpoint.config.has_encoder,
    eos_ids=checkpoint.eos_ids,
    pad_id=checkpoint.config.pad_id,
    source_language=source_language,
  )


def checkpoint_draft(
  target: LoadedTarget,
  model: str = str(EMBEDDED / "draft"),
  dtype: str = "float32",
  kernels: str = "auto",
  weights: LoadedWeights | None = None,
  output_tokens: OutputTokens | None = None,
  vocabulary: str | None = None,
) -> DraftFactory:
  """Load a model from a checkpoint as a draft, for example for a composed draft.

  Args:
    target: target of the pair.
    model: checkpoint of the model, or its name on the Hugging Face Hub.
    dtype: see `load_pair`.
    kernels: see `load_pair`.
    weights: see `load_pair`; by default 'int8' if `dtype` is 'bfloat16' and `kernels.skinny` is
      used, otherwise 'stored'.
    output_tokens: function from a vocabulary to the tokens that the draft may propose, such as
      `frequent_tokens` with its other arguments bound; by default, all tokens.
    vocabulary: the model's own vocabulary, if it is not that of the pair: path of the file, or a
      Hugging Face folder or name. The draft then proposes the tokens that both vocabularies have
      (`drafts.other_vocabulary`).

  Raises:
    InputError: see `load_for`; or the two vocabularies have no piece in common.
  """
  words, opened = target.vocabulary, open_checkpoint(model)
  if vocabulary is not None:
    file = hub.resolve(vocabulary, hub.VOCABULARY)
    words = open_vocabulary_of_model(file, opened.config.vocab_size, tokens=model_tokens(opened))
  config, params = load_for(
    "draft",
    model,
    words,
    _of_device(dtype),
    None,
    kernels,
    weights=weights,
    opened=opened,
    output_tokens=output_tokens and output_tokens(words),
  )
  drafting, name = model_of(config), draft_name(checkpoint_name(model), config)
  if vocabulary is not None:
    if _prompt_format(config) != _prompt_format(config_of(target.model)):
      raise InputError(
        f"The draft in {model} has another vocabulary and another format of prompts than the "
        "target; both must be encoder-decoders, or decoder-only with a start token, or without."
      )
    starts = config_of(target.model).start_id, config.start_id
    params = other_vocabulary_params(params, target.vocabulary, words, config.has_encoder, starts)
    drafting = OtherVocabularyModel(drafting, target.model, config.pad_id)
    name += f", {int((params.partners >= 0).sum())} shared tokens"
  return DraftFactory(name, functools.partial(model_draft, drafting), params, recorded_path(model))


def _prompt_format(config: Config) -> tuple[bool, bool]:
  """Return whether a model has an encoder, and whether a start token precedes its prompts."""
  return config.has_encoder, config.start_id is not None


def frequent_tokens(vocabulary: Vocabulary, path: str, count: int) -> list[int]:
  """Return the most frequent tokens of a text file and EOS, in ascending order (FR-Spec).

  A draft with these output tokens (`checkpoint_draft`) computes fewer logits. Its q is 0 for all
  other tokens, so decoding remains exact.

  Args:
    vocabulary: vocabulary of the pair.
    path: text file with one output of the task per line.
    count: number of tokens, at most that of the vocabulary.
  """
  require_count("count", count)
  counts = np.zeros(len(vocabulary), np.int64)
  for line in read_lines(path):
    np.add.at(counts, vocabulary.encode(line), 1)
  counts[vocabulary.eos_id] = counts.max() + 1
  return sorted(np.argsort(-counts, kind="stable")[:count].tolist())


def asset(name: str) -> str:
  """Return the path of a bundled file or folder. Gin files call this function."""
  return str(ASSETS / name)


class GenerationWarning(UserWarning):
  """Warning that a checkpoint has generation settings that the caller may not apply."""


def _generation(checkpoint: Checkpoint, words: Vocabulary) -> dict[str, Any]:
  """Return the generation settings of a checkpoint.

  Its EOS ids within the vocabulary are included if one of them is not the EOS of `words`.
  """
  eos_ids = [eos_id for eos_id in checkpoint.eos_ids if eos_id < len(words)]
  several = {"eos_token_id": eos_ids} if {*eos_ids} - {words.eos_id} else {}
  return {**checkpoint.generation.settings, **several}


def is_bundled(target: str) -> bool:
  """Return True if `target` is the path of the bundled target."""
  return recorded_path(target) == recorded_path(str(EMBEDDED / "target"))


def laid_out(config: Config, shardings: ShardingsFn, kernels: str) -> Config:
  """Return the configuration in the layout for decoding: with fused matmuls and the kernels to use.

  If parameters are sharded across devices, the configuration is returned unchanged.

  Raises:
    InputError: `kernels` is unknown.
  """
  if kernels not in ("auto", "xla"):
    raise InputError(f"kernels is {kernels!r}; use 'auto' or 'xla'.")
  places = jax.tree.leaves(make_shardings(shardings, config)) if shardings else []
  if not all(place.is_fully_replicated for place in places):
    return config
  here = kernels == "auto" and not shardings and skinny.is_available(config.dtype)
  kernels = "skinny" if here else "xla"
  return dataclasses.replace(config, fused=True, tied_logits=False, kernels=kernels)


def vocabulary_of(target: str) -> str:
  """Return the path of the vocabulary that belongs to a target.

  Raises:
    InputError: the target has no vocabulary.
  """
  found = find_vocabulary(hub.resolve(target, hub.VOCABULARY))
  if found is None:
    raise InputError(
      f"The target {target} has no vocabulary with it; expected spiece.model, tokenizer.json or "
      "other files of its tokenizer in its folder. Give its file as vocabulary (VOCABULARY on the "
      "command line)."
    )
  return found


def _of_device(dtype: str) -> str:
  """Return the dtype that 'auto' stands for on this device; return any other dtype unchanged."""
  here = "float32" if jax.default_backend() == "cpu" else "bfloat16"
  return here if dtype == "auto" else dtype


def load_for(
  role: str,
  path: str,
  words: Vocabulary,
  dtype: str = "float32",
  shardings: ShardingsFn = None,
  kernels: str = "xla",
  weights: LoadedWeights | None = "float",
  opened: Checkpoint | None = None,
  beside: Any = (),
  output_tokens: Sequence[int] | None = None,
) -> tuple[Config, Any]:
  """Load configuration and parameters of a checkpoint, and convert them for decoding.

  Sharded parameters are not converted.

  Args:
    role: 'target' or 'draft', for messages.
    path: path of the checkpoint.
    words: vocabulary of the pair.
    dtype: 'float32' or 'bfloat16'.
    shardings: see `load_pair`.
    kernels: see `load_pair`.
    weights: see `load_pair`; None for the default of a draft.
    opened: the checkpoint, if it is already open.
    beside: arrays that must fit in memory together with the parameters. For a draft they are the
      target's parameters.
    output_tokens: see `Checkpoint.load`.

  Raises:
    InputError: the checkpoint is a draft head, or it does not fit the vocabulary or the memory.
  """
  checkpoint = opened or open_checkpoint(path)
  advice = "target, draft and vocabulary must agree"
  if role == "draft":
    advice += (
      ", unless `vocabulary` of checkpoint_draft is the draft's own "
      "(gin/drafts/other_vocabulary.gin)"
    )
  if isinstance(checkpoint.config, SpeculatorConfig):
    raise InputError(
      f"{path} is no model by itself but lives on the states of a target; give it as the draft "
      "of a pair."
    )
  config = dataclasses.replace(checkpoint.config, dtype=named_dtype(dtype))
  size, rows = len(words), config.vocab_size
  if rows == padded_size(size):
    config = dataclasses.replace(config, vocab_size=size, padded_vocab_size=rows)
  elif rows != size:
    raise InputError(
      f"The {role} in {path} has a vocabulary of {rows} tokens but {words.path} has {size}, "
      f"{words.extra_ids} extra_ids among them (T5's own has 100); {advice}."
    )
  eos_ids = checkpoint.eos_ids
  if isinstance(config, GPTConfig):
    eos_ids = eos_ids or (config.eos_id,)
  if eos_ids and words.eos_id not in eos_ids:
    raise InputError(
      f"The {role} in {path} ends a text with token {' or '.join(map(str, eos_ids))} but "
      f"{words.path} with {words.eos_id}; {advice}."
    )
  if words.pad_id in eos_ids:
    raise InputError(
      f"The {role} in {path} ends a text with token {words.pad_id}, which pads prompts here; use "
      "models whose vocabulary has another token there."
    )
  config = dataclasses.replace(config, eos_id=words.eos_id, pad_id=words.pad_id)
  if checkpoint.vocabulary not in (None, words.fingerprint()):
    raise InputError(
      f"The {role} in {path} was trained with another vocabulary than {words.path}, though "
      f"of the same size; {advice}."
    )
  config = laid_out(config, shardings, kernels)
  if weights not in (None, "float", "stored", "int8"):
    raise InputError(f"weights is {weights!r}; give 'float', 'stored' or 'int8'.")
  if weights is None:
    weights = "int8" if config.kernels == "skinny" and config.in_pairs else "stored"
  if weights == "int8":
    config = dataclasses.replace(config, weights="int8")
  if output_tokens is not None:
    config = dataclasses.replace(config, num_output_tokens=len(output_tokens))
  return config, checkpoint.load(
    config,
    shardings=shardings,
    stored_weights=weights == "stored",
    other_arrays=beside,
    output_tokens=output_tokens,
  )
