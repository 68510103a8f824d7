"""Tests run on the CPU whatever the machine has: their tolerances are those of its float32.

Their programs run for a moment only, so they are compiled without LLVM's optimisations and by one
thread a worker, in a third of the time; SPECDEC_XLA_FLAGS='' compiles them as a run would. What one
worker compiled, the others read. Tracing makes millions of objects, few of them in cycles, and
where in the source each step of a program stands is not kept in it, which takes an eighth off.
"""

import gc
import os
import tempfile

from specdec_jax.xla_flags import (
  rejection_message,
)  # turns YNN off, before a test that uses jax alone

gc.set_threshold(200_000, 50, 50)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
_quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
_quick += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
_quick += " --xla_cpu_enable_concurrency_optimized_scheduler=false"
if (_flags := os.environ.get("SPECDEC_XLA_FLAGS")) is None:
  _unknown = rejection_message(
    _quick
  ).split()  # XLA aborts at a flag that this jaxlib does not know
  _flags = " ".join(flag for flag in _quick.split() if flag not in _unknown)
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flags}".strip()
os.environ["SPECDEC_XLA_FLAGS"] = ""  # workers inherit XLA_FLAGS
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  # Gone with the first of the processes, which made it.
  _programs = tempfile.TemporaryDirectory(prefix="specdec-programs-")
  os.environ["JAX_COMPILATION_CACHE_DIR"] = _programs.name
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "1.0"  # to keep one takes 0.1

import pathlib  # noqa: E402

import jax  # noqa: E402
import pytest  # noqa: E402

MOST_MAPS = 25_000  # of memory that a process maps, as each program is; the kernel allows 65,530


@pytest.fixture(autouse=True, scope="module")
def programs_are_kept():
  """Experiments drop theirs after each setting, and with them those of the tests around them."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, "clear_caches", lambda: None)
    yield
  maps = pathlib.Path("/proc/self/maps")
  if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
    jax.clear_caches()


@pytest.fixture
def cache(tmp_path):
  """A place of its own for what jax keeps."""
  before = jax.config.jax_compilation_cache_dir
  jax.config.update("jax_compilation_cache_dir", str(tmp_path))
  yield tmp_path
  jax.config.update("jax_compilation_cache_dir", before)
