# make train: set everything up and train a tiny LLaMA on the CPU.   make test: the same, then all tests.
PYTHON ?= python3

train: .venv/ready
	.venv/bin/python train.py --device cpu --model tiny --out out/tiny

test: .venv/ready
	.venv/bin/python -m pytest -q test_all.py

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet -r requirements.txt
	touch $@

.PHONY: train test
