"""Count the kernels of a program that is compiled for a GPU, and predict its time from their bytes.

The optimized HLO text lists the kernels; no program is run. `specdec_jax.measure.kernel_times` has
the model of their times.
"""

import collections
import math
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from experiments.tpu_v4.compile import Programs
from experiments.tpu_v4.examine import LOOPS
from experiments.tpu_v4.hlo import Computations, Instruction, parse, trip_count
from specdec_jax.measure.kernel_times import GPU_TIMES, KernelWork
from specdec_jax.measure.plan import DEVICES
from specdec_jax.measure.tables import Table

# Instructions that name a value, or that other instructions have counted.
_FREE = set(
  "parameter constant tuple get-tuple-element bitcast after-all opt-barrier add-dependency domain "
  "partition-id replica-id copy-done async-done async-update fusion-done".split()
)
_BITS = {"pred": 8, "token": 0, "c64": 64}  # of dtypes whose name does not end in their bits
_VIEWS = {"bitcast", "reshape", "convert", "copy", "transpose"}
PARTS = "draft", "target", "rest"  # scopes of `experiments.tpu_v4.compile`
KINDS = "matmul", "attention", "norm", "write", "other"


class Kernel(NamedTuple):
  """Kernels of one kind.

  Attributes:
    part: one of PARTS.
    kind: one of KINDS. A product of one row and a matrix that is compiled to several kernels has
      several kernels of the kind 'matmul'.
    num_bytes: bytes that the kernel has to read and write. Of an operand that is only sliced or
      indexed, the part that is taken counts; of an array that is updated in place, the update.
    queries: queries of all heads, if it computes a whole attention by reductions; otherwise 0.
    transposed: whether it is a matmul with a large matrix that is stored transposed.
  """

  part: str
  kind: str
  num_bytes: int
  queries: int = 0
  transposed: bool = False


Kernels = Mapping[Kernel, float]  # -> how often it runs


def work_of(kernels: Kernels) -> KernelWork:
  """Return what kernels do."""

  def total(of: Callable[[Kernel], float]) -> float:
    return math.fsum(n * of(kernel) for kernel, n in kernels.items())

  return KernelWork(
    total(lambda kernel: kernel.num_bytes),
    total(lambda kernel: kernel.num_bytes * kernel.transposed),
    total(lambda kernel: 1),
    total(lambda kernel: kernel.queries),
  )


def predicted_us(kernels: Kernels) -> float:
  """Return the predicted microseconds of kernels on an H100."""
  return GPU_TIMES.us(work_of(kernels), DEVICES["h100"].gb_per_s)


def report(programs: Programs) -> dict[str, Any]:
  """Compile `programs`, except the loops, and return their kernels and predicted times.

  Returns:
    'programs': for each program, its kernels by part and kind, their bytes, the predicted 'us' of
      each part, the bytes of arguments and temporary memory, and the 'seconds' of compilation.
  """
  reports = {}
  for name, lower in programs.items():
    if name in LOOPS:
      continue
    started = time.perf_counter()
    compiled = lower().compile()
    memory: Any = compiled.memory_analysis()
    found = kernels(compiled.as_text() or "")
    reports[name] = {
      "arguments": memory.argument_size_in_bytes,
      "temporaries": memory.temp_size_in_bytes,
      "bytes": num_bytes(found),
      "kernels": {kind: sum(of_kind.values()) for kind, of_kind in by_kind(found).items()},
      "us": {part: round(predicted_us(of_part), 1) for part, of_part in by_part(found).items()},
      "seconds": round(time.perf_counter() - started, 1),
    }
  return {"programs": reports}


def report_table(report: dict[str, Any], title: str) -> Table:
  """Return a report as a table."""
  rows = []
  for name, program in report["programs"].items():
    memory = (f"{program[x] / 1e9:.3f}" for x in ("arguments", "temporaries", "bytes"))
    counts, us = program["kernels"], program["us"]
    numbers = sum(counts.values()), *(counts[kind] for kind in KINDS)
    times = f"{sum(us.values()) / 1e3:.3f}", *(f"{us[part]:.0f}" for part in PARTS)
    rows.append((name, *memory, *map(str, numbers), *times, f"{program['seconds']:.0f}"))
  columns = "program", "arguments GB", "temporaries GB", "accessed GB", "kernels", *KINDS
  notes = (
    "No program was run. Kernels of one run, those of each draft step included, and the bytes that "
    "they read and write.",
    "ms: by `specdec_jax.measure.kernel_times`, without the time of queries of attention.",
  )
  times = ("ms", *(f"{part} us" for part in PARTS), "compiled s")
  return Table(title, (*columns, *times), tuple(rows), notes)


def kernels(hlo: str) -> collections.Counter[Kernel]:
  """Return the kernels of one run of a program, from its optimized HLO text.

  A loop runs as often as it says, or once if it does not; of a conditional, the branch with the
  most kernels runs. Each instruction of the program that is not merely a name is a kernel.
  """
  computations, entry = parse(re.sub(r"/\*.*?\*/", "", hlo))
  return _of(computations, entry, "rest")


def num_bytes(found: Kernels) -> int:
  """Return the bytes that kernels read and write."""
  return round(sum(n * kernel.num_bytes for kernel, n in found.items()))


def by_part(found: Kernels) -> dict[str, Kernels]:
  """Return kernels by part."""
  return {part: {k: n for k, n in found.items() if k.part == part} for part in PARTS}


def by_kind(found: Kernels) -> dict[str, Kernels]:
  """Return kernels by kind."""
  return {kind: {k: n for k, n in found.items() if k.kind == kind} for kind in KINDS}


def _of(computations: Computations, name: str, part: str) -> collections.Counter[Kernel]:
  found: collections.Counter[Kernel] = collections.Counter()
  for instruction in computations[name].values():
    part = _part(computations, instruction) or part
    if instruction.op in _FREE:
      continue
    if instruction.op in ("call", "async-start"):
      for callee in instruction.calls("to_apply|calls|called_computations"):
        found += _of(computations, callee, part)
    elif instruction.op == "while":
      times = trip_count(computations, name, instruction)
      for callee in instruction.calls("body|condition"):
        of_callee = _of(computations, callee, part)
        found += collections.Counter({kernel: times * n for kernel, n in of_callee.items()})
    elif instruction.op == "conditional":
      branches = instruction.calls("true_computation|false_computation|branch_computations")
      found += max((_of(computations, each, part) for each in branches), key=lambda x: x.total())
    else:
      kind = _kind(computations, instruction)
      found[Kernel(part, kind, _kernel_bytes(computations, name, instruction))] += 1
  return found


def _names(computations: Computations, instruction: Instruction) -> list[str]:
  """Return the JAX names of an instruction, its own first, then those of what is fused in it."""
  own = re.findall('op_name="(.*?)"', instruction.line)
  callees = instruction.calls("calls")
  return own + [
    name
    for callee in callees
    for inner in computations[callee].values()
    for name in _names(computations, inner)
  ]


def _part(computations: Computations, instruction: Instruction) -> str | None:
  """Return the scope of an instruction. One without a name counts with the one before: None."""
  names = [name for name in _names(computations, instruction) if name.startswith("jit(")]
  if not names:
    return None
  scope = re.search("/(draft|target)/", names[0])
  return scope[1] if scope else "rest"


def _ops(computations: Computations, instruction: Instruction) -> set[str]:
  ops = {instruction.op}
  for callee in instruction.calls("calls"):
    ops = ops.union(*(_ops(computations, inner) for inner in computations[callee].values()))
  return ops


def _kind(computations: Computations, instruction: Instruction) -> str:
  names, ops = _names(computations, instruction), _ops(computations, instruction)
  name = names[0] if names else ""
  if "dynamic-update-slice" in ops or "scatter" in ops:
    return "write"
  if "_matmul/" in name or "custom-call" in ops or ("dot" in ops and "attention" not in name):
    return "matmul"
  if "attention/" in name:
    return "attention"
  return "norm" if "norm/" in name else "other"


def _kernel_bytes(computations: Computations, name: str, instruction: Instruction) -> int:
  if instruction.op != "fusion":
    shapes = [computations[name][x].shape for x in instruction.operands if x in computations[name]]
    return array_bytes(instruction.shape) + sum(map(array_bytes, shapes))
  (callee,) = instruction.calls("calls")
  body = computations[callee]
  users = collections.defaultdict(list)
  for each, inner in body.items():
    for operand in inner.operands:
      users[operand].append(each)

  def read(value: str) -> int:
    """Return the bytes of a value that its users read."""
    total, full = 0, array_bytes(body[value].shape)
    for user in users[value]:
      inner = body[user]
      if inner.op in _VIEWS and users[user]:
        share = read(user) * full / max(1, array_bytes(inner.shape))
      elif inner.op in ("slice", "dynamic-slice", "gather") and inner.operands[0] == value:
        share = array_bytes(inner.shape)
      else:
        share = 0 if inner.op == "dynamic-update-slice" and inner.operands[0] == value else full
      total += share
    return round(min(full, total))

  def written(value: str) -> int:
    inner = body[value]
    if inner.op == "tuple":
      return sum(map(written, inner.operands))
    while inner.op in _VIEWS and body[inner.operands[0]].op in {"dynamic-update-slice", *_VIEWS}:
      inner = body[inner.operands[0]]
    is_update = inner.op == "dynamic-update-slice"
    return array_bytes(body[inner.operands[1]].shape if is_update else inner.shape)

  root = next(each for each, inner in body.items() if inner.line.lstrip().startswith("ROOT"))
  parameters = [each for each, inner in body.items() if inner.op == "parameter"]
  return sum(map(read, parameters)) + written(root)


def array_bytes(shape: str) -> int:
  """Return the bytes of an array, or of all arrays of a tuple."""
  total = 0
  for dtype, sides in re.findall(r"([a-z]\w*)\[([\d,]*)\]", shape):
    bits = _BITS.get(dtype) or int((re.findall(r"^[a-z]+(\d+)", dtype) or [0])[0])
    for side in filter(None, sides.split(",")):
      bits *= int(side)
    total += -(-bits // 8)
  return total
