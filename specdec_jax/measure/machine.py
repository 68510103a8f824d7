"""Functions that describe the provenance of a record: the processor, the commit and the date."""

import datetime
import functools
import os
import pathlib
import platform
import subprocess
from typing import Any

COMMIT_FILE = pathlib.Path(__file__).resolve().parents[1] / "commit.txt"  # setup.py writes it
_CHECKOUT = COMMIT_FILE.parents[1]
# Flags of /proc/cpuinfo and the vector extensions that they stand for, the widest first.
_VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX", "sve": "SVE", "asimd": "NEON"}


def provenance() -> dict[str, Any]:
  """Return the fields of a record that describe the machine, the commit and the date."""
  return dict(
    processor=processor(),
    cores=os.cpu_count(),
    threads=threads(),
    commit=commit(),
    date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%MZ}",
  )


@functools.cache
def processor(cpuinfo: str = "/proc/cpuinfo") -> str:
  """Return the name, family and model of this host's processor, and its widest vector extension.

  The name alone is not enough: cloud hosts call different processors "AMD EPYC".
  """
  try:
    lines = pathlib.Path(cpuinfo).read_text().splitlines()
  except OSError:  # not Linux
    return platform.processor() or platform.machine()
  fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
  name = fields.get("model name") or fields.get("CPU part") or platform.machine()
  if "cpu family" in fields:
    name += f" (family {fields['cpu family']}, model {fields.get('model')})"
  flags = (fields.get("flags") or fields.get("Features") or "").split()
  return ", ".join([name, *[vectors for flag, vectors in _VECTORS.items() if flag in flags][:1]])


def threads() -> int:
  """Return the number of threads in XLA's pool on a CPU, counted as XLA does."""
  from_environment = os.environ.get("NPROC", "")
  if from_environment.isdecimal() and int(from_environment):
    return int(from_environment)
  affinity = getattr(os, "sched_getaffinity", None)
  return len(affinity(0)) if affinity else os.cpu_count() or 1


@functools.cache
def commit() -> str | None:
  """Return the commit of this package, or None if it is not known.

  For an installed package, it is that of the checkout that it was built from. A "+" is appended if
  specdec_jax/ or gin/ differ from the commit.
  """
  if COMMIT_FILE.is_file():
    return COMMIT_FILE.read_text().strip() or None
  if not (_CHECKOUT / ".git").exists():
    return None
  try:
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", "specdec_jax", "gin")
    return _git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
  except (OSError, subprocess.CalledProcessError):
    return None


def _git(*args: str) -> str:
  command = ["git", "-C", str(_CHECKOUT), *args]
  return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
