"""Learned draft heads: small modules that are trained for one target."""

import dataclasses
from typing import Any

from specdec_jax import registry
from specdec_jax.drafts.heads.base import DraftHead
from specdec_jax.models import families
from specdec_jax.models.config import TransformerConfig
from specdec_jax.models.layout import Layout

AnyConfig = families.Config | DraftHead

# Fields of a head that are those of its target.
_OF_TARGET = (
  "vocab_size",
  "padded_vocab_size",
  "has_encoder",
  "num_heads",
  "num_kv_heads",
  "head_dim",
  "eos_id",
  "start_id",
  "pad_id",
)


def new_head(target: TransformerConfig, kind: str = "parallel", **settings: Any) -> DraftHead:
  """Return a draft head for a target.

  Args:
    kind: name of the head in `registry.HEADS`.
    settings: fields of the head. A setting that is None, or that only other kinds have, is left
      out, so that one gin file serves all kinds.

  Raises:
    InputError: there is no head of this kind, or the head does not fit the target.
  """
  chosen = registry.head(kind)
  fields = {
    each: {f.name for f in dataclasses.fields(registry.head(each))} for each in registry.HEADS
  }
  if unknown := settings.keys() - set().union(*fields.values()):
    raise TypeError(f"No kind of head has {', '.join(sorted(unknown))}.")
  given = {n: x for n, x in settings.items() if n in fields[kind] and x is not None}
  if "num_heads" in given:
    given.setdefault("num_kv_heads", None)
  shared: dict[str, Any] = {name: getattr(target, name) for name in _OF_TARGET}
  shared["layout"] = Layout(dtype=target.layout.dtype)
  head = chosen(**{"kind": kind, "state_dim": target.emb_dim, **shared, **given})
  if features := head.feature_layers:
    head = dataclasses.replace(head, state_dim=target.emb_dim * len(features))
  head.require_target(target)
  return head
