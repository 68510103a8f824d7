"""What a record says of where it was measured: the processor, its cores, the commit, the date."""

import datetime
import functools
import os
import pathlib
import platform
import subprocess
from typing import Any

_CHECKOUT = pathlib.Path(__file__).resolve().parents[1]
_VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX", "sve": "SVE", "asimd": "NEON"}


def provenance() -> dict[str, Any]:
  """Fields of `records.Record` that do not depend on what is measured."""
  return dict(
    processor=processor(),
    cores=os.cpu_count(),
    threads=threads(),
    commit=commit(),
    date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%MZ}",
  )


@functools.cache
def processor(cpuinfo: str = "/proc/cpuinfo") -> str:
  """This host's processor: its name, family and model, and the widest vectors that it has.

  A name alone may be no name: clouds call unlike machines "AMD EPYC".
  """
  try:
    lines = pathlib.Path(cpuinfo).read_text().splitlines()
  except OSError:  # not Linux
    return platform.processor() or platform.machine()
  about = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
  named = about.get("model name") or about.get("CPU part") or platform.machine()
  if "cpu family" in about:
    named += f" (family {about['cpu family']}, model {about.get('model')})"
  has = (about.get("flags") or about.get("Features") or "").split()
  return ", ".join([named, *[name for flag, name in _VECTORS.items() if flag in has][:1]])


def threads() -> int:
  """Threads of XLA's pool on a CPU, as XLA counts them."""
  given = os.environ.get("NPROC", "")
  if given.isdecimal() and int(given):
    return int(given)
  affinity = getattr(os, "sched_getaffinity", None)
  return len(affinity(0)) if affinity else os.cpu_count() or 1


@functools.cache
def commit() -> str | None:
  """Of the checkout that this package lies in, '+' behind it if changed since; None if in none."""
  if not (_CHECKOUT / ".git").exists():
    return None
  git = lambda *args: subprocess.run(
    ["git", "-C", str(_CHECKOUT), *args], capture_output=True, text=True, check=True
  ).stdout.strip()
  try:
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "specdec_jax", "gin")
    return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
  except (OSError, subprocess.CalledProcessError):
    return None
