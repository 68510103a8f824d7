"""Compile steps of T5-XXL for one TPU v4 chip with weights in bfloat16, int8 and int4.

python -m experiments.tpu_v4.formats > experiments/tpu_v4/formats.jsonl

Programs of one and two layers are compiled, since each layer adds as many bytes as the one before.
"""

import importlib.metadata
import json
import time

import jax.numpy as jnp

from experiments.tpu_v4 import compile as compiler
from specdec_jax.measure.machine import commit
from specdec_jax.models.layout import Layout
from specdec_jax.models.sizes import t5_config

LAYERS = 24


def main() -> None:
  _, devices = compiler.described("v4:1x1x1")
  layout = Layout(dtype=jnp.bfloat16, fused=True)
  draft = t5_config(
    "small", num_encoder_layers=1, num_decoder_layers=1, layout=layout, tied_logits=False
  )
  settings = compiler.CompileSettings(gamma=7)
  origin = {"commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime())}
  origin |= {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
  for weights in ("int4", "int8", "float"):
    for program in ("decode step", "verify"):
      sizes = []
      for layers in (1, 2):
        of_layers = dict(num_encoder_layers=layers, num_decoder_layers=layers)
        target = t5_config("xxl", layout=layout, tied_logits=False, **of_layers)
        target = target.with_layout(weights=weights)
        lowered = compiler.programs(target, draft, devices, settings)[program]()
        compiled = lowered.compile(compiler_options=compiler.HBM_ONLY)
        arguments = compiled.memory_analysis().argument_size_in_bytes
        sizes.append((compiled.cost_analysis()["bytes accessed"], arguments))
      total = [(two + (LAYERS - 2) * (two - one)) / 1e9 for one, two in zip(*sizes)]
      gigabytes = dict(zip(("hbm_gb", "arguments_gb"), (round(x, 3) for x in total)))
      line = {"weights": weights, "program": program, **gigabytes, **origin}
      print(json.dumps(line), flush=True)


if __name__ == "__main__":
  main()
