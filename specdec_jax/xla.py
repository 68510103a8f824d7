"""Persistent cache of compiled programs, and a flag of XLA.

This module does not import jax, because jax reads its environment variables when it is imported.
"""

import importlib.metadata
import os
import sys
import warnings
from typing import Any


def default_cache_dir() -> str:
  """Return JAX_COMPILATION_CACHE_DIR (may be ''), or `~/.cache/specdec_jax` if it is not set."""
  return os.environ.get("JAX_COMPILATION_CACHE_DIR", "~/.cache/specdec_jax")


def enable_compile_cache(directory: str) -> None:
  """Cache in `directory` all programs that take half a second or longer to compile.

  An empty string disables the cache, and so does, with a warning, a folder that cannot be created.
  If JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS is set, it replaces the half second.
  """
  if directory:
    directory = os.path.abspath(os.path.expanduser(directory))
    try:
      os.makedirs(directory, exist_ok=True)
    except OSError as error:
      reason = f"cannot use '{error.filename}': {error.strerror}."
      print(f"warning: compiled programs are not cached: {reason}", file=sys.stderr)
      directory = ""
  seconds = os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
  os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
  if directory:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = directory
  # jax reads the environment once, when it is imported. If it is imported, set its options as well.
  if jax := sys.modules.get("jax"):
    jax.config.update("jax_compilation_cache_dir", directory or None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float(seconds))


YNN_FLAG = "--xla_cpu_experimental_ynn_fusion_type="  # the empty value enables no YNN fusion
# Versions of jaxlib that know YNN_FLAG. XLA aborts the process if a flag is unknown.
_VERSIONS = "0.10.", "0.11.", "0.12."


def disable_ynn() -> None:
  """Add YNN_FLAG to XLA_FLAGS, unless the user has set it to any value or jaxlib does not know it.

  XLA reads XLA_FLAGS once, when jax is first used. If jax has already been used, or if XLA_FLAGS
  names a file of flags, the flag cannot be added. A warning then says what to do, unless jax has
  been used on a device other than a CPU.
  """
  flags = os.environ.get("XLA_FLAGS", "").strip()
  try:
    version = importlib.metadata.version("jaxlib")
  except importlib.metadata.PackageNotFoundError:  # records and reports work without jax
    return
  if YNN_FLAG in flags or not version.startswith(_VERSIONS):
    return
  # jax has no public function that tells whether a backend is initialized.
  bridge: Any = sys.modules.get("jax._src.xla_bridge")
  used = bridge is not None and bridge.backends_are_initialized()
  if used and bridge.default_backend() != "cpu":
    return
  if used or flags[:1] not in ("", "-"):
    warnings.warn(
      f"XLA's YNN kernels are enabled, with which jaxlib {version} may return wrong results on a "
      f"CPU; start Python with {YNN_FLAG} in XLA_FLAGS, or import specdec_jax before jax is used.",
      stacklevel=3,
    )
    return
  os.environ["XLA_FLAGS"] = f"{flags} {YNN_FLAG}".strip()
