"""What is asked for, compared with the memory there is, before anything is tried."""

import math
import os
import pathlib
from typing import Any

import jax

from specdec_jax.errors import InputError

# A container's own limit, in either version of Linux's control groups.
_LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"


def require_memory(what: str, arrays: Any, advice: str = "ask for less") -> None:
  """Raise InputError unless memory could hold `arrays`, if nothing else were in it.

  Args:
    what: takes them, for the message: the user's settings.
    arrays: a tree of arrays, which may be traced, or of `jax.ShapeDtypeStruct`.
    advice: what the message tells the user to do.
  """
  types = [*map(jax.typeof, jax.tree.leaves(arrays))]
  needed = sum(x.size * x.dtype.itemsize for x in types)
  there = _memory(next((x.sharding.mesh for x in types if not x.sharding.mesh.empty), None))
  _require(what, needed, there, advice)


def require_host_memory(what: str, num_bytes: int) -> None:
  """Raise InputError unless the host's memory could hold `num_bytes`. Starts no backend of jax."""
  _require(what, num_bytes, _host_memory(), "ask for less")


def _require(what: str, needed: float, there: float, advice: str) -> None:
  if needed > there:
    raise InputError(
      f"{what} would take at least {needed / 1e9:,.1f} GB of memory, and there are "
      f"{there / 1e9:,.1f} GB; {advice}."
    )


def _memory(mesh: jax.sharding.AbstractMesh | None) -> float:
  """Bytes that the devices of a mesh have, without one the first device; a CPU has the host's."""
  device = jax.local_devices()[0]
  if mesh and mesh.abstract_device.platform != device.platform:
    return math.inf  # it is compiled for a machine that is not here
  if device.platform != "cpu":
    limit = (device.memory_stats() or {}).get("bytes_limit", math.inf)
    return limit * (mesh.size if mesh else 1)
  return _host_memory()


def _host_memory() -> float:
  there = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
  for path in _LIMITS:
    try:
      there.append(int(pathlib.Path(path).read_text()))
    except (OSError, ValueError):  # no such file, or 'max'
      continue
  return min(there)
