"""Compare two checkouts bit by bit: the same cases run in both at the same time, on one machine.

  python scripts/compare_checkouts.py BEFORE AFTER
  python scripts/compare_checkouts.py BEFORE AFTER --only tables,tokenizers
  python scripts/compare_checkouts.py BEFORE AFTER --reuse-before runs/compare/before.json

Groups of cases:
  tables        cells of every table in a page, written anew from its records
  tokenizers    token ids of 1,000 texts
  checkpoints   configuration and parameters that are read from each format
  quickstart    outputs of the bundled pair
  commands      what short runs write, without times
  contract      tokens, rounds and log-probabilities of the cases of tests/test_contract.py

For each group, the numbers of cases that are identical and different are printed, then the
differences, and the cases that only one checkout has. The exit status is 1 if a case differs or
fails, and 2 if the cases of a checkout cannot be run.

Modules in `checkout_layers` have the names that a checkout uses, and `cases.py` has the cases. The
first checkout writes the files that both read. The bits of results depend on the processor, so
earlier values are valid on the machine that computed them, with the files in the same folder.
"""

import argparse
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent / "checkout_layers"
GROUPS = "tables", "tokenizers", "checkpoints", "quickstart", "commands", "contract"
# As in tests/conftest.py, programs are compiled without LLVM's optimizations, in less time.
XLA_FLAGS = (
  "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
  "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 "
  "--xla_cpu_enable_concurrency_optimized_scheduler=false"
)
MOST_SHOWN = 4  # number of differences that are printed for each case


def start(checkout, layer, folder, side, groups=()):
  """Start the cases of a checkout in a process that writes to a log in `folder`."""
  environment = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(checkout), str(checkout / "tests")]),
    "JAX_PLATFORMS": "cpu",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),  # of both, so each compiles half
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    "XLA_FLAGS": os.environ.get("XLA_FLAGS", XLA_FLAGS),
  }
  command = [sys.executable, str(HERE / "cases.py"), layer, str(folder), side, *groups]
  with open(folder / f"{side}.log", "w") as log:
    return subprocess.Popen(command, cwd=checkout, env=environment, stdout=log, stderr=log)


def wait(folder, **processes):
  """Wait for processes by the name of their log, and exit with status 2 if one of them failed."""
  for side, process in processes.items():
    if status := process.wait():
      for other in processes.values():
        other.terminate()
      log = folder / f"{side}.log"
      print(*log.read_text().splitlines()[-5:], sep="\n", file=sys.stderr)
      print(f"{side} ended with status {status}; see {log}.", file=sys.stderr)
      raise SystemExit(2)


def differences(before, after):
  """Yield a line for each part of a case that differs."""
  for part in before.keys() & after.keys():
    if before[part] != after[part]:
      yield f"{part}: {before[part]} -> {after[part]}"
  for side, one, other in (("before", before, after), ("after", after, before)):
    if only := one.keys() - other.keys():
      yield f"{len(only)} parts only {side}: {', '.join(sorted(only)[:MOST_SHOWN])}"


def compare(before, after):
  """Print how a group of cases differs, and return the number of cases that differ or fail."""
  common = [case for case in before if case in after]
  found = {case: sorted(differences(before[case], after[case])) for case in common}
  for case in common:
    if "error" in before[case] and before[case] == after[case]:
      found[case] = [f"fails in both: {before[case]['error']}"]
  found = {case: lines for case, lines in found.items() if lines}
  only = {"before": [*before.keys() - after.keys()], "after": [*after.keys() - before.keys()]}
  print(
    f"{len(common)} cases in both, {len(common) - len(found)} identical, {len(found)} different; "
    + ", ".join(f"{len(cases)} only {side}" for side, cases in only.items())
  )
  for case, lines in found.items():
    print(f"  {case}: {len(lines)} of {len(before[case])} parts")
    for line in [*lines[:MOST_SHOWN], *["..."] * (len(lines) > MOST_SHOWN)]:
      print(f"    {line}")
  for side, cases in only.items():
    for case in sorted(cases):
      print(f"  only {side}: {case}")
  return len(found)


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("before", type=pathlib.Path, help="folder of the first checkout")
  parser.add_argument("after", type=pathlib.Path, help="folder of the second checkout")
  parser.add_argument("--only", default=",".join(GROUPS), help="groups to run, with commas")
  parser.add_argument("--layers", default="before,after", help="modules of checkout_layers")
  parser.add_argument("--folder", default="runs/compare", type=pathlib.Path, help="for all files")
  parser.add_argument("--reuse-before", type=pathlib.Path, help="before.json of an earlier run")
  args = parser.parse_args()
  groups, layers = args.only.split(","), args.layers.split(",")
  if unknown := {*groups} - {*GROUPS}:
    parser.error(f"there is no group {', '.join(unknown)}; there are {', '.join(GROUPS)}")
  since, before, after = time.monotonic(), args.before.resolve(), args.after.resolve()
  folder = (args.reuse_before.parent if args.reuse_before else args.folder).resolve()
  folder.mkdir(parents=True, exist_ok=True)
  if not args.reuse_before:
    shutil.rmtree(folder / "files", ignore_errors=True)
    wait(folder, write=start(before, layers[0], folder, "write"))
  running = {"after": start(after, layers[1], folder, "after", groups)}
  if not args.reuse_before:
    running["before"] = start(before, layers[0], folder, "before", groups)
  wait(folder, **running)
  paths = args.reuse_before or folder / "before.json", folder / "after.json"
  values = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
  count = 0
  for group in groups:
    print(f"{group}: ", end="")
    count += compare(*(side.get(group, {}) for side in values))
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  seconds = f"{time.monotonic() - since:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of CPU"
  print(f"{count} cases differ; {seconds}.")
  sys.exit(count > 0)


if __name__ == "__main__":
  main()
