# make demo   install, train the committed tiny model by RL, print a summary (two cores, 8 GB, no GPU needed)
# make install  only install, into .venv (several minutes the first time)
# make quick  tests of the method alone (losses, advantages, elimination, plug-ins): under a minute, for a fork
# make figures  the tables of the docs against their records; HISTORY=complete refuses a shallow clone
# make check  style, types, the tables of the docs, and the quick tests: two to four minutes on two cores
# make test   every test: 7 to 14 minutes on two cores; on one GPU say STACK=cpu, the tests start two ranks
# make test-sandbox  the tests that need bubblewrap; without that program all tests above skip them
# make real   train a pretrained model of 135 M parameters, upcycled to a MoE, on tasks of reasoning-gym, and show
#             texts before and after: 20 to 37 minutes on two cores, 19 GiB of memory; JOB=instructions is another
#             job; SETTINGS="train.seed=1 run.dir=runs/real_1" changes settings
# make record  the cheapest known way to a held-out accuracy, in generated tokens: its runs, resumable; ENTRY=NAME
#             runs another entry of experiments/record and compares both; TRACK=tasks is the other track
#
# STACK=cpu|gpu picks the requirements; left alone it is gpu where nvidia-smi lists a GPU that is not hidden.
# RANKS is the number of processes of the demo, each with a share of the experts: two, or one on a single GPU.
# PIP_ARGS is passed to pip. The CPU stack needs an index that has torch's CPU builds.

PYTHON ?= python3
ifndef STACK
STACK := $(shell [ "$${CUDA_VISIBLE_DEVICES-all}" ] && nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
endif
REQUIREMENTS = $(if $(filter cpu,$(STACK)),requirements-cpu.txt,requirements.txt)
# GPUs that the demo may use: those of CUDA_VISIBLE_DEVICES, else all (a line that begins with GPU; MIG slices do not).
VISIBLE = if [ -n "$$CUDA_VISIBLE_DEVICES" ]; then echo "$$CUDA_VISIBLE_DEVICES" | tr , '\n'; else nvidia-smi -L | grep ^GPU; fi
RANKS  ?= $(if $(filter gpu,$(STACK)),$(shell $(VISIBLE) | head -n 2 | wc -l),2)
# The two stacks overwrite parts of each other, so the one that is installed second has a folder of its own.
OTHER  = $(if $(filter cpu,$(STACK)),gpu,cpu)
VENV   = .venv$(if $(wildcard .venv/installed-$(OTHER)),-$(STACK))
BIN    = $(VENV)/bin
STAMP  = $(VENV)/installed-$(STACK)

# One thread per rank: two ranks share two cores, and torchrun would set it anyway, with a warning.
export OMP_NUM_THREADS ?= 1

# The CPU stack must not see a GPU: torch as the registry ships it would take it, vLLM's CPU build cannot.
ifeq ($(STACK),cpu)
export CUDA_VISIBLE_DEVICES =
endif

# What is printed comes when one of the two is done; make fails if one fails.
TWO_AT_ONCE = $(MAKE) --no-print-directory --jobs=2 --output-sync=target

.PHONY: demo real lint quick quick-first quick-second figures check check-first check-second test test-ranks test-others test-sandbox record install
install: $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m runtime.torchrun --nproc-per-node=$(RANKS) train_rl.py --config experiments/environments/demo.yaml \
	    model.ep_size=$(RANKS)

real: $(STAMP)
	$(BIN)/python experiments/real.py $(if $(JOB),--job $(JOB)) $(SETTINGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m mypy

METHOD_TESTS = losses model replay prompt_sharing teacher centering carry drafts grpo zero_variance greso plugins methods second_opinion rollouts_of_a_step walkthrough

quick: $(STAMP)
	$(TWO_AT_ONCE) quick-first quick-second

# The tests of elimination take as long as all others together.
quick-first: quick_tests = zero_variance greso
quick-second: quick_tests = $(filter-out zero_variance greso,$(METHOD_TESTS))

quick-first quick-second: $(STAMP)
	$(BIN)/python -m pytest -q $(quick_tests:%=tests/test_%.py) -m "not slow and not gpu"

check: $(STAMP)
	$(TWO_AT_ONCE) check-first check-second

# Exit code 3: a shallow clone, which cannot check declarations and says so in its last line.
figures: $(STAMP)
	@$(BIN)/python experiments/report.py --check; code=$$?; \
	    [ $$code = 3 ] && [ "$(HISTORY)" != complete ] || exit $$code

check-first: figures
check-second: lint

check-first check-second: $(STAMP)
	$(BIN)/python -m pytest -q $(wildcard tests/test_[$(if $(filter %first,$@),a-ln-oqw-y,mpr-vz)]*.py) \
	    -m "not slow and not gpu" --durations=5

# Two processes at once: one starts ranks and spends much of its time on one core, the other runs all else meanwhile.
# `time make test` leaves ranks out: they are children of a fork server (tests/preloaded.py) that nobody waits for.
test: $(STAMP)
	$(TWO_AT_ONCE) test-others test-ranks

test-ranks: $(STAMP)
	$(BIN)/python -m pytest -q -m ranks --durations=15

test-others: $(STAMP)
	$(BIN)/python -m pytest -q -m "not ranks" --durations=5

test-sandbox: $(STAMP)
	$(BIN)/python -m pytest -q -m 'needs_program(name="bubblewrap")'

record: $(STAMP)
	$(BIN)/python -m experiments.record.record $(if $(TRACK),--track $(TRACK)) $(if $(ENTRY),--entry $(ENTRY))

PIP = $(BIN)/python -m pip
FIT = import sys; sys.exit(not (sys.platform == 'linux' and (3, 11) <= sys.version_info[:2] < (3, 15)))
NO_TORCH = is that torch in the package index? vLLM's CPU build needs torch's CPU build, which not every index has: \
    make demo PIP_ARGS='--extra-index-url URL', with the URL that torch's installation page gives for CPUs
NEEDS_CUDA = "import torch; assert torch.version.cuda, \
    'the package index gave a CPU build of torch: set PIP_ARGS to one with CUDA'"

# torch goes first and alone, so that pip takes the one build asked for. vLLM's CPU build brings torchvision, torchaudio
# and torchcodec made for CUDA; nothing here uses them, and they break `import transformers` on a machine without CUDA.
# The tasks of reasoning-gym come without their requirements, of which one is C source that needs a compiler.
$(STAMP): $(REQUIREMENTS) requirements-no-deps.txt
	@$(PYTHON) -c "$(FIT)" || { echo "needs Linux and Python 3.11 to 3.14: name one, for example make demo PYTHON=python3.12"; exit 1; }
	@echo "installing the $(STACK) stack from $(REQUIREMENTS) into $(VENV) (several minutes the first time)"
	$(BIN)/python -c "import pip; $(FIT)" 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) install -q $(PIP_ARGS) $$(grep '^torch==' $(REQUIREMENTS)) || { echo "$(NO_TORCH)"; exit 1; }
	$(PIP) install -q $(PIP_ARGS) -r $(REQUIREMENTS)
	$(PIP) install -q $(PIP_ARGS) --no-deps -r requirements-no-deps.txt
	$(if $(filter cpu,$(STACK)),$(PIP) uninstall -q -y torchvision torchaudio torchcodec)
	$(if $(filter gpu,$(STACK)),$(BIN)/python -c $(NEEDS_CUDA))
	touch $@
