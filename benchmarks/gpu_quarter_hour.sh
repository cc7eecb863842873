#!/usr/bin/env bash
# Measure moecore on one NVIDIA card, the most telling parts first, in at most 12 minutes.
#   benchmarks/gpu_quarter_hour.sh [--dry-run] [--minutes N] [OUT [PART ...]]
# Writes OUT/PART.json per part (default: $OUT, else .state/gpu) and prints the table. A part that
# fails or reaches its limit is named, and the next one starts; its JSON keeps what it measured.
# Nothing is installed; JOBS sets the stages at a time of the part repro, as for `make repro`.
# --dry-run: every part at tiny sizes on the CPU, which tests the script and measures nothing.
set -u
usage() { sed -n '2,8s/^# //p' "$0"; exit 2; }

minutes=12 dry=()
while [[ "${1:-}" == --* ]]; do
    case "$1" in
        --dry-run) dry=(--dry-run); export CUDA_VISIBLE_DEVICES= ;;
        --minutes) minutes="${2:-}"; shift ;;
        *) usage ;;
    esac
    shift
done
[[ "$minutes" =~ ^[1-9][0-9]?$ && "$minutes" -le 12 ]] || usage

# seconds that each may take (the first imports torch); of 12 minutes the last one gets one or more
declare -A limits=([environment]=40 [equality]=70 [layers]=80 [triton]=110 [graph]=100 [peers]=30 [steps]=110
    [jobs]=100 [memory]=20 [repro]=720)
parts=(environment equality layers triton graph peers steps jobs memory repro)
home=$(realpath "$(dirname "$0")/..")
out="${1:-${OUT:-$home/.state/gpu}}"
[[ $# -gt 1 ]] && parts=("${@:2}")
for part in "${parts[@]}"; do
    [[ -n "${limits[$part]:-}" ]] && continue
    echo "found the part $part; allowed: ${!limits[*]}" >&2
    exit 2
done

mkdir -p "$out" && out=$(realpath "$out") && cd "$home" || exit 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export DVC_NO_ANALYTICS=1 MLFLOW_DISABLE_TELEMETRY=true
unset PYTHONDONTWRITEBYTECODE # each process would compile all that it imports
for part in "${parts[@]}"; do rm -f "$out/$part.json"; done
SECONDS=0
failed=0
for part in "${parts[@]}"; do
    remaining=$((60 * minutes - SECONDS - 15)) # to end the part, and for the table
    limit=$((remaining < limits[$part] ? remaining : limits[$part]))
    ((${#dry[@]})) && limit=1200 # on a busy CPU
    if ((limit < 15)); then
        echo "== $part: not started, no time remains" && failed=1
        continue
    fi
    echo "== $part, for at most $limit s"
    begun=$SECONDS
    timeout --kill-after=10 "$limit" python3 -m benchmarks.gpu "$part" --json "$out/$part.json" \
        --seconds $((limit - 10)) "${dry[@]}"
    status=$?
    case $status in
        0) echo "== $part: done in $((SECONDS - begun)) s" ;;
        124 | 137 | 143) echo "== $part: STOPPED after $((SECONDS - begun)) s" && failed=1 ;;
        *) echo "== $part: FAILED with status $status" && failed=1 ;;
    esac
done
python3 -m benchmarks.table --gpu "$out" --into - || failed=1
exit $failed
