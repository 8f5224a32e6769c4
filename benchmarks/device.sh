#!/usr/bin/env bash
# For whoever has a GPU or TPU: what of the tests holds there, then the benchmarks, in less than eight minutes.
#
#   bash benchmarks/device.sh gpu            or tpu; cpu and --quick are for trying the script itself
#
# Installs nothing. Needs in the environment of $PYTHON (python3): this checkout with an accelerator's extra, as in
# pip install -e '.[test,cuda12]' or '.[test,tpu]'; on a GPU a CUDA build of torch and '.[parity]' fill the columns of torch.
set -euo pipefail
cd "$(dirname "$0")/.."

platform=${1:-}
quick=${2:-}
case "$platform" in
  gpu | tpu | cpu) ;;
  *) echo "usage: bash benchmarks/device.sh gpu|tpu|cpu [--quick]" >&2; exit 2 ;;
esac
python=${PYTHON:-python3}
out=${OUT:-runs/benchmarks}
# jax's own name of a GPU is cuda (or rocm); naming a platform makes it fail where it would fall back to the CPU.
case "$platform" in gpu) export JAX_PLATFORMS=cuda,cpu ;; tpu) export JAX_PLATFORMS=tpu,cpu ;; *) export JAX_PLATFORMS=cpu ;; esac
began=$SECONDS
stage() { printf '\n=== %s (after %d s)\n' "$*" $((SECONDS - began)); }

stage "what is here"
"$python" - "$platform" <<'PY'
import importlib.util, sys

wanted = sys.argv[1]
extra = {"gpu": "cuda12", "tpu": "tpu"}.get(wanted)
missing = [name for name in ("jax", "flax", "optax", "grain", "pytest") if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"not installed: {', '.join(missing)}. Run: pip install -e '.[test{',' + extra if extra else ''}]'")
import jax

try:
    found = jax.default_backend()
except RuntimeError as error:
    sys.exit(f"jax finds no {wanted}: {error}")
if found != wanted:
    sys.exit(f"{wanted} was asked for and jax runs on {found}: install the extra {extra or 'test'} and look at the driver.")
print(f"jax {jax.__version__} on {len(jax.devices())} x {jax.devices()[0].device_kind}")
absent = [name for name in ("torch", "transformers", "ntloss") if importlib.util.find_spec(name) is None]
if absent:
    print(f"{', '.join(absent)}: not installed, so their columns will say so")
PY

stage "tests that hold on every device"
# Products at full precision: the accelerators' default rounds float32 operands, and the tolerances are those of float32.
export JAX_DEFAULT_MATMUL_PRECISION=highest
tests=(tests/test_golden.py tests/test_masking.py tests/test_numeric_vocab.py tests/test_device.py)
if [ "$quick" = --quick ]; then tests=(tests/test_device.py); fi
status=0
timeout 200 "$python" -m pytest -q -n 0 -p no:cacheprovider "${tests[@]}" || status=$?
unset JAX_DEFAULT_MATMUL_PRECISION

stage "benchmarks"
mkdir -p "$out"
json="$out/device_$platform.json"
timeout 230 "$python" -m benchmarks.run --only=step,loss,decode --rounds=3 $quick --json="$json" || status=$?

stage "done"
echo "results: $json; copy it to docs/results/device_NAME.json and run: python -m benchmarks.report"
if [ "$status" -ne 0 ]; then echo "something above failed or ran out of time (status $status)" >&2; fi
exit "$status"
