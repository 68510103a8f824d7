"""Test that importing the package disables XLA's YNN kernels."""

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

from specdec_jax.xla import YNN_FLAG, disable_ynn

ROOT = pathlib.Path(__file__).resolve().parents[1]


# The next two tests also run with newer versions of jaxlib, which may have the kernels too.


def test_ynn_kernels_are_disabled_in_these_tests():
  x = jnp.ones((64, 64))
  compiled = jax.jit(jnp.matmul).lower(x, x).compile()
  assert "__ynn_fusion" not in (compiled.as_text() or "__ynn_fusion")


@pytest.mark.slow
def test_ynn_kernels_are_disabled_if_jax_is_imported_first():
  code = """
import jax, jax.numpy as jnp
import specdec_jax.core.decode
x = jnp.ones((64, 64))
text = jax.jit(jnp.matmul).lower(x, x).compile().as_text()
assert 'dot' in text and '__ynn_fusion' not in text
"""
  environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
  subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, check=True)


def flags_after(monkeypatch, flags, version, used, platform="cpu"):
  """Return XLA_FLAGS after `disable_ynn` with this version of jaxlib; `used`: jax has started."""
  bridge = types.SimpleNamespace(
    backends_are_initialized=lambda: used, default_backend=lambda: platform
  )
  monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
  monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", bridge)
  monkeypatch.setenv("XLA_FLAGS", flags)
  disable_ynn()
  return os.environ["XLA_FLAGS"]


@pytest.mark.parametrize(
  "flags, version, used, expected",
  [
    ("", "0.10.2", False, YNN_FLAG),
    ("", "0.11.0", False, YNN_FLAG),
    ("--xla_a=1", "0.11.0", False, f"--xla_a=1 {YNN_FLAG}"),
    (f"{YNN_FLAG}dot", "0.10.2", False, f"{YNN_FLAG}dot"),
    (YNN_FLAG, "0.10.2", True, YNN_FLAG),
    ("", "0.9.2", False, ""),  # XLA would abort at the unknown flag
    ("", "0.12.0.1", False, YNN_FLAG),
    ("", "0.13.0", True, ""),
  ],
)
def test_flag_is_added_if_jaxlib_knows_it_and_the_user_has_not_set_it(
  monkeypatch, flags, version, used, expected
):
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    assert flags_after(monkeypatch, flags, version, used) == expected


@pytest.mark.parametrize("flags, used", [("--xla_a=1", True), ("flags.txt", False)])
def test_warning_if_the_flag_cannot_be_added(monkeypatch, flags, used):
  with pytest.warns(UserWarning, match=f"YNN kernels are enabled.*start Python with {YNN_FLAG} in"):
    assert flags_after(monkeypatch, flags, "0.10.2", used) == flags
  with warnings.catch_warnings():
    warnings.simplefilter("error")  # on other devices the CPU's kernels do not matter
    flags_after(monkeypatch, "", "0.10.2", True, platform="tpu")
