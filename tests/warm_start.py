"""Import what the processes of a test need, once, in the process that they are forked from.

test_all.start_processes names this module to Python's fork server. Each process of a test is a fork
of that server, so it has these modules and values already. Without them, a process of train.py
would spend more time on its start than on its steps.
"""

import gc

import matplotlib.pyplot  # noqa: F401
import torch._dynamo  # noqa: F401
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401
from transformers.models.llama import modeling_llama  # noqa: F401

import data
import test_all  # noqa: F401

data.package_files()  # the default data: it finds 2,000 files, and remembers them
gc.collect()
gc.freeze()  # a later garbage collection need not walk what was imported here
