"""Installs specdec_jax with a copy of `gin/` in it; `configs/` is read from the checkout only."""

import pathlib
import re

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

# Read, not imported: the package's dependencies are not there yet.
_version_file = pathlib.Path(__file__).parent / "specdec_jax" / "version.py"
_version = re.search(r'__version__ = "(.+?)"', _version_file.read_text()).group(1)


class BuildWithGinFiles(build_py):
  """What is installed finds them without a checkout. A package `gin` would shadow the library."""

  def run(self):
    super().run()
    if not self.editable_mode:
      self.copy_tree("gin", f"{self.build_lib}/specdec_jax/gin_files/gin")


setup(
  name="specdec_jax",
  version=_version,
  description="Exact speculative decoding (Leviathan et al., 2023) for T5 in JAX and Flax",
  author="The specdec_jax Authors",
  license="Apache-2.0",
  python_requires=">=3.11",
  cmdclass={"build_py": BuildWithGinFiles},
  entry_points={"console_scripts": ["specdec = specdec_jax.run:command"]},
  packages=find_packages(include=["specdec_jax", "specdec_jax.*"]),
  package_data={
    "specdec_jax": [
      *(f"assets/**/*.{kind}" for kind in ("json", "msgpack", "model", "txt", "md")),
      "kernels/*.cc",
      "kernels/*.h",
      "py.typed",
      "reporting/*.html",
    ]
  },
  install_requires=[
    "jax>=0.10",
    "flax>=0.12",
    "optax>=0.2.8",
    "numpy>=2.0",
    "scipy>=1.13",
    "absl-py>=2.1",
    "gin-config>=0.5",
    "seqio>=0.0.20",
    "tensorflow-datasets>=4.9.9",
    "sentencepiece>=0.2.0",
    "tokenizers>=0.20",
    "orbax-checkpoint>=0.12",
    "tensorstore>=0.1.80",
    "safetensors>=0.5",
    "msgpack>=1.1",
    "rich>=13.7",
    "sacrebleu>=2.4",
  ],
  extras_require={
    "test": [
      "pytest>=8.0",
      "hypothesis>=6.100",
      "matplotlib>=3.8",
      "rouge-score>=0.1.2",
      "pytest-xdist>=3.6",
      "ruff>=0.15",
      "mypy>=1.15",
    ],
    "tpu": ["jax[tpu]>=0.10"],
    "plots": ["matplotlib>=3.8"],
    "rouge": ["rouge-score>=0.1.2"],
    "peers": ["torch>=2.3", "transformers>=4.45", "ctranslate2>=4.8"],
  },
)
