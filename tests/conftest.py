"""Tests run on the CPU whatever the machine has: their tolerances are those of its float32."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
