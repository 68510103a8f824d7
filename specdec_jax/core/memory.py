"""Functions that check, before arrays are allocated, whether they fit in memory."""

import math
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.errors import InputError

# Files that contain the memory limit of a container, for versions 2 and 1 of Linux control groups.
_LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"


def require_memory(what: str, arrays: Any, advice: str = "ask for less") -> None:
  """Raise InputError unless `arrays` would fit in memory if nothing else were stored in it.

  `arrays` is a pytree of arrays, which may be traced, or of `jax.ShapeDtypeStruct`.
  """
  types = [*map(jax.typeof, jax.tree.leaves(arrays))]
  total = sum(map(num_bytes, types))
  mesh = next((x.sharding.mesh for x in types if not x.sharding.mesh.empty), None)
  _require(what, total, _device_memory(mesh), advice)


def num_bytes(x: Any) -> int:
  """Return the bytes of an array, or of an array of this type, on a device: XLA packs int4."""
  return x.size * x.dtype.itemsize // (2 if x.dtype == jnp.int4 else 1)


def require_host_memory(what: str, num_bytes: int) -> None:
  """Raise InputError unless `num_bytes` fit in the host's memory. No jax backend is initialized."""
  _require(what, num_bytes, host_memory(), "ask for less")


def _require(what: str, num_bytes: float, memory_bytes: float, advice: str) -> None:
  if num_bytes > memory_bytes:
    raise InputError(
      f"{what} would take at least {num_bytes / 1e9:,.1f} GB of memory, and there are "
      f"{memory_bytes / 1e9:,.1f} GB; {advice}."
    )


def _device_memory(mesh: jax.sharding.AbstractMesh | None) -> float:
  """Return the memory in bytes of all devices of a mesh; of the first device if there is no mesh.

  On a CPU it is the memory of the host. It is infinite if it is unknown, or if the mesh belongs to
  a platform that jax does not use here.
  """
  device = jax.local_devices()[0]
  if mesh and mesh.abstract_device.platform != device.platform:
    return math.inf  # the program is compiled for another machine
  if device.platform != "cpu":
    limit = (device.memory_stats() or {}).get("bytes_limit", math.inf)
    return limit * (mesh.size if mesh else 1)
  return host_memory()


def host_memory() -> float:
  """Return the bytes of memory of this machine or, if less, of its container."""
  limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
  for path in _LIMITS:
    try:
      limits.append(int(pathlib.Path(path).read_text()))
    except (OSError, ValueError):  # the file does not exist, or contains "max"
      continue
  return min(limits)
