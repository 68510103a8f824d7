"""Test that signals end a command, and that a killed and restarted measurement loses no records.

Subprocesses run `measure` and are killed with SIGKILL while they write. Only the measurement of a
setting is replaced, by a slow function with fixed results, so that runs can be compared.
"""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tiny_pair

from specdec_jax.core.loading import DecodeSettings
from specdec_jax.core.sampling import Sampling
from specdec_jax.measure import measure as measuring
from specdec_jax.measure import records

HERE = pathlib.Path(__file__).resolve().parent
GAMMAS = range(1, 13)

RUN = f"""
import sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {str(HERE)!r})
import test_interrupted as here
here.measuring._measure = here.fake_measure
here.tiny_pair.folder = lambda: here.pathlib.Path(sys.argv[2])  # records contain its path
here.measure_it(sys.argv[1], print)
"""


def fake_measure(pair, prompts, settings, timing, references, wanted, report):
  for setting in wanted:
    time.sleep(0.05)
    yield dataclasses.replace(setting, alpha=setting.gamma / 20 + setting.temperature / 4)


def measure_it(folder, announce=lambda *words, flush: None):
  pair = tiny_pair.pair()
  with records.open_results(str(folder)) as path:
    announce("ready", flush=True)
    settings = [DecodeSettings(Sampling(0.0)), DecodeSettings(Sampling(1.0))]
    measuring.measure(pair, ["A man"], path, settings, [*GAMMAS])


def start(folder) -> subprocess.Popen:
  run = subprocess.Popen(
    [sys.executable, "-c", RUN, str(folder), str(tiny_pair.folder())],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )
  assert run.stdout.readline() == b"ready\n", run.stderr.read().decode()
  return run


def test_killed_and_restarted_run_writes_the_same_records(tmp_path, monkeypatch):
  monkeypatch.setattr(measuring, "_measure", fake_measure)
  measure_it(tmp_path / "whole")
  killed, rng = 0, np.random.default_rng(0)
  for _ in range(2):
    run = start(tmp_path / "killed")
    time.sleep(rng.uniform(0.1, 0.6))
    run.send_signal(signal.SIGKILL)
    killed += run.wait() == -signal.SIGKILL
    with open(tmp_path / "killed" / "results.jsonl", "ab") as f:
      f.write(b'{"task": "tiny", "targ')  # the state after a kill in the middle of a write
  with pytest.warns(UserWarning, match="an incomplete record at its end, left by a killed"):
    measure_it(tmp_path / "killed")
  assert killed
  both = [
    [dataclasses.replace(r, date=None) for r in records.read(tmp_path / name / "results.jsonl")]
    for name in ("whole", "killed")
  ]
  assert len(both[0]) == 2 * len(GAMMAS) == len({records.key(r) for r in both[0]})
  assert both[0] == both[1]


# Functions that a signal has to end. Python ignores an exception in a callback of the collector.
LOOPS = """
import ctypes, gc, sys, time

def collect_with_a_slow_hook():
  hook = sys.unraisablehook

  def slow(unraisable):
    hook(unraisable)
    time.sleep(0.1)  # an exception that is raised again meanwhile is ignored, too

  sys.unraisablehook = slow
  collect()

def collect():
  gc.callbacks.append(lambda *_: [None] * 10)  # like jax's callback, it runs Python code
  print("ready", flush=True)
  while True:
    gc.collect()

def swallow():
  try:
    print("ready", flush=True)
    time.sleep(60)
  except BaseException:
    print("swallowed", flush=True)
    time.sleep(60)

def block():
  mutex = ctypes.create_string_buffer(128)
  lock = ctypes.CDLL(None).pthread_mutex_lock  # no signal interrupts it, and it releases the GIL
  print("ready", flush=True)
  lock(mutex), lock(mutex)
"""


# A shell ignores SIGINT in a background job, and its processes inherit that.
RESTORE_SIGNALS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def command(folder, *args) -> subprocess.Popen:
  environment = os.environ | {"PYTHONPATH": f"{HERE.parent}{os.pathsep}{folder}"}
  command = [sys.executable, "-c", RESTORE_SIGNALS, "-m", "specdec_jax.run"]
  pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  arguments = ["--jax_compilation_cache_dir=", *args]
  return subprocess.Popen([*command, *arguments], cwd=folder, env=environment, **pipes)


def loop(folder, name: str) -> subprocess.Popen:
  (folder / "loops.py").write_text(LOOPS)
  (folder / "loop.gin").write_text(
    "from __gin__ import dynamic_registration\nfrom specdec_jax import run\nimport loops\n"
    f"run.run.experiment = @loops.{name}\n"
  )
  run = command(folder, "--gin_file=loop.gin")
  assert run.stdout.readline() == b"ready\n", run.stderr.read().decode()
  return run


@pytest.mark.parametrize(
  "number, message", [(signal.SIGTERM, b"terminated\n"), (signal.SIGINT, b"interrupted\n")]
)
@pytest.mark.parametrize("name", ["collect", "collect_with_a_slow_hook"])
def test_signal_during_garbage_collection_ends_the_command(tmp_path, name, number, message):
  run = loop(tmp_path, name)
  run.send_signal(number)
  try:
    out, err = run.communicate(timeout=60)
  finally:
    run.kill()
  assert run.returncode == 128 + number and out == b""
  # Python reports an exception that is raised while the hook runs.
  assert err == message if name == "collect" else err.endswith(message)


def test_second_signal_ends_a_command_that_swallows_the_first(tmp_path):
  run = loop(tmp_path, "swallow")
  run.terminate()
  assert run.stdout.readline() == b"swallowed\n"
  run.terminate()
  assert run.wait(60) == -signal.SIGTERM


def test_second_signal_ends_a_native_call(tmp_path):
  run = loop(tmp_path, "block")
  for _ in range(600):
    run.terminate()
    try:
      # -SIGTERM if the first signal arrived before the call began.
      assert run.wait(0.1) in (128 + signal.SIGTERM, -signal.SIGTERM)
      break
    except subprocess.TimeoutExpired:
      pass
  else:
    run.kill()
    pytest.fail("the process did not end")


def test_signal_ends_a_translation_that_waits_for_input(tmp_path):
  run = command(tmp_path, "translate", "--gin.OUTPUT='out.txt'", "--gin.GAMMA=0")
  while not [*tmp_path.glob(".out.txt.*.part")] and run.poll() is None:
    time.sleep(0.05)
  run.terminate()
  assert run.communicate(timeout=60)[1] == b"terminated\n"
  assert run.returncode == 128 + signal.SIGTERM and not [*tmp_path.iterdir()]
