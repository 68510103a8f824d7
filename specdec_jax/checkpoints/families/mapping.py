"""Functions that the families share: tables of names, and checks of fields of config.json."""

from collections.abc import Mapping
from typing import Any

from specdec_jax.errors import InputError

_ATTENTION = {"q": "query", "k": "key", "v": "value"}


def expand(modules: Mapping[str, str], num_layers: int = 1) -> dict[str, str]:
  """Return our name for the name of each parameter in transformers, given names of modules.

  A weight is the scale of a norm, and the kernel of any other module. `{}` is a layer's number.
  """
  names = {}
  for i in range(num_layers):
    for theirs, ours in modules.items():
      weight = "scale" if ours.endswith("norm") else "kernel"
      names[f"{theirs}.weight".format(i)] = f"{ours}/{weight}".format(i)
      names[f"{theirs}.bias".format(i)] = f"{ours}/bias".format(i)
  return names


def attention(theirs: str, ours: str, suffix: str = "", out: str = "o") -> dict[str, str]:
  """Return the names of the four projections of attention."""
  words = {**_ATTENTION, out: "out"}
  return {f"{theirs}.{name}{suffix}": f"{ours}/{word}" for name, word in words.items()}


def require_known(path: str, fields: Mapping[str, Any], **known: tuple) -> None:
  """Raise InputError unless each field has a supported value; the first one is the default."""
  for field, values in known.items():
    if fields.get(field, values[0]) not in values:
      raise InputError(
        f"{field} in {path}/config.json is {fields[field]!r}; it must be "
        f"{' or '.join(map(repr, values))} for a supported model."
      )


def read_eos_ids(fields: Mapping[str, Any], default: int) -> tuple[int, ...]:
  """Return the ids in the field `eos_token_id`, each of which ends a text, or `default`.

  `default` stands for an absent field, and for null and [], with which transformers would decode
  each text up to its limit.
  """
  value = fields.get("eos_token_id")
  value = default if value in (None, []) else value
  return tuple(dict.fromkeys(value if isinstance(value, list) else [value]))
