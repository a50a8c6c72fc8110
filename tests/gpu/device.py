"""What the tests of this folder run on: a GPU, or a CPU so that the tests themselves can be checked.

`PENGSERVE_GPU_TESTS_ON=cpu` says the latter, to those tests that can run without a GPU.
"""

import os

DEVICE = os.environ.get("PENGSERVE_GPU_TESTS_ON", "cuda")
IS_CUDA = DEVICE == "cuda"
