"""Predict memory, times and speedups of a pair on a device, or of drafts to choose from."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specdec_jax.checkpoints import files, huggingface, save
from specdec_jax.core.memory import host_memory
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.drafts.heads import AnyConfig, DraftHead, new_head
from specdec_jax.errors import InputError
from specdec_jax.load import BUNDLED, laid_out, load_pair
from specdec_jax.measure.alpha import Estimate, measure_alpha
from specdec_jax.measure.machine import threads
from specdec_jax.measure.plan import (
  CPU_TFLOPS,
  DEVICES,
  HEAD_KERNELS,
  PAYS,
  Counts,
  Device,
  PairShapes,
  Plan,
  least_alpha,
)
from specdec_jax.measure.roofline import memory_bandwidth
from specdec_jax.measure.speed import own_baseline
from specdec_jax.measure.tables import Table, terminal_text
from specdec_jax.models.families import Config
from specdec_jax.models.layout import Layout, Weights, named_dtype
from specdec_jax.models.sizes import PUBLISHED, named_config

FREE = "ngrams", "prompt_lookup", "suffix_decoding", "recycled_tokens"  # drafts that take no time


def plan(
  texts: Sequence[str],
  target: str = str(BUNDLED / "target"),
  draft: str | None = None,
  device: str = "h100",
  batch_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
  alphas: Sequence[float] = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95),
  dtype: str = "auto",
  weights: Weights = "float",
  source_tokens: int = 128,
  max_new_tokens: int = 128,
  gb_per_s: float | None = None,
  tflops: float | None = None,
  measure: bool = False,
  temperature: float = 0.0,
) -> None:
  """Print predicted costs and speedups of a pair, or of drafts at the first batch size.

  Args:
    texts: texts on which `measure` measures alpha.
    target: a published name, such as google/flan-t5-xxl, or a folder with a config.json.
    draft: the same; or fields that differ from those of the target or, with `kind`, of a head as
      wide as the target, as in num_decoder_layers=2,emb_dim=512; or a name, such as ngrams. By
      default, drafts are ranked by the alpha that they need.
    device: h100, a100, l4, v4, v5e, v5p, v6e, or cpu for this machine.
    batch_sizes: numbers of rows that are decoded together.
    alphas: acceptance rates.
    dtype: bfloat16 or float32; auto is float32 for a CPU and bfloat16 elsewhere.
    weights: float, int8 or int4.
    source_tokens: tokens of a source; a Whisper has its own number.
    max_new_tokens: new tokens of each row.
    gb_per_s: bandwidth; by default that of the device, and on a CPU a measured one.
    tflops: peak of arithmetic; by default that of the device.
    measure: whether to load the pair, and measure alpha on the texts without timing.
    temperature: sampling temperature of `measure`.

  Raises:
    InputError: there is no such model or device, or the draft has another vocabulary.
  """
  machine = _device(device, gb_per_s, tflops)
  if dtype == "auto":
    dtype = "float32" if device == "cpu" else "bfloat16"
  layout = Layout(dtype=named_dtype(dtype), weights=weights, fused=True)
  config = read(target)
  source = getattr(config, "source_positions", None) or source_tokens

  def plans(name: str, batches: Sequence[int], layout: Layout = layout) -> list[Plan]:
    model = laid_out(config, layout, None)
    counts = Counts(PairShapes(model, as_draft(name, model), source, max_new_tokens))
    return [Plan(counts, machine, batch) for batch in batches]

  notes = [
    f"{device}: {machine.memory_gb:.0f} GB, {machine.gb_per_s:.0f} GB/s, {machine.tflops:g} TFLOPS "
    f"({machine.note}). {dtype}, weights {weights}, {source} source and {max_new_tokens} new "
    "tokens."
  ]
  if draft is None:
    names = candidates(target, config)
    found = {name: plans(name, batch_sizes[:1])[0] for name in names}
    found = dict(sorted(found.items(), key=lambda each: least_alpha(each[1].c, each[1].v)))
    title = f"Drafts for {target} on {device}, batch {batch_sizes[0]}"
    if not PUBLISHED.keys() & names:
      notes.append("No smaller published model is known that has the vocabulary of the target.")
  else:
    found = {f"{each.batch}": each for each in plans(draft, batch_sizes)}
    title = f"{target} with {draft} on {device}"
  if not (first := next(iter(found.values()))).fits:
    others: Any = {x: replace(layout, weights=x) for x in ("int8", "int4")}
    fits = [x for x in others if plans(draft or FREE[0], [first.batch], others[x])[0].fits]
    notes.append(f"Does not fit in {weights}; weights that fit: {', '.join(fits) or 'none'}.")
  if measure and draft:
    measured = measured_alpha(target, draft, texts, max_new_tokens, dtype, weights, temperature)
    alpha, low, high = (round(x, 3) for x in measured)
    notes.append(f"alpha, measured on {len(texts)} texts: {alpha} [{low}, {high}].")
    alphas = *alphas, alpha
  heading = "draft" if draft is None else "batch"
  print(terminal_text(plan_table(title, heading, found, alphas, notes)))


def measured_alpha(
  target: str,
  draft: str,
  texts: Sequence[str],
  max_new_tokens: int,
  dtype: str = "float32",
  weights: Weights = "float",
  temperature: float = 0.0,
) -> Estimate:
  """Return alpha over the target's outputs for texts, each from one pass; nothing is timed."""
  pair, sampling = load_pair(target, draft, dtype=dtype, weights=weights), Sampling(temperature)
  prompts, decode = [pair.prompt([text]) for text in texts], own_baseline(pair).decode
  options: Any = dict(max_new_tokens=max_new_tokens, sampling=sampling)
  outputs = [decode(x, row_keys(0, i, 1), **options) for i, x in enumerate(prompts)]
  found: Any = measure_alpha(pair, prompts, outputs, sampling)
  return Estimate(found.alpha, found.alpha_low, found.alpha_high)


def plan_table(
  title: str, heading: str, plans: Mapping[str, Plan], alphas: Sequence[float], notes: Sequence[str]
) -> Table:
  """Return a table with one row per plan, named by its key."""
  rows = []
  for name, each in plans.items():
    lowest, step_ms = least_alpha(each.c, each.v), 1e3 * each.target_s()
    best = (each.best(alpha) for alpha in alphas)
    rows.append(
      (
        name,
        f"{each.memory_gb:.1f}" if each.fits else f"{each.memory_gb:.1f} (does not fit)",
        f"{step_ms:.2f}",
        f"{step_ms * each.c[3]:.2f}",
        f"{each.c[3]:.3f}",
        f"{each.v[3]:.2f}",
        f"{lowest:.2f}" if lowest <= 1 else "never",
        *(f"{gain:.2f} ({shape})" for gain, shape in best),
      )
    )
  columns = heading, "GB", "step ms", "draft ms", "c", "v(4)", "pays from alpha"
  legend = (
    "GB: weights and caches, which take at most 0.9 of the memory. draft ms: per token, gamma 4. "
    f"pays: {PAYS} times as fast. Speedups by alpha, with the best gamma or nodes/depth of a tree.",
  )
  columns += tuple(f"alpha {alpha:g}" for alpha in alphas)
  return Table(title, columns, tuple(rows), (*notes, *legend))


def _device(name: str, gb_per_s: float | None, tflops: float | None) -> Device:
  if name == "cpu":
    rates = gb_per_s or memory_bandwidth() / 1e9, tflops or CPU_TFLOPS * threads()
    return Device(host_memory() / 1e9, *rates, note="validated in float32 with AVX-512")
  if name not in DEVICES:
    raise InputError(f"There is no device {name!r}; there are {', '.join(DEVICES)} and cpu.")
  known = DEVICES[name]
  return known._replace(gb_per_s=gb_per_s or known.gb_per_s, tflops=tflops or known.tflops)


def read(name: str) -> Any:
  """Return the configuration of a published model, or of the model or head in a folder."""
  if name in PUBLISHED:
    return named_config(*PUBLISHED[name])
  if files.is_file(name, save.PARAMS):
    return save.open_folder(name).config
  if files.is_file(name, huggingface.CONFIG):
    return huggingface.read_config(name)
  known = ", ".join(PUBLISHED)
  raise InputError(f"{name} is no folder with a config.json; known names are {known}.")


def as_draft(name: str, target: Config) -> AnyConfig | None:
  """Return the configuration of a draft for a target; None for one that takes no time."""
  if name in FREE:
    return None
  config: Any
  if "=" in name:
    fields = dict(word.partition("=")[::2] for word in name.split(","))
    own: dict[str, Any] = {field: int(x) if x.isdigit() else x for field, x in fields.items()}
    wide = dict(emb_dim=target.emb_dim, mlp_dim=target.mlp_dim)
    try:
      config = new_head(target, **wide | own) if "kind" in own else replace(target, **own)
    except TypeError as error:
      raise InputError(f"--draft {name}: {error}.") from error
  else:
    config = read(name)
  if config.vocab_size != target.vocab_size:
    raise InputError(
      f"{name} has a vocabulary of {config.vocab_size} tokens, and the target one of "
      f"{target.vocab_size}."
    )
  if isinstance(config, DraftHead):
    return config.with_layout(dtype=target.layout.dtype)
  return laid_out(config, target.layout, None)


def candidates(name: str, target: Config) -> list[str]:
  """Return drafts for a target: smaller published models, heads, two shapes, and n-grams."""
  family = PUBLISHED.get(name, ("",))[0]
  family = {"ul2": "1.1"}.get(family, family)  # they share a vocabulary
  smaller: dict[str, str] = {}
  for other in sorted(PUBLISHED, key=lambda x: -len(os.path.commonprefix([x, name]))):
    size, config = PUBLISHED[other][1], named_config(*PUBLISHED[other])
    if PUBLISHED[other][0] == family and _weight(config) < _weight(target):
      smaller.setdefault(size, other)  # one of equal sizes
  heads = [f"kind={kind},num_decoder_layers=1" for kind in HEAD_KERNELS]
  shape = "num_decoder_layers=2"  # the last head, conditioned, needs an encoder
  if target.has_encoder:
    heads.append(f"{heads[-1]},table_tokens=8000")  # logits of frequent tokens only
    shape += ",num_encoder_layers=2"
  else:
    heads.pop()
  half = f"{shape},emb_dim={target.emb_dim // 2},mlp_dim={target.mlp_dim // 2}"
  return [*smaller.values(), *heads, shape, half, FREE[0]]


def _weight(config: Any) -> int:
  return config.num_decoder_layers * config.emb_dim * config.mlp_dim
