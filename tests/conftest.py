"""Configuration of the tests.

Tests run on the CPU, because their tolerances are those of float32 on a CPU. On the platform that
the variable SPECDEC_TEST_PLATFORM names, matmuls are those of full float32, and arrays may differ
by 1e-3; `experiments.gpu.measure` runs the tests of decoding there. The programs of the tests run
only briefly, so they are compiled without LLVM's optimizations and with one thread per worker, in a
third of the time. SPECDEC_XLA_FLAGS='' compiles programs as in a normal run. Workers share a
compilation cache. Garbage collection runs rarely, because tracing creates millions of objects, few
of which are in reference cycles. Programs do not record source locations, which saves an eighth of
the time.
"""

import gc
import importlib.metadata
import itertools
import os
import tempfile

gc.set_threshold(200_000, 50, 50)
_platform = os.environ.get("SPECDEC_TEST_PLATFORM", "cpu")
os.environ["JAX_PLATFORMS"] = _platform if _platform == "cpu" else f"{_platform},cpu"
if _platform != "cpu":
  os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"  # not TF32
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
_quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
_quick += " --xla_cpu_parallel_codegen_split_count=1"
_quick += " --xla_cpu_enable_concurrency_optimized_scheduler=false"
if importlib.metadata.version("jaxlib").startswith("0.10."):  # XLA aborts at an unknown flag
  _quick += " --xla_cpu_use_fusion_emitters=false"
_flags = os.environ.get("SPECDEC_XLA_FLAGS", _quick if _platform == "cpu" else "")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flags}".strip()
os.environ["SPECDEC_XLA_FLAGS"] = ""  # workers inherit XLA_FLAGS
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  # The process that creates the folder removes it.
  _programs = tempfile.TemporaryDirectory(prefix="specdec-programs-")
  os.environ["JAX_COMPILATION_CACHE_DIR"] = _programs.name
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "1.0"  # writing a program takes 0.1 s

import pathlib  # noqa: E402

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

# Check shapes and types in the signatures of these packages, which are imported after this.
jaxtyping.install_import_hook(
  ("specdec_jax.core", "specdec_jax.models", "specdec_jax.drafts", "specdec_jax.beams"),
  "signatures.checked",
)

# Each program has many memory maps. The Linux kernel allows a process 65,530 of them, and aborts it
# if it has more.
MAX_MAPS = 25_000
_clear_caches = jax.clear_caches
_num_tests = itertools.count(1)


if _platform != "cpu":
  _assert_allclose = np.testing.assert_allclose

  def _with_tolerance(actual, desired, rtol=1e-7, atol=0.0, **options):
    _assert_allclose(actual, desired, max(rtol, 1e-3), max(atol, 1e-3), **options)

  np.testing.assert_allclose = _with_tolerance


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_are_kept():
  """Make `jax.clear_caches` do nothing, because experiments call it after each setting."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, "clear_caches", lambda: None)
    yield


@pytest.fixture(autouse=True)
def few_programs_are_kept():
  """Forget the compiled programs of earlier tests before they have too many memory maps."""
  yield
  maps = pathlib.Path("/proc/self/maps")
  if next(_num_tests) % 10 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > MAX_MAPS:
    _clear_caches()


@pytest.fixture
def unchecked(monkeypatch):
  """Turn off jaxtyping's checks in tests of arguments that the library itself rejects."""
  monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def cache(tmp_path):
  """Set and return an empty folder for JAX's compilation cache."""
  before = jax.config.jax_compilation_cache_dir
  jax.config.update("jax_compilation_cache_dir", str(tmp_path))
  yield tmp_path
  jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def few_rounds_on_tables(monkeypatch):
  """Let the checker take the same few rounds on tables for each pair. They have their own tests."""
  from specdec_jax.core.sampling import Sampling
  from specdec_jax.core.trees import chain
  from specdec_jax.core.verify.tokens import TokenVerifier
  from specdec_jax.exactness import checker, tables

  found = tables.verifier_alone(TokenVerifier(Sampling(top_k=10)), chain(3), 0, 2**10)
  monkeypatch.setattr(checker, "verifier_alone", lambda *args: found)
  monkeypatch.setattr(checker, "draft_with_verifier", lambda *args: (found, {}))
