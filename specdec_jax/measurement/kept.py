"""Calibrations, kept beside compiled programs: what was found once is there for the next run."""

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
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import Tree, chain
from specdec_jax.errors import require_types
from specdec_jax.measurement.choice import Branching, Calibration
from specdec_jax.pairs import Pair, verifier_name
from specdec_jax.version import __version__


def get_or_compute(
  find: Callable[[], Calibration], on: Callable[[], Mapping[str, Any]], num_texts: int
) -> tuple[Calibration, str]:
  """What `find` finds; or what it found in an earlier run, where jax keeps its programs.

  Args:
    find: calibrates; what it finds is kept if there is a place.
    on: what it depends on, such as `depends_on` gives.
    num_texts: that it would look at; what was found with fewer does not count.

  Returns:
    The calibration, and words about where it was kept, empty if it was found now.
  """
  if not (cache := getattr(jax.config, "jax_compilation_cache_dir", None)):
    return find(), ""
  about = json.dumps(on(), sort_keys=True)
  name = hashlib.sha256(about.encode()).hexdigest()[:16]
  path = pathlib.Path(cache) / "calibrations" / f"{name}.json"
  if path.is_file():
    try:
      kept = json.loads(path.read_text(encoding="utf-8"))
      calibration, date = _calibration(kept["calibration"]), kept["date"]
      looked_at = kept["num_texts"]
      if looked_at >= num_texts:
        since = f"; found on {date} with {looked_at} texts (kept in {path})"
        return calibration, since
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
      fault = " ".join(f"{type(error).__name__}: {error}".split())[:200]
      warnings.warn(
        f"{path} is not a calibration ({fault}); it is measured again and replaced.", stacklevel=2
      )
  found = find()
  branching = found.branching
  fields = found._asdict()
  if branching is not None:
    fields["branching"] = branching._asdict() | dict(tree=[*branching.tree.parents])
  date = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
  with contextlib.suppress(OSError):  # then it is found again
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
      json.dump(dict(date=date, num_texts=num_texts, on=about, calibration=fields), file)
  return found, ""


def depends_on(
  pair: Pair, texts: Sequence[str], sampling: Sampling, **settings: Any
) -> dict[str, Any]:
  """What a calibration depends on: models, settings, program, machine and length of texts, as JSON
  has it.

  Their words are left out, though they decide alpha: the next run's are taken to be like them.
  """
  return dict(
    settings,
    width=max(len(pair.encode(text)) for text in texts).bit_length(),  # alike up to twice as long
    sampling=repr(sampling),
    verifier=verifier_name(pair.verifier),
    target=f"{pair.target!r} {_digest(pair.target_params)}",
    draft=f"{pair.draft(sampling, chain(1))!r} {_digest(pair.draft_params)}",
    kernels=pair.kernels,
    version=f"{__version__} {machine.commit()}, jax {jax.__version__}",
    devices=[device.device_kind for device in jax.devices()],
    machine=f"{machine.processor()}, {machine.threads()} threads",
  )


def _calibration(fields: dict[str, Any]) -> Calibration:
  """The calibration that a file holds.

  Raises:
    ValueError, KeyError, TypeError: it holds something else, or values that no calibration has.
  """
  if (branching := fields["branching"]) is not None:
    tree, acceptance = Tree(branching["tree"]), tuple(branching["acceptance"])
    branching = Branching(**branching | dict(tree=tree, acceptance=acceptance))
  tuples = {name: tuple(of) for name, of in fields.items() if isinstance(of, list)}
  found = Calibration(**fields | tuples | dict(branching=branching))
  require_types(Calibration, found._asdict())
  size = len(found.speedups)
  if not (0 <= found.gamma < size == len(found.c) == len(found.v) and size > 1):
    raise ValueError(f"gamma is {found.gamma}, among {size} speedups")
  if branching is not None:
    require_types(Branching, branching._asdict())
  numbers = [found.alpha, *found.c, *found.v, *found.speedups]
  finite = np.isfinite([*numbers, *found.starts, found.tried or 0.0]).all()
  if not (finite and min(numbers) >= 0 and found.alpha <= 1):
    raise ValueError("a number is out of range")
  return found


def _digest(params: Any) -> str:
  """Tells parameters apart by their names, shapes and the first row of each."""
  found = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    row = np.asarray(leaf[(0,) * max(0, np.ndim(leaf) - 1)]) if np.size(leaf) else leaf
    found.update(f"{jax.tree_util.keystr(path)} {np.shape(leaf)}".encode())
    found.update(np.ravel(row)[:64].tobytes())
  return found.hexdigest()[:16]
