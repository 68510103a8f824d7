#!/usr/bin/env bash
# Train a pair from nothing: vocabulary, target, draft. Each step resumes if stopped.
#
#   scripts/train_pair.sh multi30k [flags for each step, such as --gin.DATA='"some/folder"']
#   scripts/train_pair.sh lm1b
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in
  multi30k) prefix=train ;;
  lm1b) prefix=train_gpt ;;
  *) echo "error: the pair is '${1:-}'; choose multi30k or lm1b." >&2 && exit 2 ;;
esac
shift
for step in vocabulary target draft; do
  python -m specdec_jax.run --gin_file="gin/runs/${prefix}_$step.gin" "$@"
done
