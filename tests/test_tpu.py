"""What the compiler for TPU v4 says of T5-XXL with T5-small, and of LaMDA: what must hold.

As a script this is the process that asks it: libtpu wants settings of its own before jax starts.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys

import pytest

GAMMA = 7
CHIP = 32e9  # bytes


def main() -> None:
  """Prints what the tests look at, as JSON."""
  import jax
  import jax.numpy as jnp

  from specdec_jax.experiments import tpu_compile
  from specdec_jax.models.config import named_config, t5_config
  from specdec_jax.sampling import Sampling

  devices = tpu_compile.v4_devices(4)
  xxl, small = (t5_config(size, dtype=jnp.bfloat16) for size in ("xxl", "small"))
  # As wide, so that a layer's copies are as large, but compiled sooner.
  shallow = [
    dataclasses.replace(config, num_encoder_layers=layers, num_decoder_layers=layers)
    for config, layers in ((xxl, 2), (small, 1))
  ]

  def examined(programs, *names, options=None):
    compiled = {name: programs[name]().compile(compiler_options=options) for name in names}
    return {name: tpu_compile.examine(program)._asdict() for name, program in compiled.items()}

  programs = tpu_compile.programs(xxl, small, devices[:1], gamma=GAMMA)
  found = {
    "loop": examined(programs, "speculative loop")["speculative loop"],
    "hbm_bytes": tpu_compile.hbm_bytes(programs, GAMMA),
  }
  steps = "decode step", "verify"
  cut = tpu_compile.programs(*shallow, devices, gamma=GAMMA)
  found["cut"] = examined(cut, *steps, options=tpu_compile.HBM_ONLY)
  whole = tpu_compile.programs(*shallow, devices[:1], gamma=GAMMA)
  found["whole"] = examined(whole, *steps, options=tpu_compile.HBM_ONLY)
  lamda = [
    named_config("lamda", size, dtype=jnp.bfloat16, num_decoder_layers=layers)
    for size, layers in (("137b", 2), ("100m", 1))
  ]
  sixteen = tpu_compile.v4_devices(16)
  over = tpu_compile.programs(*lamda, sixteen, gamma=GAMMA, sampling=Sampling(top_k=40))
  found["lamda"] = examined(over, *steps, options=tpu_compile.HBM_ONLY)
  found["lamda"] |= examined(over, "speculative loop")
  # As attention would be without what keeps its kernels in their layout.
  jax.lax.optimization_barrier = lambda x: x
  jax.clear_caches()
  found["broken"] = examined(whole, *steps, options=tpu_compile.HBM_ONLY)
  found["broken"] |= examined(whole, "speculative loop")
  print(json.dumps(found))


@pytest.fixture(scope="module")
def found():
  if importlib.util.find_spec("libtpu") is None:
    pytest.skip("libtpu, the compiler for TPU, is not installed (extra 'tpu')")
  env = os.environ | {"XLA_FLAGS": ""}  # those of the other tests are for the CPU
  run = subprocess.run(
    [sys.executable, __file__], stdout=subprocess.PIPE, check=True, timeout=1200, env=env
  )
  return json.loads(run.stdout)


def ratio(programs: dict) -> float:
  return programs["verify"]["accessed"] / programs["decode step"]["accessed"]


def test_xxl_and_its_draft_fit_on_one_chip(found):
  # 11.1e9 parameters in bfloat16 are all there, and nothing is there twice.
  loop = found["loop"]
  assert 22e9 < loop["arguments"] < loop["peak"] < 1.05 * loop["arguments"] < CHIP


def test_loop_copies_no_weights(found):
  assert found["loop"]["weight_copies"] == []


def test_loop_stays_on_the_chip(found):
  assert found["loop"]["host_transfers"] == 0


def test_bytes_of_a_round(found):
  from specdec_jax.experiments.tpu_compile import over_a_step

  accessed, over = found["hbm_bytes"], over_a_step(found["hbm_bytes"])
  # A decoder's 24 layers, without the keys and values of attention to the source, and logits.
  weights = 2 * (24 * (6 * 4096 * 4096 + 3 * 4096 * 10240) + 4096 * 32128)
  assert weights < accessed["decode step"] < 1.05 * weights, "each weight is read once"
  assert over["verify"] <= 1.15
  assert over["draft step"] <= 0.03
  assert over["round"] <= 1.25


def test_four_chips_share_the_work(found):
  for step, whole in found["whole"].items():
    cut = found["cut"][step]
    assert cut["weight_copies"] == []
    assert cut["collectives"] > 0
    assert cut["arguments"] < 0.26 * whole["arguments"]
    assert cut["accessed"] < 0.28 * whole["accessed"]


def test_sixteen_chips_share_two_layers_of_lamda(found):
  for program in found["lamda"].values():
    assert program["weight_copies"] == []
    assert program["host_transfers"] == 0
    assert program["collectives"] > 0
  # Both layers and logits, of which a chip has a sixteenth.
  weights = 2 * (2 * (4 * 8192 * 16384 + 3 * 8192 * 65536) + 8192 * 32000) / 16
  assert weights < found["lamda"]["decode step"]["accessed"] < 1.05 * weights
  assert ratio(found["lamda"]) < 1.15


def test_copies_of_weights_are_seen(found):
  # Two layers, each with queries, keys, values and queries to the source.
  assert found["whole"]["verify"]["weight_copies"] == []
  copies = found["broken"]["verify"]["weight_copies"]
  assert len(copies) == 8
  assert any("['layers_1']['self_attention']['query']['kernel']" in copy for copy in copies)
  assert ratio(found["whole"]) < 1.15 < 1.3 < ratio(found["broken"])
  # In the loops too: of the target's in the outer one, of the draft's in the one within.
  in_loop = "\n".join(found["broken"]["speculative loop"]["weight_copies"])
  assert "target_params['decoder']" in in_loop and "draft_params['decoder']" in in_loop


if __name__ == "__main__":
  main()
