#!/usr/bin/env bash
# Set up, then draw a picture on two workers and compare it with one worker's. Needs no ComfyUI, no GPU, no model download.
# Options: --help. Python: $PYTHON, otherwise python3 (3.11 or newer); what is missing is installed into .venv.
set -euo pipefail
caller=$PWD
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD
for option in "$@"; do
    case $option in -h | --help) exec "${PYTHON:-python3}" -m parallel_runtime demo --help ;; esac
done
.ci/setup parallel_runtime/for_diffusers/requirements.txt
cd "$caller" # the picture goes there
exec "$PYTHONPATH/.venv/bin/python" -m parallel_runtime demo "$@"
