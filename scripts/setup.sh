#!/usr/bin/env bash
# Sets slime up for the device of this machine, in .venv or in the virtual environment that is active.
# Quick when there is nothing to do. SLIME_DEVICE=cpu|cuda|npu overrides what is found; PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

SGLANG="sglang==0.5.23"
# The newest torchvision that installs beside a CPU build of torch; newer ones from PyPI need CUDA.
TORCHVISION_CPU="torchvision==0.16.2"
TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

find_device() {
    if [ -n "${SLIME_DEVICE:-}" ]; then echo "$SLIME_DEVICE"
    elif command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then echo cuda
    elif command -v npu-smi >/dev/null || [ -e /dev/davinci_manager ]; then echo npu
    else echo cpu; fi
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3 python; do
        [ -n "$candidate" ] && command -v "$candidate" >/dev/null || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            echo "$candidate"; return
        fi
    done
    die "Python 3.11 was not found (megatron-core's wheel needs exactly that); set PYTHON to its path"
}

enter_venv() {
    if [ -z "${VIRTUAL_ENV:-}" ]; then
        if [ ! -x .venv/bin/python ]; then
            say "making the virtual environment .venv"
            local python; python=$(find_python)
            "$python" -m venv .venv || die "'$python -m venv' failed (on Debian: apt-get install python3.11-venv)"
        fi
        # shellcheck disable=SC1091
        . .venv/bin/activate
    fi
    python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
        || die "$VIRTUAL_ENV has $(python --version), but slime needs Python 3.11"
}

# The CPU build of torch has an index of its own; without it PyPI's build, several GB larger, works as well.
torch_index() {
    if python - "$TORCH_CPU_INDEX" <<'PY' 2>/dev/null
import sys, urllib.request
urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=5).read(1)
PY
    then echo "--extra-index-url $TORCH_CPU_INDEX"; fi
}

pip_install() { python -m pip install --disable-pip-version-check --progress-bar off -q "$@"; }

install_cpu() {
    say "installing for the CPU: torch, megatron-core, ray, transformers and what SGLang's server imports (about 3 GB)"
    # shellcheck disable=SC2046
    pip_install $(torch_index) -c requirements/lock.txt -e ".[cpu,examples,dev]"
    say "installing SGLang without its CUDA requirements"
    pip_install --no-deps "$SGLANG" "$TORCHVISION_CPU"
}

install_cuda() { pip_install -e ".[cuda,examples,dev]"; }

install_npu() {
    [ -n "${ASCEND_TOOLKIT_HOME:-}" ] || die "the Ascend toolkit is not active: source its set_env.sh first"
    pip_install -e ".[npu,examples,dev]"
    pip_install --no-deps "$SGLANG"
}

describe() {
    case "$1" in
        cuda) say "a CUDA device: pip install -e '.[cuda,examples,dev]'" ;;
        npu) say "an Ascend device: pip install -e '.[npu,examples,dev]'; pip install --no-deps '$SGLANG'" ;;
        cpu) say "no accelerator: pip install -e '.[cpu,examples,dev]'; pip install --no-deps '$SGLANG' '$TORCHVISION_CPU'" ;;
        *) die "SLIME_DEVICE=$1 is none of cpu, cuda, npu" ;;
    esac
}

main() {
    local device stamp wanted started=$SECONDS
    device=$(find_device)
    enter_venv
    stamp="$VIRTUAL_ENV/.slime-setup"
    wanted=$(cat pyproject.toml requirements/lock.txt scripts/setup.sh | cksum)" $device $PWD"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then return; fi
    describe "$device"
    if [ "${1:-}" = "--print" ]; then return; fi
    "install_$device"
    printf '%s' "$wanted" >"$stamp"
    say "done in $((SECONDS - started)) s; $(du -sh "$VIRTUAL_ENV" | cut -f1) in $VIRTUAL_ENV"
}

main "$@"
