#!/usr/bin/env bash
# Install a package of experiments.bench.gpu_pack: bash install.sh TARGET, with all parts beside this file.
# Then `source TARGET/env.sh`. PYTHON names the interpreter (default: python3), which has torch.
set -uo pipefail
parts="
@PARTS@
"
fail() { echo "install.sh: $*" >&2; exit 1; }
[ $# = 1 ] || fail "usage: bash install.sh TARGET"
python=${PYTHON:-python3}
mkdir -p "$1" && target=$(cd "$1" && pwd) || fail "cannot write to $1"
cd "$(dirname "$0")" || exit 1

files=()
while read -r digest name; do
    [ -n "$name" ] || continue
    [ -f "$name" ] || fail "$name is missing: copy it beside install.sh"
    [ "$(sha256sum < "$name")" = "$digest  -" ] || fail "$name has another SHA-256 than when it was packed: copy it again"
    files+=("$name")
done <<< "$parts"
cat "${files[@]}" | "$python" -c 'import sys, tarfile
tarfile.open(mode="r|xz", fileobj=sys.stdin.buffer).extractall(sys.argv[1], filter="data")' "$target/wheels" \
    || fail "the parts cannot be unpacked into $target"

install() {  # FOLDER WHEEL...: install wheels into a folder of their own
    rm -rf "${target:?}/$1"
    "$python" -m pip install -q --no-index --no-deps --no-compile --disable-pip-version-check --no-warn-conflicts \
        --target "$target/$1" "${@:2}" || fail "pip cannot install $1"
}
install packages "$target"/wheels/packages/*.whl

# vLLM 0.30's DeepGEMM calls a constructor that torch 2.11 defines in a header only.
cat > "$target/shim.cpp" <<'EOF'
#include <c10/util/Exception.h>
extern "C" void construct(void* error, c10::SourceLocation location, std::string text)
    asm("_ZN3c1010ValueErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE");
extern "C" void construct(void* error, c10::SourceLocation location, std::string text) {
    new (error) c10::ValueError(location, std::move(text));
}
EOF
torch=$("$python" -c 'import importlib.util as u; print(*u.find_spec("torch").submodule_search_locations)' 2> /dev/null) \
    || fail "$python has no torch"
if g++ -shared -fPIC -O1 -std=c++20 -I"$torch/include" "$target/shim.cpp" -o "$target/shim.so" -L"$torch/lib" -lc10 \
    -Wl,-rpath,"$torch/lib" 2> "$target/shim.log"; then
    preload="export LD_PRELOAD=$target/shim.so"
else
    preload="# no shim, so vLLM runs FP8 without DeepGEMM: see shim.log"
    echo "install.sh: g++ cannot build the shim for DeepGEMM; FP8 takes vLLM's other kernels ($target/shim.log)" >&2
fi
cat > "$target/env.sh" <<EOF
export PYTHONPATH=$target/vllm:$target/packages\${PYTHONPATH:+:\$PYTHONPATH}
export VLLM_DEEP_GEMM_WARMUP=skip
$preload
EOF
for wheel in "$target"/wheels/models/*.whl; do  # of SmolLM2, for experiments.bench.gpu
    [ ! -f "$wheel" ] || echo "export EXPERIMENTS_GPU_WHEEL=$wheel" >> "$target/env.sh"
done

launches() {  # import vLLM's compiled code and, on a GPU, compare a kernel's result
    (source "$target/env.sh" && cd "$target" && "$python" - <<'EOF'
import vllm
from vllm import LLM, _custom_ops
import torch

if torch.cuda.is_available():
    values = torch.full((2, 256), 3.0, dtype=torch.bfloat16, device="cuda")
    result = torch.empty_like(values)
    _custom_ops.rms_norm(result, values, torch.ones_like(values[0]), 1e-6)
    assert (result - 1).abs().max().item() < 0.01
print(f"vLLM {vllm.__version__} with torch {torch.__version__}:", "a kernel ran" if torch.cuda.is_available() else "imports")
EOF
    ) 2> "$target/launch.log"
}
install vllm "$target"/wheels/engine/*.whl
if ! launches; then
    echo "install.sh: vLLM does not launch: $(tail -n 1 "$target/launch.log")" >&2
    ls "$target"/wheels/fallback/*.whl > /dev/null 2>&1 || fail "no older vLLM was packed (--with fallback)"
    install vllm "$target"/wheels/fallback/*.whl
    launches || fail "the older vLLM does not launch either: $(tail -n 1 "$target/launch.log")"
fi
