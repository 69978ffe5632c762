#!/usr/bin/env bash
# Parity and speed of one engine over several ranks, on a machine with several GPUs.
#
#   benchmarks/multi_gpu.sh [--model MODEL] [--device cuda|cpu] [--sizes "2 4 8"] [--out DIR] [-- flags of `diptych serve`]
#
# For every size that the machine has GPUs for: greedy output of tp, pp and tp x pp must equal one rank's (float32), then
# `diptych bench offline` with a tp and a pp engine of that size. Parity tests of the tree come first. With --device cpu it
# is a dry run with CPU ranks and the demo model: it shows that the script works, and its figures mean little.
# Exits with 1 if anything failed; goes on after a failure, and says at the end what failed.
set -uo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"

model=demo
device=cuda
sizes="2 4 8"
out=""
flags=()
while (($#)); do
  case $1 in
    --model | --device | --sizes | --out)
      if (($# < 2)); then
        echo "multi_gpu.sh: $1 needs a value" >&2
        exit 2
      fi
      printf -v "${1#--}" '%s' "$2"
      shift 2
      ;;
    --)
      shift
      flags=("$@")
      break
      ;;
    -h | --help)
      sed -n '2,9p' "$0" | cut -c3-
      exit 0
      ;;
    *)
      echo "multi_gpu.sh: unknown argument $1; see --help" >&2
      exit 2
      ;;
  esac
done
out=${out:-results/$(date -u +%Y-%m-%d)-ranks-$device}
mkdir -p "$out" || exit 2

failed=()
step() {
  local name=$1
  shift
  echo "== $name"
  "$@" 2>&1 | tee "$out/$name.log"
  ((PIPESTATUS[0] == 0)) || failed+=("$name")
}

# Shapes of n ranks. Groups of data-parallel attention are not on CUDA yet.
shapes_of() {
  local n=$1
  local found="tp$n,pp$n"
  ((n < 4)) || found+=",tp$((n / 2))pp2"
  [[ $device == cuda ]] || found+=",tp${n}dp2"
  echo "$found"
}

case $device in
  cuda)
    available=$(python -c 'import torch; print(torch.cuda.device_count())') || exit 1
    preset=(--preset h200)
    ;;
  cpu)
    available=64
    preset=(--num-prompts 4 --input-len 32 --output-len 16)
    flags=(--kv-cache-memory 64MiB --max-model-len 1024 "${flags[@]}")
    ;;
  *)
    echo "multi_gpu.sh: --device must be cuda or cpu, got $device" >&2
    exit 2
    ;;
esac
common=("$model" --device "$device" "${flags[@]}")
echo "$device: $available devices; model $model; results in $out"
[[ $device == cpu ]] || nvidia-smi topo -m | tee "$out/topology.txt"

if [[ $device == cuda ]]; then
  step gpu-tests python -m pytest -q tests/gpu
fi
step rank-tests python -m pytest -q tests/contract/test_multi_process.py tests/parity/test_ranks.py
for size in $sizes; do
  if ((size > available)); then
    echo "== size $size: left out, there are $available devices"
    continue
  fi
  step "parity-$size" python benchmarks/rank_parity.py "${common[@]}" --shapes "$(shapes_of "$size")"
done

table() {
  local name=$1
  shift
  step "$name" diptych bench offline "${common[@]}" "${preset[@]}" --json "$out/$name.json" "$@"
}
table speed-1
for size in $sizes; do
  ((size <= available)) || continue
  table "speed-tp$size" --tp-size "$size"
  table "speed-pp$size" --pp-size "$size"
done

if ((${#failed[@]})); then
  echo "failed: $(IFS=,; echo "${failed[*]}"); logs in $out"
  exit 1
fi
echo "all passed; logs and JSON in $out"
