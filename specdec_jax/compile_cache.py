"""Persistent cache of compiled programs, and a check of XLA_FLAGS.

This module does not import jax, because jax reads its environment variables when it is imported.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import pathlib
import sys

from specdec_jax.errors import InputError
from specdec_jax.xla_flags import YNN_FLAG, rejection_message


def default_cache_dir() -> str:
  """Return JAX_COMPILATION_CACHE_DIR (may be ''), or `~/.cache/specdec_jax` if it is not set."""
  return os.environ.get("JAX_COMPILATION_CACHE_DIR", "~/.cache/specdec_jax")


def enable_compile_cache(directory: str) -> None:
  """Cache in `directory` all programs that take half a second or longer to compile.

  If JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS is set, it replaces the half second.

  Args:
    directory: folder of the cache. An empty string disables the cache. If the folder cannot be
      created, the cache is disabled with a warning.
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


def check_xla_flags() -> None:
  """Raise InputError if XLA rejects the user's XLA_FLAGS. XLA itself would abort the process.

  An empty file in the compilation cache marks each combination of flags and jaxlib version that XLA
  accepted, so that it is tried only once. If there is no cache, or if XLA_FLAGS names a file of
  flags, the flags are tried each time.
  """
  flags = " ".join(os.environ.get("XLA_FLAGS", "").replace(YNN_FLAG, "").split())
  if not flags:
    return
  cache_dir = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
  key = f"{importlib.metadata.version('jaxlib')} {flags}".encode()
  marker = pathlib.Path(cache_dir, f"xla_flags-{hashlib.sha256(key).hexdigest()[:16]}")
  # If XLA_FLAGS does not start with "-", it names a file of flags, whose content may change.
  can_cache = bool(cache_dir) and flags.startswith("-")
  if can_cache and marker.exists():
    return
  if message := rejection_message(flags):
    raise InputError(
      f"XLA_FLAGS is '{flags}', which XLA rejects: {message.rstrip('.')}; correct it or unset it."
    )
  if can_cache:
    with contextlib.suppress(OSError):  # the flags are tried again by the next run
      marker.touch()
