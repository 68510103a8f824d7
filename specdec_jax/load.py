"""Functions that load pairs and drafts from checkpoints, by default the bundled pair."""

import dataclasses
import difflib
import functools
import os
import pathlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import registry
from specdec_jax.checkpoints.checkpoint import (
  Checkpoint,
  ShardingsFn,
  make_shardings,
)
from specdec_jax.checkpoints.load import is_in_memory, open_checkpoint
from specdec_jax.core.decode import NullDraft, num_positions
from specdec_jax.core.generation_config import SETTINGS, with_effect
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree
from specdec_jax.core.types import Draft, DraftOptions, DraftSpec, Loaded, LoadsDraft, Verifier
from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabularies import find_vocabulary, padded_size
from specdec_jax.data.vocabulary import Vocabulary
from specdec_jax.drafts.dynamic import model_draft
from specdec_jax.drafts.heads import AnyConfig, DraftHead
from specdec_jax.drafts.other_vocabulary import OtherVocabularyModel, other_vocabulary_params
from specdec_jax.errors import InputError, require_count
from specdec_jax.models.config import T5Config
from specdec_jax.models.families import Config, config_of, model_of
from specdec_jax.models.layout import Layout, Weights, for_device
from specdec_jax.models.whisper import DraftWhisper, WhisperModel, has_encoder_of, without_encoder
from specdec_jax.pair import Pair
from specdec_jax.xla import default_cache_dir, enable_compile_cache

OutputTokens = Callable[[Vocabulary], Sequence[int]]

ASSETS = pathlib.Path(__file__).parent / "assets"
BUNDLED: pathlib.Path = ASSETS / "multi30k_ende"


def load_pair(
  target: str | os.PathLike | Any = str(BUNDLED / "target"),
  draft: str | os.PathLike | LoadsDraft | Any = None,
  vocabulary: str | os.PathLike | Vocabulary | None = None,
  task: str | None = None,
  dtype: str = "float32",
  max_source_tokens: int | None = None,
  extra_ids: int | Literal["auto"] = "auto",
  kernels: str = "auto",
  weights: Weights = "float",
  draft_weights: Weights | None = None,
  verifier: str | Callable[[Sampling], Verifier] = "tokens",
  source_language: str | None = None,
  *,
  shardings: ShardingsFn = None,
  draft_shardings: ShardingsFn = None,
) -> Pair:
  """Load a target and a draft; by default, load the bundled pair.

  The cache of compiled programs is enabled, unless jax is already configured with a folder for it.

  Args:
    target: checkpoint of the target (of T5X, Orbax, Hugging Face or this project, local or
      `gs://`), or its name on the Hugging Face Hub. Or a model in memory: a PyTorch model of
      transformers, or (config, parameters); see `checkpoints.huggingface.open_in_memory`.
    draft: a name in `registry.DRAFTS`, such as 'prompt_lookup' (a folder of that name is
      './prompt_lookup'); or a checkpoint as for `target`, of a separate model or of a draft head
      that was trained on this target's hidden states; or a function that loads a draft for a
      `Loaded` target, such as `registry.draft` returns. By default, the bundled target has its own
      draft head, a Whisper has none, and any other target copies from its source
      ('prompt_lookup').
    vocabulary: vocabulary, or path of its file, or a Hugging Face folder or name. By default, the
      vocabulary in the folder of the target or, for pairs of this project, next to it. A target in
      memory requires this argument.
    task: name of the inputs, for records; by default that of the bundled target, or None.
    dtype: 'float32' or 'bfloat16'; 'auto' is float32 on a CPU and bfloat16 elsewhere. On a CPU,
      bfloat16 is faster if the processor multiplies in it (AVX512-BF16), and slower otherwise.
    max_source_tokens: maximum number of tokens of a source, EOS included. By default, the positions
      of the target, or 512 for a target with relative positions.
    extra_ids: number of sentinels after the pieces of the vocabulary. 'auto' adds the 100 sentinels
      of T5 if the target's embedding table has rows for them.
    kernels: 'xla' for XLA only; 'gpu' for XLA with the matmuls of `kernels.gpu`; without
      `shardings`, 'auto' uses 'gpu' on a GPU and, if available, `kernels.skinny` on a CPU, for
      matmuls with weights, attention and T5's norms.
    weights: how the matrices of the target are kept in memory. 'float': in `dtype`. 'stored':
      bfloat16 matrices of the checkpoint stay in bfloat16 if `kernels.skinny` is used, which halves
      the bytes that a step reads and does not change the output. 'int8' and 'int4': quantized on
      loading (`models.quantization`); outputs are then exactly those of the quantized model. int4
      takes half the memory of int8, but is slow on a CPU.
    draft_weights: the same for a draft that is a separate model; outputs keep the target's
      distribution with any value. By default as `weights` if that is 'int8' or 'int4'; 'int8' if
      `dtype` is 'bfloat16' and `kernels.skinny` is used, which is faster; otherwise 'stored'.
    verifier: a name in `registry.VERIFIERS`, or a function from a sampling method to a verifier,
      such as a class.
    source_language: language of the sources of a multilingual target, by the name of its token,
      such as 'fra_Latn' (NLLB), 'fr_XX' (mBART-50) or 'fr' (M2M100). By default, the language that
      the files of the tokenizer set.
    shardings: function that returns a tree of `jax.sharding.Sharding`, given the tree of shapes of
      the target's parameters and, if it has a parameter `config`, the target's configuration.
      Sharded parameters are not converted for decoding, because that would concatenate matrices
      across shards.
    draft_shardings: the same for a draft that is a separate model.

  Raises:
    InputError: a file is missing or damaged, the models do not share the vocabulary, or an argument
      is invalid.
  """
  cache_programs()
  checkpoint, dtype = open_checkpoint(target), _of_device(dtype)
  if not isinstance(vocabulary, Vocabulary):
    vocabulary = checkpoint.open_vocabulary(vocabulary, extra_ids, source_language)
  layout = for_device(dtype, "xla" if shardings else kernels, weights)
  model, params = load_with_layout("target", checkpoint, vocabulary, layout, shardings)
  loaded = Loaded(
    checkpoint.name,
    model,
    params,
    vocabulary,
    checkpoint.recorded_path,
    *_generation(checkpoint, vocabulary),
    checkpoint.speech,
  )
  bundled = is_bundled(checkpoint)
  if draft is None:
    copying = "prompt_lookup" if checkpoint.speech is None else no_draft
    draft = str(BUNDLED / "conditioned") if bundled else copying
  if isinstance(draft, str) and registry.entry("draft", draft):
    draft = registry.draft(draft)
  if callable(draft) and not is_in_memory(draft):
    drafted = draft(loaded)
  else:
    drafted = checkpoint_draft(
      loaded, draft, dtype=dtype, kernels=kernels, weights=draft_weights, shardings=draft_shardings
    )
  if max_source_tokens is None:
    max_source_tokens = num_positions(model) or 512
  task = BUNDLED.name if task is None and bundled else task
  return Pair(loaded, drafted, registry.verifier(verifier), task, max_source_tokens)


def no_draft(target: Loaded) -> DraftSpec:
  """Return a draft that proposes no tokens: decoding is autoregressive."""
  return DraftSpec("none", lambda *_: NullDraft())


def checkpoint_draft(
  target: Loaded,
  model: Any = str(BUNDLED / "draft"),
  *,
  dtype: str | None = None,
  kernels: str = "auto",
  weights: Weights | None = None,
  vocabulary: str | None = None,
  output_tokens: OutputTokens | None = None,
  shardings: ShardingsFn = None,
) -> DraftSpec:
  """Load a model or a draft head from a checkpoint as a draft, for example for a composed draft.

  Args:
    model: see `draft` of `load_pair`; by default the separate draft model of the bundled target. A
      head has no `dtype`, `kernels`, `vocabulary` and `shardings`.
    dtype: see `load_pair`; by default the target's.
    kernels: see `load_pair`.
    weights: see `draft_weights` of `load_pair`.
    vocabulary: the model's own vocabulary, if it is not that of the pair: path of the file, or a
      Hugging Face folder or name. The draft then proposes the tokens that both vocabularies have
      (`drafts.other_vocabulary`).
    output_tokens: function from a vocabulary to the tokens that the draft may propose, such as
      `frequent_tokens` with its other arguments bound; by default, all tokens.
    shardings: see `load_pair`.
  """
  opened = _open_draft(model)
  if isinstance(opened.config, DraftHead):
    return speculator(target, opened.path, weights, output_tokens)
  own = config_of(target.model)
  layout = Layout() if own is None else own.layout
  layout = for_device(
    _of_device(dtype or jnp.dtype(layout.dtype).name),
    "xla" if shardings else kernels,
    weights or (layout.weights if layout.is_quantized else None),
  )
  words = opened.open_vocabulary(vocabulary) if vocabulary else target.vocabulary
  tokens = output_tokens and output_tokens(words)
  drafting, params = load_with_layout(
    "draft", opened, words, layout, shardings, target.params, tokens
  )
  config = drafting.config
  if vocabulary is None and own is not None and _kind(own) != _kind(config):
    raise InputError(
      f"{target.name} is {_kind(own)} and {opened.path} is {_kind(config)}; target and draft must "
      "be of one kind."
    )
  name = draft_name(opened.name, config)
  if vocabulary is not None:
    own = require_config(target)
    if len({(each.has_encoder, each.start_id is None) for each in (config, own)}) > 1:
      raise InputError(
        f"The draft in {model} has another vocabulary and another format of prompts than the "
        "target; both must be encoder-decoders, or decoder-only with a start token, or without."
      )
    starts = own.start_id, config.start_id
    params = other_vocabulary_params(params, target.vocabulary, words, config.has_encoder, starts)
    drafting = OtherVocabularyModel(drafting, target.model, config.pad_id)
    name += f", {int((params.partners >= 0).sum())} shared tokens"
  encoder = None
  if isinstance(drafting, WhisperModel):
    if has_encoder_of(params, target.params):
      params = without_encoder(params)
    else:
      encoder, drafting = drafting, DraftWhisper(config)
  build = functools.partial(model_draft, drafting)
  return DraftSpec(name, build, params, opened.recorded_path, encoder=encoder)


def _kind(config: Config) -> str:
  if isinstance(config, T5Config):
    return "an encoder-decoder" if config.num_mels is None else "a model of speech"
  return "decoder-only"


def _open_draft(model: Any) -> Checkpoint:
  """Open a checkpoint; the error for a misspelled name of a draft has the right one."""
  try:
    return open_checkpoint(model)
  except InputError as error:
    alike = difflib.get_close_matches(model, registry.DRAFTS, 1) if isinstance(model, str) else []
    if not alike:
      raise
    raise InputError(f"{error} There is a draft of the name {alike[0]!r}.") from error


def other_vocabulary_draft(
  target: Loaded,
  model: str = str(BUNDLED / "draft"),
  draft_vocabulary: str = str(BUNDLED / "vocabulary.model"),
) -> DraftSpec:
  """Load a model with a vocabulary of its own as a draft (TLI; Timor et al., 2025)."""
  return checkpoint_draft(target, model, vocabulary=draft_vocabulary)


def frequent_tokens_draft(
  target: Loaded,
  target_text: str,
  model: str = str(BUNDLED / "draft"),
  num_output_tokens: int = 2000,
) -> DraftSpec:
  """Load a model that proposes only the most frequent tokens of a text (FR-Spec)."""
  tokens = functools.partial(frequent_tokens, target_text=target_text, count=num_output_tokens)
  return checkpoint_draft(target, model, output_tokens=tokens)


def frequent_tokens(vocabulary: Vocabulary, target_text: str, count: int) -> list[int]:
  """Return the most frequent tokens of a text file and EOS, in ascending order (FR-Spec).

  The file has one output of the task per line. A draft with these output tokens
  (`checkpoint_draft`) computes fewer logits. Its q is 0 for all other tokens, so decoding remains
  exact.
  """
  require_count("count", count)
  counts = np.zeros(len(vocabulary), np.int64)
  for line in read_lines(target_text):
    np.add.at(counts, vocabulary.encode_target(line), 1)
  counts[vocabulary.eos_id] = counts.max() + 1
  return sorted(np.argsort(-counts, kind="stable")[:count].tolist())


def asset(name: str) -> str:
  """Return the path of a bundled file or folder. Gin files call this function."""
  return str(ASSETS / name)


def is_bundled(checkpoint: Checkpoint) -> bool:
  """Return True if a checkpoint is that of the bundled target."""
  return pathlib.Path(checkpoint.folder or "").resolve() == (BUNDLED / "target").resolve()


def speculator(
  target: Loaded,
  path: str,
  weights: Weights | None = None,
  output_tokens: OutputTokens | None = None,
) -> DraftSpec:
  """Load a draft head from `train_speculator` as a draft of the target that it was trained on.

  Args:
    path: folder of the head, local or `gs://`.
    weights: see `load_pair`. By default as the target's if they are quantized, otherwise 'stored'.
    output_tokens: see `checkpoint_draft`.

  Raises:
    InputError: the folder has no head for this vocabulary and shape of the target.
  """
  checkpoint = open_checkpoint(path)
  head = checkpoint.config
  if not isinstance(head, DraftHead):
    raise InputError(f"{path} is a model by itself, and no part of a target; give it as the draft.")
  if checkpoint.vocabulary not in (None, target.vocabulary.fingerprint()):
    raise InputError(
      f"The draft in {path} was trained with another vocabulary than {target.vocabulary.path}."
    )
  layout = require_config(target).layout
  weights = weights or (layout.weights if layout.is_quantized else "stored")
  tokens = output_tokens and output_tokens(target.vocabulary)
  head = dataclasses.replace(
    head,
    layout=dataclasses.replace(layout, weights=weights),
    num_output_tokens=None if tokens is None else len(tokens),
  )
  params = checkpoint.load(head, other_arrays=target.params, output_tokens=tokens)
  draft = head_draft(draft_name(checkpoint.name, head), head, params, target)
  return dataclasses.replace(draft, path=checkpoint.recorded_path)


def head_draft(name: str, head: DraftHead, params: Any, target: Loaded) -> DraftSpec:
  """Return a draft head as a draft of a target."""
  target_config = require_config(target)
  head.require_target(target_config)

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> Draft:
    return head.draft(target_config, sampling, tree, options)

  params = head.draft_params(target_config, params, target.params)
  return DraftSpec(name, build, params, features=head.feature_layers)


def draft_name(name: str, config: AnyConfig) -> str:
  """Return the name of a draft for records, with its number of output tokens and its format."""
  tokens = [f"{config.num_output_tokens} tokens"] if config.num_output_tokens else []
  weights = [config.layout.weights] if config.layout.is_quantized else []
  return ", ".join([name, *tokens, *weights])


def require_config(target: Loaded) -> Config:
  """Return the configuration of a target, or raise InputError if it has none."""
  config = config_of(target.model)
  if config is None:
    raise InputError(f"{type(target.model).__name__} has no states that a draft could read.")
  return config


def load_with_layout(
  role: str,
  checkpoint: Checkpoint,
  vocabulary: Vocabulary,
  layout: Layout,
  shardings: ShardingsFn = None,
  other_arrays: Any = (),
  output_tokens: Sequence[int] | None = None,
) -> tuple[Any, Any]:
  """Return the model of a checkpoint and its parameters, with the given layout if not sharded.

  Args:
    other_arrays: arrays that must fit in memory together with the parameters: for a draft, the
      target's parameters.
  """
  if isinstance(checkpoint.config, DraftHead):
    raise InputError(
      f"{checkpoint.path} is no model by itself but lives on the states of a target; give it as "
      "the draft of a pair."
    )
  config = _with_vocabulary(role, checkpoint, vocabulary)
  config = laid_out(config, layout, shardings)
  if output_tokens is not None:
    config = dataclasses.replace(config, num_output_tokens=len(output_tokens))
  params = checkpoint.load(
    config, shardings=shardings, other_arrays=other_arrays, output_tokens=output_tokens
  )
  return model_of(config), params


def _with_vocabulary(role: str, checkpoint: Checkpoint, vocabulary: Vocabulary) -> Any:
  """Return the config of a model with its vocabulary; raise InputError if they do not agree."""
  where, advice = f"The {role} in {checkpoint.path}", "target, draft and vocabulary must agree"
  if role == "draft":
    advice += ", unless the draft has a vocabulary of its own (--draft other_vocabulary)"
    if vocabulary.path.startswith(str(BUNDLED)):
      advice += "; without --target, the target is the bundled one"
  config = checkpoint.config
  size, rows = len(vocabulary), config.vocab_size
  if size < rows <= padded_size(size + size // 50):  # tables may have some more rows
    config = dataclasses.replace(config, vocab_size=size, padded_vocab_size=rows)
  elif rows != size:
    raise InputError(
      f"{where} has a vocabulary of {rows} tokens but {vocabulary.path} has {size}, "
      f"{vocabulary.extra_ids} extra_ids among them (T5's own has 100); {advice}."
    )
  if (eos_ids := checkpoint.eos_ids) and vocabulary.eos_id not in eos_ids:
    raise InputError(
      f"{where} ends a text with token {' or '.join(map(str, eos_ids))} but "
      f"{vocabulary.path} with {vocabulary.eos_id}; {advice}."
    )
  if not 0 <= vocabulary.pad_id < size:
    raise InputError(
      f"{where} pads sources with token {vocabulary.pad_id}, and {vocabulary.path} has {size} "
      "tokens; correct pad_token_id."
    )
  if vocabulary.pad_id in eos_ids and checkpoint.speech is None:
    raise InputError(
      f"{where} ends a text with token {vocabulary.pad_id}, which pads prompts here; use models "
      "whose vocabulary has another token there."
    )
  if checkpoint.vocabulary not in (None, vocabulary.fingerprint()):
    raise InputError(
      f"{where} was trained with another vocabulary than {vocabulary.path}, though of the same "
      f"size; {advice}."
    )
  if role == "draft" and checkpoint.vocabulary is None:
    share = _share_of_other_tokens(checkpoint, vocabulary)
    if share > 0.05:  # a few special tokens may differ
      raise InputError(
        f"{where} has as many tokens as {vocabulary.path}, but {share:.0%} of them are others, so "
        f"that hardly any would be accepted; {advice}."
      )
  return dataclasses.replace(config, eos_id=vocabulary.eos_id, pad_id=vocabulary.pad_id)


def _share_of_other_tokens(checkpoint: Checkpoint, vocabulary: Vocabulary) -> float:
  """Return the share of ids for which the files of a checkpoint have another token, if any."""
  path = pathlib.Path((checkpoint.folder and find_vocabulary(checkpoint.folder)) or "")
  is_inside = path.parent == pathlib.Path(checkpoint.folder or "")
  if not is_inside or not path.name or path.resolve() == pathlib.Path(vocabulary.path).resolve():
    return 0.0
  own = checkpoint.open_vocabulary(str(path)).all_pieces()
  return sum(one != other for one, other in zip(own, vocabulary.all_pieces())) / len(vocabulary)


def laid_out(config: Config, layout: Layout, shardings: ShardingsFn) -> Config:
  """Return the configuration with a layout; parameters that are sharded stay fused or not."""
  places = jax.tree.leaves(make_shardings(shardings, config)) if shardings else []
  if not all(place.is_fully_replicated for place in places):
    layout = dataclasses.replace(layout, fused=config.layout.fused)
  tied_logits = config.tied_logits and not layout.fused
  return dataclasses.replace(config, layout=layout, tied_logits=tied_logits)


def _generation(
  checkpoint: Checkpoint, vocabulary: Vocabulary
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
  """Return the settings of a checkpoint and of its tasks, and warn of those not supported."""
  settings, tasks = checkpoint.generation
  known = {*SETTINGS, "prefix"}
  ignored: dict[str, Any] = {}
  for given in ({}, *tasks.values()):
    effective = with_effect({**settings, **given})
    ignored |= {name: value for name, value in effective.items() if name not in known}
  if ignored:
    stated = ", ".join(f"{name} {value!r:.60}" for name, value in ignored.items())
    warnings.warn(
      f"{checkpoint.path} sets {stated}. transformers applies these in generate; specdec_jax does "
      "not support them, so that outputs may differ.",
      stacklevel=3,
    )
  eos_ids = [eos_id for eos_id in checkpoint.eos_ids if eos_id < len(vocabulary)]
  several = {"eos_token_id": eos_ids} if {*eos_ids} - {vocabulary.eos_id} else {}
  return (
    {name: value for name, value in settings.items() if name in known} | several,
    {task: {k: x for k, x in given.items() if k in known} for task, given in tasks.items()},
  )


def _of_device(dtype: str) -> str:
  here = "float32" if jax.default_backend() == "cpu" else "bfloat16"
  return here if dtype == "auto" else dtype


def cache_programs() -> None:
  """Cache compiled programs in the default folder, unless jax is configured with another one."""
  if not getattr(jax.config, "jax_compilation_cache_dir", None):
    enable_compile_cache(default_cache_dir())
