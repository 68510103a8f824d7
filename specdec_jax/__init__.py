"""Exact speculative decoding in JAX. Whatever is imported of it, `xla_flags` comes first."""

from specdec_jax.xla_flags import turn_ynn_off

turn_ynn_off()
