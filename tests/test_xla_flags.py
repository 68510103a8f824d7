"""XLA's YNN kernels are off for whoever imports the package, or a warning says how."""

import importlib.metadata
import os
import pathlib
import subprocess
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import pytest

from specdec_jax.xla_flags import YNN_FLAG, rejection, turn_ynn_off

ROOT = pathlib.Path(__file__).resolve().parents[1]


# Neither is skipped with a jaxlib that is newer than those known: it may have the kernels too.


def test_these_tests_run_without_them():
  x = jnp.ones((64, 64))
  compiled = jax.jit(jnp.matmul).lower(x, x).compile()
  assert "__ynn_fusion" not in (compiled.as_text() or "__ynn_fusion")


def test_they_are_off_though_jax_was_imported_first():
  code = """
import jax, jax.numpy as jnp
import specdec_jax.core.decode
x = jnp.ones((64, 64))
text = jax.jit(jnp.matmul).lower(x, x).compile().as_text()
assert 'dot' in text and '__ynn_fusion' not in text
"""
  environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
  subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, check=True)


def flags_after(monkeypatch, given, version, used, platform="cpu"):
  bridge = types.SimpleNamespace(
    backends_are_initialized=lambda: used, default_backend=lambda: platform
  )
  monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
  monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", bridge)
  monkeypatch.setenv("XLA_FLAGS", given)
  turn_ynn_off()
  return os.environ["XLA_FLAGS"]


@pytest.mark.parametrize(
  "given, version, used, after",
  [
    ("", "0.10.2", False, YNN_FLAG),
    ("", "0.11.0", False, YNN_FLAG),
    ("--xla_a=1", "0.11.0", False, f"--xla_a=1 {YNN_FLAG}"),
    (f"{YNN_FLAG}dot", "0.10.2", False, f"{YNN_FLAG}dot"),
    (YNN_FLAG, "0.10.2", True, YNN_FLAG),
    ("", "0.9.2", False, ""),  # which ends at a flag that it does not know
    ("", "0.12.0.1", False, YNN_FLAG),
    ("", "0.13.0", True, ""),
  ],
)
def test_the_flag_is_set_where_it_is_known_and_left_where_it_is_given(
  monkeypatch, given, version, used, after
):
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    assert flags_after(monkeypatch, given, version, used) == after


@pytest.mark.parametrize("given, used", [("--xla_a=1", True), ("flags.txt", False)])
def test_too_late_a_warning_says_how(monkeypatch, given, used):
  with pytest.warns(UserWarning, match=f"YNN kernels are on.*start Python with {YNN_FLAG} in"):
    assert flags_after(monkeypatch, given, "0.10.2", used) == given
  with warnings.catch_warnings():
    warnings.simplefilter("error")  # a CPU's kernels do nothing to who uses another device
    flags_after(monkeypatch, "", "0.10.2", True, platform="tpu")


def test_flags_that_xla_rejects():
  assert rejection("--xla_backend_optimization_level=0") == ""
  unknown = "--xla_cpu_no_such_flag=1 --xla_nor_this"
  said = rejection(f"{unknown} --xla_backend_optimization_level=0")
  assert said == f"Unknown flags in XLA_FLAGS: {unknown}"
  assert "value many" in rejection("--xla_backend_optimization_level=many")
  assert '"no/such/file"' in rejection("no/such/file")
