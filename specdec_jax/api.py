"""What `import specdec_jax` offers: pairs, whose compiled programs are kept between runs."""

import functools
from collections.abc import Callable
from typing import ParamSpec

import jax

from specdec_jax import pairs
from specdec_jax.compile_cache import keep_compiled, kept_in

P = ParamSpec("P")


def _keeping(load: Callable[P, pairs.Pair]) -> Callable[P, pairs.Pair]:
  """The same; programs go where the command line keeps them, unless jax was told where."""

  @functools.wraps(load)
  def loading(*args: P.args, **kwargs: P.kwargs) -> pairs.Pair:
    if not getattr(jax.config, "jax_compilation_cache_dir", None):
      keep_compiled(kept_in())
    return load(*args, **kwargs)

  return loading


load_pair = _keeping(pairs.load_pair)
random_pair = _keeping(pairs.random_pair)
