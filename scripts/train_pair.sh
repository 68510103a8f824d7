#!/usr/bin/env bash
# Train a pair from nothing: vocabulary, target, draft. Each step resumes if stopped.
#
#   scripts/train_pair.sh multi30k [flags for each step, such as --gin.DATA='"some/folder"']
#   scripts/train_pair.sh lm1b
#   scripts/train_pair.sh editing   # after scripts/prepare_editing.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
files=()
case "${1:-}" in
  multi30k) prefix=train ;;
  lm1b) prefix=train_gpt ;;
  editing) prefix=train && files=(--gin_file=gin/tasks/editing.gin) ;;
  *) echo "error: the pair is '${1:-}'; choose multi30k, lm1b or editing." >&2 && exit 2 ;;
esac
shift
for step in vocabulary target draft; do
  work_dir=()
  if [[ ${#files[@]} -gt 0 && $step != vocabulary ]]; then
    work_dir=("--gin.WORK_DIR='runs/editing/train_$step'")
  fi
  python -m specdec_jax.run --gin_file="gin/runs/${prefix}_$step.gin" "${files[@]}" "${work_dir[@]}" "$@"
done
