"""On-disk cache of calibrations for later runs, in the folder of jax's compilation cache."""

import contextlib
import datetime
import hashlib
import json
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax import machine
from specdec_jax.atomic_files import atomic_write
from specdec_jax.core.trees import Tree, chain
from specdec_jax.errors import require_types
from specdec_jax.loading import DecodeSettings
from specdec_jax.measurement.choice import Branching, Calibration
from specdec_jax.pairs import LoadedPair, verifier_name
from specdec_jax.version import __version__


def get_or_compute(
  compute: Callable[[], Calibration], key: Callable[[], Mapping[str, Any]], num_texts: int
) -> tuple[Calibration, str]:
  """Return a cached calibration, or compute and cache it.

  The cache is a folder in jax's compilation cache. Without a compilation cache, nothing is cached.

  Args:
    compute: function that calibrates.
    key: function that returns the key of the calibration, a JSON object; see `cache_key`.
    num_texts: number of texts that `compute` uses. A cached calibration from fewer texts is not
      used.

  Returns:
    The calibration, and words for a message that say when the calibration was made and where it is
    cached. The words are empty if the calibration was computed now.
  """
  if not (cache := getattr(jax.config, "jax_compilation_cache_dir", None)):
    return compute(), ""
  key_json = json.dumps(key(), sort_keys=True)
  name = hashlib.sha256(key_json.encode()).hexdigest()[:16]
  path = pathlib.Path(cache) / "calibrations" / f"{name}.json"
  if path.is_file():
    try:
      cached = json.loads(path.read_text(encoding="utf-8"))
      calibration, date = _parse(cached["calibration"]), cached["date"]
      cached_texts = cached["num_texts"]
      if cached_texts >= num_texts:
        return calibration, f"; found on {date} with {cached_texts} texts (cached in {path})"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
      fault = " ".join(f"{type(error).__name__}: {error}".split())[:200]
      warnings.warn(
        f"{path} is not a calibration ({fault}); it is measured again and replaced.", stacklevel=2
      )
  calibration = compute()
  branching = calibration.branching
  fields = calibration._asdict()
  if branching is not None:
    fields["branching"] = branching._asdict() | dict(tree=[*branching.tree.parents])
  date = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
  with contextlib.suppress(OSError):  # if it cannot be written, the next run computes it again
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
      json.dump(dict(date=date, num_texts=num_texts, on=key_json, calibration=fields), file)
  return calibration, ""


def cache_key(
  pair: LoadedPair, texts: Sequence[str], settings: DecodeSettings, branching: bool
) -> dict[str, Any]:
  """Return the key of a calibration in the cache, a JSON object.

  It includes the models, the settings, the versions of the program, the machine and, within a
  factor of 2, the length of the longest text. The content of the texts is not included, although it
  determines alpha: a later run is assumed to have similar texts. The seed is not included either.
  """
  longest = max(len(pair.encode(text)) for text in texts)
  return dict(
    batch_size=settings.batch_size,
    max_new_tokens=settings.max_new_tokens,
    lenience=settings.lenience,
    branching=branching,
    width=longest.bit_length(),  # equal for lengths within a factor of 2
    sampling=repr(settings.sampling),
    verifier=verifier_name(pair.verifier),
    target=f"{pair.target!r} {_digest(pair.target_params)}",
    draft=f"{pair.draft(settings.sampling, chain(1))!r} {_digest(pair.draft_params)}",
    kernels=pair.kernels,
    version=f"{__version__} {machine.commit()}, jax {jax.__version__}",
    devices=[device.device_kind for device in jax.devices()],
    machine=f"{machine.processor()}, {machine.threads()} threads",
  )


def _parse(fields: dict[str, Any]) -> Calibration:
  """Convert the fields of a cached file to a calibration.

  Raises:
    ValueError, KeyError, TypeError: the fields are not those of a calibration, or a value is out of
      range.
  """
  if (branching := fields["branching"]) is not None:
    tree, acceptance = Tree(branching["tree"]), tuple(branching["acceptance"])
    branching = Branching(**branching | dict(tree=tree, acceptance=acceptance))
  tuples = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
  calibration = Calibration(**fields | tuples | dict(branching=branching))
  require_types(Calibration, calibration._asdict())
  gamma, size = calibration.gamma, len(calibration.speedups)
  if not (0 <= gamma < size == len(calibration.c) == len(calibration.v) and size > 1):
    raise ValueError(f"gamma is {gamma}, among {size} speedups")
  if branching is not None:
    require_types(Branching, branching._asdict())
  numbers = [calibration.alpha, *calibration.c, *calibration.v, *calibration.speedups]
  finite = np.isfinite([*numbers, *calibration.starts, calibration.tried or 0.0]).all()
  if not (finite and min(numbers) >= 0 and calibration.alpha <= 1):
    raise ValueError("a number is out of range")
  return calibration


def _digest(params: Any) -> str:
  """Return a checksum of the names, shapes and first values of all parameters."""
  checksum = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    row = np.asarray(leaf[(0,) * max(0, np.ndim(leaf) - 1)]) if np.size(leaf) else leaf
    checksum.update(f"{jax.tree_util.keystr(path)} {np.shape(leaf)}".encode())
    checksum.update(np.ravel(row)[:64].tobytes())
  return checksum.hexdigest()[:16]
