"""A target, a draft model and the vocabulary they share, loaded and ready to decode."""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.checkpoints.stored import Shardings, param_shapes
from specdec_jax.data.vocabulary import PAD_ID, Vocabulary, open_vocabulary, padded
from specdec_jax.decoding import autoregressive_decode, speculative_decode
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import InputError, require_count, require_types
from specdec_jax.kernels import skinny
from specdec_jax.memory import require_memory
from specdec_jax.models.config import GPTConfig, named_config, named_dtype
from specdec_jax.models.families import Config, model_of
from specdec_jax.models.simulated import SimulatedModel
from specdec_jax.protocols import Decoded, Draft, Model, Rule
from specdec_jax.rules.tokens import TokenRule
from specdec_jax.sampling import Sampling
from specdec_jax.trees import Tree, chain

_TABLE_MULTIPLE = 128  # T5's tables have that many rows times some number: 32,128 for 32,100 tokens
_STEP = re.compile(r"(checkpoint(_\d+|s)?|snapshots|[0-9a-f]{40}|\d+|state|default|params|\.?)")

ASSETS = pathlib.Path(__file__).parent / "assets"
EMBEDDED = ASSETS / "multi30k_ende"


class Drafter(NamedTuple):
  """An approximation model M_q, loaded: what `Pair` needs of it.

  Attributes:
    name: for records.
    make: (sampling, tree) -> the draft.
    params: arguments of the compiled programs, never constants in them.
  """

  name: str
  make: Callable[[Sampling, Tree], Draft]
  params: Any = ()


class Pair(NamedTuple):
  """Everything that decoding a text needs.

  Attributes:
    target: M_p. target_params: its parameters. target_name: for records.
    draft: (sampling, tree) -> M_q as a draft. draft_params, draft_name: likewise.
    vocabulary: of both.
    task: what they were trained for.
    dtype: of parameters and activations.
    max_source_tokens: longer inputs are cut to it, EOS kept.
    kernels: who multiplies the target's matrices (see `TransformerConfig`), and whether they are
      bfloat16.
    simulated_alpha: the acceptance rate that the target is told to have, or None for a real one.
    continues: whether the target goes on writing what it reads, as decoder-only models do; else it
      writes an output for a source.
    rule: how guesses are judged: a class of `rules`, or any (sampling) -> rule.
  """

  target: Model
  target_params: Any
  target_name: str
  draft: Callable[[Sampling, Tree], Draft]
  draft_params: Any
  draft_name: str
  vocabulary: Vocabulary
  task: str
  dtype: str
  max_source_tokens: int
  kernels: str = "xla"
  simulated_alpha: float | None = None
  continues: bool = False
  rule: Callable[[Sampling], Rule] = TokenRule

  def with_draft(self, drafter: Drafter) -> "Pair":
    """The same target with another draft."""
    return self._replace(draft=drafter.make, draft_params=drafter.params, draft_name=drafter.name)

  def decoder(
    self,
    sampling: Sampling,
    tree: Tree | int,
    lenience: float = 1.0,
  ) -> Callable[..., Decoded]:
    """(prompt [B, P], rng [B], *, max_new_tokens) -> Decoded, as `decoding` has them.

    By speculation with a tree of guesses, or gamma in a chain; plainly if there are none.
    """
    tree, eos_id = chain(tree) if isinstance(tree, int) else tree, self.vocabulary.eos_id
    if not tree.num_guesses:
      plain = functools.partial(autoregressive_decode, self.target, self.target_params)
      return functools.partial(plain, sampling=sampling, eos_id=eos_id)
    models = self.target, self.draft(sampling, tree), self.target_params, self.draft_params
    judge = self.judge(sampling, lenience)
    return functools.partial(speculative_decode, *models, rule=judge, eos_id=eos_id)

  def judge(self, sampling: Sampling, lenience: float = 1.0) -> Rule:
    """The rule of this sampling, with lenience below 1 (Appendix A.5) if it has any.

    Raises:
      InputError: the rule is not `TokenRule`, which alone knows lenience.
    """
    rule = self.rule(sampling)
    if lenience == 1:
      return rule
    if not isinstance(rule, TokenRule):
      raise InputError(
        f"lenience is {lenience}, but the rule is {rule_name(self.rule)}; lenience below 1 goes "
        "with TokenRule."
      )
    return TokenRule(sampling, lenience)

  def require_batch_size(self, batch_size: object) -> None:
    """Raise InputError unless it is a whole number from 1, of rows whose logits fit in memory."""
    require_count("batch_size", batch_size)
    logits = jax.ShapeDtypeStruct((batch_size, self.target.vocab_size), jnp.float32)
    require_memory(f"batch_size {batch_size}", logits)

  def reads(self, text: str) -> bool:
    """Whether there is anything to decode: of nothing only a text that continues can be made."""
    return self.continues or bool(text.strip())

  def prompt(self, texts: Sequence[str], width: int | None = None) -> Array:
    """Source tokens [B, S] of texts, padded to a common multiple of 8 or to `width`."""
    encoded = {text: self.encode(text) for text in set(texts)}  # batches are filled up with one
    rows = [encoded[text] for text in texts]
    return jnp.asarray(padded(rows, width or -(-max(map(len, rows)) // 8) * 8))

  def encode(self, text: str) -> list[int]:
    """Token ids of one source, at most max_source_tokens of them, EOS last."""
    ids, most = self.vocabulary.encode(text), self.max_source_tokens
    return ids if len(ids) <= most else ids[: most - 1] + ids[-1:]

  def cut(self, text: str) -> str | None:
    """What is left of a source longer than max_source_tokens, or None if all of it fits."""
    fits = len(self.vocabulary.encode(text)) <= self.max_source_tokens
    return None if fits else self.vocabulary.decode(self.encode(text))


def load_pair(
  target: str = str(EMBEDDED / "target"),
  draft: str | Callable[[Vocabulary], Drafter] = str(EMBEDDED / "draft"),
  vocabulary: str = str(EMBEDDED / "vocabulary.model"),
  task: str = "multi30k_ende",
  dtype: str = "float32",
  max_source_tokens: int = 128,
  extra_ids: int = 0,
  shardings: Shardings = None,
  draft_shardings: Shardings = None,
  kernels: str = "auto",
  stored_weights: bool = False,
  rule: Callable[[Sampling], Rule] = TokenRule,
) -> Pair:
  """Load a target and a draft; by default the pair that comes with the package.

  Args:
    target: checkpoint of the target: of T5X, Orbax, Hugging Face or this project, local or `gs://`;
      see `checkpoints.load.open_checkpoint`.
    draft: checkpoint of the draft, or a function that makes one for a vocabulary.
    vocabulary: its file; see `open_vocabulary`.
    task: name for records.
    dtype: 'float32' or 'bfloat16'.
    max_source_tokens: limit for a source, EOS counted.
    extra_ids: sentinels after the pieces of the vocabulary; T5's has 100.
    shardings: of the target's parameters: a function from the tree of their shapes to one of
      `jax.sharding.Sharding`. Parameters that are cut are not laid out for decoding, since the cuts
      would go across the matrices that it puts side by side.
    draft_shardings: of the draft's.
    kernels: 'xla' has XLA do all products; 'auto', on a CPU `kernels.skinny` those with weights.
    stored_weights: what is stored as bfloat16 stays so where these kernels read it. Half the bytes
      and the same output to the last bit; a plain step gains more by it than verification does.
    rule: how guesses are judged: a class of `rules`, or any (sampling) -> rule.

  Raises:
    InputError: a file is missing or damaged, the two do not share the vocabulary, or an argument is
      not what it should be.
  """
  require_types(load_pair, locals())
  require_count("max_source_tokens", max_source_tokens)
  words = open_vocabulary(vocabulary, extra_ids)
  load = functools.partial(
    _load, words=words, dtype=dtype, kernels=kernels, stored_weights=stored_weights
  )
  config, target_params = load("target", target, shardings=shardings)
  if callable(draft):
    drafter = draft(words)
  else:
    draft_config, params = load("draft", draft, shardings=draft_shardings)
    if draft_config.has_encoder != config.has_encoder:
      raise InputError(
        f"Of {target} and {draft} one is decoder-only and the other is not; target and draft must "
        "be of one kind."
      )
    make = functools.partial(ModelDraft, model_of(draft_config))
    drafter = Drafter(checkpoint_name(draft), make, params)
  halved = dtype == "float32" and any(
    x.dtype == jnp.bfloat16 for x in jax.tree.leaves((target_params, drafter.params))
  )
  return Pair(
    target=model_of(config),
    target_params=target_params,
    target_name=checkpoint_name(target),
    draft=drafter.make,
    draft_params=drafter.params,
    draft_name=drafter.name,
    vocabulary=words,
    task=task,
    dtype=dtype,
    max_source_tokens=max_source_tokens,
    kernels=config.kernels + ("+bfloat16" if halved else ""),
    continues=not config.has_encoder,
    rule=rule,
  )


def asset(name: str) -> str:
  """Path of a file or folder among those that come with the package, for gin files."""
  require_types(asset, locals())
  return str(ASSETS / name)


def random_pair(
  target: str,
  draft: str,
  alpha: float,
  version: str = "1.1",
  dtype: str = "float32",
  vocabulary: str = str(EMBEDDED / "vocabulary.model"),
  max_source_tokens: int = 128,
  shardings: Shardings = None,
  draft_shardings: Shardings = None,
  kernels: str = "auto",
) -> Pair:
  """Two named sizes with random weights and a set acceptance rate: scale, not sense.

  Both models do all their work, so times are those of the real ones; which guesses stand is
  simulated (`SimulatedModel`), and the texts mean nothing.

  Args:
    target: size of M_p; see `named_config`.
    draft: size of M_q.
    alpha: acceptance rate.
    version: of T5, '1.0' or '1.1'; or a family of decoder-only models: 'gpt_like', 'gpt2', 'lamda'.
    dtype: 'float32' or 'bfloat16'.
    vocabulary: turns sources into tokens.
    max_source_tokens: limit for a source, EOS counted.
    shardings: as for `load_pair`.
    draft_shardings: likewise.
    kernels: likewise.
  """
  require_types(random_pair, locals())
  require_count("max_source_tokens", max_source_tokens)
  kind = named_dtype(dtype)
  words = open_vocabulary(vocabulary)
  config, target_params = _random(target, version, kind, words, shardings, kernels)
  draft_config, draft_params = _random(draft, version, kind, words, draft_shardings, kernels)
  family = version if version.isidentifier() else f"t5_{version}"
  return Pair(
    target=SimulatedModel(model_of(config), alpha, words.eos_id),
    target_params=target_params,
    target_name=f"{family}_{target}",
    draft=functools.partial(ModelDraft, model_of(draft_config)),
    draft_params=draft_params,
    draft_name=f"{family}_{draft}",
    vocabulary=words,
    task=f"simulated, alpha {alpha:g}",
    dtype=dtype,
    max_source_tokens=max_source_tokens,
    kernels=config.kernels,
    simulated_alpha=alpha,
    continues=not config.has_encoder,
  )


def _random(
  size: str, version: str, dtype, words: Vocabulary, shardings: Shardings, kernels: str
) -> tuple[Config, Any]:
  """A shape and its parameters at random, made one by one in dtype and where they belong."""
  config = named_config(version, size, dtype=dtype)
  if isinstance(config, GPTConfig):  # whatever the vocabulary, its EOS ends a prompt
    config = dataclasses.replace(config, eos_id=words.eos_id)
  if len(words) > config.vocab_size:
    raise InputError(
      f"{words.path} has {len(words)} tokens, more than the {config.vocab_size} of {version} "
      f"{size}; give a smaller vocabulary."
    )
  config = _for_decoding(config, shardings, kernels)
  shapes = param_shapes(config)
  leaves, tree = jax.tree.flatten(shapes)
  places = jax.tree.leaves(shardings(shapes)) if shardings else [None] * len(leaves)

  @functools.partial(jax.jit, static_argnames=("shape", "place"))
  def draw(key, shape, place):
    if len(shape) == 1:
      made = jnp.ones(shape, dtype)
    else:
      made = jax.random.normal(key, shape, dtype) * shape[-2] ** -0.5
    return made if place is None else jax.lax.with_sharding_constraint(made, place)

  keys = jax.random.split(jax.random.key(0), len(leaves))
  made = [draw(key, leaf.shape, place) for key, leaf, place in zip(keys, leaves, places)]
  return config, jax.tree.unflatten(tree, made)


def _for_decoding(config: Config, shardings: Shardings, kernels: str) -> Config:
  """The same model with fewer, larger products, unless these would be cut over devices."""
  if kernels not in ("auto", "xla"):
    raise InputError(f"kernels is {kernels!r}; use 'auto' or 'xla'.")
  places = jax.tree.leaves(shardings(param_shapes(config))) if shardings else []
  if not all(place.is_fully_replicated for place in places):
    return config
  here = kernels == "auto" and not shardings and config.dtype == jnp.float32
  kernels = "skinny" if here and skinny.ready() else "xla"
  return dataclasses.replace(config, fused=True, tied_logits=False, kernels=kernels)


def _load(
  role: str,
  path: str,
  words: Vocabulary,
  dtype: str,
  shardings: Shardings,
  kernels: str,
  stored_weights: bool,
) -> tuple[Config, Any]:
  """The shape of a checkpoint, laid out for decoding unless it is cut, and its parameters."""
  checkpoint = open_checkpoint(path)
  config = dataclasses.replace(checkpoint.config, dtype=named_dtype(dtype))
  size, rows = len(words), config.vocab_size
  if rows == -(-size // _TABLE_MULTIPLE) * _TABLE_MULTIPLE:
    config = dataclasses.replace(config, vocab_size=size, padded_vocab_size=rows)
  elif rows != size:
    raise InputError(
      f"The {role} in {path} has a vocabulary of {rows} tokens but {words.path} has {size}, "
      f"{words.extra_ids} extra_ids among them (T5's own has 100); target, draft and vocabulary "
      "must agree."
    )
  eos_id = config.eos_id if isinstance(config, GPTConfig) else checkpoint.eos_id
  if eos_id not in (None, words.eos_id):
    raise InputError(
      f"The {role} in {path} ends a text with token {eos_id} but {words.path} with "
      f"{words.eos_id}; target, draft and vocabulary must agree."
    )
  if eos_id == PAD_ID:
    raise InputError(
      f"The {role} in {path} ends a text with token {PAD_ID}, which pads prompts here; use "
      "models whose vocabulary has another token there."
    )
  if checkpoint.vocabulary not in (None, words.fingerprint()):
    raise InputError(
      f"The {role} in {path} was trained with another vocabulary than {words.path}, though "
      "of the same size; target, draft and vocabulary must agree."
    )
  config = _for_decoding(config, shardings, kernels)
  return config, checkpoint.load(config, shardings=shardings, stored_weights=stored_weights)


def rule_name(rule: Callable[[Sampling], Rule]) -> str:
  """What a rule is called in records: its class, `TokenRule` or another."""
  return type(rule(Sampling())).__name__


def checkpoint_name(path: str) -> str:
  """What a checkpoint is called in records: the last part of its path that is no step."""
  parts = [part for part in path.split("/") if not _STEP.fullmatch(part)]
  return parts[-1] if parts else path
