"""Fixtures of all tests in this folder."""

import pytest

# imported first, because it sets the number of threads before torch is imported
from test_all import clean_up, group, run  # noqa: F401

# so that an assert in helpers.py that fails shows its values, as those of test files do
pytest.register_assert_rewrite("helpers")

import numpy as np

from helpers import hf_model


@pytest.fixture(scope="session")
def sandbox(tmp_path_factory):
    """A folder with three things that tests read:

    hf         a Hugging Face model
    o          the folder of a run that began with this model
    big.bin    a file of token ids, with one id that is not in the model's vocabulary
    """
    folder = tmp_path_factory.mktemp("sandbox")
    hf_model(folder / "hf")
    run(f"--steps 1 --init hf:{folder}/hf --out {folder}/o")
    ids = np.zeros(500, "<u2")
    ids[3] = 999
    ids.tofile(folder / "big.bin")
    return folder
