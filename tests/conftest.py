"""Tests run on the CPU whatever the machine has: their tolerances are those of its float32.

Their programs run for a moment only, so they are compiled without LLVM's optimisations, in half of
the time; SPECDEC_XLA_FLAGS='' compiles them as a run would. What one worker compiled, the others
read.
"""

import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
_quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
_quick += " --xla_cpu_use_fusion_emitters=false"
_given = os.environ.get("XLA_FLAGS", ""), os.environ.get("SPECDEC_XLA_FLAGS", _quick)
os.environ["XLA_FLAGS"] = " ".join(_given).strip()
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  # Gone with the first of the processes, which made it.
  _programs = tempfile.TemporaryDirectory(prefix="specdec-programs-")
  os.environ["JAX_COMPILATION_CACHE_DIR"] = _programs.name
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import specdec_jax  # noqa: E402, F401  adds to them, before a test that uses jax alone
