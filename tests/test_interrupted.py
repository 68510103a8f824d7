"""A measuring run that is killed and started again ends with the records of one left alone.

Real runs of `measure` in processes of their own, killed with SIGKILL while they write. What a
setting gives is made up (and slow), so that the runs can be compared; all else is what users run.
"""

import dataclasses
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import tiny_pair

from specdec_jax import records
from specdec_jax.measurement import measure as measuring
from specdec_jax.sampling import Sampling

HERE = pathlib.Path(__file__).resolve().parent
GAMMAS = range(1, 13)

RUN = f"""
import sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {str(HERE)!r})
import test_interrupted as here
here.measuring._measure = here.made_up
here.measure_it(sys.argv[1], print)
"""


def made_up(pair, prompts, sampling, settings, *rest):
  for setting in settings:
    time.sleep(0.05)
    yield dataclasses.replace(setting, alpha=setting.gamma / 20 + sampling.temperature / 4)


def measure_it(folder, say=lambda *words, flush: None):
  pair = tiny_pair.pair()
  with records.open_results(str(folder)) as path:
    say("ready", flush=True)
    samplings = [Sampling(0.0), Sampling(1.0)]
    measuring.measure(pair, ["A man"], path, samplings, [*GAMMAS])


def start(folder) -> subprocess.Popen:
  run = subprocess.Popen(
    [sys.executable, "-c", RUN, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
  )
  assert run.stdout.readline() == b"ready\n", run.stderr.read().decode()
  return run


def test_killed_and_started_again_it_ends_with_the_same_records(tmp_path, monkeypatch):
  monkeypatch.setattr(measuring, "_measure", made_up)
  measure_it(tmp_path / "whole")
  killed, rng = 0, np.random.default_rng(0)
  for _ in range(2):
    run = start(tmp_path / "killed")
    time.sleep(rng.uniform(0.1, 0.6))
    run.send_signal(signal.SIGKILL)
    killed += run.wait() == -signal.SIGKILL
    with open(tmp_path / "killed" / "results.jsonl", "ab") as f:
      f.write(b'{"task": "tiny", "targ')  # as a kill in the middle of a write leaves it
  assert start(tmp_path / "killed").wait(120) == 0
  assert killed
  both = [
    [dataclasses.replace(r, date=None) for r in records.read(tmp_path / name / "results.jsonl")]
    for name in ("whole", "killed")
  ]
  assert len(both[0]) == 2 * len(GAMMAS) == len({records.key(r) for r in both[0]})
  assert both[0] == both[1]
