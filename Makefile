# make train      set everything up, train a tiny LLaMA on the CPU, and read what it writes
# make check      after an edit: all tests that need neither many ranks nor many seconds
# make lint       the format and the lint rules (pyproject.toml)
# make test       what CI runs: lint, then all tests, among them a pairwise cover of combinations
# make test-all   many more combinations
# make test-gpu   what needs GPUs, on all that are there
PYTHON ?= python3
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTEST := .venv/bin/python -m pytest -v --durations=30

train: .venv/ready
	@echo "make train takes about 6 minutes on two idle cores, half of it to install."
	@echo "At the end the model writes 200 characters. If other programs use the same cores, it is"
	@echo "faster as: OMP_NUM_THREADS=1 make train"
	.venv/bin/python train.py --device cpu --model tiny --out out/tiny
	.venv/bin/python sample.py out/tiny --device cpu --prompt "def " --tokens 200

check: .venv/ready
	@echo "make check takes about 5 minutes on two idle cores. Each line ends with how much is done."
	CHECK=1 $(PYTEST) test_all.py tests

lint: .venv/ready
	.venv/bin/ruff format --check
	.venv/bin/ruff check

# The tests run in three parts at once:
#   many ranks   the cases of many ranks and simulated steps, and for balance the race checker, the
#                planner's questions and the bench. It makes way for the other parts, some of whose
#                tests wait for a few seconds only
#   faults       signals, lost ranks and restarts; these tests mostly wait
#   others       all other tests
MANY_RANKS := equals_one_process or resumed_under or counted_memory or flag_by_hand or \
              test_streams or test_bench
test: lint
	@echo "make test takes 10 to 22 minutes on two idle cores. It runs three parts at once: each"
	@echo "line begins with its part, and ends with how much of that part is done."
	@$(MAKE) --no-print-directory -j3 test-many-ranks test-faults test-others

test-many-ranks:
	@nice $(PYTEST) test_all.py tests -k "$(MANY_RANKS)" | sed -u "s/^/many ranks | /"

test-faults:
	@$(PYTEST) tests/test_faults.py | sed -u "s/^/faults     | /"

test-others:
	@$(PYTEST) test_all.py tests --ignore tests/test_faults.py -k "not ($(MANY_RANKS))" \
	  | sed -u "s/^/others     | /"

test-all: .venv/ready
	ALL_COMBINATIONS=1 $(PYTEST) test_all.py tests

test-gpu: .venv/ready
	$(PYTEST) test_all.py tests -k "test_gpu or cuda"

.venv/ready: requirements.txt
	@echo "Installing into .venv takes about 3 minutes, and prints nothing."
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet -r requirements.txt
	touch $@

.PHONY: train check lint test test-many-ranks test-faults test-others test-all test-gpu
