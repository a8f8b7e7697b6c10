#!/usr/bin/env bash
# The embedded model's head from nothing on one GPU: the target writes conversations, a head is trained on them, evaluated
# and left in the output directory. Meant for under ten minutes and some 10 million tokens on an H200; not measured yet.
#
#   split -n 2 ~/.cache/eagle_jax/smollm2-135m.gguf runs/smollm2.    # two halves, for where 60 MB at a time can travel
#   bash train/embedded_on_gpu.sh --model "runs/smollm2.aa runs/smollm2.ab" --prompts prompts.jsonl \
#       --evaluate "mt_bench.jsonl humaneval.jsonl gsm8k.jsonl" --output "$OUT"
#
# --preset tiny goes through every part in a few minutes of two CPU cores. Without --model the model is the cache's. Needs no
# network and nothing installed but the packages: the library is taken from this checkout. Each part has a time of its
# own, and what it has by then is what the next one gets; so the whole ends in time on a slower machine, too, if need be
# without an evaluation.
set -euo pipefail

refuse() { echo "error: $1" >&2 && exit 2; }

preset=h200 model="" prompts="" evaluate="" output=""
while (($# > 0)); do
  case "$1" in
    --preset | --model | --prompts | --evaluate | --output) ;;
    *) refuse "unknown option $1; there are --preset, --model, --prompts, --evaluate and --output" ;;
  esac
  [[ -n "${2:-}" && "${2:-}" != --* ]] || refuse "$1 needs a value"
  declare "${1#--}=$2" && shift 2
done
case "$preset" in
  h200)
    writing=170 rows=1024 asked=24000 invented=40000 words=448
    steps=2400 batch=65536 training_time=210 evaluating=120 pick="--limit 20 --batch 20"
    ;;
  tiny)
    writing=600 rows=8 asked=12 invented=4 words=24
    steps=6 batch=1024 training_time=600 evaluating=600 pick="--limit 1 --batch 1 --max-new-tokens 8 --tree.nodes 8 --tree.depth 3 --tree.top-k 3"
    ;;
  *) refuse "--preset is $preset; it must be h200 or tiny" ;;
esac
[[ -n "$output" && -n "$prompts" && -n "$evaluate" ]] || refuse "--prompts, --evaluate and --output are needed"
# shellcheck disable=SC2086  # lists of files
for file in $model $prompts $evaluate; do
  [[ -r "$file" ]] || refuse "there is no file $file that can be read"
done

root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
mkdir -p "$output"
if [[ -n "$model" ]]; then
  export EAGLE_JAX_CACHE="${EAGLE_JAX_CACHE:-$output/cache}"
  mkdir -p "$EAGLE_JAX_CACHE"
  # shellcheck disable=SC2086  # a list of files
  cat $model >"$EAGLE_JAX_CACHE/smollm2-135m.gguf" # its SHA-256 is checked when it is loaded
fi

echo "== writing"
# Interrupted in an orderly way when its time is over, and killed where a shell has it ignore that.
# shellcheck disable=SC2086
timeout --signal=INT --kill-after=30 "$writing" "$python" "$root/train/synthesize.py" --output "$output/chats.jsonl" \
  --prompts "$prompts" --limit "$asked" --from-nothing "$invented" --exclude $evaluate \
  --rows "$rows" --max-new-tokens "$words" --temperatures 0 0.7 1 || (($? == 124 || $? == 130 || $? == 137))
[[ -z "$(tail -c 1 "$output/chats.jsonl")" ]] || sed -i '$d' "$output/chats.jsonl" # a line that a kill cut short
wc -l "$output/chats.jsonl"

echo "== training"
# Of a run that is killed its last whole save is what is evaluated.
timeout --signal=INT --kill-after=30 "$training_time" "$python" "$root/train/train_head.py" --data "$output/chats.jsonl" \
  --output "$output/head" --online --tokens-per-batch "$batch" --evaluate-every "$((steps / 3))" --save-every "$((steps / 6))" \
  --log-every "$((steps / 6))" --recipe.steps "$steps" --recipe.unroll 3 --recipe.optimizer muon \
  --recipe.learning-rate 1e-3 --recipe.decay cosine || (($? == 124 || $? == 130 || $? == 137))

echo "== evaluating"
# shellcheck disable=SC2086
timeout --kill-after=30 "$evaluating" "$python" "$root/train/evaluate.py" --head "$output/head" --prompts $evaluate --output "$output/evaluation.json" $pick ||
  { (($? == 124 || $? == 137)) && echo "no evaluation within $evaluating s"; }
