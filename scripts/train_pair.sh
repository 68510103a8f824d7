#!/usr/bin/env bash
# Train the Multi30k pair from nothing: vocabulary, target, draft. Each step resumes if stopped.
#
#   scripts/train_pair.sh [flags for each step, such as --gin.DATA='"some/folder"']
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for step in train_vocabulary train_target train_draft; do
  python -m specdec_jax.run --gin_file="gin/runs/$step.gin" "$@"
done
