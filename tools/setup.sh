#!/usr/bin/env bash
# Create or refresh .venv: tools/setup.sh runtime|dev
# Chooses the build of torch by the machine: CUDA where nvidia-smi works, otherwise CPU. TORCH_INDEX overrides the
# index torch comes from (for example https://download.pytorch.org/whl/cu128).
set -euo pipefail
cd "$(dirname "$0")/.."

flavour=${1:-runtime}
venv=${VENV:-.venv}
cpu_index=https://download.pytorch.org/whl/cpu

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }
die() { say "$*"; exit 2; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if command -v "$candidate" >/dev/null \
            && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "Soloist needs Python 3.11 or newer. Install it, or name one: make PYTHON=/path/to/python3.12 ..."
}

if [[ ! -x $venv/bin/python ]]; then
    python=$(find_python)
    say "Creating $venv with $($python --version) (first time only)"
    "$python" -m venv "$venv" || die "Could not create $venv. On Debian and Ubuntu: apt install python3-venv"
fi

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

has_gpu=false
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then has_gpu=true; fi

# An index that does not answer at once is not worth waiting for: the default registry serves as well.
answers() {
    "$venv/bin/python" - "$1" <<'PY' 2>/dev/null
import sys, threading, os, urllib.request
watchdog = threading.Timer(4, os._exit, [1])
watchdog.daemon = True
watchdog.start()
urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=3).read(1)
PY
}

pin=$(grep -E '^torch==' requirements/runtime.txt)
index=${TORCH_INDEX:-}
if [[ -z $index && $has_gpu == false && $(uname -s) == Linux ]] && answers "$cpu_index"; then index=$cpu_index; fi

installed=$("$venv/bin/python" -c \
    'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true)
if [[ ${installed%%+*} != "${pin#torch==}" ]]; then
    if [[ -n $index ]]; then
        say "Installing $pin from $index"
        pip install --quiet --index-url "$index" "$pin" || say "$index did not serve $pin; trying the default registry"
    fi
fi

say "Installing the packages in requirements/$flavour.txt"
pip install --quiet -r "requirements/$flavour.txt"

extras=""
if [[ $has_gpu == true ]]; then extras="[gpu]"; fi
pip install --quiet --no-build-isolation --editable ".$extras"

"$venv/bin/python" - "$has_gpu" <<'PY'
import sys
import torch
build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
print(f"torch {torch.__version__} ({build}), Python {sys.version.split()[0]}", file=sys.stderr)
if sys.argv[1] == "true" and not torch.cuda.is_available():
    print(
        "A card is present but this torch cannot use it. Remove .venv and run again with TORCH_INDEX set to the index "
        "that matches your driver, for example https://download.pytorch.org/whl/cu128.",
        file=sys.stderr,
    )
PY
