# make train      set everything up and train a tiny LLaMA on the CPU
# make check      after an edit: the tests that take no processes, and one start of two ranks
# make test       the tests that CI runs: a pairwise cover of combinations
# make test-all   many more combinations
# make test-gpu   what needs GPUs, on all that are there
PYTHON ?= python3

train: .venv/ready
	.venv/bin/python train.py --device cpu --model tiny --out out/tiny

check: .venv/ready
	CHECK=1 .venv/bin/python -m pytest -q test_all.py tests

# the cases of many ranks and simulated steps beside all else, for which they make way
CASES = equals_one_process or resumed_under or counted_memory
test: .venv/ready
	@$(MAKE) --no-print-directory --output-sync -j2 test-cases test-others

test-cases:
	nice .venv/bin/python -m pytest -q test_all.py tests -k "$(CASES)"

test-others:
	.venv/bin/python -m pytest -q test_all.py tests -k "not ($(CASES))"

test-all: .venv/ready
	ALL_COMBINATIONS=1 .venv/bin/python -m pytest -q test_all.py tests

test-gpu: .venv/ready
	.venv/bin/python -m pytest -q test_all.py tests -k "test_gpu or cuda"

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet -r requirements.txt
	touch $@

.PHONY: train check test test-cases test-others test-all test-gpu
