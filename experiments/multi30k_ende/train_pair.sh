#!/usr/bin/env bash
# Train a pair from nothing: vocabulary, target, draft. Each step resumes if stopped.
#
#   train_pair.sh multi30k [flags for each step, such as --gin.DATA='"some/folder"']
#   train_pair.sh lm1b
#   train_pair.sh editing     # after python -m experiments.editing.prepare
#   train_pair.sh summaries   # a target only; after python -m experiments.summaries.prepare
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
task=${1:-} files=() steps=(vocabulary target draft)
case $task in
  multi30k) prefix=gin/runs/train ;;
  lm1b) prefix=experiments/gpt_like/train_gpt ;;
  editing) prefix=gin/runs/train && files=(--gin_file=experiments/editing/train_editing.gin) ;;
  summaries)
    prefix=gin/runs/train && files=(--gin_file=experiments/summaries/train_summaries.gin)
    steps=(target)
    ;;
  *) echo "error: the pair is '$task'; choose multi30k, lm1b, editing or summaries." >&2 && exit 2 ;;
esac
shift
for step in "${steps[@]}"; do
  work_dir=()
  if [[ ${#files[@]} -gt 0 && $step != vocabulary ]]; then
    work_dir=("--gin.WORK_DIR='runs/$task/train_$step'")
  fi
  python -m specdec_jax.run --gin_file="${prefix}_$step.gin" "${files[@]}" "${work_dir[@]}" "$@"
done
