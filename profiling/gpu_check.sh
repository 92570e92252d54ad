#!/usr/bin/env bash
# Everything a GPU is needed to prove, in one run of at most 8 minutes after pip has fetched the dependencies:
#
#   profiling/gpu_check.sh [--out FOLDER]
#
# builds into a temporary environment, runs the GPU tests, compares CPU and GPU bit for bit, times the kernels, lets
# two processes average on one GPU, and writes JSON and Markdown to profiling/results/. Without a GPU it does what a
# CPU can and says what it skipped. GPU_CHECK_PYTHON=... uses an environment into which this tree is already
# installed with its test extra (a stale extension is refused).
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${GPU_CHECK_PYTHON:-}
if [ -z "$python" ]; then
  python3 -m venv "$work/venv"
  "$work/venv/bin/pip" install --quiet --disable-pip-version-check '.[test]'
  python=$work/venv/bin/python
  echo "built and installed in $SECONDS s"
fi
"$python" profiling/gpu_check.py "$@"
